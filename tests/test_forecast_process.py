"""ARIMA in a process of its own: the same forecasts, and no harm when it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lightning_parcae import forecast_process
from lightning_parcae.availability.arima import ArimaForecaster
from lightning_parcae.availability.forecast import NOTHING
from lightning_parcae.forecast_process import ForecastProcess

COUNTS = [8, 8, 7, 7, 8, 8, 6, 6, 6, 7, 8, 8, 8, 7, 7, 6, 6, 8, 8, 8]


@pytest.mark.timeout(120)
def test_forecasts_come_from_the_helper() -> None:
    process = ForecastProcess()
    try:
        forecaster = process.arima((1, 1, 0))
        found = forecaster.forecast(COUNTS, horizon=3, capacity=8)
        # Ctrl-C in the terminal reaches the helper too.
        assert process._process is not None
        process._process.send_signal(signal.SIGINT)
        assert forecaster.forecast(COUNTS, horizon=3, capacity=8) == found
        assert process._process is not None and process._process.poll() is None
    finally:
        process.close()
    assert found.by == forecaster.name == "ARIMA(1,1,0)"
    assert len(found.laws) == 3 and found.laws[0] != NOTHING


def test_a_helper_that_dies_is_replaced_by_the_built_in_fit_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: start([sys.executable, "-c", ""], **options))
    process = ForecastProcess()
    expected = ArimaForecaster(built_in=True).forecast(COUNTS, horizon=2, capacity=8).laws
    for forecaster in (process.arima(None), process.arima((1, 1, 0))):
        for _ in range(2):
            assert forecaster.forecast(COUNTS, horizon=2, capacity=8).laws == expected
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a simpler fit takes its place" in caplog.text


def test_an_answer_that_was_not_waited_for_is_not_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen
    code = "import sys\nfor line in sys.stdin: sys.stdout.write(line); sys.stdout.flush()"
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start([sys.executable, "-c", code], **options))
    process = ForecastProcess()
    try:
        with monkeypatch.context() as interrupted:
            interrupted.setattr(forecast_process, "_read_line", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                process.ask({"question": 1})
        assert process.ask({"question": 2}) == {"question": 2}
    finally:
        process.close()


def test_a_helper_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    started: list[subprocess.Popen[bytes]] = []

    def hang(_: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(command, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", hang)
    process = ForecastProcess(timeout_s=0.2)
    for _ in range(2):
        assert len(process.arima(None).forecast(COUNTS, horizon=1, capacity=8).laws) == 1
    assert len(started) == 1 and started[0].returncode is not None


@pytest.mark.timeout(120)
def test_without_pmdarima_the_helper_warns_once(tmp_path: Path) -> None:
    (tmp_path / "pmdarima.py").write_text("raise ImportError('numpy.core.multiarray failed to import')")
    code = (
        "from lightning_parcae.forecast_process import ForecastProcess\n"
        f"process, counts = ForecastProcess(), {COUNTS}\n"
        "for order in ((1, 1, 0), None):\n"
        "    laws = process.arima(order).forecast(counts, horizon=2, capacity=8).laws\n"
        "    assert laws[0].expected_lost > 0, laws\n"
        "process.close()\n"
    )
    paths = [str(tmp_path), str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(paths)),
        stderr=subprocess.PIPE,
        text=True,
        timeout=50,
        check=True,
    )
    assert done.stderr.count("pmdarima cannot be used (ImportError: numpy.core.multiarray failed to import)") == 1
    assert len(done.stderr.splitlines()) == 1
