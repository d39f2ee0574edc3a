"""A real podman in a temporary folder, with an image that is nothing but this machine's own /usr."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

IMAGE = "ctl-test:1"
TIMEOUT_S = 120.0
LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
"""Podman raises these to 1,048,576 by default, which a container that is itself confined may not."""


def install(folder: Path) -> Path:
    """Return a folder to put first in PATH: its `podman` keeps images and containers below `folder`.

    Skips the test where podman is not installed or cannot start a container.
    """
    real = shutil.which("podman")
    runtime = shutil.which("runc") or shutil.which("crun")
    if real is None or runtime is None:
        pytest.skip("there is no podman: apt install podman runc")
    programs, root = folder / "bin", folder / "root"
    programs.mkdir()
    (root / "usr").mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    store = f"--root {folder}/store --runroot {folder}/run --storage-driver vfs --cgroup-manager cgroupfs"
    wrapper = programs / "podman"
    wrapper.write_text(f'#!/bin/sh\nexec {real} --runtime {runtime} {store} "$@"\n')
    wrapper.chmod(0o755)
    archive = folder / "root.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(root, arcname=".")
    call([str(wrapper), "import", "--quiet", str(archive), IMAGE], "podman cannot import an image")
    trial = [str(wrapper), "run", "--rm", "--network", "host", *LIMITS, "-v", "/usr:/usr:ro", IMAGE, "/usr/bin/true"]
    call(trial, "podman cannot start a container here")
    return programs


def call(argv: list[str], otherwise: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        pytest.skip(f"{otherwise}: {done.stderr.strip()[-300:]}")
