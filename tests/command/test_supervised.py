"""Scripts that behave badly, under the care of the supervisor: each ends with the right words and a clean host."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from support.commandhost import CommandHost
from support.hostrun import left_by_the_run, wait_until

from remote_payload.host import follow
from remote_payload.host.members import HELPER_ENV
from remote_payload.host.stacks import find_spy

FLOOD = """
import os, sys
line = b"step %d of 1000 " + b"x" * 1000 + b"\\n"
left = int(sys.argv[1])
step = 0
while left > 0:
    step = min(step + 1, 1000)
    data = b"".join(line.replace(b"%d", b"%d" % step) for _ in range(256))
    os.write(1, data)
    left -= len(data)
os.write(1, b"step 1000 of 1000\\n")
"""

DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("daemon.new", "w").write(str(os.getpid()))
    os.rename("daemon.new", "daemon")
    time.sleep(300)
    os._exit(0)
while not os.path.exists("daemon"):
    time.sleep(0.01)
sys.exit(int(sys.argv[1]))
"""

HANG = """
import multiprocessing, os, threading

def collective():
    threading.Event().wait()

def work(rank):
    os.environ["RANK"] = str(rank)
    collective()

if __name__ == "__main__":
    ranks = [multiprocessing.get_context("fork").Process(target=work, args=(n,), name=f"w{n}") for n in range(2)]
    for rank in ranks:
        rank.start()
    print("waiting", flush=True)
    collective()
"""


def script(host: CommandHost, text: str) -> None:
    (host.workdir / "job.py").write_text(text)


def playbook(host: CommandHost, extra: str = "", *words: str) -> dict[str, object]:
    head = 'argv = ["{python}", "job.py"]\ncwd = "{workdir}"\ntracebacks = true\n'
    limits = "" if "[limits]" in extra else "\n[limits]\nstop_grace = 1\n"
    return host.playbook(head + extra + limits, *words)


def test_a_flood_of_a_gigabyte_is_counted_to_the_byte(host: CommandHost) -> None:
    size = 1 << 30
    script(host, FLOOD)
    plan = playbook(
        host,
        'progress = { pattern = "step (?P<done>[0-9]+) of (?P<total>[0-9]+)" }\n[limits]\nstop_grace = 1\n'
        'log_cap = "64MiB"\n',
        str(size),
    )
    paths = host.launch(plan)
    wait_until(lambda: Path(paths.result).exists(), "the flood has ended", 280.0)
    ended = host.read(paths.result)
    assert (ended["end_reason"], ended["gpus_clean"], left_by_the_run(ended)) == ("succeeded", True, [])
    held = b"".join(path.read_bytes() for path in sorted(Path(paths.log).glob("*.log")))
    assert ended["log_bytes"] == len(held)
    assert ended["log_sha256"] == hashlib.sha256(held).hexdigest()
    assert size <= ended["log_bytes"] + ended["log_gap_bytes"] < size + 2 * 256 * 1100
    assert len(held) <= 64 << 20
    last = host.all_events(plan, "progress")[-1]
    assert (last["done"], last["total"], last["unit"]) == (1000, 1000, "steps")


def test_a_follower_that_cannot_be_ended_keeps_no_run_from_ending(host: CommandHost) -> None:
    script(host, "import os; os.mkdir(os.environ['CTL_RUN_DIR'] + '/follow.stop')")
    ended = host.finish(playbook(host))
    assert (ended["end_reason"], ended["gpus_clean"], left_by_the_run(ended)) == ("succeeded", True, [])


def test_a_stop_ends_a_run_whatever_lies_among_its_fault_files(host: CommandHost) -> None:
    folder = "os.environ['CTL_RUN_DIR'] + '/faults/folder'"
    script(host, f"import os, time; os.mkdir({folder}); print('waiting', flush=True); time.sleep(600)")
    plan = playbook(host)
    paths = host.launch(plan)
    wait_until(lambda: b"waiting" in host.log(paths), "the job waits")
    host.kill_supervisor(paths)
    answer = host.ask("stop", {"run_id": plan["run_id"], "grace_s": 1, "force": False})
    assert (answer["state"], answer["end_reason"]) == ("finished", "stopped")
    assert "fatal signals are not told" in answer["leftovers"][0]["reason"]


@pytest.mark.parametrize(("code", "reason"), [("0", "succeeded"), ("9", "job-failed")])
def test_a_daemon_that_ignores_term_does_not_outlive_its_run(host: CommandHost, code: str, reason: str) -> None:
    script(host, DAEMON)
    ended = host.finish(playbook(host, "", code))
    daemon = int((host.workdir / "daemon").read_text())
    assert not Path(f"/proc/{daemon}").exists()
    assert (ended["end_reason"], ended["gpus_clean"], left_by_the_run(ended)) == (reason, True, [])
    assert ended["exit_code"] == int(code)


