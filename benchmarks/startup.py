"""How long `ctl --help` takes, as a ratio to a bare Python start: python benchmarks/startup.py

Goal: 250 ms on the slowest machine that anybody uses it on. Medians of wall-clock seconds over whole processes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 11


def median_s(argv: list[str]) -> float:
    """Return the median wall-clock seconds of `argv` over RUNS runs after one that warms the caches."""
    seconds = []
    for number in range(RUNS + 1):
        started = time.perf_counter()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=60)
        if number:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main() -> None:
    bare = median_s([sys.executable, "-c", "pass"])
    typer = median_s([sys.executable, "-c", "import typer"])
    own = median_s([sys.executable, "-m", "controller", "--help"])
    print(f"python -c pass      {bare * 1000:6.0f} ms   1.0")
    print(f"python -c 'import typer' {typer * 1000:1.0f} ms   {typer / bare:.1f}")
    print(f"ctl --help          {own * 1000:6.0f} ms   {own / bare:.1f}   goal 250 ms")


if __name__ == "__main__":
    main()
