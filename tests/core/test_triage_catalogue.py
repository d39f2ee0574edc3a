"""Each entry of the catalogue: what it must match, and what looks like it and must not match."""

from __future__ import annotations

import pytest

from controller.core.triage import Ending, place_lines, triage
from controller.core.triage_catalogue import CATALOGUE

VLLM = "/opt/vllm/lib/python3.12/site-packages/vllm"
Frame = tuple[str, str, str]
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."


def frame(path: str, function: str, source: str = "work()") -> Frame:
    return path, function, source


LOADER = frame(f"{VLLM}/model_executor/model_loader/base_loader.py", "load_model")
WEIGHTS = frame(f"{VLLM}/model_executor/models/qwen3.py", "load_weights")
STEP = frame(f"{VLLM}/v1/worker/gpu_worker.py", "execute_model")
BROADCAST = frame(f"{VLLM}/distributed/device_communicators/shm_broadcast.py", "acquire_read", "raise TimeoutError")
WEIGHT_LOADER = frame(f"{VLLM}/model_executor/layers/linear.py", "weight_loader")
INDUCTOR = frame("/opt/torch/_inductor/utils.py", "run")
MINE = frame("/home/user/my_worker.py", "patched_forward", "hidden, residual = layer(hidden, residual, positions)")
REMOTE = frame("/opt/site-packages/transformers/modeling_x.py", "forward", "hidden = layer(hidden)")
EXTRACT = frame(f"{VLLM}/v1/spec_decode/extract_hidden_states.py", "propose")
USER = frame("/home/user/script.py", "main")
DATA = frame("/w/payload/af56/remote_payload/extract/dataset.py", "read", "raise ConfigError(")


def raised(exception: str, *frames: Frame, source: str = "") -> str:
    """The log of one process that dies of an exception."""
    prefix = f"({source} pid=7) " if source else ""
    lines = ["Traceback (most recent call last):"]
    for path, function, text in frames or (USER,):
        lines += [f'  File "{path}", line 1, in {function}', f"    {text}"]
    return "".join(f"{prefix}{line}\n" for line in [*lines, *exception.splitlines()])


def code_of(log: str, ending: Ending | None = None) -> str | None:
    found = triage(place_lines([("log", log.encode())]), (), ending)
    return found.code if found else None


RENAME = frame("/home/user/my_worker.py", "write", "os.replace(temporary, path)")
GONE = "FileNotFoundError: [Errno 2] No such file or directory: '/out/0.tmp' -> '/out/0'"
NCCL_WARN = "host:1:2 [0] misc/shmutils.cc:129 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x\n"

ARGUMENTS = frame(f"{VLLM}/engine/arg_utils.py", "create_engine_config", "scheduler_config = SchedulerConfig(")
REFUSED = "ValidationError: 1 validation error for SchedulerConfig\n{field}\n  {says}"
NO_INTEGER = ("Input should be a valid integer, unable to parse string as an integer "
              "[type=int_parsing, input_value='eight', input_type=str]")  # fmt: skip

