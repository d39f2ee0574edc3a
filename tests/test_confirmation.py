"""What a person is asked before a launch: about what is deleted, moved or claimed, and about nothing else."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller import commands
from controller.core.errors import Interrupted, RefusedError
from controller.pipeline import outputs_to_confirm
from controller.ui import terminal
from controller.ui.terminal import loss_question
from remote_payload.host.protocol import OwnedOutput, Plan

OUTPUT = {"path": "/data/out", "root": "/data", "adopt": False, "digest": "d", "entries": 2, "bytes": 413}


def asked(stale: str, **listing: Any) -> bool:
    plan = cast("Plan", {"job": {"outputs": [{**OUTPUT, "stale": stale}]}})
    shown = {"stale": stale, "foreign": False, "partial": 0, "spent": False, **listing}
    return bool(outputs_to_confirm(plan, {"/data/out": shown}))


@pytest.mark.parametrize(
    ("stale", "listing", "question"),
    [
        ("clear", {}, True),
        ("clear", {"spent": True}, True),  # the folder's files go, and that was asked for
        ("quarantine", {}, True),
        ("resume", {}, False),
        ("resume", {"partial": 1}, True),
        ("resume", {"foreign": True}, True),
        ("resume", {"spent": True, "partial": 1}, False),
        ("fail", {"spent": True}, False),
    ],
)
def test_a_question_is_asked_only_where_something_is_lost(
    stale: str, listing: dict[str, Any], question: bool
) -> None:
    assert asked(stale, **listing) is question


def test_nothing_known_of_a_folder_is_a_reason_to_ask() -> None:
    plan = cast("Plan", {"job": {"outputs": [{**OUTPUT, "stale": "resume"}]}})
    assert outputs_to_confirm(plan, {})


@pytest.mark.parametrize(
    ("stale", "listing", "question"),
    [
        (
            "clear",
            {"marker": {"run_id": "R1"}},
            "delete 2 entries of /data/out on host gpu1, written by run R1 (`--stale quarantine` would keep them)?",
        ),
        ("quarantine", {}, "move aside 2 entries of /data/out on host gpu1, which no run of ctl wrote?"),
        (
            "resume",
            {"marker": {"run_id": "R1"}, "partial": 1},
            "go on with 2 entries of /data/out on host gpu1, written by run R1, deleting 1 half-written?",
        ),
    ],
)
def test_the_question_names_the_host_and_the_run_that_wrote(
    stale: str, listing: dict[str, Any], question: str
) -> None:
    assert loss_question("gpu1", {**OUTPUT, "stale": stale}, listing) == question


@pytest.mark.parametrize(
    ("stale", "fate"), [("clear", "left alone"), ("quarantine", "moved with them"), ("resume", "left alone")]
)
def test_the_question_says_what_becomes_of_what_is_not_ctls(stale: str, fate: str) -> None:
    listing = {"marker": {"run_id": "R1"}, "not_ours": {"entries": 1, "bytes": 9, "names": ["notes.txt"]}}
    question = loss_question("gpu1", {**OUTPUT, "stale": stale}, listing)
    assert question.endswith(f"; 1 entry that is not ctl's: notes.txt, {fate}?")


def test_a_command_without_stale_offers_none() -> None:
    question = loss_question("gpu1", {**OUTPUT, "stale": "clear"}, {"marker": {"run_id": "R1"}}, keepable=False)
    assert question == "delete 2 entries of /data/out on host gpu1, written by run R1?"


def test_ctrl_c_at_a_question_says_what_it_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "can_ask", lambda: True)
    monkeypatch.setattr(terminal, "ask_yes_no", interrupted)
    with pytest.raises(Interrupted, match="nothing was deleted"):
        terminal.require_yes("delete?", unattended="", fix="", declined="nothing was deleted")


@pytest.mark.parametrize(("answers", "sees"), [(False, True), (True, False), (False, False)])
def test_who_cannot_see_a_question_and_answer_it_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, answers: bool, sees: bool
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: answers))
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: sees))
    assert not terminal.ask_yes_no("delete?")
    with pytest.raises(RefusedError, match="nobody is there") as refused:
        terminal.require_yes(
            "delete?", unattended="nobody is there", fix="add `--yes`", declined="nothing was deleted"
        )
    assert (refused.value.code, refused.value.fix) == ("confirmation-needed", "add `--yes`")


def test_no_verb_has_a_way_of_its_own_to_ask() -> None:
    """One that decides by itself whether somebody is there may take nobody for a yes, as `ctl stop` did."""
    asking = {"can_ask", "ask_yes_no", "input", "getpass"}
    root = Path(terminal.__file__).parents[1]
    callers = {
        (str(path.relative_to(root)), node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id)
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)
    }
    # What ssh needs, a password say, is asked in transport: without it nothing is done at all.
    found = {(path, name) for path, name in callers if name in asking and not path.startswith("transport/")}
    assert found == {
        ("ui/terminal.py", "can_ask"), ("ui/terminal.py", "ask_yes_no"), ("ui/terminal.py", "input"),
        ("commands.py", "can_ask"), ("commands.py", "ask_yes_no"),  # with or without --yes, see tests/e2e
        ("provisioning.py", "can_ask"),  # whether a plan is shown under -qq
        ("checkup.py", "ask_yes_no"),  # about a host's key
        ("hosting.py", "can_ask"), ("settingup.py", "input"),  # four values, none of which may be missing
        ("provisioning.py", "getpass"),  # a token that --token-stdin announced
    }  # fmt: skip


@pytest.mark.parametrize("yes", [True, False])
def test_silence_ends_where_somebody_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], yes: bool
) -> None:
    """`-qq` leaves out the list of what goes; who has to agree to it sees it all the same."""
    for module in (terminal, commands):
        monkeypatch.setattr(module, "can_ask", lambda: True)
    monkeypatch.setattr("builtins.input", lambda: "y")
    output = cast("OwnedOutput", {**OUTPUT, "stale": "clear"})
    with terminal.silence():
        assert commands._confirm_clear("gpu1", [output], {}, yes=yes)
        said = capsys.readouterr().err
    terminal.err_console().print("after")
    assert capsys.readouterr().err == "after\n"
    assert ("/data/out" in said, "delete 2 entries" in said) == (not yes, not yes)
    assert yes == (said == "")
