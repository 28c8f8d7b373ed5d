"""One call for many runs: what names mean, what is run, in which order, in how many processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_parcae import simulation
from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import ThroughputProfile
from lightning_parcae.simulation import compare
from lightning_parcae.simulation.compare import (
    chosen_policies,
    known_policies,
    known_terms,
    parse_segment,
    read_traces,
    resampled,
    simulate,
)
from lightning_parcae.simulation.result import PolicyResult
from lightning_parcae.simulation.workload import Workload

COUNTS = AvailabilityTrace.from_counts([6, 6, 4, 4, 5, 6, 6, 6, 3, 6], source="counts")
NAMED = AvailabilityTrace.from_events(
    [(0.0, {"add": ["a", "b", "c", "d"]}), (200.0, {"remove": ["b"]}), (300.0, {"add": ["e"]})],
    end_s=600.0,
    source="named",
)
RATES = {ParallelConfig(pipelines, 2): 4.0 * pipelines for pipelines in (1, 2, 3)}
TOY = Workload("toy", ThroughputProfile("toy", RATES), (10**8,) * 4, {}, num_samples=8)


def plain(comparison: Any) -> str:
    return json.dumps(comparison.to_json())


def test_public_names_are_listed_and_loaded_when_asked_for() -> None:
    assert dir(simulation) == sorted(simulation.__all__)
    assert all(getattr(simulation, name) is not None for name in simulation.__all__)
    assert simulation.simulate is simulate
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        simulation.no_such_name


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5.5h:6.5h", (19800.0, 23400.0)),
        ("90m:", (5400.0, None)),
        ("3600s:7200s", (3600.0, 7200.0)),
        (":2h", (0.0, 7200.0)),
        ("0:1d", (0.0, 86400.0)),
        (" 1h : 2h ", (3600.0, 7200.0)),
        (":", (0.0, None)),
    ],
)
def test_parts_of_traces(text: str, seconds: tuple[float, float | None]) -> None:
    assert parse_segment(text) == seconds


@pytest.mark.parametrize("text", ["", "5h", "5:6h", "2h:1h", "1h:1h", "-1h:2h", "1h:2h:3h", "xh:2h", "1w:2w", "nan:"])
def test_no_parts_of_traces(text: str) -> None:
    with pytest.raises(ValueError, match=r"^no part of a trace: '.*; write it as 5\.5h:6\.5h"):
        parse_segment(text)


def test_policies_are_chosen_by_name() -> None:
    assert chosen_policies("liveput, ondemand,liveput", "job") == ("liveput", "ondemand")
    assert chosen_policies(["published"], "reference") == ("published",)
    assert chosen_policies("all", "job") == tuple(known_policies("job"))
    assert {"liveput", "reactive", "checkpoint", "redundant", "bound"} <= set(known_policies("job"))
    assert {"liveput", "published", "oracle", "ondemand"} <= set(known_policies("reference"))


@pytest.mark.parametrize("policies", ["liveput,nothing", ["nothing"], "", []])
def test_an_unknown_policy_lists_those_there_are(policies: Any) -> None:
    with pytest.raises(ValueError, match="policy") as caught:
        chosen_policies(policies, "job")
    lines = str(caught.value).splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(known_policies("job"))
    assert all(len(line.split()) > 3 for line in lines)


def test_terms_have_names_and_defaults() -> None:
    terms = known_terms("job")
    assert terms["warm_up_s"] == 30.0 and terms["checkpoint_every_s"] == 60.0 and "num_stages" in terms
    assert not {"seed", "policy", "planner", "notice_s"} & set(terms)
    assert set(known_terms("reference")) == {"detection_s", "formation_s", "build_s", "bytes_per_s", "rollback_s"}


# --- what is run ------------------------------------------------------------------------------------------------------


def test_results_come_by_trace_policy_and_seed() -> None:
    comparison = simulate([NAMED, COUNTS], TOY, policies=["bound", "liveput"], seeds=[3, 5], workers=1)
    found = [(result.trace, result.policy, result.seed) for result in comparison.results]
    # the named trace says who is lost, and the bound does not ask
    assert found == [
        ("named", "bound", 3),
        ("named", "liveput", 3),
        ("counts", "bound", 3),
        ("counts", "liveput", 3),
        ("counts", "liveput", 5),
    ]
    assert all(result.samples > 0 and result.profile == "toy" for result in comparison.results)
    assert comparison.settings["accounting"] == "job" and comparison.settings["seeds"] == [3, 5]


def test_every_policy_runs_in_both_accountings() -> None:
    job = simulate(COUNTS, "bert", policies="all", workers=1)
    assert [result.policy for result in job.results] == list(known_policies("job"))
    (bound,) = job.of("bound")
    assert all(result.samples <= bound.samples + 1e-6 for result in job.results if result.policy != "ondemand")
    reference = simulate(COUNTS, "bert", policies="all", accounting="reference", workers=1)
    assert [result.policy for result in reference.results] == list(known_policies("reference"))


def test_the_result_is_the_same_again_and_in_any_number_of_processes() -> None:
    policies = ["liveput", "redundant", "ondemand"]
    here = simulate([COUNTS, NAMED], TOY, policies=policies, seeds=[0, 1], workers=1)
    there = simulate([COUNTS, NAMED], TOY, policies=policies, seeds=[0, 1], workers=2)
    assert plain(here) == plain(there)


@pytest.mark.parametrize("accounting", ["job", "reference"])
def test_the_time_of_plans_is_told_to_those_who_ask(accounting: Any) -> None:
    def planning(**more: Any) -> float | None:
        comparison = simulate(COUNTS, "bert", policies="liveput", accounting=accounting, workers=1, **more)
        return comparison.results[0].planning_s

    assert planning() is None
    timed = planning(time_plans=True)
    assert timed is not None and timed > 0


def test_settings_reach_the_job_and_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def result(policy: str) -> PolicyResult:
        return PolicyResult(policy, "counts", "toy", 0, 600.0, (), (), 1.0, 1.0)

    def job(trace: Any, workload: Any, settings: Any, **_: Any) -> PolicyResult:
        seen["job"] = settings
        return result("liveput")

    def system(policy: str, trace: Any, workload: Any, *, terms: Any, seed: int, progress: Any) -> PolicyResult:
        seen["system"] = terms
        return result(policy)

    def intervals(policy: str, trace: Any, workload: Any, **more: Any) -> PolicyResult:
        seen["intervals"] = more
        return result(policy)

    monkeypatch.setattr(compare, "simulate_job", job)
    monkeypatch.setattr(compare, "simulate_system", system)
    monkeypatch.setattr(compare, "simulate_intervals", intervals)
    more: dict[str, Any] = {"notice_s": 120.0, "interval_s": 30.0, "horizon": 4, "forecaster": "events", "workers": 1}
    terms: dict[str, Any] = {"warm_up_s": 7.0, "bytes_per_s": 5e8, "checkpoint_every_s": 9.0}
    simulate(COUNTS, TOY, policies=["liveput", "redundant"], seeds=[4], **more, **terms)
    simulate(COUNTS, TOY, policies=["stays"], accounting="reference", seeds=[4], **more, bytes_per_s=5e8)
    settings = seen["job"]
    assert (settings.policy, settings.notice_s, settings.seed, settings.warm_up_s) == ("liveput", 120.0, 4, 7.0)
    assert (settings.planner.interval_s, settings.planner.horizon, settings.planner.forecaster) == (30.0, 4, "events")
    assert settings.bytes_per_s == seen["system"].bytes_per_s == 5e8
    assert seen["system"].checkpoint_every_s == 9.0
    assert seen["intervals"]["cost"].bytes_per_s == 5e8
    assert (seen["intervals"]["notice_s"], seen["intervals"]["horizon"], seen["intervals"]["seed"]) == (120.0, 4, 4)


def test_the_reference_accounting_uses_its_own_costs_unless_told_otherwise() -> None:
    def reactive(**terms: float) -> float:
        comparison = simulate(COUNTS, "bert", policies="reactive", accounting="reference", workers=1, **terms)
        return comparison.results[0].samples

    assert reactive() < reactive(formation_s=0.2)
    assert simulate(COUNTS, TOY, policies="reactive", accounting="reference", workers=1).results[0].samples > 0


# --- traces -----------------------------------------------------------------------------------------------------------


def test_traces_are_files_examples_or_values(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0,add,a\n0,add,b\n120000,remove,a\n")
    found = read_traces([str(path), "aws-p3", COUNTS], segment=(60.0, 120.0))
    assert [trace.end_s for trace in found] == [60.0, 60.0, 60.0]
    assert found[0].source.startswith(str(path)) and found[1].source.startswith("aws-p3")
    assert read_traces(path)[0].count_at(0.0) == 2


@pytest.mark.parametrize(
    ("traces", "segment", "message"),
    [
        ([], None, "needed are traces"),
        ([COUNTS, COUNTS], None, "different names"),
        ("nowhere.csv", None, "there is no trace nowhere.csv"),
        (COUNTS, "1h:2h", "cannot cut 3600 to 7200 s out of 0 to 600 s"),
    ],
)
def test_no_traces(traces: Any, segment: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_traces(traces, segment=segment)


def test_resampled_traces_differ_by_seed_and_share_a_name() -> None:
    one, other = (resampled(trace, seed=seed) for trace, seed in zip(read_traces(["aws-p3"]) * 2, (1, 2), strict=True))
    assert one.source == other.source == "aws-p3, resampled"
    assert one.counts != other.counts
    comparison = simulate(COUNTS, TOY, policies="bound", bootstrap=True, seeds=range(3), workers=1)
    assert [result.seed for result in comparison.of("bound")] == [0, 1, 2]


def test_more_instances_than_can_be_simulated_are_refused() -> None:
    many = AvailabilityTrace.from_counts([5001], source="many")
    with pytest.raises(ValueError, match="many: 5001 instances; at most 5000 are simulated"):
        simulate(many, TOY, policies="bound")


def test_the_planning_interval_is_not_that_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "counts.txt"
    path.write_text("6\n4\n6\n")
    accountings: tuple[compare.Accounting, ...] = ("job", "reference")
    for accounting in accountings:
        found = simulate(path, TOY, policies="reactive,ondemand", accounting=accounting, interval_s=50.0, workers=1)
        assert {result.duration_s for result in found.results} == {180.0}


# --- running ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_what_fails_in_a_run_is_raised_as_itself_and_names_it(workers: int) -> None:
    with pytest.raises(ValueError, match=r"^replica_drop on counts, seed 0: toy: no configuration with 99 stages"):
        simulate(COUNTS, TOY, policies=["liveput", "replica_drop"], workers=workers, num_stages=99)


def test_an_interrupt_ends_the_workers() -> None:
    told = []

    def interrupt(done: float, total: int) -> None:
        told.append((done, total))
        raise KeyboardInterrupt

    # conftest fails the test if a process stays
    with pytest.raises(KeyboardInterrupt):
        simulate("gcp-v100", "bert", policies=["bound", "liveput", "reactive", "fixed"], workers=2, progress=interrupt)
    assert told == [(1, 4)]


def test_progress_rises_to_the_number_of_runs() -> None:
    told: list[tuple[float, int]] = []
    simulate(COUNTS, TOY, policies=["bound", "liveput"], workers=1, progress=lambda *now: told.append(now))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (2, 2) and any(0 < done < 1 for done, _ in told)


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": 0},
        {"seeds": []},
        {"seeds": [1, 1]},
        {"notice_s": -1.0},
        {"notice_s": float("nan")},
        {"interval_s": 0.0},
        {"horizon": 0},
        {"horizon": 1001},
        {"interval_s": 1e9},
        {"seeds": [-1]},
        {"forecaster": "crystal ball"},
        {"accounting": "creative"},
    ],
)
def test_bad_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="got"):
        simulate(COUNTS, TOY, policies="bound", **wrong)


@pytest.mark.parametrize("policies", ["liveput", "checkpoint", "bound"])
def test_a_profile_that_cannot_run_is_refused_whatever_the_policy(policies: str) -> None:
    few = AvailabilityTrace.from_counts([1, 1], source="few")
    with pytest.raises(ValueError, match="no configuration of profile toy runs on at most 1 instances"):
        simulate(few, TOY, policies=policies)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_stages", 1.5), ("start_share", 1.1), ("bytes_per_s", 0.0), ("build_s", -1.0), ("failure_timeout_s", 0.0)],
)
def test_bad_terms_are_refused_before_anything_runs(name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "read_traces", lambda *_: pytest.fail("it went on"))
    term: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"^{name} must be .*, got {value}"):
        simulate(COUNTS, TOY, policies="bound", **term)


def test_an_unknown_term_lists_those_there_are() -> None:
    with pytest.raises(TypeError, match=r"no term 'warp_factor'.*there are warm_up_s, "):
        simulate(COUNTS, TOY, policies="bound", warp_factor=9.0)