MATCHES: list[tuple[str, str]] = [
    ("gpu-memory-kv", raised(OOM, frame(f"{VLLM}/v1/worker/gpu_model_runner.py", "initialize_kv_cache"))),
    ("gpu-memory-warm-up", raised(OOM, LOADER, frame(f"{VLLM}/v1/worker/gpu_model_runner.py", "profile_run"))),
    ("gpu-memory-load", raised(OOM, LOADER)),
    ("gpu-memory-load", raised("RuntimeError: CUDA error: out of memory", WEIGHTS)),
    ("gpu-memory-step", raised(OOM, STEP)),
    ("kv-cache-small", raised("ValueError: No available memory for the cache blocks. Try increasing it.")),
    ("kv-cache-small", raised("ValueError: To serve at least one request with the model's max seq len (262144), "
                              "(16.00 GiB KV cache is needed, which is larger than the available KV cache memory)")),
    ("gpu-memory-taken", raised("ValueError: Free memory on device (3.22/4.0 GiB) on startup is less than desired")),
    ("no-kernel-image", raised("RuntimeError: CUDA error: no kernel image is available for execution on the device")),
    ("driver-old", raised("RuntimeError: The NVIDIA driver on your system is too old (found version 12020).")),
    ("no-gpu", raised("RuntimeError: No CUDA GPUs are available")),
    ("no-pinned-memory", raised("RuntimeError: pin_memory=True requires a CUDA or other accelerator backend")),
    ("gpu-fault", raised("RuntimeError: CUDA error: an illegal memory access was encountered", STEP)),
    ("gpu-fault", "kernel: NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n"),
    ("compile-slow", raised("TimeoutError: RPC call to execute_model timed out.",
                            frame("/opt/site-packages/flashinfer/jit/core.py", "build_and_load"))),
    ("compile-slow", "[3/16] /usr/local/cuda/bin/nvcc -gencode=arch=compute_120a,code=sm_120a -c attention.cu\n"
                     + raised("TimeoutError: RPC call to execute_model timed out.")),
    ("step-timeout", raised("TimeoutError: RPC call to execute_model timed out.")),
    ("broadcast-timeout", raised("TimeoutError", BROADCAST)),
    ("nccl-timeout", raised("torch.distributed.DistBackendError: Watchdog caught collective operation timeout: "
                            "WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600000 milliseconds before timing out.")),
    ("nccl-timeout", "[rank3]:[E1129 19:00:00 x.cpp:1] Watchdog caught collective operation timeout\n"),
    ("shm-full", raised("OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'")),
    ("shm-full", raised("RuntimeError: Insufficient space in /dev/shm for shared-memory allocation: 160 MiB")),
    ("shm-full", raised("OSError: [Errno 28] No space left on device",
                        frame("/usr/lib/python3.12/multiprocessing/shared_memory.py", "__init__"))),
    ("shm-full", NCCL_WARN + raised("RuntimeError: NCCL error: unhandled system error")),
    ("shm-full", "Bus error (core dumped)\n"),
    ("nccl", raised("RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)")),
    ("head-size", raised("ValueError: Head size 72 is not supported by FlashAttention. Supported: [64, 128]")),
    ("head-size", raised("ValueError: No valid attention backend found for cuda with AttentionSelectorConfig("
                         "head_size=72). Reasons: {FLASH_ATTN: [head_size not supported]}")),
    ("topk-method", raised("KeyError: 'layers.2.mlp.gate.e_score_correction_bias'", WEIGHTS)),
    ("state-count", raised("RuntimeError: The expanded size of the tensor (4) must match the existing size (3) at "
                           "non-singleton dimension 1.", EXTRACT)),
    ("state-count", raised("errors.CaptureError: the engine gave no state at boundaries [61]")),
    ("layer-signature", raised("TypeError: DeepseekV2DecoderLayer.forward() missing 1 required positional argument: "
                               "'llama_4_scaling'")),
    ("layer-signature", raised("AttributeError: 'NoneType' object has no attribute 'dtype'", MINE)),
    ("embedding-method", raised("AttributeError: 'DeepseekV2Model' object has no attribute 'get_input_embeddings'")),
    ("embedding-method", raised("TypeError: Kimi.get_input_embeddings() missing 1 required argument: 'x'")),
    ("shard-truncated", raised("safetensors_rust.SafetensorError: Error while deserializing header: "
                               "MetadataIncompleteBuffer")),
    ("shard-missing", raised("RuntimeError: Cannot find any model weights with `/models/x`")),
    ("shard-missing", raised("FileNotFoundError: [Errno 2] No such file: '/m/model-2-of-3.safetensors'")),
    ("shard-missing", raised("ValueError: Following weights were not initialized from checkpoint: {'x'}")),
    ("weights-config", raised("AssertionError: Attempted to load weight (torch.Size([320, 128])) into parameter "
                              "(torch.Size([256, 128]))", WEIGHTS, WEIGHT_LOADER)),
    ("weights-config", raised("AssertionError", WEIGHTS, WEIGHT_LOADER)),
    ("remote-code", raised("ValueError: The repository x contains custom code which must be executed")),
    ("tokenizer", raised("OSError: Can't load tokenizer for '/models/x'.")),
    ("architecture", raised("pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
                            "  Value error, Model architectures ['NewForCausalLM'] are not supported for now.")),
    ("config-broken", raised("OSError: It looks like the config file at '/m/config.json' is not a valid JSON file.")),
    ("prompt-too-long", raised("ValueError: The decoder prompt (length 5000) is longer than the maximum model length "
                               "of 4097. Make sure that it is shorter.")),
    ("max-model-len", raised("ValueError: User-specified max_model_len (100000) is greater than the derived "
                             "max_model_len (max_position_embeddings=1024)")),
    ("engine-argument", raised("TypeError: EngineArgs.__init__() got an unexpected keyword argument 'tensor_size'")),
    ("engine-argument", "vllm serve: error: unrecognized arguments: --tensor-size 2\n"),
    ("engine-value", raised(REFUSED.format(field="max_num_seqs", says=NO_INTEGER), ARGUMENTS)),
    ("engine-value", raised("pydantic_core._pydantic_core.Validation" + REFUSED.format(
        field="gpu_memory_utilization", says="Input should be less than or equal to 1 [type=less_than_equal, "
        "input_value=2.0, input_type=float]").removeprefix("Validation"), ARGUMENTS)),
    ("engine-value", raised(REFUSED.format(field="additional_config.dict[any,any]", says="Input should be a "
                                           "valid dictionary [type=dict_type, input_value='x', input_type=str]"),
                            ARGUMENTS)),
    ("engine-value", raised("ValueError: Unknown attention backend: 'FP99'. Valid options are: FLASH_ATTN, CPU_ATTN",
                            ARGUMENTS)),
    ("engine-value", raised("ValidationError: 1 validation error for ModelConfig\n  Value error, Unknown "
                            "quantization method: fp99. Must be one of ['awq', 'fp8']. [type=value_error, "
                            "input_value=ArgsKwargs((), {'model': 1}), input_type=ArgsKwargs]", ARGUMENTS)),
    ("heads", raised("pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n  Value "
                     "error, Total number of attention heads (8) must be divisible by tensor parallel size (3). "
                     "[type=value_error, input_value=ArgsKwargs((), {}), input_type=ArgsKwargs]", ARGUMENTS)),
    ("heads", raised("AssertionError: 10 is not divisible by 4",
                     frame(f"{VLLM}/distributed/utils.py", "ensure_divisibility"), source="Worker_TP0")),
    ("cores-per-rank", raised("AssertionError: Given number of CPU id list ['0', '1'] doesn't match local world size "
                              "4.", source="EngineCore")),
    ("port-taken", raised("OSError: [Errno 98] Address already in use")),
    ("tmp-full", raised("OSError: [Errno 28] No space left on device: '/tmp/torchinductor_user/x'")),
    ("tmp-full", raised("FileNotFoundError: [Errno 2] No usable temporary directory found in ['/tmp', '/var/tmp']")),
    ("quota", raised("OSError: [Errno 122] Disk quota exceeded: '/home/user/out/hs_1.safetensors'")),
    ("disk-full", raised("OSError: [Errno 28] No space left on device: '/data/out/hs_1.safetensors'")),
    ("disk-full", raised("safetensors_rust.SafetensorError: Error while serializing: "
                         'IoError(Os { code: 28, message: "No space left on device" })')),
    ("read-only", raised("OSError: [Errno 30] Read-only file system: '/data/out/hs_1.safetensors'")),
    ("permission", raised("PermissionError: [Errno 13] Permission denied: '/data/out'")),
    ("same-file", "".join(raised(GONE, RENAME, source=f"Worker_TP{rank}") for rank in (0, 1))),
    ("module-missing", raised("ModuleNotFoundError: No module named 'deep_gemm'")),
    ("symbol-missing", raised("ImportError: cannot import name 'Worker' from 'vllm.v1.worker.gpu_worker'")),
    ("symbol-missing", raised("ImportError: /opt/vllm/_C.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEi")),
    ("library-missing", raised("ImportError: libcudart.so.13: cannot open shared object file: No such file")),
    ("host-memory", raised("RuntimeError: [enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate "
                           "memory: you tried to allocate 9 bytes.")),
    ("compile-cache", raised("AssertionError", frame(f"{VLLM}/compilation/caching.py", "optimized_call"), INDUCTOR)),
    ("compile-cache", raised("ValueError: too many values to unpack (expected 2)",
                             frame(f"{VLLM}/v1/worker/gpu_model_runner.py", "execute_model",
                                   "hidden_states, aux_hidden_states = model_output"))),
    ("empty-message", raised("AssertionError", LOADER)),
    ("empty-message", raised("RuntimeError: ", STEP)),
    ("empty-message", raised("torch.AcceleratorError", STEP)),
    ("killed", "(Worker_TP0 pid=8) INFO 11-29 19:00:00 [x.py:1] Starting to load model /m...\n"
               + raised("Exception: WorkerProc initialization failed due to an exception in a background process. "
                        "See stack trace for root cause.", source="EngineCore")),
    ("host-memory", raised("ValueError: Available memory on node 0 (15.7/19.21 GiB) on kv cache allocation is less "
                           "than requested memory for kv (900.0 GiB).")),
    ("host-memory-share", raised(
        "ValueError: Available memory on node 0 (21.26/23.46 GiB) on startup is less than desired CPU memory "
        "utilization (0.92, 21.58 GiB). On the CPU backend, the `--gpu-memory-utilization` flag controls the "
        "fraction of CPU memory reserved (despite its name). To resolve: decrease `--gpu-memory-utilization` (e.g. "
        "`--gpu-memory-utilization 0.5`) or reduce CPU memory used by other processes.", source="Worker")),
    ("refused-by-job", raised("remote_payload.extract.settings.ConfigError: d.jsonl gives not one sample", DATA)),
    ("package-missing", "ERROR: No matching distribution found for vllm==9.9.7\n"),
    ("package-missing", "error: No solution found when resolving dependencies\n  cause: Because there is no version "
                        "of vllm==9.9.7 and you require vllm==9.9.7, we can conclude that\n"),
    ("disk-full", "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"),
    ("oom-killed", "kernel: Out of memory: Killed process 4242 (VLLM::Worker) total-vm:1kB\n"),
    ("oom-killed", "kernel: Memory cgroup out of memory: Killed process 4242 (python)\n"),
    ("crashed", "!!!!!!! Segfault encountered !!!!!!!\n"),
    ("crashed", "(Worker_TP0 pid=8) terminate called after throwing an instance of 'c10::Error'\n  what():  \n"),
    ("killed", "(EngineCore pid=3) ERROR 11-29 22:10:59 [x.py:1] Worker proc VllmWorker-1 died unexpectedly\n"),
    ("killed", raised("RuntimeError: Engine core initialization failed. See root cause above.",
                      source="APIServer") + "Failed core proc(s): {'EngineCore': -9}\n"),
]  # fmt: skip

