"""The first lines of a frame: where the run stands, in words."""

from __future__ import annotations

from rich.text import Text

from controller.core.laststage import last_stage
from controller.core.runview import Contact, RunView, Status
from controller.ui.clean import clean
from controller.ui.formats import (
    Ending,
    declined,
    duration_text,
    ending_of,
    given_up,
    gpus_clean_text,
    is_paused,
    last_stage_text,
    state_text,
)
from controller.ui.glyphs import Glyphs
from controller.ui.layout import spread


def header(view: RunView, width: int, now: float, glyphs: Glyphs) -> list[Text]:
    """Return the state, elapsed time, playbook, host and run id, and what is known of the contact and of the end."""
    sign, style = sign_of(view, glyphs)
    left = Text.assemble(" ", (sign, f"bold {style}"), " ", (clean(state_text(view)), f"bold {style}"))
    away = view.contact is not Contact.CONNECTED and view.end is None
    if away:
        left.append(" when last seen", style="dim")
    elif view.state_text and view.end is None:
        left.append("  " + clean(view.state_text), style="dim")
    lines = [spread(left, Text(duration_text(view.elapsed_s(now), running=True) + " ", style="bold"), width)]
    names = [clean(part) for part in (view.playbook, view.host and f"on {view.host}") if part]
    lines.append(spread(Text("   " + " ".join(names)), Text(clean(view.run) + " ", style="dim"), width))
    if away:
        since = "" if view.contact_since is None else f" for {duration_text(now - view.contact_since, running=True)}"
        words = "host out of reach" if view.contact is Contact.LOST else "reconnecting"
        lines.append(
            Text.assemble(
                " ", (f"{glyphs.warn} {words}{since}", "bold yellow"), ("; the run goes on without us", "yellow")
            )
        )
        if view.contact_text:
            lines.append(Text("   " + clean(view.contact_text), style="dim"))
    if view.end is not None:
        stage = last_stage(view)
        doing = last_stage_text(view.end.end_reason, stage.record() if stage else None)
        message = "" if view.end.message == state_text(view) else view.end.message
        known = [f"while {clean(doing)}" if doing else "", gpus_clean_text(view), clean(message)]
        lines.append(Text("   " + glyphs.separator.join(part for part in known if part)))
    return lines


def sign_of(view: RunView, glyphs: Glyphs) -> tuple[str, str]:
    """Return the sign of a run's state and its colour."""
    if view.end is not None:
        ending = ending_of(view.end.end_reason)
        signs = {Ending.WELL: glyphs.ok, Ending.STOPPED: glyphs.warn, Ending.BADLY: glyphs.fail}
        return signs[ending], ending.value
    if given_up(view):
        stopped = declined(view) or view.stages[-1].status is Status.SKIPPED
        return (glyphs.warn, "yellow") if stopped else (glyphs.fail, "red")
    return glyphs.dot, "yellow" if view.state in ("orphaned", "lost") or is_paused(view) else "cyan"
