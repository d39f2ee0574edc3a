"""The local copy of a run folder, byte for byte; the size of a local file is the cursor of its stream.

Because the cursor is nothing but the file itself, a controller that is killed at any moment goes on exactly
where its disk stands: no byte is lost and none is written twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from controller.core.errors import CtlError
from controller.core.events import Event, parse_event
from controller.private import private, write_private
from controller.stages.telling import Piece
from remote_payload.host.layout import LOG_GAPS, LOG_TIMES, MIRRORED_DOCUMENTS, MIRRORED_STREAMS

_STREAM_FILE = re.compile(rf"(?:{'|'.join(MIRRORED_STREAMS)})/[A-Za-z0-9][A-Za-z0-9._-]{{0,99}}")


class MirrorError(CtlError):
    """The host sent something that does not continue the local copy, or names a file outside it."""

    code = "mirror"


class Mirror:
    """Writes what the host sends into `folder`. One process at a time (the caller holds the run's local lock)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Of files received from their first byte on; what an earlier controller held is read again at the end.
        self._digests: dict[str, Any] = {}

    def cursor(self) -> dict[str, int]:
        """Return {relative path: bytes held} of every stream file."""
        sizes = {}
        for stream in MIRRORED_STREAMS:
            for path in sorted((self.folder / stream).glob("*")):
                name = f"{stream}/{path.name}"
                if _STREAM_FILE.fullmatch(name) and path.is_file() and path.name != LOCAL_EVENTS:
                    sizes[name] = path.stat().st_size
        return sizes

    def held(self) -> dict[str, int]:
        """Return {relative path: bytes held} of every stream file and every small file."""
        paths = {name: self.folder / name for name in MIRRORED_DOCUMENTS}
        return {**self.cursor(), **{name: path.stat().st_size for name, path in paths.items() if path.is_file()}}

    def documents(self) -> dict[str, str]:
        """Return {name: sha256} of the small files that are replaced whole; what cannot be read is not held."""
        paths = {name: self.folder / name for name in MIRRORED_DOCUMENTS}
        return {name: _sha256(path) for name, path in paths.items() if path.is_file() and os.access(path, os.R_OK)}

    def append(self, name: str, offset: int, data: bytes) -> None:
        """Append a piece of a stream that starts at `offset`. Raises MirrorError on a gap or an overlap."""
        path = self._stream_path(name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(path, "ab", opener=private) as stream:
            held = stream.tell()
            if offset != held:
                raise MirrorError(f"{name} continues at byte {offset}, but {held} bytes are held")
            stream.write(data)
        if offset == 0:
            self._digests[name] = hashlib.sha256()
        if name in self._digests:
            self._digests[name].update(data)

    def replace(self, name: str, data: bytes) -> None:
        """Replace a small file atomically; what is no file there is put into `DAMAGED`."""
        if name not in MIRRORED_DOCUMENTS:
            raise MirrorError(f"the host sent an unexpected file: {name!r}")
        if (self.folder / name).is_dir():
            self._put_aside(name)
        temporary = self.folder / f".{name}.part"
        write_private(temporary, data)
        os.replace(temporary, self.folder / name)

    def unfinished(self) -> dict[str, bytes]:
        """Return the unfinished last line of each file of events, and of that with the times of the log."""
        names = [name for name in self.cursor() if name.startswith("events/") or name == f"log/{LOG_TIMES}"]
        return {name: (self.folder / name).read_bytes().rpartition(b"\n")[2] for name in names}

    def held_events(self) -> Iterator[tuple[float, Event]]:
        """Yield the events that are held by time, each with its time, or an earlier one's of its writer if that was
        later: a clock that was set back does not reorder a writer."""
        self._digests.clear()  # since an earlier watch, others may have touched the files
        keyed: list[tuple[float, bytes]] = []  # lines, which are smaller than events
        for name in self.cursor():
            if name.startswith("events/"):
                latest = 0.0
                for line in (self.folder / name).read_bytes().split(b"\n")[:-1]:
                    event = parse_event(line)
                    latest = max(latest, event.t if event is not None else 0.0)
                    keyed.append((latest, line))
        for t, line in sorted(keyed, key=lambda each: each[0]):
            if (event := parse_event(line)) is not None:
                yield t, event

    def held_log(self) -> Iterator[Piece]:
        """Yield the log that is held, in blocks."""
        for part in self.log_parts():
            offset = 0
            for block in read_part(part):
                yield (None if isinstance(part, bytes) else (int(part.stem), offset)), block
                offset += len(block)

    def times(self) -> list[bytes]:
        """Return the whole lines that say when the log was printed, as far as they are held."""
        path = self.folder / "log" / LOG_TIMES
        return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []

    def log_parts(self) -> list[Path | bytes]:
        """Return the log in order: a path for each segment that is held, a line of ours where bytes are missing."""
        segments = {int(path.stem): path for path in (self.folder / "log").glob("*.log")}
        gaps = self.gaps()
        parts: list[Path | bytes] = []
        for number in sorted(segments.keys() | gaps.keys()):
            if number in segments:
                parts.append(segments[number])
            if number in gaps and (line := self.gap_line(gaps[number])):
                parts.append(line)
        return parts

    def gaps(self) -> dict[int, Mapping[str, Any]]:
        """Return the segments that the host gave up under its log cap, by number."""
        path = self.folder / "log" / LOG_GAPS
        if not path.is_file():
            return {}
        records: dict[int, Mapping[str, Any]] = {}
        for line in path.read_bytes().splitlines():
            try:
                record = json.loads(line)
                whole = {"bytes": int(record["bytes"]), "sha256": str(record["sha256"])}
                records[int(record["segment"])] = {**record, **whole}
            except (ValueError, KeyError, TypeError):
                continue  # cut off: still under way, or its writer was killed before it gave anything up
        return records

    def missing(self, gap: Mapping[str, Any]) -> int:
        """Return how many bytes of a gap are not held here: a segment that was copied in time is no loss."""
        path = self._segment(gap)
        return int(gap["bytes"]) - (path.stat().st_size if path.is_file() else 0)

    def gap_line(self, gap: Mapping[str, Any]) -> bytes:
        """Return the line that stands in the log for the missing bytes of a gap, b"" if none are missing."""
        count = self.missing(gap)
        if count <= 0:
            return b""
        text = f"[ctl: {count:,} bytes of the log are missing here: segment {gap['segment']} went over the log cap; "
        return f"\n{text}{gap['bytes']:,} bytes, sha256 {gap['sha256']}]\n".encode()

    def _segment(self, gap: Mapping[str, Any]) -> Path:
        return self.folder / "log" / f"{int(gap['segment']):06d}.log"

    def renew(self, files: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Put aside each stream file that differs from the host's, so that it is asked for from its first byte.

        Return {name: how it differs}. They go to `DAMAGED`, not away: it may be the host's that was damaged.
        """
        differing = self._differing(files)
        for name in differing:
            if (self.folder / name).exists():
                self._put_aside(name)
            self._digests.pop(name, None)
        return differing

    def _put_aside(self, name: str) -> None:
        aside = self.folder / DAMAGED / f"{time.time():.3f}-{name.replace('/', '-')}"
        aside.parent.mkdir(mode=0o700, exist_ok=True)
        os.rename(self.folder / name, aside)

    def differences(self, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Compare the copy with the host's sizes and hashes; return one sentence for each file that differs."""
        found = [f"{name}: {how}" for name, how in self._differing(files).items()]
        for gap in self.gaps().values():
            if self.missing(gap) < 0 or (self.missing(gap) == 0 and _sha256(self._segment(gap)) != gap["sha256"]):
                found.append(f"log segment {gap['segment']}: differs from what the host gave up")
        return found

    def _differing(self, files: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        found = {}
        for name, expected in sorted(files.items()):
            path = self._stream_path(name)
            size = path.stat().st_size if path.is_file() else 0
            if size != expected["size"]:
                found[name] = f"{size} bytes here, {expected['size']} on the host"
            elif size and self._digest(name) != expected["sha256"]:
                found[name] = "same size, other contents"
        return found

    def _digest(self, name: str) -> str:
        received = self._digests.get(name)
        return received.hexdigest() if received else _sha256(self.folder / name)

    def _stream_path(self, name: str) -> Path:
        if not _STREAM_FILE.fullmatch(name) or Path(name).name == LOCAL_EVENTS:
            raise MirrorError(f"the host sent an unexpected file: {name!r}")
        return self.folder / name


def read_part(part: Path | bytes) -> Iterator[bytes]:
    """Yield the bytes of one of `Mirror.log_parts` in blocks of at most 1 MiB."""
    if isinstance(part, bytes):
        yield part
        return
    with open(part, "rb") as stream:
        while block := stream.read(1 << 20):
            yield block


DAMAGED = "damaged"
"""Folder of a run's copy: files of it that were not the host's, each by the second in which that was found."""

COPY_DAMAGED = "copy-damaged"
"""Code of the notice, and of the error, that a file of a run's copy is not what was written into it."""

LOCAL_EVENTS = "controller.jsonl"
"""The one file below `events/` that is written here and not on the host."""


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
