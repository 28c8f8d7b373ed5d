"""ARIMA behind its guards. The only tests that load pmdarima."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_parcae.availability import arima
from lightning_parcae.availability.arima import ArimaForecaster, _least_squares, without_spikes
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
    "negative": [-3, 4, -7, 2] * 8,
    "spikes": ([8] * 6 + [30]) * 5,
    "beyond capacity": [50, 60, 70, 65] * 8,
    "fractions": [3.4, 4.6, 5.5, 2.2] * 8,
    "huge": [1e12, 3, 5] * 10,
    "zeros and one": [0] * 30 + [1],
}


@pytest.fixture(scope="module", params=["fixed", "auto", "built-in"])
def forecaster(request: pytest.FixtureRequest) -> ArimaForecaster:
    order = None if request.param == "auto" else (1, 1, 0)
    return ArimaForecaster(order, built_in=request.param == "built-in")


@pytest.mark.parametrize("name", AWKWARD)
def test_no_history_is_too_awkward(forecaster: Forecaster, name: str) -> None:
    forecast = forecaster.forecast(AWKWARD[name], horizon=6, capacity=32)
    assert len(forecast.laws) == 6
    assert all(isinstance(count, int) for law in forecast.laws for kind in law.kinds for count in kind)
    counts = forecast.counts(5, 32)
    assert counts.shape == (6, 33)  # whole numbers from 0 to the capacity
    assert counts.sum(axis=1) == pytest.approx(np.ones(6))
    known = [value for value in AWKWARD[name] if np.isfinite(value)]
    if len(set(known)) < 2 or len(AWKWARD[name]) < 13 or name == "beyond capacity":
        assert forecast.laws == (NOTHING,) * 6
        assert "intervals are known" in str(forecaster.problem) or forecaster.problem == "the history is constant"


@pytest.mark.parametrize("length", range(13))
def test_twelve_points_and_fewer_are_too_few(length: int) -> None:
    values = [5, 7, 6, 8, 5, 9, 7, 6, 8, 7, 9, 5][:length]
    for forecaster in (ArimaForecaster(), ArimaForecaster(None)):
        assert forecaster.forecast(values, horizon=3, capacity=9).laws == (NOTHING,) * 3


@settings(max_examples=60, deadline=None)
@given(
    history=st.lists(st.one_of(st.integers(0, 20), st.just(float("nan"))), max_size=40),
    order=st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 1)),
)
def test_the_built_in_fit_takes_anything(history: list[float], order: tuple[int, int, int]) -> None:
    forecast = ArimaForecaster(order, built_in=True).forecast(history, horizon=4, capacity=16)
    assert forecast.counts(3, 16).sum(axis=1) == pytest.approx(np.ones(4))


def test_the_built_in_fit_finds_the_model_that_made_a_series() -> None:
    rng = np.random.default_rng(3)
    changes = [1.0]
    for noise in rng.normal(0, 0.1, 400):
        changes.append(0.6 * changes[-1] + noise)
    values = np.cumsum(changes)
    means, errors = _least_squares(values, (1, 1, 0), 2)
    assert (means[1] - means[0]) / (means[0] - values[-1]) == pytest.approx(0.6, abs=0.1)
    assert errors.std() == pytest.approx(0.1, rel=0.1)
    assert _least_squares(values, (0, 0, 0), 2)[0] == pytest.approx([values.mean()] * 2)
    squares = np.arange(20.0) ** 2
    assert _least_squares(squares, (1, 3, 0), 2)[0] == pytest.approx([400.0, 441.0])


def test_the_built_in_fit_is_near_to_the_library() -> None:
    rng = np.random.default_rng(0)
    history = np.clip(20 + np.cumsum(rng.integers(-2, 3, 40)), 0, 32)
    means = [
        ArimaForecaster(built_in=built_in).forecast(history, horizon=6, capacity=32).counts(int(history[-1]), 32)
        @ np.arange(33)
        for built_in in (False, True)
    ]
    assert means[0] == pytest.approx(means[1], abs=1.0)


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


@pytest.fixture(autouse=True)
def real_library_afterwards() -> Iterator[None]:
    yield
    arima._library.cache_clear()


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

    library(monkeypatch, SimpleNamespace(ARIMA=fixed, auto_arima=search))


def library(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Let pmdarima be something else."""
    arima._library.cache_clear()
    monkeypatch.setitem(sys.modules, "pmdarima", module)


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
    quick = ArimaForecaster(built_in=True)
    for length, num_calls in ((14, 1), (15, 1), (16, 2)):
        history = (HISTORY * 2)[:length]
        laws = forecaster.forecast(history, horizon=1, capacity=20).laws
        assert forecaster.problem is None
        assert len(calls) == num_calls
        assert (laws == quick.forecast(history, horizon=1, capacity=20).laws) == (length == 15)


