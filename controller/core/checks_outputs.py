"""Checks of the output folders: what is in them, what will become of it, and what stands against it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from controller.core.finding import Finding, failed, passed, section, size, some, warned
from controller.core.outputs import not_ours_text
from remote_payload.host.layout import OWNER_MARKER
from remote_payload.host.protocol import OwnedOutput, Plan, Stale

EXAMPLES_SHOWN = 5


def check_outputs(report: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    """Say exactly what will be deleted or moved aside, or why the folder cannot be used."""
    found = section(report, "outputs")
    for listing in found["outputs"] if found else ():
        if listing["problems"]:
            yield from _check_problems(listing)
        elif listing["foreign"] and not listing["adopt"]:
            yield failed(
                "output-foreign",
                f"{listing['path']} holds {_amount(listing)} that no run of ctl wrote",
                why=f"it has no {OWNER_MARKER}; {_examples(listing)}",
                fix="choose another folder, or add `--adopt` to have them treated as stale output",
            )
        elif counts_as_empty(listing):
            yield passed(
                "output",
                f"{listing['path']} holds no sample, only records of run {listing['marker']['run_id']}, which is "
                "over: they go",
            )
        elif listing["entries"]:
            yield _stale(listing, report, plan)
        elif strange := not_ours_text(listing):
            yield passed("output", f"{listing['path']} holds nothing of ctl's; {_stays(listing, strange)}")
        else:
            state = "is empty" if listing["exists"] else "does not exist yet"
            yield passed("output", f"{listing['path']} {state}")


def counts_as_empty(listing: Mapping[str, Any]) -> bool:
    """Whether a run that is over left its records in the folder and no sample: then there is nothing to decide on.

    With `clear` and `quarantine` a person has decided.
    """
    return bool(listing.get("spent")) and listing["stale"] in (Stale.FAIL, Stale.RESUME)


def owned_outputs(report: Mapping[str, Any], plan: Plan) -> tuple[OwnedOutput, ...]:
    """Return the plan's outputs with digest, entries and bytes as listed: exactly what may be cleared.

    An output that the report does not list is returned as planned.
    """
    found = section(report, "outputs")
    listings = {(item["path"], item["root"]): item for item in (found["outputs"] if found else ())}
    outputs: list[OwnedOutput] = []
    for output in plan["job"]["outputs"]:
        updated = output.copy()
        listing = listings.get((output["path"], output["root"]))
        if listing is not None:
            updated["digest"], updated["entries"] = listing["digest"], listing["entries"]
            updated["bytes"] = listing["bytes"]
        outputs.append(updated)
    return tuple(outputs)


def _check_problems(listing: Mapping[str, Any]) -> Iterator[Finding]:
    path, root = shlex.quote(listing["path"]), shlex.quote(listing["root"])
    fixes = {
        "root-missing": f"on the host: `mkdir -p {root}`, or correct `output_roots` in hosts.toml",
        "mount": "name the mount point itself in `output_roots` of this host, and set `path` in [output] to a folder "
        "below it, which need not exist yet: a root itself is no output; or unmount it: `findmnt`",
        "symlink": f"use the folder that it points to: `readlink -f {path}`, with a matching `output_roots`",
        "unreadable": f"on the host: `ls -la {path}`; if it is yours, `chmod -R u+rwX {path}`",
        "not-a-folder": f"on the host: `ls -ld {path}`, or choose another `path` in [output]",
        "moved": "something renames folders there; find it, then run again",
    }
    for problem in listing["problems"]:
        yield failed(
            f"output-{problem['code']}",
            f"{listing['path']} cannot be used as an output",
            why=problem["what"],
            fix=fixes.get(
                problem["code"], "set `path` in [output] to a folder below one of the host's `output_roots`"
            ),
        )


def _going_on(plan: Plan) -> str:
    """A conversion writes every file anew: it has nothing to go on with."""
    return "" if plan["job"]["kind"] == "convert" else "`--stale resume` to go on, "


def _stale(listing: Mapping[str, Any], report: Mapping[str, Any], plan: Plan) -> Finding:
    path, stale = listing["path"], Stale(listing["stale"])
    strange = not_ours_text(listing)
    beside = f"; {_stays(listing, strange)}" if strange else ""
    if stale is Stale.FAIL:
        return failed(
            "output-stale",
            f"{path} holds {_amount(listing)} of an earlier run{beside}",
            why=f"{_whose(listing, report)}; {_examples(listing)}",
            fix=f"add {_going_on(plan)}`--stale clear` to delete them, `--stale quarantine` to move them",
        )
    # Where nothing says what job wrote there, a name that no extraction has may be that job's, or somebody's.
    others = [] if (listing["marker"] or {}).get("kind") else listing.get("others") or []
    if stale is Stale.CLEAR:
        also = f", also what no extraction writes: {some(others)}" if others else ""
        return warned(
            "output-clear",
            f"{_amount(listing)} in {path} will be deleted{also}{beside}",
            why=f"{_whose(listing, report)}; {_examples(listing)}",
            fix="to keep them: `--stale quarantine`",
        )
    if stale is Stale.QUARANTINE:
        return warned(
            "output-quarantine",
            f"{_amount(listing)} in {path} will be moved to {path}.quarantine-{plan['run_id']}{beside}",
            why=f"{_whose(listing, report)}; {_examples(listing)}",
            fix=f"later, to free the space: `rm -r {shlex.quote(path)}.quarantine-{plan['run_id']}`",
        )
    differing = _other_kind(listing, plan)
    if differing:
        return failed(
            "output-differs",
            f"{path} holds samples of another kind, and runs are not mixed",
            why="; ".join(differing),
            fix="use the earlier run's settings, another folder, or `--stale quarantine`",
        )
    return passed(
        "output-resume",
        f"{path} holds {_amount(listing)}: good samples stay, bad ones go to {path}.quarantine-{plan['run_id']}"
        + beside,
    )


def _other_kind(listing: Mapping[str, Any], plan: Plan) -> list[str]:
    """Compare with the folder's manifest what the plan alone tells; the job compares the rest before the load."""
    manifest, spec = listing.get("manifest"), plan["extract"]
    if spec is None or not isinstance(manifest, Mapping) or not isinstance(manifest.get("identity"), Mapping):
        return []
    wanted = {"model": spec["model"], "revision": spec["revision"] or "", "format": spec["format"]}
    wanted["final_norm"] = spec["final_norm"]
    if not isinstance(spec["boundaries"], str):
        wanted["boundaries"] = spec["boundaries"]
    found = manifest["identity"]
    return [
        f"{key} is {found.get(key)!r} there and {wanted[key]!r} here"
        for key in wanted
        if found.get(key) != wanted[key]
    ]


