"""`ctl report` and the charts of `ctl summary`, of runs that are held here."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.recorded import RUN, TRACEBACK
from support.reported import HOSTILE, write_run

from controller import reporting
from controller.core.errors import UsageError
from controller.core.runview import ProgressView
from controller.core.timelines import Gauge, Gauges
from controller.runfolder import RunFolder
from controller.ui import svg
from controller.ui.report import page
from controller.ui.sample_charts import BINS, MAP_CELLS, print_sample_charts

ROOT = Path(__file__).parents[1]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "hosts.toml").write_text(
        'schema = 1\n[hosts.gpu-host-1]\naddress = "127.0.0.1"\nport = 1\npython = "/opt/python"\n'
        'workdir = "/root/ctl"\noutput_roots = ["/data/out"]\ngpus = 8\n'
    )
    return tmp_path


def ctl(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "controller", *words], cwd=folder, env={**base, **env}, text=True,
        capture_output=True, stdin=subprocess.DEVNULL, timeout=120, check=False,
    )  # fmt: skip


def test_a_report_lies_in_the_run_folder_for_its_owner_only(project: Path) -> None:
    write_run(project / "ctl-runs", samples=50)
    done = ctl(project, "report", "--last")
    assert (done.returncode, done.stderr) == (0, "")
    path = project / "ctl-runs" / RUN / "report.html"
    assert done.stdout == f"{path}\n"
    assert path.stat().st_mode & 0o777 == 0o600
    named = ctl(project, "report", RUN, "-o", "mine.html", "--json")
    assert json.loads(named.stdout)["path"] == str(project / "mine.html")
    # But for the moment of writing the same run gives the same page.
    first, second = ((each.read_text().partition("<footer")[0]) for each in (path, project / "mine.html"))
    assert first == second


def test_open_starts_the_browser(project: Path) -> None:
    write_run(project / "ctl-runs", samples=20)
    browser = project / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {project}/opened\n')
    browser.chmod(0o755)
    done = ctl(project, "report", "--last", "--open", BROWSER=f"{browser} %s")
    assert done.returncode == 0, done.stderr
    assert (project / "opened").read_text().strip() == Path(done.stdout.strip()).as_uri()


def test_a_report_that_cannot_be_written_loses_nothing(project: Path) -> None:
    write_run(project / "ctl-runs", samples=20)
    done = ctl(project, "report", "--last", "-o", "nowhere/report.html")
    assert done.returncode == 2
    assert "cannot write" in done.stderr
    assert "-o FILE" in done.stderr


def test_without_matplotlib_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError) as caught:
        svg.require_matplotlib()
    assert "ctl-hidden-states[report]" in caught.value.fix


def page_of(folder: Path, **run: object) -> str:
    return reporting.write_report(RunFolder(write_run(folder, **run).path)).read_text()  # type: ignore[arg-type]


def test_a_report_says_what_ran_where_with_what_and_how_to_repeat_it(tmp_path: Path) -> None:
    page = page_of(tmp_path, samples=300)
    for part in (
        "extract eagle3-kimi-k2.5 on gpu-host-1", "succeeded", "10.1.230.174", "8 GPUs", "0.24.0",
        "/models/Kimi-K2.5",
        "/dev/shm holds 14.0 GiB of an earlier vLLM", "rm /dev/shm/psm_0f3a91", "buffers were full for 3 s",
        "ctl extract --host gpu-host-1 --playbook eagle3-kimi-k2.5 --data /data/chats.jsonl", "not JSON: line 1",
    ):  # fmt: skip
        assert part in page, part


def test_a_command_has_its_values_and_no_charts_without_data(tmp_path: Path) -> None:
    folder = RunFolder(write_run(tmp_path, samples=5).path)
    reports = [
        ProgressView(
            t=t, done=done, total=12, tokens=0, bytes=0, skipped=0, failed=0, unit="steps", values={"loss": loss}
        )
        for t, done, loss in ((1.0, 1, 2.5), (2.0, 12, 0.25))
    ]  # fmt: skip
    gauge = Gauge(name="cpu", util=(None, None), memory=(1.0, 2.0), memory_total=4.0)
    gauges = Gauges(start=0.0, times=(0.0, 1.0), devices=(gauge,))
    text = page(replace(reporting.gather(folder), progress=reports, rates=None, gauges=gauges))
    assert 'id="throughput"' not in text
    assert "<td>steps</td><td>1</td><td>12 of 12</td>" in text
    assert "<td>loss</td><td>2.5</td><td>0.25</td>" in text
    assert "Memory in use by time" in text
    assert "Utilisation by time" not in text
    assert 'id="progress"' not in page_of(tmp_path / "extraction", samples=5)


def test_the_report_of_a_failed_run_begins_with_the_cause_and_the_whole_traceback(tmp_path: Path) -> None:
    page = page_of(tmp_path, failed=True)
    assert page.index('id="problems"') < page.index('id="outcome"')
    assert "Cause: a decoder layer is called with other arguments" in page
    assert "ranks 0-7: " in page
    for line in TRACEBACK.splitlines():
        assert line.strip().replace('"', "&quot;").replace("'", "&#x27;") in page


def test_nothing_of_a_host_is_markup(tmp_path: Path) -> None:
    page = page_of(tmp_path, text=HOSTILE, name=HOSTILE)
    assert "<script" not in page
    assert "<img" not in page
    assert not {"\x1b", "\x07", "\u202e"} & set(page)


def test_a_run_that_has_not_ended_is_reported_from_what_is_here(project: Path) -> None:
    run = write_run(project / "ctl-runs", samples=40)
    for name in ("result.json", "summary.json"):
        (run.path / name).unlink()
    done = ctl(project, "report", RUN)
    assert done.returncode == 0, done.stderr
    assert "the report shows what was copied before" in done.stderr
    page = Path(done.stdout.strip()).read_text()
    assert "has not ended, or was lost" in page
    assert "40 written, 0 skipped, 0 failed, 962 missing" in page  # of as many as progress told


def test_an_empty_or_damaged_run_folder_still_gives_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path, samples=30)
    for path in run.path.rglob("*.jsonl"):
        path.write_bytes(b"\xff\xfe no json\n[1]\n" + path.read_bytes()[:-7])
    assert "Samples" in reporting.write_report(RunFolder(run.path)).read_text()
    for name in ("plan.json", "summary.json", "result.json"):
        (run.path / name).unlink()
    for path in run.path.rglob("*.jsonl"):
        path.unlink()
    page = reporting.write_report(RunFolder(run.path), "lost").read_text()
    assert "The plan of this run was never copied here" in page


# ------------------------------------------------------------------------------------- on a terminal


def charts(folder: Path, encoding: str = "utf-8", **run: object) -> str:
    data = reporting.recorded.load(RunFolder(write_run(folder, **run).path))  # type: ignore[arg-type]
    lines = list(data.lines.values())
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_sample_charts(
        Console(file=stream, width=100),
        reporting.figures.norm_map(lines, most=MAP_CELLS),
        reporting.figures.lengths(lines, 4096, len(data.truncated), most=BINS),
    )
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_summary_shows_norms_and_lengths_on_any_terminal(tmp_path: Path, encoding: str) -> None:
    text = charts(tmp_path, encoding)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    rows = {line.split()[0]: line for line in lines if line.split()[:1] in (["2"], ["30"], ["58"], ["61"])}
    assert list(rows) == ["61", "58", "30", "2"]
    assert ["X" in row for row in rows.values()] == [True, False, False, False]
    heights = "_.:-=+#" if encoding == "ascii" else "▁▂▃▄▅▆▇"
    levels = [heights.index(row.split()[1][0]) for row in rows.values()]
    assert levels == sorted(levels, reverse=True)
    assert (levels[0], levels[-1]) == (6, 0)
    assert "max_seq_len 4,096, 3 samples cut" in text


def test_ctl_summary_ends_with_the_charts(project: Path) -> None:
    write_run(project / "ctl-runs", samples=50)
    done = ctl(project, "summary", "--last")
    assert done.returncode == 0, done.stderr
    assert "by boundary, samples from left to right" in done.stdout
    assert "samples by their tokens" in done.stdout
    assert "boundaries" in json.loads(ctl(project, "summary", "--last", "--json").stdout)
