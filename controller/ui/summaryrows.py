"""What the summary of a run says, as labels and values: the terminal, the report and a notebook show the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.text import Text

from controller.ui.clean import clean, text
from controller.ui.formats import (
    UNKNOWN,
    bytes_text,
    count_text,
    duration_text,
    host_text,
    inline_text,
    last_stage_text,
)
from controller.ui.survey import survey_rows
from remote_payload.host.protocol import EndReason

HERE = ("push", "preflight")
"""Timings of what came before the host had the run."""

IN_ORDER = (
    "rehearse",
    "data",
    "load",
    "probe",
    "canary",
    "extract",
    "shutdown",
    "convert",
    "fetch",
    "install",
    "verify",
)

TOLD_S = 0.1
REST_S = 1.0
"""Shorter parts, and a shorter rest, are left out: they explain nothing."""


MUCH_SKIPPED = 0.05
"""Of the records: who has a twentieth of the data left out wants to know before training on the rest."""

WRITTEN_ALL_THE_SAME = frozenset({"truncated", "split", "no-loss"})
"""Reasons for a remark on records that gave a sample; earlier payloads counted them beside those for skipping."""


def summary_rows(summary: Mapping[str, Any]) -> Iterable[tuple[str, Text]]:
    """Yield what a summary says as labels and cleaned text, the most important first."""
    samples, reason = summary.get("samples"), str(summary.get("end_reason") or "")
    unfinished = summary.get("kind") == "extract" and reason != EndReason.SUCCEEDED.value
    if doing := last_stage_text(reason, summary.get("last_stage")):
        yield "while", text(doing)
    if summary.get("last_seen"):
        yield "last seen", text(summary["last_seen"])
    if isinstance(samples, Mapping):
        line = Text(f"{count_text(samples.get('written'))} of {count_text(samples.get('expected'))} written")
        for name in ("skipped", "failed", "missing"):
            count = samples.get(name) or 0
            count = len(count) if isinstance(count, list | tuple) else count
            if count and name == "skipped":
                line.append_text(_skipped(summary, count))
            elif count:
                line.append(f", {count_text(count)} {name}", style="bold red")
        if blank := summary.get("blank_lines"):
            line.append(f", {count_text(blank)} blank line{'' if blank == 1 else 's'} passed over", style="yellow")
        yield "samples", line
        if noted := _noted(summary):
            yield "noted", Text(noted)
        if unfinished and samples.get("written"):
            yield "go on", Text("the same command with `--stale resume` keeps what is written and adds the rest")
        if summary.get("missing"):
            yield "missing", Text(_index_ranges(summary["missing"]), style="bold red")
    elif unfinished:
        yield "samples", Text("none written; how many there are to write was not known yet")
    if summary.get("tokens") is not None:
        rates = [f"{count_text(summary['tokens'])} tokens, {bytes_text(summary.get('bytes'))}"]
        if summary.get("tokens_per_s") is not None:
            rates.append(
                f"{count_text(summary['tokens_per_s'])} tokens/s, {bytes_text(summary.get('bytes_per_s'))}/s"
            )
        yield "amount", Text("; ".join(rates))
    lengths = [bin_ for bin_ in summary.get("token_lengths") or () if bin_.get("samples")]
    if lengths:
        yield "lengths", Text(", ".join(f"{count_text(b['samples'])} {_length_text(b['up_to'])}" for b in lengths))
    ranks = summary.get("ranks") or ()
    if len(ranks) > 1:
        shares = (f"{rank['rank']}: {count_text(rank['files'])} ({bytes_text(rank['bytes'])})" for rank in ranks)
        yield "by rank", Text(", ".join(shares))
    kept = summary.get("kept")
    if isinstance(kept, Mapping) and kept.get("files"):
        yield "kept", Text(f"{count_text(kept['files'])} of an earlier run, {bytes_text(kept.get('bytes'))}")
    for path in summary.get("outputs") or ():
        yield "output", text(path)
    shape = summary.get("shape")
    if isinstance(shape, Mapping):
        form = f"tokens x {shape.get('states')} x {shape.get('hidden')}, {clean(shape.get('dtype'))}"
        form += f", {clean(summary['format'])}" if summary.get("format") else ""
        yield "shape", Text(form + _norm_text(summary))
    if summary.get("model"):
        layers = f" ({summary['num_layers']} layers)" if summary.get("num_layers") else ""
        yield "model", Text(clean(summary["model"]) + layers)
    if isinstance(summary.get("survey"), Mapping):
        yield from survey_rows(summary["survey"])
    yield from _provision_rows(summary)
    yield from _proof_rows(summary)
    cause = summary.get("triage")
    if isinstance(cause, Mapping):
        code = f" ({cause.get('code')})" if cause.get("known") else ""
        yield "cause", text(f"{cause.get('what')}{code}", "bold red")
    if times := _times(summary):
        yield "time", Text(clean(times))
    if summary.get("gpu_hours") is not None:
        cost = summary.get("cost") or {}
        price = f"; {cost['total']:,.2f} at {cost['price_per_gpu_hour']:g} an hour" if cost else ""
        yield "used", Text(f"{summary['gpu_hours']:.2f} GPU-hours{price}")
    yield "after", Text(host_text(summary))


def _norm_text(summary: Mapping[str, Any]) -> str:
    """Say whether the model's last state is taken after its final norm; a trainer must not apply it twice, or never.

    Nothing where the last of the states is not the model's last, or of a run of an earlier version.
    """
    boundaries, normed = summary.get("boundaries") or (), summary.get("final_norm")
    if normed is None or not boundaries or boundaries[-1] != summary.get("num_layers"):
        return ""
    return f"; the last state {'after' if normed else 'before'} the final norm"


def _skipped(summary: Mapping[str, Any], count: int) -> Text:
    """Return how many records gave no sample, and why; where they are a good part of the data, so that it is seen."""
    records = count + int((summary.get("samples") or {}).get("expected") or 0)
    reasons = summary.get("skipped") if isinstance(summary.get("skipped"), Mapping) else {}
    told = ("; " if summary.get("skipped_lines") else ", ").join(
        f"{clean(code)} {count_text(number)}{_lines_text(summary, 'skipped', code, number)}"
        for code, number in (reasons or {}).items()
        if code not in WRITTEN_ALL_THE_SAME
    )
    much = count / records >= MUCH_SKIPPED
    share = f" of {count_text(records)} records, {count / records:.0%} of the data" if much else ""
    line = f", {count_text(count)} skipped{share}" + (f" ({told})" if told else "")
    return Text(line, style="bold red" if much else "yellow")


def _noted(summary: Mapping[str, Any]) -> str:
    """Return which records were kept although something is to be said about them; "" where there are none."""
    noted = summary.get("noted") if isinstance(summary.get("noted"), Mapping) else {}
    return "; ".join(
        f"{clean(code)} {count_text(number)}{_lines_text(summary, 'noted', code, number)}"
        for code, number in (noted or {}).items()
    )


def _lines_text(summary: Mapping[str, Any], fate: str, code: str, number: int) -> str:
    """Return the first lines, or rows, of the records with one code of "skipped" or "noted"; older ones have none."""
    lines = (summary.get(f"{fate}_lines") or {}).get(code) or ()
    if not lines:
        return ""
    read_as = str((summary.get("data") or {}).get("read_as") or "")
    place = "line" if read_as.startswith("json") else "row"  # of jsonl and json
    more = " and more" if number > len(lines) else ""
    return f", {place}{'s' if number > 1 else ''} {', '.join(map(clean, lines))}{more}"


def _times(summary: Mapping[str, Any]) -> str:
    """Return where the time went: all of it on the host with its parts, and what was done here before."""
    timings = {name.removesuffix("_s"): value for name, value in (summary.get("timings") or {}).items()}
    timings = {name: value for name, value in timings.items() if isinstance(value, int | float)}
    if not isinstance(summary.get("rehearsal"), Mapping) and summary.get("end_reason") == EndReason.SUCCEEDED.value:
        timings.pop("rehearse", None)  # the step found nothing to try
    here = {name: timings.pop(name) for name in HERE if name in timings}
    paused = timings.pop("paused", None)  # within the extraction
    whole = timings.pop("host", None)
    if whole == 0:  # it never held the host
        return f"before the launch {_spans(here)}" if here else ""
    parts = {name: timings.pop(name) for name in IN_ORDER if name in timings} | timings
    shown = {name: value for name, value in parts.items() if value >= TOLD_S or name in ("load", "extract")}
    if whole is None:  # of a run of an earlier version
        return _spans({**here, **shown})
    if shown and (rest := whole - sum(shown.values())) >= REST_S:
        shown["other"] = rest
    on_host = f"{duration_text(whole)} on the host" + (f": {_spans(shown)}" if shown else "")
    waited = f"; paused {duration_text(paused)} of that, for room on the disk" if paused else ""
    return on_host + waited + (f"; before the launch {_spans(here)}" if here else "")


def _spans(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {duration_text(value)}" for name, value in seconds.items())


def _provision_rows(summary: Mapping[str, Any]) -> Iterable[tuple[str, Text]]:
    """What `ctl hosts setup` and `ctl hosts fetch-model` left on the host."""
    environment, fetched = summary.get("environment"), summary.get("fetched")
    if isinstance(environment, Mapping):
        yield "python", text(f"{environment.get('python')} in {environment.get('path')}")
        cuda = environment.get("torch_cuda")
        names = {**environment.get("packages", {}), "torch": environment.get("torch")}
        packages = ", ".join(f"{name} {version}" for name, version in names.items() if version)
        yield "packages", text(packages + (f", CUDA {cuda}" if cuda else ""))
    if isinstance(fetched, Mapping):
        yield "model", text(f"{fetched.get('repo')}, commit {fetched.get('commit')}")
        yield "folder", text(fetched.get("path"))
        proofs = ", ".join(f"{count} by {kind}" for kind, count in fetched.get("proved_by", {}).items() if count)
        yield "files", text(f"{fetched.get('files')}, {bytes_text(fetched.get('bytes'))}; proved {proofs}")


def _proof_rows(summary: Mapping[str, Any]) -> Iterable[tuple[str, Text]]:
    """What was checked about the states themselves, and what was not."""
    rehearsal, canary = summary.get("rehearsal"), summary.get("canary")
    if isinstance(rehearsal, Mapping):
        line = Text(
            f"layers {clean(inline_text(rehearsal.get('layers')))} with {clean(rehearsal.get('weights'))} weights"
        )
        line.append("; not proven: " + clean(", ".join(map(str, rehearsal.get("not_proven") or ()))), style="dim")
        yield "rehearsal", line
    if isinstance(canary, Mapping):
        if not canary.get("enabled"):
            yield "canary", Text("switched off: nothing proves that the states are the model's", style="yellow")
        else:
            passed = [when for when in ("start", "end") if "figures" in (canary.get(when) or {})]
            line = Text("passed at the " + " and the ".join(passed) if passed else UNKNOWN)
            notes = dict.fromkeys(clean(note) for when in passed for note in canary[when].get("notes") or ())
            line.append("".join(f"; {note}" for note in notes), style="yellow")
            yield "canary", line
    if summary.get("repairs"):
        yield "repairs", Text(clean(", ".join(map(str, summary["repairs"]))), style="yellow")


def _length_text(up_to: int | None) -> str:
    return "longer" if up_to is None else f"up to {count_text(up_to)} tokens"


def _index_ranges(indexes: Sequence[int], shown: int = 12) -> str:
    """Return "3, 7-9": sorted indexes with runs folded, the first `shown` of them."""
    runs: list[list[int]] = []
    for index in indexes:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(texts[:shown]) + (f" and {len(texts) - shown} more" if len(texts) > shown else "")
