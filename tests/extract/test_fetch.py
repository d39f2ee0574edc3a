"""The job of `ctl hosts fetch-model` itself: faults of the hub, of the disk and of the folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.disk import fill, small_disk
from support.hub import COMMIT, Hub, safetensors

from remote_payload.extract.errors import ExceptionReporter
from remote_payload.extract.hub import refusal

REPOSITORY = Path(__file__).resolve().parents[2]
RUN = "20260102-030405-abcdef"
INDEX = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
FIRST, SECOND = "model-1-of-2.safetensors", "model-2-of-2.safetensors"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    FIRST: safetensors(tensors=4),
    SECOND: safetensors(tensors=2),
}


@dataclass
class Job:
    """Runs the job against `hub`, in a run folder of its own; `words` are further arguments."""

    hub: Hub
    root: Path
    log: str = field(default="", init=False)

    @property
    def folder(self) -> Path:
        return self.root / "model"

    def run(self, *words: str, folder: Path | None = None) -> int:
        argv = [
            sys.executable, "-m", "remote_payload.extract.fetch", "--repo", self.hub.repo, "--commit", COMMIT,
            "--folder", str(folder or self.folder), *words,
        ]  # fmt: skip
        run = self.root / RUN
        run.mkdir(exist_ok=True)
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CTL_RUN_DIR": str(run), "HF_ENDPOINT": self.hub.url,
               "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # fmt: skip
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False, cwd="/")
        self.log = done.stdout + done.stderr
        return done.returncode

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.root / RUN / "events" / "driver.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["type"] == kind]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Hub(dict(FILES)) as hub:
        yield Job(hub, tmp_path)


def test_a_wrong_checksum_never_gets_the_files_name(job: Job) -> None:
    job.hub.corrupt.add(FIRST)
    assert job.run() == 1
    (problem,) = job.events("problem")
    assert problem["code"] == "checksum"
    assert FIRST in problem["what"]
    assert len(job.hub.gets(FIRST)) == 2
    assert not (job.folder / FIRST).exists()
    job.hub.corrupt.clear()
    before = len(job.hub.requests)
    assert (job.run(), job.run("--verify")) == (0, 0)
    # What was proved is not asked for again, and what was wrong starts from its first byte.
    assert [each.range for each in job.hub.requests[before:] if each.path == f"/cdn/{FIRST}"][-1] is None
    assert (job.folder / FIRST).read_bytes() == FILES[FIRST]


def test_a_disk_that_fills_up_ends_the_job_and_room_lets_it_go_on(job: Job, tmp_path: Path) -> None:
    job.hub.files[FIRST] = large = safetensors(tensors=3, bytes_each=8 << 20)
    with small_disk(tmp_path / "disk", 64 << 20) as disk:
        job.hub.during = lambda name, sent: name == FIRST and sent >= 12 << 20 and fill(disk, 0)
        assert job.run(folder=disk / "model") == 1
        (raised,) = job.events("exception")
        assert "No space left on device" in raised["message"]
        assert not (disk / "model" / FIRST).exists()
        job.hub.during = lambda name, sent: None
        (disk / "filler").unlink()
        assert job.run(folder=disk / "model") == 0
        assert (disk / "model" / FIRST).read_bytes() == large
        assert job.hub.gets(FIRST)[-1].range is not None
        fill(disk, 1 << 20)
        (disk / "model" / FIRST).unlink()
        assert job.run(folder=disk / "other") == 1
        assert job.events("problem")[-1]["code"] == "disk-space"
        assert not (disk / "other").exists()


def test_a_folder_of_somebody_else_is_left_alone_unless_it_is_adopted(job: Job) -> None:
    job.folder.mkdir()
    (job.folder / "config.json").write_bytes(b"mine, and of another size")
    (job.folder / FIRST).write_bytes(FILES[FIRST])
    assert job.run() == 1
    assert job.events("problem")[-1]["code"] == "folder-foreign"
    assert (job.folder / "config.json").read_bytes() == b"mine, and of another size"
    assert job.run("--adopt") == 0
    assert job.hub.gets(FIRST) == []  # it was there, and proved
    assert (job.folder / ".ctl-replaced" / RUN / "config.json").read_bytes() == b"mine, and of another size"
    assert (job.folder / "config.json").read_bytes() == FILES["config.json"]
    marker = json.loads((job.folder / ".ctl-model.json").read_text())
    (job.folder / ".ctl-model.json").write_text(json.dumps({**marker, "commit": "0" * 40}))
    assert job.run("--adopt") == 1
    assert job.events("problem")[-1]["code"] == "folder-other"


def test_a_shard_that_the_index_names_and_the_hub_lacks_is_a_problem(job: Job) -> None:
    del job.hub.files[SECOND]
    job.hub.files[FIRST] = FILES[FIRST][:-100]  # whole for the hub, cut for its own header
    assert (job.run(), job.run("--verify")) == (0, 1)
    assert {event["code"] for event in job.events("problem")} == {"shard-missing", "shard-truncated"}
    assert json.loads((job.folder / ".ctl-model.json").read_text())["complete"] is False


def test_shards_that_were_not_asked_for_are_no_problem(job: Job) -> None:
    assert (job.run("--include=*.json"), job.run("--include=*.json", "--verify")) == (0, 0)
    assert sorted(path.name for path in job.folder.iterdir()) == [
        ".ctl-model.json", "config.json", "model.safetensors.index.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name", ["../outside", "a/../../outside", "./.ctl-model.json", ".ctl-partial/x", ".ctl-replaced/x"]
)
def test_a_file_name_that_leaves_the_folder_or_is_ours_is_refused(job: Job, name: str) -> None:
    job.hub.files[name] = b"x"
    assert job.run() == 1
    assert job.events("problem")[-1]["code"] == "hub-name"
    assert not (job.root / "outside").exists()
    assert not job.folder.exists()


def test_a_folder_that_cannot_be_looked_at_is_no_fault_of_the_hub(job: Job) -> None:
    job.folder.mkdir()
    (job.folder / ".ctl-model.json").write_text("not json")
    query = {
        "repo": job.hub.repo, "revision": COMMIT, "include": [], "exclude": [], "folder": str(job.folder),
    }  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_ENDPOINT": job.hub.url, "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "remote_payload.extract.hub"], input=json.dumps(query).encode(), env=env,
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    (line,) = done.stdout.splitlines()[1:]
    assert json.loads(line.partition(b" ")[2])["error"]["code"] == "folder-unreadable"


def test_files_of_the_same_contents_do_not_get_in_each_others_way(job: Job) -> None:
    job.hub.files = {f"part-{number}.bin": safetensors(tensors=8, bytes_each=1 << 20) for number in range(4)}
    job.hub.pause_s = 0.02
    assert job.run() == 0
    assert {path.read_bytes() for path in job.folder.glob("part-*")} == set(job.hub.files.values())
    assert len(list(job.folder.glob("part-*"))) == 4


def test_a_hub_that_answers_500_for_a_while_is_asked_again(job: Job) -> None:
    job.hub.failing = 1
    assert job.run() == 0
    assert "trying again" in job.log
    assert (job.folder / FIRST).read_bytes() == FILES[FIRST]


def test_a_signed_address_gets_into_no_record() -> None:
    signed = "https://cas.example/file?X-Amz-Signature=0123&Expires=9"
    told: list[dict[str, Any]] = []

    class Events:
        def emit(self, type: str, **fields: Any) -> None:  # noqa: A002 - the field's name on the wire
            told.append(fields)

    try:
        raise OSError(f"403 Client Error for url: {signed}")
    except OSError as error:
        ExceptionReporter(Events(), None).report(error, "fetch")
    refused = refusal(OSError(f"500 Server Error for url: {signed} (Request ID: 1)"), "a/b", "main")
    for text in (str(told), str(refused), str(refused.record)):
        assert "Signature" not in text
        assert "https://cas.example/file?***" in text
