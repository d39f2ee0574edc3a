"""Commands over one connection to a real sshd."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.core.errors import ConnectionFailed, ConnectionLost, RemoteFailed
from controller.transport.remote import STDERR_KEPT_BYTES
from controller.transport.ssh import SshTarget, SshTransport
from tools.sshd import SshServer

pytestmark = pytest.mark.sshd

PRINT_ARGS = "import sys,os; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"

WORDS = st.lists(
    st.one_of(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
        st.text("'\"\\ \n\t$`!*?#;&|<>(){}[]~-=%^\r", max_size=12),
        st.sampled_from(["-", "--", "-n", "-c", "'", "\\", "!", "\n"]),
    ),
    min_size=100,
    max_size=100,
)
"""A hundred a command: each remote call costs as much as generating them."""


@pytest.mark.only("paramiko")
def test_every_exit_code_arrives(shared: SshTransport) -> None:
    codes = [shared.run(["sh", "-c", f"exit {code}"], timeout=30).code for code in range(256)]
    assert codes == list(range(256))


@pytest.mark.only("openssh")
def test_the_exit_codes_that_ssh_uses_itself_arrive(shared: SshTransport) -> None:
    """A process for each costs more than a channel; 255 is ssh's own word for a broken connection."""
    codes = [0, 1, 2, 126, 127, 128, 129, 130, 137, 254, 255]
    assert [shared.run(["sh", "-c", f"exit {code}"], timeout=30).code for code in codes] == codes


def test_a_missing_program_is_127(shared: SshTransport) -> None:
    done = shared.run(["/no/such/program"], timeout=30)
    assert done.code == 127
    assert b"/no/such/program" in done.stderr


@pytest.mark.only("paramiko")  # the line is made before either transport sees it
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(words=WORDS)
def test_ten_thousand_arguments_arrive_unchanged(shared: SshTransport, words: list[str]) -> None:
    # printf is an external program here, cheaper than a Python for each example.
    done = shared.run(["/usr/bin/env", "printf", "%s\\0", *words, "end"], timeout=30)
    assert done.stdout == b"".join(word.encode() + b"\0" for word in [*words, "end"])


def test_arguments_that_are_no_text_arrive_unchanged(shared: SshTransport) -> None:
    word = os.fsdecode(b"file-\xff\xfe")
    assert shared.run(["printf", "%s", word], timeout=30).stdout == b"file-\xff\xfe"


def test_stdin_and_stdout_are_binary_and_larger_than_any_window(shared: SshTransport) -> None:
    data = os.urandom(1 << 20) * 20
    done = shared.run(["cat"], stdin=data, timeout=120)
    assert done.code == 0
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(data).digest()


def test_environment_is_added(shared: SshTransport) -> None:
    done = shared.run(["sh", "-c", 'printf "%s|%s" "$CTL_X" "$HOME"'], env={"CTL_X": "a 'b'\n$c"}, timeout=30)
    assert done.stdout.decode().split("|") == ["a 'b'\n$c", os.path.expanduser("~")]


def test_the_environment_is_not_readable_in_the_process_list(shared: SshTransport) -> None:
    done = shared.run(
        ["sh", "-c", "cat /proc/$$/cmdline; cat /proc/$PPID/cmdline"], env={"CTL_X": "plainvalue"}, timeout=30
    )
    assert b"plainvalue" not in done.stdout


def test_stderr_is_kept_apart_and_bounded(shared: SshTransport) -> None:
    script = "import sys; sys.stderr.write('x' * (40 << 20) + 'the end'); print('out')"
    done = shared.run([sys.executable, "-c", script], timeout=120)
    assert done.stdout == b"out\n"
    assert len(done.stderr) == STDERR_KEPT_BYTES
    assert done.stderr.endswith(b"the end")


def test_output_is_delivered_while_the_command_runs(shared: SshTransport) -> None:
    process = shared.start(["sh", "-c", "echo one; read line; echo two; exit 5"])
    assert process.read(timeout=30) == b"one\n"
    with pytest.raises(TimeoutError):
        process.read(timeout=0.3)
    process.write(b"go on\n", timeout=30)
    assert process.read(timeout=30) == b"two\n"
    assert process.read(timeout=30) == b""
    assert process.wait(timeout=30) == 5


def test_end_of_stdin_is_seen(shared: SshTransport) -> None:
    process = shared.start(["cat"])
    process.write(b"data", timeout=30)
    process.close_stdin()
    assert process.wait(timeout=30) == 0


def test_a_command_that_does_not_read_its_stdin_is_no_error(shared: SshTransport) -> None:
    done = shared.run(["sh", "-c", "exit 4"], stdin=b"x" * (8 << 20), timeout=60)
    assert done.code == 4


def test_no_room_for_input_is_noticed(shared: SshTransport) -> None:
    process = shared.start(["sleep", "60"])
    with pytest.raises(ConnectionLost, match="took no input"):
        process.write(b"x" * (32 << 20), timeout=1)
    process.close()


