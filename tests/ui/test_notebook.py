"""What a notebook's cell shows of a run as it goes on: pure renderings of recorded events."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from support import recorded
from support.reported import HOSTILE

from controller.core.events import Event
from controller.ui.notebook_live import NotebookView, in_notebook, live_html


def html(script: recorded.Script) -> str:
    return live_html(recorded.view_of(script.events), recorded.log_lines(), recorded.START + 700)


def test_a_run_under_way_shows_stages_gpus_progress_and_the_log() -> None:
    page = html(recorded.healthy())
    for part in ("load 8 min 32 s", "gpu 0", "gpu 7", "412 of 1,000", 'value="0.4120"', "2 skipped",
                 "first sample: [712, 4, 7168]"):  # fmt: skip
        assert part in page
    assert page.count("<progress") == 1


def test_a_failed_run_shows_the_whole_traceback_and_no_stale_gpus() -> None:
    page = html(recorded.failing())
    assert "llama_4_scaling" in page
    assert "model_loader.load_model(" in page
    assert "same on ranks" in page or "rank 3" in page
    assert "gpu 0" not in page


def test_a_lost_connection_is_no_word_about_the_run() -> None:
    script = recorded.healthy()
    script(700.0, "controller", "contact", status="reconnecting", text="no route")
    page = html(script)
    assert "reconnecting: no route; the run goes on without us" in page


def test_nothing_of_a_host_is_markup() -> None:
    script = recorded.healthy()
    script(701.0, "driver", "phase", name=HOSTILE, status="started", text=HOSTILE)
    script(702.0, "driver", "notice", level="warn", code=HOSTILE, text=HOSTILE)
    script(703.0, "controller", "contact", status="lost", text=HOSTILE)
    page = live_html(recorded.view_of(script.events), recorded.log_lines(HOSTILE.encode() + b"\n"), 0.0)
    assert "<script" not in page
    assert "<img" not in page
    assert not {"\x1b", "\x07", "\u202e"} & set(page)


def test_updates_come_at_a_bounded_rate_and_the_last_state_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython's display is replaced: outside a kernel it would print each update anew."""
    shown: list[str] = []
    handle = SimpleNamespace(update=lambda view: shown.append(view._repr_mimebundle_()["text/html"]))
    monkeypatch.setattr("IPython.display.display", lambda view, display_id: handle)
    now = [0.0]
    with NotebookView("r", "h", clock=lambda: now[0]) as view:
        for number in range(1000):
            now[0] = number / 100
            view.log(b"line %d\n" % number)
        assert 15 <= len(shown) <= 20
        data = {"end_reason": "succeeded", "message": "", "gpus_clean": True}
        view.event(Event(type="end", run="r", host="h", writer="supervisor", seq=0, t=9.0, data=data))
    assert "succeeded" in shown[-1]


def test_only_a_kernel_is_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1)))  # type: ignore[arg-type]
    assert in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))  # type: ignore[arg-type]
    assert not in_notebook()