@pytest.mark.skipif(find_spy(sys.executable) is None, reason="there is no py-spy: pip install py-spy")
def test_a_hang_is_ended_and_says_where_every_rank_stood(host: CommandHost) -> None:
    script(host, HANG)
    plan = playbook(host, "\n[limits]\nsilence_timeout = 8\nstop_grace = 1\n")
    paths = host.launch(plan)
    ended = host.result(paths)
    assert (ended["end_reason"], ended["gpus_clean"], left_by_the_run(ended)) == ("limit-exceeded", True, [])
    assert "silence_timeout: no line of log and no event" in ended["message"]
    told = host.all_events(plan, "stacks")
    assert [event["rank"] for event in told] == [0, 1, None]
    assert all("collective" in event["stacks"] for event in told)
    log = host.log(paths).decode()
    assert "ctl: stacks of rank 0 (pid" in log
    assert "collective (job.py:5)" in log


@pytest.mark.skipif(find_spy(sys.executable) is None, reason="there is no py-spy: pip install py-spy")
def test_a_living_run_tells_where_every_rank_stands_and_an_ended_one_that_it_has_none(host: CommandHost) -> None:
    script(host, HANG)
    plan = playbook(host)
    paths = host.launch(plan)
    wait_until(lambda: b"waiting" in host.log(paths), "the job waits")
    # The fault files, by which forked ranks are known, are written by the ranks themselves.
    wait_until(lambda: sum(b'"rank": ' in p.read_bytes() for p in Path(paths.faults).iterdir()) == 3, "all are named")
    asked = host.ask("stacks", {"run_id": plan["run_id"]})["processes"]
    assert [process["rank"] for process in asked] == [0, 1, None]
    assert all("collective" in process["stacks"] for process in asked)
    host.ask("stop", {"run_id": plan["run_id"], "grace_s": 1, "force": False})
    code, answer = host.call("stacks", {"run_id": plan["run_id"]})
    assert (code, json.loads(answer)["error"]["code"]) == (70, "run-ended")


def test_without_py_spy_it_says_so(host: CommandHost, monkeypatch: pytest.MonkeyPatch) -> None:
    script(host, HANG)
    host.env = {"PATH": "/usr/bin:/bin"}
    python = host.folder / "python"
    python.symlink_to(sys.executable)
    plan = host.playbook(
        'argv = ["{python}", "job.py"]\ncwd = "{workdir}"\n[limits]\nsilence_timeout = 2\nstop_grace = 1\n',
        host={"python": str(python)},
    )
    paths = host.launch(plan)
    code, answer = host.call("stacks", {"run_id": plan["run_id"]})
    assert (code, json.loads(answer)["error"]["code"]) == (70, "no-py-spy")
    assert host.result(paths)["end_reason"] == "limit-exceeded"
    assert "no-py-spy" in [event["code"] for event in host.all_events(plan, "notice")]


def test_outputs_that_grow_over_their_limit_end_the_run(host: CommandHost) -> None:
    script(
        host,
        "import sys, time\nfile = open(sys.argv[1] + '/big.bin', 'wb')\n"
        "while True:\n    file.write(bytes(1 << 20)); file.flush(); time.sleep(0.1)\n",
    )
    plan = playbook(
        host,
        f'outputs = [{{ path = "{host.outputs}/o" }}]\n[limits]\noutput_bytes = "2MiB"\nstop_grace = 1\n',
        f"{host.outputs}/o",
    )
    ended = host.finish(plan)
    assert ended["end_reason"] == "limit-exceeded"
    assert "output_bytes: the outputs hold" in ended["message"]


def test_progress_is_read_from_a_file_of_json_lines(host: CommandHost) -> None:
    script(
        host,
        "import json\nwith open('progress.jsonl', 'w') as file:\n"
        "    file.write('half a line')\n    file.write('\\n[1]\\n')\n"
        "    for step in range(5):\n"
        "        print(json.dumps({'done': step, 'total': 4, 'loss': 2.5 - step / 2}), file=file)\n",
    )
    plan = playbook(host, 'progress = { file = "progress.jsonl", unit = "batches" }\n')
    assert host.finish(plan)["end_reason"] == "succeeded"
    last = host.all_events(plan, "progress")[-1]
    assert (last["done"], last["total"], last["unit"], last["values"]) == (4, 4, "batches", {"loss": 0.5})


