"""Several policies on several traces in one call, on all cores.

:func:`simulate` finds out what each name means, runs every combination of trace, policy and seed, and returns the
results in that order. Workers are processes started afresh; the results do not depend on their number. What fails in
one of them is raised here, with the name of the run; Ctrl-C ends them all.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.planning.cost import MeasuredCost
from lightning_parcae.planning.job_planner import ForecasterName, PlannerSettings, Policy
from lightning_parcae.simulation.bootstrap import bootstrap_trace
from lightning_parcae.simulation.intervals import INTERVAL_POLICIES, check_feasible, simulate_intervals
from lightning_parcae.simulation.job import JOB_POLICIES, JobSettings, simulate_job
from lightning_parcae.simulation.result import Comparison, PolicyResult, Prices
from lightning_parcae.simulation.systems import SYSTEM_POLICIES, SystemTerms, simulate_system
from lightning_parcae.simulation.worker_pool import run_in_processes
from lightning_parcae.simulation.workload import Workload, read_trace, read_workload

Accounting = Literal["job", "reference"]
TraceLike = AvailabilityTrace | str | Path
Progress = Callable[[float, int], None]

#: What is simulated if nobody says what.
DEFAULT_POLICIES = ("liveput", "reactive", "ondemand", "bound")

#: What is taken for an interval and a horizon, and the most instances: more would take hours, or is a mistake.
INTERVAL_S = (1.0, 86400.0)
MOST_INTERVALS_AHEAD = 1_000
MOST_INSTANCES = 5_000
#: A coordinator that gives up on an instance sooner than this ends every job.
LEAST_FAILURE_TIMEOUT_S = 0.1

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
# Given by other means, or no number to change.
_NOT_TERMS = ("notice_s", "seed", "is_announced")
_MOMENT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([smhd]?)")


@dataclass(frozen=True)
class _Task:
    """One run of one policy; everything that a worker needs.

    Attributes:
        accounting: How it is accounted.
        policy: The policy.
        trace: The trace.
        workload: What is trained.
        seed: Seed of everything random.
        notice_s: Notice before a preemption.
        interval_s: Planning interval.
        horizon: Intervals that a plan looks ahead.
        forecaster: Whose forecast is planned with.
        terms: Terms of migrations that differ from the defaults.
        time_plans: Whether the processor time of plans is kept.
    """

    accounting: Accounting
    policy: str
    trace: AvailabilityTrace
    workload: Workload
    seed: int
    notice_s: float
    interval_s: float
    horizon: int | None
    forecaster: ForecasterName
    terms: Mapping[str, float] = field(default_factory=dict)
    time_plans: bool = False

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"{self.policy} on {self.trace.source}, seed {self.seed}"

    def run(self, progress: Callable[[float], None] | None = None) -> PolicyResult:
        """Simulate; what goes wrong names the run."""
        try:
            result = self._simulate(progress)
        except Exception as error:
            if len(error.args) == 1:  # others carry more than a message
                error.args = (f"{self.name}: {error}",)
            raise
        # How long this machine took differs from run to run, so that it is told only to those who ask.
        return result if self.time_plans else replace(result, planning_s=None)

    def _simulate(self, progress: Callable[[float], None] | None) -> PolicyResult:
        if self.accounting == "reference" and self.policy in INTERVAL_POLICIES:
            own = self.terms or self.workload.reference_cost is None
            return simulate_intervals(
                self.policy,
                self.trace,
                self.workload,
                cost=self.workload.measured_cost(**self.terms) if own else None,
                notice_s=self.notice_s,
                horizon=self.horizon,
                forecaster=self.forecaster,
                interval_s=self.interval_s,
                seed=self.seed,
                progress=progress,
            )
        if self.policy in JOB_POLICIES:
            planner = PlannerSettings(interval_s=self.interval_s, horizon=self.horizon, forecaster=self.forecaster)
            settings = JobSettings(
                policy=cast(Policy, self.policy),
                planner=planner,
                notice_s=self.notice_s,
                seed=self.seed,
                **_known(JobSettings, self.terms),
            )
            clock = time.process_time if self.time_plans else None
            return simulate_job(self.trace, self.workload, settings, clock=clock, progress=progress)
        terms = SystemTerms(**_known(SystemTerms, self.terms))
        return simulate_system(self.policy, self.trace, self.workload, terms=terms, seed=self.seed, progress=progress)


def simulate(
    traces: TraceLike | Sequence[TraceLike],
    workload: Workload | str | Path,
    *,
    policies: str | Sequence[str] = DEFAULT_POLICIES,
    accounting: Accounting = "job",
    seeds: Sequence[int] = (0,),
    notice_s: float = 0.0,
    segment: str | tuple[float, float | None] | None = None,
    bootstrap: bool = False,
    prices: Prices | None = None,
    interval_s: float = 60.0,
    horizon: int | None = None,
    forecaster: ForecasterName = "auto",
    model: str | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    time_plans: bool = False,
    **terms: float,
) -> Comparison:
    """Simulate policies on traces.

    Args:
        traces: One or several: files, names of examples, or traces.
        workload: What is trained: a profile file, the name of an example, or a workload.
        policies: Names, see :func:`known_policies`; or ``all``.
        accounting: ``job`` runs the package's coordinator and planner on a simulated clock, and other systems as small
            models in continuous time. ``reference`` decides once per interval and prices pauses as the reference
            system does.
        seeds: Seeds of what is random: who is preempted where the trace gives counts only, and what a policy draws
            itself. Where nothing is random only the first one is run.
        notice_s: Seconds of warning before a preemption; 0 for none.
        segment: Part of the traces, such as ``5.5h:6.5h`` or ``90m:``; or two moments in seconds.
        bootstrap: Instead of the trace itself, one made of it for each seed, see :func:`resampled`.
        prices: Dollars per instance-hour.
        interval_s: Seconds between two plans, 1 to 86400. How a trace is read does not depend on it: rows without a
            time are one a minute, and where a file does not say when it ends, its last row holds for a minute.
        horizon: Intervals that a plan looks ahead, at most 1000; None for a value over many intervals.
        forecaster: ``auto``, ``events``, ``last_value`` or ``arima``.
        model: Which model of a profile file that holds several.
        workers: Processes; all cores if None. With one, or a single run, all happens in this process.
        progress: Called with the runs that are done (a fraction while a single one goes on) and their number.
        time_plans: Keep the processor time of plans; it differs from run to run.
        **terms: Terms of migrations that differ from the defaults, see :func:`known_terms`.

    Returns:
        The results by trace, policy and seed, in the order given.

    Raises:
        ValueError: If an argument makes no sense, a file is no trace or profile, or nothing can run.
        TypeError: If a term is unknown.
        ParcaeError: If a worker process ends by itself.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"needed is at least 1 worker, got {workers}")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"needed are seeds that differ, at least one; got {list(seeds)}")
    if not 0 <= notice_s < float("inf") or not INTERVAL_S[0] <= interval_s <= INTERVAL_S[1]:
        least, most = INTERVAL_S
        raise ValueError(
            f"a notice is at least 0 s and an interval {least:g} to {most:g} s, got {notice_s} and {interval_s}"
        )
    if horizon is not None and not 1 <= horizon <= MOST_INTERVALS_AHEAD:
        raise ValueError(f"a horizon is 1 to {MOST_INTERVALS_AHEAD} intervals, or None for many, got {horizon}")
    if min(seeds) < 0:
        raise ValueError(f"a seed is at least 0, got {min(seeds)}")
    if forecaster not in get_args(ForecasterName):
        raise ValueError(f"a forecaster is one of {', '.join(get_args(ForecasterName))}, got {forecaster!r}")
    names = chosen_policies(policies, accounting)
    check_terms(terms, accounting)
    what = workload if isinstance(workload, Workload) else read_workload(workload, model=model)
    where = read_traces(traces, segment=segment)
    for trace in where:
        if trace.capacity > MOST_INSTANCES:
            raise ValueError(
                f"{trace.source}: {trace.capacity} instances; at most {MOST_INSTANCES} are simulated, and the time it "
                "takes grows with their square"
            )
        check_feasible(what, trace.capacity)
    tasks = [
        _Task(
            accounting=accounting,
            policy=policy,
            trace=resampled(trace, seed=seed) if bootstrap else trace,
            workload=what,
            seed=seed,
            notice_s=notice_s,
            interval_s=interval_s,
            horizon=horizon,
            forecaster=forecaster,
            terms=dict(terms),
            time_plans=time_plans,
        )
        for trace in where
        for policy in names
        for seed in (seeds if bootstrap or _is_random(policy, accounting, trace) else seeds[:1])
    ]
    count = min(workers if workers is not None else os.cpu_count() or 1, len(tasks))
    tell = progress if progress is not None else _silent
    results = run_in_processes(_Task.run, tasks, count, tell) if count > 1 else _here(tasks, tell)
    settings: dict[str, Any] = {
        "accounting": accounting,
        "notice_s": notice_s,
        "segment": segment,
        "bootstrap": bootstrap,
        "seeds": list(seeds),
        "interval_s": interval_s,
        "horizon": horizon,
        "forecaster": forecaster,
        "terms": dict(terms),
    }
    return Comparison(tuple(results), prices, what.tokens_per_sample, settings)


