"""The job as this package would run it: the real coordinator and the real planner on a fake clock.

:class:`~lightning_parcae.control.coordinator.Coordinator` and
:class:`~lightning_parcae.planning.job_planner.JobPlanner` are those that run a job; nothing of them is imitated. The
instances are simulated: when they come, are ready, get a notice, die; that they stop, form a generation and train. How
long each of these takes is a setting, and each default says where it was measured.

What is simplified, and to whose favour:

* Messages take no time; ``formation_s`` was measured with theirs. Nobody waits for the planner (10 to 20 ms in its
  thread), nor for the writing of checkpoints.
* Of a formation that breaks, the state moved so far is moved again. Nobody is hung, and no link fails.
* One planner goes on when rank 0 changes. In the job the next rank 0's begins from the coordinator's history and with
  the step times that it has measured itself.
* A step of a configuration takes as long as its profile says, always.

It ends with a ValueError where the settings, the trace or the profile contradict each other, and with nothing else: a
job that stops or waits until the end of the trace is a result.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lightning_parcae.availability.arima import ArimaForecaster
from lightning_parcae.availability.forecast import Forecast, Forecaster, quantile
from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.control.coordinator import EXIT_STATE_LOST, Coordinator
from lightning_parcae.control.events import (
    Close,
    Connected,
    CoordinatorEvent,
    Disconnected,
    Received,
    Record,
    Send,
    Tick,
)
from lightning_parcae.control.history import HISTORY_KEY
from lightning_parcae.control.messages import (
    PROTOCOL_VERSION,
    Ack,
    CheckpointRef,
    Commit,
    Fenced,
    Formed,
    Goodbye,
    Heartbeat,
    Hello,
    JobSpec,
    Message,
    Notice,
    Plan,
    Prepare,
    Progress,
    Ready,
    Release,
    Reply,
    Request,
    Stop,
)
from lightning_parcae.planning.cost import MeasuredCost
from lightning_parcae.planning.job_history import JobHistory
from lightning_parcae.planning.job_planner import JobModel, JobPlanner, PlannerSettings, Policy
from lightning_parcae.planning.job_profile import JobProfile, Limits, StepTime
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.policy import LayoutTable, table_to_json
from lightning_parcae.planning.profile import ModelProfile
from lightning_parcae.simulation.result import Cause, ForecastBand, Migration, PolicyResult
from lightning_parcae.simulation.training import Training
from lightning_parcae.simulation.workload import Workload

#: What the job can do about changes, and how.
JOB_POLICIES = {
    "liveput": "this package: live migration, planned ahead by liveput from what the job has seen so far",
    "reactive": "this package's live migration, to the fastest configuration for whoever is there",
    "fixed": "this package's live migration by the table that the job starts with",
}

# As `lightning_parcae.planner` has it: steps of a configuration before its time counts as measured. The first two after
# each change are not counted.
_MIN_STEPS = 5
_SLOW_FIRST_STEPS = 2
_PLAN_LATE_S = 1e-3  # after an interval's begin, so that the planner's question falls into it
# An instance that waits for others to start is looked at so often; the coordinator waits for late ones by the clock.
_WAITING_TICK_S = 1.0


@dataclass(frozen=True)
class JobSettings:
    """What a job is like.

    Attributes:
        policy: One of :data:`JOB_POLICIES`.
        planner: How to plan; its policy is not looked at.
        notice_s: Seconds of warning before each removal; 0 kills without warning.
        warm_up_s: From being given to being ready: imports, model, data and a throw-away step beside the running job.
            Starting Python with torch and Lightning alone takes 5 to 15 s (``tests/integration/jobs.py``). With 0 the
            trace counts ready instances.
        detection_s: From a death to its being known. kill -9 costs 0.13 s in all on loopback (``docs/benchmarks.md``).
        formation_s: Two phases and new groups; 0.14 s in the median of 50 joins (``docs/benchmarks.md``).
        build_s: Rebuilding a stage.
        bytes_per_s: What a link moves; 0.8 of the reference instances' 10 Gb/s, as on loopback.
        rollback_s: Loading a checkpoint when nobody holds the state.
        fallback_every_s: Seconds of training between two checkpoints, 0 for a copy that is as new as the state; None
            for none, then a loss of state ends the job.
        start_share: Share of the state that exists before the first step: with Adam, parameters but no moments.
        failure_timeout_s: Of the coordinator.
        max_step_failures: Deaths in one step that end the job.
        seed: Chooses the victims where the trace does not name them.
    """

    policy: Policy = "liveput"
    planner: PlannerSettings = field(default_factory=PlannerSettings)
    notice_s: float = 0.0
    warm_up_s: float = 30.0
    detection_s: float = MeasuredCost.detection_s
    formation_s: float = MeasuredCost.formation_s
    build_s: float = MeasuredCost.build_s
    bytes_per_s: float = MeasuredCost.bytes_per_s
    rollback_s: float = MeasuredCost.rollback_s
    fallback_every_s: float | None = 300.0
    start_share: float = 1 / 3
    failure_timeout_s: float = 20.0
    max_step_failures: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.policy not in JOB_POLICIES:
            raise ValueError(f"a job's policy is one of {', '.join(JOB_POLICIES)}, got {self.policy!r}")
        for name in ("notice_s", "warm_up_s", "detection_s", "formation_s", "build_s", "rollback_s", "start_share"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")
        if self.fallback_every_s is not None and not 0 <= self.fallback_every_s < math.inf:
            raise ValueError(f"fallback_every_s must be at least 0, or None, got {self.fallback_every_s}")
        for name in ("bytes_per_s", "failure_timeout_s", "max_step_failures"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Happening:
    """What happens to an instance.

    Attributes:
        time_s: When.
        action: ``add`` (it is given), ``notice`` (it will be taken) or ``kill`` (it dies, if it is still there).
        instance: Its name.
        grace_s: Of a notice: seconds until it is taken.
    """

    time_s: float
    action: Literal["add", "notice", "kill"]
    instance: str
    grace_s: float = 0.0


def happenings(trace: AvailabilityTrace, *, notice_s: float = 0.0, seed: int = 0) -> list[Happening]:
    """Return what a trace says, in order: as :meth:`lightning_parcae.faults.FaultScript.from_trace` replays it.

    A warning comes before the loss that the trace records, but not before the instance is there.
    """
    found: list[Happening] = []
    given: dict[str, tuple[float, str]] = {}
    lives: dict[str, int] = {}  # a name may be given again, but then it is another process
    for time_s, change in trace.events(seed=seed):
        for node in change.get("remove", ()):
            since_s, name = given.pop(node)
            if notice_s > 0:
                warned_s = max(since_s, time_s - notice_s)
                found.append(Happening(warned_s, "notice", name, time_s - warned_s))
            found.append(Happening(time_s, "kill", name))
        for node in change.get("add", ()):
            lives[node] = lives.get(node, 0) + 1
            name = node if lives[node] == 1 else f"{node}#{lives[node]}"
            given[node] = (time_s, name)
            found.append(Happening(time_s, "add", name))
    return sorted(found, key=lambda one: one.time_s)  # stable: what is given comes before its notice


def simulate_job(
    trace: AvailabilityTrace,
    workload: Workload,
    settings: JobSettings | None = None,
    *,
    clock: Callable[[], float] | None = None,
    progress: Callable[[float], None] | None = None,
) -> PolicyResult:
    """Run a job through a trace.

    Args:
        trace: Who is there when.
        workload: What is trained.
        settings: How.
        clock: Processor seconds, to say what planning takes; None does not measure it.
        progress: Told the share that is done, 0 to 1.

    Raises:
        ValueError: If settings, trace and workload contradict each other.
    """
    settings = settings if settings is not None else JobSettings()
    if not trace.end_s > 0:
        raise ValueError(f"{trace.source}: a trace needs a length above 0 s to simulate, got {trace.end_s:g}")
    events = happenings(trace, notice_s=settings.notice_s, seed=settings.seed)
    job = SimulatedJob(events, trace.end_s, workload, settings, clock=clock)
    return job.run(trace=trace.source, progress=progress)


# --- what the job is --------------------------------------------------------------------------------------------------


def start_table(workload: Workload, max_instances: int) -> LayoutTable:
    """Return the table that a job starts with.

    A job whose layers were measured takes the configuration that leaves the fewest instances idle, the one with the
    fewest stages of these, as :func:`~lightning_parcae.planning.policy.most_instances_table` does, among those that fit
    into memory. With a given table of throughputs it is the fastest one.
    """
    profile = workload.profile
    exact: dict[int, ParallelConfig] = {}
    for config in profile.configs(max_instances):
        known, size = exact.get(config.num_instances), config.num_instances
        if known is None or config.num_stages < known.num_stages:
            exact[size] = config
    if not isinstance(profile, ModelProfile):
        limits = Limits(num_layers=10**9, max_pipelines=10**9)
        return JobProfile(profile, limits).fastest_table(max_instances)
    best: list[ParallelConfig | None] = [None]
    for count in range(1, max_instances + 1):
        best.append(exact.get(count, best[-1]))
    return tuple(best)


def describe(workload: Workload, settings: JobSettings, max_instances: int) -> tuple[JobSpec, JobModel]:
    """Return the job as its instances tell it to the coordinator, and as they plan it.

    Raises:
        ValueError: If nothing can run on so many instances, or the layers do not make the profile's stages.
    """
    configs = workload.profile.configs(max_instances)
    if not configs:
        raise ValueError(
            f"{workload.name}: no configuration of the profile can run on the trace's {max_instances} instances or "
            "fewer; use a profile of smaller configurations, or a larger trace"
        )
    most_stages = max(config.num_stages for config in configs)
    sizes = workload.layer_bytes
    if not any(sizes) and len(sizes) < most_stages:
        sizes = (0,) * most_stages  # the state is unknown: nothing moves
    if len(sizes) < most_stages:
        raise ValueError(f"{workload.name}: {len(sizes)} layers cannot make the profile's {most_stages} stages")
    even = {
        stages: tuple(len(sizes) * index // stages for index in range(stages + 1))
        for stages in range(1, len(sizes) + 1)
    }
    cuts = {**even, **{stages: tuple(cut) for stages, cut in workload.cuts.items() if stages <= len(sizes)}}
    table = start_table(workload, max_instances)
    every_s, num_steps = settings.fallback_every_s, None
    if every_s is not None:
        step_s = workload.num_samples / max(workload.profile.samples_per_s(config) for config in configs)
        num_steps = max(1, round(every_s / step_s))
    spec = JobSpec(
        num_layers=len(sizes),
        layer_bytes=list(sizes),
        table=[None if entry is None else (entry[0], entry[1]) for entry in table_to_json(table)],
        boundaries={stages: list(cut) for stages, cut in cuts.items()},
        fingerprint="simulated",
        max_step_failures=settings.max_step_failures,
        has_fallback=every_s is not None,
    )
    model = JobModel(
        profile=workload.profile,
        limits=Limits(
            num_layers=len(sizes),
            max_pipelines=max(config.num_pipelines for config in configs),
            min_stages=min(config.num_stages for config in configs),
            max_stages=most_stages,
        ),
        layer_bytes=sizes,
        cuts=cuts,
        start_table=table,
        num_samples=workload.num_samples,
        fallback_every_n_steps=num_steps,
    )
    return spec, model


# --- the job ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Instance:
    """A simulated instance.

    Attributes:
        name: Its name.
        is_alive: Whether its process runs.
        is_ready: Whether it has been warm once.
        has_place: Whether it belongs to the running generation.
        layers: Layers that it holds.
    """

    name: str
    is_alive: bool = True
    is_ready: bool = False
    has_place: bool = False
    layers: Sequence[int] = ()


class SimulatedJob:
    """One job.

    Args:
        events: What happens to its instances, ascending.
        end_s: When to stop looking.
        workload: What is trained.
        settings: How; its ``notice_s`` and ``seed`` are in the events already.
        clock: See :func:`simulate_job`.

    Attributes:
        timeline: What the coordinator has recorded, as in ``timeline.jsonl``.
    """

    def __init__(
        self,
        events: Sequence[Happening],
        end_s: float,
        workload: Workload,
        settings: JobSettings,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.timeline: list[dict[str, Any]] = []
        self._settings = settings
        self._workload = workload
        self._end_s = end_s
        self._clock = clock
        self._model_settings = replace(settings.planner, policy=settings.policy)
        self._now = 0.0
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._inbox: deque[CoordinatorEvent] = deque()
        self._instances: dict[str, _Instance] = {}
        first = [one for one in events if one.action == "add" and one.time_s == 0.0]
        self._most, self._instance_s = _given(events, end_s)
        self._spec, self._model = describe(workload, settings, self._most)
        self._coordinator = Coordinator("simulated", settings.failure_timeout_s, expected=len(first) or None)
        self._training = Training(workload.num_samples, settings.fallback_every_s)
        self._clock_votes = 0  # of the job, up to where training last stopped
        self._prepare: Prepare | None = None
        self._to_stop: list[_Instance] = []  # who must say so, for the newest Prepare
        self._commit: Commit | None = None  # newest
        self._is_forming = False
        self._is_waiting = True
        self._stands_at_boundary = False
        self._order: tuple[str, ...] = ()  # of the running generation
        self._stopped_at: float | None = None  # since when members stand still
        self._before: ParallelConfig | None = None
        self._planner = JobPlanner(self._model, self._model_settings, candidates=_candidates(settings))
        self._measured: dict[ParallelConfig, int] = {}  # steps whose times the planner has
        self._plan_reason = ""
        self._plan_number = 0
        self._reply: Any = None
        self._planning_s = 0.0
        self._forecasts: list[ForecastBand] = []
        self._migrations: list[Migration] = []
        self._notes: list[str] = []
        self._is_over = False
        for one in events:
            self._at(one.time_s, lambda one=one: self._happen(one))  # type: ignore[misc]

    # --- time ---------------------------------------------------------------------------------------------------------

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time_s, next(self._numbers), action))

    def run(self, *, trace: str = "script", progress: Callable[[float], None] | None = None) -> PolicyResult:
        """Run to the end.

        Args:
            trace: Name of what happens, for the result.
            progress: See :func:`simulate_job`.
        """
        self._at(0.0, self._beat)
        self._at(0.0, self._tick_while_waiting)
        shown = 0
        while self._queue and self._queue[0][0] < self._end_s and not self._is_over:
            self._now, _, action = heapq.heappop(self._queue)
            action()
            if not self._queue or self._queue[0][0] > self._now:
                self._deliver()
            if progress is not None and int(100 * self._now / self._end_s) > shown:
                shown = int(100 * self._now / self._end_s)
                progress(shown / 100)
        self._now = self._end_s
        if self._training.is_running:
            self._training.finish(self._end_s)
        else:
            self._training.book(self._end_s, "waiting" if self._is_waiting or self._is_over else self._cause())
        if progress is not None:
            progress(1.0)
        settings = self._settings
        return PolicyResult(
            policy=settings.policy,
            trace=trace,
            profile=self._workload.name,
            seed=settings.seed,
            duration_s=self._end_s,
            spans=self._training.spans(),
            migrations=tuple(self._migrations),
            samples=self._training.samples,
            instance_s=self._instance_s,
            planning_s=self._planning_s if settings.policy != "fixed" and self._clock is not None else None,
            forecasts=tuple(self._forecasts),
            notes=tuple(self._notes),
        )

    def _cause(self) -> Cause:
        """Return what a pause that ends now was for."""
        kind = self._commit.kind if self._commit is not None else "initial"
        return _CAUSES[kind]

    def _beat(self) -> None:
        """Let everybody show that it lives, and let the coordinator look at its clock."""
        for one in self._instances.values():
            if one.is_alive:
                self._inbox.append(Received(one.name, Heartbeat(self._votes, self._steps)))
        self._report()
        self._inbox.append(Tick())
        self._at(self._now + 0.4 * self._settings.failure_timeout_s, self._beat)

    def _tick_while_waiting(self) -> None:
        if self._is_waiting:
            self._inbox.append(Tick())
            self._at(self._now + _WAITING_TICK_S, self._tick_while_waiting)

    @property
    def _steps(self) -> int:
        return self._training.step + self._training.steps_at(self._now)

    @property
    def _votes(self) -> int:
        return self._clock_votes + self._training.steps_at(self._now)

    def _report(self) -> None:
        """Let rank 0 say where the job is, as it does after each step."""
        if self._order and self._training.is_running:
            self._inbox.append(Received(self._order[0], Progress(self._steps, 0, self._steps, self._votes)))

    # --- what happens to instances ------------------------------------------------------------------------------------

    def _happen(self, one: Happening) -> None:
        if one.action == "add":
            self._instances[one.instance] = _Instance(one.instance)
            hello = Hello("simulated", one.instance, one.instance, one.instance, 0, PROTOCOL_VERSION, {})
            self._inbox.append(Connected(hello))
            if self._settings.warm_up_s > 0:
                self._at(one.time_s + self._settings.warm_up_s, lambda: self._get_ready(one.instance))
            else:
                self._get_ready(one.instance)
        elif one.instance in self._instances and self._instances[one.instance].is_alive:
            if one.action == "notice":
                self._inbox.append(Received(one.instance, Notice(one.grace_s)))
            else:
                self._kill(self._instances[one.instance])

    def _get_ready(self, name: str) -> None:
        one = self._instances.get(name)
        if one is None or not one.is_alive:
            return
        one.is_ready = True
        one.layers = range(self._spec.num_layers)
        step = self._training.checkpoint_step
        checkpoint = None if step is None else CheckpointRef(f"step-{step:08d}", step)
        self._inbox.append(Received(name, Ready(self._spec, name, name, checkpoint)))

    def _kill(self, one: _Instance) -> None:
        one.is_alive = False
        commit = self._commit
        if self._training.is_running and one.name in self._order:
            self._stop()
        if self._is_forming and commit is not None and one.name in _participants(commit):
            self._is_forming = False  # nobody completes it: the coordinator will replace it
        name = one.name
        self._at(self._now + self._settings.detection_s, lambda: self._disconnect(name))

    def _disconnect(self, name: str) -> None:
        self._instances.pop(name, None)
        self._inbox.append(Disconnected(name, name))

    def _stop(self) -> None:
        """Stand still: at a boundary, or because a step has broken."""
        self._report()
        done = self._training.stop(self._now)
        self._clock_votes += done
        self._stopped_at, self._before = self._now, self._training.config
        if self._before is not None and done > _SLOW_FIRST_STEPS:
            self._measured[self._before] = self._measured.get(self._before, 0) + done - _SLOW_FIRST_STEPS

    # --- what the coordinator says ------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Give the coordinator everything that has been said, until it and the instances have no more to say."""
        while (self._inbox or self._answer()) and not self._is_over:
            said: Message | None = None
            for action in self._coordinator.handle(self._now, self._inbox.popleft()):
                if isinstance(action, Send):
                    message = action.message
                    if isinstance(message, (Prepare, Commit, Stop)):
                        if message is not said:  # one object for all who get it
                            said = message
                            self._hear(message)
                    elif isinstance(message, Reply):
                        self._reply = message.value
                    elif isinstance(message, (Release, Fenced)):
                        self._leave(action.instance, message)
                elif isinstance(action, Record):
                    self.timeline.append({"time": self._now, "event": action.name, **action.fields})
                    if action.name == "rolled_back":
                        self._lose_state()
                else:
                    assert not isinstance(action, Close) or action.instance not in self._instances
        if not self._is_waiting and not self._is_over and self._coordinator.phase == "waiting":
            # too few are left for a start, or for the return to a checkpoint
            self._training.book(self._now, self._cause())
            self._is_waiting = True
            self._at(self._now + _WAITING_TICK_S, self._tick_while_waiting)

    def _hear(self, message: Prepare | Commit | Stop) -> None:
        if isinstance(message, Prepare):
            self._on_prepare(message)
        elif isinstance(message, Commit):
            self._on_commit(message)
        elif not self._is_over:
            self._is_over = True
            self._notes.append(f"the job stopped after {self._now:.0f} s: {message.reason}")
            if self._training.is_running:
                self._stop()
            if message.exit_code == EXIT_STATE_LOST:
                self._training.roll_back()

    def _on_prepare(self, prepare: Prepare) -> None:
        before, self._prepare = self._prepare, prepare
        members = [self._instances[name] for name in prepare.members if name in self._instances]
        if before is not None and before.generation == prepare.generation:  # more joiners, while the others train
            self._to_stop += [one for one in members if one.name not in before.members]
            return
        if prepare.urgent:
            self._is_forming = False
            if self._training.is_running:
                self._stop()
            self._to_stop = members
        else:
            self._to_stop = [one for one in members if not one.has_place]
            if self._training.is_running:
                self._at(self._training.boundary_after(self._now), lambda: self._reach_boundary(prepare))

    def _reach_boundary(self, prepare: Prepare) -> None:
        newest = self._prepare
        if newest is not None and newest.generation == prepare.generation and self._training.is_running:
            self._stop()
            self._stands_at_boundary = True
            members = [self._instances[name] for name in newest.members if name in self._instances]
            self._to_stop = [one for one in members if one.has_place]

    def _answer(self) -> bool:
        """Let members say that they have stopped for the newest Prepare; return whether there was somebody."""
        if not self._to_stop or self._prepare is None:
            return False
        generation, votes, step = self._prepare.generation, self._clock_votes, self._training.step
        for one in self._to_stop:
            if one.is_alive:
                at_boundary = self._stands_at_boundary or not one.has_place
                ack = Ack(generation, votes, None, list(one.layers), at_boundary, step)
                self._inbox.append(Received(one.name, ack))
        self._to_stop = []
        return bool(self._inbox)

    def _on_commit(self, commit: Commit) -> None:
        assert self._prepare is not None
        self._commit, self._stands_at_boundary = commit, False
        members = [name for name in self._prepare.members if name in self._instances]
        layout = commit.layout
        if layout is None:  # back to the newest checkpoint; `rollback_s` says how long that takes
            self._order = ()
            for name in members:
                self._instances[name].has_place = False
                self._get_ready(name)
            return
        if self._is_waiting:
            self._training.book(self._now, "waiting")
            self._is_waiting = False
        for name in set(members).difference(layout.order):
            self._instances[name].has_place = False
        # Who is dead and not yet known to be leaves this formation open until the coordinator replaces it.
        taking_part = [self._instances.get(name) for name in _participants(commit)]
        self._is_forming = all(one is not None and one.is_alive for one in taking_part)
        if self._is_forming:
            self._at(self._now + self._pause_s(commit), lambda: self._form(commit))

    def _pause_s(self, commit: Commit) -> float:
        """Return how long a formation takes: receivers work at the same time, a donor serves one after another."""
        settings = self._settings
        if commit.checkpoint is not None:
            return settings.formation_s + settings.build_s + settings.rollback_s
        sent: dict[str, float] = {}
        for (_, source, _), size in zip(commit.transfers, self._sizes(commit), strict=True):
            sent[source] = sent.get(source, 0.0) + size
        most = max([*sent.values(), *self._received(commit).values()], default=0.0)
        return settings.formation_s + settings.build_s + most / settings.bytes_per_s

    def _sizes(self, commit: Commit) -> list[float]:
        share = self._settings.start_share if commit.kind == "initial" else 1.0
        return [share * self._spec.layer_bytes[layer] for layer, _, _ in commit.transfers]

    def _received(self, commit: Commit) -> dict[str, float]:
        received: dict[str, float] = {}
        for (_, _, target), size in zip(commit.transfers, self._sizes(commit), strict=True):
            received[target] = received.get(target, 0.0) + size
        return received

    def _form(self, commit: Commit) -> None:
        """Let all have formed a generation, unless it has been broken or replaced."""
        layout = commit.layout
        if not self._is_forming or self._commit is not commit or layout is None:
            return
        self._is_forming = False
        training, now = self._training, self._now
        training.config = layout.config
        training.book(now, self._cause())
        self._clock_votes = commit.clock + 1
        since = self._stopped_at if self._stopped_at is not None else now
        self._note_migration(commit, layout.config)
        self._order = layout.order
        received = self._received(commit)
        held = [list(layout.layers_of_stage(stage)) for stage in range(layout.config.num_stages)]
        layers = {name: held[stage] for row in layout.grid for stage, name in enumerate(row)}
        for name in layout.order:
            one = self._instances[name]
            pause_s = now - since if one.has_place else 0.0
            one.has_place, one.layers = True, layers.get(name, ())
            self._inbox.append(Received(name, Formed(commit.generation, pause_s, int(received.get(name, 0.0)))))
        training.start(layout.config, self._workload.num_samples / self._rate(layout.config))
        self._plan_at(now)

    def _note_migration(self, commit: Commit, config: ParallelConfig) -> None:
        since = self._stopped_at if self._stopped_at is not None else 0.0
        reason = commit.reason
        if self._plan_reason:
            reason, self._plan_reason = f"{reason}; planned since {self._plan_reason}", ""
        self._migrations.append(Migration(since, self._cause(), self._before, config, self._now - since, reason))

    def _rate(self, config: ParallelConfig) -> float:
        """Return the throughput; of what the profile does not know, that of the next smaller grid of these stages.

        The coordinator may run such a grid until the next step boundary, where state is in place for nothing else.
        """
        profile = self._workload.profile
        rate = profile.samples_per_s(config)
        if rate > 0:
            return rate
        known = profile.configs(max(config.num_instances, self._most))
        same = [one for one in known if one.num_stages == config.num_stages]
        below = [profile.samples_per_s(one) for one in same if one.num_pipelines < config.num_pipelines]
        each = [profile.samples_per_s(one) / one.num_pipelines * config.num_pipelines for one in same]
        note = f"the profile does not know {config}, which ran for a while; its speed was taken from its neighbours"
        if note not in self._notes:
            self._notes.append(note)
        return max(below) if below else min(each or [profile.samples_per_s(one) for one in known])

    def _lose_state(self) -> None:
        """Note that only a checkpoint has the state now."""
        self._training.book(self._now, "rollback")
        self._training.roll_back()
        self._order = ()
        self._is_waiting = True
        self._at(self._now + _WAITING_TICK_S, self._tick_while_waiting)

    def _leave(self, name: str, message: Release | Fenced) -> None:
        if self._instances.pop(name, None) is not None:
            if isinstance(message, Release):
                self._inbox.append(Received(name, Goodbye()))

    # --- rank 0's planner ---------------------------------------------------------------------------------------------

    def _plan_at(self, time_s: float) -> None:
        """Let rank 0 plan then, instead of at any later time that was set before."""
        self._plan_number = number = self._plan_number + 1
        if self._settings.policy != "fixed":
            self._at(time_s, lambda: self._plan(number))

    def _plan(self, number: int) -> None:
        if number != self._plan_number:
            return
        interval_s = self._model_settings.interval_s
        name = self._order[0] if self._order else ""
        if name not in self._instances or not self._training.is_running or self._coordinator.phase != "running":
            self._plan_at(self._now + interval_s)  # or as soon as a generation is formed
            return
        running = self._training.config
        assert running is not None
        lacking = _MIN_STEPS - self._measured.get(running, 0)
        if self._training.steps_at(self._now) < _SLOW_FIRST_STEPS + lacking and lacking > 0:
            self._plan_at(self._training.time_of_step(_SLOW_FIRST_STEPS + lacking))
            return
        self._inbox.append(Received(name, Request(0, "get", HISTORY_KEY)))
        self._deliver()
        history = JobHistory.from_json(self._reply)
        self._decide(name, history, {running, *(one for one, count in self._measured.items() if count >= _MIN_STEPS)})
        since = history.started_at if history.started_at is not None else self._now
        self._plan_at(self._now + interval_s - (self._now - since) % interval_s + _PLAN_LATE_S)

    def _decide(self, name: str, history: JobHistory, measured: Iterable[ParallelConfig]) -> None:
        """Let the planner of rank 0 decide, and tell the coordinator if it wants another table."""
        times = {config: StepTime(self._workload.num_samples / self._rate(config)) for config in sorted(measured)}
        began = self._clock() if self._clock is not None else 0.0
        decision = self._planner.decide(history, times)
        self._planning_s += self._clock() - began if self._clock is not None else 0.0
        if decision is None:
            return
        if decision.forecast is not None:
            self._forecasts.append(self._band(decision.forecast, history))
        table = [None if pair is None else (pair[0], pair[1]) for pair in table_to_json(decision.table)]
        if tuple(table) != history.table:
            self._plan_reason = decision.reason
            details = {**decision.details(), "num_instances": history.num_instances}
            self._inbox.append(Received(name, Plan(table, decision.reason, details)))

    def _band(self, forecast: Forecast, history: JobHistory) -> ForecastBand:
        most = max(count for _, count in history.changes)
        counts = forecast.counts(history.num_instances, most)[-1:]
        low, median, high = (int(quantile(counts, share)[0]) for share in (0.1, 0.5, 0.9))
        ahead_s = len(forecast.laws) * self._settings.planner.interval_s
        return ForecastBand(self._now, ahead_s, low, median, high)


