"""The generated command line, run by every login shell that is installed here, and the scanner of its output."""

from __future__ import annotations

import itertools
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.transport.bootstrap import MAX_LINE_BYTES, OutputScanner, command_line

NONCE = "0123456789abcdef"

SHELLS = ("sh", "dash", "bash", "zsh", "fish", "tcsh", "csh", "ksh", "mksh")

AWKWARD = [
    "",
    "-n",
    "--",
    "two words",
    "it's",
    '"double"',
    "line\nbreak\n",
    "tab\tand\rreturn",
    "$HOME `id` $(id) ${x}",
    "back\\slash\\n",
    "!history !!",
    "*?[a-z]~{a,b}",
    "Grüße 日本語 🙂",
    "a=b;c&d|e>f<g#h",
    "%s%d",
]

PRINT_ARGS = "import sys,os; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"


def run_with(shell: str, line: str, stdin: bytes = b"") -> tuple[OutputScanner, bytes, bytes]:
    done = subprocess.run([shell, "-c", line], input=stdin, capture_output=True, timeout=30, check=False)
    scanner = OutputScanner(NONCE)
    return scanner, scanner.feed(done.stdout), done.stderr


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    path = shutil.which(request.param)
    if path is None:
        pytest.skip(f"{request.param} is not installed")
    return path


def test_every_login_shell_passes_arguments_unchanged(shell: str) -> None:
    scanner, output, stderr = run_with(shell, command_line(["python3", "-c", PRINT_ARGS, *AWKWARD], None, NONCE))
    assert output.split(b"\0") == [word.encode() for word in AWKWARD], stderr
    assert scanner.code == 0


def test_every_login_shell_leaves_stdin_to_the_command(shell: str) -> None:
    data = b"echo this is data, not a script\n\0\xff"
    scanner, output, _ = run_with(shell, command_line(["cat"], None, NONCE), data)
    assert (output, scanner.code) == (data, 0)


def test_every_login_shell_passes_the_environment(shell: str) -> None:
    env = {"CTL_A": "it's a $value\nwith a line break", "CTL_B": ""}
    line = command_line(
        ["python3", "-c", "import os; print(repr((os.environ['CTL_A'], os.environ['CTL_B'])))"], env, NONCE
    )
    assert run_with(shell, line)[1].decode().strip() == repr(tuple(env.values()))


def test_the_constant_is_safe_in_every_shell() -> None:
    line = command_line(["true"], None, NONCE)
    assert not set("!\\\n") & set(line)
    assert line.count("'") == 2
    assert "=" not in line


@pytest.mark.parametrize("name", ["exit", "if", "A=b", "cd", "exec", "/no/such/program"])
def test_program_names_are_programs(name: str) -> None:
    """A built-in, keyword or assignment must not be taken for the program, or end the script before its trailer."""
    scanner, _, _ = run_with("sh", command_line([name, "3"], None, NONCE))
    assert scanner.code == (0 if shutil.which(name) else 127)


def test_a_program_killed_by_a_signal_reports_128_plus_its_number() -> None:
    scanner, _, _ = run_with("sh", command_line(["sh", "-c", "kill -9 $$"], None, NONCE))
    assert scanner.code == 128 + 9


@pytest.mark.parametrize("argv", [[], [""], ["-c", "x"], ["echo", "nul\0byte"], ["echo", "x" * MAX_LINE_BYTES]])
def test_what_no_command_line_can_carry_is_refused(argv: list[str]) -> None:
    with pytest.raises(ValueError, match=r"program|NUL|limit"):
        command_line(argv, None, NONCE)


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=B", "A;id", "Ä"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="environment variable"):
        command_line(["true"], {name: "x"}, NONCE)


BEGIN, END = b"\x1ectl-begin %b\n" % NONCE.encode(), b"\x1ectl-end %b 7\n" % NONCE.encode()


@given(
    chatter=st.binary(max_size=50),
    output=st.lists(
        st.one_of(st.binary(max_size=20), st.sampled_from([b"\x1e", END[:9], END[:-1] + b"x", BEGIN])), max_size=6
    ).map(b"".join),
    after=st.binary(max_size=20),
    cuts=st.lists(st.integers(0, 300), max_size=12),
)
def test_the_scanner_finds_the_output_however_it_is_cut(
    chatter: bytes, output: bytes, after: bytes, cuts: list[int]
) -> None:
    if END[:-2] in output:  # the nonce cannot be guessed, so real output never holds the trailer
        output = output.replace(END[:-2], b"")
    stream = chatter + BEGIN + output + END + after
    scanner = OutputScanner(NONCE)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    found = b"".join(scanner.feed(stream[a:b]) for a, b in itertools.pairwise(edges))
    assert found == output
    assert scanner.code == 7
    assert scanner.chatter == chatter + after


def test_the_scanner_holds_back_nothing_that_cannot_be_the_trailer() -> None:
    """A follower must get a whole frame or line when it was sent, not with the next one."""
    scanner = OutputScanner(NONCE)
    scanner.feed(BEGIN)
    assert scanner.feed(b"a line\n") == b"a line\n"
    assert scanner.feed(b"ends like a trailer \x1ectl-begin") == b"ends like a trailer \x1ectl-begin"
    assert scanner.code is None


def test_a_stream_without_trailer_has_no_code() -> None:
    scanner = OutputScanner(NONCE)
    scanner.feed(BEGIN + b"x" + END[:-1])
    assert scanner.code is None


def test_chatter_is_bounded() -> None:
    scanner = OutputScanner(NONCE)
    for _ in range(40):
        assert scanner.feed(b"noise " * 1000) == b""
    assert 65536 <= len(scanner.chatter) < 65536 + 100
    assert not scanner.begun
