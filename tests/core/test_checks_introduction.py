"""What `ctl hosts test` makes of a host's answers."""

from __future__ import annotations

from typing import Any

import pytest

from controller.core.checks_introduction import introduction_findings
from controller.core.finding import Level
from controller.core.model import Host
from controller.core.validation import validate

GPU = {"name": "NVIDIA H200", "memory_mib": "143771", "driver": "580.1"}


def host(**changes: Any) -> Host:
    data = {
        "name": "gpu1", "address": "gpu1", "python": "/opt/vllm/bin/python", "workdir": "/root/ctl",
        "output_roots": ["/data/out"], "gpus": 2, "gpu_name": "H200", **changes,
    }  # fmt: skip
    return validate(Host, data, where=str)


def report(**changes: Any) -> dict[str, Any]:
    return {
        "hostname": "box", "user": "root", "bootstrap": "3.9.2",
        "python": {"version": "3.12.1", "vllm": "0.32.0", "torch": "2.13.0"}, "gpus": [GPU, GPU],
        "folders": {"/root/ctl": "ok", "/data/out": "ok"}, **changes,
    }  # fmt: skip


def bad(**changes: Any) -> list[tuple[str, str]]:
    found = introduction_findings(host(), report(**changes))
    assert all(finding.fix for finding in found if finding.level is not Level.OK)
    return [(finding.code, finding.level.value) for finding in found if finding.level is not Level.OK]


def test_a_host_that_is_as_described_is_right() -> None:
    assert bad() == []


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"bootstrap": "3.8.10"}, [("python-old", "fail")]),
        ({"python": {"error": "No such file"}}, [("environment-python", "fail")]),
        ({"python": {"version": "3.12", "vllm": None, "torch": "2"}}, [("vllm-missing", "fail")]),
        ({"python": {"version": "3.12", "vllm": "0.9.2", "torch": "2"}}, [("vllm-old", "fail")]),
        ({"python": {"version": "3.12", "vllm": "1.0.0rc1", "torch": "2"}}, []),
        ({"gpus": [GPU]}, [("gpu-count", "fail")]),
        ({"gpus": []}, [("gpu-count", "fail")]),
        ({"gpus": {"error": "nvidia-smi: No such file"}}, [("gpus", "fail")]),
        ({"gpus": [{**GPU, "name": "NVIDIA A100"}] * 2}, [("gpu-name", "warn")]),
        ({"folders": {"/data/out": "there is no such folder"}}, [("folder", "fail")]),
    ],
)
def test_each_thing_that_is_wrong_is_named_with_its_remedy(changes: dict[str, Any], found: list[Any]) -> None:
    assert bad(**changes) == found


def test_a_host_without_gpus_is_not_asked_for_any() -> None:
    found = introduction_findings(host(accelerator="cpu", gpus=0, gpu_name=None), report(gpus=[]))
    assert all(finding.level is Level.OK for finding in found)
