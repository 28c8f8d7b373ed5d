"""Policies on a trace by the reference system's accounting: one decision per interval, pauses from a cost model.

The membership changes when an interval begins. The policy decides, a migration takes its expected pause out of the
interval (and the next ones, if it is longer), then training goes on. The numbers are those of
:mod:`lightning_parcae.planning.replay`; here they are told as spans and migrations.

Nothing but the past is known to any policy but ``bound`` and ``oracle``, except for what ``notice_s`` announces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import numpy as np

from lightning_parcae.availability.arima import ArimaForecaster
from lightning_parcae.availability.backtest import ForecastChooser
from lightning_parcae.availability.forecast import (
    NOTHING,
    EventLaw,
    EventRates,
    Forecast,
    quantile,
)
from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.planning.cost import MeasuredCost, MigrationCost, ReferenceCost
from lightning_parcae.planning.guard import Guard
from lightning_parcae.planning.liveput import fewest_replicas
from lightning_parcae.planning.optimizer import LiveputOptimizer, Situation
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import Profile, ThroughputProfile
from lightning_parcae.planning.replay import (
    MembershipStep,
    PairPauses,
    Running,
    best_possible,
    membership_steps,
    settle,
)
from lightning_parcae.planning.space import ConfigSpace
from lightning_parcae.simulation.published import HORIZON, PublishedForecast, advised, planned_ahead
from lightning_parcae.simulation.result import Cause, ForecastBand, Migration, PolicyResult, Span, merge_spans
from lightning_parcae.simulation.system_terms import RestartTimes, SystemTerms
from lightning_parcae.simulation.workload import Workload

#: What can be simulated, and what it does.
INTERVAL_POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "bound": "zero overhead: always the fastest configuration, migrations are free",
        "oracle": "the most that any plan could train, the whole future known (of many configurations the fast ones)",
        "reactive": "always the fastest configuration for the instances there are, migrations live",
        "liveput": "this package's planner, with what it has learned from the past",
        "stays": "the same planner, but expecting no events, over a fixed horizon (12 if none is given)",
        "published": "Parcae as published: its forecast taken for the truth, planned one interval ahead",
        "checkpoint": "the fastest configuration, restarted from a checkpoint at every change of the membership",
    }
)

# One choice for every model and trace; the tables of the simulation are exact, so that little is noise.
_PRUNE_BELOW = 0.5
_NOISE = 0.002
_STAYS_HORIZON = 12
_SURE_OF_LIMIT = 20  # intervals with the most instances ever seen
_BAND_EVERY = 5
_BAND_AHEAD = 10
# The oracle's matrices grow with the square of the configurations: beyond so many only the fast ones count.
_MOST_CONFIGS = 160
_MOST_ORACLE_CONFIGS = 40

Decided = tuple[ParallelConfig | None, str]


class _Decider(Protocol):
    def decide(self, index: int, running: Running) -> Decided:
        """Return what to run in an interval, and why."""
        ...


def simulate_intervals(
    policy: str,
    trace: AvailabilityTrace | Sequence[MembershipStep],
    workload: Workload,
    *,
    cost: MigrationCost | None = None,
    notice_s: float = 0.0,
    horizon: int | None = None,
    forecaster: str = "events",
    interval_s: float = 60.0,
    seed: int = 0,
    clock: Callable[[], float] | None = None,
    progress: Callable[[float], None] | None = None,
) -> PolicyResult:
    """Return what a policy would have trained.

    Args:
        policy: One of :data:`INTERVAL_POLICIES`.
        trace: The availability, or what happens to the membership in each interval.
        workload: What is trained.
        cost: Pauses; the reference system's for this model if None.
        notice_s: How long before an event it is known to ``liveput``; whole intervals count.
        horizon: Intervals that ``liveput``, ``stays`` and ``published`` look ahead; None for their defaults.
        forecaster: What ``liveput`` expects: ``events`` (learned rates), ``last_value``, ``arima`` or ``auto``.
        interval_s: Length of an interval.
        seed: Of what ``published`` makes up.
        clock: Seconds, to time the plans; processor time if None.
        progress: Called with the share that is done, 0 to 1.

    Raises:
        ValueError: If the policy is unknown, nothing can run on the trace, or no costs are given where there are none.
    """
    if policy not in INTERVAL_POLICIES:
        raise ValueError(f"there is no policy {policy!r}; known are {', '.join(INTERVAL_POLICIES)}")
    if not (0 <= notice_s < float("inf")) or (horizon is not None and horizon < 1):
        raise ValueError(f"needed are a notice of at least 0 s and a horizon of at least 1, got {notice_s}, {horizon}")
    run = _Run.prepare(trace, workload, cost, interval_s)
    tell = progress if progress is not None else _silent
    if policy == "bound":
        return run.bound(tell)
    decider = _decider(policy, run, notice_s=notice_s, horizon=horizon, forecaster=forecaster, seed=seed)
    if policy == "checkpoint":
        return run.result(policy, decider, seed=seed, progress=tell, pause=run.reload_pauses())
    plans = clock if clock is not None else time.process_time
    return run.result(policy, decider, seed=seed, progress=tell, clock=None if policy == "reactive" else plans)


def score_plan(
    name: str,
    configs: Sequence[ParallelConfig | None],
    trace: AvailabilityTrace | Sequence[MembershipStep],
    workload: Workload,
    *,
    cost: MigrationCost | None = None,
    interval_s: float = 60.0,
) -> PolicyResult:
    """Return what a plan made elsewhere would have trained.

    Args:
        name: Name of the plan, for the result.
        configs: Configuration of each interval.
        trace: See :func:`simulate_intervals`.
        workload: See :func:`simulate_intervals`.
        cost: See :func:`simulate_intervals`.
        interval_s: See :func:`simulate_intervals`.

    Raises:
        ValueError: If the plan does not fit the trace.
    """
    run = _Run.prepare(trace, workload, cost, interval_s)
    if len(configs) != len(run.steps):
        raise ValueError(f"{name}: a plan of {len(configs)} intervals for a trace of {len(run.steps)}")
    return run.result(name, _Planned(tuple(configs), "as planned"), seed=0, progress=_silent)


def _silent(_: float) -> None:
    pass


# --- the accounting ---------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """A trace and a workload, ready to be decided about.

    Attributes:
        name: Name of the trace.
        steps: What happens when each interval begins.
        workload: What is trained.
        cost: Pauses.
        interval_s: Length of an interval.
        fastest: Fastest configuration for each number of instances, up to the most there ever are.
        end_s: End of the trace, which cuts the last interval.
    """

    name: str
    steps: tuple[MembershipStep, ...]
    workload: Workload
    cost: MigrationCost
    interval_s: float
    fastest: tuple[ParallelConfig | None, ...]
    end_s: float

    @classmethod
    def prepare(
        cls,
        trace: AvailabilityTrace | Sequence[MembershipStep],
        workload: Workload,
        cost: MigrationCost | None,
        interval_s: float,
    ) -> _Run:
        if isinstance(trace, AvailabilityTrace):
            name, steps, end_s = trace.source, membership_steps(trace, interval_s), trace.end_s
        else:
            name, steps = "steps", tuple(trace)
            end_s = len(steps) * interval_s
        if not (steps and end_s > 0):
            raise ValueError("a trace needs at least one interval, and a length above 0 s")
        if cost is None:
            cost = workload.reference_cost
        if cost is None:
            raise ValueError(
                f"{workload.name}: the reference system has no migration costs for this profile; use the job "
                "accounting, or give the costs (Workload.measured_cost)"
            )
        most = max(step.num_instances for step in steps)
        check_feasible(workload, most)
        fastest = _fastest(workload.profile, most)
        return cls(name, steps, workload, cost, interval_s, fastest, end_s)

    @property
    def most(self) -> int:
        """Most instances there ever are."""
        return len(self.fastest) - 1

    def rate(self, config: ParallelConfig | None) -> float:
        """Return the samples per second of a configuration."""
        return 0.0 if config is None else self.workload.profile.samples_per_s(config)

    def bound(self, progress: Callable[[float], None]) -> PolicyResult:
        """Return what would be trained if migrations were free."""
        spans = [self._span(begin, end, self.fastest[step.num_instances]) for step, begin, end in self._intervals()]
        progress(1.0)
        return self._told("bound", spans, [], seed=0)

    def result(
        self,
        policy: str,
        decider: _Decider,
        *,
        seed: int,
        progress: Callable[[float], None],
        pause: _Pauses | None = None,
        clock: Callable[[], float] | None = None,
    ) -> PolicyResult:
        """Let a policy decide interval by interval, and tell what came of it."""
        pause = pause if pause is not None else _CostPauses(self.cost)
        running, spent = Running(), 0.0
        cause: Cause = "start"
        spans: list[Span] = []
        migrations: list[Migration] = []
        for index, (step, begin, end) in enumerate(self._intervals()):
            started = clock() if clock is not None else 0.0
            config, reason = decider.decide(index, running)
            spent += clock() - started if clock is not None else 0.0
            if config is not None and config.num_instances > step.num_instances:
                raise ValueError(f"interval {index}: {config} needs more than the {step.num_instances} instances there")
            pause_s, overlap_s = pause(running.config, config, step)
            before = running
            running, paused_s = settle(before, config, pause_s, overlap_s, interval_s=end - begin)
            if pause_s > 0:
                cause = pause.kind(before.config, config, step)
                total_s = paused_s + running.remaining_s
                migrations.append(Migration(begin, cause, before.config, config, total_s, reason))
            elif config is None and before.config is not None:
                migrations.append(Migration(begin, "waiting", before.config, None, 0.0, reason))
            if paused_s > 0:
                spans.append(Span(begin, begin + paused_s, config, 0.0, cause))
            spans.append(self._span(begin + paused_s, end, config))
            progress((index + 1) / len(self.steps))
        forecasts = tuple(getattr(decider, "bands", ()))
        planning_s = spent if clock is not None else None
        return self._told(policy, spans, migrations, seed=seed, planning_s=planning_s, forecasts=forecasts)

    def reload_pauses(self) -> _ReloadPauses | _TermReloadPauses:
        """Return the pauses of restarts from a checkpoint."""
        if isinstance(self.cost, ReferenceCost):
            return _ReloadPauses(self.cost)
        return _TermReloadPauses(self.workload, self.cost)

    def _intervals(self) -> Iterator[tuple[MembershipStep, float, float]]:
        """Give what happens when each interval begins, with its begin and its end."""
        for index, step in enumerate(self.steps):
            end_s = self.end_s if index == len(self.steps) - 1 else (index + 1) * self.interval_s
            yield step, index * self.interval_s, end_s

    def _span(self, start_s: float, end_s: float, config: ParallelConfig | None) -> Span:
        if config is None:
            return Span(start_s, end_s, None, 0.0, "waiting")
        return Span(start_s, end_s, config, self.rate(config))

    def _told(
        self,
        policy: str,
        spans: Sequence[Span],
        migrations: Sequence[Migration],
        *,
        seed: int,
        planning_s: float | None = None,
        forecasts: tuple[ForecastBand, ...] = (),
    ) -> PolicyResult:
        return PolicyResult(
            policy=policy,
            trace=self.name,
            profile=self.workload.name,
            seed=seed,
            duration_s=self.end_s,
            spans=merge_spans(spans),
            migrations=tuple(_with_waits(migrations, self.end_s)),
            samples=sum(span.duration_s * span.samples_per_s for span in spans),
            instance_s=sum(step.num_instances * (end - begin) for step, begin, end in self._intervals()),
            planning_s=planning_s,
            forecasts=forecasts,
            notes=self._notes(policy),
        )

    def _notes(self, policy: str) -> tuple[str, ...]:
        common = "pauses are expectations of the cost model, membership changes when an interval begins"
        if policy != "checkpoint" or isinstance(self.cost, ReferenceCost):
            return (common,)
        start = f"processes start in {SystemTerms.restart_s:g} s and load their state"
        return (common, f"{start}: not priced with the reference system's constants")


def check_feasible(workload: Workload, most: int) -> None:
    """Refuse a workload that cannot run.

    Args:
        workload: What is to be trained.
        most: Most instances there ever are.

    Raises:
        ValueError: If no configuration runs on so many.
    """
    profile = workload.profile
    if any(profile.samples_per_s(config) > 0 for config in profile.configs(most)):
        return
    larger = (config for size in _sizes_beyond(most) for config in profile.configs(size))
    smallest = min((config.num_instances for config in larger if profile.samples_per_s(config) > 0), default=None)
    needs = "none runs on any number" if smallest is None else f"the smallest needs {smallest}"
    raise ValueError(f"no configuration of profile {workload.name} runs on at most {most} instances: {needs}")


def _sizes_beyond(most: int) -> tuple[int, ...]:
    return 2 * most + 8, 16 * most + 64, 128 * most + 512


def _fastest(profile: Profile, most: int) -> tuple[ParallelConfig | None, ...]:
    """Return the fastest configuration for each number of instances; of equally fast ones the one with fewest D."""
    best: list[tuple[float, ParallelConfig | None]] = [(0.0, None)] * (most + 1)
    for config in profile.configs(most):
        rate = profile.samples_per_s(config)
        known = best[config.num_instances]
        if rate > known[0]:
            best[config.num_instances] = (rate, config)
    fastest = []
    top: tuple[float, ParallelConfig | None] = (0.0, None)
    for entry in best:
        if entry[0] > top[0] or (entry[0] == top[0] and entry[1] and top[1] and entry[1] < top[1]):
            top = entry
        fastest.append(top[1])
    return tuple(fastest)


class _Pauses(Protocol):
    def __call__(
        self, old: ParallelConfig | None, new: ParallelConfig | None, step: MembershipStep
    ) -> tuple[float, float]:
        """Return the pause, and what is paid on top if the last migration has not ended."""
        ...

    def kind(self, old: ParallelConfig | None, new: ParallelConfig | None, step: MembershipStep) -> Cause:
        """Return what the pause is booked under."""
        ...


class _CostPauses(PairPauses):
    """Pauses of a cost model."""

    def kind(self, old: ParallelConfig | None, new: ParallelConfig | None, step: MembershipStep) -> Cause:
        """Return the likelier kind: what is booked is a mean over all sets of victims."""
        if old is None or new is None:
            return "start"
        if old.num_stages != new.num_stages:
            return "pipeline"
        spares = max(step.num_before - old.num_instances, 0)
        left = fewest_replicas([old.num_pipelines] * old.num_stages, spares, step.num_lost)
        return "intra_stage" if float(left[new.num_pipelines :].sum()) >= 0.5 else "inter_stage"


class _ReloadPauses:
    """A restart of everything whenever instances come or go, as the reference system prices it."""

    def __init__(self, cost: ReferenceCost) -> None:
        self._cost = cost

    def __call__(
        self, old: ParallelConfig | None, new: ParallelConfig | None, step: MembershipStep
    ) -> tuple[float, float]:
        if new is None or not (step.num_joined or step.num_lost or old != new):
            return 0.0, 0.0
        grows = step.num_joined > 0
        pause_s = self._cost.reload_s(new, grows=grows, is_first=old is None)
        return pause_s, self._cost.restart_s(new, grows=grows)

    def kind(self, old: ParallelConfig | None, new: ParallelConfig | None, step: MembershipStep) -> Cause:
        return "start" if old is None else "restart"


class _TermReloadPauses:
    """The same without the reference system's constants: as the checkpoint of the job accounting restarts."""

    def __init__(self, workload: Workload, cost: MigrationCost) -> None:
        terms = SystemTerms(bytes_per_s=cost.bytes_per_s) if isinstance(cost, MeasuredCost) else SystemTerms()
        self._times = RestartTimes(replace(workload, reference_cost=None), terms)

    def __call__(
        self, old: ParallelConfig | None, new: ParallelConfig | None, step: MembershipStep
    ) -> tuple[float, float]:
        if new is None or not (step.num_joined or step.num_lost or old != new):
            return 0.0, 0.0
        start_s = self._times.processes_s(new, grows=True)
        return start_s if old is None else self._times.from_checkpoint_s(new, grows=True), start_s

    def kind(self, old: ParallelConfig | None, new: ParallelConfig | None, step: MembershipStep) -> Cause:
        return "start" if old is None else "restart"


