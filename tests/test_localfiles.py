"""What is uploaded of a folder, and what is not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller import localfiles
from controller.core.command import UploadSection
from controller.core.errors import ConfigError


def collect(folder: Path, *uploads: dict[str, Any]) -> localfiles.LocalFiles:
    return localfiles.local_files([UploadSection.model_validate(each) for each in uploads], folder, "job.toml")


def names(found: localfiles.LocalFiles) -> list[str]:
    return [entry["path"] for entry in found.files]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (
        "train/main.py", "train/lib/a.py", "train/lib/__pycache__/a.pyc", "train/.git/config", "train/data/big.bin",
        "train/data/keep.txt", "train/run.log", "train/keep.log", "one.py",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def test_rules_of_file_and_playbook_are_those_of_gitignore(folder: Path) -> None:
    (folder / "train" / ".ctlignore").write_text("# comment\n*.log\n!keep.log\n")
    found = collect(folder, {"path": "train", "ignore": ["/data/*", "!/data/keep.txt"]}, {"path": "one.py"})
    assert names(found) == [
        "one.py", "train/.ctlignore", "train/data/keep.txt", "train/keep.log", "train/lib/a.py", "train/main.py",
    ]  # fmt: skip


def test_a_place_of_its_own_and_the_executable_bit(folder: Path) -> None:
    (folder / "one.py").chmod(0o755)
    found = collect(folder, {"path": "train/lib", "to": "."}, {"path": "one.py", "to": "bin/one"})
    assert [(entry["path"], entry["exec"]) for entry in found.files] == [("a.py", False), ("bin/one", True)]
    assert b"".join(found.pieces([entry["sha256"] for entry in found.files])) == b"train/lib/a.pyone.py"
    before = found.digest
    (folder / "one.py").chmod(0o644)
    assert collect(folder, {"path": "train/lib", "to": "."}, {"path": "one.py", "to": "bin/one"}).digest != before


def test_links(folder: Path) -> None:
    (folder / "train" / "link.py").symlink_to("lib/a.py")
    assert "train/link.py" in names(collect(folder, {"path": "train"}))
    (folder / "train" / "loop").symlink_to(folder / "train")
    with pytest.raises(ConfigError, match="is a link to a folder"):
        collect(folder, {"path": "train"})
    assert "train/main.py" in names(collect(folder, {"path": "train", "ignore": ["loop"]}))
    os.mkfifo(folder / "train" / "pipe")
    assert "train/pipe" not in names(collect(folder, {"path": "train", "ignore": ["loop"]}))


@pytest.mark.parametrize("through", ["one.py", "train-2/key", "train/hop"])
def test_a_link_out_of_the_folder_is_refused_and_named(folder: Path, through: str) -> None:
    (folder / "train-2").mkdir()
    (folder / "train-2" / "key").write_text("private")
    (folder / "train" / "hop").symlink_to(folder / "train-2" / "key")
    link = folder / "train" / "lib" / "link"
    link.symlink_to(folder / through)
    with pytest.raises(ConfigError) as refused:
        collect(folder, {"path": "train", "ignore": ["/hop"]})
    target = (folder / through).resolve()
    assert refused.value.code == "upload-link"
    assert f"{link} is a link to {target}" in refused.value.what
    assert "train/main.py" in names(collect(folder, {"path": "train", "ignore": ["/hop", "link"]}))
    # A link that is named itself is what was asked for.
    assert names(collect(folder, {"path": "train/lib/link", "to": "key"})) == ["key"]


def test_what_cannot_be_uploaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*/none to upload"):
        collect(folder, {"path": "none"})
    with pytest.raises(ConfigError, match=r"would both be one.py"):
        collect(folder, {"path": "one.py"}, {"path": "train/main.py", "to": "one.py"})
    monkeypatch.setattr(localfiles, "LARGE_BYTES", 10)
    for path in ("train", "train/data/big.bin"):
        with pytest.raises(ConfigError, match="holds more than"):
            collect(folder, {"path": path})


def test_what_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> Iterator[os.DirEntry[str]]:  # root may read everything, so no mode would refuse it
        raise PermissionError(13, "Permission denied", str(path))

    (folder / "train" / ".ctlignore").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"\.ctlignore is not UTF-8"):
        collect(folder, {"path": "train"})
    (folder / "train" / ".ctlignore").unlink()
    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(ConfigError, match=r"cannot read .*/train"):
        collect(folder, {"path": "train"})
