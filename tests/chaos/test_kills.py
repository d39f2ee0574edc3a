"""SIGKILL in turn of everything that takes part; and cuts of what happens once: push, launch, the last frames."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
from support import chaos
from support.hostrun import wait_until

from controller.core.errors import ConnectionFailed, ConnectionLost
from controller.payload import load_payload
from controller.stages import launch, push, stop
from remote_payload.host.layout import Layout
from remote_payload.host.liveness import send_signal
from remote_payload.host.members import snapshot

pytestmark = pytest.mark.sshd

PARTS, SIZE = 3, 300_000


def connections(site: chaos.Site) -> list[int]:
    """Return the processes that serve sshd's connections."""
    assert site.server is not None
    table = snapshot()
    found, waiting = [], [site.server.pid]
    while waiting:
        parent = waiting.pop()
        children = [stat.pid for stat in table.values() if stat.ppid == parent and stat.comm.startswith("sshd")]
        found += children
        waiting += children
    return found


def test_sshds_connection_process_is_killed(site: chaos.Site) -> None:
    run = site.launch(PARTS, SIZE)
    thread = run.watch_in_background()
    for part in range(PARTS):
        run.open_gate(part)
        for pid in connections(site):
            os.kill(pid, signal.SIGKILL)
        run.wait_log((part + 1) * SIZE)
    assert run.finish(thread).reconnects >= 1
    run.check()


def test_the_controller_is_killed_and_another_goes_on_in_the_same_folder(site: chaos.Site, tmp_path: Path) -> None:
    project = site.project(tmp_path / "project", tmp_path / "ssh_config")
    run = site.prepare(PARTS, SIZE)
    first = project.start("run", "--host", "stub", "--", *run.plan["job"]["steps"][0]["argv"])
    run.open_gate(0)

    def copied() -> int:
        return sum(path.stat().st_size for path in (project.folder / "ctl-runs").glob("*/log/*.log"))

    wait_until(lambda: copied() >= SIZE or first.poll() is not None, "the first part arrived")
    assert first.poll() is None, first.communicate()
    run.open_gate(1)
    first.kill()
    first.communicate(timeout=30)
    run.open_gate(2)
    code, _, stderr = project.ctl("attach", "--last")
    assert code == 0, stderr
    _, stdout, stderr = project.ctl("logs", "--last")
    assert stdout == run.expected_log(), stderr


def test_the_supervisor_is_killed_and_the_job_logs_on_to_its_end(site: chaos.Site) -> None:
    run = site.launch(PARTS, SIZE)
    thread = run.watch_in_background()
    run.open_gate(0)
    run.wait_log(SIZE)
    supervisor = json.loads((run.folder / "run.json").read_bytes())["supervisor"]
    assert send_signal(supervisor["pid"], supervisor["start_ticks"], signal.SIGKILL)
    run.open_gate(1)
    run.wait_log(2 * SIZE)  # the job never noticed

    def told() -> list[str]:
        return [str(f["text"]) for kind, f in site.host.events if kind == "notice" and f["code"] == "orphaned"]

    wait_until(told, "the orphan is told")
    run.open_gate(2)
    outcome = run.finish(thread)
    assert (outcome.ended, outcome.state, outcome.end_reason) == (True, "lost", None)
    assert ["ctl stop " + run.plan["run_id"] in text for text in told()] == [True]
    assert bytes(run.log) == run.expected_log()


def test_an_orphan_is_stopped_from_here(site: chaos.Site) -> None:
    run = site.launch(PARTS, SIZE)
    thread = run.watch_in_background()
    run.open_gate(0)
    run.wait_log(SIZE)
    record = json.loads((run.folder / "run.json").read_bytes())
    assert send_signal(record["supervisor"]["pid"], record["supervisor"]["start_ticks"], signal.SIGKILL)
    stopped = stop.run(site.host.context(), run.plan["run_id"], grace_s=0.2)
    assert (stopped.state, stopped.end_reason, stopped.gpus_clean) == ("finished", "stopped", True)
    assert [item["pid"] for item in stopped.killed if item["signal"] == "SIGTERM"] == [record["job"]["pid"]]
    outcome = run.finish(thread)
    assert (outcome.state, outcome.end_reason) == ("finished", "stopped")


