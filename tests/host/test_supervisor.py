"""What the supervisor does with a job, seen from the run folder and from the process table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.fake_smi import UUIDS, FakeSmi
from support.hostrun import HostRun, wait_until

from remote_payload.host.layout import OWNER_MARKER, Layout
from remote_payload.host.liveness import Liveness, identity, judge
from remote_payload.host.summary import PRINTED_NOTHING

SLEEP = "import time; time.sleep(120)"

DAEMON = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open('daemon.new', 'w').write(str(os.getpid()))
    os.rename('daemon.new', 'daemon')
    time.sleep(300)
"""
"""A process in another session whose parent is dead and that ignores TERM: what vLLM's workers amount to."""

WAIT_FOR_DAEMON = """
while not os.path.exists('daemon'):
    time.sleep(0.01)
"""


def test_steps_run_in_order_and_every_record_agrees(host: HostRun) -> None:
    plan = host.plan(
        {"name": "recheck", "kind": "recheck"},
        host.python("print('one'); open('order', 'a').write('1')", "rehearse"),
        host.python("print('two'); open('order', 'a').write('2')", "job"),
        host.python(
            "import json, os; open('order', 'a').write('3');"
            "json.dump({'samples': {'expected': 2}, 'timings': {'load_s': 3.5}, 'versions': {'vllm': '1'},"
            "'problems': [{'code': 'note'}]}, open(os.environ['CTL_RUN_DIR'] + '/verify.json', 'w'))",
            "verify",
            "verify",
        ),
    )
    paths = host.launch(plan)
    result = host.result(paths)
    summary = host.read(paths.summary)

    assert (host.folder / "order").read_text() == "123"
    assert (result["end_reason"], result["exit_code"], result["gpus_clean"]) == ("succeeded", 0, True)
    assert host.log(paths) == b"one\ntwo\n"
    assert result["log_bytes"] == 8
    assert summary["samples"] == {"expected": 2}
    assert summary["timings"]["push_s"] == 0.5
    assert summary["timings"]["load_s"] == 3.5
    assert summary["timings"]["rehearse_s"] > 0
    assert summary["versions"]["vllm"] == "1"
    assert summary["problems"] == [{"code": "note"}]
    events = host.events(paths)
    steps = [(e["name"], e["status"]) for e in events if e["type"] == "step"]
    assert steps == [(n, s) for n in ("recheck", "rehearse", "job", "verify") for s in ("started", "done")]
    states = [e["state"] for e in events if e["type"] == "state"]
    assert states == ["launching", "running", "stopping"]
    assert [e["seq"] for e in events] == list(range(1, len(events) + 1))
    assert next(e for e in events if e["type"] == "end")["gpus_clean"] is True


def test_the_job_has_the_promised_environment(host: HostRun) -> None:
    code = """
import json, os
seen = {'env': dict(os.environ), 'leads': os.getpgid(0) == os.getpid() == os.getsid(0)}
json.dump(seen, open('env.json', 'w'))
"""
    host.env["PYTHONPATH"] = "/from/login"
    host.env["CTL_RUN_ID"] = "of-an-outer-run"
    plan = host.plan(host.python(code), job={"env": {"HF_HUB_OFFLINE": "1"}})
    host.run(plan)
    seen = json.loads((host.folder / "env.json").read_text())
    env = seen["env"]

    assert env["CTL_RUN_ID"] == plan["run_id"]
    assert env["CTL_RUN_DIR"] == host.paths(plan).folder
    assert env["CTL_HOST"] == "box"
    assert env["SPT_NOENV"] == env["PYTHONUNBUFFERED"] == env["HF_HUB_OFFLINE"] == "1"
    assert env["PYTHONPATH"] == f"{Layout(str(host.workdir)).payload('0' * 64)}:/from/login"
    assert "CTL_HELPER" not in env
    assert seen["leads"]


