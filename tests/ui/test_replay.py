"""Recorded run folders played through the view of a live run: whole screens, times of then, and plain lines.

After a wanted change of the screens: `CTL_WRITE_GOLDEN=1 pytest tests/ui/test_replay.py`, then read the difference.
The recordings themselves are written anew by `python -m support.recorded` in tests/.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.recorded import START, finished, healthy, view_of

from controller.core.errors import UsageError
from controller.known import gpu_ranks, known_of, usual_ending, usual_seconds
from controller.logreader import LogReader
from controller.replay import Player, load, parse_at
from controller.runfolder import RunFolder
from controller.ui.formats import duration_text, left_text
from controller.ui.glyphs import UNICODE
from controller.ui.live import LiveView
from controller.ui.plainlines import progress_line
from controller.ui.progresslines import progress_lines

RUNS = Path(__file__).parents[1] / "data" / "runs"
GOLDEN = Path(__file__).parent / "golden"
SIZES = [(60, 20), (80, 24), (100, 30), (200, 60)]
SCREENS = {
    "running": ("running", "end"), "loading": ("running", "330"), "failed": ("failed", "end"),
    "finished": ("finished", "end"),
}  # fmt: skip
"""Screen: recording, and the moment of it."""


def folder(name: str) -> RunFolder:
    return RunFolder(RUNS / name)


def played(name: str, at: str = "end") -> tuple[LiveView, Player]:
    """Return the view at a place in a recording, with nothing drawn."""
    recording = load(folder(name))
    player = Player(recording, speed=0.0, at_s=0.0)
    view = LiveView(io.StringIO(), clock=player.now, replay=True)
    # As where the same job has run once before.
    known = replace(known_of(folder(name), live=False), usual=usual_seconds([RUNS / "finished"]))
    sink = view.sink(run=recording.run, host=recording.host, known=known)
    player.play(sink, left=lambda: False, until=recording.begin + parse_at(at, recording.seconds))
    return view, player


def text(view: LiveView, width: int = 100, height: int = 30) -> str:
    return "\n".join(line.plain.rstrip() for line in view.frame(width, height, keys=True))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", SCREENS)
def test_recorded_screens(name: str, size: tuple[int, int]) -> None:
    view, _ = played(*SCREENS[name])
    shown = text(view, *size)
    path = GOLDEN / f"{name}-{size[0]}x{size[1]}.txt"
    if os.environ.get("CTL_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown + "\n", encoding="utf-8")
    assert shown.splitlines() == path.read_text(encoding="utf-8").splitlines()


def test_the_load_is_replayed_with_its_bar_spread_over_its_time() -> None:
    """The bar's states have no times of their own in the log."""
    early, late = text(played("running", "180")[0]), text(played("running", "500")[0])
    assert "13 of 62 shards" in early
    assert "55 of 62 shards" in late
    assert "load 7 min 0" in late


def test_lines_of_the_log_come_when_their_prefix_says_in_any_time_zone() -> None:
    recording = load(folder("running"))
    (capture,) = [moment for moment in recording.moments if b"capture: boundaries" in moment.log]
    assert capture.t == pytest.approx(START + 585, abs=1)  # the host's clock is in UTC-8


def test_times_that_the_host_noted_count_more_than_prefixes(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    shutil.copytree(RUNS / "failed" / "events", tmp_path / "events")
    lines = [b"INFO 11-29 10:00:00 [a.py:1] first\n", b"bar 1%\rbar 2%\r", b"bar 3%\nlast\n"]
    (tmp_path / "log" / "000001.log").write_bytes(b"".join(lines))
    notes = [(0, 71.0), (len(lines[0]), 74.0), (len(lines[0] + lines[1]), 78.0)]
    (tmp_path / "log" / "times.jsonl").write_text(
        "".join(json.dumps({"segment": 1, "offset": offset, "t": START + t}) + "\n" for offset, t in notes)
    )
    logged = [(moment.t - START, moment.log) for moment in load(RunFolder(tmp_path)).moments if moment.log]
    assert logged == [(71.0, lines[0]), (74.0, lines[1]), (78.0, lines[2])]


def test_what_came_after_the_end_is_left_out(tmp_path: Path) -> None:
    shutil.copytree(RUNS / "finished", tmp_path / "run")
    late = (RUNS / "finished" / "events" / "controller.jsonl").read_text().splitlines()[-1]
    with open(tmp_path / "run" / "events" / "controller.jsonl", "a", encoding="utf-8") as file:
        file.write(
            late.replace('"seq": 13', '"seq": 14').replace(f'"t": {START + 774.6}', f'"t": {START + 90_000}') + "\n"
        )
    assert load(RunFolder(tmp_path / "run")).seconds == pytest.approx(774.6)


def test_a_player_keeps_the_pace_halts_and_leaves() -> None:
    recording = load(folder("failed"))
    player = Player(recording, speed=1000.0, at_s=80.0)
    seen: list[float] = []

    class Sink:
        def event(self, event: object) -> None:
            seen.append(player.now())

        def log(self, data: bytes) -> None:
            seen.append(player.now())

    player.play(Sink(), left=lambda: False)
    assert len(seen) == len(recording.moments)
    assert seen == sorted(seen)
    assert all(now >= moment.t for now, moment in zip(seen, recording.moments, strict=True))
    assert player.now() <= recording.moments[-1].t
    halted = Player(recording, speed=1.0, at_s=0.0)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:
            halted.toggle()

    halted.play(Sink(), left=lambda: len(waits) > 3, wait=wait)
    assert len(waits) == 4
    assert halted.now() < recording.begin + 60


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("90", 90), ("90s", 90), ("2m", 120), ("1h", 1000), ("40%", 400), ("end", 1000), ("1.5m", 90)],
)
def test_places_in_a_run(given: str, seconds: float) -> None:
    assert parse_at(given, 1000.0) == seconds


