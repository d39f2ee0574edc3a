"""The real job over a stand-in for vLLM (support/stubvllm), forked from one warm process: a run takes milliseconds.

As a module it is that process: a request a line on stdin, `{"env", "log"}`, the child's pid a line on stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors.torch import load_file
from support.extraction import REPOSITORY, Run, environment, make_run, write_lines
from support.stubvllm.vllm.v1.worker.cpu_worker import HIDDEN, states

from remote_payload.extract import arrow
from remote_payload.host.layout import OUTPUT_LEDGER, OUTPUT_MANIFEST

STUB = Path(__file__).parent / "stubvllm"
BOUNDARIES = [2, 4, 5, 8]
ROW_BYTES = HIDDEN * len(BOUNDARIES) * 4
RUN_TIMEOUT_S = 120.0


class StubEngine:
    """Starts jobs. Each is a process group of its own, so that it can be killed as a whole."""

    def __enter__(self) -> Self:
        path = f"{STUB}:{REPOSITORY}:{REPOSITORY / 'tests'}"
        self._server = subprocess.Popen(
            [sys.executable, "-m", "support.stubengine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(30)

    def start(self, run: Run, **stub: Any) -> Job:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        env = {key: value for key, value in environment(run).items() if key.startswith("CTL_")}
        env["CTL_STUB"] = json.dumps(stub)
        status = run.folder / "exit-code"
        status.unlink(missing_ok=True)
        request = {"env": env, "log": str(run.folder / "log.txt"), "status": str(status)}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return Job(run, int(self._server.stdout.readline()), status)

    def run(self, run: Run, **stub: Any) -> Run:
        """Run a job to its end."""
        return self.start(run, **stub).wait()


class Job:
    def __init__(self, run: Run, pid: int, status: Path) -> None:
        self.run, self.pid, self._status = run, pid, status

    def kill(self) -> None:
        """SIGKILL the job with everything it started."""
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.killpg(self.pid, signal.SIGKILL)
        while self.alive():
            time.sleep(0.001)

    def alive(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # gone before the open, or between open and read
            return False
        return state not in "ZX"

    def wait(self, timeout_s: float = RUN_TIMEOUT_S) -> Run:
        deadline = time.monotonic() + timeout_s
        while self.alive():
            assert time.monotonic() < deadline, (self.run.folder / "log.txt").read_text()[-4000:]
            time.sleep(0.005)
        code = int(self._status.read_text()) if self._status.exists() else None
        log = (self.run.folder / "log.txt").read_text()
        return Run(folder=self.run.folder, output=self.run.output, code=code, log=log)


def write_model(folder: Path) -> Path:
    """Write the configuration of the stub's model."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "stub", "num_hidden_layers": 8, "hidden_size": HIDDEN, "vocab_size": 1024,
        "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_prompts(path: Path, lengths: list[int], seed: int = 0) -> Path:
    """Write prompts of these lengths, the third with a loss mask, and one record that is refused after the first."""
    generator = random.Random(seed)
    records: list[Any] = [{"input_ids": [generator.randrange(10, 1000) for _ in range(n)]} for n in lengths]
    if len(records) > 2:
        records[2]["loss_mask"] = [number % 2 for number in range(lengths[2])]
    records.insert(1, "{ no record")
    return write_lines(path, records)


def make_stub_run(folder: Path, shared: Path, run_id: str, **fields: Any) -> Run:
    """Create a run with an output, a model and data in `shared`; its folder is `folder`/RUN_ID."""
    run = make_run(folder / run_id, model=str(shared / "model"), data=str(shared / "data.jsonl"), **fields)
    plan = json.loads((run.folder / "plan.json").read_text())
    output = fields.get("output") or str(shared / "out")
    plan["run_id"], plan["extract"]["output"], plan["job"]["outputs"][0]["path"] = run_id, output, output
    (run.folder / "plan.json").write_text(json.dumps(plan))
    return Run(folder=run.folder, output=Path(output))


def prompts(data: Path) -> dict[int, list[int]]:
    """The token ids of each valid record of a data set, by index."""
    lines = data.read_text().splitlines()
    return {i: json.loads(line)["input_ids"] for i, line in enumerate(lines) if line.startswith('{"')}


def fates(run: Run) -> Counter[int]:
    """How often the ledgers of a run name each record; a cut sample's notice is no fate."""
    return Counter(r["index"] for r in run.ledger("*") if {"file", "skipped", "failed"} & r.keys())


def assert_all_samples(run: Run, data: Path) -> None:
    """The output holds every sample with its tokens and states and nothing else, and the ledger each record once."""
    wanted = prompts(data)
    names = {f"hs_{index}.safetensors" for index in wanted}
    found = set(os.listdir(run.output)) - set(arrow.FILES)  # there with pyarrow
    assert found == {*names, OUTPUT_MANIFEST, OUTPUT_LEDGER}
    for index, ids in wanted.items():
        sample = load_file(run.path(index))
        assert sample["token_ids"].tolist() == ids
        expected = states([(token, position) for position, token in enumerate(ids)])
        assert sample["hidden_states"].equal(torch.stack([expected[b] for b in BOUNDARIES], dim=1))
    assert fates(run) == Counter(dict.fromkeys(range(len(data.read_text().splitlines())), 1))


def _serve() -> None:
    import vllm  # noqa: F401
    from transformers import PretrainedConfig  # noqa: F401 - imported once, for all children

    import remote_payload.extract.worker  # noqa: F401
    from remote_payload.extract import engine

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid:
            sys.stdout.write(f"{pid}\n")
            sys.stdout.flush()
            continue
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request["env"])
        code = 1
        try:
            code = engine.main()
        except BaseException:  # noqa: BLE001 - a forked child must never run on as its parent
            traceback.print_exc()
        Path(request["status"]).write_text(str(code))
        os._exit(code)


if __name__ == "__main__":
    _serve()
