"""How good a forecaster would have been, and which one to trust.

A back-test with a rolling origin asks the forecaster at each past moment, shows it only what was known then, and
compares the distribution it gave with what came. Scores are in instances; smaller is better:

* mean absolute error of the median;
* CRPS, the integral of the squared distance between the forecast's and the true distribution function: the absolute
  error of a forecast that claims to be certain, less for one that spreads its bets rightly;
* pinball loss of the 10, 50 and 90 % quantiles;
* share of the truth within the band from the 10 to the 90 % quantile, which should be at least 80 %.

The yardstick is "nothing changes". Skill is one minus the ratio of CRPS: at most 0 means that the forecaster is of no
use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_parcae.availability.forecast import Forecast, Forecaster, LastValue, cleaned, quantile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_QUANTILES = (0.1, 0.5, 0.9)
# A distribution that is better as a whole may have a median that is worse by so little.
_ERROR_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class ForecastScore:
    """How good one or many forecasts were, averaged over the horizon.

    Attributes:
        absolute_error: Mean absolute error of the median, in instances.
        crps: Continuous ranked probability score, in instances.
        pinball: Mean pinball loss of three quantiles, in instances.
        coverage: Share of the truth within the 80 % band.
    """

    absolute_error: float
    crps: float
    pinball: float
    coverage: float


def score(counts: Floats, truth: Ints) -> ForecastScore:
    """Compare forecast distributions with what came.

    Args:
        counts: Distribution of the instances, shape ``(H, C + 1)``.
        truth: What came, shape ``(H,)``.
    """
    below = np.cumsum(counts, axis=1)
    step = np.arange(counts.shape[1])[None, :] >= truth[:, None]
    low, middle, high = (quantile(counts, share) for share in _QUANTILES)
    pinball = [
        np.maximum(share * (truth - guess), (share - 1) * (truth - guess)).mean()
        for share, guess in zip(_QUANTILES, (low, middle, high), strict=True)
    ]
    return ForecastScore(
        absolute_error=float(np.abs(truth - middle).mean()),
        crps=float(((below - step) ** 2).sum(axis=1).mean()),
        pinball=float(np.mean(pinball)),
        coverage=float(((low <= truth) & (truth <= high)).mean()),
    )


@dataclass(frozen=True, slots=True)
class Backtest:
    """Result of a back-test.

    Attributes:
        name: The forecaster.
        num_forecasts: Moments it was asked at.
        mean: Means of the scores.
        normalised_error: Absolute error over the mean number of instances.
        skill: One minus CRPS over that of "nothing changes"; 0 if nothing ever changed.
        error_skill: The same for the absolute error.
        seconds_per_call: Mean time of a forecast; None without a clock.
    """

    name: str
    num_forecasts: int
    mean: ForecastScore
    normalised_error: float
    skill: float
    error_skill: float
    seconds_per_call: float | None


def backtest(
    forecaster: Forecaster,
    history: ArrayLike,
    *,
    horizon: int,
    capacity: int | None = None,
    first: int = 12,
    stride: int = 1,
    clock: Callable[[], float] | None = None,
) -> Backtest:
    """Ask a forecaster at every past moment and compare with what came.

    Args:
        forecaster: Whom to ask.
        history: Instances of each interval.
        horizon: Intervals ahead.
        capacity: Most instances there can be; the most there were if None.
        first: Intervals known at the first question.
        stride: Intervals between two questions.
        clock: Seconds, to measure the time of a call.

    Raises:
        ValueError: If the history is too short for one question.
    """
    most = int(np.nanmax(np.asarray(history, dtype=np.float64))) if capacity is None else capacity
    counts = cleaned(history, most)
    if horizon < 1 or stride < 1 or first < 1 or len(counts) < first + horizon:
        raise ValueError(
            f"a back-test of {horizon} intervals after the first {first} needs {first + max(horizon, 1)} intervals of "
            f"history, got {len(counts)}"
        )
    scores, yardstick, seconds = [], [], 0.0
    for now in range(first, len(counts) - horizon + 1, stride):
        known, truth = counts[:now], counts[now : now + horizon]
        started = clock() if clock is not None else 0.0
        forecast = forecaster.forecast(known, horizon=horizon, capacity=most)
        seconds += clock() - started if clock is not None else 0.0
        scores.append(score(forecast.counts(int(known[-1]), most), truth))
        yardstick.append(np.abs(truth - known[-1]).mean())
    mean, base = _mean(scores), float(np.mean(yardstick))
    return Backtest(
        name=forecaster.name,
        num_forecasts=len(scores),
        mean=mean,
        normalised_error=mean.absolute_error / max(float(counts.mean()), 1e-9),
        skill=_skill(mean.crps, base),
        error_skill=_skill(mean.absolute_error, base),
        seconds_per_call=seconds / len(scores) if clock is not None else None,
    )


def _mean(scores: Sequence[ForecastScore]) -> ForecastScore:
    names = ("absolute_error", "crps", "pinball", "coverage")
    return ForecastScore(*(float(np.mean([getattr(one, name) for one in scores])) for name in names))


def _skill(loss: float, base: float) -> float:
    return 1.0 - loss / base if base > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """Whose forecast to use.

    Attributes:
        forecast: The forecast.
        skill: Its skill so far on this job.
        reason: One line for people: which one, and why.
    """

    forecast: Forecast
    skill: float
    reason: str


class ForecastChooser:
    """Use the forecaster that has shown skill on this job's own history, else "nothing changes".

    Each interval every candidate forecasts; when the truth is known, all are scored. A candidate is used if its CRPS is
    clearly smaller than that of the yardstick (by a margin, and by more than chance gives) and the error of its median
    at most 1 % larger.

    Args:
        candidates: Whom to choose from, the yardstick not among them.
        horizon: Intervals ahead.
        capacity: Most instances there can be.
        min_scores: Scored forecasts before anyone is trusted.
        memory: Scored forecasts that are remembered.
        margin: Skill that it takes.
    """

    def __init__(
        self,
        candidates: Sequence[Forecaster],
        *,
        horizon: int,
        capacity: int,
        min_scores: int = 60,
        memory: int = 240,
        margin: float = 0.02,
    ) -> None:
        if horizon < 1 or min_scores < 1 or memory < min_scores:
            raise ValueError(
                "needed are a horizon and min_scores of at least 1 and no shorter memory, got "
                f"{horizon}, {min_scores} and {memory}"
            )
        self._yardstick = LastValue()
        self._candidates: tuple[Forecaster, ...] = (self._yardstick, *candidates)
        if len({one.name for one in self._candidates}) != len(self._candidates):
            raise ValueError(f"names must differ, got {[one.name for one in self._candidates]}")
        self._horizon = horizon
        self._capacity = capacity
        self._min_scores = min_scores
        self._margin = margin
        self._counts: list[int] = []
        self._open: deque[list[Floats]] = deque()  # distributions whose truth is not known yet, oldest first
        self._scores: deque[list[ForecastScore]] = deque(maxlen=memory)

    def update(self, num_instances: float) -> Choice:
        """Take note of the instances of the interval that has begun, and choose a forecast.

        Args:
            num_instances: Instances now; NaN if unknown.
        """
        previous = self._counts[-1] if self._counts else 0
        now = int(np.clip(num_instances, 0, self._capacity)) if np.isfinite(num_instances) else previous
        self._counts.append(now)
        if len(self._open) == self._horizon:
            truth = np.array(self._counts[-self._horizon :], dtype=np.int64)
            self._scores.append([score(counts, truth) for counts in self._open.popleft()])
        forecasts = [
            one.forecast(self._counts, horizon=self._horizon, capacity=self._capacity) for one in self._candidates
        ]
        self._open.append([forecast.counts(now, self._capacity) for forecast in forecasts])
        return self._choose(forecasts)

    def replay(self, history: ArrayLike) -> Choice:
        """Take note of a whole history, as when another instance takes over; return the last choice.

        Raises:
            ValueError: If the history is empty.
        """
        choice: Choice | None = None
        for count in np.asarray(history, dtype=np.float64).ravel().tolist():
            choice = self.update(count)
        if choice is None:
            raise ValueError("a history needs at least one interval")
        return choice

    def _choose(self, forecasts: Sequence[Forecast]) -> Choice:
        nothing = forecasts[0]
        if len(self._scores) < self._min_scores:
            known = f"{len(self._scores)} of {self._min_scores} forecasts scored"
            return Choice(nothing, 0.0, f"{self._yardstick.name}: {known}")
        means = [_mean([row[index] for row in self._scores]) for index in range(len(forecasts))]
        base = means[0]
        best = 0
        for index in range(1, len(forecasts)):
            fits = means[index].absolute_error <= base.absolute_error * (1 + _ERROR_TOLERANCE) + 1e-12
            if (
                fits
                and self._is_sure(index)
                and means[index].crps < min(base.crps * (1 - self._margin), means[best].crps)
            ):
                best = index
        skills = [_skill(mean.crps, base.crps) for mean in means]
        rest = ", ".join(
            f"{one.name} {skill:+.0%}"
            for index, (one, skill) in enumerate(zip(self._candidates, skills, strict=True))
            if index not in (0, best)
        )
        others = f"; others: {rest}" if rest else ""
        if best == 0:
            return Choice(nothing, 0.0, f"{self._yardstick.name}: no forecaster has skill against it{others}")
        name = self._candidates[best].name
        text = f"{name}: skill {skills[best]:+.0%} over {len(self._scores)} forecasts{others}"
        return Choice(forecasts[best], skills[best], text)

    def _is_sure(self, index: int) -> bool:
        """Return whether a candidate's lead is more than one standard error; overlapping forecasts count once."""
        leads = np.array([row[0].crps - row[index].crps for row in self._scores])
        independent = max(len(leads) / self._horizon, 1.0)
        return bool(leads.mean() > leads.std() / np.sqrt(independent))
