"""Nothing from a host steers the terminal, and nothing printable is lost."""

from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from controller.ui.clean import Encodable, clean, clean_block, text


@pytest.mark.parametrize(
    ("hostile", "harmless"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]52;c;aGVsbG8=\x07after", "after"),
        ("\x1b]0;title\x1b\\after", "after"),
        ("\x9b2Jafter", "after"),
        ("\x1bP1;2q payload\x1b\\after", "after"),
        ("\x1b]8;;http://evil\x07link\x1b]8;;\x07", "link"),
        ("\x1b(0after", "after"),
        ("a\x1b", "a"),
        ("a\rb", "a b"),
        ("a\x00\x08b", "ab"),
        ("safe\u202egnp.exe", "safegnp.exe"),
        ("line\u2028break", "linebreak"),
        ("lone \ud800 surrogate", "lone  surrogate"),
        ("tab\tbed", "tab    bed"),
        ("naïve 漢字 🎉 ✓ é", "naïve 漢字 🎉 ✓ é"),
        ("[red]kept[/red] :smile:", "[red]kept[/red] :smile:"),
    ],
)
def test_cleaned(hostile: str, harmless: str) -> None:
    assert clean(hostile) == harmless


def test_an_unterminated_sequence_ends_with_its_line() -> None:
    assert clean_block("\x1b]52;c;never ends\nnext line") == "\nnext line"


@given(st.text())
def test_what_comes_out_holds_no_control_character(value: str) -> None:
    cleaned = clean(value)
    assert not [character for character in cleaned if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")]
    assert clean(cleaned) == cleaned


def test_markup_is_shown_as_written() -> None:
    console = Console(file=io.StringIO(), width=60, force_terminal=True, color_system="truecolor")
    with console.capture() as capture:
        console.print(text("[red]not red[/red] :smile:"))
    assert capture.get() == "[red]not red[/red] :smile:\n"


def test_what_the_terminal_cannot_write_becomes_question_marks() -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True), width=40)
    console.print(Encodable(text("naïve 漢 ok")))
    assert raw.getvalue() == b"na?ve ?? ok\n"
