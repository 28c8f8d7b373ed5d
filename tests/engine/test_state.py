"""Layers move between instances: everything that belongs to them, and nothing that does not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from lightning_parcae.engine.state import (
    drop_layer,
    is_resident,
    layer_bytes,
    layer_state,
    load_layer,
    restore_buffers,
    snapshot_buffers,
)
from lightning_parcae.engine.wire import decode_tree, encode_tree
from lightning_parcae.errors import MigrationError


class Layer(nn.Module):
    """Parameters of several kinds, one of them shared, persistent and other buffers, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.linear.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self.register_buffer("cache", None)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(self.tied(self.linear(x)))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def trained(seed: int, steps: int = 3) -> tuple[Layer, list[Optimizer]]:
    torch.manual_seed(seed)
    layer = Layer()
    trainable = [p for p in layer.parameters() if p.requires_grad]
    optimizers: list[Optimizer] = [Adam(trainable[:2], lr=0.1), SGD(trainable[2:], lr=0.1, momentum=0.9)]
    for _ in range(steps):
        step(layer, optimizers)
    return layer, optimizers


def step(layer: nn.Module, optimizers: list[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    layer(torch.linspace(0, 1, 24).view(6, 4)).pow(2).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def through_the_wire(tree: Any) -> Any:
    return decode_tree(b"".join(bytes(part) for part in encode_tree(tree)))


def assert_same_module(a: nn.Module, b: nn.Module) -> None:
    for (name, left), (_, right) in zip(
        [*a.named_parameters(), *a.named_buffers()], [*b.named_parameters(), *b.named_buffers()], strict=True
    ):
        assert torch.equal(left, right), name


def test_a_layer_goes_on_elsewhere_as_if_nothing_had_happened() -> None:
    source, source_optimizers = trained(1)
    target, target_optimizers = trained(2)
    drop_layer(target, target_optimizers)
    identities = [id(t) for t in (*target.parameters(), *target.buffers())]

    moved = load_layer(target, target_optimizers, through_the_wire(layer_state(source, source_optimizers)))

    assert moved == layer_bytes(source, source_optimizers) > 0
    assert [id(t) for t in (*target.parameters(), *target.buffers())] == identities
    assert target.tied.weight is target.linear.weight
    assert target.calls == source.calls == 3
    for a, b in zip(source.parameters(), target.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or b.grad is None or torch.equal(a.grad, b.grad)
    assert_same_module(source, target)
    for _ in range(2):
        step(source, source_optimizers)
        step(target, target_optimizers)
    assert_same_module(source, target)


def test_an_absent_layer_keeps_objects_shapes_and_nothing_else() -> None:
    layer, optimizers = trained(1)
    names = set(layer.state_dict())
    before = [(id(t), t.shape, t.dtype, t.requires_grad) for t in (*layer.parameters(), *layer.buffers())]
    assert is_resident(layer)
    drop_layer(layer, optimizers)
    assert not is_resident(layer)
    assert [(id(t), t.shape, t.dtype, t.requires_grad) for t in (*layer.parameters(), *layer.buffers())] == before
    assert set(layer.state_dict()) == names
    for tensor in (*layer.parameters(), *layer.buffers()):
        assert tensor.untyped_storage().nbytes() == tensor.element_size()
        assert not tensor.is_floating_point() or bool(tensor.isnan().all())
    assert all(p.grad is None for p in layer.parameters())
    assert all(not optimizer.state for optimizer in optimizers)
    # What Lightning and optimizers do with a model that is partly absent.
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    twin = copy.deepcopy(layer)
    assert not is_resident(twin)
    layer.double()
    drop_layer(layer, optimizers)
    with pytest.raises(MigrationError, match="does not hold it"):
        layer_state(layer, optimizers)


def test_state_shares_memory_and_loading_does_not() -> None:
    source, optimizers = trained(1)
    state = layer_state(source, optimizers)
    assert state["parameters"]["linear.weight"].data_ptr() == source.linear.weight.data_ptr()
    target, target_optimizers = trained(2)
    load_layer(target, target_optimizers, state)
    assert target.linear.weight.data_ptr() != source.linear.weight.data_ptr()
    arrived = through_the_wire(state)
    load_layer(target, target_optimizers, arrived, copy=False)
    assert target.linear.weight.data_ptr() == arrived["parameters"]["linear.weight"].data_ptr()


def test_a_layer_can_go_and_come_back() -> None:
    layer, optimizers = trained(1)
    twin, twin_optimizers = copy.deepcopy(layer), trained(1)[1]
    away = through_the_wire(layer_state(layer, optimizers))
    drop_layer(layer, optimizers)
    load_layer(layer, optimizers, away)
    assert is_resident(layer)
    assert_same_module(layer, twin)
    assert len(optimizers[0].state) == len(twin_optimizers[0].state)
    assert torch.equal(
        optimizers[0].state[layer.linear.weight]["exp_avg"], away["optimizers"][0]["linear.weight"]["exp_avg"]
    )


def test_a_foreign_state_is_refused_with_the_names() -> None:
    layer, optimizers = trained(1)
    other = nn.Linear(2, 2)
    state = layer_state(layer, optimizers)
    with pytest.raises(MigrationError, match=r"missing .*'weight'"):
        load_layer(other, optimizers, state)
    with pytest.raises(MigrationError, match="2 optimizers"):
        load_layer(layer, optimizers[:1], state)


def test_buffers_that_appear_on_one_side_arrive() -> None:
    source, optimizers = trained(1)
    source.cache = torch.ones(3)
    target, target_optimizers = trained(1)
    load_layer(target, target_optimizers, through_the_wire(layer_state(source, optimizers)))
    assert torch.equal(target.cache, torch.ones(3))
    source.cache = None
    load_layer(target, target_optimizers, through_the_wire(layer_state(source, optimizers)))
    assert target.cache is None


def test_a_redone_step_starts_from_the_buffers_it_started_from() -> None:
    class Mask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("large", torch.zeros(100, 100))
            self.register_buffer("rebound", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.rebound = self.rebound + 1
            return x

    model = nn.Sequential(nn.BatchNorm1d(4), Mask(), nn.Linear(4, 4))
    identities = [id(b) for b in model.buffers()]
    for expected in (0, 7):
        model[1].large.fill_(expected)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        snapshot = snapshot_buffers(list(model))
        for _ in range(3):
            model(torch.randn(6, 4))
        model[1].large.add_(1)
        restore_buffers(list(model), snapshot)
        assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
        assert [id(b) for b in model.buffers()] == identities
    kept = [snapshot_buffers(list(model)) for _ in range(2)]
    values = [next(saved.value for saved in snapshot if saved.name == "large") for snapshot in kept]
    assert values[0] is values[1]  # a large buffer that nobody changes is copied once


def test_absent_layers_are_left_out_of_snapshots() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    drop_layer(model[1])
    snapshot = snapshot_buffers(list(model))
    assert {id(saved.module) for saved in snapshot} == {id(model[0])}
    drop_layer(model[0])
    restore_buffers(list(model), snapshot)
    assert bool(model[0].running_mean.isnan().all())
