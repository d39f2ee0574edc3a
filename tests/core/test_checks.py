"""Verdicts from reports: tests/cases/checks.json holds one change of a clean report or plan each.

A case's `report` and `plan` map dotted paths to new values (a whole section is given as its data, or as its error);
`expect` lists every finding that is not ok; `says` gives text, parts separated by |, that a finding must contain.
"""

from __future__ import annotations

import copy
import io
import json
import posixpath
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from controller.core.checks import WAITED_FOR, Finding, Level, findings, owned_outputs
from controller.core.checks_outputs import check_outputs
from controller.core.finding import age, size
from remote_payload.host import probe
from remote_payload.host.clear import claim, clear
from remote_payload.host.probe_gpus import FIELDS, parse_gpus
from remote_payload.host.protocol import Plan

CASES = Path(__file__).resolve().parents[1] / "cases"
CHECKS = json.loads((CASES / "checks.json").read_text())


def base(name: str) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads((CASES / f"{name}-8x-rtx-pro-6000.json").read_text()))


def put(target: Any, path: str, value: Any) -> None:
    *way, last = path.split(".")
    for word in way:
        target = target[int(word) if isinstance(target, list) else word]
    target[int(last) if isinstance(target, list) else last] = value


def changed_report(changes: dict[str, Any]) -> dict[str, Any]:
    report = base("probe")
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        if name not in report["sections"]:
            put(report, path, value)
        elif rest:
            put(report["sections"][name]["data"], rest, value)
        elif "error" in value:
            report["sections"][name] = {"ok": False, "seconds": 10.0, **value}
        else:
            report["sections"][name]["data"] = value
    return report


def changed_plan(changes: dict[str, Any]) -> Plan:
    plan = base("plan")
    for path, value in changes.items():
        put(plan, path, value)
    return cast("Plan", plan)


def judge(case: dict[str, Any]) -> tuple[Finding, ...]:
    return findings(
        changed_report(case.get("report", {})), changed_plan(case.get("plan", {})), **case.get("args", {})
    )


@pytest.mark.parametrize("case", CHECKS, ids=[case["name"] for case in CHECKS])
def test_case(case: dict[str, Any]) -> None:
    found = judge(case)
    assert sorted(f"{f.level} {f.code}" for f in found if f.level is not Level.OK) == case["expect"]
    for code, parts in case.get("says", {}).items():
        said = "\n".join(" ".join((f.what, f.why, f.fix)) for f in found if f.code == code)
        for part in parts.split("|"):
            assert part in said


@pytest.mark.parametrize("case", CHECKS, ids=[case["name"] for case in CHECKS])
def test_every_failure_says_what_to_do(case: dict[str, Any]) -> None:
    for finding in judge(case):
        assert finding.what
        assert not finding.what.endswith(".")
        assert finding.fix or finding.level is Level.OK, finding


def test_case_names_are_distinct_and_the_report_is_what_the_driver_prints() -> None:
    assert len({case["name"] for case in CHECKS}) == len(CHECKS)
    printed = (CASES / "nvidia-smi-8x-rtx-pro-6000.csv").read_text()
    gpus, unparsed = parse_gpus(printed, [field for _, field, _ in FIELDS])
    assert base("probe")["sections"]["gpus"]["data"]["gpus"] == gpus
    assert unparsed == []


@pytest.mark.parametrize("name", ["gpus", "outputs", "model"])
def test_a_section_that_is_not_reported_is_not_taken_for_good(name: str) -> None:
    report = base("probe")
    del report["sections"][name]
    assert f"probe-{name}" in [f.code for f in findings(report, changed_plan({})) if f.level is Level.FAIL]


def test_what_is_allowed_by_name_is_a_warning_that_says_so() -> None:
    report = changed_report({"model.exists": False})
    (refused,) = [f for f in findings(report, changed_plan({})) if f.code == "model-missing"]
    (allowed,) = [
        f for f in findings(report, changed_plan({}), allow=["model-missing", "data"]) if f.code == refused.code
    ]
    assert (refused.level, refused.allowed) == (Level.FAIL, False)
    assert (allowed.level, allowed.allowed, allowed.why) == (Level.WARN, True, "allowed by name")
    assert not [f for f in findings(report, changed_plan({}), allow=["data"]) if f.allowed]


