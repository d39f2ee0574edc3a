"""The payload's one entry point: `python -I -B .../host/main.py VERB`, with the request as a frame on stdin.

Exit codes: 0 the verb did its work, 70 it did not and says why as {"error": ...} on stdout, 64 no such verb.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback

# `-I` keeps the script's folder and the environment out of the path; the payload's own root is all that is needed.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from remote_payload.host.errors import HostError, ProtocolError
from remote_payload.host.framing import read_frame

VERBS = {
    "probe": ("probe", "main"),
    "start": ("start", "main"),
    "cancel": ("start", "cancel"),
    "tail": ("tail", "main"),
    "ps": ("ps", "main"),
    "stop": ("stop", "main"),
    "tidy": ("tidy", "main"),
    "prune": ("prune", "main"),
    "data": ("data", "receive"),
    "uploads": ("uploads", "receive"),
    "stacks": ("stacks", "main"),
    "follow": ("follow", "main"),
    "environment": ("environment", "look"),
    "hub": ("hub", "listing"),
    "look": ("sweeping", "look"),
    "sweep": ("sweeping", "sweep"),
    "supervise": ("supervisor", "main"),
    "pump": ("pump", "main"),
}
"""Verb -> module of this package and its function; imported on use, as most verbs need few of them."""

EXIT_USAGE = 64
EXIT_FAILED = 70


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in VERBS:
        print("usage: main.py %s" % "|".join(VERBS), file=sys.stderr)
        return EXIT_USAGE
    os.umask(0o077)
    module, function = VERBS[sys.argv[1]]
    out = sys.stdout.buffer
    try:
        request, body = read_frame(sys.stdin.buffer)
        run = getattr(importlib.import_module("remote_payload.host.%s" % module), function)
        code: int = run(request, body, out)
        out.flush()
        return code
    except BrokenPipeError:
        # The reader left. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except HostError as error:
        record = error.to_dict()
    except ProtocolError as error:
        record = HostError("protocol", "the request cannot be understood", str(error)).to_dict()
    except Exception as error:  # noqa: BLE001 - reported whole: to the workstation in words, to stderr as a traceback
        traceback.print_exc()
        why = "%s: %s" % (type(error).__name__, error)
        record = HostError("host-failed", "%s failed on the host" % sys.argv[1], why).to_dict()
    out.write(json.dumps({"error": record}).encode() + b"\n")
    out.flush()
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
