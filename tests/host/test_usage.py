"""How much an output holds, while its job goes on working in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from remote_payload.host import usage


def test_links_are_not_followed_and_what_is_not_there_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "out" / "deep").mkdir(parents=True)
    (tmp_path / "out" / "deep" / "a").write_bytes(b"x" * 100)
    (tmp_path / "large").write_bytes(b"x" * 1000)
    (tmp_path / "out" / "link").symlink_to(tmp_path / "large")
    (tmp_path / "out" / "loop").symlink_to(tmp_path / "out")
    assert usage.size_of(str(tmp_path / "out")) == 100
    assert usage.size_of(str(tmp_path / "none")) == 0


def test_a_file_that_vanishes_hides_no_other_and_a_closed_folder_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"x" * 10)
    scandir = os.scandir

    @contextmanager
    def scanning(path: str) -> Iterator[list[Any]]:
        if path.endswith("closed"):  # root may read everything, so no mode would refuse it
            raise PermissionError(13, "Permission denied", path)
        with scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        (tmp_path / "a").unlink()
        yield found

    monkeypatch.setattr(os, "scandir", scanning)
    assert usage.size_of(str(tmp_path)) == 20
