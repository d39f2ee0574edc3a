"""What goes into a pipe: whole values, and no blanks behind them."""

from __future__ import annotations

import pytest
from rich.padding import Padding
from rich.text import Text

from controller.ui import terminal
from controller.ui.tables import print_config, print_intention


def test_a_pipe_gets_whole_values_and_no_padding(capsys: pytest.CaptureFixture[str]) -> None:
    path = ":".join(f"/very/long/folder/number/{number}" for number in range(40))
    rows = [["PYTHONPATH", path], ["short", "value"]]
    print_intention(terminal.out_console(), [{"title": "environment", "rows": rows}])
    terminal.out_console().print(Padding(Text("indented"), (0, 0, 0, 4)))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.rstrip() != line] == []
    assert [line.split() for line in lines if "PYTHONPATH" in line] == [["PYTHONPATH", path]]
    assert lines[-1] == "    indented"


def test_what_is_not_set_is_no_python_word(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"hosts.a.user": {"value": None, "origin": "built in"}}
    print_config(terminal.out_console(), {"files": [], "values": values})
    assert capsys.readouterr().out.split() == ["hosts.a.user", "-", "built", "in"]
