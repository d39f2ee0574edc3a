"""Fetch the few source files of a vLLM release that tell what it can capture, without its 400 MB wheel.

    python tools/fetch_vllm_sources.py OUT_DIR VERSION [VERSION ...]

pip says where its index has the wheel; only the wheel's directory and the wanted members are then read, by HTTP
range requests. Each version becomes OUT_DIR/VERSION/, laid out like a site-packages folder. These files are vLLM's
own and are not part of this repository; what `capability.py` reads from them is.
"""

from __future__ import annotations

import fnmatch
import io
import json
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterable
from pathlib import Path

WANTED = (
    "vllm-*.dist-info/METADATA",
    "vllm/_version.py",
    "vllm/config/*.py",
    "vllm/distributed/__init__.py",
    "vllm/distributed/communication_op.py",
    "vllm/engine/arg_utils.py",
    "vllm/entrypoints/llm.py",
    "vllm/envs.py",
    "vllm/model_executor/models/*.py",
    "vllm/models/*",
    "vllm/platforms/*.py",
    "vllm/sampling_params.py",
    "vllm/v1/core/sched/output.py",
    "vllm/v1/worker/*",
    "vllm/__init__.py",
)
TIMEOUT_S = 120.0
CHUNK = 1 << 20
"""Bytes a request, at least: members that lie together are then read at once."""


class RangeFile(io.RawIOBase):
    """A read-only file over HTTP range requests; remembers the last chunk."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._position = 0
        self._chunk = (0, b"")
        self.requests = 0
        with urllib.request.urlopen(self._request("bytes=0-0"), timeout=TIMEOUT_S) as answer:  # noqa: S310
            self._size = int(answer.headers["Content-Range"].rpartition("/")[2])

    def _request(self, span: str) -> urllib.request.Request:
        self.requests += 1
        return urllib.request.Request(self._url, headers={"Range": span})  # noqa: S310 - the address is pip's own

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override] - typeshed's Buffer is wider than what io passes
        start, data = self._chunk
        wanted = min(len(buffer), self._size - self._position)
        if wanted <= 0:
            return 0
        if not start <= self._position < start + len(data):
            end = min(self._size, self._position + max(wanted, CHUNK)) - 1
            with urllib.request.urlopen(self._request(f"bytes={self._position}-{end}"), timeout=TIMEOUT_S) as answer:  # noqa: S310
                start, data = self._position, answer.read()
            self._chunk = (start, data)
        piece = data[self._position - start :][:wanted]
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


def wheel_url(version: str) -> str:
    """Ask pip where its index has the wheel of a vLLM release. Raises subprocess.CalledProcessError."""
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed",
            "--ignore-requires-python", "--only-binary=:all:", "--target", "/nonexistent", "--report", "-",
            f"vllm=={version}",
        ],
        capture_output=True, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    (item,) = json.loads(done.stdout)["install"]
    return str(item["download_info"]["url"])


def fetch(version: str, out: Path, wanted: Iterable[str] = WANTED) -> Path:
    """Write the wanted files of a release below out/VERSION, and return that folder; what is there stays."""
    folder = out / version
    if folder.is_dir():
        return folder
    partial = out / f".{version}.part"
    shutil.rmtree(partial, ignore_errors=True)
    with zipfile.ZipFile(io.BufferedReader(RangeFile(wheel_url(version)), CHUNK)) as wheel:
        members = [
            info
            for info in wheel.infolist()
            if info.filename.endswith((".py", "METADATA"))
            and any(fnmatch.fnmatch(info.filename, each) for each in wanted)
        ]
        # In the order of the file, so that one request serves many members.
        for info in sorted(members, key=lambda info: info.header_offset):
            wheel.extract(info, partial)
    partial.rename(folder)
    return folder


def main(arguments: list[str]) -> int:
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    for version in arguments[1:]:
        print(fetch(version, Path(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
