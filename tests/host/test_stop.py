"""Stopping: through the supervisor, without it, and what ps says meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from support import fuse
from support.hostrun import HostRun, left_by_the_run, wait_until
from support.stopping import CHILD, READY, stop

from remote_payload.host import stop as stop_module
from remote_payload.host.codes import STOPPING
from remote_payload.host.framing import pack_frame
from remote_payload.host.journal import EventWriter
from remote_payload.host.layout import Layout
from remote_payload.host.liveness import Liveness, identity, judge
from remote_payload.host.members import FOLDER_ENV, RUN_ENV, read_environ
from remote_payload.host.protocol import RunState
from remote_payload.host.ps import Standing
from remote_payload.host.start import hold_start_lock


def test_a_living_supervisor_stops_its_run(host: HostRun) -> None:
    plan = host.plan(host.python(CHILD), job={"limits": {"stop_grace_s": 300.0}})
    paths = host.launch(plan)
    host.wait_file("child")
    assert host.state(plan)["state"] == "running"
    answer = stop(host, plan, grace_s=0.5)

    assert (answer["state"], answer["end_reason"], answer["gpus_clean"]) == ("finished", "stopped", True)
    assert {item["signal"] for item in answer["killed"]} == {"SIGTERM", "SIGKILL"}
    result = host.read(paths.result)
    assert (result["end_reason"], result["killed"]) == ("stopped", answer["killed"])
    assert (answer["was"], answer["was_over"]) == ("running", False)
    assert stop(host, plan) == {**answer, "was": "finished", "was_over": True}, (
        "a second stop changes nothing, and says so"
    )
    assert host.read(paths.result) == result


IN_THE_KERNEL = """
# Without the lease's descriptor, as a worker that its parent executed.
child = "import os; open('stuck', 'w').write(str(os.getpid())); os.stat('{point}/nobody answers')"
subprocess.Popen([sys.executable, '-S', '-c', child], start_new_session=True)
time.sleep(300)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount a file system")
def test_what_cannot_be_killed_is_said_and_the_lease_stays_dirty_until_it_is_gone(
    host: HostRun, tmp_path: Path
) -> None:
    point = tmp_path / "dead disk"
    point.mkdir()
    try:
        disk = fuse.mounted(point, {}, mute=frozenset({fuse.LOOKUP}))
        server = disk.__enter__()
    except OSError as error:
        pytest.skip(f"no file system may be mounted here: {error}")
    try:
        plan = host.plan(host.python(READY + IN_THE_KERNEL.format(point=point)))
        paths = host.launch(plan)
        pid = int(host.wait_file("stuck"))
        assert server is not None
        assert server.muted.wait(60), "it waits inside the kernel"
        said = {"pid": pid, "comm": "python", "reason": "unkillable: it waits inside the kernel (state D)"}

        answer = stop(host, plan, grace_s=0.2)
        assert (answer["state"], answer["end_reason"], answer["gpus_clean"]) == ("finished", "stopped", False)
        assert [left for left in left_by_the_run(answer) if "pid" in left] == [said]
        assert {"SIGTERM", "SIGKILL"} == {item["signal"] for item in answer["killed"] if item["pid"] == pid}
        assert host.read(paths.summary)["gpus_clean"] is False
        [lease] = host.ask("ps", {})["leases"]
        assert (lease["state"], lease["run_id"]) == ("dirty", plan["run_id"])
        refused = host.start(host.plan(host.python("pass")))["result"]
        assert refused["end_reason"] == "lease-dirty"
        assert f"its processes live: {pid} (python)" in refused["message"]
        again = stop(host, plan, grace_s=0.2)
        assert again["gpus_clean"] is False
        assert said in again["leftovers"]
    finally:
        disk.__exit__(None, None, None)
    answer = stop(host, plan, grace_s=0.2)
    assert (answer["end_reason"], answer["gpus_clean"], left_by_the_run(answer)) == ("stopped", True, [])
    assert "no process of the run is left" in str(answer["message"])
    assert host.ask("ps", {})["leases"] == []
    assert host.read(paths.result)["gpus_clean"] is False, "result.json says how it was at the end"


