"""Look at sample files in child processes: a damaged file, or one made to harm, must not take the job along.

As a module it is the child: one JSON request a line on stdin, `{"path", "format"}`, one JSON answer a line on stdout.
Torch files are loaded weights-only before anything else looks at them. The checksum is over the whole file.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from remote_payload.extract.formats import HalfFileError, SampleFacts, format_named
from remote_payload.host.asked import AskedChild, ChildDied
from remote_payload.host.files import sha256_of

CHILDREN = 8
"""At most. Each hashes about 1 GB/s, which together is what a good file system delivers."""

AHEAD = 4
"""Files asked for ahead of each child, so that none waits for the reader of the answers."""

START_S = 120.0
"""For a child's first answer: the import of torch from a cold network file system takes a minute."""

SLOWEST_BYTES_PER_S = 4 << 20
"""A file that is read slower than this has a disk that hangs."""

TORCH_SUFFIXES = (".pt", ".ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What a file holds and its checksum, or why it holds nothing that can be trusted."""

    facts: SampleFacts | None
    sha256: str | None
    why: str


def inspect_file(path: str, form: str) -> Inspection:
    """Look at one file in this process; damage is an answer, not an error."""
    try:
        if path.endswith(TORCH_SUFFIXES):
            _load_weights_only(path)
        facts = format_named(form).inspect(path)
        return Inspection(facts=facts, sha256=sha256_of([path])[1], why="")
    except (OSError, HalfFileError) as error:
        return Inspection(facts=None, sha256=None, why=str(getattr(error, "strerror", None) or error))


def inspect_all(paths: Iterable[str], form: str, children: int | None = None) -> Generator[Inspection, None, None]:
    """Yield what `inspect_file` says of each path, in their order; a file that kills its child is damaged."""
    count = children or min(CHILDREN, os.cpu_count() or 1)
    idle = [_Child(form) for _ in range(count)]
    lock = threading.Lock()

    def ask(path: str) -> Inspection:
        with lock:
            child = idle.pop()
        try:
            return child.ask(path)
        finally:
            with lock:
                idle.append(child)

    pending: list[Future[Inspection]] = []
    try:
        with ThreadPoolExecutor(count, thread_name_prefix="ctl-inspector") as threads:
            try:
                for path in paths:
                    pending.append(threads.submit(ask, path))
                    if len(pending) > count * AHEAD:
                        yield pending.pop(0).result()
                while pending:
                    yield pending.pop(0).result()
            finally:  # also where the caller stops listening
                for future in pending:
                    future.cancel()
    finally:
        for child in idle:
            child.end()


class _Child:
    """Inspects one file after the other in a process of its own."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._child = AskedChild([sys.executable, "-m", "remote_payload.extract.inspector"])

    def ask(self, path: str) -> Inspection:
        try:
            size = os.path.getsize(path)
        except OSError as error:
            return Inspection(facts=None, sha256=None, why=str(error.strerror))
        try:
            answer = self._child.ask({"path": path, "format": self._form}, START_S + size / SLOWEST_BYTES_PER_S)
        except ChildDied as error:
            return Inspection(facts=None, sha256=None, why=f"reading it killed its reader ({error})")
        return _decoded(answer)

    def end(self) -> None:
        self._child.end()


def _decoded(answer: dict[str, Any]) -> Inspection:
    facts = answer["facts"]
    return Inspection(
        facts=SampleFacts(**{**facts, "shape": tuple(facts["shape"])}) if facts else None,
        sha256=answer["sha256"],
        why=answer["why"],
    )


def _load_weights_only(path: str) -> None:
    import pickle
    import zipfile

    import torch

    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise HalfFileError(f"it is not a torch file of plain tensors: {reason}") from error


def main() -> int:
    """Answer until stdin ends."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer = asdict(inspect_file(request["path"], request["format"]))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
