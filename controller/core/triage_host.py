"""Causes in files, packages and processes, and exceptions without words."""

from __future__ import annotations

from controller.core.triage_entry import Entry, pattern

_FULL = r"No space left on device|ENOSPC|\(os error 28\)"

OOM_KILLED = Entry(
    code="oom-killed",
    what="the kernel killed a process because the host's memory was used up",
    fix="`free -h` and `dmesg -T | grep -i oom` on the host; load with fewer processes, or add memory",
    line=pattern(r"Out of memory: Killed process|Memory cgroup out of memory|oom-kill:"),
)

KILLED = Entry(
    code="killed",
    what="a process was killed by a signal: {source}",
    why="it had no time to say anything: the kernel's out-of-memory killer, or somebody's `kill`",
    fix="`dmesg -T | grep -iE 'oom|killed|xid'` on the host, around that time",
    exception=pattern(r"EngineLostError: the process of (?P<source>.+) is gone"),
    line=pattern(
        r"(?:Worker proc (?=\S+ died unexpectedly)|Failed core proc\(s\): \{'(?=[^']+': -\d)"
        r"|(?=pid \d+ died, exit code: -\d))(?P<source>pid \d+|[^'\s]+)"
    ),
)

ENTRIES = (
    Entry(
        code="tmp-full",
        what="the folder for temporary files is full",
        fix="free it, or set `TMPDIR` in `env` of the host to a folder with room",
        exception=pattern(rf"({_FULL}).{{0,20}}'(/var)?/tmp/|No usable temporary (directory|file name)"),
    ),
    Entry(
        code="quota",
        what="the disk quota is used up",
        fix="`quota -s` on the host; free some of it or choose another `path` in [output], then `--stale resume`",
        exception=pattern(r"Disk quota exceeded|EDQUOT|\(os error 122\)"),
    ),
    Entry(
        code="disk-full",
        what="the disk is full",
        fix="`df -h` and `df -i` on the host; free some space, then go on with `--stale resume`",
        exception=pattern(_FULL),
        line=pattern(rf"^ERROR: Could not install packages due to an OSError: .{{0,20}}({_FULL})"),
    ),
    Entry(
        code="read-only",
        what="a folder that must be written to is on a read-only file system",
        fix="choose another folder; `findmnt -T FOLDER` shows the mount, which the kernel may have made read-only",
        exception=pattern(r"Read-only file system"),
    ),
    Entry(
        code="permission",
        what="a file or folder may not be used by this user",
        fix="`namei -l PATH` on the host shows whose it is; change its owner or choose another",
        exception=pattern(r"PermissionError: \[Errno 13\]|Permission denied \(os error 13\)"),
    ),
    Entry(
        code="same-file",
        what="several ranks write and rename the same file",
        why="each rank holds the same states; the one that comes second finds the file gone",
        fix="give each sample to one rank, as ctl's own worker does",
        exception=pattern(r"FileNotFoundError: .*' -> '"),
        frames=pattern(r"os\.(rename|replace)\("),
        least_ranks=2,
    ),
    Entry(
        code="module-missing",
        what="the Python module `{name}` is not installed",
        fix="install it into the vLLM environment: `PYTHON -m pip install {name}`",
        exception=pattern(r"ModuleNotFoundError: No module named '(?P<name>[^']+)'"),
    ),
    Entry(
        code="symbol-missing",
        what="two packages do not belong together: {name} is missing",
        why="vLLM's extensions are built for one version of torch, and its Python code moves names between versions",
        fix="reinstall both together: `PYTHON -m pip install --force-reinstall vllm==VERSION`",
        exception=pattern(
            r"ImportError: cannot import name '(?P<name>[^']+)'|ImportError: .*undefined symbol: (?P<detail>\S+)"
        ),
    ),
    Entry(
        code="library-missing",
        what="the shared library {name} is missing",
        fix="install what provides it, or correct LD_LIBRARY_PATH in `env` of the host",
        exception=pattern(r"(ImportError|OSError): (?P<name>\S+\.so[.\d]*): cannot open shared object file"),
    ),
    Entry(
        code="host-memory-share",
        what="the host has less memory available than vLLM was told to take: {detail}",
        why="on a CPU host `gpu_memory_utilization` is the share of the host's memory that vLLM takes at its start, "
        "0.92 where the playbook does not say",
        fix="set `gpu_memory_utilization` in [engine] below the share that is available (0.5, for example), "
        "or end what else uses the memory: `free -h` on the host",
        exception=pattern(
            r"Available memory on node \d+.{0,20}?(?P<detail>[\d.]+/[\d.]+ GiB).{0,20} on startup is less than"
        ),
    ),
    Entry(
        code="host-memory",
        what="the host's own memory is used up",
        fix="`free -h` on the host; lower `swap_space`, `cpu_offload_gb` or VLLM_CPU_KVCACHE_SPACE",
        exception=pattern(
            r"DefaultCPUAllocator: can't allocate memory|std::bad_alloc|^MemoryError|Cannot allocate memory"
            r"|[Nn]ot enough (allocatable )?(CPU )?memory"
            r"|Available memory on node \d+ .{0,60} on kv cache allocation is less than"
        ),
    ),
    Entry(
        code="compile-cache",
        what="a compiled graph of another configuration was taken from the cache",
        why="vLLM's cache key does not know everything that changes the graph",
        fix="delete ~/.cache/vllm/torch_compile_cache on the host, or set VLLM_CACHE_ROOT to a folder of its own",
        exception=pattern(
            r"^AssertionError$|failed to get the hash of the compiled graph|vLLM failed to compile the model"
            r"|^AssertionError: Expected tensors only, but got"
        ),
        frames=pattern(r"vllm/compilation/|torch_compile_cache|torch/_inductor/|torch/_dynamo/aot_compile"),
    ),
    Entry(
        code="compile-cache",
        what="a compiled graph of another configuration was taken from the cache",
        why="vLLM's cache key does not know everything that changes the graph",
        fix="delete ~/.cache/vllm/torch_compile_cache on the host, or set VLLM_CACHE_ROOT to a folder of its own",
        exception=pattern(r"^AssertionError$|too many values to unpack|not enough values to unpack"),
        frames=pattern(
            r"in execute_model\n\s+hidden_states, aux_hidden_states = |assert isinstance\(\w*output, torch\.Tensor\)"
        ),
    ),
    Entry(
        code="empty-message",
        what="an exception without any words was raised: {name}",
        why="the source line in the traceback is all that is known of it",
        fix="read the last frame of the traceback; for more, run the same with `VLLM_LOGGING_LEVEL=DEBUG` in `env`",
        exception=pattern(
            r"^(?!\S*(KeyboardInterrupt|SystemExit|CancelledError|TimeoutError))"
            r"(?P<name>[A-Za-z_][\w.]*(Error|Exception|Fault)?):?\s*$"
        ),
    ),
    Entry(
        code="package-missing",
        what="no index that was asked has a package in the version wanted",
        why="the version does not exist there, or not for this Python and this machine",
        fix="see `PYTHON -m pip index versions NAME`; choose another version, or name the index that has "
        "it: `--index-url`, `--find-links`",
        line=pattern(
            r"^ERROR: No matching distribution found for (?P<name>\S+)"
            r"|Because there is no version of (?P<detail>\S+) and you require"
        ),
        also=pattern(r"^ERROR: Could not find a version that satisfies the requirement"),
    ),
    OOM_KILLED,
    Entry(
        code="gpu-fault",
        what="the GPU reported a fault to the kernel",
        fix="look up the Xid number; `nvidia-smi -q -d ECC,ROW_REMAPPER` and a reboot of the host",
        line=pattern(r"NVRM: Xid"),
    ),
    Entry(
        code="crashed",
        what="native code crashed",
        fix="the frames after this line name the module; update it, or run without it",
        line=pattern(
            r"Fatal Python error: (Segmentation fault|Aborted)|Segfault encountered"
            r"|^terminate called (after throwing an instance of|without an active exception)"
        ),
    ),
    KILLED,
    Entry(
        code="killed",
        what="a worker ended while the model was loaded, without a word of its own",
        why="an exception would stand in the log: a signal ended it, most often the kernel's out-of-memory killer",
        fix="`dmesg -T | grep -iE 'oom|killed|xid'` on the host, around that time",
        exception=pattern(r"WorkerProc initialization failed due to an exception in a background process"),
        beside=pattern(r"^Starting to load model "),
    ),
)
