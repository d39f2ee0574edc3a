"""Answers that are read once, on consoles that can and cannot write signs."""

from __future__ import annotations

import io

from rich.console import Console
from support.printed import SUMMARY, Paper
from support.recorded import RUN

from controller.commands import chosen_rows
from controller.core.errors import HostKeyError, RefusedError
from controller.core.runview import FindingView
from controller.topics import TOPICS
from controller.ui.comparison import TITLES, print_comparison
from controller.ui.errors import print_error, print_problems
from controller.ui.output import print_folder, print_swept
from controller.ui.stopped import print_stop
from controller.ui.survey import print_groups
from controller.ui.tables import (
    print_clear_list,
    print_config,
    print_findings,
    print_hosts,
    print_intention,
    print_ps,
    print_summary,
)
from controller.ui.wrapping import wrapped_page

EVIL = "\x1b[2J[red]x[/red]\x07"


FINDINGS = [
    FindingView(level="ok", code="gpus-free", what="8 GPUs are free", why="not shown", fix="not shown"),
    FindingView(
        level="warn", code="shm", what="/dev/shm holds 14.0 GiB", why="two segments", fix="rm /dev/shm/psm_*"
    ),
    FindingView(level="fail", code="disk", what="too little room", why="12 GiB free", fix="choose another path " * 9),
]


def test_each_check_that_refuses_is_an_error_of_its_own() -> None:
    paper = Paper()
    findings = [
        {"level": level, "code": f"c{number}", "what": f"w{number}", "why": "", "fix": f"f{number}"}
        for number, level in enumerate(("fail", "warn", "fail"))
    ]
    print_error(RefusedError("preflight refused (and 1 more): w0", data={"findings": findings}), paper.console)
    assert [line for line in paper.lines if line] == [
        "✗ preflight refused: 2 checks failed, nothing was launched",
        "✗ w0", "  hint: f0", "  code: c0", "✗ w2", "  hint: f2", "  code: c2",
    ]  # fmt: skip


def test_findings_explain_only_what_is_not_right() -> None:
    paper = Paper()
    print_findings(paper.console, "gpu-host-1", FINDINGS)
    assert paper.lines == [
        "host gpu-host-1",
        "  ✓ 8 GPUs are free",
        "  ! /dev/shm holds 14.0 GiB",
        "    two segments",
        "    fix: rm /dev/shm/psm_*",
        "  ✗ too little room",
        "    12 GiB free",
        "    fix: " + ("choose another path " * 9).rstrip(),  # a fix is never wrapped: it is copied
        "  1 ok, 1 warning, 1 failure",
    ]


def test_without_unicode_signs_are_plain() -> None:
    paper = Paper("ascii")
    print_findings(paper.console, "naïve", FINDINGS)
    print_summary(paper.console, SUMMARY)
    assert "  + 8 GPUs are free" in paper.lines
    assert "  x too little room" in paper.lines
    assert "host na?ve" in paper.lines


def test_an_intention_is_titled_rows() -> None:
    paper = Paper()
    sections = [
        {"title": "Run", "rows": [["id", RUN], ["host", "gpu-host-1"]]},
        {"title": "Steps", "rows": [["extract", "python -m remote_payload.extract.engine"], ["both", ["a", "b"]]]},
    ]
    print_intention(paper.console, {"sections": sections})
    assert paper.lines == [
        "Run",
        f"  id       {RUN}",
        "  host     gpu-host-1",
        "",
        "Steps",
        "  extract  python -m remote_payload.extract.engine",
        "  both     a",
        "           b",
    ]


def test_a_clear_list_says_what_will_happen_to_how_much() -> None:
    paper = Paper()
    output = {"path": "/data/out", "stale": "clear", "entries": 412, "bytes": 17 * 2**30, "adopt": True}
    examples = [{"path": f"hs_{i}.safetensors", "size": 40 * 2**20} for i in range(50)]
    marker = {"run_id": RUN, "owner": "alice"}
    print_clear_list(paper.console, "gpu1", [output], {"/data/out": {"examples": examples, "marker": marker}})
    assert paper.lines[:3] == [
        "/data/out",
        "  412 entries, 17.0 GiB, on host gpu1: will be deleted",
        f"  written by run {RUN} of alice",
    ]
    assert "no marker says that these files are ours" in paper.text
    assert "40.0 MiB  hs_0.safetensors" in paper.text
    assert paper.lines[-1].endswith("and 402 more")
    moved = Paper()
    print_clear_list(moved.console, "gpu1", [{**output, "stale": "quarantine", "entries": 1, "adopt": False}])
    assert moved.lines == ["/data/out", "  1 entry, 17.0 GiB, on host gpu1: will be moved aside"]


STRANGERS = {"entries": 3, "bytes": 9, "names": ["notes.txt", "plots/"]}


