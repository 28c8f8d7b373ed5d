"""What the coordinator remembers of the membership for the planner, which moves with rank 0 and may die with it."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

from lightning_parcae.planning.job_history import PastReconfiguration

#: Key under which a planner asks for the history, by a ``get`` request.
HISTORY_KEY = "parcae/availability"

MAX_CHANGES = 4096
MAX_RECONFIGURATIONS = 64
_MAX_WARM_UPS = 16


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
        """Return everything as JSON values; see :class:`~lightning_parcae.planning.job_history.JobHistory`."""
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
                [past.kind, past.is_urgent, past.pause_s, past.bytes_moved, past.serial_bytes]
                for past in self._reconfigurations
            ],
        }

    def _note_count(self, now: float) -> None:
        if self._changes and self._changes[-1][0] == now:
            self._changes.pop()
        self._changes.append((now, len(self._present)))
