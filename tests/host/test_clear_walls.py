"""Where clearing stops: at mounts, at permissions, and at the root, whatever a path says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.outputs import RUN, owned

from remote_payload.host.clear import ClearChanged, ClearFailed, claim, clear
from remote_payload.host.guard import guard
from remote_payload.host.layout import OWNER_MARKER

REPO = Path(__file__).resolve().parents[2]


def can_unshare() -> bool:
    return (
        subprocess.run(["unshare", "-m", "-r", "true"], capture_output=True, check=False, timeout=20).returncode == 0
    )


@pytest.mark.skipif(not shutil.which("unshare") or not can_unshare(), reason="needs a mount namespace of its own")
@pytest.mark.parametrize("kind", ["at", "above", "inside", "file", "appearing"])
def test_mounts_are_never_crossed(tmp_path: Path, kind: str) -> None:
    """A bind mount has the device number of its surroundings; only the mount table and mount ids show it."""
    script = """
        set -eu
        mkdir -p outside/in root/a/out/sub
        for file in outside/keep outside/in/keep root/a/out/x; do echo keep > $file; done
        echo '{"wire": 1, "run_id": "r"}' > root/a/out/.ctl-owner.json
        case $1 in
            at) mount --bind outside root/a/out; mkdir -p outside/out;;
            above) mkdir -p outside/out; mount --bind outside root/a;;
            inside) mount --bind outside root/a/out/sub;;
            file) touch root/a/out/f; mount --bind outside/keep root/a/out/f;;
        esac
        exec "$2" -c "$3" "$PWD" "$1"
    """
    program = """
        import os, subprocess, sys
        from remote_payload.host import clear, guard
        from remote_payload.host.listing import scan
        base, kind = sys.argv[1:]
        path, root = base + "/root/a/out", base + "/root"
        if kind == "appearing":  # mounted after the mount table was read: the mount id of the folder tells
            guard.read_mounts = lambda: []
            subprocess.run(["mount", "--bind", "outside", "root/a/out/sub"], check=True)
        listing = scan(path, root)
        print([problem["code"] for problem in listing["problems"]])
        try:
            clear.clear({"path": path, "root": root, "stale": "clear", "adopt": True, "digest": listing["digest"],
                         "entries": 0, "bytes": 0}, "20261129-120000-abcdef")
        except clear.ClearFailed as error:
            print(error.code)
    """
    done = subprocess.run(
        ["unshare", "-m", "-r", "sh", "-c", script, "sh", kind, sys.executable, textwrap.dedent(program)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["['mount']", "output-mount"], done.stderr
    assert (tmp_path / "outside" / "keep").exists()
    assert (tmp_path / "outside" / "in" / "keep").exists()
    assert (tmp_path / "root" / "a" / "out" / "x").exists()


@pytest.fixture
def as_nobody() -> Iterator[Callable[[str], list[str]]]:
    """Run a program as an unprivileged user, whom permissions bind, in a folder of theirs; give its output lines."""
    with tempfile.TemporaryDirectory() as base:
        Path(base).chmod(0o755)
        shutil.copytree(REPO / "remote_payload", f"{base}/lib/remote_payload")
        (Path(base) / "work").mkdir()
        identity: dict[str, Any] = {}
        if os.geteuid() == 0:
            os.chown(f"{base}/work", 65534, 65534)
            identity = {"user": 65534, "group": 65534, "extra_groups": []}

        def run(program: str) -> list[str]:
            done = subprocess.run(
                [shutil.which("python3", path="/usr/bin:/bin") or sys.executable, "-c", textwrap.dedent(program)],
                cwd=f"{base}/work", env={"PYTHONPATH": f"{base}/lib", "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True, text=True, check=False, timeout=60, **identity,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            return str(done.stdout).splitlines()

        yield run


PERMISSION_PROGRAM = """
    import os
    from remote_payload.host.clear import ClearFailed, claim, clear
    from remote_payload.host.listing import scan
    base = os.getcwd()
    os.mkdir("root")
    out = {"path": base + "/root/out", "root": base + "/root", "stale": "clear", "adopt": False, "digest": None,
           "entries": 0, "bytes": 0}
    claim(out, "20261129-120000-abcdef")
    os.makedirs("root/out/locked")
    open("root/out/locked/file", "w").close()
    os.chmod("root/out/locked", %s)
    listing = scan(out["path"], out["root"])
    print([problem["code"] for problem in listing["problems"]])
    try:
        print(clear({**out, "digest": listing["digest"]}, "20261129-120000-abcdef")["deleted_entries"])
    except ClearFailed as error:
        print(error.code)
    os.chmod(base + "/root/out", 0o700)
    print(sorted(os.listdir("root/out")))
