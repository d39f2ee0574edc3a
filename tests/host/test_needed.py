"""What keeps the folder of a run: one case for each reason, and beside it that the run may go without the reason."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hostrun import HostRun, wait_until
from support.pruned import OLD, age, confirmed, copies, dead, ended, look, why_kept, write

from remote_payload.extract import settings
from remote_payload.host import needed
from remote_payload.host.files import sha256_of
from remote_payload.host.finish import baseline_path
from remote_payload.host.layout import OUTPUT_LEDGER, OWNER_MARKER, RunPaths
from remote_payload.host.leftovers import SHM, list_shm
from remote_payload.host.liveness import identity, user_name
from remote_payload.host.segments import LogFiles
from remote_payload.host.writers import is_spent

RUN = f"{OLD}00"
OTHER = f"{OLD}01"


def change(host: HostRun, path: str, **fields: Any) -> None:
    write(path, {**host.read(path), **fields})


def lease(folder: Path, workdir: Path, run_id: str = RUN, **process: Any) -> None:
    owner = {"run_id": run_id, "workdir": str(workdir), "uid": os.getuid(), "user": user_name(os.getuid())}
    write(folder / "host.lock", {**owner, "state": "dirty", "process": dead(**process)})


def end_without(name: str) -> Callable[[HostRun, RunPaths], None]:
    return lambda host, paths: os.unlink(getattr(paths, name))


def never_launched(host: HostRun, paths: RunPaths) -> None:
    """Given up before it was launched: nothing but the word."""
    for path in (paths.plan, paths.run, paths.result, os.path.join(paths.log, "000001.log")):
        os.unlink(path)
    write(paths.cancelled, "the controller gave up")


def not_over(host: HostRun, paths: RunPaths, **supervisor: Any) -> RunPaths:
    other = ended(host, 1)
    os.unlink(other.result)
    change(host, other.run, supervisor=supervisor or identity(os.getpid()))
    return other


def converting(host: HostRun, paths: RunPaths) -> None:
    argv = ["python", "-m", "remote_payload.extract.convert", "--run", paths.folder]
    other = not_over(host, paths)
    change(host, other.plan, job={**host.read(other.plan)["job"], "steps": [{"name": "convert", "argv": argv}]})


def unreadable_plan(host: HostRun, paths: RunPaths) -> None:
    other = ended(host, 1)
    os.unlink(other.result)
    write(other.run, "{")
    os.unlink(other.plan)
    os.mkdir(other.plan)


def own_lease_dir(host: HostRun, paths: RunPaths) -> None:
    plan = host.read(paths.plan)
    write(paths.plan, {**plan, "host": {**plan["host"], "lease_dir": str(host.folder / "own")}})
    lease(host.folder / "own", host.workdir)


CASES: dict[str, tuple[Callable[[HostRun, RunPaths], Any], str]] = {
    "another's id": (lambda host, paths: change(host, paths.plan, run_id=OTHER), "says that it is of this run"),
    "no plan": (lambda host, paths: (os.unlink(paths.plan), os.unlink(paths.run)), "says that it is of this run"),
    "damaged": (lambda host, paths: write(paths.result, "{"), "cannot be read: ValueError"),
    "no lock": (end_without("start_lock"), "no start.lock"),
    "another user's": (lambda host, paths: change(host, paths.run, user="somebody"), "it is of user somebody"),
    "running": (
        lambda host, paths: (os.unlink(paths.result), change(host, paths.run, supervisor=identity(os.getpid()))),
        "it is running: supervisor",
    ),
    "supervisor alive": (
        lambda host, paths: change(host, paths.run, supervisor=identity(os.getpid())), "has not left yet",
    ),
    "another machine": (
        lambda host, paths: change(host, paths.run, supervisor=dead(machine="elsewhere")),
        "cannot be judged from here: process",
    ),
    "another namespace": (
        lambda host, paths: change(host, paths.run, supervisor=dead(pidns=1)), "cannot be judged from here: process",
    ),
    "lease": (lambda host, paths: lease(host.lease_dir, host.workdir), "its lease was not given back"),
    "lease elsewhere": (own_lease_dir, "its lease was not given back"),
    "lease not readable": (lambda host, paths: os.makedirs(host.lease_dir / "GPU-1.lock"), "lease of GPU-1 cannot"),
    "lease folder not safe": (
        lambda host, paths: (host.lease_dir.mkdir(), host.lease_dir.chmod(0o777)), "leases cannot be read: any user",
    ),
    "read by a conversion": (converting, f"run {OTHER}, which is not over, names it"),
    "read by nobody knows whom": (unreadable_plan, f"whether run {OTHER} reads it"),
    "a person's file": (lambda host, paths: write(Path(paths.folder, "best.pt"), "x"), "'best.pt', which is no"),
    "an output": (
        lambda host, paths: write(Path(paths.folder, OWNER_MARKER), {"wire": 1, "run_id": OTHER}), "an output folder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_reason_keeps_a_run_that_would_go_without_it(host: HostRun, case: str) -> None:
    paths = ended(host)
    assert why_kept(host, paths) is None
    act, reason = CASES[case]
    act(host, paths)
    age(paths.folder)
    why = why_kept(host, paths)
    assert reason in (why or "nothing")
    answer = look(host, confirmed=confirmed(look(host)))
    assert RUN not in [each["run_id"] for each in answer["deleted"]]
    assert os.path.isdir(paths.folder)


def test_a_run_that_lives_elsewhere_names_what_it_reads(host: HostRun) -> None:
    paths = ended(host)
    other = not_over(host, paths, **dead(machine="elsewhere"))
    assert why_kept(host, paths) is None
    change(host, other.plan, source=RUN)
    assert "names it" in (why_kept(host, paths) or "")


@pytest.mark.parametrize("kind", ["launched", "lost", "cancelled"])
def test_a_late_start_finds_what_became_of_the_first(host: HostRun, kind: str) -> None:
    paths = ended(host)
    if kind == "lost":
        os.unlink(paths.result)
    elif kind == "cancelled":
        never_launched(host, paths)
    age(paths.folder, 0.9)
    assert "less than 60 min ago" in (why_kept(host, paths) or "")
    age(paths.folder, 1.1)
    assert why_kept(host, paths) is None
    if kind != "launched":  # a line that came late: whoever wrote it lived so long
        os.utime(Path(paths.events, "supervisor.jsonl"))
        assert "less than 60 min ago" in (why_kept(host, paths) or "")


@pytest.mark.parametrize("state", ["lost", "finished"])
def test_shared_memory_keeps_the_run_that_left_it(host: HostRun, state: str) -> None:
    paths = ended(host)
    before = list_shm()
    left = Path(SHM, f"psm_ctl_{os.getpid()}_{host.folder.name[-8:]}")
    left.write_text("x")
    try:
        write(baseline_path(paths), {"leases": [], "gpu_memory": {}, "shm": before, "oom_kills": None})
        if state == "lost":
            os.unlink(paths.result)
        else:
            change(host, paths.result, leftovers=[{"path": str(left), "reason": "not deleted"}])
        age(paths.folder)
        assert "left processes or shared memory" in (why_kept(host, paths) or "")
    finally:
        left.unlink()
    assert why_kept(host, paths) is None


def test_processes_keep_the_run_that_left_them(host: HostRun) -> None:
    paths = ended(host)
    code = "import time; time.sleep(600)"
    left = subprocess.Popen([sys.executable, "-S", "-c", code], env={**os.environ, "CTL_RUN_ID": RUN})
    try:
        wait_until(lambda: "left processes" in (why_kept(host, paths) or ""), "it is seen")
    finally:
        left.kill()
        left.wait()
    assert why_kept(host, paths) is None


def test_a_pump_keeps_the_run_that_it_writes_for(host: HostRun) -> None:
    paths = ended(host)
    with open(LogFiles(paths).lock, "w", encoding="ascii") as lock:
        age(paths.folder)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "still writes its log" in (why_kept(host, paths) or "")
    assert why_kept(host, paths) is None


def uploaded(host: HostRun, **files: str) -> str:
    """A tree that the host has received, by its digest."""
    entries = []
    for name, text in files.items():
        path = host.folder / "upload"
        path.write_text(text)
        entries.append({"path": f"{name}.py", "size": len(text), "sha256": sha256_of([str(path)])[1], "exec": False})
    digest = "d" * 64
    write(host.workdir / "files" / "trees" / f"{digest}.json", {"files": entries})
    return digest


def test_what_a_command_wrote_into_its_work_folder_keeps_the_run(host: HostRun) -> None:
    paths = ended(host, upload=uploaded(host, train="print()", model="weights = 1"))
    work = Path(paths.work)

    def why() -> str | None:
        age(paths.folder)
        return why_kept(host, paths)

    write(work / "train.py", "print()")
    write(work / "model.py", "weights = 1")
    write(work / "__pycache__" / "model.cpython-311.pyc", "compiled")
    (work / "empty").mkdir()
    assert why() is None
    for name in ("checkpoint.pt", "empty/step-1.pt", "__pycache__/other.cpython-311.pyc"):
        write(work / name, "x")
        assert repr(f"work/{name}") in (why() or "")
        (work / name).unlink()
    (work / "link").symlink_to("train.py")
    assert "'work/link'" in (why() or "")
    (work / "link").unlink()
    for text in ("weights = 2", "weights = 10"):  # trained in place
        write(work / "model.py", text)
        assert "'work/model.py'" in (why() or "")
    write(work / "model.py", "weights = 1")
    assert why() is None
    os.unlink(host.workdir / "files" / "trees" / f"{'d' * 64}.json")
    assert "what was uploaded for it is not known" in (why() or "")


def test_a_work_folder_of_a_run_without_uploads_keeps_it(host: HostRun) -> None:
    paths = ended(host)
    write(Path(paths.work, "checkpoint.pt"), "x")
    age(paths.folder)
    assert "'work/checkpoint.pt'" in (why_kept(host, paths) or "")


def with_output(host: HostRun, number: int = 0) -> tuple[RunPaths, Path]:
    root = host.folder / "root"
    output = root / "out"
    output.mkdir(parents=True, exist_ok=True)
    return ended(host, number, outputs=[{"path": str(output), "root": str(root)}]), output


def test_an_output_that_names_a_run_keeps_it(host: HostRun) -> None:
    paths, output = with_output(host)
    assert why_kept(host, paths) is None
    marker = {"wire": 1, "run_id": RUN, "owner": user_name(os.getuid())}
    write(output / OWNER_MARKER, marker)
    assert why_kept(host, paths) is None, "as `ctl clear` leaves it"
    write(output / "hs_0.safetensors", "x")
    assert "is marked as its output" in (why_kept(host, paths) or "")
    write(output / OWNER_MARKER, {**marker, "run_id": OTHER})
    assert why_kept(host, paths) is None
    write(output / OUTPUT_LEDGER / f"{RUN}.rank-0.jsonl", "")
    assert f"the ledger of {output} names it" in (why_kept(host, paths) or "")
    os.rename(output, output.with_name("trained"))
    assert why_kept(host, paths) is None
    os.rename(output.parent, host.folder / "unmounted")
    assert "cannot be seen" in (why_kept(host, paths) or "")


def test_a_failed_runs_empty_records_go_on_counting_as_spent(host: HostRun) -> None:
    """Without the folder of the run that left them, the next extraction would be refused as if they were samples."""
    from remote_payload.host.listing import scan

    paths, output = with_output(host)
    change(host, paths.result, end_reason="job-failed")
    age(paths.folder)
    write(output / OWNER_MARKER, {"wire": 1, "run_id": RUN, "owner": user_name(os.getuid())})
    write(output / OUTPUT_LEDGER / f"{RUN}.rank-0.jsonl", "")
    look(host, confirmed=confirmed(look(host)))
    assert is_spent(str(host.workdir), str(output), scan(str(output), str(output.parent)))


@pytest.mark.parametrize(
    "line", [{"index": 0, "file": "hs_0.safetensors"}, {"index": 0, "file": "hs_0", "kept": True}]
)
def test_samples_that_a_run_vouches_for_keep_it(host: HostRun, line: dict[str, Any]) -> None:
    """As `ctl convert` reads them: from the run's own ledger, which names those too that an earlier run wrote."""
    paths, output = with_output(host)
    write(Path(paths.ledger, "driver.jsonl"), json.dumps({"index": 1, "skipped": "too long"}) + "\n")
    age(paths.folder)
    assert why_kept(host, paths) is None
    write(Path(paths.ledger, "rank-0.jsonl"), json.dumps(line) + "\n")
    age(paths.folder)
    assert "`ctl convert` reads its records" in (why_kept(host, paths) or "")
    write(output / OWNER_MARKER, {"wire": 1, "run_id": RUN, "owner": user_name(os.getuid())})
    assert why_kept(host, paths) is None, "as `ctl clear` leaves it: they are gone"
    (output / OWNER_MARKER).unlink()
    output.rmdir()
    assert "as if it were not mounted" in (why_kept(host, paths) or "")
    (output.parent / "of-another-run").mkdir()
    assert why_kept(host, paths) is None


