"""Launch exactly once, with real starters racing each other."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from pathlib import Path

import pytest
from support.hostrun import HostRun, wait_until

from remote_payload.host.errors import HostError
from remote_payload.host.liveness import Liveness, judge
from remote_payload.host.members import read_environ
from remote_payload.host.protocol import parse_confirmation
from remote_payload.host.start import hold_start_lock

APPEND_LINE = "open('count', 'a').write('x\\n')"


def test_a_second_start_returns_the_first_ones_record_and_starts_no_second_job(host: HostRun) -> None:
    plan = host.plan(host.python(APPEND_LINE))
    first = host.start(plan)
    second = host.start(plan)
    host.result(host.paths(plan))
    third = host.start(plan)

    assert (first["outcome"], second["outcome"], third["outcome"]) == ("launched", "exists", "exists")
    assert second["run"]["supervisor"] == first["run"]["supervisor"]
    assert third["result"]["end_reason"] == "succeeded"
    assert (host.folder / "count").read_text() == "x\n"


def test_racing_starters_of_one_id_launch_one_job(host: HostRun) -> None:
    plan = host.plan(host.python(APPEND_LINE))
    request, body = host.start_request(plan)
    starters = [host.popen("start", request, body) for _ in range(6)]
    answers = [parse_confirmation(process.communicate(timeout=60)[0], request["nonce"]) for process in starters]
    host.result(host.paths(plan))

    outcomes = sorted(answer["outcome"] for answer in answers if answer)
    assert outcomes == ["exists"] * 5 + ["launched"]
    assert (host.folder / "count").read_text() == "x\n"


def test_racing_starters_of_different_ids_give_one_holder_of_the_lease(host: HostRun) -> None:
    plans = [host.plan(host.python("import time; time.sleep(120)")) for _ in range(20)]
    starters = [host.popen("start", *host.start_request(plan)) for plan in plans]
    answers = {}
    for plan, process in zip(plans, starters, strict=True):
        answers[plan["run_id"]] = parse_confirmation(process.communicate(timeout=120)[0], f"nonce-{plan['run_id']}")

    launched = [run_id for run_id, answer in answers.items() if answer and answer["outcome"] == "launched"]
    refused = [answer for answer in answers.values() if answer and answer["outcome"] == "refused"]
    assert len(launched) == 1
    assert len(refused) == 19
    for answer in refused:
        assert answer["result"]["end_reason"] == "lease-busy"
        assert answer["detail"]["holder"]["run_id"] == launched[0]
        assert f"held by run {launched[0]} of user" in answer["result"]["message"]
        assert answer["run"] is None


def test_a_cancelled_run_is_never_launched(host: HostRun) -> None:
    plan = host.plan(host.python(APPEND_LINE))
    answer = host.ask("cancel", {"run_id": plan["run_id"], "reason": "ctrl-c"})
    assert answer == {"outcome": "cancelled", "run": None}

    confirmation = host.start(plan)
    assert confirmation["outcome"] == "cancelled"
    assert confirmation["detail"] == {"reason": "ctrl-c"}
    assert not (host.folder / "count").exists()
    row = host.state(plan)
    assert (row["state"], row["end_reason"]) == ("finished", "cancelled")


def test_cancel_after_launch_says_that_the_run_exists(host: HostRun) -> None:
    plan = host.plan(host.python("pass"))
    paths = host.launch(plan)
    answer = host.ask("cancel", {"run_id": plan["run_id"], "reason": "too late"})

    assert answer["outcome"] == "exists"
    assert answer["run"]["run_id"] == plan["run_id"]
    assert host.result(paths)["end_reason"] == "succeeded"


def test_the_supervisor_is_detached_and_the_starter_leaves_nothing_of_its_own_behind(host: HostRun) -> None:
    plan = host.plan(host.python("import time; open('up', 'w').write('1'); time.sleep(120)"))
    request, body = host.start_request(plan)
    process = host.popen("start", request, body)
    # communicate returns only at end of file: it would hang if the supervisor had inherited stdout or stderr.
    stdout, _ = process.communicate(timeout=60)
    confirmation = parse_confirmation(stdout, request["nonce"])
    assert confirmation is not None
    assert confirmation["run"] is not None
    pid = confirmation["run"]["supervisor"]["pid"]

    assert judge(confirmation["run"]["supervisor"])[0] is Liveness.ALIVE
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull
    assert os.readlink(f"/proc/{pid}/fd/1") == host.paths(plan).supervisor_log
    assert os.readlink(f"/proc/{pid}/cwd") == str(host.workdir)
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")), 16)
    assert ignored & 1, "SIGHUP is ignored"


def test_secrets_reach_the_job_and_no_file_or_helper(host: HostRun) -> None:
    code = "import os; open('env', 'w').write(os.environ['TOKEN'] + os.environ['PLAIN'])"
    plan = host.plan(host.python(code), job={"secret_env": ["TOKEN"], "env": {"PLAIN": "-plain"}})
    confirmation = host.start(plan, {"TOKEN": "s3cret-value"})
    supervisor = (read_environ(confirmation["run"]["supervisor"]["pid"]) or {}).values()
    paths = host.paths(plan)
    host.result(paths)

    assert (host.folder / "env").read_text() == "s3cret-value-plain"
    assert "s3cret-value" not in supervisor
    for path in Path(paths.folder).rglob("*"):
        if path.is_file() and not stat.S_ISFIFO(path.stat().st_mode):
            assert b"s3cret-value" not in path.read_bytes(), path


def test_a_missing_secret_is_an_error_before_anything_is_made(host: HostRun) -> None:
    plan = host.plan(host.python("pass"), job={"secret_env": ["TOKEN"]})
    code, stdout = host.call("start", *host.start_request(plan))
    assert code == 70
    assert "TOKEN" in json.loads(stdout)["error"]["why"]
    assert not Path(host.paths(plan).folder).exists()


def test_a_supervisor_that_dies_without_a_word_is_an_error_and_may_be_started_again(host: HostRun) -> None:
    plan = host.plan(host.python(APPEND_LINE))
    paths = host.paths(plan)
    Path(paths.folder).mkdir(parents=True)
    (Path(paths.folder) / "events").write_text("in the way of the folder of that name")
    code, stdout = host.call("start", *host.start_request(plan))
    error = json.loads(stdout)["error"]
    assert code == 70
    assert error["code"] == "supervisor-died"
    assert "FileExistsError" in error["why"]
    assert host.state(plan)["state"] == "lost"

    (Path(paths.folder) / "events").unlink()
    assert host.start(plan)["outcome"] == "launched"
    assert host.result(paths)["end_reason"] == "succeeded"


def test_a_refused_start_leaves_a_result_that_every_reader_understands(host: HostRun) -> None:
    holder = host.plan(host.python("import time; time.sleep(120)"))
    host.launch(holder)
    plan = host.plan(host.python(APPEND_LINE))
    confirmation = host.start(plan)
    paths = host.paths(plan)

    assert confirmation["outcome"] == "refused"
    assert host.read(paths.result) == confirmation["result"]
    assert host.read(paths.summary)["problems"][0]["code"] == "lease-busy"
    assert host.start(plan)["outcome"] == "exists"
    assert host.state(plan)["end_reason"] == "lease-busy"
    assert not Path(paths.run).exists()


def test_run_folder_and_files_are_private(host: HostRun) -> None:
    paths = host.launch(host.plan(host.python("print('x')")))
    host.result(paths)
    wait_until(lambda: not Path(paths.reserve).exists(), "the reserve is given up")
    for path in [Path(paths.folder), *Path(paths.folder).rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("deleted", [True, False])
def test_a_lock_that_is_no_longer_at_its_path_is_not_held(
    host: HostRun, monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    """A folder may go after its lock was opened and before it is held: who takes it must not start in that folder."""
    paths = host.paths(host.plan())
    os.makedirs(paths.folder)
    original = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", original)
        os.rename(paths.folder, paths.folder + ".gone")
        if not deleted:
            os.makedirs(paths.folder)
        original(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    if deleted:
        with pytest.raises(HostError, match="folder of this run is gone"), hold_start_lock(paths, 0.5):
            pass
        return
    with hold_start_lock(paths, 5.0) as descriptor:
        assert os.path.samestat(os.fstat(descriptor), os.stat(paths.start_lock))
