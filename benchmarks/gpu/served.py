"""`vllm serve` with vLLM's own connector, asked as speculators' offline generator asks: the most used peer.

The client is speculators' own file (CTL_SPECULATORS_CLIENT names its `vllm_client.py`), loaded by its path, since the
package itself needs more than a bare GPU machine has.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import STOP_TIMEOUT_S

PORT = 18437
AT_ONCE = 32
"""Requests, as speculators 0.9's `generate-offline-data --concurrency`."""

START_LIMIT_S = 200.0
REQUEST_LIMIT_S = 120.0


class Server:
    """A server over `options` (keyword arguments of vllm.LLM) whose connector writes below `output`."""

    def __init__(self, options: Mapping[str, Any], output: Path) -> None:
        self._model, self._moved = str(options["model"]), output / "moved"
        self._argv = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", self._model, "--port", str(PORT)]
        for name, value in options.items():
            flag = name.replace("_", "-")
            if name == "model":
                continue
            if isinstance(value, bool):
                self._argv.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                self._argv += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
        spec = importlib.util.spec_from_file_location("vllm_client", os.environ["CTL_SPECULATORS_CLIENT"])
        assert spec is not None
        assert spec.loader is not None
        self._client = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._client)

    def __enter__(self) -> Server:
        with socket.socket() as free:  # another's server would answer in its place
            free.bind(("127.0.0.1", PORT))
        # In our process group, so that whoever kills us at a limit kills it too.
        self._server = subprocess.Popen(self._argv)
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if self._server.poll() is not None:
                raise RuntimeError(f"vllm serve ended with {self._server.returncode}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2):
                    return self
            except OSError:
                time.sleep(0.5)
        self.__exit__()
        raise TimeoutError(f"vllm serve did not answer in {START_LIMIT_S:.0f} s")

    def __exit__(self, *_: object) -> None:
        self._server.terminate()  # it ends its engine itself
        try:
            self._server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def ask(self, prompts: Sequence[Sequence[int]]) -> float:
        """Return the seconds from the first request to the last file in its place."""
        shutil.rmtree(self._moved, ignore_errors=True)
        self._moved.mkdir()
        return asyncio.run(self._ask(prompts))

    async def _ask(self, prompts: Sequence[Sequence[int]]) -> float:
        import openai

        slots, writes, client = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(AT_ONCE), self._client

        async def one(index: int, ids: Sequence[int], api: Any) -> None:
            async with slots:
                path, _ = await client.generate_hidden_states_async(
                    api, self._model, {"input_ids": list(ids)}, timeout=REQUEST_LIMIT_S, max_retries=0
                )
            if Path(path + ".lock").exists():
                await client.wait_for_lock_async(path + ".lock")
            async with writes:
                await asyncio.to_thread(shutil.move, path, self._moved / f"hs_{index}.safetensors")

        started = time.monotonic()
        async with openai.AsyncClient(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none") as api:
            await asyncio.gather(*(one(index, ids, api) for index, ids in enumerate(prompts)))
        return time.monotonic() - started
