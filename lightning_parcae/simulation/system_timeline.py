"""The clock of a simulated system: what runs, what pauses it, which work is safe, and the spans that come of it.

Work is counted in samples. ``position`` is where training stands; a rollback sets it back to what was saved, and until
it is again where it has been before, time is booked as ``redo`` at rate 0. So the samples that count are the furthest
position ever reached, and spans have neither holes nor overlaps.
"""

from __future__ import annotations

import math

from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.simulation.result import Cause, Migration, Span, merge_spans


class Timeline:
    """Goes forward in time and remembers what happened.

    Args:
        checkpoint_every_s: Training time between two checkpoints; 0 means that everything is always saved.

    Attributes:
        config: What runs or is being formed; None while the job waits.
        has_run: Whether anything was ever formed.
    """

    def __init__(self, checkpoint_every_s: float = 0.0) -> None:
        self.config: ParallelConfig | None = None
        self.has_run = False
        self._rate = 0.0
        self._now = 0.0
        self._every = checkpoint_every_s
        self._spans: list[Span] = []
        self._migrations: list[Migration] = []
        self._open: Migration | None = None
        self._busy_until = math.inf
        self._cause: Cause = "waiting"
        self._position = self._furthest = self._saved = self._unsaved_s = 0.0

    @property
    def busy_until_s(self) -> float:
        """When the last pause ends or ended; ``inf`` while the job waits."""
        return self._busy_until

    # --- what the system does, all of it now --------------------------------------------------------------------------

    def switch(self, config: ParallelConfig, rate: float) -> None:
        """Run something else from now on without a pause; a pause that is going on ends only in its own time."""
        self.config, self._rate = config, rate
        if self._busy_until == math.inf:
            self._busy_until = self._now
            self._close()
        self.has_run = True

    def pause(self, until_s: float, cause: Cause, config: ParallelConfig, rate: float, reason: str = "") -> None:
        """Stop for something and run ``config`` after it; what was left of another pause is dropped."""
        self._begin(Migration(self._now, cause, self.config, config, 0.0, reason))
        self.config, self._rate = config, rate
        self._busy_until, self._cause = until_s, cause
        self.has_run = True

    def wait(self, reason: str = "") -> None:
        """Stop until there is something to run."""
        if self.config is not None:
            self._begin(Migration(self._now, "waiting", self.config, None, 0.0, reason))
        self.config, self._rate = None, 0.0
        self._busy_until, self._cause = math.inf, "waiting"

    def save(self) -> None:
        """Write a checkpoint."""
        self._saved, self._unsaved_s = self._position, 0.0

    def roll_back(self) -> None:
        """Lose what was done since the last checkpoint."""
        self._position, self._unsaved_s = self._saved, 0.0

    # --- time ---------------------------------------------------------------------------------------------------------

    def advance(self, until_s: float) -> None:
        """Let time pass."""
        if self._now < self._busy_until:
            end = min(until_s, self._busy_until)
            self._spend(end, 0.0, self._cause)
            if end == self._busy_until:
                self._close()
        if self._now < until_s:
            self._train(until_s)

    def finish(self) -> tuple[tuple[Span, ...], tuple[Migration, ...], float]:
        """Return the spans, the migrations and the samples that count."""
        self._close()
        return merge_spans(self._spans), tuple(self._migrations), self._furthest

    def _train(self, until_s: float) -> None:
        duration = until_s - self._now
        behind_s = (self._furthest - self._position) / self._rate
        if behind_s > 0:
            self._spend(min(until_s, self._now + behind_s), 0.0, "redo")
        # Exactly the furthest position, so that rounding leaves no debt behind.
        self._position = self._position + duration * self._rate if behind_s >= duration else self._furthest
        if self._now < until_s:
            self._position += (until_s - self._now) * self._rate
            self._furthest = self._position
            self._spend(until_s, self._rate, None)
        self._unsaved_s += duration
        if self._unsaved_s >= self._every:
            self._unsaved_s = math.fmod(self._unsaved_s, self._every) if self._every > 0 else 0.0
            self._saved = self._position - self._unsaved_s * self._rate

    def _spend(self, until_s: float, rate: float, cause: Cause | None) -> None:
        self._spans.append(Span(self._now, until_s, self.config, rate, cause))
        self._now = until_s

    def _begin(self, migration: Migration) -> None:
        self._close()
        self._open = migration

    def _close(self) -> None:
        if self._open is not None:
            one = self._open
            self._migrations.append(
                Migration(one.time_s, one.kind, one.before, one.after, self._now - one.time_s, one.reason)
            )
        self._open = None
