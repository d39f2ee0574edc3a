"""Accounts that hurt, each against a real sshd: odd login shells, noisy profiles, tight limits, hostile paths."""

from __future__ import annotations

import io
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from support.accounts import account_on, temporary_folder

from controller.core.errors import ConnectionFailed, RemoteFailed
from controller.stages import push
from controller.transport.base import Completed, Transport
from controller.ui.errors import print_error
from remote_payload.host.protocol import HostRecord
from tools.sshd import SshServer, free_port, make_key

pytestmark = pytest.mark.sshd

Connect = Callable[..., Transport]
Start = Callable[..., SshServer]

SYSTEM_PYTHON = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path)), "")
"""One that every account of this machine may run."""

HOSTILE = 'it\'s "a" $(touch pwned) `id`; rm -rf *\n%s \\ Grüße 日本 \x1b[31m'

SHELLS = {"fish": "fish", "tcsh": "tcsh", "dash": "dash", "zsh": "zsh"}


def record(workdir: Path, **changes: str) -> HostRecord:
    host: HostRecord = {
        "name": "testhost",
        "address": "127.0.0.1",
        "port": 0,
        "user": "",
        "workdir": str(workdir),
        "python": sys.executable,
        "bootstrap_python": SYSTEM_PYTHON,
        "accelerator": "cpu",
        "gpus": 0,
        "lease_dir": None,
    }
    return {**host, **changes}  # type: ignore[typeddict-item]


def push_to(transport: Transport, workdir: Path, **changes: str) -> push.PushOutcome:
    events: list[str] = []
    return push.run(transport, record(workdir, **changes), emit=lambda kind, /, **_fields: events.append(kind))


def assert_works(transport: Transport, workdir: Path) -> None:
    """Arguments, exit codes, binary data in both directions, and a push: whatever the account does around them."""
    done = transport.run(
        ["sh", "-c", 'printf %s "$1"; cat; exit 7', "sh", HOSTILE], stdin=bytes(range(256)), timeout=60
    )
    assert (done.code, done.stdout) == (7, HOSTILE.encode() + bytes(range(256)))
    first, second = push_to(transport, workdir), push_to(transport, workdir)
    assert (first.skipped, second.skipped) == (False, True)
    assert Path(first.path, "remote_payload", "host", "main.py").is_file()


# ------------------------------------------------------------------------------------------- login shells


@pytest.mark.parametrize("shell", SHELLS)
def test_a_login_shell_of_another_kind(start_server: Start, connect_to: Connect, shell: str) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed: apt-get install {SHELLS[shell]}")
    with account_on(start_server, shell=path) as (server, account):
        transport = connect_to(server.config_block(), server.alias)
        assert_works(transport, account.home / "ctl")


def test_a_bashrc_that_prints_and_takes_two_seconds(start_server: Start, connect_to: Connect) -> None:
    noise = "echo 'Welcome to the cluster'\necho 'quota: 80%' >&2\nprintf '\\036ctl-begin \\nno newline'\nsleep 2\n"
    with account_on(start_server, shell="/bin/bash") as (server, account):
        (account.home / ".bashrc").write_text(noise)
        transport = connect_to(server.config_block(), server.alias)
        process = transport.start(["cat"])
        process.write(b"\0data", timeout=30)
        process.close_stdin()
        assert process.read(timeout=30) == b"\0data"
        assert process.wait(timeout=30) == 0
        assert b"Welcome" in process.chatter  # type: ignore[attr-defined]  # both kinds have it
        assert push_to(transport, account.home / "ctl").skipped is False


def test_a_banner_and_a_message_of_the_day(start_server: Start, connect_to: Connect, tmp_path: Path) -> None:
    banner = tmp_path / "banner"
    banner.write_text("\x1b[2JUNAUTHORISED ACCESS IS FORBIDDEN\nHost key verification failed. Permission denied (\n")
    server = start_server(extra=[f"Banner {banner}", "PrintMotd yes"])
    transport = connect_to(server.config_block(), server.alias)
    assert_works(transport, tmp_path / "ctl")
    assert b"FORBIDDEN" not in transport.run(["true"], timeout=30).stderr


def test_a_shell_that_lets_nobody_in_is_explained(start_server: Start, connect_to: Connect) -> None:
    with account_on(start_server, shell="/usr/sbin/nologin") as (server, _account):
        with pytest.raises(RemoteFailed) as failure:
            connect_to(server.config_block(), server.alias).run(["true"], timeout=30)
        assert failure.value.code == "shell-unusable"
        assert "not available" in failure.value.why


def test_what_a_hostile_shell_prints_stays_text(start_server: Start, connect_to: Connect, tmp_path: Path) -> None:
    """An escape, a clipboard write and rich markup in a host's last words reach the screen as text or not at all."""
    words = tmp_path / "words"
    words.write_bytes(b"\x1b]52;c;cm0gLXJm\x07\x1b[2J[bold red]trust me[/] [link=http://x]here[/link]\r\n")
    server = start_server(extra=[f"ForceCommand cat {words}; exit 1"])
    with pytest.raises(RemoteFailed) as failure:
        connect_to(server.config_block(), server.alias).run(["true"], timeout=30)
    screen = io.StringIO()
    print_error(failure.value, Console(file=screen, force_terminal=True, color_system=None, width=200))
    assert "[bold red]trust me[/] [link=http://x]here[/link]" in screen.getvalue()
    assert "\x07" not in screen.getvalue()
    assert "\x1b]" not in screen.getvalue()
    assert "\x1b[2J" not in screen.getvalue()