def _with_waits(migrations: Sequence[Migration], end_s: float) -> list[Migration]:
    """Say of those that end in waiting how long it took until training went on."""
    told = []
    for index, one in enumerate(migrations):
        if one.after is None:
            then = migrations[index + 1] if index + 1 < len(migrations) else None
            until_s = end_s if then is None else then.time_s + then.pause_s
            one = Migration(one.time_s, one.kind, one.before, None, until_s - one.time_s, one.reason)
        told.append(one)
    return told


# --- the policies -----------------------------------------------------------------------------------------------------


def _decider(policy: str, run: _Run, *, notice_s: float, horizon: int | None, forecaster: str, seed: int) -> _Decider:
    if policy in ("reactive", "checkpoint"):
        configs = tuple(run.fastest[step.num_instances] for step in run.steps)
        return _Planned(configs, "the fastest for the instances there are")
    if policy == "oracle":
        space = _oracle_space(run)
        last_s = run.end_s - (len(run.steps) - 1) * run.interval_s
        configs = best_possible(run.steps, space, interval_s=run.interval_s, last_s=last_s)
        return _Planned(configs, "the best with the whole future known")
    if policy == "published":
        return _Published(run, horizon if horizon is not None else HORIZON, seed)
    if policy == "stays":
        return _Liveput(run, 0, horizon if horizon is not None else _STAYS_HORIZON, "last_value", is_guarded=False)
    return _Liveput(run, int(notice_s / run.interval_s + 1e-9), horizon, forecaster, is_guarded=True)


