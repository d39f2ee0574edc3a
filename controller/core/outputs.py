"""Which folder a run may own, and perhaps clear: decided from paths alone, before anything is asked of the host."""

from __future__ import annotations

from controller.core.errors import ConfigError
from controller.core.model import Host, Playbook
from remote_payload.host.protocol import Layout, OwnedOutput

MIN_DEPTH = 2
"""Folders from the root of the file system: a root such as / must never make /home an output."""


def planned_output(host: Host, playbook: Playbook, *, adopt: bool) -> OwnedOutput:
    """Return the playbook's output folder as planned: nothing is known of its contents yet.

    Raises ConfigError if it lies outside the host's `output_roots`, or overlaps what no clear may touch.
    """
    path = host.resolve(playbook.output.path)
    roots = [root for root in host.output_roots if _inside(path, root)]
    if not roots or path.count("/") < MIN_DEPTH:
        raise ConfigError(
            f"output `{path}` is not inside an output root of host `{host.name}`",
            why=f"`output_roots` are {', '.join(host.output_roots)}; an output is a folder below one of them",
            fix=f"set `path` in [output] of {playbook.origin} to a folder such as {host.output_roots[0]}/NAME",
            code="output-outside-roots",
        )
    _check_not_ours_to_clear(path, host, playbook)
    return {
        "path": path,
        "root": max(roots, key=len),
        "stale": playbook.output.stale.value,
        "adopt": adopt,
        "digest": None,
        "entries": 0,
        "bytes": 0,
    }


def _check_not_ours_to_clear(path: str, host: Host, playbook: Playbook) -> None:
    """Refuse an output that is, holds or lies in something that a clear must never touch."""
    layout = Layout(host.workdir)
    kept = {
        "the host's `workdir`": (host.workdir, False),
        "ctl's runs": (layout.runs, True),
        "ctl's payloads": (layout.payloads, True),
        "the model": (host.resolve(playbook.model.path), True),
        "the data": (host.resolve(playbook.data.path), True),
        "the host's `python`": (host.python, True),
        "the host's `lease_dir`": (host.lease_dir or layout.runs, True),
    }
    for what, (other, also_below) in kept.items():
        if path == other or _inside(other, path) or (also_below and _inside(path, other)):
            raise ConfigError(
                f"output `{path}` would overlap {what} ({other})",
                why="the output folder may be cleared as a whole",
                fix=f"choose another `path` in [output] of {playbook.origin}",
                code="output-overlaps",
            )


def _inside(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")
