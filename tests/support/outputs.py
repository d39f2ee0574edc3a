"""Output folders as a plan holds them."""

from __future__ import annotations

from pathlib import Path

from remote_payload.host.listing import scan
from remote_payload.host.protocol import OwnedOutput

RUN = "20261129-120000-abcdef"


def owned(path: Path | str, root: Path | str, *, stale: str = "clear", adopt: bool = False) -> OwnedOutput:
    """Return the output as preflight would put it into the plan: with the listing of this moment."""
    listing = scan(str(path), str(root))
    return OwnedOutput(
        path=str(path), root=str(root), stale=stale, adopt=adopt,
        digest=listing["digest"], entries=listing["entries"], bytes=listing["bytes"],
    )  # fmt: skip
