"""The documents say what is so: links lead somewhere, commands exist and run, every key is explained."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel
from support.markdown import SHELL, Block, anchors, blocks, indented_commands, links, spans

from controller.cli import app
from controller.core.model import Host, Playbook
from controller.core.playbook import parse_playbook
from controller.core.validation import NOT_IN_FILES
from tools.make_reference import DECISIONS, decisions

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "changes/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
GENERATED = ROOT / "docs" / "reference.md"

PROJECT = """
schema = 1
[hosts.gpu1]
address = "gpu1.example"
python = "/opt/vllm/bin/python"
workdir = "/root/ctl"
output_roots = ["/data"]
gpus = 8
playbook = "eagle3-kimi-k2.5"
"""

PLACEHOLDERS = {"RUN": "2562e8", "HOST": "gpu1", "H": "gpu1", "TOPIC": "json", "FORMAT": "specforge", "FILE": "a.log"}
"""Words that stand for one of the reader's own."""


def shell_blocks() -> Iterator[Block]:
    for page in PAGES:
        yield from (block for block in blocks(page) if block.info in SHELL)


def name_of(value: object) -> str:
    return value.place if isinstance(value, Block) else str(value)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in links(page):
        if "://" in link or link.startswith("mailto:"):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target) if target else page
        assert file.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {link} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_stand_in_console_blocks(page: Path) -> None:
    """So that none escapes the tests below; the reference is made from the code, which has tests of its own."""
    if page != GENERATED:
        assert indented_commands(page, ("ctl", "make", "pip", "python", "$")) == []
        assert [block.place for block in blocks(page) if not block.info] == []


@pytest.mark.parametrize("block", [b for b in shell_blocks() if "not run" not in b.markers], ids=name_of)
def test_commands_of_the_documents_run(block: Block, tmp_path: Path) -> None:
    if block.markers.get("setup") != "empty":
        (tmp_path / "hosts.toml").write_text(PROJECT)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ctl"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m controller "$@"\n')
    program.chmod(0o755)
    environment = {
        "PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    for command in block.commands:
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block.place}: {command}\n{done.stderr}"


def mentioned() -> Iterator[tuple[str, str]]:
    """Yield every `ctl ...` of a block or between backticks, with its page."""
    for page in PAGES:
        found = [span for span in spans(page) if span.startswith("ctl ")]
        found += [line for block in blocks(page) if block.info in SHELL for line in block.commands]
        yield from ((page.name, line) for line in dict.fromkeys(found) if line.startswith("ctl "))


def test_every_mentioned_command_exists_with_its_options() -> None:
    wrong = [f"{page}: {line}: {problem}" for page, line in mentioned() if (problem := problem_of(line))]
    assert wrong == []


@functools.cache
def whole() -> Any:
    """Return all of `ctl` as a tree; to build it takes as long as to look through hundreds of lines."""
    return typer.main.get_command(app)


def problem_of(line: str) -> str:
    """Say what of a command line does not exist: a verb, a verb of a group, or an option."""
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line, comments=True)[1:]]
    if "--" in words:
        words = words[: words.index("--")]
    command = whole()
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        if words[0] not in command.commands:
            # A group of its own, such as `ctl hosts`, or a name for all verbs.
            return "" if words[0].isupper() else f"there is no {words[0]}"
        command = command.commands[words.pop(0)]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help", "-h"}
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in known:
            return f"there is no {name}"
        if name.startswith("-") and not name.startswith("--") and not {f"-{letter}" for letter in name[1:]} <= known:
            return f"there is no {name}"
    return ""


def leaves(group: Any, words: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, f"{words}{name} ")
        elif not command.hidden:
            yield f"{words}{name}", command


def test_every_verb_with_json_has_its_fields_documented() -> None:
    page = (ROOT / "docs" / "json.md").read_text()
    verbs = [words for words, leaf in leaves(whole()) if any("--json" in p.opts for p in leaf.params)]
    assert [verb for verb in verbs if f"\n## {verb}\n" not in page and f"`ctl {verb}`" not in page] == []


def test_an_invented_option_would_be_noticed() -> None:
    assert problem_of("ctl extract --host gpu1 --fast") == "there is no --fast"
    assert problem_of("ctl hosts rent") == "there is no rent"
    assert problem_of("ctl logs RUN -f") == ""


def keys_of(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if name in NOT_IN_FILES:
            continue
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys_of(inner)
        else:
            yield field.alias or name


@pytest.mark.parametrize(("model", "page"), [(Playbook, "playbooks.md"), (Host, "hosts.md")])
def test_every_key_of_a_file_is_explained(model: type[BaseModel], page: str) -> None:
    said = set(spans(ROOT / "docs" / page)) | {span.strip("[]") for span in spans(ROOT / "docs" / page)}
    assert sorted(set(keys_of(model)) - said) == []


@pytest.mark.parametrize("block", [b for page in PAGES for b in blocks(page) if b.info == "toml"], ids=name_of)
def test_toml_of_the_documents_is_valid(block: Block) -> None:
    document = tomllib.loads(block.text)
    if {"model", "data", "output"} <= document.keys():
        parse_playbook("page", block.place, block.text)


def test_the_renaming_for_angelslim_keeps_every_tensor(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (block,) = [b for b in blocks(ROOT / "docs" / "feeding.md") if b.info == "python"]
    (tmp_path / "rename.py").write_text(block.text)
    (tmp_path / "in" / "rows_0-2000").mkdir(parents=True)
    sample = {
        "input_ids": torch.arange(3), "loss_mask": torch.ones(3), "aux_hidden_state": torch.rand(1, 3, 12),
        "hidden_state": torch.rand(1, 3, 4), "ctl": "{}",
    }  # fmt: skip
    torch.save(sample, tmp_path / "in" / "rows_0-2000" / "data_0.ckpt")
    subprocess.run([sys.executable, "rename.py", "in", "out"], cwd=tmp_path, check=True, timeout=120)
    written = torch.load(tmp_path / "out" / "rows_0-2000" / "data_0.ckpt", weights_only=True)
    assert set(written) == {"input_ids", "loss_mask", "hidden_states", "target_hiddens"}
    assert torch.equal(written["hidden_states"], sample["aux_hidden_state"])
    assert torch.equal(written["target_hiddens"], sample["hidden_state"])


@pytest.mark.parametrize("drawing", sorted((ROOT / "docs").rglob("*.svg")), ids=lambda path: path.name)
def test_drawings_can_be_read_without_seeing_them_and_in_the_dark(drawing: Path) -> None:
    root = ElementTree.parse(drawing).getroot()
    words = "{http://www.w3.org/2000/svg}"
    assert root.findtext(f"{words}title")
    assert "script" not in drawing.read_text()
    if drawing.name == "boundaries.svg":
        assert root.findtext(f"{words}desc")
        assert "prefers-color-scheme: dark" in drawing.read_text()


def test_the_index_of_decisions_is_whole() -> None:
    assert DECISIONS.read_text() == decisions(), "run: python tools/make_reference.py"


def test_contributing_is_one_page() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 60
