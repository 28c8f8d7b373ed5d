"""One stage of a pipeline, run by torchgpipe on micro-batches that are cut here.

torchgpipe schedules the micro-batches over the local devices, orders the backward pass and recomputes; this module
feeds it micro-batches whose borders do not depend on the layout, and makes the result independent of the layout too:
random layers are keyed by (key, micro-batch, layer), buffers are updated once although layers run twice under
recomputation, and autocast, grad mode and inference mode are carried into torchgpipe's workers, which do not inherit
them.

A micro-batch travels through torchgpipe as a tuple that starts with a *carrier*, an empty tensor of shape ``(0, i)``.
It names the micro-batch, requires grad whether or not the data do (so that torchgpipe's dependencies between
micro-batches also hold for token ids), and costs nothing. Tensors that carry no gradient go past torchgpipe, whose
checkpoints accept only outputs that require grad.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torchgpipe import GPipe, phony
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.checkpoint import is_checkpointing, is_recomputing
from torchgpipe.microbatch import Batch, gather
from torchgpipe.pipeline import Pipeline
from torchgpipe.skip.layout import inspect_skip_layout
from torchgpipe.stream import AbstractStream, new_stream

from lightning_parcae.engine.channel import Channel, Receive, Send, carries_gradient
from lightning_parcae.engine.partition import stage_boundaries

__all__ = ["Recompute", "StagePipeline"]

Recompute = Literal["always", "except_last", "never"]
TensorOrTensors = Tensor | tuple[Tensor, ...]
Autocast = Callable[[], AbstractContextManager[Any]]

# Layers of torch.nn that may draw random numbers; all others of torch.nn do not, and what is not of torch.nn may.
_RANDOM_NAMES = ("Dropout", "RReLU", "FractionalMaxPool", "MultiheadAttention", "Transformer", "RNN", "LSTM", "GRU")

# The generators belong to the process, and local devices work in threads: nobody may draw between seeding and a layer.
_random_lock = threading.RLock()


@dataclass(slots=True)
class _Run:
    """What the layers must know about one call of :meth:`StagePipeline.forward`, also when they run again."""

    indices: tuple[int, ...]
    key: tuple[int, ...]
    autocast: Autocast | None
    is_inference: bool
    input_is_tuple: bool
    # Per partition and micro-batch: how the partition's output was taken apart.
    outputs: list[dict[int, _Output]] = field(default_factory=list)

    def enter(self) -> AbstractContextManager[Any]:
        if self.autocast is None and not self.is_inference:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        if self.is_inference:
            stack.enter_context(torch.inference_mode())
        if self.autocast is not None:
            stack.enter_context(self.autocast())
        return stack

    def seed(self, micro: int, layer: int, device: torch.device, seeds_python: bool) -> None:
        text = repr((self.key, self.indices[micro], layer)).encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(seed)
        if seeds_python:
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class _Output:
    """A partition's output: positions of the tensors that went through torchgpipe, and those that went past it."""

    is_tuple: bool
    through: tuple[int, ...]
    past: dict[int, Tensor]

    def assemble(self, tensors: Sequence[Tensor], device: torch.device | None = None) -> TensorOrTensors:
        if not self.is_tuple and self.through:
            return tensors[0]
        found = dict(zip(self.through, tensors, strict=True))
        for position, tensor in self.past.items():
            found[position] = tensor if device is None else tensor.to(device)
        whole = tuple([found[position] for position in range(len(found))])
        return whole if self.is_tuple else whole[0]


