"""The pipelined part of a user's module: finding it, checking it, cutting it into stages."""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torchgpipe.balance.profile import profile_times
from torchgpipe.gpipe import verify_module

Route = Callable[[Any], Any]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class PipelinedSequential(nn.Sequential):
    """Takes the place of the user's ``nn.Sequential``, with the same children under the same names.

    While a route is set, a call goes through the pipeline; otherwise the layers run one after the other.
    """

    def __init__(self, sequential: nn.Sequential) -> None:
        super().__init__()
        for name, child in sequential.named_children():
            self.add_module(name, child)
        self.train(sequential.training)
        self._route: Route | None = None
        self._guard: Callable[[], None] | None = None

    def set_guard(self, guard: Callable[[], None] | None) -> None:
        """Call ``guard`` before each ``state_dict()`` of this module or of one around it."""
        object.__setattr__(self, "_guard", guard)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._guard is not None:
            self._guard()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def __getitem__(self, idx: Any) -> Any:
        """Return one layer, or a plain ``nn.Sequential`` of several."""
        if isinstance(idx, slice):
            return nn.Sequential(OrderedDict(list(self.named_children())[idx]))
        return super().__getitem__(idx)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_route": None, "_guard": None}

    def set_route(self, route: Route | None) -> None:
        """Send calls through ``route``, or run the layers here if None."""
        object.__setattr__(self, "_route", route)

    def forward(self, input: Any) -> Any:
        """Run the pipeline on a batch."""
        return self.run_here(input) if self._route is None else self._route(input)

    def run_here(self, value: Any) -> Any:
        """Run the layers one after the other, as a plain ``nn.Sequential`` does."""
        for layer in self:
            value = layer(value)
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelinedSequential:
        twin = PipelinedSequential(nn.Sequential())
        for name, child in self.named_children():
            twin.add_module(name, copy.deepcopy(child, memo))
        twin.train(self.training)
        return twin


def find_sequential(module: nn.Module, name: str | None) -> str:
    """Return the path of the ``nn.Sequential`` to pipeline.

    Args:
        module: The user's module.
        name: The path the user gave, or None to find it.

    Raises:
        ValueError: If there is none, several, or the named one is not an ``nn.Sequential``.
    """
    if name is not None:
        try:
            found = module.get_submodule(name)
        except AttributeError:
            raise ValueError(
                f"pipeline_module={name!r} names nothing in {type(module).__name__}; it has {_child_names(module)}"
            ) from None
        if not isinstance(found, nn.Sequential):
            raise ValueError(
                f"pipeline_module={name!r} must be an nn.Sequential, but is a {type(found).__name__}; "
                "put its layers, in order, into one nn.Sequential"
            )
        return name
    candidates = [path for path in _outermost_sequentials(module, "") if path]
    if not candidates:
        raise ValueError(
            f"{type(module).__name__} has no nn.Sequential to pipeline; it has {_child_names(module)}. "
            "Put the trainable layers, in order, into one: self.net = nn.Sequential(...)"
        )
    if len(candidates) > 1:
        raise ValueError(
            f"{type(module).__name__} has {len(candidates)} nn.Sequential: {', '.join(candidates)}. "
            f"Name the one to pipeline: ParcaeStrategy(pipeline_module={candidates[0]!r}), "
            "and keep trainable parameters out of the others"
        )
    return candidates[0]


def _child_names(module: nn.Module) -> str:
    return ", ".join(f"{name} ({type(child).__name__})" for name, child in module.named_children()) or "no submodules"


def _outermost_sequentials(module: nn.Module, path: str) -> list[str]:
    if isinstance(module, nn.Sequential) and path:
        return [path]
    found = []
    for name, child in module.named_children():
        found += _outermost_sequentials(child, f"{path}.{name}" if path else name)
    return found


