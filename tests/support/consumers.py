"""The trainers themselves, installed outside the project's environment, and their loaders, each in its process."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.extraction import REPOSITORY

PINS = REPOSITORY / "requirements" / "consumers.txt"
INSTALL_TIMEOUT_S = 280.0
LOADER_TIMEOUT_S = 250.0


def folder(pins: Path = PINS) -> Path:
    """Where the pinned packages are kept from one test run to the next: inside `.venv`, on none of its paths."""
    return Path(sys.prefix) / "share" / "ctl-tests" / hashlib.sha256(pins.read_bytes()).hexdigest()[:12]


def install(group: str, pins: Path = PINS) -> Path:
    """Install one group of a file of pins, unless it is there, and return its folder."""
    root = folder(pins)
    root.mkdir(parents=True, exist_ok=True)
    target, blocks = root / group, re.split(r"^# group: ", pins.read_text(), flags=re.M)[1:]
    wanted = next(block.split()[1:] for block in blocks if block.split()[0] == group)
    with open(root / f"{group}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            scratch = root / f"{group}.partial"
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(scratch)]
            subprocess.run([*pip, *wanted], check=True, timeout=INSTALL_TIMEOUT_S)
            scratch.rename(target)
    return target


def load(consumer: str, path: Path, out: Path, groups: tuple[str, ...], *words: str) -> Any:
    """Have a consumer's own loader read `path`; return what it gave, a list of dicts of tensors (or a word)."""
    import torch

    paths = [str(install(group)) for group in groups]
    script = Path(__file__).with_name("consume.py")
    done = subprocess.run(
        [sys.executable, str(script), consumer, str(path), str(out), *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "HF_HOME": str(out.parent)},
        capture_output=True,
        text=True,
        timeout=LOADER_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out, weights_only=True)
