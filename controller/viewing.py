"""Runs on the screen beyond the one that was just launched: several at once, and recorded ones."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

from controller import lookup
from controller import replay as recorded
from controller.core.endings import exit_code
from controller.core.errors import CtlError, ExitCode
from controller.diagnosis import view_of
from controller.known import RunControls, known_of
from controller.run import Run
from controller.runfolder import find_run
from controller.ui.plainlines import standing_line
from controller.ui.stream import View, animates, choose_view, keyboard
from controller.ui.terminal import ask_yes_no, err_console, out_console
from controller.workspace import load_workspace


def attach_several(run_ids: Sequence[str], host: str | None, *, progress: str, as_json: bool) -> ExitCode:
    """Watch runs side by side until all have ended; a Ctrl-C detaches from all.

    The exit code is 8 if one still runs, else that of the first that is no success.
    """
    workspace = load_workspace()
    view = choose_view(sys.stderr, os.environ, progress, error_follows=False)
    failures: dict[str, CtlError] = {}
    with ExitStack() as stack:
        runs: list[Run] = []
        for run_id in run_ids:
            run = lookup.open_run(workspace, run_id, host, ask=ask_yes_no, pause=view.paused)
            stack.callback(run.close)
            if run.id not in (each.id for each in runs):
                runs.append(run)
        with view:
            _watch_all(runs, view, failures)
    for run in runs:
        if run.id in failures and not as_json:
            err_console().print(f"{run.id} on {run.host}: {failures[run.id].what}", markup=False, soft_wrap=True)
    codes = [_code(run, failures.get(run.id)) for run in runs]
    if as_json:
        rows = [run.summary or {"run_id": run.id, "hosts": [run.host], "state": run.state} for run in runs]
        print(json.dumps({"schema_version": 1, "runs": rows}, indent=1, default=str))
    else:
        for run in runs:
            view_now = replace(view_of(run.folder), state=run.state)
            out_console().print(f"{run.id}  {run.host}  {standing_line(view_now)}", markup=False, soft_wrap=True)
        _tell_going_on([run for run, code in zip(runs, codes, strict=True) if code is ExitCode.DETACHED])
    if ExitCode.DETACHED in codes:
        return ExitCode.DETACHED
    return next((code for code in codes if code is not ExitCode.OK), ExitCode.OK)


def _tell_going_on(runs: Sequence[Run]) -> None:
    if runs:
        words = "1 run goes on" if len(runs) == 1 else f"{len(runs)} runs go on"
        again = f"detached: {words}; watch again with `ctl attach {' '.join(run.id for run in runs)}`"
        err_console().print(again, markup=False, soft_wrap=True)


def _watch_all(runs: Sequence[Run], view: View, failures: dict[str, CtlError]) -> None:
    """Watch each run in a thread of its own, until all have ended or Ctrl-C detaches.

    Raises the first unexpected error of a watch, once none is under way any more.
    """
    unexpected: list[Exception] = []

    def watch(run: Run) -> None:
        try:
            run.watch()
        except CtlError as error:
            failures[run.id] = error
        except Exception as error:  # noqa: BLE001 - raised below, in the thread that maps errors to exit codes
            unexpected.append(error)

    threads = []
    for run in runs:
        sink = view.sink(run=run.id, host=run.host, known=known_of(run.folder))
        sink.control(RunControls(run))
        run.add_sink(sink)
        threads.append(threading.Thread(target=watch, args=(run,), name=f"ctl-watch-{run.id}", daemon=True))
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(timeout=0.5)  # in steps: a signal is heard between them
    except KeyboardInterrupt:
        for run in runs:
            run.detach()
        for thread in threads:
            thread.join(timeout=5.0)
    if unexpected:
        raise unexpected[0]


def _code(run: Run, failure: CtlError | None) -> ExitCode:
    if failure is not None:
        return ExitCode(failure.exit_code)
    return exit_code(run.error()) if run.ended else ExitCode.DETACHED


def replay(run_id: str | None, *, speed: float, at: str, progress: str) -> ExitCode:
    """Play a recorded run through the view of `progress`; without a dashboard at once, with the times of then."""
    folder = recorded.open_folder(partial(find_run, load_workspace().runs_dir), run_id)
    recording = recorded.load(folder)
    at_s = recorded.parse_at(at, recording.seconds)
    live = progress == "auto" and animates(sys.stderr, os.environ)
    player = recorded.Player(recording, speed=speed if live else 0.0, at_s=at_s)
    known = known_of(folder, live=False)
    if live:
        from controller.ui.live import LiveView  # heavy, and only wanted on a terminal

        dashboard = LiveView(
            sys.stderr, keyboard=keyboard(), clock=player.now, replay=True, on_playback=player.toggle
        )
        with suppress(KeyboardInterrupt), dashboard:  # Ctrl-C leaves a recording as q does
            sink = dashboard.sink(run=recording.run, host=recording.host, known=known)
            player.play(sink, left=lambda: dashboard.left)
        return ExitCode.OK
    with choose_view(sys.stderr, os.environ, progress, show_log=True, clock=player.now, error_follows=False) as view:
        player.play(view.sink(run=recording.run, host=recording.host, known=known), left=lambda: False)
    return ExitCode.OK