@pytest.mark.parametrize("kind", ["extract", "command"])
def test_titles_name_the_run_but_not_in_a_command(host: HostRun, kind: str) -> None:
    """vLLM keys its compile cache by them too, and nobody takes the run out of a command's."""
    code = "import os; open('title', 'w').write(os.environ['VLLM_PROCESS_NAME_PREFIX'])"
    plan = host.plan(host.python(code), job={"kind": kind})
    host.run(plan)
    assert (host.folder / "title").read_text() == {"extract": f"ctl-{plan['run_id']}", "command": "ctl"}[kind]


@pytest.mark.parametrize(
    ("code", "kind", "end_reason", "exit_code", "number"),
    [
        ("raise SystemExit(3)", "exec", "job-failed", 3, None),
        ("import os; os.kill(os.getpid(), 9)", "exec", "job-signaled", None, 9),
        ("raise SystemExit(1)", "verify", "verify-failed", 1, None),
        ("import os; os.abort()", "verify", "verify-failed", None, 6),
    ],
)
def test_a_failing_step_ends_the_run(
    host: HostRun, code: str, kind: str, end_reason: str, exit_code: int | None, number: int | None
) -> None:
    plan = host.plan(host.python(code, "work", kind), host.python("open('never', 'w')", "next"))
    paths = host.launch(plan)
    result = host.result(paths)

    assert (result["end_reason"], result["step"]) == (end_reason, "work")
    assert (result["exit_code"], result["signal"]) == (exit_code, number)
    assert result["gpus_clean"] is True
    assert not (host.folder / "never").exists()
    assert host.read(paths.summary)["problems"][-1]["code"] == end_reason


def test_a_program_that_does_not_exist_is_named(host: HostRun) -> None:
    paths = host.launch(host.plan({"name": "job", "kind": "exec", "argv": ["/no/such/program"]}))
    result = host.result(paths)
    assert result["end_reason"] == "job-failed"
    assert "/no/such/program could not be started" in result["message"]
    (problem,) = host.read(paths.summary)["problems"]
    assert problem["fix"] == PRINTED_NOTHING, "a hint does not lead to an empty log"


def test_other_exit_codes_succeed_where_the_plan_says_so(host: HostRun) -> None:
    plan = host.plan(host.python("raise SystemExit(5)"), job={"success": {"exit_codes": [0, 5]}})
    assert host.run(plan)["end_reason"] == "succeeded"


def test_a_daemon_in_its_own_session_that_ignores_term_is_killed_and_told(host: HostRun) -> None:
    plan = host.plan(host.python(DAEMON + WAIT_FOR_DAEMON), job={"limits": {"stop_grace_s": 0.3}})
    paths = host.launch(plan)
    daemon = int(host.wait_file("daemon"))
    result = host.result(paths)

    assert not Path(f"/proc/{daemon}").exists()
    assert result["gpus_clean"] is True
    notice = next(e for e in host.events(paths) if e.get("code") == "processes-left")
    assert str(daemon) in notice["text"]


def test_a_daemon_that_wiped_its_environment_is_found_by_descent(host: HostRun) -> None:
    code = (
        f"import os, sys; os.execve(sys.executable, [sys.executable, '-S', '-c', {DAEMON + WAIT_FOR_DAEMON!r}], {{}})"
    )
    paths = host.launch(host.plan(host.python(code), job={"limits": {"stop_grace_s": 0.2}}))
    daemon = int(host.wait_file("daemon"))
    host.result(paths)
    assert not Path(f"/proc/{daemon}").exists()
    recorded = [json.loads(line)["pid"] for line in Path(paths.tree).read_text().splitlines()]
    assert daemon in recorded


def test_term_to_the_supervisor_stops_the_job(host: HostRun) -> None:
    code = "import time; open('up', 'w').write('1'); time.sleep(120)"
    paths = host.launch(host.plan(host.python(code)))
    host.wait_file("up")
    job = host.job(paths)
    os.kill(host.read(paths.run)["supervisor"]["pid"], signal.SIGTERM)
    result = host.result(paths)

    assert (result["end_reason"], result["step"], result["gpus_clean"]) == ("stopped", "job", True)
    assert judge(job)[0] is Liveness.DEAD
    assert host.read(paths.run)["state"] == "stopping"


