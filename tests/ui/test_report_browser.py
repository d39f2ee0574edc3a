"""Reports in a real browser: light and dark, of good, failed, large and hostile runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from support.browser import chromium, opened
from support.reported import HOSTILE, write_run

from controller.reporting import write_report
from controller.runfolder import RunFolder

LARGEST = 2 << 20
"""Bytes of a report, however many samples its run had."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


def report_of(folder: Path, **run: object) -> Path:
    return write_report(RunFolder(write_run(folder, **run).path))  # type: ignore[arg-type]


def luminance(colour: str) -> float:
    """Return the relative luminance of `rgb(r, g, b)`, as WCAG 2 defines it."""
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted([luminance(one), luminance(other)], reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(
    "run", [{}, {"failed": True}, {"text": HOSTILE, "name": HOSTILE}, {"text": HOSTILE, "failed": True}]
)
def test_a_report_asks_for_nothing_says_nothing_and_is_readable(
    browser: Browser, tmp_path: Path, run: dict[str, object]
) -> None:
    path = report_of(tmp_path, **run)
    papers = set()
    for scheme in ("light", "dark"):
        with opened(browser, path, scheme=scheme) as seen:
            assert (seen.console, seen.dialogs, seen.requests) == ([], [], [path.as_uri()])
            assert seen.page.evaluate("document.scripts.length") == 0
            paper, ink = seen.colour("body", "backgroundColor"), seen.colour("body", "color")
            assert contrast(paper, ink) > 7
            assert seen.colour("figure svg text", "fill") == ink  # charts follow the scheme
            for css in ("soft", "good", "bad", "warn"):
                if seen.page.query_selector(f".{css}"):
                    assert contrast(paper, seen.colour(f".{css}", "color")) > 4.5, css
            papers.add(paper)
    assert len(papers) == 2


def test_names_of_a_host_are_shown_as_they_are_written(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, report_of(tmp_path, text=HOSTILE, name=HOSTILE)) as seen:
        text = seen.page.inner_text("main")
        assert "<script>alert(1)</script>" in text
        assert "$\\frac{1}{0}$" in text
        assert seen.page.query_selector("img") is None
        links = seen.page.eval_on_selector_all("a", "links => links.map(link => link.getAttribute('href'))")
        assert all(link.startswith("#") for link in links)


def test_the_policy_forbids_what_escaping_would_have_let_through(browser: Browser, tmp_path: Path) -> None:
    path = report_of(tmp_path)
    bad = '<script>document.title = "owned"</script><img src="http://127.0.0.1:9/x"><p onclick="x()" id="bait">b</p>'
    spoilt = tmp_path / "spoilt.html"
    spoilt.write_text(path.read_text().replace("</main>", f"{bad}</main>"))
    with opened(browser, spoilt) as seen:
        assert "owned" not in seen.page.title()
        assert sum("Content Security Policy" in line for line in seen.console) >= 2


def test_a_chart_has_words_for_who_cannot_see_it(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, report_of(tmp_path)) as seen:
        names = seen.page.eval_on_selector_all(
            "figure svg",
            """charts => charts.map(chart => [chart.getAttribute("role"), chart.getAttribute("aria-labelledby")
               .split(" ").map(id => document.getElementById(id).textContent).join(": ")])""",
        )
        assert {role for role, _ in names} == {"img"}
        assert len(names) == 7
        said = "\n".join(words for _, words in names)
        for part in ("the longest is", "mean utilisation", "tokens a second", "1 cell with values that are not",
                     "the limit is 4,096", "986 written, 10 skipped, 0 failed, 4 missing"):  # fmt: skip
            assert part in said, said
        twice = seen.page.evaluate("""() => { const ids = [...document.querySelectorAll("[id]")].map(each => each.id);
            return ids.filter((id, place) => ids.indexOf(id) !== place); }""")
        assert twice == []


@pytest.mark.parametrize("width", [1100, 420])
def test_a_page_never_scrolls_sideways(browser: Browser, tmp_path: Path, width: int) -> None:
    with opened(browser, report_of(tmp_path, text=HOSTILE + "x" * 500), width=width) as seen:
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(
    ("samples", "written"), [(10_000, "9,850"), pytest.param(100_000, "98,501", marks=pytest.mark.slow)]
)
def test_many_samples_fit_into_a_small_file(browser: Browser, tmp_path: Path, samples: int, written: str) -> None:
    path = report_of(tmp_path, samples=samples, seconds=7200.0)
    assert path.stat().st_size < LARGEST
    with opened(browser, path) as seen:
        assert (seen.console, seen.requests) == ([], [path.as_uri()])
        assert f"{written} of {samples:,} written" in seen.page.inner_text("#outcome")