# --- names ------------------------------------------------------------------------------------------------------------


def known_policies(accounting: Accounting) -> dict[str, str]:
    """Return what can be simulated, with one line each.

    Raises:
        ValueError: If there is no such accounting.
    """
    if accounting == "job":
        return {**JOB_POLICIES, **SYSTEM_POLICIES}
    if accounting == "reference":
        # Without a migration there is nothing to account for differently.
        return {**INTERVAL_POLICIES, "ondemand": SYSTEM_POLICIES["ondemand"]}
    raise ValueError(f"an accounting is one of {', '.join(get_args(Accounting))}, got {accounting!r}")


def chosen_policies(policies: str | Sequence[str], accounting: Accounting) -> tuple[str, ...]:
    """Return the policies that are meant.

    Args:
        policies: Names, or one string of names with commas, or ``all``.
        accounting: Where they should be known.

    Raises:
        ValueError: If one is unknown; the message lists those that there are.
    """
    known = known_policies(accounting)
    words = [word.strip() for word in policies.split(",")] if isinstance(policies, str) else list(policies)
    names = tuple(dict.fromkeys(known if words == ["all"] else words))
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        found = f"there is no policy {wrong[0]!r}" if wrong else "no policy was given"
        lines = "".join(f"\n  {name:16} {text}" for name, text in known.items())
        raise ValueError(f"{found} with the accounting {accounting!r}; there are:{lines}")
    return names


