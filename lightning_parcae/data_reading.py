"""Reading one instance's part of a global batch, the same bits wherever and whenever it is read.

Every sample (or, for a dataset with ``__getitems__``, every micro-batch) is read with the CPU random number
generators seeded by its place in the seeded order. So unseeded augmentation depends neither on the layout nor
on the loader's workers, and a batch that is read again is the same batch.
"""

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from multiprocessing.sharedctypes import RawValue
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from lightning_parcae.data_order import isolated_rng, seed_rng
from lightning_parcae.sharding.order import BatchPlan, derive_seed

# datasets that draw nothing: their samples need no seeds (8 us each, more than reading one takes)
_PLAIN_DATASETS = (TensorDataset, list, tuple, range, Tensor, np.ndarray)


class Part(NamedTuple):
    """What one instance reads of a global batch."""

    batch: int
    first: int
    """Position of the first sample within the global batch."""
    indices: tuple[Any, ...]
    sizes: tuple[int, ...]
    """Samples of each micro-batch."""


def part_of(plan: BatchPlan, micro: range) -> Part:
    """Return the part of a global batch that holds some consecutive micro-batches, at least one."""
    pieces = plan.microbatches[micro.start : micro.stop]
    indices = plan.indices[pieces[0].start : pieces[-1].stop]
    return Part(plan.batch, pieces[0].start, indices, tuple(map(len, pieces)))


class ReadingStoppedError(Exception):
    """A worker was told to stop in the middle of a batch that nobody wants any more; never seen by users."""


class StopFlag:
    """Tells the workers of a loader to give up the batch they are reading (one shared byte, 0.1 us to look).

    Args:
        is_shared: Whether there will be workers; shared memory takes a temporary file.
    """

    def __init__(self, is_shared: bool) -> None:
        self._raw = RawValue(ctypes.c_bool, False) if is_shared else ctypes.c_bool(False)

    def set(self, stop: bool) -> None:
        """Raise or lower the flag."""
        self._raw.value = stop

    def check(self) -> None:
        """Raise :class:`ReadingStoppedError` in a worker if the flag is up."""
        if self._raw.value and get_worker_info() is not None:
            raise ReadingStoppedError


class SampleReader(Dataset[Any]):
    """The dataset that torch's workers see: its index is a :class:`Part`, its sample a collated batch.

    Args:
        loader: The user's loader.
        seed: Of this pass, from the job's seed, the epoch and the cycle.
        stop: Shared with the workers.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, stop: StopFlag) -> None:
        # not the loader itself: with "spawn" all of this is pickled, and a sampler may not be picklable
        self.dataset: Any = loader.dataset
        self._collate: Any = loader.collate_fn
        self._seed = seed
        self._stop = stop

    def __getitem__(self, part: Part) -> Any:
        with isolated_rng():
            samples = self._read(part)
            seed_rng(derive_seed(self._seed, part.batch, part.first, "collate"))
            return self._collate(samples)

    def __getitems__(self, part: Part) -> Any:
        # torch hands a whole batch (here: what our batch sampler yields, a Part) to __getitems__ if there is one
        return self[part]

    def _read(self, part: Part) -> list[Any]:
        dataset, position = self.dataset, part.first
        samples: list[Any] = []
        if getattr(dataset, "__getitems__", None):
            for size in part.sizes:  # whole micro-batches: a layout must not show in how many are asked for at once
                self._stop.check()
                seed_rng(derive_seed(self._seed, part.batch, position))
                taken = position - part.first
                samples.extend(dataset.__getitems__(list(part.indices[taken : taken + size])))
                position += size
            return samples
        if type(dataset) in _PLAIN_DATASETS:
            return [dataset[index] for index in part.indices]
        for index in part.indices:
            self._stop.check()
            seed_rng(derive_seed(self._seed, part.batch, position))
            samples.append(dataset[index])
            position += 1
        return samples


class Parts:
    """The batch sampler of an inner loader: this instance's part of each remaining global batch.

    Args:
        batches: Numbers of the global batches.
        plan: Returns the plan of one.
        place: ``(D, d)``, number of pipelines and the one to read for; batches without a share are left out.
    """

    def __init__(self, batches: range, plan: Callable[[int], BatchPlan], place: tuple[int, int]) -> None:
        self._batches, self._plan, self._place = batches, plan, place

    def __iter__(self) -> Iterator[Part]:
        for batch in self._batches:
            plan = self._plan(batch)
            micro = plan.share(*self._place)
            if micro:
                yield part_of(plan, micro)


class StreamReader(IterableDataset[Any]):
    """Reads whole global batches of an iterable dataset, from a given one on.

    Args:
        loader: The user's loader, with ``num_workers=0``.
        seed: Of this pass.
        sizes: Samples of every global batch of the pass.
        first: The global batch to start with; what comes before is read and thrown away.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, sizes: list[int], first: int) -> None:
        self._loader, self._seed, self._sizes, self._first = loader, seed, sizes, first

    def __iter__(self) -> Iterator[Any]:
        with isolated_rng():
            seed_rng(derive_seed(self._seed, "stream"))
            stream = iter(self._loader.dataset)
        for batch, size in enumerate(self._sizes):
            with isolated_rng():
                samples = self._read(stream, batch, size)
                if batch < self._first:
                    continue
                seed_rng(derive_seed(self._seed, batch, 0, "collate"))
                collated = self._loader.collate_fn(samples)
            yield collated

    def _read(self, stream: Iterator[Any], batch: int, size: int) -> list[Any]:
        samples = []
        for position in range(size):
            seed_rng(derive_seed(self._seed, batch, position))
            try:
                samples.append(next(stream))
            except StopIteration:
                dataset: Any = self._loader.dataset
                raise MisconfigurationException(
                    f"{type(dataset).__name__} says it has {len(dataset)} samples, but its stream ended after "
                    f"{sum(self._sizes[:batch]) + position}. Change: let __len__ return what __iter__ yields."
                ) from None
        return samples


