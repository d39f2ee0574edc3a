"""Pruning: only folders of runs that are over and needed for nothing go, as they were shown, and nothing else."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.hostrun import HostRun, wait_until
from support.pruned import OLD, age, confirmed, copies, dead, ended, look, request, write

from remote_payload.host import prune as module
from remote_payload.host.errors import HostError
from remote_payload.host.framing import pack_frame
from remote_payload.host.layout import OWNER_MARKER, Layout
from remote_payload.host.liveness import Liveness, judge, user_name
from remote_payload.host.needed import Needs

RUN = f"{OLD}00"
ASIDE = module.ASIDE + RUN


def chosen_of(host: HostRun) -> tuple[Layout, Needs, dict[str, module.Chosen]]:
    """What a prune has chosen before it deletes, for tests of what comes between."""
    layout = Layout(str(host.workdir))
    needs = Needs(layout, str(host.lease_dir), copies(host))
    chosen, _ = module._choose(layout, request(host)[0], needs)
    return layout, needs, chosen


def names(host: HostRun) -> list[str]:
    return sorted(os.listdir(host.workdir / "runs"))


def test_a_real_run_goes_with_its_folder_and_nothing_else_does(host: HostRun) -> None:
    plan = host.plan(host.python("print('hello')"))
    host.run(plan)
    paths = host.paths(plan)
    supervisor = host.read(paths.run)["supervisor"]
    wait_until(lambda: judge(supervisor)[0] is Liveness.DEAD, "the supervisor leaves")
    beside = host.workdir / "runs" / "notes"
    beside.mkdir()
    assert "less than 60 min ago" in look(host)["kept"][0]["why"]
    age(paths.folder)
    shown = look(host)
    (row,) = shown["runs"]
    assert (row["run_id"], row["folder"], row["unfinished"]) == (plan["run_id"], plan["run_id"], False)
    assert (row["name"], row["end_reason"]) == ("test", "succeeded")
    assert row["bytes"] > 0
    assert os.path.isdir(paths.folder)
    answer = look(host, confirmed=confirmed(shown))
    assert answer["deleted"] == [{"run_id": plan["run_id"], "entries": row["entries"], "bytes": row["bytes"]}]
    assert (answer["failed"], answer["remaining"]) == ([], [])
    assert names(host) == ["notes"]
    assert host.ask("ps", {"lease_dir": str(host.lease_dir)})["runs"] == []


def test_age_and_number_choose_together(host: HostRun) -> None:
    for number, days in enumerate((90.0, 40.0, 35.0, 1.0)):
        ended(host, number, days)
    runs = {number: f"{OLD}{number:02x}" for number in range(4)}

    def chosen(**fields: Any) -> list[str]:
        shown = look(host, **fields)
        assert shown["kept"] == []
        return [row["run_id"] for row in shown["runs"]]

    assert chosen() == [runs[number] for number in range(4)]
    assert chosen(older_than_s=30 * 86400.0) == [runs[0], runs[1], runs[2]]
    assert chosen(keep=2) == [runs[0], runs[1]]
    assert chosen(older_than_s=37 * 86400.0, keep=3) == [runs[0]]
    assert chosen(keep=9) == []


def test_a_lost_run_is_as_old_as_the_last_that_it_wrote(host: HostRun) -> None:
    """Its id is of 2025: one that was launched long ago may have worked until yesterday."""
    paths = ended(host, days=2.0)
    os.unlink(paths.result)
    age(paths.folder, 48.0)
    assert [row["state"] for row in look(host, older_than_s=86400.0)["runs"]] == ["lost"]
    yesterday = time.time() - 20 * 3600.0
    os.utime(Path(paths.log, "000001.log"), (yesterday, yesterday))
    shown = look(host, older_than_s=86400.0)
    assert (shown["runs"], shown["kept"]) == ([], [])


@pytest.mark.parametrize("change", ["content", "added", "gone", "unasked"])
def test_what_is_not_as_it_was_shown_stays_with_all_others(host: HostRun, change: str) -> None:
    first, second = ended(host, 0), ended(host, 1)
    wanted = confirmed(look(host))
    if change == "content":
        Path(first.log, "000001.log").write_bytes(b"y" * 1001)
    elif change == "added":
        Path(first.log, "000002.log").touch()
    elif change == "gone":
        os.rename(first.folder, host.workdir / "elsewhere")
    else:
        wanted[f"{OLD}77"] = "0" * 64
    code, stdout = host.call("prune", *request(host, confirmed=wanted))
    error = json.loads(stdout)["error"]
    assert (code, error["code"]) == (70, "prune-changed")
    assert os.path.exists(second.result)


def test_what_is_no_folder_is_left_alone(host: HostRun) -> None:
    paths = ended(host)
    target = host.workdir / "precious"
    os.rename(paths.folder, target)
    os.symlink(target, paths.folder)
    shown = look(host)
    assert shown["runs"] == []
    assert "symbolic link" in shown["kept"][0]["why"]
    os.rename(paths.folder, host.workdir / "runs" / ASIDE)  # nor under the name of what was put aside
    shown = look(host)
    assert (shown["runs"], len(shown["kept"])) == ([], 1)
    assert (target / "log" / "000001.log").exists()


@pytest.mark.parametrize(
    ("change", "why"), [("plan", "no longer what was shown"), ("needed", "names it"), ("aside", "there already")]
)
def test_under_the_lock_a_run_is_judged_once_more(host: HostRun, change: str, why: str) -> None:
    paths = ended(host)
    layout, needs, chosen = chosen_of(host)
    if change == "plan":
        write(paths.plan, {**host.read(paths.plan), "created": "2026-02-02T00:00:00Z"})
        age(paths.folder)
    elif change == "needed":
        other = ended(host, 1)
        write(other.plan, {**host.read(other.plan), "extract": {"source": paths.folder}})
        os.unlink(other.result)
        write(other.run, {**host.read(other.run), "supervisor": dead(machine="elsewhere")})
    else:
        (host.workdir / "runs" / ASIDE).mkdir()
    with pytest.raises(HostError, match=why):
        module._put_aside(layout, RUN, chosen[RUN].contents, needs)
    assert os.path.exists(paths.result)


@pytest.mark.parametrize("kind", ["lost", "cancelled"])
def test_a_run_without_a_result_goes_too(host: HostRun, kind: str) -> None:
    """Under its lock it is not taken for one that somebody else starts or stops."""
    paths = ended(host)
    if kind == "cancelled":
        write(paths.cancelled, "the controller gave up")
        os.unlink(paths.run)
    os.unlink(paths.result)
    age(paths.folder)
    assert look(host, confirmed=confirmed(look(host)))["failed"] == []
    assert names(host) == []


def test_the_lock_is_given_up_before_anything_is_deleted(host: HostRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS keeps an open file that is unlinked under another name in its folder, which then cannot be removed."""
    ended(host)
    original = module.delete
    open_then: list[str] = []

    def spy(*args: Any, **options: Any) -> Any:
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the listing's own
                open_then.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        return original(*args, **options)

    monkeypatch.setattr(module, "delete", spy)
    assert look(host, confirmed=confirmed(look(host)))["failed"] == []
    assert ASIDE in open_then
    assert "start.lock" not in open_then
    assert names(host) == []