_CAUSES: dict[str, Cause] = {
    "initial": "start",
    "none": "intra_stage",  # only passengers leave: new groups, and no state moves
    "intra_stage": "intra_stage",
    "inter_stage": "inter_stage",
    "pipeline": "pipeline",
    "rollback": "rollback",
}


def _participants(commit: Commit) -> set[str]:
    """Return who must live for a formation to succeed."""
    order = () if commit.layout is None else commit.layout.order
    names = {*order, *(source for _, source, _ in commit.transfers)}
    if commit.fresh and commit.trainer_source is not None:
        names.add(commit.trainer_source)
    return names


def _given(events: Sequence[Happening], end_s: float) -> tuple[int, float]:
    """Return the most instances at once, and the instance-seconds until the end."""
    present = most = 0
    seconds = 0.0
    for one in events:
        if one.action != "notice" and one.time_s < end_s:
            sign = 1 if one.action == "add" else -1
            present += sign
            seconds += sign * (end_s - one.time_s)
            most = max(most, present)
    return most, seconds


def _candidates(settings: JobSettings) -> tuple[Forecaster, ...]:
    """Return the forecasters that the job's planner chooses from, as the running job has them."""
    if settings.planner.forecaster == "arima":
        return (ArimaForecaster((1, 1, 0)), ArimaForecaster(None))
    return ()
