"""What a plan will do, said before anything is done: the document behind `ctl plan` and its JSON.

Keys are stable from one version to the next (`schema_version`); `sections` hold the same facts as text for a
person.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping
from typing import Any, Literal

from controller.core.boundaries import resolve_boundaries
from controller.core.finding import size, span
from controller.core.model import Playbook
from controller.core.redaction import redact
from controller.core.shape import ModelShape, bytes_expected, element_bytes, model_shape, sample_bytes, state_count
from remote_payload.host.layout import Layout
from remote_payload.host.protocol import Plan, Stale
from remote_payload.host.titles import TITLE_ENV, title_prefix

SCHEMA_VERSION = 1

CommandField = Literal["upload", "container", "watched", "tracebacks", "survey"]

_FATES = {
    Stale.FAIL: "is left alone; if anything is in it, the run is refused",
    Stale.CLEAR: "may be deleted: what is listed at preflight, after confirmation",
    Stale.QUARANTINE: "may be moved aside: what is listed at preflight, after confirmation",
    Stale.RESUME: "each file is proved: good ones are kept, bad ones moved aside, missing ones written",
}

_DOES = {
    "recheck": "looks under the lease that the GPUs are still free",
    "place": "puts a fresh copy of what was uploaded into the run's folder",
    "clear": "deletes or moves what is in the output, if anything is, as shown and confirmed; marks it as this run's",
    "claim": "marks the output as this run's; deletes nothing",
}
"""Steps of the host's own, by name."""

_COMMAND_FIELDS: tuple[CommandField, ...] = ("upload", "container", "watched", "tracebacks", "survey")

_MOVING = (Stale.QUARANTINE.value, Stale.RESUME.value)


