"""A narrow terminal: ids, paths and commands stay whole, words stay words, and rows of a chart stay rows."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from controller.core.errors import CtlError
from controller.core.figures import Lengths, NormMap
from controller.core.runview import FindingView
from controller.ui.comparison import print_comparison
from controller.ui.errors import print_error
from controller.ui.pruned import print_prunable
from controller.ui.sample_charts import map_cells, print_sample_charts
from controller.ui.survey import print_groups
from controller.ui.tables import print_config, print_findings, print_hosts, print_intention, print_ps

IDS = [f"2026113{number}-103012-a1b2c{number}" for number in range(4)]

WIDTHS = (40, 60, 80, 120)


def screen(width: int, draw: Callable[[Console], None], *, terminal: bool = True) -> list[str]:
    file = io.StringIO()
    draw(Console(file=file, force_terminal=terminal, color_system=None, width=width, highlight=False))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def ps(console: Console) -> None:
    ends = ("succeeded", "lease-busy", "stopped", None)
    runs = [
        {"run_id": run_id, "name": "eagle3-kimi-k2.5-of-yesterday", "user": "root", "state": "finished",
         "end_reason": end, "step": "extract", "started": "2026-11-30T08:00:00Z"}
        for run_id, end in zip(IDS, ends, strict=True)
    ]  # fmt: skip
    print_ps(console, "gpu1", {"runs": runs}, now=1796000000.0)


def prunable(console: Console) -> None:
    rows = [
        {"run_id": run_id, "name": "eagle3-kimi-k2.5", "ended": "2026-11-30T08:00:00Z", "unfinished": False,
         "end_reason": "succeeded", "state": "finished", "entries": 12_000, "bytes": 3 << 30}
        for run_id in IDS
    ]  # fmt: skip
    print_prunable(console, "gpu1", {"runs": rows, "kept": []})


@pytest.mark.parametrize("draw", [ps, prunable])
@pytest.mark.parametrize("width", WIDTHS)
def test_an_id_is_never_folded(draw: Callable[[Console], None], width: int) -> None:
    lines = screen(width, draw)
    assert max(map(len, lines)) <= width
    assert sorted(re.findall(r"\S+", line)[0] for line in lines if line.startswith("2026")) == IDS


def test_columns_go_in_the_order_of_their_worth() -> None:
    heads = {width: screen(width, ps)[0].split() for width in (120, 62, 50, 40)}
    assert heads[120] == ["RUN", "NAME", "USER", "STATE", "STEP", "AGE"]
    assert heads[62] == ["RUN", "NAME", "STATE", "AGE"]
    assert heads[40] == ["RUN", "STATE"]


def test_one_long_state_widens_no_other_row() -> None:
    on_a_terminal, in_a_pipe = screen(120, ps), screen(8192, ps, terminal=False)
    assert on_a_terminal[0].index("STEP") - on_a_terminal[0].index("STATE") <= 26
    assert len(in_a_pipe) == 1 + len(IDS)
    assert any("refused: another run holds the host" in line for line in in_a_pipe)


def test_an_address_is_whole_or_not_there() -> None:
    host = {"name": "gpu-1", "address": "10.1.230.174", "user": "root", "port": 2222, "gpus": 8,
            "python": "/opt/vllm/bin/python", "workdir": "/root/ctl"}  # fmt: skip
    for width in WIDTHS:
        assert "root@10.1.230.174:2222" in screen(width, lambda console: print_hosts(console, [host]))[1]


LONG = "/a/very/long/folder/of/somebody/elses/project/on/a/network/drive/that/is/wider/than/any/terminal/hosts.toml"
"""No word of it can be broken."""


def config(console: Console) -> None:
    files = [{"path": LONG, "layer": "project", "found": True, "included_by": None}]
    value = {"value": LONG, "origin": f"{LONG}:12 (project)"}
    print_config(console, {"files": files, "values": {"hosts.gpu1.env.VLLM_CACHE_ROOT": value}})


def test_a_value_and_its_origin_are_whole_on_any_terminal() -> None:
    for width in WIDTHS:
        assert screen(width, config) == [
            f"project {LONG}", f"hosts.gpu1.env.VLLM_CACHE_ROOT  {LONG}", f"    {LONG}:12 (project)",
        ]  # fmt: skip
    (_, row) = screen(400, config)
    assert row.split() == ["hosts.gpu1.env.VLLM_CACHE_ROOT", LONG, f"{LONG}:12", "(project)"]


def findings(console: Console) -> None:
    print_findings(console, LONG, [FindingView(level="warn", code="x", what=f"at {LONG}", why=LONG, fix=LONG)])


def comparison(console: Console) -> None:
    change = {"key": f"plan.{LONG}", "before": f"{LONG}a", "after": f"{LONG}b"}
    changes = {"plan": [change], "versions": [], "outcome": [], "figures": []}
    print_comparison(console, {"runs": IDS[:2], "ended": [True, True], "same": False, "changes": changes})


def groups(console: Console) -> None:
    tensor = {"name": f"{LONG}.weight", "dtype": "bfloat16", "shape": [4, 8], "count": 1}
    print_groups(console, {"groups": [{"files": 3, "example": f"{LONG}.pt", "tensors": [tensor]}]})


def intention(console: Console) -> None:
    print_intention(console, [{"title": "Run", "rows": [["output", LONG], [LONG, "1"]]}])


def hosts(console: Console) -> None:
    host = {"name": "g", "address": "a", "user": "", "port": 0, "gpus": 8, "python": LONG, "workdir": LONG}
    print_hosts(console, [host])


@pytest.mark.parametrize("draw", [config, findings, comparison, groups, intention, hosts])
@pytest.mark.parametrize("width", WIDTHS)
def test_no_word_is_cut_however_long_it_is(draw: Callable[[Console], None], width: int) -> None:
    shown = "".join(screen(width, draw))
    assert "…" not in shown
    assert "..." not in shown


def test_a_plan_leaves_its_values_more_room_than_its_labels() -> None:
    sections = [{"title": "Run", "rows": [["id", IDS[0]], ["entries that would be moved", "12"]]}]
    assert any(IDS[0] in line for line in screen(40, lambda console: print_intention(console, sections)))


ADVICE = f"name the run: `ctl stop {IDS[0]} --grace 9`; or say `ctl stop --last`, which is as good"


def error(fix: str) -> Callable[[Console], None]:
    refused = CtlError("the folder holds files of an earlier run, and nobody is there to confirm",
                       why="/data/out/kimi on gpu1: 71 entries, and nobody is there", fix=fix)  # fmt: skip
    finding = FindingView(level="fail", code="disk", what="too little room", why="12 GiB", fix=fix)

    def draw(console: Console) -> None:
        print_error(refused, console)
        print_findings(console, "gpu1", [finding])

    return draw


def test_words_are_not_broken_and_commands_are_not_cut() -> None:
    lines = screen(40, error(ADVICE))
    for command in (f"`ctl stop {IDS[0]} --grace 9`;", "`ctl stop --last`,"):
        assert sum(command in line for line in lines) == 2, "in one piece, in the error and in the finding"
    longer = [line for line in lines if len(line) > 40]
    assert all("`" in line for line in longer), "only what is copied may be longer than the terminal"
    said = " ".join(" ".join(lines).split())
    assert ADVICE in said
    assert "/data/out/kimi on gpu1: 71 entries, and nobody is there" in said


def test_a_bare_command_is_left_alone_and_so_is_a_pipe() -> None:
    bare = "rm -rf /dev/shm/psm_one /dev/shm/psm_two /dev/shm/psm_three"
    assert sum(bare in line for line in screen(40, error(bare))) == 2
    assert sum(ADVICE in line for line in screen(40, error(ADVICE), terminal=False)) == 2


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_of_a_chart_is_one_line(width: int) -> None:
    cells = map_cells(width)
    norms = NormMap(
        boundaries=(2, 30, 58), first=tuple(range(cells)), last=9_999,
        rows=tuple(tuple(1.234e-3 * 10**number for _ in range(cells)) for number in (0, 2, 4)),
    )  # fmt: skip
    lengths = Lengths(width=10_000, counts=(1_200_000, 30, 0, 7), limit=2048, truncated=12)
    lines = screen(width, lambda console: print_sample_charts(console, norms, lengths))
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines if re.match(r" +(58|30|2) ", line)] == ["58", "30", "2"]
    assert [line.split()[0] for line in lines if re.match(r" *[\d,]+-[\d,]+( |$)", line)] == [
        "0-9,999", "10,000-19,999", "20,000-29,999", "30,000-39,999"
    ]  # fmt: skip
    assert any("max_seq_len 2,048" in line for line in lines)
    known = "0.00123 to 0.00123" in " ".join(lines)
    assert known is (width > 40), "a narrow terminal has the map alone"


def test_a_chart_of_lengths_has_no_row_for_what_no_sample_has() -> None:
    def rows(width: int, *counts: int) -> list[str]:
        figures = Lengths(width=width, counts=counts, limit=None, truncated=0)
        lines = screen(80, lambda console: print_sample_charts(console, None, figures))
        return [re.sub(r"[━─]+", "", line).strip() for line in lines if re.match(r" *[\d,]+", line)]

    assert [row.split() for row in rows(1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12)] == [["9", "12"]]
    assert [row.split() for row in rows(1, 3, 0, 0, 5)] == [["0", "3"], ["1-2"], ["3", "5"]]
    assert [row.split() for row in rows(10, 3, 0, 0, 5, 2)] == [
        ["0-9", "3"], ["10-29"], ["30-39", "5"], ["40-49", "2"],
    ]  # fmt: skip
