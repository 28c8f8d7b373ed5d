"""What may happen to the membership in the coming intervals, as a distribution.

A forecast gives for each interval ahead the chance of every kind of event: so many instances lost, so many joined. From
it follows the distribution of the number of instances. A forecaster never raises into the job, whatever the history:
where it cannot say anything it says "nothing happens".

Symbols: ``N`` instances, ``H`` intervals ahead, ``C`` the capacity: most instances there can be.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EventLaw:
    """What may happen when one interval begins.

    Attributes:
        kinds: ``(lost, joined)`` of each kind of event; "nothing" is ``(0, 0)``.
        chances: Probability of each kind; sums to 1.
    """

    kinds: tuple[tuple[int, int], ...]
    chances: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.kinds) != len(self.chances) or any(lost < 0 or joined < 0 for lost, joined in self.kinds):
            raise ValueError(f"each kind of event needs a chance, and counts of at least 0, got {self}")
        if any(chance < 0 for chance in self.chances) or abs(sum(self.chances) - 1.0) > 1e-9:
            raise ValueError(f"chances must be at least 0 and sum to 1, got {self.chances}")

    @property
    def expected_lost(self) -> float:
        """Instances lost on average."""
        return sum(lost * chance for (lost, _), chance in zip(self.kinds, self.chances, strict=True))

    @property
    def expected_joined(self) -> float:
        """Instances that join on average."""
        return sum(joined * chance for (_, joined), chance in zip(self.kinds, self.chances, strict=True))

    def thinned(self, share: float) -> EventLaw:
        """Return the law by which every event has only a share of its chance."""
        events = [(kind, share * chance) for kind, chance in zip(self.kinds, self.chances, strict=True) if any(kind)]
        kinds = tuple(kind for kind, _ in events)
        chances = tuple(chance for _, chance in events)
        return EventLaw(((0, 0), *kinds), (1.0 - sum(chances), *chances))

    @classmethod
    def certain(cls, num_lost: int = 0, num_joined: int = 0) -> EventLaw:
        """Return the law of an event that is known, from a notice or a joiner that warms up."""
        return cls(((num_lost, num_joined),), (1.0,))


NOTHING = EventLaw.certain()


def outcome(num_instances: int, kind: tuple[int, int], capacity: int) -> tuple[int, int]:
    """Return how many instances a kind of event really takes, and how many are there afterwards."""
    lost = min(kind[0], num_instances)
    return lost, min(num_instances - lost + kind[1], max(capacity, num_instances - lost))


@dataclass(frozen=True, slots=True)
class Forecast:
    """What may happen in the intervals ahead; independent from one interval to the next.

    Attributes:
        laws: Law of each interval, length ``H``.
        by: Name of the forecaster.
    """

    laws: tuple[EventLaw, ...]
    by: str = ""

    def thinned(self, share: float) -> Forecast:
        """Return the forecast with only a share of the chance of every event."""
        laws = {law: law.thinned(share) for law in set(self.laws)}
        return Forecast(tuple(laws[law] for law in self.laws), self.by)

    def counts(self, num_instances: int, capacity: int) -> Floats:
        """Return the distribution of the number of instances, shape ``(H, C + 1)``.

        Args:
            num_instances: Instances now.
            capacity: Most instances there can be; raised to ``num_instances`` if that is more.
        """
        size = max(capacity, num_instances) + 1
        now = np.zeros(size)
        now[num_instances] = 1.0
        rows = np.zeros((len(self.laws), size))
        for index, law in enumerate(self.laws):
            following = np.zeros(size)
            for (lost, joined), chance in zip(law.kinds, law.chances, strict=True):
                following += chance * _moved(now, lost, joined)
            rows[index] = now = following
        return rows


def _moved(counts: Floats, lost: int, joined: int) -> Floats:
    """Return a distribution of counts after so many were lost, then joined, as far as there is room."""
    last = len(counts) - 1
    if lost:
        lost = min(lost, last)
        counts = np.concatenate([[counts[: lost + 1].sum()], counts[lost + 1 :], np.zeros(lost)])
    if joined:
        joined = min(joined, last)
        counts = np.concatenate([np.zeros(joined), counts[: last - joined], [counts[last - joined :].sum()]])
    return counts


class Forecaster(Protocol):
    """Something that looks ahead. Implementations must never raise, whatever the history."""

    @property
    def name(self) -> str:
        """Name for people."""
        ...

    def forecast(self, history: ArrayLike, *, horizon: int, capacity: int) -> Forecast:
        """Look ahead.

        Args:
            history: Instances of each interval until now, oldest first; may be empty and hold NaN for gaps.
            horizon: Intervals ahead ``H``.
            capacity: Most instances there can be.

        Returns:
            A law for each of ``horizon`` intervals.
        """
        ...


def cleaned(history: ArrayLike, capacity: int) -> Ints:
    """Return a history of whole counts from 0 to ``capacity``; a gap takes the last known count."""
    raw = np.asarray(history, dtype=np.float64).ravel()
    known = np.flatnonzero(np.isfinite(raw))
    if len(known) == 0:
        return np.zeros(0, dtype=np.int64)
    last = np.maximum(np.searchsorted(known, np.arange(len(raw)), side="right") - 1, 0)
    filled: Ints = np.rint(np.clip(raw[known[last]], 0, capacity)).astype(np.int64)
    return filled


def quantile(counts: Floats, share: float) -> Ints:
    """Return the smallest count that is not exceeded with a probability of at least ``share``, shape ``(H,)``."""
    reached: Ints = (np.cumsum(counts, axis=1) >= share - 1e-12).argmax(axis=1)
    return reached


@dataclass(frozen=True, slots=True)
class LastValue:
    """Nothing happens: the yardstick of every other forecaster."""

    name: str = "last value"

    def forecast(self, history: ArrayLike, *, horizon: int, capacity: int) -> Forecast:
        """See :class:`Forecaster`."""
        return Forecast((NOTHING,) * horizon, self.name)


@dataclass(frozen=True, slots=True)
class EventRates:
    """Learn how often how many instances go and come; the default.

    All history counts, and a prior counts as so many more intervals: a short memory hurts where events are rare.
    Allocations are counted only over intervals that had room for one. Large events are pooled in classes of doubling
    size, so that a law has few kinds.

    Attributes:
        prior_intervals: What the prior is worth.
        prior_rate: Events of each direction per interval before anything was seen.
        prior_sizes: How likely sizes 1, 2, ... of an event are before anything was seen.
        memory: Intervals to look back; None means all.
    """

    name: str = "event rates"
    prior_intervals: float = 40.0
    prior_rate: float = 0.1
    prior_sizes: tuple[float, ...] = (0.5, 0.25, 0.15, 0.1)
    memory: int | None = None

    @classmethod
    def for_intervals(cls, interval_s: float) -> EventRates:
        """Return the default for intervals of some length; the prior was learned from traces cut into minutes."""
        minutes, plain = interval_s / 60.0, cls()
        return cls(prior_intervals=plain.prior_intervals / minutes, prior_rate=min(plain.prior_rate * minutes, 0.5))

    def forecast(self, history: ArrayLike, *, horizon: int, capacity: int) -> Forecast:
        """See :class:`Forecaster`."""
        return Forecast((self.law(history, capacity=capacity),) * horizon, self.name)

    def law(self, history: ArrayLike, *, capacity: int) -> EventLaw:
        """Return the law that all coming intervals have in common."""
        counts = cleaned(history, capacity)
        if self.memory is not None:
            counts = counts[-self.memory - 1 :]
        changes = np.diff(counts)
        before = counts[:-1]
        down = self._rates(-changes[changes < 0], int((before > 0).sum()))
        up = self._rates(changes[changes > 0], int((before < capacity).sum()))
        total = sum(down.values()) + sum(up.values())
        scale = min(1.0, 0.95 / total) if total else 1.0  # both directions together must leave room for "nothing"
        kinds = {(size, 0): rate * scale for size, rate in down.items()}
        kinds |= {(0, size): rate * scale for size, rate in up.items()}
        nothing = 1.0 - sum(kinds.values())
        return EventLaw(((0, 0), *kinds), (nothing, *kinds.values()))

    def _rates(self, sizes: Ints, intervals: int) -> dict[int, float]:
        """Return the chance per interval of an event of each size."""
        weight = self.prior_intervals + intervals
        if weight <= 0:
            return {}
        pooled: dict[int, list[int]] = {}
        for size, times in sorted(Counter(sizes.tolist()).items()):
            # 1, 2, 3, 4 by themselves, then 5-8, 9-16, ...
            group = size if size <= 4 else 4 + int(np.ceil(np.log2(size / 4)))
            pooled.setdefault(group, []).extend([size] * times)
        events: defaultdict[int, float] = defaultdict(float)
        for size, share in enumerate(self.prior_sizes, start=1):
            events[size] += self.prior_intervals * self.prior_rate * share
        for group in pooled.values():
            events[round(sum(group) / len(group))] += len(group)
        return {size: count / weight for size, count in sorted(events.items()) if count > 0}


def certain_forecast(steps: Sequence[tuple[int, int]], then: Forecast, horizon: int) -> Forecast:
    """Put what is known in front of a forecast: a known step overrides the forecast of its interval.

    Args:
        steps: ``(lost, joined)`` of the first intervals, from notices and joiners that warm up.
        then: What is forecast from now on.
        horizon: Intervals of the result.
    """
    known = tuple(EventLaw.certain(lost, joined) for lost, joined in steps[:horizon])
    rest = then.laws[len(known) : horizon]
    last = then.laws[-1] if then.laws else NOTHING
    padding = (last,) * (horizon - len(known) - len(rest))
    return Forecast((*known, *rest, *padding), then.by)
