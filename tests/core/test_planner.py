"""Host + playbook + flags -> plan, and what is said about it before anything is done."""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from support.plans import GIVEN, RUN_ID, host, plan, playbook

from controller.core import planner, shape
from controller.core.errors import ConfigError, UsageError
from controller.core.finding import size
from controller.core.intention import describe, supervisor_env
from controller.core.model import Overrides
from controller.core.outputs import planned_output
from remote_payload.host.protocol import OwnedOutput, Plan, check_plan


def test_a_plan_waits_for_the_lease_only_if_asked_and_bounds_its_log_always() -> None:
    made = planner.make_command_plan(host(), ["true"], name="t", **GIVEN)
    assert made["job"]["limits"]["log_cap_bytes"] == 4 << 30
    rows = [row for section in describe(made, playbook())["sections"] for row in section["rows"]]
    assert {row[0]: row[1] for row in rows}["log_cap"] == "4 GiB"
    assert "wait_for_lease" not in made["job"]["limits"]
    assert planner.with_queue(made)["job"]["limits"]["wait_for_lease"] is True
    assert "wait_for_lease" not in made["job"]["limits"], "the given plan is not changed"


def test_extract_plan_is_whole_and_valid_for_the_host() -> None:
    made = plan(engine={"tensor_parallel_size": 4, "max_num_seqs": 8})
    assert check_plan(json.loads(json.dumps(made))) == made
    assert [step["kind"] for step in made["job"]["steps"]] == ["recheck", "exec", "clear", "exec", "verify"]
    assert made["job"]["steps"][1]["argv"] == ["/opt/vllm/bin/python", "-m", "remote_payload.extract.rehearse"]
    assert made["job"]["steps"][1]["failure"] == "rehearsal-failed"
    assert made["job"]["steps"][3]["argv"] == ["/opt/vllm/bin/python", "-m", "remote_payload.extract.engine"]
    assert made["job"]["cwd"] == f"/srv/ctl/runs/{RUN_ID}"
    spec = made["extract"]
    assert spec is not None
    assert (spec["model"], spec["data"]) == ("/models/Kimi-K2.5", "/srv/ctl/data/d.jsonl")
    assert spec["engine"] == {"tensor_parallel_size": 4, "max_num_seqs": 8}
    assert made["job"]["limits"]["load_timeout_s"] == 1800


def test_checks_can_be_switched_off_and_the_plan_says_so() -> None:
    spec = plan()["extract"]
    assert spec is not None
    assert (spec["canary"], spec["rehearse"]) == (True, "auto")
    assert spec["buffer_bytes"] == 4 << 30
    overrides = Overrides(canary=False, rehearse="never")
    made = planner.make_plan(host(), playbook(), overrides=overrides, **GIVEN)
    assert made["extract"] is not None
    assert made["extract"]["canary"] is False
    assert [step["name"] for step in made["job"]["steps"]] == ["recheck", "claim", "extract", "verify"]


def test_a_rehearsal_alone_owns_no_output() -> None:
    made = planner.make_rehearsal_plan(host(), playbook(), **GIVEN)
    assert check_plan(json.loads(json.dumps(made))) == made
    assert [step["name"] for step in made["job"]["steps"]] == ["recheck", "rehearse"]
    assert (made["job"]["kind"], made["job"]["outputs"]) == ("rehearse", [])
    assert made["extract"] is not None
    assert made["extract"]["rehearse"] == "fresh"


def test_same_inputs_give_the_same_plan() -> None:
    assert plan() == plan()


def test_tensor_parallel_size_defaults_to_all_gpus_and_cannot_exceed_them() -> None:
    spec = plan()["extract"]
    assert spec is not None
    assert spec["engine"]["tensor_parallel_size"] == 8
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        plan(engine={"tensor_parallel_size": 9})
    placed = playbook(engine={"tensor_parallel_size": 9}, engine_places={"tensor_parallel_size": "/p/m.toml:12"})
    with pytest.raises(ConfigError, match=r"^/p/m\.toml:12: `engine\.tensor_parallel_size` is 9"):
        planner.make_plan(host(), placed, **GIVEN)
    cpu = planner.make_plan(host(accelerator="cpu", gpus=0), playbook(engine={"tensor_parallel_size": 2}), **GIVEN)
    assert cpu["extract"] is not None
    assert cpu["extract"]["engine"]["tensor_parallel_size"] == 2


