"""preflight: one execution of the probe on the host, judged here by pure checks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from controller.core.checks import Finding, Level, findings, owned_outputs
from controller.core.checks_gpus import ranks
from controller.core.checks_source import source_of
from controller.core.errors import RefusedError
from controller.stages.base import Context
from remote_payload.host.protocol import OwnedOutput, Plan

PROBE_DEADLINE_S = 60.0
"""The probe's own deadline: longer than its slowest section, where each GPU's process imports torch from a disk."""

ASKED = (
    "model", "revision", "trust_remote_code", "data", "data_kind", "max_samples", "max_seq_len", "over_long",
    "shard",
)  # fmt: skip
"""Of the ExtractSpec, what the lengths of the data, and the samples that are there of them, depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightOutcome:
    """What was seen, what follows from it, and exactly what clear may delete."""

    report: Mapping[str, Any]
    findings: Sequence[Finding]
    outputs: Sequence[OwnedOutput]
    seconds: float

    @property
    def section_seconds(self) -> dict[str, float]:
        """Seconds that each section of the probe took, the slowest first; they run side by side."""
        took = {name: float(result["seconds"]) for name, result in self.report["sections"].items()}
        return dict(sorted(took.items(), key=lambda item: -item[1]))

    @property
    def listings(self) -> dict[str, Mapping[str, Any]]:
        """The host's listing of each output folder, by path."""
        section = self.report["sections"].get("outputs", {})
        return {each["path"]: each for each in section.get("data", {}).get("outputs", ())}

    @property
    def allowed(self) -> list[str]:
        """Codes of failures that were allowed by name, each once."""
        return list(dict.fromkeys(finding.code for finding in self.findings if finding.allowed))

    @property
    def failed(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level is Level.FAIL]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """What the configuration knows and a plan does not hold; see `core.checks.findings`."""

    gpu_name: str | None = None
    data_name: str | None = None
    bytes_expected: int | None = None
    min_free_bytes: int | None = None
    min_memory_bytes: int | None = None
    programs: Sequence[str] = ()
    engine_places: Mapping[str, str] = field(default_factory=dict)
    allow: Sequence[str] = ()


def run(ctx: Context, plan: Plan, expected: Expectations) -> PreflightOutcome:
    """Probe the host and judge the report. Nothing on the host is changed; its free GPUs compute for a second.

    Raises RemoteFailed, ConnectionLost. A refusal is not raised here: see `refuse`.
    """
    started = time.monotonic()
    ctx.emit("stage", name="preflight", status="started")
    sent = time.time()
    asked = {**request_of(plan), "programs": list(expected.programs)}
    report = ctx.call_json("probe", asked, timeout=PROBE_DEADLINE_S + 15)
    report["clock"].update(clock_offset(report["clock"], sent, time.time()))
    found = findings(
        report,
        plan,
        gpu_name=expected.gpu_name,
        data_name=expected.data_name,
        bytes_expected=expected.bytes_expected,
        min_free_bytes=expected.min_free_bytes,
        min_memory_bytes=expected.min_memory_bytes,
        engine_places=expected.engine_places,
        allow=expected.allow,
    )
    for finding in found:
        ctx.emit("finding", **asdict(finding))
    outcome = PreflightOutcome(
        report=report,
        findings=found,
        outputs=owned_outputs(report, plan),
        seconds=time.monotonic() - started,
    )
    failed = len(outcome.failed)
    ctx.emit(
        "stage",
        name="preflight",
        status="failed" if failed else "done",
        text=f"{failed} of {len(found)} checks failed" if failed else f"{len(found)} checks",
        seconds=round(outcome.seconds, 3),
    )
    return outcome


def request_of(plan: Plan) -> dict[str, Any]:
    """Return what `remote_payload.host.probe` is asked about a plan."""
    spec, host = plan["extract"], plan["host"]
    return {
        "workdir": host["workdir"],
        "accelerator": host["accelerator"],
        "python": host["python"],
        "outputs": plan["job"]["outputs"],
        "model": spec["model"] if spec else None,
        "data": spec["data"] if spec else None,
        "gpus": host["gpus"],
        "deadline_s": PROBE_DEADLINE_S,
        "lease_dir": host["lease_dir"],
        "kind": plan["job"]["kind"],
        "env": plan["job"]["env"],
        "env_file": host["env_file"],
        "ranks": ranks(plan),
        "extract": {key: spec[key] for key in ASKED} if spec else None,
        "source": source_of(plan),
    }


def clock_offset(clock: Mapping[str, float], sent: float, received: float) -> dict[str, float]:
    """Return how far the host's clock is ahead of ours, and how uncertain that is, in seconds.

    As in NTP (RFC 5905, section 8): the way there and the way back are taken to be equally long.
    """
    offset = ((clock["begun"] - sent) + (clock["ended"] - received)) / 2
    travelled = (received - sent) - (clock["ended"] - clock["begun"])
    return {"offset_s": round(offset, 3), "uncertain_s": round(max(0.0, travelled) / 2, 3)}


def refuse(outcome: PreflightOutcome) -> None:
    """Raise RefusedError if any check failed; the first failure speaks, all are in its data."""
    failed = outcome.failed
    if not failed:
        return
    first = failed[0]
    others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    raise RefusedError(
        f"preflight refused{others}: {first.what}",
        why=first.why,
        fix=first.fix,
        code=first.code,
        data={"findings": [asdict(finding) for finding in outcome.findings]},
    )