@pytest.mark.parametrize("code", WAITED_FOR)
def test_what_a_queued_run_waits_for_is_allowed_by_nobody(code: str) -> None:
    case = next(case for case in CHECKS if f"fail {code}" in case["expect"])
    queued = {**case, "plan": {**case.get("plan", {}), "job.limits.wait_for_lease": True}}
    (refused, *_) = [f for f in judge(case) if f.code == code]
    (waited, *_) = [f for f in judge(queued) if f.code == code]
    assert (refused.level, waited.level, waited.allowed) == (Level.FAIL, Level.WARN, False)
    assert waited.why.endswith("the run waits for its turn, and looks again then")
    assert "--wait" not in waited.fix
    if code == "lease-busy":
        assert waited.fix == "nothing, or ask bob to end it"
    named = {**queued, "args": {**case.get("args", {}), "allow": [code]}}
    assert next(f.allowed for f in judge(named) if f.code == code)


def test_a_queued_run_minds_what_no_turn_mends() -> None:
    report = changed_report({"model.exists": False})
    found = findings(report, changed_plan({"job.limits.wait_for_lease": True}))
    assert [f.level for f in found if f.code == "model-missing"] == [Level.FAIL]


def test_judging_changes_nothing() -> None:
    report, plan = base("probe"), changed_plan({})
    before = copy.deepcopy((report, plan))
    findings(report, plan)
    owned_outputs(report, plan)
    assert (report, plan) == before


class TestOwnedOutputs:
    def test_carry_exactly_what_was_listed(self) -> None:
        listed = {"outputs.outputs.0.digest": "d" * 64, "outputs.outputs.0.entries": 3, "outputs.outputs.0.bytes": 99}
        (output,) = owned_outputs(changed_report(listed), changed_plan({}))
        assert output == {
            "path": "/data/out/kimi", "root": "/data/out", "stale": "fail", "adopt": False,
            "digest": "d" * 64, "entries": 3, "bytes": 99,
        }  # fmt: skip

    @pytest.mark.parametrize(
        "changes", [{"outputs": {"error": "timed out"}}, {"outputs.outputs.0.path": "/data/out/other"}]
    )
    def test_what_is_not_listed_stays_as_planned(self, changes: dict[str, Any]) -> None:
        assert owned_outputs(changed_report(changes), changed_plan({})) == tuple(changed_plan({})["job"]["outputs"])


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (595_148_192_736, "554.3 GiB"), (1 << 50, "1024.0 TiB")],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "unknown time"), (0.4, "0 s"), (59, "59 s"), (125, "2 min"), (11000, "3 h"), (200000, "2 d")],
)
def test_ages(seconds: float | None, text: str) -> None:
    assert age(seconds) == text


