"""A real vLLM of two ranks after its supervisor's SIGKILL: engine core and workers are found and ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.hostrun import HostRun, wait_until
from support.vllmtree import open_shm, title

from remote_payload.host.leftovers import SHM_NAMES, list_shm
from remote_payload.host.members import RUN_ENV, find_descendants, find_members, read_environ, snapshot
from tools import tiny_models

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ENGINE_S = 300.0
"""For an engine's start on a busy machine; 20 to 60 s on an idle one."""

JOB = """
import os, sys, time

if __name__ == "__main__":
    from vllm import LLM

    sizes = {"max_model_len": 128, "max_num_batched_tokens": 128}
    engine = LLM(sys.argv[1], tensor_parallel_size=2, enforce_eager=True, **sizes)
    open("ready", "w").write(str(os.getpid()))
    time.sleep(600)  # an engine that nobody refers to shuts itself down
"""

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def test_engine_core_and_workers_are_found_and_ended_after_the_supervisors_death(
    host: HostRun, tmp_path: Path
) -> None:
    model = tiny_models.write("qwen3-tiny", tmp_path / "models")
    (tmp_path / "job.py").write_text(JOB)
    environment = {**ENVIRONMENT, "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    step: dict[str, Any] = {
        "name": "job",
        "kind": "exec",
        "argv": [sys.executable, str(tmp_path / "job.py"), str(model)],
    }
    plan = host.plan(step, job={"kind": "extract", "env": environment, "limits": {"stop_grace_s": 5.0}})
    paths = host.launch(plan)
    wait_until(lambda: (host.folder / "ready").exists() or Path(paths.result).exists(), "the engine is up", ENGINE_S)
    assert not Path(paths.result).exists(), host.log(paths)[-4000:]
    run_id = plan["run_id"]
    supervisor = host.read(paths.run)["supervisor"]["pid"]
    tree = find_descendants([supervisor], snapshot(), run_id)
    named = {pid: title(pid) for pid in tree if f"ctl-{run_id}" in title(pid)}
    assert any("EngineCore" in text for text in named.values()), {pid: title(pid) for pid in tree}
    assert sum("Worker" in text for text in named.values()) == 2
    for pid in named:  # setproctitle would have written over it without SPT_NOENV
        assert (read_environ(pid) or {}).get(RUN_ENV) == run_id

    shm_names = open_shm(tree)

    host.kill_supervisor(paths)
    standing = host.state(plan)
    assert standing["state"] == "orphaned"
    # By the environment alone: without record, cgroup or a living supervisor.
    os.rename(paths.tree, paths.tree + ".away")
    assert set(tree) <= {member.pid for member in find_members(paths.folder, set())}
    os.rename(paths.tree + ".away", paths.tree)

    answer = host.ask("stop", {"run_id": run_id, "grace_s": 5, "force": False})
    assert (answer["state"], answer["end_reason"], answer["gpus_clean"]) == ("finished", "stopped", True)
    assert set(tree) <= {item["pid"] for item in answer["killed"]}
    assert not set(tree) & snapshot().keys()
    left = [item for item in answer["leftovers"] if str(item.get("path", "")).startswith("/dev/shm")]
    assert [item for item in left if not item["reason"].startswith(("belongs to", "in use by"))] == []
    swept = {name for name in shm_names if SHM_NAMES.match(name)}
    assert not swept & set(list_shm()), "shared memory of the killed engine is left"
