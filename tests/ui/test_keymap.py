"""What keys do, one after the other, without a terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from controller.ui.keymap import BINDINGS, Action, Pane, Situation, UiState, press
from controller.ui.keys import decode

AT = Situation(total=500, page=10, ranks=8, failed=True, trace_end=30)


def after(keys: str, at: Situation = AT, state: UiState | None = None) -> UiState:
    state = state or UiState()
    for key in keys.split():
        state, _ = press(state, key, at)
    return state


def action(keys: str, at: Situation = AT) -> Action | None:
    *before, last = keys.split()
    return press(after(" ".join(before), at), last, at)[1]


def test_the_log_is_paused_scrolled_and_followed_again() -> None:
    assert after("s").frozen == 500
    assert after("s s").frozen is None
    scrolled = after("up up pageup")
    assert (scrolled.frozen, scrolled.skip) == (500, 12)
    assert after("up pagedown").skip == 0
    assert after("home").skip == 500
    assert after("home end") == UiState()
    assert after("pagedown") == UiState()  # there is nothing below the newest line


def test_a_filter_is_typed_corrected_kept_and_cleared() -> None:
    typed = after("/ O O x backspace M")
    assert (typed.needle, typed.typing) == ("OOM", True)
    kept = after("enter", state=typed)
    assert (kept.needle, kept.typing) == ("OOM", False)
    assert after("esc", state=kept).needle == ""
    assert after("esc", state=typed) == UiState()
    # Letters that mean something else belong to the filter while it is typed.
    assert press(after("/"), "x", AT) == (replace(UiState(), typing=True, needle="x"), None)


def test_ranks_are_chosen_by_number_or_in_turn() -> None:
    assert after("3").rank == 3
    assert after("3 a").rank is None
    assert after("r r").rank == 1
    assert after("7 r").rank is None  # after the last come all
    assert after("3 esc").rank is None


def test_panes_open_and_close() -> None:
    for key, pane in (("f", Pane.LOG), ("t", Pane.TRACE), ("?", Pane.HELP)):
        assert after(key).pane is pane
        assert after(f"{key} esc").pane is Pane.BOARD
        assert after(f"{key} q").pane is Pane.BOARD
    assert after("f f").pane is Pane.BOARD
    assert after("t pagedown pagedown pagedown pagedown").trace_top == 30
    assert after("t end up").trace_top == 29
    nothing = after("t", replace(AT, failed=False))
    assert (nothing.pane, nothing.said) == (Pane.BOARD, "nothing has failed")


def test_a_stop_is_confirmed_by_y_alone() -> None:
    assert action("x") is None
    assert after("x").confirming
    assert action("x y") is Action.STOP
    for key in ("n", "enter", "esc", "x", "d", "q"):
        assert action(f"x {key}") is None
        assert after(f"x {key}").said == "not stopped"


def test_detach_and_leave_fit_the_situation() -> None:
    assert action("d") is Action.DETACH
    assert action("q") is Action.DETACH
    before = replace(AT, live=False)
    assert action("d", before) is None
    assert action("x", before) is None
    assert "not under way yet" in after("d", before).said
    ended = replace(AT, ended=True)
    assert action("q", ended) is Action.CLOSE
    assert action("x", ended) is None
    assert not after("x", ended).confirming
    replayed = replace(AT, replay=True, live=False)
    assert action("q", replayed) is Action.CLOSE
    assert action("p", replayed) is Action.PLAYBACK
    assert action("p") is None


def test_several_runs_are_opened_and_left_again() -> None:
    at = replace(AT, runs=3)
    table = UiState(opened=None)
    assert after("down down down", at, table).chosen == 2
    assert after("down enter", at, table).opened == 1
    assert after("3", at, table).opened == 2
    assert after("9", at, table).opened is None
    back = after("down enter esc", at, table)
    assert (back.opened, back.chosen) == (None, 1)
    assert press(table, "d", at)[1] is Action.DETACH
    assert press(table, "x", at) == (table, None)  # which one?


@pytest.mark.parametrize(
    ("raw", "keys"),
    [
        ("a?/", ["a", "?", "/"]),
        ("\x1b[A\x1b[5~\x1bOB", ["up", "pageup", "down"]),
        ("\x1b", ["esc"]),
        ("\x1bq", ["esc", "q"]),
        ("\x1b[99;5Xy\x1b[200~z", ["y", "z"]),  # unknown sequences are no letters
        ("\r\n\x7f\x08\t", ["enter", "enter", "backspace", "backspace", "tab"]),
        ("\x01\x02ü", ["ü"]),
        ("\x1b[", []),
    ],
)
def test_bytes_become_keys(raw: str, keys: list[str]) -> None:
    assert list(decode(raw)) == keys


def test_every_binding_of_the_help_does_something() -> None:
    at = replace(AT, replay=True)
    for keys, _, _ in BINDINGS:
        for key in keys.replace("pgup", "pageup").replace("pgdn", "pagedown").split():
            situation = at if key == "p" else AT
            state = after("up up t down" if key in ("down", "up", "home", "pageup", "pagedown", "end", "esc") else "")
            assert press(state, key, situation) != (state, None), key


def test_the_documentation_has_every_key() -> None:
    text = (Path(__file__).parents[2] / "docs" / "dashboard.md").read_text(encoding="utf-8")
    for keys, does, _ in BINDINGS:
        named = " ".join(f"`{key}`" for key in keys.split())
        assert f"| {named} | {does} |" in text
