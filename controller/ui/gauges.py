"""Rows that show how busy a host is: one per GPU, or one for the CPU. They shrink before anything else does."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from controller.core.runview import GpuView, SampleView
from controller.ui.charts import bar, sparkline
from controller.ui.formats import UNKNOWN, memory_text, number_text, plural
from controller.ui.glyphs import UNICODE, Glyphs

HOT_C = 85.0
"""Data-centre GPUs throttle from here on."""


def gpu_lines(
    samples: Sequence[SampleView], width: int, room: int, label: int, glyphs: Glyphs = UNICODE
) -> list[Text]:
    """Return at most max(1, `room`) lines: a row per GPU, else a grid, else one for all; without GPUs a CPU row."""
    if not samples:
        return []
    latest = samples[-1]
    if not latest.gpus:
        return [_cpu(samples, width, label, glyphs)]
    if len(latest.gpus) <= room:
        return [_row(samples, gpu, width, label, glyphs) for gpu in latest.gpus]
    grid = _grid(latest.gpus, width, label)
    return grid if len(grid) <= room else [_total(latest.gpus, label)]


def _row(samples: Sequence[SampleView], gpu: GpuView, width: int, label: int, glyphs: Glyphs) -> Text:
    history = [_util(sample, gpu.index) for sample in samples]
    memory = memory_text(gpu.memory_used, gpu.memory_total).rjust(15)
    hot = gpu.temperature_c is not None and gpu.temperature_c >= HOT_C
    end = Text.assemble(
        memory,
        number_text(gpu.power_w, "W").rjust(7),
        (number_text(gpu.temperature_c, glyphs.degree).rjust(7), "yellow" if hot else ""),
    )
    return _gauge(f"gpu {gpu.index}", history, gpu.util, _share(gpu), end, width, label, glyphs)


def _cpu(samples: Sequence[SampleView], width: int, label: int, glyphs: Glyphs) -> Text:
    latest = samples[-1]
    share = latest.memory_used / latest.memory_total if latest.memory_used and latest.memory_total else None
    end = Text(memory_text(latest.memory_used, latest.memory_total).rjust(15))
    history = [sample.cpu_percent for sample in samples]
    return _gauge("cpu", history, latest.cpu_percent, share, end, width, label, glyphs)


def _gauge(
    name: str,
    history: Sequence[float | None],
    util: float | None,
    share: float | None,
    end: Text,
    width: int,
    label: int,
    glyphs: Glyphs,
) -> Text:
    """Name, history, use now, memory bar, and the figures at the end."""
    space = width - label - 6 - 2 - end.cell_len - 2
    cells = min(40, max(6, space * 3 // 5))
    bar_cells = min(24, max(0, space - cells))
    plain = glyphs is not UNICODE
    filled, rest = bar(share, bar_cells, ascii_only=plain)
    return Text.assemble(
        (f" {name}".ljust(label), "dim"),
        (sparkline(history, cells, ascii_only=plain), _mean_style(history[-cells:])),
        f"{number_text(util, '%'):>6}  ",
        (filled, "blue"),
        (rest, "bright_black"),
        " ",
        end,
    )


def _grid(gpus: Sequence[GpuView], width: int, label: int) -> list[Text]:
    cells = [
        f"{gpu.index:>2} {number_text(gpu.util, '%'):>5} {memory_text(gpu.memory_used, gpu.memory_total):>15}"
        for gpu in gpus
    ]
    columns = max(1, (width - label) // 27)
    rows = -(-len(cells) // columns)
    lines = []
    for row in range(rows):
        head = Text((" gpu" if row == 0 else "").ljust(label), style="dim")
        lines.append(head.append("   ".join(cells[row::rows]), style="default"))
    return lines


def _total(gpus: Sequence[GpuView], label: int) -> Text:
    utils = [gpu.util for gpu in gpus if gpu.util is not None]
    used = [gpu.memory_used for gpu in gpus if gpu.memory_used is not None]
    total = [gpu.memory_total for gpu in gpus if gpu.memory_total is not None]
    util = f"{sum(utils) / len(utils):.0f} % ({min(utils):.0f} to {max(utils):.0f})" if utils else UNKNOWN
    memory = memory_text(sum(used) if used else None, sum(total) if total else None)
    return Text.assemble((" gpu".ljust(label), "dim"), f"{plural(len(gpus), 'GPU')}  {util}  {memory}")


def _util(sample: SampleView, index: int) -> float | None:
    return next((gpu.util for gpu in sample.gpus if gpu.index == index), None)


def _share(gpu: GpuView) -> float | None:
    return gpu.memory_used / gpu.memory_total if gpu.memory_used and gpu.memory_total else None


def _mean_style(history: Sequence[float | None]) -> str:
    """Height shows each value, colour their mean: idle is dim, busy is green."""
    known = [value for value in history if value is not None]
    mean = sum(known) / len(known) if known else 0.0
    if mean >= 60:
        return "green"
    return "cyan" if mean >= 10 else "dim"
