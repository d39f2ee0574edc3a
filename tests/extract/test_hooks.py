"""Hooks on layers of every signature, finding the layers, switching compiled modules, the proof of native states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from remote_payload.extract import versions
from remote_payload.extract.errors import CaptureError
from remote_payload.extract.hooks import Eager, LayerHooks, decoder_layers
from remote_payload.extract.native import NativeStates, Probe, prove

HIDDEN = 4


class Plain(nn.Module):
    """Returns the state."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + 1


class Fused(nn.Module):
    """vLLM's style: the residual is updated in place, and more arguments come in any order."""

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: Any, llama_4_scaling: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states
        else:
            residual += hidden_states
        return torch.ones_like(hidden_states), residual


class PPMissingLayer(nn.Module):
    pass


def stack(layers: list[nn.Module]) -> Any:
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList(layers)
    return model


def run(layers: nn.ModuleList, fused: bool, rows: int = 3) -> None:
    state: torch.Tensor = torch.full((rows, HIDDEN), 10.0)
    residual = None
    for layer in layers:
        if fused:
            state, residual = layer(torch.arange(rows), state, residual)
        else:
            state = layer(state)


@pytest.mark.parametrize("fused", [True, False])
def test_states_are_the_residual_stream_at_each_boundary(fused: bool) -> None:
    layers = nn.ModuleList((Fused if fused else Plain)() for _ in range(3))
    hooks = LayerHooks(layers, [0, 1, 3], HIDDEN)
    hooks.install()
    with hooks.recording() as states:
        run(layers, fused)
    assert {b: state[0, 0].item() for b, state in states.items()} == {0: 10.0, 1: 11.0, 3: 13.0}


class NoOp(nn.Module):
    """vLLM's form of a layer that leaves out attention and MLP."""

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: Any
    ) -> tuple[torch.Tensor, Any]:
        return hidden_states, residual


def test_a_layer_that_computes_nothing_passes_the_state_on() -> None:
    layers = nn.ModuleList([NoOp(), Fused(), NoOp(), Fused()])
    hooks = LayerHooks(layers, [0, 1, 2, 3, 4], HIDDEN)
    hooks.install()
    with hooks.recording() as states:
        run(layers, fused=True)
    assert {b: state[0, 0].item() for b, state in states.items()} == {0: 10.0, 1: 10.0, 2: 11.0, 3: 11.0, 4: 12.0}


def test_hooks_are_silent_outside_a_recording_and_after_removal() -> None:
    layers = nn.ModuleList([Plain()])
    hooks = LayerHooks(layers, [0, 1], HIDDEN)
    hooks.install()
    run(layers, fused=False)
    hooks.remove()
    with hooks.recording() as states:
        run(layers, fused=False)
    assert states == {}


def test_a_split_batch_is_an_error_but_not_while_memory_is_measured() -> None:
    layers = nn.ModuleList([Plain()])
    hooks = LayerHooks(layers, [1], HIDDEN)
    hooks.install()
    with hooks.rehearsing():
        run(layers, fused=False)
        run(layers, fused=False)
    with hooks.recording():
        run(layers, fused=False)
        with pytest.raises(CaptureError, match="twice in one step"):
            run(layers, fused=False)


