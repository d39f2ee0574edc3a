"""The Python environment that vLLM lives in: a look at it before `ctl hosts setup`, and the proof after it.

`look` is a payload verb and changes nothing. `python -m remote_payload.host.environment` is the verify step of the
set-up job; it runs under `bootstrap_python`, because the environment's own Python is what it judges.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from typing import Any, BinaryIO, Dict, List, Optional

from remote_payload.host.files import write_json
from remote_payload.host.journal import EventWriter
from remote_payload.host.layout import RunPaths
from remote_payload.host.protocol import check_record
from remote_payload.host.versions import normalised, same_version

ASK_TIMEOUT_S = 25.0
"""For a cold start of Python from a network disk; two of them stay below the controller's time-out for a call."""

IMPORT_TIMEOUT_S = 300.0
"""`import vllm` reads some 10,000 files: 10 s from a local disk, minutes from a cold network one."""

_READ = """
import importlib.util, json, sys
from importlib import metadata
packages = {}
for each in metadata.distributions():
    name = each.metadata["Name"]
    if name and each.version:
        packages.setdefault(name, each.version)
print("\\nctl-environment", json.dumps({
    "version": "%d.%d.%d" % sys.version_info[:3], "prefix": sys.prefix, "packages": packages,
    **{name: importlib.util.find_spec(name) is not None for name in ("pip", "ensurepip")},
}))
"""
"""The first distribution of a name is the one that is imported, as `sys.path` is searched in order."""

_IMPORT = """
import importlib, json, sys
found = {}
for name in sys.argv[1:]:
    found[name] = str(getattr(importlib.import_module(name), "__version__", ""))
cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
print("\\nctl-imported", json.dumps({"modules": found, "torch_cuda": cuda}))
"""


