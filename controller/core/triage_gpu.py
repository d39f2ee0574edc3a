"""Causes in the GPUs and between the ranks: memory, drivers, kernels, NCCL, shared memory."""

from __future__ import annotations

from controller.core.triage_entry import Entry, pattern

_OOM = pattern(r"OutOfMemoryError: |CUDA error: out of memory|CUDA out of memory|Cuda failure.{0,20}out of memory")
_FULL = r"No space left on device|ENOSPC|\(os error 28\)"

ENTRIES = (
    Entry(
        code="gpu-memory-kv",
        what="the GPU ran out of memory while the KV cache was allocated",
        fix="lower `gpu_memory_utilization` in [engine] by 0.05, and see with `ctl preflight` who else uses the GPU",
        exception=_OOM,
        frames=pattern(r"in (initialize_kv_cache|initialize_from_config|_allocate_kv_cache\w*)"),
    ),
    Entry(
        code="gpu-memory-warm-up",
        what="the GPU ran out of memory in vLLM's warm-up, after the weights were loaded",
        why="the activations of the largest step, and the captured states of its tokens, did not fit",
        fix="lower `max_num_batched_tokens` in [engine] (halve it), or `gpu_memory_utilization`",
        exception=_OOM,
        frames=pattern(r"in (profile_run|determine_available_memory|_dummy_run|_dummy_sampler_run|capture_model)\b"),
    ),
    Entry(
        code="gpu-memory-load",
        what="the GPU ran out of memory while the weights were loaded",
        fix="raise `tensor_parallel_size` in [engine], use a quantized checkpoint, or free the GPU: `ctl preflight`",
        exception=_OOM,
        frames=pattern(
            r"in (load_model|load_weights|create_weights|process_weights_after_loading|initialize_model)\b"
        ),
    ),
    Entry(
        code="gpu-memory-step",
        what="the GPU ran out of memory in a step",
        why="the load and the warm-up had fitted; a later step needed more",
        fix="lower `max_num_batched_tokens` or `gpu_memory_utilization` in [engine], then go on: `--stale resume`",
        exception=_OOM,
        frames=pattern(r"in (execute_model|sample_tokens)\b"),
    ),
    Entry(
        code="kv-cache-small",
        what="the memory left for the KV cache is too small for one prompt of the maximum length",
        fix="lower `max_model_len` in [engine] to the longest prompt plus one, or raise `gpu_memory_utilization`",
        exception=pattern(
            r"No available memory for the cache blocks|To serve at least one request with the model.s max seq len"
            r"|larger than the maximum number of tokens that can be stored in KV cache"
        ),
    ),
    Entry(
        code="gpu-memory-taken",
        what="the GPU has less free memory than vLLM was told to take: {detail}",
        fix="`ctl preflight` shows who holds it; free it, or lower `gpu_memory_utilization` in [engine]",
        exception=pattern(
            r"Free memory on device.{0,40}?(?P<detail>[\d.]+/[\d.]+ GiB).{0,20} on startup is less than"
        ),
    ),
    Entry(
        code="no-kernel-image",
        what="torch or a kernel was not built for this GPU",
        why="its compute capability is not among those of the installed CUDA build",
        fix="install a build for this GPU (sm_120 needs CUDA 12.8 or newer): "
        "`python -c 'import torch; print(torch.cuda.get_arch_list(), torch.cuda.get_device_capability())'`",
        exception=pattern(r"no kernel image is available for execution|CUDA capability sm_\d+ is not compatible"),
        also=pattern(r"is not compatible with the current PyTorch installation"),
    ),
    Entry(
        code="driver-old",
        what="the NVIDIA driver is too old for the installed CUDA",
        fix="update the driver, or install torch and vLLM for the CUDA that `nvidia-smi` shows",
        exception=pattern(r"NVIDIA driver on your system is too old|CUDA driver version is insufficient"),
    ),
    Entry(
        code="no-gpu",
        what="the process saw no GPU",
        fix="check CUDA_VISIBLE_DEVICES of the job and `nvidia-smi` on the host: `ctl preflight`",
        exception=pattern(
            r"No CUDA GPUs are available|no CUDA-capable device|invalid device ordinal|Failed to infer device type"
        ),
    ),
    Entry(
        code="no-pinned-memory",
        what="this way of capturing needs a GPU: pinned memory does not exist on a CPU",
        why="vLLM's own hidden-states connector copies through pinned memory",
        fix='on a CPU host use ctl\'s own capture: `path = "auto"` in [capture]',
        exception=pattern(r"pin_memory=True requires a CUDA"),
    ),
    Entry(
        code="gpu-fault",
        what="a GPU kernel failed",
        why="the traceback shows where it was noticed, not where it happened",
        fix="run once more with `CUDA_LAUNCH_BLOCKING=1` in `env` to see where; look for `Xid` in `dmesg`",
        exception=pattern(
            r"CUDA error: (an illegal memory access|device-side assert|unspecified launch failure|uncorrectable ECC)"
        ),
        also=pattern(r"NVRM: Xid"),
    ),
    Entry(
        code="compile-slow",
        what="a kernel was still being compiled when the engine stopped waiting for the step",
        fix="raise `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS` in `env` (600), and run again: what was compiled is cached",
        exception=pattern(r"RPC call to \w+ timed out"),
        frames=pattern(r"torch/utils/cpp_extension|flashinfer/jit|deep_gemm.{0,60}(jit|compile)|triton/compiler"),
    ),
    Entry(
        code="compile-slow",
        what="kernels were compiled by nvcc when the engine stopped waiting for the step",
        fix="raise `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS` in `env` (600), and run again: what was compiled is cached",
        exception=pattern(r"RPC call to \w+ timed out"),
        beside=pattern(r"^\[\d+/\d+\] \S*nvcc |^ninja: Entering directory"),
    ),
    Entry(
        code="step-timeout",
        what="a rank did not answer within the engine's time-out for a step ({name})",
        why="it hangs (NCCL, a dead peer) or works for longer, for example compiling a kernel in the first step",
        fix="look at `nvidia-smi` and the last lines of each rank; if they compile, raise "
        "`VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS` in `env`; if they hang, try `NCCL_P2P_DISABLE=1`",
        exception=pattern(r"RPC call to (?P<name>\w+) timed out"),
        also=pattern(r"No available shared memory broadcast block found|JIT compilation during inference"),
    ),
    Entry(
        code="broadcast-timeout",
        what="a rank waited in vain for the engine's broadcast over shared memory",
        why="the other side hangs, was killed, or works for longer than the time-out",
        fix="look at the other ranks' last lines; then `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`, or `NCCL_P2P_DISABLE=1`",
        exception=pattern(r"TimeoutError"),
        frames=pattern(r"shm_broadcast\.py"),
        also=pattern(r"No available shared memory broadcast block found"),
    ),
    Entry(
        code="nccl-timeout",
        what="NCCL waited in vain for another rank",
        why="a rank hangs or died; on hosts without NVLink, IOMMU or ACS can make peer-to-peer transfers hang",
        fix="set `NCCL_P2P_DISABLE=1` in `env` of the host and run again; `nvidia-smi topo -m` shows the links",
        exception=pattern(r"Watchdog caught collective operation timeout|NCCL.{0,80}timed? ?out"),
        line=pattern(r"Watchdog caught collective operation timeout"),
    ),
    Entry(
        code="shm-full",
        what="the shared memory of the host, /dev/shm, is full",
        why="ranks and NCCL exchange data through it; a container has 64 MB unless told otherwise",
        fix="`df -h /dev/shm` and `ls -l /dev/shm` on the host; in a container: `docker run --shm-size=16g`",
        exception=pattern(rf"({_FULL}).{{0,80}}/dev/shm|/dev/shm.{{0,120}}({_FULL})|Insufficient space in /dev/shm"),
        line=pattern(r"Error while creating shared memory segment /dev/shm|Bus error|exited with signal SIGBUS"),
    ),
    Entry(
        code="shm-full",
        what="the shared memory of the host, /dev/shm, is full",
        why="ranks exchange data through it; a container has 64 MB unless told otherwise",
        fix="`df -h /dev/shm` and `ls -l /dev/shm` on the host; in a container: `docker run --shm-size=16g`",
        exception=pattern(_FULL),
        frames=pattern(r"shm_broadcast\.py|multiprocessing/shared_memory\.py"),
    ),
    Entry(
        code="shm-full",
        what="the shared memory of the host, /dev/shm, is full",
        why="NCCL exchanges data through it; a container has 64 MB unless told otherwise",
        fix="`df -h /dev/shm` and `ls -l /dev/shm` on the host; in a container: `docker run --shm-size=16g`",
        exception=pattern(r"ncclSystemError|unhandled system error"),
        beside=pattern(r"Error while creating shared memory segment /dev/shm"),
    ),
    Entry(
        code="nccl",
        what="NCCL failed between the ranks: {detail}",
        fix="run again with `NCCL_DEBUG=WARN` in `env` to have NCCL say why; then `NCCL_P2P_DISABLE=1`",
        exception=pattern(
            r"(?P<detail>nccl(System|Internal|UnhandledCuda)Error|NCCL error: unhandled (system|cuda) error)"
        ),
        also=pattern(r"NCCL WARN"),
    ),
)
