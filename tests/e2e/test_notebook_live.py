"""A run in a real kernel: one display that is updated, an interrupt that detaches, an error with its fix."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from support.stubproject import write_project

from tools.make_example import execute
from tools.sshd import SshdUnavailable, SshServer

pytestmark = pytest.mark.sshd

CELLS = (
    'import controller, os, signal, threading\ncontroller.extract(host="lefd")',
    'allow = ["model-no-weights", "capability-architecture"]\n'
    'run = controller.extract(host="left", allow=allow)\nrun',
    "threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()\nrun.wait()",
    "controller.attach().result()",
    "run.wait()",
    "run.close()",
)


def test_a_run_in_a_kernel(tmp_path: Path) -> None:
    try:
        server = SshServer(tmp_path / "ssh", alias="ctl-stub")
    except SshdUnavailable as reason:
        pytest.skip(str(reason))
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    for place in (0, 2):
        cells[place].metadata["tags"] = ["raises-exception"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CTL_", "XDG_"))}
    with server:
        project = write_project(tmp_path / "project", server, "left", step_s=0.3)
        notebook = nbformat.v4.new_notebook(cells=cells)
        execute(notebook, project, {**environment, "HOME": str(tmp_path)})
    error, launched, interrupted, attached, again, _ = [cell.outputs for cell in notebook.cells]
    assert "fix: " in "".join(error[0].traceback)
    assert "left" in "".join(error[0].traceback)
    assert launched[0].data["text/plain"].startswith("run ")
    # One display, however often it was updated; then the message, without a frame of ours.
    assert [output.output_type for output in interrupted] == ["display_data", "error"]
    assert interrupted[1].ename == "Detached"
    assert interrupted[1].traceback[0].startswith("detached: run ")
    assert not any("File" in line for line in interrupted[1].traceback)
    assert [output.output_type for output in attached] == ["display_data", "execute_result"]
    assert "succeeded" in attached[0].data["text/html"]
    assert "24 of 24" in attached[0].data["text/html"]
    assert "24 of 24 written" in attached[1].data["text/plain"]
    assert "24 of 24 written" in again[-1].data["text/html"]
