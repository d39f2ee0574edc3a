"""What the benchmark says of a way that does not run: the worker's own error, of all that a log repeats."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from support.extraction import REPOSITORY

from remote_payload.extract.settings import capture_settings, load_job, read_model_facts
from remote_payload.host.protocol import ExtractSpec

WORKER = "(Worker pid=11562) ERROR 11-30 04:46:12 [multiproc_executor.py:1063] "
CORE = "(EngineCore pid=11466) ERROR 11-30 04:46:12 [core.py:1512] "
LOG = f"""\
(MainProcess pid=11199) WARNING 11-30 04:46:12 [base.py:380] ValueError: Tokenizer not available
{WORKER}WorkerProc hit an exception.
{WORKER}Traceback (most recent call last):
{WORKER}  File "/opt/lib/python3.11/site-packages/vllm/v1/worker/worker_base.py", line 370, in execute_model
{WORKER}    return self.worker.execute_model(scheduler_output)
{WORKER}  File "/opt/lib/python3.11/site-packages/vllm/connector.py", line 402, in _submit_async_write
{WORKER}    pinned_hs = torch.empty_like(
{WORKER}RuntimeError: pin_memory=True requires a CUDA or other accelerator backend.
{CORE}RuntimeError: Worker failed with error 'pin_memory=True requires', please check the stack trace above
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above).
"""


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("capture", REPOSITORY / "benchmarks" / "capture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_first_error_of_a_worker_is_named_with_its_place(benchmark: ModuleType) -> None:
    assert benchmark.first_error(LOG.splitlines()) == (
        "RuntimeError: pin_memory=True requires a CUDA or other accelerator backend. "
        "(vllm/connector.py:402, _submit_async_write)"
    )
    assert benchmark.first_error(LOG.splitlines()[-1:]).startswith("vllm.v1.engine.exceptions.EngineDeadError: ")
    assert benchmark.first_error(["killed"]) is None


def test_its_plan_is_one_that_the_job_can_run(benchmark: ModuleType, tmp_path: Path) -> None:
    options = argparse.Namespace(hidden=256, layers=8, tokens=500, dtype="float32", cuda=False)
    benchmark.prepare(tmp_path, options)
    spec = json.loads((tmp_path / "run" / "plan.json").read_text())["extract"]
    assert set(spec) >= ExtractSpec.__required_keys__
    job = load_job({"CTL_RUN_DIR": str(tmp_path / "run")})
    facts = read_model_facts(job.spec)
    assert capture_settings(job.spec, facts).boundaries == (2, 4, 5, 8)