LOOKALIKES: list[tuple[str, str | None, str]] = [
    ("refused-by-job", "unknown", raised("omegaconf.ConfigError: d.jsonl gives not one sample", DATA)),
    ("refused-by-job", "unknown", raised("ConfigError: d.jsonl gives not one sample", USER)),
    ("gpu-memory-kv", "gpu-memory-load", raised(OOM, LOADER)),
    ("gpu-memory-warm-up", "unknown", raised(OOM)),
    ("gpu-memory-load", "unknown", raised("RuntimeError: CUDA error: invalid configuration argument", LOADER)),
    ("gpu-memory-step", "unknown", raised("RuntimeError: out of memory slots in my own pool", STEP)),
    ("kv-cache-small", "unknown", raised("ValueError: the cache blocks have no available memory layout")),
    ("gpu-memory-taken", None, "INFO 11-29 19:00:00 [x.py:1] Free memory on device (3.22/4.0 GiB) on startup\n"),
    ("no-kernel-image", "unknown", raised("RuntimeError: no image was given for the vision tower")),
    ("driver-old", "unknown", raised("RuntimeError: the driver worker is too old to answer")),
    ("no-gpu", "unknown", raised("ValueError: 8 GPUs are available, 16 were asked for")),
    ("no-pinned-memory", "unknown", raised("RuntimeError: cannot pin memory that is already pinned")),
    ("gpu-fault", "unknown", raised("RuntimeError: CUDA error: initialization error", STEP)),
    ("gpu-fault", None, "INFO 11-29 19:00:00 [x.py:1] NVRM version: 580.95\n"),
    ("compile-slow", "step-timeout", raised("TimeoutError: RPC call to execute_model timed out.", BROADCAST)),
    ("compile-slow", "step-timeout", "Triton kernel JIT compilation during inference: fused_moe_kernel.\n"
                                     + raised("TimeoutError: RPC call to execute_model timed out.")),
    ("step-timeout", "unknown", raised("TimeoutError: timed out waiting for the data set")),
    ("broadcast-timeout", "empty-message", raised("KeyError", BROADCAST)),
    ("nccl-timeout", "unknown", raised("RuntimeError: the reader timed out before NCCL was there")),
    ("shm-full", "disk-full", raised("OSError: [Errno 28] No space left on device: '/data/shm/x'")),
    ("shm-full", "nccl", raised("RuntimeError: NCCL error: unhandled system error")),
    ("nccl", "unknown", raised("RuntimeError: NCCL is not available")),
    ("head-size", "unknown", raised("ValueError: the head of the file has an unsupported size")),
    ("topk-method", "unknown", raised("KeyError: 'layers.2.mlp.gate.weight'", WEIGHTS)),
    ("state-count", "unknown", raised("RuntimeError: The expanded size of the tensor (4) must match the existing "
                                      "size (3) at non-singleton dimension 1.", STEP)),
    ("layer-signature", "unknown", raised("TypeError: KVCacheManager.forward() missing 1 required argument: 'x'")),
    ("layer-signature", "unknown", raised("AttributeError: 'NoneType' object has no attribute 'dtype'", REMOTE)),
    ("layer-signature", "unknown", raised("RuntimeError: the rank was told to stop", MINE)),
    ("embedding-method", "unknown", raised("AttributeError: 'Model' object has no attribute 'get_embeddings'")),
    ("shard-truncated", "unknown", raised("safetensors_rust.SafetensorError: File does not contain tensor lm_head")),
    ("shard-missing", "unknown", raised("FileNotFoundError: [Errno 2] No such file or directory: '/m/.part/16fa' -> "
                                        "'/m/model-2-of-3.safetensors'")),
    ("shard-missing", "unknown", raised("FileNotFoundError: [Errno 2] No such file or directory: "
                                        "'/m/model-2-of-3.safetensors' -> '/m/aside'")),
    ("shard-missing", "unknown", raised("FileNotFoundError: [Errno 2] No such file or directory: 'prompts.jsonl'")),
    ("weights-config", "unknown", raised("RuntimeError: shape mismatch: value tensor of shape [3]", STEP)),
    ("remote-code", "unknown", raised("ValueError: the repository has no code owner")),
    ("tokenizer", "unknown", raised("ValueError: Tokenizer not available when `skip_tokenizer_init=True`")),
    ("architecture", "unknown", raised("ValueError: the architecture of this CPU is not supported")),
    ("config-broken", "unknown", raised("json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)")),
    ("prompt-too-long", "unknown", raised("ValueError: The prompt (length 0) is empty")),
    ("max-model-len", "unknown", raised("ValueError: max_model_len must be positive")),
    ("engine-argument", "unknown", raised("TypeError: Params.__init__() got an unexpected keyword argument 'x'")),
    ("engine-value", "unknown", raised(REFUSED.format(field="max_num_seqs", says=NO_INTEGER), USER)),
    ("engine-value", "unknown", raised(REFUSED.format(field="  Value error, seqs and tokens do not fit", says="x"),
                                       ARGUMENTS)),
    ("engine-value", "unknown", raised("ValueError: Unknown attention backend: 'FP9'. Valid options are: A", USER)),
    ("heads", "unknown", raised("ValueError: Total number of attention heads (8) must be positive", ARGUMENTS)),
    ("heads", "unknown", raised("AssertionError: 10 is not divisible by 4", USER)),
    ("cores-per-rank", "unknown", raised("AssertionError: Given number of heads doesn't match local world size 4.")),
    ("port-taken", "unknown", raised("OSError: [Errno 99] Cannot assign requested address")),
    ("lease-taken", "unknown", raised("RuntimeError: the lease of the office is taken")),
    ("tmp-full", "disk-full", raised("OSError: [Errno 28] No space left on device: '/data/tmp/x'")),
    ("quota", "unknown", raised("ValueError: the quota of 5 samples is used up")),
    ("disk-full", "unknown", raised("RuntimeError: no space left in the batch")),
    ("read-only", "unknown", raised("ValueError: assignment destination is read-only")),
    ("permission", "unknown", raised("PermissionError: [Errno 1] Operation not permitted")),
    ("same-file", "unknown", raised(GONE, RENAME, source="Worker_TP0")),
    ("module-missing", "unknown", raised("AttributeError: module 'torch' has no attribute 'nope'")),
    ("symbol-missing", "unknown", raised("ImportError: attempted relative import with no known parent package")),
    ("library-missing", "unknown", raised("OSError: model.so.json: not a valid file")),
    ("host-memory", "unknown", raised("ValueError: the memory on node 0 is less than a million")),
    ("host-memory-share", "host-memory", raised(
        "ValueError: Available memory on node 0 (15.7/19.21 GiB) on kv cache allocation is less than requested "
        "memory for kv (900.0 GiB).")),
    ("host-memory-share", "gpu-memory-taken", raised(
        "ValueError: Free memory on device cuda:0 (3.22/4.0 GiB) on startup is less than desired GPU memory "
        "utilization (0.92, 3.68 GiB). Decrease GPU memory utilization or reduce GPU memory used by other "
        "processes.")),
    ("host-memory", "gpu-memory-step", raised("RuntimeError: CUDA error: out of memory", STEP)),
    ("compile-cache", "weights-config", raised("AssertionError", WEIGHT_LOADER)),
    ("compile-cache", "unknown", raised("AssertionError: batch size must be positive", INDUCTOR)),
    ("empty-message", "unknown", raised("RuntimeError: there are words", STEP)),
    ("empty-message", "unknown", raised("KeyboardInterrupt")),
    ("killed", "unknown", raised("Exception: WorkerProc initialization failed due to an exception in a background "
                                 "process. See stack trace for root cause.", source="EngineCore")),
    ("package-missing", None, "WARNING: Requested a 1.0 has no extra; no matching distribution found elsewhere\n"),
    ("disk-full", None, "ERROR: Could not install packages due to an OSError: [Errno 2] No such file\n"),
    ("oom-killed", None, "INFO 11-29 19:00:00 [x.py:1] Killed process groups: none\n"),
    ("crashed", None, "INFO 11-29 19:00:00 [x.py:1] the callback terminate called after the last step\n"),
    ("crashed", None, "INFO 11-29 19:00:00 [x.py:1] faulthandler will report segmentation faults\n"),
    ("killed", None, "INFO 11-29 19:00:00 [x.py:1] Worker proc VllmWorker-1 is ready\n"),
    ("killed", "unknown", raised("RuntimeError: Engine core initialization failed. See root cause above. "
                                 "Failed core proc(s): {'EngineCore': 1}")),
]  # fmt: skip