# ------------------------------------------------------------------------------------------ tight limits


def test_no_sftp_subsystem_and_one_session_at_a_time(
    start_server: Start, connect_to: Connect, tmp_path: Path
) -> None:
    """The test server offers no sftp at all; nothing here ever opens two sessions at once."""
    server = start_server(extra=["MaxSessions 1"])
    assert "Subsystem" not in (server.folder / "sshd_config").read_text()
    assert_works(connect_to(server.config_block(), server.alias), tmp_path / "ctl")


def test_a_host_that_refuses_more_startups_is_tried_again(
    start_server: Start, connect_to: Connect, tmp_path: Path
) -> None:
    """One unauthenticated connection holds the only place; it times out while we try."""
    server = start_server(extra=["MaxStartups 1", "LoginGraceTime 2"])
    with only_place(server):
        transport = connect_to(server.config_block(), server.alias, connect_timeout_s=20)
        done = next(filter(None, (first_connection(transport) for _ in range(8))))
        assert done.stdout == b"in\n"
    assert "past MaxStartups" in server.log.read_text()


def only_place(server: SshServer) -> socket.socket:
    """A connection that is let in and says nothing; whoever came before may have to leave first."""
    while True:
        sock = socket.create_connection((server.address, server.port), timeout=30)
        if sock.recv(7) == b"SSH-2.0":
            return sock
        sock.close()


def first_connection(transport: Transport) -> Completed | None:
    """None while the host drops us: the jitter may spend all attempts before the grace time is over."""
    try:
        return transport.run(["echo", "in"], timeout=30)
    except ConnectionFailed as error:
        if type(error) is not ConnectionFailed:
            raise
        return None


# --------------------------------------------------------------------------------------- poor accounts


def test_an_ordinary_user_with_a_tight_umask(start_server: Start, connect_to: Connect) -> None:
    """Neither root nor sudo; umask 077 for the session; all that is made is for this user alone."""
    with account_on(start_server, shell="/bin/bash") as (server, account):
        (account.home / ".bashrc").write_text("umask 077\n")
        transport = connect_to(server.config_block(), server.alias)
        assert transport.run(["id", "-u"], timeout=30).stdout == b"%d\n" % account.uid
        workdir = account.home / "work"
        assert_works(transport, workdir)
        for path in [workdir, *workdir.rglob("*")]:
            status = path.lstat()
            assert status.st_uid == account.uid
            assert stat.S_IMODE(status.st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_wide_open_umask_changes_nothing(start_server: Start, connect_to: Connect) -> None:
    with account_on(start_server, shell="/bin/bash") as (server, account):
        (account.home / ".bashrc").write_text("umask 000\n")
        workdir = account.home / "work"
        push_to(connect_to(server.config_block(), server.alias), workdir)
        assert [path for path in [workdir, *workdir.rglob("*")] if path.lstat().st_mode & 0o077] == []


def test_a_read_only_home(start_server: Start, connect_to: Connect) -> None:
    """An ordinary user who may not write in their home; the work folder lies elsewhere."""
    with account_on(start_server) as (server, account), temporary_folder(account) as elsewhere:
        os.chown(account.home, 0, 0)
        account.home.chmod(0o755)
        transport = connect_to(server.config_block(), server.alias)
        assert transport.run(["touch", str(account.home / "x")], timeout=30).code != 0
        assert_works(transport, elsewhere / "ctl")
        with pytest.raises(RemoteFailed) as failure:
            push_to(transport, account.home / "ctl")
        assert failure.value.code == "workdir-unusable"
        assert "workdir" in failure.value.fix


def test_nothing_is_executed_from_tmp(start_server: Start, connect_to: Connect, tmp_path: Path) -> None:
    """TMPDIR on a file system mounted noexec, as many clusters mount /tmp."""
    mount_point = tmp_path / "noexec"
    mount_point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "noexec,size=8m", "ctl-test", str(mount_point)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, timeout=30, check=False).returncode != 0:
        pytest.skip("mounting a tmpfs needs root and CAP_SYS_ADMIN")
    try:
        server = start_server(extra=[f"SetEnv TMPDIR={mount_point} SHLVL=2"])
        transport = connect_to(server.config_block(), server.alias)
        script = 'printf "#!/bin/sh\\n" > "$TMPDIR/x"; chmod +x "$TMPDIR/x"; "$TMPDIR/x"'
        assert transport.run(["sh", "-c", script], timeout=30).code == 126
        assert_works(transport, tmp_path / "ctl")
        probe = transport.run(
            [SYSTEM_PYTHON, "-I", "-B", "-c", "import tempfile; print(tempfile.gettempdir())"], timeout=60
        )
        assert probe.stdout.decode().strip() == str(mount_point)
    finally:
        subprocess.run(["umount", str(mount_point)], check=True, timeout=30)


