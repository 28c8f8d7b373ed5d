"""Policies in the reference system's accounting: its scores, and what every policy promises on any trace."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.planning.cost import MeasuredCost
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import LayerCost, ModelProfile, ThroughputProfile
from lightning_parcae.planning.replay import membership_steps, replay
from lightning_parcae.planning.space import ConfigSpace
from lightning_parcae.simulation.intervals import INTERVAL_POLICIES, score_plan, simulate_intervals
from lightning_parcae.simulation.result import PolicyResult
from lightning_parcae.simulation.workload import Workload, read_trace, read_workload

PLANS = Path(__file__).parent.parent / "data" / "parcae_plans"
RATES = {(1, 2): 4.0, (1, 3): 5.0, (2, 2): 6.0, (2, 3): 8.0, (3, 2): 8.5, (4, 2): 10.0}
TOY = Workload(
    "toy",
    ThroughputProfile("toy", {ParallelConfig(*config): rate for config, rate in RATES.items()}),
    layer_bytes=(10,) * 6,
    cuts={},
)
TOY_COST = TOY.measured_cost(bytes_per_s=10.0, formation_s=8.0)
TRACES = {
    "constant": [6] * 20,
    "single": [5],
    "gone": [6, 6, 0, 0, 1, 6, 6, 3],
    "late": [0, 0, 1, 4, 8, 8],
    "violent": [8, 2, 7, 3, 8, 0, 8, 1, 6, 4] * 3,
    "many": [6, 1000, 1000, 990, 3, 40],
}


@pytest.fixture(scope="module")
def workloads() -> dict[str, Workload]:
    """The cost tables take a second each: one for all tests."""
    return {name: read_workload(name) for name in ("gpt-1.5b", "resnet152", "gpt-6.7b")}


def simulate_toy(policy: str, counts: list[int], **settings: object) -> PolicyResult:
    trace = AvailabilityTrace.from_counts(counts)
    return simulate_intervals(policy, trace, TOY, cost=TOY_COST, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        (
            "gpt-1.5b_p3_gbs128_mbs1",
            {
                "bound": 36.750,
                "oracle": 34.767,
                "reactive": 33.919,
                "checkpoint": 28.583,
                "throughut-opt": 33.919,
                "liveput-truth": 34.241,
                "liveput-predict": 31.780,
            },
        ),
        (
            "resnet152_gbs2048_mbs32",
            {
                "bound": 2323.864,
                "oracle": 2259.59,
                "reactive": 2255.234,
                "checkpoint": 2117.285,
                "throughut-opt": 2255.234,
                "liveput-truth": 2259.683,
                "liveput-predict": 2184.199,
            },
        ),
    ],
)
def test_the_reference_systems_scores_are_reproduced(
    workloads: dict[str, Workload], plan: str, rows: dict[str, float]
) -> None:
    path = PLANS / f"{plan}.json"
    workload, steps = workloads[plan.partition("_")[0]], membership_steps(AvailabilityTrace.read(path))
    plans = json.loads(path.read_text())
    for name, expected in rows.items():
        if name in INTERVAL_POLICIES:
            result = simulate_intervals(name, steps, workload)
        else:
            result = score_plan(name, [ParallelConfig(*step[name]) for step in plans], steps, workload)
        assert result.samples_per_s == pytest.approx(expected, rel=5e-4), name


def test_the_published_policy_is_about_as_good_as_the_published_plan(workloads: dict[str, Workload]) -> None:
    trace = read_trace("aws-p3")
    published = simulate_intervals("published", trace, workloads["gpt-1.5b"]).samples_per_s
    assert published == pytest.approx(31.78, rel=0.02)  # its forecasts are seeded by nobody knows what


def test_what_is_made_up_depends_on_the_seed_alone(workloads: dict[str, Workload]) -> None:
    steps = membership_steps(read_trace("aws-p3"))[:150]
    runs = [simulate_intervals("published", steps, workloads["gpt-6.7b"], seed=seed).samples for seed in (0, 0, 1, 2)]
    assert runs[0] == runs[1]
    assert len(set(runs)) > 1


@pytest.mark.parametrize("counts", TRACES.values(), ids=TRACES)
@pytest.mark.parametrize("policy", [name for name in INTERVAL_POLICIES if name != "checkpoint"])
def test_any_trace_is_told_without_holes(policy: str, counts: list[int]) -> None:
    result = simulate_toy(policy, counts)
    assert result.duration_s == 60.0 * len(counts)
    assert result.spans[0].start_s == 0.0
    assert result.spans[-1].end_s == result.duration_s
    for one, then in itertools.pairwise(result.spans):
        assert one.end_s == then.start_s
    assert result.samples == pytest.approx(sum(span.duration_s * span.samples_per_s for span in result.spans))
    assert result.instance_s == 60.0 * sum(counts)
    for span in result.spans:
        if span.config is not None:
            assert span.config.num_instances <= counts[min(int(span.start_s / 60.0 + 1e-9), len(counts) - 1)]
            assert span.samples_per_s in (0.0, RATES[span.config.num_pipelines, span.config.num_stages])
        else:
            assert span.cause == "waiting"
    for one in result.migrations:
        assert one.before != one.after or one.kind in ("intra_stage", "inter_stage")
    assert result.samples <= simulate_toy("bound", counts).samples + 1e-9
    if policy != "bound":
        assert result.samples <= simulate_toy("oracle", counts).samples + 1e-6


@pytest.mark.parametrize("policy", ["oracle", "reactive", "liveput", "stays", "published"])
def test_the_numbers_are_those_of_the_replay(policy: str) -> None:
    rng = np.random.default_rng(4)
    trace = AvailabilityTrace.from_counts(np.clip(5 + np.cumsum(rng.integers(-2, 3, 60)), 0, 8).tolist())
    # Pauses longer than an interval are carried over.
    cost = TOY.measured_cost(bytes_per_s=1.0, formation_s=25.0, rollback_s=50.0)
    result = simulate_intervals(policy, trace, TOY, cost=cost)
    steps = membership_steps(trace)
    space = ConfigSpace(TOY.profile, cost, max_instances=8)
    configs = [
        next(span.config for span in result.spans if span.start_s <= 60.0 * index + 59.999 <= span.end_s)
        for index in range(len(steps))
    ]
    score = replay(configs, steps, space)
    assert result.samples == pytest.approx(float(score.samples.sum()))
    assert len([one for one in result.migrations if one.kind != "waiting"]) == score.num_migrations
    paused_s = sum(seconds for cause, seconds in result.lost_s.items() if cause != "waiting")
    waiting = np.array([config is None for config in configs])
    assert paused_s == pytest.approx(float(score.paused_s[~waiting].sum()))


def test_kinds_pauses_and_waiting() -> None:
    result = simulate_toy("reactive", [8, 8, 6, 4, 1, 1, 4])
    assert [(one.kind, str(one.before), str(one.after)) for one in result.migrations] == [
        ("start", "None", "4x2"),
        ("intra_stage", "4x2", "3x2"),
        ("intra_stage", "3x2", "2x2"),
        ("waiting", "2x2", "None"),
        ("start", "None", "2x2"),
    ]
    assert result.lost_s["waiting"] == 120.0
    wait = result.migrations[3]
    assert (wait.time_s, wait.pause_s) == (240.0, 120.0 + result.migrations[4].pause_s)
    assert result.goodput == pytest.approx(1.0 - sum(result.lost_s.values()) / 420.0)
    grown = simulate_toy("reactive", [4, 6])
    assert [one.kind for one in grown.migrations] == ["start", "inter_stage"]
    assert [one.kind for one in simulate_toy("reactive", [3, 4]).migrations] == ["start", "pipeline"]
    bound = simulate_toy("bound", [8, 8, 6, 4, 1, 1, 4])
    assert not bound.migrations
    assert bound.samples == pytest.approx(60.0 * (10.0 + 10.0 + 8.5 + 6.0 + 6.0))


def test_only_the_past_is_known(workloads: dict[str, Workload]) -> None:
    counts = read_trace("aws-p3").resample(60.0)[:60].tolist()
    other = counts[:40] + [max(count - 9, 6) for count in counts[40:]]
    for policy in ("reactive", "liveput", "stays", "published"):
        runs = [
            simulate_intervals(policy, AvailabilityTrace.from_counts(one), workloads["gpt-6.7b"], seed=3)
            for one in (counts, other)
        ]
        pasts = [[one for one in run.migrations if one.time_s < 2400.0] for run in runs]
        assert pasts[0] == pasts[1], policy
        assert pasts[0]


def test_notices_help_and_the_oracle_is_never_beaten(workloads: dict[str, Workload]) -> None:
    steps = membership_steps(read_trace("aws-p3"))[:120]
    workload = workloads["gpt-6.7b"]
    rates = {
        name: simulate_intervals(name, steps, workload).samples_per_s for name in ("reactive", "liveput", "oracle")
    }
    for notice_s in (60.0, 125.0):
        told = simulate_intervals("liveput", steps, workload, notice_s=notice_s).samples_per_s
        assert rates["reactive"] < rates["liveput"] <= told <= rates["oracle"] * (1 + 1e-9)
    short = simulate_intervals("liveput", steps, workload, notice_s=59.0).samples_per_s
    assert short == rates["liveput"]


def test_a_planner_that_waits_for_what_never_comes_is_overruled(workloads: dict[str, Workload]) -> None:
    # Shifted down, the paper's trace stays at its limit for long, where the fastest configuration just fits.
    counts = np.maximum(read_trace("aws-p3").resample(60.0)[:400] - 9, 0)
    trace = AvailabilityTrace.from_counts(counts.tolist())
    planned, reactive = (
        simulate_intervals(policy, trace, workloads["resnet152"]) for policy in ("liveput", "reactive")
    )
    assert any("planning is behind reacting" in one.reason for one in planned.migrations)
    assert planned.samples >= reactive.samples * 0.999


@pytest.mark.parametrize("counts", [[24] * 90, [16 + index % 16 for index in range(64)], [32, 24] * 40])
def test_planning_is_never_much_worse_than_reacting(workloads: dict[str, Workload], counts: list[int]) -> None:
    trace = AvailabilityTrace.from_counts(counts)
    for name in ("gpt-6.7b", "resnet152"):
        planned, reactive = (
            simulate_intervals(policy, trace, workloads[name]).samples_per_s for policy in ("liveput", "reactive")
        )
        assert planned >= reactive * 0.999, name


def test_settings_are_used_and_told() -> None:
    counts = [6, 6, 4, 8, 6, 3, 8, 8, 6, 4] * 3
    done: list[float] = []
    ticks = itertools.count()
    result = simulate_toy("liveput", counts, progress=done.append, clock=lambda: float(next(ticks)))
    assert done[-1] == 1.0
    assert done == sorted(done)
    assert result.planning_s == 30.0  # one tick within each plan
    assert result.forecasts[0].ahead_s == 600.0
    assert all(band.low <= band.median <= band.high for band in result.forecasts)
    assert result.policy == "liveput"
    assert (result.profile, result.trace) == ("toy", "counts")
    slow = TOY.measured_cost(bytes_per_s=10.0, formation_s=50.0)
    assert (
        simulate_intervals("liveput", AvailabilityTrace.from_counts(counts), TOY, cost=slow, horizon=1).samples
        != simulate_intervals("liveput", AvailabilityTrace.from_counts(counts), TOY, cost=slow).samples
    )
    for forecaster in ("last_value", "auto"):
        assert simulate_toy("liveput", counts, forecaster=forecaster).samples > 0
    half = simulate_toy("reactive", counts, interval_s=30.0)
    assert half.duration_s == 1800.0
    assert half.samples > simulate_toy("reactive", counts).samples * 0.99


def test_a_thousand_instances_and_many_configurations() -> None:
    layer = LayerCost(0.01, 0.02, 0.001, 10**7, 6 * 10**7, 10**7, 10**6)
    profile = ModelProfile("deep", (layer,) * 24, num_samples=4096, num_microbatches=2048, memory_bytes=8e9)
    workload = Workload("deep", profile, (6 * 10**7,) * 24, {}, 4096)
    trace = AvailabilityTrace.from_counts([1000, 998, 998, 970, 990, 1000, 1000, 991])
    cost = workload.measured_cost()
    rates = [
        simulate_intervals(policy, trace, workload, cost=cost).samples_per_s
        for policy in ("reactive", "liveput", "oracle", "bound")
    ]
    assert rates[0] * 0.999 <= rates[1] <= rates[2] * (1 + 1e-9) <= rates[3] * (1 + 2e-9)


@pytest.mark.parametrize(
    ("workload", "counts", "policy", "message"),
    [
        (TOY, [1, 1], "reactive", "no configuration of profile toy runs on at most 1 instances: the smallest needs 2"),
        (TOY, [0], "bound", "at most 0 instances: the smallest needs 2"),
        (
            Workload("none", ThroughputProfile("none", {}), (1,), {}),
            [4],
            "liveput",
            "no configuration of profile none runs on at most 4 instances: none runs on any number",
        ),
        (TOY, [4], "best", "there is no policy 'best'; known are bound, oracle, reactive"),
    ],
)
def test_what_cannot_be_simulated_is_refused(workload: Workload, counts: list[int], policy: str, message: str) -> None:
    cost = MeasuredCost(layer_bytes=workload.layer_bytes)
    with pytest.raises(ValueError, match=message):
        simulate_intervals(policy, AvailabilityTrace.from_counts(counts), workload, cost=cost)


def test_a_checkpoint_without_the_reference_systems_constants_restarts_as_in_the_job_accounting() -> None:
    trace = AvailabilityTrace.from_counts([4, 4, 2], interval_s=100.0)
    cost = MeasuredCost(layer_bytes=TOY.layer_bytes, bytes_per_s=1e8)
    result = simulate_intervals("checkpoint", trace, TOY, cost=cost, interval_s=100.0)
    loading_s = sum(TOY.layer_bytes) / 1e8
    assert [move.kind for move in result.migrations] == ["start", "restart"]
    assert [move.pause_s for move in result.migrations] == pytest.approx([16.8, 16.8 + loading_s])
    assert any("16.8 s" in note for note in result.notes)


@pytest.mark.parametrize("policy", INTERVAL_POLICIES)
def test_the_end_of_the_trace_cuts_the_last_interval(policy: str) -> None:
    trace = AvailabilityTrace.from_events(
        [(0.0, {"add": ["a", "b", "c", "d"]}), (60.0, {"remove": ["a"]})], end_s=150.0, source="cut"
    )
    whole = AvailabilityTrace.from_counts([4, 3, 3])
    cost = MeasuredCost(layer_bytes=TOY.layer_bytes)
    cut, longer = (simulate_intervals(policy, one, TOY, cost=cost) for one in (trace, whole))
    assert cut.duration_s == cut.spans[-1].end_s == 150.0
    assert cut.instance_s == 4 * 60 + 3 * 60 + 3 * 30
    last = longer.spans[-1]
    assert longer.samples - cut.samples == pytest.approx(30.0 * last.samples_per_s)


def test_the_oracle_knows_that_the_last_interval_is_cut() -> None:
    # A migration of 15.05 s pays in 60 s (6 x 44.95 > 4 x 60), but not in 30.
    cost = TOY.measured_cost(bytes_per_s=1e9, formation_s=15.0)
    for end_s, last in ((150.0, ParallelConfig(1, 2)), (180.0, ParallelConfig(2, 2))):
        trace = AvailabilityTrace((0.0, 120.0), (2, 4), end_s)
        small = Workload(
            "small", ThroughputProfile("small", {ParallelConfig(1, 2): 4.0, ParallelConfig(2, 2): 6.0}), (10,), {}
        )
        oracle = simulate_intervals("oracle", trace, small, cost=cost)
        assert oracle.spans[-1].config == last
        assert oracle.samples >= simulate_intervals("reactive", trace, small, cost=cost).samples


def test_other_nonsense_is_refused() -> None:
    trace = AvailabilityTrace.from_counts([4, 4])
    with pytest.raises(ValueError, match="toy: the reference system has no migration costs"):
        simulate_intervals("reactive", trace, TOY)
    with pytest.raises(ValueError, match="there is no forecaster 'tea leaves'"):
        simulate_toy("liveput", [4], forecaster="tea leaves")
    for wrong in ({"notice_s": -1.0}, {"horizon": 0}):
        with pytest.raises(ValueError, match="a notice of at least 0 s and a horizon of at least 1"):
            simulate_toy("published", [4], **wrong)
    with pytest.raises(ValueError, match="at least one interval"):
        simulate_intervals("reactive", [], TOY, cost=TOY_COST)
    with pytest.raises(ValueError, match="a plan of 1 intervals for a trace of 2"):
        score_plan("mine", [ParallelConfig(2, 2)], trace, TOY, cost=TOY_COST)
    with pytest.raises(ValueError, match="interval 0: 4x2 needs more than the 4 instances"):
        score_plan("mine", [ParallelConfig(4, 2)] * 2, trace, TOY, cost=TOY_COST)
