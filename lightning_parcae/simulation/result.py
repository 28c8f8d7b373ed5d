"""What a simulation tells, as values: spans of time, migrations, samples, money.

Whatever the policy, time is split into spans without holes or overlaps: in each, either training goes on at a known
rate, or something else takes the time, named by its :data:`Cause`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lightning_parcae.planning.parallel_config import ParallelConfig

#: Why nothing is trained: ``waiting`` (too few instances), ``start`` (the first formation), the kinds of migration,
#: ``restart`` (processes start again), ``rollback`` (loading an older state), ``redo`` (work done again after it, or
#: after a step that was interrupted).
Cause = Literal["waiting", "start", "intra_stage", "inter_stage", "pipeline", "restart", "rollback", "redo"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in which one thing happens.

    Attributes:
        start_s: Begin, from the begin of the trace.
        end_s: End.
        config: What runs or is being formed; None if nothing.
        samples_per_s: Rate of samples that count, 0 where a cause is given.
        cause: Why nothing is trained; None while training goes on.
    """

    start_s: float
    end_s: float
    config: ParallelConfig | None
    samples_per_s: float = 0.0
    cause: Cause | None = None

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Migration:
    """A change of what runs, or a repair of it.

    Attributes:
        time_s: When training stopped for it.
        kind: Which cause the pause is booked under.
        before: What ran; None at the start.
        after: What runs afterwards; None if the job waits.
        pause_s: Seconds until training went on.
        reason: One line for people.
    """

    time_s: float
    kind: Cause
    before: ParallelConfig | None
    after: ParallelConfig | None
    pause_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ForecastBand:
    """What a planner expected at one moment, for plots.

    Attributes:
        time_s: When it was made.
        ahead_s: How far ahead it looks.
        low: 10 % quantile of the instances then.
        median: 50 % quantile.
        high: 90 % quantile.
    """

    time_s: float
    ahead_s: float
    low: int
    median: int
    high: int


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars per instance-hour.

    Attributes:
        spot: Of a preemptible instance.
        on_demand: Of one that stays.
    """

    spot: float
    on_demand: float

    def __post_init__(self) -> None:
        if not 0 <= self.spot <= self.on_demand < float("inf"):
            raise ValueError(
                "prices are dollars per instance-hour, the spot price first and not above the on-demand price; got "
                f"{self.spot} and {self.on_demand}"
            )


@dataclass(frozen=True)
class PolicyResult:
    """What one policy did with one trace.

    Attributes:
        policy: Name of the policy or system.
        trace: Name of the trace.
        profile: Name of the profile.
        seed: Seed of everything random in it.
        duration_s: Length of the trace.
        spans: What happened, from 0 to ``duration_s``.
        migrations: Changes of what ran.
        samples: Samples that count in the end.
        instance_s: Instance-seconds used, spares included.
        uses_on_demand: Whether they are paid at the on-demand price.
        planning_s: Processor time of all plans; None if it plans nothing.
        forecasts: What was expected, for plots.
        notes: What to know about the number, one line each.
    """

    policy: str
    trace: str
    profile: str
    seed: int
    duration_s: float
    spans: tuple[Span, ...]
    migrations: tuple[Migration, ...]
    samples: float
    instance_s: float
    uses_on_demand: bool = False
    planning_s: float | None = None
    forecasts: tuple[ForecastBand, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()

    @property
    def samples_per_s(self) -> float:
        """Mean throughput over the whole trace."""
        return self.samples / self.duration_s

    @property
    def lost_s(self) -> dict[Cause, float]:
        """Seconds in which nothing was trained, by cause; causes that never occurred are left out."""
        lost: dict[Cause, float] = {}
        for span in self.spans:
            if span.cause is not None and span.duration_s > 0:
                lost[span.cause] = lost.get(span.cause, 0.0) + span.duration_s
        return {cause: lost[cause] for cause in CAUSES if cause in lost}

    @property
    def goodput(self) -> float:
        """Share of the time in which samples that count were trained, 0 to 1."""
        return 1.0 - sum(self.lost_s.values()) / self.duration_s

    def dollars(self, prices: Prices) -> float:
        """Return what the instances cost."""
        return self.instance_s / 3600.0 * (prices.on_demand if self.uses_on_demand else prices.spot)

    def dollars_per_million(self, prices: Prices) -> float | None:
        """Return dollars per million samples; None if nothing was trained."""
        return self.dollars(prices) / self.samples * 1e6 if self.samples > 0 else None

    def to_json(self, prices: Prices | None = None) -> dict[str, Any]:
        """Return everything but the forecasts as JSON values; configurations are ``[D, P]``."""
        value: dict[str, Any] = {
            "policy": self.policy,
            "trace": self.trace,
            "profile": self.profile,
            "seed": self.seed,
            "duration_s": self.duration_s,
            "samples": self.samples,
            "samples_per_s": self.samples_per_s,
            "goodput": self.goodput,
            "lost_s": dict(self.lost_s),
            "num_migrations": len(self.migrations),
            "instance_hours": self.instance_s / 3600.0,
            "planning_s": self.planning_s,
            "notes": list(self.notes),
            "migrations": [
                {
                    "time_s": one.time_s,
                    "kind": one.kind,
                    "before": config_to_json(one.before),
                    "after": config_to_json(one.after),
                    "pause_s": one.pause_s,
                    "reason": one.reason,
                }
                for one in self.migrations
            ],
            "spans": [
                [span.start_s, span.end_s, config_to_json(span.config), span.samples_per_s, span.cause]
                for span in self.spans
            ],
        }
        if prices is not None:
            value["dollars"] = self.dollars(prices)
            value["dollars_per_million_samples"] = self.dollars_per_million(prices)
        return value


def config_to_json(config: ParallelConfig | None) -> list[int] | None:
    """Return ``[D, P]``, or None."""
    return None if config is None else [config.num_pipelines, config.num_stages]


def merge_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Join neighbours that say the same, and drop empty spans.

    Raises:
        ValueError: If there is a hole or an overlap.
    """
    merged: list[Span] = []
    for span in spans:
        if span.end_s < span.start_s or (merged and abs(span.start_s - merged[-1].end_s) > 1e-6):
            before = merged[-1].end_s if merged else span.start_s
            raise ValueError(f"spans must follow each other: one ends at {before:g} s, the next is {span}")
        if span.end_s == span.start_s:
            continue
        last = merged[-1] if merged else None
        if last is not None and (last.config, last.samples_per_s, last.cause) == (
            span.config,
            span.samples_per_s,
            span.cause,
        ):
            merged[-1] = Span(last.start_s, span.end_s, span.config, span.samples_per_s, span.cause)
        else:
            merged.append(span)
    return tuple(merged)


