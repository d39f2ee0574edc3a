"""The `toolchain` section: what compiles kernels while the engine starts, and what earlier starts left behind."""

from __future__ import annotations

import fnmatch
import os
import shutil
import stat
import subprocess
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

from remote_payload.host.envfile import read_env_file, with_python_first
from remote_payload.host.errors import HostError
from remote_payload.host.liveness import user_name
from remote_payload.host.sections import Note

TOOLS = ("nvcc", "ninja", "cc", "c++")
SHOWN = ("HF_HOME", "HF_HUB_CACHE", "CUDA_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
"""Variables whose values are shown: folders. Of all others only the names, for they may be secrets."""

INCLUDE_TIMEOUT_S = 10.0
MAX_FOUND = 50
MAX_ENTRIES = 20_000
"""Entries of the caches that are looked at: more would take longer than the rest of the probe."""

_READ_INCLUDE = "import sysconfig; print(sysconfig.get_path('include'))"


def probe_toolchain(note: Note, python: str, env: Dict[str, str], env_file: Optional[str]) -> Dict[str, Any]:
    """Return {"path", "tools": {name: path or null}, "include", "python_h", "env_file", "variables", "caches"}.

    The PATH is the job's: the folder of `python`, then the login's, `env_file`'s or `env`'s own. `include` is the
    folder of Python's headers. `env_file`: {"path", "names", "error"} or null. `variables` holds SHOWN: {name:
    {"value", "exists"}}. `caches`: see `probe_caches`. Raises subprocess.TimeoutExpired.
    """
    environ = dict(os.environ)
    record: Optional[Dict[str, Any]] = None
    if env_file is not None:
        note(env_file)
        record = {"path": env_file, "names": [], "error": None}
        try:
            given = read_env_file(env_file)
            record["names"] = sorted(given)
            environ.update(given)
        except HostError as error:
            record["error"] = error.why or error.what
    environ.update(env)
    environ = with_python_first(environ, python)
    if environ.get("CUDA_HOME"):
        # torch and flashinfer take nvcc from there before they look at PATH.
        search = os.pathsep.join([os.path.join(environ["CUDA_HOME"], "bin"), environ["PATH"]])
    else:
        search = environ["PATH"]
    note(python)
    include = _include(python, environ)
    note("caches")
    return {
        "path": environ["PATH"],
        "tools": {name: shutil.which(name, path=search if name == "nvcc" else environ["PATH"]) for name in TOOLS},
        "include": include,
        "python_h": include is not None and os.path.isfile(os.path.join(include, "Python.h")),
        "env_file": record,
        "variables": {
            name: {"value": environ[name], "exists": os.path.isdir(environ[name])}
            for name in SHOWN
            if name in environ
        },
        "caches": probe_caches(environ, time.time()),
    }


def probe_caches(environ: Dict[str, str], now: float) -> Dict[str, Any]:
    """Return {"found": [{kind, path, owner, age_s}], "looked_at", "whole"} of the caches of compiled kernels.

    `kind` is "lock" (a lock by a file's mere existence, which its maker's death leaves locked for ever: PyTorch's
    extension builds wait for it without a limit), "half" (a vLLM compile cache that was never finished) or "partial"
    (a temporary that was never renamed). `whole` is false if there was more than MAX_ENTRIES to look at.
    """
    found: List[Dict[str, Any]] = []
    looked = 0
    for kind, folder, depth, pattern in _caches(environ):
        for path, status in _entries(folder, depth):
            looked += 1
            if looked > MAX_ENTRIES or len(found) >= MAX_FOUND:
                return {"found": found, "looked_at": looked, "whole": False}
            if kind == "half":
                guilty = stat.S_ISDIR(status.st_mode) and fnmatch.fnmatch(path, pattern) and _is_half(path)
            else:
                guilty = fnmatch.fnmatch(os.path.basename(path), pattern)
            if guilty:
                age = round(max(0.0, now - status.st_mtime), 1)
                found.append({"kind": kind, "path": path, "owner": user_name(status.st_uid), "age_s": age})
    return {"found": found, "looked_at": looked, "whole": True}


def _caches(environ: Dict[str, str]) -> List[Tuple[str, str, int, str]]:
    """Return (kind, folder, levels below it, pattern) of each cache, by the variables that their libraries follow."""
    home = environ.get("HOME", "/")
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    vllm = environ.get("VLLM_CACHE_ROOT") or os.path.join(cache, "vllm")
    extensions = environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")
    triton = environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
    return [
        # torch.utils.cpp_extension: ROOT/PY_CUDA/NAME/lock, made by FileBaton (O_EXCL, no owner noted)
        ("lock", extensions, 3, "lock"),
        # vllm.compilation: ROOT/torch_compile_cache/HASH/rank_I_J/MODEL/vllm_compile_cache.py, written last
        ("half", os.path.join(vllm, "torch_compile_cache"), 3, "*/rank_*/*"),
        # triton's FileCacheManager: a folder tmp.pid_N_UUID that is renamed into place
        ("partial", triton, 2, "tmp.pid_*"),
    ]


def _is_half(folder: str) -> bool:
    """Whether a compile began here (its graph is there) and never came to write its index, or left it empty."""
    index = os.path.join(folder, "vllm_compile_cache.py")
    try:
        return os.path.getsize(index) == 0
    except FileNotFoundError:
        return os.path.exists(os.path.join(folder, "computation_graph.py"))


def _entries(folder: str, depth: int) -> Iterator[Tuple[str, os.stat_result]]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entries, key=lambda entry: entry.name)
    except OSError:  # no such cache, or not ours to look into: then nothing of it is used either
        return
    for entry in names:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        yield entry.path, status
        if depth > 1 and stat.S_ISDIR(status.st_mode):
            yield from _entries(entry.path, depth - 1)


def _include(python: str, environ: Dict[str, str]) -> Optional[str]:
    try:
        done = subprocess.run(
            [python, "-S", "-B", "-c", _READ_INCLUDE], stdin=subprocess.DEVNULL, capture_output=True, env=environ,
            timeout=INCLUDE_TIMEOUT_S, check=False, cwd="/",
        )  # fmt: skip
    except OSError:  # the section `environment` says why
        return None
    return done.stdout.decode("utf-8", "replace").strip() or None
