"""What a job prints reaches the controller's disk, and `ctl logs`, to the byte, whatever it is."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import chaos

from controller.core.errors import ExitCode, LocalDiskFull
from controller.run import Run
from controller.runfolder import RunFolder
from controller.stages import launch

pytestmark = pytest.mark.sshd

WRITER = """
import os, sys
for name in sorted(os.listdir(sys.argv[1])):
    if name.endswith('.bin'):
        with open(os.path.join(sys.argv[1], name), 'rb') as file:
            data = file.read()
        # In odd pieces, so that characters and escapes are split anywhere.
        for start in range(0, len(data), 4093):
            os.write(1 + (start // 4093) % 2, data[start:start + 4093])
"""

PIECES = {
    "10 MB line": b"x" * 10_000_000 + b"\n",
    "carriage returns": b"".join(b"\rloading %3d%%|%s" % (n, b"#" * n) for n in range(101)) + b"\n",
    "split characters": ("\u00e9\u65e5\U0001f680" * 5000).encode() + b"\n",
    "invalid UTF-8": b"\xc3\x28\xff\xfe\xed\xa0\x80\n" * 500,
    "ANSI": b"\x1b[2J\x1b[31mred\x1b[0m\x1b]52;c;aGk=\x07\x1b]0;title\x1b\\\n" * 500,
    "NUL": b"\0" * 10_000 + b"\n",
    "every byte": bytes(range(256)) * 300,
    "frames of our own protocol": b"\0\0\0\x10\0\0\0\0ctl-launch x {}\nctl-trailer 0\n" * 100,
    "no newline at the end": b"the end",
}


def test_every_kind_of_output_arrives_as_it_was_printed(site: chaos.Site) -> None:
    assert site.proxy is not None
    run = site.prepare(1)
    for number, piece in enumerate(PIECES.values()):
        (run.output / f"{number}.bin").write_bytes(piece)
    run.plan["job"]["steps"] = [
        {"name": "job", "kind": "exec", "argv": [sys.executable, "-S", "-c", WRITER, str(run.output)]}
    ]
    expected = b"".join(PIECES.values())
    launch.run(site.host.context(), run.plan, {})
    site.proxy.cut_after = 1_234_567  # in the middle of the long line
    assert run.watch().end_reason == "succeeded"
    assert hashlib.sha256(run.log).hexdigest() == hashlib.sha256(expected).hexdigest()
    held = b"".join(path.read_bytes() for path in sorted((run.mirror.folder / "log").glob("*.log")))
    assert held == expected
    result = run.read("result.json")
    assert (result["log_bytes"], result["log_sha256"]) == (len(expected), hashlib.sha256(expected).hexdigest())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """2 MiB for the controller's run folders."""
    if os.getuid() != 0:
        pytest.skip("only root may mount a small file system")
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    mount = subprocess.run(command, capture_output=True, text=True)
    if mount.returncode != 0:
        pytest.skip(f"mount: {mount.stderr}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_the_controllers_full_disk_ends_the_watch_and_not_the_run(site: chaos.Site, small_disk: Path) -> None:
    launched = site.launch(2, 2_000_000)
    launched.open_gate(0)
    folder = RunFolder.create(small_disk, launched.plan["run_id"])
    folder.write_plan(launched.plan)

    def attach() -> Run:
        return Run(folder, site.host.transport, site.host.record, launched.plan["payload"])

    launched.open_gate(1)
    with pytest.raises(LocalDiskFull) as caught:
        attach().watch()
    assert caught.value.exit_code is ExitCode.DETACHED
    assert str(small_disk) in str(caught.value)
    assert "ctl attach" in caught.value.fix

    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    seen = bytearray()

    class Sink:
        def event(self, event: object) -> None: ...

        def log(self, data: bytes) -> None:
            seen.extend(data)

    run = attach()
    run.add_sink(Sink())
    assert run.watch().end_reason == "succeeded"
    assert bytes(seen) == launched.expected_log() == b"".join(run.logs())
    assert json.loads((folder.path / "result.json").read_bytes())["log_bytes"] == len(seen)