@pytest.mark.parametrize("python", ["/opt/no/such/python3", "/etc/passwd"])
def test_no_python_at_the_configured_path_is_a_clear_error(shared: Transport, tmp_path: Path, python: str) -> None:
    with pytest.raises(RemoteFailed) as failure:
        push_to(shared, tmp_path / "ctl", bootstrap_python=python)
    assert failure.value.code == "python-missing"
    assert python in failure.value.what
    assert "[hosts.testhost]" in failure.value.fix
    assert not (tmp_path / "ctl").exists()


def test_an_old_python_is_a_clear_error(shared: Transport, tmp_path: Path) -> None:
    """No Python 3.8 is at hand, so the receiver is run by one that says it is."""
    pretend = tmp_path / "pretend.py"
    pretend.write_text("import sys\nsys.version_info = (3, 8, 10)\nexec(sys.argv[1])\n")
    old = tmp_path / "python3"
    old.write_text(f'#!/bin/sh\nexec {SYSTEM_PYTHON} -I -S {pretend} "$4"\n')
    old.chmod(0o755)
    with pytest.raises(RemoteFailed) as failure:
        push_to(shared, tmp_path / "ctl", bootstrap_python=str(old))
    assert failure.value.code == "python-old"
    assert "3.8" in failure.value.what


# ------------------------------------------------------------------------------------------ hostile names


@pytest.mark.parametrize(
    "name", ["with space", "it's", 'say "hi"', "new\nline", "Grüße-日本", "$(touch pwned)", "-rf", "%h"]
)
def test_a_work_folder_of_any_name(shared: Transport, tmp_path: Path, name: str) -> None:
    assert_works(shared, tmp_path / name / "ctl")
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


# ------------------------------------------------------------------------------------------ ssh configuration


def test_include_match_and_a_jump_together(
    start_server: Start, connect_to: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The user's own login shell runs ssh's ProxyCommand, and need not be a POSIX one either.
    monkeypatch.setenv("SHELL", shutil.which("tcsh") or "/bin/sh")
    jump, target = (
        start_server("jump", alias="jump", extra=["LogLevel DEBUG1"]),
        start_server("target", alias="target"),
    )
    (tmp_path / "hops").write_text(jump.config_block())
    marker = tmp_path / "matched"
    config = (
        f"Include {tmp_path}/hops\n"
        f'Match originalhost gpu exec "touch {marker}"\n  ProxyJump jump\n' + target.config_block(alias="gpu")
    )
    transport = connect_to(config, "gpu")
    assert_works(transport, tmp_path / "ctl")
    assert marker.exists()
    assert f"127.0.0.1 port {target.port}" in jump.log.read_text()
    assert "Accepted publickey" in target.log.read_text()


def test_a_name_that_is_a_command_never_runs(connect_to: Connect, tmp_path: Path) -> None:
    """Names travel as arguments; a jump's are put into a shell command by us, quoted."""
    marker = tmp_path / "pwned"
    config = (
        f"Host *\n  UserKnownHostsFile {tmp_path}/none\n  GlobalKnownHostsFile none\n  ConnectTimeout 2\n"
        f"Host gpu\n  HostName 127.0.0.1\n  Port {free_port()}\n  ProxyJump a$(touch${{IFS}}{marker})@127.0.0.1:1\n"
    )
    with pytest.raises(Exception):  # noqa: B017, PT011 - refused by ssh or by us, whichever comes first
        connect_to(config, "gpu", connect_timeout_s=3).connect()
    assert not marker.exists()


@pytest.fixture
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real ssh-agent."""
    folder = Path(f"/tmp/ctl-a-{os.getpid()}")
    folder.mkdir(mode=0o700)
    process = subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(folder / "agent")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield folder / "agent"
    finally:
        process.terminate()
        process.wait(10)
        shutil.rmtree(folder)


def test_a_certificate_in_the_agent_does_not_break_the_others(
    start_server: Start, connect_to: Connect, tmp_path: Path, agent: Path
) -> None:
    """A certificate that this host does not accept comes first in a real agent."""
    server = start_server()
    make_key(tmp_path / "ca")
    make_key(tmp_path / "certified")
    sign = ["ssh-keygen", "-q", "-s", str(tmp_path / "ca"), "-I", "me", "-n", "me", str(tmp_path / "certified.pub")]
    subprocess.run(sign, check=True, timeout=60)
    for key in (tmp_path / "certified", server.user_key):
        subprocess.run(
            ["ssh-add", "-q", str(key)], check=True, timeout=60, env={**os.environ, "SSH_AUTH_SOCK": str(agent)}
        )
    config = server.config_block().replace("IdentityAgent none", f"IdentityAgent {agent}")
    config = config.replace("IdentitiesOnly yes", "IdentitiesOnly no").replace(str(server.user_key), "/absent")
    transport = connect_to(config, server.alias)
    assert transport.run(["echo", "in"], timeout=30).stdout == b"in\n"
