"""The codes that a finding of preflight may have: what `--allow` and `allow` of a playbook name one of.

docs/preflight.md explains each; a test compares both with the checks.
"""

from __future__ import annotations

from collections.abc import Iterable

from controller.core.errors import UsageError
from controller.core.suggest import nearest

CODES = frozenset(
    {
        "bootstrap-python", "boundaries", "boundaries-unknown", "capability", "capability-architecture",
        "capability-final-norm", "capability-llama-4-scaling", "capability-names", "capability-native",
        "capability-unread", "clock", "compile-cache", "connected", "cpu-busy", "cpus", "cuda-driver", "data",
        "data-broken", "data-empty", "data-kind", "data-lengths", "data-missing", "data-none", "data-short", "disk",
        "disk-close", "disk-inodes", "disk-lock", "disk-low", "disk-network", "disk-not-writable", "disk-quota",
        "disk-quota-files", "disk-rename", "disk-slow", "engine-argument", "engine-value", "env-file",
        "env-file-visible", "env-folder", "environment", "environment-python", "folder", "gpu-arch", "gpu-attention",
        "gpu-attention-set", "gpu-collective", "gpu-context", "gpu-count", "gpu-driver", "gpu-ecc",
        "gpu-health", "gpu-link", "gpu-links", "gpu-memory", "gpu-memory-broken", "gpu-mig", "gpu-mig-pending",
        "gpu-name", "gpu-p2p", "gpu-paths", "gpu-persistence", "gpu-process", "gpu-prohibited", "gpu-recovery",
        "gpu-repair", "gpu-throttled", "gpu-tp", "gpu-unreadable", "gpu-visible", "gpu-visible-login",
        "gpu-xid", "gpus", "jit-lock", "kv-memory", "lease", "lease-busy", "lease-dirty", "lease-folder",
        "limit-file-size",
        "limit-open-files", "limit-processes", "login", "logout-kills", "max-model-len", "memory", "memory-low",
        "memory-share", "model", "model-code-missing", "model-config", "model-expert-missing", "model-heads",
        "model-index",
        "model-layer-beyond", "model-layer-missing", "model-missing", "model-no-weights", "model-remote-code",
        "model-shard-missing", "model-shard-truncated", "model-tensor-missing", "model-tight",
        "model-tokenizer", "model-too-large", "output", "output-bad-name", "output-clear", "output-differs",
        "output-foreign", "output-is-root", "output-mount", "output-moved", "output-not-a-folder",
        "output-outside-root", "output-parent-component", "output-quarantine", "output-relative",
        "output-resume", "output-root-missing", "output-root-not-a-folder", "output-root-too-wide",
        "output-stale", "output-symlink", "output-too-shallow", "output-unreadable", "pids-hidden",
        "probe-capability", "probe-data", "probe-disk", "probe-environment", "probe-functional", "probe-gpus",
        "probe-health", "probe-history", "probe-lease", "probe-lengths", "probe-login", "probe-memory",
        "probe-model", "probe-outputs", "probe-processes", "probe-programs", "probe-source", "probe-toolchain",
        "processes", "program-missing", "programs", "python-broken", "python-missing", "python-old",
        "shm-leftovers", "shm-small", "size", "source", "source-changed", "source-empty", "source-gone",
        "source-running", "source-unknown", "time", "tool-cc", "tool-cxx", "tool-ninja", "tool-nvcc",
        "tool-python-h", "toolchain", "torch-cpu", "torch-import", "trial", "trial-skipped", "vllm-missing",
        "vllm-old", "vllm-process",
    }
)  # fmt: skip

WHERE = "the code stands below each refusal, and in `ctl preflight --json`"


def fix_of(code: str) -> str:
    """Return what to write in place of an unknown code."""
    close = nearest(code, CODES)
    return f"did you mean `{close}`?" if close else WHERE


def check_codes(codes: Iterable[str]) -> tuple[str, ...]:
    """Return the codes that were given on a command line. Raises UsageError for one that no finding has."""
    given = tuple(codes)
    for code in given:
        if code not in CODES:
            raise UsageError(f"no finding of preflight has the code `{code}`", fix=fix_of(code))
    return given