@pytest.mark.parametrize(
    ("limits", "word"),
    [
        ({"time_limit_s": 1.0}, "time_limit"),
        ({"silence_timeout_s": 1.0}, "silence_timeout"),
        ({"load_timeout_s": 1.0, "silence_timeout_s": 60.0}, "load_timeout"),
    ],
)
def test_limits_end_the_run_and_say_which(host: HostRun, limits: dict[str, float], word: str) -> None:
    paths = host.launch(host.plan(host.python(SLEEP), job={"limits": {"stop_grace_s": 1.0, **limits}}))
    job = host.job(paths)
    result = host.result(paths)
    assert result["end_reason"] == "limit-exceeded"
    assert word in result["message"]
    assert "limit 1 s" in result["message"]
    assert judge(job)[0] is Liveness.DEAD


def test_output_and_progress_keep_the_limits_at_bay(host: HostRun) -> None:
    code = """
import os, time
events = os.environ['CTL_RUN_DIR'] + '/events/driver.jsonl'
open(events, 'a').write('{"type":"progress","done":1}\\n')
for turn in range(22):
    print(turn)
    time.sleep(0.5)
"""
    limits = {"load_timeout_s": 10.0, "silence_timeout_s": 8.0}  # both below the 11 s that it takes
    assert host.run(host.plan(host.python(code), job={"limits": limits}))["end_reason"] == "succeeded"


def test_outputs_are_cleared_claimed_and_told(host: HostRun) -> None:
    output = host.folder / "out" / "states"
    output.parent.mkdir()
    owned = {"path": str(output), "root": str(output.parent), "stale": "clear", "adopt": False}
    owned.update({"digest": None, "entries": 0, "bytes": 0})
    plan = host.plan({"name": "clear", "kind": "clear"}, host.python("pass"), job={"outputs": [owned]})
    paths = host.launch(plan)
    assert host.result(paths)["end_reason"] == "succeeded"
    assert json.loads((output / OWNER_MARKER).read_text())["run_id"] == plan["run_id"]
    assert any(e.get("code") == "cleared" for e in host.events(paths))


def test_a_folder_that_is_not_what_was_confirmed_ends_the_run_before_the_job(host: HostRun) -> None:
    output = host.folder / "out" / "states"
    output.mkdir(parents=True)
    (output / "hs_0.safetensors").write_text("precious")
    owned = {"path": str(output), "root": str(output.parent), "stale": "clear", "adopt": True}
    owned.update({"digest": None, "entries": 0, "bytes": 0})
    plan = host.plan({"name": "clear", "kind": "clear"}, host.python("open('ran', 'w')"), job={"outputs": [owned]})
    assert host.run(plan)["end_reason"] == "clear-changed"
    assert (output / "hs_0.safetensors").read_text() == "precious"
    assert not (host.folder / "ran").exists()


# ------------------------------------------------------------------------------------------- GPUs


@pytest.fixture
def smi(host: HostRun) -> FakeSmi:
    smi = FakeSmi(host.folder / "bin")
    host.env.update(smi.env)
    return smi


def test_gpus_back_at_their_baseline_are_clean_and_were_sampled(host: HostRun, smi: FakeSmi) -> None:
    plan = host.plan(host.python("import time; time.sleep(3)"), accelerator="cuda", gpus=2)
    paths = host.launch(plan)
    result = host.result(paths)
    assert (result["end_reason"], result["gpus_clean"]) == ("succeeded", True)
    sample = next(e for e in host.events(paths) if e["type"] == "sample")
    assert sample["gpus"][0] == {
        "index": 0,
        "util": 55.0,
        "memory_used": 4 << 20,
        "memory_total": 97887 << 20,
        "power_w": 83.12,
        "temperature_c": 41.0,
    }
    assert sample["gpus"][1]["util"] is None
    assert sample["gpus"][1]["power_w"] is None
    assert sorted(path.name for path in host.lease_dir.iterdir()) == [f"{uuid}.lock" for uuid in UUIDS]


