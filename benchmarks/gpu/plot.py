"""Draw docs/performance.png: prefill speed with capture against without, ours and vLLM's, from results of fast.py.

python benchmarks/gpu/plot.py RESULT.json ...      one a mode, compiled first
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

TARGET = Path(__file__).resolve().parents[2] / "docs" / "performance.png"
NAMES = {"ours": "ctl", "vllm": "vLLM's extract_hidden_states", "served": "the same behind vllm serve"}
GOAL = 0.99


def main(paths: list[str]) -> int:
    figure, axes = plt.subplots(figsize=(7.2, 2.9), layout="constrained")
    labels, values, colours = [], [], []
    for path in paths:
        for row in json.loads(Path(path).read_text())["rows"]:
            kind, mode = row["row"].split("-")
            if kind != "plain" and "invalid" not in row:
                labels.append(f"{NAMES[kind]}, {mode}")
                values.append(row["of_plain"])
                colours.append("#2b6cb0" if kind == "ours" else "#64748b")
    bars = axes.barh(labels, values, color=colours, height=0.62)
    axes.bar_label(bars, [f"{value:.4f}" for value in values], padding=-42, color="white", fontweight="bold")
    axes.axvline(GOAL, color="#c05621", linewidth=1, linestyle="--")
    axes.text(GOAL, -0.95, " goal 0.99", color="#c05621", va="center", ha="right")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlim(0.92, 1.01)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("of plain prefill's tokens/s (the axis begins at 0.92)")
    figure.savefig(TARGET, dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