def test_boundaries_are_checked_where_the_number_of_layers_is_known() -> None:
    with pytest.raises(ConfigError, match="62"):
        plan(capture={"boundaries": [2, 62]})
    assert plan(model={"path": "/models/other"}, capture={"boundaries": [2, 62]})["extract"]


def test_overrides_reach_the_plan() -> None:
    overrides = Overrides(stale="quarantine", adopt=True, max_samples=3, output="/data/states/other", capture="hooks")
    made = planner.make_plan(host(), playbook(), overrides=overrides, **GIVEN)
    assert made["job"]["outputs"][0]["stale"] == "quarantine"
    assert made["job"]["outputs"][0]["adopt"] is True
    assert made["extract"] is not None
    assert (made["extract"]["max_samples"], made["extract"]["capture"]) == (3, "hooks")
    assert made["extract"]["output"] == made["job"]["outputs"][0]["path"] == "/data/states/other"


def test_output_belongs_to_the_innermost_root() -> None:
    assert planned_output(host(), playbook(), adopt=False)["root"] == "/data/states"
    relative = planned_output(host(), playbook(output={"path": "states/kimi"}), adopt=False)
    assert (relative["path"], relative["root"]) == ("/srv/ctl/states/kimi", "/srv/ctl/states")


@pytest.mark.parametrize("path", ["/data", "/elsewhere/kimi", "/database/kimi", "states", ".", "/data/.", "kimi"])
def test_output_outside_the_roots_is_refused(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planner.make_plan(host(), playbook(), overrides=Overrides(output=path), **GIVEN)
    assert caught.value.code == "output-outside-roots"


@pytest.mark.parametrize(
    "path",
    [
        "/srv/ctl",
        "/srv/ctl/runs",
        "/srv/ctl/runs/x",
        "/srv/ctl/payload/x",
        "/srv/ctl/files/blobs",
        "/srv/models",
        "/srv/models/m",
        "/srv/models/m/out",
        "/srv/d",
        "/srv/venv",
        "/srv/venv/out",
        "/srv/venv/lib/python3.12/site-packages",
        "/srv/leases",
    ],
)
def test_output_that_overlaps_what_must_stay_is_refused(path: str) -> None:
    target = host(output_roots=["/srv"], python="/srv/venv/bin/python", lease_dir="/srv/leases")
    book = playbook(model={"path": "/srv/models/m"}, data={"path": "/srv/d/x.jsonl"}, output={"path": path})
    with pytest.raises(ConfigError) as caught:
        planner.make_plan(target, book, **GIVEN)
    assert caught.value.code == "output-overlaps"


def test_a_home_folder_with_a_bin_in_it_is_no_environment_as_a_whole() -> None:
    target = host(output_roots=["/home/me"], workdir="/home/me/ctl", python="/home/me/bin/python")
    made = planner.make_plan(target, playbook(output={"path": "/home/me/out/x"}), **GIVEN)
    assert made["job"]["outputs"][0]["path"] == "/home/me/out/x"
    for path in ("/home/me/bin/out", "/home/me/lib"):
        with pytest.raises(ConfigError) as caught:
            planner.make_plan(target, playbook(output={"path": path}), **GIVEN)
        assert caught.value.code == "output-overlaps"


def test_secrets_are_in_the_plan_by_name_only() -> None:
    target = host(env={"A": "host", "WANDB_API_KEY": "wk"}, secrets={"CERT": {"env": "X"}})
    book = playbook(env={"A": "book", "HF_TOKEN": "hf_abc"})
    made = planner.make_plan(target, book, **GIVEN)
    assert made["job"]["env"] == {"A": "book"}
    assert made["job"]["secret_env"] == ["CERT", "HF_TOKEN", "WANDB_API_KEY"]
    text = json.dumps([made, describe(made, None)])
    assert "hf_abc" not in text
    assert "wk" not in text
    with pytest.raises(ConfigError, match="CERT"):
        planner.job_env(target, playbook(env={"CERT": "in the open"}))


def test_command_plan_owns_no_output() -> None:
    made = planner.make_command_plan(host(), ["python", "train.py", "--x=1"], name="train", cwd="exp", **GIVEN)
    assert check_plan(json.loads(json.dumps(made))) == made
    assert [step["kind"] for step in made["job"]["steps"]] == ["recheck", "exec"]
    assert made["job"]["outputs"] == []
    assert made["job"]["cwd"] == "/srv/ctl/exp"
    assert made["extract"] is None
    limits = planner.make_command_plan(host(), ["true"], name="t", time_limit_s=5, **GIVEN)["job"]["limits"]
    assert limits["time_limit_s"] == 5
    assert "silence_timeout_s" not in limits


def test_command_without_words_or_with_a_secret_is_refused() -> None:
    with pytest.raises(UsageError):
        planner.make_command_plan(host(), [], name="x", **GIVEN)
    with pytest.raises(UsageError) as caught:
        planner.make_command_plan(host(), ["env", "HF_TOKEN=hf_abc", "x"], name="x", **GIVEN)
    assert "hf_abc" not in json.dumps(caught.value.to_dict())


def test_preflight_adds_what_was_seen_and_leaves_the_first_plan_alone() -> None:
    first = plan()
    before = copy.deepcopy(first)
    seen: OwnedOutput = {**first["job"]["outputs"][0], "digest": "cd" * 32, "entries": 3, "bytes": 9}
    second = planner.with_preflight(first, [seen], {"push_s": 0.5}, ["disk-low"])
    assert (first["allowed"], second["allowed"]) == ([], ["disk-low"])
    assert second["job"]["outputs"] == [seen]
    assert second["timings"] == {"push_s": 0.5}
    assert first == before


@pytest.mark.parametrize(
    ("stale", "planned", "empty", "full"),
    [
        ("fail", "claim", "claim", "clear"),  # records of a failed run, which count as nothing, go
        ("clear", "clear", "claim", "clear"),
        ("quarantine", "clear", "claim", "clear"),
        ("resume", "claim", "claim", "claim"),
    ],
)
def test_a_plan_clears_only_where_there_may_be_something(stale: str, planned: str, empty: str, full: str) -> None:
    """The host does the same step under either name: it compares the folder with what was shown."""

    def step(made: Plan) -> str:
        (found,) = (step for step in made["job"]["steps"] if step["kind"] == "clear")
        return found["name"]

    made = planner.make_plan(host(), playbook(), overrides=Overrides(stale=stale), **GIVEN)
    (output,) = made["job"]["outputs"]
    assert step(made) == planned
    assert step(planner.with_preflight(made, [output], {})) == empty
    seen: OwnedOutput = {**output, "digest": "cd" * 32, "entries": 3, "bytes": 9}
    assert step(planner.with_preflight(made, [seen], {})) == full
    rows = {tuple(row) for section in describe(made, playbook())["sections"] for row in section["rows"]}
    assert (planned in {row[0] for row in rows}, "" in {row[1] for row in rows}) == (True, False)


def test_preflight_cannot_widen_what_may_be_cleared() -> None:
    first = plan()
    other: OwnedOutput = {**first["job"]["outputs"][0], "path": "/data/states"}
    adopted: OwnedOutput = {**first["job"]["outputs"][0], "adopt": True}
    for outputs in ([other], [adopted], [], [first["job"]["outputs"][0], other]):
        with pytest.raises(ValueError, match="other outputs"):
            planner.with_preflight(first, outputs, {})


def test_run_id_is_utc_and_checked() -> None:
    now = datetime(2026, 1, 2, 5, 4, 5, tzinfo=timezone(timedelta(hours=2)))
    assert planner.new_run_id(now, bytes.fromhex("a1b2c3")) == RUN_ID
    with pytest.raises(ValueError, match="run id"):
        planner.new_run_id(datetime.now(UTC), b"ab")


def test_model_shape_is_the_playbooks_else_known_by_name() -> None:
    assert shape.model_shape(playbook()) == shape.ModelShape(num_layers=61, hidden=7168)
    unknown = playbook(model={"path": "/models/other", "num_layers": 8})
    assert shape.model_shape(unknown) == shape.ModelShape(num_layers=8, hidden=None)


def test_bytes_are_an_upper_bound() -> None:
    payload = 10 * 100 * 4 * 7168 * 2
    at_most = shape.bytes_expected(plan(), playbook())
    assert at_most is not None
    assert payload < at_most < payload * 1.01
    in_float32 = plan(capture={"store_dtype": "float32", "boundaries": [1, 2]})
    assert (shape.bytes_expected(in_float32, playbook()) or 0) >= payload
    assert shape.bytes_expected(plan(data={"path": "d"}), playbook()) is None
    assert shape.bytes_expected(plan(), playbook(model={"path": "/models/other"})) is None


def test_intention_says_what_is_uploaded_run_written_and_deleted() -> None:
    made = plan(
        output={"path": "/data/states/kimi", "stale": "clear"}, env={"HF_TOKEN": "hf_abc"},
        engine={"max_num_batched_tokens": 8192, "kv_cache_memory_bytes": 4 << 30},
    )  # fmt: skip
    document = describe(made, playbook(), payload_files=12, payload_bytes=3456)
    assert json.loads(json.dumps(document)) == document
    assert document["may_delete"] == ["/data/states/kimi"]
    assert document["may_move"] == []
    assert document["capture"]["boundaries"] == [2, 30, 58, 61]
    assert document["environment"]["HF_TOKEN"] == "***"
    assert document["environment"]["CTL_RUN_DIR"] == made["job"]["cwd"]
    text = "\n".join(" ".join(row) for section in document["sections"] for row in section["rows"])
    facts = ("remote_payload.extract.engine", "2, 30, 58, 61 of 61 layers")
    as_people_read_them = (
        "12 files, 3.4 KiB", "bytes at most 54.7 MiB", "load_timeout 30 min", "log_cap 4 GiB",
        "engine max_num_batched_tokens 8,192", "engine kv_cache_memory_bytes 4 GiB",
    )  # fmt: skip
    for fact in (*facts, *as_people_read_them):
        assert fact in text
    raw = (document["upload"]["bytes"], document["limits"]["load_timeout_s"], document["capture"]["bytes_at_most"])
    assert raw == (3456, 1800.0, shape.bytes_expected(made, playbook()))


def bytes_row(document: dict[str, Any]) -> str:
    rows = dict(next(section["rows"] for section in document["sections"] if section["title"] == "Capture"))
    return str(rows["bytes"])


def test_intention_of_unknown_model_and_of_command() -> None:
    unknown = describe(plan(), None)
    assert unknown["capture"]["boundaries"] is None
    assert unknown["capture"]["bytes_at_most"] is None
    assert unknown["capture"]["sample_bytes_at_most"] is None
    assert "`hidden` is not set" in bytes_row(unknown)
    whole = describe(plan(data={"path": "d", "max_seq_len": 100}), playbook())
    assert whole["capture"]["bytes_at_most"] is None
    each = whole["capture"]["sample_bytes_at_most"]
    assert each * 10 == shape.bytes_expected(plan(), playbook())
    assert bytes_row(whole) == f"at most {size(each)} a sample; how many there are is told by preflight"
    command = planner.make_command_plan(host(), ["echo", "a b"], name="echo", **GIVEN)
    document = describe(command, None)
    assert document["capture"] is None
    assert document["may_delete"] == []
    assert ["command", "echo 'a b'"] in next(s["rows"] for s in document["sections"] if s["title"] == "Steps")


def test_supervisor_keeps_the_jobs_own_python_path() -> None:
    made = planner.make_plan(host(env={"PYTHONPATH": "/my/lib"}), playbook(), **GIVEN)
    assert supervisor_env(made)["PYTHONPATH"] == f"/srv/ctl/payload/{'ab' * 32}:/my/lib"


# ------------------------------------------------------------------------- formats, conventions, shares


def spec_of(made: Plan) -> dict[str, Any]:
    assert made["extract"] is not None
    return dict(made["extract"])


@pytest.mark.parametrize(
    ("convention", "ids"),
    [
        ("boundaries", [2, 30, 58, 61]), ("vllm", [2, 30, 58, 61]), ("speculators", [2, 30, 58, 61]),
        ("speculators-0.3", [1, 29, 57, 60]), ("specforge", [1, 29, 57, 60]), ("modelopt", [1, 29, 57, 60]),
        ("modelopt-vllm", [2, 30, 58, 61]),
    ],
)  # fmt: skip
def test_layer_ids_of_other_systems_become_boundaries(convention: str, ids: list[int]) -> None:
    given = Overrides(boundaries=ids, layer_convention=convention)
    made = planner.make_plan(host(), playbook(), **GIVEN, overrides=given)
    assert spec_of(made)["boundaries"] == [2, 30, 58, 61]
    written = plan(capture={"boundaries": ids, "layer_convention": convention})
    assert spec_of(written) == spec_of(made)


def test_converted_layer_ids_are_checked_against_the_model() -> None:
    with pytest.raises(ConfigError, match="62"):
        plan(capture={"boundaries": [1, 61], "layer_convention": "specforge"})
    with pytest.raises(ValueError, match="no layer convention `sglang`"):
        plan(capture={"boundaries": [1], "layer_convention": "sglang"})


@pytest.mark.parametrize(
    ("form", "norm"), [("speculators", False), ("speculators-0.3", False), ("specforge", True), ("modelopt", True)]
)
def test_the_norm_follows_the_format_unless_it_is_said(form: str, norm: bool) -> None:
    output = {"path": "/data/states/kimi", "format": form}
    assert spec_of(plan(output=output))["final_norm"] is norm
    assert spec_of(plan(output=output, capture={"final_norm": not norm}))["final_norm"] is not norm


def test_a_share_is_named_and_expects_its_part_of_the_bytes() -> None:
    whole = planner.make_plan(host(), playbook(), **GIVEN)
    third = planner.make_plan(host(), playbook(), **GIVEN, overrides=Overrides(shard=(3, 3)))
    assert (spec_of(whole)["shard"], spec_of(third)["shard"]) == ([1, 1], [3, 3])
    sizes = [shape.bytes_expected(made, playbook()) for made in (whole, third)]
    assert sizes[1] == sizes[0] // 10 * 4  # of 10 samples
    rows = dict(section_rows(third, "Capture"))
    assert rows["shard"] == "3 of 3"
    for shard in ((0, 2), (3, 2)):
        with pytest.raises(UsageError, match="no shard"):
            planner.make_plan(host(), playbook(), **GIVEN, overrides=Overrides(shard=shard))


def section_rows(made: Plan, title: str) -> list[list[str]]:
    sections = describe(made, playbook())["sections"]
    return next(section["rows"] for section in sections if section["title"] == title)


def test_data_of_the_workstation_is_read_where_it_is_pushed_to() -> None:
    pushed = "/srv/ctl/data/" + "cd" * 32 + "/d.jsonl"
    book = playbook(data={"path": "local:d.jsonl"})
    made = planner.make_plan(host(), book, **GIVEN, pushed=pushed)
    assert spec_of(made)["data"] == pushed


def test_fp8_halves_the_bytes_of_states() -> None:
    sizes = [shape.bytes_expected(plan(capture={"store_dtype": name}), playbook()) for name in ("bfloat16", "fp8")]
    assert sizes[0] is not None
    assert sizes[1] is not None
    assert 0.49 < sizes[1] / sizes[0] < 0.51
