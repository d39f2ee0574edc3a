"""What capturing costs: tokens/s of plain `LLM.generate`, of our extraction, and of vLLM's own, in one run.

    python benchmarks/capture.py [--hidden 1024] [--layers 12] [--tokens 8192] [--rounds 1] [--dtype float32]

Each way runs in a process of its own, one after another, over the same random prompts (lognormal lengths), on dummy
weights of Qwen3's shape, with four states and without CUDA graphs. Ours is the real job: its time ends when the last
file is on disk. vLLM's own (`extract_hidden_states`) ends when its last file is there. Goal on a CPU with a hidden
size of 1,024: ours at 0.95 of plain. On a shared machine use
more rounds: the best of each counts, and every second round goes the other way round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from remote_payload.host.protocol import ExtractSpec

REPOSITORY = Path(__file__).resolve().parents[1]
WAYS = {"plain": "LLM.generate, nothing captured", "ours": "ctl's extraction", "vllm": "vLLM's extract_hidden_states"}
VOCABULARY, LONGEST = 8192, 1024
RUN_ID = "20260101-000000-000000"
PROCESS_TIMEOUT_S = 3600.0
FILES_TIMEOUT_S = 120.0
FRAME = re.compile(r'File "\S*/site-packages/(?P<file>\S+)", line (?P<line>\d+), in (?P<name>\S+)')
RAISED = re.compile(r"^(?:\(.*\) ERROR .*?\] )?(?P<what>(?:\w+\.)*\w*(?:Error|Exception)\b(?:: .*)?)$")


def prepare(folder: Path, options: argparse.Namespace) -> None:
    """Write the model's configuration, the prompts, and the run folder with its plan."""
    model = folder / "model"
    model.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden, "num_hidden_layers": options.layers, "head_dim": 128,
        "num_attention_heads": max(1, options.hidden // 128), "num_key_value_heads": max(1, options.hidden // 256),
        "vocab_size": VOCABULARY, "max_position_embeddings": 2 * LONGEST, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "torch_dtype": options.dtype, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    generator, left = random.Random(0), options.tokens  # noqa: S311 - test data
    with (folder / "data.jsonl").open("w") as file:
        while left > 0:
            length = min(int(generator.lognormvariate(5.5, 0.6)) + 16, LONGEST, left)
            left -= length
            ids = [generator.randrange(10, VOCABULARY) for _ in range(length)]
            file.write(json.dumps({"input_ids": ids}) + "\n")
    (folder / "run").mkdir()
    spec: ExtractSpec = {
        "model": str(model), "revision": None, "trust_remote_code": False, "dtype": options.dtype,
        "data": str(folder / "data.jsonl"), "data_kind": "auto", "max_samples": None, "max_seq_len": LONGEST,
        "over_long": "truncate", "shard": [1, 1], "canary": False, "rehearse": "never", "boundaries": "eagle3",
        "final_norm": False, "store_dtype": "auto", "output": str(folder / "ours"), "format": "speculators",
        "capture": "auto", "buffer_bytes": 4 << 30,
        "engine": {"load_format": "dummy", "max_num_batched_tokens": 4096, "tensor_parallel_size": 1},
    }  # fmt: skip
    host = {"name": "here", "accelerator": "cuda" if options.cuda else "cpu"}
    plan = {"run_id": RUN_ID, "host": host, "job": {"outputs": []}, "extract": spec}
    (folder / "run" / "plan.json").write_text(json.dumps(plan))


def measure(way: str, folder: Path) -> None:
    """Run one way in this process and print its result as the last line."""
    from remote_payload.extract.settings import (
        capture_settings,
        engine_arguments,
        load_job,
        read_model_facts,
    )

    job = load_job(os.environ)
    prompts = [json.loads(line)["input_ids"] for line in (folder / "data.jsonl").read_text().splitlines()]
    tokens = sum(map(len, prompts))
    if way == "ours":
        seconds = _ours(job)
    else:
        facts = read_model_facts(job.spec)
        settings = capture_settings(job.spec, facts)
        arguments = engine_arguments(job, settings, facts)
        for name in ("worker_cls", "additional_config"):
            del arguments[name]
        seconds = _generate(way, arguments, prompts, list(settings.boundaries), folder / way)
    print("RESULT " + json.dumps({"tokens": tokens, "samples": len(prompts), "seconds": seconds}))


def _ours(job: Any) -> float:
    from remote_payload.extract import engine
    from remote_payload.host.files import read_lines

    assert engine.main() == 0
    events = read_lines(os.path.join(job.paths.events, "driver.jsonl"))
    phases = [e for e in events if e["type"] == "phase" and e["status"] == "done"]
    return sum(e["seconds"] for e in phases if e["name"] in ("capture", "drain"))


def _generate(
    way: str, arguments: dict[str, Any], prompts: list[list[int]], boundaries: list[int], out: Path
) -> float:
    from vllm import LLM, SamplingParams

    if way == "vllm":
        hidden = {"hf_config": {"eagle_aux_hidden_state_layer_ids": boundaries}}
        arguments["speculative_config"] = {
            "method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": hidden,
        }  # fmt: skip
        arguments["kv_transfer_config"] = {
            "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(out)},
        }  # fmt: skip
    llm = LLM(**arguments)
    once = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    llm.generate([{"prompt_token_ids": ids[:64]} for ids in prompts[:3]], once, use_tqdm=False)  # as our probe does
    before = len(list(out.glob("*.safetensors")))
    started = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], once, use_tqdm=False)
    deadline = time.perf_counter() + FILES_TIMEOUT_S
    while way == "vllm" and len(list(out.glob("*.safetensors"))) < before + len(prompts):
        assert time.perf_counter() < deadline, "files are missing"
        time.sleep(0.01)
    return time.perf_counter() - started