def check_pipeline(module: nn.Module, path: str, *, batch_norm: str | None) -> None:
    """Refuse what cannot be pipelined exactly.

    Raises:
        ValueError: With the reason and the change to make.
    """
    sequential = module.get_submodule(path)
    assert isinstance(sequential, nn.Sequential)
    if type(sequential).forward not in (nn.Sequential.forward, PipelinedSequential.forward):
        raise ValueError(
            f"{path} is a {type(sequential).__name__} with its own forward(); the pipeline runs the layers one after "
            "the other. Use a plain nn.Sequential"
        )
    if len(sequential) == 0:
        raise ValueError(f"{path} is empty; it needs at least one layer")
    hooks = [kind.strip("_").replace("_", " ") for kind in _HOOKS if getattr(sequential, kind)]
    if hooks:
        raise ValueError(
            f"{path} itself has {' and '.join(hooks)}, which the pipeline cannot run: no instance has the input and "
            f"the output of {path}. Register them on its layers, or put what they do into a layer"
        )
    lazy = [
        name for name, t in (*module.named_parameters(), *module.named_buffers(remove_duplicate=False)) if is_lazy(t)
    ]
    if lazy:
        raise ValueError(
            f"{', '.join(lazy[:3])}{', ...' if len(lazy) > 3 else ''} have no shape yet, but an instance that joins "
            "later must build the same model. Give the layers their input sizes instead of using Lazy modules, or run "
            "one batch through the module in its __init__ (with torch.no_grad())"
        )
    try:
        verify_module(sequential)
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be cut into stages: {error}. Tied weights and repeated layers must stay within one child "
            "of the nn.Sequential"
        ) from error
    inside = {id(parameter) for parameter in sequential.parameters()}
    outside = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in inside]
    if outside:
        more = f" and {len(outside) - 5} more" if len(outside) > 5 else ""
        raise ValueError(
            f"trainable parameters outside of {path}: {', '.join(outside[:5])}{more}. Move the layers that hold them "
            f"into {path}, or freeze them with requires_grad_(False)"
        )
    normed = [name for name, child in sequential.named_modules() if isinstance(child, _BatchNorm)]
    if normed and batch_norm is None:
        raise ValueError(
            f"{path} holds BatchNorm ({', '.join(normed[:3])}{', ...' if len(normed) > 3 else ''}), whose statistics "
            "depend on how a batch is cut. Choose: batch_norm='deferred' (running statistics of the whole batch, "
            "torchgpipe's deferred batch norm), batch_norm='micro_batch' (of each micro-batch), or use GroupNorm"
        )


def parameter_bytes(layer: nn.Module) -> int:
    """Return the size of a layer's parameters and buffers in bytes."""
    tensors = [*layer.parameters(), *layer.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _OnCopies(nn.Module):
    """Gives a layer copies of its inputs: torchgpipe measures on leaves, which no layer may change in place."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Any) -> Any:
        copies = tuple(part.clone() for part in value) if isinstance(value, tuple) else value.clone()
        return self.layer(copies)


def layer_costs(layers: nn.Sequential, sample: Tensor | None) -> list[float]:
    """Return a positive cost for each layer: measured seconds if a sample is given, else its size.

    Args:
        layers: The pipelined layers, all resident.
        sample: An input of the first layer, or None.
    """
    if sample is not None:
        times = profile_times(nn.Sequential(*map(_OnCopies, layers)), sample, 0.3, sample.device)
        return [max(float(t), 1e-3) for t in times]
    sizes = [float(parameter_bytes(layer)) for layer in layers]
    floor = max(sum(sizes) / len(sizes) / 100, 1.0)
    return [size + floor for size in sizes]


def stage_boundaries(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Cut layers into stages: the costliest stage as cheap as possible, and the others as even as that allows.

    torchgpipe's block partition is not used for it: where costs differ much, it leaves stages empty or repeats layers.

    Args:
        costs: Cost of each layer.
        num_stages: Stages ``P``, from 1 to the number of layers.

    Returns:
        Boundaries of length ``P + 1``.
    """
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(costs, dtype=np.float64))])
    blocks = prefix[None, :] - prefix[:, None]  # of layers i .. j - 1
    blocks[np.tril_indices(len(prefix))] = np.inf
    highest, _ = _cheapest_cuts(blocks, num_stages, np.maximum)
    _, boundaries = _cheapest_cuts(np.where(blocks <= highest * (1 + 1e-9), blocks**2, np.inf), num_stages, np.add)
    return boundaries


def _cheapest_cuts(blocks: Any, num_stages: int, combine: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """Cut into contiguous blocks of the least combined cost, by dynamic programming over the stages."""
    best, choices = blocks[0], []
    for _ in range(num_stages - 1):
        costs = combine(best[:, None], blocks)
        choices.append(costs.argmin(axis=0))
        best = costs.min(axis=0)
    boundaries = [len(best) - 1]
    for choice in reversed(choices):
        boundaries.append(int(choice[boundaries[-1]]))
    return float(best[-1]), (0, *reversed(boundaries))


def fingerprint(module: nn.Module, path: str, extra: Sequence[object]) -> str:
    """Identify the shape of a model and its settings; instances of one job must agree on it."""
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype};".encode())
    digest.update(f"{path} {[str(item) for item in extra]}".encode())
    return digest.hexdigest()[:16]
