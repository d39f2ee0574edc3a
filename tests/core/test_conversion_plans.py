"""What a conversion of a run's samples owns, and what it refuses before anything is sent."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from support.plans import GIVEN, RUN_ID, host, plan, playbook

from controller.core import planner
from controller.core.checks import findings
from controller.core.checks_source import check_source
from controller.core.errors import ConfigError, UsageError
from controller.stages.preflight import request_of
from remote_payload.host.protocol import Plan, check_plan


def convert(source: Plan, **options: Any) -> Plan:
    chosen: dict[str, Any] = {"to": "specforge", "output": None, "stale": "fail", "adopt": False, **options}
    return planner.make_convert_plan(host(), source, **chosen, **{**GIVEN, "run_id": "20260102-030406-a1b2c3"})


def test_a_conversion_owns_a_folder_of_its_own_and_no_gpu() -> None:
    made = convert(plan())
    assert check_plan(json.loads(json.dumps(made))) == made
    assert [step["kind"] for step in made["job"]["steps"]] == ["clear", "exec", "verify"]
    assert made["job"]["outputs"][0]["path"] == "/data/states/kimi-specforge"
    assert (made["host"]["accelerator"], made["host"]["gpus"]) == ("cpu", 0)
    argv = made["job"]["steps"][1]["argv"]
    assert f"/srv/ctl/runs/{RUN_ID}" in argv
    assert made["job"]["steps"][2]["argv"] == [*argv, "--verify"]


@pytest.mark.parametrize(
    ("spec", "to", "why"),
    [
        ({"store_dtype": "fp8"}, "modelopt", "they are fp8"),
        ({"format": "specforge", "final_norm": True}, "speculators", "it cannot be undone"),
        ({"format": "modelopt", "final_norm": True}, "speculators-0.3", "it cannot be undone"),
    ],
)
def test_a_conversion_that_would_lose_something_is_refused_before_anything_is_sent(
    spec: dict[str, Any], to: str, why: str
) -> None:
    source = plan()
    assert source["extract"] is not None
    lossy = cast("Plan", {**source, "extract": {**source["extract"], **spec}})
    with pytest.raises(UsageError) as caught:
        convert(lossy, to=to)
    assert caught.value.code == "lossy-conversion"
    assert why in caught.value.why


def test_a_conversion_cannot_overwrite_what_it_reads() -> None:
    for output in ("/data/states/kimi", "/data/states/kimi/below", "/models/x"):
        with pytest.raises(ConfigError) as caught:
            convert(plan(), output=output)
        assert caught.value.code in ("output-overlaps", "output-outside-roots")
    with pytest.raises(UsageError, match="already"):
        convert(plan(), to="speculators")
    with pytest.raises(UsageError, match="cannot resume"):
        convert(plan(), stale="resume")
    with pytest.raises(UsageError, match="no format"):
        convert(plan(), to="hdf5")
    with pytest.raises(UsageError, match="is a run, not an extraction"):
        convert(planner.make_command_plan(host(), ["true"], name="t", **GIVEN))
    with pytest.raises(UsageError, match="is a rehearsal, not an extraction"):
        convert(planner.make_rehearsal_plan(host(), playbook(), **GIVEN))


SOURCE = {
    "run_id": RUN_ID, "found": True, "over": True, "state": "finished", "output": "/data/states/kimi",
    "written": 10, "present": 10, "changed": 0, "marker": RUN_ID,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "level", "code", "words"),
    [
        ({}, "ok", "source", f"10 samples of run {RUN_ID}"),
        ({"found": False}, "fail", "source-unknown", "is not on host gpu1"),
        ({"over": False, "state": "running"}, "fail", "source-running", "is running: it still writes"),
        ({"written": 0, "present": 0}, "fail", "source-empty", "has written no sample"),
        ({"present": 0, "marker": "other"}, "fail", "source-gone", "all 10 samples"),
        ({"present": 7}, "fail", "source-gone", "3 of 10 samples"),
        ({"changed": 2, "marker": "other"}, "fail", "source-changed", "are not those that run"),
    ],
)
def test_a_source_is_judged_before_anything_is_launched(
    changes: dict[str, Any], level: str, code: str, words: str
) -> None:
    made = convert(plan())
    report = {"sections": {"source": {"ok": True, "data": {**SOURCE, **changes}}}}
    (finding,) = check_source(report, made)
    assert (finding.level, finding.code) == (level, code)
    assert words in finding.what
    assert ("run other" in finding.why) == (changes.get("marker") == "other")


def test_the_probe_is_asked_for_the_source_of_a_conversion_and_must_answer() -> None:
    made = convert(plan())
    assert request_of(made)["source"] == f"/srv/ctl/runs/{RUN_ID}"
    assert request_of(plan())["source"] is None
    unanswered = [finding.code for finding in findings({"sections": {}}, made) if finding.level == "fail"]
    assert "probe-source" in unanswered
    for timed_out, level in ((True, "warn"), (False, "fail")):
        late = {"sections": {"source": {"ok": False, "error": "it took 30 s", "timed_out": timed_out}}}
        levels = {finding.code: finding.level for finding in findings(late, made)}
        assert levels["probe-source"] == level
        assert levels["probe-outputs"] == "fail", "what has not been looked at at all is another matter"


def test_a_full_output_of_a_conversion_is_no_place_to_go_on() -> None:
    made = convert(plan())
    listing = {
        "path": made["job"]["outputs"][0]["path"], "stale": "fail", "adopt": False, "foreign": False, "spent": False,
        "entries": 3, "bytes": 9, "problems": [], "marker": None, "samples": 3, "partial": 0, "others": [],
        "examples": [],
    }  # fmt: skip
    report = {"sections": {"outputs": {"ok": True, "data": {"outputs": [listing]}}}}
    found = {each.code: each.fix for each in findings(report, made)}
    assert "--stale clear" in found["output-stale"]
    assert "resume" not in found["output-stale"]
