"""The verbs over a real sshd, with jobs that need no engine."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from e2e.conftest import Project

from controller.known import known_of
from controller.runfolder import RunFolder
from tools.sshd import make_key

pytestmark = pytest.mark.sshd

CONNECT_DEADLINE_S = 15.0
"""`connect_timeout_s` of hosts.toml; a start of Python and its imports come on top."""


def test_run_streams_any_command_and_repeats_its_exit_code(project: Project) -> None:
    done = project.ctl("run", "--host", "demo", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert done.returncode == 100, done.stderr
    assert "exited with code 7" in done.stderr
    logged = project.ctl("logs", "--last")
    assert sorted(logged.stdout.splitlines()) == ["err", "out"]
    summary = project.json("summary", "--last")
    assert (summary["kind"], summary["end_reason"], summary["gpus_clean"]) == ("command", "job-failed", True)


def test_a_script_that_raises_is_told_once_and_its_exception_is_the_headline(project: Project) -> None:
    code = "def f():\n    raise ValueError('bad shape')\nf()"
    done = project.ctl("run", "--host", "demo", "--tracebacks", "-qq", "--", "python3", "-c", code)
    assert done.returncode == 100
    headline, *rest = done.stderr.splitlines()
    assert re.fullmatch(r"✗ process \d+: ValueError: bad shape, at <string>:2 in f", headline)
    assert [line for line in rest if "Traceback" in line] == ["  Traceback (most recent call last):"]
    assert done.stderr.count("command exited with code 1") == 1
    assert done.stderr.count("unknown cause") == 1
    assert "driver" not in done.stderr
    watched = project.ctl("run", "--host", "demo", "--tracebacks", "--", "python3", "-c", code)
    assert watched.stderr.count("Traceback (most recent call last)") == 2, (
        "as it was raised, and as the job printed it"
    )
    assert "  its traceback stands above" in watched.stderr.splitlines()
    assert "Traceback" not in watched.stdout
    assert project.ctl("summary", "--last").stdout.count("Traceback") == 1


def test_a_failed_run_names_its_cause_with_the_place_in_its_log(project: Project) -> None:
    log = Path(__file__).parents[1] / "data" / "vllm-logs" / "h200-0.24-load-keyerror.log"
    done = project.ctl("run", "--host", "demo", "--", "sh", "-c", f"cat {log}; exit 1")
    assert done.returncode == 100
    assert "cause: config.json lacks `topk_method`" in done.stderr
    assert "log/000001.log:86" in done.stderr
    assert 'hint: add `"topk_method"' in done.stderr
    document = project.json("summary", "--last")
    assert document["triage"]["code"] == "topk-method"
    assert document["triage"]["evidence"][0]["segment"] == "log/000001.log"
    kept = project.root / "ctl-runs" / document["run_id"] / "summary.json"
    assert json.loads(kept.read_text())["triage"] == document["triage"]
    assert "topk-method" in project.ctl("summary", "--last").stdout
    shown = project.ctl("logs", "--last", "--problem")
    assert "KeyError: 'layers.2.mlp.gate.e_score_correction_bias'" in shown.stdout
    assert shown.stdout in log.read_text()
    assert "000001.log:86" in shown.stderr
    assert project.ctl("logs", "--last", "--problem", "--follow").returncode == 2
    nobody = project.ctl("logs", "--last", "--rank", "77")
    assert (nobody.returncode, nobody.stdout) == (0, "")
    assert f"no line of rank 77 in the log of {document['run_id']}: it " in nobody.stderr


def test_arguments_reach_the_command_as_they_are(project: Project) -> None:
    words = ["a b", "'", '"', "$HOME", "`id`", "*", "ümläut", "-n", "", "new\nline"]
    done = project.ctl("run", "--host", "demo", "--", "printf", "%s\\0", *words)
    assert done.returncode == 0, done.stderr
    log = subprocess.run(
        project.argv("logs", "--last"), cwd=project.root, env=project.environment(), capture_output=True, check=True,
        timeout=60,
    )  # fmt: skip
    assert log.stdout.split(b"\0")[:-1] == [word.encode() for word in words]


def test_a_second_run_is_told_who_holds_the_host_and_stop_ends_the_first(project: Project) -> None:
    words = ("run", "--host", "demo", "--detach", "--json", "--name", "holder", "--", "sleep", "300")
    first = project.ctl(*words)
    assert first.returncode == 8, first.stderr
    assert json.loads(first.stdout)["state"] in ("launching", "running"), "the host has confirmed it"
    listed = project.json("ps", "--host", "demo")
    running = [row for row in listed["runs"] if row["state"] == "running"]
    assert [row["name"] for row in running] == ["holder"]
    run_id = running[0]["run_id"]
    assert run_id in json.dumps(listed["leases"])
    refused = project.json("extract", "--host", "demo", "--playbook", "demo", "--yes", code=3)
    assert refused["error"]["code"] == "lease-busy"
    assert run_id in json.dumps(refused)
    stopped = project.json("stop", run_id)
    assert (stopped["state"], stopped["end_reason"], stopped["gpus_clean"]) == ("finished", "stopped", True)
    assert project.ctl("attach", run_id).returncode == 103
    assert project.json("stacks", run_id, code=2)["error"]["code"] == "run-ended"
    again = project.json("stop", run_id)
    assert again["end_reason"] == "stopped"


def test_attach_needs_no_local_state(project: Project, tmp_path: Path) -> None:
    started = project.ctl("run", "--host", "demo", "--detach", "--", "sh", "-c", "echo from elsewhere; sleep 2")
    assert started.returncode == 8
    run_id = project.json("ps", "--host", "demo")["runs"][0]["run_id"]
    elsewhere = tmp_path / "runs"
    other = {"CTL_RUNS_DIR": str(elsewhere), "XDG_STATE_HOME": str(tmp_path / "state")}
    attached = project.ctl("attach", run_id, "--host", "demo", **other)
    assert attached.returncode == 0, attached.stderr
    assert (elsewhere / run_id / "log" / "000001.log").read_bytes() == b"from elsewhere\n"
    (elsewhere / run_id / "plan.json").unlink()  # as after a copy that was cut off before it came to the plan
    assert known_of(RunFolder(elsewhere / run_id)).title == "sh"
    for lost in (["plan.json"], ["plan.json", "local.json"]):
        for name in lost:
            (elsewhere / run_id / name).unlink(missing_ok=True)
        again = project.ctl("attach", run_id, *(["--host", "demo"] if "local.json" in lost else []), **other)
        assert again.returncode == 0, again.stderr
        assert (elsewhere / run_id / "plan.json").exists()


def test_an_unknown_run_is_looked_for_on_no_host_but_the_one_that_is_named(project: Project, tmp_path: Path) -> None:
    started = project.ctl("run", "--host", "demo", "--detach", "--", "sh", "-c", "echo found; sleep 1")
    assert started.returncode == 8
    run_id = project.json("ps", "--host", "demo")["runs"][0]["run_id"]
    other = {"CTL_RUNS_DIR": str(tmp_path / "runs"), "XDG_STATE_HOME": str(tmp_path / "state")}
    logins = (project.server.folder / "sshd.log").read_text().count("Accepted ")
    for verb in ("attach", "stop", "logs", "summary"):
        unknown = project.ctl(verb, run_id, **other)
        assert unknown.returncode == 2
        assert f"no run of this workstation has the id `{run_id}`" in unknown.stderr
        assert "--host" in unknown.stderr
    mistyped = project.json("stop", run_id[:-1] + ("0" if run_id[-1] != "0" else "1"), code=2)["error"]
    assert mistyped["code"] == "run-unknown"
    assert mistyped["why"].startswith(f"like it: {run_id}")  # others of the same minute are like it too
    assert (project.server.folder / "sshd.log").read_text().count("Accepted ") == logins
    attached = project.ctl("attach", run_id, "--host", "demo", **other)
    assert attached.returncode == 0, attached.stderr
    assert (tmp_path / "runs" / run_id / "log" / "000001.log").read_bytes() == b"found\n"


def test_ctrl_c_after_the_confirmation_detaches(project: Project) -> None:
    controller = subprocess.Popen(
        project.argv("run", "--host", "demo", "--", "sh", "-c", "echo working; sleep 4; echo done"),
        cwd=project.root, env=project.environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert controller.stderr is not None
    lines: list[str] = []
    for line in controller.stderr:
        lines.append(line)
        if "is running" in line:
            break
    time.sleep(0.5)
    controller.send_signal(signal.SIGINT)
    rest = controller.communicate(timeout=30)[1]
    assert controller.returncode == 8, "".join(lines) + rest
    assert "ctl attach" in rest
    assert project.ctl("attach", "--last").returncode == 0
    assert project.ctl("logs", "--last").stdout == "working\ndone\n"


def test_a_finding_is_allowed_by_its_name(project: Project) -> None:
    playbook = project.playbook("no-model", ("models/kimi-k25-tiny", "models/none"))
    words = ("preflight", "--host", "demo", "--playbook", playbook, "--stale", "clear")
    refused = project.json(*words, code=3)
    failed = [finding["code"] for finding in refused["findings"] if finding["level"] == "fail"]
    assert failed == ["model-missing"]
    allowed = project.json(*words, "--allow", "model-missing", "--allow", "disk-low")
    assert [finding["code"] for finding in allowed["findings"] if finding["allowed"]] == failed
    unknown = project.json(*words, "--allow", "model-mising", code=2)
    assert "model-missing" in unknown["error"]["fix"]


def test_a_run_that_is_watched_can_be_stopped_and_read_from_another_window(project: Project) -> None:
    watcher = subprocess.Popen(
        project.argv("run", "--host", "demo", "--", "sh", "-c", "echo seen by both; sleep 300"),
        cwd=project.root, env=project.environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert watcher.stderr is not None
    for line in watcher.stderr:
        if "seen by both" in line:  # plain lines hold a command's output
            break
    assert project.ctl("logs", "--last").stdout == "seen by both\n"
    stopped = project.json("stop", "--last")
    assert (stopped["end_reason"], stopped["gpus_clean"]) == ("stopped", True)
    watcher.communicate(timeout=30)
    assert watcher.returncode == 103


def test_a_refused_run_is_not_looked_for_on_the_host(project: Project) -> None:
    name = project.playbook("refused", ('path = "models/kimi-k25-tiny"', 'path = "models/nowhere"'))
    before = {path.name for path in (project.root / "ctl-runs").iterdir()}
    project.json("extract", "--host", "demo", "--playbook", name, "--yes", code=3)
    (run_id,) = {path.name for path in (project.root / "ctl-runs").iterdir()} - before
    assert project.json("summary", run_id, code=2)["error"]["code"] == "not-launched"


def test_the_demo_recognises_its_own_sshd(project: Project) -> None:
    assert project.demo.sshd_pid() == project.server.pid


def test_preflight_reports_and_changes_nothing(project: Project) -> None:
    before = sorted(path for path in project.workdir.rglob("*") if "payload" not in path.parts)
    report = project.json("preflight", "--host", "demo", "--playbook", "demo", "--stale", "clear")
    assert report["ok"], report
    assert {finding["code"] for finding in report["findings"]} >= {"environment", "model", "data"}
    assert sorted(path for path in project.workdir.rglob("*") if "payload" not in path.parts) == before


def test_a_missing_model_is_refused_in_seconds(project: Project) -> None:
    name = project.playbook("missing", ('path = "models/kimi-k25-tiny"', 'path = "models/nowhere"'))
    refused = project.json("extract", "--host", "demo", "--playbook", name, "--yes", code=3)
    assert refused["error"]["code"] == "model-missing"
    assert "models/nowhere" in refused["error"]["what"]


def test_an_unchanged_payload_is_not_sent_again(project: Project) -> None:
    project.json("preflight", "--host", "demo", "--playbook", "demo", "--stale", "clear")
    payloads = {path: path.stat().st_ino for path in (project.workdir / "payload").iterdir()}
    done = project.ctl("run", "--host", "demo", "--", "true")
    assert "already there" in done.stderr
    assert {path: path.stat().st_ino for path in (project.workdir / "payload").iterdir()} == payloads


# --------------------------------------------------------------------------------- errors of the setting


def hosts_file(project: Project, tmp_path: Path, **changes: str) -> dict[str, str]:
    """Write a hosts.toml like the demo's with some lines changed; return the environment that uses it."""
    lines = []
    for line in project.demo.hosts_toml.read_text().splitlines():
        key = line.split(" =")[0]
        lines.append(f"{key} = {json.dumps(changes.pop(key))}" if key in changes else line)
    assert not changes, changes
    path = tmp_path / "hosts.toml"
    path.write_text("\n".join(lines))
    return {"CTL_CONFIG": str(path)}


