"""What travels between neighbouring stages: activations forward, gradients back.

A :class:`Channel` moves tensors; :class:`Receive` and :class:`Send` put one at each end of a stage as layers that
autograd knows. Both take a *carrier*, an empty tensor of shape ``(0, i)`` that names micro-batch ``i`` wherever it goes
(through copies between devices, checkpointing and recomputation) without a value that would have to be read back.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torchgpipe.checkpoint import is_checkpointing, is_recomputing

from lightning_parcae.engine.groups import Group, Pending
from lightning_parcae.engine.wire import recv_tree, send_tree
from lightning_parcae.errors import GenerationBrokenError

__all__ = [
    "Activation",
    "Channel",
    "GroupChannel",
    "InProcessChannel",
    "Receive",
    "Send",
    "carries_gradient",
    "recv_tree",
    "send_tree",
]

_HEADER_INTS = 64
# Trees that travel over the same group take other tags.
_TAG_HEADER, _TAG_PAYLOAD, _TAG_GRADIENT = 1, 2, 64

_DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


@dataclass(frozen=True, slots=True)
class Activation:
    """What one stage hands to the next for one micro-batch.

    Attributes:
        tensors: The tensors, detached.
        needs_grad: For each, whether a gradient comes back.
        is_tuple: Whether the layers pass a tuple (else one tensor).
    """

    tensors: tuple[Tensor, ...]
    needs_grad: tuple[bool, ...]
    is_tuple: bool


class Channel(Protocol):
    """Moves activations to the next stage and gradients to the previous one.

    Micro-batches are sent and received in the order ``0 .. n-1``, their gradients in the reverse order.

    Attributes:
        activations_sent: Micro-batches sent forward so far.
        activations_received: Micro-batches received so far.
        gradients_sent: Micro-batches whose gradients were sent back so far.
        gradients_received: Micro-batches whose gradients came back so far.
    """

    activations_sent: int
    activations_received: int
    gradients_sent: int
    gradients_received: int

    def begin(self, sizes: Sequence[int]) -> None:
        """Start a batch of micro-batches with these numbers of samples."""

    def finish_forward(self) -> None:
        """Return when every activation has left (called when no gradients will follow)."""

    def send_activation(self, micro: int, activation: Activation) -> None:
        """Hand a micro-batch to the next stage; may return before it has arrived."""

    def recv_activation(self, micro: int) -> Activation:
        """Wait for a micro-batch of the previous stage; the tensors are the caller's own."""

    def send_gradient(self, micro: int, gradients: Sequence[Tensor]) -> None:
        """Send back the gradients of the received tensors that need one, in order."""

    def recv_gradient(self, micro: int) -> tuple[Tensor, ...]:
        """Wait for the gradients of the sent tensors that need one, in order."""


class _Meta(NamedTuple):
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    needs_grad: tuple[bool, ...]
    is_tuple: bool

    @classmethod
    def of(cls, activation: Activation) -> _Meta:
        tensors = activation.tensors
        return cls(
            tuple(tuple(t.shape) for t in tensors),
            tuple(t.dtype for t in tensors),
            activation.needs_grad,
            activation.is_tuple,
        )

    def encode(self) -> list[int]:
        numbers = [len(self.shapes), int(self.is_tuple)]
        for shape, dtype, needs_grad in zip(self.shapes, self.dtypes, self.needs_grad, strict=True):
            try:
                numbers += [_DTYPE_CODES[dtype], int(needs_grad), len(shape), *shape]
            except KeyError:
                raise TypeError(
                    f"tensors of dtype {dtype} cannot travel between stages; cast to one of {_DTYPES}"
                ) from None
        return numbers

    @classmethod
    def decode(cls, numbers: list[int]) -> _Meta:
        shapes, dtypes, needs_grad, at = [], [], [], 2
        for _ in range(numbers[0]):
            code, needs, ndim = numbers[at : at + 3]
            shapes.append(tuple(numbers[at + 3 : at + 3 + ndim]))
            dtypes.append(_DTYPES[code])
            needs_grad.append(bool(needs))
            at += 3 + ndim
        return cls(tuple(shapes), tuple(dtypes), tuple(needs_grad), bool(numbers[1]))

    def buffers(self) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]

    def gradient_buffers(self) -> list[Tensor]:
        items = zip(self.shapes, self.dtypes, self.needs_grad, strict=True)
        return [torch.empty(shape, dtype=dtype) for shape, dtype, needs_grad in items if needs_grad]


