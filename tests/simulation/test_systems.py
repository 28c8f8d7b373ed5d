"""Other systems: what each does when, worked out by hand; time and samples add up; the reference's figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_parcae.availability.trace import AvailabilityTrace, Event
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import LayerCost, ModelProfile, ThroughputProfile
from lightning_parcae.simulation.result import PolicyResult
from lightning_parcae.simulation.systems import SYSTEM_POLICIES, SystemTerms, simulate_system
from lightning_parcae.simulation.workload import Workload, read_trace, read_workload

PLANS = Path("/work/shared/data/parcae/reference_plans")
needs_data = pytest.mark.skipif(not PLANS.is_dir(), reason="the shared data folder is not here")

#: One sample per second for each instance in the grid; two stages at least.
TABLE = {ParallelConfig(d, p): float(d * p) for d in range(1, 9) for p in (2, 4)}
WORKLOAD = Workload("toy", ThroughputProfile("toy", TABLE), (0,), {})
TERMS = SystemTerms(
    restart_s=10.0, checkpoint_every_s=30.0, redundant_slowdown=1.0, overprovision=1.0, quorum_s=5.0, join_s=1.0
)


def names(first: int, last: int) -> list[str]:
    return [f"n{index:02d}" for index in range(first, last + 1)]


def run(
    system: str, events: list[Event], end_s: float, workload: Workload = WORKLOAD, **changes: object
) -> PolicyResult:
    trace = AvailabilityTrace.from_events(events, end_s=end_s)
    return simulate_system(system, trace, workload, terms=dataclasses.replace(TERMS, **changes))  # type: ignore[arg-type]


def told(result: PolicyResult) -> list[tuple[float, float, str, str]]:
    """Return begin, end, configuration, and what went on: a rate or a cause."""
    return [
        (span.start_s, span.end_s, str(span.config), span.cause or f"{span.samples_per_s:g}/s") for span in result.spans
    ]


def check_sums(result: PolicyResult) -> None:
    edges = [(span.start_s, span.end_s) for span in result.spans]
    assert edges[0][0] == 0.0 and edges[-1][1] == pytest.approx(result.duration_s)
    assert [end for _, end in edges[:-1]] == pytest.approx([start for start, _ in edges[1:]])
    assert result.samples == pytest.approx(sum(span.duration_s * span.samples_per_s for span in result.spans))
    assert sum(result.lost_s.values()) + sum(s.duration_s for s in result.spans if s.cause is None) == pytest.approx(
        result.duration_s
    )
    assert all(span.samples_per_s == 0 for span in result.spans if span.cause is not None)
    assert all(0 <= one.pause_s <= result.duration_s for one in result.migrations)


def test_checkpoint_loses_the_work_since_the_last_checkpoint_and_restarts() -> None:
    result = run("checkpoint", [(0.0, {"add": names(1, 4)}), (95.0, {"remove": ["n02"]})], 200.0)
    # Trained from 10 to 95: checkpoints after 30 and 60 s, so 25 s x 4/s are lost; at 2/s they take 50 s.
    assert told(result) == [
        (0.0, 10.0, "1x4", "start"),
        (10.0, 95.0, "1x4", "4/s"),
        (95.0, 105.0, "1x2", "restart"),
        (105.0, 155.0, "1x2", "redo"),
        (155.0, 200.0, "1x2", "2/s"),
    ]
    assert result.samples == 85 * 4 + 45 * 2
    assert [(one.kind, one.pause_s) for one in result.migrations] == [("start", 10.0), ("restart", 10.0)]
    check_sums(result)


def test_checkpoint_saves_before_it_grows_and_leaves_spares_alone() -> None:
    events: list[Event] = [
        (0.0, {"add": names(1, 3)}),
        (50.0, {"remove": ["n03"]}),  # a spare
        (60.0, {"add": ["n04"]}),  # not enough for more
        (70.0, {"add": ["n05"]}),
    ]
    result = run("checkpoint", events, 100.0)
    assert told(result) == [
        (0.0, 10.0, "1x2", "start"),
        (10.0, 70.0, "1x2", "2/s"),
        (70.0, 80.0, "1x4", "restart"),
        (80.0, 100.0, "1x4", "4/s"),
    ]
    assert run("checkpoint", events, 100.0, restart_always=True).lost_s == {"start": 10.0, "restart": 30.0}


def test_an_interrupted_restart_begins_again() -> None:
    events: list[Event] = [(0.0, {"add": names(1, 4)}), (50.0, {"remove": ["n01"]}), (56.0, {"remove": ["n02"]})]
    result = run("checkpoint", events, 100.0)
    assert told(result)[2] == (50.0, 66.0, "1x2", "restart")
    assert [one.pause_s for one in result.migrations] == [10.0, 6.0, 10.0]


def test_too_few_instances_mean_waiting_and_a_restart_afterwards() -> None:
    events: list[Event] = [(20.0, {"add": names(1, 2)}), (50.0, {"remove": ["n01"]}), (70.0, {"add": ["n03"]})]
    result = run("checkpoint", events, 100.0)
    assert told(result) == [
        (0.0, 20.0, "None", "waiting"),
        (20.0, 30.0, "1x2", "start"),
        (30.0, 50.0, "1x2", "2/s"),
        (50.0, 70.0, "None", "waiting"),
        (70.0, 80.0, "1x2", "restart"),
        (80.0, 100.0, "1x2", "redo"),
    ]
    assert [(one.kind, one.pause_s) for one in result.migrations] == [
        ("start", 10.0),
        ("waiting", 20.0),
        ("restart", 10.0),
    ]
    assert result.instance_s == 30 * 2 + 20 * 1 + 30 * 2


def test_elastic_restart_restarts_at_every_change_and_keeps_its_stages() -> None:
    events: list[Event] = [(0.0, {"add": names(1, 4)}), (40.0, {"add": names(5, 8)}), (70.0, {"remove": ["n01"]})]
    result = run("elastic_restart", events, 100.0, num_stages=4)
    assert told(result) == [
        (0.0, 10.0, "1x4", "start"),
        (10.0, 40.0, "1x4", "4/s"),  # a checkpoint exactly at 40 s
        (40.0, 50.0, "2x4", "restart"),
        (50.0, 70.0, "2x4", "8/s"),
        (70.0, 80.0, "1x4", "restart"),
        (80.0, 100.0, "1x4", "redo"),
    ]
    check_sums(result)


def test_replica_drop_goes_on_with_the_survivors_and_takes_a_replica_back() -> None:
    events: list[Event] = [
        (0.0, {"add": names(1, 4)}),
        (50.0, {"remove": ["n03"]}),
        (80.0, {"add": ["n05"]}),  # with n04 a replica again, ready at 90
    ]
    result = run("replica_drop", events, 100.0, num_stages=2)
    assert told(result) == [
        (0.0, 10.0, "2x2", "start"),
        (10.0, 50.0, "2x2", "4/s"),
        (50.0, 55.0, "1x2", "intra_stage"),
        (55.0, 90.0, "1x2", "2/s"),
        (90.0, 91.0, "2x2", "intra_stage"),
        (91.0, 100.0, "2x2", "4/s"),
    ]
    check_sums(result)


def test_replica_drop_starts_over_when_no_replica_is_left() -> None:
    events: list[Event] = [(0.0, {"add": names(1, 4)}), (65.0, {"remove": ["n02", "n04"]}), (95.0, {"remove": ["n01"]})]
    result = run("replica_drop", events, 120.0, num_stages=2)
    # The survivors of both make one replica; 25 s x 4/s since the checkpoint at 40 s are done again at 2/s.
    assert told(result) == [
        (0.0, 10.0, "2x2", "start"),
        (10.0, 65.0, "2x2", "4/s"),
        (65.0, 75.0, "1x2", "restart"),
        (75.0, 95.0, "1x2", "redo"),
        (95.0, 120.0, "None", "waiting"),
    ]
    check_sums(result)


def test_replica_drop_waits_for_as_many_replicas_as_the_profile_needs() -> None:
    table = {ParallelConfig(2, 2): 4.0, ParallelConfig(3, 2): 6.0}
    workload = Workload("no single pipeline", ThroughputProfile("x", table), (0,), {})
    events: list[Event] = [(0.0, {"add": names(1, 4)}), (50.0, {"remove": ["n01"]}), (70.0, {"add": names(5, 5)})]
    result = run("replica_drop", events, 100.0, workload, num_stages=2)
    assert told(result)[2:] == [
        (50.0, 70.0, "None", "waiting"),
        (70.0, 80.0, "2x2", "restart"),
        (80.0, 100.0, "2x2", "4/s"),  # the replica that was alone has kept the state
    ]


def test_redundancy_absorbs_single_losses_and_spreads_the_stages_anew() -> None:
    events: list[Event] = [
        (0.0, {"add": names(1, 5)}),
        (100.0, {"remove": ["n02"]}),  # n01 takes over; the spare relieves it
        (200.0, {"remove": ["n04"]}),  # no spare: it goes on with three instances
        (300.0, {"add": ["n06"]}),
    ]
    result = run("redundant", events, 400.0, num_stages=4, global_rendezvous_s=30.0, overloaded_share=0.9)
    assert told(result) == [
        (0.0, 30.0, "1x4", "start"),
        (30.0, 100.0, "1x4", "4/s"),
        (100.0, 110.0, "1x4", "pipeline"),
        (110.0, 200.0, "1x4", "4/s"),
        (200.0, 201.0, "1x4", "inter_stage"),
        (201.0, 300.0, "1x4", "2.66667/s"),
        (300.0, 310.0, "1x4", "pipeline"),
        (310.0, 400.0, "1x4", "4/s"),
    ]
    check_sums(result)


@pytest.mark.parametrize(
    ("lost", "is_fatal"),
    [
        (["n01"], False),
        (["n01", "n03"], False),
        (["n01", "n02"], True),
        (["n02", "n01"], True),
        (["n04", "n01"], True),  # the last stage's successor is the first
        (["n01", "n05"], False),  # neighbours by name, but in different pipelines
    ],
)
def test_redundancy_fails_when_neighbours_are_lost(lost: list[str], is_fatal: bool) -> None:
    events: list[Event] = [(0.0, {"add": names(1, 8)}), (100.0, {"remove": lost})]
    result = run("redundant", events, 200.0, num_stages=4)
    assert ("restart" in result.lost_s) == is_fatal
    assert ("redo" in result.lost_s) == is_fatal


def test_redundancy_fails_when_an_overloaded_instance_is_lost() -> None:
    events: list[Event] = [(0.0, {"add": names(1, 4)}), (100.0, {"remove": ["n02"]}), (150.0, {"remove": ["n01"]})]
    result = run("redundant", events, 200.0, num_stages=4, overloaded_share=0.9)
    assert told(result)[-1] == (150.0, 200.0, "None", "waiting")


def test_a_loss_while_stages_are_spread_starts_that_again() -> None:
    events: list[Event] = [(0.0, {"add": names(1, 6)}), (100.0, {"remove": ["n02"]}), (104.0, {"remove": ["n04"]})]
    assert told(run("redundant", events, 200.0, num_stages=4))[2] == (100.0, 114.0, "1x4", "pipeline")
    # With nobody left to relieve them, the old places are kept.
    events = [(0.0, {"add": names(1, 5)}), (100.0, {"remove": ["n02"]}), (104.0, {"remove": ["n04", "n05"]})]
    assert told(run("redundant", events, 200.0, num_stages=4))[3:] == [
        (104.0, 105.0, "1x4", "inter_stage"),
        (105.0, 200.0, "1x4", "2.66667/s"),
    ]


def test_redundancy_takes_pipelines_as_deep_as_it_must() -> None:
    workload = Workload("x", ThroughputProfile("x", TABLE | {ParallelConfig(4, 2): 9.0}), (0,), {})
    events: list[Event] = [(0.0, {"add": names(1, 8)})]
    for overprovision, config in (
        (1.0, ParallelConfig(4, 2)),
        (1.5, ParallelConfig(2, 4)),
        (9.0, ParallelConfig(2, 4)),
    ):
        assert run("redundant", events, 100.0, workload, overprovision=overprovision).spans[-1].config == config


def test_on_demand_rents_what_its_configuration_uses() -> None:
    result = run("ondemand", [(0.0, {"add": names(1, 2)}), (50.0, {"add": names(3, 5)})], 100.0)
    assert told(result) == [(0.0, 10.0, "1x4", "start"), (10.0, 100.0, "1x4", "4/s")]
    assert result.uses_on_demand and result.instance_s == 400.0


def test_the_bound_has_no_pauses() -> None:
    events: list[Event] = [(0.0, {"add": names(1, 2)}), (50.0, {"add": names(3, 5)}), (70.0, {"remove": names(1, 4)})]
    assert told(run("bound", events, 100.0)) == [
        (0.0, 50.0, "1x2", "2/s"),
        (50.0, 70.0, "1x4", "4/s"),
        (70.0, 100.0, "None", "waiting"),
    ]


def test_state_takes_time_to_load_without_constants_of_the_reference() -> None:
    layers = tuple(LayerCost(1.0, 2.0, state_bytes=size) for size in (100, 300))
    profile = ModelProfile("layers", layers, num_samples=8, num_microbatches=8)
    workload = Workload("layers", profile, (100, 300), {1: (0, 2), 2: (0, 1, 2)})
    events: list[Event] = [(0.0, {"add": names(1, 2)}), (50.0, {"remove": ["n01"]})]
    lost = run("checkpoint", events, 200.0, workload, bytes_per_s=20.0).lost_s
    assert lost["start"] == 10.0 and lost["restart"] == 10.0 + 400 / 20


@needs_data
@pytest.mark.parametrize(
    ("model", "plan", "bound", "checkpoint", "tolerance"),
    [
        ("gpt-1.5b", "gpt-1.5b_p3_gbs128_mbs1", 36.750, 28.583, 0.025),
        ("resnet152", "resnet152_gbs2048_mbs32", 2323.864, 2117.285, 0.005),
    ],
)
def test_the_reference_systems_own_figures(
    model: str, plan: str, bound: float, checkpoint: float, tolerance: float
) -> None:
    """Its checkpoint baseline restarts at every change and loses no work; GPT's restarts outlast its intervals."""
    trace, workload = read_trace(PLANS / f"{plan}.json"), read_workload(model)
    assert simulate_system("bound", trace, workload).samples_per_s == pytest.approx(bound, rel=2e-5)
    terms = SystemTerms(checkpoint_every_s=0.0, restart_always=True)
    found = simulate_system("checkpoint", trace, workload, terms=terms)
    assert found.samples_per_s == pytest.approx(checkpoint, rel=tolerance)


