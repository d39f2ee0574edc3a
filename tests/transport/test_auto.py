"""paramiko wherever it can do what is asked, OpenSSH where it cannot, and a sentence about it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.agent import FIDO_BLOB, FakeAgent

from controller.core.errors import AuthenticationError, HostKeyError
from controller.core.model import Host
from controller.pipeline import open_transport
from controller.transport.auto import AutoTransport, needs_openssh
from controller.transport.openssh import OpensshTransport
from controller.transport.ssh import SshTransport
from controller.transport.sshconfig import SshTarget, resolve_chain
from tools.sshd import SshServer, make_key

pytestmark = pytest.mark.sshd

Auto = Callable[..., AutoTransport]


@pytest.fixture
def auto(tmp_path: Path) -> Iterator[Auto]:
    made: list[AutoTransport] = []

    def make(config: str, host: str, **options: object) -> AutoTransport:
        path = tmp_path / f"auto-{len(made)}"
        path.write_text(config)
        made.append(AutoTransport(SshTarget(host=host, ssh_config=str(path)), **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for transport in made:
        transport.close()


def reason(tmp_path: Path, config: str, host: str = "gpu") -> str:
    path = tmp_path / "config"
    path.write_text(config)
    return needs_openssh(resolve_chain(SshTarget(host=host, ssh_config=str(path))))


BARE = "Host *\n  UserKnownHostsFile none\n  GlobalKnownHostsFile none\n  IdentityFile none\n"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", ""),
        ("ProxyCommand nc %h %p", ""),
        ("ForwardAgent yes", ""),
        ("GSSAPIAuthentication yes", ""),
        ("CertificateFile /keys/c", "CertificateFile /keys/c for gpu"),
        ("PKCS11Provider /lib/p.so", "PKCS11Provider /lib/p.so for gpu"),
        ("KnownHostsCommand /bin/known %H", "KnownHostsCommand /bin/known %H for gpu"),
        ("RevokedHostKeys /etc/krl", "RevokedHostKeys /etc/krl for gpu"),
        ("ProxyUseFdpass yes", "ProxyUseFdpass yes for gpu"),
        ("BindAddress 10.0.0.7", "BindAddress 10.0.0.7 for gpu"),
        ("HostbasedAuthentication yes", "HostbasedAuthentication yes for gpu"),
        ("PubkeyAuthentication no", "PubkeyAuthentication no for gpu"),
        ("PreferredAuthentications keyboard-interactive", "PreferredAuthentications keyboard-interactive for gpu"),
        ("PreferredAuthentications publickey,password", ""),
        ('Match exec "true"\n  CertificateFile /keys/c', "CertificateFile /keys/c for gpu"),
        ('Match exec "false"\n  CertificateFile /keys/c', ""),
    ],
)
def test_what_only_openssh_can_do_is_named(tmp_path: Path, lines: str, said: str) -> None:
    found = reason(tmp_path, BARE + f"  {lines}\n")
    # `ssh -G` of some versions says true and false.
    assert found.replace(" true ", " yes ").replace(" false ", " no ") == said


def test_a_jump_counts_too(tmp_path: Path) -> None:
    config = f"Host jump\n  CertificateFile /keys/c\nHost gpu\n  ProxyJump jump\n{BARE}"
    assert reason(tmp_path, config) == "CertificateFile /keys/c for jump"


def test_an_authority_counts_only_where_no_key_is_on_file(tmp_path: Path) -> None:
    known = tmp_path / "known"
    config = f"Host *\n  UserKnownHostsFile {known}\n{BARE}"
    key = make_key(tmp_path / "k")
    known.write_text(f"@cert-authority *.example.org {key}\n")
    assert reason(tmp_path, config) == ""
    known.write_text(f"@cert-authority gpu {key}\n")
    assert reason(tmp_path, config) == f"@cert-authority in {known}:1 for gpu"
    known.write_text(f"@cert-authority gpu {key}\ngpu {key}\n")
    assert reason(tmp_path, config) == ""


def test_paramiko_is_taken_without_a_word(server: SshServer, auto: Auto) -> None:
    transport = auto(server.config_block(), server.alias)
    assert transport.run(["echo", "in"], timeout=30).stdout == b"in\n"
    assert transport.note == ""
    assert isinstance(transport._chosen, SshTransport)


def test_a_user_certificate_changes_over(server: SshServer, auto: Auto, tmp_path: Path) -> None:
    """The key alone is refused: only the certificate lets it in, and it lies where only ssh looks."""
    make_key(tmp_path / "ca")
    make_key(tmp_path / "key")
    sign = ["ssh-keygen", "-q", "-s", tmp_path / "ca", "-I", "me", "-n", server.user, tmp_path / "key.pub"]
    subprocess.run(list(map(str, sign)), check=True, timeout=60)
    (tmp_path / "key-cert.pub").rename(tmp_path / "elsewhere")
    before = server.authorized_keys.read_text()
    with server.authorized_keys.open("a") as stream:
        stream.write(f"cert-authority {(tmp_path / 'ca.pub').read_text()}")
    try:
        config = server.config_block(extra=[f"CertificateFile {tmp_path}/elsewhere"])
        config = config.replace(str(server.user_key), str(tmp_path / "key"))
        transport = auto(config, server.alias)
        assert transport.run(["echo", "in"], timeout=30).stdout == b"in\n"
        assert isinstance(transport._chosen, OpensshTransport)
        assert f"CertificateFile {tmp_path}/elsewhere" in transport.note
        with pytest.raises(AuthenticationError):
            SshTransport(SshTarget(host=server.alias, ssh_config=str(tmp_path / "auto-0"))).connect()
    finally:
        server.authorized_keys.write_text(before)


def test_keys_that_only_openssh_can_use_change_over(server: SshServer, auto: Auto, tmp_path: Path) -> None:
    """A security key is in the agent and paramiko is refused; ssh is asked, and its refusal counts."""
    with FakeAgent(tmp_path / "agent", blobs=[FIDO_BLOB]) as agent:
        config = server.config_block().replace("IdentityAgent none", f"IdentityAgent {agent.path}")
        config = config.replace("IdentitiesOnly yes", "IdentitiesOnly no")
        transport = auto(config.replace(str(server.user_key), "/absent"), server.alias)
        with pytest.raises(AuthenticationError, match="without a question"):
            transport.connect()


def test_a_refusal_that_openssh_cannot_mend_is_paramikos(server: SshServer, auto: Auto, tmp_path: Path) -> None:
    make_key(tmp_path / "wrong")
    transport = auto(server.config_block().replace(str(server.user_key), str(tmp_path / "wrong")), server.alias)
    with pytest.raises(AuthenticationError, match="accepts none of your keys"):
        transport.connect()
    assert transport.note == ""


def test_an_unknown_key_is_no_reason_to_change_over(server: SshServer, auto: Auto, tmp_path: Path) -> None:
    config = f"Host *\n  UserKnownHostsFile {tmp_path}/none\n" + server.config_block()
    with pytest.raises(HostKeyError):
        auto(config, server.alias).connect()


@pytest.mark.parametrize(
    ("word", "kind"), [("auto", AutoTransport), ("paramiko", SshTransport), ("openssh", OpensshTransport)]
)
def test_hosts_toml_chooses(word: str, kind: type) -> None:
    host = Host.model_validate(
        {"name": "h", "address": "h", "python": "/p", "workdir": "/w", "output_roots": ["/o"], "gpus": 1,
         "transport": word}
    )  # fmt: skip
    assert isinstance(open_transport(host, ask=None), kind)