def test_what_is_not_ctls_is_told_apart() -> None:
    output = {"path": "/data/out", "stale": "clear", "entries": 1, "bytes": 10, "adopt": False}
    listing = {
        "exists": True, "entries": 1, "digest": "d", "not_ours": STRANGERS,
        "examples": [{"path": "hs_0.safetensors", "size": 10}], "marker": {"run_id": RUN, "owner": "alice"},
    }  # fmt: skip
    for stale, fate in (("clear", "left alone"), ("fail", "left alone"), ("quarantine", "moved with it")):
        paper = Paper()
        print_clear_list(paper.console, "gpu1", [{**output, "stale": stale}], {"/data/out": listing})
        assert paper.lines[-2:] == [
            "          10 B  hs_0.safetensors", f"  {fate}: 3 entries that are not ctl's: notes.txt, plots/",
        ]  # fmt: skip
    paper = Paper()
    print_folder(paper.console, "gpu1", output, {**listing, "entries": 0, "examples": []})
    assert paper.lines == [
        "/data/out holds nothing of ctl's on gpu1", "  left alone: 3 entries that are not ctl's: notes.txt, plots/",
    ]  # fmt: skip
    paper = Paper()
    print_swept(
        paper.console, {"path": "/data/out", "deleted_entries": 1, "deleted_bytes": 10, "not_ours": STRANGERS}
    )
    assert paper.lines == [
        "✓ /data/out: 1 entry, 10 B deleted; left alone: 3 entries that are not ctl's: notes.txt, plots/"
    ]


def test_a_paused_run_is_listed_as_one() -> None:
    paper = Paper()
    running = {"run_id": RUN, "name": "new", "state": "running", "end_reason": None}
    print_ps(paper.console, "gpu-host-1", {"runs": [{**running, "paused": "disk-low"}]})
    assert "paused: the disk is full" in paper.text
    of_old = Paper()  # a host whose payload says nothing of it
    print_ps(of_old.console, "gpu-host-1", {"runs": [running]})
    assert "running" in of_old.text


def test_ps_lists_the_newest_first() -> None:
    paper = Paper()
    runs = [
        {
            "run_id": "20261128-184150-a1b2c3",
            "name": "old",
            "user": "me",
            "state": "finished",
            "end_reason": "job-failed",
        },
        {
            "run_id": RUN,
            "name": "new",
            "user": "me",
            "state": "running",
            "step": "extract",
            "started": "2026-11-29T18:00:00Z",
        },
    ]
    leases = [
        {
            "resource": "host",
            "run_id": RUN,
            "user": "me",
            "state": "held",
            "since": "2026-11-29T18:00:00Z",
            "process": {"pid": 77},
            "alive": "alive",
            "heartbeat_age_s": 0.5,
        }
    ]
    print_ps(paper.console, "gpu-host-1", {"runs": runs, "leases": leases}, now=1796000000.0)
    assert [line.split()[0] for line in paper.lines[:4]] == ["RUN", RUN, "20261128-184150-a1b2c3", "lease"]
    assert "failed" in paper.lines[2]
    told = " ".join(paper.lines[3:])
    assert f"host: held by run {RUN} of me, since 2026-11-29T18:00:00Z" in " ".join(told.split())
    assert "process 77 (alive), heard from 0.5 s ago" in " ".join(told.split())
    empty = Paper()
    print_ps(empty.console, "gpu-host-1", {"runs": []})
    assert empty.lines == ["no runs on gpu-host-1"]


def test_ps_shows_the_newest_of_those_that_are_wanted() -> None:
    states = {"20260101-000000-00000a": "running", "20260102-000000-00000b": "finished",
              "20260103-000000-00000c": "lost", "20260104-000000-00000d": "orphaned"}  # fmt: skip
    rows = [{"run_id": run_id, "state": state} for run_id, state in states.items()]

    def ends(limit: int | None, *, running: bool) -> str:
        return "".join(row["run_id"][-1] for row in chosen_rows(rows, limit=limit, running=running))

    assert (ends(None, running=False), ends(2, running=False)) == ("dcba", "dc")
    assert (ends(None, running=True), ends(1, running=True)) == ("da", "d")


def test_hosts_and_origins() -> None:
    paper = Paper()
    host = {
        "name": "gpu-1",
        "address": "10.1.230.174",
        "user": "root",
        "port": 2222,
        "gpus": 8,
        "python": "py",
        "workdir": "/w",
    }
    print_hosts(paper.console, [host])
    assert paper.lines[1].split() == ["gpu-1", "root@10.1.230.174:2222", "8", "py", "/w"]
    print_hosts(paper.console, [])
    assert "no hosts: describe one with `ctl init` or `ctl hosts add`" in paper.lines