def _oracle_space(run: _Run) -> ConfigSpace:
    """Return the choices of the oracle: all of them, or where they are too many the fastest for each count met."""
    profile = run.workload.profile
    configs = profile.configs(run.most)
    if len(configs) > _MOST_CONFIGS:
        rates = np.array([profile.samples_per_s(config) for config in configs])
        order = np.argsort(-rates, kind="stable")
        sizes = np.array([config.num_instances for config in configs])[order]
        fits = [order[sizes <= count] for count in {step.num_instances for step in run.steps}]
        chosen: set[int] = set()
        for rank in range(_MOST_CONFIGS):
            more = chosen.union(int(entries[rank]) for entries in fits if len(entries) > rank)
            if chosen and len(more) > _MOST_ORACLE_CONFIGS:
                break
            chosen = more
        fast = {configs[entry]: float(rates[entry]) for entry in chosen if rates[entry] > 0}
        profile = ThroughputProfile(run.workload.name, fast)
    return ConfigSpace(profile, run.cost, max_instances=run.most)


@dataclass(frozen=True)
class _Planned:
    """Follow a plan that was made before."""

    configs: tuple[ParallelConfig | None, ...]
    why: str

    def decide(self, index: int, running: Running) -> Decided:
        return self.configs[index], self.why


class _Published:
    """Parcae as published."""

    def __init__(self, run: _Run, horizon: int, seed: int) -> None:
        self._run = run
        self._horizon = horizon
        self._forecast = PublishedForecast(seed)
        self._space = ConfigSpace(run.workload.profile, run.cost, max_instances=run.most)
        self._wanted: ParallelConfig | None = None
        self._history: list[int] = []

    def decide(self, index: int, running: Running) -> Decided:
        now = self._run.steps[index].num_instances
        if index == 0:
            self._wanted = self._run.fastest[now]
        else:
            capacity = max(self._history)
            expected = self._forecast.steps(self._history, horizon=self._horizon, capacity=capacity)
            self._wanted = planned_ahead(expected, self._space, running)
        self._history.append(now)
        config = advised(self._wanted, now, self._space)
        if config == self._wanted:
            return config, "as planned one interval ahead"
        return config, f"{self._wanted} was planned, but only {now} instances are there"


