"""Which loaders are refused, and that samplers are kept."""

from __future__ import annotations

import itertools

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler, SubsetRandomSampler

from lightning_parcae.data_order import OrderSource, refuse


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Sized(Endless):
    def __len__(self):
        return 10


class OwnLoop(DataLoader):
    def __iter__(self):
        return iter(range(3))


class Unsized:
    def __iter__(self):
        yield [1]


@pytest.mark.parametrize(
    ("loader", "found"),
    [
        ([torch.ones(2)], "got <class 'list'>"),
        (OwnLoop(range(4)), r"overrides DataLoader.__iter__"),
        (DataLoader(range(4), batch_size=None), "has batch_size=None"),
        (DataLoader(Sized(), batch_size=None), "has batch_size=None"),
        (DataLoader(Endless(), batch_size=2), "iterable dataset without a length"),
        (DataLoader(Sized(), batch_size=2, num_workers=1), "num_workers=1, so the order depends on them"),
        (DataLoader(range(4), batch_sampler=Unsized()), "batch sampler without a length"),
        (DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 1)), "DistributedSampler for 2 replicas"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_guarantee_and_the_change(loader, found):
    lost = "guarantee for its samples would be: none; samples could be repeated or lost after a preemption. Change: "
    with pytest.raises(MisconfigurationException, match=f"{found}.*{lost}"):
        refuse(loader)


def test_other_loaders_are_let_through():
    refuse(DataLoader(Sized(), batch_size=2))
    refuse(DataLoader(range(4), batch_size=2, sampler=DistributedSampler(range(4), 1, 0)))
    refuse(DataLoader(range(4), batch_sampler=[[0, 1], [3]]))


def _batches(loader, seed=1, epoch=0, cycle=0):
    order = OrderSource(loader).draw(seed, epoch, cycle)
    return [list(order[batch]) for batch in range(len(order))]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(range(10), batch_size=3, shuffle=True),
        lambda: DataLoader(range(10), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(4)),
        lambda: DataLoader(range(10), batch_size=3, sampler=SubsetRandomSampler([1, 3, 5, 7, 9])),
        lambda: DataLoader(range(10), batch_sampler=BatchSampler(SubsetRandomSampler(range(10)), 4, True)),
    ],
)
def test_an_order_is_a_function_of_seed_epoch_and_cycle(make):
    names = list(itertools.product((1, 2), (0, 1), (0, 1)))
    fresh = [_batches(make(), *name) for name in names]
    one = OrderSource(make())
    assert [one.draw(*name).digest for name in reversed(names)] == [
        OrderSource(make()).draw(*name).digest for name in reversed(names)
    ]
    assert len({str(batches) for batches in fresh}) == len(names)
    plain = list(make().batch_sampler)
    assert list(map(len, fresh[0])) == list(map(len, plain))


def test_batches_of_a_list_are_taken_as_they_are():
    assert _batches(DataLoader(range(9), batch_sampler=[[0, 1], [8]])) == [[0, 1], [8]]


class CountsPasses(Sampler):
    def __init__(self):
        self.passes = 0

    def __len__(self):
        return 4

    def __iter__(self):
        self.passes += 1
        return iter([(index + self.passes) % 4 for index in range(4)])


class FollowsEpoch(CountsPasses):
    def set_epoch(self, epoch):
        self.passes = epoch - 1

    def __iter__(self):
        return iter([(index + self.passes) % 4 for index in range(4)])


def test_a_sampler_that_keeps_its_own_count_is_refused_and_one_that_follows_the_epoch_is_not():
    with pytest.raises(MisconfigurationException, match="CountsPasses gave two different orders for epoch 0"):
        _batches(DataLoader(range(4), sampler=CountsPasses()))
    source = OrderSource(DataLoader(range(4), batch_size=4, sampler=FollowsEpoch()))
    assert [source.draw(1, epoch, 0)[0] for epoch in (0, 2)] == [(3, 0, 1, 2), (1, 2, 3, 0)]