@pytest.mark.parametrize("model", ["gpt-1.5b", "resnet152", "vgg19", "gpt-6.7b", "bert"])
@pytest.mark.parametrize("system", SYSTEM_POLICIES)
def test_examples_add_up_and_stay_below_the_bound(system: str, model: str) -> None:
    trace, workload = read_trace("aws-p3"), read_workload(model)
    result = simulate_system(system, trace, workload)
    check_sums(result)
    if system != "ondemand":
        assert 0 < result.samples <= simulate_system("bound", trace, workload).samples
        assert result.instance_s == pytest.approx(trace.statistics().instance_hours * 3600)


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=40),
    interval_s=st.sampled_from([0.3, 7.0, 60.0]),
    seed=st.integers(0, 3),
)
@pytest.mark.parametrize("system", SYSTEM_POLICIES)
def test_any_trace_adds_up(system: str, counts: list[int], interval_s: float, seed: int) -> None:
    trace = AvailabilityTrace.from_counts(counts, interval_s=interval_s)
    done: list[float] = []
    result = simulate_system(system, trace, WORKLOAD, terms=TERMS, seed=seed, progress=done.append)
    check_sums(result)
    assert result == simulate_system(system, trace, WORKLOAD, terms=TERMS, seed=seed)
    for span in result.spans:
        if system != "ondemand" and span.cause is None and span.config is not None and system != "redundant":
            assert span.config.num_instances <= trace.count_at(span.start_s)
    if system not in ("ondemand", "redundant"):
        assert result.samples <= simulate_system("bound", trace, WORKLOAD).samples + 1e-6
    if system != "ondemand":
        assert done == sorted(done) and done[-1] == 1.0


