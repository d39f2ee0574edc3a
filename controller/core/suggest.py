"""The nearest valid word, for errors about a word that is not valid."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

CLOSE_ENOUGH = 0.6
"""Similarity from 0 to 1 from which on a word is worth suggesting (difflib's own default): `dmeo` finds `demo`."""


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """Return the entry of `valid` most like `word`, ignoring case and `-` against `_`; None if none is close."""
    plain = {_plain(entry): entry for entry in sorted(valid, reverse=True)}
    found = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=CLOSE_ENOUGH)
    return plain[found[0]] if found else None


def did_you_mean(
    word: str, valid: Iterable[str], *, kind: str, meant: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Return the `fix` for an unknown `word`: what it is another word for, the nearest valid one, else all of them.

    `meant` gives valid words that mean the same as one that is not; those that are not in `valid` are left out.
    """
    known = sorted(set(valid))
    same = [each for each in (meant or {}).get(word.lower(), ()) if each in known]
    if same:
        return f"did you mean {' or '.join(f'`{each}`' for each in same)}?"
    close = nearest(word, known)
    if close is not None:
        return f"did you mean `{close}`?"
    return f"valid {kind}: {', '.join(known)}" if known else f"there are no {kind}"


def _plain(word: str) -> str:
    # All options begin with two dashes: they make none more like another.
    return word.lower().lstrip("-").replace("-", "_")
