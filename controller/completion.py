"""What a shell completes: hosts, playbooks and runs, from the files of the current folder; never from a network.

A completion must not print or fail: a broken configuration completes nothing, and the command itself explains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from controller.core.errors import CtlError


def hosts(incomplete: str) -> list[str]:
    """Return the names of the configured hosts that begin with `incomplete`."""
    from controller.workspace import load_workspace

    try:
        return _beginning(load_workspace().config.host_names(), incomplete)
    except CtlError:
        return []


def playbooks(incomplete: str) -> list[str]:
    """Return the names of the playbooks that begin with `incomplete`."""
    from controller.workspace import load_workspace

    try:
        return _beginning(load_workspace().playbooks, incomplete)
    except CtlError:
        return []


def runs(incomplete: str) -> list[str]:
    """Return the ids of the runs of the current folder, newest first."""
    from controller.runfolder import list_runs
    from controller.workspace import load_workspace

    try:
        known = [run.run_id for run in reversed(list_runs(load_workspace().runs_dir))]
    except CtlError:
        return []
    return [run_id for run_id in known if run_id.startswith(incomplete)]


PROGRESS_MODES = ("auto", "plain", "json", "none")


def one_of(*words: str) -> Callable[[str], list[str]]:
    """Return the completion of an option that takes one of a few words."""

    def complete(incomplete: str) -> list[str]:
        return _beginning(words, incomplete)

    return complete


def topics(incomplete: str) -> list[str]:
    """Return the topics of `ctl help`."""
    from controller.topics import TOPICS

    return _beginning(TOPICS, incomplete)


def _beginning(words: Iterable[str], incomplete: str) -> list[str]:
    return sorted(word for word in words if word.startswith(incomplete))
