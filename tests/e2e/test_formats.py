"""Conversion, shares and pushed data over a real sshd, without an engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import Project
from support.samples import make_sample

pytestmark = pytest.mark.sshd

SOURCE = "20260101-000000-00000{}"


def extraction(project: Project, number: int, indexes: list[int], shard: list[int], form: str = "speculators") -> str:
    """Leave behind what an extraction leaves: its files, its run folder on the host, and the copy of that here."""
    run_id = SOURCE.format(number)
    output = project.workdir / "output" / f"made-{number}"
    lines = [make_sample(output, form, index, 3 + index).line for index in indexes]
    plan = project.json("plan", "--host", "demo", "--playbook", "demo")
    spec = {
        "output": str(output), "format": form, "model": "m", "data": "d", "shard": shard,
    }  # fmt: skip
    document = {"run_id": run_id, "extract": spec, "host": plan["host"], "payload": plan["upload"]["payload"]}
    document["job"] = {"kind": "extract"}
    for folder in (project.workdir / "runs" / run_id, project.root / "ctl-runs" / run_id):
        (folder / "ledger").mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps(document))
        (folder / "verify.json").write_text(json.dumps({"data": {"records": 5}}))
        (folder / "ledger" / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_id


@pytest.fixture(scope="module")
def shares(project: Project) -> tuple[str, str]:
    return extraction(project, 1, [0, 2, 4], [1, 2]), extraction(project, 2, [1, 2], [2, 2])


def test_convert_is_a_supervised_run_with_an_output_of_its_own(project: Project, shares: tuple[str, str]) -> None:
    words = ("convert", shares[0], "--to", "speculators-0.3")
    summary = project.json(*words)
    assert summary["kind"] == "convert"
    assert summary["end_reason"] == "succeeded"
    assert summary["samples"] == {"expected": 3, "written": 3, "skipped": 0, "failed": 0, "missing": 0}
    output = project.workdir / "output" / "made-1-speculators-0.3"
    assert {"data_0.pt", "data_2.pt", "data_4.pt", ".ctl-owner.json"} <= {path.name for path in output.iterdir()}
    refused = project.json(*words, code=3)
    assert refused["error"]["code"]
    assert project.json("summary", summary["run_id"])["format"] == "speculators-0.3"


def test_files_that_a_format_groups_in_folders_are_found_and_converted(project: Project) -> None:
    run_id = extraction(project, 4, [0, 1, 2000], [1, 1], "specforge")
    summary = project.json("convert", run_id, "--to", "modelopt")
    assert summary["end_reason"] == "succeeded"
    assert summary["samples"] == {"expected": 3, "written": 3, "skipped": 0, "failed": 0, "missing": 0}


def test_a_conversion_that_would_lose_something_fails_and_says_why(project: Project, shares: tuple[str, str]) -> None:
    done = project.ctl("convert", shares[0], "--to", "specforge")  # model m: no norm to apply
    assert done.returncode == 100
    assert "cannot read config.json of the model" in done.stderr


def test_a_conversion_of_samples_that_are_gone_is_refused_before_anything_is_launched(project: Project) -> None:
    run_id = extraction(project, 3, [0, 1], [1, 1])
    (project.workdir / "output" / "made-3" / "hs_1.safetensors").unlink()
    runs = sorted((project.workdir / "runs").iterdir())
    refused = project.json("convert", run_id, "--to", "speculators-0.3", code=3)["error"]
    assert (refused["code"], refused["what"]) == (
        "source-gone", f"preflight refused: 1 of 2 samples of run {run_id} are gone",
    )  # fmt: skip
    assert "cleared or moved since" in refused["why"]
    assert sorted((project.workdir / "runs").iterdir()) == runs
    assert not (project.workdir / "output" / "made-3-speculators-0.3").exists()


def test_what_a_run_wrote_is_the_hosts_to_say_before_a_conversion(project: Project, shares: tuple[str, str]) -> None:
    """A summary counts what passed its proof, which a disk that was away for a minute makes 0: the ledgers do not."""
    summary = project.root / "ctl-runs" / shares[1] / "summary.json"
    summary.write_text(json.dumps({"samples": {"written": 0}}))
    assert project.json("convert", shares[1], "--to", "speculators-0.3", "--dry-run")
    summary.unlink()
    for ledger in (project.workdir / "runs" / extraction(project, 5, [0], [1, 1]) / "ledger").iterdir():
        ledger.unlink()
    refused = project.json("convert", SOURCE.format(5), "--to", "speculators-0.3", code=3)["error"]
    assert refused["code"] == "source-empty"


def test_ledgers_of_shares_are_joined(project: Project, shares: tuple[str, str], tmp_path: Path) -> None:
    merged = project.json("ledger", "merge", *shares, "--output", str(tmp_path / "all.jsonl"), code=100)
    assert (merged["written"], merged["records"]) == (4, 5)
    assert (merged["hole_ranges"], merged["double_samples"][0]["index"]) == ([[3, 3]], 2)
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2, 4]
    shown = project.ctl("ledger", "merge", *shares)
    assert "holes: 1 (3)" in shown.stdout
    assert "doubles: 1 (2)" in shown.stdout


def test_a_share_whose_end_was_not_seen_here_is_asked_for_before_it_is_joined(
    project: Project, shares: tuple[str, str]
) -> None:
    (project.root / "ctl-runs" / shares[0] / "ledger" / "rank-0.jsonl").unlink()
    assert project.json("ledger", "merge", *shares, code=100)["written"] == 4


def test_data_of_the_workstation_is_pushed_before_it_is_judged(project: Project) -> None:
    (project.root / "mine.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "t1"}]}) + "\n")
    words = ("--host", "demo", "--playbook", "demo", "--data", "local:mine.jsonl")
    planned: dict[str, Any] = project.json("plan", *words)
    assert planned["data"] == {
        "name": "mine.jsonl", "bytes": 50, "container": "jsonl", "kind": "chat",
    }  # fmt: skip
    shown = project.ctl("plan", *words).stdout
    assert "(jsonl, by its contents of kind chat)" in shown
    assert "mine.jsonl, 50 B, only if the host does not have it" in shown
    assert "(jsonl, taken for tokens)" in project.ctl("plan", *words, "--data-kind", "tokens").stdout
    path = Path(planned["capture"]["data"])
    assert path.parent.parent == project.workdir / "data"
    shutil.rmtree(path.parent, ignore_errors=True)
    document = project.json("preflight", *words)
    found = {finding["code"]: finding for finding in document["findings"]}
    assert found["data"]["level"] == "ok"
    assert "of chat" in found["data"]["what"]
    assert path.read_text() == (project.root / "mine.jsonl").read_text()


def test_flags_of_the_format_reach_the_plan(project: Project) -> None:
    planned = project.json(
        "plan", "--host", "demo", "--playbook", "demo", "--format", "specforge", "--boundaries", "1,3,7",
        "--layer-convention", "specforge", "--shard", "2/4", "--data-kind", "chat",
    )  # fmt: skip
    capture = planned["capture"]
    assert (capture["boundaries"], capture["format"], capture["final_norm"]) == ([2, 4, 8], "specforge", True)
    assert (capture["shard"], capture["data_kind"]) == ([2, 4], "chat")
    wrong = project.json("plan", "--host", "demo", "--playbook", "demo", "--shard", "2-4", code=2)
    assert "--shard" in wrong["error"]["what"]