def _stays(listing: Mapping[str, Any], strange: str) -> str:
    """Say what becomes of what is not ours: a quarantine renames the folder, and has something to rename it for."""
    moved = listing["stale"] == Stale.QUARANTINE.value and listing["entries"]
    return f"{strange} ({'moved with it' if moved else 'left alone'})"


def _amount(listing: Mapping[str, Any]) -> str:
    count = listing["entries"]
    return f"{count:,} {'entry' if count == 1 else 'entries'} ({size(listing['bytes'])})"


def _whose(listing: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    marker = listing["marker"]
    if marker is None:
        return f"adopted: it has no {OWNER_MARKER}"
    owner = marker.get("owner")
    whose = f"written by run {marker['run_id']}" + ("" if owner == report["user"] else f" of {owner}, not by you")
    return whose + _how_it_ended(listing.get("run")) + _partial(listing)


def _how_it_ended(run: Mapping[str, Any] | None) -> str:
    if run is None:
        return ""
    word = run["end_reason"] or run["state"]
    counted = run["written"] is not None and run["expected"] is not None
    return f" ({word}: {run['written']:,} of {run['expected']:,} samples)" if counted else f" ({word})"


def _partial(listing: Mapping[str, Any]) -> str:
    count = listing.get("partial")
    return f", {count:,} of them not whole" if count else ""


def _examples(listing: Mapping[str, Any]) -> str:
    shown = [example["path"] for example in listing["examples"]]
    extra = listing["entries"] - min(len(shown), EXAMPLES_SHOWN)
    return some(shown[:EXAMPLES_SHOWN]) + (f" and {extra:,} more" if extra > 0 else "")
