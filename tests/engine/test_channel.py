"""Channels: what arrives is what was sent, over queues and over gloo, and failures arrive too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parcae.engine.channel import (
    Activation,
    Channel,
    GroupChannel,
    InProcessChannel,
    recv_tree,
    send_tree,
)
from lightning_parcae.engine.groups import Groups, RendezvousStore
from lightning_parcae.engine.pipeline import StagePipeline
from lightning_parcae.errors import GenerationBrokenError
from lightning_parcae.planning.layout import Layout


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """Run each in a thread, return the results or raise the first error."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]
    return results


class Pipes:
    """Three stages in one process, connected by gloo."""

    def __init__(self) -> None:
        self.store = RendezvousStore()
        names = ("a", "b", "c")
        layout = Layout(1, (names,), names, (0, 1, 2, 3))
        self.groups: list[Groups] = in_threads(
            *[lambda name=name: Groups.form(layout, name, self.store.address) for name in names]  # type: ignore[misc]
        )
        self.channels = [GroupChannel(g.pipeline) for g in self.groups if g.pipeline is not None]

    def close(self) -> None:
        for groups in self.groups:
            groups.close()
        self.store.close()


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    made = Pipes()
    yield made
    made.close()


@pytest.fixture(params=["queues", "gloo"])
def channels(request: pytest.FixtureRequest) -> Iterator[list[Channel]]:
    if request.param == "queues":
        yield list(InProcessChannel.connect(3))
        return
    made = Pipes()
    yield list(made.channels)
    made.close()


def test_what_arrives_is_what_was_sent(channels: list[Channel]) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
    batches = [
        # Micro-batches of one size may still differ: the receiver's guess must then be put right.
        [(torch.full((2, 3), 1.5),), (torch.full((2, 3), 2.5),), (torch.full((1, 3), 3.5),)],
        [(torch.full((2, 4), 1.0),), (torch.full((2, 3), 2.0, dtype=torch.float64),), (torch.zeros(1, 0),)],
        [tuple(torch.ones(2, 2).to(dtype) for dtype in dtypes), (torch.tensor(7),), (torch.ones(1, 3).t(),)],
        [tuple(torch.full((1, 1, 1, 1, 2), float(i)) for i in range(20)), (torch.ones(2, 3),), (torch.ones(1),)],
    ]

    def send() -> None:
        for batch in batches:
            channels[0].begin([2, 2, 1])
            for micro, tensors in enumerate(batch):
                grads = tuple([t.is_floating_point() for t in tensors])
                channels[0].send_activation(micro, Activation(tensors, grads, len(tensors) > 1))
            for micro in (2, 1, 0):
                gradients = channels[0].recv_gradient(micro)
                wanted = [t for t in batch[micro] if t.is_floating_point()]
                assert len(gradients) == len(wanted)
                assert all(torch.equal(g, 2 * t) for g, t in zip(gradients, wanted, strict=True))
        channels[0].begin([2])
        channels[0].send_activation(0, Activation((torch.ones(2),), (False,), False))
        channels[0].finish_forward()

    def receive() -> None:
        for batch in batches:
            channels[1].begin([2, 2, 1])
            for micro, tensors in enumerate(batch):
                got = channels[1].recv_activation(micro)
                assert got.is_tuple == (len(tensors) > 1)
                assert got.needs_grad == tuple([t.is_floating_point() for t in tensors])
                for a, b in zip(got.tensors, tensors, strict=True):
                    assert a.dtype == b.dtype and torch.equal(a, b)
            for micro in (2, 1, 0):
                channels[1].send_gradient(micro, [2 * t for t in batch[micro] if t.is_floating_point()])
        channels[1].begin([2])
        assert torch.equal(channels[1].recv_activation(0).tensors[0], torch.ones(2))

    in_threads(send, receive)
    assert (channels[0].activations_sent, channels[0].gradients_received) == (13, 12)
    assert (channels[1].activations_received, channels[1].gradients_sent) == (13, 12)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 1)).double()


