"""The optimizer equals brute force, carries a table, says why, and never raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_parcae.availability.forecast import EventLaw, EventRates, outcome
from lightning_parcae.planning.cost import MeasuredCost, expected_pause_s
from lightning_parcae.planning.optimizer import LiveputOptimizer, Plan, Situation, reactive_plan
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import LayerCost, ModelProfile, ThroughputProfile
from lightning_parcae.planning.replay import Running, advance, best_possible, membership_steps, replay
from lightning_parcae.simulation.workload import read_trace

RATES = {(1, 1): 2.0, (2, 1): 3.5, (1, 2): 4.0, (1, 3): 5.0, (2, 2): 6.0, (1, 5): 6.2, (2, 3): 8.0}
PROFILE = ThroughputProfile("toy", {ParallelConfig(*config): rate for config, rate in RATES.items()})
NOTHING = EventLaw.certain()


def costly(**terms: float) -> MeasuredCost:
    return MeasuredCost(layer_bytes=(10,) * 6, **({"bytes_per_s": 10.0} | terms))  # type: ignore[arg-type]


def random_law(rng: np.random.Generator) -> EventLaw:
    kinds = ((0, 0), (1, 0), (2, 0), (0, 1), (1, 2))
    chances = rng.dirichlet(np.ones(len(kinds)))
    return EventLaw(kinds, tuple((chances / chances.sum()).tolist()))


def value(config: ParallelConfig | None, count: int, laws: list[EventLaw], cost: MeasuredCost, capacity: int) -> float:
    """What can still be trained, by trying everything."""
    if not laws:
        return 0.0
    total = 0.0
    for kind, chance in zip(laws[0].kinds, laws[0].chances, strict=True):
        lost, after = outcome(count, kind, capacity)
        total += chance * best(config, count, lost, after, laws[1:], cost, capacity)
    return total


def best(
    config: ParallelConfig | None,
    before: int,
    lost: int,
    count: int,
    laws: list[EventLaw],
    cost: MeasuredCost,
    capacity: int,
) -> float:
    found = value(None, count, laws, cost, capacity)
    for new in PROFILE.configs(count):
        key = ("brute force", config, new, before, lost)
        if key not in cost._cache:  # the same few pauses thousands of times
            cost._cache[key] = expected_pause_s(cost, config, new, num_instances=before, num_lost=lost)
        pause = cost._cache[key]
        found = max(found, PROFILE.samples_per_s(new) * (60.0 - pause) + value(new, count, laws, cost, capacity))
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("mode", ["horizon", "sweeps", "known"])
def test_plan_equals_brute_force(mode: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost = costly(formation_s=float(rng.choice([1.0, 15.0, 50.0, 90.0])), rollback_s=float(rng.choice([0.0, 40.0])))
    capacity = int(rng.integers(3, 6))
    now = int(rng.integers(1, capacity + 1))
    lost = int(rng.integers(0, 3))
    fits = [None, *PROFILE.configs(now + lost)]
    running = fits[rng.integers(0, len(fits))]
    laws = [random_law(rng) for _ in range(2)]
    options = {"capacity": capacity, "noise": 0.0, "prune_below": 0.0}
    known: tuple[tuple[int, int], ...] = ()
    if mode == "horizon":
        optimizer = LiveputOptimizer(PROFILE, cost, horizon=3, **options)  # type: ignore[arg-type]
        ahead, given = laws, laws
    elif mode == "sweeps":
        optimizer = LiveputOptimizer(PROFILE, cost, sweeps=2, **options)  # type: ignore[arg-type]
        ahead, given = [laws[0]] * 2, [laws[0]]
    else:
        known = ((1, 0), (0, 2))
        optimizer = LiveputOptimizer(PROFILE, cost, horizon=4, **options)  # type: ignore[arg-type]
        ahead, given = [EventLaw.certain(1, 0), EventLaw.certain(0, 2), laws[1]], [laws[0], laws[0], laws[1]]
    plan = optimizer.plan(Situation(now, Running(running), lost, known), given)
    expected = best(running, now + lost, lost, now, ahead, cost, capacity)
    assert plan.samples_per_s * 60.0 * (len(ahead) + 1) == pytest.approx(max(expected, 0.0))
    if plan.config is not None:
        pause = expected_pause_s(cost, running, plan.config, num_instances=now + lost, num_lost=lost)
        gained = PROFILE.samples_per_s(plan.config) * (60.0 - pause)
        assert gained + value(plan.config, now, ahead, cost, capacity) == pytest.approx(expected)
        assert plan.pause_s == pytest.approx(pause)


@pytest.mark.parametrize("horizon", [None, 4])
@pytest.mark.parametrize("now", range(9))
def test_table_is_what_a_new_plan_would_say(horizon: int | None, now: int) -> None:
    optimizer = LiveputOptimizer(PROFILE, costly(), capacity=8, horizon=horizon)
    laws = (EventRates().law([now], capacity=8),) * 3
    plan = optimizer.plan(Situation(now), laws)
    assert len(plan.table) == 9
    assert plan.table[now] == plan.config
    for count, config in enumerate(plan.table):
        again = optimizer.plan(Situation(count, Running(plan.config), max(now - count, 0)), laws)
        assert config == again.config
        assert config is None or config.num_instances <= count


@pytest.mark.parametrize(
    "profile", [PROFILE, ThroughputProfile("none", {}), ThroughputProfile("one", {ParallelConfig(2, 3): 1.0})]
)
def test_wait_is_a_plan_and_nothing_raises(profile: ThroughputProfile) -> None:
    for capacity in (0, 5, 20):
        optimizer = LiveputOptimizer(profile, costly(), capacity=capacity, sweeps=10)
        for now in (0, 1, 2, 5, 6, 7, 19, 21, 100):
            law = EventRates().law([], capacity=capacity)
            for running in (None, ParallelConfig(2, 3), ParallelConfig(3, 1)):
                plan = optimizer.plan(Situation(now, Running(running, 30.0), 2, ((1, 0), (40, 3))), (law,))
                assert plan.config is None or plan.config.num_instances <= now
                assert len(plan.table) == max(capacity, now) + 1
                assert plan.reason
    assert optimizer.plan(Situation(0), ()).config is None


def test_reasons_say_what_and_why() -> None:
    optimizer = LiveputOptimizer(PROFILE, costly(), capacity=8)
    quiet = (NOTHING,)
    assert optimizer.plan(Situation(0), quiet).reason == (
        "wait: 0 instances, the smallest configuration looked at needs 1"
    )
    assert optimizer.plan(Situation(6), quiet).reason == ("start 2x3 on 6 instances: 0.0 losses expected within 10 min")
    stays = optimizer.plan(Situation(6, Running(ParallelConfig(2, 3))), quiet)
    assert stays.reason == "2x3 stays: the fastest for 6 instances; 0.0 losses expected within 10 min"
    shrinks = optimizer.plan(Situation(5, Running(ParallelConfig(2, 3)), num_lost=1), quiet)
    assert shrinks.reason.startswith("2x3 -> 1x5: 0.0 losses expected within 10 min, 5 instances, now it costs ")
    dear = LiveputOptimizer(PROFILE, costly(formation_s=55.0), capacity=8, horizon=2)
    dear_stays = dear.plan(Situation(6, Running(ParallelConfig(2, 2))), quiet)
    assert dear_stays.reason.startswith("2x2 stays: 2x3 would be faster now, but costs 5")
    nothing = LiveputOptimizer(ThroughputProfile("none", {}), costly(), capacity=3)
    assert nothing.plan(Situation(3), quiet).reason == "wait: no configuration can run at all on 3 instances"


def test_gains_below_noise_change_nothing() -> None:
    nearly = ThroughputProfile("nearly", {ParallelConfig(1, 2): 10.0, ParallelConfig(2, 1): 10.001})
    free = costly(formation_s=0.0, build_s=0.0, detection_s=0.0, bytes_per_s=1e12)
    running = Running(ParallelConfig(1, 2))
    assert (
        LiveputOptimizer(nearly, free, capacity=2, noise=0.02).plan(Situation(2, running), ()).config == running.config
    )
    keen = LiveputOptimizer(nearly, free, capacity=2, noise=0.0)
    assert keen.plan(Situation(2, running), ()).config == ParallelConfig(2, 1)
    even = ThroughputProfile("even", {ParallelConfig(1, 2): 10.0, ParallelConfig(2, 1): 10.0})
    for config in even.configs(2):
        same = LiveputOptimizer(even, free, capacity=2, noise=0.0)
        assert same.plan(Situation(2, Running(config)), ()).config == config


@pytest.mark.parametrize("left_s", [1.0, 30.0])
def test_an_unfinished_migration_is_carried_over(left_s: float) -> None:
    optimizer = LiveputOptimizer(PROFILE, costly(formation_s=10.0), capacity=6, horizon=1)
    config, faster = ParallelConfig(2, 2), ParallelConfig(2, 3)
    done = optimizer.plan(Situation(6, Running(config)), ())
    assert done.config == faster
    # A second migration pays for its own time and one more formation; what is left of the first one is dropped.
    worth = {config: 6.0 * (60.0 - left_s), faster: 8.0 * (60.0 - done.pause_s - 10.0)}
    half = optimizer.plan(Situation(6, Running(config, left_s)), ())
    assert half.config == (config if left_s == 1.0 else faster)
    assert half.samples_per_s * 60.0 == pytest.approx(max(worth.values()))
    assert half.pause_s == pytest.approx(left_s if half.config == config else done.pause_s + 10.0)


def test_a_notice_changes_the_plan_before_the_event() -> None:
    # Deep pipelines are a little faster, but a death then costs a rollback of half an interval.
    profile = ThroughputProfile(
        "two", {ParallelConfig(1, 6): 10.0, ParallelConfig(2, 2): 9.5, ParallelConfig(1, 4): 6.0}
    )
    cost = costly(formation_s=0.5, bytes_per_s=1e3, rollback_s=50.0)
    optimizer = LiveputOptimizer(profile, cost, capacity=6)
    running = Running(ParallelConfig(1, 6))
    assert optimizer.plan(Situation(6, running), (NOTHING,)).config == ParallelConfig(1, 6)
    warned = optimizer.plan(Situation(6, running, known=((1, 0),)), (NOTHING,))
    assert warned.config == ParallelConfig(2, 2)
    assert "6 instances" in warned.reason
    assert warned.table[5] == ParallelConfig(2, 2)


@pytest.mark.parametrize("now", [24, 32])
def test_pruning_does_not_change_the_value(now: int) -> None:
    layer = LayerCost(0.01, 0.02, 0.001, 10**7, 6 * 10**7, 10**7, 10**6)
    profile = ModelProfile("toy", (layer,) * 16, num_samples=256, num_microbatches=32, memory_bytes=1e9)
    cost = MeasuredCost(layer_bytes=(6 * 10**7,) * 16, formation_s=4.0)
    law = EventRates().law([now], capacity=32)
    plans: list[Plan] = []
    for share in (0.0, 0.85):
        optimizer = LiveputOptimizer(profile, cost, capacity=32, prune_below=share)
        plans.append(optimizer.plan(Situation(now), (law,)))
    assert plans[0].samples_per_s == pytest.approx(plans[1].samples_per_s, rel=1e-6)
    assert plans[0].config == plans[1].config


def test_many_sizes_are_planned_for_in_turn() -> None:
    rates = {ParallelConfig(d, 3): 10.0 * d for d in range(1, 40)}
    optimizer = LiveputOptimizer(ThroughputProfile("wide", rates), costly(), capacity=120, sweeps=2)
    impossible = EventLaw(((0, 0), (1, 0)), (1.0, 0.0))
    for now in range(20, 100):
        plan = optimizer.plan(Situation(now), (impossible,))
        assert plan.config == ParallelConfig(now // 3, 3)
        assert plan.table[119] == ParallelConfig(39, 3)
        assert plan.expected_lost == 0.0


@pytest.mark.parametrize(
    "wrong", [{"capacity": -1}, {"interval_s": 0.0}, {"horizon": 0}, {"sweeps": -1}, {"window": 0}]
)
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="needed are a capacity of at least 0"):
        LiveputOptimizer(PROFILE, costly(), **({"capacity": 3} | wrong))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="counts cannot be negative"):
        LiveputOptimizer(PROFILE, costly(), capacity=3).plan(Situation(-1), ())


def test_knowing_only_the_past_it_beats_reacting_on_the_papers_trace(reference_model: Callable[[str], Any]) -> None:
    """The first four hours; the whole trace is in tests/benchmarks/what_if.py."""
    profile, cost, space = reference_model("gpt-6.7b")
    steps = membership_steps(read_trace("aws-p3"))[:240]
    optimizer = LiveputOptimizer(profile, cost, capacity=32)
    running, history, plan = Running(), [], []
    for step in steps:
        history.append(step.num_instances)
        law = EventRates().law(history, capacity=32)
        config = optimizer.plan(Situation(step.num_instances, running, step.num_lost), (law,)).config
        running = advance(running, config, step, space)[0]
        plan.append(config)
    planned = replay(plan, steps, space).samples_per_s
    reactive = replay([reactive_plan(profile, step.num_instances) for step in steps], steps, space).samples_per_s
    optimum = replay(best_possible(steps, space), steps, space).samples_per_s
    assert reactive < planned <= optimum
    assert (planned - reactive) / (optimum - reactive) > 0.5
