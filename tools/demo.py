"""The main job on this machine: `ctl extract` over a real SSH server, with vLLM on the CPU.

    python tools/demo.py run     prepare `.demo/`, start sshd on loopback, extract from a tiny Kimi-K2.5
    python tools/demo.py stop    stop that sshd

Everything lies below `.demo/`: keys, known_hosts, models, data, output, HOME, TMPDIR and the caches of vLLM. Only
`/run/sshd`, where OpenSSH separates privileges, and `/dev/shm`, which vLLM's workers share, lie
outside, and a line of the history of your own `ctl`, which knows the demo's run from every folder then.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

from controller.history import history_file  # noqa: E402 - found through the line above
from tools.sshd import SshdUnavailable, SshServer  # noqa: E402 - found through the line above

ALIAS = "ctl-demo"
MODEL = "kimi-k25-tiny"
DATA = "chats.jsonl"
FOLDERS = ("models", "data", "output")
STOP_TIMEOUT_S = 10.0


class Demo:
    """The folder of a demo: `root` is `.demo/` of a checkout, or any folder in a test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.host = root / "host"
        self.ssh = root / "ssh"
        self.home = root / "home"
        self.hosts_toml = root / "hosts.toml"

    def prepare(self) -> None:
        """Write the model and the data set, unless they are there whole."""
        # A folder of the environment that is not there is worth a warning, but not on a host that we made ourselves.
        for folder in (*map(Path, self._folders().values()), *(self.host / name for name in FOLDERS)):
            folder.mkdir(parents=True, exist_ok=True)
        generator = [sys.executable, str(CHECKOUT / "tools" / "tiny_models.py")]
        subprocess.run([*generator, str(self.host / "models"), MODEL], check=True, env=self.environment())
        subprocess.run([*generator, str(self.host / "data"), DATA], check=True, env=self.environment())

    def environment(self) -> dict[str, str]:
        """Return an environment in which nothing is read from or written to the user's own home."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CTL_", "XDG_"))}
        return {**kept, **self._folders()}

    def _folders(self) -> dict[str, str]:
        return {
            "HOME": str(self.home),
            "TMPDIR": str(self.root / "tmp"),
            "XDG_CACHE_HOME": str(self.home / ".cache"),
            "VLLM_CACHE_ROOT": str(self.home / ".cache" / "vllm"),
            "HF_HOME": str(self.home / ".cache" / "huggingface"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.home / ".cache" / "inductor"),
        }

    def start_sshd(self) -> None:
        """Start an sshd with new keys on a free port, unless the one of an earlier call still listens."""
        if self.sshd_pid() is not None and self.hosts_toml.exists():
            return
        shutil.rmtree(self.ssh, ignore_errors=True)
        server = SshServer(self.ssh, alias=ALIAS)
        server.start()
        self.write_hosts(server)

    def write_hosts(self, server: SshServer) -> None:
        env = "\n".join(f"{name} = {json.dumps(value)}" for name, value in self._job_environment().items())
        self.hosts_toml.write_text(
            f"""# Written by tools/demo.py: this machine as a host, reached through the sshd in {self.ssh.name}/.
schema = 1

[hosts.demo]
address = "{ALIAS}"
ssh_config = {json.dumps(str(server.ssh_config))}
python = {json.dumps(sys.executable)}
bootstrap_python = {json.dumps(sys.executable)}
workdir = {json.dumps(str(self.host))}
output_roots = ["output"]
lease_dir = "lease"
accelerator = "cpu"
playbook = "demo"

[hosts.demo.env]
{env}
"""
        )

    def _job_environment(self) -> dict[str, str]:
        return {**self._folders(), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

    def sshd_pid(self) -> int | None:
        """Return the pid of this demo's sshd if it lives; its command line must name our configuration.

        OpenSSH rewrites its command line into one text, so the path is looked for inside it.
        """
        try:
            pid = int((self.ssh / "sshd.pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError, ValueError):
            return None
        return pid if str(self.ssh / "sshd_config").encode() in command else None

    def stop_sshd(self) -> bool:
        """Stop this demo's sshd; False if there was none."""
        pid = self.sshd_pid()
        if pid is None:
            return False
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self.sshd_pid() is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.sshd_pid() is None


def with_history(environment: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return a demo's environment whose runs the `ctl` of the environment `own` knows by their ids too."""
    return {**environment, "XDG_STATE_HOME": str(history_file(own).parent.parent)}


def main(argv: list[str]) -> int:
    demo = Demo(CHECKOUT / ".demo")
    if argv == ["stop"]:
        print("sshd of the demo stopped" if demo.stop_sshd() else "no sshd of the demo is running")
        return 0
    if argv != ["run"]:
        print(__doc__, file=sys.stderr)
        return 2
    demo.prepare()
    try:
        demo.start_sshd()
    except SshdUnavailable as error:
        print(f"{error}\ninstall it with: sudo apt-get install openssh-server", file=sys.stderr)
        return 1
    command = ["ctl", "extract", "--host", "demo", "--playbook", "demo", "--yes"]
    print(f"$ {' '.join(command)}", file=sys.stderr)
    environment = with_history(demo.environment(), os.environ)
    code = subprocess.call([sys.executable, "-m", "controller", *command[1:]], cwd=CHECKOUT, env=environment)
    if code == 0:
        print(
            "\nsshd goes on, so that you can look around:\n"
            "  export PATH=$PWD/.venv/bin:$PATH\n  ctl summary --last\n  ctl ps --host demo\n"
            "  ctl extract --host demo --stale clear\n  make demo-stop",
            file=sys.stderr,
        )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
