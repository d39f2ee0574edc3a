"""The charts of a report: each is an SVG and the sentence that says the same in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from controller.core.figures import Lengths, Manifest, NormMap
from controller.core.ledger import Fate
from controller.core.runview import Status
from controller.core.timelines import Gauge, Gauges, Rates, Span
from controller.ui.clean import clean
from controller.ui.formats import bytes_text, count_text, duration_text, plural
from controller.ui.markup import Markup
from controller.ui.svg import INK, drawing, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 10.0
"""Inches of a chart: the width of the page's column."""

# Hues that read on white and on near-black paper alike, and differ for the colour-blind (Okabe and Ito, darkened).
RANKS = ("#2b7bba", "#d9730d", "#1a936f", "#b5489a", "#8a7a12", "#5a6acf", "#c0392b", "#4f9da6")
STATUS = {Status.DONE: "#1a936f", Status.STARTED: "#2b7bba", Status.FAILED: "#d0342c", Status.SKIPPED: "#8b8f98"}
FATES = {
    Fate.WRITTEN: ("#1a936f", "s"),
    Fate.SKIPPED: ("#c99a0c", "o"),
    Fate.FAILED: ("#d0342c", "X"),
    Fate.MISSING: ("#8b8f98", "x"),
}
"""Colour and shape of each fate: nothing is told by colour alone."""

NAN = "#ff2bd6"
"""Of a norm that is not a number; the scale (viridis) has no such hue."""

FEW = 12
"""Points of a line that are marked: one alone draws no line at all."""

TEXT_MOST = 60
"""Characters of a name from a host inside a chart."""


def gantt(spans: Sequence[Span], now: float) -> Markup:
    """Draw each stage as a bar on a line of its own; `now` ends those that had not ended (seconds on their axis)."""
    longest = max(spans, key=lambda span: (span.end if span.end is not None else now) - span.begin)
    last = max(now, *(span.end or span.begin for span in spans))
    with drawing(WIDTH, 0.6 + 0.24 * len(spans)) as figure:
        axes = figure.subplots()
        for place, span in enumerate(spans):
            end = span.end if span.end is not None else now
            hatch = "////" if span.end is None else None
            # A stage of no length is still there to be seen.
            axes.barh(
                place, max(end - span.begin, last / 500), left=span.begin, height=0.66, color=STATUS[span.status],
                hatch=hatch, edgecolor=INK if hatch else "none", linewidth=0.3,
            )  # fmt: skip
            words = duration_text(end - span.begin)
            words += {Status.FAILED: ", failed", Status.STARTED: ", not ended", Status.SKIPPED: ", skipped"}.get(
                span.status, ""
            )
            _bar_label(axes, words, span.begin, end, place, last)
        names = [f"{span.row}: {_short(span.name)}" for span in spans]
        axes.set_yticks(range(len(spans)), names)
        axes.set_ylim(len(spans) - 0.4, -0.6)
        axes.set_xlim(0, last * 1.02 or 1.0)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        _time_axis(axes, last)
        words = (
            f"{plural(len(spans), 'stage')} in {duration_text(last)}; the longest is {clean(longest.name)} with "
            f"{duration_text((longest.end if longest.end is not None else now) - longest.begin)}"
        )
        return Markup(svg(figure, name="gantt", title="Stages by time", description=words))


def _bar_label(axes: Axes, words: str, begin: float, end: float, place: int, last: float) -> None:
    """Write beside a bar where there is room: behind it, else inside it, else before it."""
    if end < 0.82 * last:
        x, offset, side, colour = end, 4, "left", INK
    elif end - begin > 0.18 * last:
        x, offset, side, colour = end, -4, "right", "#ffffff"
    else:
        x, offset, side, colour = begin, -4, "right", INK
    axes.annotate(
        words, (x, place), xytext=(offset, 0), textcoords="offset points", va="center", ha=side, fontsize=8,
        color=colour,
    )  # fmt: skip


def utilisation(gauges: Gauges) -> Markup:
    """Draw the percent of each device, on a scale of 0 to 100."""
    means = [sum(values) / len(values) for gauge in gauges.devices if (values := known(gauge.util))]
    words = (
        f"{plural(len(gauges.devices), 'device')}; mean utilisation {', '.join(f'{mean:.0f} %' for mean in means)}"
    )
    return _device_lines(
        gauges, "util", "Utilisation", words, lambda gauge: gauge.util, 100.0, lambda value: f"{value:g} %"
    )


def memory(gauges: Gauges) -> Markup:
    """Draw the memory used by each device, on a scale from nothing to what the largest has."""
    peaks = [bytes_text(max(values)) for gauge in gauges.devices if (values := known(gauge.memory))]
    words = f"{plural(len(gauges.devices), 'device')}; at most {', '.join(peaks)} in use"
    totals = [gauge.memory_total for gauge in gauges.devices if gauge.memory_total]
    top = max(totals, default=max((value for gauge in gauges.devices for value in known(gauge.memory)), default=1.0))
    return _device_lines(gauges, "memory", "Memory in use", words, lambda gauge: gauge.memory, top, bytes_text)


