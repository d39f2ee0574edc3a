"""Answers that are read once: findings, intentions, lists. Data goes in as it is recorded, text comes out cleaned."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from controller.core.outputs import not_ours_text
from controller.core.runview import kind_word
from controller.ui.clean import Encodable, clean, text
from controller.ui.columns import GAP, Column, fitting
from controller.ui.formats import (
    UNKNOWN,
    Ending,
    bytes_text,
    count_text,
    duration_text,
    end_text,
    ending_of,
    inline_text,
    plural,
    state_word,
)
from controller.ui.glyphs import Glyphs, glyphs_for
from controller.ui.summaryrows import summary_rows
from controller.ui.survey import print_groups
from controller.ui.wrapping import wrapped_advice

EXAMPLES = 10
"""Entries named in a clear list; the digest that is confirmed covers all of them."""

VALUE_LEAST = 26
"""Cells that labels leave: a run id has 22, and four are between them."""

_FATES = {
    "clear": "will be deleted",
    "quarantine": "will be moved aside",
    "fail": "is in the way",
    "resume": "is proved file by file: good is kept, bad moved aside, missing added",
}


class FindingLike(Protocol):
    """What a check found; `level` is ok, warn or fail."""

    @property
    def level(self) -> str: ...

    @property
    def code(self) -> str: ...

    @property
    def what(self) -> str: ...

    @property
    def why(self) -> str: ...

    @property
    def fix(self) -> str: ...


def print_findings(console: Console, host: str, findings: Sequence[FindingLike]) -> None:
    """Print each finding with its sign; reason and fix only where something is not right."""
    glyphs = glyphs_for(console.encoding)
    _print(console, Text.assemble(("host ", "dim"), (clean(host), "bold")))
    for finding in findings:
        sign, style = sign_of(finding.level, glyphs)
        _print(
            console, _hanging(Text(sign, style=style), text(finding.what, "" if finding.level == "ok" else "bold"))
        )
        if finding.level != "ok":
            if finding.why:
                _print(console, Padding(text(finding.why), (0, 0, 0, 4)))
            if finding.fix:
                shown = wrapped_advice(clean(finding.fix), console, 9).replace("\n", "\n" + " " * 9)
                _print_copyable(console, Text.assemble(("    fix: ", "cyan"), shown))
    counts = {level: sum(finding.level == level for finding in findings) for level in ("ok", "warn", "fail")}
    verdict = [f"{counts['ok']} ok", plural(counts["warn"], "warning"), plural(counts["fail"], "failure")]
    _print(console, Text("  " + ", ".join(verdict), style="bold red" if counts["fail"] else "dim"))


def print_intention(console: Console, described: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Print what a plan will do: the `sections` of its description, each with a title and (label, value) rows."""
    sections = described.get("sections", ()) if isinstance(described, Mapping) else described
    widest = max((len(clean(row[0])) for section in sections for row in section["rows"]), default=0)
    for number, section in enumerate(sections):
        if number:
            _print(console, Text(""))
        _print(console, text(section["title"], "bold"))
        most = max(10, console.width - VALUE_LEAST)
        grid = _grid(min(widest, 28, most), most)
        for label, value in section["rows"]:
            values = [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
            grid.add_row("", text(label, "dim"), Group(*(text(each) for each in values or [UNKNOWN])))
        _print(console, grid)


def print_clear_list(
    console: Console,
    host: str,
    outputs: Sequence[Mapping[str, Any]],
    listings: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Print what would be deleted or moved on `host`.

    `listings` (by path, as the probe reports them) add the run that wrote it, and the first names.
    """
    for output in outputs:
        fate = _FATES.get(str(output.get("stale")), str(output.get("stale")))
        entries, size = int(output.get("entries") or 0), bytes_text(output.get("bytes"))
        style = "bold yellow" if output.get("stale") == "clear" else "bold"
        noun = f"{entries:,} {'entry' if entries == 1 else 'entries'}"
        _print_copyable(console, text(output["path"], "bold"))
        _print(console, Text.assemble("  ", (f"{noun}, {size}, on host {clean(host)}: {clean(fate)}", style)))
        marker = (listings or {}).get(str(output["path"]), {}).get("marker")
        if marker:
            _print(console, text(f"  written by run {marker.get('run_id')} of {marker.get('owner')}", "dim"))
        if output.get("adopt"):
            _print(console, Text("  no marker says that these files are ours; --adopt allows it", style="yellow"))
        examples = list((listings or {}).get(str(output["path"]), {}).get("examples", ()))
        for example in examples[:EXAMPLES]:
            grid = _grid(12)
            grid.add_row(
                "", Text(bytes_text(example.get("size")), style="dim", justify="right"), text(example["path"])
            )
            _print(console, grid)
        if examples and entries > len(examples[:EXAMPLES]):
            _print(console, Text(f"  {'':12}  and {entries - len(examples[:EXAMPLES]):,} more", style="dim"))
        print_not_ours(
            console, (listings or {}).get(str(output["path"]), {}), moved=output.get("stale") == "quarantine"
        )


def print_not_ours(console: Console, listing: Mapping[str, Any], *, moved: bool = False) -> None:
    """Print what in an output is not ctl's, if there is anything: it is left alone, or `moved` with its folder."""
    found = not_ours_text(listing)
    if found:
        _print(console, text(f"  {'moved with it' if moved else 'left alone'}: {found}", "bold"))


def print_summary(console: Console, summary: Mapping[str, Any], *, cause: bool = True) -> None:
    """Print a run's summary.json: how it ended, what was written, the proof for each state, where the time went.

    `cause`: also what it failed of, where that is not told after it.
    """
    glyphs = glyphs_for(console.encoding)
    ending = ending_of(str(summary.get("end_reason")))
    sign, style = sign_of({Ending.WELL: "ok", Ending.STOPPED: "warn", Ending.BADLY: "fail"}[ending], glyphs)
    hosts = ", ".join(clean(host) for host in summary.get("hosts") or ())
    word = kind_word(summary.get("kind")) if summary.get("kind") in ("rehearse", "convert") else "run"
    _print(
        console,
        Text.assemble(
            (sign, style),
            f" {word} ",
            (clean(summary.get("run_id", UNKNOWN)), "bold"),
            f" on {hosts}: " if hosts else ": ",
            (clean(end_text(str(summary.get("end_reason", UNKNOWN)))), style),
        ),
    )
    grid = _grid(10)
    for label, value in summary_rows(summary if cause else {**summary, "triage": None}):
        grid.add_row("", Text(label, style="dim"), value)
    _print(console, grid)
    if isinstance(summary.get("survey"), Mapping):
        print_groups(console, summary["survey"])
    if summary.get("states"):
        _print(console, Padding(_states(summary["states"]), (1, 0, 1, 2)))


def print_ps(console: Console, host: str, listed: Mapping[str, Any], *, now: float | None = None) -> None:
    """Print the runs of a host, newest first, and who holds its GPUs. `now` is seconds since the epoch."""
    runs = sorted(listed.get("runs") or (), key=lambda run: str(run.get("run_id")), reverse=True)
    if not runs:
        _print(console, Text.assemble("no runs on ", (clean(host), "bold")))
    else:
        present = time.time() if now is None else now
        rows = [
            [
                text(run.get("run_id"), "bold"),
                text(run.get("name") or UNKNOWN),
                text(run.get("user") or UNKNOWN),
                _run_state(run),
                text(run.get("step") or UNKNOWN),
                Text(_age(run, present)),
            ]
            for run in runs
        ]
        _print(console, fitting(_PS, rows, console))
    for lease in listed.get("leases") or ():
        _print(console, Text.assemble(("lease ", "dim"), clean(_lease(lease))))


_PS = (
    Column(title="RUN"),
    Column(title="NAME", worth=4, least=12),
    Column(title="USER", worth=1),
    Column(title="STATE", least=12, most=24),
    Column(title="STEP", worth=2),
    Column(title="AGE", worth=3, right=True),
)


def _lease(lease: Mapping[str, Any]) -> str:
    """Say who holds what, in one line; the whole record is in the JSON."""
    if not lease.get("run_id"):
        return inline_text(lease)
    process = lease.get("process") or {}
    words = f"{lease.get('resource')}: {lease.get('state')} by run {lease['run_id']} of {lease.get('user')}"
    beat = lease.get("heartbeat_age_s")
    heard = f", heard from {beat:g} s ago" if isinstance(beat, int | float) else ""
    return f"{words}, since {lease.get('since')}, process {process.get('pid')} ({lease.get('alive')}){heard}"


def print_hosts(console: Console, hosts: Sequence[Mapping[str, Any]]) -> None:
    """Print the configured hosts as host records."""
    if not hosts:
        _print(console, Text("no hosts: describe one with `ctl init` or `ctl hosts add`"))
        return
    rows = []
    for host in hosts:
        address = f"{host['user']}@{host['address']}" if host.get("user") else str(host.get("address", UNKNOWN))
        address += f":{host['port']}" if host.get("port") not in (None, 0, 22) else ""
        rows.append([
            text(host.get("name"), "bold"), text(address), text(host.get("gpus") or "none"), text(host.get("python")),
            text(host.get("workdir")),
        ])  # fmt: skip
    _print(console, fitting(_HOSTS, rows, console))


_HOSTS = (
    Column(title="HOST"),
    Column(title="ADDRESS"),
    Column(title="GPUS", worth=3),
    Column(title="PYTHON", worth=1, least=16),
    Column(title="WORKDIR", worth=2, least=12),
)


def print_config(console: Console, document: Mapping[str, Any]) -> None:
    """Print the files that were looked for, and each configured value with its origin.

    Where one of them is too long for a line of three columns, its origin stands below each value: what is read to be
    mended is never cut.
    """
    for file in document["files"]:
        found = "" if file["found"] else "  (not there)"
        _print_copyable(console, Text.assemble((f"{file['layer']:<8}", "dim"), text(file["path"]), (found, "dim")))
    rows = [
        (text(name, "bold"), text(_config_text(value["value"])), text(value["origin"], "dim"))
        for name, value in document["values"].items()
    ]
    widest = [max((row[column].cell_len for row in rows), default=0) for column in range(3)]
    if sum(widest) + 2 * GAP <= console.width:
        grid = Table.grid(padding=(0, GAP, 0, 0))
        for row in rows:
            grid.add_row(*row)
        _print(console, grid)
        return
    for name, value, origin in rows:
        _print_copyable(console, Text.assemble(name, " " * GAP, value))
        _print_copyable(console, Text.assemble(" " * 2 * GAP, origin))


def _config_text(value: object) -> str:
    return UNKNOWN if value is None else inline_text(value)


def _states(states: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = _table("BOUNDARY", "MEAN NORM", "MAX NORM", "NAN", "INF", "ZERO ROWS", right=True)
    for state in states:
        bad = [int(state.get(name) or 0) for name in ("nan", "inf", "zero_rows")]
        norms = [UNKNOWN if state.get(name) is None else f"{state[name]:.4g}" for name in ("norm_mean", "norm_max")]
        table.add_row(
            text(state.get("boundary"), "bold"),
            *(text(norm) for norm in norms),
            *(Text(count_text(count), style="bold red" if count else "dim") for count in bad),
        )
    return table


def _run_state(run: Mapping[str, Any]) -> Text:
    state, reason = str(run.get("state")), run.get("end_reason")
    if reason:
        return text(end_text(str(reason)), ending_of(str(reason)).value)
    paused = run.get("paused")
    return text(state_word(state, paused), "cyan" if state == "running" and not paused else "yellow")


def _age(run: Mapping[str, Any], now: float) -> str:
    try:
        return duration_text(now - datetime.fromisoformat(str(run["started"])).timestamp(), running=True)
    except (KeyError, ValueError):
        return UNKNOWN


def sign_of(level: str, glyphs: Glyphs) -> tuple[str, str]:
    """Return the sign of a finding's level, and its style."""
    signs = {"ok": (glyphs.ok, "green"), "warn": (glyphs.warn, "bold yellow"), "fail": (glyphs.fail, "bold red")}
    return signs.get(level, (glyphs.dot, ""))


def _hanging(sign: Text, content: Text) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=1)
    grid.add_column(width=1, no_wrap=True)
    grid.add_column()
    grid.add_row("", sign, content)
    return grid


def _grid(label_width: int, most: int | None = None) -> Table:
    """Two columns, indented; long values wrap under themselves, and labels of more than `most` cells."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=0)
    grid.add_column(min_width=label_width or None, max_width=most, overflow="fold")
    grid.add_column(overflow="fold")
    return grid


def _table(*columns: str, right: bool = False) -> Table:
    """Columns without lines: what is copied from it can be pasted."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="right" if right and number else "left")
    return table


def _print(console: Console, renderable: RenderableType) -> None:
    console.print(Encodable(renderable))


def _print_copyable(console: Console, line: Text) -> None:
    """Commands and paths are not wrapped: a terminal wraps them itself and still copies them whole."""
    console.print(Encodable(line), soft_wrap=True)