def test_a_command_that_outlives_its_deadline_is_reported(shared: SshTransport) -> None:
    with pytest.raises(ConnectionLost, match="did not end within 1 s"):
        shared.run(["sh", "-c", "while :; do echo still here; sleep 0.1; done"], timeout=1)
    process = shared.start(["sleep", "60"])
    with pytest.raises(ConnectionLost, match="did not end"):
        process.wait(timeout=0.5)
    process.close()


def test_a_detached_child_does_not_hold_the_command_open(shared: SshTransport) -> None:
    """The child keeps stdout; the trailer ends the command all the same."""
    started = time.monotonic()
    done = shared.run(["sh", "-c", "sleep 60 & echo $!"], timeout=50)
    assert done.code == 0
    assert time.monotonic() - started < 45
    os.kill(int(done.stdout), 9)


def test_a_killed_shell_leaves_the_outcome_unknown(shared: SshTransport) -> None:
    process = shared.start(["sh", "-c", "kill -9 $PPID; sleep 0.1"])
    with pytest.raises(ConnectionLost, match="lost the command") as failure:
        process.wait(timeout=30)
    assert "killed" in failure.value.why


def test_commands_run_side_by_side_over_one_connection(shared: SshTransport) -> None:
    results: dict[int, bytes] = {}

    def work(number: int) -> None:
        results[number] = shared.run(["sh", "-c", f"sleep 0.2; echo {number}"], timeout=60).stdout

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {number: b"%d\n" % number for number in range(8)}


def test_a_bad_argv_is_refused_before_anything_is_sent(shared: SshTransport) -> None:
    with pytest.raises(ValueError, match="NUL"):
        shared.start(["echo", "\0"])


def test_no_more_sessions_than_the_host_allows(
    start_server: Callable[..., SshServer], connect_to: Callable[..., SshTransport]
) -> None:
    server = start_server(extra=["MaxSessions 1"])
    transport = connect_to(server.config_block(), server.alias)
    first = transport.start(["cat"])
    with pytest.raises(ConnectionFailed) as failure:
        transport.start(["true"])
    assert failure.value.code == "session-refused"
    assert "MaxSessions" in failure.value.fix
    first.close_stdin()
    assert first.wait(timeout=30) == 0


def wrapper(tmp_path: Path, script: str) -> str:
    path = tmp_path / "wrapper"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return f"ForceCommand {path}"


def test_chatter_of_a_login_shell_is_not_output(
    start_server: Callable[..., SshServer], connect_to: Callable[..., SshTransport], tmp_path: Path
) -> None:
    noise = "echo Welcome; printf 'no newline, \\036ctl-begin 0 '; echo warning >&2"
    force = wrapper(tmp_path, f'{noise}\nsh -c "$SSH_ORIGINAL_COMMAND"\necho Goodbye')
    server = start_server(extra=[force])
    transport = connect_to(server.config_block(), server.alias)
    done = transport.run(["cat"], stdin=b"data\0", timeout=30)
    assert (done.code, done.stdout) == (0, b"data\0")
    process = transport.start(["echo", "hello"])
    assert process.wait(timeout=30) == 0
    assert b"Welcome" in process.chatter


def test_a_login_shell_that_runs_nothing_is_explained(
    start_server: Callable[..., SshServer], connect_to: Callable[..., SshTransport], tmp_path: Path
) -> None:
    server = start_server(extra=[wrapper(tmp_path, "echo 'This account is currently not available.'; exit 1")])
    with pytest.raises(RemoteFailed) as failure:
        connect_to(server.config_block(), server.alias).run(["true"], timeout=30)
    assert failure.value.code == "shell-unusable"
    assert "not available" in failure.value.why


def test_fabric_and_paramiko_are_loaded_only_to_connect() -> None:
    code = (
        "import sys, controller.transport.auto, controller.stages.push;"
        "print([name for name in ('fabric', 'paramiko', 'invoke', 'tenacity') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)
    assert done.stdout.strip() == b"[]"


def test_close_is_idempotent_and_the_next_command_connects_again(server: SshServer) -> None:
    transport = SshTransport(SshTarget(host=server.alias, ssh_config=str(server.ssh_config)))
    with transport:
        assert transport.run(["true"], timeout=30).code == 0
        transport.close()
        transport.close()
        assert transport.run(["true"], timeout=30).code == 0


def test_no_agent_is_forwarded(server: SshServer, connect_to: Callable[..., SshTransport]) -> None:
    transport = connect_to(server.config_block(extra=["ForwardAgent yes"]), server.alias)
    assert transport.run(["sh", "-c", 'printf %s "$SSH_AUTH_SOCK"'], timeout=30).stdout == b""


def test_quoting_agrees_with_the_shell(shared: SshTransport) -> None:
    """A command that itself contains a script, as callers write them."""
    inner = f"printf '%s' {shlex.quote(chr(39) + ' and ' + chr(34))}"
    assert shared.run(["sh", "-c", inner], timeout=30).stdout == b"' and \""


def test_arguments_reach_python_as_text(shared: SshTransport) -> None:
    words = ["Grüße", "日本語", "-x", ""]
    done = shared.run([sys.executable, "-c", PRINT_ARGS, *words], timeout=30)
    assert done.stdout.split(b"\0") == [word.encode() for word in words]
