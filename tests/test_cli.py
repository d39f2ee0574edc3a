"""The command line itself: help, topics, completion, typos, errors as JSON; nothing here needs a host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import controller.cli  # noqa: F401 - it registers the verbs
from controller.app import MEANT, app, verbs
from controller.topics import TOPICS
from tools.make_reference import TARGET, reference

HOSTS = """
schema = 1
[hosts.gpu1]
address = "gpu1.example"
python = "/opt/vllm/bin/python"
workdir = "/root/ctl"
output_roots = ["/data/out"]
gpus = 8
env = { HF_TOKEN = "hf_hush" }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hosts.toml").write_text(HOSTS)
    (tmp_path / "ctl-runs" / "20260101-000000-abcdef").mkdir(parents=True)
    return tmp_path


def ctl(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-m", "controller", *words], cwd=folder, env={**environment, **env}, text=True,
        capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False,
    )  # fmt: skip


def complete(folder: Path, line: str) -> list[str]:
    words = line.split(" ")
    done = ctl(folder, _CTL_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1))
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ctl pre", ["preflight"]),
        ("ctl ps --host gp", ["gpu1"]),
        ("ctl plan --host gpu1 --playbook eagle", ["eagle3-kimi-k2.5"]),
        ("ctl attach ", ["20260101-000000-abcdef"]),
        ("ctl help exit", ["exit-codes"]),
        ("ctl extract --stale q", ["quarantine"]),
    ],
)
def test_shells_complete_verbs_hosts_playbooks_runs_and_topics(folder: Path, line: str, words: list[str]) -> None:
    assert complete(folder, line) == words


def test_a_broken_configuration_completes_nothing_and_says_nothing(folder: Path) -> None:
    (folder / "hosts.toml").write_text("schema = ")
    assert complete(folder, "ctl ps --host ") == []


def test_a_typo_is_answered_with_the_nearest_verb(folder: Path) -> None:
    done = ctl(folder, "extrct")
    assert done.returncode == 2
    assert "hint: did you mean `extract`?" in done.stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("status", "did you mean `ps` or `summary`?"),
        ("Status", "did you mean `ps` or `summary`?"),
        ("ls", "did you mean `ps` or `hosts`?"),
        ("list", "did you mean `ps` or `hosts`?"),
        ("log", "did you mean `logs`?"),
        ("kill", "did you mean `stop`?"),
        ("verify", "did you mean `summary` or `preflight`?"),
        ("help status", "did you mean `ps` or `summary`?"),
        ("hosts ls", "did you mean `list`?"),
        ("stack", "did you mean `stacks`?"),
        ("completion", "`ctl --install-completion` sets it up"),
        ("playbooks", "there are: demo, eagle3-kimi-k2.5, "),
    ],
)
def test_another_tools_word_for_a_verb_is_answered_with_ours(folder: Path, words: str, hint: str) -> None:
    done = ctl(folder, *words.split())
    assert done.returncode == 2
    assert hint in done.stderr.partition("hint: ")[2]


def test_words_of_other_tools_lead_to_verbs_that_there_are() -> None:
    known = set(verbs())
    assert {verb for meant in MEANT.values() for verb in meant} <= known
    assert not set(MEANT) & known


TAKING_LAST = ["attach", "stop", "logs", "stacks", "replay", "summary", "report", "convert"]


def test_these_are_the_verbs_that_take_a_run_or_the_last() -> None:
    group: Any = typer.main.get_command(app)
    takes = {name for name, verb in group.commands.items() if any("--last" in each.opts for each in verb.params)}
    assert takes == set(TAKING_LAST)


@pytest.mark.parametrize("words", [*TAKING_LAST, "attach abcdef"])
def test_a_run_and_the_last_are_not_both_taken(words: str) -> None:
    more = ["--to", "specforge"] if words == "convert" else []
    runner = CliRunner()
    done = runner.invoke(app, [*words.split(), "abcdef", "--last", *more])
    assert done.exit_code == 2, done.output
    assert "name two runs" in done.output


