"""The planner's thread: when it asks, what it says, how it ends and how it fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_parcae.control.history import HISTORY_KEY, AvailabilityHistory
from lightning_parcae.control.messages import Event, Plan, decode, encode
from lightning_parcae.errors import MembershipError, PlanError
from lightning_parcae.planner import MIN_STEPS, Planner, StepTimes
from lightning_parcae.planning.job_history import JobHistory, PastReconfiguration
from lightning_parcae.planning.job_planner import JobModel, JobPlanner, PlannerSettings
from lightning_parcae.planning.job_profile import Limits, LinkSpeed
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.policy import most_instances_table
from lightning_parcae.planning.profile import LayerCost, ModelProfile, read_profile

CONFIG = ParallelConfig(2, 2)
INTERVAL_S = 0.2


class FakeAgent:
    """A coordinator of four instances that takes every plan."""

    def __init__(self) -> None:
        self.history = AvailabilityHistory()
        self.num_asked = 0
        self.plans: list[Plan] = []
        self.events: list[Event] = []
        self.error: Exception | None = None
        self.table: list[list[int] | None] = []
        for index in range(4):
            self.history.connected(0.0, f"i{index}")
            self.history.ready(0.5, f"i{index}")
        self.history.formed(1.0, PastReconfiguration("initial", False, 0.0, 0, 0))
        self._began = time.monotonic() - 2 * INTERVAL_S

    def request(self, op: str, key: str, value: Any = None, *, timeout_s: float | None) -> Any:
        assert (op, key) == ("get", HISTORY_KEY)
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        state = {"phase": "running", "config": [2, 2], "table": self.table}
        return json.loads(json.dumps({**self.history.describe(1.0 + time.monotonic() - self._began), **state}))

    def send(self, message: Plan | Event) -> None:
        assert decode(encode(message)) == message
        if isinstance(message, Event):
            self.events.append(message)
            return
        self.table = [None if entry is None else list(entry) for entry in message.table]
        self.plans.append(message)


def make_job(policy: str = "liveput", interval_s: float = INTERVAL_S) -> JobPlanner:
    model = JobModel(
        profile=ModelProfile("toy", (LayerCost(0.001, 0.002),) * 4, num_samples=80, num_microbatches=8),
        limits=Limits(num_layers=4, max_pipelines=8),
        layer_bytes=(1000,) * 4,
        cuts={},
        start_table=most_instances_table(num_layers=4, max_instances=8, max_pipelines=8),
    )
    return JobPlanner(model, PlannerSettings(policy=policy, interval_s=interval_s))  # type: ignore[arg-type]


def run_steps(planner: Planner, count: int = MIN_STEPS + 3) -> None:
    for _ in range(count):
        planner.steps.note(time.perf_counter())


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting until {what}"
        time.sleep(0.005)


@pytest.fixture
def started() -> Iterator[list[Planner]]:
    planners: list[Planner] = []
    yield planners
    for planner in planners:
        planner.stop(wait_s=5.0)
        assert not any(thread.name == "parcae-planner" for thread in threading.enumerate())


def test_plans_each_interval_and_sends_only_what_differs(started: list[Planner], tmp_path: Path) -> None:
    agent = FakeAgent()
    planner = Planner(agent, make_job(), profile_path=tmp_path / "profile.json")
    started.append(planner)
    planner.enter(CONFIG, is_zero=True)
    wait_until(lambda: agent.num_asked >= 2, "it asks again")
    assert not agent.plans  # nothing is measured yet
    assert planner.metrics == {}
    run_steps(planner)
    wait_until(lambda: agent.plans, "a plan")
    asked, now = agent.num_asked, time.monotonic()
    wait_until(lambda: agent.num_asked >= asked + 3, "three intervals more")
    assert time.monotonic() - now > 1.9 * INTERVAL_S
    assert len(agent.plans) == 1  # the same again
    assert [event.name for event in agent.events] == ["planner"]
    plan = agent.plans[0]
    assert plan.details["num_instances"] == 4 and plan.details["forecast"]["intervals"] >= 2
    assert plan.details["config"] == list(plan.table[4] or ())
    names = ("liveput", "forecast_lost", "forecast_skill", "forecast_mae", "plan_s")
    assert set(planner.metrics) == {f"parcae/{name}" for name in names}
    assert planner.metrics["parcae/liveput"] > 0
    assert isinstance(read_profile(tmp_path / "profile.json"), ModelProfile)
    planner.raise_if_failed()


def test_a_probed_link_is_planned_with_and_said(started: list[Planner]) -> None:
    agent, job = FakeAgent(), make_job()
    planner = Planner(agent, job)
    started.append(planner)
    planner.link = LinkSpeed(latency_s=0.002, bytes_per_s=5e6)
    planner.enter(CONFIG, is_zero=True)
    run_steps(planner)
    wait_until(lambda: agent.plans, "a plan")
    assert agent.events[0].fields["link"] == {"latency_s": 0.002, "bytes_per_s": 5e6}
    written = job.profile.to_json()
    assert (written["link_latency_s"], written["link_bytes_per_s"]) == (0.002, 5e6)


def test_notify_plans_at_once(started: list[Planner]) -> None:
    agent = FakeAgent()
    planner = Planner(agent, make_job(interval_s=30.0))
    agent._began -= 70.0
    started.append(planner)
    run_steps(planner)
    planner.enter(CONFIG, is_zero=True)
    run_steps(planner)
    wait_until(lambda: agent.plans, "a plan")
    asked = agent.num_asked
    planner.enter(CONFIG, is_zero=True)  # a membership change
    wait_until(lambda: agent.num_asked > asked, "it asks again", 5.0)


def test_only_rank_zero_plans(started: list[Planner]) -> None:
    agent = FakeAgent()
    planner = Planner(agent, make_job())
    started.append(planner)
    planner.enter(CONFIG, is_zero=False)
    assert not planner.is_running
    planner.enter(CONFIG, is_zero=True)
    assert planner.is_running
    planner.enter(CONFIG, is_zero=False)
    assert not planner.is_running
    planner.enter(CONFIG, is_zero=True)
    wait_until(lambda: agent.num_asked > 0, "the second thread asks")


def test_fixed_never_asks(started: list[Planner]) -> None:
    agent = FakeAgent()
    planner = Planner(agent, make_job("fixed"))
    started.append(planner)
    planner.enter(CONFIG, is_zero=True)
    assert not planner.is_running and agent.num_asked == 0


def test_a_failure_surfaces_in_the_training_thread(started: list[Planner], monkeypatch: pytest.MonkeyPatch) -> None:
    agent = FakeAgent()
    job = make_job()
    planner = Planner(agent, job)
    started.append(planner)

    def fail(history: JobHistory, measured: object) -> None:
        raise ZeroDivisionError("a fault in the planner")

    monkeypatch.setattr(job, "decide", fail)
    planner.enter(CONFIG, is_zero=True)
    wait_until(lambda: not planner.is_running, "the thread has failed")
    with pytest.raises(PlanError, match="ZeroDivisionError: a fault in the planner") as found:
        planner.raise_if_failed()
    assert found.value.__cause__ is not None and found.value.__cause__.__traceback__ is not None
    planner.raise_if_failed()  # once is enough


@pytest.mark.parametrize(("error", "ends"), [(MembershipError("lost"), True), (TimeoutError("slow"), False)])
def test_a_lost_coordinator_is_no_failure(started: list[Planner], error: Exception, ends: bool) -> None:
    agent = FakeAgent()
    agent.error = error
    ended = threading.Event()
    planner = Planner(agent, make_job(), on_end=ended.set)
    started.append(planner)
    planner.enter(CONFIG, is_zero=True)
    wait_until(lambda: agent.num_asked >= (1 if ends else 2), "it asks")
    if ends:
        assert ended.wait(5.0)
    planner.raise_if_failed()
    assert planner.is_running != ends


def test_step_times_leave_out_what_is_no_step() -> None:
    now = 0.0
    times = StepTimes(lambda: now)
    times.enter(CONFIG)
    for index in range(20):
        started = now + 0.3  # hooks and data
        now = started + (5.0 if index < 2 else 0.7)
        times.note(started, is_whole=index != 7)
        if index == 12:
            now += 50.0  # a validation epoch
    (found,) = times.measured().values()
    assert found.work_s == pytest.approx(0.7) and found.other_s == pytest.approx(0.3)
    other = ParallelConfig(1, 2)
    times.enter(other)
    for _ in range(MIN_STEPS + 1):
        now += 1.0
        times.note(now - 0.5)
    assert other not in times.measured()
    now += 1.0
    times.note(now - 0.5)
    assert set(times.measured()) == {CONFIG, other}