class GroupChannel:
    """A channel over the pipeline group of a generation.

    Every activation is announced by a header of fixed size, so shapes may change at will. Both ends expect that a
    micro-batch looks like the last one with as many samples: the receiver posts its receives for the next micro-batch
    ahead, and the transfer overlaps with the computation of the current one. After a surprise the sender first fills
    the receives that were posted, then sends what is really there.

    Args:
        group: The members of the pipeline, by stage.
    """

    def __init__(self, group: Group) -> None:
        self.activations_sent = self.activations_received = self.gradients_sent = self.gradients_received = 0
        self._group = group
        self._next, self._previous = group.rank + 1, group.rank - 1
        self._sizes: tuple[int, ...] = ()
        self._expected_out: dict[int, _Meta] = {}
        self._expected_in: dict[int, _Meta] = {}
        self._sent: dict[int, _Meta] = {}
        # Nobody waits for sends: the first gradient tells that the next stage has every activation, and the next
        # batch's first activation that the previous stage has every gradient.
        self._sends: list[Pending] = []
        self._gradient_sends: list[Pending] = []
        self._posted: tuple[int, Pending, list[Pending]] | None = None
        self._posted_gradient: tuple[int, list[Pending]] | None = None

    def begin(self, sizes: Sequence[int]) -> None:
        """Start a batch of micro-batches with these numbers of samples."""
        if self._sends:
            self.finish_forward()  # the last batch had no gradients, which would have told that all has arrived
        self._sizes = tuple(sizes)
        self._sent.clear()

    def finish_forward(self) -> None:
        """Return when every activation has left."""
        self._group.wait_for_sends(self._sends)
        self._sends.clear()

    def send_activation(self, micro: int, activation: Activation) -> None:
        """Hand a micro-batch to the next stage; returns at once."""
        group, peer = self._group, self._next
        meta = _Meta.of(activation)
        expected = self._expected_out.get(self._sizes[micro])
        numbers = [micro, int(expected is not None and expected != meta), *meta.encode()]
        overflow = len(numbers) + 1 > _HEADER_INTS
        header = torch.zeros(_HEADER_INTS, dtype=torch.int64)
        if overflow:
            header[0] = len(numbers)
        else:
            header[1 : 1 + len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        pending = [group.isend(header, peer, _TAG_HEADER)]
        if overflow:
            pending.append(group.isend(torch.tensor(numbers, dtype=torch.int64), peer, _TAG_HEADER))
        if expected is not None and expected != meta:
            pending += [group.isend(filler, peer, _TAG_PAYLOAD) for filler in expected.buffers()]
        for tensor in activation.tensors:
            pending.append(group.isend(tensor.detach().cpu().contiguous(), peer, _TAG_PAYLOAD))
        self._expected_out[self._sizes[micro]] = meta
        self._sent[micro] = meta
        self._sends += pending
        self.activations_sent += 1

    def recv_activation(self, micro: int) -> Activation:
        """Wait for a micro-batch of the previous stage."""
        if self._posted is None:
            self._post(micro)
        assert self._posted is not None
        posted, header, payload = self._posted
        numbers: list[int] = header.wait().tolist()
        if numbers[0]:
            longer = torch.empty(numbers[0], dtype=torch.int64)
            self._group.recv(longer, self._previous, _TAG_HEADER)
            numbers = [0, *longer.tolist()]
        if not posted == micro == numbers[1]:
            raise GenerationBrokenError(
                f"micro-batch {micro} was expected, but {numbers[1]} came; receive was for {posted}"
            )
        meta = _Meta.decode(numbers[3:])
        if numbers[2] or not payload:
            for filler in payload:
                filler.wait()
            payload = [self._group.irecv(buffer, self._previous, _TAG_PAYLOAD) for buffer in meta.buffers()]
        self._expected_in[self._sizes[micro]] = meta
        tensors = tuple([pending.wait() for pending in payload])
        _forget(self._gradient_sends)
        self._posted = None
        if micro + 1 < len(self._sizes):
            self._post(micro + 1)
        self.activations_received += 1
        return Activation(tensors, meta.needs_grad, meta.is_tuple)

    def _post(self, micro: int) -> None:
        group, peer = self._group, self._previous
        header = group.irecv(torch.empty(_HEADER_INTS, dtype=torch.int64), peer, _TAG_HEADER)
        expected = self._expected_in.get(self._sizes[micro])
        buffers = expected.buffers() if expected is not None else []
        self._posted = (micro, header, [group.irecv(buffer, peer, _TAG_PAYLOAD) for buffer in buffers])

    def send_gradient(self, micro: int, gradients: Sequence[Tensor]) -> None:
        """Send back the gradients of a micro-batch; returns at once."""
        group, peer, tag = self._group, self._previous, _TAG_GRADIENT + micro
        self._gradient_sends += [group.isend(g.detach().cpu().contiguous(), peer, tag) for g in gradients]
        self.gradients_sent += 1

    def recv_gradient(self, micro: int) -> tuple[Tensor, ...]:
        """Wait for the gradients of a micro-batch."""
        if self._posted_gradient is None or self._posted_gradient[0] != micro:
            self._post_gradient(micro)
        assert self._posted_gradient is not None
        gradients = tuple([pending.wait() for pending in self._posted_gradient[1]])
        if any([gradient.numel() for gradient in gradients]):  # else no message came
            _forget(self._sends)
        self._posted_gradient = None
        if micro > 0:
            self._post_gradient(micro - 1)
        self.gradients_received += 1
        return gradients

    def _post_gradient(self, micro: int) -> None:
        buffers = self._sent[micro].gradient_buffers()
        posted = [self._group.irecv(buffer, self._next, _TAG_GRADIENT + micro) for buffer in buffers]
        self._posted_gradient = (micro, posted)


def _forget(sends: list[Pending]) -> None:
    for pending in sends:
        pending.forget()
    sends.clear()


class InProcessChannel:
    """A channel between threads of one process, for tests.

    Args:
        previous: Queues to the previous stage (activations, gradients), None on the first.
        following: Queues to the next stage, None on the last.
    """

    def __init__(self, previous: _Link | None, following: _Link | None) -> None:
        self.activations_sent = self.activations_received = self.gradients_sent = self.gradients_received = 0
        self._previous = previous
        self._following = following

    @classmethod
    def connect(cls, num_stages: int) -> list[InProcessChannel]:
        """Return the channels of a pipeline, by stage."""
        links = [_Link(queue.Queue(), queue.Queue()) for _ in range(num_stages - 1)]
        return [cls(previous, following) for previous, following in zip([None, *links], [*links, None], strict=True)]

    def abort(self) -> None:
        """Make the neighbours' receives and our own fail."""
        for link in (self._previous, self._following):
            if link is not None:
                for _ in range(1024):
                    link.activations.put(None)
                    link.gradients.put(None)

    def begin(self, sizes: Sequence[int]) -> None:
        """Start a batch of micro-batches."""

    def finish_forward(self) -> None:
        """Return at once: queues never block the sender."""

    def send_activation(self, micro: int, activation: Activation) -> None:
        """Hand a copy to the next stage."""
        assert self._following is not None
        tensors = tuple([tensor.detach().clone() for tensor in activation.tensors])
        self._following.activations.put((micro, Activation(tensors, activation.needs_grad, activation.is_tuple)))
        self.activations_sent += 1

    def recv_activation(self, micro: int) -> Activation:
        """Wait for a micro-batch of the previous stage."""
        assert self._previous is not None
        activation = cast(Activation, _take(self._previous.activations, micro))
        self.activations_received += 1
        return activation

    def send_gradient(self, micro: int, gradients: Sequence[Tensor]) -> None:
        """Send copies of the gradients back."""
        assert self._previous is not None
        self._previous.gradients.put((micro, tuple([gradient.clone() for gradient in gradients])))
        self.gradients_sent += 1

    def recv_gradient(self, micro: int) -> tuple[Tensor, ...]:
        """Wait for the gradients of a micro-batch."""
        assert self._following is not None
        gradients = cast("tuple[Tensor, ...]", _take(self._following.gradients, micro))
        self.gradients_received += 1
        return gradients


@dataclass(frozen=True, slots=True)
class _Link:
    activations: queue.Queue[tuple[int, Activation] | None]
    gradients: queue.Queue[tuple[int, tuple[Tensor, ...]] | None]


def _take(source: queue.Queue[Any], micro: int) -> object:
    item = source.get(timeout=30)
    if item is None:
        raise GenerationBrokenError("the channel was aborted")
    if item[0] != micro:
        raise GenerationBrokenError(f"micro-batch {micro} was expected, but {item[0]} came")
    return item[1]


class _ReceiveFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, channel: Channel, activation: Activation) -> tuple[Tensor, ...]:
        ctx.channel, ctx.micro, ctx.needs_grad = channel, carrier.shape[1], activation.needs_grad
        fixed = [t for t, needs in zip(activation.tensors, activation.needs_grad, strict=True) if not needs]
        ctx.mark_non_differentiable(*fixed)
        # The tensors themselves, not views of them (as arguments would become): the first layer may work in place.
        return activation.tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.channel.send_gradient(ctx.micro, [g for g, needs in zip(gradients, ctx.needs_grad, strict=True) if needs])
        return (None, None, None)


