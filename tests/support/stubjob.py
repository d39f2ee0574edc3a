"""A job that logs and writes like an extraction, in parts that wait for a gate; it needs nothing but Python.

Run as `python stubjob.py job OUTPUT PARTS PART_BYTES` by the supervisor, and as `... verify OUTPUT PARTS PART_BYTES`.
Part N begins once OUTPUT/gate-N exists, so that a test decides when bytes flow; nothing depends on time.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SAMPLES_A_PART = 6
RANKS = 2

NASTY = (
    b"\rprogress 17%|#### |\rprogress 18%|#####|",
    "Gr\u00fc\u00dfe \u65e5\u672c\u8a9e \U0001f680".encode(),
    b"\x1b[31mred\x1b[0m \x1b]52;c;eA==\x07",
    b"\x00\x00\x01\x02\xff\xfe\x80",
    b"\xc3",  # half a character, and its other half in the next piece
    b"\xbc\n",
)


def log_of(part: int, size: int) -> bytes:
    """Return what part `part` prints: `size` bytes, the same each time."""
    chance = random.Random(part)
    pieces, left = [b"part %d begins\n" % part], size
    while left > 0:
        pieces.append(chance.choice(NASTY) if chance.random() < 0.2 else chance.randbytes(chance.randrange(1, 2000)))
        left -= len(pieces[-1])
    return b"".join(pieces)[:size]


def sample_of(index: int) -> bytes:
    return random.Random(1_000_000 + index).randbytes(500 + index)


def indices(part: int) -> Iterator[int]:
    yield from range(part * SAMPLES_A_PART, (part + 1) * SAMPLES_A_PART)


def job(output: Path, parts: int, size: int) -> None:
    run = Path(os.environ["CTL_RUN_DIR"])
    for part in range(parts):
        while not (output / f"gate-{part}").exists():
            time.sleep(0.01)
        data = log_of(part, size)
        for start in range(0, len(data), 40_000):
            os.write(1, data[start : start + 40_000])
        for index in indices(part):
            body = sample_of(index)
            temporary = output / f".hs_{index}"
            temporary.write_bytes(body)
            temporary.rename(output / f"hs_{index}.bin")
            record = {"index": index, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
            with (run / "ledger" / f"rank-{index % RANKS}.jsonl").open("a") as ledger:
                ledger.write(json.dumps(record) + "\n")
        event = {"wire": 1, "seq": part + 1, "run": run.name, "host": "stub", "writer": "driver", "t": time.time()}
        progress = {"type": "progress", "done": (part + 1) * SAMPLES_A_PART, "total": parts * SAMPLES_A_PART}
        with (run / "events" / "driver.jsonl").open("a") as events:
            events.write(json.dumps({**event, **progress}, separators=(",", ":")) + "\n")


def verify(output: Path, parts: int) -> None:
    run = Path(os.environ["CTL_RUN_DIR"])
    expected = parts * SAMPLES_A_PART
    sizes = [(output / f"hs_{index}.bin").stat().st_size for index in range(expected)]
    record = {"samples": {"expected": expected, "written": len(sizes), "missing": 0}, "bytes": sum(sizes)}
    (run / "verify.json").write_text(json.dumps(record))


if __name__ == "__main__":
    verb, folder, count, part_bytes = sys.argv[1:]
    if verb == "job":
        job(Path(folder), int(count), int(part_bytes))
    else:
        verify(Path(folder), int(count))
