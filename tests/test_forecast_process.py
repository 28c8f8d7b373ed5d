"""ARIMA in a process of its own: the same forecasts, and no harm when it fails."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_parcae.availability.forecast import NOTHING
from lightning_parcae.forecast_process import ForecastProcess

COUNTS = [8, 8, 7, 7, 8, 8, 6, 6, 6, 7, 8, 8, 8, 7, 7, 6, 6, 8, 8, 8]


@pytest.mark.timeout(120)
def test_forecasts_come_from_the_helper() -> None:
    process = ForecastProcess()
    try:
        forecaster = process.arima((1, 1, 0))
        found = forecaster.forecast(COUNTS, horizon=3, capacity=8)
    finally:
        process.close()
    assert found.by == forecaster.name == "ARIMA(1,1,0)"
    assert len(found.laws) == 3 and found.laws[0] != NOTHING


def test_a_helper_that_dies_is_no_change_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: start([sys.executable, "-c", ""], **options))
    process = ForecastProcess()
    forecaster = process.arima(None)
    for _ in range(2):
        assert forecaster.forecast(COUNTS, horizon=2, capacity=8).laws == (NOTHING, NOTHING)
    assert caplog.text.count("forecasts no change from now on") == 1


def test_a_helper_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start(command, **options))
    process = ForecastProcess(timeout_s=0.2)
    assert process.arima(None).forecast(COUNTS, horizon=1, capacity=8).laws == (NOTHING,)
