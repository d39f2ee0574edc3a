"""Empty an output folder for a person, without a run: verbs `look` and `sweep`.

The same rules as for the clear step of a run (see `clear`), and two more, since no lease stands in for them: the
folder must bear our marker, and no run that is under way may write into it.
"""

from __future__ import annotations

import json
import os
from typing import Any, BinaryIO, Dict, List, Optional

from remote_payload.host.clear import clear
from remote_payload.host.errors import HostError
from remote_payload.host.lease import lease_folder, list_leases
from remote_payload.host.listing import scan
from remote_payload.host.liveness import user_name
from remote_payload.host.protocol import WIRE, OwnedOutput, Stale, check_record
from remote_payload.host.writers import runs_under_way

_OUTPUT = {"path": str, "root": str, "stale": str, "adopt": bool}


def look(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Verb `look`: {"workdir", "lease_dir", "output"}; answers with the folder's listing, and who writes into it."""
    check_record(request, {"workdir": str, "output": dict}, "look request")
    output = check_record(request["output"], _OUTPUT, "output")
    _answer(out, request, output)
    return 0


def sweep(request: Dict[str, Any], body: bytes, out: BinaryIO) -> int:
    """Verb `sweep`: like `look`, with the digest that was shown in "output", and a "run_id" of its own.

    Deletes exactly what the digest stands for, and answers with the folder as it is afterwards, `report` (see
    `clear`) added. Raises ClearError, and HostError (`output-in-use`, `output-foreign`); then nothing was deleted.
    """
    check_record(request, {"workdir": str, "output": dict, "run_id": str}, "sweep request")
    record = check_record(request["output"], {**_OUTPUT, "entries": int, "bytes": int}, "output")
    output: OwnedOutput = {**record, "stale": Stale.CLEAR.value, "adopt": False}  # type: ignore[typeddict-item]
    marker = scan(output["path"], output["root"])["marker"]
    writers = _writers(request, output["path"], marker)
    if writers:
        raise HostError(
            "output-in-use",
            "%s is being written by run %s" % (output["path"], ", ".join(writers)),
            "a run that is under way must not lose its files",
            "wait for it, or stop it: ctl stop %s" % writers[0],
        )
    report = clear(output, request["run_id"])
    _answer(out, request, output, report=report)
    return 0


def _answer(out: BinaryIO, request: Dict[str, Any], output: Any, **more: Any) -> None:
    listing = scan(output["path"], output["root"])
    document = {
        "wire": WIRE,
        "user": user_name(os.getuid()),
        "listing": {**listing, "path": output["path"], "root": output["root"]},
        "writers": _writers(request, output["path"], listing["marker"]),
        **more,
    }
    out.write(json.dumps(document).encode() + b"\n")


def _writers(request: Dict[str, Any], path: str, marker: Optional[Dict[str, Any]]) -> List[str]:
    """Return the runs under way that write into `path`: of this workdir, and any whose lease and marker are there."""
    found = runs_under_way(request["workdir"], path)
    if marker is not None:
        leases = list_leases(lease_folder(request.get("lease_dir"), create=False))
        found.update(str(marker["run_id"]) for lease in leases if lease.get("run_id") == marker["run_id"])
    return sorted(found)
