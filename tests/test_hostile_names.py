"""Ten thousand hostile strings in the place of everything that others write: a host's or user's name, a path, a
playbook's value, a line of a data set, a foreign process's command, a line of a log.

They are never an option or a word of a shell, and on a screen they are text: no markup, no escape, nothing hidden.
The words of a command go over a real sshd, ten thousand of them too, in tests/transport/test_ssh_commands.py.
"""

from __future__ import annotations

import io
import shlex
import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from controller.core.errors import ConfigError, CtlError
from controller.core.runview import FindingView, RunView
from controller.core.values import SshWord
from controller.transport import sshconfig
from controller.transport.sshconfig import SshTarget, resolve, target_arguments
from controller.ui.board import Known
from controller.ui.clean import clean
from controller.ui.errors import print_error, print_problems
from controller.ui.stream import PlainView
from controller.ui.tables import print_clear_list, print_findings, print_hosts, print_intention, print_ps
from controller.ui.viewsink import ViewSink

BATCH = 100
"""Strings an example: making an example of its own for each would take most of the time."""

PIECES = st.sampled_from(
    [
        "$(touch x)", "`id`", ";rm -rf /", "|sh", "&", "'", '"', "\\", "\n", "\r", "--", "-oProxyCommand=x",
        "~", "*", "\x1b[2J", "\x1b]0;title\x07", "\x1b]52;c;cm0=\x1b\\", "\x9b31m", "\x1b(0", "\x1bP1q", "\x08\x08",
        "\x7f", "\0", "[red]", "[/]", "[bold", "[link=http://x]y[/link]", ":smile:", "[@click=app.quit()]", "\\[",
        "\u202e", "\u2066", "\u200b", "\ufeff", "\u2028", "\ud800", "日本", "é", "e\u0301", "🚀", " ",
        "a", "gpu1", "/tmp/x",
    ]
)  # fmt: skip
STRINGS = st.lists(
    st.one_of(st.lists(PIECES, min_size=1, max_size=4).map("".join), st.text(min_size=1, max_size=12)),
    min_size=BATCH,
    max_size=BATCH,
)
ten_thousand = settings(max_examples=10_000 // BATCH, deadline=None, suppress_health_check=list(HealthCheck))


@ten_thousand
@given(strings=STRINGS)
def test_a_name_is_refused_or_harmless(strings: list[str]) -> None:
    word = TypeAdapter(SshWord)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sshconfig, "_ssh_g", lambda _binary, _target: {})  # a process for each would take minutes
        for name in strings:
            try:
                assert shlex.quote(word.validate_python(name)) == name
                assert not name.startswith("-")
            except ValidationError:
                pass
            for target in (SshTarget(host=name), SshTarget(host="gpu1", user=name)):
                try:
                    resolve(target)
                except ConfigError:
                    continue
                arguments = target_arguments(target)
                assert arguments[-2] == "--"
                assert not name.startswith("-")
                assert not set(name) & set(" \t\r\n'\"`$;&<>|(){}\0\x1b")


def show_path(console: Console, name: str) -> None:
    output = {"path": name, "stale": "clear", "entries": 1, "bytes": 1}
    print_clear_list(console, name, [output], {name: {"examples": [{"path": name, "size": 1}]}})  # type: ignore[list-item]


def show_foreign_process(console: Console, name: str) -> None:
    finding = FindingView(level="fail", code="gpu-busy", what=name, why=name, fix=name)
    print_findings(console, name, [finding])


def show_run(console: Console, name: str) -> None:
    row = dict.fromkeys(("run_id", "name", "user", "state", "step"), name)
    print_ps(console, name, {"runs": [row], "leases": [{name: name}]})


def show_host(console: Console, name: str) -> None:
    print_hosts(console, [dict.fromkeys(("name", "address", "user", "python", "workdir"), name)])


def show_playbook(console: Console, name: str) -> None:
    print_intention(console, [{"title": name, "rows": [[name, name], [name, [name]]]}])


def show_data_line(console: Console, name: str) -> None:
    print_problems(
        [{"code": "data", "what": f"line 7 is no record: {name}", "why": name, "fix": name}], name, console
    )


def show_error(console: Console, name: str) -> None:
    print_error(CtlError(name, why=name, fix=name, code=name), console)


def show_log_line(console: Console, name: str) -> None:
    with PlainView(console.file, show_log=True) as view:  # type: ignore[arg-type] # a text file is what it needs
        sink = ViewSink(view, run=name, host=name, known=Known(title=name))
        sink.log(name.encode("utf-8", "surrogatepass") + b"\n")
        view.update(RunView(run=name, state="running"))


SCREENS: list[Callable[[Console, str], None]] = [
    show_path, show_foreign_process, show_run, show_host, show_playbook, show_data_line, show_error, show_log_line,
]  # fmt: skip


@ten_thousand
@given(strings=STRINGS)
def test_on_every_screen_it_is_text(strings: list[str]) -> None:
    for number, name in enumerate(strings):
        screen = io.StringIO()
        # No colours, so that every escape there is would be the string's own; wide, so that nothing is folded.
        console = Console(file=screen, force_terminal=True, color_system=None, width=2000, highlight=False)
        SCREENS[number % len(SCREENS)](console, name)
        shown = screen.getvalue()
        controls = {each for each in shown if unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp")} - {"\n"}
        assert (controls, set(shown) & set("\u202e\u2066\u200b\ufeff")) == (set(), set())
        assert squeezed(clean(name)) in squeezed(shown), "markup was taken for markup, or something is hidden"


def squeezed(text: str) -> str:
    return "".join(text.split())