def cumulative_samples(spans: Sequence[Span]) -> tuple[list[float], list[float]]:
    """Return times in seconds and the samples trained until then, for plots.

    Where work was lost, spans with the cause ``redo`` stand for it: the curve counts what lasts.
    """
    times, totals = [spans[0].start_s if spans else 0.0], [0.0]
    for span in spans:
        times.append(span.end_s)
        totals.append(totals[-1] + span.duration_s * span.samples_per_s)
    return times, totals


@dataclass(frozen=True)
class Comparison:
    """Several policies on the same traces.

    Attributes:
        results: One per policy, trace and seed.
        prices: What instances cost; None if nobody asked.
        tokens_per_sample: For the throughput in tokens; None if unknown.
        settings: What was simulated with, for reports.
    """

    results: tuple[PolicyResult, ...]
    prices: Prices | None = None
    tokens_per_sample: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def of(self, policy: str) -> tuple[PolicyResult, ...]:
        """Return the results of one policy.

        Raises:
            ValueError: If it was not simulated.
        """
        found = tuple(result for result in self.results if result.policy == policy)
        if not found:
            names = ", ".join(dict.fromkeys(result.policy for result in self.results))
            raise ValueError(f"no policy {policy!r} was simulated, only {names}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "format": "lightning_parcae/comparison/1",
            "settings": dict(self.settings),
            "tokens_per_sample": self.tokens_per_sample,
            "prices": None if self.prices is None else {"spot": self.prices.spot, "on_demand": self.prices.on_demand},
            "results": [result.to_json(self.prices) for result in self.results],
        }
