"""A project whose hosts are this machine over a real sshd, with a stand-in for vLLM: `extract` in a few seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support.extraction import REPOSITORY
from support.stubengine import STUB, write_model, write_prompts

from tools.sshd import SshServer

PLAYBOOK = """
schema = 1
kind = "extract"
[model]
path = "model"
dtype = "float32"
[data]
path = "data.jsonl"
max_seq_len = 48
[capture]
boundaries = [2, 4, 5, 8]
path = "hooks"
canary = false
[output]
path = "out/stub"
stale = "fail"
[rehearse]
mode = "never"
"""


def write_project(
    root: Path, server: SshServer, *names: str, samples: int = 24, load_s: float = 0.0, step_s: float = 0.02
) -> Path:
    """Write hosts.toml and a playbook `stub` below `root`; each host is a folder of its own, with its own lease.

    `load_s` and `step_s` are the seconds that the stand-in takes to load, and for each step.
    """
    root.mkdir(parents=True, exist_ok=True)
    text = "schema = 1\n"
    for name in names:
        host = root / name
        write_model(host / "model")
        write_prompts(host / "data.jsonl", [8 + 3 * (number % 20) for number in range(samples)])
        (host / "out").mkdir()
        env = {
            "PYTHONPATH": f"{STUB}:{REPOSITORY / 'tests'}",
            "CTL_STUB": json.dumps({"load_s": load_s, "step_s": step_s}),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in env.items())
        text += (
            f"[hosts.{name}]\naddress = {json.dumps(server.alias)}\n"
            f"ssh_config = {json.dumps(str(server.ssh_config))}\n"
            f"python = {json.dumps(sys.executable)}\nbootstrap_python = {json.dumps(sys.executable)}\n"
            f'workdir = {json.dumps(str(host))}\noutput_roots = ["out"]\nlease_dir = "lease"\naccelerator = "cpu"\n'
            f'playbook = "stub"\n[hosts.{name}.env]\n{lines}'
        )
    (root / "hosts.toml").write_text(text)
    (root / "playbooks").mkdir(exist_ok=True)
    (root / "playbooks" / "stub.toml").write_text(PLAYBOOK)
    return root