def known_terms(accounting: Accounting) -> dict[str, float | None]:
    """Return the terms of migrations that can be given, with their defaults."""
    found: dict[str, float | None] = {}
    for kind in _term_classes(accounting):
        for item in fields(kind):
            if item.name not in _NOT_TERMS and _is_number(item.type):
                found.setdefault(item.name, item.default if isinstance(item.default, int | float) else None)
    return found


def _kinds(kind: Any) -> set[str]:
    return set(str(kind).replace(" ", "").split("|"))


def _is_number(kind: Any) -> bool:
    return _kinds(kind) <= {"int", "float", "bool", "None"}


def _known(kind: type, terms: Mapping[str, float | None]) -> dict[str, Any]:
    """Return those terms that a class of settings has."""
    names = inspect.signature(kind).parameters
    return {name: value for name, value in terms.items() if name in names}


def _term_classes(accounting: Accounting) -> tuple[type, ...]:
    return (JobSettings, SystemTerms) if accounting == "job" else (MeasuredCost,)


def check_terms(terms: Mapping[str, float | None], accounting: Accounting) -> None:
    """Check terms before anything is simulated with them.

    Raises:
        TypeError: If one is unknown.
        ValueError: If a value makes no sense.
    """
    known = known_terms(accounting)
    classes = _term_classes(accounting)
    whole = {item.name for kind in classes for item in fields(kind) if "float" not in _kinds(item.type)}
    for name, value in terms.items():
        if name not in known:
            raise TypeError(
                f"there is no term {name!r} with the accounting {accounting!r}; there are {', '.join(known)}"
            )
        if value is not None:
            _check_term(name, value, is_whole=name in whole)
    for kind in classes:
        own = {"layer_bytes": (0,)} if kind is MeasuredCost else {}
        kind(**own, **_known(kind, terms))


