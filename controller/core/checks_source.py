"""Checks of a conversion's source: the run, and the samples that it wrote, before anything is launched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from controller.core.finding import Finding, failed, passed, section
from remote_payload.host.protocol import Plan


def conversion_options(plan: Plan) -> dict[str, str]:
    """Return the options of a conversion's job by name (`--run`, `--output`, `--to`); {} for another kind of job."""
    steps = plan["job"]["steps"] if plan["job"]["kind"] == "convert" else []
    argv = next((step["argv"] for step in steps if step["name"] == "convert"), [])
    return dict(itertools.pairwise(argv))


def source_of(plan: Plan) -> str | None:
    """Return the run folder on the host whose samples are to be converted, None for another kind of job."""
    return conversion_options(plan).get("--run")


def check_source(report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    """Judge whether what is to be converted is there, whole and as it was written."""
    found = section(report, "source")
    if found is None:
        return
    run_id, output = found["run_id"], found["output"]
    written, present = found["written"], found["present"]
    anew = f"extract them anew; what is there says `ls {output}` on the host"
    if not found["found"]:
        yield failed(
            "source-unknown",
            f"run {run_id} is not on host {plan['host']['name']}",
            why="its run folder is not in the workdir, or not any more: nothing tells which samples it wrote",
            fix="if another host made it, name that with `--host`; if `ctl prune` deleted it, extract them anew",
        )
    elif not found["over"]:
        yield failed(
            "source-running",
            f"run {run_id} is {found['state']}: it still writes samples",
            why=f"{written:,} are written so far",
            fix=f"convert when it has ended: `ctl attach {run_id}`",
        )
    elif not written:
        yield failed(
            "source-empty",
            f"run {run_id} has written no sample, so there is nothing to convert",
            fix=f"see how it ended with `ctl summary {run_id}`",
        )
    elif present < written:
        since = found["marker"]
        other = f"; run {since} has used the folder since" if since not in (None, run_id) else ""
        yield failed(
            "source-gone",
            f"{'all' if not present else f'{written - present:,} of'} {written:,} samples of run {run_id} are gone",
            why=f"they are not in {output}, where it wrote them: cleared or moved since{other}",
            fix=anew,
        )
    elif found["changed"]:
        yield failed(
            "source-changed",
            f"samples in {output} are not those that run {run_id} wrote",
            why=f"{found['changed']:,} of the looked at have another size"
            + (f"; run {found['marker']} wrote there last" if found["marker"] not in (None, run_id) else ""),
            fix=anew,
        )
    else:
        yield passed("source", f"{written:,} samples of run {run_id} in {output}")
