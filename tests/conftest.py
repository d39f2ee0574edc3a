"""What holds for every test, beside whichever others it runs; and how `make test` shares them out to two processes.

Files go whole to whichever process is free. All that start an engine go to one, so that no engine ever meets another
one, each is still started once, and the other process has the second core for all else. With them goes what judges
all of the machine's /dev/shm, in which an engine that is killed leaves files of nobody's.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

ENGINES = "engine"
"""The marker of a test that starts one, and the name of all their files together."""

MACHINE = "machine"
"""The marker of a test that judges the whole machine, which must stand still meanwhile."""

# A shell that starts us in the background has us ignore Ctrl-C, and all that we start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes, and how long the next one is in coming, depends on who else works on the machine.
settings.register_profile("ctl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ctl")


@pytest.fixture(autouse=True)
def umask_stays() -> Iterator[None]:
    """No test leaves its umask to the next one, which is another one in each order of the files."""
    before = _umask()
    yield
    after = _umask()
    os.umask(before)
    assert after == before


@pytest.fixture(autouse=True)
def consoles_of_this_test() -> None:
    """A process has one stdout and one stderr, to which its consoles keep; here each test has its own."""
    terminal = sys.modules.get("controller.ui.terminal")
    if terminal is not None:
        terminal.out_console.cache_clear()
        terminal.err_console.cache_clear()


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    strays = [item.nodeid for item in items if item.get_closest_marker(ENGINES) and not _is_of_engines(item.path)]
    if strays:
        raise pytest.UsageError(f"not written as pytest.mark.{ENGINES}, so not kept from other engines: {strays}")
    if hasattr(config, "workerinput"):  # one of two: the longest piece of work is begun first
        items.sort(key=lambda item: not _is_of_engines(item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class EnginesTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return ENGINES if _is_of_engines(config.rootpath / file) else file

    return EnginesTogether(config, log)


@functools.cache
def _is_of_engines(file: Path) -> bool:
    """Whether a file has tests marked so. The process that shares out has collected nothing and sees names alone."""
    text = file.read_text()
    return any(f"pytest.mark.{marker}" in text for marker in (ENGINES, MACHINE))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say where the minutes went; of two processes side by side they add up to more than the run took."""
    spent: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent[_folder(report)] += report.duration
    if sum(spent.values()) >= 60:
        told = (f"{folder} {seconds / 60:.1f}" for folder, seconds in spent.most_common())
        terminalreporter.write_sep("-", "minutes")
        terminalreporter.write_line(", ".join(told))


def _folder(report: pytest.TestReport) -> str:
    """The folder below tests/; what starts an engine is taken together, wherever it stands."""
    if ENGINES in report.keywords:
        return "engines"
    parts = report.nodeid.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 else "the rest"
