"""Watch loses no byte and repeats none, wherever the connection or the controller breaks."""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path

import pytest
from support.hostrun import wait_until
from support.stubhost import StubHost

from controller.core.errors import ConnectionFailed, RemoteFailed
from controller.core.events import Event
from controller.stages import launch, watch
from controller.stages.mirror import Mirror, MirrorError

RUN = "20260101-000000-abcd02"
JOB = ["/bin/sh", "-c", 'i=0; while [ $i -lt 3000 ]; do echo "line $i of the job"; i=$((i+1)); done']
EXPECTED = b"".join(b"line %d of the job\n" % number for number in range(3000))


@pytest.fixture
def host(tmp_path: Path) -> StubHost:
    return StubHost(tmp_path / "host")


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    (tmp_path / "local" / "events").mkdir(parents=True)
    return Mirror(tmp_path / "local")


class Collector:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.log = b""
        self.told: list[tuple[float, str]] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        self.told.append((event.t, event.type))

    def on_log(self, data: bytes, t: float) -> None:
        self.log += data
        self.told.append((t, data.decode()))


def follow(host: StubHost, mirror: Mirror, into: Collector, *, run: str = RUN) -> watch.WatchOutcome:
    return watch.run(host.context(), run, mirror, on_event=into.on_event, on_log=into.on_log, patience_s=30)


def test_mirrors_a_run_to_its_end(host: StubHost, mirror: Mirror) -> None:
    launch.run(host.context(), host.plan(RUN, *JOB), {})
    seen = Collector()
    outcome = follow(host, mirror, seen)
    assert (outcome.ended, outcome.state, outcome.end_reason) == (True, "finished", "succeeded")
    assert seen.log == EXPECTED
    assert (mirror.folder / "result.json").is_file()
    assert [event.seq for event in seen.events if event.writer == "supervisor"] == sorted(
        {event.seq for event in seen.events if event.writer == "supervisor"}
    )


def test_what_was_missed_is_told_in_the_order_in_which_it_happened(host: StubHost, mirror: Mirror) -> None:
    """Of the files of all writers, of which the host sends one after the other."""
    write = (
        "import json, os, time\nfile = open(os.environ['CTL_RUN_DIR'] + '/events/driver.jsonl', 'a')\n"
        "event = {'wire': 1, 'seq': 1, 'run': 'r', 'host': 'stub', 'writer': 'driver', 't': time.time()}\n"
        "print(json.dumps({**event, 'type': 'phase', 'name': 'load', 'status': 'started'}), file=file)"
    )
    launch.run(host.context(), host.plan(RUN, sys.executable, "-c", write), {})
    wait_until(lambda: (host.workdir / "runs" / RUN / "result.json").exists(), "it has ended")
    seen = Collector()
    assert follow(host, mirror, seen).ended
    assert [(event.writer, event.type) for event in seen.events if event.type in ("phase", "end")] == [
        ("driver", "phase"), ("supervisor", "end"),
    ]  # fmt: skip
    assert [event.t for event in seen.events] == sorted(event.t for event in seen.events)


@pytest.mark.parametrize("look", ["first", "under way", "again"])
def test_the_log_and_the_events_are_told_as_they_happened(host: StubHost, mirror: Mirror, look: str) -> None:
    """Though the host sends all that it has of the log first."""
    launch.run(host.context(), host.plan(RUN, "/bin/sh", "-c", "echo hi; sleep 1.1; echo ho; sleep 1.1; exit 3"), {})
    if look != "under way":
        wait_until(lambda: (host.workdir / "runs" / RUN / "result.json").exists(), "it has ended")
    seen = Collector()
    assert follow(host, mirror, seen).ended
    if look == "again":
        seen = Collector()
        assert follow(host, mirror, seen).ended, "from what the first has copied"
    times, names = [t for t, _ in seen.told], [name for _, name in seen.told]
    assert seen.log == b"hi\nho\n"
    begun = names.index("step")
    ended = len(names) - 1 - names[::-1].index("step")
    assert begun < names.index("hi\n") < names.index("ho\n") < ended
    if look != "under way":  # where one look may find what was written while the one before it was at work
        assert times == sorted(times)


@pytest.mark.parametrize("seed", range(6))
def test_any_cut_goes_on_at_the_byte(host: StubHost, mirror: Mirror, seed: int) -> None:
    launch.run(host.context(), host.plan(RUN, *JOB), {})
    chance = random.Random(seed)
    host.transport.cuts = [chance.randrange(0, 30_000) for _ in range(4)]
    seen = Collector()
    outcome = follow(host, mirror, seen)
    assert outcome.ended
    assert outcome.reconnects == 4
    assert seen.log == EXPECTED