def run_way(way: str, options: argparse.Namespace) -> dict[str, Any] | str:
    """Return the result of one way in a process of its own, or why there is none."""
    with tempfile.TemporaryDirectory(prefix="ctl-bench-", dir=options.folder) as scratch:
        folder = Path(scratch)
        prepare(folder, options)
        env = {
            **os.environ, "CTL_RUN_DIR": str(folder / "run"), "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
            "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        }  # fmt: skip
        argv = [sys.executable, __file__, "--way", way, "--folder", scratch]
        ended = subprocess.run(
            argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            timeout=PROCESS_TIMEOUT_S,
        )  # fmt: skip
    lines = ended.stdout.strip().splitlines()
    found = [line.removeprefix("RESULT ") for line in lines if line.startswith("RESULT ")]
    if ended.returncode == 0 and found:
        return dict(json.loads(found[-1]))
    return first_error(lines) or f"exit code {ended.returncode}, last line: {(lines or [''])[-1][-300:]}"


def first_error(lines: list[str]) -> str | None:
    """Return the first exception of a log with its place: the worker's own, which all later ones only pass on."""
    place = ""
    for line in lines:
        frame = FRAME.search(line)
        if frame:
            place = f" ({frame['file']}:{frame['line']}, {frame['name']})"
        raised = RAISED.search(line)
        if raised:
            return raised["what"][:300] + place
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", default=None, help="float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--folder", default=None, help="where the states go for the time being")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        measure(options.way, Path(options.folder))
        return
    import torch
    import vllm

    options.cuda = torch.cuda.is_available()
    options.dtype = options.dtype or ("bfloat16" if options.cuda else "float32")
    device = torch.cuda.get_device_name(0) if options.cuda else f"CPU, {len(os.sched_getaffinity(0))} cores"
    print(f"date      {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
    print(f"command   {shlex.join([Path(sys.executable).name, *sys.argv])}")
    print(f"versions  vLLM {vllm.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"device    {device}; load average before {os.getloadavg()[0]:.1f}")
    shape = f"hidden {options.hidden}, {options.layers} layers, {options.dtype}, 4 states, best of {options.rounds}"
    print(f"model     Qwen3's shape, dummy weights: {shape}")
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    why: dict[str, str] = {}
    for number in range(options.rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):  # whoever is always first gets the cold machine
            if way in why:
                continue
            result = run_way(way, options)
            if isinstance(result, str):
                why[way] = result
            else:
                rates[way].append(result["tokens"] / result["seconds"])
                samples, tokens = result["samples"], result["tokens"]
    if any(rates.values()):
        print(f"data      {samples} prompts, {tokens} tokens")
    print(f"load      average after {os.getloadavg()[0]:.1f}\n")
    for way, what in WAYS.items():
        if way in why:
            print(f"{what:32} does not run here: {why[way]}")
            continue
        rounds = [mine / plain for mine, plain in zip(rates[way], rates["plain"], strict=False)]
        ratio = f"{max(rates[way]) / max(rates['plain']):.3f}" if rounds else "?"
        each = f" (by round {', '.join(f'{one:.3f}' for one in rounds)})" if way != "plain" else ""
        goal = "   goal on a CPU: 0.95" if way == "ours" else ""
        print(f"{what:32} {max(rates[way]):10,.0f} tokens/s   {ratio} of plain{each}{goal}")


if __name__ == "__main__":
    main()