def test_a_run_stays_until_every_byte_is_copied(host: HostRun) -> None:
    paths = ended(host)
    whole = copies(host)[RUN]

    def why(**held: int | None) -> str | None:
        copied = {name: held.get(Path(name).stem, size) for name, size in whole.items()}
        return why_kept(host, paths, copied={RUN: {name: size for name, size in copied.items() if size is not None}})

    assert why() is None
    assert why(summary=12) is None  # a workstation adds to its own
    assert "have not been copied" in (why_kept(host, paths, copied={}) or "")
    assert "log/000001.log has not been copied" in (why(**{"000001": 999}) or "")
    assert "events/supervisor.jsonl has not been copied" in (why(supervisor=None) or "")
    assert "result.json has not been copied" in (why(result=None) or "")
    os.unlink(paths.result)
    age(paths.folder)
    assert why(result=None) is None  # a lost run has none


def test_what_was_never_launched_has_nothing_to_be_copied(host: HostRun) -> None:
    paths = ended(host)
    never_launched(host, paths)
    age(paths.folder)
    assert why_kept(host, paths, copied={}) is None


def test_the_records_of_an_extraction_are_known() -> None:
    assert {settings.MANIFEST, settings.CANARY, settings.REHEARSAL} <= needed.RECORDS
    paths = vars(RunPaths("/run"))
    assert {os.path.relpath(path, "/run").split("/")[0] for path in paths.values()} - {"."} <= needed.RECORDS
