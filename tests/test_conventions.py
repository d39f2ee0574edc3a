"""What every verb has in common: one form of error, examples in its help, quiet, verbose and dry runs."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from controller import app, checkup, commands
from controller.cli import app as application
from controller.core.errors import ExitCode, UsageError
from controller.options import view_mode
from remote_payload.extract.summarize import counts_text

ROOT = Path(__file__).parents[1]

HOSTS = """
schema = 1
[hosts.gpu1]
address = "gpu1.example"
python = "/opt/vllm/bin/python"
workdir = "/root/ctl"
output_roots = ["/data/out"]
gpus = 8
playbook = "eagle3-kimi-k2.5"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "hosts.toml").write_text(HOSTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CTL_HOST", "CTL_PLAYBOOK", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def leaves() -> list[tuple[str, Any]]:
    group: Any = typer.main.get_command(application)
    found = []
    for name, each in group.commands.items():
        below = getattr(each, "commands", None)
        found += [(f"{name} {word}", leaf) for word, leaf in below.items()] if below else [(name, each)]
    return found


@pytest.mark.parametrize(("words", "command"), leaves())
def test_every_verb_has_a_sentence_and_examples_of_itself(words: str, command: Any) -> None:
    summary, _, examples = command.help.partition("\n\nExamples:\n")
    assert summary.strip()
    if not command.hidden:
        assert examples.strip(), f"{words} has no examples"
        assert all(line.strip().startswith(f"ctl {words}") for line in examples.splitlines())


@pytest.mark.parametrize(("words", "command"), leaves())
def test_every_option_is_explained(words: str, command: Any) -> None:
    for parameter in command.params:
        assert getattr(parameter, "hidden", False) or parameter.help, f"{words}: {parameter.name}"


def test_a_switch_is_not_shown_as_if_it_took_a_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert app.run(["extract", "--help"]) == 0
    page = capsys.readouterr().out
    rows = {words[1]: words[2] for line in page.splitlines() if (words := line.split())[1:2] and "--" in words[1]}
    assert rows["--adopt"] == "Claim"
    assert rows["--help"] == "-h"
    assert "bool" not in page.lower()


def test_examples_stand_before_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["stop", "--help"]) == 0
    page = capsys.readouterr().out
    assert page.index("Examples:") < page.index("Options")


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (["extrct"], 2, "did you mean `extract`?"),
        (["hosts", "lst"], 2, "did you mean `list`?"),
        (["extract", "--hots", "gpu1"], 2, "did you mean `--host`?"),
        (["stop", "--grace", "soon"], 2, "see `ctl stop --help`"),
        (["ledger", "merge"], 2, "see `ctl ledger merge --help`"),
        (["extract", "--progress", "jsn"], 2, "did you mean `json`?"),
        (["plan", "--host", "gpu2"], 2, "did you mean `gpu1`?"),
        (["plan", "--host", "gpu1", "--playbook", "eagle3-kimi"], 2, "did you mean `eagle3-kimi-k2.5`?"),
        (["plan", "--host", "gpu1", "--stale", "claer"], 2, "did you mean `clear`?"),
        (["plan", "--host", "gpu1", "--format", "specforg"], 2, "did you mean `specforge`?"),
        (["extract", "--host", "gpu1", "--allow", "disk-lo", "--dry-run"], 2, "did you mean `disk-low`?"),
        (["run", "speculators-train", "--host", "gpu1", "--allow", "foo"], 2, "the code stands below each refusal"),
        (["preflight", "--host", "gpu1", "--allow", "gpu-cuont"], 2, "did you mean `gpu-count`?"),
        (["help", "exit-code"], 2, "did you mean `exit-codes`?"),
        (["attach", "none-such"], 2, "ctl ps --host HOST"),
    ],
)
def test_a_mistake_is_answered_alike_as_text_and_as_json(
    words: list[str], code: int, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(words) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert hint in said.err
    assert "Traceback" not in said.err
    if words[0] != "help":
        assert app.run([*words, "--json"]) == code
        said = capsys.readouterr()
        error = json.loads(said.out)["error"]
        assert hint in error["fix"]
        assert set(error) >= {"code", "what", "why", "fix"}


@pytest.mark.parametrize("words", ["extract --json --host", "run --json -H", "ledger merge --json --output"])
def test_an_option_without_its_value_leads_to_the_verbs_own_help(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(words.split()) == 2
    verb = words.partition(" --json")[0]
    assert json.loads(capsys.readouterr().out)["error"]["fix"] == f"see `ctl {verb} --help`"


def test_words_after_two_dashes_are_the_commands_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["run", "--host", "nowhere", "--", "tool", "--json", "-v"]) == 2
    said = capsys.readouterr()
    assert (said.out, "unknown host" in said.err) == ("", True)


def defect(*_: object, **__: object) -> None:
    raise RuntimeError("something of our own")


def test_an_error_of_usage_always_says_what_to_do() -> None:
    bare = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "controller").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        and node.func.id in ("UsageError", "ConfigError") and "fix" not in {each.arg for each in node.keywords}
    ]  # fmt: skip
    assert bare == []


