"""The titles of vLLM's processes, by which a person, and a preflight of another user, sees whose they are."""

from __future__ import annotations

import re
from typing import List, Optional

TITLE_ENV, TITLE = "VLLM_PROCESS_NAME_PREFIX", "ctl"

_OF_RUN = re.compile(TITLE + r"-([0-9]{8}-[0-9]{6}-[0-9a-f]{6})::")


def title_prefix(kind: str, run_id: str) -> str:
    """Return what `TITLE_ENV` is in a job of a kind; vLLM writes it before each title, with `::` between.

    vLLM keys its compile cache by this variable too (`envs.compile_factors`). With a run's id in it no run would find
    what another has compiled, so the extraction's worker sets it to `TITLE` before it compiles, and a command, which
    nobody takes it back from, has `TITLE` from the start.
    """
    return TITLE if kind == "command" else "%s-%s" % (TITLE, run_id)


def run_of_title(argv: List[str]) -> Optional[str]:
    """Return the run that a title names, `ctl-RUN::Worker`: also of processes whose environment is closed to us."""
    found = _OF_RUN.match(argv[0] if argv else "")
    return found.group(1) if found else None