def test_a_state_of_another_shape_is_an_error() -> None:
    class Streams(nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states.unsqueeze(1).repeat(1, 2, 1)

    layers = nn.ModuleList([Streams()])
    hooks = LayerHooks(layers, [1], HIDDEN)
    hooks.install()
    with hooks.recording(), pytest.raises(CaptureError, match="shape"):
        run(layers, fused=False)


def test_layers_are_found_inside_a_multimodal_wrapper() -> None:
    text = stack([Plain(), Plain()])
    wrapper = nn.Module()
    wrapper.vision = stack([Plain(), Plain()])
    wrapper.language_model = text
    assert decoder_layers(wrapper, 2) is text.model.layers
    wrapper.get_language_model = lambda: text
    assert decoder_layers(wrapper, 2) is text.model.layers


def test_layers_elsewhere_or_absent_are_an_error() -> None:
    with pytest.raises(CaptureError, match="pipeline parallelism"):
        decoder_layers(stack([Plain(), PPMissingLayer()]), 2)
    with pytest.raises(CaptureError, match="no list of 5 decoder layers"):
        decoder_layers(stack([Plain()]), 5)


def test_only_modules_that_compile_are_switched() -> None:
    model = stack([Plain(), Plain()])
    one, other = model.model.layers
    one.do_not_compile, other.do_not_compile = False, True
    eager = Eager(model)
    assert not eager.always
    eager.set(True)
    assert (one.do_not_compile, other.do_not_compile) == (True, True)
    eager.set(False)
    assert (one.do_not_compile, other.do_not_compile) == (False, True)


def test_native_states_need_both_the_class_and_the_runner() -> None:
    runner, model = nn.Module(), nn.Module()
    assert not NativeStates.supported(runner, model)
    model.set_aux_hidden_state_layers = lambda layers: None
    assert not NativeStates.supported(runner, model)
    runner.use_aux_hidden_state_outputs, runner.execute_model_state = False, None
    assert NativeStates.supported(runner, model)


class DeepseekV2Model(nn.Module):
    """Named like vLLM's, with what its forward reads."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers, self.end_layer = layers, len(layers)


@pytest.mark.parametrize(
    ("version", "boundaries", "added"),
    [("0.24.0", [1, 2], 1), ("0.28.0", [1, 2], 0), ("0.24.0", [1], 0), ("0.1.dev9+g1", [2], 0), ("unknown", [2], 0)],
)
def test_a_class_that_drops_the_last_state_gets_a_layer_behind_it(
    monkeypatch: pytest.MonkeyPatch, version: str, boundaries: list[int], added: int
) -> None:
    monkeypatch.setattr(versions, "vllm_version", lambda: version)
    layers = nn.ModuleList([Plain(), Plain()])
    model, runner = nn.Module(), nn.Module()
    model.inner = inner = DeepseekV2Model(layers)
    model.set_aux_hidden_state_layers = lambda wanted: None
    native = NativeStates(runner, model, layers, boundaries)
    native.enable()
    assert (len(layers), inner.end_layer) == (2 + added, 2 + added)
    native.disable()
    assert (len(layers), inner.end_layer) == (2, 2)


def hooked(boundaries: range) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {b: torch.randn(20, HIDDEN, generator=generator) for b in boundaries}


def test_the_proof_wants_every_boundary_in_its_place() -> None:
    states = hooked(range(1, 9))
    proof = prove([states[2] + 1e-6, states[4], states[8]], states, [2, 4, 8])
    assert proof.positions == {2: 0, 4: 1, 8: 2}
    assert all(error < 1e-5 for error in proof.errors.values())


def test_the_proof_sees_a_dropped_state_and_a_state_one_layer_off() -> None:
    states = hooked(range(1, 9))
    assert prove([states[2], states[4]], states, [2, 4, 8]).positions == {2: 0, 4: 1}
    assert prove([states[2], states[5], states[8]], states, [2, 4, 8]).positions == {2: 0, 8: 2}
    assert prove([], states, [2]).positions == {}


def test_the_proof_refuses_a_state_near_nothing() -> None:
    states = hooked(range(1, 4))
    assert prove([states[2] * 1.5], states, [2]).positions == {}


def test_equal_boundaries_of_dummy_weights_are_told_by_their_place() -> None:
    same = torch.randn(20, HIDDEN)
    assert prove([same, same], {1: same, 2: same, 3: same}, [1, 2]).positions == {1: 0, 2: 1}


def test_probe_rows_are_ordered_by_prompt_and_position() -> None:
    probe = Probe()
    for prompt, start, value in ((1, 0, 3.0), (0, 2, 2.0), (0, 0, 1.0)):
        probe.add("hooks", 5, prompt, start, torch.full((1, HIDDEN), value))
    assert probe.states("hooks")[5][:, 0].tolist() == [1.0, 2.0, 3.0]
    assert probe.states("native") == {}
