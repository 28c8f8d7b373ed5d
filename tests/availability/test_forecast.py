"""Forecasts as distributions, the simple forecasters, and what every forecaster must stand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lightning_parcae.availability.forecast import (
    NOTHING,
    EventLaw,
    EventRates,
    Forecast,
    Forecaster,
    LastValue,
    certain_forecast,
    cleaned,
    outcome,
    quantile,
)

AWKWARD = {
    "empty": [],
    "one point": [5],
    "two points": [5, 6],
    "constant": [7] * 20,
    "only gaps": [np.nan] * 5,
    "gaps": [np.nan, 4, np.nan, np.nan, 6, np.nan],
    "ramp up": list(range(20)),
    "ramp down to nothing": list(range(20, -1, -1)),
    "cliff": [30] * 15 + [2],
    "zeros": [0] * 12,
    "full": [32] * 12,
    "beyond capacity": [50, 60, 70],
    "negative and infinite": [-3, np.inf, 4, -np.inf, 2],
}


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize(
    "forecaster", [LastValue(), EventRates(), EventRates(memory=5), EventRates(prior_intervals=0.0)]
)
@pytest.mark.parametrize("horizon", [0, 1, 5])
def test_no_history_is_too_awkward(forecaster: Forecaster, name: str, horizon: int) -> None:
    forecast = forecaster.forecast(AWKWARD[name], horizon=horizon, capacity=32)
    assert len(forecast.laws) == horizon
    counts = forecast.counts(7, 32)
    assert counts.shape == (horizon, 33)
    assert (counts >= 0).all()
    assert counts.sum(axis=1) == pytest.approx(np.ones(horizon))
    assert forecast.by == forecaster.name


@pytest.mark.parametrize("now", [0, 2, 4])
def test_counts_equal_enumeration(now: int) -> None:
    laws = (
        EventLaw(((0, 0), (1, 0), (0, 2)), (0.5, 0.3, 0.2)),
        EventLaw(((2, 1), (0, 3)), (0.6, 0.4)),
        EventLaw.certain(1, 0),
    )
    capacity = 4
    expected = np.zeros((3, capacity + 1))
    for path in itertools.product(*[range(len(law.kinds)) for law in laws]):
        chance, count = 1.0, now
        for step, (law, kind) in enumerate(zip(laws, path, strict=True)):
            chance *= law.chances[kind]
            _, count = outcome(count, law.kinds[kind], capacity)
            rest = np.prod([len(law.kinds) for law in laws[step + 1 :]])
            expected[step, count] += chance / rest
    assert Forecast(laws).counts(now, capacity) == pytest.approx(expected)


def test_event_never_takes_more_than_there_is_nor_exceeds_capacity() -> None:
    assert outcome(3, (5, 0), 8) == (3, 0)
    assert outcome(7, (1, 4), 8) == (1, 8)
    assert outcome(10, (1, 4), 8) == (1, 9)


def test_rates_are_counted_where_an_event_was_possible() -> None:
    # Ten intervals: at capacity half of the time, then one loss of two, one allocation of one.
    history = [4, 4, 4, 4, 4, 4, 2, 2, 3, 3, 3]
    law = EventRates(prior_intervals=0.0).law(history, capacity=4)
    chances = dict(zip(law.kinds, law.chances, strict=True))
    assert chances[2, 0] == pytest.approx(1 / 10)
    assert chances[0, 1] == pytest.approx(1 / 4)
    assert law.expected_lost == pytest.approx(0.2)
    assert law.expected_joined == pytest.approx(0.25)


def test_prior_speaks_alone_at_first_and_fades() -> None:
    rates = EventRates()
    at_first = rates.law([], capacity=8)
    assert dict(zip(at_first.kinds, at_first.chances, strict=True))[1, 0] == pytest.approx(0.05)
    later = rates.law([8] * 2000, capacity=8)
    assert dict(zip(later.kinds, later.chances, strict=True))[1, 0] == pytest.approx(0.05 * 40 / 2039)


def test_large_events_are_pooled() -> None:
    history = [100, 95, 100, 93, 100, 88, 100, 50, 100, 48]
    law = EventRates(prior_intervals=0.0).law(history, capacity=100)
    assert {lost for lost, _ in law.kinds if lost} == {6, 12, 51}
    assert sum(law.chances) == pytest.approx(1.0)
    assert law.chances[0] == pytest.approx(0.05)  # never certain that something happens


def test_known_steps_override_the_forecast() -> None:
    law = EventLaw(((0, 0), (1, 0)), (0.9, 0.1))
    forecast = certain_forecast([(0, 0), (2, 1)], Forecast((law,) * 3, "x"), 5)
    assert forecast.laws == (NOTHING, EventLaw.certain(2, 1), law, law, law)
    assert certain_forecast([(1, 0)] * 4, Forecast(()), 2).laws == (EventLaw.certain(1, 0),) * 2
    assert certain_forecast([], Forecast(()), 2).laws == (NOTHING,) * 2


def test_gaps_take_the_last_known_count() -> None:
    assert cleaned(AWKWARD["gaps"], 5).tolist() == [4, 4, 4, 4, 5, 5]


def test_quantiles() -> None:
    counts = np.array([[0.1, 0.4, 0.5], [0.0, 1.0, 0.0]])
    assert [quantile(counts, share).tolist() for share in (0.1, 0.5, 0.9)] == [[0, 1], [1, 1], [2, 1]]


@pytest.mark.parametrize(
    ("kinds", "chances", "message"),
    [
        (((0, 0),), (0.5,), "sum to 1"),
        (((0, 0), (1, 0)), (1.5, -0.5), "at least 0 and sum to 1"),
        (((0, 0),), (0.5, 0.5), "each kind of event needs a chance"),
        (((-1, 0),), (1.0,), "counts of at least 0"),
    ],
)
def test_no_law_is_refused(kinds: tuple[tuple[int, int], ...], chances: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EventLaw(kinds, chances)
