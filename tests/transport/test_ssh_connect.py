"""Host keys, authentication, jumps: who is let in and who is refused."""

from __future__ import annotations

import base64
import os
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.agent import FIDO_BLOB, MALFORMED_BLOB, FakeAgent

from controller.core.errors import AuthenticationError, ConnectionFailed, HostKeyError
from controller.transport.knownhosts import fingerprint
from controller.transport.ssh import SshTransport
from controller.transport.sshconfig import SshTarget, resolve
from tools.sshd import SshServer, free_port, make_key

pytestmark = pytest.mark.sshd

Connect = Callable[..., SshTransport]
Start = Callable[..., SshServer]


def blob(line: str) -> bytes:
    return base64.b64decode(line.split()[1])


def with_known_hosts(server: SshServer, path: Path, *extra: str) -> str:
    # The first value of an option wins in ssh_config, so this goes before the block's own.
    return f"Host *\n    UserKnownHostsFile {path}\n    HashKnownHosts no\n" + server.config_block(extra=extra)


def test_an_unknown_key_is_refused_with_the_command_that_adds_it(
    server: SshServer, connect_to: Connect, tmp_path: Path
) -> None:
    known = tmp_path / "known_hosts"
    transport = connect_to(with_known_hosts(server, known), server.alias)
    with pytest.raises(HostKeyError) as failure:
        transport.connect()
    assert failure.value.code == "host-key-unknown"
    assert fingerprint(blob(server.host_key_line())) in failure.value.why
    assert not known.exists()
    command = failure.value.fix.split("then add it: ")[1]
    subprocess.run(["sh", "-c", command], check=True, timeout=30)
    transport.connect()


