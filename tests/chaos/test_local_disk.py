"""The workstation's disk is full, or may not be written: before a launch, right after it, while a run is copied."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import chaos
from support.disk import fill, small_disk

from controller import pipeline
from controller.commandverbs import plan_command
from controller.core.errors import CopyFailed, ExitCode
from controller.core.events import Event
from controller.run import Run
from controller.runfolder import RunFolder

pytestmark = pytest.mark.sshd


@pytest.fixture
def project(site: chaos.Site, tmp_path: Path) -> chaos.Project:
    return site.project(tmp_path / "project", tmp_path / "ssh_config")


@pytest.fixture
def runs_disk(project: chaos.Project) -> Iterator[Path]:
    """2 MiB for the project's run folders."""
    with small_disk(project.folder / "ctl-runs", 2 << 20) as folder:
        yield folder


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True, timeout=20)


def refused_before_launch(site: chaos.Site, project: chaos.Project, code: str) -> dict[str, str]:
    exit_code, stdout, stderr = project.ctl("run", "--host", "stub", "--json", "--", "true")
    error: dict[str, str] = json.loads(stdout)["error"]
    assert (exit_code, error["code"]) == (ExitCode.REFUSED, code), stderr
    assert "nothing was launched" in error["what"]
    assert "CTL_RUNS_DIR" in error["fix"]
    assert b"Traceback" not in stderr
    assert not (site.host.workdir / "runs").exists()
    return error


def test_no_room_before_a_launch_is_refused(site: chaos.Site, project: chaos.Project, runs_disk: Path) -> None:
    fill(runs_disk, 0)
    assert str(runs_disk) in refused_before_launch(site, project, "local-disk-full")["why"]


def test_a_read_only_folder_is_refused(site: chaos.Site, project: chaos.Project, runs_disk: Path) -> None:
    remount(runs_disk, "ro")
    assert "Read-only file system" in refused_before_launch(site, project, "local-unwritable")["why"]


def test_a_file_in_the_folders_place_is_refused(site: chaos.Site, project: chaos.Project) -> None:
    (project.folder / "ctl-runs").write_text("mine")
    refused_before_launch(site, project, "local-unwritable")
    assert (project.folder / "ctl-runs").read_text() == "mine"


@pytest.mark.parametrize(("stage", "launched"), [("preflight", False), ("launch", True)])
def test_a_disk_that_fills_up_on_the_way_never_hides_what_became_of_the_launch(
    site: chaos.Site,
    project: chaos.Project,
    runs_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    launched: bool,
) -> None:
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv("HOME", str(project.folder))
    intention = plan_command("stub", ["true"], name="job", cwd=None, wait=False, tracebacks=False)
    notices: list[str] = []

    class Filler:
        def event(self, event: Event) -> None:
            if (event.type, event.data.get("name"), event.data.get("status")) == ("stage", stage, "done"):
                fill(runs_disk, 0)
            if event.type == "notice":
                notices.append(str(event.data["code"]))

        def log(self, data: bytes) -> None: ...

    def launch() -> Run:
        return pipeline.launch(intention, sinks=[Filler()], confirm=lambda _outputs, _listings: True)

    run_id = intention.plan["run_id"]
    host_folder = site.host.workdir / "runs" / run_id
    with pytest.raises(Exception, match="cannot be written on this workstation") as caught:
        launch()
    assert caught.value.code == "local-disk-full"  # type: ignore[attr-defined]
    assert host_folder.exists() is launched
    (runs_disk / "filler").unlink()
    if launched:
        assert isinstance(caught.value, CopyFailed)
        assert f"ctl attach {run_id}" in caught.value.fix
        code, _, stderr = project.ctl("attach", run_id)
        assert code == ExitCode.OK, stderr
    else:
        assert caught.value.exit_code is ExitCode.REFUSED  # type: ignore[attr-defined]


def test_a_stop_is_told_though_its_copy_has_no_room(
    site: chaos.Site, project: chaos.Project, runs_disk: Path
) -> None:
    code, _, stderr = project.ctl("run", "--host", "stub", "--detach", "--", "sh", "-c", "seq 400000; sleep 300")
    assert code == ExitCode.DETACHED, stderr
    fill(runs_disk, 4096)
    code, stdout, stderr = project.ctl("stop", "--last", "--json")
    assert (code, json.loads(stdout)["end_reason"]) == (ExitCode.OK, "stopped"), stderr
    assert b"local-disk-full" in stderr
    remount(runs_disk, "size=64m")
    assert project.ctl("attach", "--last")[0] == ExitCode.JOB_STOPPED
    assert project.ctl("logs", "--last")[1].startswith(b"1\n2\n3\n")


def test_a_full_disk_behind_a_redirection_is_told(site: chaos.Site, project: chaos.Project) -> None:
    assert project.ctl("run", "--host", "stub", "--", "echo", "hello")[0] == ExitCode.OK
    for words in (["logs", "--last"], ["summary", "--last", "--json"]):
        with open("/dev/full", "wb") as full:
            process = project.start(*words, stdout=full)
            _, stderr = process.communicate(timeout=chaos.DEADLINE_S)
        assert process.returncode == ExitCode.UNEXPECTED, words
        assert b"this workstation has no room left" in stderr
        assert b"Traceback" not in stderr


def test_the_controllers_full_disk_ends_the_watch_and_not_the_run(site: chaos.Site, tmp_path: Path) -> None:
    launched = site.launch(2, 2_000_000)
    launched.open_gate(0)
    launched.open_gate(1)
    with small_disk(tmp_path / "small", 2 << 20) as small:
        folder = RunFolder.create(small, launched.plan["run_id"])
        folder.write_plan(launched.plan)

        def attach() -> Run:
            return Run(folder, site.host.transport, site.host.record, launched.plan["payload"])

        with pytest.raises(CopyFailed) as caught:
            attach().watch()
        assert (caught.value.exit_code, caught.value.code) == (ExitCode.DETACHED, "local-disk-full")
        assert str(small) in str(caught.value)
        assert "ctl attach" in caught.value.fix

        remount(small, "size=64m")
        seen = bytearray()

        class Sink:
            def event(self, event: Event) -> None: ...

            def log(self, data: bytes) -> None:
                seen.extend(data)

        run = attach()
        run.add_sink(Sink())
        assert run.watch().end_reason == "succeeded"
        assert bytes(seen) == launched.expected_log() == b"".join(run.logs())
        assert json.loads((folder.path / "result.json").read_bytes())["log_bytes"] == len(seen)


def test_an_attach_that_may_not_write_says_that_the_run_goes_on(
    site: chaos.Site, project: chaos.Project, runs_disk: Path
) -> None:
    code, _, stderr = project.ctl("run", "--host", "stub", "--detach", "--", sys.executable, "-c", "print('hi')")
    assert code == ExitCode.DETACHED, stderr
    remount(runs_disk, "ro")
    code, _, stderr = project.ctl("attach", "--last")
    assert (code, b"local-unwritable" in stderr) == (ExitCode.DETACHED, True), stderr
    assert b"not affected" in stderr
