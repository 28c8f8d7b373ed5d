"""ARIMA by pmdarima, guarded so that it can be asked anything.

pmdarima, and with it scikit-learn and pandas, is imported when the first model is fitted, not before: it takes seconds.
By itself ``auto_arima`` forecasts 0 for constant series and negative counts for ramps, raises on two points, and on a
busy machine takes many times longer with several BLAS threads than with one. So:

* short and constant histories are "nothing happens"; gaps are filled, short spikes removed;
* a forecast may go as far from the last value as the history has gone in as many intervals, and stays in the capacity;
* the spread is the model's own errors on the history, not a normal distribution: events are rare and lumpy;
* BLAS runs on one thread; the orders are searched now and then only; after a fit that took too long, and where pmdarima
  is missing or does not load beside this numpy (one warning says so), a least-squares fit of the autoregressive part
  takes its place;
* whatever fails, nothing is raised but a Ctrl-C: the answer is "nothing happens", and
  :attr:`ArimaForecaster.problem` says why.
"""

from __future__ import annotations

import functools
import importlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_parcae.availability.forecast import NOTHING, EventLaw, Forecast, cleaned

log = logging.getLogger(__name__)

Floats = NDArray[np.float64]

_LONGEST_SPIKE = 3
_Order = tuple[int, int, int]
_DEFAULT_ORDER: _Order = (1, 1, 0)


# Whether an import was interrupted: the half of a library that stays in memory then fails in odd ways.
_was_interrupted = False


@functools.cache
def _library() -> tuple[Any, Any] | None:
    """Return pmdarima and threadpoolctl; None, with one warning in the life of the process, if they do not load."""
    global _was_interrupted
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # By name: neither has type hints.
            return importlib.import_module("pmdarima"), importlib.import_module("threadpoolctl")
    except Exception as error:  # built against another numpy it raises ValueError, and who knows what else
        if (interrupt := _interrupt_behind(error)) is not None:
            _was_interrupted = True
            raise interrupt from None
        log.warning(
            "pmdarima cannot be used (%s: %s); ARIMA forecasts are made by a simpler built-in fit. To mend it: %s",
            type(error).__name__,
            error,
            "start Python anew, an import of it was interrupted"
            if _was_interrupted
            else "pip install --force-reinstall 'pmdarima>=2.1'",
        )
        return None
    except BaseException:
        _was_interrupted = True
        raise


def _interrupt_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the Ctrl-C that a library has made another error of, if it was one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


class ArimaForecaster:
    """Forecast by an ARIMA model of the last intervals.

    Args:
        order: ``(p, d, q)``, or None to let pmdarima search.
        window: Intervals of history that a model is fitted to.
        min_points: Fewest intervals it takes.
        pause: Intervals between two searches for orders, and after a fit that took too long.
        budget_s: Longest time that a fit may take; None means any.
        clock: Seconds, to measure that; without it there is no budget.
        built_in: Use the built-in fit only, and never load pmdarima.

    Attributes:
        problem: Why the last forecast says "nothing happens", or None if it is a model's.
    """

    def __init__(
        self,
        order: _Order | None = _DEFAULT_ORDER,
        *,
        window: int = 24,
        min_points: int = 13,
        pause: int = 30,
        budget_s: float | None = None,
        clock: Callable[[], float] | None = None,
        built_in: bool = False,
    ) -> None:
        if window < min_points or min_points < 4 or pause < 1:
            raise ValueError(
                f"needed are window >= min_points >= 4 and a pause of at least 1, got {window}, {min_points}, {pause}"
            )
        self.problem: str | None = None
        self._order = order
        self._window = window
        self._min_points = min_points
        self._pause = pause
        self._budget_s = budget_s
        self._clock = clock
        self._built_in = built_in
        self._found: tuple[_Order, int] | None = None  # orders, and the length they were found at
        self._rests_until = 0

    @property
    def name(self) -> str:
        """See :class:`Forecaster`."""
        return "auto ARIMA" if self._order is None else "ARIMA({},{},{})".format(*self._order)

    def forecast(self, history: ArrayLike, *, horizon: int, capacity: int) -> Forecast:
        """See :class:`Forecaster`."""
        counts = cleaned(history, capacity)
        recent = without_spikes(counts[-self._window :].astype(np.float64))
        laws = (NOTHING,) * horizon
        if len(recent) < self._min_points:
            self.problem = f"only {len(recent)} of at least {self._min_points} intervals are known"
        elif np.ptp(recent) == 0:
            self.problem = "the history is constant"
        elif horizon > 0:
            laws = self._guarded(recent, len(counts), horizon, capacity)
        return Forecast(laws, self.name)

    def _guarded(self, recent: Floats, length: int, horizon: int, capacity: int) -> tuple[EventLaw, ...]:
        try:
            means, errors = self._fit(recent, length, horizon)
        except Exception as error:  # the library may raise anything, and the job must not feel it
            if (interrupt := _interrupt_behind(error)) is not None:
                raise interrupt from None
            self.problem = f"{type(error).__name__}: {error}"
            log.debug("%s failed on %s", self.name, recent.tolist(), exc_info=True)
            return (NOTHING,) * horizon
        if not (np.isfinite(means).all() and np.isfinite(errors).all()):
            self.problem = "the model diverged"
            return (NOTHING,) * horizon
        self.problem = None
        return _laws(_bounded(means, recent, capacity), recent[-1], errors)

    def _fit(self, recent: Floats, length: int, horizon: int) -> tuple[Floats, Floats]:
        """Fit a model; return the means ahead and the model's errors on the history."""
        rests = length < self._rests_until <= length + self._pause
        library = None if self._built_in or rests else _library()
        if library is None:
            return _least_squares(recent, self._order or _DEFAULT_ORDER, horizon)
        pmdarima, threadpoolctl = library
        started = self._clock() if self._clock is not None else 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # convergence warnings; the guards deal with what follows
            with threadpoolctl.threadpool_limits(1, user_api="blas"):
                model = self._model(pmdarima, recent, length)
                means = np.asarray(model.predict(horizon), dtype=np.float64)
                errors = np.asarray(model.resid(), dtype=np.float64)
        if self._clock is not None and self._budget_s is not None and self._clock() - started > self._budget_s:
            self._rests_until = length + self._pause
        # The first errors are of the start, not of the model.
        return means, errors[2:]

    def _model(self, pmdarima: Any, recent: Floats, length: int) -> Any:
        if self._order is not None:
            return pmdarima.ARIMA(order=self._order, with_intercept=self._order[1] == 0).fit(recent)
        if self._found is not None and 0 <= length - self._found[1] < self._pause:
            order = self._found[0]
            return pmdarima.ARIMA(order=order, with_intercept=order[1] == 0).fit(recent)
        model = pmdarima.auto_arima(
            recent, seasonal=False, max_p=2, max_q=2, max_d=1, error_action="ignore", suppress_warnings=True
        )
        self._found = (tuple(model.order), length)
        return model


