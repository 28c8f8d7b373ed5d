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

:class:`ForecastChooser` uses a forecaster only as far as it has earned it. Against "nothing changes" a forecast loses
most if nothing changes, so its worst is known when it is made. (Let F be its distribution function, G that of the
present count n, Y that of the truth. The integral of (F - Y)^2 - (G - Y)^2 is that of (F - G)^2 + 2 (F - G)(G - Y), and
where G differs from Y, F - G and G - Y never have the same sign. For medians it is the triangle inequality.) The
chooser keeps two accounts, one for CRPS and one for the absolute error: each forecast used pays its worst in advance,
gets back what it did better than that, and 1 % of the yardstick's loss is paid in. An account never falls below zero.
So up to any moment of any history whatsoever the loss of the forecasts used is at most 1.01 times that of "nothing
changes". This holds from the chooser's first interval to its last; a new chooser begins anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_parcae.availability.forecast import NOTHING, Forecast, Forecaster, LastValue, cleaned, quantile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_QUANTILES = (0.1, 0.5, 0.9)
#: Share of the yardstick's loss by which a chooser may be worse, and the error of a trusted forecaster's median.
TOLERANCE = 0.01
_LEAST_TRUST = 1 / 16


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


def _losses(below: Floats, truth: int) -> Floats:
    """Return CRPS and absolute error of the median, shape ``(..., 2)``, for distribution functions ``(..., C + 1)``."""
    size = below.shape[-1]
    crps = ((below - (np.arange(size) >= truth)) ** 2).sum(axis=-1) + max(truth - size, 0)
    middle = (below >= 0.5 - 1e-12).argmax(axis=-1)
    return np.stack([crps, np.abs(middle - truth)], axis=-1).astype(np.float64)


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
        errors_ahead: Absolute error for each interval ahead, in instances.
        yardstick_ahead: The same for "nothing changes".
    """

    name: str
    num_forecasts: int
    mean: ForecastScore
    normalised_error: float
    skill: float
    error_skill: float
    seconds_per_call: float | None
    errors_ahead: tuple[float, ...] = ()
    yardstick_ahead: tuple[float, ...] = ()


def backtest(
    forecaster: Forecaster,
    history: ArrayLike,
    *,
    horizon: int,
    capacity: int | None = None,
    first: int = 12,
    stride: int = 1,
    clock: Callable[[], float] | None = None,
    progress: Callable[[float], None] | None = None,
    on_forecast: Callable[[int, Floats], None] | None = None,
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
        progress: Told the share that is done, up to 1.
        on_forecast: Told for each question how many intervals were known, and the distribution that was forecast.

    Raises:
        ValueError: If the history is too short for one question.
    """
    known_counts = np.asarray(history, dtype=np.float64)
    known_counts = known_counts[np.isfinite(known_counts)]
    most = capacity if capacity is not None else int(known_counts.max()) if len(known_counts) else 0
    counts = cleaned(history, most)
    if horizon < 1 or stride < 1 or first < 1 or len(counts) < first + horizon:
        raise ValueError(
            f"a back-test of {horizon} intervals after the first {first} needs {first + max(horizon, 1)} intervals of "
            f"history, got {len(counts)}"
        )
    scores, errors, yardstick, seconds = [], [], [], 0.0
    moments = range(first, len(counts) - horizon + 1, stride)
    for index, now in enumerate(moments):
        known, truth = counts[:now], counts[now : now + horizon]
        started = clock() if clock is not None else 0.0
        forecast = forecaster.forecast(known, horizon=horizon, capacity=most)
        seconds += clock() - started if clock is not None else 0.0
        distribution = forecast.counts(int(known[-1]), most)
        if on_forecast is not None:
            on_forecast(now, distribution)
        scores.append(score(distribution, truth))
        errors.append(np.abs(truth - quantile(distribution, 0.5)))
        yardstick.append(np.abs(truth - known[-1]))
        if progress is not None:
            progress((index + 1) / len(moments))
    mean, base = _mean(scores), float(np.mean(yardstick))
    return Backtest(
        name=forecaster.name,
        num_forecasts=len(scores),
        mean=mean,
        normalised_error=mean.absolute_error / max(float(counts.mean()), 1e-9),
        skill=_skill(mean.crps, base),
        error_skill=_skill(mean.absolute_error, base),
        seconds_per_call=seconds / len(scores) if clock is not None else None,
        errors_ahead=tuple(np.mean(errors, axis=0).tolist()),
        yardstick_ahead=tuple(np.mean(yardstick, axis=0).tolist()),
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
        forecast: The forecast, thinned by the trust.
        skill: The forecaster's skill so far on this job; 0 for "nothing changes".
        reason: One line for people: which one, and why.
        trust: Share of the expected events that is believed.
    """

    forecast: Forecast
    skill: float
    reason: str
    trust: float = 1.0


@dataclass(slots=True)
class _Open:
    """Forecasts of one moment whose truth is not known yet.

    Attributes:
        below: Distribution functions by forecaster and lead, those used last, shape ``(M + 1, H, C + 1)``.
        paid: Worst excess of the one used over the yardstick by lead, shape ``(H, 2)``.
        losses: Sums over the leads known, shape ``(M + 1, 2)``.
        num_known: Leads known.
    """

    below: Floats
    paid: Floats
    losses: Floats
    num_known: int = 0


class ForecastChooser:
    """Use the forecaster that has shown skill on this job's own history, else "nothing changes".

    Each interval every candidate forecasts; when the truth is known, all are scored. The one with the smallest CRPS of
    late is used if that is smaller than the yardstick's, and as far as the accounts allow (see the module): if they
    cannot bear all of the forecast, the chance of every event is halved until they can. Of the accounts, too, only what
    was gained lately remains: when times change, little can be lost.

    Args:
        candidates: Whom to choose from, the yardstick not among them.
        horizon: Intervals ahead.
        capacity: Most instances there can be; grows when there are more.
        min_scores: Scored forecasts before anyone is trusted.
        memory: Scored forecasts that are remembered; what the accounts hold is forgotten as fast.

    Attributes:
        capacity: Most instances there can be; may be raised at any time.
    """

    def __init__(
        self,
        candidates: Sequence[Forecaster],
        *,
        horizon: int,
        capacity: int,
        min_scores: int = 20,
        memory: int = 240,
    ) -> None:
        if horizon < 1 or min_scores < 1 or memory < min_scores:
            raise ValueError(
                "needed are a horizon and min_scores of at least 1 and no shorter memory, got "
                f"{horizon}, {min_scores} and {memory}"
            )
        self.capacity = capacity
        self._yardstick = LastValue()
        self._candidates: tuple[Forecaster, ...] = (self._yardstick, *candidates)
        if len({one.name for one in self._candidates}) != len(self._candidates):
            raise ValueError(f"names must differ, got {[one.name for one in self._candidates]}")
        self._horizon = horizon
        self._min_scores = min_scores
        self._memory = memory
        self._counts: list[int] = []
        self._open: deque[_Open] = deque()  # oldest first
        self._scores: deque[Floats] = deque()  # mean losses of each forecaster, shape (M, 2)
        self._sums = np.zeros((len(self._candidates), 2))
        self._account = np.zeros(2)

    def update(self, num_instances: float) -> Choice:
        """Take note of the instances of the interval that has begun, and choose a forecast.

        Args:
            num_instances: Instances now; NaN if unknown, then the last known count holds.
        """
        if not np.isfinite(num_instances):
            if not self._counts:
                return Choice(self._nothing(), 0.0, f"{self._yardstick.name}: nothing is known yet", 0.0)
            num_instances = self._counts[-1]
        now = max(round(num_instances), 0)
        self.capacity = max(self.capacity, now)
        self._counts.append(now)
        self._settle(now)
        forecasts = [
            one.forecast(self._counts, horizon=self._horizon, capacity=self.capacity) for one in self._candidates
        ]
        below = [np.cumsum(forecast.counts(now, self.capacity), axis=1) for forecast in forecasts]
        choice, used, paid = self._wager(*self._choose(forecasts), now)
        self._account -= paid.sum(axis=0)
        self._open.append(_Open(np.stack([*below, used]), paid, np.zeros((len(below) + 1, 2))))
        return choice

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

    def _settle(self, now: int) -> None:
        """Score what was said about the interval that has begun."""
        self._account *= 1.0 - 1.0 / self._memory
        size = max((item.below.shape[2] for item in self._open), default=1)
        said = np.ones((len(self._open), len(self._candidates) + 1, size))  # older ones may know fewer counts
        for row, item in zip(said, self._open, strict=True):
            row[:, : item.below.shape[2]] = item.below[:, item.num_known]
        for item, losses in zip(self._open, _losses(said, now), strict=True):
            base, used = losses[0], losses[-1]
            self._account += item.paid[item.num_known] - (used - base) + TOLERANCE * base
            item.losses += losses
            item.num_known += 1
        if len(self._open) == self._horizon:
            if len(self._scores) == self._memory:
                self._sums -= self._scores.popleft()
            self._scores.append(self._open.popleft().losses[:-1] / self._horizon)
            self._sums += self._scores[-1]

    def _wager(self, choice: Choice, index: int, now: int) -> tuple[Choice, Floats, Floats]:
        """Return how much of a choice the accounts can bear, its distribution functions, and its worst excess."""
        trust = 1.0
        while index and trust >= _LEAST_TRUST:
            forecast = choice.forecast if trust == 1.0 else choice.forecast.thinned(trust)
            below = np.cumsum(forecast.counts(now, self.capacity), axis=1)
            worst = _losses(below, now)  # the yardstick's losses are zero then
            if (worst.sum(axis=0) <= self._account).all():
                note = "" if trust == 1.0 else f"; {trust:.0%} of it believed"
                return Choice(forecast, choice.skill, choice.reason + note, trust), below, worst
            trust /= 2
        nothing = self._nothing()
        if index:
            reason = f"{self._yardstick.name}: too little gained yet to risk more ({choice.reason})"
            choice = Choice(nothing, 0.0, reason)
        return choice, np.cumsum(nothing.counts(now, self.capacity), axis=1), np.zeros((self._horizon, 2))

    def _nothing(self) -> Forecast:
        return self._yardstick.forecast((), horizon=self._horizon, capacity=self.capacity)

    def _choose(self, forecasts: Sequence[Forecast]) -> tuple[Choice, int]:
        """Return the choice by skill, and its index."""
        if len(self._scores) < self._min_scores:
            known = f"{len(self._scores)} of {self._min_scores} forecasts scored"
            return Choice(forecasts[0], 0.0, f"{self._yardstick.name}: {known}"), 0
        crps = self._sums[:, 0] / len(self._scores)
        best = 0
        for index in range(1, len(forecasts)):
            if crps[index] < crps[best]:
                best = index
        skills = [_skill(float(one), float(crps[0])) for one in crps]
        rest = ", ".join(
            f"{one.name} {skill:+.0%}"
            for index, (one, skill) in enumerate(zip(self._candidates, skills, strict=True))
            if index not in (0, best)
        )
        others = f"; others: {rest}" if rest else ""
        if best == 0:
            text = f"{self._yardstick.name}: no forecaster has skill against it{others}"
            return Choice(forecasts[0], 0.0, text), 0
        name = self._candidates[best].name
        text = f"{name}: skill {skills[best]:+.0%} over {len(self._scores)} forecasts{others}"
        return Choice(forecasts[best], skills[best], text), best


class ChosenForecasts:
    """A chooser asked like any forecaster, for back-tests: it hears of a history once, as it grows.

    Args:
        candidates: See :class:`ForecastChooser`.
        **options: See there.

    Attributes:
        choice: The last choice, None before the first.
        trusted: For each choice so far who was used and how far.
    """

    name = "chooser"

    def __init__(self, candidates: Sequence[Forecaster], **options: int) -> None:
        self.choice: Choice | None = None
        self.trusted: list[tuple[str, float]] = []
        self._candidates = candidates
        self._options = options
        self._chooser: ForecastChooser | None = None

    def forecast(self, history: ArrayLike, *, horizon: int, capacity: int) -> Forecast:
        """See :class:`~lightning_parcae.availability.forecast.Forecaster`."""
        if self._chooser is None:
            self._chooser = ForecastChooser(self._candidates, horizon=horizon, capacity=capacity, **self._options)
        for count in np.asarray(history, dtype=np.float64).ravel()[len(self.trusted) :].tolist():
            self.choice = self._chooser.update(count)
            self.trusted.append((self.choice.forecast.by, self.choice.trust))
        return Forecast((NOTHING,) * horizon, LastValue().name) if self.choice is None else self.choice.forecast