class WorkerInit:
    """Runs the user's ``worker_init_fn`` as in a plain loader.

    torch has seeded the worker from our own generator then, so that nothing depends on the rank; every sample
    is seeded again when it is read.
    """

    def __init__(self, function: Any) -> None:
        if isinstance(function, functools.partial) and "rank" in function.keywords:
            # Lightning adds its own with the rank of the moment, which a joiner does not share
            function = functools.partial(function.func, *function.args, **{**function.keywords, "rank": 0})
        self._function = function

    def __call__(self, worker_id: int) -> None:
        """Run in a worker that has just started."""
        info: Any = get_worker_info()
        if info is not None:
            # the user's function looks for the user's dataset; WorkerInfo refuses plain assignment
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._function is not None:
            self._function(worker_id)


def _unchanged(batch: Any) -> Any:
    return batch


def open_inner(loader: DataLoader[Any], parts: Any, reader: Dataset[Any], seed: int, in_process: bool) -> Iterator[Any]:
    """Open an iterator of collated batches that keeps the settings of the user's loader.

    Args:
        loader: The user's loader.
        parts: What to read, for a :class:`SampleReader`; None for a :class:`StreamReader`.
        reader: Reads it.
        seed: For the workers' base seed, so that the process's own generator is not touched.
        in_process: Read here even if the user's loader has workers.
    """
    settings: dict[str, Any] = {"pin_memory": loader.pin_memory, "collate_fn": _unchanged}
    settings["generator"] = torch.Generator().manual_seed(seed)
    if loader.pin_memory and loader.pin_memory_device:
        settings["pin_memory_device"] = loader.pin_memory_device
    if loader.num_workers and not in_process:
        settings.update(
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            timeout=loader.timeout,
            multiprocessing_context=loader.multiprocessing_context,
            worker_init_fn=WorkerInit(loader.worker_init_fn),
        )
    how: dict[str, Any] = {"batch_size": None} if parts is None else {"batch_sampler": parts}
    return iter(DataLoader(reader, **how, **settings))


def close_inner(iterator: Iterator[Any] | None, stop: StopFlag) -> None:
    """End the workers of an iterator now; waits for the sample each one is reading, not for its batch."""
    shutdown = getattr(iterator, "_shutdown_workers", None)
    if shutdown is None:
        return
    stop.set(True)
    try:
        shutdown()
    finally:
        stop.set(False)


def cut_batch(batch: Any, samples: range, num_samples: int) -> Any:
    """Take some samples of a collated batch: slice what has ``num_samples`` entries along dimension 0.

    Args:
        batch: Tensors, arrays and lists of samples in dicts, lists and tuples; other leaves are kept.
        samples: Which ones, consecutive.
        num_samples: Samples of ``batch``.

    Raises:
        MisconfigurationException: If a tensor or array has another length than the batch.
    """
    return _cut(batch, samples, num_samples, "batch")


def _cut(value: Any, samples: range, total: int, path: str) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim == 0:
            return value
        if value.shape[0] != total:
            raise MisconfigurationException(
                f"cannot share out {path}: dimension 0 is {value.shape[0]}, but the global batch has {total} samples. "
                "Change: let collate_fn put the samples along dimension 0 of every tensor."
            )
        return value[samples.start : samples.stop]
    if isinstance(value, Mapping):
        items = {key: _cut(entry, samples, total, f"{path}[{key!r}]") for key, entry in value.items()}
        if isinstance(value, dict) or not isinstance(value, MutableMapping):
            return items
        same_kind = copy.copy(value)  # such as a tokenizer's BatchEncoding
        same_kind.update(items)
        return same_kind
    if isinstance(value, tuple):
        entries = [_cut(entry, samples, total, f"{path}[{number}]") for number, entry in enumerate(value)]
        return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
    if isinstance(value, list):
        if len(value) == total and not all(_is_batched(entry, total) for entry in value):
            return value[samples.start : samples.stop]
        return [_cut(entry, samples, total, f"{path}[{number}]") for number, entry in enumerate(value)]
    return value


def _is_batched(value: Any, total: int) -> bool:
    """Whether an entry of a list holds all samples by itself (then the list is no list of samples)."""
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0 and value.shape[0] == total
    if isinstance(value, Mapping):
        return all(_is_batched(entry, total) for entry in value.values())
    if isinstance(value, tuple | list):
        return len(value) == total or all(_is_batched(entry, total) for entry in value)
    return False


def tensor_versions(batch: Any) -> list[int]:
    """Return how often each tensor of a batch was changed in place; a change of a slice counts for the whole."""
    if isinstance(batch, Tensor):
        return [] if batch.is_inference() else [batch._version]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return [version for entry in batch for version in tensor_versions(entry)]
    return []
