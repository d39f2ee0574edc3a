"""What a person is asked before a launch: about what is deleted, moved or claimed, and about nothing else."""

from __future__ import annotations

from typing import Any, cast

import pytest

from controller.core.errors import Interrupted
from controller.pipeline import outputs_to_confirm
from controller.ui import terminal
from controller.ui.terminal import loss_question
from remote_payload.host.protocol import Plan

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
