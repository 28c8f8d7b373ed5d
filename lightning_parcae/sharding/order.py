"""The seeded order of an epoch: every instance draws the same one, whatever it reads itself.

An order is named by ``(seed, epoch, cycle)``; *cycle* counts the passes over a loader that end within one
epoch (a short loader beside a long one starts again).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

from lightning_parcae.sharding.microbatches import cut, default_micro_batch_size, share


def derive_seed(*parts: int | str) -> int:
    """Return a seed that depends on all parts and on nothing else.

    Built-in ``hash`` differs from process to process for strings; this does not.

    Args:
        parts: What the seed is for, e.g. ``(seed, epoch, batch)``.

    Returns:
        A seed from 0 to ``2**63 - 1``.
    """
    # repr keeps 1 and "1", and (12, 3) and (1, 23), apart
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """What an instance has to read of each global batch.

    Attributes:
        version: Grows whenever the position of any instance changes.
        num_pipelines: Pipelines that share the global batch, at least 1.
        pipeline: The pipeline this instance reads for, from 0 to ``num_pipelines - 1``.
    """

    version: int
    num_pipelines: int
    pipeline: int

    def __post_init__(self) -> None:
        if not 0 <= self.pipeline < self.num_pipelines:
            raise ValueError(f"pipeline must be from 0 to {self.num_pipelines - 1}, got {self.pipeline}")


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One global batch of the seeded order.

    Attributes:
        epoch: Data epoch.
        cycle: Pass over the loader within the epoch.
        batch: Number of the global batch within the pass.
        indices: Dataset indices of its samples, in order; positions in the stream for an iterable dataset.
        microbatches: Sample positions of each global micro-batch, see :func:`~.microbatches.cut`.
    """

    epoch: int
    cycle: int
    batch: int
    indices: tuple[Any, ...]
    microbatches: tuple[range, ...]

    @property
    def num_samples(self) -> int:
        """Samples of the global batch."""
        return len(self.indices)

    def share(self, num_pipelines: int, pipeline: int) -> range:
        """Return the numbers of the micro-batches that a pipeline takes; may be empty."""
        return share(len(self.microbatches), num_pipelines, pipeline)

    def samples(self, num_pipelines: int, pipeline: int) -> range:
        """Return the sample positions (within the global batch) that a pipeline takes; may be empty."""
        taken = self.share(num_pipelines, pipeline)
        if not taken:
            return range(0)
        return range(self.microbatches[taken[0]].start, self.microbatches[taken[-1]].stop)


class BatchOrder:
    """The global batches of one pass over a dataset, kept in 8 bytes per sample where indices are integers.

    Args:
        indices: Dataset indices of all samples in order.
        ends: Where each batch ends in ``indices``, increasing.

    Raises:
        ValueError: If a batch is empty.
    """

    def __init__(self, indices: array[int] | list[Any], ends: array[int]) -> None:
        for number, end in enumerate(ends):
            if end <= (ends[number - 1] if number else 0):
                raise ValueError(f"global batch {number} has no samples; a batch needs at least 1")
        self._indices = indices
        self._ends = ends

    @classmethod
    def from_samples(cls, indices: Iterable[Any], batch_size: int, drop_last: bool) -> BatchOrder:
        """Cut a sequence of indices into batches as torch's ``BatchSampler`` does."""
        flat = _compact(indices)
        if drop_last and len(flat) % batch_size:
            del flat[-(len(flat) % batch_size) :]
        num_samples = len(flat)
        ends = array("q", range(batch_size, num_samples + 1, batch_size))
        if num_samples % batch_size:
            ends.append(num_samples)
        return cls(flat, ends)

    @classmethod
    def from_batches(cls, batches: Iterable[Iterable[Any]], limit: int) -> BatchOrder:
        """Take at most ``limit`` batches of indices as they come (a batch sampler may have no end)."""
        flat: list[Any] = []
        ends: array[int] = array("q")
        for batch in islice(batches, limit):
            flat.extend(batch)
            ends.append(len(flat))
        return cls(_compact(flat), ends)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, batch: int) -> tuple[Any, ...]:
        start = self._ends[batch - 1] if batch else 0
        return tuple(self._indices[start : self._ends[batch]])

    def plan(self, *, epoch: int, cycle: int, batch: int, micro_batch_size: int | None) -> BatchPlan:
        """Return one global batch with its micro-batches.

        Args:
            epoch: Data epoch of this order.
            cycle: Pass within the epoch.
            batch: From 0 to ``len(self) - 1``.
            micro_batch_size: Samples of a micro-batch; None cuts each batch into at most 8.
        """
        indices = self[batch]
        size = default_micro_batch_size(len(indices)) if micro_batch_size is None else micro_batch_size
        return BatchPlan(epoch, cycle, batch, indices, cut(len(indices), size))

    @property
    def digest(self) -> str:
        """A short hash of the order; two instances with different ones would not read the same samples."""
        flat = self._indices
        content = flat.tobytes() if isinstance(flat, array) else repr(flat).encode()
        return blake2b(content + self._ends.tobytes(), digest_size=8).hexdigest()


def _compact(indices: Iterable[Any]) -> array[int] | list[Any]:
    """Return the indices as 64-bit integers if they are integers, unchanged otherwise."""
    kept = indices if isinstance(indices, range | list) else list(indices)
    try:
        return array("q", kept)
    except (TypeError, OverflowError):
        return list(kept)
