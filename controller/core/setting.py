"""A host that nobody typed: `CTL_HOST` stands for `--host`, and yet says nothing about a run that is named."""

from __future__ import annotations


class Setting(str):
    """A word of the environment in the place of an option."""

    __slots__ = ()


def typed(word: str | None) -> str | None:
    """Return an option's value where somebody gave it, None where there is none or the environment has it."""
    return None if isinstance(word, Setting) else word