def test_this_machine_from_probe_to_clear(tmp_path: Path) -> None:
    """The whole way on real files: probe, judge, put the listing into the plan, clear what was listed."""
    root, data = tmp_path / "root", tmp_path / "prompts.jsonl"
    root.mkdir()
    data.write_text('{"input_ids": [1, 2, 3]}\n\n')
    changes: dict[str, Any] = {
        "host.workdir": str(tmp_path / "work"), "host.python": sys.executable, "host.accelerator": "cpu",
        "host.gpus": 0,
        "extract.model": str(tmp_path / "model"), "extract.data": str(data), "extract.max_samples": None,
        "extract.engine.tensor_parallel_size": 1,
        "job.outputs.0.path": str(root / "out"), "job.outputs.0.root": str(root), "job.outputs.0.stale": "clear",
    }  # fmt: skip
    plan = changed_plan(changes)
    spec = cast("dict[str, Any]", plan["extract"])
    claim(plan["job"]["outputs"][0], "20261128-090000-000001")
    (root / "out" / "hs_0.safetensors").write_bytes(bytes(1000))
    request = {
        "workdir": plan["host"]["workdir"], "accelerator": "cpu", "python": sys.executable, "gpus": 0,
        "kind": "extract", "outputs": plan["job"]["outputs"], "model": str(tmp_path / "model"), "data": str(data),
        "extract": {"over_long": "truncate", **spec, "data_kind": "auto"},
        "deadline_s": 45.0, "lease_dir": str(tmp_path / "lease"),
    }  # fmt: skip
    out = io.BytesIO()
    probe.main(request, b"", out)
    report = json.loads(out.getvalue())

    by_code = {finding.code: finding for finding in findings(report, plan, bytes_expected=10_000)}
    assert not [code for code in by_code if code.startswith("probe-")], "a section failed on this machine"
    assert by_code["model-missing"].level is Level.FAIL
    beside = posixpath.dirname(spec["model"])
    assert f"`ls {beside}` on the host" in by_code["model-missing"].fix, "not of what does not exist"
    assert by_code["data"].what.startswith("2 lines of tokens")
    assert (by_code["data-broken"].level, by_code["data-broken"].why) == (Level.WARN, "1 blank: line 2")
    assert by_code["output-clear"].what == f"1 entry (1000 B) in {root / 'out'} will be deleted"

    (output,) = owned_outputs(report, plan)
    assert clear(output, plan["run_id"])["deleted_entries"] == 1
    assert [path.name for path in (root / "out").iterdir()] == [".ctl-owner.json"]


def test_lines_that_give_no_sample_are_named_before_the_launch() -> None:
    report = json.loads((CASES / "probe-8x-rtx-pro-6000.json").read_text())
    faults = [
        {"code": "blank", "count": 1, "lines": [33], "why": ""},
        {"code": "encoding", "count": 1, "lines": [7], "why": "not UTF-8: byte 2 is 0xff"},
        {
            "code": "malformed",
            "count": 9,
            "lines": [1, 2, 3, 4, 5, 6, 8, 2001],
            "why": "not JSON: x at column 4 of the line",
        },
    ]
    report["sections"]["data"]["data"]["broken"] = {"lines": 2002, "whole": True, "faults": faults}
    found = {each.code: each for each in findings(report, changed_plan({}), data_name="prompts.jsonl")}
    assert found["data-broken"].level is Level.WARN
    assert found["data-broken"].what == "11 of 2,002 lines of prompts.jsonl give no sample"
    assert found["data-broken"].why == (
        "1 blank: line 33; 1 encoding: line 7 (not UTF-8: byte 2 is 0xff); "
        "9 malformed: lines 1, 2, 3, 4, 5, 6, 8, 2001 and more (line 1: not JSON: x at column 4 of the line)"
    )
    report["sections"]["data"]["data"]["broken"] = {"lines": 2002, "whole": False, "faults": faults[:1]}
    (one,) = [each for each in findings(report, changed_plan({})) if each.code == "data-broken"]
    assert one.what.startswith("1 of the first 2,002 lines of ")
    assert one.what.endswith(" gives no sample")
    report["sections"]["data"]["data"]["broken"] = {"lines": 2002, "whole": True, "faults": []}
    assert "data-broken" not in {each.code for each in findings(report, changed_plan({}))}


def test_a_recorded_report_of_a_cpu_host_is_in_order() -> None:
    """A real report, with paths made neutral: what the probe gives and what the checks read are the same."""
    report = json.loads((CASES / "probe-cpu-host.json").read_text())
    changes: dict[str, Any] = {
        "host.workdir": "/srv/ctl/work", "host.python": "/opt/vllm/bin/python", "host.accelerator": "cpu",
        "host.gpus": 0, "extract.model": "/srv/models/kimi-k25-tiny", "extract.data": "/srv/models/chats.jsonl",
        "extract.max_samples": None, "extract.max_seq_len": 300, "extract.engine.tensor_parallel_size": 2,
        "extract.final_norm": False, "job.outputs.0.path": "/srv/ctl/data/out", "job.outputs.0.root": "/srv/ctl/data",
        "extract.engine.gpu_memory_utilization": 0.5,
    }  # fmt: skip
    found = {finding.code: finding for finding in findings(report, changed_plan(changes))}
    assert [finding for finding in found.values() if finding.level is not Level.OK] == []
    assert found["trial"].what.startswith("product and all-reduce on 2 processes")
    assert "12 samples (at most, by the bytes of the data)" in found["size"].what
    assert "KimiK25ForConditionalGeneration" in found["capability"].what