def describe(
    plan: Plan,
    playbook: Playbook | None,
    *,
    payload_files: int | None = None,
    payload_bytes: int | None = None,
    pushed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a plan's intention as JSON-ready data; secrets are shown as `***`.

    `playbook` tells what is known of the model; the payload's size is given where it is known, and in `pushed`
    {"name", "bytes", "container", "kind"} of a data set that comes from the workstation. Raises ConfigError if the
    boundaries do not fit a known number of layers.
    """
    job, host = plan["job"], plan["host"]
    outputs = [
        {"path": output["path"], "root": output["root"], "stale": output["stale"], "adopt": output["adopt"]}
        for output in job["outputs"]
    ]
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "run_id": plan["run_id"],
        "kind": job["kind"],
        "name": job["name"],
        "playbook": plan["playbook"],
        "host": dict(host),
        "upload": {
            "payload": plan["payload"],
            "to": Layout(host["workdir"]).payload(plan["payload"]),
            "files": payload_files,
            "bytes": payload_bytes,
        },
        "data": dict(pushed) if pushed else None,
        "steps": [dict(step) for step in job["steps"]],
        "cwd": job["cwd"],
        "environment": redact({**job["env"], **supervisor_env(plan)}, job["secret_env"]),
        "outputs": outputs,
        "may_delete": [output["path"] for output in outputs if output["stale"] == Stale.CLEAR.value],
        "may_move": [output["path"] for output in outputs if output["stale"] in _MOVING],
        "capture": _capture(plan, playbook),
        "limits": dict(job["limits"]),
        "command": {name: job[name] for name in _COMMAND_FIELDS if name in job} or None,
    }
    return {**document, "sections": _sections(document)}


def supervisor_env(plan: Plan) -> dict[str, str]:
    """Return the variables that the supervisor sets for every job."""
    layout, run_id = Layout(plan["host"]["workdir"]), plan["run_id"]
    inherited = plan["job"]["env"].get("PYTHONPATH")
    payload, python = layout.payload(plan["payload"]), plan["host"]["python"]
    hook = f"{payload}/remote_payload/hook" if plan["job"].get("tracebacks") else None
    return {
        **({"PATH": f"{posixpath.dirname(python)}:$PATH"} if python.startswith("/") else {}),
        "PYTHONPATH": ":".join(filter(None, [hook, payload, inherited])),
        "CTL_RUN_ID": run_id,
        "CTL_RUN_DIR": layout.run(run_id).folder,
        "CTL_HOST": plan["host"]["name"],
        "SPT_NOENV": "1",
        "PYTHONUNBUFFERED": "1",
        TITLE_ENV: title_prefix(plan["job"]["kind"], run_id),
    }


def _capture(plan: Plan, playbook: Playbook | None) -> dict[str, Any] | None:
    spec = plan["extract"]
    if spec is None:
        return None
    shape = model_shape(playbook) if playbook else ModelShape()
    layers = shape.num_layers
    return {
        "model": spec["model"],
        "data": spec["data"],
        "data_kind": spec["data_kind"],
        "over_long": spec["over_long"],
        "shard": list(spec["shard"]),
        "format": spec["format"],
        "final_norm": spec["final_norm"],
        "requested": spec["boundaries"],
        "boundaries": list(resolve_boundaries(spec["boundaries"], layers)) if layers else None,
        "num_layers": layers,
        "hidden": shape.hidden,
        "states": state_count(spec),
        "element_bytes": element_bytes(spec),
        "max_samples": spec["max_samples"],
        "max_seq_len": spec["max_seq_len"],
        "bytes_at_most": bytes_expected(plan, playbook),
        "sample_bytes_at_most": sample_bytes(plan, playbook),
        "engine": dict(spec["engine"]),
    }


def _sections(document: dict[str, Any]) -> list[dict[str, Any]]:
    host, upload, capture = document["host"], document["upload"], document["capture"]
    where = f"{host['user']}@{host['address']}" if host["user"] else host["address"]
    sections = {
        "Run": [
            ("id", document["run_id"]),
            ("host", f"{host['name']} ({where}), {host['gpus'] or 'no'} GPUs, {host['accelerator']}"),
            ("playbook", document["playbook"] or "none"),
        ],
        "Upload": [("payload", _upload_text(upload)), ("to", upload["to"]), *_data_rows(document["data"])],
        "Capture": _capture_rows(capture, document["data"]) if capture else [],
        "Command": _command_rows(document),
        "Steps": [(step["name"], _step_text(step)) for step in document["steps"]],
        "Environment": list(document["environment"].items()),
        "Output": [(output["path"], _FATES[Stale(output["stale"])]) for output in document["outputs"]],
        "Limits": [
            (name.removesuffix("_s").removesuffix("_bytes"), _limit_text(name, value))
            for name, value in document["limits"].items()
        ],
    }
    return [{"title": title, "rows": [list(row) for row in rows]} for title, rows in sections.items() if rows]


def _step_text(step: Mapping[str, Any]) -> str:
    return shlex.join(step["argv"]) if "argv" in step else _DOES.get(step["name"], "")


def _command_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    command = document["command"] or {}
    rows = [("cwd", document["cwd"])]
    if "upload" in command:
        rows.append(("upload", f"{command['upload'][:12]}, changed files only; a fresh copy for this run"))
    if "container" in command:
        container = command["container"]
        rows.append(("container", f"{container['image']} by {container['runtime']}"))
    if "watched" in command:
        watched = command["watched"]
        rows.append(("progress", watched.get("file") or ", ".join(watched["patterns"])))
    if command.get("tracebacks"):
        rows.append(("tracebacks", "every Python process is hooked"))
    for path in command.get("survey", {}).get("files", ()):
        rows.append(("must exist", path))
    return rows if document["kind"] == "command" else []


def _limit_text(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return _round_size(value) if name.endswith("_bytes") else span(value)


def _round_size(count: float) -> str:
    return size(int(count)).replace(".0 ", " ")


def _argument_text(name: str, value: Any) -> str:
    """Return an engine argument: a count of tokens or bytes as people read it, all else as it will be given."""
    if type(value) is int and name.endswith("_bytes"):
        return _round_size(value)
    return f"{value:,}" if type(value) is int and ("token" in name or name.endswith("_len")) else str(value)


def _upload_text(upload: dict[str, Any]) -> str:
    amount = "" if upload["files"] is None else f", {upload['files']:,} files, {size(upload['bytes'])}"
    return f"{upload['payload'][:12]}{amount}, only if the host does not have it"


def _data_rows(data: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    return [("data", f"{data['name']}, {size(data['bytes'])}, only if the host does not have it")] if data else []


def _capture_rows(capture: dict[str, Any], data: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    requested = capture["requested"]
    if capture["boundaries"] is None:
        boundaries = f"{requested}, resolved on the host: the number of layers is not known here"
    else:
        boundaries = f"{', '.join(map(str, capture['boundaries']))} of {capture['num_layers']} layers"
    samples = "all" if capture["max_samples"] is None else f"{capture['max_samples']:,}"
    at_most = capture["bytes_at_most"]
    return [
        ("model", capture["model"]),
        ("data", f"{capture['data']} ({_kind_text(capture['data_kind'], data)})"),
        ("boundaries", boundaries),
        ("format", f"{capture['format']}, the last state {'after' if capture['final_norm'] else 'before'} the norm"),
        ("samples", f"{samples}, {_length_text(capture)}"),
        *([("shard", "{} of {}".format(*capture["shard"]))] if capture["shard"][1] > 1 else []),
        ("bytes", _bytes_text(at_most, capture["sample_bytes_at_most"])),
        *((f"engine {name}", _argument_text(name, value)) for name, value in capture["engine"].items()),
    ]


def _bytes_text(at_most: int | None, sample: int | None) -> str:
    if at_most is not None:
        return f"at most {size(at_most)}"
    if sample is not None:
        return f"at most {size(sample)} a sample; how many there are is told by preflight"
    return "not known before the model is read: [model] `hidden` is not set"


def _kind_text(kind: str, data: Mapping[str, Any] | None) -> str:
    """Say what the data set is, where it can be looked at; what lies on a host preflight tells."""
    form = f"{data['container']}, " if data and data["container"] else ""
    if kind != "auto":
        return f"{form}taken for {kind}"
    if data is None:
        return "its kind is read from its contents"
    return f"{form}by its contents of kind {data['kind']}"


def _length_text(capture: dict[str, Any]) -> str:
    fate = "longer ones are cut" if capture["over_long"] == "truncate" else "longer ones are skipped"
    return f"at most {capture['max_seq_len']:,} tokens each, {fate}"