"""


def test_read_only_folders_of_ours_are_emptied(as_nobody: Callable[[str], list[str]]) -> None:
    assert as_nobody(PERMISSION_PROGRAM % "0o555") == ["[]", "2", f"['{OWNER_MARKER}']"]


def test_an_unreadable_folder_refuses_the_whole(as_nobody: Callable[[str], list[str]]) -> None:
    expected = ["['unreadable']", "output-unreadable", f"['{OWNER_MARKER}', 'locked']"]
    assert as_nobody(PERMISSION_PROGRAM % "0") == expected


# Components that have bitten path checks before, mixed with any text at all.
hostile = st.sampled_from(
    [
        "..",
        ".",
        "",
        "/",
        "root",
        "beside",
        "out",
        "link_up",
        "link_beside",
        "link_abs",
        "sub",
        "é",
        "e\u0301",
        "\u202e",
    ]
)
segment = st.one_of(hostile, hostile, st.text(max_size=6))
tails = st.lists(segment, max_size=5).map("/".join)


HEADS = ["{root}/", "{root}", "{base}/", "", "/", "//", "{root}/out/"]
BATCH = 50
"""Paths an example: making an example of its own for each would take most of the time."""


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arena")
    for sentinel in ("keep", "beside/keep", "beside/sub/keep"):
        (folder / sentinel).parent.mkdir(parents=True, exist_ok=True)
        (folder / sentinel).touch()
    furnish(folder)
    return folder


def furnish(arena: Path) -> None:
    """Put back what a clear may have deleted: a stale file, and links that lead out of the root."""
    root = arena / "root"
    (root / "out" / "sub").mkdir(parents=True, exist_ok=True)
    (root / "out" / "sub" / "stale").touch()
    for name, target in {"link_up": "..", "link_beside": "../beside", "link_abs": str(arena / "beside")}.items():
        for folder in (root, root / "out"):
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(target)


@settings(max_examples=10_000 // BATCH, deadline=None, suppress_health_check=list(HealthCheck))
@given(batch=st.lists(st.tuples(st.sampled_from(HEADS), tails), min_size=BATCH, max_size=BATCH))
@example(
    batch=[
        ("{root}/", "out"),
        ("{root}/", "link_beside/sub"),
        ("{root}/", "out/link_up/../beside"),
        ("{root}/out/", "link_abs"),
    ]
)
@pytest.mark.timeout(600)
def test_nothing_outside_the_root_is_ever_deleted(arena: Path, batch: list[tuple[str, str]]) -> None:
    """10,000 real deletions with every right given, beside sentinels that must survive whatever the path says."""
    for head, tail in batch:
        clear_one(arena, head.format(root=arena / "root", base=arena) + tail)


def clear_one(arena: Path, path: str) -> None:
    root, stale = arena / "root", arena / "root" / "out" / "sub" / "stale"
    refused = False
    try:
        clear(owned(path, root, adopt=True), RUN)
        claim(owned(path, root, adopt=True), RUN)
    except (ClearFailed, ClearChanged):
        refused = True
    assert sorted(os.listdir(arena)) == ["beside", "keep", "root"]
    assert sorted(os.listdir(arena / "beside")) == ["keep", "sub"]
    assert os.listdir(arena / "beside" / "sub") == ["keep"]
    if guard(path, str(root)):
        assert stale.exists()
    if path == f"{root}/out":
        assert not refused
        assert not stale.exists()
    if not refused or not stale.exists():
        furnish(arena)
