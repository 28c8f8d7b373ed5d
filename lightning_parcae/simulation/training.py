"""Training on a fake clock: whole steps by arithmetic, and what every second was used for.

A stretch of training is its begin, the time of a step and a number of whole steps; nothing happens per step. What is
lost with a step that breaks, or with a return to a checkpoint, is booked as ``redo`` where it was first done, so that
what remains are the steps that last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.simulation.result import Cause, Span, merge_spans

# Share of a step that floats may be off where a step ends in this very moment.
_TINY = 1e-6


@dataclass(slots=True)
class _Stretch:
    """Time in which one thing happened; ``num_steps`` whole steps if it was training."""

    start_s: float
    end_s: float
    config: ParallelConfig | None
    cause: Cause | None
    samples_per_s: float = 0.0
    first_step: int = 0
    num_steps: int = 0


class Training:
    """The steps of a job.

    Args:
        num_samples: Samples of a step.
        checkpoint_every_s: Seconds of training between two checkpoints, 0 for one after each step; None for none.

    Attributes:
        step: Steps that count, up to where training last stopped.
        checkpoint_step: Steps in the newest checkpoint; None before the first training.
        config: What runs, or ran last.
    """

    def __init__(self, num_samples: int, checkpoint_every_s: float | None) -> None:
        self.step = 0
        self.checkpoint_step: int | None = None
        self.config: ParallelConfig | None = None
        self._num_samples = num_samples
        self._checkpoint_every_s = checkpoint_every_s
        self._stretches: list[_Stretch] = []
        self._booked_s = 0.0
        self._step_s: float | None = None  # while it runs
        self._since_checkpoint_s = 0.0

    @property
    def is_running(self) -> bool:
        """Whether steps are being done."""
        return self._step_s is not None

    @property
    def booked_s(self) -> float:
        """Until when time has been accounted for; while it runs, when it began."""
        return self._booked_s

    def start(self, config: ParallelConfig, step_s: float) -> None:
        """Begin to train; all time before must be booked."""
        self.config, self._step_s = config, step_s
        if self.checkpoint_step is None and self._checkpoint_every_s is not None:
            self.checkpoint_step = self.step  # what a job begins with can be made again

    def steps_at(self, now: float) -> int:
        """Return how many whole steps have been done since training last began."""
        if self._step_s is None:
            return 0
        return int((now - self._booked_s) / self._step_s + _TINY)

    def boundary_after(self, now: float) -> float:
        """Return when the running step ends; a step that ends in this moment has been done, and the next one runs."""
        return self.time_of_step(self.steps_at(now) + 1)

    def time_of_step(self, count: int) -> float:
        """Return when so many steps will have been done since training last began."""
        assert self._step_s is not None
        return self._booked_s + count * self._step_s

    def stop(self, now: float) -> int:
        """Stop; a step that is not done is lost.

        Returns:
            Whole steps done since training began.
        """
        step_s, done = self._step_s, self.steps_at(now)
        assert step_s is not None
        end_s = min(self.time_of_step(done), now)
        self._append(_Stretch(self._booked_s, end_s, self.config, None, self._num_samples / step_s, self.step, done))
        self._note_checkpoints(done, step_s)
        self.step += done
        self._step_s = None
        self.book(now, "redo")
        return done

    def book(self, now: float, cause: Cause | None) -> None:
        """Account for the time until now; without a cause for a step that the end of the trace cuts off."""
        config = None if cause == "waiting" else self.config
        self._append(_Stretch(self._booked_s, now, config, cause))

    def roll_back(self) -> None:
        """Go back to the newest checkpoint: the steps since then have been done in vain."""
        target = self.checkpoint_step if self.checkpoint_step is not None else 0
        self.step = min(self.step, target)
        kept: list[_Stretch] = []
        for one in reversed(self._stretches):
            last = one.first_step + one.num_steps
            if one.num_steps and last > target:
                good = max(target - one.first_step, 0)
                middle = one.start_s + (one.end_s - one.start_s) * good / one.num_steps
                kept.append(_Stretch(middle, one.end_s, one.config, "redo"))
                if good:
                    kept.append(
                        _Stretch(one.start_s, middle, one.config, None, one.samples_per_s, one.first_step, good)
                    )
            else:
                kept.append(one)
        self._stretches = kept[::-1]
        self._since_checkpoint_s = 0.0

    def finish(self, now: float) -> None:
        """End at the end of the trace: a step that is not done by then does not count, but nothing was lost."""
        if self.is_running:
            step_s = self._step_s
            assert step_s is not None
            self.stop(self.time_of_step(self.steps_at(now)))
        if now > self._booked_s:
            self.book(now, None)

    @property
    def samples(self) -> float:
        """Samples that count."""
        return float(self.step * self._num_samples)

    def spans(self) -> tuple[Span, ...]:
        """Return what happened."""
        return merge_spans(
            [Span(one.start_s, one.end_s, one.config, one.samples_per_s, one.cause) for one in self._stretches]
        )

    def _append(self, stretch: _Stretch) -> None:
        if stretch.end_s > stretch.start_s:
            self._stretches.append(stretch)
        self._booked_s = max(stretch.end_s, self._booked_s)

    def _note_checkpoints(self, done: int, step_s: float) -> None:
        """Find the last of the steps just done after which a checkpoint was due."""
        every_s = self._checkpoint_every_s
        if every_s is None:
            return
        at = 0
        while True:
            ahead = max(1, math.ceil((every_s - self._since_checkpoint_s) / step_s - _TINY))
            if at + ahead > done:
                break
            at += ahead if every_s > 0 else done
            self._since_checkpoint_s, self.checkpoint_step = 0.0, self.step + at
        self._since_checkpoint_s += (done - at) * step_s
