"""Recorded runs, written by hand: the events of a healthy run, of a failing one, and their log lines."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from controller.core.events import Event
from controller.core.logs import LogFolder, LogLine
from controller.core.runview import RunView
from controller.core.state import reduce

RUN = "20261129-184150-a1b2c3"
HOST = "gpu-host-1"
START = 1_796_000_000.0
"""Seconds since the epoch at which every recording starts."""

GIB = 2**30


class Script:
    """Writes events with a clock and a sequence for each writer."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._seq: dict[str, int] = {}

    def __call__(self, t: float, writer: str, event_type: str, /, **data: Any) -> None:
        seq = self._seq.get(writer, -1) + 1
        self._seq[writer] = seq
        event = Event(type=event_type, run=RUN, host=HOST, writer=writer, seq=seq, t=START + t, data=data)
        self.events.append(event)


def started() -> Script:
    """From the first connection to the load under way; eight GPUs."""
    add = Script()
    for name, begin, seconds, text in (
        ("connect", 0.0, 0.31, "root@10.1.230.174"),
        ("push", 0.4, 0.52, "payload unchanged"),
        ("preflight", 1.0, 2.14, "14 ok, 1 warning"),
        ("confirm", 3.2, 4.0, ""),
    ):
        add(begin, "controller", "stage", name=name, status="started")
        add(begin + seconds, "controller", "stage", name=name, status="done", text=text, seconds=seconds)
    add(2.9, "controller", "finding", level="ok", code="gpus-free", what="8 GPUs are free", why="0 MiB each", fix="")
    add(
        2.9,
        "controller",
        "finding",
        level="warn",
        code="shm-leftovers",
        what="/dev/shm holds 14.0 GiB of an earlier vLLM",
        why="psm_0f3a91, psm_77c1d2",
        fix="rm /dev/shm/psm_0f3a91 /dev/shm/psm_77c1d2",
    )
    add(7.3, "controller", "stage", name="launch", status="started")
    add(8.1, "controller", "stage", name="launch", status="done", text="supervisor confirmed", seconds=0.82)
    add(8.2, "controller", "stage", name="watch", status="started")
    add(8.3, "controller", "contact", status="connected", text="")
    add(8.0, "supervisor", "state", state="running", text="")
    for name, begin, seconds in (("recheck", 8.1, 0.61), ("rehearse", 8.8, 58.2), ("clear", 67.1, 0.09)):
        add(begin, "supervisor", "step", name=name, status="started")
        add(begin + seconds, "supervisor", "step", name=name, status="done", seconds=seconds)
    add(67.2, "supervisor", "step", name="extract", status="started")
    add(69.0, "driver", "phase", name="data", status="started")
    add(73.1, "driver", "phase", name="data", status="done", text="1,000 samples", seconds=4.1)
    add(73.2, "driver", "phase", name="load", status="started", text="Kimi-K2.5, TP=8")
    return add


def loading() -> Script:
    """The same, and how many samples there are, which the driver tells before it loads."""
    add = started()
    add(73.2, "driver", "progress", done=0, total=1000, tokens=0, bytes=0, skipped=0, failed=0)
    return add


def sample(add: Script, t: float, busy: float, loaded: float = 1.0) -> None:
    """GPU i is a little slower than GPU i-1, so that rows differ; `loaded` is the share of the weights in memory."""
    gpus = [
        {
            "index": i,
            "util": round(max(0.0, min(100.0, busy - 2 * i + 6 * math.sin(t / 7 + i))), 1),
            "memory_used": int((1.5 + 69.0 * loaded + i * 0.3) * GIB),
            "memory_total": int(95.0 * GIB),
            "power_w": 180 + 2.4 * busy - i,
            "temperature_c": 40 + busy / 4 + i,
        }
        for i in range(8)
    ]
    add(
        t, "supervisor", "sample", gpus=gpus, cpu_percent=12.5, memory_used=210 * GIB, memory_total=1024 * GIB,
        disk_free=int((900 - t / 20) * GIB), disk_total=3500 * GIB,
    )  # fmt: skip


def healthy() -> Script:
    """Loaded after 9 minutes; 412 of 1,000 samples captured."""
    add = loading()
    for t in range(84, 560, 12):
        sample(add, t, 3.0, (t - 80) / 480)
    for index in range(40):
        sample(add, 560.0 + 2 * index, 4.0 if index < 12 else 88.0)
    add(585.0, "driver", "phase", name="load", status="done", text="Kimi-K2.5, TP=8", seconds=511.8)
    add(585.1, "driver", "phase", name="capture", status="started")
    for step in range(9):
        done = 412 * step // 8
        add(
            585.2 + 7.0 * step,
            "driver",
            "progress",
            done=done,
            total=1000,
            tokens=done * 730,
            bytes=done * 730 * 4 * 7168 * 2,
            skipped=min(step, 2),
            failed=0,
        )
    return add


