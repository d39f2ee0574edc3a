"""Verbs `look` and `sweep`: only what was shown, only what is ours, and nothing that a run writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.hostrun import HostRun

RUN = "20260101-000000-abcd04"


@pytest.fixture
def output(host: HostRun) -> dict[str, Any]:
    """An output folder as a finished run leaves it, and its record."""
    folder = host.folder / "roots" / "out"
    (folder / "deeper").mkdir(parents=True)
    (folder / "hs_0.safetensors").write_bytes(b"x" * 100)
    (folder / "deeper" / "file").write_bytes(b"y")
    (folder / ".ctl-owner.json").write_text(json.dumps({"wire": 1, "run_id": RUN, "owner": "me"}))
    return {"path": str(folder), "root": str(folder.parent), "stale": "clear", "adopt": False}


def shown(host: HostRun, output: dict[str, Any]) -> dict[str, Any]:
    answer = host.ask("look", {"output": output, "lease_dir": str(host.lease_dir)})
    listing = answer["listing"]
    return {**output, "digest": listing["digest"], "entries": listing["entries"], "bytes": listing["bytes"]}


def sweep(host: HostRun, output: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = {"output": output, "lease_dir": str(host.lease_dir), "run_id": "20260102-000000-abcdef"}
    code, stdout = host.call("sweep", request)
    return code, json.loads(stdout)


def test_it_deletes_what_was_shown_and_lists_the_folder_again(host: HostRun, output: dict[str, Any]) -> None:
    code, answer = sweep(host, shown(host, output))
    assert code == 0
    assert (answer["report"]["deleted_entries"], answer["report"]["deleted_bytes"]) == (3, 101)
    assert answer["listing"]["entries"] == 0
    assert [path.name for path in Path(output["path"]).iterdir()] == [".ctl-owner.json"]


def test_a_folder_that_is_not_what_was_shown_stays(host: HostRun, output: dict[str, Any]) -> None:
    seen = shown(host, output)
    (Path(output["path"]) / "new").write_text("since then")
    code, answer = sweep(host, seen)
    assert (code, answer["error"]["code"]) == (70, "clear-changed")
    assert (Path(output["path"]) / "hs_0.safetensors").exists()


def test_a_folder_without_our_marker_stays_even_if_a_request_adopts_it(host: HostRun, output: dict[str, Any]) -> None:
    (Path(output["path"]) / ".ctl-owner.json").unlink()
    code, answer = sweep(host, {**shown(host, output), "adopt": True})
    assert (code, answer["error"]["code"]) == (70, "output-foreign")
    assert (Path(output["path"]) / "hs_0.safetensors").exists()


@pytest.mark.parametrize("path", ["/etc", "{root}", "{root}/../work", "{root}/link"])
def test_what_is_not_strictly_inside_a_root_stays(host: HostRun, output: dict[str, Any], path: str) -> None:
    (Path(output["root"]) / "link").symlink_to(output["path"])
    asked = {**shown(host, output), "path": path.format(root=output["root"])}
    code, _ = sweep(host, asked)
    assert code == 70
    assert (Path(output["path"]) / "hs_0.safetensors").exists()


def test_what_a_run_under_way_writes_stays(host: HostRun, output: dict[str, Any]) -> None:
    seen = shown(host, output)
    owned = {**output, "stale": "resume", "digest": None, "entries": 0, "bytes": 0}
    plan = host.plan(host.python("import time; time.sleep(120)"), job={"outputs": [owned]})
    host.launch(plan)
    answer = host.ask("look", {"output": output, "lease_dir": str(host.lease_dir)})
    assert answer["writers"] == [plan["run_id"]]
    code, answer = sweep(host, seen)
    assert (code, answer["error"]["code"]) == (70, "output-in-use")
    assert (Path(output["path"]) / "hs_0.safetensors").exists()
