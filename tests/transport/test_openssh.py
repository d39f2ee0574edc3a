"""What only the OpenSSH transport does: control masters, their sockets, a person's second factor."""

from __future__ import annotations

import os
import pty
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.accounts import AUTHORIZED_KEYS, temporary_account
from support.proxy import TcpProxy

from controller.core.errors import AuthenticationError, ConfigError, ConnectionFailed
from controller.transport.deadline import Deadline
from controller.transport.master import MAX_SOCKET_BYTES, Master, control_folder
from controller.transport.openssh import OpensshTransport
from controller.transport.sshconfig import SshTarget, resolve_chain
from tools.sshd import SshServer, make_key

pytestmark = [pytest.mark.sshd, pytest.mark.only("openssh")]

Connect = Callable[..., OpensshTransport]
Start = Callable[..., SshServer]


def master_of(config: Path, host: str) -> Master:
    chain = resolve_chain(SshTarget(host=host, ssh_config=str(config)))
    return Master("ssh", chain, keepalive_s=5, dead_after_s=20)


def master_pid(master: Master) -> int:
    command = ["ssh", "-F", os.devnull, "-S", master.socket, "-O", "check", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return int(done.stderr.split("pid=")[1].rstrip(")\r\n"))


@pytest.fixture
def proxied(server: SshServer, tmp_path: Path) -> tuple[TcpProxy, Path]:
    proxy = TcpProxy(server.address, server.port)
    server.trust(server.known_hosts, port=proxy.port)
    config = tmp_path / "config"
    config.write_text(server.config_block(port=proxy.port))
    return proxy, config


def test_two_transports_share_one_connection(server: SshServer, proxied: tuple[TcpProxy, Path]) -> None:
    proxy, config = proxied
    with proxy:
        target = SshTarget(host=server.alias, ssh_config=str(config))
        with OpensshTransport(target) as first, OpensshTransport(target) as second:
            assert first.run(["echo", "one"], timeout=30).stdout == b"one\n"
            assert second.run(["echo", "two"], timeout=30).stdout == b"two\n"
        assert OpensshTransport(target).run(["echo", "three"], timeout=30).stdout == b"three\n"
        assert proxy.connections == 1


def test_a_changed_configuration_does_not_find_the_old_connection(
    server: SshServer, proxied: tuple[TcpProxy, Path]
) -> None:
    proxy, config = proxied
    with proxy:
        before = master_of(config, server.alias).socket
        config.write_text(server.config_block(port=proxy.port, extra=["ServerAliveInterval 77"]))
        assert master_of(config, server.alias).socket != before


def test_a_stale_socket_is_removed(server: SshServer, proxied: tuple[TcpProxy, Path]) -> None:
    """A master that was killed leaves its socket behind, and ssh would refuse to make another one there."""
    proxy, config = proxied
    with proxy:
        target = SshTarget(host=server.alias, ssh_config=str(config))
        transport = OpensshTransport(target)
        transport.connect()
        master = master_of(config, server.alias)
        os.kill(master_pid(master), signal.SIGKILL)
        assert os.path.exists(master.socket)
        assert transport.run(["echo", "again"], timeout=30).stdout == b"again\n"
        assert proxy.connections == 2


def test_a_socket_on_which_nobody_answers_is_stale(
    server: SshServer, proxied: tuple[TcpProxy, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.transport.master.CONTROL_TIMEOUT_S", 0.5)
    proxy, config = proxied
    with proxy, socket.socket(socket.AF_UNIX) as deaf:
        master = master_of(config, server.alias)
        deaf.bind(master.socket)
        deaf.listen()
        assert master.check() is False
        assert not os.path.exists(master.socket)


def test_sockets_are_ours_alone_and_short_enough(server: SshServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with OpensshTransport(SshTarget(host=server.alias, ssh_config=str(server.ssh_config))):
        folder = control_folder()
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        for name in os.listdir(folder):
            assert stat.S_IMODE(os.stat(f"{folder}/{name}").st_mode) == 0o600, name
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp/" + "x" * 80)
    socket_path = master_of(server.ssh_config, server.alias).socket
    assert len(os.fsencode(socket_path)) + 17 <= MAX_SOCKET_BYTES


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_a_control_folder_that_others_may_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    runtime = Path(f"/tmp/c{os.getpid()}")
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    try:
        if kind == "a link":
            (runtime / "ctl").symlink_to(tmp_path)
        else:
            (runtime / "ctl").mkdir()
            (runtime / "ctl").chmod(0o755)  # whatever the umask
        with pytest.raises(ConfigError) as failure:
            control_folder()
        assert failure.value.code == "control-folder-unsafe"
    finally:
        for path in runtime.iterdir():
            path.unlink() if path.is_symlink() else path.rmdir()
        runtime.rmdir()


def test_one_process_connects_at_a_time(server: SshServer) -> None:
    master = master_of(server.ssh_config, server.alias)
    with master.starting(Deadline(5)), pytest.raises(ConnectionFailed) as failure, master.starting(Deadline(0.3)):
        pytest.fail("two at once")
    assert failure.value.code == "connect-busy"


def test_known_hosts_is_only_appended_to(start_server: Start, connect_to: Connect, tmp_path: Path) -> None:
    """UpdateHostKeys would rewrite the file once the host shows a second key."""
    server = start_server(host_key_types=("ed25519", "ecdsa"))
    known = tmp_path / "known_hosts"
    known.write_text(f"# mine\n[127.0.0.1]:{server.port} {server.host_key_line(0)}\n")
    before = (known.read_bytes(), known.stat().st_ino)
    config = f"Host *\n  UserKnownHostsFile {known}\n  UpdateHostKeys yes\n" + server.config_block()
    transport = connect_to(config, server.alias)
    assert transport.run(["true"], timeout=30).code == 0
    assert (known.read_bytes(), known.stat().st_ino) == before


def test_a_lax_configuration_does_not_switch_the_checks_off(
    start_server: Start, connect_to: Connect, tmp_path: Path
) -> None:
    jump, target = (start_server(name, alias=name) for name in ("jump", "target"))
    jump.known_hosts.write_text("")
    config = (
        "Host *\n  StrictHostKeyChecking no\n" + jump.config_block() + target.config_block(extra=["ProxyJump jump"])
    )
    with pytest.raises(ConnectionFailed) as failure:
        connect_to(config, "target").connect()
    assert failure.value.code == "host-key-unknown", failure.value.why
    assert jump.known_hosts.read_text() == ""


def test_two_jumps_in_a_row_with_names_that_need_quoting(start_server: Start, tmp_path: Path) -> None:
    """Each jump is a command inside the next one's, so quotes and percent signs pass several shells and ssh."""
    first, second, target = (start_server(name, alias=name) for name in ("first", "second", "target"))
    folder = tmp_path / "50% of 'it'"
    folder.mkdir()
    config = folder / "ssh config"
    config.write_text(
        first.config_block()
        + second.config_block(extra=["ProxyJump first"])
        + target.config_block(extra=["ProxyJump second"])
    )
    with OpensshTransport(SshTarget(host="target", ssh_config=str(config))) as transport:
        assert transport.run(["echo", "through"], timeout=30).stdout == b"through\n"
    for server in (first, second, target):
        assert "Accepted publickey" in server.log.read_text()


def test_a_certificate_authority_is_honoured(start_server: Start, connect_to: Connect, tmp_path: Path) -> None:
    server = start_server()
    make_key(tmp_path / "ca")
    public = server.host_keys[0].with_name(server.host_keys[0].name + ".pub")
    sign = ["ssh-keygen", "-q", "-s", str(tmp_path / "ca"), "-I", "host", "-h", "-n", "127.0.0.1", str(public)]
    subprocess.run(sign, check=True, timeout=60)
    certified = start_server(
        "certified",
        extra=[f"HostKey {server.host_keys[0]}", "HostCertificate " + str(public).replace(".pub", "-cert.pub")],
    )
    known = tmp_path / "known_hosts"
    known.write_text(f"@cert-authority * {(tmp_path / 'ca.pub').read_text()}")
    config = f"Host *\n  UserKnownHostsFile {known}\n" + certified.config_block()
    assert connect_to(config, certified.alias).run(["echo", "in"], timeout=30).stdout == b"in\n"


# ------------------------------------------------------------------------------- a person's second factor


SCRIPT = """
import sys
from controller.transport.openssh import OpensshTransport
from controller.transport.sshconfig import SshTarget
transport = OpensshTransport(
    SshTarget(host="testhost", ssh_config=sys.argv[1]), ask=lambda question: True, connect_timeout_s=10
)
transport.connect()
print("RESULT", transport.run(["echo", "in"], timeout=30).stdout, flush=True)
"""


def on_a_terminal(argv: list[str], answer_to: bytes, answer: bytes) -> bytes:
    """Run a program on a terminal of its own, answer one question, and return all that it showed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(argv[0], argv)
    shown, answered, end = b"", False, time.monotonic() + 60
    while time.monotonic() < end:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the other side of the terminal is closed
            break
        if not data:
            break
        shown += data
        if not answered and answer_to in shown:
            os.write(terminal, answer + b"\n")
            answered = True
    os.waitpid(pid, 0)
    os.close(terminal)
    return shown


PAM = Path("/etc/pam.d/sshd")

FACTORS = {
    "password": ["PasswordAuthentication yes", "AuthenticationMethods publickey,password"],
    # What one-time codes use. The question comes from PAM, here the one for the password.
    "keyboard-interactive": [
        "UsePAM yes",
        "KbdInteractiveAuthentication yes",
        "AuthenticationMethods publickey,keyboard-interactive",
    ],
}


@pytest.mark.parametrize("method", FACTORS)
def test_a_second_factor_is_asked_for_once(start_server: Start, method: str) -> None:
    if method == "keyboard-interactive" and not PAM.exists():
        pytest.skip(f"this sshd has no PAM ({PAM}) to ask the second question")
    with temporary_account(password="correct horse") as account:
        server = start_server(user=account.name, extra=[*FACTORS[method], AUTHORIZED_KEYS])
        account.let_in(server.user_key.with_suffix(".pub"))
        config = server.ssh_config
        target = SshTarget(host=server.alias, ssh_config=str(config))
        with pytest.raises(AuthenticationError) as failure:
            OpensshTransport(target).connect()
        assert failure.value.code == "authentication-method", failure.value.why
        assert "terminal" in failure.value.fix
        shown = on_a_terminal([sys.executable, "-c", SCRIPT, str(config)], b"assword:", b"correct horse")
        assert b"RESULT b'in\\n'" in shown
        assert f"Accepted {method}" in server.log.read_text().replace("/pam", "")
        # The connection stays for a while, so the next command asks nothing, terminal or not.
        assert OpensshTransport(target).run(["echo", "still"], timeout=30).stdout == b"still\n"
        os.kill(master_pid(master_of(config, server.alias)), signal.SIGTERM)
