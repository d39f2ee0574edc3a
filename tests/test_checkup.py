"""Several hosts of one `ctl preflight`: what one of them is wrong with hides nothing of the others."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from controller.checkup import Checkup, plan_each
from controller.core.errors import ConfigError, ConnectionFailed
from controller.core.finding import passed, warned
from controller.ui.checkup import print_side_by_side, print_unseen
from controller.ui.tables import print_findings


def plan(name: str) -> Any:
    if name.startswith("bad"):
        raise ConfigError(f"{name} has no such output root")
    return SimpleNamespace(host=SimpleNamespace(name="box" if name == "192.0.2.7" else name))


def test_a_host_that_cannot_be_planned_for_keeps_its_place_and_a_name_counts_once() -> None:
    box, bad = plan_each(["box", "bad", "box", "192.0.2.7"], plan)
    assert box == plan("box")
    assert isinstance(bad, Checkup)
    assert (bad.host, bad.document()["error"]["what"]) == ("bad", "bad has no such output root")


def test_what_all_hosts_share_is_said_once() -> None:
    def unreadable(name: str) -> Any:
        raise ConfigError("hosts.toml cannot be read")

    with pytest.raises(ConfigError, match=r"hosts\.toml cannot be read"):
        plan_each(["box", "closed"], unreadable)
    with pytest.raises(ConfigError, match="bad has no"):
        plan_each(["bad", "bad"], plan)


def test_the_column_of_an_unreachable_host_says_so_and_counts_hold_all_findings() -> None:
    console = Console(file=io.StringIO(), width=100)
    findings = [*(passed(f"fine-{number}", "fine") for number in range(12)), warned("shm", "old memory")]
    error = ConnectionFailed("closed refuses connections")
    print_side_by_side(console, {"box": findings}, {"closed": error}, order=["box", "closed"])
    print_findings(console, "box", findings)
    print_unseen(console, "closed", error)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert lines[1].split() == ["looked", "at", "✓", "ok", "✗", "unreachable"]
    assert lines[2].split() == ["fine-0", "✓", "ok"]
    assert "  12 ok, 1 warning, 0 failures" in lines
    assert lines[lines.index("host closed") + 1] == "✗ closed refuses connections"