@pytest.mark.parametrize(("code", "log"), MATCHES, ids=[f"{i}-{code}" for i, (code, _) in enumerate(MATCHES)])
def test_it_matches(code: str, log: str) -> None:
    found = triage(place_lines([("vllm.log", log.encode())]))
    assert found is not None
    assert found.code == code
    assert "?" not in found.what + found.why + found.fix, "all that its words name was found"


@pytest.mark.parametrize(
    ("code", "instead", "log"), LOOKALIKES, ids=[f"{i}-{code}" for i, (code, _, _) in enumerate(LOOKALIKES)]
)
def test_it_does_not_match_what_looks_like_it(code: str, instead: str | None, log: str) -> None:
    assert instead != code
    assert code_of(log) == instead


@pytest.mark.parametrize("reason", ["lease-busy", "lease-dirty"])
def test_a_lease_is_taken_by_the_end_reason_alone(reason: str) -> None:
    found = triage([], (), Ending(end_reason=reason, message="run 20260102-030405-abcdef of anna holds GPU 3"))
    assert found is not None
    assert (found.code, found.what) == (
        "lease-taken",
        "another run holds the GPUs: run 20260102-030405-abcdef of anna holds GPU 3",
    )
    assert code_of("", Ending(end_reason="recheck-failed")) is None


