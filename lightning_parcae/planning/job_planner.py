"""Plans for a running job: from what is known of it to the table that it should follow.

Pure: no thread, no clock. :class:`~lightning_parcae.planner.Planner` asks it in the job, a simulation on a fake clock.

The first plan is made when the running configuration has been measured for an interval; until then the table that the
job started with stays. What changes afterwards must be worth more than the noise of the measurements.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_parcae.availability.backtest import Choice, ForecastChooser
from lightning_parcae.availability.forecast import NOTHING, EventLaw, EventRates, Forecast, Forecaster
from lightning_parcae.planning.cost import MeasuredCost
from lightning_parcae.planning.job_history import JobHistory
from lightning_parcae.planning.job_profile import JobProfile, Limits, LinkSpeed, StepTime
from lightning_parcae.planning.optimizer import LiveputOptimizer, Situation
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.policy import LayoutTable, lookup
from lightning_parcae.planning.profile import ModelProfile, ThroughputProfile
from lightning_parcae.planning.replay import Running

log = logging.getLogger(__name__)

Policy = Literal["liveput", "reactive", "fixed"]
ForecasterName = Literal["auto", "events", "arima", "last_value"]

_SCORED_HORIZON = 12
_SHOWN_HORIZON = 10
# Scored forecasts that are remembered; a planner that takes over replays as many intervals.
_SCORES = 240
_NOISE = 0.02
_EXACT_NOISE = 0.002
# Replicas that save the state may cost much speed, so that slower configurations matter than where all is replicated.
_PRUNE_BELOW = 0.5
_PROFILE_TOLERANCE = 0.05
_COST_TOLERANCE = 0.2
_LARGE_BYTES = 1 << 20
_ANNOUNCED_SHARE = 0.9
_FEW_LOSSES = 3
_LONGEST_REDO_S = 3600.0
# In a large job more joiners that warm up, or more notices, than this are looked at as so many: a plan is made again
# when they come, and one that looks at all numbers of instances on the way took minutes (388 joiners to 612 instances).
_MOST_KNOWN = 24
_LARGE_CAPACITY = 64


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """How to plan.

    Attributes:
        policy: ``liveput``, ``reactive`` (the fastest configuration for the instances there are) or ``fixed`` (the
            start's table stays).
        interval_s: Seconds between two plans, and length of an interval of the forecast.
        horizon: Intervals that a plan looks ahead; None for a value over many intervals.
        forecaster: ``auto`` uses a forecaster where it has shown skill on this job and learned event rates elsewhere;
            ``events`` only these, ``last_value`` expects no events; ``arima`` is ``auto`` with ARIMA models.
        horizon_scored: Intervals ahead over which forecasters are compared.
        min_scores: Scored forecasts before a forecaster is trusted.
        max_scores: Scored forecasts that are remembered.
    """

    policy: Policy = "liveput"
    interval_s: float = 60.0
    horizon: int | None = None
    forecaster: ForecasterName = "auto"
    horizon_scored: int = _SCORED_HORIZON
    min_scores: int = 20
    max_scores: int = _SCORES


@dataclass(frozen=True, slots=True)
class JobModel:
    """What is planned for.

    Attributes:
        profile: Throughput, as a model or a table.
        limits: What may run.
        layer_bytes: State of each layer.
        cuts: Boundaries for each number of stages.
        start_table: The table that the job starts with.
        num_samples: Samples of a global batch.
        fallback_every_n_steps: Steps between two fallback checkpoints; None if there are none.
    """

    profile: ModelProfile | ThroughputProfile
    limits: Limits
    layer_bytes: tuple[int, ...]
    cuts: Mapping[int, tuple[int, ...]]
    start_table: LayoutTable
    num_samples: int = 1
    fallback_every_n_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What the job should follow from now on.

    Attributes:
        table: Configuration for each number of instances.
        config: The one for the present number.
        reason: One line for people.
        samples_per_s: Expected throughput, migrations included.
        expected_lost: Instances expected to be lost over the horizon.
        skill: Skill of the forecaster in use; 0 for learned rates and where nobody has any.
        forecast_by: The forecaster in use, and why.
        num_intervals: Intervals of history.
        forecast_mae: Mean absolute error so far of the number of instances forecast for the next interval; None where
            no forecast could be compared yet.
        forecast: What the plan expects, without what is known for certain; None where nothing is forecast.
    """

    table: LayoutTable
    config: ParallelConfig | None
    reason: str
    samples_per_s: float
    expected_lost: float
    skill: float
    forecast_by: str
    num_intervals: int
    forecast_mae: float | None = None
    forecast: Forecast | None = None

    def details(self) -> dict[str, Any]:
        """Return what the timeline shows beside table and reason."""
        return {
            "config": None if self.config is None else [self.config.num_pipelines, self.config.num_stages],
            "liveput": round(self.samples_per_s, 4),
            "forecast": {
                "by": self.forecast_by,
                "expected_lost": round(self.expected_lost, 4),
                "skill": round(self.skill, 4),
                "intervals": self.num_intervals,
            },
        }


class JobPlanner:
    """Plan for one job.

    Args:
        model: What is planned for.
        settings: How.
        candidates: Forecasters to choose from beside learned rates and "nothing changes"; with ``auto`` and ``arima``.
    """

    def __init__(
        self, model: JobModel, settings: PlannerSettings | None = None, *, candidates: Sequence[Forecaster] = ()
    ) -> None:
        self.settings = settings if settings is not None else PlannerSettings()
        self.model = model
        self._events = EventRates.for_intervals(self.settings.interval_s)
        self._candidates = (self._events, *candidates)
        self._chooser: ForecastChooser | None = None
        self._num_seen = 0
        self._choice: Choice | None = None
        self._has_warned = False
        self._capacity = 0
        self._measured: dict[ParallelConfig, StepTime] = {}
        self._link: LinkSpeed | None = None  # as probed when members met
        self._link_bytes_per_s: float | None = None  # as state has moved in this job
        self._predicted = (0, 0.0)  # for an interval, the number of instances
        self._errors = (0, 0.0)  # of such forecasts: how many, and their absolute sum
        self._profile = self._profile_of({})
        self._cost: MeasuredCost | None = None
        self._optimizer: LiveputOptimizer | None = None

    @property
    def profile(self) -> JobProfile:
        """The profile in use."""
        return self._profile

    def take_link(self, link: LinkSpeed) -> None:
        """Use what a probe says of the links between the members, until state has moved over them."""
        if self._link is not None and link.is_close(self._link, _COST_TOLERANCE):
            return
        self._link = link
        self._profile, self._optimizer = self._profile_of(self._measured), None

    def decide(self, history: JobHistory, measured: Mapping[ParallelConfig, StepTime]) -> Decision | None:
        """Decide what the job should follow.

        Args:
            history: What is known of the job.
            measured: Step times.

        Returns:
            The decision; None if nothing should change: the job does not run, or has not been measured.
        """
        settings = self.settings
        counts = history.counts(settings.interval_s)
        running = history.config
        if len(counts) < 2 or history.phase != "running" or running is None or running not in measured:
            return None
        capacity = max(
            self._capacity, max(count for _, count in history.changes), history.num_instances + len(history.warming)
        )
        if capacity > self._capacity:
            self._capacity, self._optimizer = capacity, None
        cost = self._cost_of(history, measured[running])
        if self._cost is None or _differ(cost, self._cost):
            self._cost, self._optimizer = cost, None
        self._take_measurements(measured)
        if settings.policy == "reactive":
            return self._react(history, len(counts))
        laws, stays, choice = self._forecast(counts)
        self._score(counts, laws[0])
        if self._optimizer is None:
            self._optimizer = LiveputOptimizer(
                self._profile,
                self._cost,
                capacity=self._capacity,
                interval_s=settings.interval_s,
                horizon=settings.horizon,
                prune_below=_PRUNE_BELOW,
                noise=self._noise(_NOISE),
                late_at_best=True,
            )
        situation = situation_of(history, settings.interval_s)
        if self._capacity > _LARGE_CAPACITY:
            situation = replace(situation, known=_bounded(situation.known))
        plan = self._optimizer.plan(situation, laws, stays=stays)
        table = self._completed(plan.table, running)
        return Decision(
            table=table,
            config=lookup(table, history.num_instances),
            reason=plan.reason,
            samples_per_s=plan.samples_per_s,
            expected_lost=plan.expected_lost,
            skill=choice.skill,
            forecast_by=choice.reason,
            num_intervals=len(counts),
            forecast_mae=self._errors[1] / self._errors[0] if self._errors[0] else None,
            forecast=Forecast((*laws, *[stays] * _SHOWN_HORIZON)[:_SHOWN_HORIZON], choice.forecast.by),
        )

    # --- throughput and costs -----------------------------------------------------------------------------------------

    def _profile_of(self, measured: Mapping[ParallelConfig, StepTime]) -> JobProfile:
        model, base = self.model, self.model.profile
        if isinstance(base, ModelProfile) and self._link is not None:
            base = replace(base, link_bytes_per_s=self._link.bytes_per_s, link_latency_s=self._link.latency_s)
        if isinstance(base, ModelProfile) and self._link_bytes_per_s is not None:
            base = replace(base, link_bytes_per_s=self._link_bytes_per_s)
        return JobProfile(base, model.limits, cuts=model.cuts, measured=measured, num_samples=model.num_samples)

    def _take_measurements(self, measured: Mapping[ParallelConfig, StepTime]) -> None:
        """Use new measurements where they say something else, so that noise changes nothing."""
        changed = False
        speed = MeasuredCost.bytes_per_s if self._cost is None else self._cost.bytes_per_s
        defaults = (MeasuredCost.bytes_per_s, self._default_cost().bytes_per_s)  # are no measurements
        if speed not in (*defaults, self._link_bytes_per_s):
            self._link_bytes_per_s, changed = speed, True
        for config, step in measured.items():
            old = self._measured.get(config)
            total = step.work_s + step.other_s
            if old is None or abs(total / (old.work_s + old.other_s) - 1.0) > _PROFILE_TOLERANCE:
                self._measured[config] = step
                changed = True
        if changed:
            self._profile = self._profile_of(self._measured)
            self._optimizer = None

    def _cost_of(self, history: JobHistory, step: StepTime) -> MeasuredCost:
        num_steps = self.model.fallback_every_n_steps
        step_s = step.work_s + step.other_s
        if num_steps is None:  # the job would have to be started again
            elapsed_s = history.now - (history.started_at if history.started_at is not None else history.now)
            redo_s = min(elapsed_s, _LONGEST_REDO_S)
        else:
            redo_s = num_steps * step_s / 2
        return measured_cost(self._default_cost(), history, step_s=step_s, redo_s=redo_s)

    def _default_cost(self) -> MeasuredCost:
        """Return the cost model to start from: state moves no faster than the link."""
        cost = MeasuredCost(layer_bytes=self.model.layer_bytes, boundaries=self.model.cuts)
        return cost if self._link is None else replace(cost, bytes_per_s=min(cost.bytes_per_s, self._link.bytes_per_s))

    def _score(self, counts: Sequence[int], law: EventLaw) -> None:
        """Compare the forecast for the interval that has begun, if there was one, and note the one for the next."""
        interval, expected = self._predicted
        if interval == len(counts):
            self._errors = (self._errors[0] + 1, self._errors[1] + abs(counts[-1] - expected))
        self._predicted = (len(counts) + 1, counts[-1] - law.expected_lost + law.expected_joined)

    # --- the future ---------------------------------------------------------------------------------------------------

    def _forecast(self, counts: Sequence[int]) -> tuple[tuple[EventLaw, ...], EventLaw, Choice]:
        """Return the laws of the coming intervals, the law afterwards, and whose they are."""
        try:
            return self._forecast_or_raise(counts)
        except Exception:  # a forecast must never cost the job anything
            if not self._has_warned:
                self._has_warned = True
                log.warning("the forecast failed; planning as if the membership stayed as it is", exc_info=True)
            return (NOTHING,), NOTHING, _named("no change: the forecast failed")

    def _forecast_or_raise(self, counts: Sequence[int]) -> tuple[tuple[EventLaw, ...], EventLaw, Choice]:
        name = self.settings.forecaster
        if name == "last_value":
            return (NOTHING,), NOTHING, _named("last value")
        law = self._events.law(counts, capacity=self._capacity)
        if name == "events":
            return (law,), law, _named(self._events.name)
        choice = self._choose(counts)
        if choice.skill > 0:
            # Learned rates plan in full with or without trust; thinned ones would plan less the more they are trusted.
            laws = (law,) if choice.forecast.by == self._events.name else choice.forecast.laws
            return laws, law, choice
        return (law,), law, _named(f"{self._events.name} ({choice.reason})")

    def _choose(self, counts: Sequence[int]) -> Choice:
        if self._chooser is None:
            settings = self.settings
            self._chooser = ForecastChooser(
                self._candidates,
                horizon=settings.horizon_scored,
                capacity=self._capacity,
                min_scores=settings.min_scores,
                memory=max(settings.min_scores, settings.max_scores),
            )
            self._num_seen = max(0, len(counts) - settings.max_scores - settings.horizon_scored)
            self._choice = None
        self._chooser.capacity = max(self._chooser.capacity, self._capacity)
        for count in counts[self._num_seen :]:
            self._choice = self._chooser.update(count)
        self._num_seen = len(counts)
        assert self._choice is not None
        return self._choice

    # --- tables -------------------------------------------------------------------------------------------------------

    def _noise(self, measured: float) -> float:
        """Return the gain that is no reason to change; what the job measures is noisy, a given table exact."""
        return measured if isinstance(self.model.profile, ModelProfile) else _EXACT_NOISE

    def _react(self, history: JobHistory, num_intervals: int) -> Decision:
        table = self._completed((), history.config)
        config = lookup(table, history.num_instances)
        text = f"{config} stays" if config == history.config else f"{history.config} -> {config}"
        return Decision(
            table=table,
            config=config,
            reason=f"{text}: the fastest for {history.num_instances} instances",
            samples_per_s=0.0 if config is None else self._profile.samples_per_s(config),
            expected_lost=0.0,
            skill=0.0,
            forecast_by="none",
            num_intervals=num_intervals,
        )

    def _completed(self, table: LayoutTable, running: ParallelConfig | None) -> LayoutTable:
        """Continue a table to more instances than there ever were, and let nobody wait who could run.

        The optimizer may say "wait" where it expects state to be lost; whether it is, is known when it happens.
        """
        size = max(len(table), min(len(self.model.start_table), 2 * self._capacity + 9))
        fastest = self._profile.fastest_table(size - 1, keep=running, noise=self._noise(_PROFILE_TOLERANCE))
        return tuple(
            table[count] if count < len(table) and table[count] is not None else fastest[count] for count in range(size)
        )


def situation_of(history: JobHistory, interval_s: float) -> Situation:
    """Return what is known now.

    Usually an instance with a notice is not counted any more: the coordinator gives its place away at once, by the
    table. It is counted where it stays until it is taken because too few others are there.
    """
    config, now = history.config, history.num_instances
    steps = history.known_steps(interval_s)
    if config is not None and config.num_instances > now and history.notices:
        now += len(history.notices)
    else:
        steps = tuple((0, joined) for _, joined in steps)
        while steps and steps[-1] == (0, 0):
            steps = steps[:-1]
    return Situation(num_instances=now, running=Running(config), known=steps)


def _bounded(steps: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Return steps of which no more than ``_MOST_KNOWN`` instances are lost, and as many join, in all."""
    bounded: list[tuple[int, int]] = []
    lost = joined = 0
    for gone, come in steps:
        bounded.append((min(gone, _MOST_KNOWN - lost), min(come, _MOST_KNOWN - joined)))
        lost, joined = lost + bounded[-1][0], joined + bounded[-1][1]
    return tuple(bounded)


@dataclass(frozen=True)
class _RunningCost(MeasuredCost):
    """Costs in a job that has begun: starting from nothing is coming back from a loss of state.

    Else waiting for one interval would be the cheapest way back from it.
    """

    def initial(self, configs: tuple[ParallelConfig, ...]) -> NDArray[np.float64]:
        """See :class:`MeasuredCost`."""
        return MeasuredCost.initial(self, configs) + self.rollback_s


def measured_cost(default: MeasuredCost, history: JobHistory, *, step_s: float, redo_s: float) -> MeasuredCost:
    """Return a cost model with the terms that the job's own reconfigurations suggest.

    Each default counts as one measurement, so that a single odd one does not rule.

    Args:
        default: The terms to start from.
        history: With what past reconfigurations took.
        step_s: Seconds of a step: a death costs what was done of the step that it interrupts, half of it on average.
        redo_s: Seconds of work that is lost with state that nobody held.
    """
    pasts = history.reconfigurations
    small = [past for past in pasts if past.serial_bytes < _LARGE_BYTES]
    fixed_s = median([default.formation_s + default.build_s, *(past.pause_s for past in small if not past.is_urgent)])
    noticed_s = [max(past.pause_s - fixed_s, 0.0) for past in small if past.is_urgent]
    large = [past for past in pasts if past.serial_bytes >= _LARGE_BYTES]
    speeds = [past.serial_bytes / max(past.pause_s - fixed_s, 1e-3) for past in large]
    num_lost = history.num_announced + history.num_unannounced
    return _RunningCost(
        layer_bytes=default.layer_bytes,
        boundaries=default.boundaries,
        detection_s=median([default.detection_s, *noticed_s]) + step_s / 2,
        formation_s=fixed_s,
        build_s=0.0,
        bytes_per_s=median([default.bytes_per_s, *speeds]),
        rollback_s=default.rollback_s + redo_s,
        is_announced=num_lost >= _FEW_LOSSES and history.num_announced >= _ANNOUNCED_SHARE * num_lost,
    )


def _differ(one: MeasuredCost, other: MeasuredCost) -> bool:
    names = ("detection_s", "formation_s", "bytes_per_s", "rollback_s")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    far = any(abs(new - old) > _COST_TOLERANCE * max(old, 1e-9) for new, old in pairs)
    return far or one.is_announced != other.is_announced


def _named(reason: str) -> Choice:
    return Choice(Forecast((NOTHING,)), 0.0, reason)