def test_another_history_does_not_wait_for_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fake(monkeypatch, [8.0], calls)
    ticks = iter([0.0, 9.0, 10.0, 10.5])
    forecaster = ArimaForecaster(budget_s=5.0, pause=2, clock=lambda: next(ticks))
    forecaster.forecast(HISTORY * 4, horizon=1, capacity=20)
    forecaster.forecast(HISTORY, horizon=1, capacity=20)
    assert len(calls) == 2


def test_a_model_is_fitted_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Watching(FakeModel):
        def fit(self, recent: Any) -> FakeModel:
            seen.extend(pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas")
            return self

    library(monkeypatch, SimpleNamespace(ARIMA=lambda **_: Watching([8.0])))
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        ArimaForecaster().forecast(HISTORY, horizon=1, capacity=20)
    assert seen and set(seen) == {1}


def test_whatever_the_library_raises_stays_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> Any:
        raise ZeroDivisionError("inside")

    library(monkeypatch, SimpleNamespace(ARIMA=broken))
    forecaster = ArimaForecaster()
    assert forecaster.forecast(HISTORY, horizon=2, capacity=20).laws == (NOTHING,) * 2
    assert forecaster.problem == "ZeroDivisionError: inside"


BROKEN = {
    "missing": "raise ModuleNotFoundError(\"No module named 'pmdarima'\")",
    "made for another numpy": "raise ValueError('numpy.dtype size changed, may indicate binary incompatibility')",
}


@pytest.mark.parametrize("how", BROKEN)
def test_without_the_library_a_built_in_fit_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, how: str
) -> None:
    (tmp_path / "pmdarima.py").write_text(BROKEN[how])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pmdarima", raising=False)
    arima._library.cache_clear()
    for forecaster in (ArimaForecaster(), ArimaForecaster(None), ArimaForecaster()):
        for length in (14, 20):
            history = (HISTORY * 2)[:length]
            expected = ArimaForecaster(built_in=True).forecast(history, horizon=2, capacity=20)
            assert forecaster.forecast(history, horizon=2, capacity=20).laws == expected.laws != (NOTHING,) * 2
            assert forecaster.problem is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert BROKEN[how].split("(")[0].split()[1] in caplog.text


INTERRUPTED = {
    "as it is": "raise KeyboardInterrupt",
    "as another error": "try:\n    raise KeyboardInterrupt\nexcept BaseException:\n    raise NameError('odd')",
    "as the cause of one": "try:\n    raise KeyboardInterrupt\nexcept BaseException as e:\n    raise OSError from e",
}


@pytest.mark.parametrize("how", INTERRUPTED)
def test_an_interrupted_import_is_an_interrupt_and_no_reason_for_the_built_in_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, how: str
) -> None:
    (tmp_path / "pmdarima.py").write_text(INTERRUPTED[how])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pmdarima", raising=False)
    monkeypatch.setattr(arima, "_was_interrupted", False)
    arima._library.cache_clear()
    with pytest.raises(KeyboardInterrupt):
        ArimaForecaster().forecast(HISTORY, horizon=2, capacity=20)
    assert not caplog.records
    # What is half loaded may fail in any way the next time; a new installation would not help.
    (tmp_path / "pmdarima.py").write_text("raise NameError('np is not defined, as I am half loaded')")
    importlib.invalidate_caches()
    assert ArimaForecaster().forecast(HISTORY, horizon=2, capacity=20).laws != (NOTHING,) * 2
    assert "start Python anew" in caplog.text and "pip install" not in caplog.text


def test_an_interrupted_fit_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: Any) -> Any:
        try:
            raise KeyboardInterrupt
        except BaseException as error:
            raise ImportError("odd") from error

    library(monkeypatch, SimpleNamespace(ARIMA=interrupted))
    with pytest.raises(KeyboardInterrupt):
        ArimaForecaster().forecast(HISTORY, horizon=2, capacity=20)


def test_short_spikes_are_removed() -> None:
    values = np.array([5.0, 3, 5, 5, 8, 9, 7, 5, 2, 2, 2, 2, 5])
    assert without_spikes(values).tolist() == [5, 5, 5, 5, 5, 5, 5, 5, 2, 2, 2, 2, 5]


@pytest.mark.parametrize("wrong", [{"window": 5}, {"min_points": 3}, {"pause": 0}])
def test_nonsense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="window >= min_points >= 4"):
        ArimaForecaster(**wrong)  # type: ignore[arg-type]
