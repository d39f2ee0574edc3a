"""Which folder a run may own, and perhaps clear: decided from paths alone, before anything is asked of the host."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from controller.core.errors import ConfigError
from controller.core.finding import some
from controller.core.model import Host, Playbook
from controller.core.values import LOCAL
from remote_payload.host.layout import Layout
from remote_payload.host.protocol import OwnedOutput, Stale, Step

MIN_DEPTH = 2
"""Folders from the root of the file system: a root such as / must never make /home an output."""


def not_ours_text(listing: Mapping[str, Any]) -> str:
    """Return `3 entries that are not ctl's: notes.txt, plots/` of an output's listing; "" if there are none.

    They are in no other figure of the listing, since nothing deletes them.
    """
    found = listing.get("not_ours") or {}
    count = int(found.get("entries") or 0)
    if not count:
        return ""
    nouns = "entry that is" if count == 1 else "entries that are"
    return f"{count:,} {nouns} not ctl's: {some(list(found.get('names') or ()))}"


def planned_output(host: Host, playbook: Playbook, *, adopt: bool, by_flag: bool = False) -> OwnedOutput:
    """Return the playbook's output folder as planned: nothing is known of its contents yet.

    `by_flag`: it stands in for the playbook's own, so that whoever has to change it changes the flag.
    Raises ConfigError if it lies outside the host's `output_roots`, or overlaps what no clear may touch.
    """
    reads = [host.resolve(playbook.model.path)]
    if not playbook.data.path.startswith(LOCAL):
        reads.append(host.resolve(playbook.data.path))
    where = "set `--output`" if by_flag else f"set `path` in [output] of {playbook.origin}"
    path, stale = host.resolve(playbook.output.path), playbook.output.stale.value
    return owned_output(host, path, stale=stale, adopt=adopt, reads=reads, where=where)


def owned_output(
    host: Host, path: str, *, stale: str, adopt: bool, reads: Sequence[str], where: str = "set `--output`"
) -> OwnedOutput:
    """Return an output folder that overlaps neither what the job `reads` nor what is ctl's own.

    Raises ConfigError as `planned_output` does; `where` says how to choose another path.
    """
    roots = [root for root in host.output_roots if _inside(path, root)]
    if not roots or path.count("/") < MIN_DEPTH:
        raise ConfigError(
            f"output `{path}` is not inside an output root of host `{host.name}`",
            why=f"`output_roots` are {', '.join(host.output_roots)}; an output is a folder below one of them",
            fix=f"{where} to a folder such as {host.output_roots[0]}/NAME",
            code="output-outside-roots",
        )
    _check_not_ours_to_clear(path, host, reads, where)
    return {
        "path": path,
        "root": max(roots, key=len),
        "stale": stale,
        "adopt": adopt,
        "digest": None,
        "entries": 0,
        "bytes": 0,
    }


def output_step(outputs: Sequence[OwnedOutput], *, seen: bool = False) -> Step:
    """Return the step that makes the outputs ready: `clear` where something may go, else `claim`.

    `seen`: preflight has listed them, so that an empty one has nothing to be cleared. Of what is resumed only the job
    takes something away.
    """
    if seen:
        clears = any(output["entries"] and output["stale"] != Stale.RESUME.value for output in outputs)
    else:
        clears = any(output["stale"] in (Stale.CLEAR.value, Stale.QUARANTINE.value) for output in outputs)
    return {"name": "clear" if clears else "claim", "kind": "clear"}


def _check_not_ours_to_clear(path: str, host: Host, reads: Sequence[str], where: str) -> None:
    """Refuse an output that is, holds or lies in something that a clear must never touch."""
    layout = Layout(host.workdir)
    kept = [
        ("the host's `workdir`", host.workdir, False),
        ("ctl's runs", layout.runs, True),
        ("ctl's payloads", layout.payloads, True),
        ("ctl's copies of data", layout.data, True),
        ("ctl's copies of uploads", layout.files, True),
        *(("what the job reads", folder, True) for folder in reads),
        ("the host's `python`", host.python, True),
        *(("the environment of the host's `python`", folder, True) for folder in _environment(host)),
        ("the host's `lease_dir`", host.lease_dir or layout.runs, True),
    ]
    for what, other, also_below in kept:
        if path == other or _inside(other, path) or (also_below and _inside(path, other)):
            raise ConfigError(
                f"output `{path}` would overlap {what} ({other})",
                why="the output folder may be cleared as a whole",
                fix=f"{where} to another folder",
                code="output-overlaps",
            )


def _environment(host: Host) -> list[str]:
    """Return the folders that belong to the environment of the host's `python`."""
    folder, name = posixpath.split(posixpath.dirname(host.python))
    if name != "bin" or folder in ("", "/"):
        return []
    if any(f"{place}/".startswith(f"{folder}/") for place in (host.workdir, *host.output_roots)):
        return [f"{folder}/{part}" for part in ("bin", "lib", "lib64")]  # such as a home folder with a `bin` in it
    return [folder]


def _inside(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")
