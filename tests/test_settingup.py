"""`ctl init` and `ctl hosts add`: what they write, that they overwrite nothing, and leave every other byte."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from controller import settingup
from controller.core.errors import ExitCode, RefusedError

REPOSITORY = Path(__file__).parents[1]

ANSWERS = (
    "--address", "root@10.0.0.9:2222", "--python", "/opt/vllm/bin/python", "--model", "/models/Kimi-K2.5",
    "--data", "/data/prompts.jsonl",
)  # fmt: skip

ADDED = ("--python", "/opt/vllm/bin/python", "--gpus", "8", "--output-root", "/data/out")


def environment(folder: Path, **env: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(REPOSITORY), **env}


def ctl(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "controller", *words], cwd=folder, env=environment(folder, **env), text=True,
        capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False,
    )  # fmt: skip


def test_init_writes_two_files_that_make_a_plan(tmp_path: Path) -> None:
    done = ctl(tmp_path, "init", *ANSWERS, "--name", "gpu1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("next: ctl hosts test gpu1, then ctl plan --host gpu1\n")
    hosts = tomllib.loads((tmp_path / "hosts.toml").read_text())
    assert hosts["hosts"]["gpu1"]["port"] == 2222
    assert (tmp_path / "playbooks" / "kimi-k2.5.toml").read_text().count("#") > 10
    planned = ctl(tmp_path, "plan", "--host", "gpu1", "--json")
    assert planned.returncode == 0, planned.stderr
    document = json.loads(planned.stdout)
    assert document["host"]["address"] == "10.0.0.9"
    assert document["outputs"][0]["path"] == "/root/ctl/output/kimi-k2.5"


def test_init_asks_nobody_who_would_not_see_the_questions(tmp_path: Path) -> None:
    """Somebody may type, but what is asked goes into a file."""
    terminal, other_end = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "controller", "init"], cwd=tmp_path, env=environment(tmp_path), text=True,
        capture_output=True, stdin=other_end, timeout=60, check=False,
    )  # fmt: skip
    os.close(terminal)
    os.close(other_end)
    assert done.returncode == 2
    assert "nobody is there to answer the questions" in done.stderr


def test_init_says_what_it_assumed_and_where(tmp_path: Path) -> None:
    told = ctl(tmp_path, "init", *ANSWERS, "--name", "gpu1").stderr
    for path, line in (("hosts.toml", "gpus = 8"), ("playbooks/kimi-k2.5.toml", "tensor_parallel_size = 8")):
        lines = (tmp_path / path).read_text().splitlines()
        number = next(i for i, text in enumerate(lines, 1) if text.startswith(line))
        assert f"  {tmp_path / path}:{number}: {line}\n" in told
    other = tmp_path / "other"
    other.mkdir()
    assert "assumed" not in ctl(other, "init", *ANSWERS, "--gpus", "8").stderr


def test_init_overwrites_neither_file(tmp_path: Path) -> None:
    for name in ("hosts.toml", "playbooks/kimi-k2.5.toml"):
        folder = tmp_path / name.replace("/", "-")
        (folder / "playbooks").mkdir(parents=True)
        (folder / name).write_text("# mine\n")
        done = ctl(folder, "init", *ANSWERS)
        assert done.returncode == 2
        assert "is not overwritten" in done.stderr
        files = {str(path.relative_to(folder)) for path in folder.rglob("*.toml")}
        assert files == {name}
        assert (folder / name).read_text() == "# mine\n"


def test_without_a_terminal_init_names_the_flags_that_answer(tmp_path: Path) -> None:
    done = ctl(tmp_path, "init", "--address", "gpu1", "--json")
    assert done.returncode == 2
    assert "`--python`, `--model`, `--data`" in json.loads(done.stdout)["error"]["fix"]
    assert list(tmp_path.iterdir()) == []


def test_an_answer_that_is_not_valid_writes_nothing(tmp_path: Path) -> None:
    done = ctl(tmp_path, "init", *ANSWERS[:-1], "~/prompts.jsonl")
    assert done.returncode == 2
    assert "`~` is not expanded" in done.stderr
    assert not (tmp_path / "hosts.toml").exists()


def test_init_asks_four_questions_on_a_terminal(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        words = [sys.executable, "-m", "controller", "init", "--cpu"]
        os.execve(sys.executable, words, environment(tmp_path, TERM="dumb"))
    os.write(terminal, b"me@box\n\n/models/m\nlocal:a.jsonl\n")
    screen = b""
    try:
        while data := os.read(terminal, 4096):
            screen += data
    except OSError:  # the other end is closed
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, screen
    assert screen.count(b"?") == 4
    host = tomllib.loads((tmp_path / "hosts.toml").read_text())["hosts"]["box"]
    assert (host["user"], host["accelerator"], host["python"]) == ("me", "cpu", "/opt/vllm/bin/python")


BEFORE = b"""# My hosts.\r
schema = 1 # odd   spacing\r
\r
[hosts.a]\r
address='a'\r
python = "/p/python"\r
workdir = "/w/ctl"\r
output_roots = ["/w/out"]\r
gpus = 1"""


def test_add_keeps_every_byte_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts.toml"
    file.write_bytes(BEFORE)
    file.chmod(0o640)
    done = ctl(tmp_path, "hosts", "add", "gpu.2", "--address", "root@10.0.0.2", *ADDED)
    assert done.returncode == 0, done.stderr
    after = file.read_bytes()
    assert after.startswith(BEFORE)
    assert b"\n" not in after.replace(b"\r\n", b"")
    assert file.stat().st_mode & 0o777 == 0o640
    listed = json.loads(ctl(tmp_path, "hosts", "--json").stdout)["hosts"]
    assert {"a", "gpu.2"} <= {host["name"] for host in listed}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a", *ADDED), "there is a host `a` already"),
        (("b", "--gpus", "8"), "--python, --output-root"),
        (("b", *ADDED, "--workdir", "relative"), "absolute path"),
        (("b c", *ADDED), "letters, digits"),
        (("b", *ADDED, "--cpu"), "contradict"),
    ],
)
def test_a_host_that_cannot_be_added_leaves_the_file_alone(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    (tmp_path / "hosts.toml").write_bytes(BEFORE)
    done = ctl(tmp_path, "hosts", "add", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert (tmp_path / "hosts.toml").read_bytes() == BEFORE


def test_a_file_that_somebody_writes_to_meanwhile_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "hosts.toml"
    file.write_bytes(BEFORE + b"# another window\n")
    with pytest.raises(RefusedError) as caught:
        settingup._append(file, BEFORE, b"[hosts.b]\n")
    assert (caught.value.code, caught.value.exit_code) == ("file-changed", ExitCode.REFUSED)
    assert file.read_bytes() == BEFORE + b"# another window\n"


def test_a_dry_run_prints_what_would_be_added(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_bytes(BEFORE)
    done = ctl(tmp_path, "hosts", "add", "b", *ADDED, "--dry-run")
    assert "[hosts.b]" in done.stdout
    assert (tmp_path / "hosts.toml").read_bytes() == BEFORE


def test_a_host_can_go_into_ones_own_file(tmp_path: Path) -> None:
    done = ctl(tmp_path, "hosts", "add", "b", *ADDED, "--user")
    assert done.returncode == 0, done.stderr
    assert "[hosts.b]" in (tmp_path / ".config" / "ctl" / "hosts.toml").read_text()
    assert not (tmp_path / "hosts.toml").exists()


def test_a_folder_that_cannot_be_written_is_refused_and_no_defect(tmp_path: Path) -> None:
    """Below /proc the kernel says that there is no such file, where nothing can be made."""
    words = ("--address", "root@1.2.3.4", "--python", "/p/python")
    started = ctl(
        Path("/proc"), "init", *words, "--model", "/m", "--data", "/d", "--json", XDG_CONFIG_HOME=str(tmp_path)
    )
    words = ("gpu1", *words, "--cpu", "--output-root", "/o", "--user", "--json")
    added = ctl(tmp_path, "hosts", "add", *words, XDG_CONFIG_HOME="/proc/config")
    for done, place in ((started, "/proc/"), (added, "/proc/config")):
        assert done.returncode == ExitCode.REFUSED, done.stdout + done.stderr
        error = json.loads(done.stdout)["error"]
        assert error["code"] == "local-unwritable"
        assert error["what"].startswith(place)
