"""ARIMA behind its guards. The only tests that load pmdarima."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_parcae.availability.arima import ArimaForecaster, _without_spikes
from lightning_parcae.availability.forecast import NOTHING, Forecaster

AWKWARD: dict[str, list[float]] = {
    "empty": [],
    "one point": [5],
    "two points": [5, 6],
    "twelve points": [5, 6, 5, 6, 7, 5, 6, 8, 5, 6, 5, 7],
    "constant": [7] * 30,
    "gaps": [np.nan, 4, np.nan, 5, 6, np.nan] * 5,
    "only gaps": [np.nan] * 30,
    "ramp up": list(range(33)),
    "ramp down to nothing": list(range(32, -1, -1)),
    "cliff": [30] * 25 + [2],
    "full, then a dip": [32] * 25 + [31],
    "alternating": [3, 9] * 15,
    "infinite": [np.inf, 4, -np.inf, 2] * 8,
}


@pytest.fixture(scope="module", params=[(1, 1, 0), None], ids=["fixed", "auto"])
def forecaster(request: pytest.FixtureRequest) -> ArimaForecaster:
    return ArimaForecaster(request.param)


@pytest.mark.parametrize("name", AWKWARD)
def test_no_history_is_too_awkward(forecaster: Forecaster, name: str) -> None:
    forecast = forecaster.forecast(AWKWARD[name], horizon=6, capacity=32)
    assert len(forecast.laws) == 6
    counts = forecast.counts(5, 32)
    assert counts.sum(axis=1) == pytest.approx(np.ones(6))
    known = [value for value in AWKWARD[name] if np.isfinite(value)]
    if len(set(known)) < 2 or len(AWKWARD[name]) < 13:
        assert forecast.laws == (NOTHING,) * 6


def test_a_ramp_goes_on_within_what_was_seen_and_what_there_can_be() -> None:
    forecaster = ArimaForecaster((1, 1, 0))
    forecast = forecaster.forecast([4, 6, 7, 9, 10, 12, 14, 15, 17, 18, 20, 22, 23, 25, 26], horizon=8, capacity=30)
    assert forecaster.problem is None
    mean = forecast.counts(26, 30) @ np.arange(31)
    assert 26 < mean[0] <= 28
    assert (np.diff(mean[:4]) > 0).all()
    assert (mean <= 30).all()


def test_loaded_only_when_it_is_needed() -> None:
    code = (
        "import sys\n"
        "from lightning_parcae.availability.arima import ArimaForecaster\n"
        "ArimaForecaster().forecast([5] * 40, horizon=3, capacity=8)\n"
        "assert not {'pmdarima', 'sklearn', 'pandas', 'statsmodels', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


class FakeModel:
    order = (2, 1, 0)

    def __init__(self, means: list[float]) -> None:
        self.means = means

    def fit(self, recent: Any) -> FakeModel:
        return self

    def predict(self, horizon: int) -> list[float]:
        return self.means[:horizon]

    def resid(self) -> list[float]:
        return [9.0, 9.0, -1.0, 0.0, 0.0, 1.0]


def fake(monkeypatch: pytest.MonkeyPatch, means: list[float], calls: list[str]) -> None:
    def fixed(*, order: tuple[int, int, int], with_intercept: bool) -> FakeModel:
        calls.append(f"fixed {order}")
        return FakeModel(means)

    def search(recent: Any, **options: Any) -> FakeModel:
        calls.append("search")
        return FakeModel(means)

    monkeypatch.setitem(sys.modules, "pmdarima", SimpleNamespace(ARIMA=fixed, auto_arima=search))


HISTORY = [5, 6, 5, 7, 6, 8, 7, 6, 5, 6, 7, 8, 9, 8]


def test_spread_is_the_models_own_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, [9.0, 9.0], [])
    first, second = ArimaForecaster().forecast(HISTORY, horizon=2, capacity=20).laws
    assert dict(zip(first.kinds, first.chances, strict=True)) == {(0, 0): 0.25, (0, 1): 0.5, (0, 2): 0.25}
    assert dict(zip(second.kinds, second.chances, strict=True)) == {(1, 0): 0.25, (0, 0): 0.5, (0, 1): 0.25}


def test_a_model_that_runs_away_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, [500.0, -500.0], [])
    forecast = ArimaForecaster().forecast(HISTORY, horizon=2, capacity=20)
    assert forecast.laws[0].expected_joined <= 2.0  # never rose by more than two at once
    fake(monkeypatch, [np.nan, 1.0], [])
    forecaster = ArimaForecaster()
    assert forecaster.forecast(HISTORY, horizon=2, capacity=20).laws == (NOTHING,) * 2
    assert forecaster.problem == "the model diverged"


def test_orders_are_searched_now_and_then_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fake(monkeypatch, [8.0], calls)
    forecaster = ArimaForecaster(None, pause=3)
    for length in (14, 15, 16, 17, 18):
        forecaster.forecast((HISTORY * 2)[:length], horizon=1, capacity=20)
    assert forecaster.forecast(HISTORY, horizon=0, capacity=20).laws == ()
    assert calls == ["search", "fixed (2, 1, 0)", "fixed (2, 1, 0)", "search", "fixed (2, 1, 0)"]


def test_a_slow_fit_is_not_repeated_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fake(monkeypatch, [8.0], calls)
    ticks = iter([0.0, 9.0, 10.0, 10.5])
    forecaster = ArimaForecaster(budget_s=5.0, pause=2, clock=lambda: next(ticks))
    problems = []
    for length in (14, 15, 16):
        forecaster.forecast((HISTORY * 2)[:length], horizon=1, capacity=20)
        problems.append(forecaster.problem)
    assert problems == [None, "the last fit took too long", None]
    assert len(calls) == 2


def test_whatever_the_library_raises_stays_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> Any:
        raise ZeroDivisionError("inside")

    monkeypatch.setitem(sys.modules, "pmdarima", SimpleNamespace(ARIMA=broken))
    forecaster = ArimaForecaster()
    assert forecaster.forecast(HISTORY, horizon=2, capacity=20).laws == (NOTHING,) * 2
    assert forecaster.problem == "ZeroDivisionError: inside"
    monkeypatch.setitem(sys.modules, "pmdarima", None)
    forecaster.forecast(HISTORY, horizon=2, capacity=20)
    assert forecaster.problem is not None
    assert "ModuleNotFoundError" in forecaster.problem


def test_short_spikes_are_removed() -> None:
    values = np.array([5.0, 3, 5, 5, 8, 9, 7, 5, 2, 2, 2, 2, 5])
    assert _without_spikes(values).tolist() == [5, 5, 5, 5, 5, 5, 5, 5, 2, 2, 2, 2, 5]


@pytest.mark.parametrize("wrong", [{"window": 5}, {"min_points": 3}, {"pause": 0}])
def test_nonsense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="window >= min_points >= 4"):
        ArimaForecaster(**wrong)  # type: ignore[arg-type]
