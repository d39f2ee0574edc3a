"""A private name that vLLM has renamed fails with the name and the version."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from remote_payload.extract import versions
from remote_payload.extract.errors import CaptureError


def test_a_missing_name_is_told_with_the_version() -> None:
    import vllm

    with pytest.raises(CaptureError) as caught:
        versions.require(SimpleNamespace(load_model=1), ("load_model", "init_device"), "the worker class Worker")
    assert "init_device" in str(caught.value)
    assert "load_model," not in str(caught.value)
    assert vllm.__version__ in str(caught.value)


def test_a_scheduler_output_of_another_shape_is_refused() -> None:
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[])
    fields = {
        "finished_req_ids": set(), "num_scheduled_tokens": {}, "scheduled_new_reqs": [],
        "scheduled_cached_reqs": cached, "total_num_scheduled_tokens": 0,
    }  # fmt: skip
    versions.require_step(SimpleNamespace(**fields))
    for name in fields:
        with pytest.raises(CaptureError, match=name):
            versions.require_step(SimpleNamespace(**{key: value for key, value in fields.items() if key != name}))
    new = SimpleNamespace(req_id="1", prompt_token_ids=[1], sampling_params=None)
    with pytest.raises(CaptureError, match="num_computed_tokens"):
        versions.require_step(SimpleNamespace(**{**fields, "scheduled_new_reqs": [new]}))


def test_the_installed_vllm_has_the_cpu_worker() -> None:
    versions.require(versions.worker_class(cpu=True), versions.WORKER_METHODS, "the CPU worker")
