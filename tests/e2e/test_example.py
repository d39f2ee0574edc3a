"""docs/example.ipynb, executed against the host of `make demo`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from e2e.conftest import Project
from nbconvert import HTMLExporter
from support.browser import chromium, opened

from tools.make_example import TARGET, execute

pytestmark = [pytest.mark.engine, pytest.mark.sshd]


def forms(notebook: nbformat.NotebookNode) -> Iterator[tuple[str, list[tuple[str, list[str]]]]]:
    """Yield each cell of code with the kinds of its outputs."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            yield cell.source, [(output.output_type, sorted(output.get("data", {}))) for output in cell.outputs]


def test_the_example_is_what_a_user_sees(project: Project, tmp_path: Path) -> None:
    committed = nbformat.read(TARGET, as_version=4)
    done = execute(nbformat.read(TARGET, as_version=4), project.root, project.environment())
    assert list(forms(done)) == list(forms(committed)), "run: python tools/make_example.py"
    text = "\n".join(str(output) for cell in done.cells for output in cell.get("outputs", ()))
    assert "32 of 32 written" in text
    assert "fix: " in text
    # A page of the same: nothing of it may need a network to be read.
    page = tmp_path / "example.html"
    page.write_text(HTMLExporter(mathjax_url="", require_js_url="", jquery_url="").from_notebook_node(done)[0])
    with chromium() as browser, opened(browser, page) as seen:
        shown = seen.page.inner_text("body")
        assert "32 of 32 written" in shown
        assert "detaches and says how to go back" in shown
        assert "<div" not in shown
