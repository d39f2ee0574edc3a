"""The lengths of a data set that needs the model's tokenizer, or a column store's reader: for preflight's arithmetic.

Run as a module by the probe in the environment's Python; the request is CTL_LENGTHS (see `host.probe_lengths`), the
answer one line `ctl-lengths {"lengths", "error"}` on stdout.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from remote_payload.extract.dataset import read_samples
from remote_payload.extract.records import open_source
from remote_payload.extract.settings import ConfigError
from remote_payload.host.lengths import CONFIDENCE, Lengths, measure

WHOLE_BELOW = 1 << 20
"""Bytes of chats that are rendered one and all."""

FIRST = 500
"""Records of a store that only reads in order: their mean stands for the rest, and the answer says so."""


def main() -> int:
    request = json.loads(os.environ["CTL_LENGTHS"])
    try:
        found = look(request)
        answer: dict[str, Any] = {"lengths": found.to_dict() if found else None, "error": None}
    except (ConfigError, OSError) as error:
        answer = {"lengths": None, "error": str(error)}
    print("\nctl-lengths " + json.dumps(answer))
    return 0


def look(request: Mapping[str, Any]) -> Lengths | None:
    """Measure the request's data set. Raises ConfigError, OSError."""
    with tempfile.TemporaryDirectory(prefix="ctl-lengths-") as scratch:
        tokenizer = _tokenizer(request)
        if open_source(request["data"]).container == "jsonl":
            tokenizer()  # before the clock starts: importing transformers can take longer than the measuring
            return measure(
                request["data"],
                _count_rendered(request, os.path.join(scratch, "line.jsonl"), tokenizer),
                max_samples=request["max_samples"],
                whole_below=WHOLE_BELOW,
                seconds=request["seconds"],
            )
        return _first(request, tokenizer)


def _first(request: Mapping[str, Any], tokenizer: Callable[[], Any]) -> Lengths:
    """Measure the first records; the others are only counted. Raises ConfigError if there are too many to count."""
    deadline = time.monotonic() + request["seconds"]
    wanted = request["max_samples"]
    lengths = list(_lengths(request, request["data"], tokenizer, min(wanted or FIRST, FIRST)))
    count, tokens = len(lengths), sum(lengths)
    if count < FIRST or count == wanted:
        return Lengths(count, tokens, 0, count, max(lengths), "all")
    samples = 0
    for _ in open_source(request["data"]).records():
        samples += 1
        if samples == wanted:
            break
        if time.monotonic() > deadline:
            if wanted is None:
                raise ConfigError(f"more than {samples:,} records: too many to count here")
            samples = wanted
            break
    mean = tokens / count
    spread = math.sqrt(sum((length - mean) ** 2 for length in lengths) / (count - 1) / count)
    return Lengths(
        samples, round(samples * mean), math.ceil(CONFIDENCE * samples * spread), count, max(lengths), "first"
    )


def _count_rendered(
    request: Mapping[str, Any], path: str, tokenizer: Callable[[], Any]
) -> Callable[[bytes], list[int]]:
    def count(line: bytes) -> list[int]:
        with open(path, "wb") as file:
            file.write(line)
        try:
            return list(_lengths(request, path, tokenizer, None))
        except ConfigError:  # the line gives no sample, or none of whose tokens one counts
            return []

    return count


def _lengths(request: Mapping[str, Any], path: str, tokenizer: Callable[[], Any], limit: int | None) -> Iterator[int]:
    data = read_samples(
        path, request["data_kind"], max_samples=limit, max_seq_len=request["max_seq_len"],
        over_long=request["over_long"], vocabulary=None, tokenizer=tokenizer, skip=lambda skip: None,
    )  # fmt: skip
    return (len(sample.token_ids) for sample in data.samples)


def _tokenizer(request: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that loads the tokenizer once, when the first chat wants it."""
    loaded: list[Any] = []

    def load() -> Any:
        if not loaded:
            from transformers import AutoTokenizer

            loaded.append(
                AutoTokenizer.from_pretrained(
                    request["model"], revision=request["revision"], trust_remote_code=request["trust_remote_code"]
                )
            )
        return loaded[0]

    return load


if __name__ == "__main__":
    sys.exit(main())