def test_every_entry_is_told_from_what_looks_like_it() -> None:
    codes = {entry.code for entry in CATALOGUE}
    assert {code for code, _ in MATCHES} | {"lease-taken"} == codes
    assert {code for code, _, _ in LOOKALIKES} == codes


@pytest.mark.parametrize("number", [i for i, entry in enumerate(CATALOGUE) if not entry.ends])
def test_each_entry_alone_is_needed_and_is_silent_on_what_looks_like_it(number: int) -> None:
    entry = CATALOGUE[number]

    def names(log: str) -> bool:
        found = triage(place_lines([("log", log.encode())]), catalogue=(entry,))
        return found is not None and found.known

    assert any(names(log) for code, log in MATCHES if code == entry.code)
    assert [log for code, _, log in LOOKALIKES if code == entry.code and names(log)] == []


@pytest.mark.parametrize("number", range(len(CATALOGUE)))
def test_every_entry_says_what_to_do_in_words_that_can_be_filled_in(number: int) -> None:
    entry = CATALOGUE[number]
    words = dict.fromkeys(("name", "detail", "wanted", "source"), "X")
    for text in (entry.what, entry.why, entry.fix):
        filled = text
        for word in words:
            filled = filled.replace(f"{{{word}}}", "X")
        assert text.format(**words) == filled
    assert entry.what
    assert entry.fix
    assert entry.exception or entry.line or entry.ends


