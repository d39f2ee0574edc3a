"""What preflight says of engine arguments' values, against what this vLLM does with every one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.engine.arg_utils import EngineArgs

from controller.core.enginevalues import refused
from remote_payload.host.vllm_source import VllmSource
from remote_payload.host.vllm_types import engine_types
from tools import tiny_models

VALUES = (
    "eight", "8", " 8 ", "8.0", "1e3", "1_000", "true", "auto", "", 8, 0, -1, 10**30, 1.5, 8.0, True, False, [], {},
)  # fmt: skip


@pytest.mark.slow
def test_nothing_is_refused_that_vllm_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = str(tiny_models.write("qwen3-tiny", tmp_path))
    given: dict[str, Any] = {"model": model, "tokenizer": model, "max_model_len": 512, "skip_tokenizer_init": True}
    types = engine_types(VllmSource(str(Path(vllm.__file__).parents[1])))
    wrong = [(name, value) for name, wanted in types.items() for value in VALUES if refused(value, wanted)]
    assert len(wrong) > 500
    EngineArgs(**given).create_engine_config()  # or nothing below would be the value's fault
    taken = []
    for name, value in wrong:
        try:
            EngineArgs(**{**given, name: value}).create_engine_config()
        except (ValueError, TypeError, AssertionError):  # pydantic's is the first; vLLM's own checks raise each
            continue
        taken.append((name, value))
    assert taken == []