def test_a_defect_leaves_a_report_and_no_screen_of_frames(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "hosts", defect)
    monkeypatch.setattr(sys, "argv", ["ctl", "hosts", "secret-word"])
    assert app.run(["hosts", "list"]) == 1
    said = capsys.readouterr().err
    assert "unexpected RuntimeError: something of our own" in said
    assert "Traceback" not in said
    (report,) = (folder / ".local" / "state" / "ctl" / "defects").iterdir()
    assert str(report) in said
    assert report.stat().st_mode & 0o777 == 0o600
    assert "in defect" in report.read_text()
    assert "secret-word" not in report.read_text()


def test_verbose_shows_the_frames_and_json_names_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "hosts", defect)
    assert app.run(["hosts", "list", "-v", "--json"]) == 1
    said = capsys.readouterr()
    assert "Traceback" in said.err
    assert Path(json.loads(said.out)["error"]["data"]["report"]).is_file()


def test_an_interrupt_is_130_and_a_document_with_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "hosts", interrupted)
    assert app.run(["hosts", "list", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "interrupted"


@pytest.mark.parametrize(
    ("given", "view"),
    [
        ({}, "auto"),
        ({"quiet": 1}, "none"),
        ({"verbose": True}, "plain"),
        ({"as_json": True}, "plain"),
        ({"progress": "json", "quiet": 1}, "json"),
        ({"progress": "json", "as_json": True}, "json"),
    ],
)
def test_how_progress_is_shown(given: dict[str, Any], view: str) -> None:
    assert view_mode(**{"progress": "auto", "quiet": 0, "verbose": False, "as_json": False, **given}) == view


@pytest.mark.parametrize("given", [{"quiet": 1, "verbose": True}, {"quiet": 2, "as_json": True}, {"progress": "x"}])
def test_contradictions_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        view_mode(**{"progress": "auto", "quiet": 0, "verbose": False, "as_json": False, **given})


@pytest.mark.parametrize(
    "words",
    [
        ["extract", "--host", "gpu1", "--output", "/data/out/k", "--dry-run"],
        ["run", "--host", "gpu1", "--dry-run", "--", "nvidia-smi"],
        ["rehearse", "--host", "gpu1", "--dry-run"],
    ],
)
def test_a_dry_run_connects_nowhere_and_leaves_nothing(
    folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if words[0] == "rehearse":
        (folder / "hosts.toml").write_text(HOSTS.replace("/data/out", "/data/eagle3-training/hidden_states"))
    assert app.run(words) == 0, capsys.readouterr()
    assert "gpu1" in capsys.readouterr().out
    assert not (folder / "ctl-runs").exists()


def test_a_dry_run_on_the_server_is_a_preflight(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def preflight(intentions: Any, *, as_json: bool) -> ExitCode:
        asked.extend(intention.host.name for intention in intentions)
        return ExitCode.REFUSED

    monkeypatch.setattr(checkup, "preflight", preflight)
    assert app.run(["extract", "--host", "gpu1", "--output", "/data/out/k", "--dry-run=server"]) == 3
    assert asked == ["gpu1"]


def test_silence_is_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--host", "gpu1", "--dry-run", "-qq", "--", "nvidia-smi"]
    assert app.run(words) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


def test_no_colour_beats_whatever_would_force_it(folder: Path) -> None:
    forced = {"FORCE_COLOR": "1", "GITHUB_ACTIONS": "true", "NO_COLOR": "1", "TERM": "xterm-256color"}
    for words in (["--help"], ["extrct"], ["hosts"], ["config", "show"], ["summary", "--nosuch"], ["help", "runs"]):
        done = subprocess.run(
            [sys.executable, "-m", "controller", *words], cwd=folder, capture_output=True, timeout=60, check=False,
            env={**forced, "PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.stdout + done.stderr
        assert b"\x1b" not in done.stdout + done.stderr, (words, "neither bold nor faint: nothing of it is forced")


def test_help_explains_verbs_and_topics(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["help", "hosts", "add"]) == 0
    assert "ctl hosts add" in capsys.readouterr().out
    assert app.run(["help"]) == 0
    assert "exit-codes" in capsys.readouterr().out


COUNTED = re.compile(r" (more |other |half-written )?(samples|entries|records|files|tokens)\b")
TEXTS = ("kind", "share")
"""Names that stand before such a word and are no numbers."""


def test_counts_in_sentences_have_thousands_separators() -> None:
    """`3,011 entries` on every line, wherever the sentence is made."""
    bare = []
    for path in sorted([*(ROOT / "controller").rglob("*.py"), *(ROOT / "remote_payload").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            pairs = pairwise(node.values) if isinstance(node, ast.JoinedStr) else ()
            for value, after in pairs:
                if not isinstance(value, ast.FormattedValue) or not isinstance(after, ast.Constant):
                    continue
                shown = ast.unparse(value.value)
                formatted = value.format_spec is not None or re.match(r"\w*_text\(", shown) or shown in TEXTS
                if COUNTED.match(str(after.value)) and not formatted:
                    bare.append(f"{path.relative_to(ROOT)}:{node.lineno}: {shown}{after.value}")
    assert bare == []


def test_the_counts_of_a_proof_are_words() -> None:
    counts = {"expected": 3000, "written": 2991, "skipped": 12, "failed": 0, "missing": 9}
    assert counts_text(counts) == "2,991 of 3,000 samples written, 12 skipped, 9 missing"
    assert counts_text({**counts, "written": 3000, "skipped": 0, "missing": 0}) == "3,000 of 3,000 samples written"
