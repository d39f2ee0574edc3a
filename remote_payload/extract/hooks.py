"""The base path: hooks on the decoder layers, for any model and any vLLM, in eager mode.

Nothing here depends on a layer's arguments: a state is taken from what a layer returns. vLLM's layers return either
a tensor, or `(hidden, residual)` whose sum is the state, because the next layer adds them inside its first norm.
Only boundary 0 is read from arguments, those of the first layer.

Hooks are Python, so they run only where layers are called as modules: not inside a compiled graph, and not when a
CUDA graph is replayed. `Eager` switches a model that was built for compilation back to plain calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from remote_payload.extract import versions
from remote_payload.extract.errors import CaptureError

PLACEHOLDER = "PPMissingLayer"
"""vLLM's stand-in for a layer that another pipeline rank holds."""


def decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """Return the `count` decoder layers of the language model inside `model`.

    Raises CaptureError if they cannot be told apart from other lists of modules, or are not all on this rank.
    """
    text = _language_model(model)
    named = [
        (name, module)
        for name, module in text.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    # `model.layers` is vLLM's convention; a shorter path is nearer to the top than a list inside a layer.
    named.sort(key=lambda item: (not item[0].endswith("layers"), item[0].count(".")))
    if not named:
        raise CaptureError(f"no list of {count} decoder layers in {type(text).__name__}")
    layers = named[0][1]
    if any(type(layer).__name__ == PLACEHOLDER for layer in layers):
        raise CaptureError("some decoder layers are on another rank: pipeline parallelism is not supported")
    return layers


def _language_model(model: nn.Module) -> nn.Module:
    for wrapper in ("unwrap", "get_language_model"):  # CUDA-graph wrappers; multimodal models
        inner = getattr(model, wrapper, None)
        if callable(inner):
            found = inner()
            if isinstance(found, nn.Module) and found is not model:
                return _language_model(found)
    inner = getattr(model, "language_model", None)
    return inner if isinstance(inner, nn.Module) else model


class Eager:
    """Switches the compiled parts of a model to plain Python calls and back.

    vLLM's `support_torch_compile` gives each such module a flag, `do_not_compile`, that it reads at every call.
    """

    def __init__(self, model: nn.Module) -> None:
        self._compiled = [m for m in model.modules() if getattr(m, "do_not_compile", None) is False]
        self.always = not self._compiled

    def set(self, on: bool) -> None:
        for module in self._compiled:
            module.do_not_compile = on  # type: ignore[assignment]  # a plain attribute of vLLM's


class LayerHooks:
    """Records the states at `boundaries` while a recording is open."""

    def __init__(self, layers: nn.ModuleList, boundaries: Sequence[int], hidden: int) -> None:
        self.boundaries = tuple(boundaries)
        self._layers, self.hidden = layers, hidden
        self._signature = inspect.signature(layers[0].forward)
        self._states: dict[int, torch.Tensor] | None = None
        self._rows = 0
        self._handles: list[Any] = []

    def install(self) -> None:
        """Register the hooks; idempotent. Not before a model is compiled: tracing would bake them in."""
        if self._handles:
            return
        self._handles.append(self._layers[0].register_forward_pre_hook(self._before_first, with_kwargs=True))
        for boundary in self.boundaries:
            if boundary:
                layer = self._layers[boundary - 1]
                self._handles.append(layer.register_forward_hook(self._after(boundary)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def recording(self) -> Iterator[dict[int, torch.Tensor]]:
        """Collect, during one forward pass, boundary -> state [rows, hidden] in the model's dtype."""
        states: dict[int, torch.Tensor] = {}
        self._states = states
        try:
            yield states
        finally:
            self._states = None

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Hold states as a recording does, over any number of passes: for vLLM's measurement of peak memory."""
        self._states = _Overwriting()
        try:
            yield
        finally:
            self._states = None

    def _before_first(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._states is None:
            return
        bound = self._signature.bind(*args, **kwargs).arguments
        hidden = bound.get("hidden_states")
        if not isinstance(hidden, torch.Tensor):
            hidden = next((value for value in bound.values() if self._is_state(value)), None)
        if hidden is None:
            raise CaptureError(f"no hidden states among the arguments of {type(module).__name__}: {list(bound)}")
        self._rows = hidden.shape[0]
        if 0 in self.boundaries:
            # The layer goes on to use this very tensor as its residual and adds to it in place: copy it now.
            self._keep(0, _sum(hidden, bound.get("residual")))

    def _after(self, boundary: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._states is None:
                return
            first, second = (*output, None)[:2] if isinstance(output, tuple) else (output, None)
            if not isinstance(first, torch.Tensor):
                raise CaptureError(f"{type(module).__name__} returns {type(first).__name__}, not hidden states")
            self._keep(boundary, _sum(first, second))

        return hook

    def _keep(self, boundary: int, state: torch.Tensor) -> None:
        assert self._states is not None
        if boundary in self._states:
            raise CaptureError(
                f"boundary {boundary} was passed twice in one step: the batch is split (micro-batching)"
            )
        if not self._is_state(state):
            raise CaptureError(f"boundary {boundary} has shape {list(state.shape)}, not [tokens, {self.hidden}]")
        if state.shape[0] != self._rows:
            state = _gathered(state, self._rows)
        self._states[boundary] = state

    def _is_state(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.ndim == 2
            and value.shape[1] == self.hidden
        )


class _Overwriting(dict[int, torch.Tensor]):
    """Never says that it has a boundary, so that each pass replaces the states of the one before."""

    def __contains__(self, key: object) -> bool:
        return False


def _sum(hidden: torch.Tensor, residual: Any) -> torch.Tensor:
    if isinstance(residual, torch.Tensor) and residual.shape == hidden.shape:
        return hidden + residual
    return hidden.clone()  # later layers may write into it


def _gathered(state: torch.Tensor, rows: int) -> torch.Tensor:
    """Under sequence-parallel MoE each rank returns a share of the rows; put them together, less the padding."""
    gather = versions.named(*versions.ALL_GATHER)
    whole: torch.Tensor = gather(state, 0)
    return whole[:rows]