def test_stop_of_an_ended_run_ends_what_it_left(host: HostRun) -> None:
    plan = host.plan(host.python("pass"))
    host.run(plan)
    assert stop(host, plan)["killed"] == []
    ours, theirs = (Layout(workdir).run(plan["run_id"]).folder for workdir in (str(host.workdir), "/srv/theirs"))
    left, same_id = (
        subprocess.Popen(["sleep", "300"], env={**os.environ, RUN_ENV: plan["run_id"], FOLDER_ENV: folder})
        for folder in (ours, theirs)
    )
    stranger = subprocess.Popen(["sleep", "300"])
    try:
        for process in (left, same_id):
            wait_until(lambda p=process: FOLDER_ENV in (read_environ(p.pid) or {}), "it was executed")
        reaper = threading.Thread(target=left.wait)
        reaper.start()
        answer = stop(host, plan)
        reaper.join(30)
        assert (answer["end_reason"], answer["gpus_clean"]) == ("succeeded", True)
        assert answer["killed"] == [{"pid": left.pid, "comm": "sleep", "signal": "SIGTERM"}]
        assert left.returncode == -signal.SIGTERM
        assert (same_id.poll(), stranger.poll()) == (None, None)
    finally:
        for process in (left, same_id, stranger):
            process.kill()
            process.wait()


def test_a_second_look_proves_no_more_of_a_container_than_the_first(host: HostRun) -> None:
    plan = host.plan(host.python("pass"))
    result = host.run(plan)
    programs = host.folder / "programs"
    programs.mkdir()
    (programs / "docker").write_text(f"#!/bin/sh\necho $* >> {host.folder}/asked\n")
    (programs / "docker").chmod(0o755)
    host.env = {"PATH": f"{programs}:{os.environ['PATH']}"}
    paths = host.paths(plan)
    plan["job"]["container"] = {"runtime": "docker", "image": "there"}
    Path(paths.plan).write_text(json.dumps(plan))
    Path(paths.result).write_text(json.dumps({**result, "gpus_clean": "unknown"}))  # as such a run ends
    answer = stop(host, plan)
    assert answer["gpus_clean"] == "unknown"
    assert "docker's containers are no processes of this run" in answer["message"]
    assert "rm --force" in (host.folder / "asked").read_text()


def test_a_stop_goes_on_when_nobody_listens_any_more(host: HostRun) -> None:
    """As after a Ctrl-C on the workstation; the supervisor is dead, so that nobody else would go on."""
    plan = host.plan(host.python(CHILD))
    paths = host.launch(plan)
    host.wait_file("child")
    job = host.job(paths)
    host.kill_supervisor(paths)
    request = {"workdir": str(host.workdir), "run_id": plan["run_id"], "grace_s": 1.0, "force": False, "tell": True}
    asked = host.popen("stop", request)
    assert asked.stdout is not None
    asked.stdout.readline()
    asked.stdout.close()
    assert host.result(paths)["end_reason"] == "stopped"
    assert judge(job)[0] is Liveness.DEAD
    asked.wait(30)


