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

    def add_sink(self, sink: Any) -> None: ...

    def watch(self) -> None:
        if self.error is not None:
            raise self.error


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
