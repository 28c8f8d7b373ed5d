"""Finding, checking and cutting the pipelined module."""

from __future__ import annotations

import copy
import itertools
import pickle
import random

import pytest
import torch
from torch import nn

from lightning_parcae.engine.partition import (
    PipelinedSequential,
    check_pipeline,
    find_sequential,
    fingerprint,
    layer_costs,
    parameter_bytes,
    stage_boundaries,
)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))


def test_the_outermost_sequential_is_found() -> None:
    assert find_sequential(Nested(), None) == "inner.net"
    assert find_sequential(Nested(), "inner.net") == "inner.net"


def test_a_subclass_with_its_own_forward_is_refused() -> None:
    class Residual(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input + super().forward(input)

    module = nn.Module()
    module.net = Residual(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"Residual with its own forward\(\)"):
        check_pipeline(module, "net", batch_norm=None)


def test_an_empty_sequential_and_a_repeated_layer_are_refused() -> None:
    module = nn.Module()
    module.net = nn.Sequential()
    with pytest.raises(ValueError, match="is empty"):
        check_pipeline(module, "net", batch_norm=None)
    layer = nn.Linear(2, 2)
    module.net = nn.Sequential(layer, nn.ReLU(), layer)
    with pytest.raises(ValueError, match="cannot be cut"):
        check_pipeline(module, "net", batch_norm=None)


def test_frozen_parameters_may_lie_outside() -> None:
    module = nn.Module()
    module.net = nn.Sequential(nn.Linear(2, 2))
    module.encoder = nn.Linear(2, 2).requires_grad_(False)
    check_pipeline(module, "net", batch_norm=None)


def test_the_replacement_keeps_names_modes_and_values() -> None:
    plain = nn.Sequential(nn.Linear(2, 3), nn.Dropout(), nn.Linear(3, 1)).eval()
    ours = PipelinedSequential(plain)
    x = torch.randn(4, 2)
    assert ours.state_dict().keys() == plain.state_dict().keys()
    assert not ours.training
    assert torch.equal(ours(x), plain(x))
    ours.set_route(lambda value: value * 0)
    assert not ours(x).any()
    twin = copy.deepcopy(ours)  # the copy is no part of the pipeline
    assert torch.equal(twin(x), plain(x))
    ours.set_route(None)
    assert torch.equal(ours(x), plain(x))


def test_costs_are_positive_and_measured_on_request() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 1))
    by_size = layer_costs(net, None)
    assert by_size[0] > by_size[2] > by_size[1] > 0
    assert all(cost > 0 for cost in layer_costs(net, torch.randn(4, 64)))
    assert parameter_bytes(net[0]) == 4 * (64 * 64 + 64)


def test_boundaries_are_the_best_there_are() -> None:
    random.seed(3)
    for _ in range(40):
        costs = [random.choice([1, 1, 10, 300, 1000]) * random.random() + 1e-9 for _ in range(random.randint(1, 8))]
        for num_stages in range(1, len(costs) + 1):
            found = stage_boundaries(costs, num_stages)
            cuts = itertools.combinations(range(1, len(costs)), num_stages - 1)
            best = min(highest(costs, (0, *cut, len(costs))) for cut in cuts)
            assert highest(costs, found) <= best * (1 + 1e-6)
            assert found[0] == 0 and found[-1] == len(costs) and len(found) == num_stages + 1
            assert all(left < right for left, right in itertools.pairwise(found))


def highest(costs: list[float], boundaries: tuple[int, ...]) -> float:
    return max(sum(costs[left:right]) for left, right in itertools.pairwise(boundaries))


def test_equal_layers_give_even_stages() -> None:
    assert stage_boundaries([1.0] * 10, 4) in [(0, 2, 4, 7, 10), (0, 3, 5, 8, 10), (0, 3, 6, 8, 10), (0, 2, 5, 7, 10)]


def test_the_fingerprint_names_shapes_and_settings() -> None:
    module = nn.Module()
    module.net = nn.Sequential(nn.Linear(2, 2))
    first = fingerprint(module, "net", [1, None])
    assert fingerprint(copy.deepcopy(module), "net", [1, None]) == first
    assert fingerprint(module, "net", [2, None]) != first
    module.net = nn.Sequential(nn.Linear(2, 3))
    assert fingerprint(module, "net", [1, None]) != first


def test_slices_and_sums_are_plain_sequentials() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    pipelined = PipelinedSequential(plain)
    assert type(pipelined[1:]) is nn.Sequential
    assert list(pipelined[1:].state_dict()) == list(plain[1:].state_dict()) == ["2.weight", "2.bias"]
    assert pipelined[-1] is plain[-1]
    assert len(pipelined + nn.Sequential(nn.ReLU())) == 4
    assert len(pipelined * 2) == 6
    pipelined.append(nn.ReLU()).insert(1, nn.ReLU())
    assert len(pipelined) == 5


def test_a_guard_watches_the_state_and_does_not_travel() -> None:
    module = nn.Module()
    module.net = PipelinedSequential(nn.Sequential(nn.Linear(2, 2)))
    calls: list[int] = []
    module.net.set_guard(lambda: calls.append(1))
    module.state_dict()
    module.net.state_dict()
    assert len(calls) == 2
    copy.deepcopy(module).state_dict()
    pickle.loads(pickle.dumps(module)).state_dict()
    assert len(calls) == 2


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_hooks_on_the_pipelined_module_are_refused_and_on_its_layers_are_not(kind: str) -> None:
    module = nn.Module()
    module.net = nn.Sequential(nn.Linear(2, 2))
    getattr(module.net[0], f"register_{kind}")(lambda *args: None)
    check_pipeline(module, "net", batch_norm=None)
    getattr(module.net, f"register_{kind}")(lambda *args: None)
    with pytest.raises(ValueError, match=r"net itself has .* hooks"):
        check_pipeline(module, "net", batch_norm=None)


def test_parameters_without_a_shape_are_refused() -> None:
    module = nn.Module()
    module.net = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"net\.0\.weight, net\.0\.bias have no shape yet.*run one batch"):
        check_pipeline(module, "net", batch_norm=None)
    module.net(torch.zeros(1, 3))
    check_pipeline(module, "net", batch_norm=None)
