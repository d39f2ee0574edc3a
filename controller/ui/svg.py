"""matplotlib figures as inline SVG for a page of our own: themed, scriptless, with words for who cannot see them.

Colours of text and axes become `currentColor`, so that one file is right on light and on dark paper.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from controller.core.errors import UsageError
from controller.ui.markup import escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#010203"
"""Stands for the page's text colour while matplotlib draws: no palette holds it."""

STYLE = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": False,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "text.parse_math": False,  # a name may hold a dollar
    "svg.fonttype": "none",  # text stays text: it is read out, searched and copied
    "svg.image_inline": True,
    "svg.hashsalt": "ctl",  # the same run gives the same file
}

_PROLOGUE = re.compile(r"\A.*?(?=<svg)", re.DOTALL)
_DROPPED = re.compile(r"<metadata>.*?</metadata>|<style [^>]*>.*?</style>|<!--.*?-->", re.DOTALL)
_IDS = re.compile(r'( id="|xlink:href="#|url\(#)')
_NUMBERS = re.compile(r"(\d+\.\d\d)\d+")


def require_matplotlib() -> None:
    """Raise UsageError where matplotlib, an optional extra, is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "the report's charts need matplotlib, which is not installed here",
            why=str(error),
            fix="python -m pip install 'ctl-hidden-states[report]'",
            code="no-matplotlib",
        ) from error


@contextmanager
def drawing(width: float, height: float) -> Iterator[Figure]:
    """Yield a figure of `width` by `height` inches (72 points each), in the page's style, whatever is configured."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield Figure(figsize=(width, height), layout="constrained")


def svg(figure: Figure, *, name: str, title: str, description: str) -> str:
    """Return a figure as an `<svg role="img">` element with a title and a description; inside `drawing`.

    `name` keeps its ids apart from those of the other figures of a page.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = _DROPPED.sub("", _PROLOGUE.sub("", buffer.getvalue()))
    # A hundredth of a point is finer than any screen; the rest is a third of the file.
    text = _NUMBERS.sub(r"\1", text).replace(INK, "currentColor")
    text = _IDS.sub(rf"\g<1>{name}-", text)
    head, _, body = text.partition(">")
    size = re.search(r'viewBox="[^"]*"', head)
    label = f'aria-labelledby="{name}-title {name}-desc"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" {label} '
        f'{size.group() if size else ""}>\n<title id="{name}-title">{escape(title)}</title>\n'
        f'<desc id="{name}-desc">{escape(description)}</desc>{body}'
    )
