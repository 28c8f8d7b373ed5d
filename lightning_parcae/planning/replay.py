"""What a sequence of configurations would have trained, and the most that any sequence could have.

The rules are the reference system's: a change of membership happens when an interval begins; the migration it causes
pauses training; what of it is not finished by the end of the interval goes on in the next one; if another migration
begins before that, the rest is replaced by that migration plus :meth:`MigrationCost.overlap`.

Symbols: ``T`` length of an interval, ``S`` configurations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.planning.cost import MigrationCost, expected_pause_s
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.space import ConfigSpace

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MembershipStep:
    """What happens to the membership when an interval begins.

    Attributes:
        num_before: Instances before.
        num_joined: Instances that come.
        num_lost: Instances that go.
    """

    num_before: int
    num_joined: int
    num_lost: int

    @property
    def num_instances(self) -> int:
        """Instances afterwards."""
        return self.num_before + self.num_joined - self.num_lost


def membership_steps(trace: AvailabilityTrace, interval_s: float = 60.0) -> tuple[MembershipStep, ...]:
    """Cut a trace into intervals; the first one begins with nobody there before.

    An instance that comes and goes between two beginnings is never seen, as far as the counts tell.
    """
    _, go = trace.allocations_and_preemptions(interval_s)
    counts = trace.resample(interval_s).tolist()
    steps = []
    for before, after, gone in zip([0, *counts[:-1]], counts, go.tolist(), strict=True):
        lost = min(max(gone, before - after), before)
        steps.append(MembershipStep(before, after - before + lost, lost))
    return tuple(steps)


@dataclass(frozen=True)
class Score:
    """What a plan trained.

    Attributes:
        configs: The configuration of each interval.
        samples: Samples trained in each interval.
        paused_s: Seconds paused by migrations in each interval.
        interval_s: Length of an interval.
        num_migrations: Migrations.
    """

    configs: tuple[ParallelConfig | None, ...]
    samples: Floats
    paused_s: Floats
    interval_s: float
    num_migrations: int

    @property
    def samples_per_s(self) -> float:
        """Mean throughput."""
        return float(self.samples.sum()) / (len(self.samples) * self.interval_s)

    def between(self, first: int, last: int) -> float:
        """Return the mean throughput of intervals ``first`` to ``last - 1``."""
        return float(self.samples[first:last].sum()) / ((last - first) * self.interval_s)


@dataclass(frozen=True, slots=True)
class Running:
    """What runs when an interval begins.

    Attributes:
        config: The configuration, or None.
        remaining_s: What is left of its migration.
    """

    config: ParallelConfig | None = None
    remaining_s: float = 0.0


def replay(
    configs: Sequence[ParallelConfig | None],
    steps: Sequence[MembershipStep],
    space: ConfigSpace,
    *,
    interval_s: float = 60.0,
) -> Score:
    """Return what a plan would have trained.

    Args:
        configs: Configuration of each interval.
        steps: Membership changes, as many.
        space: Throughput and pauses.
        interval_s: Length of an interval.

    Raises:
        ValueError: If a configuration needs more instances than there are.
    """
    running = Running()
    samples, paused, migrations = [], [], 0
    for index, (config, step) in enumerate(zip(configs, steps, strict=True)):
        if config is not None and config.num_instances > step.num_instances:
            raise ValueError(f"interval {index}: {config} needs more than the {step.num_instances} instances there")
        running, done, pause, moved = advance(running, config, step, space, interval_s=interval_s)
        samples.append(done)
        paused.append(pause)
        migrations += moved
    return Score(tuple(configs), np.array(samples), np.array(paused), interval_s, migrations)


def advance(
    running: Running,
    config: ParallelConfig | None,
    step: MembershipStep,
    space: ConfigSpace,
    *,
    interval_s: float = 60.0,
) -> tuple[Running, float, float, bool]:
    """Go through one interval; return what runs then, samples, seconds paused and whether there was a migration."""
    old, new = space.index(running.config), space.index(config)
    pause = float(space.pauses_s(step.num_before, step.num_lost)[old, new])
    left, paused = settle(running, config, pause, float(space.overlap_s[new]), interval_s=interval_s)
    return left, float(space.rates[new]) * (interval_s - paused), paused, pause > 0


class PairPauses:
    """Expected pauses one pair of configurations at a time, remembered: a plan meets few of the pairs."""

    def __init__(self, cost: MigrationCost) -> None:
        self._cost = cost
        self._known: dict[tuple[ParallelConfig | None, ParallelConfig, int, int], tuple[float, float]] = {}

    def __call__(
        self, old: ParallelConfig | None, new: ParallelConfig | None, step: MembershipStep
    ) -> tuple[float, float]:
        """Return the pause, and what is paid on top if the last migration has not ended."""
        if new is None:
            return 0.0, 0.0
        before, lost = (step.num_before, step.num_lost) if step.num_lost else (0, 0)
        key = (old, new, before, lost)
        if key not in self._known:
            # Without a loss, who is a spare does not matter.
            before = before if lost else max(new.num_instances, old.num_instances if old is not None else 0)
            pause_s = expected_pause_s(self._cost, old, new, num_instances=before, num_lost=lost)
            self._known[key] = pause_s, float(self._cost.overlap((new,))[0])
        return self._known[key]


def settle(
    running: Running, config: ParallelConfig | None, pause_s: float, overlap_s: float, *, interval_s: float
) -> tuple[Running, float]:
    """Book the pause of a migration, or go on with the last one; return what runs then, and the seconds paused.

    Args:
        running: What ran before.
        config: What runs from now on.
        pause_s: The migration's pause, 0 if there is none.
        overlap_s: What is paid on top if the last migration has not ended.
        interval_s: Length of the interval.
    """
    total = running.remaining_s
    if pause_s > 0:
        total = pause_s + (overlap_s if running.remaining_s > 0 else 0.0)
    paused = min(total, interval_s)
    return Running(config, total - paused if config is not None else 0.0), paused


def best_possible(
    steps: Sequence[MembershipStep],
    space: ConfigSpace,
    *,
    interval_s: float = 60.0,
    last_s: float | None = None,
    start: Running | None = None,
) -> tuple[ParallelConfig | None, ...]:
    """Return the plan that trains the most, with the whole future known. Above it there is nothing.

    A dynamic program over what runs and what is left of its migration. Of two ways to one configuration, the one with
    at least as many samples and at most as much left is as good or better, so that only those that no other one beats
    in both are kept. Of equal plans, the one that starts from the earlier entry of the space.

    Args:
        steps: Membership changes of all intervals.
        space: Throughput and pauses.
        interval_s: Length of an interval.
        last_s: Length of the last one, if it is cut off.
        start: What runs before; nothing if None.
    """
    begin = start if start is not None else Running()
    # A way: (entry, samples, left of the migration). Each level remembers the way before.
    levels: list[list[tuple[int, float, float, int]]] = [[(space.index(begin.config), 0.0, begin.remaining_s, -1)]]
    for index, step in enumerate(steps):
        length_s = last_s if last_s is not None and index == len(steps) - 1 else interval_s
        pauses = space.pauses_s(step.num_before, step.num_lost)
        ways = levels[-1]
        entries = np.array([way[0] for way in ways])
        left = np.array([way[2] for way in ways])[:, None]
        total = pauses[entries]  # (ways, S)
        total = np.where(total > 0, total + np.where(left > 0, space.overlap_s[None, :], 0.0), left)
        gained = np.array([way[1] for way in ways])[:, None] + space.rates * np.maximum(length_s - total, 0.0)
        rest = np.maximum(total - length_s, 0.0)
        rest[:, 0] = 0.0
        level: list[tuple[int, float, float, int]] = []
        fits = np.flatnonzero(space.sizes <= step.num_instances)
        most = gained[:, fits].argmax(axis=0)
        nothing_left = rest[most, fits] == 0.0  # then no other way can be better
        for entry, way, is_best in zip(fits.tolist(), most.tolist(), nothing_left.tolist(), strict=True):
            kept = [way] if is_best else _undominated(gained[:, entry], rest[:, entry])
            level.extend((entry, float(gained[one, entry]), float(rest[one, entry]), one) for one in kept)
        levels.append(level)
    last = max(range(len(levels[-1])), key=lambda way: levels[-1][way][1])
    plan: list[ParallelConfig | None] = []
    for level in reversed(levels[1:]):
        entry, _, _, last = level[last]
        plan.append(space.configs[entry])
    return tuple(reversed(plan))


def _undominated(gained: Floats, rest: Floats) -> list[int]:
    order = np.lexsort((rest, -gained))
    kept: list[int] = []
    least = np.inf
    for way in order.tolist():
        if rest[way] < least:
            kept.append(way)
            least = rest[way]
            if least == 0.0:
                break
    return kept