class _Gate(torch.autograd.Function):
    """Let backward enter a partition only when the gradients of all its outputs are there, the carrier's included."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (carrier.detach(), *[tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


class _Kept(torch.autograd.Function):
    """Run a partition without recomputation, but with a backward pass of its own, as torchgpipe's checkpoint has.

    The gradients of a parameter are then summed within a micro-batch first and over micro-batches afterwards, and added
    to ``.grad`` in that order, whatever the recompute mode: otherwise the modes differ in the last bits as soon as a
    parameter is used twice in a layer or gradients are accumulated over batches.
    """

    @staticmethod
    def forward(ctx: Any, segment: _Segment, run: _Run, *batch: Tensor) -> tuple[Tensor, ...]:
        leaves = tuple([tensor.detach().requires_grad_(tensor.requires_grad) for tensor in batch])
        with torch.enable_grad():
            outputs = segment.compute(run, leaves)
        ctx.graph = (leaves, outputs)
        return tuple([tensor.detach() for tensor in outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.graph is None:
            raise RuntimeError("a pipeline's backward pass runs once; it was called again. Compute the loss anew first")
        (leaves, outputs), ctx.graph = ctx.graph, None
        wanted = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
        if wanted:
            torch.autograd.backward([output for output, _ in wanted], [gradient for _, gradient in wanted])
        return (None, None, *[leaf.grad for leaf in leaves])


class _Drive(torch.autograd.Function):
    """A number whose backward pass drives that of every micro-batch of a stage without a loss."""

    @staticmethod
    def forward(ctx: Any, *carriers: Tensor) -> Tensor:
        ctx.carriers = [(carrier.shape, carrier.device) for carrier in carriers]
        return torch.zeros(1)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return tuple([torch.zeros(shape, device=device) for shape, device in ctx.carriers])


class _Buffers:
    """Keeps a layer's buffers right when the layer runs twice.

    Which buffers a layer changes is found out once. Under recomputation the layer sees them as they were before its
    first run (a power iteration must start from the same vectors) and its changes are dropped (running statistics count
    once).
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (m, name) for m in module.modules() for name, buffer in m._buffers.items() if buffer is not None
        ]
        self._changing: list[tuple[nn.Module, str]] | None = None
        self._modes: list[bool] = []
        self._before: dict[int, list[Tensor | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def reset(self) -> None:
        self._before.clear()

    @contextlib.contextmanager
    def first_run(self, micro: int) -> Iterator[None]:
        modes = [module.training for module, _ in self._places]
        if modes != self._modes:
            self._modes, self._changing = modes, None
        watched = self._places if self._changing is None else self._changing
        before = [_copy_of(module._buffers[name]) for module, name in watched]
        yield
        if self._changing is None:
            changed = [not _same(m._buffers[name], old) for (m, name), old in zip(watched, before, strict=True)]
            self._changing = [place for place, differs in zip(watched, changed, strict=True) if differs]
            before = [old for old, differs in zip(before, changed, strict=True) if differs]
        self._before[micro] = before

    @contextlib.contextmanager
    def second_run(self, micro: int) -> Iterator[None]:
        changing = self._changing or []
        now = [module._buffers[name] for module, name in changing]
        # Other tensors take the place of the real ones: writing to these would break what backward has saved of them.
        for (module, name), old in zip(changing, self._before.pop(micro), strict=True):
            module._buffers[name] = old
        try:
            yield
        finally:
            for (module, name), current in zip(changing, now, strict=True):
                module._buffers[name] = current


def _copy_of(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right if left is None or right is None else torch.equal(left, right)


def _draws(module: nn.Module) -> bool:
    """Say whether a layer may draw random numbers; where in doubt it does."""
    return any(
        not type(m).__module__.startswith("torch.nn.modules")
        or type(m).__name__.startswith(_RANDOM_NAMES)
        or bool(m._forward_hooks or m._forward_pre_hooks)
        or ("Dropout" in type(m).__name__)
        for m in module.modules()
    )


def _is_foreign(module: nn.Module) -> bool:
    return any(not type(m).__module__.startswith("torch.nn.modules") for m in module.modules())


class _Segment(nn.Module):
    """The layers that one local device runs: a partition of torchgpipe has this one child."""

    def __init__(
        self, position: int, layers: Sequence[nn.Module], first_index: int, device: torch.device, channels: _Ends
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.receive = channels.receive
        self.send = channels.send
        self._position = position
        self._first_index = first_index
        self._device = device
        self._works_in_place: bool | None = None  # unknown
        self._is_foreign = False
        self._steps: list[tuple[nn.Module, int, bool, bool, _Buffers | None]] = []

    def prepare(self) -> bool:
        """Look at the layers once they are final; return whether any may draw random numbers."""
        for offset, layer in enumerate(self.layers):
            buffers = _Buffers(layer)
            step = (layer, self._first_index + offset, _draws(layer), _is_foreign(layer), buffers or None)
            self._steps.append(step)
        self._is_foreign = any(step[2] and step[3] for step in self._steps)
        return any(step[2] for step in self._steps)

    def reset(self) -> None:
        """Forget what a broken step has left."""
        for end in (self.receive, self.send):
            if end is not None:
                end.reset()
        for step in self._steps:
            if step[4] is not None:
                step[4].reset()

    def run(self, run: _Run, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compute one micro-batch; called by torchgpipe's workers, and in the backward pass to recompute."""
        if is_recomputing():
            with _python_random_kept() if self._is_foreign else contextlib.nullcontext():
                return self.compute(run, batch)
        if torch.is_grad_enabled():
            return _kept(self, run, *batch)
        return self.compute(run, batch)

    def compute(self, run: _Run, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Receive or take over the input, run the layers, and send or hand over the output."""
        carrier = batch[0]
        micro = carrier.shape[1]
        with run.enter():
            tensors, is_tuple = self._enter(run, micro, carrier, batch[1:])
            tensors, originals = self._protect(tensors)
            value: Any = tensors if is_tuple else tensors[0]
            value = self._run_layers(run, micro, value)
            if originals is not None:
                self._judge(originals)
            return self._leave(run, micro, carrier, value)

    def _enter(
        self, run: _Run, micro: int, carrier: Tensor, tensors: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], bool]:
        if self.receive is not None:
            return cast("tuple[tuple[Tensor, ...], bool]", self.receive(carrier))
        if self._position == 0:
            return tensors, run.input_is_tuple
        value = run.outputs[self._position - 1][micro].assemble(tensors, self._device)
        return (value, True) if isinstance(value, tuple) else ((value,), False)

    def _protect(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, int]] | None]:
        # A first layer that works in place (ReLU(inplace=True)) would destroy the input that recomputation needs, and
        # autograd forbids it on leaves and views: such a segment gets copies. Whether it does is tried out once.
        if self._works_in_place is False or not (torch.is_grad_enabled() or is_checkpointing()):
            return tensors, None
        copies = tuple([tensor.clone() for tensor in tensors])
        if self._works_in_place:
            return copies, None
        return copies, [(tensor, tensor._version) for tensor in copies]

    def _judge(self, handed: list[tuple[Tensor, int]]) -> None:
        self._works_in_place = any(tensor._version != version for tensor, version in handed)

    def _run_layers(self, run: _Run, micro: int, value: Any) -> Any:
        second = is_recomputing()
        twice = second or is_checkpointing()
        for layer, index, draws, is_foreign, buffers in self._steps:
            if not draws and (buffers is None or not twice):
                value = layer(value)
                continue
            with contextlib.ExitStack() as stack:
                if draws:
                    stack.enter_context(_random_lock)
                    run.seed(micro, index, self._device, is_foreign)
                if buffers is not None and twice:
                    stack.enter_context(buffers.second_run(micro) if second else buffers.first_run(micro))
                value = layer(value)
        return value

    def _leave(self, run: _Run, micro: int, carrier: Tensor, value: Any) -> tuple[Tensor, ...]:
        is_tuple = isinstance(value, tuple)
        tensors: tuple[Any, ...] = value if is_tuple else (value,)
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                last = self._first_index + len(self._steps) - 1
                raise TypeError(
                    f"layer {last} ends a stage or a device's part of it and must return a Tensor or a tuple of "
                    f"Tensors, but it returned {'a tuple with ' if is_tuple else ''}{type(tensor).__name__}"
                )
        if self.send is not None:
            return (self.send(carrier, tensors, is_tuple),)
        outputs = run.outputs[self._position]
        if is_recomputing():
            through = outputs[micro].through
        else:
            needs_grad = carries_gradient(tensors)
            through = tuple([i for i, needs in enumerate(needs_grad) if needs])
            past = {i: tensor for i, tensor in enumerate(tensors) if i not in through}
            outputs[micro] = _Output(is_tuple, through, past)
        kept = [tensors[i] for i in through]
        # Only torchgpipe's checkpoint needs the gate: it gives its backward pass every output.
        return _gate(carrier, *kept) if is_recomputing() else (carrier.detach(), *kept)


# torch does not annotate `apply`.
_gate = cast("Callable[..., tuple[Tensor, ...]]", _Gate.apply)
_kept = cast("Callable[..., tuple[Tensor, ...]]", _Kept.apply)
_drive = cast("Callable[..., Tensor]", _Drive.apply)


@dataclass(frozen=True, slots=True)
class _Ends:
    receive: Receive | None
    send: Send | None


class StagePipeline:
    """One stage of a pipeline on this instance's devices.

    With one stage the channel is None. Layers keep their identity; they are moved to their device.

    Args:
        layers: This stage's layers, in order.
        layer_indices: Their indices in the whole model.
        devices: Local devices; the layers are split over them by parameter bytes. Layers on one device after the other.
        is_first: Whether the stage reads the data.
        is_last: Whether the stage's output is the model's.
        channel: To the neighbouring stages.
        recompute: Which micro-batches drop their activations and compute them again in the backward pass.
        deferred_batch_norm: Let torchgpipe update BatchNorm's statistics once per batch instead of per micro-batch.

    Raises:
        ValueError: If the layers share parameters, or the arguments do not fit each other.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        layer_indices: range,
        *,
        devices: Sequence[torch.device | str] = ("cpu",),
        is_first: bool = True,
        is_last: bool = True,
        channel: Channel | None = None,
        recompute: Recompute = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        if not layers or len(layers) != len(layer_indices):
            raise ValueError(f"a stage needs layers and an index for each, got {len(layers)} and {len(layer_indices)}")
        if not devices:
            raise ValueError("a stage needs at least one device, got none")
        if recompute not in ("always", "except_last", "never"):
            raise ValueError(f"recompute must be 'always', 'except_last' or 'never', got {recompute!r}")
        if channel is None and not (is_first and is_last):
            raise ValueError("a stage that is not alone needs a channel, got None")
        self.layer_indices = layer_indices
        self.recompute: Recompute = recompute
        self._is_first = is_first
        self._is_last = is_last
        self._channel = channel if not (is_first and is_last) else None
        segments, parts = self._split(list(layers), [torch.device(device) for device in devices])
        gpipe = GPipe(
            nn.Sequential(*segments),
            balance=[1] * len(segments),
            devices=parts,
            checkpoint=recompute,
            deferred_batch_norm=deferred_batch_norm,
        )
        self.devices: list[torch.device] = list(gpipe.devices)
        self._segments = [cast(_Segment, partition[0]) for partition in gpipe.partitions]
        self._draws = any([segment.prepare() for segment in self._segments])
        self._batch_norms = [m for m in gpipe.modules() if isinstance(m, DeferredBatchNorm)]
        # torchgpipe puts new modules in the place of BatchNorms: those that are layers themselves are not in the user's
        # model, so train() and eval() do not reach them; those inside layers start out in training mode.
        used = [layer for segment in self._segments for layer in segment.layers]
        self._replaced = [(old, new) for old, new in zip(layers, used, strict=True) if new is not old]
        for parent in (module for layer in layers for module in layer.modules()):
            for child in parent.children():
                if isinstance(child, DeferredBatchNorm):
                    child.training = parent.training
        for norm in self._batch_norms:
            # torchgpipe's sums are zero between batches: no part of the model's state.
            norm._non_persistent_buffers_set.update(("sum", "sum_squares"))
            # made with the default type: the sums of a model in double precision must not be rounded to less
            assert norm.running_mean is not None  # torchgpipe replaces only those that keep statistics
            dtype = torch.promote_types(norm.sum.dtype, norm.running_mean.dtype)
            norm.sum, norm.sum_squares = norm.sum.to(dtype), norm.sum_squares.to(dtype)
        self._skip_layout = inspect_skip_layout(gpipe.partitions)
        self._copy_streams: list[list[AbstractStream]] = [[] for _ in self.devices]
        for device in set(self.devices):
            _make_phonies(device)

    def _split(self, layers: list[nn.Module], devices: list[torch.device]) -> tuple[list[_Segment], list[torch.device]]:
        devices = devices[: len(layers)]
        costs = [1 + sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in layers]
        boundaries = stage_boundaries(costs, len(devices))
        segments = []
        for position, device in enumerate(devices):
            receive = send = None
            if self._channel is not None and not self._is_first and position == 0:
                receive = Receive(self._channel, device)
            if self._channel is not None and not self._is_last and position == len(devices) - 1:
                send = Send(self._channel)
            start, stop = boundaries[position], boundaries[position + 1]
            ends = _Ends(receive, send)
            segments.append(_Segment(position, layers[start:stop], self.layer_indices[start], device, ends))
        return segments, devices

    def forward(
        self,
        inputs: TensorOrTensors | None,
        sizes: Sequence[int],
        indices: Sequence[int],
        key: tuple[int, ...],
        training: bool = True,
        autocast: Autocast | None = None,
    ) -> TensorOrTensors:
        """Run the forward pass of this stage on a batch.

        Args:
            inputs: The samples of all micro-batches (first stage), else None.
            sizes: Samples of each micro-batch.
            indices: Global number of each micro-batch; with ``key`` it decides what random layers draw.
            key: What else decides it, e.g. seed and step.
            training: Whether to recompute activations; the mode of the layers is theirs.
            autocast: Makes the context that the layers run in.

        Returns:
            The output of all micro-batches (last stage), else a tensor of one element; ``.sum().backward()`` of it runs
            this stage's backward pass.
        """
        if not sizes or len(sizes) != len(indices):
            raise ValueError(
                f"a batch needs micro-batches and an index for each, got sizes {sizes} and indices {indices}"
            )
        grad = torch.is_grad_enabled()
        run = _Run(tuple(indices), tuple(key), autocast, torch.is_inference_mode_enabled(), isinstance(inputs, tuple))
        run.outputs = [{} for _ in self._segments]
        batches = self._cut(inputs, sizes, grad)
        if grad:
            for segment in self._segments:
                segment.reset()
        self._reset_batch_norms(len(batches))
        if self._channel is not None:
            self._channel.begin(sizes)

        stop = {"always": len(batches), "except_last": len(batches) - 1, "never": 0}[self.recompute]
        partitions = [_bind(segment, run) for segment in self._segments]
        pipeline = Pipeline(
            batches,
            cast("list[nn.Sequential]", partitions),
            self.devices,
            self._streams(len(batches)),
            self._skip_layout,
            stop if training and grad else 0,
        )
        with self._random_state_kept():
            pipeline.run()
        if not grad and self._channel is not None:
            self._channel.finish_forward()
        if not self._is_last:
            return _drive(*[batch[0] for batch in batches])
        return self._gather(run, batches)

    def _cut(self, inputs: TensorOrTensors | None, sizes: Sequence[int], grad: bool) -> list[Batch]:
        device = self.devices[0]
        carriers = [torch.empty(0, micro, device=device, requires_grad=grad) for micro in range(len(sizes))]
        if not self._is_first:
            return [Batch((carrier,)) for carrier in carriers]
        if inputs is None:
            raise ValueError("the first stage needs the batch, got None")
        tensors = inputs if isinstance(inputs, tuple) else (inputs,)
        total = sum(sizes)
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"the model's input must be a Tensor or a tuple of Tensors, got {type(tensor).__name__}"
                )
            if tensor.dim() == 0 or tensor.shape[0] != total:
                raise ValueError(
                    f"inputs must have the {total} samples of the batch in front, got {tuple(tensor.shape)}"
                )
        pieces = zip(*[torch.split(tensor.to(device), list(sizes)) for tensor in tensors], strict=True)
        return [Batch((carrier, *piece)) for carrier, piece in zip(carriers, pieces, strict=True)]

    def _gather(self, run: _Run, batches: list[Batch]) -> TensorOrTensors:
        if torch.is_grad_enabled():
            # The carriers are reached through torchgpipe's dependencies on the micro-batch that follows. The last has
            # none: without this its recomputation would not be part of the loss's graph.
            batches[-1] = Batch(_gate(*batches[-1]))
        values = [run.outputs[-1][micro].assemble(tuple(batch)[1:]) for micro, batch in enumerate(batches)]
        first = values[0] if isinstance(values[0], tuple) else (values[0],)
        if any(tensor.dim() == 0 for tensor in first):
            raise TypeError(
                "the model's output must have the samples in front, got a number; compute the loss after it"
            )
        return gather([Batch(value) for value in values])

    def _streams(self, count: int) -> list[list[AbstractStream]]:
        for device, streams in zip(self.devices, self._copy_streams, strict=True):
            while len(streams) < count:
                streams.append(new_stream(device))
        return self._copy_streams

    def _reset_batch_norms(self, count: int) -> None:
        for old, new in self._replaced:
            new.train(old.training)
        for norm in self._batch_norms:
            norm.chunks = count
            norm.counter = norm.tracked = 0
            norm.sum.zero_()
            norm.sum_squares.zero_()

    @contextlib.contextmanager
    def _random_state_kept(self) -> Iterator[None]:
        if not self._draws:
            yield
            return
        with _random_lock:
            state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
            cuda = {device for device in self.devices if device.type == "cuda"}
            cuda_states = [(device, torch.cuda.get_rng_state(device)) for device in cuda]
        try:
            yield
        finally:
            with _random_lock:
                torch.set_rng_state(state)
                random.setstate(python_state)
                np.random.set_state(numpy_state)
                for device, cuda_state in cuda_states:
                    torch.cuda.set_rng_state(cuda_state, device)


def _bind(segment: _Segment, run: _Run) -> Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]:
    # Bound to its call, so that recomputation finds the same context even if another batch was run meanwhile.
    return lambda batch: segment.run(run, batch)


@contextlib.contextmanager
def _python_random_kept() -> Iterator[None]:
    # torchgpipe guards torch's generators under recomputation.
    with _random_lock:
        state = random.getstate()
    try:
        yield
    finally:
        with _random_lock:
            random.setstate(state)


def _make_phonies(device: torch.device) -> None:
    # torchgpipe caches them; one made in inference mode (validation comes first) would break training later.
    with torch.inference_mode(False):
        for requires_grad in (False, True):
            if phony.get_phony(device, requires_grad=requires_grad).is_inference():
                del phony._phonies[device, requires_grad]
                phony.get_phony(device, requires_grad=requires_grad)
