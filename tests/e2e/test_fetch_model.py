"""`ctl hosts fetch-model` over a real sshd, from a hub on loopback that speaks the real one's API."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import Project
from support.hub import COMMIT, Hub, safetensors

pytestmark = pytest.mark.sshd

DEADLINE_S = 60.0
INDEX = {"metadata": {}, "weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-1-of-2.safetensors": safetensors(tensors=4),
    "model-2-of-2.safetensors": safetensors(tensors=2),
    "pytorch_model.bin": b"the same weights" * 200,
    "tokenizer/tokenizer.json": b"{}",
}
FIRST = "model-1-of-2.safetensors"


@dataclass
class Site:
    """A project whose host `box` reaches `hub`; models go below `models`."""

    project: Project
    hub: Hub
    host: Path

    @property
    def folder(self) -> Path:
        return self.host / "models" / "org" / "tiny"

    def fetch(self, *words: str, code: int = 0, stdin: str = "") -> dict[str, Any]:
        """Run the verb with --json and return its document."""
        argv = self.project.argv("hosts", "fetch-model", "box", "org/tiny@main", "--json", *words)
        done = subprocess.run(
            argv, cwd=self.project.root, env=self.project.environment(), input=stdin, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr[-4000:] + done.stdout[-2000:]
        document: dict[str, Any] = json.loads(done.stdout)
        return {**document, "stderr": done.stderr}


@pytest.fixture
def site(project: Project, tmp_path: Path) -> Iterator[Site]:
    host = tmp_path / "host"
    with Hub(dict(FILES)) as hub:
        (tmp_path / "hosts.toml").write_text(
            f"""schema = 1
[hosts.box]
address = "ctl-demo"
ssh_config = {json.dumps(str(project.server.ssh_config))}
python = {json.dumps(sys.executable)}
bootstrap_python = {json.dumps(sys.executable)}
workdir = {json.dumps(str(host))}
output_roots = ["output"]
lease_dir = "lease"
accelerator = "cpu"
[hosts.box.env]
HF_ENDPOINT = {json.dumps(hub.url)}
HF_HUB_OFFLINE = "1"
"""
        )
        yield Site(replace(project, root=tmp_path), hub, host)


def test_a_model_comes_whole_and_proved_and_the_second_time_there_is_nothing_to_do(site: Site) -> None:
    planned = site.fetch("--dry-run")
    assert planned["nothing_to_do"] is False
    assert planned["plan"]["commit"] == COMMIT
    assert planned["plan"]["left_out"] == ["pytorch_model.bin"]
    assert not site.folder.exists()

    refused = site.fetch(code=3)
    assert refused["error"]["code"] == "confirmation-needed"
    assert not site.folder.exists()

    summary = site.fetch("--yes")
    assert (summary["kind"], summary["end_reason"]) == ("fetch-model", "succeeded")
    fetched = summary["fetched"]
    assert fetched["proved_by"] == {"sha256": 2, "git": 3, "size": 0}
    assert (fetched["commit"], fetched["shards"], fetched["path"]) == (COMMIT, 2, str(site.folder))
    wanted = {name: data for name, data in FILES.items() if name != "pytorch_model.bin"}
    assert {name: (site.folder / name).read_bytes() for name in wanted} == wanted
    names = sorted(path.name for path in site.folder.iterdir())
    assert names == sorted({name.partition("/")[0] for name in wanted} | {".ctl-model.json"})
    events = (site.host / "runs" / summary["run_id"] / "events" / "driver.jsonl").read_text().splitlines()
    progress = [event for event in map(json.loads, events) if event["type"] == "progress"]
    total = sum(map(len, wanted.values()))
    assert (progress[-1]["unit"], progress[-1]["done"], progress[-1]["total"]) == ("bytes", total, total)

    before = len(site.hub.requests)
    again = site.fetch()
    assert again["nothing_to_do"] is True
    assert not [request for request in site.hub.requests[before:] if "/cdn/" in request.path]

    # A file that was touched since is proved again, one that changed is moved aside and brought anew.
    os.utime(site.folder / "config.json")
    (site.folder / FIRST).write_bytes(b"x" * len(FILES[FIRST]))
    before = len(site.hub.gets(FIRST))
    repaired = site.fetch("--yes")
    assert repaired["end_reason"] == "succeeded"
    assert len(site.hub.gets(FIRST)) == before + 1
    assert (site.folder / FIRST).read_bytes() == FILES[FIRST]
    aside = site.folder / ".ctl-replaced" / repaired["run_id"] / FIRST
    assert aside.read_bytes() == b"x" * len(FILES[FIRST])


def test_a_killed_download_goes_on_where_it_was_cut(site: Site) -> None:
    # The hub's client hands on 10 MB at a time.
    site.hub.files[FIRST] = large = safetensors(tensors=3, bytes_each=8 << 20)
    site.hub.pause_s = 0.3
    argv = site.project.argv("hosts", "fetch-model", "box", "org/tiny@main", "--yes", "--detach")
    started = site.project.ctl(*argv[3:])
    assert started.returncode == 8, started.stderr
    deadline = time.monotonic() + DEADLINE_S
    partial = site.folder / ".ctl-partial"
    while not any(path.stat().st_size > 1 << 20 for path in partial.glob("*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (run,) = (site.host / "runs").iterdir()
    leader = json.loads((run / "run.json").read_text())["job"]["pid"]
    os.kill(leader, signal.SIGKILL)
    ended = site.project.ctl("attach", "--last")
    assert ended.returncode == 100, ended.stderr
    left = {path.name: path.stat().st_size for path in partial.glob("*")}
    assert any(left.values())
    assert not (site.folder / FIRST).exists()

    site.hub.pause_s = 0.0
    planned = site.fetch("--dry-run")
    assert "of an earlier try" in json.dumps(planned["sections"])
    assert site.fetch("--yes")["end_reason"] == "succeeded"
    ranges = [request.range for name in FILES for request in site.hub.gets(name) if request.range]
    assert ranges
    assert all(int(text.removeprefix("bytes=").rstrip("-")) > 0 for text in ranges)
    assert (site.folder / FIRST).read_bytes() == large


def test_a_hub_that_wants_a_token_gets_it_from_stdin_and_nothing_keeps_it(site: Site) -> None:
    site.hub.token = "hf_a-secret-of-the-test"
    refused = site.fetch("--yes", code=1)
    assert refused["error"]["code"] == "hub-refused"
    assert "--token-stdin" in refused["error"]["fix"]
    assert not (site.host / "runs").exists()
    wrong = site.fetch("--yes", "--token-stdin", code=1, stdin="hf_wrong\n")
    assert "this token" in wrong["error"]["what"]
    empty = site.fetch("--yes", "--token-stdin", code=2)
    assert "no token" in empty["error"]["what"]
    assert site.fetch("--yes", "--token-stdin", stdin=site.hub.token + "\n")["end_reason"] == "succeeded"
    assert {request.token for request in site.hub.gets(FIRST)} == {site.hub.token}
    kept = [path for path in site.project.root.rglob("*") if path.is_file() and path.stat().st_size < 1 << 20]
    assert not [path for path in kept if site.hub.token.encode() in path.read_bytes()]
