"""Paths of this workstation that a person chose and that cannot be written: named, with exit 3, and no defect."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from controller.core.errors import ExitCode, RefusedError
from controller.localdisk import before_launch, disk_error, make_folder
from controller.runfolder import RunFolder

RUN = "20260101-000000-abcdef"


@pytest.mark.parametrize("place", ["/proc/x", "/proc/x/y", "/dev/null/x", "/sys/x", "LOOP/x", "LONG"])
def test_a_run_folder_that_cannot_be_made_refuses_the_launch(place: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    runs_dir = Path(place.replace("LOOP", str(tmp_path / "loop")).replace("LONG", str(tmp_path / ("x" * 300))))
    with pytest.raises(RefusedError) as refused, before_launch(runs_dir):
        RunFolder.create(runs_dir, RUN)
    assert (refused.value.code, refused.value.exit_code) == ("local-unwritable", ExitCode.REFUSED)
    assert str(runs_dir) in refused.value.fix
    assert "CTL_RUNS_DIR" in refused.value.fix


def test_what_cannot_be_made_is_told_apart_from_what_is_missing() -> None:
    with pytest.raises(PermissionError) as denied:
        make_folder(Path("/proc/x"))
    explained = disk_error(denied.value)
    assert explained is not None
    assert (explained.code, explained.exit_code) == ("local-unwritable", ExitCode.REFUSED)
    assert explained.what.startswith("/proc/x ")
    assert disk_error(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/nope")) is None


def test_no_room_is_not_called_no_right() -> None:
    explained = disk_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert explained is not None
    assert (explained.code, explained.exit_code) == ("local-disk-full", ExitCode.UNEXPECTED)
