"""Verb `hub`: ask the model hub, from the host and with its own environment, what a model consists of."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any, BinaryIO, Dict

from remote_payload.host.errors import HostError, without_queries
from remote_payload.host.protocol import check_record

TIMEOUT_S = 50.0
"""Below the controller's time-out for a call: importing the client and two requests take a few seconds."""

ANSWER = "ctl-hub "


def listing(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """{"python", "query"}, with {"env"} as JSON in the body (secrets included) -> what `extract.hub` answers.

    Raises HostError if the environment cannot ask, or with the hub's own refusal.
    """
    check_record(request, {"python": str, "query": dict}, "hub request")
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environ = {**os.environ, **json.loads(body or b"{}").get("env", {}), "PYTHONPATH": root}
    argv = [request["python"], "-B", "-m", "remote_payload.extract.hub"]
    try:
        done = subprocess.run(
            argv, input=json.dumps(request["query"]).encode(), capture_output=True, timeout=TIMEOUT_S, check=False,
            cwd="/", env=environ,
        )  # fmt: skip
    except OSError as error:
        raise HostError(
            "environment-missing",
            "the host's `python` cannot be run: %s" % request["python"],
            str(error),
            "make its environment first: `ctl hosts setup`",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise HostError(
            "hub-timeout",
            "the hub did not answer within %g s" % TIMEOUT_S,
            "",
            "check the host's way to the hub (HTTPS_PROXY, HF_ENDPOINT in `env` of hosts.toml)",
        ) from error
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        if line.startswith(ANSWER):
            answer = json.loads(line[len(ANSWER) :])
            if "error" in answer:
                raise HostError(**answer["error"])
            out.write(json.dumps(answer).encode() + b"\n")
            return 0
    said = without_queries((done.stderr or done.stdout).decode("utf-8", "replace").strip())
    raise HostError(
        "hub-failed", "the hub could not be asked", said[-2000:], "run `ctl hosts setup` to check the environment"
    )
