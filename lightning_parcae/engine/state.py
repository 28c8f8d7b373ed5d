"""The state of one layer: taking it, giving it up, and taking it over from another instance.

Every instance keeps the whole model registered: parameter objects, optimizer groups, schedulers and checkpoint keys are
those of the undivided model everywhere, and only the memory of absent layers is given up. An absent tensor keeps its
object, dtype, device and shape, but its storage is one NaN (one zero, if it holds integers) expanded to that shape;
freeing storage in place would crash later in ``deepcopy`` or ``load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary
from torchgpipe.batchnorm import DeferredBatchNorm

from lightning_parcae.errors import MigrationError

__all__ = [
    "BufferSnapshot",
    "LayerState",
    "drop_layer",
    "is_resident",
    "layer_bytes",
    "layer_state",
    "load_layer",
    "restore_buffers",
    "snapshot_buffers",
]

LayerState = dict[str, Any]
"""``parameters``, ``gradients``, ``buffers`` and ``extra`` by name, ``optimizers`` by position, then parameter name."""

_ABSENT = "_parcae_is_absent"
_SMALL_NUMEL = 4096


def is_resident(layer: nn.Module) -> bool:
    """Say whether the layer's memory is here."""
    return not getattr(layer, _ABSENT, False)


def drop_layer(layer: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
    """Give up the memory of a layer: parameters, gradients, buffers and optimizer state."""
    for parameter in layer.parameters():
        parameter.grad = None
        _set_data(parameter, _placeholder(parameter))
        for optimizer in optimizers:
            optimizer.state.pop(parameter, None)
    for _, _, buffer in _buffers(layer):
        if buffer is not None:
            _set_data(buffer, _placeholder(buffer))
    setattr(layer, _ABSENT, True)


def layer_state(layer: nn.Module, optimizers: Sequence[Optimizer] = ()) -> LayerState:
    """Return the state of a resident layer; its tensors share the layer's memory.

    Buffers that are not part of the ``state_dict`` move too. A tensor with several names is one tensor in the result.

    Raises:
        MigrationError: If the layer is absent here.
    """
    if not is_resident(layer):
        raise MigrationError(f"the state of {type(layer).__name__} was asked for, but this instance does not hold it")
    parameters = dict(layer.named_parameters())
    seen: dict[int, Tensor] = {}
    return {
        "parameters": {name: parameter.detach() for name, parameter in parameters.items()},
        "gradients": {name: p.grad.detach() for name, p in parameters.items() if p.grad is not None},
        "buffers": {
            path: None if buffer is None else seen.setdefault(id(buffer), buffer.detach())
            for path, _, buffer in _buffers(layer)
        },
        "extra": {name: module.get_extra_state() for name, module in _with_extra_state(layer)},
        "optimizers": [
            {name: dict(optimizer.state[p]) for name, p in parameters.items() if p in optimizer.state}
            for optimizer in optimizers
        ],
    }


def load_layer(
    layer: nn.Module,
    optimizers: Sequence[Optimizer],
    state: Mapping[str, Any],
    device: torch.device | str | None = None,
    *,
    copy: bool = True,
) -> int:
    """Take over the state of a layer; parameters and buffers keep their identity.

    Args:
        layer: The layer, resident or absent.
        optimizers: The optimizers of its parameters, in the order of the giver.
        state: What :func:`layer_state` returned, here or elsewhere.
        device: Where to put it; None for where the layer is.
        copy: Give the layer memory of its own. Without it the tensors of ``state`` become the layer's memory: right for
            a state that has just arrived and is used for nothing else.

    Returns:
        Bytes of the state.

    Raises:
        MigrationError: If the state is not one of this layer.
    """
    parameters = dict(layer.named_parameters())
    _check_names(layer, "parameters", parameters, state["parameters"])
    if len(state["optimizers"]) != len(optimizers):
        raise MigrationError(
            f"the state of {type(layer).__name__} comes from a run with {len(state['optimizers'])} optimizers, but "
            f"here are {len(optimizers)}; run the same script on each instance"
        )
    mover = _Mover(None if device is None else torch.device(device), copy)
    for name, parameter in parameters.items():
        _set_data(parameter, mover.move(state["parameters"][name], parameter.device))
        gradient = state["gradients"].get(name)
        parameter.grad = None if gradient is None else mover.move(gradient, parameter.device)
    _load_buffers(layer, state["buffers"], mover)
    for name, module in _with_extra_state(layer):
        if name in state["extra"]:
            module.set_extra_state(state["extra"][name])
    for optimizer, entries in zip(optimizers, state["optimizers"], strict=True):
        for name, parameter in parameters.items():
            optimizer.state.pop(parameter, None)
            if name in entries:
                optimizer.state[parameter] = _optimizer_entry(optimizer, parameter, entries[name], mover)
    setattr(layer, _ABSENT, False)
    return mover.num_bytes


def layer_bytes(layer: nn.Module, optimizers: Sequence[Optimizer] = ()) -> int:
    """Return the bytes of a layer's parameters, gradients, buffers and optimizer state, as if it were resident."""
    tensors: list[Tensor] = [*layer.parameters(), *(buffer for _, _, buffer in _buffers(layer) if buffer is not None)]
    for parameter in layer.parameters():
        if parameter.grad is not None:
            tensors.append(parameter.grad)
        for optimizer in optimizers:
            if parameter in optimizer.state:
                tensors += [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(tensor): tensor for tensor in tensors}.values())


