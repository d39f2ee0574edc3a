"""One rank of the functional probe: what a worker of vLLM does first, in seconds instead of minutes.

Import torch, open a context, multiply two matrices and check the product, then one all-reduce over all ranks. Each
step is announced before it begins and told with its seconds afterwards, one JSON object a line on stdout, so that
whoever reads knows where a rank that says nothing more hangs. Run as a module; the request is CTL_EXERCISE:
{"rank", "ranks", "device": "cuda" or "cpu", "store": a file path that all ranks share, "timeout_s"}.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIZE = 1024
"""Rows and columns: large enough for the tensor cores' kernels, small enough for a busy CPU."""

VALUES = 1 << 20
"""Elements of the all-reduce, 4 MiB in float32: beyond the sizes that travel inline, as a layer's activations do."""


def main() -> int:
    """Exit code 0: all steps went well; 1: one failed, and the last line says why."""
    request = json.loads(os.environ["CTL_EXERCISE"])
    try:
        run(request)
    except Exception as error:  # noqa: BLE001 - whatever it was is the finding
        tell(error=f"{type(error).__name__}: {error}")
        return 1
    return 0


def run(request: dict[str, Any]) -> None:
    """Raises what torch raises; RuntimeError if a result is wrong."""
    rank, ranks, cuda = request["rank"], request["ranks"], request["device"] == "cuda"
    with step("import"):
        import torch
        import torch.distributed as dist
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    with step("context"):
        if cuda:
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)
            torch.cuda.synchronize()
        tell(**facts(torch, device))
    with step("matmul"):
        row = torch.arange(SIZE, dtype=torch.float32, device=device) % 7
        # In the model's own type: bfloat16 holds these sums' factors exactly, and the check is against a closed form.
        product = torch.ones(SIZE, SIZE, dtype=torch.bfloat16, device=device) @ row.bfloat16().diag()
        if not torch.equal(product.sum(0).float(), (row * SIZE).bfloat16().float()):
            raise RuntimeError("the product of two matrices is wrong")
    with step("group"):
        dist.init_process_group(
            "nccl" if cuda else "gloo", init_method="file://" + request["store"], rank=rank, world_size=ranks,
            timeout=datetime.timedelta(seconds=request["timeout_s"]),
        )  # fmt: skip
    with step("all-reduce"):
        values = torch.full((VALUES,), float(rank + 1), device=device)
        dist.all_reduce(values)
        wanted = ranks * (ranks + 1) / 2
        if values.min().item() != wanted or values.max().item() != wanted:
            raise RuntimeError(f"the sum over {ranks} ranks is wrong")
    # Not destroyed: a group that is torn down while a rank is slow waits for it, and the process ends anyway.


def facts(torch: Any, device: Any) -> dict[str, Any]:
    """Return what torch says of itself and the device: versions, and the architectures that it has kernels for."""
    if device.type != "cuda":
        return {"torch": torch.__version__, "cuda": None, "archs": [], "capability": None}
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "archs": torch.cuda.get_arch_list(),
        "capability": list(torch.cuda.get_device_capability(device)),
        "peers": [
            peer != device.index and torch.cuda.can_device_access_peer(device, peer)
            for peer in range(torch.cuda.device_count())
        ],
    }


@contextmanager
def step(name: str) -> Iterator[None]:
    tell(step=name)
    started = time.monotonic()
    yield
    tell(done=name, seconds=round(time.monotonic() - started, 3))


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # A driver that hangs at its shutdown must not turn a success into a timeout.
    os._exit(code)