def test_what_a_supervisor_says_last_is_told_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says it, and writes its result, just as somebody looks whether that is there."""
    paths = Layout(str(tmp_path)).run("20260101-000000-abcdef")
    supervisor = EventWriter(paths.events, "supervisor", "20260101-000000-abcdef", "box")
    exists, told = os.path.exists, list[str]()

    def look(path: str) -> bool:
        if path == paths.result and not exists(path):
            supervisor.emit("notice", level="info", code=STOPPING, text="the last word")
            Path(paths.result).write_text("{}")
        return exists(path)

    monkeypatch.setattr(os.path, "exists", look)
    monkeypatch.setattr(stop_module, "send_signal", lambda *_: True)
    standing = Standing(RunState.RUNNING, "", run={"supervisor": identity(os.getpid())})
    assert stop_module._ask_supervisor(paths, standing, 1.0, False, told.append)
    assert told == ["its supervisor has been asked to stop it", "the last word"]


def test_force_needs_no_grace(host: HostRun) -> None:
    plan = host.plan(host.python(CHILD), job={"limits": {"stop_grace_s": 300.0}})
    host.launch(plan)
    host.wait_file("child")
    assert stop(host, plan, grace_s=300.0, force=True)["end_reason"] == "stopped"


def test_an_orphaned_run_is_seen_stopped_and_its_lease_freed(host: HostRun) -> None:
    plan = host.plan(host.python(CHILD))
    paths = host.launch(plan)
    host.wait_file("child")
    job = host.job(paths)
    host.kill_supervisor(paths)

    row = host.state(plan)
    assert row["state"] == "orphaned"
    assert "2 processes of the job live" in row["evidence"]
    busy = host.start(host.plan(host.python("pass")))
    assert busy["result"]["end_reason"] == "lease-busy", "the job holds the lease by the descriptor it inherited"

    code, stdout = host.call("stop", {"run_id": plan["run_id"], "grace_s": 0.3, "force": False, "tell": True})
    *told, answer = map(json.loads, stdout.splitlines())
    assert [each["doing"] for each in told] == [
        "its supervisor is dead: stopping it in its place",
        "2 processes asked to end (TERM); KILL after 0.3 s",
        "1 process still there after 0.3 s: killed (KILL)",
        "looking whether GPUs, shared memory and processes are as before the run",
    ]
    assert code == 0
    assert (answer["state"], answer["end_reason"], answer["gpus_clean"]) == ("finished", "stopped", True)
    assert {item["signal"] for item in answer["killed"]} == {"SIGTERM", "SIGKILL"}
    assert judge(job)[0] is Liveness.DEAD
    assert answer["was_over"] is False
    assert host.log(paths) == b"child up\n"
    assert host.read(paths.summary)["end_reason"] == "stopped"
    assert host.ask("ps", {})["leases"] == []
    host.launch(host.plan(host.python("pass")))


def test_a_lost_run_is_seen_and_its_lease_is_taken_over_only_because_nothing_lives(host: HostRun) -> None:
    plan = host.plan(host.python(CHILD))
    paths = host.launch(plan)
    host.wait_file("child")
    job = host.job(paths)
    host.kill_supervisor(paths)
    # The job's leader holds the lease; its child, in another session, does not: the lock alone would be given away.
    os.kill(job["pid"], signal.SIGKILL)
    wait_until(lambda: judge(job)[0] is Liveness.DEAD, "the job's leader is dead")
    dirty = host.start(host.plan(host.python("pass")))
    assert dirty["result"]["end_reason"] == "lease-dirty"
    assert f"ctl stop {plan['run_id']}" in dirty["result"]["message"]
    assert host.state(plan)["state"] == "orphaned"

    host.close()
    with hold_start_lock(paths, 0):  # as a stop does until it has written how the run ended
        assert host.state(plan)["state"] == "stopping"
    assert host.state(plan)["state"] == "lost"
    (lease,) = host.ask("ps", {})["leases"]
    assert (lease["run_id"], lease["alive"]) == (plan["run_id"], "dead")
    host.launch(host.plan(host.python("pass")))
    answer = stop(host, plan)
    assert (answer["state"], answer["end_reason"], answer["was"], answer["was_over"]) == ("lost", None, "lost", True)


def test_a_run_that_dies_of_its_stop_was_stopped(host: HostRun) -> None:
    """Its supervisor does not answer and is killed by force: then nothing lives, but somebody asked while it did."""
    plan = host.plan(host.python("open('child', 'w').write('1'); import time; time.sleep(300)"))
    paths = host.launch(plan)
    host.wait_file("child")
    job = host.job(paths)
    supervisor = host.read(paths.run)["supervisor"]["pid"]
    os.kill(supervisor, signal.SIGSTOP)
    os.kill(job["pid"], signal.SIGKILL)
    answer = stop(host, plan, grace_s=0.0, force=True)
    assert (answer["state"], answer["end_reason"], answer["was"]) == ("finished", "stopped", "running")


def test_stop_before_a_launch_and_for_an_unknown_run_explains_itself(host: HostRun) -> None:
    plan = host.plan(host.python("pass"))
    request = {"run_id": plan["run_id"], "grace_s": 1, "force": False}
    code, stdout = host.call("stop", request)
    assert (code, json.loads(stdout)["error"]["code"]) == (70, "no-such-run")
    host.ask("cancel", {"run_id": plan["run_id"], "reason": "x"})
    assert stop(host, plan)["end_reason"] == "cancelled"


def test_a_run_of_another_machine_is_not_touched(host: HostRun) -> None:
    plan = host.plan(host.python(CHILD))
    paths = host.launch(plan)
    host.wait_file("child")
    host.job(paths)
    run = host.read(paths.run)
    Path(paths.run).write_text(json.dumps({**run, "supervisor": {**run["supervisor"], "machine": "elsewhere"}}))
    row = host.state(plan)
    code, stdout = host.call("stop", {"run_id": plan["run_id"], "grace_s": 0, "force": True})
    Path(paths.run).write_text(json.dumps(run))

    assert row["state"] == "running"
    assert "not to be judged from here" in row["evidence"]
    assert (code, json.loads(stdout)["error"]["code"]) == (70, "not-ours-to-judge")
    assert judge(run["job"])[0] is Liveness.ALIVE


def test_a_request_that_is_not_understood_is_a_json_error(host: HostRun) -> None:
    code, stdout = host.call("stop", {"run_id": "../../etc", "grace_s": 1, "force": False})
    assert (code, json.loads(stdout)["error"]["code"]) == (70, "protocol")
    process = host.popen("ps", {})
    stdout, _ = process.communicate(timeout=60)
    assert json.loads(stdout)["error"]["why"] == "ps request lacks 'workdir'"
    assert len(pack_frame({})) == 10


WRITES_ON = """
import json, os, time

