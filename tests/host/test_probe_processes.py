"""Who computes, and what vLLM left behind: on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.probing import quiet

from remote_payload.host.probe_processes import is_vllm, probe_processes


def probed(apps: list[dict[str, Any]] | None, probe_pid: int, python: str | None, workdir: str = "/x") -> Any:
    return probe_processes(quiet, apps, probe_pid, python, workdir)


class TestProcesses:
    @pytest.fixture
    def start(self) -> Iterator[Any]:
        started: list[subprocess.Popen[bytes]] = []

        def run(argv: list[str], **env: str) -> int:
            process = subprocess.Popen(argv, env={**os.environ, **env}, start_new_session=True)
            started.append(process)
            for _ in range(200):  # until exec: before it the child still has our own command line
                if Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[0] == os.fsencode(argv[0]):
                    break
                time.sleep(0.05)
            return process.pid

        yield run
        for process in started:
            process.kill()
            process.wait()

    @pytest.mark.parametrize("workdir", ["its own", "another"])
    def test_finds_leftovers_with_owner_age_and_run(self, start: Any, tmp_path: Path, workdir: str) -> None:
        (tmp_path / "its own" / "runs" / "20261129-120000-abcdef").mkdir(parents=True)
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__main__.py").write_text("import time; time.sleep(600)")
        argv = [sys.executable, "-m", "vllm", "serve"]
        of_run = {"CTL_RUN_ID": "20261129-120000-abcdef", "PYTHONPATH": str(tmp_path)}
        pid = start(argv, **of_run, CTL_RUN_DIR=str(tmp_path / "its own" / "runs" / of_run["CTL_RUN_ID"]))
        reader = start(["tail", "-f", "/dev/null", "--pid", str(os.getpid())])
        # A pid without a process stands for the probe: this test's own children are not to be left out.
        records = probed([], 2**22 + 1, sys.executable, str(tmp_path / workdir))["vllm"]
        found = {record["pid"]: record for record in records}
        assert found[pid]["run_here"] is (workdir == "its own")
        assert found[pid]["run_id"] == "20261129-120000-abcdef"
        assert found[pid]["uid"] == os.getuid()
        assert found[pid]["ppid"] == os.getpid()
        assert " ".join(argv) == found[pid]["command"]
        assert 0 <= found[pid]["age_s"] < 300
        assert reader not in found
        odd = start(argv, CTL_RUN_ID="../..", PYTHONPATH=str(tmp_path))
        again = probed([], 2**22 + 1, sys.executable, str(tmp_path / workdir))["vllm"]
        assert [record["run_here"] for record in again if record["pid"] == odd] == [False]
        same = start(argv, **of_run, CTL_RUN_DIR=str(tmp_path / "a third" / "runs" / of_run["CTL_RUN_ID"]))
        again = probed([], 2**22 + 1, sys.executable, str(tmp_path / workdir))["vllm"]
        assert [record["run_here"] for record in again if record["pid"] == same] == [False]

    def test_leaves_out_the_probe_its_children_and_ancestors(self, start: Any, tmp_path: Path) -> None:
        (tmp_path / "vllm").write_text("import time; time.sleep(600)")
        pid = start([sys.executable, str(tmp_path / "vllm")])
        assert pid in [record["pid"] for record in probed([], 2**22 + 1, sys.executable)["vllm"]]
        found = probed([], os.getpid(), sys.executable)["vllm"]
        assert pid not in [record["pid"] for record in found]

    def test_compute_processes_seen_and_unseen(self, start: Any) -> None:
        pid = start([sys.executable, "-c", "import time; 'vllm'; time.sleep(600)"])
        apps = [
            {"pid": pid, "gpu_uuid": "GPU-0", "memory_used": 5, "name": "python"},
            {"pid": 2**22 + 2, "gpu_uuid": "GPU-1", "memory_used": None, "name": "[Not Found]"},
        ]
        found = probed(apps, 2**22 + 1, sys.executable)
        assert [(r["pid"], r["gpu_uuid"], r["uid"]) for r in found["compute"]] == [
            (pid, "GPU-0", os.getuid()), (2**22 + 2, "GPU-1", None),
        ]  # fmt: skip
        assert pid not in [record["pid"] for record in found["vllm"]]
        assert probed(None, 2**22 + 1, None)["compute"] is None

    @pytest.mark.parametrize(
        ("comm", "argv", "expected"),
        [
            ("VLLM::EngineCor", ["VLLM::EngineCore"], True),
            ("ctl-20261129-12", ["ctl-20261129-120000-abcdef::Worker_TP3"], True),
            ("python3", ["/opt/venv/bin/python3", "-m", "vllm.entrypoints.openai.api_server"], True),
            ("vllm", ["/opt/venv/bin/vllm", "serve", "m"], True),
            ("python", ["/opt/venv/bin/python", "-m", "remote_payload.extract.engine"], True),
            ("python", ["/opt/venv/bin/python", "-X", "dev", "-Bm", "vllm.entrypoints.cli.main", "serve"], True),
            ("vllm", ["/opt/venv/bin/python3.12", "-B", "/opt/venv/bin/vllm", "serve", "m"], True),
            ("python", ["/opt/venv/bin/python", "-m", "remote_payload.extract.lengths"], False),
            ("python", ["/srv/other/bin/python", "-m", "remote_payload.extract.exercise"], False),
            ("python", ["/opt/venv/bin/python", "-c", "import vllm.entrypoints"], False),
            ("python", ["/opt/venv/bin/python", "-c", "'multiprocessing'; 'vllm.entrypoints'"], False),
            ("python", ["/opt/venv/bin/python", "-m", "vllm_exporter"], False),
            ("python", ["/opt/venv/bin/python", "-m", "pytest", "tests/vllm"], False),
            ("python", ["/opt/vllm/bin/python", "/srv/vllm/report.py", "vllm", "serve"], False),
            ("python", ["/opt/venv/bin/python", "-W", "ignore::vllm.W", "-"], False),
            ("python", ["/opt/venv/bin/python"], False),
            ("python", ["/opt/venv/bin/python", "-c", "from multiprocessing.resource_tracker import main"], True),
            ("python", ["/usr/bin/python", "-c", "from multiprocessing.resource_tracker import main"], False),
            ("tail", ["tail", "-f", "vllm.log"], False),
            ("vim", ["vim", "/opt/vllm/worker.py"], False),
            ("bash", ["bash", "-c", "python -m vllm"], False),
            ("kworker/0:1", [], False),
        ],
    )
    def test_a_command_that_only_mentions_vllm_is_not_one(self, comm: str, argv: list[str], expected: bool) -> None:
        assert is_vllm(comm, argv, "/opt/venv/bin/python") is expected
