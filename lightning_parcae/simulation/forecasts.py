"""How good the forecasters would have been on traces, and whom a job would have used.

Nothing is simulated here: forecasts of a trace, made with nothing but its past, are compared with what came. A trace
too short for it is a ValueError that says what would fit. Forecasters themselves never raise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_parcae.availability.arima import ArimaForecaster
from lightning_parcae.availability.backtest import Backtest, ChosenForecasts, backtest
from lightning_parcae.availability.forecast import EventRates, Forecaster, LastValue, quantile
from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.planning.job_planner import PlannerSettings
from lightning_parcae.simulation.compare import INTERVAL_S
from lightning_parcae.simulation.result import ForecastBand
from lightning_parcae.simulation.worker_pool import run_in_processes

_AHEAD = 5
_MANY_MOMENTS = 200
# A chooser looks at all of the past in each of them: minutes.
_MOST_INTERVALS = 100_000


def _chooser(*more: Forecaster, name: str = ChosenForecasts.name) -> ChosenForecasts:
    """Return a chooser as a job has it."""
    job = PlannerSettings()
    memory = max(job.min_scores, job.max_scores)
    chooser = ChosenForecasts([EventRates(), *more], min_scores=job.min_scores, memory=memory)
    chooser.name = name
    return chooser


#: Forecasters that can be tested: what each is, and how it is made.
FORECASTERS: Mapping[str, tuple[str, Callable[[], Forecaster]]] = {
    "last_value": ("nothing changes: the yardstick", LastValue),
    "events": ("rates of losses and arrivals, learned from all of the past", EventRates),
    "events_hour": ("the same from the last 60 intervals", lambda: EventRates("event rates, last 60", memory=60)),
    "arima": ("ARIMA(1,1,0), guarded", ArimaForecaster),
    "auto_arima": ("ARIMA of an order that is searched, guarded", lambda: ArimaForecaster(None)),
    "auto": ("the job's chooser: events as far as they have earned it", lambda: _chooser()),
    "auto_with_arima": (
        "the job's chooser with both ARIMA models",
        lambda: _chooser(ArimaForecaster(), ArimaForecaster(None), name="chooser with ARIMA"),
    ),
}
DEFAULT_FORECASTERS = ("last_value", "events", "arima", "auto")


@dataclass(frozen=True)
class ForecastTest:
    """What one forecaster would have forecast on one trace.

    Attributes:
        key: Its name in :data:`FORECASTERS`.
        result: Scores.
        bands: Its 80 % band some intervals ahead, for each moment that it was asked at.
        reason: Of a chooser, whom a job would use after this trace, and why.
        used: Of a chooser, the share of the moments at which it used a forecaster, and did so in full.
    """

    key: str
    result: Backtest
    bands: tuple[ForecastBand, ...]
    reason: str | None = None
    used: tuple[float, float] | None = None


@dataclass(frozen=True)
class TraceForecasts:
    """Forecasters compared on one trace.

    Attributes:
        trace: Name of the trace.
        interval_s: Length of an interval.
        horizon: Intervals ahead.
        first: Intervals known at the first question.
        stride: Intervals between two questions.
        mean_instances: Mean over the intervals.
        num_changes: Intervals that began with another number of instances than the one before.
        tests: The forecasters, the best (by CRPS) first.
    """

    trace: str
    interval_s: float
    horizon: int
    first: int
    stride: int
    mean_instances: float
    num_changes: int
    tests: tuple[ForecastTest, ...]

    @property
    def best(self) -> ForecastTest:
        """The one with the smallest CRPS; of equal ones the yardstick."""
        return self.tests[0]

    def to_json(self) -> dict[str, Any]:
        """Return everything but the bands as plain values."""
        values = asdict(self)
        for test in values["tests"]:
            del test["bands"]
        return values


def compare_forecasters(
    traces: Sequence[AvailabilityTrace],
    forecasters: str | Sequence[str] = DEFAULT_FORECASTERS,
    *,
    horizon: int = 12,
    interval_s: float = 60.0,
    first: int = 12,
    stride: int | None = None,
    workers: int | None = None,
    progress: Callable[[float, int], None] | None = None,
) -> list[TraceForecasts]:
    """Ask forecasters at past moments of traces and compare with what came.

    Args:
        traces: The traces.
        forecasters: Names in :data:`FORECASTERS`, also as one string with commas, or ``all``. The yardstick, last
            value, is always among them.
        horizon: Intervals ahead.
        interval_s: Seconds of an interval, 1 to 86400; a trace has at most 100000 of them.
        first: Intervals known at the first question.
        stride: Intervals between two questions; None for about 200 questions. A chooser looks at every interval.
        workers: Processes; all cores if None.
        progress: Told how much is done, and of how much.

    Raises:
        ValueError: If a forecaster is unknown, a number is out of range, or a trace is too short or too long.
    """
    names = known_forecasters(forecasters)
    for text, value in (("horizon", horizon), ("first", first), ("stride", stride), ("workers", workers)):
        if value is not None and value < 1:
            raise ValueError(f"{text} should be at least 1, got {value}")
    least, most = INTERVAL_S
    if not least <= interval_s <= most:
        raise ValueError(f"an interval is {least:g} to {most:g} s, got {interval_s:g}")
    strides = [_stride(trace, horizon, interval_s, first, stride) for trace in traces]
    tasks = [
        (trace, name, horizon, interval_s, first, step)
        for trace, step in zip(traces, strides, strict=True)
        for name in names
    ]
    tests = _run(tasks, min(workers or os.cpu_count() or 1, len(tasks)), progress)
    compared = []
    for index, (trace, step) in enumerate(zip(traces, strides, strict=True)):
        counts = trace.resample(interval_s)
        mine = tests[index * len(names) : (index + 1) * len(names)]
        mine.sort(key=lambda test: (-test.result.skill, test.key != "last_value"))
        compared.append(
            TraceForecasts(
                trace=trace.source,
                interval_s=interval_s,
                horizon=horizon,
                first=first,
                stride=step,
                mean_instances=float(counts.mean()),
                num_changes=int((counts[1:] != counts[:-1]).sum()),
                tests=tuple(mine),
            )
        )
    return compared


def known_forecasters(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names that are meant, the yardstick first.

    Raises:
        ValueError: If one is unknown; the message lists those that there are.
    """
    words = [word.strip() for word in names.split(",")] if isinstance(names, str) else list(names)
    wrong = [word for word in words if word not in FORECASTERS and word != "all"]
    if wrong:
        raise ValueError(f"there is no forecaster {wrong[0]!r}; there are {', '.join(FORECASTERS)}, or all")
    return tuple(dict.fromkeys(["last_value", *(FORECASTERS if "all" in words else words)]))


