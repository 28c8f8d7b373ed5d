"""Scores, back-tests, and the chooser that trusts only skill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from lightning_parcae.availability.arima import ArimaForecaster
from lightning_parcae.availability.backtest import (
    Choice,
    ChosenForecasts,
    ForecastChooser,
    _losses,
    backtest,
    score,
)
from lightning_parcae.availability.forecast import EventLaw, EventRates, Forecast, Forecaster, LastValue, cleaned
from lightning_parcae.simulation.workload import TRACES, read_trace


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


# --- never worse than last value by more than 1 % ---------------------------------------------------------------------


class Wild:
    """Says something else each time, from certain ruin to certain growth, but always the same for the same history."""

    def __init__(self, seed: int) -> None:
        self.name = f"wild {seed}"
        self.seed = seed

    def forecast(self, history: ArrayLike, *, horizon: int, capacity: int) -> Forecast:
        rng = np.random.default_rng([self.seed, len(np.asarray(history)) // (1 + self.seed % 7)])
        laws = []
        for _ in range(horizon):
            kinds = {(int(lost), 0) for lost in rng.integers(1, 9, 2)} | {
                (0, int(more)) for more in rng.integers(0, 9, 2)
            }
            chances = rng.dirichlet(np.full(len(kinds), 0.5))
            laws.append(EventLaw(tuple(sorted(kinds)), tuple((chances / chances.sum()).tolist())))
        return Forecast(tuple(laws), self.name)


def excess(
    counts: Sequence[float], candidates: Sequence[Forecaster], *, horizon: int = 12, **options: int
) -> tuple[Any, Any]:
    """Return CRPS and error of a chooser minus 1.01 times those of last value, summed up to each moment; worst of each.

    Every forecast that can be scored counts, from the first moment on.
    """
    known = cleaned(counts, 1000)
    capacity = int(known.max(initial=1))
    chooser = ForecastChooser(candidates, horizon=horizon, capacity=capacity, **options)
    used, base = [], []
    for index, count in enumerate(counts[: max(len(known) - horizon, 0)]):
        forecast = chooser.update(count).forecast
        truth = known[index + 1 : index + 1 + horizon]
        result = score(forecast.counts(int(known[index]), capacity), truth)
        used.append((result.crps, result.absolute_error))
        base.append(np.abs(truth - known[index]).mean())
    if not used:
        return 0.0, 0.0
    worst = (np.cumsum(used, axis=0) - 1.01 * np.cumsum(base)[:, None]).max(axis=0)
    return worst[0], worst[1]


ALL = (EventRates(), ArimaForecaster(built_in=True), Certain("falls", 1, 0), Certain("rises", 0, 1), Wild(3))


@pytest.mark.parametrize("name", TRACES)
def test_chooser_is_never_worse_on_the_example_traces(name: str) -> None:
    assert max(excess(read_trace(name).resample(60.0).tolist(), [EventRates()])) <= 1e-6


@pytest.mark.parametrize("name", TRACES)
def test_chooser_is_never_worse_on_bootstrapped_blocks(name: str) -> None:
    counts = read_trace(name).resample(60.0)
    changes = np.diff(counts)
    for seed in range(2):
        starts = np.random.default_rng(seed).integers(0, len(changes) - 30, 6)
        series = [int(counts[0])]
        for change in np.concatenate([changes[start : start + 30] for start in starts]).tolist():
            series.append(int(np.clip(series[-1] + change, 0, counts.max())))
        assert max(excess(series, ALL)) <= 1e-6


AFTER = {"calm": [0] * 120, "the opposite": [1] * 60 + [0] * 60, "swings": [3, -3] * 60, "a cliff": [-20] + [0] * 119}
ADVERSARIAL: dict[str, list[float]] = {
    **{f"falls for long, then {what}": [100, *(100 + np.cumsum([-1] * 80 + then))] for what, then in AFTER.items()},
    **{f"rises for long, then {what}": [20, *(20 + np.cumsum([1] * 80 + then))] for what, then in AFTER.items()},
    "turns whenever the accounts are full": [60, *(60 + np.cumsum(([-1] * 30 + [1] * 30) * 6))],
    "constant": [16] * 200,
    "constant, then a cliff": [16] * 100 + [2] * 60,
    "ramp": list(range(150)),
    "sawtooth": list(range(20)) * 9,
    "alternating": [3, 9] * 90,
    "spikes": ([12] * 9 + [3]) * 18,
    "one event only": [8] * 99 + [7] * 99,
    "gaps": [np.nan, np.nan, *([9, np.nan, 8, 8, np.nan, np.nan, 9] * 25)],
    "zeros": [0] * 90,
    "huge swings": [0, 900] * 60,
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_chooser_is_never_worse_on_series_made_to_fool_it(name: str) -> None:
    series = [float(count) for count in ADVERSARIAL[name]]
    if np.isnan(series[0]):
        assert (
            ForecastChooser(ALL, horizon=4, capacity=9).update(series[0]).reason == "last value: nothing is known yet"
        )
        series = series[2:]
    assert max(excess(series, ALL, horizon=4, min_scores=1, memory=50)) <= 1e-6


@pytest.mark.parametrize("length", range(13))
def test_chooser_stands_short_histories(length: int) -> None:
    series = [float(count) for count in range(5, 5 + length)]
    assert max(excess(series, ALL, horizon=3, min_scores=1, memory=9)) <= 1e-6


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(-4, 4), st.integers(1, 25)), min_size=1, max_size=12),
    noise=st.sampled_from([0, 0, 1, 5]),
    seed=st.integers(0, 99),
    horizon=st.sampled_from([1, 2, 6]),
)
def test_chooser_is_never_worse_whatever_comes(
    parts: list[tuple[int, int]], noise: int, seed: int, horizon: int
) -> None:
    slopes = np.concatenate([[slope] * length for slope, length in parts])
    series = np.clip(
        25 + np.cumsum(slopes + np.random.default_rng(seed).integers(-noise, noise + 1, len(slopes))), 0, 40
    )
    candidates = [Certain("falls", 2, 0), Certain("rises", 0, 2), Wild(seed), Wild(seed + 100), EventRates()]
    assert max(excess(series.tolist(), candidates, horizon=horizon, min_scores=1, memory=40)) <= 1e-6


def test_a_chooser_without_accounts_would_be_worse() -> None:
    """What the accounts are for: the series fools one that goes by past scores alone."""
    series = [float(count) for count in ADVERSARIAL["falls for long, then the opposite"]][60:]
    falls = Certain("falls", 1, 0)

    class Trusting(ForecastChooser):
        def _wager(self, choice: Choice, index: int, now: int) -> Any:
            self._account[:] = 1e9
            return super()._wager(choice, index, now)

    def total(kind: type[ForecastChooser]) -> float:
        chooser = kind([falls], horizon=4, capacity=100, min_scores=1)
        scores = [
            score(chooser.update(count).forecast.counts(int(count), 100), cleaned(series[at + 1 : at + 5], 100)).crps
            for at, count in enumerate(series[:-4])
        ]
        return sum(scores)

    base = sum(np.abs(np.array(series[at + 1 : at + 5]) - series[at]).mean() for at in range(len(series) - 4))
    assert total(ForecastChooser) <= 1.01 * base < total(Trusting)


def test_the_loss_against_no_change_is_largest_if_nothing_changes() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        below = np.cumsum(rng.dirichlet(np.full(9, 0.3)))
        now = int(rng.integers(9))
        worst = _losses(below, now)
        for truth in range(14):
            base = _losses((np.arange(9) >= now).astype(float), truth)
            assert base == pytest.approx([abs(now - truth)] * 2)
            assert (_losses(below, truth) - base <= worst + 1e-9).all()


def test_trust_grows_with_what_was_gained() -> None:
    chooser = ForecastChooser([Certain("falls", 1, 0)], horizon=3, capacity=200, min_scores=5)
    choices = [chooser.update(count) for count in range(200, 120, -1)]
    used = [choice for choice in choices if choice.skill > 0]
    assert used[0].trust < 1.0 and f"{used[0].trust:.0%} of it believed" in used[0].reason
    assert used[0].forecast.laws[0].expected_lost == pytest.approx(used[0].trust)
    assert used[-1].trust == 1.0 and used[-1].forecast.laws == (EventLaw.certain(1, 0),) * 3
    assert np.mean([one.trust for one in used[:15]]) < 0.5 and {one.trust for one in used[-30:]} == {1.0}


def test_a_lead_that_is_gone_is_noticed_at_once() -> None:
    chooser = ForecastChooser([Certain("falls", 1, 0)], horizon=3, capacity=200, min_scores=5, memory=40)
    assert chooser.replay(range(200, 120, -1)).trust == 1.0
    believed = [choice.skill > 0 for choice in (chooser.update(121) for _ in range(60))]
    assert believed[0] and sum(believed) < 25  # of the 40 that are remembered, most were good for longer than that
    assert not any(believed[25:])


def test_more_instances_than_ever_are_no_surprise() -> None:
    chooser = ForecastChooser([EventRates()], horizon=2, capacity=4, min_scores=1)
    for count in (4, 5, 9, 30, 2, 31):
        chooser.update(count)
    assert chooser.capacity == 31


def test_backtest_of_a_chooser() -> None:
    chosen = ChosenForecasts([Certain("falls", 1, 0)], min_scores=5)
    told: list[float] = []
    result = backtest(chosen, list(range(90, 20, -1)), horizon=4, first=1, stride=3, progress=told.append)
    assert len(chosen.trusted) == 64  # the last question was asked there; every interval once, whatever the stride
    assert chosen.choice is not None and chosen.choice.forecast.by == "falls"
    assert 0.5 < result.skill < 1.0
    assert result.yardstick_ahead == (1.0, 2.0, 3.0, 4.0)
    assert all(error < base for error, base in zip(result.errors_ahead, result.yardstick_ahead, strict=True))
    assert told == sorted(told) and told[-1] == 1.0
    assert ChosenForecasts([]).forecast([], horizon=2, capacity=3).by == "last value"


@pytest.mark.parametrize("history", [[], [np.nan] * 30])
def test_backtest_of_nothing_is_refused(history: list[float]) -> None:
    with pytest.raises(ValueError, match="of history, got 0"):
        backtest(LastValue(), history, horizon=1, first=1)