class _Liveput:
    """This package's planner, which knows the past and what has been announced."""

    def __init__(self, run: _Run, num_known: int, horizon: int | None, forecaster: str, *, is_guarded: bool) -> None:
        self._run = run
        self._guard = Guard(run.rate, PairPauses(run.cost), interval_s=run.interval_s) if is_guarded else None
        self._num_known = num_known
        self._horizon = horizon
        self._source = _LawSource(forecaster, run.interval_s)
        self._optimizer: LiveputOptimizer | None = None
        self._history: list[int] = []
        self._capacity = 0
        self.bands: list[ForecastBand] = []

    def decide(self, index: int, running: Running) -> Decided:
        run, step = self._run, self._run.steps[index]
        self._history.append(step.num_instances)
        announced = run.steps[index + 1 : index + 1 + self._num_known]
        known = tuple((later.num_lost, later.num_joined) for later in announced)
        capacity = self._most_possible(known)
        if self._optimizer is None or capacity != self._capacity:
            self._capacity = capacity
            self._optimizer = self._make_optimizer()
        laws, stays = self._source.laws(self._history, self._capacity)
        if index % _BAND_EVERY == 0:
            self.bands.append(_band(index * run.interval_s, laws, stays, step.num_instances, self._capacity, run))
        guard = self._guard
        begin = running if guard is None else guard.planned
        plan = self._optimizer.plan(Situation(step.num_instances, begin, step.num_lost, known), laws, stays=stays)
        if guard is None:
            return plan.config, plan.reason
        config = guard.follow(plan.config, run.fastest[step.num_instances], step)
        return config, "planning is behind reacting so far: the fastest" if guard.reacts else plan.reason

    def _most_possible(self, known: Sequence[tuple[int, int]]) -> int:
        """Return what the past suggests as the most instances there can be.

        That there never were more does not say that there cannot be; that it stayed so for long does.
        """
        most = max(self._history)
        is_limit = self._history.count(most) >= _SURE_OF_LIMIT
        count = self._history[-1]
        announced = most
        for lost, joined in known:
            count += joined - lost
            announced = max(announced, count)
        return most if is_limit and announced == most else announced + 1

    def _make_optimizer(self) -> LiveputOptimizer:
        return LiveputOptimizer(
            self._run.workload.profile,
            self._run.cost,
            capacity=self._capacity,
            interval_s=self._run.interval_s,
            horizon=self._horizon,
            prune_below=_PRUNE_BELOW,
            noise=_NOISE,
            late_at_best=True,
        )


