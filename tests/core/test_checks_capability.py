"""What preflight says of a vLLM, from the facts that were read of real releases."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import pytest

from controller.core.checks import findings
from controller.core.checks_capability import check_capability, native_boundaries
from controller.core.finding import Finding
from remote_payload.host.protocol import Plan

TESTS = Path(__file__).resolve().parents[1]
REPORT = json.loads((TESTS / "cases" / "probe-8x-rtx-pro-6000.json").read_text())
PLAN = json.loads((TESTS / "cases" / "plan-8x-rtx-pro-6000.json").read_text())
RELEASES = json.loads((TESTS / "data" / "vllm-capability.json").read_text())


def judge(version: str, model: str = "Kimi-K2.5", *, needed: bool = False, **capture: Any) -> list[Finding]:
    report, plan = copy.deepcopy(REPORT), copy.deepcopy(PLAN)
    facts = {**RELEASES[version]["models"][model], "package": "/opt/vllm/lib/python3.12/site-packages/vllm"}
    facts["llama_4_scaling"] = {**facts["llama_4_scaling"], "needed": needed}
    report["sections"]["capability"] = {"ok": True, "seconds": 0.4, "data": facts}
    plan["extract"].update(capture)
    return list(check_capability(report, cast("Plan", plan)))


def test_the_origin_case_is_captured_with_hooks() -> None:
    (found,) = judge("0.16.0")
    assert (found.level, found.code) == ("ok", "capability")
    assert found.what == (
        "vLLM 0.16.0: KimiK25ForConditionalGeneration over DeepseekV2ForCausalLM, "
        "boundaries 2, 30, 58, 61 with hooks, "
        "DeepseekV2DecoderLayer(positions, hidden_states, residual, llama_4_scaling?), "
        "embed_input_ids(), runner v1"
    )


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.24.0", "boundaries 2, 30, 58 natively, boundaries 61 with hooks"),
        ("0.32.0", "boundaries 2, 30, 58, 61 natively, Deep"),
    ],
)
def test_what_is_native_is_told_from_what_is_not(version: str, says: str) -> None:
    (found,) = judge(version)
    assert says in found.what


def test_a_class_that_is_not_there_fails_with_name_version_and_remedy() -> None:
    (found,) = judge("0.14.1")
    assert (found.level, found.code) == ("fail", "capability-architecture")
    assert found.what == "vLLM 0.14.1 has no class for KimiK25ForConditionalGeneration"
    assert "docs/compatibility.md" in found.fix


@pytest.mark.parametrize(
    ("version", "model", "says"),
    [
        ("0.16.0", "Kimi-K2.5", "DeepseekV2ForCausalLM of vLLM 0.16.0 returns no hidden states natively"),
        ("0.24.0", "Kimi-K2.5", "DeepseekV2ForCausalLM of vLLM 0.24.0 does not return [61]"),
        ("0.11.0", "Qwen3", "Qwen3ForCausalLM of vLLM 0.11.0 does not return [2, 30, 58, 61]"),
    ],
)
def test_native_demanded_and_not_there(version: str, model: str, says: str) -> None:
    found = judge(version, model, capture="native")
    native = [each for each in found if each.code == "capability-native"]
    assert [each.what for each in native] == [says]
    assert native[0].level == "fail"
    assert "auto" in native[0].fix
    assert "ok" not in [each.level for each in found]


def test_native_demanded_and_there() -> None:
    assert [each.code for each in judge("0.32.0", capture="native")] == ["capability"]


def test_a_missing_name_is_named() -> None:
    found = judge("0.11.0", "Qwen3", capture="native")
    (names,) = [each for each in found if each.code == "capability-names"]
    assert "GPUModelRunner.execute_model_state" in names.why
    assert [each.code for each in judge("0.11.0", "Qwen3")] == ["capability"]


def test_the_final_norm_needs_a_runner_that_keeps_it() -> None:
    assert "capability-final-norm" in [each.code for each in judge("0.11.0", "Qwen3", final_norm=True)]
    assert [each.code for each in judge("0.12.0", "Qwen3", final_norm=True)] == ["capability"]


def test_scaling_that_the_config_asks_for_and_the_class_does_not_know() -> None:
    assert "capability-llama-4-scaling" in [each.code for each in judge("0.11.0", "DeepSeek-V3", needed=True)]
    assert [each.code for each in judge("0.12.0", "DeepSeek-V3", needed=True)] == ["capability"]


def test_layers_that_could_not_be_read_are_a_warning() -> None:
    report = copy.deepcopy(REPORT)
    facts = {**RELEASES["0.32.0"]["models"]["Qwen3"], "package": "/x/vllm", "layer_parameters": None, "layer": None}
    report["sections"]["capability"] = {"ok": True, "seconds": 0.1, "data": facts}
    assert [(each.level, each.code) for each in check_capability(report, PLAN)] == [
        ("warn", "capability-unread"),
        ("ok", "capability"),
    ]


def test_no_vllm_and_no_section_say_nothing() -> None:
    report = copy.deepcopy(REPORT)
    del report["sections"]["capability"]
    assert list(check_capability(report, PLAN)) == []
    report["sections"]["capability"] = {"ok": True, "seconds": 0.1, "data": {"package": None}}
    assert list(check_capability(report, PLAN)) == []
    report["sections"]["capability"] = {"ok": False, "seconds": 10.0, "error": "SyntaxError: invalid syntax"}
    assert list(check_capability(report, PLAN)) == []
    assert [(each.level, each.code) for each in findings(report, PLAN) if each.code == "probe-capability"] == [
        ("warn", "probe-capability")
    ]


def test_boundary_0_is_native_only_where_the_class_adds_nothing_to_it() -> None:
    qwen, kimi = (RELEASES["0.32.0"]["models"][name] for name in ("Qwen3", "Kimi-K2.5"))
    assert native_boundaries(qwen, [0, 4, 8], 8) == (0, 4, 8)
    assert native_boundaries(kimi, [0, 4, 8], 8) == (4, 8)