def test_long_values_are_cut() -> None:
    line = {"done": 3, "phase": "x" * 100_000, "n" * 1000: 1, "big": 1 << 4000, "loss": 0.5, "seed": 1 << 63}
    found = follow._from_json(json.dumps(line))
    long = "n" * follow.VALUE_CHARS
    assert found == {
        "done": 3, "phase": "x" * follow.VALUE_CHARS, long: 1, "big": "a number of 4001 bits", "loss": 0.5,
        "seed": 1 << 63,
    }  # fmt: skip
    assert follow._value("7" * 100_000) == "7" * follow.VALUE_CHARS


def test_an_expression_that_takes_forever_stalls_progress_only(host: CommandHost) -> None:
    script(host, "import time\nprint('a' * 40 + '!', flush=True)\ntime.sleep(1)\nprint('done')\n")
    plan = playbook(host, "progress = { pattern = '(?P<done>(a+)+)$' }\n")
    ended = host.finish(plan)
    assert (ended["end_reason"], ended["gpus_clean"]) == ("succeeded", True)
    assert ended["log"].endswith("done\n")


def test_a_follower_stuck_in_an_expression_dies_with_its_supervisor(host: CommandHost) -> None:
    script(host, "import time\nprint('a' * 40 + '!', flush=True)\ntime.sleep(600)\n")
    plan = playbook(host, "progress = { pattern = '(?P<done>(a+)+)$' }\n")
    paths = host.launch(plan)
    wait_until(lambda: b"!" in host.log(paths), "the line is there")
    (follower,) = wait_until(lambda: helpers(plan["run_id"], "follow"), "the follower works")
    busy = cpu_ticks(follower)
    wait_until(lambda: cpu_ticks(follower) > busy + 20, "it is stuck in the expression")
    host.kill_supervisor(paths)
    wait_until(lambda: not helpers(plan["run_id"], "follow"), "the follower is gone")


def test_what_was_uploaded_is_copied_for_the_run_and_checked(host: CommandHost) -> None:
    content = b"import helper\nprint(helper.word)\n"
    files = [
        {"path": "train/main.py", "size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "exec": True},
        {"path": "train/helper.py", "size": 11, "sha256": hashlib.sha256(b'word = "w"\n').hexdigest(), "exec": False},
    ]
    assert _upload(host, files, [content, b'word = "w"\n'])["missing"] == [file["sha256"] for file in files]
    digest = _upload(host, files, [])["digest"]
    text = 'argv = ["{python}", "{work}/train/main.py"]\nuploads = [{ path = "train" }]\n'
    plan = host.playbook(text, upload=digest)
    ended = host.finish(plan)
    assert (ended["end_reason"], ended["log"]) == ("succeeded", "w\n")
    work = Path(host.paths(plan).work)
    assert os.access(work / "train" / "main.py", os.X_OK)
    assert not os.access(work / "train" / "helper.py", os.X_OK)

    blob = host.workdir / "files" / "blobs" / files[0]["sha256"][:2] / files[0]["sha256"]
    blob.write_bytes(b"other " + content[6:])
    ended = host.finish(host.playbook(text, upload=digest))
    assert ended["end_reason"] == "job-failed"
    assert "the stored copy of train/main.py is damaged" in ended["message"]
    shutil.rmtree(host.workdir / "files")
    assert "is not on this host" in host.finish(host.playbook(text, upload=digest))["message"]


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a//b", "a/./b", ""])
def test_an_upload_stays_below_its_folder(host: CommandHost, name: str) -> None:
    file = {"path": name, "size": 0, "sha256": hashlib.sha256(b"").hexdigest(), "exec": False}
    code, answer = host.call("uploads", {}, json.dumps({"files": [file]}).encode())
    assert (code, json.loads(answer)["error"]["code"]) == (70, "protocol")
    assert not (host.workdir / "files" / "trees").exists()


def _upload(host: CommandHost, files: list[dict[str, object]], contents: list[bytes]) -> dict[str, object]:
    """Hold the whole conversation at once: the host reads only as far as it asks."""
    from remote_payload.host.framing import pack_frame

    process = host.popen_open("uploads", {"workdir": str(host.workdir)}, json.dumps({"files": files}).encode())
    frames = b"".join(pack_frame({"end": False}, content) for content in contents) + pack_frame({"end": True})
    stdout, stderr = process.communicate(frames if contents else b"", timeout=60)
    assert process.returncode == 0, stdout + stderr
    first: dict[str, object] = json.loads(stdout.splitlines()[0])
    return first


def helpers(run_id: str, verb: str) -> list[int]:
    """Return the processes of ctl that serve a run with this verb."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ours = f"{HELPER_ENV}={run_id}".encode() in (path / "environ").read_bytes().split(b"\0")
            if ours and (path / "cmdline").read_bytes().split(b"\0")[-2:-1] == [verb.encode()]:
                found.append(int(path.name))
    return found


def cpu_ticks(pid: int) -> int:
    """Return the processor time that a process has used, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
