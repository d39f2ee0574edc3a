"""Tail and pump: every byte once, whatever dies in between."""

from __future__ import annotations

import hashlib
import io
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.hostrun import HostRun, wait_until

from remote_payload.host.children import MAIN
from remote_payload.host.framing import FrameReader
from remote_payload.host.layout import RunPaths
from remote_payload.host.members import snapshot
from remote_payload.host.pump import PumpKeeper, open_pipe, pump
from remote_payload.host.segments import LogFiles, Segments
from remote_payload.host.tail import main as tail_main

LINES = "import sys\nfor number in range({count}):\n    print('%06d' % number + 'x' * 93)\n"


def tail(host: HostRun, plan: dict[str, Any], cursor: dict[str, int], follow: bool = True, **more: Any) -> Any:
    request = {
        "workdir": str(host.workdir),
        "run_id": plan["run_id"],
        "cursor": cursor,
        "documents": {},
        "follow": follow,
        "times": True,
        "interval_s": 0.05,
    }
    return host.popen("tail", {**request, **more})


def mirror(frames: list[tuple[dict[str, Any], bytes]], start: dict[str, bytes]) -> dict[str, bytes]:
    """Apply frames as the controller does; an append anywhere but at the end is an error."""
    copies = dict(start)
    for header, body in frames:
        if header["type"] == "append":
            copy = copies.get(header["path"], b"")
            assert header["offset"] == len(copy)
            assert len(body) <= 1 << 20
            copies[header["path"]] = copy + body
        elif header["type"] == "document":
            copies[header["path"]] = body
    return copies


def on_disk(paths: RunPaths) -> dict[str, bytes]:
    folder = Path(paths.folder)
    found = [path for name in ("log", "events", "ledger") for path in (folder / name).glob("*.*l*")]
    return {str(p.relative_to(folder)): p.read_bytes() for p in found if p.suffix in (".log", ".jsonl")}


def pump_pids(run_id: str) -> list[int]:
    found = []
    for pid in snapshot():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if MAIN.encode() in command and b"pump" in command and f"CTL_HELPER={run_id}".encode() in environ:
            found.append(pid)
    return found


def test_following_a_run_gives_its_files_its_documents_and_its_end(host: HostRun) -> None:
    plan = host.plan(host.python(LINES.format(count=20000) + "import time; time.sleep(1.5)"))
    paths = host.launch(plan)
    stdout, _ = tail(host, plan, {}).communicate(timeout=60)
    reader = FrameReader()
    frames = list(reader.feed(stdout))
    copies = mirror(frames, {})

    assert reader.pending == 0
    for relpath, data in on_disk(paths).items():
        assert copies[relpath] == data, relpath
    for name in ("plan.json", "run.json", "summary.json", "result.json"):
        assert copies[name] == (Path(paths.folder) / name).read_bytes()
    header, _ = frames[-1]
    assert (header["type"], header["state"]) == ("end", "finished")
    log = copies["log/000001.log"]
    assert header["files"]["log/000001.log"] == {"size": len(log), "sha256": hashlib.sha256(log).hexdigest()}
    statuses = [h for h, _ in frames if h["type"] == "status"]
    assert statuses[-1]["end_reason"] == "succeeded"
    assert any(h["state"] == "running" and h["step"] == "job" for h in statuses)


def test_any_cursor_continues_exactly_there(host: HostRun) -> None:
    plan = host.plan(host.python(LINES.format(count=20000)))
    paths = host.launch(plan)
    host.result(paths)
    whole = on_disk(paths)
    chance = random.Random(5)
    for _ in range(4):
        have = {name: data[: chance.randrange(len(data) + 1)] for name, data in whole.items()}
        known = {"plan.json": hashlib.sha256(Path(paths.plan).read_bytes()).hexdigest()}
        process = tail(host, plan, {n: len(d) for n, d in have.items()}, documents=known)
        frames = list(FrameReader().feed(process.communicate(timeout=60)[0]))
        copies = mirror(frames, have)
        assert {name: copies[name] for name in whole} == whole
        assert not any(header.get("path") == "plan.json" for header, _ in frames)


def test_without_follow_it_sends_what_is_there_and_ends(host: HostRun) -> None:
    plan = host.plan(host.python("print('here', flush=True); import time; time.sleep(120)"))
    paths = host.launch(plan)
    wait_until(lambda: host.log(paths), "the job has printed")
    stdout, _ = tail(host, plan, {}, follow=False).communicate(timeout=60)
    frames = list(FrameReader().feed(stdout))
    assert mirror(frames, {})["log/000001.log"] == b"here\n"
    assert (frames[-1][0]["type"], frames[-1][0]["state"]) == ("end", "running")


def test_a_segment_given_up_after_it_was_listed_is_told_before_the_next(host: HostRun) -> None:
    plan = host.plan(host.python("pass"))
    paths = host.launch(plan)
    host.result(paths)
    files = LogFiles(paths)
    for number in (1, 2, 3):
        Path(files.path(number)).write_bytes(b"%d\n" % number)

    class Reader(io.BytesIO):
        """While the first segment is sent, the pump gives up the second."""

        def write(self, data: Any) -> int:
            if data == b"1\n":
                Path(files.gaps).write_text('{"segment": 2, "bytes": 2, "sha256": "00"}\n')
                os.unlink(files.path(2))
            return super().write(data)

    out = Reader()
    request = {"workdir": str(host.workdir), "run_id": plan["run_id"], "cursor": {}, "documents": {}, "follow": False}
    assert tail_main(request, b"", out) == 0
    sent = [header["path"] for header, _ in FrameReader().feed(out.getvalue()) if header["type"] == "append"]
    assert [name for name in sent if name.startswith("log/")] == [
        "log/000001.log",
        "log/gaps.jsonl",
        "log/000003.log",
    ]