def test_preflight_checks_whatever_extraction_can_be_planned() -> None:
    group: Any = typer.main.get_command(app)
    options = {verb: {each.opts[0] for each in group.commands[verb].params} for verb in ("plan", "preflight")}
    assert options["plan"] <= options["preflight"]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("hosts test", "use `ctl hosts test NAME`, or set CTL_HOST"),
        (
            "plan --host gpu1 --playbook eagle3-kimi-k2.5 --output /etc/x",
            "set `--output` to a folder such as /data/out/",
        ),
        ("plan --host gpu1 --playbook eagle3-kimi-k2.5", "set `path` in [output] of "),
        (
            "clear --host gpu1 --playbook speculators-train",
            "`ctl clear --host gpu1 /data/eagle3-training/hidden_states/kimi-k2.5-draft`",
        ),
        (
            "plan --host gpu1 --playbook speculators-train",
            "`ctl run speculators-train --host gpu1`; with `--dry-run`",
        ),
        ("logs --json", "valid options of `ctl logs`: "),
    ],
)
def test_a_hint_is_what_has_to_be_typed(folder: Path, line: str, hint: str) -> None:
    done = ctl(folder, *line.split())
    assert done.returncode == 2
    assert hint in " ".join((done.stdout + done.stderr).split())


def test_help_alone_lists_topics_and_verbs_and_an_unknown_word_each_once(folder: Path) -> None:
    listed = ctl(folder, "help").stdout.splitlines()
    assert listed[0].startswith("topics: ")
    assert "extract, " in listed[1]
    unknown = ctl(folder, "help", "nothing").stderr.split()
    assert unknown.count("run,") == 1


@pytest.mark.parametrize("topic", sorted(TOPICS))
def test_topics_are_printed_whole(folder: Path, topic: str) -> None:
    done = ctl(folder, "help", topic)
    assert (done.returncode, done.stdout) == (0, TOPICS[topic])


def test_an_error_is_a_document_with_json(folder: Path) -> None:
    done = ctl(folder, "plan", "--host", "gpu2", "--json")
    assert done.returncode == 2
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert document["error"]["code"] == "unknown-host"
    assert "gpu1" in document["error"]["fix"]


def test_a_plan_shows_no_secret_and_connects_nowhere(folder: Path) -> None:
    words = ["plan", "--host", "gpu1", "--playbook", "eagle3-kimi-k2.5", "--output", "/data/out/k"]
    for form in ([], ["--json"]):
        done = ctl(folder, *words, *form)
        assert done.returncode == 0, done.stderr
        assert "HF_TOKEN" in done.stdout
        assert "hush" not in done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["environment"]["HF_TOKEN"] == "***"
    assert document["capture"]["boundaries"] == [2, 30, 58, 61]
    assert not (folder / ".ssh").exists()


def test_the_exit_codes_of_the_topic_are_those_of_the_code() -> None:
    from controller.core.errors import ExitCode

    listed = {int(line.split()[0]) for line in TOPICS["exit-codes"].splitlines() if line[:8].strip().isdigit()}
    assert listed == {code.value for code in ExitCode}


def test_the_reference_page_is_what_the_code_says() -> None:
    assert TARGET.read_text() == reference(), "run: python tools/make_reference.py"


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        ("extract --dry-run=sever", "`--dry-run` has no value `sever`", "did you mean `server`?"),
        ("clear --dry-run=server", "`--dry-run` of `ctl clear` does not take a value", "see `ctl clear --help`"),
        ("plan --shard 2", "`--shard` is `2`, and must say which share and of how many: I/N", "`--shard 2/4`"),
        ("plan --boundaries 2;3", "`--boundaries` is `2;3`, and must be whole numbers with commas", "2,30,58,61"),
        ("plan --max-samples x", "`--max-samples`: it must be a whole number, and is `x`", "see `ctl plan --help`"),
        (
            "plan --max-samples 1.5",
            "`--max-samples`: it must be a whole number, and is `1.5`",
            "see `ctl plan --help`",
        ),
        ("plan --max-samples 0", "`--max-samples`: it must be at least 1, and is `0`", "see `ctl plan --help`"),
        ("ps --limit 0", "it must be at least 1, and is `0`", "see `ctl ps --help`"),
    ],
)
def test_a_flag_is_answered_alone_and_in_the_words_of_the_files(folder: Path, line: str, what: str, fix: str) -> None:
    done = ctl(folder, *line.split(), "--json")
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 2
    assert what in error["what"]
    assert fix in error["fix"]
    assert "Input should" not in done.stdout


def test_options_that_help_does_not_show_are_not_offered(folder: Path) -> None:
    assert "--dry-run-server" not in json.loads(ctl(folder, "extract", "--nope", "--json").stdout)["error"]["fix"]