def _stride(trace: AvailabilityTrace, horizon: int, interval_s: float, first: int, stride: int | None) -> int:
    """Return the stride to use, and refuse a trace that is too short or too long."""
    known = trace.num_intervals(interval_s)
    if known > _MOST_INTERVALS:
        raise ValueError(
            f"{trace.source}: {known} intervals of {interval_s:g} s are more than {_MOST_INTERVALS}: "
            "take longer intervals, or a segment of the trace"
        )
    if known < first + horizon:
        part = known // 3
        fits = (
            f"--horizon {part} --first {part} would fit"
            if part
            else f"an interval of at most {trace.end_s / 3:g} s would fit, with --horizon 1 --first 1"
        )
        raise ValueError(
            f"{trace.source}: a back-test of {horizon} intervals ahead, after the first {first}, needs "
            f"{first + horizon} intervals; the trace has {known} of {interval_s:g} s; {fits}"
        )
    return stride if stride is not None else max(1, round((known - first - horizon + 1) / _MANY_MOMENTS))


_Task = tuple[AvailabilityTrace, str, int, float, int, int]


def _test(task: _Task, progress: Callable[[float], None] | None = None) -> ForecastTest:
    trace, name, horizon, interval_s, first, stride = task
    forecaster = FORECASTERS[name][1]()
    ahead = min(_AHEAD, horizon)
    bands: list[ForecastBand] = []

    def note(known: int, counts: NDArray[np.float64]) -> None:
        low, median, high = (int(quantile(counts[ahead - 1 : ahead], share)[0]) for share in (0.1, 0.5, 0.9))
        bands.append(ForecastBand((known - 1) * interval_s, ahead * interval_s, low, median, high))

    result = backtest(
        forecaster,
        trace.resample(interval_s),
        horizon=horizon,
        first=first,
        stride=stride,
        clock=time.process_time,
        progress=progress,
        on_forecast=note,
    )
    if not isinstance(forecaster, ChosenForecasts) or forecaster.choice is None:
        return ForecastTest(name, result, tuple(bands))
    trusts = [0.0 if by == LastValue().name else trust for by, trust in forecaster.trusted]
    shares = (sum(trust > 0 for trust in trusts) / len(trusts), sum(trust == 1 for trust in trusts) / len(trusts))
    return ForecastTest(name, result, tuple(bands), forecaster.choice.reason, shares)


def _run(tasks: Sequence[_Task], workers: int, progress: Callable[[float, int], None] | None) -> list[ForecastTest]:
    tell = progress if progress is not None else lambda _done, _total: None
    if workers == 1:
        return [
            _test(task, lambda share, index=index: tell(index + share, len(tasks)))  # type: ignore[misc]
            for index, task in enumerate(tasks)
        ]
    return run_in_processes(_test, tasks, workers, tell)