def test_what_appears_during_the_deletion_keeps_a_folder_that_no_reader_takes_for_a_run(host: HostRun) -> None:
    ended(host)
    layout, needs, chosen = chosen_of(host)
    module._put_aside(layout, RUN, chosen[RUN].contents, needs)
    (host.workdir / "runs" / ASIDE / "log" / "000002.log").write_bytes(b"late")
    with pytest.raises(HostError, match="entries stay"):
        module._delete(layout, ASIDE, chosen[RUN].contents)
    assert names(host) == [ASIDE]
    shown = look(host, keep=9, older_than_s=1e9)
    assert [(row["run_id"], row["folder"], row["unfinished"]) for row in shown["runs"]] == [(RUN, ASIDE, True)]
    assert look(host, confirmed=confirmed(shown))["remaining"] == []
    assert names(host) == []


def test_what_cannot_be_deleted_is_told_and_the_others_go(host: HostRun, monkeypatch: pytest.MonkeyPatch) -> None:
    ended(host, 0)
    ended(host, 1)
    header, body = request(host, confirmed=confirmed(look(host)))
    original = module.delete

    def fail(place: Any, *args: Any, **options: Any) -> Any:
        if place.name == ASIDE:
            raise OSError(5, "Input/output error")
        return original(place, *args, **options)

    monkeypatch.setattr(module, "delete", fail)
    out = io.BytesIO()
    module.main(header, body, out)
    answer = json.loads(out.getvalue())
    assert [each["run_id"] for each in answer["deleted"]] == [f"{OLD}01"]
    assert [(each["run_id"], "Input/output" in each["why"]) for each in answer["failed"]] == [(RUN, True)]
    assert answer["remaining"] == [RUN]
    assert names(host) == [ASIDE]


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from remote_payload.host import main, prune
function, number = sys.argv[2], int(sys.argv[3])
original, calls = getattr(os, function), [0]
def deadly(*args, **options):
    if function == "fsync" or options.keys() & {"dir_fd", "src_dir_fd"}:
        calls[0] += 1
        if calls[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **options)
