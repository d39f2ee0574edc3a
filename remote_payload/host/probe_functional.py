"""The `functional` section: a context and a product on each GPU, one all-reduce over all, in children with a
deadline.

0 MiB in use does not prove that a GPU computes, nor that NCCL gets through the machine's switches. The ranks are
`remote_payload.extract.exercise` under the host's `python`, in the job's own environment, so a variable that helps
the job (NCCL_P2P_DISABLE) shows here whether it does.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from typing import Any, Dict, List, Optional

from remote_payload.host.sections import Note

STEPS = ("import", "context", "matmul", "group", "all-reduce")

OUTPUT_LIMIT = 1 << 20
LOOK_S = 0.5
REAP_S = 0.5
"""A killed process is gone within milliseconds, or stuck."""

STDERR_KEPT = 4000
"""Characters of a rank's stderr that are reported: its end, where NCCL and Python say why."""

PAYLOAD = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def probe_functional(
    note: Note, python: str, uuids: List[str], ranks: int, env: Dict[str, str], deadline_s: float
) -> Dict[str, Any]:
    """Return {"device", "ranks": [record], "seconds"}; a rank that has not ended by `deadline_s` is killed.

    `uuids` are the GPUs, one a rank; without any, `ranks` processes use the CPU. `env` is the job's environment. A
    record is {rank, uuid, steps: {name: seconds}, at (the step it failed or hung in, null if it ended well), hung,
    error, stderr, torch, cuda, archs, capability, peers}. Raises OSError if `python` cannot be run.
    """
    started = time.monotonic()
    folder = tempfile.mkdtemp(prefix="ctl-exercise-")
    processes: List[_Rank] = []
    try:
        for rank in range(len(uuids) or ranks):
            note("rank %d" % rank)
            processes.append(_Rank(rank, python, uuids, len(uuids) or ranks, env, folder, deadline_s))
        _follow(processes, started + deadline_s)
        return {
            "device": "cuda" if uuids else "cpu",
            "ranks": [process.record() for process in processes],
            "seconds": round(time.monotonic() - started, 3),
        }
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.reap()
        shutil.rmtree(folder, ignore_errors=True)


class _Rank:
    def __init__(
        self, rank: int, python: str, uuids: List[str], ranks: int, env: Dict[str, str], folder: str, timeout_s: float
    ) -> None:
        self.rank = rank
        self.uuid: Optional[str] = uuids[rank] if uuids else None
        self.output = b""
        self.code: Optional[int] = None
        # A file, not a pipe: NCCL_DEBUG=INFO fills a pipe that nobody empties, and that would look like a hang.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the rank
        weakref.finalize(self, self._stderr.close)
        request = {
            "rank": rank, "ranks": ranks, "device": "cuda" if uuids else "cpu",
            "store": os.path.join(folder, "store"), "timeout_s": timeout_s,
        }  # fmt: skip
        environ = {**os.environ, **env, "CTL_EXERCISE": json.dumps(request), "PYTHONDONTWRITEBYTECODE": "1"}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (PAYLOAD, env.get("PYTHONPATH"))))
        environ.setdefault("OMP_NUM_THREADS", "1")
        if uuids:
            # All of them in each rank, as vLLM does it: NCCL judges the way to a GPU that it cannot see differently.
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)
        self.process = subprocess.Popen(
            [python, "-m", "remote_payload.extract.exercise"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=self._stderr, env=environ, cwd="/",
        )  # fmt: skip

    def take(self) -> bool:
        """Read what there is; False once the rank has said all."""
        assert self.process.stdout is not None
        piece = os.read(self.process.stdout.fileno(), 1 << 16)
        self.output += piece
        return bool(piece) and len(self.output) < OUTPUT_LIMIT

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)  # our own child, not yet reaped: its pid cannot be another's

    def reap(self) -> None:
        try:
            self.process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            return  # stuck in the driver: waiting would pass its hang on to us

    def record(self) -> Dict[str, Any]:
        record: Dict[str, Any] = {
            "rank": self.rank, "uuid": self.uuid, "steps": {}, "at": None, "hung": False, "error": None, "stderr": "",
            "torch": None, "cuda": None, "archs": [], "capability": None, "peers": [],
        }  # fmt: skip
        for line in _lines(self.output):
            if "step" in line:
                record["at"] = line["step"]
            elif "done" in line:
                record["steps"][line["done"]] = line["seconds"]
                record["at"] = None
            else:
                record.update({key: line[key] for key in line if key in record})
        self.code = self.process.poll()
        record["hung"] = self.code is None
        if self.code is not None and self.code < 0 and not record["error"]:
            record["error"] = "killed by signal %d" % -self.code
        elif self.code not in (None, 0) and not record["error"]:
            record["error"] = "exit code %d" % (self.code or 0)
        if self.code != 0:
            record["at"] = record["at"] or next((step for step in STEPS if step not in record["steps"]), STEPS[-1])
            record["stderr"] = self._end_of_stderr()
        return record

    def _end_of_stderr(self) -> str:
        # Not through the file's own place, which a rank that still writes shares; and not as a whole: NCCL's debug
        # output may be gigabytes. A character is at most 4 bytes.
        size, most = os.fstat(self._stderr.fileno()).st_size, 4 * STDERR_KEPT
        piece = os.pread(self._stderr.fileno(), most, max(0, size - most))
        return piece.decode("utf-8", "replace").strip()[-STDERR_KEPT:]


def _follow(ranks: List[_Rank], deadline: float) -> None:
    """Read all ranks until they have ended, or the deadline; a rank that fails leaves the others waiting for it."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            assert rank.process.stdout is not None
            selector.register(rank.process.stdout, selectors.EVENT_READ, rank)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            # In slices: a rank that failed closes its output a moment before it can be seen to have ended.
            for key, _ in selector.select(min(left, LOOK_S)):
                if not key.data.take():
                    selector.unregister(key.fileobj)
            if any(rank.process.poll() not in (None, 0) for rank in ranks):
                deadline = min(deadline, time.monotonic() + 2.0)  # theirs is the error; the rest only waits for them
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, min(1.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            continue


def _lines(output: bytes) -> List[Dict[str, Any]]:
    """Return the JSON objects among the lines; libraries print their own words in between."""
    found = []
    for text in output.split(b"\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return found
