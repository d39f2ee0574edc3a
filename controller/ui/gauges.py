"""Rows that show how busy a host is: one per GPU, or one for the CPU. They shrink before anything else does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from controller.core.runview import GpuView, SampleView
from controller.ui.board import Snapshot
from controller.ui.charts import bar, sparkline
from controller.ui.formats import UNKNOWN, age_text, memory_text, number_text, plural
from controller.ui.glyphs import UNICODE, Glyphs
from controller.ui.layout import LABEL

HOT_C = 85.0
"""Data-centre GPUs throttle from here on."""

SILENT_S = 60.0
"""A rank that captures shows a sign of life more often than this."""

NAME = 7
RANK = 5
UTIL = 6
POWER = 7
TEMPERATURE = 7
AGE = 8
"""Cells of the columns; a value that is not known takes its column too."""

NARROW = 90
"""Columns below which figures stand close together, to leave something for the histories."""

SPARK_MAX = 60


def gpu_lines(shot: Snapshot, width: int, room: int, glyphs: Glyphs = UNICODE, *, titles: bool = False) -> list[Text]:
    """Return at most max(1, `room`) lines: a row per GPU, else a grid, else one for all; without GPUs a CPU row.

    `titles` puts the names of the columns above the rows, where there is room for them.
    """
    samples = shot.view.samples
    if not samples:
        return []
    latest = samples[-1]
    if not latest.gpus:
        return [_cpu(samples, width, glyphs)]
    if len(latest.gpus) <= room:
        columns = _columns(latest.gpus, width, ranks=bool(shot.ranks))
        rows = [_row(shot, gpu, columns, glyphs) for gpu in latest.gpus]
        if titles and width >= NARROW and len(rows) < room:
            rows.insert(0, _titles(columns))
        return rows
    grid = _grid(latest.gpus, width)
    return grid if len(grid) <= room else [_total(latest.gpus)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """How many cells each column has; the figures come first, and the two histories share what is left."""

    rank: int
    use: int
    filled: int
    memory: int
    power: int
    temperature: int
    age: int


def _columns(gpus: Sequence[GpuView], width: int, *, ranks: bool) -> _Columns:
    close = 0 if width >= NARROW else 1
    memory = max(len(memory_text(gpu.memory_used, gpu.memory_total)) for gpu in gpus) + 2 - close
    rank, age = (RANK - 2 * close, AGE - 3 * close) if ranks else (0, 0)
    power, temperature = POWER - close, TEMPERATURE - close
    space = width - NAME - rank - UTIL - 2 - memory - power - temperature - age - 1
    use = min(SPARK_MAX, max(3, space * 3 // 5))
    return _Columns(
        rank=rank, use=use, filled=min(SPARK_MAX, max(0, space - use)), memory=memory, power=power,
        temperature=temperature, age=age,
    )  # fmt: skip


def _titles(columns: _Columns) -> Text:
    line = " gpu".ljust(NAME) + "rank"[: columns.rank].ljust(columns.rank)
    line += "use, 0 to 100 %".ljust(columns.use + UTIL + 2)[: columns.use + UTIL + 2]
    line += "memory, 0 to all".ljust(columns.filled + columns.memory)[: columns.filled + columns.memory]
    line += "power".rjust(columns.power) + "temp".rjust(columns.temperature)
    return Text(line + ("silent".rjust(columns.age) if columns.age else ""), style="dim")


def _row(shot: Snapshot, gpu: GpuView, columns: _Columns, glyphs: Glyphs) -> Text:
    plain = glyphs is not UNICODE
    use, filled = _histories(shot.view.samples, gpu.index)
    hot = gpu.temperature_c is not None and gpu.temperature_c >= HOT_C
    rank = shot.ranks.get(gpu.index)
    silent = shot.silent.get(rank) if rank is not None else None
    capturing = shot.view.phase is not None and shot.view.phase.name == "capture"
    late = capturing and silent is not None and silent >= SILENT_S
    return Text.assemble(
        (f" gpu {gpu.index}".ljust(NAME), "dim"),
        ((f"r{rank}" if rank is not None else UNKNOWN).ljust(columns.rank)[: columns.rank], "dim"),
        (sparkline(use, columns.use, ascii_only=plain), _mean_style(use[-columns.use :])),
        (number_text(gpu.util, "%").rjust(UTIL) + "  ", ""),
        (sparkline(filled, columns.filled, ascii_only=plain), "blue"),
        (memory_text(gpu.memory_used, gpu.memory_total).rjust(columns.memory), ""),
        (number_text(gpu.power_w, "W").rjust(columns.power), ""),
        (number_text(gpu.temperature_c, glyphs.degree).rjust(columns.temperature), "yellow" if hot else ""),
        (age_text(silent).rjust(columns.age) if columns.age else "", "yellow" if late else "dim"),
    )


def _histories(samples: Sequence[SampleView], index: int) -> tuple[list[float | None], list[float | None]]:
    """Return the use and the share of memory in use of one GPU, both in percent, a value for each sample."""
    use: list[float | None] = []
    filled: list[float | None] = []
    for sample in samples[-SPARK_MAX:]:
        gpu = next((each for each in sample.gpus if each.index == index), None)
        use.append(gpu.util if gpu else None)
        filled.append(_percent(gpu.memory_used, gpu.memory_total) if gpu else None)
    return use, filled


def _percent(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else 100 * part / whole


def _cpu(samples: Sequence[SampleView], width: int, glyphs: Glyphs) -> Text:
    latest = samples[-1]
    share = latest.memory_used / latest.memory_total if latest.memory_used and latest.memory_total else None
    end = memory_text(latest.memory_used, latest.memory_total).rjust(15)
    history = [sample.cpu_percent for sample in samples]
    space = width - LABEL - UTIL - 2 - len(end) - 2
    cells = min(SPARK_MAX, max(6, space * 3 // 5))
    plain = glyphs is not UNICODE
    filled, rest = bar(share, min(24, max(0, space - cells)), ascii_only=plain)
    return Text.assemble(
        (" cpu".ljust(LABEL), "dim"),
        (sparkline(history, cells, ascii_only=plain), _mean_style(history[-cells:])),
        f"{number_text(latest.cpu_percent, '%'):>{UTIL}}  ",
        (filled, "blue"),
        (rest, "bright_black"),
        " ",
        end,
    )


def _grid(gpus: Sequence[GpuView], width: int) -> list[Text]:
    cells = [
        f"{gpu.index:>2} {number_text(gpu.util, '%'):>5} {memory_text(gpu.memory_used, gpu.memory_total):>15}"
        for gpu in gpus
    ]
    columns = max(1, (width - LABEL) // 27)
    rows = -(-len(cells) // columns)
    lines = []
    for row in range(rows):
        head = Text((" gpu" if row == 0 else "").ljust(LABEL), style="dim")
        lines.append(head.append("   ".join(cells[row::rows]), style="default"))
    return lines


def _total(gpus: Sequence[GpuView]) -> Text:
    return Text.assemble((" gpu".ljust(LABEL), "dim"), total_text(gpus))


def total_text(gpus: Sequence[GpuView]) -> str:
    """Return all GPUs of a host in a few words: how many, mean use with its ends, memory."""
    utils = [gpu.util for gpu in gpus if gpu.util is not None]
    used = [gpu.memory_used for gpu in gpus if gpu.memory_used is not None]
    total = [gpu.memory_total for gpu in gpus if gpu.memory_total is not None]
    util = f"{sum(utils) / len(utils):.0f} % ({min(utils):.0f} to {max(utils):.0f})" if utils else UNKNOWN
    memory = memory_text(sum(used) if used else None, sum(total) if total else None)
    return f"{plural(len(gpus), 'GPU')}  {util}  {memory}"


def mean_util(gpus: Sequence[GpuView]) -> float | None:
    """Return the mean use of those that tell theirs, in percent."""
    known = [gpu.util for gpu in gpus if gpu.util is not None]
    return sum(known) / len(known) if known else None


def _mean_style(history: Sequence[float | None]) -> str:
    """Height shows each value, colour their mean: idle is dim, busy is green."""
    known = [value for value in history if value is not None]
    mean = sum(known) / len(known) if known else 0.0
    if mean >= 60:
        return "green"
    return "cyan" if mean >= 10 else "dim"
