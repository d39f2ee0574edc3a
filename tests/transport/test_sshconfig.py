from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from controller.core.errors import ConfigError
from controller.transport.sshconfig import SshTarget, by_hand, resolve, resolve_chain

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh client is installed")


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "ssh_config"
    path.write_text(text)
    return str(path)


def test_openssh_resolves_includes_matches_and_tokens(tmp_path: Path) -> None:
    (tmp_path / "more").write_text(
        "Host gpu1\n  User fromfile\n  IdentityFile /keys/%n-%r-%p\n  IdentitiesOnly yes\n"
    )
    path = config(
        tmp_path,
        f"Include {tmp_path}/more\n"
        "Host gpu*\n  HostName 10.1.230.174\n  Port 2222\n  HostKeyAlias cluster\n"
        "  UserKnownHostsFile /a/known /b/known\n  GlobalKnownHostsFile none\n  HashKnownHosts yes\n"
        "Match user fromfile\n  StrictHostKeyChecking yes\n",
    )
    settings = resolve(SshTarget(host="gpu1", ssh_config=path))
    assert (settings.address, settings.port, settings.user) == ("10.1.230.174", 2222, "fromfile")
    assert settings.identity_files == ("/keys/gpu1-fromfile-2222",)
    assert settings.identities_only
    assert settings.host_key_name == "cluster"
    assert settings.user_known_hosts == ("/a/known", "/b/known")
    assert settings.global_known_hosts == ()
    assert settings.hash_known_hosts
    assert not settings.may_ask
    assert settings.label == "gpu1 (10.1.230.174:2222)"


def test_explicit_values_win(tmp_path: Path) -> None:
    path = config(tmp_path, "Host *\n  HostName elsewhere\n  Port 2222\n  User other\n")
    settings = resolve(SshTarget(host="10.1.230.174", port=22, user="me", ssh_config=path))
    assert (settings.address, settings.port, settings.user) == ("10.1.230.174", 22, "me")


def test_an_explicit_user_selects_match_blocks(tmp_path: Path) -> None:
    path = config(tmp_path, "Match user admin\n  Port 4444\n")
    assert resolve(SshTarget(host="gpu1", user="admin", ssh_config=path)).port == 4444


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("", "/tmp/agent"),
        ("IdentityAgent none", None),
        ("IdentityAgent /x/%r", "/x/me"),
        ("IdentityAgent $MY_AGENT", "/my"),
    ],
)
def test_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, expected: str | None) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/agent")
    monkeypatch.setenv("MY_AGENT", "/my")
    assert (
        resolve(SshTarget(host="h", user="me", ssh_config=config(tmp_path, f"Host *\n {option}\n"))).agent == expected
    )


def test_jumps_are_resolved_hop_by_hop(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        "Host target\n  ProxyJump second@mid:2201,[2001:db8::1]:2202\n"
        "Host mid\n  HostName 10.0.0.2\n  ProxyJump outer\n"
        "Host outer\n  HostName 10.0.0.1\n  User first\n",
    )
    chain = resolve_chain(SshTarget(host="target", user="me", ssh_config=path))
    assert [(hop.user, hop.address, hop.port) for hop in chain] == [
        ("first", "10.0.0.1", 22),
        ("second", "10.0.0.2", 2201),
        (chain[2].user, "2001:db8::1", 2202),
        ("me", "target", 22),
    ]


def test_a_jump_host_that_leads_to_itself_ends(tmp_path: Path) -> None:
    path = config(tmp_path, "Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    with pytest.raises(ConfigError, match="jump hosts"):
        resolve_chain(SshTarget(host="a", ssh_config=path))


def test_a_proxy_command_is_expanded(tmp_path: Path) -> None:
    path = config(tmp_path, "Host *\n  HostName 10.0.0.9\n  ProxyCommand connect %h %p --as %r --100%%\n")
    settings = resolve(SshTarget(host="gpu1", user="me", port=23, ssh_config=path))
    assert settings.proxy_command == "connect 10.0.0.9 23 --as me --100%"


def test_a_configuration_that_ssh_cannot_read_is_explained(tmp_path: Path) -> None:
    path = config(tmp_path, "Host *\n  NoSuchOption yes\n")
    with pytest.raises(ConfigError) as failure:
        resolve(SshTarget(host="gpu1", ssh_config=path))
    assert "line 2" in failure.value.why
    assert path in failure.value.fix


def test_an_absent_configuration_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as failure:
        resolve(SshTarget(host="gpu1", ssh_config=str(tmp_path / "absent")))
    assert "absent" in failure.value.why


@pytest.mark.parametrize(
    "host", ["", "-oProxyCommand=id", "two words", "line\nbreak", "esc\x1b", "$(id)", "a;id", "`id`", "a|b", "it's"]
)
def test_what_is_no_host_name_never_reaches_ssh(host: str) -> None:
    with pytest.raises(ConfigError, match="host name"):
        resolve(SshTarget(host=host))


@pytest.mark.parametrize("user", ["-l", "$(id)", "a b", "a;b", "esc\x1b"])
def test_what_is_no_user_name_never_reaches_ssh(user: str) -> None:
    with pytest.raises(ConfigError, match="user name"):
        resolve(SshTarget(host="gpu1", user=user))


def test_without_ssh_the_defaults_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", "/home/someone")
    settings = resolve(SshTarget(host="gpu1", user="me"))
    assert (settings.address, settings.port, settings.user) == ("gpu1", 22, "me")
    assert settings.user_known_hosts[0] == "/home/someone/.ssh/known_hosts"
    with pytest.raises(ConfigError, match="no `ssh` program"):
        resolve(SshTarget(host="gpu1", ssh_config="/some/config"))


def test_a_hint_names_the_file_the_port_and_the_alias_of_the_target(tmp_path: Path) -> None:
    path = config(tmp_path, "Host gpu1\n  HostName 10.0.0.9\n  Port 39141\n  User ann\n")
    hop = resolve(SshTarget(host="gpu1", ssh_config=path))
    assert hop.by_hand("true") == f"ssh -F {path} -p 39141 ann@gpu1 true"
    assert hop.by_hand(program="ssh-copy-id") == f"ssh-copy-id -F {path} -p 39141 ann@gpu1"
    spaced = str(tmp_path / "my config")
    assert by_hand(SshTarget(host="h", ssh_config=spaced), "true") == f"ssh -F '{spaced}' h true"
    assert by_hand(SshTarget(host="h", port=2200, user="me"), "true") == "ssh -p 2200 me@h true"


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("Compression no", False),
        ("IdentityFile ~/.ssh/id_ed25519", True),
        ("IdentityFile /elsewhere/id_rsa", True),
        ("IdentityFile none", True),
    ],
)
def test_whether_key_files_are_named(tmp_path: Path, option: str, named: bool) -> None:
    hop = resolve(SshTarget(host="h", user="me", ssh_config=config(tmp_path, f"Host *\n {option}\n")))
    assert hop.names_identities is named