def _least_squares(values: Floats, order: _Order, horizon: int) -> tuple[Floats, Floats]:
    """Fit the autoregressive part of a model; return the means ahead and the errors on the history.

    The moving-average part is left out, and a series that is not differenced varies around its mean.
    """
    num_lags, num_differences, _ = order
    series, lasts = values, []
    for _ in range(num_differences):
        lasts.append(series[-1])
        series = np.diff(series)
    centre = series.mean() if num_differences == 0 else 0.0
    series = series - centre
    lagged = np.zeros((len(series) - num_lags, num_lags))
    for lag in range(1, num_lags + 1):
        lagged[:, lag - 1] = series[num_lags - lag : len(series) - lag]
    weights = np.linalg.lstsq(lagged, series[num_lags:], rcond=None)[0]
    errors = series[num_lags:] - lagged @ weights
    path = series.tolist()
    for _ in range(horizon):
        path.append(float(np.dot(weights, path[: -num_lags - 1 : -1])))
    means = np.asarray(path[len(series) :]) + centre
    for last in reversed(lasts):
        means = last + np.cumsum(means)
    return means, errors


def without_spikes(values: Floats) -> Floats:
    """Remove dips and spikes of up to three intervals after which the old value is back."""
    result = values.copy()
    for size in range(_LONGEST_SPIKE, 0, -1):
        for start in range(len(result) - size - 1):
            inner = result[start + 1 : start + size + 1]
            if result[start] == result[start + size + 1] and (inner != result[start]).all():
                result[start + 1 : start + size + 1] = result[start]
    return result


def _bounded(means: Floats, recent: Floats, capacity: int) -> Floats:
    """Keep a forecast as near to the last value as the history has kept over as many intervals."""
    bounded = means.copy()
    for index in range(len(means)):
        ahead = min(index + 1, len(recent) - 1)
        rises = recent[ahead:] - recent[:-ahead]
        bounded[index] = np.clip(means[index], recent[-1] + min(rises.min(), 0.0), recent[-1] + max(rises.max(), 0.0))
    return np.clip(bounded, 0.0, float(capacity))


def _laws(means: Floats, last: float, errors: Floats) -> tuple[EventLaw, ...]:
    """Return the law of each interval: the expected change, spread by the model's errors."""
    laws = []
    spread = errors - errors.mean()
    for change in np.diff(means, prepend=last):
        steps = Counter(np.rint(change + spread).astype(np.int64).tolist())
        kinds = tuple((max(-step, 0), max(step, 0)) for step in sorted(steps))
        laws.append(EventLaw(kinds, tuple(steps[step] / len(spread) for step in sorted(steps))))
    return tuple(laws)
