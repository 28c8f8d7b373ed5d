"""What the coordinator remembers of the membership for the planner, which moves with rank 0 and may die with it.

:class:`AvailabilityHistory` is written by the coordinator, :class:`JobHistory` is what a planner reads. Times are
readings of the coordinator's clock, in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lightning_parcae.planning.parallel_config import ParallelConfig

#: Key under which a planner asks for the history, by a ``get`` request.
HISTORY_KEY = "parcae/availability"

MAX_CHANGES = 4096
MAX_RECONFIGURATIONS = 64
_MAX_WARM_UPS = 16


@dataclass(frozen=True, slots=True)
class PastReconfiguration:
    """What a reconfiguration took.

    Attributes:
        kind: Kind of migration.
        is_urgent: Whether it interrupted the members, because somebody died.
        pause_s: Longest time that a member stood still, in seconds.
        bytes_moved: State that was moved, by all members together.
        num_receivers: Members that received state, at least 1.
    """

    kind: str
    is_urgent: bool
    pause_s: float
    bytes_moved: int
    num_receivers: int


class AvailabilityHistory:
    """How many instances there were, who warms up, who will go, and what reconfigurations took.

    Counted is who can be given work that lasts: ready, and without a notice. That is what a table of configurations is
    indexed by.
    """

    def __init__(self) -> None:
        self._present: set[str] = set()
        self._warming: dict[str, float] = {}
        self._notices: dict[str, float | None] = {}  # when the instance goes, if known
        self._changes: deque[tuple[float, int]] = deque(maxlen=MAX_CHANGES)
        self._warm_ups: deque[float] = deque(maxlen=_MAX_WARM_UPS)
        self._reconfigurations: deque[PastReconfiguration] = deque(maxlen=MAX_RECONFIGURATIONS)
        self._started_at: float | None = None
        self._num_announced = self._num_unannounced = 0

    def connected(self, now: float, name: str) -> None:
        """Note an instance that begins to warm up."""
        self._warming[name] = now

    def ready(self, now: float, name: str) -> None:
        """Note that an instance is warm."""
        since = self._warming.pop(name, None)
        if since is not None:
            self._warm_ups.append(now - since)
        if name not in self._notices and name not in self._present:
            self._present.add(name)
            self._note_count(now)

    def noticed(self, now: float, name: str, leaves_at: float | None) -> None:
        """Note that an instance will be taken away."""
        self._warming.pop(name, None)
        self._notices[name] = leaves_at
        if name in self._present:
            self._num_announced += 1
            self._present.discard(name)
            self._note_count(now)

    def gone(self, now: float, name: str) -> None:
        """Note that an instance is gone, in whatever way."""
        self._warming.pop(name, None)
        self._notices.pop(name, None)
        if name in self._present:
            self._num_unannounced += 1
            self._present.discard(name)
            self._note_count(now)

    def formed(self, now: float, reconfiguration: PastReconfiguration) -> None:
        """Note a generation that has been formed."""
        if self._started_at is None:
            self._started_at = now
        if reconfiguration.kind not in ("initial", "rollback"):
            self._reconfigurations.append(reconfiguration)

    def describe(self, now: float) -> dict[str, Any]:
        """Return everything as JSON values; see :class:`JobHistory`."""
        return {
            "now": now,
            "started_at": self._started_at,
            "changes": [[time, count] for time, count in self._changes],
            "warming": sorted(self._warming.values()),
            "warm_up_s": median(self._warm_ups) if self._warm_ups else None,
            "notices": list(self._notices.values()),
            "num_announced": self._num_announced,
            "num_unannounced": self._num_unannounced,
            "reconfigurations": [
                [past.kind, past.is_urgent, past.pause_s, past.bytes_moved, past.num_receivers]
                for past in self._reconfigurations
            ],
        }

    def _note_count(self, now: float) -> None:
        if self._changes and self._changes[-1][0] == now:
            self._changes.pop()
        self._changes.append((now, len(self._present)))


@dataclass(frozen=True)
class JobHistory:
    """What a planner knows of its job.

    Attributes:
        now: The coordinator's clock.
        started_at: When the first generation was formed; None before.
        changes: ``(time, instances)`` from that time on, ascending.
        warming: Since when each instance that warms up is connected.
        warm_up_s: How long that usually takes; None if unknown.
        notices: When each instance with a notice that is still here will go; None where the notice does not say.
        num_announced: Instances taken with a notice so far.
        num_unannounced: Instances lost without one.
        reconfigurations: What the newest reconfigurations took.
        phase: Phase of the coordinator.
        config: What runs; None if nothing does.
        table: The present table of configurations, as in a ``Plan`` message.
    """

    now: float
    started_at: float | None = None
    changes: tuple[tuple[float, int], ...] = ()
    warming: tuple[float, ...] = ()
    warm_up_s: float | None = None
    notices: tuple[float | None, ...] = ()
    num_announced: int = 0
    num_unannounced: int = 0
    reconfigurations: tuple[PastReconfiguration, ...] = ()
    phase: str = "waiting"
    config: ParallelConfig | None = None
    table: tuple[tuple[int, int] | None, ...] = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> JobHistory:
        """Build it from the coordinator's answer.

        Raises:
            ValueError: If that is not what it should be.
        """
        try:
            return cls(
                now=float(value["now"]),
                started_at=None if value["started_at"] is None else float(value["started_at"]),
                changes=tuple((float(time), int(count)) for time, count in value["changes"]),
                warming=tuple(float(time) for time in value["warming"]),
                warm_up_s=None if value["warm_up_s"] is None else float(value["warm_up_s"]),
                notices=tuple(None if time is None else float(time) for time in value["notices"]),
                num_announced=int(value["num_announced"]),
                num_unannounced=int(value["num_unannounced"]),
                reconfigurations=tuple(PastReconfiguration(*past) for past in value["reconfigurations"]),
                phase=str(value["phase"]),
                config=None if value["config"] is None else ParallelConfig(*value["config"]),
                table=tuple(None if entry is None else (int(entry[0]), int(entry[1])) for entry in value["table"]),
            )
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"not the history of a job: {type(error).__name__}: {error}") from error

    @property
    def num_instances(self) -> int:
        """Instances that are ready and have no notice."""
        return self.changes[-1][1] if self.changes else 0

    def counts(self, interval_s: float) -> list[int]:
        """Return the instances at the beginning of each interval since the first generation was formed."""
        if self.started_at is None or not self.changes:
            return []
        counts, index = [], 0
        for number in range(int((self.now - self.started_at) / interval_s) + 1):
            begin = self.started_at + number * interval_s
            while index + 1 < len(self.changes) and self.changes[index + 1][0] <= begin:
                index += 1
            counts.append(self.changes[index][1])
        return counts

    def known_steps(self, interval_s: float, most: int = 5) -> tuple[tuple[int, int], ...]:
        """Return ``(lost, joined)`` of the coming intervals, as far as notices and joiners that warm up tell.

        A joiner that takes longer than usual is expected with the next interval.
        """
        usual_s = self.warm_up_s if self.warm_up_s is not None else interval_s
        leave = [self._interval_of(self.now if time is None else time, interval_s) for time in self.notices]
        come = [self._interval_of(since + usual_s, interval_s) for since in self.warming]
        last = max([index for index in (*leave, *come) if index < most], default=-1)
        return tuple((leave.count(index), come.count(index)) for index in range(last + 1))

    def _interval_of(self, time: float, interval_s: float) -> int:
        return int(max(time - self.now, 0.0) / interval_s)


def as_json(config: ParallelConfig | None, table: Sequence[tuple[int, int] | None], phase: str) -> dict[str, Any]:
    """Return what else belongs into the answer to a planner: what the coordinator runs, and by which table."""
    return {
        "phase": phase,
        "config": None if config is None else [config.num_pipelines, config.num_stages],
        "table": [None if entry is None else list(entry) for entry in table],
    }
