"""What this workstation's disk refuses, in words: no room (`local-disk-full`), or no right (`local-unwritable`)."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from controller.core.errors import CopyFailed, LocalDiskError, LocalUnwritable, RefusedError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}

_NO_RIGHT = {
    errno.EACCES, errno.EPERM, errno.EROFS,
    errno.ENOTDIR, errno.EEXIST, errno.EISDIR,  # a file stands where a folder is wanted, or the other way round
    errno.ENAMETOOLONG, errno.ELOOP,  # no path of a file, however it is written
    errno.EIO, errno.ESTALE,  # a disk that fails, or a network disk that went away
}  # fmt: skip

_CODES = {**dict.fromkeys(_NO_ROOM, "local-disk-full"), **dict.fromkeys(_NO_RIGHT, "local-unwritable")}


def disk_error(error: OSError) -> LocalDiskError | None:
    """Explain a failed write of any file; None if it is something else (a socket, a missing program)."""
    code = _CODES.get(error.errno or 0)
    if code is None or (code == "local-unwritable" and error.filename is None):
        return None
    name = str(error.filename or "")
    if code == "local-disk-full":
        return LocalDiskError("this workstation has no room left", why=_why(error, name), fix="make room", code=code)
    what = f"{name} cannot be written or read on this workstation"
    return LocalUnwritable(what, why=error.strerror or "", fix="correct the path or its permissions", code=code)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder, and those above it, unless it is there. Raises OSError; see `making`."""
    with making(path):
        path.mkdir(mode=mode, parents=True, exist_ok=True)


@contextmanager
def making(path: Path) -> Iterator[None]:
    """For making a file or folder in one that is there: raises PermissionError in place of FileNotFoundError.

    Where nothing can be made (below /proc), the kernel says that there is no such file: that is no right to write.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise PermissionError(errno.EACCES, "nothing can be made there", str(path)) from error


@contextmanager
def before_launch(runs_dir: Path) -> Iterator[None]:
    """For the writing of a run's folder that nothing has been launched for: raises RefusedError."""
    try:
        yield
    except OSError as error:
        code = _CODES.get(error.errno or 0)
        if code is None:
            raise
        fix = f"make room for {runs_dir}" if code == "local-disk-full" else f"make {runs_dir} a folder you may write"
        raise RefusedError(
            "the run's folder cannot be written on this workstation, so nothing was launched",
            why=_why(error, str(runs_dir)),
            fix=f"{fix}, or name another folder in CTL_RUNS_DIR",
            code=code,
        ) from error


@contextmanager
def copying(folder: Path) -> Iterator[None]:
    """For the copy of a run that the host holds: raises CopyFailed; a later attach goes on from what is copied."""
    try:
        yield
    except OSError as error:
        code = _CODES.get(error.errno or 0)
        if code is None or (code == "local-unwritable" and error.filename is None):
            raise
        remedy = "make room" if code == "local-disk-full" else f"make {folder.parent} a folder you may write"
        raise CopyFailed(
            f"the copy of run {folder.name} cannot be written on this workstation",
            why=f"{_why(error, str(folder))}; the run itself is not affected, nothing of it is lost",
            fix=f"{remedy}, then go on at the byte with `ctl attach {folder.name}`",
            code=code,
        ) from error


def _why(error: OSError, place: str) -> str:
    return f"{error.filename or place}: {error.strerror}".removeprefix(": ")