def paused() -> Script:
    """The disk has no room for the next sample, a minute after the last one was written; 412 of 1,000 samples."""
    add = healthy()
    low = "/out has 279,356 bytes free for 312,080. No sample is admitted until space is freed; none is lost"
    add(650.0, "driver", "notice", level="warn", code="disk-low", text=low)
    told = {"done": 412, "total": 1000, "tokens": 412 * 730, "bytes": 412 * 730 * 4 * 7168 * 2}
    for t in (650.0, 680.0, 710.0):
        add(t, "driver", "progress", **told, skipped=2, failed=0, paused="disk-low")
    sample(add, 712.0, 0.0)
    return add


def freed() -> Script:
    """The same, and room again two minutes later."""
    add = paused()
    add(770.0, "driver", "notice", level="info", code="disk-freed", text="/out has room again; goes on after 120 s")
    done = {"done": 412, "total": 1000, "tokens": 412 * 730, "bytes": 412 * 730 * 4 * 7168 * 2}
    add(770.0, "driver", "progress", **done, skipped=2, failed=0)
    add(780.0, "driver", "progress", **{**done, "done": 512}, skipped=2, failed=0)
    return add


def finished() -> Script:
    """All samples captured, read back and the GPUs given back, a quarter of an hour after the start."""
    add = healthy()
    for step in range(1, 9):
        done = 412 + 588 * step // 8
        sample(add, 640.0 + 10 * step, 88.0)
        add(
            641.2 + 10.0 * step, "driver", "progress", done=done, total=1000, tokens=done * 730,
            bytes=done * 730 * 4 * 7168 * 2, skipped=2, failed=0,
        )  # fmt: skip
    add(721.5, "driver", "phase", name="capture", status="done", text="", seconds=136.4)
    add(721.6, "driver", "phase", name="drain", status="started", text="")
    add(723.4, "driver", "phase", name="drain", status="done", text="", seconds=1.8)
    add(726.0, "supervisor", "step", name="extract", status="done", text="", seconds=658.8)
    add(726.1, "supervisor", "step", name="verify", status="started", text="")
    add(769.9, "supervisor", "step", name="verify", status="done", text="", seconds=43.8)
    add(774.0, "supervisor", "notice", level="info", code="gpus-clean", text="8 GPUs at 0 MiB, no process left")
    add(774.1, "supervisor", "state", state="finished", text="")
    add(
        774.2, "supervisor", "end", end_reason="succeeded", exit_code=0, signal=None, message="all steps succeeded",
        gpus_clean=True,
    )  # fmt: skip
    add(774.6, "controller", "stage", name="watch", status="done", text="finished")
    return add


TRACEBACK = """Traceback (most recent call last):
  File "/opt/vllm/v1/worker/gpu_model_runner.py", line 5176, in load_model
    self.model = model_loader.load_model(
  File "/home/payload/remote_payload/extract/worker.py", line 77, in forward
    hidden, residual = layer(positions, hidden, residual)
TypeError: DeepseekV2DecoderLayer.forward() missing 1 required positional argument: 'llama_4_scaling'
"""


def failing() -> Script:
    """Every rank fails in the load with one mistake; the driver only repeats it."""
    add = loading()
    sample(add, 80.0, 3.0)
    for rank in (3, 0, 1, 2, 4, 5, 6, 7):
        add(
            90.0 + (0.0 if rank == 3 else 0.1 + rank / 100),
            f"rank-{rank}",
            "exception",
            rank=rank,
            exc_type="TypeError",
            message="DeepseekV2DecoderLayer.forward() missing 1 required positional argument: 'llama_4_scaling'",
            traceback=TRACEBACK,
            where="worker.py:77 in forward",
        )
    add(
        90.6,
        "driver",
        "exception",
        rank=None,
        exc_type="RuntimeError",
        message="Engine core initialization failed. See root cause above.",
        traceback="Traceback (most recent call last):\n  ...\nRuntimeError: Engine core initialization failed.\n",
        where="",
    )
    add(90.7, "driver", "phase", name="load", status="failed", text="", seconds=17.5)
    add(91.2, "supervisor", "step", name="extract", status="failed", text="exit code 1", seconds=24.0)
    add(94.0, "supervisor", "state", state="finished", text="")
    add(
        94.0,
        "supervisor",
        "end",
        end_reason="job-failed",
        exit_code=1,
        signal=None,
        message="the job ended with exit code 1 in step extract",
        gpus_clean=True,
    )
    return add


def view_of(events: Iterable[Event], playbook: str = "eagle3-kimi-k2.5") -> RunView:
    view = RunView(playbook=playbook)
    for event in events:
        view = reduce(view, event)
    return view


