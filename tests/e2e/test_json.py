"""docs/json.md against what the commands print: every documented field is there, for each verb."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import Project

pytestmark = pytest.mark.sshd

PAGE = Path(__file__).parents[2] / "docs" / "json.md"

LOG = Path(__file__).parents[1] / "data" / "vllm-logs" / "h200-0.24-load-keyerror.log"

NEW_HOST = ("--gpus", "1", "--python", "/p/python", "--output-root", "/o/out")


def documented(title: str) -> list[str]:
    """Return the fields in the first column of the table below a heading."""
    section = PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    first = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    fields = [name for cell in first for name in re.findall(r"`([^`]+)`", cell)]
    assert fields, title
    return fields


def missing(document: dict[str, Any], title: str) -> list[str]:
    found = []
    for field in documented(title):
        inner: Any = document
        for part in field.split("."):
            inner = inner.get(part, ...) if isinstance(inner, dict) else ...
        found += [field] if inner is ... else []
    return found


@pytest.fixture(scope="module")
def runs(project: Project) -> tuple[str, str]:
    ids = []
    for words in (["true"], ["sh", "-c", "exit 3"]):
        project.ctl("run", "--host", "demo", "-q", "--", *words)
        ids.append(project.json("summary", "--last")["run_id"])
    return ids[0], ids[1]


@pytest.mark.parametrize(
    ("title", "words", "code"),
    [
        ("summary", ["summary", "RUN"], 0),
        ("ps", ["ps", "--host", "demo"], 0),
        ("report", ["report", "RUN"], 0),
        ("stop", ["stop", "RUN"], 0),
        ("preflight", ["preflight", "--host", "demo", "--stale", "clear"], None),
        ("hosts test", ["hosts", "test", "demo"], 0),
        ("hosts", ["hosts"], 0),
        ("hosts add, init", ["hosts", "add", "x", *NEW_HOST, "--dry-run"], 0),
        ("clear", ["clear", "output/none", "--host", "demo"], 0),
        ("prune", ["prune", "--host", "demo", "--keep", "0", "--dry-run"], 0),
        ("diff", ["diff", "RUN", "OTHER"], 0),
        ("triage", ["triage", str(LOG)], 0),
        ("plan", ["plan", "--host", "demo"], 0),
        ("config show", ["config", "show"], 0),
    ],
)  # fmt: skip
def test_every_documented_field_is_printed(
    project: Project, runs: tuple[str, str], title: str, words: list[str], code: int | None
) -> None:
    names = {"RUN": runs[0], "OTHER": runs[1]}
    done = project.ctl(*(names.get(word, word) for word in words), "--json")
    assert done.returncode == code or (code is None and done.returncode in (0, 3)), done.stderr
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert missing(document, title) == []


def test_every_event_is_a_line_with_progress_json(project: Project) -> None:
    done = project.ctl("run", "--host", "demo", "--progress", "json", "--json", "--", "sh", "-c", "exit 3")
    assert done.returncode == 100
    assert json.loads(done.stdout)["end_reason"] == "job-failed"
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert {"stage", "finding", "end"} <= {event["type"] for event in events}
    assert all({"wire", "seq", "run", "host", "writer", "t", "type"} <= event.keys() for event in events)


def test_a_run_that_is_left_is_a_document_too(project: Project) -> None:
    done = project.ctl("run", "--host", "demo", "--detach", "--json", "--", "true")
    assert done.returncode == 8, done.stderr
    document = json.loads(done.stdout)
    assert missing(document, "detached") == []
    assert project.ctl("attach", document["run_id"], "-q").returncode == 0


def test_a_refusal_holds_its_findings(project: Project) -> None:
    name = project.playbook("json-refused", ('path = "models/kimi-k25-tiny"', 'path = "models/nowhere"'))
    error = project.json("extract", "--host", "demo", "--playbook", name, "--yes", code=3)["error"]
    assert error["code"] == "model-missing"
    assert any(finding["level"] == "fail" for finding in error["data"]["findings"])
