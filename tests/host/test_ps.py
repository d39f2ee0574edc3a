"""What ps says of runs: damaged folders, none at all, and one that waits for room."""

from __future__ import annotations

from pathlib import Path

from support.hostrun import HostRun

from remote_payload.host.journal import EventWriter

SLEEPER = "open('child', 'w').write('1'); import time; time.sleep(300)"


def test_ps_shows_damaged_folders_beside_the_others(host: HostRun) -> None:
    good = host.plan(host.python("pass"))
    host.run(good)
    for damage in ("not json", "[]", '{"state": "running"}', '{"state": "dancing", "supervisor": {}}'):
        bad = host.plan(host.python("pass"))
        Path(host.paths(bad).folder).mkdir()
        Path(host.paths(bad).run).write_text(damage)
        row = host.state(bad)
        assert row["state"] == "lost"
        assert "cannot be read" in row["evidence"]
        Path(host.paths(bad).run).unlink()
    row = host.state(good)
    assert (row["state"], row["end_reason"], row["name"]) == ("finished", "succeeded", "test")
    assert row["started"]
    assert row["ended"]


def test_ps_of_a_new_workdir_is_empty(host: HostRun) -> None:
    assert host.ask("ps", {})["runs"] == []


def test_a_run_that_waits_for_room_is_listed_as_paused(host: HostRun) -> None:
    plan = host.plan(host.python(SLEEPER))
    paths = host.launch(plan)
    host.wait_file("child")
    assert host.state(plan)["paused"] is None
    driver = EventWriter(paths.events, "driver", plan["run_id"], "box")
    driver.emit("notice", level="warn", code="disk-low", text="no room")
    for number in range(400):  # more than is looked at
        driver.emit("progress", done=number, paused="disk-low")
    row = host.state(plan)
    assert (row["state"], row["paused"]) == ("running", "disk-low")
    driver.emit("progress", done=400)
    driver.emit("notice", level="info", code="disk-freed", text="room")
    assert host.state(plan)["paused"] is None
    driver.emit("progress", done=400, paused="disk-full")
    host.ask("stop", {"run_id": plan["run_id"], "grace_s": 0.3, "force": False})
    assert host.state(plan)["paused"] is None, "it has ended"
