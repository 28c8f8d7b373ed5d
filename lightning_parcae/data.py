"""The loader that stands in for the user's: it gives each pipeline its part of every global batch.

The user's ``batch_size`` is the *global* batch. The position counts global batches handed to Lightning, so a
change of the layout, a checkpoint or a joiner needs three numbers (epoch, cycle, batch), and what workers had
prefetched beyond it was never seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, IterableDataset

from lightning_parcae.data_order import OrderSource, refuse
from lightning_parcae.data_reading import (
    Part,
    Parts,
    SampleReader,
    StopFlag,
    StreamReader,
    close_inner,
    cut_batch,
    open_inner,
    part_of,
    tensor_versions,
)
from lightning_parcae.sharding.order import BatchOrder, BatchPlan, ReadPosition, derive_seed

__all__ = ["AbsentBatch", "BatchPlan", "ElasticLoader", "ReadPosition", "refuse"]

_log = logging.getLogger(__name__)


class AbsentBatch:
    """Stands for a batch on an instance that does not read it (Lightning skips the step on None).

    Args:
        reason: Why there is no batch here.
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"AbsentBatch({self.reason!r})"

    def __getattr__(self, name: str) -> NoReturn:
        # copying and pickling look for dunder names, and for "reason" before it is set
        if name.startswith("__") or name == "reason":
            raise AttributeError(name)
        raise AttributeError(f"this instance has no batch to take .{name} from: {self.reason}")

    def __getitem__(self, key: object) -> NoReturn:
        # also reached by unpacking; __iter__ would make Lightning look for a batch size in it
        raise TypeError(f"this instance has no batch to take [{key!r}] from: {self.reason}")


