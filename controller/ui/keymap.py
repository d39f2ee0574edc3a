"""What each key does to what is shown. Pure: a state and a key give the next state, and sometimes an action."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Pane(StrEnum):
    """What the frame shows beside the header."""

    BOARD = "board"
    LOG = "log"
    TRACE = "trace"
    HELP = "help"


class Action(StrEnum):
    """What a key asks of somebody else than the screen."""

    DETACH = "detach"
    STOP = "stop"
    CLOSE = "close"
    """Leave a view whose run has ended, or a replay."""
    PLAYBACK = "playback"
    """Halt or go on with a replay."""


BINDINGS = (
    ("s", "pause or follow the log", "log"),
    ("up down pgup pgdn home end", "scroll the log or the traceback", "log"),
    ("/", "filter the log; enter keeps it, esc clears it", "log"),
    ("r", "next rank; 0-9 one rank, a all of them", "log"),
    ("w", "wrap long lines", "log"),
    ("f", "log in full screen, and back", "log"),
    ("t", "whole traceback of a failure, and back", "view"),
    ("?", "this help", "view"),
    ("esc", "back: one step towards the plain dashboard", "view"),
    ("d", "detach: the run goes on", "run"),
    ("x", "stop the run, after a question", "run"),
    ("p", "halt or go on with a replay", "replay"),
    ("q", "back; on the plain dashboard: detach, or leave a replay or an ended run", "run"),
)
"""Keys, what they do, and what they belong to: the help is made from it, and docs/dashboard.md says the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What decides which keys mean something."""

    runs: int = 1
    live: bool = True
    """A run under way that a person may detach from and stop; else a replay, or one not yet launched."""
    ended: bool = False
    failed: bool = False
    """There is a traceback to show."""
    replay: bool = False
    total: int = 0
    """Log lines so far, kept or not."""
    page: int = 10
    """Lines that a page key scrolls."""
    trace_end: int = 0
    """The furthest that the traceback can be scrolled, in lines."""
    ranks: int = 0
    """Ranks that were heard of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UiState:
    """What a person has chosen to see.

    `opened` is the run whose board is shown, None the table of several; `chosen` the row under the cursor.
    `frozen` is the log's line number at which it was paused, `skip` how many lines it was scrolled back from there.
    """

    opened: int | None = 0
    chosen: int = 0
    pane: Pane = Pane.BOARD
    frozen: int | None = None
    skip: int = 0
    trace_top: int = 0
    needle: str = ""
    typing: bool = False
    rank: int | None = None
    wrap: bool = False
    confirming: bool = False
    said: str = ""
    """The answer to the last key, until the next one."""


def press(state: UiState, key: str, at: Situation) -> tuple[UiState, Action | None]:
    """Return the state after a key, and what it asks for."""
    state = replace(state, said="")
    if state.confirming:
        agreed = key in ("y", "Y")
        said = "stopping: TERM, grace, KILL, then proof" if agreed else "not stopped"
        return replace(state, confirming=False, said=said), Action.STOP if agreed else None
    if state.typing:
        return _type(state, key), None
    if state.opened is None:
        return _choose(state, key, at)
    if state.pane is Pane.HELP:
        return replace(state, pane=Pane.BOARD), None
    if key in ("esc", "q"):
        return _back(state, key, at)
    if state.pane is Pane.TRACE and (moved := _scroll_trace(state, key, at)) is not None:
        return moved, None
    if (moved := _scroll_log(state, key, at)) is not None:
        return moved, None
    if (changed := _toggle(state, key, at)) is not None:
        return changed, None
    return _ask(state, key, at)


def _choose(state: UiState, key: str, at: Situation) -> tuple[UiState, Action | None]:
    """Keys on the table of several runs."""
    if key in ("up", "k", "down", "j"):
        step = -1 if key in ("up", "k") else 1
        return replace(state, chosen=min(at.runs - 1, max(0, state.chosen + step))), None
    if key in ("enter", "right"):
        return replace(state, opened=state.chosen), None
    if key.isdecimal() and 1 <= int(key) <= at.runs:
        return replace(state, opened=int(key) - 1, chosen=int(key) - 1), None
    if key in ("d", "q", "esc"):
        return state, Action.CLOSE if at.ended or at.replay else (Action.DETACH if key != "esc" else None)
    return state, None


