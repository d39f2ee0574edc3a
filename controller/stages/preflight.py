"""preflight: one execution of the probe on the host, judged here by pure checks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from controller.core.checks import Finding, Level, findings, owned_outputs
from controller.core.errors import RefusedError
from controller.stages.base import Context
from remote_payload.host.protocol import OwnedOutput, Plan

PROBE_DEADLINE_S = 45.0
"""The probe's own deadline: longer than its slowest section (importing nothing, but a cold Python on NFS)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightOutcome:
    """What was seen, what follows from it, and exactly what clear may delete."""

    report: Mapping[str, Any]
    findings: Sequence[Finding]
    outputs: Sequence[OwnedOutput]
    seconds: float

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
    bytes_expected: int | None = None
    min_free_bytes: int | None = None
    min_memory_bytes: int | None = None
    programs: Sequence[str] = ()
    allow: Sequence[str] = ()


def run(ctx: Context, plan: Plan, expected: Expectations) -> PreflightOutcome:
    """Probe the host and judge the report. Nothing on the host is changed.

    Raises RemoteFailed, ConnectionLost. A refusal is not raised here: see `refuse`.
    """
    started = time.monotonic()
    ctx.emit("stage", name="preflight", status="started")
    spec = plan["extract"]
    report = ctx.call_json(
        "probe",
        {
            "workdir": plan["host"]["workdir"],
            "accelerator": plan["host"]["accelerator"],
            "python": plan["host"]["python"],
            "outputs": plan["job"]["outputs"],
            "model": spec["model"] if spec else None,
            "data": spec["data"] if spec else None,
            "gpus": plan["host"]["gpus"],
            "deadline_s": PROBE_DEADLINE_S,
            "lease_dir": plan["host"]["lease_dir"],
            "kind": plan["job"]["kind"],
            "programs": list(expected.programs),
        },
        timeout=PROBE_DEADLINE_S + 15,
    )
    found = findings(
        report,
        plan,
        gpu_name=expected.gpu_name,
        bytes_expected=expected.bytes_expected,
        min_free_bytes=expected.min_free_bytes,
        min_memory_bytes=expected.min_memory_bytes,
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
