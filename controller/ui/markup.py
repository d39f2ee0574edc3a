"""HTML from remote text: the one place through which a string of a host passes into a page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from controller.ui.clean import clean, clean_block


class Markup(str):
    """HTML of our own making; everything else is text and will be escaped."""

    __slots__ = ()


def escape(value: object) -> Markup:
    """Return text for one line of HTML, also inside an attribute: no control sequence, no markup of its own."""
    return value if isinstance(value, Markup) else Markup(html.escape(clean(value), quote=True))


def block(value: object) -> Markup:
    """Return text of several lines as `<pre>`."""
    return Markup(f"<pre>{html.escape(clean_block(value), quote=True)}</pre>")


def tag(name: str, content: object, css: str = "") -> Markup:
    """Return an element; `content` is escaped unless it is Markup."""
    classes = f' class="{escape(css)}"' if css else ""
    return Markup(f"<{name}{classes}>{escape(content)}</{name}>")


def join(parts: Iterable[object], separator: str = "") -> Markup:
    return Markup(separator.join(escape(part) for part in parts))


def facts(rows: Iterable[tuple[object, object]]) -> Markup:
    """Return labels and values as a table of two columns."""
    lines = (f'<tr><th scope="row">{escape(label)}</th><td>{escape(value)}</td></tr>' for label, value in rows)
    return Markup(f'<table class="facts"><tbody>{"".join(lines)}</tbody></table>')


def table(columns: Sequence[object], rows: Iterable[Sequence[object]], css: str = "") -> Markup:
    """Return rows under column heads."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    classes = f' class="{escape(css)}"' if css else ""
    return Markup(f"<table{classes}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
