"""What a planner knows of its job: how many instances there were, who comes, who goes, what reconfigurations took.

Times are readings of the coordinator's clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_parcae.planning.parallel_config import ParallelConfig


@dataclass(frozen=True, slots=True)
class PastReconfiguration:
    """What a reconfiguration took.

    Attributes:
        kind: Kind of migration.
        is_urgent: Whether it interrupted the members, because somebody died.
        pause_s: Longest time that a member stood still, in seconds.
        bytes_moved: State that was moved, by all members together.
        serial_bytes: The most of it that a single member sent or received: what took the time.
    """

    kind: str
    is_urgent: bool
    pause_s: float
    bytes_moved: int
    serial_bytes: float


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
