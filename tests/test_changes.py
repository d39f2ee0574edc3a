"""Changelog fragments have the form that is folded into CHANGELOG.md, and folding takes each of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FRAGMENTS = sorted(path for path in (ROOT / "changes").glob("*.md") if path.name != "README.md")
TOPICS = [
    kind["directory"] for kind in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
]


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: path.name)
def test_a_fragment_is_named_by_its_topic_and_holds_bullets(path: Path) -> None:
    parts = path.name.split(".")
    assert len(parts) == 3, f"rename changes/{path.name} to changes/{parts[0]}.TOPIC.md; topics: {', '.join(TOPICS)}"
    assert parts[1] in TOPICS
    for line in path.read_text().splitlines():
        assert re.match(r"- \S|  \S", line), f"{path.name}: {line!r} is neither a bullet nor its continuation"


def test_folding_takes_every_fragment_and_keeps_what_was_released(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "changes", tmp_path / "changes")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True, timeout=60)
    for version in ("9.8.0", "9.9.0"):
        if version == "9.9.0":
            (tmp_path / "changes" / "later.hosts.md").write_text("- Something later.\n")
        subprocess.run(
            [sys.executable, "-m", "towncrier", "build", "--yes", "--version", version, "--date", "2026-01-01"],
            cwd=tmp_path, check=True, capture_output=True, timeout=60,
        )  # fmt: skip
    folded = (tmp_path / "CHANGELOG.md").read_text()
    assert folded.index("## 9.9.0") < folded.index("- Something later.") < folded.index("## 9.8.0")
    for path in FRAGMENTS:
        assert path.read_text().strip() in folded
    left = {path.name for path in (tmp_path / "changes").iterdir()}
    assert left == {"README.md", "template.md.jinja"}


def test_the_hooks_before_a_commit_are_those_of_make_lint() -> None:
    subprocess.run([sys.executable, "-m", "pre_commit", "validate-config"], cwd=ROOT, check=True, timeout=60)
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    for line in (ROOT / "Makefile").read_text().splitlines():
        if line.startswith("\t.venv/bin/"):
            tool = line.split()[0]
            assert tool in config, f"{tool} is run by make lint, and not before a commit"
