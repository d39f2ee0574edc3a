"""Command playbooks as text, and the plans that they become."""

from __future__ import annotations

from typing import Any

import pytest

from controller.core.checks_command import check_command, programs
from controller.core.command import CommandPlaybook
from controller.core.commandplan import make_playbook_command_plan
from controller.core.errors import ConfigError, UsageError
from controller.core.intention import describe
from controller.core.model import Host
from controller.core.playbook import parse_playbook
from remote_payload.host.protocol import check_plan

HOST = {
    "name": "gpu1", "address": "10.1.230.174", "python": "/opt/vllm/bin/python", "workdir": "/root/ctl",
    "output_roots": ["/data/out"], "gpus": 8, "env": {"FROM_HOST": "1", "BOTH": "host"},
    "secrets": {"HF_TOKEN": {"env": "HF_TOKEN"}, "WANDB_API_KEY": {"env": "WANDB_API_KEY"}},
}  # fmt: skip


def parse(text: str) -> CommandPlaybook:
    found = parse_playbook("train", "train.toml", f'schema = 1\nkind = "command"\n{text}')
    assert isinstance(found, CommandPlaybook)
    return found


def plan(text: str, *extra: str, host: dict[str, Any] = HOST, **options: Any) -> Any:
    made = make_playbook_command_plan(
        Host.model_validate(host), parse(text), extra, run_id="20261129-010203-abcdef",
        created="2026-11-29T01:02:03Z", payload="0" * 64, ctl_version="0.1.0", **options,
    )  # fmt: skip
    return check_plan(dict(made))


def test_words_are_replaced_and_extra_arguments_follow() -> None:
    job = plan(
        'argv = ["{python}", "t.py", "{output}/a", "{output:2}", "{other}", "{{work}}"]\n'
        'uploads = [{ path = "t.py" }]\nenv = { PYTHONPATH = "{work}/src" }\ncwd = "sub"\n'
        '[[outputs]]\npath = "/data/out/one"\n[[outputs]]\npath = "/data/out/two"\nstale = "clear"\n',
        "--lr", "{python}",
        upload="1" * 64,
    )["job"]  # fmt: skip
    work = "/root/ctl/runs/20261129-010203-abcdef/work"
    command = next(step for step in job["steps"] if step["kind"] == "exec")
    assert command["argv"] == [
        "/opt/vllm/bin/python", "t.py", "/data/out/one/a", "/data/out/two", "{other}", f"{{{work}}}", "--lr",
        "{python}",
    ]  # fmt: skip
    assert (job["cwd"], job["env"]["PYTHONPATH"], job["upload"]) == (f"{work}/sub", f"{work}/src", "1" * 64)
    assert [step["kind"] for step in job["steps"]] == ["recheck", "place", "clear", "exec", "verify"]
    assert [(output["path"], output["stale"]) for output in job["outputs"]] == [
        ("/data/out/one", "fail"),
        ("/data/out/two", "clear"),
    ]


def test_a_small_playbook_asks_for_nothing() -> None:
    made = plan('argv = ["make", "data"]')
    job = made["job"]
    assert [step["kind"] for step in job["steps"]] == ["recheck", "exec"]
    assert (job["cwd"], job["outputs"], job["secret_env"], made["host"]["gpus"]) == ("/root/ctl", [], [], 8)
    assert not {"upload", "watched", "tracebacks", "container", "survey"} & set(job)
    assert describe(made, None)["command"] is None


def test_a_password_in_a_url_never_comes_into_a_plan() -> None:
    """A proxy of the host serves every command, and is no secret that one has to name."""
    proxy = "http://me:hunter2@proxy:3128"
    host = {**HOST, "env": {"HTTPS_PROXY": proxy, "MINE_TOKEN": "for-those-who-name-it"}}
    made = plan('argv = ["x"]\nenv = { DB = "postgres://me:hunter3@db/x" }', host=host)
    assert (made["job"]["env"], made["job"]["secret_env"]) == ({}, ["DB", "HTTPS_PROXY"])
    assert "hunter" not in str(made)


def test_it_gets_the_secrets_that_it_names_and_no_other() -> None:
    job = plan('argv = ["x"]\nsecrets = ["HF_TOKEN"]\nenv = { BOTH = "playbook", MY_TOKEN = "s3cret" }')["job"]
    assert job["secret_env"] == ["HF_TOKEN", "MY_TOKEN"]
    assert job["env"] == {"FROM_HOST": "1", "BOTH": "playbook"}
    assert "s3cret" not in str(job)


