"""A model hub on loopback: the part of the Hugging Face hub's HTTP API that a download needs, and its faults."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

COMMIT = "c0ffee" * 6 + "beef"
CHUNK = 1 << 20


@dataclass
class Request:
    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class Hub:
    """One repository `org/tiny` of `files`; large ones (over 1 KiB) are LFS files, as on the hub.

    `token`: needed for everything. `corrupt`: names whose bytes are changed on the way. `pause_s`: between two
    chunks of a large file. `failing`: how many downloads are first answered with 500. `during`: called before each
    chunk with (name, bytes sent). `requests` are all that came.
    """

    files: dict[str, bytes]
    repo: str = "org/tiny"
    token: str | None = None
    corrupt: set[str] = field(default_factory=set)
    pause_s: float = 0.0
    failing: int = 0
    during: Callable[[str, int], object] = lambda name, sent: None
    requests: list[Request] = field(default_factory=list)

    def __enter__(self) -> Self:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self)

            do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

            def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def gets(self, name: str) -> list[Request]:
        """The downloads of one file, in order."""
        return [each for each in self.requests if each.method == "GET" and each.path == f"/cdn/{name}"]

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        authorization = handler.headers.get("Authorization", "")
        token = authorization.removeprefix("Bearer ") or None
        path = handler.path.partition("?")[0]
        self.requests.append(Request(handler.command, path, handler.headers.get("Range"), token))
        if self.token is not None and token != self.token:
            return _reply(handler, 401, b'{"error": "Invalid username or password."}')
        if path.startswith(f"/api/models/{self.repo}/revision/"):
            if path.rpartition("/")[2] not in ("main", COMMIT):
                return _reply(handler, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return _reply(handler, 200, json.dumps(self._listing()).encode())
        resolved = re.fullmatch(rf"/{self.repo}/resolve/{COMMIT}/(?P<name>.+)", path)
        name = resolved["name"] if resolved else path.removeprefix("/cdn/")
        if name not in self.files:
            return _reply(handler, 404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        if resolved:
            digest, size = hashlib.sha256(self.files[name]).hexdigest(), len(self.files[name])
            facts = {"X-Repo-Commit": COMMIT, "X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(size)}
            return _reply(handler, 302, b"", {**facts, "ETag": f'"{digest}"', "Location": f"{self.url}/cdn/{name}"})
        return self._send(handler, name)

    def _send(self, handler: BaseHTTPRequestHandler, name: str) -> None:
        data = self.files[name]
        if handler.command == "GET" and self.failing > 0:
            self.failing -= 1
            return _reply(handler, 500, b"{}")
        if name in self.corrupt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range") or "")
        start = int(asked[1]) if asked else 0
        handler.send_response(206 if asked else 200)
        handler.send_header("Content-Length", str(len(data) - start))
        if asked:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        handler.end_headers()
        if handler.command == "HEAD":
            return None
        try:
            for position in range(start, len(data), CHUNK):
                self.during(name, position)
                handler.wfile.write(data[position : position + CHUNK])
                if len(data) > CHUNK:
                    time.sleep(self.pause_s)
        except (BrokenPipeError, ConnectionResetError):  # the client was killed
            handler.close_connection = True
        return None

    def _listing(self) -> dict[str, Any]:
        siblings = []
        for name, data in self.files.items():
            sibling: dict[str, Any] = {"rfilename": name, "size": len(data)}
            sibling["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
            if len(data) > 1024:
                sibling["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(sibling)
        return {
            "id": self.repo,
            "modelId": self.repo,
            "sha": COMMIT,
            "siblings": siblings,
            "tags": [],
            "private": False,
        }


def _reply(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


def safetensors(*, tensors: int = 1, bytes_each: int = 1 << 16) -> bytes:
    """Return a file of float32 tensors in the safetensors format: header length, header, data."""
    names = {
        f"t{number}": {
            "dtype": "F32", "shape": [bytes_each // 4],
            "data_offsets": [number * bytes_each, (number + 1) * bytes_each],
        }
        for number in range(tensors)
    }  # fmt: skip
    header = json.dumps(names).encode()
    return len(header).to_bytes(8, "little") + header + bytes(range(256)) * (tensors * bytes_each // 256)