class Receive(nn.Module):
    """The first layer of every stage but the first: its output comes from the previous stage.

    Under recomputation it returns what it received the first time.

    Args:
        channel: Where activations come from.
        device: Where the layers expect them.
    """

    def __init__(self, channel: Channel, device: torch.device) -> None:
        super().__init__()
        self._channel = channel
        self._device = device
        self._kept: dict[int, Activation] = {}

    def reset(self) -> None:
        """Forget what a broken step has left."""
        self._kept.clear()

    def forward(self, carrier: Tensor) -> tuple[tuple[Tensor, ...], bool]:
        """Return the tensors of the carrier's micro-batch, and whether the layers want them as a tuple."""
        micro = carrier.shape[1]
        if is_recomputing():
            activation = self._kept.pop(micro)
        else:
            activation = self._channel.recv_activation(micro)
            if self._device.type != "cpu":
                tensors = tuple([tensor.to(self._device) for tensor in activation.tensors])
                activation = Activation(tensors, activation.needs_grad, activation.is_tuple)
            if is_checkpointing():
                self._kept[micro] = activation
        tensors = activation.tensors
        if torch.is_grad_enabled() and any(activation.needs_grad):
            tensors = _receive(carrier, self._channel, activation)
        return tensors, activation.is_tuple


class _SendFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, channel: Channel, *tensors: Tensor) -> Tensor:
        ctx.channel, ctx.micro, ctx.devices = channel, carrier.shape[1], [tensor.device for tensor in tensors]
        return carrier.new_empty(carrier.shape)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        if not ctx.devices:
            return (None, None)
        gradients = ctx.channel.recv_gradient(ctx.micro)
        return (None, None, *[g.to(device) for g, device in zip(gradients, ctx.devices, strict=True)])