@dataclass(frozen=True, slots=True)
class _Saved:
    module: nn.Module
    name: str
    buffer: Tensor | None
    value: Tensor | None


BufferSnapshot = list[_Saved]

# Large constant buffers (masks, positions) are copied once, not before every step.
_copies: Any = WeakTensorKeyDictionary()


def snapshot_buffers(layers: Sequence[nn.Module]) -> BufferSnapshot:
    """Keep the buffers of the resident layers as they are before a step that may have to be done again."""
    return [
        _Saved(module, path.rpartition(".")[2], buffer, None if buffer is None else _saved_value(module, buffer))
        for layer in layers
        if is_resident(layer)
        for path, module, buffer in _buffers(layer)
    ]


def restore_buffers(layers: Sequence[nn.Module], snapshot: BufferSnapshot) -> None:
    """Put the buffers of :func:`snapshot_buffers` back; layers that are absent now are left alone."""
    present = {id(module) for layer in layers if is_resident(layer) for module in layer.modules()}
    with torch.no_grad():
        for saved in snapshot:
            if id(saved.module) not in present:
                continue
            saved.module._buffers[saved.name] = saved.buffer
            if saved.buffer is not None and saved.value is not None:
                saved.buffer.copy_(saved.value)


def _saved_value(module: nn.Module, buffer: Tensor) -> Tensor:
    # Normalisation kernels update their statistics without a trace in the version counter.
    if buffer.numel() <= _SMALL_NUMEL or isinstance(module, _NormBase) or buffer.is_inference():
        return buffer.detach().clone()
    key = (buffer._version, buffer.data_ptr())
    known = _copies.get(buffer)
    if known is None or known[0] != key:
        known = _copies[buffer] = (key, buffer.detach().clone())
    value: Tensor = known[1]
    return value


def _buffers(layer: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor | None]]:
    """Yield path, owner and value of every buffer, non-persistent and None ones included.

    Left out are the sums of torchgpipe's deferred batch norm: they are zero between batches, and a layer that another
    instance has not converted has none.
    """
    for prefix, module in layer.named_modules():
        for name, buffer in module._buffers.items():
            if isinstance(module, DeferredBatchNorm) and name in ("sum", "sum_squares"):
                continue
            yield (f"{prefix}.{name}" if prefix else name), module, buffer


def _with_extra_state(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in layer.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def _placeholder(tensor: Tensor) -> Tensor:
    fill = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), fill, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _set_data(tensor: Tensor, value: Tensor) -> None:
    # Not in place: the object stays, its memory is exchanged.
    tensor.data = value


def _check_names(layer: nn.Module, what: str, here: Mapping[str, object], there: Mapping[str, object]) -> None:
    if here.keys() != there.keys():
        raise MigrationError(
            f"the {what} of {type(layer).__name__} do not match: missing {sorted(here.keys() - there.keys())}, "
            f"unknown {sorted(there.keys() - here.keys())}; run the same script on each instance"
        )


def _load_buffers(layer: nn.Module, values: Mapping[str, Tensor | None], mover: _Mover) -> None:
    here = {path: (module, buffer) for path, module, buffer in _buffers(layer)}
    default = next((p.device for p in layer.parameters()), torch.device("cpu"))
    for path, value in values.items():
        prefix, _, name = path.rpartition(".")
        module, buffer = here[path] if path in here else (layer.get_submodule(prefix), None)
        if value is None:
            module._buffers[name] = None
        elif buffer is not None:
            _set_data(buffer, mover.move(value, buffer.device))
        else:
            module.register_buffer(name, mover.move(value, default))


def _optimizer_entry(
    optimizer: Optimizer, parameter: Tensor, entry: Mapping[str, Any], mover: _Mover
) -> dict[str, Any]:
    group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), {})
    # torch keeps the step count on the CPU unless the kernel reads it on the device.
    steps_on_device = bool(group.get("capturable") or group.get("fused"))
    moved = {}
    for key, value in entry.items():
        if isinstance(value, Tensor):
            device = parameter.device if key != "step" or steps_on_device else value.device
            moved[key] = mover.move(value, device, keep_device=key == "step" and not steps_on_device)
        else:
            moved[key] = value
    return moved


class _Mover:
    """Moves the tensors of one state; one that occurs twice stays one."""

    def __init__(self, device: torch.device | None, copy: bool) -> None:
        self._device = device
        self._copy = copy
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}
        self.num_bytes = 0

    def move(self, tensor: Tensor, device: torch.device, *, keep_device: bool = False) -> Tensor:
        if id(tensor) not in self._moved:
            target = device if keep_device or self._device is None else self._device
            self.num_bytes += tensor.numel() * tensor.element_size()
            # The source stays referenced, so that its id stays its own.
            self._moved[id(tensor)] = (tensor, tensor.detach().to(target, copy=self._copy))
        return self._moved[id(tensor)][1]