def look(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Verb `environment`: {"python": its path, BIN in FOLDER/BIN, "base_python": word} -> one JSON object.

    {"path", "state" ("absent", "empty", "venv", "conda", "system", "broken" or "foreign"), "version", "packages":
    {normalised name: version}, "pip", "error", "base": {"python", "version", "ensurepip", "error"}, "uv" (a path or
    null), "free" (bytes), "users": [{"pid", "command"}]}. `users` are the processes that run from the environment.
    """
    check_record(request, {"python": str, "base_python": str}, "environment request")
    path = folder_of(request["python"])
    found = _environment(request["python"])
    answer = {
        **found,
        "base": _base(request["base_python"]),
        "uv": find_uv(),
        "free": _free(path),
        # Of a system's Python that would be half the host, and it is not changed anyway.
        "users": [] if found["state"] == "system" else _users(path),
    }
    out.write(json.dumps(answer).encode() + b"\n")
    return 0


def find_uv() -> Optional[str]:
    """Return uv's path. Its installer puts it where a login that is not interactive often does not look."""
    home = os.path.expanduser("~")
    places = [
        os.environ.get("PATH", os.defpath),
        os.path.join(home, ".local", "bin"),
        os.path.join(home, ".cargo", "bin"),
    ]
    return shutil.which("uv", path=os.pathsep.join(places))


def folder_of(python: str) -> str:
    """Return the environment of `FOLDER/bin/python`."""
    return os.path.dirname(os.path.dirname(python))


def _environment(python: str) -> Dict[str, Any]:
    path = folder_of(python)
    answer: Dict[str, Any] = {
        "path": path, "state": "absent", "version": None, "packages": {}, "pip": False, "error": None,
    }  # fmt: skip
    if not os.path.lexists(path):
        return answer
    if not os.path.isdir(path):
        return {**answer, "state": "foreign", "error": "it is not a folder"}
    names = os.listdir(path)
    if not names:
        return {**answer, "state": "empty"}
    venv, conda = "pyvenv.cfg" in names, "conda-meta" in names
    found = _ask(python)
    if "error" in found:
        return {**answer, "state": "broken" if venv else "foreign", "error": found["error"]}
    state = "venv" if venv else "conda" if conda else "system"
    return {
        **answer,
        "state": state,
        "version": found["version"],
        "packages": {normalised(name): version for name, version in found["packages"].items()},
        "pip": found["pip"],
    }


def _base(python: str) -> Dict[str, Any]:
    found = _ask(python)
    return {
        "python": shutil.which(python) or python,
        "version": found.get("version"),
        "ensurepip": found.get("ensurepip", False),
        "error": found.get("error"),
    }


def _ask(python: str) -> Dict[str, Any]:
    """Return what a Python says of itself, or {"error"}."""
    try:
        # In / because the current folder is searched for modules first; -I because ours would be too.
        done = subprocess.run(
            [python, "-I", "-B", "-c", _READ],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_TIMEOUT_S, check=False, cwd="/",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    return _answer(done, "ctl-environment")


def _answer(done: "subprocess.CompletedProcess[bytes]", word: str) -> Dict[str, Any]:
    """Return the JSON behind `word`, which other output may surround, or {"error"} with the last line said."""
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        if line.startswith(word + " "):
            found: Dict[str, Any] = json.loads(line.partition(" ")[2])
            return found
    said = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
    return {"error": said[-1] if said else "no output, and exit code %d" % done.returncode}


def _free(path: str) -> int:
    """Return the free bytes of the file system that `path` lies on, or will lie on."""
    nearest = os.path.abspath(path)
    while not os.path.isdir(nearest):
        nearest = os.path.dirname(nearest)
    space = os.statvfs(nearest)
    return space.f_bavail * space.f_frsize


def _users(path: str) -> List[Dict[str, Any]]:
    """Return the processes started from the environment, by name: a venv's Python resolves to another program."""
    begin = os.path.join(path, "bin", "").encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/%s/cmdline" % name, "rb") as file:
                words = file.read().split(b"\0")
        except OSError:  # it ended, or is hidden from us
            continue
        if any(word.startswith(begin) for word in words[:2]):  # a script's interpreter, or the script
            command = b" ".join(words).decode("utf-8", "replace").strip()
            found.append({"pid": int(name), "command": command[:200]})
    return found


# ------------------------------------------------------------------------------------------- proof


def main() -> int:
    """Prove that the environment holds what was asked for, write verify.json, and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True, help="of the environment")
    parser.add_argument("--expect", action="append", default=[], metavar="NAME[==VERSION]")
    parser.add_argument("--import", action="append", default=[], dest="modules", metavar="MODULE")
    parser.add_argument("--cuda", action="store_true", help="torch must be a CUDA build")
    asked = parser.parse_args()
    paths = RunPaths(os.environ["CTL_RUN_DIR"])
    events = EventWriter(paths.events, "driver", os.path.basename(paths.folder), os.environ.get("CTL_HOST", ""))
    found = _environment(asked.python)
    imported = _import(asked.python, asked.modules) if found["version"] else {}
    problems = list(_problems(asked, found, imported))
    for problem in problems:
        events.emit("problem", **problem)
        print("ctl: %(what)s: %(why)s" % problem, file=sys.stderr)
    packages = {
        name: found["packages"].get(name) for name in (expected.partition("==")[0] for expected in asked.expect)
    }
    write_json(
        paths.verify,
        {
            "environment": {
                "path": found["path"], "python": found["version"], "packages": packages,
                "torch": found["packages"].get("torch"), "torch_cuda": imported.get("torch_cuda"),
            },
        },
    )  # fmt: skip
    if not problems:
        print("ctl: %s holds %s" % (found["path"], ", ".join("%s %s" % each for each in packages.items())))
    return 1 if problems else 0


def _problems(asked: argparse.Namespace, found: Dict[str, Any], imported: Dict[str, Any]) -> List[Dict[str, str]]:
    again = "read the log of the install step: `ctl logs --last`; then `ctl hosts setup` again"
    if found["version"] is None:
        what = "the environment %s does not work" % found["path"]
        return [{"code": "environment-broken", "what": what, "why": str(found["error"]), "fix": again}]
    problems = []
    for expected in asked.expect:
        name, _, version = expected.partition("==")
        have = found["packages"].get(name)
        if have is None or (version and not same_version(have, version)):
            what = "%s is not in %s" % (expected, found["path"])
            why = "it has %s %s" % (name, have) if have else "no %s at all" % name
            problems.append({"code": "package-missing", "what": what, "why": why, "fix": again})
    if "error" in imported:
        what = "%s cannot be imported" % " or ".join(asked.modules)
        fix = "see the cause with `ctl triage` on the log, or by hand: `PYTHON -c 'import %s'`" % asked.modules[0]
        problems.append({"code": "import-failed", "what": what, "why": imported["error"], "fix": fix})
    elif asked.cuda and "torch" in found["packages"] and imported.get("torch_cuda") is None:
        why = "torch %s has no CUDA" % found["packages"]["torch"]
        fix = "name the index of the CUDA build with --index-url, or choose `--build cpu`"
        problems.append({"code": "wrong-build", "what": "torch is a CPU build", "why": why, "fix": fix})
    return problems


def _import(python: str, modules: List[str]) -> Dict[str, Any]:
    """Import modules in the environment and return {"modules", "torch_cuda"}, or {"error"}."""
    if not modules:
        return {}
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [python, "-B", "-c", _IMPORT, *modules],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=IMPORT_TIMEOUT_S, check=False, cwd="/",
            env=environ,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    sys.stderr.write(done.stderr.decode("utf-8", "replace"))  # the traceback of a failed import, whole
    return _answer(done, "ctl-imported")


if __name__ == "__main__":
    sys.exit(main())
