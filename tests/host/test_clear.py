"""Clearing: what was shown is what goes, nothing outside the root ever does, and the end is proved."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.outputs import RUN, owned

from remote_payload.host import clear as clear_module
from remote_payload.host.clear import ClearChanged, ClearFailed, claim, clear
from remote_payload.host.guard import Refused, guard, open_output
from remote_payload.host.layout import OUTPUT_MANIFEST, OWNER_MARKER
from remote_payload.host.listing import Listing, scan, walk
from remote_payload.host.protocol import EndReason, OwnedOutput

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def roomy_root() -> Iterator[Path]:
    """A root in memory where there is such a file system: many entries on a busy disk would take a minute."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as base:
        yield Path(base)


def fill(folder: Path) -> None:
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "hs_0.safetensors").write_bytes(b"x" * 100)
    (folder / "deep" / "er" / "hs_1.safetensors").write_bytes(b"y" * 50)


@pytest.fixture
def output(root: Path) -> Path:
    folder = root / "out"
    claim(owned(folder, root), RUN)
    fill(folder)
    return folder


def codes(listing: Listing) -> list[str]:
    return [problem["code"] for problem in listing["problems"]]


class TestScan:
    def test_lists_contents_without_the_marker(self, root: Path, output: Path) -> None:
        listing = scan(str(output), str(root))
        assert (listing["exists"], listing["entries"], listing["bytes"]) == (True, 4, 150)
        assert [example["path"] for example in listing["examples"]] == [
            "deep", "deep/er", "deep/er/hs_1.safetensors", "hs_0.safetensors",
        ]  # fmt: skip
        assert listing["marker"] is not None
        assert listing["marker"]["run_id"] == RUN
        assert listing["foreign"] is False
        assert listing["problems"] == []

    def test_shows_what_the_job_says_of_its_samples(self, root: Path, output: Path) -> None:
        (output / OUTPUT_MANIFEST).write_text('{"identity": {"model": "m"}}')
        assert scan(str(output), str(root))["manifest"] == {"identity": {"model": "m"}}
        (output / OUTPUT_MANIFEST).write_text("[]")
        assert scan(str(output), str(root))["manifest"] is None

    def test_absent_and_empty_have_no_digest(self, root: Path) -> None:
        assert scan(str(root / "no"), str(root)) | {} == {
            "exists": False, "marker": None, "manifest": None, "entries": 0, "bytes": 0, "digest": None,
            "partial": 0, "whole": {"count": 0, "bytes": 0}, "examples": [], "others": [], "foreign": False,
            "problems": [],
            "not_ours": {"entries": 0, "bytes": 0, "names": []},
        }  # fmt: skip
        (root / "empty").mkdir()
        listing = scan(str(root / "empty"), str(root))
        assert (listing["exists"], listing["digest"]) == (True, None)

    def test_what_no_extraction_writes_is_named_and_comes_first(self, root: Path, output: Path) -> None:
        (output / "zz-notes.txt").write_text("mine")
        (output / "zz-folder").mkdir()
        (output / "zz-folder" / "deep").touch()
        listing = scan(str(output), str(root))
        assert {"zz-folder", "zz-notes.txt"} <= set(listing["others"])
        assert not any(name.startswith("hs_") for name in listing["others"])
        paths = [example["path"] for example in listing["examples"]]
        assert paths.index("zz-notes.txt") < paths.index("hs_0.safetensors")

    @pytest.mark.parametrize("change", ["content", "name", "added", "removed", "type"])
    def test_digest_tells_every_change(self, root: Path, output: Path, change: str) -> None:
        before = scan(str(output), str(root))["digest"]
        assert scan(str(output), str(root))["digest"] == before
        sample = output / "hs_0.safetensors"
        if change == "content":  # same size, later time
            os.utime(sample, ns=(1, 1))
        elif change == "name":
            sample.rename(output / "hs_9.safetensors")
        elif change == "added":
            (output / "new").touch()
        elif change == "removed":
            sample.unlink()
        else:
            shutil.rmtree(output / "deep" / "er")
            (output / "deep" / "er").touch()
        assert scan(str(output), str(root))["digest"] != before

    def test_newlines_and_bytes_that_are_no_text(self, root: Path, output: Path) -> None:
        strange = os.fsencode(output) + b"/a\nb\xff\x1b[31m"
        Path(os.fsdecode(strange)).write_bytes(b"1")
        listing = scan(str(output), str(root))
        wire = json.loads(json.dumps(listing))
        assert os.fsencode(wire["examples"][0]["path"]) == b"a\nb\xff\x1b[31m"
        assert clear(owned(output, root), RUN)["deleted_entries"] == 5
        assert os.listdir(output) == [OWNER_MARKER]

    @pytest.mark.parametrize("marker", ["", "[]", "{}", "not json", '{"wire": 1}'])
    def test_a_marker_that_is_none_of_ours_proves_nothing(self, root: Path, output: Path, marker: str) -> None:
        (output / OWNER_MARKER).write_text(marker)
        listing = scan(str(output), str(root))
        assert (listing["marker"], listing["foreign"], listing["entries"]) == (None, True, 5)

    def test_a_linked_marker_proves_nothing(self, root: Path, output: Path, tmp_path: Path) -> None:
        (output / OWNER_MARKER).rename(tmp_path / "marker")
        (output / OWNER_MARKER).symlink_to(tmp_path / "marker")
        assert scan(str(output), str(root))["foreign"] is True

    def test_problems_instead_of_errors(self, root: Path, tmp_path: Path) -> None:
        (root / "file").touch()
        (root / "link").symlink_to(tmp_path)
        (root / "real" / "in").mkdir(parents=True)
        (root / "through").symlink_to(root / "real")
        outside = str(root)
        assert codes(scan(str(root / "file"), outside)) == ["not-a-folder"]
        assert codes(scan(str(root / "link"), outside)) == ["symlink"]
        assert codes(scan(str(root / "through" / "in"), outside)) == ["symlink"]
        assert codes(scan(str(root / "file" / "in"), outside)) == ["not-a-folder"]
        assert codes(scan(outside, outside)) == ["is-root"]
        assert codes(scan(str(tmp_path / "x"), outside)) == ["outside-root"]
        assert codes(scan(str(tmp_path / "none" / "x"), str(tmp_path / "none"))) == ["root-missing"]
        assert codes(scan(str(root / "file" / "x"), str(root / "file"))) == ["root-not-a-folder"]

    def test_a_link_in_the_path_of_the_root_is_the_administrators_choice(self, root: Path, tmp_path: Path) -> None:
        (tmp_path / "alias").symlink_to(root)
        fill_me = tmp_path / "alias" / "out"
        claim(owned(fill_me, tmp_path / "alias"), RUN)
        (fill_me / "stale").touch()
        clear(owned(fill_me, tmp_path / "alias"), RUN)
        assert os.listdir(root / "out") == [OWNER_MARKER]

    def test_a_root_that_resolves_to_the_file_system_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "all").symlink_to("/")
        assert codes(scan(str(tmp_path / "all" / "etc" / "ssh"), str(tmp_path / "all"))) == ["root-too-wide"]


