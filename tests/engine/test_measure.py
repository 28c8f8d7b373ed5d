"""Measuring layers: plausible numbers, and nothing left behind."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_parcae.engine.measure import measure_layers, resident_bytes
from lightning_parcae.planning.profile import ModelProfile, profile_from_json


def make_layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 256),
        nn.BatchNorm1d(256),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(256, 2048),
        nn.Linear(2048, 4),
    )


def state_of(layers: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in layers.state_dict().items()}


def test_measures_every_layer() -> None:
    layers = make_layers()
    costs = measure_layers(list(layers), torch.randn(8, 16))
    assert len(costs) == len(layers)
    assert all(cost.forward_s > 0 for cost in costs)
    assert costs[4].forward_s + costs[4].backward_s > costs[2].forward_s + costs[2].backward_s
    assert [cost.output_bytes for cost in costs] == [8 * 4 * n for n in (256, 256, 256, 256, 2048, 4)]
    assert costs[0].parameter_bytes == 4 * (16 * 256 + 256)
    assert costs[0].state_bytes == 3 * costs[0].parameter_bytes
    assert costs[2].parameter_bytes == 0 and costs[2].update_s == 0.0 < costs[4].update_s
    assert costs[5].activation_bytes >= 8 * 4 * 2048  # its input


def test_leaves_nothing_behind() -> None:
    layers = make_layers()
    first = layers.get_parameter("0.weight")
    first.grad = torch.ones_like(first)
    layers.get_parameter("4.weight").requires_grad_(False)
    before = state_of(layers)
    sample = torch.randn(8, 16)
    kept = sample.clone()
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    measure_layers(list(layers), sample)
    assert torch.equal(sample, kept) and sample.grad is None
    assert all(torch.equal(value, before[name]) for name, value in layers.state_dict().items())
    assert torch.equal(first.grad, torch.ones_like(first))
    assert [name for name, parameter in layers.named_parameters() if parameter.grad is not None] == ["0.weight"]
    assert random.getstate() == states[0] and (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])


def test_is_cheap() -> None:
    layers = [nn.Linear(512, 512) for _ in range(24)]
    torch.optim.AdamW(layers[0].parameters())  # the first one of a process takes seconds; in a job it is the user's
    started = time.monotonic()
    measure_layers(layers, torch.randn(64, 512))
    assert time.monotonic() - started < 2.0  # 0.05 s where nobody else works


class _Pair(nn.Module):
    def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, index


class _Join(nn.Module):
    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return x[index]


def test_tuples_and_whole_numbers_travel() -> None:
    sample = (torch.randn(5, 3), torch.tensor([4, 0]))
    costs = measure_layers([_Pair(), _Join(), nn.Linear(3, 2)], sample)
    assert [cost.output_bytes for cost in costs] == [5 * 3 * 4 + 2 * 8, 2 * 3 * 4, 2 * 2 * 4]


def test_embedding_of_whole_numbers() -> None:
    costs = measure_layers([nn.Embedding(50, 8), nn.Linear(8, 8)], torch.randint(0, 50, (4, 6)))
    assert costs[0].backward_s > 0 and costs[0].output_bytes == 4 * 6 * 8 * 4


@pytest.mark.parametrize("sample", [None, {"x": torch.ones(1)}, torch.randn(8, 3)])
def test_guesses_what_cannot_be_measured(sample: Any, caplog: pytest.LogCaptureFixture) -> None:
    layers = [nn.Linear(16, 256), nn.Linear(256, 2048)]
    costs = measure_layers(layers, sample)
    assert 0 < costs[0].forward_s < costs[1].forward_s
    assert costs[1].state_bytes == 3 * costs[1].parameter_bytes
    assert ("could not be measured" in caplog.text) == isinstance(sample, Tensor)


def test_makes_a_profile_that_survives_json() -> None:
    costs = measure_layers(list(make_layers()), torch.randn(8, 16))
    profile = ModelProfile("toy", tuple(costs), num_samples=64, num_microbatches=8)
    assert profile_from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4), nn.Sigmoid()],
        [nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.LayerNorm(64)],
        [nn.Linear(16, 64), nn.Softmax(-1), nn.Tanh(), nn.Flatten(), nn.Identity(), nn.GELU()],
    ],
)
def test_activations_add_up_to_what_autograd_keeps_of_the_whole(layers: list[nn.Module]) -> None:
    net, sample = nn.Sequential(*layers), torch.randn(32, 16)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*net.parameters(), *net.buffers())}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(sample)
    assert sum(cost.activation_bytes for cost in measure_layers(layers, sample)) == sum(kept.values())


@pytest.mark.parametrize(("kind", "num_states"), [(torch.optim.SGD, 0), (torch.optim.AdamW, 2)])
def test_resident_bytes_are_those_of_the_optimizer_that_runs(kind: Any, num_states: int) -> None:
    layer = nn.BatchNorm1d(64)
    optimizer = kind(layer.parameters(), lr=0.1)
    layer(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    steps = 2 * 4 if num_states else 0  # a number for each parameter
    buffers = 2 * 64 * 4 + 8
    assert resident_bytes(layer, [optimizer]) == (1 + num_states) * 2 * 64 * 4 + steps + buffers
    assert not set(layer.parameters()) - set(optimizer.state) or num_states == 0