def test_what_no_extraction_writes_is_named_before_it_is_deleted() -> None:
    listing = {
        "path": "/data/out/x", "root": "/data/out", "stale": "clear", "adopt": False, "exists": True,
        "marker": {"run_id": "20260101-000000-abcdef"}, "manifest": None, "entries": 3, "bytes": 30, "digest": "d",
        "others": ["notes.txt"], "foreign": False, "problems": [],
        "examples": [{"path": "notes.txt", "type": "file", "size": 1}],
    }  # fmt: skip
    report = {"uid": 0, "user": "root", "sections": {"outputs": {"ok": True, "data": {"outputs": [listing]}}}}
    (finding,) = check_outputs(report, {"run_id": "20260101-000000-abcdef"})  # type: ignore[typeddict-item]
    assert finding.code == "output-clear"
    assert finding.what.endswith("also what no extraction writes: notes.txt")


@pytest.mark.parametrize(
    ("stale", "entries", "level", "words"),
    [
        ("clear", 3, "warn", "3 entries (30 B) in /data/out/x will be deleted; {} (left alone)"),
        ("fail", 3, "fail", "/data/out/x holds 3 entries (30 B) of an earlier run; {} (left alone)"),
        ("quarantine", 3, "warn", "will be moved to /data/out/x.quarantine-R; {} (moved with it)"),
        ("resume", 3, "ok", "bad ones go to /data/out/x.quarantine-R; {} (left alone)"),
        ("fail", 0, "ok", "/data/out/x holds nothing of ctl's; {} (left alone)"),
        ("quarantine", 0, "ok", "/data/out/x holds nothing of ctl's; {} (left alone)"),
    ],
)
def test_what_is_not_ctls_is_told_apart(stale: str, entries: int, level: str, words: str) -> None:
    listing = {
        "path": "/data/out/x", "root": "/data/out", "stale": stale, "adopt": False, "exists": True, "spent": False,
        "marker": {"run_id": "20260101-000000-abcdef"}, "manifest": None, "entries": entries, "bytes": 10 * entries,
        "digest": "d", "others": [], "foreign": False, "problems": [], "run": None, "partial": 0,
        "not_ours": {"entries": 7, "bytes": 70, "names": [*"abcdef", "g/"]},
        "examples": [{"path": f"hs_{index}.safetensors", "type": "file", "size": 10} for index in range(entries)],
    }  # fmt: skip
    report = {"uid": 0, "user": "root", "sections": {"outputs": {"ok": True, "data": {"outputs": [listing]}}}}
    plan: Any = {"run_id": "R", "extract": None, "job": {"kind": "extract"}}
    (finding,) = check_outputs(report, plan)
    assert finding.level == level
    assert finding.what.endswith(words.format("7 entries that are not ctl's: a, b, c, d, e and 2 more"))
    assert "not ctl's" not in finding.why


def test_the_output_of_a_command_has_names_of_its_own() -> None:
    listing = {
        "path": "/data/out/x", "root": "/data/out", "stale": "clear", "adopt": False, "exists": True, "run": None,
        "marker": {"run_id": "20260101-000000-abcdef", "kind": "command"}, "manifest": None, "entries": 1, "bytes": 1,
        "digest": "d", "others": ["model.pt2"], "foreign": False, "problems": [],
        "examples": [{"path": "model.pt2", "type": "file", "size": 1}],
    }  # fmt: skip
    report = {"uid": 0, "user": "root", "sections": {"outputs": {"ok": True, "data": {"outputs": [listing]}}}}
    plan: Any = {"run_id": "R", "extract": None, "job": {"kind": "command"}}
    (finding,) = check_outputs(report, plan)
    assert finding.what == "1 entry (1 B) in /data/out/x will be deleted"
