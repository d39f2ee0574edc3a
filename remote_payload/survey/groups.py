"""Many files to a few lines: equal ones are counted together, and lengths that differ become a range.

Digits in a tensor's name stand for a place in a row: `layers.0.weight` and `layers.1.weight` are `layers.*.weight`,
twice. Files are of one group if they have the same such names, as often, with the same dtypes and numbers of
dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_GROUPS = 40
MAX_TENSORS = 60
"""Told of each group; a document of kilobytes is the aim."""

MAX_UNREAD = 20
"""Reasons that are told."""

Key = tuple[Any, ...]


class Group:
    """Files that hold the same, and what they hold."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.paths: list[str] = []
        self.bytes = 0
        self.records: int | None = None
        self._tensors: dict[tuple[str, str, int], _Row] = {}

    def add(self, path: str, size: int, facts: Mapping[str, Any]) -> None:
        """Count one more file of this group."""
        self.paths.append(path)
        self.bytes += size
        if facts["records"] is not None:
            self.records = (self.records or 0) + facts["records"]
        for tensor in facts["tensors"]:
            key = (pattern(tensor["name"]), tensor["dtype"], len(tensor["shape"]))
            self._tensors.setdefault(key, _Row(len(tensor["shape"]))).add(tensor["shape"])

    def tensors(self) -> list[dict[str, Any]]:
        """Return {"name", "dtype", "shape", "count", "shapes"}; a dimension that varies is [smallest, largest]."""
        return [
            {"name": name, "dtype": dtype, "shape": row.shape(), "count": row.count, "shapes": len(row.shapes)}
            for (name, dtype, _), row in sorted(self._tensors.items())
        ]

    def record(self, folder: str) -> dict[str, Any]:
        """Return the group for a summary; `folder` is cut from the example's path."""
        tensors = self.tensors()
        return {
            "kind": self.kind, "files": len(self.paths), "bytes": self.bytes, "records": self.records,
            "example": self.paths[0].removeprefix(folder.rstrip("/") + "/"),
            "tensors": tensors[:MAX_TENSORS], "tensors_left_out": max(0, len(tensors) - MAX_TENSORS),
        }  # fmt: skip


class _Row:
    def __init__(self, dimensions: int) -> None:
        self.count = 0
        self.shapes: set[tuple[int, ...]] = set()
        self._low: list[int] = []
        self._high: list[int] = [0] * dimensions

    def add(self, shape: Sequence[int]) -> None:
        self.count += 1
        self.shapes.add(tuple(shape))
        self._low = list(map(min, self._low or shape, shape))
        self._high = list(map(max, self._high, shape))

    def shape(self) -> list[Any]:
        return [low if low == high else [low, high] for low, high in zip(self._low, self._high)]


class Unread:
    """Files that could not be looked into, counted by kind and reason."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], int] = {}

    def add(self, kind: str, why: str) -> None:
        """Count one more file of this kind."""
        self._files[kind, why] = self._files.get((kind, why), 0) + 1

    @property
    def files(self) -> int:
        return sum(self._files.values())

    def records(self, prefix: str = "") -> list[dict[str, Any]]:
        """Return {"kind", "files", "why"} of the first reasons, for a summary."""
        rows = list(self._files.items())[:MAX_UNREAD]
        return [{"kind": kind, "files": files, "why": prefix + why} for (kind, why), files in rows]

    def reason(self, *kinds: str) -> str:
        """Return the first reason, of one of the kinds if any are given; "" if there is none."""
        return next((why for kind, why in self._files if not kinds or kind in kinds), "")


def pattern(name: str) -> str:
    """Return a tensor's name with each number in it as `*`."""
    return re.sub(r"\d+", "*", name)


def key_of(kind: str, facts: Mapping[str, Any]) -> Key:
    """Return what files of one group have in common."""
    rows: dict[tuple[str, str, int], int] = {}
    for tensor in facts["tensors"]:
        row = (pattern(tensor["name"]), tensor["dtype"], len(tensor["shape"]))
        rows[row] = rows.get(row, 0) + 1
    return (kind, tuple(sorted(rows.items())))


def spread(paths: Sequence[str], count: int) -> list[str]:
    """Return `count` of the paths, evenly over them, the first and the last among them."""
    if len(paths) <= count:
        return list(paths)
    if count == 1:
        return [paths[0]]
    return [paths[round(number * (len(paths) - 1) / (count - 1))] for number in range(count)]
