"""An executable `nvidia-smi` that prints what files say, so that a test can occupy and free GPUs."""

from __future__ import annotations

import os
from pathlib import Path

SCRIPT = """#!/bin/sh
[ -e "$0.hang" ] && exec sleep 600
case "$1" in
  -L) exec cat "$0.list" ;;
  --query-gpu=uuid,memory.used) exec cat "$0.memory" ;;
  --query-compute-apps=*) exec cat "$0.apps" ;;
  --query-gpu=index,*) exec cat "$0.sample" ;;
esac
echo "unexpected: $*" >&2
exit 2
"""

UUIDS = ("GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000")


class FakeSmi:
    """Two idle GPUs. `env` puts the script first in PATH."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.path = folder / "nvidia-smi"
        self.path.write_text(SCRIPT)
        self.path.chmod(0o755)
        self.env = {"PATH": f"{folder}:{os.environ['PATH']}"}
        listing = (f"GPU {number}: NVIDIA RTX PRO 6000 (UUID: {uuid})" for number, uuid in enumerate(UUIDS))
        self._write("list", "\n".join(listing))
        self._write("sample", "0, 55, 4, 97887, 83.12, 41\n1, [N/A], 4, 97887, [Not Supported], 40")
        self.set_memory(4, 4)
        self.set_apps()

    def set_memory(self, *mebibytes: int | str) -> None:
        self._write("memory", "\n".join(f"{uuid}, {used}" for uuid, used in zip(UUIDS, mebibytes, strict=True)))

    def set_apps(self, *rows: str) -> None:
        """Each row: "UUID, pid, process name"."""
        self._write("apps", "\n".join(rows))

    def hang(self) -> None:
        self._write("hang", "1")

    def file(self, name: str) -> Path:
        return Path(f"{self.path}.{name}")

    def _write(self, name: str, text: str) -> None:
        # Replaced whole: the script may be reading at this moment.
        temporary = self.path.parent / f"new-{name}"
        temporary.write_text(text + "\n" if text else "")
        temporary.replace(self.file(name))
