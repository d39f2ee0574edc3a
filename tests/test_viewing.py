"""Several runs watched side by side: what one of the watches meets is never lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from controller import viewing
from controller.core.errors import CtlError
from controller.ui.board import Known
from controller.ui.stream import SilentView


@dataclass
class Watched:
    """As much of a run as `attach` needs; its watch raises `error`."""

    id: str
    error: Exception | None = None
    host: str = "box"
    folder: None = None
    summary: None = None
    state: str = "running"

    def add_sink(self, sink: Any) -> None: ...

    def close(self) -> None: ...

    def watch(self) -> None:
        if self.error is not None:
            raise self.error


def test_no_error_follows_the_last_frame_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards each run is a line: what made one fail stays in the view, also where both names are of one run."""
    chosen: list[bool] = []

    def choose(*_: Any, error_follows: bool = True) -> SilentView:
        chosen.append(error_follows)
        return SilentView()

    monkeypatch.setattr(viewing, "known_of", lambda _: Known())
    monkeypatch.setattr(viewing, "choose_view", choose)
    monkeypatch.setattr(viewing, "load_workspace", lambda: None)
    monkeypatch.setattr(viewing.lookup, "open_run", lambda *_, **__: Watched("a", CtlError("refused")))
    viewing.attach_several(["a", "a"], None, progress="auto", as_json=True)
    assert chosen == [False]


def test_an_unexpected_error_comes_out_where_errors_are_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(viewing, "known_of", lambda _: Known())
    failures: dict[str, CtlError] = {}
    refused = CtlError("refused")
    runs: list[Any] = [Watched("a"), Watched("b", refused), Watched("c", OSError("the disk is gone"))]
    with pytest.raises(OSError, match="the disk is gone"):
        viewing._watch_all(runs, SilentView(), failures)
    assert failures == {"b": refused}
