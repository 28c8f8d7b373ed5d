"""Decisions for a running job, with histories made by hand."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import ArrayLike

from lightning_parcae.availability.forecast import NOTHING, EventLaw, Forecast
from lightning_parcae.planning.cost import MeasuredCost
from lightning_parcae.planning.job_history import JobHistory, PastReconfiguration
from lightning_parcae.planning.job_planner import (
    JobModel,
    JobPlanner,
    PlannerSettings,
    measured_cost,
    situation_of,
)
from lightning_parcae.planning.job_profile import Limits, LinkSpeed, StepTime
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.policy import most_instances_table
from lightning_parcae.planning.profile import LayerCost, ModelProfile, ThroughputProfile

# deep pipelines are fast, but hold each layer once
RATES = {(1, 2): 50.0, (1, 3): 80.0, (1, 4): 110.0, (2, 2): 90.0, (1, 5): 120.0, (2, 3): 130.0}
PROFILE = ThroughputProfile("toy", {ParallelConfig(*config): rate for config, rate in RATES.items()})
LIMITS = Limits(num_layers=6, max_pipelines=2, min_stages=2)
STEP = StepTime(0.5, 0.1)


def make_planner(*candidates: object, limits: Limits = LIMITS, **settings: object) -> JobPlanner:
    model = JobModel(
        profile=PROFILE,
        limits=limits,
        layer_bytes=(1000,) * 6,
        cuts={},
        start_table=most_instances_table(num_layers=6, max_instances=8, max_pipelines=2, min_stages=2),
        num_samples=10,
    )
    return JobPlanner(model, PlannerSettings(**settings), candidates=candidates)  # type: ignore[arg-type]


def history(
    counts: list[int], config: tuple[int, int] = (2, 2), interval_s: float = 60.0, **changes: object
) -> JobHistory:
    """One count for each interval until now."""
    steps = tuple((interval_s * index, count) for index, count in enumerate(counts))
    return JobHistory(
        now=interval_s * (len(counts) - 1) + interval_s / 60,
        started_at=0.0,
        changes=steps,
        phase="running",
        config=ParallelConfig(*config),
        **changes,  # type: ignore[arg-type]
    )


def measured(*configs: tuple[int, int]) -> dict[ParallelConfig, StepTime]:
    return {ParallelConfig(*config): STEP for config in configs}


@pytest.mark.parametrize(
    ("changes", "steps"),
    [({"phase": "preparing"}, measured((2, 2))), ({}, {}), ({"config": None}, measured((2, 2)))],
)
def test_nothing_changes_before_the_job_is_measured(
    changes: dict[str, object], steps: dict[ParallelConfig, StepTime]
) -> None:
    past = replace(history([4, 4, 4]), **changes)  # type: ignore[arg-type]
    assert make_planner().decide(past, steps) is None


def test_the_first_interval_only_measures() -> None:
    assert make_planner().decide(history([4]), measured((2, 2))) is None
    assert make_planner().decide(history([4, 4]), measured((2, 2))) is not None


def test_the_table_covers_more_than_was_ever_there() -> None:
    decision = make_planner(forecaster="events").decide(history([4, 4, 4]), measured((2, 2)))
    assert decision is not None and len(decision.table) == 9
    for count, entry in enumerate(decision.table):
        assert (entry is None) == (count < 2)
        assert entry is None or entry.num_instances <= count
    assert decision.config == decision.table[4]
    assert decision.details()["forecast"]["by"] == "event rates"


def test_losses_make_for_replicas_and_peace_for_depth() -> None:
    quiet = make_planner(forecaster="last_value").decide(history([4] * 9), measured((2, 2)))
    assert quiet is not None and quiet.config == ParallelConfig(1, 4) and quiet.expected_lost == 0
    busy = make_planner(forecaster="events").decide(history([5, 4, 5, 4, 5, 4, 5, 4] * 5), measured((2, 2)))
    assert busy is not None and busy.config == ParallelConfig(2, 2) and busy.expected_lost > 1


def test_reactive_takes_the_fastest() -> None:
    decision = make_planner(policy="reactive").decide(history([4, 3], (2, 2)), measured((2, 2)))
    assert decision is not None
    assert decision.table[:6] == (None, None, *(ParallelConfig(*c) for c in ((1, 2), (1, 3), (1, 4), (1, 5))))
    assert decision.config == ParallelConfig(1, 3)
    assert "fastest" in decision.reason


def test_pins_are_respected() -> None:
    limits = Limits(num_layers=6, max_pipelines=2, num_stages=2)
    for policy in ("liveput", "reactive"):
        decision = make_planner(policy=policy, limits=limits).decide(history([6, 6, 6]), measured((2, 2)))
        assert decision is not None
        assert {entry.num_stages for entry in decision.table if entry is not None} == {2}


class Oracle:
    """Knows that an instance is lost in every fourth interval and comes back in the next."""

    name = "oracle"
    asked: int = 0

    def forecast(self, history: ArrayLike, *, horizon: int, capacity: int) -> Forecast:
        self.asked += 1
        begin = len(np.asarray(history))
        kinds = {3: EventLaw.certain(1), 0: EventLaw.certain(0, 1)}
        return Forecast(tuple(kinds.get((begin + ahead) % 4, NOTHING) for ahead in range(horizon)), self.name)


@pytest.mark.parametrize("interval_s", [1.5, 60.0])
def test_a_forecaster_with_skill_is_used_and_the_layout_changes_before_the_loss(interval_s: float) -> None:
    planner = make_planner(Oracle(), min_scores=8, horizon_scored=3, interval_s=interval_s)
    counts = [4, 4, 4, 3] * 8
    chosen = {}
    for length in range(2, len(counts) + 1):
        seen = counts[:length]
        config = (1, 3) if seen[-1] == 3 else (2, 2)
        decision = planner.decide(history(seen, config, interval_s), measured((2, 2), (1, 3)))
        assert decision is not None
        if decision.skill > 0:
            chosen[length % 4] = str(decision.config)
            assert decision.forecast_by.startswith("oracle")
    assert chosen[1] == "1x4"  # two intervals of peace ahead
    assert chosen[3] == "2x2"  # the next interval takes one
    assert chosen[0] == "1x3"


def test_a_planner_that_takes_over_catches_up() -> None:
    counts = [4, 4, 4, 3] * 8
    oracle = Oracle()
    planner = make_planner(oracle, min_scores=8, horizon_scored=3)
    decision = planner.decide(history(counts, (1, 3)), measured((1, 3)))
    assert decision is not None and decision.skill > 0
    assert decision.num_intervals == len(counts) == oracle.asked


class Broken:
    """Raises against all rules."""

    name = "broken"

    def forecast(self, history: ArrayLike, *, horizon: int, capacity: int) -> Forecast:
        raise ZeroDivisionError("broken forecaster")


def test_a_failing_forecast_is_no_change_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    planner = make_planner(Broken())
    with caplog.at_level(logging.WARNING):
        for length in (3, 4, 5):
            decision = planner.decide(history([4] * length), measured((2, 2)))
            assert decision is not None and decision.expected_lost == 0
    assert caplog.text.count("the forecast failed; planning") == 1


def test_a_table_names_fast_configurations_however_short_the_intervals() -> None:
    """A return from lost state takes many of these intervals, whatever is chosen; it must not favour slow ones."""
    decision = make_planner(forecaster="events", interval_s=1.5).decide(
        history([6, 6, 6], (1, 5), 1.5), measured((1, 5))
    )
    assert decision is not None
    assert [str(entry) for entry in decision.table[2:5]] == ["1x2", "1x3", "1x4"]


def test_noise_in_step_times_changes_nothing() -> None:
    planner = make_planner(forecaster="last_value")
    first = planner.decide(history([4] * 3), {ParallelConfig(2, 2): StepTime(0.5)})
    second = planner.decide(history([4] * 3), {ParallelConfig(2, 2): StepTime(0.52)})
    assert first is not None and second is not None and first.table == second.table
    assert second.samples_per_s == first.samples_per_s


def test_situation() -> None:
    usual = situation_of(history([4, 3], (1, 3), notices=(90.0,), warming=(30.0,), warm_up_s=120.0), 60.0)
    assert usual.num_instances == 3 and usual.known == ((0, 0), (0, 1))
    # Too few others: the one with a notice stays in its place until it goes.
    late = situation_of(history([4, 3], (2, 2), notices=(150.0,)), 60.0)
    assert late.num_instances == 4 and late.known == ((0, 0), (1, 0))


def test_the_speed_of_the_link_is_that_of_moved_state() -> None:
    layers = tuple(LayerCost(0.001, 0.002, output_bytes=10_000_000) for _ in range(6))
    base = ModelProfile("toy", layers, num_samples=10, num_microbatches=2)
    planner = JobPlanner(replace(make_planner().model, profile=base))
    deep = ParallelConfig(1, 6)
    planner.decide(history([4] * 3), measured((2, 2)))
    before = planner.profile.samples_per_s(deep)
    pasts = tuple(PastReconfiguration("inter_stage", False, 2.25, 30_000_000, 20_000_000) for _ in range(3))
    planner.decide(history([4] * 3, reconfigurations=pasts), measured((2, 2)))
    assert planner.profile.samples_per_s(deep) < 0.8 * before


def test_costs_are_those_of_the_jobs_own_reconfigurations() -> None:
    default = MeasuredCost(layer_bytes=(1000,) * 6)
    plain = measured_cost(default, history([4]), step_s=0.5, redo_s=7.0)
    assert plain.formation_s == pytest.approx(0.25) and plain.detection_s == pytest.approx(0.35)
    assert plain.rollback_s == 37.0 and not plain.is_announced
    pasts = tuple(PastReconfiguration("intra_stage", False, 1.0, 0, 0) for _ in range(3))
    pasts += tuple(PastReconfiguration("intra_stage", True, 1.8, 0, 0) for _ in range(3))
    pasts += tuple(PastReconfiguration("inter_stage", False, 3.0, 40_000_000, 20_000_000) for _ in range(3))
    learned = measured_cost(default, history([4], reconfigurations=pasts), step_s=0.5, redo_s=7.0)
    assert learned.formation_s == pytest.approx(1.0)
    assert learned.detection_s == pytest.approx(1.05)
    assert learned.bytes_per_s == pytest.approx(1e7)
    warned = measured_cost(default, history([4], num_announced=9, num_unannounced=1), step_s=0.5, redo_s=7.0)
    assert warned.is_announced


def test_a_slow_link_makes_for_fewer_hops() -> None:
    layers = (LayerCost(0.01, 0.02, parameter_bytes=100, output_bytes=1 << 20),) * 6
    base = ModelProfile("toy", layers, num_samples=10, num_microbatches=2)

    def best(link: LinkSpeed | None) -> ParallelConfig | None:
        planner = make_planner(policy="reactive")
        planner.model = replace(planner.model, profile=base, limits=Limits(num_layers=6, max_pipelines=2))
        planner._profile = planner._profile_of({})
        if link is not None:
            planner.take_link(link)
        decision = planner.decide(history([2, 2], (1, 1)), measured((1, 1)))
        assert decision is not None
        return decision.config

    slow_hops = (LayerCost(0.01, 0.02, parameter_bytes=100 << 20, output_bytes=1),) * 6
    assert best(LinkSpeed(1e-4, 1e9)) == ParallelConfig(2, 1)  # one micro-batch each
    base = replace(base, layers=slow_hops)
    assert best(LinkSpeed(1e-4, 1e9)) == ParallelConfig(1, 2)  # gradients are heavier than activations
    assert best(LinkSpeed(1e-4, 1e12)) == ParallelConfig(2, 1)


def test_state_that_has_moved_says_more_than_a_probe_and_noise_nothing() -> None:
    base = ModelProfile("toy", (LayerCost(0.01, 0.02),) * 6, num_samples=10, num_microbatches=2)
    planner = make_planner()
    planner.model = replace(planner.model, profile=base)
    planner.take_link(LinkSpeed(1e-3, 5e8))
    planner.decide(history([4, 4, 4]), measured((2, 2)))
    assert planner.profile.to_json()["link_bytes_per_s"] == 5e8
    assert planner._cost is not None and planner._cost.bytes_per_s == 5e8
    before = planner._optimizer
    planner.take_link(LinkSpeed(1.1e-3, 5.5e8))
    assert planner._optimizer is before is not None
    moved = tuple(PastReconfiguration("pipeline", False, 10.0, 1 << 30, 1 << 30) for _ in range(3))
    planner.decide(history([4, 4, 4], reconfigurations=moved), measured((2, 2)))
    found = planner.profile.to_json()
    assert found["link_bytes_per_s"] == pytest.approx((1 << 30) / 9.75, rel=0.01) and found["link_latency_s"] == 1e-3


def test_the_error_of_one_interval_ahead_is_averaged() -> None:
    planner = make_planner(forecaster="last_value")
    errors = []
    for counts in ([4, 4], [4, 4, 4], [4, 4, 4], [4, 4, 4, 2], [4, 4, 4, 2, 2, 2], [4, 4, 4, 2, 2, 2, 3]):
        decision = planner.decide(history(counts), measured((2, 2)))
        assert decision is not None
        errors.append(decision.forecast_mae)
    # asked twice in one interval it counts once, and what skips an interval is no forecast of one
    assert errors == [None, 0.0, 0.0, 1.0, 1.0, 1.0]
