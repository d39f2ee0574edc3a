"""`ctl report`: what is held here of a run as one HTML file."""

from __future__ import annotations

import json
import os
import tempfile
import webbrowser
from datetime import datetime
from pathlib import Path

from controller import diagnosis, ending, lookup, recorded
from controller.core import figures, timelines
from controller.core.errors import ExitCode, UsageError
from controller.core.ledger import Fate
from controller.core.repeat import repeat_text
from controller.core.runview import Status
from controller.runfolder import RunFolder, find_run
from controller.ui.report import Report, page
from controller.ui.sample_charts import BINS, map_cells, print_sample_charts
from controller.ui.svg import require_matplotlib
from controller.ui.terminal import ask_yes_no, err_console, out_console
from controller.version import version
from controller.workspace import load_workspace
from remote_payload.host.protocol import RunState

LISTED = 50
"""Samples named at most that were not written; the manifest shows all, the ledger tells why."""


def report(run_id: str | None, host: str | None, *, output: Path | None, show: bool, as_json: bool) -> ExitCode:
    """Write a run's report, bringing its local copy up to date first if it has not ended."""
    require_matplotlib()
    folder, state = _up_to_date(run_id, host)
    if run_id is None:
        ending.say_which(folder)
    path = write_report(folder, state, output)
    if as_json:
        document = {"schema_version": 1, "run_id": folder.run_id, "path": str(path), "bytes": path.stat().st_size}
        print(json.dumps(document))
    else:
        print(path)
    if show and not webbrowser.open(path.as_uri()):
        err_console().print("no browser could be started here: open the file yourself")
    return ExitCode.OK


def _up_to_date(run_id: str | None, host: str | None) -> tuple[RunFolder, str]:
    """Return a run's folder and the last word about it. A host is only needed by a run that has not ended here."""
    workspace = load_workspace()
    try:
        folder = find_run(workspace.runs_dir, run_id)
    except UsageError:
        if run_id is None or host is None:
            raise
    else:
        if folder.is_over and not folder.damaged():
            return folder, (RunState.LOST if folder.is_lost else RunState.FINISHED).value
    with lookup.open_run(workspace, run_id, host, ask=ask_yes_no) as run:
        lookup.copy_or_say(run, "the report shows")
        return run.folder, run.state


def write_report(folder: RunFolder, state: str = "", output: Path | None = None) -> Path:
    """Write the report of what is held here of a run and return its path; by default report.html in its folder.

    `state` is the last known word about it. The file is for its owner only, as the run folder is: it quotes logs,
    paths and data. Raises UsageError without matplotlib, or where the file cannot be written.
    """
    require_matplotlib()
    path = (output or folder.path / "report.html").absolute()
    text = page(gather(folder, state))
    try:
        # Of a name that nobody else can have made: the folder may be one that everybody writes into.
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(descriptor, "wb") as stream:
                stream.write(text.encode("utf-8", "replace"))
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(f"cannot write {path}", why=why, fix="name another with `-o FILE`") from error
    return path


def print_samples(folder: RunFolder) -> None:
    """Print the norm map and the histogram of lengths of a run, if it wrote samples."""
    data = recorded.load(folder)
    spec = (data.plan["extract"] if data.plan else None) or {}
    lines = list(data.lines.values())
    norms = figures.norm_map(lines, most=map_cells(out_console().width))
    lengths = figures.lengths(lines, spec.get("max_seq_len"), len(data.truncated), most=BINS)
    print_sample_charts(out_console(), norms, lengths)


def gather(folder: RunFolder, state: str = "") -> Report:
    """Read a run's folder into the values that its report shows."""
    data = recorded.load(folder)
    lines = list(data.lines.values())
    # A lost run has no summary, but may have left a log that shows why.
    found = diagnosis.diagnose_run(folder).triage if data.summary is None else None
    triage = (data.summary or {}).get("triage") or (found.record() if found else None)
    spec = (data.plan["extract"] if data.plan else None) or {}
    capture = next((phase.started for phase in data.view.phases if phase.name == "capture"), None)
    spans = timelines.spans(data.view)
    indexes = data.indexes if spec else range(0)
    unwritten = sorted((line for line in lines if line.fate in (Fate.SKIPPED, Fate.FAILED)), key=lambda x: x.index)
    return Report(
        run_id=folder.run_id,
        host=str((folder.read("local.json") or {}).get("host", {}).get("name", "")),
        state=state,
        plan=data.plan,
        summary=data.summary,
        result=data.result,
        triage=triage,
        view=data.view,
        command=repeat_text(data.plan, data.playbook_file) if data.plan else "",
        written=f"Written {datetime.now().astimezone():%Y-%m-%d %H:%M %Z} by ctl {version()} from {folder.path}.",
        spans=spans,
        now_s=_seen_until(data, spans),
        gauges=timelines.gauges(data.events),
        rates=timelines.rates(lines, data.progress, capture),
        progress=data.progress,
        norms=figures.norm_map(lines),
        lengths=figures.lengths(lines, spec.get("max_seq_len"), len(data.truncated)),
        manifest=figures.manifest(data.lines, indexes, data.bad) if indexes else None,
        indexes=indexes,
        failed=[(line.index, line.code, line.why) for line in unwritten[:LISTED]],
    )


def _seen_until(data: recorded.Recorded, spans: list[timelines.Span]) -> float:
    """Return the last moment that anything was heard of the run, on the axis of its spans."""
    known = [span.end for span in spans if span.end is not None] + [span.begin for span in spans]
    at_work = any(span.status is Status.STARTED for span in spans)
    if at_work and data.view.ended is None and data.view.started is not None and data.events:
        known.append(data.events[-1].t - data.view.started)
    return max(known, default=0.0)
