"""Failures that come again and again without progress between them."""

from __future__ import annotations


class FailureCounts:
    """Counts deaths and link errors in a row; progress of the job's clock starts the count again.

    Attributes:
        deaths: Who died in each of the failures.
        num_link_errors: Link errors in a row.
        num_late_formations: Formations in a row that took too long.
    """

    def __init__(self) -> None:
        self.deaths: list[str] = []
        self.num_link_errors = 0
        self.num_late_formations = 0
        self._clock = 0

    def stopped_at(self, clock: int) -> None:
        """Note the clock at which all members have stopped."""
        if clock > self._clock:
            self.deaths = []
            self.num_link_errors = 0
        self._clock = clock + 1  # the "formed" vote to come is no progress
