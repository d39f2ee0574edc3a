"""An output folder for a person: what it holds before it is cleared, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from controller.core.outputs import not_ours_text
from controller.ui.clean import Encodable, clean, text
from controller.ui.formats import bytes_text
from controller.ui.glyphs import glyphs_for
from controller.ui.tables import print_clear_list, print_not_ours


def print_folder(console: Console, host: str, output: Mapping[str, Any], listing: Mapping[str, Any]) -> None:
    """Print an output folder: whose it is, what is in it, and the digest that a deletion is bound to."""
    if not listing["exists"]:
        _line(console, Text.assemble((clean(output["path"]), "bold"), f" does not exist on {clean(host)}"))
        return
    if not listing["entries"]:
        state = "holds nothing of ctl's" if not_ours_text(listing) else "is empty"
        _line(console, Text.assemble((clean(output["path"]), "bold"), f" {state} on {clean(host)}"))
        print_not_ours(console, listing)
        return
    print_clear_list(console, host, [output], {str(output["path"]): listing})
    if listing.get("digest"):
        _line(console, text(f"  digest {listing['digest']}", "dim"))


def print_swept(console: Console, document: Mapping[str, Any]) -> None:
    """Print what `ctl clear` deleted, as the host listed it again afterwards."""
    sign = Text(glyphs_for(console.encoding).ok, style="bold green")
    count = int(document["deleted_entries"])
    amount = f"{count:,} {'entry' if count == 1 else 'entries'}, {bytes_text(document['deleted_bytes'])}"
    found = not_ours_text(document)
    left = f"left alone: {clean(found)}" if found else "empty now"
    _line(console, Text.assemble(sign, " ", (clean(document["path"]), "bold"), f": {amount} deleted; {left}"))


def _line(console: Console, line: Text) -> None:
    console.print(Encodable(line), soft_wrap=True)
