"""The job of `ctl hosts fetch-model`: one commit of a model into a folder, proved file by file. Run as a module.

A file is downloaded beside, hashed as the hub's digest says, and only then gets its name, so that a folder holds
nothing half or wrong however this ends; what is under way is continued by the next run. Files that were there before
and differ are moved aside, never deleted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from remote_payload.extract.errors import ExceptionReporter
from remote_payload.extract.hub import (
    MARKER,
    PARTIAL,
    REPLACED,
    HubError,
    HubFile,
    Listing,
    is_proved,
    list_model,
    look_at_folder,
    partial_path,
    partial_size,
    read_marker,
    refusal,
)
from remote_payload.extract.progress import PatientEvents
from remote_payload.host.errors import without_queries
from remote_payload.host.files import fsync_folder, write_json
from remote_payload.host.journal import EventWriter
from remote_payload.host.layout import RunPaths
from remote_payload.host.probe_model import probe_model

WORKERS = 4
"""Files at a time: one stream of a distant hub seldom fills the line, and each is hashed while others are loaded."""

ATTEMPTS = 5
PAUSE_S = 2.0
"""Before a second attempt after an answer of 500 or above; doubled each time. The hub's client itself goes on after
broken connections."""

RESERVE = 16 << 20
"""Bytes kept free beside the model: for records, and for what else writes to that disk in small amounts."""

INTERVAL_S = 1.0
"""Seconds between two progress events."""


class FetchError(Exception):
    """The model cannot be brought into place; `record` is a problem of the run's summary."""

    def __init__(self, code: str, what: str, why: str, fix: str) -> None:
        super().__init__(f"{what}: {why}" if why else what)
        self.record = {"code": code, "what": what, "why": why, "fix": fix}


class Stopped(Exception):
    """Another file has failed, so this one is left as it is."""


