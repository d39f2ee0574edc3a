"""What somebody put into the output of an extraction: told apart from the run's own, and never deleted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.hostrun import HostRun
from support.outputs import RUN, owned
from support.pruned import ended, why_kept, write

from remote_payload.host.clear import ClearChanged, claim, clear
from remote_payload.host.layout import OUTPUT_LEDGER, OUTPUT_MANIFEST, OWNER_MARKER, WRITTEN_PATHS
from remote_payload.host.listing import Listing, is_emptied, scan
from remote_payload.host.writers import is_spent

OURS = (
    "hs_0.safetensors", "hs_1.safetensors", ".hs_2.safetensors.partial", ".hs_3.safetensors.17-0.partial",
    "rows_0-2000/data_7.ckpt", "rows_2000-4000/.data_2001.ckpt.partial", "data_1.pt", "12.pt", OUTPUT_MANIFEST,
    f"{OUTPUT_LEDGER}/{RUN}.rank-0.jsonl", "data-00000-of-00001.arrow", ".dataset_info.json.abcd1234",
)  # fmt: skip

THEIRS = (
    "notes.txt", "plots/a.png", "plots/deep/b.png", "backup/hs_0.safetensors", "hs_0.safetensors.bak", ".hidden",
    "rows_0-2000/why.md", f"{OUTPUT_LEDGER}/mine", "hs_one.safetensors", "a\nb", "sample.pt",
)  # fmt: skip

SIDE = {"plots", "plots/deep", "backup"}
"""Folders of theirs."""


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "roots" / "out"
    folder.parent.mkdir()
    claim(owned(folder, folder.parent), RUN, "extract")
    for name in OURS:
        write(folder / name, "{}")
    return folder


def listed(output: Path) -> Listing:
    return scan(str(output), str(output.parent))


def add_theirs(output: Path) -> None:
    for name in THEIRS:
        write(output / name, "theirs")


def files(output: Path) -> set[str]:
    return {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()} - {OWNER_MARKER}


def test_it_is_in_none_of_the_figures_and_named_by_itself(output: Path) -> None:
    before = listed(output)
    assert before["not_ours"] == {"entries": 0, "bytes": 0, "names": []}
    add_theirs(output)
    after = listed(output)
    # Two folders of ours cannot go any more, because something is in them.
    assert before["entries"] - after["entries"] == 2
    assert (after["bytes"], after["partial"]) == (before["bytes"], before["partial"])
    found = after["not_ours"]
    assert (found["entries"], found["bytes"]) == (len(THEIRS) + len(SIDE), len("theirs") * len(THEIRS))
    tops = {name for name in THEIRS if name.split("/")[0] not in SIDE}
    assert found["names"] == sorted(tops | {"plots/", "backup/"})
    assert not {example["path"] for example in after["examples"]} & set(THEIRS)
    assert after["others"] == []


@pytest.mark.parametrize("stale", ["clear", "quarantine"])
def test_no_clear_deletes_it(output: Path, stale: str) -> None:
    add_theirs(output)
    report = clear(owned(output, output.parent, stale=stale), RUN)
    assert (report["remaining"], report["not_ours"]) == (0, len(THEIRS) + len(SIDE))
    if stale == "clear":
        assert files(output) == set(THEIRS)
        assert report["deleted_entries"] == len(OURS) + 1  # and one folder; the other two hold something of theirs
    else:  # the folder was renamed as a whole
        assert files(Path(report["quarantined_to"])) == {*OURS, *THEIRS}
        assert files(output) == set()


def test_what_is_left_of_it_stands_in_no_runs_way(output: Path) -> None:
    add_theirs(output)
    clear(owned(output, output.parent), RUN)
    for stale in ("fail", "resume", "clear", "quarantine"):
        report = clear(owned(output, output.parent, stale=stale), RUN)
        assert (report["deleted_entries"], report["quarantined_to"], report["remaining"]) == (0, None, 0)
        claim(owned(output, output.parent, stale=stale), RUN, "extract")
    assert files(output) == set(THEIRS)


def test_it_may_change_between_the_look_and_the_deletion(output: Path) -> None:
    """The digest is of what goes: what stays may be edited meanwhile."""
    add_theirs(output)
    shown = owned(output, output.parent)
    (output / "notes.txt").write_text("more of it")
    (output / "late.txt").touch()
    assert clear(shown, RUN)["remaining"] == 0
    assert files(output) == {*THEIRS, "late.txt"}
    shown = owned(output, output.parent)
    (output / "hs_0.safetensors").touch()
    with pytest.raises(ClearChanged):
        clear(shown, RUN)


def test_of_a_command_all_names_may_be_its_own(output: Path) -> None:
    add_theirs(output)
    claim(owned(output, output.parent), RUN, "command")
    assert listed(output)["not_ours"]["entries"] == 0
    clear(owned(output, output.parent), RUN)
    assert files(output) == set()


def test_a_folder_of_an_earlier_version_is_known_by_its_manifest(output: Path) -> None:
    add_theirs(output)
    marker = json.loads((output / OWNER_MARKER).read_text())
    assert marker.pop("kind") == "extract"
    write(output / OWNER_MARKER, marker)
    assert listed(output)["not_ours"]["entries"] == len(THEIRS) + len(SIDE)
    for _ in range(2):  # the manifest goes with the first clear
        assert clear(owned(output, output.parent), RUN)["remaining"] == 0
        assert files(output) == set(THEIRS)
    write(output / OWNER_MARKER, marker)  # nothing says any more what job wrote there
    assert listed(output)["not_ours"]["entries"] == 0
    assert {"notes.txt", "plots"} <= set(listed(output)["others"])


def test_records_of_a_failed_run_beside_it_are_worth_a_question(host: HostRun) -> None:
    """They go by themselves only where nothing else is in the folder."""
    root = host.folder / "root"
    output = root / "out"
    root.mkdir()
    paths = ended(host, outputs=[{"path": str(output), "root": str(root)}])
    run_id = os.path.basename(paths.folder)
    claim(owned(output, root), run_id, "extract")
    write(output / OUTPUT_LEDGER / f"{run_id}.rank-0.jsonl", "")
    assert is_spent(str(host.workdir), str(output), listed(output))
    write(output / "notes.txt", "theirs")
    assert not is_spent(str(host.workdir), str(output), listed(output))


def test_what_is_left_of_it_keeps_no_run_from_prune(host: HostRun) -> None:
    root = host.folder / "root"
    output = root / "out"
    root.mkdir()
    paths = ended(host, outputs=[{"path": str(output), "root": str(root)}])
    claim(owned(output, root), os.path.basename(paths.folder), "extract")
    for name in ("notes.txt", "hs_0.safetensors"):
        write(output / name, "{}")
    assert not is_emptied(str(output))
    assert "is marked as its output" in (why_kept(host, paths) or "")
    clear(owned(output, root), RUN)
    assert is_emptied(str(output))
    assert why_kept(host, paths) is None


@pytest.mark.parametrize("name", THEIRS)
def test_only_whole_paths_count_as_ours(name: Any) -> None:
    assert not WRITTEN_PATHS.fullmatch(name)