@pytest.mark.parametrize("recompute", ["never", "except_last", "always"])
def test_three_stages_over_gloo_equal_one(pipes: Pipes, recompute: Any) -> None:
    def run(num_stages: int) -> list[Tensor]:
        layers = model()
        bounds = [0, 2, 3, 5] if num_stages == 3 else [0, 5]
        stages = [
            StagePipeline(
                list(layers[bounds[s] : bounds[s + 1]]),
                range(bounds[s], bounds[s + 1]),
                is_first=s == 0,
                is_last=s == num_stages - 1,
                channel=pipes.channels[s] if num_stages > 1 else None,
                recompute=recompute,
            )
            for s in range(num_stages)
        ]
        seen: list[Tensor] = []
        for step, sizes in enumerate([(4, 4, 3), (4, 4, 3), (1,), (3, 3, 3, 3)]):
            inputs = torch.linspace(-1, 1, 6 * sum(sizes), dtype=torch.float64).view(-1, 6)

            def work(s: int, inputs: Tensor = inputs, sizes: Any = sizes, step: int = step) -> Tensor:
                out = stages[s].forward(inputs if s == 0 else None, sizes, range(len(sizes)), (1, step))
                assert isinstance(out, Tensor)
                (out.pow(2).mean() if s == num_stages - 1 else out.sum()).backward()
                return out.detach()

            outputs = in_threads(*[lambda s=s: work(s) for s in range(num_stages)])  # type: ignore[misc]
            seen.append(outputs[-1])
            seen += [p.grad.clone() for p in layers.parameters() if p.grad is not None]  # accumulated over the steps
        return seen

    for a, b in zip(run(3), run(1), strict=True):
        assert torch.equal(a, b)
    assert [c.activations_sent for c in pipes.channels] == [11, 11, 0]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_abort_ends_a_step_wherever_it_is(pipes: Pipes, phase: str) -> None:
    layers = model()
    before = threading.active_count()
    stages = [
        StagePipeline(
            list(layers[2 * s : 2 * s + 2]), range(2 * s, 2 * s + 2), is_first=s == 0, is_last=False, channel=channel
        )
        for s, channel in enumerate(pipes.channels[:2])
    ]
    arrived = threading.Event()

    def first() -> None:
        out = stages[0].forward(torch.ones(8, 6, dtype=torch.float64), [4, 4], range(2), (0,))
        assert isinstance(out, Tensor)
        arrived.set()
        out.sum().backward()  # its gradients never come

    def second() -> None:
        if phase == "forward":
            pipes.channels[1].begin([4, 4])
            pipes.channels[1].recv_activation(0)
            pipes.channels[1].recv_activation(1)
            pipes.channels[1].recv_activation(1)  # and no third
        else:
            stages[1].forward(None, [4, 4], range(2), (0,))

    def abort() -> None:
        assert arrived.wait(10)
        pipes.groups[0].abort()

    waiting = [first, second] if phase == "forward" else [first]
    if phase == "backward":
        waiting = [first, lambda: [pipes.channels[1].recv_activation(m) for m in range(2)]]
        pipes.channels[1].begin([4, 4])
    with pytest.raises(GenerationBrokenError):
        in_threads(*waiting, abort)
    assert threading.active_count() == before


def test_trees_travel_over_a_group(pipes: Pipes) -> None:
    tree = {
        "x": torch.arange(6).view(2, 3),
        "names": ["a", None, 1.5],
        "pair": (torch.ones(2, dtype=torch.bfloat16), True),
    }
    worlds = [groups.world for groups in pipes.groups]
    _, got = in_threads(lambda: send_tree(worlds[0], tree, 2, 5), lambda: recv_tree(worlds[2], 0, 5))
    assert torch.equal(got["x"], tree["x"]) and got["names"] == tree["names"]  # type: ignore[arg-type]
    assert torch.equal(got["pair"][0], torch.ones(2, dtype=torch.bfloat16)) and got["pair"][1] is True


def test_a_dtype_that_cannot_travel_is_named(pipes: Pipes) -> None:
    pipes.channels[0].begin([1])
    odd = torch.zeros(1, dtype=torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        pipes.channels[0].send_activation(0, Activation((odd,), (False,), False))
