from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hostrun import HostRun


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostRun]:
    host = HostRun(tmp_path)
    yield host
    host.close()


@pytest.fixture
def fake_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a script of the given text first in PATH, as nvidia-smi."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def install(script: str) -> None:
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return install