def test_occupied_gpus_fail_the_recheck(host: HostRun, smi: FakeSmi) -> None:
    smi.set_memory(4, 2048)
    plan = host.plan(
        {"name": "recheck", "kind": "recheck"}, host.python("open('ran', 'w')"), accelerator="cuda", gpus=2
    )
    result = host.run(plan)
    assert result["end_reason"] == "recheck-failed"
    assert f"{UUIDS[1]} 2048 MiB" in result["message"]
    assert not (host.folder / "ran").exists()


def test_a_stranger_on_the_gpus_makes_clean_unknown_and_the_lease_dirty(host: HostRun, smi: FakeSmi) -> None:
    code = f"open('{smi.file('apps')}', 'w').write('{UUIDS[0]}, {os.getpid()}, other')"
    paths = host.launch(host.plan(host.python(code), accelerator="cuda", gpus=2))
    assert host.result(paths)["gpus_clean"] == "unknown"

    refused = host.start(host.plan(host.python("pass"), accelerator="cuda", gpus=2))
    assert refused["result"]["end_reason"] == "lease-dirty"
    assert f"{os.getpid()} (other)" in refused["result"]["message"]

    smi.set_apps()
    host.launch(host.plan(host.python("pass"), accelerator="cuda", gpus=2))


def test_a_missing_gpu_is_refused_by_name(host: HostRun, smi: FakeSmi) -> None:
    plan = host.plan(host.python("pass"), accelerator="cuda", gpus=8)
    refused = host.start(plan)
    assert refused["outcome"] == "refused"
    assert refused["result"]["end_reason"] == "supervisor-failed"
    assert "needs 8 GPUs, nvidia-smi lists 2" in refused["result"]["message"]


def test_runs_on_different_gpus_run_side_by_side(host: HostRun, smi: FakeSmi) -> None:
    for device in ("0", UUIDS[1]):
        job = {"env": {"CUDA_VISIBLE_DEVICES": device}}
        host.launch(host.plan(host.python(SLEEP), job=job, accelerator="cuda", gpus=2))
    refused = host.start(host.plan(host.python(SLEEP), accelerator="cuda", gpus=2))
    assert refused["result"]["end_reason"] == "lease-busy"


def test_the_supervisor_reaps_what_it_adopts(host: HostRun) -> None:
    code = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            os._exit(0)
        os._exit(0)
    os.wait()
open('up', 'w').write('1')
time.sleep(120)
"""
    paths = host.launch(host.plan(host.python(code)))
    host.wait_file("up")
    supervisor = host.read(paths.run)["supervisor"]["pid"]

    def zombies() -> list[str]:
        table = subprocess.run(["ps", "-o", "stat=", "--ppid", str(supervisor)], capture_output=True, text=True)
        return [word for word in table.stdout.split() if word.startswith("Z")]

    wait_until(lambda: not zombies(), "adopted children are reaped")
    assert judge(identity(supervisor))[0] is Liveness.ALIVE


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="needs to mount a small file system")
def test_a_full_disk_does_not_keep_a_run_from_saying_how_it_ended(host: HostRun) -> None:
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(host.workdir)], capture_output=True)
    if mount.returncode != 0:
        pytest.skip(f"mount: {mount.stderr.decode()}")
    try:
        plan = host.plan(host.python(DAEMON + WAIT_FOR_DAEMON + "print('x' * 4_000_000)"))
        paths = host.launch(plan)
        daemon = int(host.wait_file("daemon"))
        wait_until(lambda: len(host.log(paths)) > 1_500_000, "the disk is full")
        os.kill(host.read(paths.run)["supervisor"]["pid"], signal.SIGTERM)
        result = host.result(paths)
        assert result["end_reason"] == "stopped"
        assert any("of the log could not be written" in item["reason"] for item in result["leftovers"])
        assert not Path(f"/proc/{daemon}").exists()
    finally:
        host.close()
        subprocess.run(["umount", "-l", str(host.workdir)], check=True)
