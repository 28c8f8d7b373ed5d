"""How long an instance with a notice may train on, so that its state is handed over in time.

Handing over takes the rest of the running step and a planned reconfiguration. Both are known from the job itself; as
long as they are not, an instance with a notice gives its place away at once.
"""

from __future__ import annotations

from collections import deque

MIN_RESERVE_S = 45.0
"""Kept whatever the job has shown: a cloud's clock is not ours, and the last half minute is often not given in full."""

_MARGIN_S = 15.0
_SAFETY = 3.0
_NUM_REMEMBERED = 8


class HandOver:
    """Learns what a hand-over takes, from the steps and reconfigurations of the job."""

    def __init__(self) -> None:
        self._pauses_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._step_s: float | None = None  # of the generation before
        self._formed_at: float | None = None
        self._first_step = 0

    def formed(self, now: float, *, step: int, pause_s: float) -> None:
        """Note a new generation.

        Args:
            now: The time, in seconds.
            step: Optimizer steps done so far.
            pause_s: What forming it took.
        """
        self._step_s = self._step_time_s(now, step)
        self._formed_at, self._first_step = now, step
        self._pauses_s.append(pause_s)

    def reserve_s(self, now: float, step: int) -> float | None:
        """Return how long before its end an instance must begin to hand over; None if that is not known yet.

        Args:
            now: The time, in seconds.
            step: Optimizer steps done so far.
        """
        step_s = self._step_time_s(now, step)
        if step_s is None:
            return None
        return max(MIN_RESERVE_S, _MARGIN_S + _SAFETY * (step_s + max(self._pauses_s)))

    def _step_time_s(self, now: float, step: int) -> float | None:
        """Return the time of a step; what is no step, such as validation, counts as if it were."""
        if self._formed_at is None:
            return None
        num_steps = max(step - self._first_step, 0)  # after a rollback there are fewer
        elapsed_s = now - self._formed_at
        if num_steps >= 2:
            return elapsed_s / num_steps
        return None if self._step_s is None else max(self._step_s, elapsed_s / (num_steps + 1))