class TestGuard:
    @pytest.mark.parametrize(
        ("path", "root", "expected"),
        [
            ("/a/b", "/a", []),
            ("/a//./b/", "/a/", []),
            ("/a", "/", ["root-too-wide", "too-shallow"]),
            ("/", "/", ["root-too-wide", "is-root", "too-shallow"]),
            ("/a/b", "/a/b", ["is-root"]),
            ("/a/bc", "/a/b", ["outside-root"]),
            ("/a/b/../c", "/a/b", ["parent-component"]),
            ("a/b", "/a", ["relative"]),
            ("", "/a", ["relative"]),
            ("~/b", "/a", ["relative"]),
            ("/a/b\0c", "/a", ["bad-name"]),
            ("/a/\ud800", "/a", ["bad-name"]),
        ],
    )
    def test_verdicts(self, path: str, root: str, expected: list[str]) -> None:
        assert [problem["code"] for problem in guard(path, root)] == expected


class TestClear:
    def test_deletes_all_but_the_marker_and_proves_it(self, root: Path, output: Path) -> None:
        report = clear(owned(output, root), RUN)
        assert report == {
            "path": str(output), "stale": "clear", "deleted_entries": 4, "deleted_bytes": 150,
            "quarantined_to": None, "remaining": 0, "not_ours": 0,
        }  # fmt: skip
        assert os.listdir(output) == [OWNER_MARKER]

    def test_changed_since_shown_deletes_nothing(self, root: Path, output: Path) -> None:
        shown = owned(output, root)
        (output / "late").touch()
        with pytest.raises(ClearChanged) as caught:
            clear(shown, RUN)
        assert caught.value.end_reason is EndReason.CLEAR_CHANGED
        assert len(list(output.rglob("*"))) == 6  # 4 entries, the marker, the newcomer

    def test_shown_as_empty_but_filled_since(self, root: Path) -> None:
        output = root / "out"
        shown = owned(output, root)
        fill(output)
        with pytest.raises(ClearChanged):
            clear(shown, RUN)
        assert (output / "hs_0.safetensors").exists()

    @pytest.mark.parametrize("act", ["add", "change"])
    def test_what_appears_during_the_deletion_is_left(
        self, root: Path, output: Path, act: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original = walk

        def walk_beside_a_writer(*args: Any) -> Iterator[Any]:
            if act == "add":
                (output / "deep" / "late").write_text("new")
            else:
                (output / "hs_0.safetensors").write_text("rewritten")
            yield from original(*args)

        monkeypatch.setattr(clear_module, "walk", walk_beside_a_writer)
        with pytest.raises(ClearChanged) as caught:
            clear(owned(output, root), RUN)
        assert ("deep/late" if act == "add" else "hs_0.safetensors") in caught.value.why
        left = output / ("deep/late" if act == "add" else "hs_0.safetensors")
        assert left.read_text() == ("new" if act == "add" else "rewritten")

    def test_fail_keeps_everything(self, root: Path, output: Path) -> None:
        with pytest.raises(ClearFailed, match="earlier run") as caught:
            clear(owned(output, root, stale="fail"), RUN)
        assert caught.value.end_reason is EndReason.CLEAR_FAILED
        assert (output / "hs_0.safetensors").exists()

    def test_resume_keeps_everything(self, root: Path, output: Path) -> None:
        report = clear(owned(output, root, stale="resume"), RUN)
        assert (report["deleted_entries"], report["remaining"]) == (0, 4)
        assert (output / "hs_0.safetensors").exists()

    def test_quarantine_keeps_everything_beside_it(self, root: Path, output: Path) -> None:
        report = clear(owned(output, root, stale="quarantine"), RUN)
        aside = root / f"out.quarantine-{RUN}"
        assert report["quarantined_to"] == str(aside)
        assert report["remaining"] == 0
        assert (aside / "deep" / "er" / "hs_1.safetensors").read_bytes() == b"y" * 50
        assert os.listdir(output) == []

    def test_quarantine_overwrites_no_earlier_one(self, root: Path, output: Path) -> None:
        (root / f"out.quarantine-{RUN}").mkdir()
        with pytest.raises(ClearFailed, match="exists already"):
            clear(owned(output, root, stale="quarantine"), RUN)
        assert (output / "hs_0.safetensors").exists()

    def test_resume_goes_on_beside_a_share_that_wrote_meanwhile(self, root: Path, output: Path) -> None:
        shown = owned(output, root, stale="resume")
        (output / "hs_9.safetensors").write_bytes(b"of another share")
        assert clear(shown, RUN)["deleted_entries"] == 0
        assert (output / "hs_9.safetensors").read_bytes() == b"of another share"

    @pytest.mark.parametrize("stale", ["clear", "quarantine", "resume", "fail"])
    def test_foreign_files_need_adopt(self, root: Path, stale: str) -> None:
        folder = root / "theirs"
        fill(folder)
        with pytest.raises(ClearFailed) as caught:
            clear(owned(folder, root, stale=stale), RUN)
        assert caught.value.code == "output-foreign"
        assert "--adopt" in caught.value.fix
        assert (folder / "hs_0.safetensors").exists()

    def test_adopt_allows_foreign_files_to_go(self, root: Path) -> None:
        folder = root / "theirs"
        fill(folder)
        assert clear(owned(folder, root, adopt=True), RUN)["deleted_entries"] == 4
        assert os.listdir(folder) == []

    def test_links_are_removed_and_never_followed(self, root: Path, output: Path, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        fill(outside)
        (output / "to_folder").symlink_to(outside)
        (output / "to_file").symlink_to(outside / "hs_0.safetensors")
        (output / "dangling").symlink_to("/nowhere/at/all")
        os.link(outside / "hs_0.safetensors", output / "hard")
        os.mkfifo(output / "pipe")
        types = {example["path"]: example["type"] for example in scan(str(output), str(root))["examples"]}
        assert (types["to_folder"], types["hard"], types["pipe"], types["deep"]) == (
            "link",
            "file",
            "other",
            "folder",
        )
        assert clear(owned(output, root), RUN)["deleted_entries"] == 9
        assert os.listdir(output) == [OWNER_MARKER]
        assert (outside / "hs_0.safetensors").read_bytes() == b"x" * 100
        assert (outside / "deep" / "er" / "hs_1.safetensors").exists()

    def test_a_folder_swapped_for_a_link_after_the_listing(self, root: Path, output: Path, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        fill(outside)
        shown = owned(output, root)
        output.rename(root / "moved")
        output.symlink_to(outside)
        with pytest.raises(ClearFailed) as caught:
            clear(shown, RUN)
        assert caught.value.code == "output-symlink"
        assert (outside / "hs_0.safetensors").exists()

    def test_a_folder_moved_away_while_it_is_walked_is_not_followed(self, root: Path, tmp_path: Path) -> None:
        (root / "out" / "a" / "b").mkdir(parents=True)
        (root / "out" / "a" / "b" / "file").touch()
        (tmp_path / "beside").mkdir()
        place = open_output(str(root / "out"), str(root))
        steps = walk(place, [])
        assert next(steps).relpath == "a/b/file"
        (root / "out" / "a" / "b").rename(tmp_path / "beside" / "b")
        with pytest.raises(Refused, match="moved"):
            next(steps)
        place.close()

    def test_nesting_deeper_than_any_path_or_descriptor_limit(self, roomy_root: Path) -> None:
        depth = 3000  # 3000 * 11 bytes is beyond PATH_MAX (4096) and 3000 folders beyond 1024 descriptors
        output = roomy_root / "out"
        claim(owned(output, roomy_root), RUN)
        descriptor = os.open(output, os.O_RDONLY)
        for _ in range(depth):
            os.mkdir("0123456789", dir_fd=descriptor)
            child = os.open("0123456789", os.O_RDONLY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = child
        os.close(descriptor)
        assert clear(owned(output, roomy_root), RUN)["deleted_entries"] == depth
        assert os.listdir(output) == [OWNER_MARKER]

    def test_a_hundred_thousand_entries(self, roomy_root: Path) -> None:
        output = roomy_root / "out"
        claim(owned(output, roomy_root), RUN)
        for shelf in range(10):
            (output / str(shelf)).mkdir()
            descriptor = os.open(output / str(shelf), os.O_RDONLY)
            for number in range(10_000):
                os.close(os.open(f"hs_{number}", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
            os.close(descriptor)
        listing = scan(str(output), str(roomy_root))
        assert (listing["entries"], len(listing["examples"])) == (100_010, 50)
        shown = OwnedOutput(
            path=str(output), root=str(roomy_root), stale="clear", adopt=False,
            digest=listing["digest"], entries=listing["entries"], bytes=listing["bytes"],
        )  # fmt: skip
        assert clear(shown, RUN)["deleted_entries"] == 100_010

    def test_absent_folder_is_nothing_to_clear(self, root: Path) -> None:
        assert clear(owned(root / "none", root), RUN)["remaining"] == 0
        assert not (root / "none").exists()


class TestClaim:
    def test_creates_private_folders_and_a_marker(self, root: Path) -> None:
        marker = claim(owned(root / "a" / "b" / "out", root), RUN)
        assert (root / "a").stat().st_mode & 0o777 == 0o700
        assert (root / "a" / "b" / "out").stat().st_mode & 0o777 == 0o700
        assert json.loads((root / "a" / "b" / "out" / OWNER_MARKER).read_text()) == marker
        assert set(marker) == {"wire", "run_id", "created", "owner"}
        assert os.listdir(root / "a" / "b" / "out") == [OWNER_MARKER]

    def test_claims_again_for_the_next_run(self, root: Path, output: Path) -> None:
        later = "20261130-120000-abcdef"
        claim(owned(output, root), later)
        listing = scan(str(output), str(root))
        assert listing["marker"] is not None
        assert (listing["marker"]["run_id"], listing["entries"]) == (later, 4)

    def test_never_claims_foreign_files_unasked(self, root: Path) -> None:
        fill(root / "theirs")
        with pytest.raises(ClearFailed) as caught:
            claim(owned(root / "theirs", root), RUN)
        assert caught.value.code == "output-foreign"
        assert OWNER_MARKER not in os.listdir(root / "theirs")
        claim(owned(root / "theirs", root, adopt=True), RUN)
        assert OWNER_MARKER in os.listdir(root / "theirs")

    def test_creates_nothing_through_a_link_or_outside(self, root: Path, tmp_path: Path) -> None:
        (tmp_path / "outside").mkdir()
        (root / "link").symlink_to(tmp_path / "outside")
        for path in (root / "link" / "out", root / ".." / "out", tmp_path / "elsewhere"):
            with pytest.raises(ClearFailed):
                claim(owned(path, root), RUN)
        assert sorted(os.listdir(tmp_path)) == ["outside", "root"]
        assert os.listdir(tmp_path / "outside") == []