def _back(state: UiState, key: str, at: Situation) -> tuple[UiState, Action | None]:
    if state.pane is not Pane.BOARD:
        return replace(state, pane=Pane.BOARD), None
    if key == "esc" and (state.needle or state.rank is not None):
        return replace(state, needle="", rank=None), None
    if key == "esc" and state.frozen is not None:
        return replace(state, frozen=None, skip=0), None
    if at.runs > 1:
        return replace(state, opened=None), None
    if key == "esc":
        return state, None
    if at.ended or at.replay:
        return state, Action.CLOSE
    return (state, Action.DETACH) if at.live else (replace(state, said="not under way yet: Ctrl-C gives up"), None)


def _type(state: UiState, key: str) -> UiState:
    """Keys while a filter is typed; it works from the first letter on."""
    if key == "enter":
        return replace(state, typing=False)
    if key == "esc":
        return replace(state, typing=False, needle="")
    if key == "backspace":
        return replace(state, needle=state.needle[:-1])
    return replace(state, needle=state.needle + key, skip=0) if len(key) == 1 else state


def _scroll_log(state: UiState, key: str, at: Situation) -> UiState | None:
    if key == "s":
        following = state.frozen is None
        return replace(state, frozen=at.total if following else None, skip=0)
    if key in ("end", "G"):
        return replace(state, frozen=None, skip=0)
    steps = {"up": 1, "k": 1, "down": -1, "j": -1, "pageup": at.page, "pagedown": -at.page, "home": at.total,
             "g": at.total}  # fmt: skip
    if key not in steps:
        return None
    if state.frozen is None and steps[key] < 0:
        return state
    frozen = at.total if state.frozen is None else state.frozen
    return replace(state, frozen=frozen, skip=max(0, min(frozen, state.skip + steps[key])))


def _scroll_trace(state: UiState, key: str, at: Situation) -> UiState | None:
    steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -at.page, "pagedown": at.page}
    if key in ("home", "g"):
        return replace(state, trace_top=0)
    if key in ("end", "G"):
        return replace(state, trace_top=at.trace_end)
    if key in steps:
        return replace(state, trace_top=max(0, min(at.trace_end, state.trace_top + steps[key])))
    return None


def _toggle(state: UiState, key: str, at: Situation) -> UiState | None:
    if key == "/":
        return replace(state, typing=True, needle="", skip=0)
    if key == "w":
        return replace(state, wrap=not state.wrap)
    if key == "f":
        return replace(state, pane=Pane.BOARD if state.pane is Pane.LOG else Pane.LOG)
    if key == "t":
        if not at.failed:
            return replace(state, said="nothing has failed")
        return replace(state, pane=Pane.BOARD if state.pane is Pane.TRACE else Pane.TRACE, trace_top=0)
    if key in ("?", "h"):
        return replace(state, pane=Pane.HELP)
    if key == "r":
        following = 0 if state.rank is None else state.rank + 1
        return replace(state, rank=following if following < at.ranks else None, skip=0)
    if key == "a":
        return replace(state, rank=None, skip=0)
    if key.isdecimal():
        return replace(state, rank=int(key), skip=0)
    return None


def _ask(state: UiState, key: str, at: Situation) -> tuple[UiState, Action | None]:
    if key == "p" and at.replay:
        return state, Action.PLAYBACK
    if key not in ("d", "x"):
        return state, None
    if at.ended or at.replay:
        return replace(state, said="the run has ended" if at.ended else "this is a replay"), None
    if not at.live:
        return replace(state, said="not under way yet: Ctrl-C gives up"), None
    return (replace(state, confirming=True), None) if key == "x" else (state, Action.DETACH)
