"""What is different between two runs."""

from __future__ import annotations

from typing import Any

from controller.core.rundiff import compare


def plan(**changes: Any) -> dict[str, Any]:
    return {
        "run_id": "a", "created": "x", "payload": "p1", "timings": {"push_s": 1.0},
        "host": {"name": "gpu1", "gpus": 8},
        "job": {"kind": "extract", "env": {"HF_TOKEN": "secret", "A": "1"}, "steps": [{"argv": ["x"]}]},
        "extract": {"max_seq_len": 4096, "boundaries": [2, 4]}, **changes,
    }  # fmt: skip


def summary(**changes: Any) -> dict[str, Any]:
    return {
        "end_reason": "succeeded", "versions": {"vllm": "0.32.0"}, "tokens_per_s": 100.0, "problems": [],
        "states": [{"boundary": 2, "norm_mean": 10.0, "nan": 0}], **changes,
    }  # fmt: skip


def test_two_runs_of_one_intention_are_the_same() -> None:
    other = plan(run_id="b", created="y", timings={"push_s": 9.0})
    assert not any(compare([plan(), other], [summary(), summary()]).values())


def test_the_folder_of_a_run_is_no_change() -> None:
    plans = [plan(run_id=run, cwd=f"/root/ctl/runs/{run}/work", words=["x", f"/w/{run}/a"]) for run in ("r1", "r2")]
    assert not any(compare(plans, [None, None]).values())
    moved = {**plans[1], "cwd": "/srv/r2/work"}
    (change,) = compare([plans[0], moved], [None, None])["plan"]
    assert (change["key"], change["before"], change["after"]) == (
        "cwd",
        "/root/ctl/runs/{run}/work",
        "/srv/{run}/work",
    )


def test_each_change_is_in_its_section() -> None:
    other = plan(payload="p2", extract={"max_seq_len": 2048, "boundaries": [2, 4]})
    later = summary(
        versions={"vllm": "0.33.0"}, tokens_per_s=150.0, end_reason="job-failed",
        problems=[{"code": "exception"}], states=[{"boundary": 2, "norm_mean": 12.0, "nan": 3}],
    )  # fmt: skip
    changes = compare([plan(), other], [summary(), later])
    assert changes["plan"] == [{"key": "extract.max_seq_len", "before": 4096, "after": 2048, "ratio": 0.5}]
    assert [each["key"] for each in changes["versions"]] == ["vllm", "payload"]
    assert [each["key"] for each in changes["outcome"]] == ["end_reason", "problems"]
    figures = {each["key"]: each for each in changes["figures"]}
    assert figures["tokens_per_s"]["ratio"] == 1.5
    assert figures["boundary 2.norm_mean"] == {
        "key": "boundary 2.norm_mean", "before": 10.0, "after": 12.0, "ratio": 1.2,
    }  # fmt: skip
    assert "ratio" not in figures["boundary 2.nan"]  # from nothing there is no ratio


def test_a_run_that_has_not_ended_lacks_its_figures() -> None:
    changes = compare([plan(), plan()], [summary(), None])
    assert {"key": "tokens_per_s", "before": 100.0, "after": None} in changes["figures"]


def test_secrets_are_not_shown() -> None:
    other = plan()
    other["job"] = {**other["job"], "env": {"HF_TOKEN": "another", "A": "http://me:another@proxy"}}
    changes = compare([plan(), other], [None, None])
    assert "another" not in str(changes)
    assert {"key": "job.env.A", "before": "***", "after": "***"} in changes["plan"]


def test_a_commands_arguments_are_part_of_its_plan() -> None:
    one, other = plan(), plan()
    one["job"] = {"kind": "command", "steps": [{"argv": ["sleep", "1"]}]}
    other["job"] = {"kind": "command", "steps": [{"argv": ["sleep", "2"]}]}
    assert compare([one, other], [None, None])["plan"] == [
        {"key": "command", "before": ["sleep", "1"], "after": ["sleep", "2"]}
    ]
