"""Commands in containers: by a real podman; by a stand-in for Docker, whose daemon no test may start."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import podman
from support.commandhost import CommandHost
from support.hostrun import left_by_the_run, wait_until

from remote_payload.host import container, finish
from remote_payload.host.layout import Layout, RunPaths
from remote_payload.host.pump import PumpKeeper, open_pipe

DOCKER = """#!/bin/sh
# What matters of Docker: the client is ours, the container is not, and lives on until it is removed by name.
cd {folder}
case "$1" in
run)
  printf '%s\\n' "$@" > argv
  env > environ
  name=$(printf '%s\\n' "$@" | sed -n '/^--name$/{{n;p;}}')
  env -i setsid sleep 300 </dev/null >/dev/null 2>&1 &
  echo $! > "container-$name"
  sleep "$HOW_LONG"
  exit 3;;
rm)
  if [ -f "container-$4" ]; then kill -9 "$(cat "container-$4")"; rm "container-$4"; exit 0; fi
  echo "Error response from daemon: No such container: $4" >&2; exit 1;;
esac
"""

PODMAN = """
argv = ["/usr/bin/python3", "-c", '''
import os, sys
print("inside", os.getpid(), os.getcwd(), os.environ["PLAIN"], len(os.environ["API_TOKEN"]), os.path.exists("/work"))
open(os.path.join(sys.argv[1], "a.jsonl"), "w").write("{}")
if sys.argv[2] == "wait":
    sys.stdout.flush()
    import time
    time.sleep(300)
raise ValueError
''', "{output}"]
cwd = "{output}"
tracebacks = true
env = { PLAIN = "p" }
secrets = ["API_TOKEN"]
[[outputs]]
path = "OUTPUT"
[container]
runtime = "podman"
image = "IMAGE"
options = OPTIONS
mounts = ["/usr:/usr:ro"]
[limits]
stop_grace = 1
"""


@pytest.fixture(scope="module")
def programs() -> Iterator[Path]:
    # Podman takes no runroot of more than 50 characters. What a container left is not always ours to delete.
    with tempfile.TemporaryDirectory(prefix="ctl-p-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield podman.install(Path(folder))


def contained(host: CommandHost, programs: Path, word: str) -> dict[str, object]:
    host.env = {"PATH": f"{programs}:{os.environ['PATH']}"}
    options = json.dumps(["--network", "host", *podman.LIMITS])
    text = PODMAN.replace("OUTPUT", f"{host.outputs}/o").replace("IMAGE", podman.IMAGE).replace("OPTIONS", options)
    return host.playbook(text, word, host={"secrets": {"API_TOKEN": {"env": "API_TOKEN"}}})


def test_podman_runs_it_with_its_folders_secrets_and_tracebacks(host: CommandHost, programs: Path) -> None:
    plan = contained(host, programs, "end")
    ended = host.finish(plan, API_TOKEN="hidden-value")
    assert ended["log"].startswith(f"inside 1 {host.outputs}/o p 12 False\n"), ended["log"]
    assert (ended["end_reason"], ended["exit_code"], left_by_the_run(ended)) == ("job-failed", 1, [])
    assert ended["gpus_clean"] is (True if os.getuid() == 0 else "unknown")
    problem = ended["summary"]["problems"][0]
    assert (problem["what"], problem["traceback"].splitlines()[-1]) == ("ValueError", "ValueError")
    assert (host.outputs / "o" / "a.jsonl").read_text() == "{}"
    for path in host.folder.rglob("*"):
        if path.is_file() and not stat.S_ISFIFO(path.stat().st_mode):
            assert b"hidden-value" not in path.read_bytes(), path


def test_a_container_is_stopped_and_removed(host: CommandHost, programs: Path) -> None:
    plan = contained(host, programs, "wait")
    paths = host.launch(plan, {"API_TOKEN": "x"})
    wait_until(lambda: b"inside" in host.log(paths), "the container works")
    answer = host.ask("stop", {"run_id": plan["run_id"], "grace_s": 1, "force": False})
    assert (answer["end_reason"], left_by_the_run(answer)) == ("stopped", [])
    assert container.end(RunPaths(paths.folder))[1] is None


@pytest.mark.parametrize(
    ("how_long", "limit", "reason"), [("0", "600", "job-failed"), ("300", "3", "limit-exceeded")]
)
def test_docker_is_removed_by_name_and_leaves_the_gpus_unknown(
    host: CommandHost, how_long: str, limit: str, reason: str
) -> None:
    folder = host.folder / "docker"
    folder.mkdir()
    (folder / "docker").write_text(DOCKER.format(folder=folder))
    (folder / "docker").chmod(0o755)
    host.env = {"PATH": f"{folder}:/usr/bin:/bin", "LOGIN_ONLY": "1"}
    plan = host.playbook(
        'argv = ["python", "train.py"]\ncwd = "{output}"\nsecrets = ["API_TOKEN"]\n'
        f'[env]\nHOW_LONG = "{how_long}"\n[[outputs]]\npath = "{host.outputs}/o"\n'
        '[container]\nruntime = "docker"\nimage = "vllm/vllm-openai:v0.24.0"\nmounts = ["/models:/models:ro"]\n'
        f"[limits]\nstop_grace = 1\ntime_limit = {limit}\n",
        "--lr", "1",
        host={"secrets": {"API_TOKEN": {"env": "API_TOKEN"}}},
    )  # fmt: skip
    ended = host.finish(plan, API_TOKEN="hidden-value")
    assert (ended["end_reason"], ended["gpus_clean"], left_by_the_run(ended)) == (reason, "unknown", [])
    assert not list(folder.glob("container-*"))
    words = (folder / "argv").read_text().split("\n")[:-1]
    assert words[-5:] == ["vllm/vllm-openai:v0.24.0", "python", "train.py", "--lr", "1"]
    assert words[words.index("--name") + 1] == container.name_of(host.paths(plan).folder)
    assert words[words.index("--workdir") + 1] == f"{host.outputs}/o"
    passed = {words[number + 1] for number, word in enumerate(words) if word == "--env"}
    assert {"API_TOKEN", "HOW_LONG", "CTL_RUN_ID", "CTL_RUN_DIR", "PYTHONPATH"} <= passed
    assert "LOGIN_ONLY" not in passed
    assert "hidden-value" not in "\n".join(words)
    assert "API_TOKEN=hidden-value" in (folder / "environ").read_text()
    assert "/models:/models:ro" in words
    if os.getuid() != 0:
        assert words[words.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"


def test_a_container_that_could_not_be_removed_is_not_forgotten_for_a_log_that_was_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = Layout(str(tmp_path)).run("20260101-000000-000000")
    monkeypatch.setattr(container, "end", lambda _: (None, "the container may still run"))
    monkeypatch.setattr(finish, "prove_clean", lambda *_: (True, "no process, no memory in use"))
    done = finish.clean_up(
        paths, find=list, reap=lambda: None, known=set, grace_s=0.0, baseline=None, started=0.0,
        pipe=open_pipe(paths), keeper=PumpKeeper(str(tmp_path), "20260101-000000-000000"), cgroup=None,
    )  # fmt: skip
    assert (done.clean, done.evidence) == ("unknown", "the container may still run")
    assert [left["reason"] for left in done.leftovers] == ["the container may still run"]


def test_runs_of_the_same_id_in_two_workdirs_have_containers_of_two_names(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("a")
    named = {at: container.name_of(Layout(str(tmp_path / at)).run("20260101-000000-000000").folder) for at in "ab"}
    assert named["a"] != named["b"]
    assert named["a"].startswith("ctl-20260101-000000-000000-")
    assert container.name_of(str(tmp_path / "link/runs/20260101-000000-000000")) == named["a"]


def test_gpus_are_named_as_each_runtime_wants_them(tmp_path: Path) -> None:
    paths = RunPaths(str(tmp_path))
    plan = {
        "run_id": "20260101-000000-000000", "payload": "0" * 64, "host": {"workdir": "/w"},
        "job": {"cwd": "/w", "env": {}, "secret_env": [], "outputs": []},
    }  # fmt: skip
    words = {}
    for runtime in ("docker", "podman", "apptainer"):
        plan["job"]["container"] = {"runtime": runtime, "image": "i", "options": ["-o"], "mounts": ["/data"]}
        environ = {"PYTHONPATH": "/w/payload/" + "0" * 64, "CTL_RUN_ID": "r", "HOME": "/root"}
        words[runtime], inside = container.wrap(plan, ["python"], environ, paths, ["GPU-1", "GPU-2"])
        assert words[runtime][-3:] == ["-o", "i", "python"]
        assert "/data:/data" in words[runtime]
    assert words["docker"][words["docker"].index("--gpus") + 1] == '"device=GPU-1,GPU-2"'
    assert "nvidia.com/gpu=GPU-2" in words["podman"]
    assert words["apptainer"][:2] == ["apptainer", "exec"]
    assert "--nv" in words["apptainer"]
    assert inside["APPTAINERENV_CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert inside["APPTAINERENV_CTL_RUN_ID"] == "r"
    assert "APPTAINERENV_HOME" not in inside