class Fetch:
    """One listing into one folder; `run` is called once."""

    def __init__(self, listing: Listing, folder: str, run_id: str) -> None:
        self._listing, self._folder, self._run_id = listing, folder, run_id
        self._stop = threading.Event()
        self._lock = threading.Lock()  # of the marker
        self._marker: dict[str, Any] = {}

    def prepare(self, *, adopt: bool) -> None:
        """Claim the folder. Raises FetchError if it is not ours, or has not the room."""
        found = look_at_folder(self._folder, self._listing)
        if found["state"] == "other":
            why = f"it holds {found['holds']}, not {self._listing.repo}@{self._listing.commit}"
            raise FetchError(
                "folder-other", f"{self._folder} is of another model", why, "choose another folder: --to"
            )
        if found["state"] == "foreign" and not adopt:
            why = "it holds files and no marker of ctl"
            raise FetchError("folder-foreign", f"{self._folder} is not ours", why, "`--adopt`, or another --to")
        needed = found["bytes_to_fetch"] + RESERVE
        if found["free"] < needed:
            why = f"{needed:,} bytes are needed, {found['free']:,} are free"
            raise FetchError(
                "disk-space", f"{self._folder} has no room for the model", why, "free some, or another --to"
            )
        os.makedirs(self._folder, exist_ok=True)
        self._marker = read_marker(self._folder) or {
            "schema_version": 1, "repo": self._listing.repo, "commit": self._listing.commit, "complete": False,
            "files": {},
        }  # fmt: skip
        self._write_marker()

    def done_bytes(self) -> int:
        """Bytes of this listing that are on disk, proved or under way."""
        total = 0
        for file in self._listing.files:
            path = os.path.join(self._folder, file.name)
            try:
                total += min(os.path.getsize(path), file.size)
            except FileNotFoundError:
                total += partial_size(self._folder, file)
        return total

    def run(self) -> None:
        """Bring every file that is not proved yet. Raises the first error; the other files stop where they are."""
        waiting = [file for file in self._listing.files if not is_proved(self._folder, self._marker, file)]
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="ctl-fetch") as pool:
            # Large ones first: the last file to end is then a small one.
            futures = [pool.submit(self._bring, file) for file in sorted(waiting, key=lambda file: -file.size)]
            ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
            self._stop.set()
            pool.shutdown(cancel_futures=True)
        with contextlib.suppress(OSError):  # absent where all was there, not empty where something failed
            os.rmdir(os.path.join(self._folder, PARTIAL))
        for future in sorted(ended, key=lambda future: isinstance(future.exception(), Stopped)):
            future.result()

    def _bring(self, file: HubFile) -> None:
        if self._stop.is_set():
            raise Stopped
        path = os.path.join(self._folder, file.name)
        if os.path.lexists(path):
            if os.path.isfile(path) and file.proves(path):
                self._prove(file)
                return
            self._move_aside(file)
        partial = partial_path(self._folder, file)
        os.makedirs(os.path.dirname(partial), exist_ok=True)
        for attempt in (1, 2):
            self._download(file, partial)
            if file.proves(partial):
                break
            os.unlink(partial)  # ours, and continuing it would only repeat what is wrong
            what = f"{file.name} does not have the checksum that the hub gives"
            print(f"ctl: {what} (download {attempt})", file=sys.stderr)
            if attempt == 2:
                fix = "something between the hub and the host changes the data: a proxy, a mirror, the disk"
                raise FetchError("checksum", what, f"expected {file.key}, twice", fix)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.rename(partial, path)
        fsync_folder(os.path.dirname(path))
        self._prove(file)

    def _download(self, file: HubFile, partial: str) -> None:
        """Append to the partial file what it lacks. Raises OSError, FetchError, or what the hub's client raises."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(self._listing.repo, file.name, revision=self._listing.commit)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                # Asked for at each attempt: the address behind a redirect is signed and expires.
                location = get_hf_file_metadata(url).location
                headers = build_hf_headers()
                if urlsplit(location).netloc != urlsplit(url).netloc:
                    headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
                with open(partial, "ab") as stream:
                    have = stream.tell()
                    if have > file.size:
                        stream.truncate(0)
                        have = 0
                with open(partial, "r+b") as stream:
                    stream.seek(have)
                    target: Any = _Stoppable(stream, self._stop)
                    http_get(location, target, resume_size=have, headers=headers, expected_size=file.size)
                    stream.flush()
                    os.fsync(stream.fileno())
                return
            except HfHubHTTPError as error:
                status = getattr(error.response, "status_code", 0)
                if status < 500 or attempt == ATTEMPTS:
                    raise FetchError(**refusal(error, self._listing.repo, self._listing.commit).record) from error
                print(f"ctl: {file.name}: the hub answered {status}, trying again", file=sys.stderr)
                self._stop.wait(PAUSE_S * 2 ** (attempt - 1))

    def _move_aside(self, file: HubFile) -> None:
        aside = os.path.join(self._folder, REPLACED, self._run_id, file.name)
        os.makedirs(os.path.dirname(aside), exist_ok=True)
        os.rename(os.path.join(self._folder, file.name), aside)
        print(f"ctl: {file.name} was another file; moved to {aside}", file=sys.stderr)

    def _prove(self, file: HubFile) -> None:
        status = os.stat(os.path.join(self._folder, file.name))
        with self._lock:
            self._marker["files"][file.name] = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
            self._write_marker()
        print(f"ctl: proved {file.name} ({file.size:,} bytes)", flush=True)

    def _write_marker(self) -> None:
        write_json(os.path.join(self._folder, MARKER), self._marker)


class _Stoppable:
    """A file that refuses to go on once another download has failed: gigabytes that nobody will use."""

    def __init__(self, stream: BinaryIO, stop: threading.Event) -> None:
        self._stream, self._stop = stream, stop

    def write(self, data: bytes) -> int:
        if self._stop.is_set():
            raise Stopped
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Meter:
    """Emits `progress` with the bytes on disk once a second, and at the end. A context manager."""

    def __init__(self, events: PatientEvents, fetch: Fetch, total: int) -> None:
        self._events, self._fetch, self._total = events, fetch, total
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ctl-meter", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._emit()

    def _run(self) -> None:
        self._emit()
        while not self._stop.wait(INTERVAL_S):
            self._emit()

    def _emit(self) -> None:
        done = self._fetch.done_bytes()
        self._events.emit(
            "progress", unit="bytes", total=self._total, done=done, bytes=done, tokens=0, skipped=0, failed=0
        )


def verify(listing: Listing, folder: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Return (the document for verify.json, problems): every file proved and untouched, every shard whole.

    Shards are those of the weights' index, each judged by its safetensors header against its full length.
    """
    marker = read_marker(folder)
    problems = [
        _problem("file-unproved", f"{file.name} is not what the hub gives", "it is missing, or was changed since")
        for file in listing.files
        if not is_proved(folder, marker, file)
    ]
    shards: Mapping[str, Any] = probe_model(lambda text: None, folder)["shards"]
    if shards["error"] is not None:
        problems.append(_problem("model-index", "the index of the weights cannot be read", shards["error"]))
    for name in sorted({*shards["missing"]} - {*listing.left_out}):  # those were not asked for
        problems.append(_problem("shard-missing", f"{name} is named by the index and not there", ""))
    for name in shards["empty"]:
        problems.append(_problem("shard-truncated", f"{name} is empty", ""))
    for entry in shards["truncated"]:
        problems.append(_problem("shard-truncated", f"{entry['file']} is not whole", entry["why"]))
    if not problems:
        write_json(os.path.join(folder, MARKER), {**marker, "complete": True})
    fetched = {
        "repo": listing.repo,
        "commit": listing.commit,
        "path": folder,
        "files": len(listing.files),
        "bytes": sum(file.size for file in listing.files),
        "shards": shards["files"],
        "proved_by": {
            "sha256": sum(file.sha256 is not None for file in listing.files),
            "git": sum(file.blob is not None for file in listing.files),
            "size": sum(file.sha256 is None and file.blob is None for file in listing.files),
        },
    }
    return {"fetched": fetched}, problems