def test_a_share_of_memory_that_is_not_there_is_answered_with_the_option_that_vllm_names() -> None:
    (log,) = (log for code, log in MATCHES if code == "host-memory-share")
    found = triage(place_lines([("log", log.encode())]))
    assert found is not None
    assert "21.26/23.46 GiB" in found.what
    assert "`gpu_memory_utilization` in [engine]" in found.fix
    assert "swap_space" not in found.fix


def test_a_value_is_named_by_the_playbooks_key_and_not_by_vllms_field() -> None:
    log = raised(
        "ValidationError: 1 validation error for CacheConfig\ncache_dtype\n  Input should be 'auto' or 'fp8' "
        "[type=literal_error, input_value='fp99', input_type=str]",
        ARGUMENTS,
    )
    found = triage(place_lines([("log", log.encode())]))
    assert found is not None
    assert found.what == "[engine] `kv_cache_dtype` is 'fp99', and should be 'auto' or 'fp8'"


def test_a_backend_that_vllm_does_not_know_is_named_by_its_argument() -> None:
    log = raised("ValueError: Unknown attention backend: 'FP99'. Valid options are: FLASH_ATTN, CPU_ATTN", ARGUMENTS)
    found = triage(place_lines([("log", log.encode())]))
    assert found is not None
    assert found.what == "[engine] `attention_backend` is 'FP99', and should be one of FLASH_ATTN, CPU_ATTN"
