"""Pruning: only folders of runs that are over and needed for nothing go, as they were shown, and nothing else."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.hostrun import HostRun, wait_until

from remote_payload.host import prune as module
from remote_payload.host.layout import OUTPUT_LEDGER, Layout, RunPaths
from remote_payload.host.liveness import Liveness, judge

OLD = "20250101-000000-0000"


def request(host: HostRun, **fields: Any) -> dict[str, Any]:
    return {
        "lease_dir": str(host.lease_dir), "older_than_s": None, "keep": 0, "copied": [], "all": True,
        "confirmed": None, **fields,
    }  # fmt: skip


def look(host: HostRun, **fields: Any) -> dict[str, Any]:
    return host.ask("prune", request(host, **fields))


def confirmed(shown: dict[str, Any]) -> dict[str, str]:
    return {row["run_id"]: row["digest"] for row in shown["runs"]}


def ended(host: HostRun, number: int = 0, days: float = 0.0, **job: Any) -> RunPaths:
    """The folder of a run that succeeded so many days ago, as its supervisor leaves it."""
    paths = Layout(str(host.workdir)).run(f"{OLD}{number:02x}")
    plan = {**host.plan(job=job), "run_id": os.path.basename(paths.folder)}
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - days * 86400))
    result = {"run_id": plan["run_id"], "end_reason": "succeeded", "message": "done", "ended": when, "leftovers": []}
    Path(paths.log).mkdir(parents=True)
    Path(paths.log, "000001.log").write_bytes(b"x" * 1000)
    os.mkfifo(paths.pipe)
    Path(paths.start_lock).touch()
    Path(paths.plan).write_text(json.dumps(plan))
    Path(paths.result).write_text(json.dumps(result))
    return paths


def test_a_real_run_goes_with_its_folder_and_nothing_else_does(host: HostRun) -> None:
    plan = host.plan(host.python("print('hello')"))
    host.run(plan)
    paths = host.paths(plan)
    supervisor = host.read(paths.run)["supervisor"]
    wait_until(lambda: judge(supervisor)[0] is Liveness.DEAD, "the supervisor leaves")
    beside = host.workdir / "runs" / "notes"
    beside.mkdir()
    shown = look(host)
    (row,) = shown["runs"]
    assert (row["run_id"], row["name"], row["end_reason"]) == (plan["run_id"], "test", "succeeded")
    assert row["bytes"] > 0
    assert os.path.isdir(paths.folder)
    answer = look(host, confirmed=confirmed(shown))
    assert answer["deleted"] == [{"run_id": plan["run_id"], "entries": row["entries"], "bytes": row["bytes"]}]
    assert (answer["failed"], answer["remaining"]) == ([], [])
    assert os.listdir(host.workdir / "runs") == ["notes"]
    assert host.ask("ps", {"lease_dir": str(host.lease_dir)})["runs"] == []


def test_a_run_that_is_not_over_stays(host: HostRun) -> None:
    plan = host.plan(host.python("import time; print('up', flush=True); time.sleep(300)"))
    host.launch(plan)
    shown = look(host)
    assert shown["runs"] == []
    (kept,) = shown["kept"]
    assert (kept["run_id"], kept["why"].split(":")[0]) == (plan["run_id"], "it is running")


def test_age_and_number_choose_together(host: HostRun) -> None:
    for number, days in enumerate((90.0, 40.0, 35.0, 1.0)):
        ended(host, number, days)
    names = {number: f"{OLD}{number:02x}" for number in range(4)}

    def chosen(**fields: Any) -> list[str]:
        shown = look(host, **fields)
        assert shown["kept"] == []
        return [row["run_id"] for row in shown["runs"]]

    assert chosen() == [names[number] for number in range(4)]
    assert chosen(older_than_s=30 * 86400.0) == [names[0], names[1], names[2]]
    assert chosen(keep=2) == [names[0], names[1]]
    assert chosen(older_than_s=37 * 86400.0, keep=3) == [names[0]]
    assert chosen(keep=9) == []


@pytest.mark.parametrize("change", ["content", "added", "gone", "unasked"])
def test_what_is_not_as_it_was_shown_stays_with_all_others(host: HostRun, change: str) -> None:
    first, second = ended(host, 0), ended(host, 1)
    wanted = confirmed(look(host))
    if change == "content":
        Path(first.log, "000001.log").write_bytes(b"y" * 1001)
    elif change == "added":
        Path(first.folder, "mine.txt").touch()
    elif change == "gone":
        os.rename(first.folder, host.workdir / "elsewhere")
    else:
        wanted[f"{OLD}77"] = "0" * 64
    code, stdout = host.call("prune", request(host, confirmed=wanted))
    error = json.loads(stdout)["error"]
    assert (code, error["code"]) == (70, "prune-changed")
    assert os.path.exists(second.result)


def test_what_others_need_of_a_run_keeps_it_unless_all_is_said(host: HostRun) -> None:
    output = host.workdir / "out"
    (output / OUTPUT_LEDGER).mkdir(parents=True)
    sampled = ended(
        host, 0, outputs=[{"path": str(output), "root": str(host.workdir), "stale": "fail", "adopt": False}]
    )
    ledger = output / OUTPUT_LEDGER / f"{os.path.basename(sampled.folder)}.rank-0.jsonl"
    ledger.touch()
    elsewhere, here = ended(host, 1), ended(host, 2)
    copied = [os.path.basename(paths.folder) for paths in (sampled, here)]
    assert confirmed(look(host, all=False, copied=copied)).keys() == set(copied)
    ledger.write_text('{"index":0}\n')
    shown = look(host, all=False, copied=copied)
    assert list(confirmed(shown)) == [os.path.basename(here.folder)]
    whys = {each["run_id"]: each["why"] for each in shown["kept"]}
    assert "its samples are in" in whys[os.path.basename(sampled.folder)]
    assert "not been copied" in whys[os.path.basename(elsewhere.folder)]
    assert len(look(host)["runs"]) == 3


def test_a_lease_that_was_not_given_back_keeps_its_run(host: HostRun) -> None:
    plan = host.plan(host.python("import time; time.sleep(300)"))
    paths = host.launch(plan)
    host.job(paths)
    host.kill_supervisor(paths)
    wait_until(lambda: host.state(plan)["state"] in ("orphaned", "lost"), "the run loses its supervisor")
    (kept,) = look(host)["kept"]
    assert "orphaned" in kept["why"] or "lease" in kept["why"]


@pytest.mark.parametrize("kind", ["link", "foreign", "nameless", "damaged"])
def test_what_is_no_folder_of_ours_is_left_alone(host: HostRun, kind: str) -> None:
    paths = ended(host, 0)
    if kind == "link":
        target = host.workdir / "precious"
        os.rename(paths.folder, target)
        os.symlink(target, paths.folder)
    elif kind == "foreign":
        plan = host.read(paths.plan)
        Path(paths.plan).write_text(json.dumps({**plan, "run_id": f"{OLD}99"}))
    elif kind == "nameless":
        os.unlink(paths.plan)
    else:
        Path(paths.result).write_text("{")
    shown = look(host)
    assert shown["runs"] == []
    assert len(shown["kept"]) == 1
    assert Path(paths.folder, "log", "000001.log").exists()


def test_what_appears_during_the_deletion_keeps_folder_and_plan(host: HostRun) -> None:
    """Half a folder is still known for what it is, and goes at the next call."""
    paths, layout = ended(host, 0), Layout(str(host.workdir))
    chosen, _ = module._choose(layout, {"workdir": str(host.workdir), **request(host)})
    (run_id,) = chosen
    Path(paths.log, "000002.log").write_bytes(b"late")
    with pytest.raises(module.HostError, match="entries stay"):
        module._delete(layout, run_id, chosen[run_id].found)
    assert not os.path.exists(paths.result)
    assert Path(paths.log, "000002.log").exists()
    shown = look(host)
    assert [row["state"] for row in shown["runs"]] == ["lost"]
    assert look(host, confirmed=confirmed(shown))["remaining"] == []
    assert not os.path.exists(paths.folder)
