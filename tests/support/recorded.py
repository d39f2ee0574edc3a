"""Recorded runs, written by hand: the events of a healthy run, of a failing one, and their log lines."""

from __future__ import annotations

import math
from collections.abc import Iterable
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


def sample(add: Script, t: float, busy: float) -> None:
    """GPU i is a little slower than GPU i-1, so that rows differ."""
    gpus = [
        {
            "index": i,
            "util": round(max(0.0, min(100.0, busy - 2 * i + 6 * math.sin(t / 7 + i))), 1),
            "memory_used": int((70.5 + i * 0.3) * GIB),
            "memory_total": int(95.0 * GIB),
            "power_w": 180 + 2.4 * busy - i,
            "temperature_c": 40 + busy / 4 + i,
        }
        for i in range(8)
    ]
    add(t, "supervisor", "sample", gpus=gpus, cpu_percent=12.5, memory_used=210 * GIB, memory_total=1024 * GIB)


def healthy() -> Script:
    """Loaded after 9 minutes; 412 of 1,000 samples captured."""
    add = started()
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


TRACEBACK = """Traceback (most recent call last):
  File "/opt/vllm/v1/worker/gpu_model_runner.py", line 5176, in load_model
    self.model = model_loader.load_model(
  File "/home/payload/remote_payload/extract/worker.py", line 77, in forward
    hidden, residual = layer(positions, hidden, residual)
TypeError: DeepseekV2DecoderLayer.forward() missing 1 required positional argument: 'llama_4_scaling'
"""


def failing() -> Script:
    """Every rank fails in the load with one mistake; the driver only repeats it."""
    add = started()
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
