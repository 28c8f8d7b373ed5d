"""Scores, back-tests, and the chooser that trusts only skill."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike

from lightning_parcae.availability.backtest import ForecastChooser, backtest, score
from lightning_parcae.availability.forecast import EventLaw, EventRates, Forecast, LastValue
from lightning_parcae.availability.trace import AvailabilityTrace

DATA = Path("/work/shared/data")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data folder is not here")


class Certain:
    """Says that so many go or come each interval."""

    def __init__(self, name: str, lost: int, joined: int) -> None:
        self.name = name
        self.law = EventLaw.certain(lost, joined)

    def forecast(self, history: ArrayLike, *, horizon: int, capacity: int) -> Forecast:
        return Forecast((self.law,) * horizon, self.name)


def test_a_certain_forecast_scores_its_absolute_error() -> None:
    counts = np.zeros((2, 8))
    counts[0, 3] = counts[1, 5] = 1.0
    result = score(counts, np.array([3, 7]))
    assert (result.absolute_error, result.crps, result.coverage) == (1.0, 1.0, 0.5)
    assert result.pinball == pytest.approx((0.1 + 0.5 + 0.9) * 2 / 2 / 3)


def test_spreading_bets_rightly_scores_better() -> None:
    certain = np.eye(1, 5, 2)
    spread = np.array([[0.0, 0.25, 0.5, 0.25, 0.0]])
    truths = [1, 2, 2, 3]
    mean = [np.mean([score(counts, np.array([truth])).crps for truth in truths]) for counts in (certain, spread)]
    assert mean[1] < mean[0]
    # By hand for a truth of 3: (0.25)^2 + (0.75)^2 below it, (1 - 1)^2 from it on.
    assert score(spread, np.array([3])).crps == pytest.approx(0.0625 + 0.5625)


def test_backtest_shows_only_the_past() -> None:
    seen: list[list[float]] = []

    class Spy(LastValue):
        def forecast(self, history: ArrayLike, *, horizon: int, capacity: int) -> Forecast:
            seen.append(list(np.asarray(history)))
            return super().forecast(history, horizon=horizon, capacity=capacity)

    history = [5, 4, 6, 3, 7, 2]
    result = backtest(Spy(), history, horizon=2, first=2, stride=2)
    assert seen == [[5, 4], [5, 4, 6, 3]]
    assert result.num_forecasts == 2
    assert result.mean.absolute_error == pytest.approx(np.mean([2, 1, 4, 1]))
    assert result.normalised_error == pytest.approx(2.0 / 4.5)
    assert (result.skill, result.error_skill, result.seconds_per_call) == (0.0, 0.0, None)


def test_backtest_measures_with_the_clock_it_is_given() -> None:
    ticks = iter(range(100))
    result = backtest(LastValue(), [1] * 6, horizon=1, first=3, clock=lambda: float(next(ticks)))
    assert result.seconds_per_call == 1.0
    assert result.skill == 0.0


@pytest.mark.parametrize("wrong", [{"horizon": 0}, {"first": 6}, {"stride": 0}, {"first": 0}])
def test_too_short_a_history_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a back-test of"):
        backtest(LastValue(), [1, 2, 3, 4, 5, 6], **({"horizon": 1} | wrong))  # type: ignore[arg-type]


def test_chooser_takes_whoever_knows() -> None:
    chooser = ForecastChooser([Certain("falls", 1, 0), Certain("rises", 0, 1)], horizon=3, capacity=100, min_scores=5)
    choices = [chooser.update(count) for count in range(80, 40, -1)]
    assert choices[0].reason == "last value: 0 of 5 forecasts scored"
    assert choices[7].reason == "last value: 5 of 5 forecasts scored" or choices[7].forecast.by
    assert choices[-1].forecast.laws == (EventLaw.certain(1, 0),) * 3
    assert choices[-1].skill == pytest.approx(1.0)
    assert choices[-1].reason.startswith("falls: skill +100% over 37 forecasts; others: rises -")


def test_chooser_takes_nobody_without_skill() -> None:
    chooser = ForecastChooser([Certain("rises", 0, 1)], horizon=2, capacity=100, min_scores=3)
    choice = chooser.replay([50] * 20)
    assert choice.forecast.by == "last value"
    assert choice.reason == "last value: no forecaster has skill against it; others: rises +0%"


def test_chooser_changes_its_mind_when_times_change() -> None:
    chooser = ForecastChooser([Certain("falls", 1, 0)], horizon=1, capacity=100, min_scores=5, memory=10)
    assert chooser.replay(range(90, 60, -1)).forecast.by == "falls"
    assert chooser.replay([60] * 12).forecast.by == "last value"
    assert chooser.update(float("nan")).forecast.by == "last value"


def test_chooser_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="names must differ"):
        ForecastChooser([LastValue()], horizon=1, capacity=3)
    with pytest.raises(ValueError, match="horizon and min_scores of at least 1"):
        ForecastChooser([], horizon=0, capacity=3)
    with pytest.raises(ValueError, match="at least one interval"):
        ForecastChooser([], horizon=1, capacity=3).replay([])


@needs_data
@pytest.mark.parametrize(
    "name",
    [
        "parcae/p3_counts.csv",
        "bamboo/g4dn-trace.csv",
        "bamboo/a100x1-east1b.txt",
        "bamboo/v100x1-east1c.txt",
        "parcae/segments/gpt-1.5b/trace_hh_55_65.txt",
        "parcae/segments/gpt-1.5b/trace_hl_15_25.txt",
        "parcae/segments/gpt-1.5b/trace_lh_80_90.txt",
        "parcae/segments/gpt-1.5b/trace_ll_10_11.txt",
    ],
)
def test_chooser_is_never_worse_than_no_change_by_more_than_one_percent(name: str) -> None:
    counts = AvailabilityTrace.read(DATA / name).resample(60.0)[:300]
    capacity, horizon = int(counts.max()), 8
    chooser = ForecastChooser([EventRates()], horizon=horizon, capacity=capacity)
    crps, errors, base = [], [], []
    for index, count in enumerate(counts[:-horizon].tolist()):
        truth = counts[index + 1 : index + 1 + horizon]
        result = score(chooser.update(count).forecast.counts(count, capacity), truth)
        crps.append(result.crps)
        errors.append(result.absolute_error)
        base.append(float(np.abs(truth - count).mean()))
    assert np.mean(errors) <= 1.01 * np.mean(base)
    assert np.mean(crps) <= 1.01 * np.mean(base)
