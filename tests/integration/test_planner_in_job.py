"""The planner in jobs of real processes: plans ahead of events, moves with rank 0, and keeps every promise."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.faults import FaultScript
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import LayerCost, ModelProfile, ThroughputProfile, read_profile
from tests.integration.jobs import Job, running
from tests.integration.outcomes import assert_exactly_once, assert_same, settle, train_alone
from tests.integration.planner_scripts import LINK, SCHEDULE, fit_from_yaml, fit_with_link, fit_with_oracle
from tests.integration.scripts import fit_regressor

pytestmark = pytest.mark.timeout(180)

EPOCHS = 60
NUM_SAMPLES = 64
TRAINER = {"max_epochs": EPOCHS, "check_val_every_n_epoch": 20}
SCRIPT: dict[str, Any] = {"num_samples": NUM_SAMPLES, "batch_size": 16, "trainer": TRAINER}
# Given, so that the plans do not depend on how busy the machine is.
SHALLOW = {(1, 2): 50.0, (1, 3): 60.0, (1, 4): 90.0, (2, 2): 100.0, (1, 5): 85.0}
TRACE = Path(__file__).parents[1] / "data" / "spotserve" / "trace_0203_real.txt"
DEEP = {(1, 2): 50.0, (1, 3): 80.0, (1, 4): 110.0, (2, 2): 90.0}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train_alone(tmp_path_factory.mktemp("reference"), fit_regressor, **SCRIPT)


def make_job(
    out: Path,
    count: int,
    rates: dict[tuple[int, int], float],
    *,
    script: Callable[..., None] = fit_regressor,
    epochs: int = EPOCHS,
    sleep_s: float = 0.1,
    **strategy: Any,
) -> Job:
    out.mkdir(parents=True, exist_ok=True)
    profile = ThroughputProfile("given", {ParallelConfig(*config): rate for config, rate in rates.items()})
    path = out / "given.json"
    path.write_text(json.dumps(profile.to_json()))
    given = {"min_stages": 2, "failure_timeout": 4, "policy": "liveput", "interval": 1.0, "profile": str(path)}
    options = {**given, **strategy}
    trainer = {"trainer": {**TRAINER, "max_epochs": epochs}}
    kwargs = {**SCRIPT, **trainer, "out": str(out), "strategy": options, "sleep_s": sleep_s}
    return Job(out, script, kwargs, expected=count)


def layout(job: Job) -> dict[str, Any]:
    layouts = [record["layout"] for record in job.timeline("committed") if record["layout"]]
    newest: dict[str, Any] = layouts[-1]
    return newest


def placed(job: Job) -> list[str]:
    return [name for row in layout(job)["grid"] for name in row]


def spare(job: Job) -> str:
    ready = {record["instance"] for record in job.timeline("ready")}
    gone = {record["instance"] for record in job.timeline("died")}
    return min(ready - gone - set(placed(job)))


def follower(job: Job) -> str:
    """Return an instance with a place that is not rank 0."""
    return [name for name in placed(job) if name != job.rank_zero()][-1]


def finish(job: Job, reference: dict[str, Any] | None, killed: set[str]) -> None:
    (job.run_dir / "hurry").touch()
    for name, code in job.join(90.0).items():
        assert code == (-signal.SIGKILL if name in killed else 0), f"{name} ended with {code}\n{job.report()}"
    if reference is not None:
        assert_same(job, reference, 1e-9)
        assert_exactly_once(job, NUM_SAMPLES, EPOCHS)
    assert not job.timeline("plan_refused")
    assert not job.timeline("failed")


def test_liveput_plans_ahead_of_a_trace(tmp_path: Path, reference: dict[str, Any]) -> None:
    job = make_job(tmp_path / "job", 5, SHALLOW)
    with running(job):
        # The start takes all five; the plan knows that 2x2 is faster, and keeps one as a spare.
        job.wait_for_event("plan", timeout_s=90)
        settle(job, (2, 2), 90.0)
        (plan,) = job.timeline("plan")
        assert plan["config"] == [2, 2] and plan["num_instances"] == 5 and plan["instance"] == job.rank_zero()
        assert plan["forecast"]["by"].startswith("event rates") and plan["liveput"] > 0 and plan["reason"]
        assert plan["table"][:6] == [None, None, [1, 2], [1, 3], [2, 2], [2, 2]]
        first, zero = job.timeline("planner")[0], job.rank_zero()

        # Unannounced, and rank 0: the table is used at once, and the next rank 0 plans on from the history.
        job.kill(zero)
        job.wait_until(lambda: zero not in layout(job)["order"], 30, "the job goes on without rank 0")
        settle(job, (2, 2))
        job.wait_for_event("planner", 2, 30)
        second = job.timeline("planner")[1]
        assert second["instance"] == job.rank_zero() != zero
        assert second["intervals"] > first["intervals"]

        # A joiner stays a spare, as planned; then an announced loss: the layout changes before it.
        job.add("j1")
        job.wait_until(lambda: any(r["instance"] == "j1" for r in job.timeline("ready")), 60, "the joiner is ready")
        warned = follower(job)
        job.signal(warned, signal.SIGTERM)
        job.wait_until(lambda: any(r["instance"] == warned for r in job.timeline("left")), 30, f"{warned} has left")
        left = next(record["time"] for record in job.timeline("left") if record["instance"] == warned)
        formed = [record for record in job.timeline("formed") if record["time"] < left]
        assert warned not in layout(job)["order"] and formed[-1]["config"] == [2, 2]
        notice = job.timeline("notice")[0]["time"]
        assert plan["time"] < notice < formed[-1]["time"]

        # Unannounced, without a spare: the planned configuration for three.
        victim = follower(job)
        job.kill(victim)
        settle(job, (1, 3))
        finish(job, reference, {zero, victim})


def test_the_layout_changes_before_a_predicted_loss(tmp_path: Path, reference: dict[str, Any]) -> None:
    interval_s = 1.5
    job = make_job(tmp_path / "job", 6, DEEP, script=fit_with_oracle, interval=interval_s)
    with running(job):
        settle(job, (1, 4), 90.0)  # no losses are expected: deep is faster
        begin = time.time()
        kills = [begin + 4 * interval_s, begin + 10 * interval_s]
        (job.run_dir / SCHEDULE).write_text(json.dumps(kills))

        # The first loss is a spare's; it shows that the forecaster has skill.
        time.sleep(max(0.0, kills[0] - time.time()))
        first = spare(job)
        job.kill(first)
        job.wait_until(lambda: any(r["instance"] == first for r in job.timeline("died")), 10, "its death is seen")
        settle(job, (1, 4), 20.0)

        # The second one is not: replicas are there before it comes, without any notice.
        job.wait_until(
            lambda: job.timeline("formed")[-1]["config"] == [2, 2], kills[1] - time.time() + 1.0, "2x2 in time"
        )
        ready = job.timeline("formed")[-1]["time"]
        plan = job.timeline("plan")[-1]
        assert plan["config"] == [2, 2] and plan["forecast"]["by"].startswith("oracle")
        assert plan["forecast"]["skill"] > 0 and plan["time"] < ready
        time.sleep(max(0.0, kills[1] - time.time()))
        second = follower(job)
        job.kill(second)
        job.wait_until(lambda: any(r["instance"] == second for r in job.timeline("died")), 10, "its death is seen")
        died = next(record["time"] for record in job.timeline("died") if record["instance"] == second)
        assert ready < died and not job.timeline("notice")
        settle(job, (1, 4), 30.0)  # peace again
        finish(job, reference, {first, second})


def replay(job: Job, script: FaultScript) -> dict[str, float]:
    """Let a trace happen to a job; return when those who were warned had to be gone, as unix time."""
    run, began = script.start(), time.monotonic()
    names = {node: f"i{index}" for index, node in enumerate(script.initial_nodes)}
    deadlines: dict[str, float] = {}
    killed: set[str] = set()
    while run.left or set(deadlines) - killed:
        for event in run.due(0, time.monotonic() - began, 0):
            if event.action == "add":
                assert event.node is not None
                names[event.node] = f"j{len(names)}"
                job.add(names[event.node])
                continue
            name = run.victim(event.target, order=(), spares=(), nodes=names)
            assert name is not None
            if event.action == "notice":
                deadlines[name] = time.time() + event.grace_s
                job.signal(name, signal.SIGTERM)
            else:
                job.kill(name)
        for name in [name for name, when in deadlines.items() if time.time() >= when and name not in killed]:
            killed.add(name)
            if job.processes[name].exitcode is None:
                job.kill(name)  # the cloud does not wait
        time.sleep(0.01)
    return deadlines


def test_a_trace_file_is_replayed_with_and_without_notice(tmp_path: Path, reference: dict[str, Any]) -> None:
    # nine nodes, of which six are taken: one goes after 2 min, two after 3 min, and others come from minute 8 on
    trace = AvailabilityTrace.read(TRACE)
    script = FaultScript.from_trace(trace, time_scale=36.0, notice_s=1.5, max_instances=6)
    (first,) = (event for event in script.events if event.target == "node:node-4")
    assert first.at_s is not None
    script.events[script.events.index(first)] = replace(first, action="kill", at_s=first.at_s + first.grace_s)
    script.events.sort(key=lambda event: event.at_s or 0.0)
    assert [event.action for event in script.events] == ["kill", "notice", "notice", "add", "add", "add"]
    job = make_job(tmp_path / "job", len(script.initial_nodes), {**SHALLOW, (3, 2): 150.0}, sleep_s=0.15)
    with running(job):
        job.wait_for_event("plan", timeout_s=90)
        settle(job, (3, 2), 30.0)
        (plan,) = job.timeline("plan")
        assert plan["table"][:7] == [None, None, [1, 2], [1, 3], [2, 2], [2, 2], [3, 2]]
        deadlines = replay(job, script)
        settle(job, (3, 2), 30.0)

        # Nobody knew of the first loss: the table's configuration for five.
        died = next(record["time"] for record in job.timeline("died") if record["instance"] == "i4")
        after = [record for record in job.timeline("formed") if record["time"] > died]
        assert after[0]["config"] == [2, 2]
        # The others were announced: without them the job ran as planned for three before they had to go.
        grids = {record["generation"]: record["layout"]["order"] for record in job.timeline("committed")}
        assert set(deadlines) == {"i1", "i5"}
        for name, deadline in deadlines.items():
            free = next(record for record in after if name not in grids[record["generation"]])
            assert died < free["time"] < deadline, (name, free, deadline)
            assert job.processes[name].exitcode == 0
        without = next(record for record in after if not {"i1", "i5"} & set(grids[record["generation"]]))
        assert without["config"] == [1, 3] and without["time"] < min(deadlines.values())
        assert {record["instance"] for record in job.timeline("left")} >= {"i1", "i5"}
        finish(job, reference, {"i4"})


def test_reactive_takes_the_fastest_for_who_is_there(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", 4, DEEP, policy="reactive", epochs=25)
    with running(job):
        settle(job, (1, 4), 90.0)
        (plan,) = job.timeline("plan")
        assert plan["config"] == [1, 4] and plan["table"][:5] == [None, None, [1, 2], [1, 3], [1, 4]]
        assert job.timeline("formed")[0]["config"] == [2, 2]
        warned = follower(job)
        job.signal(warned, signal.SIGTERM)
        settle(job, (1, 3), 30.0)
        finish(job, None, set())


def test_a_job_plans_with_what_it_has_measured(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", 3, DEEP, script=fit_with_link, profile=None, interval=0.5, epochs=20)
    with running(job):
        job.wait_for_event("plan", timeout_s=90)
        profile = read_profile(job.run_dir / "profile.json")
        assert isinstance(profile, ModelProfile) and len(profile.layers) == 9
        assert profile.num_samples == 16 and profile.num_microbatches == 8
        assert ParallelConfig(*job.timeline("formed")[0]["config"]) in profile.step_s
        assert min(profile.step_s.values()) > 0.1  # the script sleeps so long in each step
        # the link was probed when the members met, and all of them know of it
        assert (profile.link_latency_s, profile.link_bytes_per_s) == (LINK.latency_s, LINK.bytes_per_s)
        said = job.timeline("planner")[0]["link"]
        assert said == {"latency_s": LINK.latency_s, "bytes_per_s": LINK.bytes_per_s}
        victim = follower(job)
        job.signal(victim, signal.SIGTERM)
        job.wait_until(lambda: any(r["instance"] == victim for r in job.timeline("left")), 30, f"{victim} has left")
        finish(job, None, set())
        met = {
            record["generation"]: record["layout"]["order"] for record in job.timeline("committed") if record["fresh"]
        }
        for name in job.processes:
            lines = (job.run_dir / f"probes-{name}.txt").read_text().split()
            assert lines == [str(number) for number, order in met.items() if name in order]
        assert all(0 < record["plan_s"] < 5 for record in job.timeline("plan"))


def test_a_death_in_the_middle_of_a_probe_breaks_one_generation(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", 3, DEEP, script=fit_with_link, policy="fixed", epochs=5)
    (job.run_dir / "dies-i1").touch()  # rank 0 is waiting for it then
    with running(job):
        settle(job, (1, 2), 90.0)
        assert job.timeline("formed")[0]["generation"] > 1
        finish(job, None, {"i1"})


def test_what_yaml_says_reaches_the_planner(tmp_path: Path) -> None:
    layers = (LayerCost(0.001, 0.002, parameter_bytes=1000, state_bytes=3000),) * 3
    given = tmp_path / "given.json"
    given.write_text(json.dumps(ModelProfile("from a file", layers, num_samples=8, num_microbatches=8).to_json()))
    asked = {"policy": "reactive", "interval": 0.4, "horizon": 7, "forecaster": "last_value"}
    strategy = {
        "class_path": "lightning_parcae.ParcaeStrategy",
        "init_args": {**asked, "profile": str(given), "device_memory": 0.5, "failure_timeout": 4},
    }
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = {**quiet, "max_epochs": 5, "accelerator": "cpu", "devices": 1, "strategy": strategy}
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"trainer": {**trainer, "enable_checkpointing": False}}))  # JSON is YAML
    out = tmp_path / "job"
    job = Job(out, fit_from_yaml, {"out": str(out), "config": str(config)}, expected=1)
    with running(job):
        assert job.join(90.0) == {"i0": 0}, job.report()
    planned = json.loads((out / "planner.json").read_text())
    settings = planned["settings"]
    assert (settings["policy"], settings["interval_s"]) == ("reactive", 0.4)
    assert (settings["horizon"], settings["forecaster"]) == (7, "last_value")
    assert planned["profile"]["name"] == "from a file" and planned["profile"]["memory_bytes"] == 0.5 * (1 << 30)


def test_nothing_that_fits_into_memory_ends_the_job_with_the_reason(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", 1, DEEP, profile=None, policy="fixed", device_memory=1e-6, min_stages=1)
    with running(job):
        assert job.join(60.0) == {"i0": 1}, job.report()
        (failed,) = job.timeline("failed")
    assert "no configuration fits into the memory of an instance" in json.dumps(failed)


def test_fixed_never_plans(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", 4, DEEP, policy="fixed", interval=0.2, epochs=8)
    with running(job):
        job.wait_for_step(20, 90.0)
        finish(job, None, set())
        assert not job.timeline("plan") and not job.timeline("planner")
        assert [record["config"] for record in job.timeline("formed")] == [[2, 2]]
