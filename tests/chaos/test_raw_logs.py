"""What a job prints reaches the controller's disk, and `ctl logs`, to the byte, whatever it is."""

from __future__ import annotations

import hashlib
import sys

import pytest
from support import chaos

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
