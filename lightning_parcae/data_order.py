"""Which loaders can be read exactly once, and the order in which one is read.

The user's sampler or batch sampler is kept. Its order is drawn under random number generators that are seeded
by ``(seed, epoch, cycle)``, so that every instance draws the same one at any time, also one that joins late.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeGuard

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_parcae.sharding.order import BatchOrder, derive_seed

# samplers whose order is a function of the seeded generators; any other is drawn twice to see whether it is
_KNOWN_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Put the CPU random number generators of this process back at the end; does nothing in a loader worker.

    Saving and restoring all three takes 60 us, most of it numpy's, so do it per batch and not per sample.
    """
    if get_worker_info() is not None:
        yield
        return
    torch_state = torch.default_generator.get_state()
    random_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(random_state)
        np.random.set_state(numpy_state)


def seed_rng(seed: int) -> None:
    """Seed the CPU random number generators of torch, ``random`` and numpy (6 us).

    ``torch.manual_seed`` would take 70 us and reset the accelerators' generators, which belong to the model.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def is_sized(value: object) -> TypeGuard[Sized]:
    """Whether ``len`` works; a class may have ``__len__`` and still raise."""
    try:
        len(value)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return False
    return True


def refuse(loader: object) -> None:
    """Check that a loader can be read exactly once, in the same order by every instance.

    Raises:
        MisconfigurationException: If it cannot; the message names the change to make.
    """
    found = _obstacle(loader)
    if found is None:
        return
    what, change = found
    raise MisconfigurationException(
        f"{what}. The guarantee for its samples would be: none; samples could be repeated or lost after a "
        f"preemption. Change: {change}."
    )


def _obstacle(loader: object) -> tuple[str, str] | None:
    """Return what stands in the way of exact reading and what to change, or None."""
    if not isinstance(loader, DataLoader):
        return (
            f"Parcae needs a torch.utils.data.DataLoader to know which samples a batch holds, got {type(loader)!r}",
            "wrap a map-style dataset into torch.utils.data.DataLoader(dataset, batch_size=<global batch size>)",
        )
    name = f"{type(loader).__name__}({type(loader.dataset).__name__})"
    if type(loader).__iter__ is not DataLoader.__iter__ and not type(loader).__module__.startswith("torchdata."):
        return (
            f"{type(loader).__name__} overrides DataLoader.__iter__, which cannot be continued in the middle",
            "pass a plain DataLoader and move what __iter__ does to the dataset, the sampler or collate_fn",
        )
    if loader.batch_sampler is None:
        return (
            f"{name} has batch_size=None, so the samples of a batch are not known and cannot be shared out",
            "let the dataset return single samples and set batch_size=<global batch size>, or batch_sampler=...",
        )
    if isinstance(loader.dataset, IterableDataset):
        return _iterable_obstacle(loader, name)
    if not is_sized(loader.batch_sampler):
        return (
            f"{name} has a batch sampler without a length, so an epoch has no known end",
            f"define {type(loader.batch_sampler).__name__}.__len__ as the number of global batches of an epoch",
        )
    for sampler in _samplers(loader):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            return (
                f"{name} has a DistributedSampler for {sampler.num_replicas} replicas, so it sees a part of the data",
                "leave it out: batch_size is the global batch size, and Parcae gives each pipeline its part",
            )
    return None


def _iterable_obstacle(loader: DataLoader[Any], name: str) -> tuple[str, str] | None:
    use_map_style = "use a map-style dataset (with __getitem__ and __len__)"
    if not is_sized(loader.dataset):
        return (
            f"{name} reads an iterable dataset without a length, so a position in it cannot be found again",
            f"{use_map_style}, or define __len__ and use num_workers=0",
        )
    if loader.num_workers:
        return (
            f"{name} reads an iterable dataset with num_workers={loader.num_workers}, so the order depends on them",
            f"set num_workers=0, or {use_map_style}",
        )
    return None


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    """Return the loader's distinct sampler objects."""
    found = [loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler]
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


class OrderSource:
    """Draws the order of any epoch of a loader.

    Args:
        loader: A loader that :func:`refuse` lets through.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._samplers = _samplers(loader)
        found = [getattr(owner, "generator", None) for owner in (loader, *self._samplers)]
        generators = {id(found): found for found in found if isinstance(found, torch.Generator)}.values()
        # the seed now: reseeding below changes what initial_seed() says
        self._generators = [(generator, generator.initial_seed()) for generator in generators]
        known = type(loader.batch_sampler) is BatchSampler and type(loader.batch_sampler.sampler) in _KNOWN_SAMPLERS
        self._is_trusted = known

    def draw(self, seed: int, epoch: int, cycle: int) -> BatchOrder:
        """Return the order of one pass over the loader.

        Args:
            seed: Of the job and this loader.
            epoch: Data epoch; handed to ``set_epoch`` of samplers and dataset that have it.
            cycle: Pass over the loader within the epoch.

        Raises:
            MisconfigurationException: If the sampler gives another order the second time.
        """
        for owner in (*self._samplers, self._loader.dataset):
            set_epoch = getattr(owner, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        order = self._draw(seed, epoch, cycle)
        if not self._is_trusted:
            if self._draw(seed, epoch, cycle).digest != order.digest:
                kind = type(self._samplers[-1]).__name__
                raise MisconfigurationException(
                    f"{kind} gave two different orders for epoch {epoch} under the same seeds, so an instance that "
                    "joins later would read other samples. The guarantee for its samples would be: none. Change: let "
                    f"{kind}.__iter__ draw from torch's, random's or numpy's global generator, or from "
                    "(seed, epoch) given by set_epoch, and keep no state from one pass to the next."
                )
            self._is_trusted = True
        return order

    def _draw(self, seed: int, epoch: int, cycle: int) -> BatchOrder:
        loader = self._loader
        with isolated_rng():
            states = [generator.get_state() for generator, _ in self._generators]
            try:
                seed_rng(derive_seed(seed, epoch, cycle, "order"))
                for generator, own_seed in self._generators:
                    generator.manual_seed(derive_seed(seed, epoch, cycle, own_seed, "generator"))
                return self._list_batches(loader)
            finally:
                for (generator, _), state in zip(self._generators, states, strict=True):
                    generator.set_state(state)

    @staticmethod
    def _list_batches(loader: DataLoader[Any]) -> BatchOrder:
        batch_sampler: Any = loader.batch_sampler
        if isinstance(loader.dataset, IterableDataset):
            indices = range(len(loader.dataset))  # type: ignore[arg-type]
            return BatchOrder.from_samples(indices, batch_sampler.batch_size, batch_sampler.drop_last)
        if type(batch_sampler) is BatchSampler:  # the same batches, five times faster
            return BatchOrder.from_samples(batch_sampler.sampler, batch_sampler.batch_size, batch_sampler.drop_last)
        return BatchOrder.from_batches(batch_sampler, len(batch_sampler))