def test_an_unknown_key_is_accepted_and_kept_when_the_person_says_yes(
    server: SshServer, connect_to: Connect, tmp_path: Path
) -> None:
    known = tmp_path / "known_hosts"
    known.write_text("@cert-authority *.example.org ssh-ed25519 AAAA\nother ssh-rsa !!!")
    questions: list[str] = []

    def ask(question: str) -> bool:
        questions.append(question)
        return True

    connect_to(with_known_hosts(server, known), server.alias, ask=ask).connect()
    assert len(questions) == 1
    assert fingerprint(blob(server.host_key_line())) in questions[0]
    lines = known.read_text().splitlines()
    assert lines[:2] == ["@cert-authority *.example.org ssh-ed25519 AAAA", "other ssh-rsa !!!"]
    assert lines[2] == f"[127.0.0.1]:{server.port} {server.host_key_line()}"
    # From now on it is known, to us and to OpenSSH.
    config = with_known_hosts(server, known)
    connect_to(config, server.alias, ask=lambda _question: pytest.fail("asked again")).connect()
    (tmp_path / "c").write_text(config)
    done = subprocess.run(
        ["ssh", "-F", str(tmp_path / "c"), "-o", "BatchMode=yes", server.alias, "echo", "in"],
        capture_output=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.stdout == b"in\n", done.stderr


def test_no_means_no(server: SshServer, connect_to: Connect, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    transport = connect_to(with_known_hosts(server, known), server.alias, ask=lambda _question: False)
    with pytest.raises(HostKeyError):
        transport.connect()
    assert not known.exists()


def test_the_time_a_person_thinks_does_not_count(server: SshServer, connect_to: Connect, tmp_path: Path) -> None:
    def ask(_question: str) -> bool:
        time.sleep(8.5)
        return True

    config = with_known_hosts(server, tmp_path / "known_hosts")
    connect_to(config, server.alias, ask=ask, connect_timeout_s=8).connect()


def test_strict_host_key_checking_is_not_softened_by_asking(
    server: SshServer, connect_to: Connect, tmp_path: Path
) -> None:
    config = with_known_hosts(server, tmp_path / "known_hosts", "StrictHostKeyChecking yes")
    transport = connect_to(config, server.alias, ask=lambda _question: pytest.fail("asked"))
    with pytest.raises(HostKeyError):
        transport.connect()


def test_a_changed_key_is_refused_and_never_asked_about(
    server: SshServer, connect_to: Connect, tmp_path: Path
) -> None:
    known = tmp_path / "known_hosts"
    old = make_key(tmp_path / "old")
    known.write_text(f"# a comment\n[127.0.0.1]:{server.port} {old}\n")
    transport = connect_to(with_known_hosts(server, known), server.alias, ask=lambda _question: pytest.fail("asked"))
    with pytest.raises(HostKeyError) as failure:
        transport.connect()
    error = failure.value
    assert error.code == "host-key-changed"
    assert fingerprint(blob(server.host_key_line())) in error.why
    assert fingerprint(blob(old)) in error.why
    assert f"{known}:2" in error.why
    command = error.fix[error.fix.index("ssh-keygen -R") :]
    subprocess.run(shlex.split(command), check=True, timeout=30, capture_output=True)
    after = connect_to(with_known_hosts(server, known), server.alias)
    with pytest.raises(HostKeyError) as second:
        after.connect()
    assert second.value.code == "host-key-unknown"


def test_a_revoked_key_is_refused(server: SshServer, connect_to: Connect, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    server.trust(known)
    with known.open("a") as stream:
        stream.write(f"@revoked * {server.host_key_line()}\n")
    with pytest.raises(HostKeyError) as failure:
        connect_to(with_known_hosts(server, known), server.alias).connect()
    assert failure.value.code == "host-key-revoked"


def test_a_known_key_of_another_type_is_asked_for(start_server: Start, connect_to: Connect, tmp_path: Path) -> None:
    """Only the RSA key is on file; the Ed25519 key, which comes first by default, would look like a change."""
    server = start_server(host_key_types=("ed25519", "rsa"))
    known = tmp_path / "rsa_only"
    known.write_text(f"[127.0.0.1]:{server.port} {server.host_key_line(1)}\n")
    assert server.host_key_line(1).startswith("ssh-rsa")
    connect_to(with_known_hosts(server, known), server.alias).connect()


def test_a_key_on_file_for_the_alias_is_used(server: SshServer, connect_to: Connect, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    config = with_known_hosts(server, known, "HostKeyAlias the-cluster")
    connect_to(config, server.alias, ask=lambda _question: True).connect()
    # OpenSSH lists an alias without a port, whatever the port.
    assert known.read_text() == f"the-cluster {server.host_key_line()}\n"
    connect_to(config, server.alias).connect()


def test_a_wrong_key_is_an_authentication_error_at_once(
    server: SshServer, connect_to: Connect, transport_class: type, tmp_path: Path
) -> None:
    make_key(tmp_path / "wrong")
    make_key(tmp_path / "locked", passphrase="secret")
    config = (
        "Host *\n"
        + "".join(f"  IdentityFile {tmp_path}/{name}\n" for name in ("wrong", "locked", "absent"))
        + server.config_block().replace(f"IdentityFile {server.user_key}", "Compression no")
    )
    started = time.monotonic()
    with pytest.raises(AuthenticationError) as failure:
        connect_to(config, server.alias).connect()
    assert time.monotonic() - started < 15
    assert "ssh-add" in str(failure.value) + failure.value.fix
    if transport_class is SshTransport:  # ssh does not say what it tried
        assert f"{tmp_path}/wrong: refused" in failure.value.why
        assert f"ssh-add {tmp_path}/locked" in failure.value.why
        assert f"key file {tmp_path}/absent: there is no such file" in failure.value.why
        assert f"`ssh-copy-id -F {tmp_path}" in failure.value.fix
    check = failure.value.fix.partition("check `")[2].partition("`")[0]
    assert check.startswith(f"ssh -F {tmp_path}")
    by_hand = subprocess.run(
        ["sh", "-c", check], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    assert (by_hand.returncode, b"Permission denied" in by_hand.stderr) == (255, True)


def test_what_a_hint_says_to_try_is_what_ctl_does(server: SshServer) -> None:
    hop = resolve(SshTarget(host=server.alias, ssh_config=str(server.ssh_config)))
    done = subprocess.run(["sh", "-c", hop.by_hand("echo", "in there")], capture_output=True, timeout=60, check=False)
    assert done.stdout == b"in there\n"


def test_a_key_file_that_is_named_and_absent_is_said(
    server: SshServer, connect_to: Connect, transport_class: type, tmp_path: Path
) -> None:
    block = server.config_block().replace(f"IdentityFile {server.user_key}", f"IdentityFile {tmp_path}/absent")
    with pytest.raises(AuthenticationError) as failure:
        connect_to(block, server.alias).connect()
    assert f"{tmp_path}/absent" in failure.value.why
    if transport_class is SshTransport:
        assert failure.value.why == f"key file {tmp_path}/absent: there is no such file"
        assert f"correct IdentityFile for {server.alias} in {tmp_path}" in failure.value.fix


def test_a_host_that_takes_no_keys_is_explained(start_server: Start, connect_to: Connect) -> None:
    server = start_server(
        extra=["PubkeyAuthentication no", "KbdInteractiveAuthentication no", "PasswordAuthentication yes"]
    )
    with pytest.raises(AuthenticationError) as failure:
        connect_to(server.config_block(), server.alias).connect()
    assert failure.value.code == "authentication-method"
    assert "password" in failure.value.why


def test_a_host_that_wants_more_than_a_key_is_explained(start_server: Start, connect_to: Connect) -> None:
    server = start_server(extra=["PasswordAuthentication yes", "AuthenticationMethods publickey,password"])
    with pytest.raises(AuthenticationError) as failure:
        connect_to(server.config_block(), server.alias).connect()
    assert failure.value.code == "authentication-method"
    assert "password" in failure.value.why


def agent_config(server: SshServer, agent: Path, *, only: bool, identity: str) -> str:
    block = server.config_block().replace("IdentityAgent none", f"IdentityAgent {agent}")
    block = block.replace("IdentitiesOnly yes", f"IdentitiesOnly {'yes' if only else 'no'}")
    return block.replace(f"IdentityFile {server.user_key}", f"IdentityFile {identity}")


def test_unusable_keys_in_the_agent_do_not_hide_the_others(
    server: SshServer, connect_to: Connect, transport_class: type, tmp_path: Path
) -> None:
    blobs = (
        [FIDO_BLOB, MALFORMED_BLOB] if transport_class is SshTransport else [FIDO_BLOB]
    )  # ssh wants well-formed ones
    with FakeAgent(tmp_path / "agent", blobs=blobs, files=[server.user_key]) as agent:
        connect_to(agent_config(server, agent.path, only=False, identity="/absent"), server.alias).connect()
        assert agent.signed == 1


def test_an_agent_that_refuses_to_sign_fails_one_key_only(
    server: SshServer, connect_to: Connect, tmp_path: Path
) -> None:
    """Paramiko signs in the connection's thread; an exception there would end the connection."""
    other = make_key(tmp_path / "other")
    with FakeAgent(tmp_path / "agent", blobs=[blob(other)]) as agent:
        config = agent_config(server, agent.path, only=False, identity=str(server.user_key))
        connect_to(config, server.alias).connect()


def test_identities_only_offers_just_the_named_key_of_the_agent(
    server: SshServer, connect_to: Connect, tmp_path: Path
) -> None:
    """Eight wrong keys would exceed MaxAuthTries before the right one came."""
    others = [tmp_path / f"k{number}" for number in range(8)]
    for path in others:
        make_key(path)
    public_only = tmp_path / "named.pub"
    public_only.write_text(server.user_key.with_suffix(".pub").read_text())
    with FakeAgent(tmp_path / "agent", files=[*others, server.user_key]) as agent:
        connect_to(agent_config(server, agent.path, only=True, identity=str(public_only)), server.alias).connect()
        assert agent.signed == 1
        with pytest.raises(AuthenticationError) as failure:
            connect_to(agent_config(server, agent.path, only=False, identity="/absent"), server.alias).connect()
        assert "IdentitiesOnly" in failure.value.fix


def test_a_dead_agent_is_passed_over(server: SshServer, connect_to: Connect, tmp_path: Path) -> None:
    config = agent_config(server, tmp_path / "no-agent", only=True, identity=str(server.user_key))
    connect_to(config, server.alias).connect()


def test_a_closed_port_fails_within_the_deadline(server: SshServer, connect_to: Connect) -> None:
    started = time.monotonic()
    with pytest.raises(ConnectionFailed) as failure:
        connect_to(server.config_block(port=free_port()), server.alias, connect_timeout_s=5).connect()
    assert type(failure.value) is ConnectionFailed
    assert "refused" in failure.value.why
    assert time.monotonic() - started < 15


def test_a_name_that_does_not_exist_is_not_tried_again(server: SshServer, connect_to: Connect) -> None:
    config = server.config_block().replace("HostName 127.0.0.1", "HostName does-not-exist.invalid")
    with pytest.raises(ConnectionFailed, match=r"does-not-exist\.invalid"):
        connect_to(config, server.alias, connect_timeout_s=5).connect()


@pytest.mark.parametrize("banner", [b"", b"SSH-2.0-Slow\r\n"])
def test_a_silent_server_fails_within_the_deadline(server: SshServer, connect_to: Connect, banner: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held: list[socket.socket] = []

        def accept() -> None:
            try:
                while True:
                    client, _ = listener.accept()
                    client.sendall(banner)
                    held.append(client)
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        started = time.monotonic()
        port = listener.getsockname()[1]
        with pytest.raises(ConnectionFailed) as failure:
            connect_to(server.config_block(port=port), server.alias, connect_timeout_s=2).connect()
        assert time.monotonic() - started < 12
        assert "within 2 s" in failure.value.why
        listener.shutdown(socket.SHUT_RDWR)
    for client in held:
        client.close()


def test_explicit_port_and_user_win(server: SshServer, connect_to: Connect) -> None:
    config = server.config_block(port=1).replace(f"User {server.user}", "User nobody-here")
    transport = connect_to(config, server.alias, port=server.port, user=server.user)
    assert transport.run(["true"], timeout=30).code == 0


def test_a_jump_goes_through_two_verified_hosts(start_server: Start, connect_to: Connect, tmp_path: Path) -> None:
    jump = start_server("jump", alias="jump", extra=["LogLevel DEBUG1"])
    target = start_server(
        "target",
        alias="target",
        extra=['ForceCommand echo via-target $SSH_CONNECTION; sh -c "$SSH_ORIGINAL_COMMAND"'],
    )
    config = jump.config_block() + target.config_block(extra=["ProxyJump jump"])
    transport = connect_to(config, "target")
    process = transport.start(["cat"])
    data = os.urandom(3 << 20)
    process.write(data, timeout=30)
    process.close_stdin()
    received = b""
    while piece := process.read(timeout=30):
        received += piece
    assert received == data
    assert process.wait(timeout=30) == 0
    assert b"via-target" in process.chatter
    assert f"127.0.0.1 port {target.port}" in jump.log.read_text()


@pytest.mark.parametrize("which", ["jump", "target"])
def test_every_hop_of_a_jump_is_verified(
    start_server: Start, connect_to: Connect, tmp_path: Path, which: str
) -> None:
    servers = {name: start_server(name, alias=name) for name in ("jump", "target")}
    wrong = servers[which]
    wrong.known_hosts.write_text(f"[127.0.0.1]:{wrong.port} {make_key(tmp_path / 'wrong')}\n")
    config = servers["jump"].config_block() + servers["target"].config_block(extra=["ProxyJump jump"])
    with pytest.raises(HostKeyError, match=rf"{which} \(127\.0\.0\.1:{wrong.port}\) has changed"):
        connect_to(config, "target").connect()


def test_a_jump_host_that_cannot_reach_the_target_says_so(start_server: Start, connect_to: Connect) -> None:
    jump = start_server("jump", alias="jump")
    lost = jump.config_block(alias="target", port=free_port(), extra=["ProxyJump jump"])
    with pytest.raises(ConnectionFailed, match="cannot connect to target") as failure:
        connect_to(jump.config_block() + lost, "target", connect_timeout_s=5).connect()
    assert "jump host" in failure.value.why


def test_a_proxy_command_is_the_way_to_the_host(server: SshServer, connect_to: Connect, tmp_path: Path) -> None:
    relay = tmp_path / "relay.py"
    relay.write_text(
        "import os, socket, sys, threading\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def up():\n"
        "    while data := os.read(0, 65536): s.sendall(data)\n"
        "    s.shutdown(socket.SHUT_WR)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while data := s.recv(65536): os.write(1, data)\n"
    )
    config = server.config_block(extra=[f"ProxyCommand python3 {relay} %h %p"])
    assert connect_to(config, server.alias).run(["echo", "through"], timeout=30).stdout == b"through\n"


def test_a_proxy_command_that_fails_is_a_failed_connection(server: SshServer, connect_to: Connect) -> None:
    config = server.config_block(extra=["ProxyCommand false"])
    with pytest.raises(ConnectionFailed):
        connect_to(config, server.alias, connect_timeout_s=3).connect()
