"""Parcae as published: its forecast of the availability and its plan, with their weaknesses, to compare with.

The rules are those of the artifact (JF-D/Parcae): the last counts, cleaned, go into an ARIMA(1,1,0) with a constant;
the forecast is bounded and turned into joins and losses; a dynamic program over a fixed horizon takes it for the truth;
what it says for the next interval is carried out whatever happens, but with fewer pipelines if fewer instances are
there. Two things differ: the model is fitted by conditional least squares, not by maximum likelihood, and the expected
pauses are exact, not sampled.

Where the artifact has numbers of its trace (at least 8 of 32 instances), here it is the same share of the most
instances that were seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_parcae.availability.arima import without_spikes
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.replay import MembershipStep, Running, best_possible
from lightning_parcae.planning.space import ConfigSpace

Floats = NDArray[np.float64]

HORIZON = 10  # the artifact's default
# How many intervals of history it takes to look so many ahead, where it is not as many.
_HISTORY = {14: 17, 7: 8, 5: 10}
_MOST_CHANGE = 3  # from the first interval of a forecast on
_LEAST_SHARE = 0.25  # 8 of 32
_PENALTIES = ((10, 0.5), (5, 0.75))  # a rise or fall of so many instances: what is expected of more of it


@dataclass
class PublishedForecast:
    """The artifact's predictor; it remembers its penalties, as the artifact's does.

    Attributes:
        seed: Of the losses that it makes up.
    """

    seed: int = 0
    _factors: tuple[float, float] = (1.0, 1.0)  # joins, losses
    _rng: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def steps(self, history: Sequence[int], *, horizon: int, capacity: int) -> tuple[MembershipStep, ...]:
        """Return what it expects to happen in the coming intervals.

        Args:
            history: Instances of each interval until now, at least one.
            horizon: Intervals to look ahead.
            capacity: Most instances there can be.
        """
        now = int(history[-1])
        length = _HISTORY.get(horizon, horizon)
        if len(history) < length:
            return (MembershipStep(now, 0, 0),) * horizon
        raw = np.asarray(history[-length:], dtype=np.float64)
        window = monotone_tail(without_spikes(raw))
        self._punish(window)
        forecast = np.full(horizon, window[-1])
        if np.ptp(window) > 0:
            forecast = np.rint(arima_110(window, horizon))
        forecast = np.clip(forecast, forecast[0] - _MOST_CHANGE, forecast[0] + _MOST_CHANGE)
        forecast = np.clip(forecast, _LEAST_SHARE * capacity, capacity)
        changes = np.diff(forecast, prepend=float(now))
        joins, losses = np.maximum(changes, 0.0), np.maximum(-changes, 0.0)
        if np.ptp(forecast) == 0 and np.ptp(raw) > 0:
            gone = np.maximum(-np.diff(raw), 0.0)
            losses += self._rng.poisson(min(raw.std(), raw.var(), gone.mean()), horizon)
        return self._rounded(now, joins, losses, capacity)

    def _punish(self, window: Floats) -> None:
        rises = np.diff(window)
        total = abs(float(window[-1] - window[0]))
        factor = next((factor for least, factor in _PENALTIES if total >= least), None)
        if factor is not None and (rises >= 0).all():
            self._factors = (factor, self._factors[1])
        elif factor is not None and (rises <= 0).all():
            self._factors = (self._factors[0], factor)

    def _rounded(self, now: int, joins: Floats, losses: Floats, capacity: int) -> tuple[MembershipStep, ...]:
        path = now + np.cumsum(self._factors[0] * joins - self._factors[1] * losses)
        counts = np.clip(np.rint(path), 0, max(capacity, now)).astype(np.int64).tolist()
        return tuple(
            MembershipStep(before, max(after - before, 0), max(before - after, 0))
            for before, after in zip([now, *counts[:-1]], counts, strict=True)
        )


def monotone_tail(values: Floats) -> Floats:
    """Level what was before a turning point: the last minimum below both ends, else the last maximum above them."""
    result = values.copy()
    for extreme, is_turn in ((values.min(), min(values[0], values[-1])), (values.max(), max(values[0], values[-1]))):
        if extreme != is_turn:
            last = int(np.flatnonzero(values == extreme)[-1])
            result[:last] = extreme
            break
    return result


def arima_110(values: Floats, horizon: int) -> Floats:
    """Forecast by ARIMA(1,1,0) with a constant, fitted by conditional least squares.

    Args:
        values: At least three.
        horizon: Steps ahead.
    """
    changes = np.diff(values)
    before, after = changes[:-1], changes[1:]
    spread = float(((before - before.mean()) ** 2).sum())
    slope = float(((before - before.mean()) * (after - after.mean())).sum()) / spread if spread > 0 else 0.0
    slope = float(np.clip(slope, -0.99, 0.99))  # stationary, or the forecast would explode
    constant = float(after.mean() - slope * before.mean())
    change, level = float(changes[-1]), float(values[-1])
    forecast = np.empty(horizon)
    for step in range(horizon):
        change = constant + slope * change
        level += change
        forecast[step] = level
    return forecast


def planned_ahead(expected: Sequence[MembershipStep], space: ConfigSpace, running: Running) -> ParallelConfig | None:
    """Return what the published planner wants to run in the next interval.

    It never plans for fewer instances than the smallest configuration needs: then it plans for so many, and no event.
    """
    smallest = int(space.sizes[1:].min())
    steps = []
    for step in expected:
        is_enough = min(step.num_before, step.num_instances) >= smallest
        steps.append(step if is_enough else MembershipStep(max(step.num_before, smallest), 0, 0))
    return best_possible(steps, space, start=running)[0]


def advised(wanted: ParallelConfig | None, num_instances: int, space: ConfigSpace) -> ParallelConfig | None:
    """Return what the published advisor runs when fewer instances are there: fewer pipelines, or one shallow one.

    That may be a configuration which cannot train; then nothing does.
    """
    if wanted is None or num_instances == 0:
        return None
    if wanted.num_instances > num_instances:
        depth = num_instances // wanted.num_stages
        wanted = ParallelConfig(depth, wanted.num_stages) if depth else ParallelConfig(1, num_instances)
    return wanted if wanted in space.configs else None