def test_paths_of_the_job_start_where_it_runs() -> None:
    job = plan(
        'argv = ["x"]\ncwd = "/data/w"\nprogress = { file = "p.jsonl" }\nsuccess = { files = ["m/*.pt", "/abs"] }\n'
        '[summary]\npaths = ["m"]\n[summary.expect]\nfiles = { min = 2 }\n'
        '[summary.expect.tensors."h[*]"]\nshape = ["*", 4]\n'
    )["job"]
    assert job["watched"] == {"unit": "steps", "file": "/data/w/p.jsonl"}
    assert job["survey"] == {
        "paths": ["/data/w/m"], "files": ["/data/w/m/*.pt", "/abs"], "sample_files": 16,
        "expect": {"files": {"min": 2}, "tensors": {"h[*]": {"shape": ["*", 4]}}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "leased", "accelerator", "visible"),
    [(None, 8, "cuda", None), (8, 8, "cuda", None), (2, 2, "cuda", "0,1"), (0, 0, "cpu", "")],
)
def test_only_what_is_leased_is_seen(gpus: int | None, leased: int, accelerator: str, visible: str | None) -> None:
    made = plan('argv = ["x"]\n' + ("" if gpus is None else f"gpus = {gpus}\n"))
    assert (made["host"]["gpus"], made["host"]["accelerator"]) == (leased, accelerator)
    assert made["job"]["env"].get("CUDA_VISIBLE_DEVICES") == visible


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('argv = []', "argv"),
        ('argv = ["x"]\nargs = 1', "unknown key `args`"),
        ('argv = ["x"]\nprogress = { pattern = "(" }', "no regular expression"),
        ('argv = ["x"]\nprogress = { pattern = "x" }', "no named group"),
        ('argv = ["x"]\nprogress = { unit = "x" }', "exactly one source"),
        ('argv = ["x"]\nuploads = [{ path = "a", to = "../b" }]', "below the run's own folder"),
        ('argv = ["x"]\ncontainer = { runtime = "rkt", image = "i" }', "runtime"),
        ('argv = ["x"]\nlimits = { time_limit = "soon" }', "not a duration"),
        ('argv = ["x"]\nsuccess = { exit_codes = [] }', "exit_codes"),
        ('argv = ["x"]\nenv = { CTL_RUN_ID = "x" }', "ctl itself sets"),
        ('argv = ["x"]\n[summary.expect]\nnan = -1', "nan"),
        ('argv = ["x"]\n[summary.expect.tensors.h]\nshape = ["?"]', "shape"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert words in str(caught.value)
    assert "train.toml" in caught.value.what


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('argv = ["{output}"]', "stands for nothing"),
        ('argv = ["x"]\nsecrets = ["OTHER"]', "has no secret `OTHER`"),
        ('argv = ["x"]\nsecrets = ["HF_TOKEN"]\nenv = { HF_TOKEN = "x" }', "in `env` and in `secrets`"),
        ('argv = ["x"]\nenv = { DB = "postgres://me:pw@db{work}" }', "a word that stands for something"),
        ('argv = ["x"]\ngpus = 9', "`gpus` is 9"),
        ('argv = ["x"]\n[summary.expect]\nnan = 0', "expects something of no file"),
        ('argv = ["x"]\noutputs = [{ path = "/elsewhere/a" }]', "not inside an output root"),
        ('argv = ["x"]\noutputs = [{ path = "/data/out/a" }, { path = "/data/out/a/b" }]', "overlap"),
    ],
)
def test_what_does_not_fit_the_host_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("`", ".")):
        plan(text)


def test_a_secret_in_the_open_is_refused() -> None:
    with pytest.raises(UsageError, match=r"assigns .HF_TOKEN. in the open"):
        plan('argv = ["env"]', "HF_TOKEN=abc", "x")
    options = '["--env", "HF_TOKEN=abc"]'
    with pytest.raises(UsageError, match=r"assigns .HF_TOKEN. in the open"):
        plan(f'argv = ["x"]\ncontainer = {{ runtime = "podman", image = "i", options = {options} }}')


@pytest.mark.parametrize(
    ("runtime", "path", "mount", "fits"),
    [
        ("podman", "/data/out/a", "/data:/in:ro", True),
        ("podman", "/data/out/a,b", "/data", True),
        ("podman", "/data/out/2026-01-01T10:00", "/data", False),
        ("docker", "/data/out/a", "/da:ta:/in:ro", False),
        ("apptainer", "/data/out/a,b", "/data", False),
        ("apptainer", "/data/out/a", "/data,/other", False),
    ],
)
def test_a_path_that_a_runtime_would_split_is_refused(runtime: str, path: str, mount: str, fits: bool) -> None:
    text = (
        f'argv = ["x"]\ncontainer = {{ runtime = "{runtime}", image = "i", mounts = ["{mount}"] }}\n'
        f'outputs = [{{ path = "{path}" }}]'
    )
    if fits:
        assert plan(text)["job"]["container"]["mounts"] == [mount]
        return
    with pytest.raises(ConfigError, match="cannot be mounted into a container") as refused:
        plan(text)
    assert refused.value.code == "mount-path"


def test_what_must_be_on_the_host_is_looked_for() -> None:
    contained = plan('argv = ["/abs"]\ncontainer = { runtime = "podman", image = "i" }\nsuccess = { files = ["f"] }')
    assert programs(contained, ["make"]) == ["make", "podman", "/opt/vllm/bin/python"]
    assert programs(plan('argv = ["/usr/bin/train"]'), []) == ["/usr/bin/train"]
    assert programs(plan('argv = ["/root/ctl/x"]'), []) == []
    report = {
        "sections": {
            "programs": {"ok": True, "data": {"programs": [{"name": "make", "path": None}]}},
            "memory": {"ok": True, "data": {"available": 1 << 30, "total": 2 << 30}},
        }
    }
    assert [finding.code for finding in check_command(report, 2 << 30)] == ["program-missing", "memory-low"]
    report["sections"]["programs"]["data"] = {"programs": [{"name": "make", "path": "/usr/bin/make"}]}
    assert [(finding.code, finding.level) for finding in check_command(report, 1 << 30)] == [("programs", "ok")]
