"""The notebook API without a host: its arguments, its documents, its errors. No warning is passed over."""

from __future__ import annotations

import inspect
import json
import sys
import typing
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from rich.console import Console
from support.reported import HOSTILE, write_run

import controller
from controller import api
from controller.cli import acting, looking  # `cli` registers all verbs in their order
from controller.core.errors import RefusedError, UsageError
from controller.core.finding import failed, passed
from controller.documents import Findings, Ledger, Plan, Summary

pytestmark = pytest.mark.filterwarnings("error")

OF_A_TERMINAL = {"detach", "dry_run", "dry_run_server", "progress", "as_json", "verbose", "quiet"}
"""Options of the command line that say how to print, or have a function of their own."""

RENAMED = {"output_format": "format", "no_canary": "canary"}


@pytest.mark.parametrize(
    ("function", "verb"),
    [(api.extract, acting.extract), (api.plan, looking.plan), (api.preflight, looking.preflight)],
)
def test_every_argument_of_the_command_line_is_there_and_typed(function: object, verb: object) -> None:
    offered = set(inspect.signature(verb).parameters) - OF_A_TERMINAL  # type: ignore[arg-type]
    if verb is looking.preflight:
        offered -= {"fix", "yes"}  # the sweep shows what it will stop and delete, and asks: it is a person's
    signature = inspect.signature(function)  # type: ignore[arg-type]
    assert {RENAMED.get(name, name) for name in offered} <= set(signature.parameters)
    hints = typing.get_type_hints(function)
    assert set(signature.parameters) <= set(hints)
    assert typing.Any not in hints.values()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "hosts.toml").write_text(
        f'schema = 1\n[hosts.gpu1]\naddress = "gpu1"\npython = "/opt/{"<b>"}/python"\nworkdir = "/root/ctl"\n'
        'output_roots = ["/out"]\ngpus = 8\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


def test_a_plan_takes_what_the_command_line_takes(project: Path) -> None:
    plan = controller.plan(
        host="gpu1", playbook="eagle3-kimi-k2.5", output="/out/k", boundaries=[2, 30], shard=(2, 4),
        format="specforge", store_dtype="float32", data="/data/x.jsonl", data_kind="tokens", max_samples=7,
        stale="quarantine", layer_convention="specforge",
    )  # fmt: skip
    capture = plan["capture"]
    assert (capture["boundaries"], capture["shard"], capture["format"]) == ([3, 31], [2, 4], "specforge")
    assert (capture["data"], capture["data_kind"], capture["max_samples"]) == ("/data/x.jsonl", "tokens", 7)
    assert plan["may_move"] == ["/out/k"]
    json.dumps(plan)


def test_a_plan_shows_itself_as_text_and_as_escaped_html(project: Path) -> None:
    plan = controller.plan(host="gpu1", playbook="eagle3-kimi-k2.5", output="/out/k")
    shown = plan._repr_mimebundle_()
    assert "/opt/<b>/python" in shown["text/plain"]
    assert "/opt/&lt;b&gt;/python" in shown["text/html"]
    assert "<b>/" not in shown["text/html"]
    assert "remote_payload.extract.engine" in printed(plan)


def test_wrong_values_are_errors_of_usage_with_a_fix(project: Path) -> None:
    with pytest.raises(UsageError) as caught:
        controller.plan(host="gpu1", playbook="eagle3-kimi-k2.5", output="/out/k", shard=(5, 4))
    assert caught.value.fix
    with pytest.raises(UsageError):
        controller.plan(host="gpu1", playbook="eagle3-kimi-k2.5", output="/out/k", stale="sometimes")  # type: ignore[arg-type]


def printed(document: object) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    with console.file:
        console.print(document)
    return console.export_text()


def test_documents_of_a_host_are_escaped_in_both_forms(tmp_path: Path) -> None:
    run = write_run(tmp_path, samples=300, text=HOSTILE)
    findings = Findings(HOSTILE, [passed("ok", "fine"), failed("bad", HOSTILE, why=HOSTILE, fix=HOSTILE)])
    for document in (Summary(run.summary), findings):
        shown = document._repr_mimebundle_()
        assert "<script" not in shown["text/html"]
        assert "<img" not in shown["text/html"]
        assert "&lt;script&gt;" in shown["text/html"]
        for text in (*shown.values(), printed(document)):
            assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_ipython_takes_the_forms_and_not_the_dict(tmp_path: Path) -> None:
    from IPython.core.formatters import DisplayFormatter

    forms, _ = DisplayFormatter().format(Summary(write_run(tmp_path, samples=100).summary))
    assert set(forms) == {"text/plain", "text/html"}
    assert "99 of 100 written" in forms["text/plain"]


def test_findings_show_reason_and_fix_only_where_something_is_wrong() -> None:
    findings = Findings(
        "gpu1", [passed("lease", "no lease"), failed("gpu", "GPU 3 is in use", why="pid 7", fix="stop it")]
    )
    for text in (*findings._repr_mimebundle_().values(), printed(findings)):
        assert "no lease" in text
        assert "stop it" in text
    with pytest.raises(RefusedError) as caught:
        findings.check()
    assert (caught.value.fix, caught.value.code) == ("stop it", "gpu")
    assert [finding.code for finding in findings[:1]] == ["lease"]


def test_an_error_in_a_cell_shows_its_fix_and_no_frames_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    shell = InteractiveShell.instance(history_manager=None) if InteractiveShell.initialized() else InteractiveShell()
    shell.user_ns["error"] = RefusedError(
        "GPU 3 is in use", why="pid 7 \x1b[31mred", fix="stop it", code="gpu-process"
    )
    shell.run_cell("raise error")
    seen = capsys.readouterr()
    text = seen.out + seen.err
    assert "RefusedError: GPU 3 is in use" in text
    assert "fix: stop it" in text
    assert "code: gpu-process" in text
    assert "\x1b[31m" not in text
    assert "Traceback" not in text


def test_a_summary_becomes_a_row_for_each_state(tmp_path: Path) -> None:
    summary = Summary(write_run(tmp_path).summary)
    frame = summary.to_pandas()
    assert list(frame.index) == [2, 30, 58, 61]
    assert frame.loc[61, "nan"] == 3
    assert frame.attrs["samples"]["written"] == 986
    assert Summary().to_pandas().empty


def test_a_ledger_becomes_a_row_for_each_sample(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    frame = Ledger({"rank": None if line["writer"] == "driver" else 1, **line} for line in run.lines).to_pandas()
    assert frame.index.is_unique
    assert frame["fate"].value_counts().to_dict() == {"written": 986, "skipped": 10}
    assert frame.loc[333, "nan_61"] == 3
    assert frame.loc[96, "why"] == "not JSON: line 1 column 7"
    assert str(frame["time"].dtype).endswith("UTC]")
    assert Ledger().to_pandas().empty
    lines = [
        {"index": 0, "file": "0.pt", "tokens": 3, "bytes": 9, "record_id": "talk-1"},
        {"index": 1, "skipped": "empty", "why": "no token in it", "record_id": "talk-2"},
        {"index": 2, "failed": "job-failed", "why": "", "record_id": 7},  # no name of ours
    ]
    names = Ledger(lines).to_pandas()["record_id"]
    assert names[:2].tolist() == ["talk-1", "talk-2"]
    assert names.isna().tolist() == [False, False, True]


def test_without_pandas_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError) as caught:
        Summary().to_pandas()
    assert "ctl-hidden-states[pandas]" in caught.value.fix


def test_plans_are_dicts(project: Path) -> None:
    assert isinstance(controller.plan(host="gpu1", playbook="eagle3-kimi-k2.5", output="/out/k"), Plan)
    assert controller.Plan is Plan
