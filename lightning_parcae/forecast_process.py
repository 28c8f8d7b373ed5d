"""ARIMA forecasts from a process of their own.

Fitting a model needs pmdarima, scikit-learn and pandas, seconds of a core with the interpreter's lock held half of the
time, and changes the warning filters of the whole process while it lasts. None of that belongs into a process that
trains. The helper is started by the first forecast, has a low priority, and ends with its parent: its input is closed.
If it fails, one warning says so, and the built-in fit, which needs nothing but numpy, takes its place here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import IO, Any

from numpy.typing import ArrayLike

from lightning_parcae.availability.arima import ArimaForecaster
from lightning_parcae.availability.forecast import EventLaw, Forecast, cleaned

log = logging.getLogger(__name__)

Order = tuple[int, int, int]

_TIMEOUT_S = 60.0  # the first forecast imports pmdarima, which takes seconds on a busy machine
_NICE = 10
_BUDGET_S = 1.0  # for one fit; far above what is usual, far below an interval


class ForecastProcess:
    """A helper process that fits ARIMA models.

    Args:
        timeout_s: Seconds to wait for a forecast before the helper is given up.
    """

    def __init__(self, timeout_s: float = _TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._has_failed = False
        self._finalizer: Any = None

    def arima(self, order: Order | None) -> RemoteArima:
        """Return a forecaster whose models are fitted by the helper."""
        return RemoteArima(self, order)

    def ask(self, question: dict[str, Any]) -> Any:
        """Return the helper's answer.

        Raises:
            OSError: If the helper cannot be started, has died or does not answer; it is not tried again, and a warning
                is logged the first time.
        """
        with self._lock:
            if self._has_failed:
                raise OSError("the forecast process has failed before")
            try:
                return self._ask(question)
            except (OSError, ValueError) as error:
                self._has_failed = True
                self._end()
                log.warning("the process that fits ARIMA models failed: %s; a simpler fit takes its place", error)
                raise OSError(f"the forecast process failed: {error}") from error
            except BaseException:  # Ctrl-C; the answer that is still to come must not be taken for another's
                self._end()
                raise

    def close(self) -> None:
        """End the helper."""
        with self._lock:
            self._end()

    def _ask(self, question: dict[str, Any]) -> Any:
        if self._process is None:
            # The helper starts with SIGINT blocked: Ctrl-C in the terminal is for its parent, whose end it notices.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._finalizer = weakref.finalize(self, _end, self._process)
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
        return json.loads(_read_line(process.stdout, self._timeout_s))

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


class RemoteArima:
    """An ARIMA forecaster whose models are fitted elsewhere; never raises.

    Args:
        process: Where.
        order: ``(p, d, q)``, or None to let pmdarima search.
    """

    def __init__(self, process: ForecastProcess, order: Order | None) -> None:
        self._process = process
        self._order = order
        self._built_in = ArimaForecaster(order, built_in=True)

    @property
    def name(self) -> str:
        """See :class:`~lightning_parcae.availability.forecast.Forecaster`."""
        return self._built_in.name

    def forecast(self, history: ArrayLike, *, horizon: int, capacity: int) -> Forecast:
        """See :class:`~lightning_parcae.availability.forecast.Forecaster`."""
        counts = cleaned(history, capacity).tolist()
        question = {"order": self._order, "history": counts, "horizon": horizon, "capacity": capacity}
        try:
            return Forecast(tuple(_law_from_json(law) for law in self._process.ask(question)), self.name)
        except OSError:
            return self._built_in.forecast(counts, horizon=horizon, capacity=capacity)


def _law_from_json(value: Any) -> EventLaw:
    kinds, chances = value
    return EventLaw(tuple((int(lost), int(joined)) for lost, joined in kinds), tuple(float(c) for c in chances))


def _read_line(stream: IO[bytes], timeout_s: float) -> bytes:
    """Read a line of a pipe within a time."""
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        part = os.read(stream.fileno(), 1 << 16)
        if not part:
            raise OSError("it has ended")
        line += part
    return line


def _end(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    process.kill()
    process.wait()


def main() -> None:
    """Answer questions until the input ends."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer
    forecasters: dict[Order | None, ArimaForecaster] = {}
    for line in sys.stdin:
        question = json.loads(line)
        order = None if question["order"] is None else tuple(question["order"])
        if order not in forecasters:
            forecasters[order] = ArimaForecaster(order, budget_s=_BUDGET_S, clock=time.monotonic)
        forecaster = forecasters[order]
        forecast = forecaster.forecast(question["history"], horizon=question["horizon"], capacity=question["capacity"])
        answers.write(json.dumps([[law.kinds, law.chances] for law in forecast.laws]) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
