"""A folder in which runs that are over left their records and no sample counts as empty; any other does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.hostrun import HostRun
from support.outputs import RUN, owned

from remote_payload.host.clear import ClearFailed, claim, clear
from remote_payload.host.layout import OUTPUT_LEDGER, OUTPUT_MANIFEST, OWNER_MARKER, Layout
from remote_payload.host.listing import scan
from remote_payload.host.writers import is_spent

LATER = "20261130-120000-abcdef"


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """A workdir that knows RUN, which was stopped while it loaded."""
    folder = tmp_path / "work"
    end_run(folder, RUN)
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """What that run left: a manifest of its own identity, and a ledger without a line."""
    folder = tmp_path / "root" / "out"
    folder.parent.mkdir()
    claim(owned(folder, folder.parent), RUN)
    (folder / OUTPUT_MANIFEST).write_text(json.dumps({"schema_version": 1, "identity": {"model": "another"}}))
    (folder / OUTPUT_LEDGER).mkdir()
    (folder / OUTPUT_LEDGER / f"{RUN}.rank-0.jsonl").touch()
    return folder


def end_run(workdir: Path, run_id: str) -> None:
    paths = Layout(str(workdir)).run(run_id)
    Path(paths.folder).mkdir(parents=True)
    Path(paths.cancelled).touch()


def spent(workdir: Path, output: Path) -> bool:
    return is_spent(str(workdir), str(output), scan(str(output), str(output.parent)))


@pytest.mark.parametrize("stale", ["fail", "resume"])
def test_records_without_a_sample_are_not_in_the_way_and_are_not_obeyed(
    workdir: Path, output: Path, stale: str
) -> None:
    assert spent(workdir, output)
    report = clear(owned(output, output.parent, stale=stale), LATER, str(workdir))
    assert (report["deleted_entries"], report["remaining"]) == (3, 0)
    assert [path.name for path in output.iterdir()] == [OWNER_MARKER]


@pytest.mark.parametrize(
    "name", ["hs_0.safetensors", ".hs_0.safetensors.partial", f"{OUTPUT_LEDGER}/notes", "notes.txt"]
)
def test_anything_else_in_it_is_in_the_way_as_before(workdir: Path, output: Path, name: str) -> None:
    (output / name).write_text("x")
    assert not spent(workdir, output)
    before = sorted(output.rglob("*"))
    with pytest.raises(ClearFailed, match="entries of an earlier run"):
        clear(owned(output, output.parent, stale="fail"), LATER, str(workdir))
    assert clear(owned(output, output.parent, stale="resume"), LATER, str(workdir))["deleted_entries"] == 0
    assert sorted(output.rglob("*")) == before


def test_a_ledger_that_vouches_for_a_sample_keeps_the_folder(workdir: Path, output: Path) -> None:
    (output / OUTPUT_LEDGER / f"{RUN}.rank-0.jsonl").write_text('{"index": 0}\n')
    assert not spent(workdir, output)


def test_a_run_that_is_not_known_here_may_be_loading_on_another_host(workdir: Path, output: Path) -> None:
    (output / OUTPUT_LEDGER / f"{LATER}.rank-0.jsonl").touch()
    assert not spent(workdir, output)
    end_run(workdir, LATER)
    assert spent(workdir, output)
    assert not spent(workdir.parent / "elsewhere", output)


def test_a_run_under_way_keeps_its_folder_but_not_from_itself(workdir: Path, output: Path) -> None:
    paths = Layout(str(workdir)).run(LATER)
    Path(paths.folder).mkdir()
    Path(paths.plan).write_text(json.dumps({"job": {"outputs": [{"path": str(output)}]}}))
    Path(paths.run).write_text("damaged")  # of which nobody can say that it is over
    assert not spent(workdir, output)
    listing = scan(str(output), str(output.parent))
    assert is_spent(str(workdir), str(output), listing, LATER)


def test_another_users_records_and_a_folder_without_our_marker_stay(workdir: Path, output: Path) -> None:
    marker = json.loads((output / OWNER_MARKER).read_text())
    (output / OWNER_MARKER).write_text(json.dumps({**marker, "owner": "somebody-else"}))
    assert not spent(workdir, output)
    (output / OWNER_MARKER).unlink()
    assert not spent(workdir, output)


def test_the_run_after_one_that_was_stopped_while_it_loaded_is_not_refused(host: HostRun, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    out = root / "out"
    load = (
        f"import os; os.mkdir({str(out / OUTPUT_LEDGER)!r}); "
        f"open({str(out / OUTPUT_MANIFEST)!r}, 'w').write('{{}}'); os._exit(3)"
    )
    clear_step = {"name": "clear", "kind": "clear"}
    first = host.plan(clear_step, host.python(load), job={"outputs": [owned(out, root, stale="fail")]})
    assert host.run(first)["end_reason"] == "job-failed"
    assert (out / OUTPUT_MANIFEST).exists()
    again = host.plan(clear_step, host.python("pass"), job={"outputs": [owned(out, root, stale="fail")]})
    assert host.run(again)["end_reason"] == "succeeded"
    assert [path.name for path in out.iterdir()] == [OWNER_MARKER]
