"""The account of samples: which were committed, how often, and which were not.

Instances write JSON lines. A *commit record* says which samples one optimizer step's global batch held; every
member of the step may write it, so equal records for one step count once and different ones are an error. A
*read record* says that a dataset served a sample; reading is not using, so it is only shown beside.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Index = int | str
"""How a sample is named in a record; an index of another type is named by its ``repr``."""


def _index(value: Any) -> Index:
    if isinstance(value, int | str) and not isinstance(value, bool):
        return value
    return repr(value)


def _fields(line: str, kind: str, names: tuple[str, ...]) -> list[Any]:
    """Return the named fields of a JSON line; ValueError if it is not such a record."""
    try:
        value = json.loads(line)
        if value["record"] != kind:
            raise KeyError("record")
        return [value[name] for name in names]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not a {kind} record with the fields {', '.join(names)}: {line[:200]!r}") from error


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The samples that one committed global batch used.

    Attributes:
        step: Number of the optimizer step that used the batch, from 0.
        epoch: Data epoch.
        batch: Number of the global batch within the epoch.
        indices: Its samples, in order.
    """

    step: int
    epoch: int
    batch: int
    indices: tuple[Index, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", tuple(_index(value) for value in self.indices))

    def to_json(self) -> str:
        """Return the record as one line of JSON, without the line end."""
        value = {"record": "commit", "step": self.step, "epoch": self.epoch, "batch": self.batch}
        return json.dumps({**value, "indices": list(self.indices)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> CommitRecord:
        """Build a record from :meth:`to_json`'s line.

        Raises:
            ValueError: If the line is not a commit record.
        """
        step, epoch, batch, indices = _fields(line, "commit", ("step", "epoch", "batch", "indices"))
        numbers = (step, epoch, batch)
        if not all(isinstance(number, int) for number in numbers) or not isinstance(indices, list):
            raise ValueError(f"step, epoch and batch must be integers and indices a list, got {line[:200]!r}")
        return cls(step, epoch, batch, tuple(indices))


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """A sample that a dataset served.

    Attributes:
        index: The sample.
        epoch: Data epoch, None where the dataset does not know it.
    """

    index: Index
    epoch: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", _index(self.index))

    def to_json(self) -> str:
        """Return the record as one line of JSON, without the line end."""
        return json.dumps({"record": "read", "index": self.index, "epoch": self.epoch}, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> ReadRecord:
        """Build a record from :meth:`to_json`'s line.

        Raises:
            ValueError: If the line is not a read record.
        """
        index, epoch = _fields(line, "read", ("index", "epoch"))
        if epoch is not None and not isinstance(epoch, int):
            raise ValueError(f"epoch must be an integer or null, got {line[:200]!r}")
        return cls(index, epoch)


@dataclass(frozen=True, slots=True)
class EpochReport:
    """What happened to the samples of one epoch.

    Attributes:
        epoch: Data epoch.
        num_expected: Samples one undisturbed epoch uses, counted with their repetitions.
        num_committed: Samples committed, counted with their repetitions.
        duplicated: Samples committed more often than expected, with the number of times too many.
        lost: Samples committed less often than expected although a later batch or epoch was committed.
        left: Samples still to come: the epoch has not ended, and every batch so far is there.
        num_reads: How often a dataset served a sample of this epoch, prefetched and redone reads included.
        gaps: Batches missing below the largest committed one.
    """

    epoch: int
    num_expected: int
    num_committed: int
    duplicated: Mapping[Index, int]
    lost: Mapping[Index, int]
    left: Mapping[Index, int]
    num_reads: int
    gaps: tuple[int, ...]

    @property
    def is_exact(self) -> bool:
        """Whether every sample so far was committed as often as it should be."""
        return not self.duplicated and not self.lost and not self.gaps

    def __str__(self) -> str:
        counts = {"duplicated": self.duplicated, "lost": self.lost, "left": self.left}
        parts = ", ".join(f"{sum(counter.values())} {name}" for name, counter in counts.items())
        return f"epoch {self.epoch}: {self.num_committed} of {self.num_expected} samples committed, {parts}"


@dataclass(slots=True)
class Ledger:
    """Commit and read records of a job, from any number of instances.

    Attributes:
        batches_per_step: Global batches one step may use at most: more than 1 with gradient accumulation.
        commits: Commit records by step, then by ``(epoch, batch)``.
        reads: How often each sample was served, by epoch (None: the dataset did not say).
        num_truncated: Files whose last line was cut off, as by a kill; that line is not counted.
    """

    batches_per_step: int = 1
    commits: dict[int, dict[tuple[int, int], CommitRecord]] = field(default_factory=dict)
    reads: dict[int | None, Counter[Index]] = field(default_factory=dict)
    num_truncated: int = 0

    @classmethod
    def from_files(cls, paths: Iterable[str | Path], *, batches_per_step: int = 1) -> Ledger:
        """Read JSON-lines files written by several instances.

        Args:
            paths: The files; they may hold records of the same steps.
            batches_per_step: Global batches one step may use at most, as in ``accumulate_grad_batches``.

        Raises:
            ValueError: If a line is no record, or records of one step contradict each other.
        """
        ledger = cls(batches_per_step)
        for path in paths:
            lines = Path(path).read_text(encoding="utf-8").split("\n")
            if lines.pop():  # a killed writer leaves a line without its end
                ledger.num_truncated += 1
            for number, line in enumerate(lines, start=1):
                try:
                    ledger.add(line)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
        return ledger

    def add(self, record: CommitRecord | ReadRecord | str) -> None:
        """Enter a record, or a line of JSON.

        Raises:
            ValueError: If the line is no record, or contradicts one that was entered.
        """
        if isinstance(record, str):
            record = _parse(record)
        if isinstance(record, ReadRecord):
            self.reads.setdefault(record.epoch, Counter())[record.index] += 1
            return
        of_step = self.commits.setdefault(record.step, {})
        known = of_step.setdefault((record.epoch, record.batch), record)
        if known == record and len(of_step) <= self.batches_per_step:
            return
        other = known if known != record else next(iter(of_step.values()))
        raise ValueError(
            f"step {record.step} was committed with different samples: {_brief(other)} and {_brief(record)}; every "
            f"instance must draw the same order, and a step may use {self.batches_per_step} batch(es)"
        )

    def report(self, expected: int | Iterable[Any], *, finished: bool = False) -> list[EpochReport]:
        """Compare each epoch with what an undisturbed one uses.

        Args:
            expected: Samples of one epoch: the dataset's size, or the indices themselves where these are not
                ``0 .. size - 1`` once each (``drop_last``, weighted samplers, subsets).
            finished: Whether the newest epoch ended, so that what it lacks is lost and not still to come.

        Returns:
            One report per epoch, in order.
        """
        want = Counter(map(_index, range(expected) if isinstance(expected, int) else expected))
        epochs: dict[int, list[CommitRecord]] = {}
        for of_step in self.commits.values():
            for record in of_step.values():
                epochs.setdefault(record.epoch, []).append(record)
        newest = max(epochs, default=0)
        return [self._report_epoch(epoch, epochs[epoch], want, finished or epoch < newest) for epoch in sorted(epochs)]

    def _report_epoch(
        self, epoch: int, records: list[CommitRecord], want: Counter[Index], finished: bool
    ) -> EpochReport:
        have: Counter[Index] = Counter()
        for record in records:
            have.update(record.indices)
        batches = {record.batch for record in records}
        gaps = tuple(batch for batch in range(max(batches)) if batch not in batches)
        missing = want - have
        over = finished or bool(gaps)
        return EpochReport(
            epoch=epoch,
            num_expected=want.total(),
            num_committed=have.total(),
            duplicated=dict(have - want),
            lost=dict(missing) if over else {},
            left={} if over else dict(missing),
            num_reads=self.reads.get(epoch, Counter()).total(),
            gaps=gaps,
        )


def _parse(line: str) -> CommitRecord | ReadRecord:
    try:
        kind = json.loads(line)["record"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not a record: {line[:200]!r}") from error
    return ReadRecord.from_json(line) if kind == "read" else CommitRecord.from_json(line)


def _brief(record: CommitRecord) -> str:
    shown = ", ".join(map(str, record.indices[:4]))
    return f"epoch {record.epoch} batch {record.batch} [{shown}{', ...' if len(record.indices) > 4 else ''}]"