class _LawSource:
    """What the planner expects, by the name of its forecaster."""

    def __init__(self, name: str, interval_s: float) -> None:
        if name not in ("events", "last_value", "arima", "auto"):
            raise ValueError(f"there is no forecaster {name!r}; known are events, last_value, arima and auto")
        self._name = name
        self._events = EventRates.for_intervals(interval_s)
        self._arima = ArimaForecaster()
        self._chooser: ForecastChooser | None = None
        self._chooser_capacity = 0

    def laws(self, history: Sequence[int], capacity: int) -> tuple[tuple[EventLaw, ...], EventLaw]:
        """Return the laws of the coming intervals, and the one afterwards."""
        if self._name == "last_value":
            return (NOTHING,), NOTHING
        stays = self._events.law(history, capacity=capacity)
        if self._name == "events":
            return (stays,), stays
        if self._name == "arima":
            return self._arima.forecast(history, horizon=_BAND_AHEAD, capacity=capacity).laws, stays
        if self._chooser is None or self._chooser_capacity < capacity:
            self._chooser = ForecastChooser([self._events], horizon=_STAYS_HORIZON, capacity=capacity)
            self._chooser_capacity = capacity
            choice = self._chooser.replay(history)
        else:
            choice = self._chooser.update(history[-1])
        return choice.forecast.laws if choice.skill > 0 else (stays,), stays


def _band(time_s: float, laws: Sequence[EventLaw], stays: EventLaw, now: int, capacity: int, run: _Run) -> ForecastBand:
    ahead = [*laws, *[stays] * _BAND_AHEAD][:_BAND_AHEAD]
    counts = Forecast(tuple(ahead)).counts(now, capacity)[-1:]
    low, median, high = (int(quantile(counts, share)[0]) for share in (0.1, 0.5, 0.9))
    return ForecastBand(time_s, _BAND_AHEAD * run.interval_s, low, median, high)