def _check_term(name: str, value: float, *, is_whole: bool) -> None:
    wanted = None
    if math.isnan(value) or value < 0:
        wanted = "at least 0"
    elif is_whole and not (math.isfinite(value) and value == int(value)):
        wanted = "a whole number"
    elif name == "bytes_per_s" and not 0 < value < math.inf:
        wanted = "above 0 and finite"
    elif name == "start_share" and value > 1:
        wanted = "a share of 0 to 1"
    elif name == "failure_timeout_s" and value < LEAST_FAILURE_TIMEOUT_S:
        wanted = f"at least {LEAST_FAILURE_TIMEOUT_S:g}"
    if wanted is not None:
        raise ValueError(f"{name} must be {wanted}, got {value}")


def _is_random(policy: str, accounting: Accounting, trace: AvailabilityTrace) -> bool:
    """Return whether a run depends on its seed."""
    if accounting == "reference":
        return policy == "published"
    # Who is lost is drawn where the trace does not say it; those two do not ask.
    return trace.changes is None and policy not in ("ondemand", "bound")


# --- traces -----------------------------------------------------------------------------------------------------------


def parse_segment(text: str) -> tuple[float, float | None]:
    """Return the two moments of a part of a trace in seconds; None for the end of the trace.

    Raises:
        ValueError: If it is no such part.

    Example:
        >>> parse_segment("5.5h:6.5h"), parse_segment("90m:"), parse_segment(":2h")
        ((19800.0, 23400.0), (5400.0, None), (0.0, 7200.0))
    """
    parts = text.strip().split(":")
    try:
        if len(parts) != 2:
            raise ValueError("it should have one colon")
        start_s, end_s = (_moment(part.strip()) for part in parts)
        if end_s is not None and end_s <= (start_s or 0.0):
            raise ValueError("its end should lie after its begin")
    except ValueError as error:
        raise ValueError(f"no part of a trace: {text!r}: {error}; write it as 5.5h:6.5h, 90m: or :2h") from error
    return start_s or 0.0, end_s


def _moment(text: str) -> float | None:
    if not text:
        return None
    found = _MOMENT.fullmatch(text)
    if found is None or (not found[2] and float(found[1]) != 0):
        raise ValueError(f"{text!r} is no time with a unit s, m, h or d")
    return float(found[1]) * _UNITS[found[2]]


def read_traces(
    traces: TraceLike | Sequence[TraceLike],
    *,
    segment: str | tuple[float, float | None] | None = None,
) -> list[AvailabilityTrace]:
    """Return the traces that are meant, or a part of each; see :func:`simulate`.

    Raises:
        ValueError: If one is no trace, two have the same name, or a part reaches beyond a trace.
        OSError: If one cannot be read.
    """
    given = [traces] if isinstance(traces, AvailabilityTrace | str | Path) else list(traces)
    found = [one if isinstance(one, AvailabilityTrace) else read_trace(one) for one in given]
    names = [trace.source for trace in found]
    if not found or len(set(names)) < len(names):
        raise ValueError(f"needed are traces of different names, at least one; got {', '.join(names) or 'none'}")
    if segment is None:
        return found
    start_s, end_s = parse_segment(segment) if isinstance(segment, str) else segment
    return [trace.slice(start_s, trace.end_s if end_s is None else end_s) for trace in found]


def resampled(trace: AvailabilityTrace, *, seed: int) -> AvailabilityTrace:
    """Return a trace that might have been: half-hour blocks of a trace's changes, minute by minute, in another order.

    It has the same name for every seed, so that its results are taken together.
    """
    made = bootstrap_trace(trace, seed=seed)
    return replace(made, source=f"{trace.source}, resampled")


# --- running ----------------------------------------------------------------------------------------------------------


def _silent(_done: float, _total: int) -> None:
    pass


def _here(tasks: Sequence[_Task], progress: Progress) -> list[PolicyResult]:
    results = []
    for index, task in enumerate(tasks):
        results.append(task.run(lambda share, index=index: progress(index + share, len(tasks))))  # type: ignore[misc]
        progress(index + 1, len(tasks))
    return results
