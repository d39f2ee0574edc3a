"""The installed version."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    return metadata.version("ctl-hidden-states")
