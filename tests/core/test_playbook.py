"""Playbooks of extractions: defaults, what is refused and how the refusal speaks, and overrides."""

from __future__ import annotations

import pytest

from controller.core.errors import ConfigError, UsageError
from controller.core.model import CapturePath, Overrides, Playbook
from controller.core.playbook import override, parse_playbook
from remote_payload.host.protocol import Stale

PLAYBOOK = """\
schema = 1
[model]
path = "models/m"
[data]
path = "data/d.jsonl"
[output]
path = "states/m"
"""


def playbook(text: str = PLAYBOOK) -> Playbook:
    return parse_playbook("m", "/project/playbooks/m.toml", text)


def playbook_refused(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        playbook(text)
    return caught.value


def test_playbook_has_the_documented_defaults() -> None:
    made = playbook()
    assert made.kind == "extract"
    assert made.capture.boundaries == "eagle3"
    assert made.capture.path is CapturePath.AUTO
    assert made.output.stale is Stale.FAIL
    assert made.engine.arguments == {}


def test_durations_are_seconds_or_text() -> None:
    limits = playbook(
        PLAYBOOK + '[limits]\nload_timeout = "1h30m"\nsilence_timeout = 90\ntime_limit = "none"\nstop_grace = "45s"\n'
    ).limits
    assert (limits.load_timeout, limits.silence_timeout, limits.time_limit, limits.stop_grace) == (5400, 90, None, 45)


@pytest.mark.parametrize(
    ("text", "count"),
    [("1000000", 10**6), ('"4GiB"', 4 << 30), ('"500MB"', 5 * 10**8), ('"1.5 kB"', 1500), ('"64KiB"', 1 << 16)],
)
def test_log_cap_is_bytes_or_text(text: str, count: int) -> None:
    assert playbook(PLAYBOOK + f"[limits]\nlog_cap = {text}\n").limits.log_cap == count


@pytest.mark.parametrize("value", ['"4gib"', '"GiB"', '""', '"4 G"', "0", '"0MB"', "-1", "1.5", "true", '"none"'])
def test_bad_log_cap_is_refused(value: str) -> None:
    error = playbook_refused(PLAYBOOK + f"[limits]\nlog_cap = {value}\n")
    assert error.data["key"] == "limits.log_cap"


@pytest.mark.parametrize("value", ['"30"', '"m"', '""', '"1m30"', "0", '"0s"', "true", "inf", '"-5m"'])
def test_bad_duration_is_refused(value: str) -> None:
    error = playbook_refused(PLAYBOOK + f"[limits]\nload_timeout = {value}\n")
    assert error.data["key"] == "limits.load_timeout"
    assert error.what.startswith("/project/playbooks/m.toml:9")


@pytest.mark.parametrize(
    ("added", "key", "says"),
    [
        ("[capture]\nboundaries = [2, 2]", "capture.boundaries", "twice"),
        ("[capture]\nboundaries = [-1]", "capture.boundaries", "-1 is negative"),
        ("[capture]\nboundaries = []", "capture.boundaries", "non-empty"),
        ("[capture]\nboundaries = [1.5]", "capture.boundaries", "whole numbers"),
        ("[capture]\nboundaries = [true]", "capture.boundaries", "whole numbers"),
        ('[capture]\nboundaries = "eagle"', "capture.boundaries", "eagle3"),
        ('[capture]\npath = "magic"', "capture.path", "native"),
        ('[capture]\nfinal_norm = "no"', "capture.final_norm", ""),
        ('[engine]\nworker_cls = "x"', "engine.worker_cls", "remove `worker_cls`"),
        ("[engine]\nenable_prefix_caching = false", "engine.enable_prefix_caching", "not computed"),
        ('[engine]\nhf_token = "hf_x"', "engine.hf_token", "secrets"),
        ("[engine]\nmax-num-seqs = 4", "engine.max-num-seqs", "max_num_seqs"),
        ("[engine]\ntensor_parallel_size = 0", "engine.tensor_parallel_size", ""),
        ("[engin]\n", "engin", "did you mean `engine`?"),
        ('name = "m"\n', "output.name", ""),
        ('[env]\nSPT_NOENV = "0"', "env.SPT_NOENV", "SPT_NOENV"),
    ],
)
def test_bad_playbook_value_is_refused_with_its_key(added: str, key: str, says: str) -> None:
    error = playbook_refused(PLAYBOOK + added + "\n")
    assert error.data["key"] == key
    assert says in f"{error.what} {error.why} {error.fix}"


@pytest.mark.parametrize(
    ("added", "why", "fix"),
    [
        (
            '[capture]\nstore_dtype = "bf16"',
            "it must be 'auto', 'bfloat16', 'float16', 'float32' or 'fp8'",
            "bfloat16",
        ),
        ("[rehearse]\nmode = 3", "it must be 'auto', 'always' or 'never'", "valid values: always, auto, never"),
        ("[engine]\ntensor_parallel_size = 0", "it must be at least 1", "write 1 or more"),
        ("[engine]\ntensor_parallel_size = 1.5", "it must be a whole number", "write a whole number"),
        ("[limits]\nstop_grace = -1", "it must be more than 0", "write more than 0"),
        ("[limits]\nstop_grace = inf", "it must be a finite number", "write a number other than inf"),
        ("[capture]\nfinal_norm = 2", "it must be true or false", "write true or false"),
        ("[env]\nA = 1", "it must be text", "write text in quotes"),
        ('[preflight]\nallow = "x"', "it must be a list", "write a list"),
        ("[[limits]]", "it must be a table", "write a table: { key = ... }"),
    ],
)
def test_a_value_that_is_not_valid_is_told_what_it_must_be(added: str, why: str, fix: str) -> None:
    """In words of ours: pydantic's speak of input."""
    error = playbook_refused(PLAYBOOK + added)
    assert error.why == why
    assert fix in error.fix


def test_an_engine_argument_that_ctl_sets_itself_is_named_with_its_own_line() -> None:
    """The table's line is that of its heading, and may be far above."""
    error = playbook_refused(PLAYBOOK + '[engine]\nmax_num_seqs = 8\nworker_cls = "x"\n')
    assert error.what == "/project/playbooks/m.toml:10: `engine.worker_cls` is not valid"


def test_another_schema_is_told_the_one_there_is() -> None:
    error = playbook_refused(PLAYBOOK.replace("schema = 1", "schema = 2"))
    assert (error.why, error.fix) == ("it must be 1", "write 1")


def test_the_lines_of_engine_arguments_are_kept_also_where_a_flag_overrides() -> None:
    text = PLAYBOOK + "[engine]\nmax_num_seqs = 8\nhf_overrides.a = 1\n"
    made = override(playbook(text), Overrides(max_samples=3))
    assert made.engine_places == {
        "max_num_seqs": "/project/playbooks/m.toml:9", "hf_overrides": "/project/playbooks/m.toml:10",
    }  # fmt: skip
    assert "engine_places" in playbook_refused("engine_places = 1\n" + PLAYBOOK).what


def test_all_unknown_keys_are_named_at_once() -> None:
    error = playbook_refused("titel = 1\nauthor = 2\n" + PLAYBOOK + "[engin]\n[capture]\nboundary = [2]\n")
    assert "unknown key" in error.what
    for key in ("titel", "author", "engin", "capture.boundary"):
        assert f"unknown key `{key}`" in f"{error.what} {error.why}"
    assert "did you mean `boundaries`?" in f"{error.why} {error.fix}"


@pytest.mark.parametrize("path", ["", "~/m", "a/../../b", "a\\u0000b"])
def test_bad_remote_path_is_refused(path: str) -> None:
    assert playbook_refused(PLAYBOOK.replace("states/m", path)).data["key"] == "output.path"


def test_missing_section_and_name_are_reported() -> None:
    error = playbook_refused("schema = 1\n[model]\npath = 'm'\n")
    assert "lacks `data`" in error.what
    assert "lacks `output`" in error.why
    assert "`name`" in playbook_refused('name = "x"\n' + PLAYBOOK).what


def test_overrides_replace_and_are_checked_under_the_flags_name() -> None:
    made = override(playbook(), Overrides(stale="clear", max_samples=5, capture="hooks", output="states/other"))
    assert (made.output.stale, made.output.path) == (Stale.CLEAR, "states/other")
    assert (made.data.max_samples, made.capture.path) == (5, CapturePath.HOOKS)
    assert override(playbook(), Overrides()) == playbook()
    for overrides, flag in ((Overrides(stale="restart"), "--stale"), (Overrides(max_samples=0), "--max-samples")):
        with pytest.raises(UsageError) as caught:
            override(playbook(), overrides)
        assert caught.value.what.startswith(flag)


def test_an_allowed_code_is_one_that_a_finding_has() -> None:
    assert playbook(PLAYBOOK + '[preflight]\nallow = ["disk-low", "probe-gpus"]\n').preflight.allow[0] == "disk-low"
    error = playbook_refused(PLAYBOOK + '[preflight]\nallow = ["disk-lo"]\n')
    assert "`preflight.allow`" in error.what
    assert (error.why, error.fix) == ("no finding of preflight has this code", "did you mean `disk-low`?")
