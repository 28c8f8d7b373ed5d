"""How many instances there were, over time.

An :class:`AvailabilityTrace` is a value: a step function of time, with the names of the instances where the file gives
them. Everything random is seeded by the caller, nothing reads a clock.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_parcae.availability import trace_formats
from lightning_parcae.availability.trace_formats import Floats

#: ``(time in seconds, {"add": names} or {"remove": names})``
Event = tuple[float, dict[str, list[str]]]


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """A trace in numbers.

    Attributes:
        duration_s: Length of the trace in seconds.
        num_intervals: Intervals it was cut into.
        mean_instances: Mean over the intervals.
        min_instances: Fewest in an interval.
        max_instances: Most in an interval.
        num_allocated: Instances given after the first interval began.
        num_preempted: Instances taken.
        allocation_intervals: Intervals with at least one allocation.
        preemption_intervals: Intervals with at least one preemption.
        instance_hours: Instances times hours.
        gap_s: Seconds for which the count is unknown.
        median_lifetime_s: Median life of the instances that were taken; None without names.
    """

    duration_s: float
    num_intervals: int
    mean_instances: float
    min_instances: int
    max_instances: int
    num_allocated: int
    num_preempted: int
    allocation_intervals: int
    preemption_intervals: int
    instance_hours: float
    gap_s: float
    median_lifetime_s: float | None


@dataclass(frozen=True, slots=True)
class _Change:
    """Instances that come and go at one moment."""

    time_s: float
    add: tuple[str, ...]
    remove: tuple[str, ...]


@dataclass(frozen=True)
class AvailabilityTrace:
    """Instances over time, from 0 to ``end_s``.

    Attributes:
        times_s: Moments at which the count changes, ascending, the first one 0.
        counts: Instances from that moment on, same length.
        end_s: End of the trace in seconds.
        changes: Named changes in order, or None if the trace has counts only.
        gaps_s: Spans ``(start, end)`` for which the count is unknown; there the last known count is assumed.
        source: Where it came from, for messages.
    """

    times_s: tuple[float, ...]
    counts: tuple[int, ...]
    end_s: float
    changes: tuple[_Change, ...] | None = None
    gaps_s: tuple[tuple[float, float], ...] = ()
    source: str = "trace"

    # --- making one ---------------------------------------------------------------------------------------------------

    @classmethod
    def read(cls, path: str | Path, *, interval_s: float = 60.0) -> AvailabilityTrace:
        """Read a trace file of any format of :mod:`lightning_parcae.availability.trace_formats`.

        Args:
            path: The file; its format is found by its content.
            interval_s: Seconds per value of counts without a time, and the time for which the last row holds if the
                trace does not say when it ends.

        Raises:
            ValueError: If the content is no trace; the message names file and line.
        """
        if Path(path).is_dir():
            raise ValueError(f"{path!s}: a folder, not a trace file")
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            what = f"not a text file ({error.reason} at byte {error.start}); a trace is text in UTF-8"
            raise ValueError(f"{path!s}: {what}") from error
        return cls.parse(text, source=str(path), interval_s=interval_s)

    @classmethod
    def parse(cls, text: str, *, source: str = "<text>", interval_s: float = 60.0) -> AvailabilityTrace:
        r"""Read a trace from text; see :meth:`read`.

        Example:
            >>> trace = AvailabilityTrace.parse("0,add,a\n0,add,b\n120000,remove,a\n")
            >>> trace.resample(60.0)
            array([2, 2, 1])
        """
        _check_interval(interval_s)
        parsed = trace_formats.parse(text, source, interval_s)
        end_s = parsed.end_s if parsed.end_s is not None else parsed.last_s + interval_s
        if parsed.events:
            changes = _named_changes(parsed.events)
            times, counts = _counts_of(changes)
            return cls(times, counts, max(end_s, times[-1]), changes, (), source)
        is_known = ~np.isnan(parsed.counts)
        gaps = _gaps(parsed.times_s, is_known, end_s)
        steps_s, steps = parsed.times_s[is_known], parsed.counts[is_known].astype(np.int64)
        if gaps and gaps[0][0] == 0.0 and steps_s[0] > 0.0:
            steps_s[0] = 0.0  # nothing known before: assume the first known count
        times, counts = _steps(steps_s, steps)
        return cls(times, counts, max(end_s, times[-1]), None, gaps, source)

    @classmethod
    def from_counts(
        cls, counts: Sequence[int], *, interval_s: float = 60.0, source: str = "counts"
    ) -> AvailabilityTrace:
        """Make a trace of one count per interval.

        Raises:
            ValueError: If there is no count, or a negative one.
        """
        _check_interval(interval_s)
        if len(counts) == 0 or min(counts) < 0:
            raise ValueError(f"a trace needs at least one count and none below 0, got {list(counts)[:10]}")
        times, values = _steps(np.arange(len(counts), dtype=np.float64) * interval_s, np.array(counts, dtype=np.int64))
        return cls(times, values, len(counts) * interval_s, None, (), source)

    @classmethod
    def from_events(
        cls, events: Iterable[tuple[float, Mapping[str, Sequence[str]]]], *, end_s: float, source: str = "events"
    ) -> AvailabilityTrace:
        """Make a trace of named events, as :meth:`events` gives them.

        Raises:
            ValueError: If an instance is added twice, or removed while it is not there.
        """
        rows = [
            trace_formats.Row(
                float(time_s),
                f"{source}: event {index}",
                add=tuple(change.get("add", ())),
                remove=tuple(change.get("remove", ())),
            )
            for index, (time_s, change) in enumerate(events)
        ]
        changes = _named_changes(sorted(rows, key=lambda row: row.time_s))
        times, counts = _counts_of(changes)
        if end_s < times[-1]:
            raise ValueError(f"{source}: the trace ends at {end_s:g} s, before its last event at {times[-1]:g} s")
        return cls(times, counts, float(end_s), changes, (), source)

    # --- asking it ----------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Most instances at any time."""
        return max(self.counts)

    def count_at(self, time_s: float) -> int:
        """Return the instances at a moment, changes of that moment included."""
        return self.counts[max(bisect.bisect_right(self.times_s, time_s) - 1, 0)]

    def num_intervals(self, interval_s: float) -> int:
        """Return how many intervals cover the trace; the last one may reach beyond its end."""
        _check_interval(interval_s)
        return max(1, int(np.ceil(round(self.end_s / interval_s, 9))))

    def resample(self, interval_s: float = 60.0, *, how: Literal["start", "min"] = "start") -> NDArray[np.int64]:
        """Return one count per interval.

        Args:
            interval_s: Length of an interval in seconds.
            how: ``start`` takes the count when the interval begins, changes of that moment included; ``min`` the
                smallest count within it.

        Returns:
            Counts, shape ``(intervals,)``.
        """
        starts = np.arange(self.num_intervals(interval_s)) * interval_s
        index = np.searchsorted(self.times_s, starts, side="right") - 1
        counts = np.asarray(self.counts, dtype=np.int64)
        if how == "start":
            return counts[index]
        if how != "min":
            raise ValueError(f"how must be 'start' or 'min', got {how!r}")
        ends = np.searchsorted(self.times_s, starts + interval_s, side="left")
        return np.array([counts[low:high].min() for low, high in zip(index, ends, strict=True)], dtype=np.int64)

    def allocations_and_preemptions(self, interval_s: float = 60.0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return how many instances came and went up to the start of each interval, since the start of the one before.

        The counts follow: ``N[i] = N[i - 1] + allocations[i] - preemptions[i]`` with :meth:`resample`'s counts.

        Returns:
            Allocations and preemptions, each of shape ``(intervals,)``; the first allocation is the initial count.
        """
        size = self.num_intervals(interval_s)
        come = np.zeros(size, dtype=np.int64)
        go = np.zeros(size, dtype=np.int64)
        for time_s, added, removed in self._moves():
            index = int(np.ceil(round(time_s / interval_s, 9)))
            if index < size:
                come[index] += added
                go[index] += removed
        return come, go

    def _moves(self) -> list[tuple[float, int, int]]:
        if self.changes is not None:
            return [(change.time_s, len(change.add), len(change.remove)) for change in self.changes]
        steps = np.diff(self.counts, prepend=0)
        return [(time, max(int(step), 0), max(-int(step), 0)) for time, step in zip(self.times_s, steps, strict=True)]

    def slice(self, start_s: float, end_s: float) -> AvailabilityTrace:
        """Return the part between two moments, with times counted from ``start_s``.

        Raises:
            ValueError: If the part is empty or reaches beyond the trace.
        """
        if not 0 <= start_s < end_s <= self.end_s:
            raise ValueError(f"{self.source}: cannot cut {start_s:g} to {end_s:g} s out of 0 to {self.end_s:g} s")
        inside = [index for index, time in enumerate(self.times_s) if start_s < time < end_s]
        times = (0.0, *(self.times_s[index] - start_s for index in inside))
        counts = (self.count_at(start_s), *(self.counts[index] for index in inside))
        changes = None
        if self.changes is not None:
            alive: dict[str, None] = {}
            for change in self.changes:
                if change.time_s <= start_s:
                    _apply(alive, change)
            later = [change for change in self.changes if start_s < change.time_s < end_s]
            changes = (
                _Change(0.0, tuple(alive), ()),
                *(_Change(change.time_s - start_s, change.add, change.remove) for change in later),
            )
        gaps = [(max(low - start_s, 0.0), min(high, end_s) - start_s) for low, high in self.gaps_s]
        return AvailabilityTrace(
            times,
            counts,
            end_s - start_s,
            changes,
            tuple((low, high) for low, high in gaps if low < high),
            f"{self.source} [{start_s:g} s, {end_s:g} s)",
        )

    def events(self, *, seed: int = 0) -> tuple[Event, ...]:
        """Return who comes and goes, in order; removals before additions of the same moment.

        A trace of counts says how many, not who: then the names are made up (``node1``, ``node2``, ...; none is used
        twice) and the victims drawn uniformly from those alive.

        Args:
            seed: Chooses the victims where the trace does not name them.
        """
        changes = self.changes if self.changes is not None else self._made_up(np.random.default_rng(seed))
        events: list[Event] = []
        for change in changes:
            if change.remove:
                events.append((change.time_s, {"remove": list(change.remove)}))
            if change.add:
                events.append((change.time_s, {"add": list(change.add)}))
        return tuple(events)

    def _made_up(self, rng: np.random.Generator) -> list[_Change]:
        alive: list[str] = []
        used = 0
        changes: list[_Change] = []
        for time_s, added, removed in self._moves():
            victims: tuple[str, ...] = ()
            if removed:
                taken = set(rng.choice(len(alive), size=removed, replace=False).tolist())
                victims = tuple(alive[index] for index in sorted(taken))
                alive = [name for index, name in enumerate(alive) if index not in taken]
            names = tuple(f"node{used + index}" for index in range(1, added + 1))
            used += added
            alive.extend(names)
            changes.append(_Change(time_s, names, victims))
        return changes

    def statistics(self, interval_s: float = 60.0) -> TraceStatistics:
        """Return the trace in numbers, cut into intervals."""
        counts = self.resample(interval_s)
        come, go = self.allocations_and_preemptions(interval_s)
        come[0] = 0  # what is there at the start was not given during the trace
        lengths = np.diff([*self.times_s, self.end_s])
        return TraceStatistics(
            duration_s=self.end_s,
            num_intervals=len(counts),
            mean_instances=float(counts.mean()),
            min_instances=int(counts.min()),
            max_instances=int(counts.max()),
            num_allocated=int(come.sum()),
            num_preempted=int(go.sum()),
            allocation_intervals=int((come > 0).sum()),
            preemption_intervals=int((go > 0).sum()),
            instance_hours=float(np.dot(lengths, self.counts)) / 3600.0,
            gap_s=sum(high - low for low, high in self.gaps_s),
            median_lifetime_s=self._median_lifetime_s(),
        )

    def _median_lifetime_s(self) -> float | None:
        born: dict[str, float] = {}
        lives: list[float] = []
        for change in self.changes or ():
            lives.extend(change.time_s - born.pop(name) for name in change.remove)
            born.update(dict.fromkeys(change.add, change.time_s))
        return float(np.median(lives)) if lives else None


def _check_interval(interval_s: float) -> None:
    if not (np.isfinite(interval_s) and interval_s > 0):
        raise ValueError(f"an interval must be above 0 s, got {interval_s}")


def _steps(times_s: Floats, counts: NDArray[np.int64]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Reduce samples in order of time to the moments at which the count changes; before the first one is nobody."""
    is_last = np.append(times_s[1:] != times_s[:-1], True)  # of equal times the last one holds
    times_s, counts = times_s[is_last], counts[is_last]
    if times_s[0] != 0.0:
        times_s, counts = np.insert(times_s, 0, 0.0), np.insert(counts, 0, 0)
    is_change = np.append(True, counts[1:] != counts[:-1])
    return tuple(times_s[is_change].tolist()), tuple(counts[is_change].tolist())


def _gaps(times_s: Floats, is_known: NDArray[np.bool_], end_s: float) -> tuple[tuple[float, float], ...]:
    """Return the spans from the first unknown count to the next known one, or to the end."""
    before = np.append(True, is_known[:-1])
    starts = times_s[~is_known & before]
    ends = times_s[is_known & ~before]
    ends = np.append(ends, end_s)[: len(starts)]
    return tuple((low, high) for low, high in zip(starts.tolist(), ends.tolist(), strict=True) if low < high)


def _apply(alive: dict[str, None], change: _Change) -> None:
    for name in change.remove:
        del alive[name]
    alive.update(dict.fromkeys(change.add))


def _named_changes(rows: Sequence[trace_formats.Row]) -> tuple[_Change, ...]:
    """Merge rows of one moment, and refuse what cannot have happened."""
    alive: set[str] = set()
    merged: dict[float, tuple[list[str], list[str]]] = {}
    for row in rows:
        added, removed = merged.setdefault(row.time_s, ([], []))
        for name in row.add:
            if name in alive:
                raise ValueError(f"{row.where}: adds {name}, which is there already")
            alive.add(name)
            added.append(name)
        for name in row.remove:
            if name not in alive:
                raise ValueError(f"{row.where}: removes {name}, which is not there at {row.time_s:g} s")
            alive.discard(name)
            if name in added:
                added.remove(name)  # came and went in the same moment
            else:
                removed.append(name)
    return tuple(_Change(time, tuple(added), tuple(removed)) for time, (added, removed) in merged.items())


def _counts_of(changes: Sequence[_Change]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    if not changes:
        return (0.0,), (0,)
    sizes = np.array([len(change.add) - len(change.remove) for change in changes], dtype=np.int64)
    return _steps(np.array([change.time_s for change in changes], dtype=np.float64), np.cumsum(sizes))
