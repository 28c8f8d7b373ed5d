"""The published forecast follows its rules, one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lightning_parcae.availability.arima import without_spikes
from lightning_parcae.planning.cost import MeasuredCost
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import ThroughputProfile
from lightning_parcae.planning.replay import MembershipStep, Running
from lightning_parcae.planning.space import ConfigSpace
from lightning_parcae.simulation.published import (
    PublishedForecast,
    advised,
    arima_110,
    monotone_tail,
    planned_ahead,
)

RATES = {(1, 2): 4.0, (1, 3): 5.0, (2, 2): 6.0, (2, 3): 8.0, (3, 2): 8.5}
PROFILE = ThroughputProfile("toy", {ParallelConfig(*config): rate for config, rate in RATES.items()})
SPACE = ConfigSpace(PROFILE, MeasuredCost(layer_bytes=(10,) * 6), max_instances=8)


@pytest.mark.parametrize(
    ("values", "cleaned"),
    [
        ([5, 3, 5, 5], [5, 5, 5, 5]),
        ([5, 3, 4, 2, 5], [5, 5, 5, 5, 5]),
        ([5, 3, 4, 2, 1, 5], [5, 3, 4, 2, 1, 5]),
        ([5, 6, 7], [5, 6, 7]),
    ],
)
def test_outliers_of_up_to_three_intervals_vanish(values: list[float], cleaned: list[float]) -> None:
    assert without_spikes(np.array(values, dtype=float)).tolist() == cleaned


@pytest.mark.parametrize(
    ("values", "tail"),
    [
        ([5, 3, 4, 6], [3, 3, 4, 6]),
        ([5, 3, 4, 3, 6], [3, 3, 3, 3, 6]),
        ([5, 8, 7, 6], [8, 8, 7, 6]),
        ([3, 4, 5], [3, 4, 5]),
    ],
)
def test_only_the_tail_after_a_turning_point_stays(values: list[float], tail: list[float]) -> None:
    assert monotone_tail(np.array(values, dtype=float)).tolist() == tail


def test_arima_finds_the_process_it_was_made_from() -> None:
    change, level, values = 0.0, 10.0, [10.0]
    for _ in range(30):
        change = 0.5 * change + 1.0
        level += change
        values.append(level)
    ahead = arima_110(np.array(values), 5)
    for value in ahead:
        change = 0.5 * change + 1.0
        level += change
        assert value == pytest.approx(level, rel=1e-6)
    assert arima_110(np.array([4.0, 4.0, 4.0]), 3).tolist() == [4.0, 4.0, 4.0]
    explosive = arima_110(np.cumsum(2.0 ** np.arange(12)), 40)
    assert np.isfinite(explosive).all()


def test_forecasts_chain_stay_near_and_in_bounds() -> None:
    rng = np.random.default_rng(0)
    for seed in range(40):
        forecast = PublishedForecast(seed)
        history = rng.integers(8, 33, size=30).tolist()
        for end in range(1, len(history) + 1):
            steps = forecast.steps(history[:end], horizon=10, capacity=32)
            assert len(steps) == 10
            assert steps[0].num_before == history[end - 1]
            for step, then in itertools.pairwise(steps):
                assert step.num_instances == then.num_before
                assert step.num_joined == 0 or step.num_lost == 0
                assert 0 <= step.num_instances <= 32


def test_a_constant_or_short_history_means_no_change_and_a_dip_makes_up_losses() -> None:
    for history in ([20], [20, 25, 22], [20] * 12):
        assert PublishedForecast().steps(history, horizon=10, capacity=32) == (MembershipStep(history[-1], 0, 0),) * 10
    dip = [20] * 6 + [14, 20, 20, 20]  # cleaned, it is flat; but something was lost
    lost = [
        sum(step.num_lost for step in PublishedForecast(seed).steps(dip, horizon=10, capacity=32)) for seed in range(9)
    ]
    assert max(lost) > 0
    assert len(set(lost)) > 1


def test_penalties_dampen_a_long_rise_and_are_never_reset() -> None:
    rise = list(range(10, 20))
    fresh, punished = PublishedForecast(), PublishedForecast()
    punished.steps(list(range(2, 22, 2)), horizon=10, capacity=64)
    slow = [10, 11, 11, 12, 12, 13, 13, 13, 14, 14]
    eager = fresh.steps(slow, horizon=10, capacity=64)
    later = punished.steps(slow, horizon=10, capacity=64)
    assert sum(step.num_joined for step in later) < sum(step.num_joined for step in eager)
    assert sum(step.num_joined for step in fresh.steps(rise, horizon=10, capacity=64)) <= 3


def test_the_advisor_drops_pipelines_and_never_adds_any() -> None:
    assert advised(ParallelConfig(3, 2), 6, SPACE) == ParallelConfig(3, 2)
    assert advised(ParallelConfig(3, 2), 8, SPACE) == ParallelConfig(3, 2)
    assert advised(ParallelConfig(3, 2), 5, SPACE) == ParallelConfig(2, 2)
    assert advised(ParallelConfig(1, 3), 2, SPACE) == ParallelConfig(1, 2)
    assert advised(ParallelConfig(1, 3), 1, SPACE) is None  # 1x1 is not in the profile
    assert advised(ParallelConfig(1, 3), 0, SPACE) is None
    assert advised(None, 8, SPACE) is None


def test_the_plan_believes_the_forecast_but_never_that_nothing_fits() -> None:
    running = Running(ParallelConfig(2, 2))
    grows = [MembershipStep(4, 2, 0), *[MembershipStep(6, 0, 0)] * 9]
    assert planned_ahead(grows, SPACE, running) in (ParallelConfig(3, 2), ParallelConfig(2, 3))
    dies = [MembershipStep(4, 0, 4), *[MembershipStep(0, 0, 0)] * 9]
    assert planned_ahead(dies, SPACE, running) is not None