def _problem(code: str, what: str, why: str) -> dict[str, str]:
    return {
        "code": code,
        "what": what,
        "why": why,
        "fix": "run the same command again; if it stays, report it upstream",
    }


def main() -> int:
    """Fetch, or verify what was fetched, in the run named by CTL_RUN_DIR; return the exit code."""
    parser = argparse.ArgumentParser()
    for name in ("--repo", "--commit", "--folder"):
        parser.add_argument(name, required=True)
    for name in ("--include", "--exclude"):
        parser.add_argument(name, action="append", default=[])
    parser.add_argument("--adopt", action="store_true")
    parser.add_argument("--verify", action="store_true")
    asked = parser.parse_args()
    paths = RunPaths(os.environ["CTL_RUN_DIR"])
    run_id = os.path.basename(paths.folder)
    events = EventWriter(paths.events, "driver", run_id, os.environ.get("CTL_HOST", ""))
    try:
        listing = list_model(asked.repo, asked.commit, asked.include, asked.exclude)
        if asked.verify:
            document, problems = verify(listing, asked.folder)
            for problem in problems:
                events.emit("problem", **problem)
                print(f"ctl: {problem['what']}: {problem['why']}", file=sys.stderr)
            write_json(paths.verify, document)
            return 1 if problems else 0
        fetch = Fetch(listing, asked.folder, run_id)
        fetch.prepare(adopt=asked.adopt)
        total = sum(file.size for file in listing.files)
        print(f"ctl: {asked.repo}@{listing.commit}: {len(listing.files):,} files, {total:,} bytes", flush=True)
        with Meter(PatientEvents(events), fetch, total):
            fetch.run()
    except (HubError, FetchError) as error:
        events.emit("problem", **error.record)
        print(f"ctl: {error}", file=sys.stderr)
        return 1
    except Exception as error:  # noqa: BLE001 - reported, with its traceback
        ExceptionReporter(events, None).report(error, "fetch")
        # Not raised again: the interpreter would print the addresses of the hub's signed redirects into the log.
        print(without_queries("".join(traceback.format_exception(error))), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