setattr(os, function, deadly)
sys.argv = ["main.py", "prune"]
sys.exit(main.main())
"""


@pytest.mark.parametrize(
    ("function", "number", "left"),
    [
        ("rename", 1, RUN),  # judged, and not renamed
        ("fsync", 1, ASIDE),  # renamed, and nobody knows whether the disk does
        ("unlink", 1, ASIDE),
        ("unlink", 3, ASIDE),  # half of it deleted
        ("rmdir", 1, ASIDE),
        ("rmdir", 3, ASIDE),  # only the empty folder is left
        ("fsync", 2, None),  # gone
    ],
)
def test_a_prune_that_is_killed_leaves_no_half_run(
    host: HostRun, function: str, number: int, left: str | None
) -> None:
    """What `ctl preflight --fix` offers to delete depends on it: half a run would be one that did not succeed."""
    paths = ended(host)
    root = host.folder / "root"
    output = root / "moved"  # the samples of this very run, where its plan does not name them
    write(output / "hs_0.safetensors", "samples")
    write(output / OWNER_MARKER, {"wire": 1, "run_id": RUN, "owner": user_name(os.getuid()), "created": ""})
    header, body = request(host, confirmed=confirmed(look(host)))
    assert os.path.isdir(paths.folder)
    repository = str(Path(module.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-S", "-c", KILLED, repository, function, str(number)],
        input=pack_frame(header, body), capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert names(host) == ([left] if left else [])
    rows = host.ask("ps", {"lease_dir": str(host.lease_dir)})["runs"]
    assert [row["end_reason"] for row in rows] == (["succeeded"] if left == RUN else [])
    asked = [{"path": str(output), "root": str(root), "stale": "fail", "adopt": False}]
    fix = {"lease_dir": str(host.lease_dir), "outputs": asked, "confirmed": None}
    assert host.ask("tidy", fix)["actions"] == []
    shown = look(host)
    assert [(row["folder"], row["unfinished"]) for row in shown["runs"]] == ([(left, left == ASIDE)] if left else [])
    answer = look(host, confirmed=confirmed(shown))
    assert (answer["failed"], answer["remaining"]) == ([], [])
    assert names(host) == []
    assert (output / "hs_0.safetensors").exists()
