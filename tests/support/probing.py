"""A probe of this machine, as the controller asks for it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

from remote_payload.host import probe

REPO = Path(__file__).resolve().parents[2]
MAIN = REPO / "remote_payload" / "host" / "main.py"


def quiet(text: str) -> None:
    """Stand in for a section's note where nobody listens."""


def request(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    root = tmp_path / "data"
    root.mkdir(exist_ok=True)
    return {
        "workdir": str(tmp_path / "work"), "accelerator": "cpu", "python": sys.executable, "gpus": 0,
        "kind": "extract",
        "outputs": [{"path": str(root / "out"), "root": str(root), "stale": "fail", "adopt": False}],
        "model": None, "data": None, "deadline_s": 45.0, "lease_dir": str(tmp_path / "lease"),
        "env": {}, "env_file": None, "ranks": 1, "extract": None, **changes,
    }  # fmt: skip


def run_probe(asked: dict[str, Any]) -> dict[str, Any]:
    out = io.BytesIO()
    assert probe.main(asked, b"", out) == 0
    report: dict[str, Any] = json.loads(out.getvalue())
    return report