def test_a_slow_reader_delays_nobody_and_a_gone_reader_ends_it(host: HostRun) -> None:
    plan = host.plan(host.python(LINES.format(count=30000) + "print('done'); import time; time.sleep(120)"))
    paths = host.launch(plan)
    process = tail(host, plan, {})
    assert process.stdout is not None
    process.stdout.read(10)
    wait_until(lambda: host.log(paths).endswith(b"done\n"), "the job prints on although nobody reads")
    assert process.poll() is None
    process.stdout.close()
    assert process.wait(timeout=30) == 0


def test_a_heartbeat_comes_at_least_every_second(host: HostRun) -> None:
    plan = host.plan(host.python("import time; time.sleep(120)"))
    host.launch(plan)
    process = tail(host, plan, {})
    assert process.stdout is not None
    reader, beats = FrameReader(), []
    while len(beats) < 3:
        data = os.read(process.stdout.fileno(), 1 << 16)
        beats += [time.monotonic() for header, _ in reader.feed(data) if header["type"] == "status"]
    process.stdout.close()
    process.wait(timeout=30)
    assert beats[-1] - beats[0] >= 0.9, "they are a heartbeat, not a flood"


def test_killed_pumps_lose_and_repeat_no_byte(host: HostRun) -> None:
    count = 50000
    code = (
        "import sys, time\n"
        f"for number in range({count}):\n"
        "    print('%06d' % number + 'x' * 93)\n"
        "    if number % 1000 == 0: sys.stdout.flush(); time.sleep(0.05)\n"
    )
    plan = host.plan(host.python(code))
    paths = host.launch(plan)
    killed: set[int] = set()
    while not Path(paths.result).exists() and len(killed) < 2:
        for pid in pump_pids(plan["run_id"]):
            if pid not in killed and len(host.log(paths)) > 200_000 * (len(killed) + 1):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(0.01)
    result = host.result(paths)

    assert len(killed) == 2
    assert result["end_reason"] == "succeeded"
    expected = b"".join(b"%06d" % number + b"x" * 93 + b"\n" for number in range(count))
    assert host.log(paths) == expected
    assert result["log_sha256"] == hashlib.sha256(expected).hexdigest()


def test_tail_starts_a_pump_for_a_job_that_lost_supervisor_and_pump(host: HostRun) -> None:
    code = (
        "import time; print('before', flush=True); open('up', 'w').write('1')\n"
        "while True:\n    print('after', flush=True); time.sleep(0.1)"
    )
    plan = host.plan(host.python(code))
    paths = host.launch(plan)
    host.wait_file("up")
    host.kill_supervisor(paths)
    for pid in wait_until(lambda: pump_pids(plan["run_id"]), "a pump runs"):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not pump_pids(plan["run_id"]), "the pump is dead")
    size = len(host.log(paths))

    tail(host, plan, {}, follow=False).communicate(timeout=60)
    wait_until(lambda: len(host.log(paths)) > size, "the log goes on")
    assert set(host.log(paths).splitlines()) <= {b"before", b"after"}


def test_no_second_pump_runs(host: HostRun) -> None:
    plan = host.plan(host.python("import time; time.sleep(120)"))
    paths = host.launch(plan)
    wait_until(lambda: PumpKeeper(str(host.workdir), plan["run_id"]).is_running(), "the pump runs")
    extra = host.popen("pump", {"workdir": str(host.workdir), "run_id": plan["run_id"]})
    assert extra.wait(timeout=30) == 0
    assert not PumpKeeper(str(host.workdir), plan["run_id"]).ensure()
    assert Path(paths.pipe).is_fifo()


@pytest.mark.parametrize("size", [0, 999, 1000, 2500, 5000])
def test_segments_are_rotated_at_their_size_and_never_empty_between(tmp_path: Path, size: int) -> None:
    paths = RunPaths(str(tmp_path))
    data = bytes(i % 251 for i in range(size))
    pipe = open_pipe(paths)
    if data:
        os.write(pipe, data)
    Path(LogFiles(paths).closed).touch()
    pump(LogFiles(paths), Segments(LogFiles(paths), 1 << 30, segment_bytes=1000))
    os.close(pipe)
    parts = [Path(path).read_bytes() for path in LogFiles(paths).segments()]
    assert b"".join(parts) == data
    assert all(len(part) == 1000 for part in parts[:-1])
    assert len(parts) <= size // 1000 + 1


def test_a_pump_ends_when_nobody_can_write_any_more(tmp_path: Path) -> None:
    paths = RunPaths(str(tmp_path))
    pipe = open_pipe(paths)
    os.write(pipe, b"last words")
    if os.fork() == 0:  # the writer: the pipe's only other end, closed by its death
        os._exit(0)
    os.wait()
    pid = os.fork()
    if pid == 0:
        os.close(pipe)
        try:
            pump(LogFiles(paths), Segments(LogFiles(paths), 1 << 30))
        finally:
            os._exit(0)
    wait_until(lambda: (tmp_path / "log" / "000001.log").exists(), "the pump has begun")
    wait_until(lambda: (tmp_path / "log" / "000001.log").read_bytes() == b"last words", "the bytes arrived")
    os.close(pipe)
    assert os.waitpid(pid, 0)[1] == 0
