"""Running statistics over pipelines against one process that sees every micro-batch."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchgpipe.batchnorm import DeferredBatchNorm

from lightning_parcae.engine.batch_norms import Share, before_step, check_momentum, combine, running_norms

SIZES = (4, 4, 4, 3)


class Replicas:
    """Sums over threads, in the order of the replicas."""

    def __init__(self, size: int) -> None:
        self.parts: list[list[Tensor] | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def of(self, index: int) -> Any:
        group = self

        class Member:
            def all_reduce_sum(self, tensors: list[Tensor]) -> None:
                group.parts[index] = [tensor.clone() for tensor in tensors]
                group.barrier.wait()
                for position, tensor in enumerate(tensors):
                    tensor.copy_(sum(part[position] for part in group.parts if part is not None))
                group.barrier.wait()

        return Member()


def micro_batches(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(size, 3, generator=generator, dtype=torch.float64) * 2 + step for size in SIZES]


def train(layer: nn.Module, parts: list[Tensor], deferred: bool) -> None:
    if deferred:
        layer.chunks = len(parts)
    for part in parts:
        layer(part)


def build(deferred: bool) -> nn.Module:
    norm = nn.BatchNorm1d(3, momentum=0.3).double()
    if not deferred:
        return norm
    twin = DeferredBatchNorm.convert_deferred_batch_norm(norm)
    twin.sum, twin.sum_squares = twin.sum.double(), twin.sum_squares.double()
    return twin


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("shares", [[range(0, 2), range(2, 4)], [range(0, 3), range(3, 4), range(4, 4)]])
def test_replicas_follow_one_process(deferred: bool, shares: list[range]) -> None:
    alone = build(deferred)
    replicas = [copy.deepcopy(alone) for _ in shares]
    for step in range(3):
        parts = micro_batches(step)
        train(alone, parts, deferred)
        group = Replicas(len(shares))

        def work(index: int, parts: list[Tensor] = parts, group: Replicas = group) -> None:
            norms = running_norms([replicas[index]])
            before = before_step(norms)
            share = shares[index]
            train(replicas[index], [parts[k] for k in share], deferred)
            weight = sum(SIZES[k] for k in share) / sum(SIZES)
            combine(norms, before, Share(share, len(SIZES), weight), group.of(index), deferred=deferred)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(shares))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        for replica in replicas:
            assert torch.allclose(replica.running_mean, alone.running_mean, rtol=0, atol=1e-12)
            assert torch.allclose(replica.running_var, alone.running_var, rtol=0, atol=1e-12)
            assert replica.num_batches_tracked == alone.num_batches_tracked


def test_norms_without_statistics_are_left_alone() -> None:
    layers = [nn.Sequential(nn.BatchNorm1d(3)), nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(2, 2)]
    assert running_norms(layers) == [layers[0][0]]
    combine([], [], Share(range(1), 1, 1.0), None, deferred=True)  # type: ignore[arg-type]


def test_a_cumulative_mean_is_refused() -> None:
    check_momentum([nn.BatchNorm1d(3)])
    with pytest.raises(ValueError, match="give it a momentum"):
        check_momentum([nn.BatchNorm1d(3, momentum=None)])
