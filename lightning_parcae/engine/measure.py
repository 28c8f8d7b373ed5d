"""Measures what each layer costs, in the job itself: the planner's profile is made of it.

Called when all layers are resident, on an input that the user's own step has produced. Nothing stays behind: gradients
are asked for, not accumulated, buffers and random number generators are put back.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_parcae.engine.partition import parameter_bytes
from lightning_parcae.engine.state import restore_buffers, snapshot_buffers
from lightning_parcae.planning.profile import LayerCost

log = logging.getLogger(__name__)

BUDGET_S = 0.4
"""Time for all layers together; the first pass is always completed."""

STATES_PER_PARAMETER = 3
"""Parameters and two moments: what a layer's state takes with the usual optimizers."""

_MAX_REPEATS = 5
_UPDATE_NUMEL = 1 << 18
# About what a fast core takes; only the proportions between layers matter until steps are measured.
_GUESSED_S_PER_BYTE = 1e-9


def measure_layers(
    layers: Sequence[nn.Module],
    sample: Any,
    *,
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    budget_s: float = BUDGET_S,
) -> list[LayerCost]:
    """Measure layers one after the other on one micro-batch.

    Args:
        layers: The pipelined layers in order, all resident.
        sample: Input of the first one: a tensor or a tuple of tensors; None if unknown.
        context: What a step's forward pass runs in, such as autocast.
        budget_s: Seconds to spend.

    Returns:
        Cost of each layer; guessed from its size if there is no input, or the layers cannot be run one by one.
    """
    if sample is None or not _is_value(sample):
        return [_guess(layer) for layer in layers]
    buffers = snapshot_buffers(layers)
    try:
        with _unchanged_rng(), torch.enable_grad():
            return _measure(layers, sample, context, budget_s)
    except Exception:  # the user's layers may do anything; the job must not fail for a measurement
        log.warning("layers could not be measured one by one; the planner guesses from their sizes", exc_info=True)
        return [_guess(layer) for layer in layers]
    finally:
        restore_buffers(layers, buffers)


def _measure(
    layers: Sequence[nn.Module], sample: Any, context: Callable[[], AbstractContextManager[Any]], budget_s: float
) -> list[LayerCost]:
    deadline = time.monotonic() + budget_s
    values = sample
    passes = []  # of each layer: its input, best forward and backward time, bytes kept and handed on
    kept_before = 0
    for layer in layers:
        inputs = _map(values, torch.Tensor.detach)
        values, forward_s, backward_s, kept = _run_once(layer, inputs, context)
        # An output that the layer before has kept is there once, though this layer keeps it as its input.
        own = kept.total - min(kept.of_input, kept_before)
        kept_before = max(kept.of_output, kept_before if kept.passes_on else 0)
        passes.append([inputs, forward_s, backward_s, own, _num_bytes(values)])
    for _ in range(_MAX_REPEATS):  # the first pass of everything is slow
        for layer, found in zip(layers, passes, strict=True):
            if time.monotonic() > deadline:
                break
            _, forward_s, backward_s, _ = _run_once(layer, found[0], context)
            found[1], found[2] = min(found[1], forward_s), min(found[2], backward_s)
    update_s = _update_s_per_byte(layers)
    return [
        LayerCost(
            forward_s=forward_s,
            backward_s=backward_s,
            update_s=update_s * _trainable_bytes(layer),
            parameter_bytes=_trainable_bytes(layer),
            state_bytes=STATES_PER_PARAMETER * parameter_bytes(layer),
            activation_bytes=kept,
            output_bytes=handed_on,
        )
        for layer, (_, forward_s, backward_s, kept, handed_on) in zip(layers, passes, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a layer has kept for its backward pass.

    Attributes:
        total: Bytes.
        of_input: How many of them are its input's.
        of_output: How many of them are its output's.
        passes_on: Whether its output lies where its input does, as a view.
    """

    total: int
    of_input: int
    of_output: int
    passes_on: bool


def _run_once(
    layer: nn.Module, inputs: Any, context: Callable[[], AbstractContextManager[Any]]
) -> tuple[Any, float, float, _Kept]:
    """Run one layer forward and backward; return its output, both times and what it has kept."""
    leaves = _map(inputs, lambda t: t.clone().requires_grad_(t.is_floating_point() or t.is_complex()))
    # copies, so that a layer that works in place meets no leaf
    inputs = _map(leaves, torch.Tensor.clone)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *layer.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    devices = {tensor.device for tensor in _tensors(inputs)}
    _wait_for(devices)
    started = time.perf_counter()
    with context(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = layer(*inputs) if isinstance(inputs, tuple) else layer(inputs)
    _wait_for(devices)
    forward_s = time.perf_counter() - started
    roots = [tensor for tensor in _tensors(outputs) if tensor.requires_grad]
    wanted = [tensor for tensor in (*_tensors(leaves), *layer.parameters()) if tensor.requires_grad]
    backward_s = 0.0
    if roots and wanted:
        gradients = [torch.ones_like(root) for root in roots]
        _wait_for(devices)
        started = time.perf_counter()
        torch.autograd.grad(roots, wanted, gradients, allow_unused=True)
        _wait_for(devices)
        backward_s = time.perf_counter() - started
    places = [{tensor.untyped_storage().data_ptr() for tensor in _tensors(value)} for value in (inputs, outputs)]
    of_input, of_output = (sum(kept.get(address, 0) for address in found) for found in places)
    found = _Kept(sum(kept.values()), of_input, of_output, passes_on=not places[0].isdisjoint(places[1]))
    return outputs, forward_s, backward_s, found


def resident_bytes(layer: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return what a layer's parameters, buffers and optimizer state take, as they are now."""
    parameters = list(layer.parameters())
    state = [
        value
        for optimizer in optimizers
        for parameter in parameters
        for value in optimizer.state.get(parameter, {}).values()
    ]
    return sum(_num_bytes(value) for value in (*parameters, *layer.buffers(), *state))


def _update_s_per_byte(layers: Sequence[nn.Module]) -> float:
    """Time an optimizer step on a parameter that is thrown away; the usual ones differ by little."""
    first = next((p for layer in layers for p in layer.parameters() if p.requires_grad), None)
    if first is None:
        return 0.0
    scratch = nn.Parameter(torch.zeros(_UPDATE_NUMEL, dtype=first.dtype, device=first.device))
    scratch.grad = torch.zeros_like(scratch)
    optimizer = torch.optim.AdamW([scratch])
    times = []
    for _ in range(3):
        _wait_for({first.device})
        started = time.perf_counter()
        optimizer.step()
        _wait_for({first.device})
        times.append(time.perf_counter() - started)
    return min(times) / (scratch.numel() * scratch.element_size())


def _guess(layer: nn.Module) -> LayerCost:
    size = max(parameter_bytes(layer), 1)
    return LayerCost(
        forward_s=size * _GUESSED_S_PER_BYTE,
        backward_s=2 * size * _GUESSED_S_PER_BYTE,
        parameter_bytes=_trainable_bytes(layer),
        state_bytes=STATES_PER_PARAMETER * parameter_bytes(layer),
    )


def _trainable_bytes(layer: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in layer.parameters() if p.requires_grad)


def _is_value(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, tuple) and bool(value) and all(isinstance(item, Tensor) for item in value)
    )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, (tuple, list)) else []


def _num_bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    return tuple(function(item) for item in value) if isinstance(value, tuple) else function(value)


def _wait_for(devices: set[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


@contextlib.contextmanager
def _unchanged_rng() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
