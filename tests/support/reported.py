"""Run folders of any size as a workstation holds them, written by hand: for reports and notebooks."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import recorded
from support.recorded import HOST, RUN, START

BOUNDARIES = (2, 30, 58, 61)

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&<!--]]></svg></style></title></pre>"
    "\x1b]52;c;eA==\x07\x1b[31m\u202egnp.exe $\\frac{1}{0}$ _x %s {0} javascript:alert(3) http://example.com/x.png"
)
"""What a host may put into any name, message or log line."""


@dataclass(frozen=True, kw_only=True)
class Reported:
    """`path` is a run folder; `plan`, `summary` and `result` are what it holds."""

    path: Path
    plan: dict[str, Any]
    summary: dict[str, Any]
    result: dict[str, Any]
    lines: list[dict[str, Any]] = field(default_factory=list)


def write_run(
    runs_dir: Path, *, samples: int = 1000, ranks: int = 8, name: str = "eagle3-kimi-k2.5", failed: bool = False,
    text: str = "", seconds: float = 70.0,
) -> Reported:  # fmt: skip
    """Write a run of `samples` records: every 97th skipped, every 211th missing, one with NaN, some cut.

    `text` is put into everything that a host can name. `failed` is a run that broke in the load.
    """
    path = runs_dir / RUN
    for part in ("events", "ledger", "log"):
        (path / part).mkdir(parents=True, exist_ok=True)
    script = recorded.failing() if failed else recorded.healthy()
    lines = [] if failed else ledger(samples, ranks, seconds, text)
    if not failed:
        _finish(script, samples, seconds, text)
    for event in script.events:
        data = {**event.data, "text": text} if text and "text" in event.data else event.data
        record = {"wire": 1, "seq": event.seq, "run": RUN, "host": HOST, "writer": event.writer, "t": event.t}
        with (path / "events" / f"{event.writer}.jsonl").open("a") as stream:
            stream.write(json.dumps({**record, "type": event.type, **data}) + "\n")
    for writer in sorted({line["writer"] for line in lines}):
        own = [{key: value for key, value in line.items() if key != "writer"} for line in lines]
        chosen = [json.dumps(each) for each, line in zip(own, lines, strict=True) if line["writer"] == writer]
        (path / "ledger" / f"{writer}.jsonl").write_text("\n".join(chosen) + "\n")
    (path / "log" / "000001.log").write_bytes(recorded.LOG)
    plan, summary, result = _documents(samples, lines, name, failed, text)
    for document, content in (("plan.json", plan), ("summary.json", summary), ("result.json", result)):
        (path / document).write_text(json.dumps(content))
    (path / "local.json").write_text(json.dumps({"schema": 1, "host": plan["host"], "status": "launched"}))
    return Reported(path=path, plan=plan, summary=summary, result=result, lines=lines)


def ledger(samples: int, ranks: int, seconds: float, text: str = "") -> list[dict[str, Any]]:
    """Return the lines of all ledgers, each with its `writer`."""
    chance = random.Random(7)
    lines: list[dict[str, Any]] = []
    for index in range(samples):
        if index % 211 == 210:
            continue
        if index % 97 == 96:
            why = text or "not JSON: line 1 column 7"
            lines.append({"writer": "driver", "index": index, "line": index + 1, "skipped": "malformed", "why": why})
            continue
        tokens = min(4096, int(math.exp(chance.gauss(6.6, 0.7))) + 8)
        if tokens == 4096:
            lines.append({"writer": "driver", "index": index, "line": index + 1, "notice": "truncated", "why": ""})
        states = []
        for place, boundary in enumerate(BOUNDARIES):
            mean = 12.0 * 6**place * chance.uniform(0.9, 1.1)
            broken = index == samples // 3 and place == 3
            states.append(
                {"boundary": boundary, "norm_mean": mean, "norm_max": 3 * mean, "nan": 3 if broken else 0,
                 "inf": 0, "zero_rows": 0}
            )  # fmt: skip
        lines.append(
            {"writer": f"rank-{index % ranks}", "index": index, "file": text or f"hs_{index}.safetensors",
             "tokens": tokens, "bytes": tokens * 4 * 7168 * 2, "sha256": "0" * 64, "token_sha256": "0" * 64,
             "states": states, "seconds": 0.2, "t": START + 586 + seconds * index / samples}
        )  # fmt: skip
    return lines


def _finish(script: recorded.Script, samples: int, seconds: float, text: str) -> None:
    end = 586 + seconds
    for place in range(int(end - 640) // 2):  # the recording has them up to here
        recorded.sample(script, 640 + 2 * place, 90.0)
    script(end, "driver", "phase", name="capture", status="done", seconds=seconds)
    script(end, "driver", "notice", level="warn", code="buffers", text=text or "buffers were full for 3 s")
    script(end + 4, "supervisor", "step", name="extract", status="done", seconds=end + 4 - 67.2)
    script(end + 4, "supervisor", "step", name="verify", status="started")
    script(end + 9, "supervisor", "step", name="verify", status="done", seconds=5.0)
    script(
        end + 9, "supervisor", "end", end_reason="succeeded", exit_code=0, signal=None, message="", gpus_clean=True
    )
    script(end + 10, "controller", "stage", name="watch", status="done", text="finished")


def _documents(
    samples: int, lines: list[dict[str, Any]], name: str, failed: bool, text: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    host = {
        "name": HOST, "address": "10.1.230.174", "port": 0, "user": "root", "workdir": "/root/ctl",
        "python": "/opt/vllm/bin/python", "bootstrap_python": "python3", "accelerator": "cuda", "gpus": 8,
        "lease_dir": None,
    }  # fmt: skip
    spec = {
        "model": text or "/models/Kimi-K2.5", "revision": None, "trust_remote_code": True, "dtype": "auto",
        "data": "/data/chats.jsonl", "data_kind": "auto", "max_samples": samples, "max_seq_len": 4096,
        "over_long": "truncate", "shard": [1, 1], "boundaries": list(BOUNDARIES), "final_norm": False,
        "store_dtype": "auto", "output": "/data/out/kimi", "format": "speculators", "capture": "auto",
        "canary": True, "rehearse": "auto", "engine": {"tensor_parallel_size": 8}, "buffer_bytes": 1 << 32,
    }  # fmt: skip
    output = {"path": spec["output"], "root": "/data/out", "stale": "clear", "adopt": False, "digest": None,
              "entries": 0, "bytes": 0}  # fmt: skip
    job = {
        "kind": "extract", "name": name, "steps": [{"name": "recheck", "kind": "recheck"}], "cwd": "/", "env": {},
        "secret_env": [], "outputs": [output], "success": {"exit_codes": [0]}, "limits": {},
    }  # fmt: skip
    plan = {
        "wire": 1, "run_id": RUN, "created": "2026-11-29T18:41:50+00:00", "ctl_version": "0.1.0", "host": host,
        "playbook": name, "payload": "0" * 64, "job": job, "extract": spec, "timings": {}, "allowed": [],
    }  # fmt: skip
    written = [line for line in lines if "file" in line]
    skipped = sum("skipped" in line for line in lines)
    reason = "job-failed" if failed else "succeeded"
    message = text or ("the job ended with exit code 1 in step extract" if failed else "all steps succeeded")
    counts = {"expected": samples, "written": len(written), "skipped": skipped, "failed": 0,
              "missing": samples - len(written) - skipped}  # fmt: skip
    summary: dict[str, Any] = {
        "schema_version": 1, "kind": "extract", "run_id": RUN, "state": "finished", "end_reason": reason,
        "hosts": [HOST], "outputs": [spec["output"]], "timings": {"push_s": 0.5, "load_s": 511.8},
        "versions": {"ctl": "0.1.0", "vllm": text or "0.24.0", "torch": "2.11.0"}, "gpus_clean": True,
        "allowed": [], "problems": [], "format": "speculators", "model": spec["model"],
    }  # fmt: skip
    if failed:
        summary["problems"] = [
            {"code": "exception", "what": text or "TypeError: missing 'llama_4_scaling'", "why": text, "fix": text,
             "traceback": text or recorded.TRACEBACK, "rank": 3, "ranks": [3, 0, 1, 2, 4, 5, 6, 7]}
        ]  # fmt: skip
    else:
        summary |= {
            "samples": counts, "tokens": sum(line["tokens"] for line in written),
            "bytes": sum(line["bytes"] for line in written), "boundaries": list(BOUNDARIES),
            "shape": {"hidden": 7168, "states": 4, "dtype": "bfloat16"}, "num_layers": 61,
            "data": {"records": samples},
            "states": [
                {"boundary": boundary, "norm_mean": 12.0 * 6**place, "norm_max": 36.0 * 6**place,
                 "nan": 3 if place == 3 else 0, "inf": 0, "zero_rows": 0}
                for place, boundary in enumerate(BOUNDARIES)
            ],
        }  # fmt: skip
    result = {
        "wire": 1, "run_id": RUN, "end_reason": reason, "step": "extract", "exit_code": int(failed), "signal": None,
        "message": message, "ended": "2026-11-29T18:53:00Z", "duration_s": 94.0 if failed else 660.0,
        "gpus_clean": True, "leftovers": [], "log_bytes": 0, "log_sha256": "", "log_gap_bytes": 0,
    }  # fmt: skip
    return plan, summary, result
