"""Run folders as their supervisors leave them, old enough for `prune`, and what a workstation says of its copies."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from typing import Any

from support.hostrun import HostRun

from remote_payload.host import prune
from remote_payload.host.layout import Layout, RunPaths
from remote_payload.host.liveness import boot_seconds, read_readings, user_name

OLD = "20250101-000000-0000"
HOUR = 3600.0


def dead(**other: Any) -> dict[str, Any]:
    """The identity of a process of this machine that is no more; `other` makes it one of elsewhere."""
    here = read_readings()
    mine = {"machine": here.machine, "boot": here.boot, "pidns": here.pidns, "pid": os.getpid(), "start_ticks": 1}
    return {**mine, **other}


def age(folder: str | Path, hours: float = 2.0) -> None:
    """Make everything in a folder as old as if nobody had touched it since."""
    when = time.time() - hours * HOUR
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            os.utime(os.path.join(place, name), (when, when), follow_symlinks=False)
    os.utime(folder, (when, when))


def write(path: str | Path, record: Any) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(record if isinstance(record, str) else json.dumps(record))


def ended(host: HostRun, number: int = 0, days: float = 1.0, **job: Any) -> RunPaths:
    """The folder of a run that succeeded so many days ago, as its supervisor leaves it."""
    paths = Layout(str(host.workdir)).run(f"{OLD}{number:02x}")
    run_id = os.path.basename(paths.folder)
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - days * 24 * HOUR))
    write(paths.plan, {**host.plan(job=job), "run_id": run_id})
    write(paths.run, {
        "run_id": run_id, "user": user_name(os.getuid()), "supervisor": dead(), "state": "running", "cgroup": None,
        "boot_s": boot_seconds() - 60.0, "name": "test", "kind": "command",
    })  # fmt: skip
    write(paths.result, {
        "run_id": run_id, "end_reason": "succeeded", "message": "done", "ended": when, "leftovers": [],
    })  # fmt: skip
    write(Path(paths.log, "000001.log"), "x" * 1000)
    write(Path(paths.events, "supervisor.jsonl"), "{}\n")
    os.mkfifo(paths.pipe)
    Path(paths.start_lock).touch()
    age(paths.folder, days * 24)
    return paths


def copies(host: HostRun) -> dict[str, dict[str, int]]:
    """What a workstation sends that has copied every run to its end."""
    runs = host.workdir / "runs"
    return {
        run.name: {str(path.relative_to(run)): path.stat().st_size for path in run.rglob("*") if path.is_file()}
        for run in (runs.iterdir() if runs.is_dir() else ())
    }


def request(host: HostRun, **fields: Any) -> tuple[dict[str, Any], bytes]:
    """The request of verb `prune`, and its body."""
    content = {"copied": copies(host), "confirmed": None}
    header = {"workdir": str(host.workdir), "lease_dir": str(host.lease_dir), "older_than_s": None, "keep": 0}
    content.update({name: fields.pop(name) for name in tuple(content) if name in fields})
    return {**header, **fields}, json.dumps(content).encode()


def look(host: HostRun, **fields: Any) -> dict[str, Any]:
    """The verb's answer, in this process: a start of Python for each would be most of what the tests cost."""
    out = io.BytesIO()
    assert prune.main(*request(host, **fields), out) == 0
    answer: dict[str, Any] = json.loads(out.getvalue())
    return answer


def confirmed(shown: dict[str, Any]) -> dict[str, str]:
    return {row["folder"]: row["digest"] for row in shown["runs"]}


def why_kept(host: HostRun, paths: RunPaths, **fields: Any) -> str | None:
    """Why a run's folder stays; None if it may go."""
    shown = look(host, **fields)
    whys = {each["run_id"]: each["why"] for each in shown["kept"]}
    run_id = os.path.basename(paths.folder)
    assert (run_id in whys) != (run_id in confirmed(shown)), shown
    return whys.get(run_id)
