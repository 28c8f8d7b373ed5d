"""Seeds and the order of an epoch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from torch.utils.data import BatchSampler

from lightning_parcae.sharding.order import BatchOrder, ReadPosition, derive_seed


def test_seeds_differ_with_every_part_and_fit_into_63_bits():
    seeds = {derive_seed(*parts) for parts in [(1, 23), (12, 3), (123,), ("1", 23), (1, 23, "x"), (1, 23, "y"), (-1,)]}
    assert len(seeds) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_the_same_in_every_process():
    code = "from lightning_parcae.sharding.order import derive_seed; print(derive_seed(3, 'order', 5))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": salt}, capture_output=True, check=True
        ).stdout
        for salt in ("1", "2")
    }
    assert found == {f"{derive_seed(3, 'order', 5)}\n".encode()}


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("num_samples", [0, 1, 5, 6, 7])
def test_batches_are_those_of_torch(num_samples, drop_last):
    order = BatchOrder.from_samples(range(num_samples), 3, drop_last)
    want = list(BatchSampler(range(num_samples), 3, drop_last))
    assert [list(order[batch]) for batch in range(len(order))] == want
    assert BatchOrder.from_batches(want, len(want)).digest == order.digest


def test_any_kind_of_index_is_kept():
    order = BatchOrder.from_batches([["a", "b"], [("c", 1)]], 5)
    assert [order[0], order[1]] == [("a", "b"), (("c", 1),)]
    assert order.digest != BatchOrder.from_batches([["a", "b"], [("c", 2)]], 5).digest


def test_a_batch_sampler_without_end_is_read_up_to_its_length():
    def forever():
        while True:
            yield [1, 2]

    assert len(BatchOrder.from_batches(forever(), 4)) == 4


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="global batch 1 has no samples"):
        BatchOrder.from_batches([[1], [], [2]], 3)


def test_digests_tell_borders_apart():
    assert BatchOrder.from_batches([[1], [2, 3]], 2).digest != BatchOrder.from_batches([[1, 2], [3]], 2).digest


def test_a_plan_says_which_samples_a_pipeline_takes():
    plan = BatchOrder.from_samples(range(20, 30), 10, False).plan(epoch=2, cycle=1, batch=0, micro_batch_size=4)
    assert (plan.epoch, plan.cycle, plan.batch, plan.num_samples) == (2, 1, 0, 10)
    assert plan.microbatches == (range(0, 4), range(4, 8), range(8, 10))
    assert [plan.samples(2, pipeline) for pipeline in range(2)] == [range(0, 8), range(8, 10)]
    assert [plan.samples(4, pipeline) for pipeline in range(4)] == [
        range(0, 4),
        range(4, 8),
        range(8, 10),
        range(0, 0),
    ]


def test_a_position_outside_the_grid_is_refused():
    with pytest.raises(ValueError, match="from 0 to 1, got 2"):
        ReadPosition(version=0, num_pipelines=2, pipeline=2)