def refused(project: Project, code: int, **env: str) -> dict[str, str]:
    started = time.monotonic()
    done = project.ctl("extract", "--host", "demo", "--playbook", "demo", "--yes", "--json", **env)
    assert time.monotonic() - started < CONNECT_DEADLINE_S + 15
    assert done.returncode == code, done.stderr
    error: dict[str, str] = json.loads(done.stdout)["error"]
    assert error["what"]
    assert error["fix"]
    return error


def runs(project: Project) -> list[str]:
    return sorted(path.name for path in (project.workdir / "runs").iterdir())


def test_a_changed_host_key_is_refused(project: Project, tmp_path: Path) -> None:
    before = runs(project)
    other = make_key(tmp_path / "other").split()[:2]
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{project.server.port} {' '.join(other)}\n")
    text = project.server.ssh_config.read_text().replace(str(project.server.known_hosts), str(known))
    (tmp_path / "ssh_config").write_text(text)
    error = refused(project, 4, **hosts_file(project, tmp_path, ssh_config=str(tmp_path / "ssh_config")))
    assert error["code"] == "host-key-changed"
    assert "ssh-keygen" in error["fix"]
    assert runs(project) == before


def test_an_unknown_host_key_is_refused_with_its_fingerprint(project: Project, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    text = project.server.ssh_config.read_text().replace(str(project.server.known_hosts), str(known))
    (tmp_path / "ssh_config").write_text(text)
    error = refused(project, 4, **hosts_file(project, tmp_path, ssh_config=str(tmp_path / "ssh_config")))
    assert error["code"] == "host-key-unknown"
    assert "SHA256:" in error["what"] + error["why"]
    assert not known.exists()


def test_a_wrong_key_is_refused(project: Project, tmp_path: Path) -> None:
    make_key(tmp_path / "stranger")
    text = project.server.ssh_config.read_text().replace(str(project.server.user_key), str(tmp_path / "stranger"))
    (tmp_path / "ssh_config").write_text(text)
    error = refused(project, 4, **hosts_file(project, tmp_path, ssh_config=str(tmp_path / "ssh_config")))
    assert error["code"] == "authentication"


def test_an_unreachable_port_is_refused(project: Project, tmp_path: Path) -> None:
    text = project.server.ssh_config.read_text().replace(f"Port {project.server.port}", "Port 1")
    (tmp_path / "ssh_config").write_text(text)
    error = refused(project, 4, **hosts_file(project, tmp_path, ssh_config=str(tmp_path / "ssh_config")))
    assert error["code"].startswith("connect")


def test_an_unknown_playbook_key_names_file_line_and_the_nearest(project: Project) -> None:
    name = project.playbook("typo", ("max_seq_len = 256", "max_seq_length = 256"))
    done = project.ctl("extract", "--host", "demo", "--playbook", name, "--json")
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert "typo.toml" in error["what"]
    assert "max_seq_len" in error["fix"]