def test_a_place_that_is_none_is_a_usage_error() -> None:
    for given in ("soon", "-5", "5 parsecs", "", "200%"):
        with pytest.raises(UsageError, match="no place in a run"):
            parse_at(given, 1000.0)


def test_usual_times_are_medians_of_earlier_runs() -> None:
    usual = usual_seconds([RUNS / "finished", RUNS / "running", RUNS / "failed"])
    assert usual["load"] == pytest.approx(511.8)
    assert usual["verify"] == pytest.approx(43.8)
    assert "capture" in usual


def test_what_follows_the_last_sample_is_learnt_from_earlier_extractions() -> None:
    assert usual_ending([RUNS / "running"]) is None, "it has not ended"
    ending = usual_ending([RUNS / "finished", RUNS / "running"])
    assert ending is not None
    view = view_of(healthy().events)
    assert left_text(view).endswith(" to last sample")
    known = replace(view, ending_s=ending)
    assert view.eta_s is not None
    assert left_text(known) == f"{duration_text(view.eta_s + ending)} left"


@pytest.mark.parametrize(
    ("until_s", "ending_s", "left"),
    [
        (722.0, 50.0, "50 s left"),  # all samples are done, and still wait for their files
        (722.0, None, ""),
        (726.0, 50.0, "47 s left"),  # the engine has ended, 2.6 s after the last file
        (770.0, 50.0, "3.5 s left"),  # the files are proved
        (770.0, 20.2, "26 s over the usual"),
        (770.0, None, ""),
        (775.0, 50.0, ""),  # it has ended
    ],
)
def test_the_time_left_goes_on_until_the_run_has_ended(until_s: float, ending_s: float | None, left: str) -> None:
    events = [event for event in finished().events if event.t <= START + until_s]
    view = replace(view_of(events), ending_s=ending_s)
    assert left_text(view) == left
    (bar, *_) = progress_lines(view, 120, UNICODE, roomy=True)
    assert bar.plain.endswith(f"1,000/1,000  100 %   {left} " if left else "100 % ")
    assert progress_line(view).endswith(f", {left}" if left else "2 skipped")


@pytest.mark.parametrize(
    ("gpus", "visible", "size", "ranks"),
    [
        (2, None, 2, {0: 0, 1: 1}),
        (8, None, 2, {0: 0, 1: 1}),
        (2, "5,3", 2, {5: 0, 3: 1}),
        (2, "GPU-aaaa,GPU-bbbb", 2, {}),
        (0, None, 2, {}),
        (2, None, None, {0: 0, 1: 1}),
    ],
)
def test_ranks_go_to_visible_gpus_in_their_order(
    gpus: int, visible: str | None, size: int | None, ranks: dict[int, int]
) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    engine = {} if size is None else {"tensor_parallel_size": size}
    plan = {"host": {"gpus": gpus}, "job": {"env": env}, "extract": {"engine": engine}}
    assert gpu_ranks(plan) == ranks  # type: ignore[arg-type]


def test_without_a_terminal_a_replay_is_plain_lines_of_then(tmp_path: Path) -> None:
    def ctl(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "controller", "replay", *words],
            capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TZ": "UTC", "HOME": str(tmp_path)},
        )  # fmt: skip

    done = ctl(str(RUNS / "finished"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == "00:53:20  connect started"
    assert "01:03:05  job: load done in 8 min 32 s: Kimi-K2.5, TP=8" in lines
    log = LogReader(folder("finished"))
    printed = [line.rstrip(b"\n").decode() for _, line in (*log.lines(), *log.unfinished()) if b"\r" not in line]
    assert printed
    assert {line.partition("  | ")[2] for line in lines if "  | " in line} >= set(printed)
    assert lines[-2].startswith("01:06:14  run 20261129-184150-a1b2c3 succeeded")
    missing = ctl("no-such-run")
    assert missing.returncode == 2
    (tmp_path / "empty" / "events").mkdir(parents=True)
    empty = ctl(str(tmp_path / "empty"))
    assert empty.returncode == 2
    assert "holds no events to replay" in empty.stderr


def test_the_pictures_of_the_documentation_are_what_the_recordings_give() -> None:
    done = subprocess.run(
        [sys.executable, "tools/make_captures.py", "--check"], cwd=RUNS.parents[2], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": "."}, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
