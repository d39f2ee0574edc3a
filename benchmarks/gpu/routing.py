"""The product's own job, keeping the experts that vLLM chose: RUN/routed.npz, index -> [tokens, layers, top k]."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from remote_payload.extract import engine
from remote_payload.extract.requests import VllmEngine


def main() -> int:
    routed: dict[str, Any] = {}

    def step(self: VllmEngine) -> None:
        for output in self._engine.step():
            experts = output.outputs[0].routed_experts
            if experts is not None and output.request_id.isdigit():
                routed[output.request_id] = experts

    VllmEngine.step = step  # the product drops what the engine answers
    code = engine.main()
    np.savez(os.path.join(os.environ["CTL_RUN_DIR"], "routed.npz"), **routed)
    return code


if __name__ == "__main__":
    sys.exit(main())