@pytest.mark.parametrize("system", SYSTEM_POLICIES)
def test_no_configuration_means_waiting_with_a_note(system: str) -> None:
    result = simulate_system(system, AvailabilityTrace.from_counts([1, 0, 1]), WORKLOAD)
    assert result.lost_s == {"waiting": 180.0} and result.samples == 0
    assert result.notes == ("no configuration of toy fits into the at most 1 instances",)


@pytest.mark.parametrize("system", SYSTEM_POLICIES)
def test_a_thousand_instances(system: str) -> None:
    counts = (800 + np.random.default_rng(0).integers(0, 200, size=60)).tolist()
    layers = tuple(LayerCost(0.01, 0.02, state_bytes=10**9, activation_bytes=10**8) for _ in range(24))
    profile = ModelProfile("large", layers, num_samples=512, num_microbatches=256, memory_bytes=8e9)
    workload = Workload("large", profile, (10**9,) * 24, {})
    result = simulate_system(system, AvailabilityTrace.from_counts(counts), workload)
    check_sums(result)
    assert result.samples > 0


def test_nonsense_is_refused() -> None:
    trace = AvailabilityTrace.from_counts([4])
    with pytest.raises(ValueError, match="no system 'x'; there are ondemand"):
        simulate_system("x", trace, WORKLOAD)
    with pytest.raises(ValueError, match="no configuration with 3 stages fits into the at most 4 instances"):
        simulate_system("replica_drop", trace, WORKLOAD, terms=SystemTerms(num_stages=3))
    with pytest.raises(ValueError, match="a trace of 0 s cannot be simulated"):
        simulate_system("bound", AvailabilityTrace.from_events([], end_s=0.0), WORKLOAD)
    for name, value in (
        ("restart_s", -1.0),
        ("quorum_s", float("nan")),
        ("join_s", float("inf")),
        ("overprovision", 0.5),
        ("bytes_per_s", 0.0),
        ("num_stages", 0),
    ):
        with pytest.raises(ValueError, match=name):
            SystemTerms(**{name: value})  # type: ignore[arg-type]
    assert SystemTerms(checkpoint_every_s=float("inf")).checkpoint_every_s == float("inf")