def test_a_new_controller_continues_the_files_of_a_killed_one(host: StubHost, mirror: Mirror) -> None:
    launch.run(host.context(), host.plan(RUN, *JOB), {})
    follow(host, mirror, Collector())
    log = mirror.folder / "log" / "000001.log"
    log.write_bytes(log.read_bytes()[:12_345])  # as a SIGKILL leaves it: cut off anywhere
    events = mirror.folder / "events" / "supervisor.jsonl"
    whole = events.read_bytes()
    events.write_bytes(whole[: len(whole) // 2])
    seen = Collector()
    assert follow(host, mirror, seen).ended
    assert seen.log == EXPECTED
    assert events.read_bytes() == whole
    assert len([event for event in seen.events if event.writer == "supervisor"]) == whole.count(b"\n")


@pytest.mark.parametrize("damage", ["changed", "longer", "empty", "other bytes"])
@pytest.mark.parametrize("name", ["log/000001.log", "events/supervisor.jsonl"])
def test_a_file_of_the_copy_that_was_damaged_is_named_and_fetched_anew(
    host: StubHost, mirror: Mirror, name: str, damage: str
) -> None:
    launch.run(host.context(), host.plan(RUN, *JOB), {})
    follow(host, mirror, Collector())
    path = mirror.folder / name
    whole = path.read_bytes()
    bad = {
        "changed": whole.replace(b"0", b"1", 1), "longer": whole + b"x\n", "empty": b"",
        "other bytes": bytes(len(whole)),
    }[damage]  # fmt: skip
    path.write_bytes(bad)
    host.events.clear()
    seen = Collector()
    assert follow(host, mirror, seen).ended
    assert path.read_bytes() == whole
    told = [fields["text"] for kind, fields in host.events if kind == "notice" and fields["code"] == "copy-damaged"]
    if damage == "empty":  # a copy that was cut off goes on at its byte
        assert not told
        return
    assert len(told) == 1
    assert f"{path} is damaged" in told[0]
    (aside,) = (mirror.folder / "damaged").iterdir()
    assert aside.read_bytes() == bad
    assert len(seen.log) == len(bad if name.startswith("log") else EXPECTED)  # shown once, as it was


def test_a_copy_that_differs_from_the_host_for_good_is_an_error(
    host: StubHost, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch.run(host.context(), host.plan(RUN, *JOB), {})
    monkeypatch.setattr(Mirror, "append", lambda *_: None)  # a disk that keeps nothing
    with pytest.raises(MirrorError, match="differs") as caught:
        follow(host, mirror, Collector())
    assert "000001.log" in caught.value.why


@pytest.mark.parametrize("name", ["plan.json", "result.json"])
def test_a_folder_in_the_place_of_a_document_makes_way(host: StubHost, mirror: Mirror, name: str) -> None:
    launch.run(host.context(), host.plan(RUN, "/bin/true"), {})
    (mirror.folder / name).mkdir()
    assert follow(host, mirror, Collector()).ended
    assert (mirror.folder / name).is_file()


def test_detaching_ends_the_watch_and_not_the_run(host: StubHost, mirror: Mirror) -> None:
    launch.run(host.context(), host.plan(RUN, "/bin/sh", "-c", "sleep 3; echo still here"), {})
    cancel = threading.Event()
    threading.Timer(0.5, cancel.set).start()
    outcome = watch.run(
        host.context(cancel), RUN, mirror, on_event=lambda _: None, on_log=lambda *_: None, patience_s=30
    )
    assert not outcome.ended
    seen = Collector()
    assert follow(host, mirror, seen).end_reason == "succeeded"
    assert seen.log == b"still here\n"


def test_patience_ends_without_a_word_about_the_run(host: StubHost, mirror: Mirror) -> None:
    launch.run(host.context(), host.plan(RUN, "/bin/true"), {})
    host.transport.unreachable = 1000
    outcome = watch.run(host.context(), RUN, mirror, on_event=lambda _: None, on_log=lambda *_: None, patience_s=1)
    assert (outcome.ended, outcome.state) == (False, "unknown")
    assert [fields["status"] for kind, fields in host.events if kind == "contact"][-1] == "lost"


def test_a_look_that_did_not_bring_all_is_no_look(host: StubHost, mirror: Mirror) -> None:
    launch.run(host.context(), host.plan(RUN, "/bin/true"), {})
    host.transport.unreachable = 1000
    with pytest.raises(ConnectionFailed, match="unreachable"):
        watch.run(
            host.context(), RUN, mirror, on_event=lambda _: None, on_log=lambda _: None, patience_s=0, follow=False
        )


def test_what_went_over_the_log_cap_is_told_in_its_place(host: StubHost, mirror: Mirror) -> None:
    plan = host.plan(RUN, "/usr/bin/seq", "-w", "1", "100000", log_cap_bytes=80_000)
    launch.run(host.context(), plan, {})
    seen = Collector()
    assert follow(host, mirror, seen).end_reason == "succeeded"
    lost = sum(mirror.missing(gap) for gap in mirror.gaps().values())
    markers = [line for line in seen.log.split(b"\n") if line.startswith(b"[ctl: ")]
    assert sum(int(line.split()[1].replace(b",", b"")) for line in markers) == lost
    kept = b"".join(line for line in seen.log.splitlines(True) if not line.startswith(b"[ctl: "))
    assert len(kept) == 700_000 - lost + len(markers)  # each marker begins on a line of its own
    assert kept.startswith(b"000001\n000002\n")
    assert kept.endswith(b"099999\n100000\n")
    again = Collector()  # a replay of the copy shows the same
    assert follow(host, mirror, again).ended
    assert again.log == seen.log


def test_an_unknown_run_is_an_error_not_a_retry(host: StubHost, mirror: Mirror) -> None:
    with pytest.raises(RemoteFailed):
        follow(host, mirror, Collector(), run="20260101-000000-ffffff")


def test_the_mirror_refuses_names_outside_the_run_folder(mirror: Mirror) -> None:
    for name in ("../x", "log/../../x", "/etc/passwd", "log/.hidden", "events/controller.jsonl", "other/x"):
        with pytest.raises(MirrorError, match="unexpected"):
            mirror.append(name, 0, b"x")
    with pytest.raises(MirrorError, match="unexpected"):
        mirror.replace("../plan.json", b"{}")


def test_the_mirror_refuses_a_gap(mirror: Mirror) -> None:
    mirror.append("log/000001.log", 0, b"abc")
    with pytest.raises(MirrorError, match="continues at byte 7"):
        mirror.append("log/000001.log", 7, b"x")
