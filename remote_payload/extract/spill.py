"""The temporary file of a sample that is too long for memory: rows go in as they come, a whole sample file comes out.

Where the format allows it the rows are written to their final place, behind room left for the header, and the file
is renamed; elsewhere they are mapped, tensor by tensor of the file to be, and written once more by the format's own
writer, which need not hold them in memory either.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import threading
from dataclasses import replace

from remote_payload.extract.formats import TEMPORARY_SUFFIX, Format, SampleData, Sink, publish
from remote_payload.extract.pool import FULL, Abandoned
from remote_payload.host.files import CHUNK, fsync_folder

HEAD_BYTES = 1 << 16
"""Room left for a header: ours take a few kilobytes; one with more (thousands of loss spans) is written elsewhere."""

_numbers = itertools.count()


class Spill:
    """One such file in the output folder. `write` may be called by several threads."""

    def __init__(self, output: str, form: Format, index: int, tokens: int, states: int, state_bytes: int) -> None:
        """`state_bytes`: of one token's state."""
        self._form, self._size = form, tokens * states * state_bytes
        self.planes = tuple(form.planes(states))
        self._widths = [(last - first) * state_bytes for first, last in self.planes]
        self._starts = list(itertools.accumulate((tokens * width for width in self._widths), initial=HEAD_BYTES))
        # Numbered: a sample that starts again must not meet the file of its first attempt.
        folder, name = os.path.split(os.path.join(output, form.file_name(index)))
        self._path = os.path.join(folder, f".{name}.{os.getpid()}-{next(_numbers)}{TEMPORARY_SUFFIX}")
        self._descriptor: int | None = None  # opened by the first writer: the engine's thread never touches the disk
        self._opening = threading.Lock()
        self._published = False

    def write(self, plane: int, start: int, rows: memoryview) -> None:
        """Put rows of one of `planes` at their position. Raises OSError; the same rows may be written again."""
        self._put(self._starts[plane] + start * self._widths[plane], rows)

    def publish(self, path: str, data: SampleData) -> tuple[int, str]:
        """Make the file `path` of all rows and return (bytes, sha256). `data.hidden` is not looked at.

        Raises OSError naming the file; it may be called again. Raises Abandoned if rows did not reach a full disk:
        the kernel drops what it could not write, so the sample must be captured anew.
        """
        descriptor = self._open()
        head = self._form.head(data, HEAD_BYTES) if self._form.head is not None else None
        if head is None:
            return self._rewrite(path, data)
        self._put(0, memoryview(head))
        self._put(HEAD_BYTES + self._size, memoryview(data.token_ids))
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno in FULL:
                raise Abandoned from error
            raise OSError(error.errno, error.strerror, path) from error
        size, digest = HEAD_BYTES + self._size + len(data.token_ids), hashlib.sha256()
        for offset in range(0, size, CHUNK):
            digest.update(os.pread(descriptor, CHUNK, offset))
        os.rename(self._path, path)
        self._published = True
        fsync_folder(os.path.dirname(path))
        return size, digest.hexdigest()

    def close(self) -> None:
        """Remove what was not published."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            if not self._published:
                os.unlink(self._path)

    def _open(self) -> int:
        with self._opening:
            if self._descriptor is None:
                os.makedirs(os.path.dirname(self._path), exist_ok=True)  # formats may group their files
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o640)
            return self._descriptor

    def _rewrite(self, path: str, data: SampleData) -> tuple[int, str]:
        # Copy on write: nothing writes to it, but torch warns of memory that cannot be written to.
        with mmap.mmap(self._open(), HEAD_BYTES + self._size, access=mmap.ACCESS_COPY) as mapped:
            whole = memoryview(mapped)
            planes = [whole[start:end] for start, end in itertools.pairwise(self._starts)]
            try:

                def write(sink: Sink) -> None:
                    # One plane is what formats with a head have, whose head did not fit.
                    given = {"hidden": planes[0]} if len(planes) == 1 else {"planes": planes}
                    self._form.write(replace(data, **given), sink)

                return publish(path, write)
            finally:
                for view in (*planes, whole):
                    view.release()

    def _put(self, offset: int, data: memoryview) -> None:
        descriptor = self._open()
        try:
            while data:
                written = os.pwrite(descriptor, data, offset)
                offset, data = offset + written, data[written:]
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error