@pytest.mark.parametrize("victim", ["core", "worker"])
def test_a_killed_engine_core_or_worker_ends_the_job_with_its_tree(site: chaos.Site, victim: str) -> None:
    """A stub of vLLM's tree: driver, core and two workers, each in a session of its own and waiting for its child."""
    code = """
import os, subprocess, sys, time
role = sys.argv[1]
name = os.path.join(sys.argv[2], role)
open(name + '.new', 'w').write(str(os.getpid())); os.rename(name + '.new', name)
below = {'driver': ['core'], 'core': ['worker', 'worker2']}.get(role, [])
children = [subprocess.Popen([sys.executable, '-S', __file__, r, sys.argv[2]], start_new_session=True) for r in below]
while children and all(child.poll() is None for child in children):
    time.sleep(0.02)
if not children:
    time.sleep(300)
print(role, 'lost a child', flush=True)
sys.exit(7)
"""
    run = site.prepare(1, SIZE)
    script = run.output / "tree.py"
    script.write_text(code)
    run.plan["job"]["steps"] = [
        {"name": "job", "kind": "exec", "argv": [sys.executable, "-S", str(script), "driver", str(run.output)]}
    ]
    launch.run(site.host.context(), run.plan, {})
    thread = run.watch_in_background()
    tree = [run.output / name for name in ("driver", "core", "worker", "worker2")]
    wait_until(lambda: all(path.exists() for path in tree), "the tree stands")
    pids = [int(path.read_text()) for path in tree]
    os.kill(int((run.output / victim).read_text()), signal.SIGKILL)
    outcome = run.finish(thread)
    assert (outcome.state, outcome.end_reason) == ("finished", "job-failed")
    result = run.read("result.json")
    # What a vLLM beside the tests holds in /dev/shm is named too; of this run nothing may be left.
    holder = re.compile(r"in use by process (\d+)")
    ours = [
        left for left in result["leftovers"] if not (held := holder.fullmatch(left["reason"])) or int(held[1]) in pids
    ]
    assert (result["exit_code"], result["gpus_clean"], ours) == (7, True, [])
    assert not [pid for pid in pids if pid in snapshot()]
    assert b"driver lost a child" in run.log


@pytest.mark.parametrize("seed", range(3))
def test_a_cut_in_the_push_leaves_no_half_payload(site: chaos.Site, seed: int) -> None:
    assert site.proxy is not None
    host = {**site.host.record, "workdir": str(site.host.workdir / f"fresh {seed}")}
    chance = random.Random(seed)
    payload = load_payload()
    final = Path(Layout(host["workdir"]).payload(payload.digest))
    for _ in range(2):
        site.proxy.cut_sent_after = chance.randrange(3000, len(payload.archive()))
        with pytest.raises((ConnectionLost, ConnectionFailed)):
            push.run(site.host.transport, host, emit=lambda *_, **__: None)  # type: ignore[arg-type]
        assert not final.exists()
    site.proxy.calm()
    outcome = push.run(site.host.transport, host, emit=lambda *_, **__: None)  # type: ignore[arg-type]
    assert (outcome.hash, outcome.skipped) == (payload.digest, False)
    assert {str(path.relative_to(final)) for path in final.rglob("*.py")} >= {"remote_payload/host/main.py"}


def test_cuts_in_the_last_frames_end_with_the_whole_truth(site: chaos.Site) -> None:
    """Verdict, documents and hashes come last; the run is over by then, and every cut asks for them anew."""
    assert site.proxy is not None
    run = site.launch(1, 20_000)
    run.open_gate(0)
    wait_until((run.folder / "result.json").exists, "the run has ended")
    thread = run.watch_in_background()
    for count in (1200, 3000, 6000, 12_000, 24_000):
        site.proxy.cut_after = count
        thread.join(1.0)
    site.proxy.calm()
    assert run.finish(thread).end_reason == "succeeded"
    run.check()


def test_freezing_without_a_word_is_noticed_on_both_sides(site: chaos.Site) -> None:
    """No FIN, no RST: the controller gives the connection up by its own clock, and goes on when the path is back."""
    assert site.proxy is not None
    run = site.launch(2, SIZE)
    thread = run.watch_in_background()
    run.open_gate(0)
    run.wait_log(SIZE)
    site.proxy.freeze()
    run.open_gate(1)
    threading.Event().wait(6)  # longer than the deadlines of the fixture
    site.proxy.thaw()
    assert run.finish(thread).reconnects >= 1
    run.check()
    assert [fields["status"] for kind, fields in site.host.events if kind == "contact"].count("reconnecting") >= 1
