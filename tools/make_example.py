"""Execute docs/example.ipynb against the demo host, and write it back with its outputs.

    python tools/make_example.py          one engine start on the CPU: about a minute

The demo is made in a temporary folder; its paths, and those of this checkout, are replaced by neutral ones.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

import nbformat  # noqa: E402 - tools are found through the line above
from nbclient import NotebookClient  # noqa: E402

from tools.demo import Demo  # noqa: E402
from tools.sshd import SshServer  # noqa: E402

TARGET = CHECKOUT / "docs" / "example.ipynb"

CELL_TIMEOUT_S = 280
"""For one cell, an engine start on two busy cores included."""

NEUTRAL = "/home/you/project"


def execute(notebook: nbformat.NotebookNode, project: Path, environment: dict[str, str]) -> nbformat.NotebookNode:
    """Return the notebook with the outputs of a fresh kernel in `project`. Raises CellExecutionError."""
    client = NotebookClient(
        notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(project)}},
        store_widget_state=False,
    )  # fmt: skip
    return client.execute(env={**environment, "PYTHONPATH": str(CHECKOUT)})


def make_project(root: Path) -> Demo:
    """Write what `make demo` finds in a checkout: the playbooks, and a hosts.toml that includes the demo's."""
    shutil.copy(CHECKOUT / "hosts.toml", root)
    shutil.copytree(CHECKOUT / "playbooks", root / "playbooks")
    demo = Demo(root / ".demo")
    demo.prepare()
    return demo


def main() -> int:
    notebook = nbformat.read(TARGET, as_version=4)
    with tempfile.TemporaryDirectory(prefix="ctl-example-") as folder:
        root = Path(folder).resolve()
        demo = make_project(root)
        with SshServer(demo.ssh, alias="ctl-demo") as server:
            demo.write_hosts(server)
            execute(notebook, root, demo.environment())
        text = nbformat.writes(notebook)
        for path, neutral in ((root, NEUTRAL), (sys.prefix, "/opt/vllm"), (CHECKOUT, "/opt/ctl")):
            text = text.replace(str(path), neutral)
    for cell in (written := nbformat.reads(text, as_version=4)).cells:
        cell.metadata.pop("execution", None)  # moments and durations: noise in every later change
    nbformat.write(written, TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