class Send(nn.Module):
    """The last layer of every stage but the last: its input goes to the next stage, its gradient comes from there.

    Under recomputation nothing is sent again.

    Args:
        channel: Where activations go.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._needs_grad: dict[int, tuple[bool, ...]] = {}

    def reset(self) -> None:
        """Forget what a broken step has left."""
        self._needs_grad.clear()

    def forward(self, carrier: Tensor, tensors: tuple[Tensor, ...], is_tuple: bool) -> Tensor:
        """Send the tensors as the carrier's micro-batch and return the carrier, now waiting for their gradients."""
        micro = carrier.shape[1]
        if is_recomputing():
            needs_grad = self._needs_grad.pop(micro)
        else:
            needs_grad = carries_gradient(tensors)
            self._channel.send_activation(micro, Activation(tensors, needs_grad, is_tuple))
            if is_checkpointing():
                self._needs_grad[micro] = needs_grad
        if not torch.is_grad_enabled():
            return carrier.detach()
        wanted = [tensor for tensor, needs in zip(tensors, needs_grad, strict=True) if needs]
        return _send(carrier, self._channel, *wanted)


# torch does not annotate `apply`.
_receive = cast("Callable[..., tuple[Tensor, ...]]", _ReceiveFunction.apply)
_send = cast("Callable[..., Tensor]", _SendFunction.apply)


def carries_gradient(tensors: Sequence[Tensor]) -> tuple[bool, ...]:
    """Say for each tensor that leaves a stage or device whether a gradient will come back for it.

    Under checkpointing nothing requires grad yet; there every tensor that could is taken to.
    """
    if is_checkpointing():
        return tuple([tensor.is_floating_point() or tensor.is_complex() for tensor in tensors])
    return tuple([tensor.requires_grad for tensor in tensors])
