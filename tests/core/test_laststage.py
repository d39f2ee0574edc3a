"""The stage that a run ended in, from its events alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.recorded import Script, failing, finished, healthy, started, view_of

from controller.core.laststage import LastStage, last_stage
from controller.core.runview import RunView
from controller.ui.formats import last_words, view_end_text


def stopped_in_the_load(*, supervisor: bool = True) -> Script:
    """Asked to stop 192 s into the load; the processes took the grace of 30 s to end."""
    add = started()
    if supervisor:
        add(265.2, "supervisor", "step", name="extract", status="failed", text="stopped on request", seconds=198.0)
        add(265.2, "supervisor", "state", state="stopping", text="stopped on request")
    else:
        add(265.2, "stop", "state", state="stopping", text="stopped without its supervisor, which is dead")
    add(
        296.0, "supervisor" if supervisor else "stop", "end", end_reason="stopped", exit_code=None, signal=None,
        message="stopped on request", gpus_clean=True,
    )  # fmt: skip
    return add


@pytest.mark.parametrize("supervisor", [True, False])
def test_the_time_in_a_stage_ends_where_the_stop_was_asked_for(supervisor: bool) -> None:
    view = view_of(stopped_in_the_load(supervisor=supervisor).events)
    stage = last_stage(view)
    assert stage is not None
    assert (stage.step, stage.phase) == ("extract", "load")
    assert stage.seconds == pytest.approx(192.0)
    assert view_end_text(view) == "stopped on request while loading the model, after 3 min 12 s"


def test_a_phase_that_failed_took_as_long_as_it_says() -> None:
    assert last_stage(view_of(failing().events)) == LastStage(step="extract", phase="load", seconds=17.5)


def test_a_success_ended_in_no_stage_and_a_run_that_had_begun_none_neither() -> None:
    assert last_stage(view_of(finished().events)) is None
    assert last_stage(RunView()) is None
    assert view_end_text(view_of(finished().events)) == "succeeded"


def test_an_end_between_two_phases_is_one_of_the_step() -> None:
    add = started()
    add(260.0, "driver", "phase", name="load", status="done", text="", seconds=186.8)
    add(261.2, "supervisor", "step", name="extract", status="failed", text="", seconds=194.0)
    add(262.0, "supervisor", "end", end_reason="job-failed", message="", gpus_clean=True)
    stage = last_stage(view_of(add.events))
    assert stage is not None
    assert (stage.step, stage.phase, stage.seconds) == ("extract", None, 194.0)


def test_an_end_whose_words_name_the_stage_does_not_name_it_twice() -> None:
    add = started()
    add(260.0, "driver", "phase", name="load", status="done", text="", seconds=186.8)
    add(300.0, "supervisor", "step", name="extract", status="done", text="", seconds=232.0)
    add(301.0, "supervisor", "step", name="verify", status="started", text="")
    add(320.0, "supervisor", "step", name="verify", status="failed", text="", seconds=19.0)
    add(321.0, "supervisor", "end", end_reason="verify-failed", message="", gpus_clean=True)
    view = view_of(add.events)
    assert last_stage(view) == LastStage(step="verify", phase=None, seconds=19.0)
    assert view_end_text(view) == "ended, but its output is not what was promised"


def test_a_lost_run_was_last_heard_of_in_a_stage() -> None:
    view = replace(view_of(healthy().events), state="lost")
    assert last_words(view) == (
        "its last sign of life came while capturing hidden states, after 56 s; 412 of 1,000 samples (41 %)"
    )
    assert last_words(RunView(state="lost")) == ""