def test_each_configured_value_is_shown_with_its_origin() -> None:
    paper = Paper()
    files = [
        {"path": "/w/hosts.toml", "layer": "project", "found": True, "included_by": None},
        {"path": "/h/hosts.toml", "layer": "user", "found": False, "included_by": None},
    ]
    print_config(
        paper.console, {"files": files, "values": {"hosts.gpu-1.gpus": {"value": 8, "origin": "hosts.toml:4"}}}
    )
    assert paper.lines[0].split() == ["project", "/w/hosts.toml"]
    assert paper.lines[1].split() == ["user", "/h/hosts.toml", "(not", "there)"]
    assert paper.lines[2].split() == ["hosts.gpu-1.gpus", "8", "hosts.toml:4"]


def test_of_a_configured_value_nothing_is_cut_however_narrow_the_terminal_is() -> None:
    """The origin, its file and line, is what the verb is for."""
    path = "/home/somebody/projects/extraction/configuration/hosts.toml"
    values = {
        "hosts.demo.env.VLLM_CACHE_ROOT": {"value": f"{path}/vllm-cache", "origin": f"{path}:12 (project)"},
        "hosts.demo.gpus": {"value": 8, "origin": "built-in default"},
    }
    for width in (40, 80, 120):
        raw = io.StringIO()
        console = Console(file=raw, width=width, highlight=False, force_terminal=True, color_system=None)
        print_config(console, {"files": [{"layer": "project", "path": path, "found": True}], "values": values})
        lines = [line.rstrip() for line in raw.getvalue().splitlines()]
        assert lines == [
            f"project {path}", f"hosts.demo.env.VLLM_CACHE_ROOT  {path}/vllm-cache", f"    {path}:12 (project)",
            "hosts.demo.gpus  8", "    built-in default",
        ]  # fmt: skip


def test_no_table_cuts_a_value() -> None:
    long = "x" * 50 + "END"
    survey = {"groups": [{"files": 2, "example": long, "tensors": [{"name": long, "count": 1, "dtype": "a"}]}]}
    changes = [{"key": long, "before": long, "after": long}]
    paper = Paper()
    print_groups(paper.console, survey)
    assert "".join(paper.text.split()).count("END") == 2
    paper = Paper()
    sections = {title: changes if title == "plan" else [] for title in TITLES}
    print_comparison(paper.console, {"runs": [RUN, RUN], "ended": [True, True], "same": False, "changes": sections})
    assert "…" not in paper.text


def test_a_page_of_help_is_broken_between_words_on_any_terminal() -> None:
    for topic, page in TOPICS.items():
        for width in (50, 60, 80, 100, 130):
            console = Console(file=io.StringIO(), width=width, force_terminal=True)
            shown = wrapped_page(page, console)
            assert shown.split() == page.split(), topic
            if width >= 80:
                assert max(map(len, shown.splitlines())) <= width, topic
            for line in shown.splitlines():
                left = line.strip()  # what is about to be copied, or cannot be broken
                assert len(line) <= width or left.startswith("ctl ") or "  " not in left, (topic, line)
        assert wrapped_page(page, Console(file=io.StringIO(), width=60)) == page, "a file is not wrapped"


def test_hostile_text_is_harmless_in_every_answer() -> None:
    paper = Paper()
    console = paper.console
    evil = FindingView(level="fail", code=EVIL, what=EVIL, why=EVIL, fix=EVIL)
    print_findings(console, EVIL, [evil])
    print_intention(console, [{"title": EVIL, "rows": [[EVIL, EVIL], [EVIL, [EVIL]]]}])
    output = {"path": EVIL, "stale": EVIL, "entries": 1, "bytes": 1}
    print_clear_list(console, EVIL, [output], {EVIL: {"examples": [{"path": EVIL, "size": 1}]}})
    print_summary(
        console, {**SUMMARY, "run_id": EVIL, "hosts": [EVIL], "model": EVIL, "end_reason": EVIL, "format": EVIL}
    )
    print_ps(
        console,
        EVIL,
        {"runs": [dict.fromkeys(("run_id", "name", "user", "state", "step"), EVIL)], "leases": [{EVIL: EVIL}]},
    )
    print_hosts(console, [dict.fromkeys(("name", "address", "user", "python", "workdir"), EVIL)])
    print_stop(console, {"run_id": EVIL, "state": EVIL, "leftovers": [EVIL], "message": EVIL, "gpus_clean": True})
    print_error(HostKeyError(EVIL, why=EVIL, fix=EVIL, code=EVIL), console)
    print_problems([{"what": f"{EVIL}: {EVIL}", "traceback": EVIL, "ranks": [0]}], EVIL, console)
    assert not set(paper.text) & set("\x1b\x07")
    assert paper.text.count("[red]x[/red]") > 25
