"""Draw the dashboard's pictures in docs/captures from recorded runs: python tools/make_captures.py

The recordings below tests/data/runs are replayed to a moment, and the frame of that moment is drawn as SVG. `--check`
writes nothing, and exits with 1 if a picture is not what its recording gives now.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from dataclasses import replace
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, Group
from rich.terminal_theme import MONOKAI

from controller.known import known_of, usual_seconds
from controller.replay import Player, load, parse_at
from controller.runfolder import RunFolder
from controller.ui.live import LiveView

CHECKOUT = Path(__file__).parents[1]
RUNS = CHECKOUT / "tests" / "data" / "runs"
TARGET = CHECKOUT / "docs" / "captures"

PICTURES = {
    "loading": ("running", "330", (100, 30), ""),
    "running": ("running", "end", (110, 30), ""),
    "failed": ("failed", "end", (100, 30), ""),
    "finished": ("finished", "end", (100, 24), ""),
    "help": ("running", "end", (90, 22), "?"),
}
"""Picture: recording, the moment of it, columns and lines, and keys pressed."""

TEMPLATE = re.sub(r"@font-face \{\{.*?\}\}\s*|<!--.*?-->\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code", "Menlo"
)
"""rich's own, without the fonts that it would load from the network: any monospaced one does."""


def draw(recording: str, at: str, size: tuple[int, int], keys: str) -> str:
    """Return a frame of a recording as SVG."""
    folder = RunFolder(RUNS / recording)
    run = load(folder)
    until = run.begin + parse_at(at, run.seconds)
    player = Player(run, speed=0.0, at_s=0.0)
    view = LiveView(io.StringIO(), clock=player.now, size=lambda: size)
    # As a live run looks on a host where the same job has run once before.
    known = replace(known_of(folder, live=False), usual=usual_seconds([RUNS / "finished"]))
    sink = view.sink(run=run.run, host=run.host, known=known)
    player.play(sink, left=lambda: False, until=until)
    for key in keys:
        view.press(key)
    lines = view.frame(size[0], size[1] + 1, keys=True)  # without the line that is kept for the cursor
    console = Console(record=True, width=size[0], file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(Group(*lines))
    title = f"ctl attach {run.run}"
    svg = console.export_svg(
        title=title, theme=MONOKAI, unique_id=f"ctl-{recording}-{len(keys)}", code_format=TEMPLATE
    )
    return svg.replace(">", f"><title>{title}: {lines[0].plain.split()[1]}</title>", 1)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--check", action="store_true")
    check = options.parse_args().check
    stale = []
    for name, (recording, at, size, keys) in PICTURES.items():
        path = TARGET / f"{name}.svg"
        svg = draw(recording, at, size, keys)
        if check and (not path.is_file() or path.read_text(encoding="utf-8") != svg):
            stale.append(name)
        elif not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(svg, encoding="utf-8")
    if stale:
        print(f"not as recorded any more: {', '.join(stale)}; run tools/make_captures.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
