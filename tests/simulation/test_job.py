"""The simulated job: the real coordinator and planner, hand-computed cases, and what must always hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.planning.optimizer import LiveputOptimizer, Situation
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import LayerCost, ModelProfile, ThroughputProfile
from lightning_parcae.simulation.job import (
    JOB_POLICIES,
    Happening,
    JobSettings,
    SimulatedJob,
    happenings,
    simulate_job,
    start_table,
)
from lightning_parcae.simulation.result import PolicyResult
from lightning_parcae.simulation.workload import Workload, read_trace, read_workload

# Two stages of two layers; 10 samples a step. Steps of 1x2 take 10 s, of 2x2 5 s, of 3x2 4 s.
RATES = {ParallelConfig(1, 2): 1.0, ParallelConfig(2, 2): 2.0, ParallelConfig(3, 2): 2.5}
SMALL = Workload("small", ThroughputProfile("small", RATES), (100, 100, 100, 100), {}, num_samples=10)
# A formation takes 1 s, a layer 1 s on its way, so a stage 2 s.
PLAIN = JobSettings(
    policy="fixed",
    warm_up_s=0.0,
    detection_s=0.5,
    formation_s=0.75,
    build_s=0.25,
    bytes_per_s=100.0,
    rollback_s=20.0,
    fallback_every_s=30.0,
    start_share=0.0,
)


def add(count: int, time_s: float = 0.0, first: int = 0) -> list[Happening]:
    return [Happening(time_s, "add", f"i{index}") for index in range(first, first + count)]


def run(events: list[Happening], end_s: float, **changes: Any) -> tuple[PolicyResult, SimulatedJob]:
    job = SimulatedJob(events, end_s, SMALL, replace(PLAIN, **changes))
    result = job.run()
    check(result)
    return result, job


def check(result: PolicyResult) -> None:
    """Check what holds for every result: no holes, and samples that are the sum of rates."""
    edges = [span.start_s for span in result.spans] + [result.spans[-1].end_s]
    assert edges[0] == 0.0 and edges[-1] == pytest.approx(result.duration_s)
    for before, after in zip(result.spans, result.spans[1:], strict=False):
        assert before.end_s == pytest.approx(after.start_s, abs=1e-6)
    total = sum(span.duration_s * span.samples_per_s for span in result.spans)
    assert total == pytest.approx(result.samples, rel=1e-6, abs=1e-6)
    assert all(span.samples_per_s == 0.0 for span in result.spans if span.cause is not None)


def causes(result: PolicyResult) -> list[tuple[float, float, str]]:
    return [
        (round(span.start_s, 6), round(span.end_s, 6), span.cause or str(span.config))
        for span in result.spans
        if span.cause is not None or span.samples_per_s > 0
    ]


def events_of(job: SimulatedJob, *names: str) -> list[str]:
    return [record["event"] for record in job.timeline if record["event"] in names]


def test_undisturbed() -> None:
    result, job = run(add(4), 101.0)
    # 1 s to form, then 20 steps of 5 s
    assert causes(result) == [(0.0, 1.0, "start"), (1.0, 101.0, "2x2")]
    assert result.samples == 200 and result.samples_per_s == pytest.approx(200 / 101)
    assert [(one.kind, one.before, one.pause_s) for one in result.migrations] == [("start", None, 1.0)]
    assert result.instance_s == 4 * 101
    assert events_of(job, "prepared", "committed", "formed") == ["prepared", "committed", "formed"]


def test_a_step_that_the_end_cuts_off_does_not_count() -> None:
    result, _ = run(add(4), 103.0)
    assert result.samples == 200 and result.goodput == pytest.approx(102 / 103)
    assert result.spans[-1] == type(result.spans[0])(101.0, 103.0, ParallelConfig(2, 2))


def test_a_start_sends_what_there_is_before_the_first_step() -> None:
    result, _ = run(add(2), 50.0, start_share=0.5)
    # the first instance has everything, the second one gets two layers of half their size
    assert causes(result)[0] == (0.0, 2.0, "start")


def test_a_kill_breaks_a_step() -> None:
    result, job = run([*add(4), Happening(14.0, "kill", "i3")], 60.0)
    assert causes(result) == [
        (0.0, 1.0, "start"),
        (1.0, 11.0, "2x2"),
        (11.0, 14.0, "redo"),  # the third step is broken
        (14.0, 15.5, "intra_stage"),  # seen after 0.5 s; nothing moves
        (15.5, 25.5, "1x2"),  # one step, then who has no place becomes a spare
        (25.5, 26.5, "intra_stage"),
        (26.5, 56.5, "1x2"),
    ]
    assert result.samples == 20 + 10 + 30
    assert events_of(job, "died", "rolled_back") == ["died"]
    death = result.migrations[1]
    assert death.time_s == 14.0 and death.pause_s == 1.5 and death.before == ParallelConfig(2, 2)
    assert "i3" in death.reason


def test_a_notice_waits_for_the_boundary_and_loses_nothing() -> None:
    events = [*add(4), Happening(14.0, "notice", "i3", 30.0), Happening(44.0, "kill", "i3")]
    result, job = run(events, 57.0)
    assert causes(result) == [
        (0.0, 1.0, "start"),
        (1.0, 16.0, "2x2"),
        (16.0, 17.0, "intra_stage"),
        (17.0, 57.0, "1x2"),
    ]
    assert events_of(job, "notice", "released", "left", "died") == ["notice", "released", "left"]
    assert result.instance_s == 4 * 57 - 13  # paid until it is taken


def test_a_notice_too_short_is_a_death() -> None:
    events = [*add(4), Happening(14.0, "notice", "i3", 1.0), Happening(15.0, "kill", "i3")]
    result, job = run(events, 40.0)
    assert (11.0, 15.0, "redo") in causes(result)
    assert events_of(job, "notice", "died") == ["notice", "died"]


def test_a_joiner_enters_at_a_boundary_with_its_stage() -> None:
    result, _ = run([*add(4), *add(2, 22.0, first=4)], 100.0)
    # ready at 22, in the middle of a step that ends at 26; both get two layers, from different donors
    assert causes(result)[1:4] == [(1.0, 26.0, "2x2"), (26.0, 29.0, "inter_stage"), (29.0, 97.0, "3x2")]


def test_joiners_warm_up_beside_the_job() -> None:
    result, _ = run([*add(4), *add(2, 22.0, first=4)], 100.0, warm_up_s=12.0)
    # all are warm after 12 s, the joiners at 34, in a step that ends at 38
    assert causes(result)[:4] == [
        (0.0, 12.0, "waiting"),
        (12.0, 13.0, "start"),
        (13.0, 38.0, "2x2"),
        (38.0, 41.0, "inter_stage"),
    ]


def test_a_donor_serves_one_receiver_after_another() -> None:
    # 1x2 becomes 3x2: two receivers for each stage, and one donor. All four enter together, although the coordinator
    # has announced the next generation when it hears of the second one.
    result, _ = run([*add(2), *add(4, 5.0, first=2)], 60.0)
    assert (11.0, 16.0, "inter_stage") in causes(result)


def test_a_spares_death_costs_nothing() -> None:
    with_spare, job = run([*add(5), Happening(14.0, "kill", "i4")], 101.0)
    without, _ = run(add(4), 101.0)
    assert with_spare.spans == without.spans and len(with_spare.migrations) == 1
    assert events_of(job, "died", "prepared") == ["prepared", "died"]


def test_lost_state_comes_back_from_the_checkpoint() -> None:
    # 1x2 with a spare, steps end at 11, 21, 31, 41; checkpoints after steps 3, 6, ... The death at 44 takes a stage.
    result, job = run([*add(3), Happening(44.0, "kill", "i1")], 100.0)
    assert causes(result) == [
        (0.0, 1.0, "start"),
        (1.0, 31.0, "1x2"),
        (31.0, 44.0, "redo"),  # the fourth step, and a broken one
        (44.0, 65.5, "rollback"),
        (65.5, 95.5, "1x2"),
    ]
    assert result.samples == 60
    (restored,) = [record for record in job.timeline if record["event"] == "restored"]
    assert restored["step"] == 3 and restored["steps_lost"] == 1
    assert result.migrations[-1].kind == "rollback"


def test_a_copy_as_new_as_the_state_loses_a_step_only() -> None:
    result, _ = run([*add(3), Happening(44.0, "kill", "i1")], 100.0, fallback_every_s=0.0, rollback_s=2.0)
    assert causes(result)[2:4] == [(41.0, 44.0, "redo"), (44.0, 47.5, "rollback")]


def test_without_checkpoints_lost_state_ends_the_job() -> None:
    result, job = run([*add(3), Happening(44.0, "kill", "i1")], 100.0, fallback_every_s=None)
    assert result.samples == 0 and "fallback_dir" in result.notes[0]
    assert causes(result)[-1] == (44.0, 100.0, "waiting")
    assert events_of(job, "stopped") == ["stopped"]


def test_too_few_instances_wait_for_more() -> None:
    events = [*add(2), Happening(35.0, "kill", "i1"), *add(1, 70.0, first=2)]
    result, _ = run(events, 112.0)
    assert causes(result) == [
        (0.0, 1.0, "start"),
        (1.0, 31.0, "1x2"),
        (31.0, 35.0, "redo"),
        (35.0, 35.5, "rollback"),  # until it is known that nobody has the state
        (35.5, 70.0, "waiting"),
        (70.0, 91.0, "rollback"),
        (91.0, 111.0, "1x2"),
    ]


def test_nobody_is_left_and_others_come() -> None:
    events = [*add(2), Happening(35.0, "kill", "i0"), Happening(35.0, "kill", "i1"), *add(2, 50.0, first=2)]
    result, job = run(events, 91.0)
    assert result.samples == 50  # three steps before, and two after
    assert events_of(job, "rolled_back", "restored") == ["rolled_back", "restored"]


def test_work_that_is_lost_at_the_end_does_not_count() -> None:
    result, _ = run([*add(2), Happening(55.0, "kill", "i1")], 90.0)
    assert result.samples == 30 and result.lost_s["redo"] == pytest.approx(24.0)


def test_a_death_while_forming_begins_again() -> None:
    # the two joiners of a formation that takes 3 s from 26 on; one of them dies in it
    result, job = run([*add(4), *add(2, 22.0, first=4), Happening(27.0, "kill", "i5")], 100.0)
    assert causes(result)[1] == (1.0, 26.0, "2x2")
    urgent = [record["urgent"] for record in job.timeline if record["event"] == "prepared"]
    assert urgent[:3] == [False, False, True]
    assert {span.config for span in result.spans if span.start_s > 40} == {ParallelConfig(2, 2)}


def test_an_instance_that_never_gets_ready() -> None:
    events = [*add(4), *add(1, 20.0, first=4), Happening(25.0, "kill", "i4")]
    result, job = run(events, 117.0, warm_up_s=16.0)
    assert result.samples == 200 and len(result.migrations) == 1
    assert events_of(job, "ready", "died").count("ready") == 4


def test_leases_are_renewed_over_quiet_hours() -> None:
    result, job = run(add(4), 36_001.0, failure_timeout_s=4.0)
    assert result.samples == 72_000
    assert not events_of(job, "coordinator_paused", "died", "suspected", "stopped")


@pytest.mark.parametrize("policy", ["liveput", "reactive"])
def test_a_planner_leaves_a_start_that_is_slow(policy: Any) -> None:
    # The start takes the fewest stages, 4x1, which spends half of its step on gradients: 34 s against 22 s of 1x4.
    layer = LayerCost(0.5, 1.0, parameter_bytes=3_000_000_000)
    model = ModelProfile("model", (layer,) * 4, 8, 8, link_bytes_per_s=1e9)
    workload = Workload("model", model, (0,) * 4, {count: model.boundaries(count) for count in range(1, 5)}, 8)
    job = SimulatedJob(add(4), 2000.0, workload, replace(PLAIN, policy=policy))
    result = job.run()
    check(result)
    plan, *later = [record for record in job.timeline if record["event"] == "plan"]
    assert all(other["config"] == plan["config"] for other in later)  # only what to do after losses may change
    assert plan["instance"] == "i0" and plan["num_instances"] == 4
    # five steps have been measured, after two that do not count
    assert plan["time"] == pytest.approx(1.0 + 7 * model.step_time_s(ParallelConfig(4, 1)), abs=1.0)
    first, second = result.migrations
    assert first.after == second.before == ParallelConfig(4, 1)
    assert second.kind == "pipeline" and second.after in (ParallelConfig(1, 4), ParallelConfig(2, 2))
    assert f"planned since {plan['reason']}" in second.reason
    assert bool(result.forecasts) == (policy == "liveput")
    for band in result.forecasts:
        assert 0 <= band.low <= band.median <= band.high <= 4 and band.ahead_s == 600.0


@pytest.mark.parametrize("policy", sorted(JOB_POLICIES))
def test_the_same_seed_gives_the_same(policy: Any) -> None:
    trace = AvailabilityTrace.from_counts([6, 4, 5, 3, 6, 2, 6, 5, 1, 4, 6], interval_s=120.0)
    settings = replace(PLAIN, policy=policy, seed=3)
    first, again = (simulate_job(trace, SMALL, settings) for _ in range(2))
    assert first == again
    check(first)
    others = [simulate_job(trace, SMALL, replace(settings, seed=seed)).samples for seed in range(4, 12)]
    assert len({first.samples, *others}) > 1  # other victims


@pytest.mark.parametrize("seed", range(12))
def test_random_traces_keep_time_and_samples(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trace = AvailabilityTrace.from_counts(rng.integers(0, 8, size=60).tolist(), interval_s=float(rng.uniform(5, 60)))
    settings = replace(
        PLAIN,
        policy=("liveput", "reactive", "fixed")[seed % 3],
        notice_s=float(rng.choice([0.0, 7.0, 30.0])),
        warm_up_s=float(rng.choice([0.0, 12.0])),
        max_step_failures=1000,
        seed=seed,
    )
    job = SimulatedJob(happenings(trace, notice_s=settings.notice_s, seed=seed), trace.end_s, SMALL, settings)
    result = job.run()
    check(result)
    assert not result.notes
    # No more is trained than the fastest configuration for whoever is there could train, steps that run over included.
    best = [start_table(SMALL, 8)[count] for count in trace.resample(1.0)]
    assert result.samples <= sum(0.0 if config is None else RATES[config] for config in best) + 10
    # Committed steps never go back but with a rollback.
    step = 0
    for record in job.timeline:
        if record["event"] == "progress":
            assert record["step"] >= step
            step = record["step"]
        elif record["event"] == "restored":
            step = record["step"]


def test_many_joiners_at_once_do_not_blow_a_plan_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {ParallelConfig(depth, 2): depth / (1 + depth / 200) for depth in range(1, 151)}
    workload = replace(SMALL, profile=ThroughputProfile("wide", rates))
    rows = []
    plan = LiveputOptimizer.plan

    def noting(self: LiveputOptimizer, situation: Situation, laws: Any, **options: Any) -> Any:
        rows.append(sum(joined for _, joined in situation.known))
        return plan(self, situation, laws, **options)

    monkeypatch.setattr(LiveputOptimizer, "plan", noting)
    events = [*add(100), *add(180, 230.0, first=100)]
    result = SimulatedJob(events, 600.0, workload, replace(PLAIN, policy="liveput", warm_up_s=90.0)).run()
    check(result)
    assert 0 < max(rows) <= 24  # of 180 that warm up
    assert result.spans[-1].config is not None and result.spans[-1].config.num_instances > 200


def test_instance_names_may_be_given_again() -> None:
    trace = AvailabilityTrace.from_events(
        [(0.0, {"add": ["a", "b"]}), (30.0, {"remove": ["b"]}), (40.0, {"add": ["b"]})], end_s=100.0
    )
    names = [(one.time_s, one.action, one.instance) for one in happenings(trace, notice_s=60.0)]
    assert names == [
        (0.0, "add", "a"),
        (0.0, "add", "b"),
        (0.0, "notice", "b"),
        (30.0, "kill", "b"),
        (40.0, "add", "b#2"),
    ]
    check(simulate_job(trace, SMALL, PLAIN))


def test_start_tables() -> None:
    # given throughputs: the fastest; a measured model: the fewest idle, of these the fewest stages, within memory
    assert [str(one) for one in start_table(SMALL, 5)] == ["None", "None", "1x2", "1x2", "2x2", "2x2"]
    layer = LayerCost(0.1, 0.2, state_bytes=100)
    model = ModelProfile("model", (layer,) * 4, 8, 2, memory_bytes=250.0)
    table = start_table(replace(SMALL, profile=model), 7)
    assert [str(one) for one in table] == ["None", "None", "1x2", "1x3", "2x2", "2x2", "2x3", "2x3"]


def test_an_unknown_state_moves_in_no_time() -> None:
    workload = Workload("rates", ThroughputProfile("rates", RATES), (0,), {}, num_samples=10)
    trace = AvailabilityTrace.from_counts([4, 6], interval_s=60.0)
    result = simulate_job(trace, workload, replace(PLAIN, bytes_per_s=1.0))
    check(result)
    assert result.lost_s == {"start": 1.0, "intra_stage": pytest.approx(1.0)} or "inter_stage" not in result.lost_s


def test_a_real_trace_and_profile() -> None:
    trace = read_trace("aws-p3").slice(0.0, 7200.0)
    shares: list[float] = []
    result = simulate_job(trace, read_workload("vgg19"), JobSettings(), clock=lambda: 0.0, progress=shares.append)
    check(result)
    assert result.planning_s == 0.0 and result.policy == "liveput" and result.trace.startswith("aws-p3")
    assert shares[-1] == 1.0 and shares == sorted(shares) and len(shares) > 50
    assert result.goodput > 0.9 and set(result.lost_s) >= {"waiting", "start", "redo"}
    assert simulate_job(trace, read_workload("vgg19"), JobSettings(policy="fixed")).planning_s is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": "oracle"}, "liveput, reactive, fixed"),
        ({"notice_s": -1.0}, "notice_s"),
        ({"warm_up_s": float("nan")}, "warm_up_s"),
        ({"bytes_per_s": 0.0}, "bytes_per_s"),
        ({"fallback_every_s": float("inf")}, "fallback_every_s"),
        ({"max_step_failures": 0}, "max_step_failures"),
    ],
)
def test_bad_settings(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        JobSettings(**changes)


def test_contradictions() -> None:
    trace = AvailabilityTrace.from_counts([1, 1])
    with pytest.raises(ValueError, match="no configuration of the profile can run on the trace's 1 instances"):
        simulate_job(trace, SMALL, PLAIN)
    with pytest.raises(ValueError, match="1 layers cannot make the profile's 2 stages"):
        simulate_job(AvailabilityTrace.from_counts([4]), replace(SMALL, layer_bytes=(5,)), PLAIN)
    with pytest.raises(ValueError, match="length above 0 s"):
        simulate_job(AvailabilityTrace((0.0,), (4,), 0.0), SMALL, PLAIN)