class ElasticLoader:
    """Hands out one pipeline's part of every global batch of a loader, and can change the part at any batch.

    Args:
        loader: The user's loader; its dataset, sampler, workers and collate function are kept.
        seed: Names the order and the augmentation. Give different loaders of a job different seeds.
        micro_batch_size: Samples of a global micro-batch, at least 1; None cuts each batch into at most 8.
        position: Returns what this instance has to read now; None if it reads nothing.
        boundary: Called at the start of each ``__next__`` that has a batch left, before anything is read. It may
            block, change what ``position`` returns, and call :meth:`jump`.
        is_training: Whether passes over the loader within one epoch differ. False for validation, testing and
            prediction, where every pass is alike: a joiner has not counted the ones before it came.
        whole_batches: Read and collate the whole global batch everywhere and cut it then, so that a
            ``collate_fn`` that looks at all samples (random masks, padding) does not depend on the layout.
            Always so for iterable datasets.

    Raises:
        MisconfigurationException: If the loader cannot be read exactly once, see :func:`refuse`.
        ValueError: If ``micro_batch_size`` is below 1.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        seed: int,
        micro_batch_size: int | None,
        position: Callable[[], ReadPosition | None],
        boundary: Callable[[ElasticLoader], None] | None = None,
        is_training: bool = True,
        whole_batches: bool = False,
    ) -> None:
        refuse(loader)
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, got {micro_batch_size}")
        self._loader = loader
        self._micro_batch_size = micro_batch_size
        self._position = position
        self._boundary = boundary
        self._is_training = is_training
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._is_whole = whole_batches or self._is_stream

        self.seed = seed
        self.epoch = 0
        self.cycle = 0
        self.batch = 0
        self._is_started = False  # whether __next__ was called since the position was set

        self._source = OrderSource(loader)
        self._order: BatchOrder | None = None
        self._order_of: tuple[int, int, int] | None = None  # seed, epoch, cycle
        self._current: BatchPlan | None = None
        self._whole: Any = None  # the whole batch that `current` was cut from, of a stream
        self._versions: list[int] = []  # of its tensors when it was handed out

        # Lightning's teardown ends the workers of an attribute with this name
        self._iterator: Iterator[Any] | None = None
        self._place: tuple[int, int] | None = None  # (D, d) that _iterator was opened for
        self._stop = StopFlag(loader.num_workers > 0)
        # Lightning calls set_epoch on the sampler of a loader only
        self.sampler = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __repr__(self) -> str:
        return f"ElasticLoader(epoch={self.epoch}, cycle={self.cycle}, batch={self.batch} of {len(self)})"

    def __len__(self) -> int:
        return len(self._loader)

    # -- position -----------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; does nothing within that epoch."""
        if epoch != self.epoch:
            self._go(self.seed, epoch, 0, 0)

    def state_dict(self) -> dict[str, int]:
        """Return the position: what was handed out, not what was prefetched. All values are integers."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "cycle": self.cycle,
            "batch": self.batch,
            "num_batches": len(self),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position; the next ``iter`` keeps it. The seed that the epoch began with is kept as well.

        Raises:
            MisconfigurationException: If the position lies within an epoch of another number of batches.
        """
        try:
            seed, epoch, cycle, batch = (int(state[name]) for name in ("seed", "epoch", "cycle", "batch"))
            num_batches = int(state["num_batches"])
        except (KeyError, TypeError, ValueError) as error:
            raise MisconfigurationException(
                f"the checkpoint holds the position of another kind of loader ({sorted(state)}), which cannot be "
                "continued exactly. Change: start from its weights alone (load_from_checkpoint), or continue with the "
                "loader that wrote it."
            ) from error
        if num_batches != len(self) and 0 < batch < num_batches:
            raise MisconfigurationException(
                f"the position is batch {batch} of {num_batches} within epoch {epoch}, but this loader has {len(self)} "
                "global batches, so it would not name the same samples. Change: continue with the dataset and the "
                "global batch size of the run that was interrupted."
            )
        if seed != self.seed:
            _log.info("the data order continues with seed %d of the interrupted run, not %d", seed, self.seed)
        self._current = None
        self._go(seed, epoch, cycle, batch if num_batches == len(self) or not batch else len(self))

    jump = load_state_dict

    def _go(self, seed: int, epoch: int, cycle: int, batch: int) -> None:
        self.close()
        self.seed, self.epoch, self.cycle, self.batch = seed, epoch, cycle, batch
        self._is_started = False

    def __iter__(self) -> ElasticLoader:
        # Lightning calls iter() more often than it reads; only a pass that was begun is followed by the next
        if self._is_started:
            self._go(self.seed, self.epoch, self.cycle + self._is_training, 0)
        return self

    # -- plans --------------------------------------------------------------------------------------------

    @property
    def order(self) -> BatchOrder:
        """The global batches of this pass; drawn at the first use, the same on every instance."""
        name = (self.seed, self.epoch, self.cycle)
        if self._order is None or self._order_of != name:
            self._order, self._order_of = self._source.draw(*name), name
        return self._order

    @property
    def current(self) -> BatchPlan:
        """The global batch handed out last, known on every instance whether it reads or not.

        Raises:
            RuntimeError: If none was handed out yet.
        """
        if self._current is None:
            raise RuntimeError("no batch was handed out yet; `current` is known after the first __next__")
        return self._current

    def _planner(self) -> Callable[[int], BatchPlan]:
        """Return what gives the plan of a batch of this pass; it does not change when the position does."""
        order, epoch, cycle, size = self.order, self.epoch, self.cycle, self._micro_batch_size
        return lambda batch: order.plan(epoch=epoch, cycle=cycle, batch=batch, micro_batch_size=size)

    # -- reading ------------------------------------------------------------------------------------------

    def __next__(self) -> Any:
        if self._boundary is not None and self.batch < len(self):
            self._boundary(self)
        self._is_started = True
        if self.batch >= len(self.order):
            self.close()
            raise StopIteration
        plan, position = self._planner()(self.batch), self._position()
        self._whole = None
        try:
            batch = self._next_part(plan, position)
        except BaseException:
            self.close()  # what the iterator does next is not known; opened again it reads this batch
            raise
        self._current = plan
        self.batch += 1
        if self.batch == len(self.order):
            self.close()  # Lightning does not ask for the StopIteration that would end the workers
        return batch

    def reread(self, position: ReadPosition | None) -> Any:
        """Return the batch handed out last once more, for a position that may be another one.

        It is read in this process with the same seeds, and so has the same bits as a worker would have read.
        """
        plan = self.current
        absent = _absence(plan, position)
        if absent is not None or position is None:
            return absent
        seed = self._pass_seed(plan.epoch, plan.cycle)
        if self._is_stream:
            if self._whole is None or self._versions != tensor_versions(self._whole):
                self._keep(next(self._open_stream(plan.batch)))
            return cut_batch(self._whole, plan.samples(position.num_pipelines, position.pipeline), plan.num_samples)
        micro = range(len(plan.microbatches)) if self._is_whole else _share(plan, position)
        parts: list[Part] = [part_of(plan, micro)]
        reader = SampleReader(self._loader, seed, self._stop)
        with _threads_as_in_worker(self._loader.num_workers > 0):
            batch = next(open_inner(self._loader, parts, reader, seed, in_process=True))
        return self._cut_whole(batch, plan, position)

    @property
    def max_pipelines(self) -> int:
        """Micro-batches of the largest global batch of this pass: more pipelines would find nothing to do."""
        plan = self._planner()
        return max(len(plan(batch).microbatches) for batch in {0, len(self.order) - 1})

    @property
    def max_samples(self) -> int:
        """Samples of the largest global batch of this pass."""
        plan = self._planner()
        return max(plan(batch).num_samples for batch in {0, len(self.order) - 1})

    def sample(self) -> Any:
        """Return the first micro-batch of the next global batch; the position stays where it is."""
        plan = self._planner()(min(self.batch, len(self.order) - 1))
        seed = self._pass_seed(plan.epoch, plan.cycle)
        if self._is_stream:
            return cut_batch(next(self._open_stream(plan.batch)), plan.microbatches[0], plan.num_samples)
        parts: list[Part] = [part_of(plan, range(1))]
        reader = SampleReader(self._loader, seed, self._stop)
        with _threads_as_in_worker(self._loader.num_workers > 0):
            return next(open_inner(self._loader, parts, reader, seed, in_process=True))

    def close(self) -> None:
        """End the workers; reading goes on after this at the same position."""
        iterator, self._iterator, self._place = self._iterator, None, None
        close_inner(iterator, self._stop)

    def _next_part(self, plan: BatchPlan, position: ReadPosition | None) -> Any:
        if position is None:
            self.close()
            return _absence(plan, position)
        place = (1, 0) if self._is_whole else (position.num_pipelines, position.pipeline)
        absent = _absence(plan, position)
        if self._place != place:
            self.close()
        if absent is not None and not self._is_whole:
            return absent  # the parts of an open iterator leave this batch out as well
        if self._iterator is None:
            self._iterator, self._place = self._open(place), place
        try:
            batch = next(self._iterator)
        except StopIteration as error:
            raise RuntimeError(
                f"the dataset raised StopIteration in global batch {plan.batch} of epoch {plan.epoch}; a map-style "
                "dataset must return a sample for each index below its length"
            ) from error
        if self._is_stream:
            self._keep(batch)
        return absent if absent is not None else self._cut_whole(batch, plan, position)

    def _cut_whole(self, batch: Any, plan: BatchPlan, position: ReadPosition) -> Any:
        if not self._is_whole:
            return batch
        return cut_batch(batch, plan.samples(position.num_pipelines, position.pipeline), plan.num_samples)

    def _keep(self, batch: Any) -> None:
        self._whole, self._versions = batch, tensor_versions(batch)

    def _pass_seed(self, epoch: int, cycle: int) -> int:
        return derive_seed(self.seed, epoch, cycle, "samples")

    def _open(self, place: tuple[int, int]) -> Iterator[Any]:
        if self._is_stream:
            return self._open_stream(self.batch)
        seed = self._pass_seed(self.epoch, self.cycle)
        parts = Parts(range(self.batch, len(self.order)), self._planner(), place)
        return open_inner(self._loader, parts, SampleReader(self._loader, seed, self._stop), seed, in_process=False)

    def _open_stream(self, first: int) -> Iterator[Any]:
        order, seed = self.order, self._pass_seed(self.epoch, self.cycle)
        reader = StreamReader(self._loader, seed, [len(order[batch]) for batch in range(len(order))], first)
        return open_inner(self._loader, None, reader, seed, in_process=True)


def _share(plan: BatchPlan, position: ReadPosition) -> range:
    return plan.share(position.num_pipelines, position.pipeline)


def _absence(plan: BatchPlan, position: ReadPosition | None) -> AbsentBatch | None:
    """Return what stands for a batch that is not read here, or None if it is read."""
    if position is None:
        return AbsentBatch("it reads no data; only the first stage of each pipeline does")
    if _share(plan, position):
        return None
    return AbsentBatch(
        f"global batch {plan.batch} of epoch {plan.epoch} has {len(plan.microbatches)} micro-batch(es) for "
        f"{position.num_pipelines} pipelines, and none is left for pipeline {position.pipeline}"
    )


@contextmanager
def _threads_as_in_worker(is_worker: bool) -> Iterator[None]:
    """Use one thread, as torch's workers do: sums may come out differently with more."""
    if not is_worker:
        yield
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