LOG = b"""\
(EngineCore pid=3898) INFO 11-29 19:37:24 [model_runner.py:302] Model loading took 70.61 GiB and 511.561878 seconds
(EngineCore pid=3898) \rCapturing CUDA graphs:   0%|      | 0/51\rCapturing CUDA graphs: 100%|######| 51/51
(Worker_TP3 pid=4001) WARNING 11-29 19:38:15 [jit_monitor.py:106] kernel compiled during inference: fused_moe_kernel
(Worker_TP0 pid=3998) INFO 11-29 19:38:16 [worker.py:120] capture: boundaries [2, 30, 58, 61] of 61 layers
(Worker_TP0 pid=3998) INFO 11-29 19:38:17 [worker.py:131] first sample: [712, 4, 7168] bfloat16
INFO 11-29 19:38:17 [engine.py:88] 1,000 samples, longest 4,096 tokens
"""


def log_lines(data: bytes = LOG) -> list[LogLine]:
    return LogFolder().feed(data)


def long_log(until: float) -> bytes:
    """Return the log of the recorded runs up to `until` seconds after their start, by a host's clock in UTC-8."""

    def worker(rank: int) -> str:
        return f"(Worker_TP{rank} pid={3998 + rank})"

    lines: list[tuple[float, str]] = [
        (74.0, "(EngineCore pid=3898) INFO {} [core.py:114] Initializing a V1 LLM engine: model='kimi-k2.5'"),
        *(
            (75.0 + rank / 4, f"{worker(rank)} INFO {{}} [gpu_worker.py:331] Using V2 Model Runner")
            for rank in range(8)
        ),
        (79.0, "(Worker_TP0 pid=3998) INFO {} [weight_utils.py:849] Filesystem type for checkpoints: XFS"),
    ]
    bar = "(Worker_TP0 pid=3998) " + "\r".join(
        f"Loading safetensors checkpoint shards: {100 * done // 62:3d}% Completed | {done}/62" for done in range(63)
    )
    lines += [(80.0, bar)] if until > 100 else []
    lines += [
        (560.0, "(Worker_TP0 pid=3998) INFO {} [model_runner.py:302] Model loading took 70.61 GiB and 480.6 seconds"),
        (566.0, "(Worker_TP3 pid=4001) WARNING {} [jit_monitor.py:106] kernel compiled during inference: fused_moe"),
        (584.0, "(EngineCore pid=3898) INFO {} [core.py:337] init engine took 24.02 s"),
        (585.1, "(Worker_TP0 pid=3998) INFO {} [worker.py:120] capture: boundaries [2, 30, 58, 61] of 61 layers"),
        (586.0, "(Worker_TP0 pid=3998) INFO {} [worker.py:131] first sample: [712, 4, 7168] bfloat16"),
        *((590.0 + 4 * n, f"{worker(n % 8)} INFO {{}} [store.py:88] wrote hs_{n * 23}") for n in range(34)),
        (722.0, "(EngineCore pid=3898) INFO {} [core.py:1214] [shutdown] EngineCore: trigger received SIGTERM"),
        (770.0, "INFO {} [summarize.py:60] 998 samples read back, 2 skipped, none missing"),
    ]
    host = [(t, text.format(time.strftime("%m-%d %H:%M:%S", time.gmtime(START + t - 8 * 3600)))) for t, text in lines]
    return "".join(f"{text}\n" for t, text in sorted(host, key=lambda each: each[0]) if t <= until).encode()


def write_run(folder: Path, script: Script, log: bytes) -> None:
    """Write a run folder as the workstation holds one: events by writer, the log, a plan."""
    (folder / "events").mkdir(parents=True, exist_ok=True)
    (folder / "log").mkdir(exist_ok=True)
    for writer in sorted({event.writer for event in script.events}):
        own = (event.to_json() for event in script.events if event.writer == writer)
        (folder / "events" / f"{writer}.jsonl").write_text("\n".join(own) + "\n", encoding="utf-8")
    (folder / "log" / "000001.log").write_bytes(log)
    plan = {
        "run_id": RUN,
        "host": {"name": HOST, "gpus": 8},
        "job": {"kind": "extract", "name": "eagle3-kimi-k2.5", "env": {}},
        "extract": {"engine": {"tensor_parallel_size": 8}},
    }
    (folder / "plan.json").write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")


RECORDED: dict[str, tuple[Callable[[], Script], float]] = {
    "running": (healthy, 643.0),
    "failed": (failing, 90.0),
    "finished": (finished, 780.0),
}
"""The folders below tests/data/runs, and until when their logs go; `python -m support.recorded` writes them anew."""


def main(target: Path) -> None:
    for name, (script, until) in RECORDED.items():
        write_run(target / name, script(), long_log(until))


if __name__ == "__main__":
    main(Path(__file__).parents[1] / "data" / "runs")