def line(path, **record):
    with open(os.path.join(os.environ["CTL_RUN_DIR"], path), "a") as file:
        file.write(json.dumps(record) + "\\n")

line("ledger/driver.jsonl", index=7, tokens=3, bytes=30, kept=True)
line("ledger/driver.jsonl", index=8, skipped="malformed")
line("events/driver.jsonl", type="progress", run="", host="", writer="driver", seq=0, t=1.0, done=2, total=9,
     tokens=5, bytes=50, skipped=1, failed=0)
for index in range(3):
    line("ledger/rank-%d.jsonl" % (index % 2), index=index, tokens=2, bytes=20)
open("written", "w").write("1")
time.sleep(300)
"""


@pytest.mark.parametrize("by", ["supervisor", "stop"])
def test_the_last_count_is_that_of_the_summary(host: HostRun, by: str) -> None:
    """The ranks write on after the driver's last report; whoever watches sees what the summary counts."""
    plan = host.plan(host.python(WRITES_ON), job={"kind": "extract"})
    paths = host.launch(plan)
    host.wait_file("written")
    if by == "stop":
        host.kill_supervisor(paths)
    stop(host, plan, grace_s=0.2)
    told = [event for event in host.events(paths, by) if event["type"] in ("progress", "end")]
    assert [event["type"] for event in told] == ["progress", "end"]
    counts = {key: told[0][key] for key in ("done", "total", "tokens", "bytes", "skipped", "failed")}
    assert counts == {"done": 4, "total": 9, "tokens": 9, "bytes": 90, "skipped": 1, "failed": 0}
    assert host.read(paths.summary)["samples"]["written"] == counts["done"]