def _device_lines(
    gauges: Gauges,
    name: str,
    title: str,
    words: str,
    values: Callable[[Gauge], Sequence[float | None]],
    top: float,
    text: Callable[[float], str],
) -> Markup:
    with drawing(WIDTH, 2.2) as figure:
        axes = figure.subplots()
        for place, gauge in enumerate(gauges.devices):
            line = [math.nan if value is None else value for value in values(gauge)]
            style = ("-", "--", "-.", ":")[place // len(RANKS) % 4]
            axes.plot(
                gauges.times, line, color=RANKS[place % len(RANKS)], linestyle=style, label=_short(gauge.name),
                marker="o" if len(line) < FEW else None, markersize=3,
            )  # fmt: skip
        axes.set_ylim(0, top * 1.03)
        axes.set_yticks([0, top / 4, top / 2, 3 * top / 4, top], [text(top * part / 4) for part in range(5)])
        axes.set_xlim(0, max(gauges.times[-1], 1e-9))
        _grid(axes)
        _time_axis(axes, gauges.times[-1])
        _legend(axes)
        return Markup(svg(figure, name=name, title=f"{title} by time", description=words))


def throughput(rates: Rates) -> Markup:
    """Draw tokens a second, of all ranks and of each."""
    peak = max(rates.total)
    mean = sum(rates.total) / len(rates.total)
    words = f"{count_text(mean)} tokens a second on average, {count_text(peak)} at most"
    words += (
        f", by {plural(len(rates.by_rank), 'rank')}" if rates.by_rank else "; the ledgers do not tell ranks apart"
    )
    with drawing(WIDTH, 2.4) as figure:
        axes = figure.subplots()
        edges = [rates.step_s * place for place in range(len(rates.total) + 1)]
        axes.stairs(rates.total, edges, fill=True, color="#8b8f98", alpha=0.28, label="all")
        for rank, values in rates.by_rank.items():
            style = ("-", "--", "-.", ":")[rank // len(RANKS) % 4]
            axes.stairs(
                values, edges, color=RANKS[rank % len(RANKS)], linestyle=style, label=f"rank {rank}", linewidth=1.3
            )
        axes.set_ylim(0, peak * 1.08 or 1.0)
        axes.set_xlim(0, edges[-1])
        axes.yaxis.set_major_formatter(lambda value, _: count_text(value))
        axes.set_ylabel("tokens/s")
        _grid(axes)
        _time_axis(axes, edges[-1])
        _legend(axes)
        return Markup(svg(figure, name="rates", title="Tokens a second by time and rank", description=words))


def norms(figures: NormMap) -> Markup:
    """Draw the norm map: a row a state, a column a bucket of samples, colour on a logarithmic scale."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Patch

    finite = [value for value in figures.finite if value > 0]
    low, high = (min(finite), max(finite)) if finite else (1.0, 1.0)
    if high <= low * 1.01:
        low, high = low / 1.5, high * 1.5  # one value still has a place on the scale
    colours = colormaps["viridis"]
    scale = LogNorm(low, high)
    pixels = [[_colour(value, colours, scale) for value in row] for row in figures.rows]
    per_bucket = "one sample" if len(figures.first) == figures.last + 1 else "consecutive samples"
    words = f"{plural(len(figures.boundaries), 'state')} by {plural(len(figures.first), 'bucket')} of {per_bucket}; "
    words += f"mean norms from {low:.3g} to {high:.3g}; " if finite else "no norm is finite; "
    words += f"{plural(figures.broken, 'cell')} with values that are not finite"
    with drawing(WIDTH, 1.0 + 0.28 * len(figures.boundaries)) as figure:
        axes = figure.subplots()
        axes.imshow(pixels, aspect="auto", interpolation="none", origin="lower")
        axes.set_yticks(range(len(figures.boundaries)), [str(boundary) for boundary in figures.boundaries])
        axes.set_ylabel("boundary")
        ticks = _spread(len(figures.first), 9)
        axes.set_xticks(ticks, [count_text(figures.first[place]) for place in ticks])
        axes.set_xlabel("first sample of the bucket")
        for spine in axes.spines.values():
            spine.set_visible(False)
        from matplotlib.cm import ScalarMappable

        bar = figure.colorbar(ScalarMappable(norm=scale, cmap=colours), ax=axes, pad=0.01, aspect=8)
        bar.outline.set_visible(False)
        bar.set_label("mean L2 norm")
        if high / low < 20:  # too short for two decades: matplotlib would name one tick or none
            bar.set_ticks([low, math.sqrt(low * high), high])
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}" if value < 100 else f"{value:,.0f}")
        bar.ax.yaxis.set_minor_formatter(lambda *_: "")
        keys = [Patch(facecolor=NAN, label="NaN or infinite")] if figures.broken else []
        if keys:
            axes.legend(handles=keys, loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8.5)
        return Markup(svg(figure, name="norms", title="Norms by state and sample", description=words))


def histogram(figures: Lengths) -> Markup:
    """Draw samples by their length, with a line where longer ones were cut."""
    top = len(figures.counts) * figures.width
    near = figures.limit is not None and figures.limit <= 3 * top
    words = f"{plural(figures.samples, 'sample')} of less than {count_text(top)} tokens"
    if figures.limit is not None:
        words += f"; the limit is {count_text(figures.limit)}, {plural(figures.truncated, 'sample')} cut to it"
    with drawing(WIDTH, 2.2) as figure:
        axes = figure.subplots()
        edges = [figures.width * place for place in range(len(figures.counts) + 1)]
        axes.stairs(figures.counts, edges, fill=True, color=RANKS[0])
        axes.set_xlim(0, max(top, figures.limit or 0) * 1.02 if near else top)
        axes.set_ylim(0, max(figures.counts) * 1.15)
        if figures.limit is not None:
            label = f"max_seq_len {count_text(figures.limit)}: {count_text(figures.truncated)} cut"
            if near:
                axes.axvline(figures.limit, color="#d0342c", linestyle="--", linewidth=1.2)
            place = (figures.limit, 1.0) if near else (1.0, 1.0)
            axes.annotate(
                label if near else label + " (to the right of this scale)", place,
                xycoords=("data" if near else "axes fraction", "axes fraction"), xytext=(-5, -3),
                textcoords="offset points", ha="right", va="top", color="#d0342c", fontsize=8.5,
            )  # fmt: skip
        axes.set_xlabel("tokens of a sample")
        axes.set_ylabel("samples")
        axes.xaxis.set_major_formatter(lambda value, _: count_text(value))
        axes.yaxis.set_major_formatter(lambda value, _: count_text(value) if value == int(value) else "")
        _grid(axes)
        return Markup(svg(figure, name="lengths", title="Samples by token length", description=words))


def grid(figures: Manifest, first: int, stride: int) -> Markup:
    """Draw every sample, or group of samples, as a cell. Indexes begin at `first` and go up by `stride`."""
    columns = min(75, len(figures.cells))
    rows = -(-len(figures.cells) // columns)
    words = ", ".join(f"{count_text(count)} {fate}" for fate, count in figures.counts.items())
    if figures.per_cell > 1:
        words += f"; a cell stands for {figures.per_cell:,} samples and shows the worst of them"
    with drawing(WIDTH, 0.75 + 0.132 * rows) as figure:
        axes = figure.subplots()
        for fate, (colour, marker) in FATES.items():
            places = [place for place, cell in enumerate(figures.cells) if cell is fate]
            if places or figures.counts[fate]:
                axes.scatter(
                    [place % columns for place in places], [place // columns for place in places], s=26,
                    c=colour, marker=marker, linewidths=1.1 if marker == "x" else 0,
                    label=f"{fate} {count_text(figures.counts[fate])}",
                )  # fmt: skip
        axes.set_xlim(-0.6, 74.6)
        axes.set_ylim(rows - 0.4, -0.6)
        step = max(1, rows // 8)
        ticks = list(range(0, rows, step))
        axes.set_yticks(ticks, [count_text(first + row * columns * figures.per_cell * stride) for row in ticks])
        axes.set_xticks([])
        axes.set_ylabel("first index" if rows > 3 else "")
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.tick_params(length=0)
        _legend(axes)
        return Markup(svg(figure, name="manifest", title="Every sample and what became of it", description=words))


def _colour(value: float | None, colours: Any, scale: Any) -> tuple[float, float, float, float]:
    from matplotlib.colors import to_rgba

    if value is None:
        return (0.0, 0.0, 0.0, 0.0)
    if not math.isfinite(value):
        return to_rgba(NAN)
    return tuple(colours(scale(max(value, scale.vmin))))


def known(values: Sequence[float | None]) -> list[float]:
    """Return the values that were measured."""
    return [value for value in values if value is not None]


def _spread(count: int, most: int) -> list[int]:
    """Return at most `most` places of `count`, evenly apart, the first among them."""
    step = max(1, -(-count // most))
    return list(range(0, count, step))


def _short(name: str) -> str:
    text = clean(name)
    # A leading underscore would hide a label from matplotlib's legend.
    text = text if len(text) <= TEXT_MOST else text[: TEXT_MOST - 1] + "…"
    return " " + text if text.startswith("_") else text


def _grid(axes: Axes) -> None:
    axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
    axes.set_axisbelow(True)


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=9, fontsize=8.5, handlelength=1.4)


def _time_axis(axes: Axes, last: float) -> None:
    """Label an axis of seconds in the unit that fits its length."""
    unit, size = next(((unit, size) for unit, size in (("h", 3600), ("min", 60)) if last >= 3 * size), ("s", 1))
    axes.xaxis.set_major_locator(_locator(size))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / size:g} {unit}")


def _locator(size: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    class Locator(MaxNLocator):
        """Round numbers of the unit, not of seconds."""

        def tick_values(self, vmin: float, vmax: float) -> Any:
            return [value * size for value in super().tick_values(vmin / size, vmax / size)]

    return Locator(nbins=9, steps=[1, 2, 5, 10])
