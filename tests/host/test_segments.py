"""The log's cap: a loss is declared on disk before it happens, and every reader says it in its place."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from support.hostrun import HostRun, wait_until

from controller.stages.mirror import Mirror, read_part
from remote_payload.host.framing import FrameReader
from remote_payload.host.layout import RunPaths
from remote_payload.host.pump import PIPE_BYTES, open_pipe, pump, write_within
from remote_payload.host.segments import DEFAULT_CAP_BYTES, LogFiles, Segments, cap_of, read_gaps, segment_number

LINE = "%07d " + "x" * 91  # 100 bytes with its newline
LOUD = f"for number in range({{count}}):\n    print({LINE!r} % number)\n"


@pytest.fixture
def files(tmp_path: Path) -> LogFiles:
    paths = RunPaths(str(tmp_path))
    os.close(open_pipe(paths))
    return LogFiles(paths)


def fill(files: LogFiles, segments: Segments, data: bytes) -> None:
    """Pump `data` through as a job would print it."""
    pipe = open_pipe(RunPaths(os.path.dirname(files.folder)))
    for start in range(0, len(data), 4096):
        os.write(pipe, data[start : start + 4096])
        Path(files.closed).touch()
        pump(files, segments)
    os.close(pipe)


def test_the_beginning_and_the_end_stay_and_the_middle_is_accounted_for_to_the_byte(files: LogFiles) -> None:
    data = b"".join(b"%08d" % number for number in range(12_500))  # 100 000 bytes
    segments = Segments(files, cap_bytes=8000)  # of 1000 bytes
    fill(files, segments, data)
    kept = {segment_number(path): Path(path).read_bytes() for path in files.segments()}
    gaps = {gap["segment"]: gap for gap in read_gaps(files)}

    assert sum(len(part) for part in kept.values()) <= 8000
    assert {1, 2} <= kept.keys()
    assert not kept.keys() & gaps.keys()
    assert sorted(kept.keys() | gaps.keys()) == list(range(1, max(kept) + 1))
    for number in kept.keys() | gaps.keys():
        original = data[(number - 1) * 1000 : number * 1000]
        if number in kept:
            assert kept[number] == original
        else:
            assert gaps[number]["bytes"] == len(original)
            assert gaps[number]["sha256"] == hashlib.sha256(original).hexdigest()


def test_a_pump_killed_between_record_and_deletion_finishes_the_deletion(files: LogFiles) -> None:
    segments = Segments(files, cap_bytes=8000)
    fill(files, segments, b"x" * 20_000)
    before = len(read_gaps(files))
    Path(files.path(read_gaps(files)[-1]["segment"])).write_bytes(b"x" * 1000)
    again = Segments(files, cap_bytes=8000)
    assert not {segment_number(path) for path in files.segments()} & {gap["segment"] for gap in read_gaps(files)}
    fill(files, again, b"y" * 1000)
    assert len(read_gaps(files)) - before <= 1


def test_the_cap_never_ends_the_job_and_the_result_tells_the_loss(host: HostRun) -> None:
    plan = host.plan(host.python(LOUD.format(count=40_000)), job={"limits": {"log_cap_bytes": 400_000}})
    paths = host.launch(plan)
    result = host.result(paths)
    assert result["end_reason"] == "succeeded"
    assert result["log_bytes"] + result["log_gap_bytes"] == 4_000_000
    log = host.log(paths)
    assert (len(log), hashlib.sha256(log).hexdigest()) == (result["log_bytes"], result["log_sha256"])
    assert len(log) <= 400_000
    assert log.startswith(b"0000000 x")
    assert log.endswith(b"0039999 " + b"x" * 91 + b"\n")
    notices = [event for event in host.events(paths, "pump") if event.get("code") == "log-gap"]
    assert len(notices) == len(read_gaps(LogFiles(paths)))


def test_without_a_cap_in_the_plan_the_default_holds(host: HostRun) -> None:
    plan = host.plan(host.python("print(1)"))
    paths = host.launch(plan)
    host.result(paths)
    assert cap_of(paths) == DEFAULT_CAP_BYTES


def test_a_mirror_that_came_late_says_what_is_missing_and_where(host: HostRun, tmp_path: Path) -> None:
    plan = host.plan(host.python(LOUD.format(count=20_000)), job={"limits": {"log_cap_bytes": 400_000}})
    paths = host.launch(plan)
    host.result(paths)
    mirror = Mirror(tmp_path / "mirror")
    mirror.folder.mkdir()
    first = Path(paths.log, "000001.log").read_bytes()
    gap = read_gaps(LogFiles(paths))[0]
    name = f"{gap['segment']:06d}.log"
    whole = b"".join(LINE.encode() % number + b"\n" for number in range(20_000))
    start = (gap["segment"] - 1) * len(first)
    (mirror.folder / "log").mkdir()
    (mirror.folder / "log" / name).write_bytes(whole[start : start + 1234])  # copied in part before it went

    code, stdout = host.call(
        "tail", {"run_id": plan["run_id"], "cursor": mirror.cursor(), "documents": {}, "follow": True}
    )
    assert code == 0
    order, end = [], {}
    for header, body in FrameReader().feed(stdout):
        if header["type"] == "append":
            mirror.append(header["path"], header["offset"], body)
            order.append(header["path"])
        end = header
    assert order.index("log/gaps.jsonl") < order.index("log/000001.log")
    assert mirror.differences(end["files"]) == []

    log = b"".join(block for part in mirror.log_parts() for block in read_part(part))
    assert log.startswith(first)
    assert log.count(b"[ctl: ") == len(read_gaps(LogFiles(paths)))
    assert f"[ctl: {gap['bytes'] - 1234:,} bytes of the log are missing here".encode() in log
    held = sum(path.stat().st_size for path in (mirror.folder / "log").glob("*.log"))
    assert held + sum(mirror.missing(gap) for gap in mirror.gaps().values()) == 2_000_000


def test_a_copy_made_in_time_is_no_loss_and_is_proved(files: LogFiles, tmp_path: Path) -> None:
    data = bytes(number % 251 for number in range(30_000))
    fill(files, Segments(files, cap_bytes=8000), data)
    mirror = Mirror(tmp_path / "mirror")
    (mirror.folder / "log").mkdir(parents=True)
    for number in range(1, 31):
        (mirror.folder / "log" / f"{number:06d}.log").write_bytes(data[(number - 1) * 1000 : number * 1000])
    (mirror.folder / "log" / "gaps.jsonl").write_bytes(Path(files.gaps).read_bytes())
    assert b"".join(block for part in mirror.log_parts() for block in read_part(part)) == data
    assert mirror.differences({}) == []
    given_up = mirror.folder / "log" / f"{read_gaps(files)[0]['segment']:06d}.log"
    given_up.write_bytes(given_up.read_bytes()[:-1] + b"?")
    assert "differs from what the host gave up" in mirror.differences({})[0]


def test_a_reader_that_follows_over_the_cap_gets_marker_and_end(host: HostRun) -> None:
    """The segments vanish under the reader's hands; what it was not given is told by the gaps."""
    plan = host.plan(host.python(LOUD.format(count=200_000)), job={"limits": {"log_cap_bytes": 200_000}})
    paths = host.launch(plan)
    wait_until(lambda: read_gaps(LogFiles(paths)), "the first gap")
    code, stdout = host.call("tail", {"run_id": plan["run_id"], "cursor": {}, "documents": {}, "follow": True})
    assert code == 0
    frames = list(FrameReader().feed(stdout))
    assert frames[-1][0]["type"] == "end"
    assert frames[-1][0]["state"] == "finished"
    assert host.read(paths.result)["end_reason"] == "succeeded"


def test_a_pipe_that_nobody_empties_holds_up_nobody(files: LogFiles) -> None:
    pipe = open_pipe(RunPaths(os.path.dirname(files.folder)))
    text = b"the stacks\n" * 1000
    assert write_within(pipe, text, 60.0)
    assert os.read(pipe, len(text)) == text
    assert not write_within(pipe, b"x" * (2 * PIPE_BYTES), 0.1)
    os.close(pipe)
