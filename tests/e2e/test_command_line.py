"""The verbs that need a host and no engine: hosts test, clear, logs by line, diff, and the hook of an ended run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.conftest import Project
from support.hostrun import wait_until
from support.pruned import age

from remote_payload.host.liveness import Liveness, judge

pytestmark = pytest.mark.sshd

SPEAKS = "echo one; echo '(Worker_TP1 pid=9) INFO 11-29 21:45:18 [a.py:3] two'; sleep 2; echo Three; printf 'no end'"


@pytest.fixture(scope="module")
def spoken(project: Project) -> str:
    """The id of an ended run that printed four lines over two seconds."""
    assert project.ctl("run", "--host", "demo", "-q", "--", "sh", "-c", SPEAKS).returncode == 0
    return str(project.json("summary", "--last")["run_id"])


def test_a_host_introduces_itself_in_one_round_trip(project: Project) -> None:
    document = project.json("hosts", "test", "demo")
    assert document["ok"]
    assert document["report"]["python"]["vllm"]
    shown = project.ctl("hosts", "test", "demo")
    assert "output root" in shown.stdout
    assert not shown.stderr


def test_a_host_that_is_not_as_described_is_refused(project: Project) -> None:
    hosts = (project.root / ".demo" / "hosts.toml").read_text()
    text = hosts.replace("[hosts.demo", "[hosts.other").replace(
        'output_roots = ["output"]', 'output_roots = ["gone"]'
    )
    file = project.root / "other.toml"
    file.write_text(re.sub(r"(?m)^python = .*$", 'python = "/nowhere/python"', text))
    done = project.ctl("hosts", "test", "other", "--json", CTL_CONFIG=str(file))
    assert done.returncode == 3, done.stderr
    document = json.loads(done.stdout)
    assert [each["code"] for each in document["findings"] if each["level"] == "fail"] == [
        "environment-python",
        "folder",
    ]


def test_clear_shows_asks_deletes_and_looks_again(project: Project) -> None:
    folder = project.workdir / "output" / "old"
    folder.mkdir(parents=True)
    (folder / "hs_0.safetensors").write_bytes(b"x" * 10)
    foreign = project.json("clear", "output/old", "--host", "demo", "--yes", code=3)
    assert foreign["error"]["code"] == "output-foreign"
    refused = project.ctl("clear", "output/old", "--host", "demo", "--yes")
    assert "will be deleted" not in refused.stdout + refused.stderr
    marker = {"wire": 1, "run_id": "20260101-000000-abcdef", "owner": "somebody"}
    (folder / ".ctl-owner.json").write_text(json.dumps(marker))
    unasked = project.ctl("clear", "output/old", "--host", "demo")
    assert unasked.returncode == 3
    assert "--yes" in unasked.stderr
    looked = project.ctl("clear", "output/old", "--host", "demo", "--dry-run")
    assert "hs_0.safetensors" in looked.stdout
    assert (folder / "hs_0.safetensors").exists()
    cleared = project.json("clear", "output/old", "--host", "demo", "--yes")
    assert (cleared["entries"], cleared["deleted_entries"], cleared["remaining"]) == (1, 1, 0)
    assert [path.name for path in folder.iterdir()] == [".ctl-owner.json"]
    (folder / ".ctl-owner.json").write_text(json.dumps({**marker, "kind": "extract"}))
    for name in ("hs_0.safetensors", "notes.txt"):
        (folder / name).write_bytes(b"x" * 10)
    spared = project.json("clear", "output/old", "--host", "demo", "--yes")
    assert (spared["deleted_entries"], spared["not_ours"]["names"]) == (1, ["notes.txt"])
    assert sorted(path.name for path in folder.iterdir()) == [".ctl-owner.json", "notes.txt"]
    again = project.ctl("clear", "output/old", "--host", "demo", "--yes")
    assert "holds nothing of ctl's" in again.stdout
    assert "notes.txt" in again.stdout
    outside = project.json("clear", "/etc/ssh", "--host", "demo", "--yes", code=2)
    assert outside["error"]["code"] == "output-outside-roots"


def test_prune_shows_asks_deletes_and_looks_again(project: Project) -> None:
    """The newest runs of the module stay for the other tests: what goes was made here."""
    assert project.ctl("run", "--host", "demo", "-q", "--", "true").returncode == 0
    run_id = str(project.json("summary", "--last")["run_id"])
    folder = project.run_folder(run_id)
    supervisor = json.loads((folder / "run.json").read_text())["supervisor"]
    wait_until(lambda: judge(supervisor)[0] is Liveness.DEAD, "the supervisor leaves")
    early = project.json("prune", "--host", "demo", "--keep", "0", "--dry-run")
    assert "a late start must find it" in {each["run_id"]: each["why"] for each in early["kept"]}[run_id]
    age(folder)
    others = len([path for path in folder.parent.iterdir() if path.name > run_id])
    unlimited = project.json("prune", "--host", "demo", code=2)
    assert "--older-than 30d" in unlimited["error"]["fix"]
    young = project.json("prune", "--host", "demo", "--older-than", "1h")
    assert (young["runs"], young["older_than_s"]) == ([], 3600.0)
    keep = ("--keep", str(others))
    unasked = project.ctl("prune", "--host", "demo", *keep)
    assert unasked.returncode == 3
    assert "--yes" in unasked.stderr
    assert run_id in unasked.stderr
    looked = project.ctl("prune", "--host", "demo", *keep, "--dry-run")
    assert run_id in looked.stdout
    assert folder.is_dir()
    only = [path.name for path in folder.parent.iterdir() if path.name < run_id]
    aside = project.workdir / "aside"
    aside.mkdir()
    for name in only:  # runs of other tests
        (folder.parent / name).rename(aside / name)
    try:
        local = project.root / "ctl-runs" / run_id / "result.json"
        local.rename(local.with_name("moved"))
        kept = project.json("prune", "--host", "demo", *keep, "--yes")
        assert (kept["runs"], [each["run_id"] for each in kept["kept"]]) == ([], [run_id])
        assert "result.json has not been copied" in kept["kept"][0]["why"]
        local.with_name("moved").rename(local)
        pruned = project.json("prune", "--host", "demo", *keep, "--yes")
    finally:
        for name in only:
            (aside / name).rename(folder.parent / name)
    assert (pruned["deleted"], [row["run_id"] for row in pruned["runs"]]) == ([run_id], [run_id])
    assert pruned["deleted_bytes"] == sum(row["bytes"] for row in pruned["runs"]) > 0
    assert not folder.exists()
    assert project.json("summary", run_id)["run_id"] == run_id  # the copy here is whole
    attached = project.ctl("attach", run_id, "--progress", "plain")
    assert attached.returncode == 0, attached.stderr
    assert "has no folder of the run any more" in attached.stderr
    # Nothing is left to be stopped, as of every run that has ended: no failure of the command.
    stopped = project.json("stop", run_id)
    assert (stopped["state"], stopped["end_reason"], stopped["killed"]) == ("finished", "succeeded", [])
    assert "has deleted its folder since" in stopped["message"]
    assert project.json("stacks", run_id, code=2)["error"]["code"] == "run-ended"


def test_logs_are_selected_by_line(project: Project, spoken: str) -> None:
    def lines(*words: str) -> list[str]:
        done = project.ctl("logs", spoken, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert len(lines()) == 4
    assert [line.split("] ")[-1] for line in lines("--rank", "1")] == ["two"]
    assert lines("--search", "three") == ["Three"]
    assert lines("--tail", "2") == ["Three", "no end"]
    assert lines("--since", "1h", "--prefix", "--tail", "1") == ["[job] no end"]
    assert lines("--until", "2020-01-01T00:00:00Z") == []
    stamps = [line.split()[0] for line in lines("--timestamps")]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", stamp) for stamp in stamps)
    assert stamps == sorted(stamps)
    assert stamps[0] < stamps[2]
    assert lines("--since-time", stamps[2]) == ["Three", "no end"]


def test_following_prints_every_line_once_and_ends_with_the_run(project: Project) -> None:
    started = project.ctl(
        "run", "--host", "demo", "-d", "--", "sh", "-c", "for i in 1 2 3; do echo $i; sleep 1; done"
    )
    assert started.returncode == 8
    followed = project.ctl("logs", "--last", "--follow", "--search", "[0-9]")
    assert (followed.returncode, followed.stdout) == (0, "1\n2\n3\n")
    assert project.ctl("logs", "--last", "--previous").returncode == 0


def test_a_run_that_another_window_watches_can_be_followed(project: Project) -> None:
    watcher = subprocess.Popen(
        project.argv("run", "--host", "demo", "--", "sh", "-c", "echo first; sleep 4; echo last"),
        cwd=project.root, env=project.environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert watcher.stderr is not None
    for line in watcher.stderr:
        if "first" in line:
            break
    followed = project.ctl("logs", "--last", "-f")
    watcher.communicate(timeout=60)
    assert (followed.returncode, followed.stdout) == (0, "first\nlast\n")


def test_two_runs_are_compared(project: Project, spoken: str) -> None:
    assert project.ctl("run", "--host", "demo", "-q", "--", "true").returncode == 0
    other = project.json("summary", "--last")["run_id"]
    document = project.json("diff", spoken, other)
    assert (document["runs"], document["same"]) == ([spoken, other], False)
    keys = {each["key"] for each in document["changes"]["plan"]}
    assert "command" in keys
    assert "job.cwd" not in keys, "each run has a folder of its own"
    assert "how it ended" not in project.ctl("diff", spoken, other).stdout


def test_the_end_of_a_run_is_told_once_also_after_attach(project: Project, tmp_path: Path) -> None:
    told, program = tmp_path / "told", tmp_path / "tell.py"
    program.write_text(
        f"import json, sys; open({str(told)!r}, 'a').write(json.load(sys.stdin)['end_reason'] + '\\n')"
    )
    hosts = (project.root / ".demo" / "hosts.toml").read_text()
    hook = f"on_finish = {json.dumps([sys.executable, str(program)])}\nprice_per_gpu_hour = 2.0\n\n[hosts.demo.env]"
    file = project.root / "with-hook.toml"
    file.write_text(hosts.replace("[hosts.demo.env]", hook))
    configured = {"CTL_CONFIG": str(file)}
    started = project.ctl("run", "--host", "demo", "--detach", "--", "sleep", "1", **configured)
    assert started.returncode == 8
    assert not told.exists()
    assert project.ctl("attach", "--last", **configured).returncode == 0
    assert project.ctl("attach", "--last", **configured).returncode == 0
    assert told.read_text() == "succeeded\n"
    document = json.loads(project.ctl("summary", "--last", "--json", **configured).stdout)
    assert (document["gpu_hours"], document["cost"]) == (None, None)  # a host without GPUs


def test_a_stop_is_said_once(project: Project) -> None:
    project.ctl("run", "--host", "demo", "--detach", "--", "sleep", "300")
    project.json("stop", "--last")
    attached = project.ctl("attach", "--last", "-q")
    assert attached.returncode == 103
    assert "✗" not in attached.stderr
    assert attached.stdout.count("stopped on request") <= 1
