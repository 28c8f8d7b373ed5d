"""Members as they behave according to the protocol, without torch, sockets or real time.

A :class:`World` runs a coordinator and members over links with random delays. Members train a "model" whose layers are
numbers (the steps applied to them), vote as the real ones do, and check at each meeting that they agree. Breaking,
pulling state, rolling forward and back follow ``lightning_parcae/engine/session.py``.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lightning_parcae.control.coordinator import Coordinator
from lightning_parcae.control.events import (
    Answer,
    Close,
    Connected,
    CoordinatorEvent,
    Disconnected,
    Received,
    Record,
    Send,
    Tick,
)
from lightning_parcae.control.messages import (
    Ack,
    CheckpointRef,
    Commit,
    Fenced,
    Finished,
    Formed,
    Goodbye,
    Heartbeat,
    Hello,
    JobFinished,
    JobSpec,
    Message,
    Notice,
    Prepare,
    Ready,
    Release,
    Stop,
    Suspect,
    decode,
    encode,
)
from lightning_parcae.planning.layout import Layout
from lightning_parcae.planning.parallel_config import ParallelConfig

GARBAGE = -1


class BrokenError(Exception):
    """The generation broke."""


class RolledBackError(Exception):
    """Back to the newest checkpoint."""


class LeftError(Exception):
    """This member goes."""


class Sleep(float):
    """Wait for so many seconds."""


@dataclass
class Until:
    """Wait until a predicate holds."""

    predicate: Callable[[], Any]


Script = Iterator[Sleep | Until]


@dataclass
class Group:
    """The connections of one generation."""

    world: World
    layout: Layout
    entered: dict[int, dict[str, tuple[Any, ...]]] = field(default_factory=dict)
    completed: set[tuple[str, int]] = field(default_factory=set)
    broken_for: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)
    seen: dict[int, int] = field(default_factory=dict)

    def enter(self, name: str, clock: int, claim: tuple[Any, ...], seen: int) -> None:
        """Take part in a vote; all must claim the same."""
        claims = self.entered.setdefault(clock, {})
        claims[name] = claim
        assert len(set(claims.values())) == 1, f"members disagree at vote {clock}: {claims}"
        self.seen[clock] = min(seen, self.seen.get(clock, seen))
        if set(claims) == set(self.layout.order):
            for other in self.layout.order:
                self.world.after(self.world.delay(0.004), lambda other=other: self._complete(other, clock))

    def _complete(self, name: str, clock: int) -> None:
        if name not in self.left and name not in self.broken_for and not (self.left and self.world.rng.random() < 0.5):
            self.completed.add((name, clock))

    def leave(self, name: str) -> None:
        """Close a member's connections; most of the others notice."""
        if name in self.left:
            return
        self.left.add(name)
        for other in self.layout.order:
            if other not in self.left and self.world.rng.random() < 0.7:
                self.world.after(self.world.delay(0.02), lambda other=other: self.broken_for.add(other))


class Member:
    """An instance: an agent that answers at once and a main thread that follows the protocol."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.incarnation = f"{name}#{next(world.numbers)}"
        self.alive = True
        self.connected = False
        self.frozen_until = 0.0
        self.inbox: list[Message] = []
        self.prepare: Prepare | None = None
        self.commits: dict[int, Commit] = {}
        self.over: str | None = None  # why the agent says that all is over
        self.released = self.finished = self.stopping = False
        self.job_finished: JobFinished | None = None
        self.clock = self.step = self.generation = self.acked = self.planned = 0
        self.vote: str | None = None
        self.layers: dict[int, int] = {}
        self.joined = self.ready_sent = False
        self.pending: Commit | None = None
        self.layout: Layout | None = None
        self.group: Group | None = None
        self.serving = 0
        self.outcome: str | None = None
        self.script = self.main()
        self.waiting: Sleep | Until = Sleep(0)
        self.wake_at = 0.0

    # The agent.

    def send(self, message: Message) -> None:
        self.world.to_coordinator(self, message)

    def receive(self, message: Message) -> None:
        if isinstance(message, Prepare):
            is_new = message.generation > self.prepare_seen
            self.prepare = message if is_new else self.prepare
            if is_new and message.urgent and message.generation > self.generation:
                self.abort()
        elif isinstance(message, Commit):
            assert message.generation not in self.commits, "one layout per generation"
            self.commits[message.generation] = message
        elif isinstance(message, Release):
            self.released = True
        elif isinstance(message, JobFinished):
            self.job_finished = message
        elif isinstance(message, Stop) and message.graceful:
            self.stopping = True
        elif isinstance(message, (Stop, Fenced)):
            self.over = message.reason
            self.abort()

    @property
    def prepare_seen(self) -> int:
        return 0 if self.prepare is None else self.prepare.generation

    def abort(self) -> None:
        if self.group is not None:
            self.group.broken_for.add(self.name)
            self.group.leave(self.name)

    # The main thread.

    def main(self) -> Script:
        yield Sleep(self.world.rng.uniform(0, 0.2))
        self.world.connect(self)
        yield Sleep(self.world.rng.choice([0.1, 0.5, 3.0]))
        self.layers = dict.fromkeys(range(self.world.spec.num_layers), GARBAGE)
        while self.outcome is None:
            try:
                yield from self.fit()
                self.outcome = "finished"
            except RolledBackError:
                self.tear_down()
                self.joined = self.ready_sent = False
                self.layout = self.pending = None
                self.vote = None
                self.step = 0
                self.layers = dict.fromkeys(range(self.world.spec.num_layers), GARBAGE)
                yield Sleep(self.world.rng.uniform(0, 0.3))
            except LeftError as error:
                self.outcome = str(error)
        self.tear_down()
        self.send(Goodbye())
        self.world.after(0.01, self.die)

    def check_over(self) -> None:
        if self.over is not None:
            raise LeftError(self.over)

    def fit(self) -> Script:
        while True:
            if self.joined and self.planned > self.generation:
                self.tear_down()
                commit = yield from self.await_commit(at_boundary=True)
                if self.is_in(commit):
                    self.accept(commit)
                    yield from self.form_pending()
                else:
                    self.step_aside(commit)
            while not self.joined:
                if (yield from self.wait_for_place()):
                    return
            if self.stopping:
                raise LeftError("stopped")
            if self.step >= self.world.num_steps:
                break
            yield from self.run("train")
            if self.clock % 3 == 0:
                yield from self.run("eval")
        yield from self.run("finish")
        self.tear_down()
        self.finished = True
        self.send(Finished())
        yield Until(lambda: self.job_finished or self.over)

    def run(self, kind: str) -> Script:
        while True:
            try:
                yield from self.form_pending()
                yield Sleep(self.world.rng.uniform(0.01, 0.2))
                yield from self.meet(kind)
                break
            except BrokenError:
                if (yield from self.repair()):
                    break
        if kind == "train":
            self.step += 1
            for layer in self.layout.layers_of(self.name) if self.layout else ():
                self.layers[layer] += 1
            self.world.maybe_checkpoint(self.step)

    def meet(self, kind: str) -> Script:
        group = self.group
        if group is None:
            raise BrokenError
        clock = self.clock + 1
        group.enter(self.name, clock, (kind, self.clock, self.step), self.prepare_seen)
        done = (self.name, clock)
        yield Until(lambda: done in group.completed or self.name in group.broken_for)
        if done not in group.completed:
            raise BrokenError
        self.complete(f"{clock}:{group.seen[clock]}:{kind}")

    def complete(self, vote: str) -> None:
        clock, seen, _ = vote.split(":")
        assert int(clock) == self.clock + 1
        self.clock += 1
        self.vote = vote
        self.planned = max(self.planned, int(seen))

    def repair(self) -> Script:
        prepare = self.prepare
        if prepare is None or not prepare.urgent or prepare.generation <= self.generation:
            self.send(Suspect(self.generation, "broken"))
        self.tear_down()
        commit = yield from self.await_commit(at_boundary=False)
        assert commit.rollback or self.is_in(commit), "whoever was interrupted needs a rank"
        return self.accept(commit)

    def tear_down(self) -> None:
        if self.group is not None:
            self.group.leave(self.name)
            self.group = None

    def await_commit(self, *, at_boundary: bool) -> Script:
        def news() -> Prepare | Commit | bool | None:
            prepare = self.prepare
            if prepare is not None and prepare.generation > max(self.acked, self.generation):
                if (at_boundary or prepare.urgent) and self.name in prepare.members:
                    return prepare
            commit = self.commits.get(self.acked) if self.acked > self.generation else None
            return commit or self.over is not None or self.job_finished is not None

        while True:
            item = yield Until(news)
            if isinstance(item, Commit):
                return item
            if not isinstance(item, Prepare):
                self.check_over()
                raise LeftError("finished by others")
            self.acknowledge(item, at_boundary)

    def acknowledge(self, prepare: Prepare, at_boundary: bool) -> None:
        self.acked = prepare.generation
        self.send(Ack(prepare.generation, self.clock, self.vote, sorted(self.layers), at_boundary))

    def accept(self, commit: Commit) -> bool:
        """Take note of a commit; return whether its vote completes the operation that broke."""
        if commit.rollback:
            self.generation = commit.generation
            raise RolledBackError
        self.pending = commit
        if commit.clock == self.clock:
            return False
        assert commit.clock == self.clock + 1 and commit.vote is not None, (commit.clock, self.clock)
        self.complete(commit.vote)
        return True

    def form_pending(self) -> Script:
        while self.pending is not None:
            commit, self.pending = self.pending, None
            try:
                yield from self.form(commit)
            except BrokenError:
                if (yield from self.repair()):
                    self.joined = True

    def form(self, commit: Commit) -> Script:
        layout = commit.layout
        assert layout is not None
        self.generation = commit.generation
        self.group = group = self.world.group_of(layout)
        self.check_over()
        if self.prepare is not None and self.prepare.urgent and self.prepare.generation > self.generation:
            raise BrokenError
        fresh = self.name in commit.fresh and not self.joined
        mine = layout.layers_of(self.name)
        if fresh:
            self.clock = commit.clock
            if commit.kind == "initial" and commit.trainer_source == self.name:
                self.layers = {layer: 0 for layer in range(layout.num_layers)}
                self.step = 0
            else:
                self.layers = {}
        self.serving = commit.generation
        yield Sleep(self.world.rng.uniform(0, self.world.formation_s))
        if commit.checkpoint is not None:
            self.step = commit.checkpoint.step
            self.layers = dict.fromkeys(mine, self.step)
        elif fresh and commit.trainer_source != self.name:
            assert commit.trainer_source is not None
            self.step = yield from self.pull(commit, commit.trainer_source, None)
        for layer, source, target in commit.transfers:
            if target == self.name:
                self.layers[layer] = yield from self.pull(commit, source, layer)
        wrong = {layer: self.layers.get(layer) for layer in mine if self.layers.get(layer) != self.step}
        assert not wrong, f"{self.name} has {wrong} at step {self.step} in {commit}"
        self.world.check_progress(self, commit)
        yield from self.meet(f"form {commit.generation}")
        self.layout = layout
        self.joined = True
        self.planned = max(self.planned, commit.generation)
        self.layers = {layer: self.layers[layer] for layer in mine}
        self.serving = 0
        self.group = group
        self.send(Formed(commit.generation))

    def pull(self, commit: Commit, source: str, layer: int | None) -> Script:
        group = self.group
        yield Sleep(self.world.rng.uniform(0, 0.02))
        other = self.world.members[source]
        yield Until(
            lambda: not other.alive or other.serving == commit.generation or self.name in group.broken_for or self.over
        )
        if not other.alive or other.serving != commit.generation or self.world.now < other.frozen_until:
            raise BrokenError
        if layer is None:
            return other.step
        assert layer in other.layers, f"{source} was told to give layer {layer} but has {sorted(other.layers)}"
        return other.layers[layer]

    def is_in(self, commit: Commit) -> bool:
        return commit.rollback or (commit.layout is not None and self.name in commit.layout.order)

    def step_aside(self, commit: Commit) -> None:
        self.generation = commit.generation
        self.joined = False
        self.serving = commit.generation
        self.ready_sent = True

    def wait_for_place(self) -> Script:
        if not self.ready_sent:
            self.ready_sent = True
            self.send(Ready(self.world.spec, f"{self.name}:1", f"{self.name}:2", self.world.checkpoint))

        def news() -> Any:
            if self.released or self.job_finished is not None or self.over is not None or self.stopping:
                return True
            prepare = self.prepare
            if prepare is not None and prepare.generation > max(self.acked, self.generation):
                if self.name in prepare.members:
                    return prepare
            return self.commits.get(self.acked) if self.acked > self.generation else None

        item = yield Until(news)
        if isinstance(item, Prepare):
            self.acknowledge(item, True)
        elif not isinstance(item, Commit):
            self.check_over()
            if self.job_finished is not None:
                yield Sleep(0.05)
                self.send(Finished())
                return True
            raise LeftError("released" if self.released else "stopped")
        elif self.is_in(item):
            if item.rollback:
                self.accept(item)
            self.clock = item.clock
            self.pending = item
            yield from self.form_pending()
        else:
            self.step_aside(item)
        return False

    # Time.

    def resume(self) -> None:
        """Run the main thread as far as it gets."""
        while self.alive and self.world.now >= self.frozen_until:
            if isinstance(self.waiting, Until):
                value = self.waiting.predicate()
                if not value:
                    return
            elif self.world.now < self.wake_at:
                return
            else:
                value = None
            try:
                self.waiting = self.script.send(value)
            except StopIteration:
                self.waiting = Until(lambda: False)
                return
            if isinstance(self.waiting, Sleep):
                self.wake_at = self.world.now + self.waiting
                self.world.after(self.waiting, lambda: None)

    def die(self) -> None:
        if not self.alive:
            return
        self.alive = False
        if self.group is not None:
            self.group.leave(self.name)
        self.world.disconnect(self)


class World:
    """A job on simulated instances.

    Args:
        seed: Of every delay and fault.
        spec: The job.
        num_steps: Steps to train.
        failure_timeout_s: Of the coordinator.
        expected: Of the coordinator.
    """

    def __init__(
        self,
        seed: int,
        spec: JobSpec,
        *,
        num_steps: int = 20,
        failure_timeout_s: float = 3.0,
        expected: int | None = None,
        max_link_delay_s: float = 0.005,
        formation_s: float = 0.1,
    ) -> None:
        self.rng = random.Random(seed)
        self.spec = spec
        self.num_steps = num_steps
        self.now = 0.0
        self.numbers = itertools.count()
        self.coordinator = Coordinator("job", failure_timeout_s, expected=expected)
        self.failure_timeout_s = failure_timeout_s
        self.members: dict[str, Member] = {}
        self.records: list[tuple[float, Record]] = []
        self.layouts: dict[int, Layout] = {}
        self.checkpoint: CheckpointRef | None = None
        self.checkpoint_every = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._groups: dict[int, Group] = {}
        self._arrival: dict[tuple[str, str], float] = {}
        self._prepared = 0
        self.noticed: set[str] = set()
        self._max_link_delay_s = max_link_delay_s
        self.formation_s = formation_s
        self._last_formed_step = 0
        self._tick()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self.numbers), action))

    def delay(self, most_s: float) -> float:
        return self.rng.uniform(0.0, most_s)

    def add(self, name: str) -> Member:
        member = self.members[name] = Member(self, name)
        self.after(0, lambda: None)
        return member

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let time pass."""
        while self._queue and self._queue[0][0] <= until and not stop():
            self.now, _, action = heapq.heappop(self._queue)
            action()
            for member in list(self.members.values()):
                member.resume()
        self.now = max(self.now, until) if not stop() else self.now

    @property
    def phase(self) -> str:
        return self.coordinator.phase

    @property
    def running(self) -> Layout | None:
        return self.coordinator._layout if self.phase == "running" else None

    def names(self, event: str) -> list[Record]:
        return [record for _, record in self.records if record.name == event]

    # Links.

    def _deliver_at(self, name: str, direction: str) -> float:
        at = max(self.now + self.delay(self._max_link_delay_s), self._arrival.get((name, direction), 0.0))
        self._arrival[name, direction] = at
        return at - self.now

    def to_coordinator(self, member: Member, message: Message) -> None:
        message = decode(encode(message))

        def arrive() -> None:
            if member.connected:
                self._handle(Received(member.name, message))

        self.after(self._deliver_at(member.incarnation, "up"), arrive)

    def connect(self, member: Member) -> None:
        hello = Hello("job", member.name, member.incarnation, "host", 1, 1, {"torch": "2"})

        def arrive() -> None:
            member.connected = True
            self._handle(Connected(hello))

        self.after(self._deliver_at(member.incarnation, "up"), arrive)
        self.after(0.1, lambda: self._beat(member))

    def _beat(self, member: Member) -> None:
        if member.alive:
            if self.now >= member.frozen_until:
                self.to_coordinator(member, Heartbeat(member.clock, member.step))
            self.after(self.failure_timeout_s / 6, lambda: self._beat(member))

    def disconnect(self, member: Member) -> None:
        def arrive() -> None:
            if member.connected:
                member.connected = False
                self._handle(Disconnected(member.name, member.incarnation))

        self.after(self._deliver_at(member.incarnation, "up"), arrive)

    def _tick(self) -> None:
        self._handle(Tick())
        self.after(0.1, self._tick)

    def _handle(self, event: CoordinatorEvent) -> None:
        for action in self.coordinator.handle(self.now, event):
            if isinstance(action, Send):
                self._check(action.message)
                self._to_member(action)
            elif isinstance(action, Close):
                member = self.members[action.instance]
                if member.incarnation == action.incarnation:
                    member.connected = False
            elif isinstance(action, Record):
                self.records.append((self.now, action))
            else:
                assert not isinstance(action, Answer)

    def _to_member(self, action: Send) -> None:
        member = self.members[action.instance]
        if member.incarnation != action.incarnation:
            return
        message = decode(encode(action.message))

        def arrive() -> None:
            if member.alive and self.now < member.frozen_until:
                self.after(member.frozen_until - self.now, arrive)
            elif member.alive:
                member.receive(message)

        self.after(self._deliver_at(member.incarnation, "down"), arrive)

    def _check(self, message: Message) -> None:
        """Check what must hold for everything that the coordinator says."""
        if isinstance(message, Prepare):
            assert message.generation >= self._prepared, "generations grow"
            self._prepared = message.generation
        elif isinstance(message, Commit) and message.layout is not None:
            assert message.generation == self._prepared, "only the newest generation is committed"
            assert message.layout.generation == message.generation
            known = self.layouts.setdefault(message.generation, message.layout)
            assert known == message.layout, "one layout per generation"
            for name in message.layout.order:
                assert name in self.coordinator._instances, f"{name} is dead"
            for name in {source for _, source, _ in message.transfers} | set(message.layout.order):
                assert name in message.addresses

    def group_of(self, layout: Layout) -> Group:
        return self._groups.setdefault(layout.generation, Group(self, layout))

    # State.

    def maybe_checkpoint(self, step: int) -> None:
        if self.checkpoint_every and step % self.checkpoint_every == 0:
            if self.checkpoint is None or self.checkpoint.step < step:
                self.checkpoint = CheckpointRef(f"step-{step}", step)

    def check_progress(self, member: Member, commit: Commit) -> None:
        if commit.generation != self._prepared:
            return  # a zombie, or about to be interrupted
        if commit.checkpoint is None:
            assert member.step >= self._last_formed_step, f"steps were lost silently: {member.step} {commit}"
        self._last_formed_step = member.step

    # Faults.

    def kill(self, name: str) -> None:
        self.members[name].die()

    def freeze(self, name: str, seconds: float) -> None:
        member = self.members[name]
        member.frozen_until = self.now + seconds
        self.after(seconds, lambda: None)

    def notice(self, name: str) -> None:
        if self.members[name].connected:
            self.noticed.add(self.members[name].incarnation)
            self.to_coordinator(self.members[name], Notice(self.rng.choice([None, 30.0, 46.0, 50.0])))

    def living(self) -> list[str]:
        return [name for name, member in self.members.items() if member.alive and member.outcome is None]

    def num_usable(self) -> int:
        """Count the members that live, run and have no notice."""
        members = [self.members[name] for name in self.living()]
        return sum(item.frozen_until <= self.now and item.incarnation not in self.noticed for item in members)


def make_spec(max_instances: int, table: Callable[[int], tuple[int, int] | None], **options: Any) -> JobSpec:
    """Return the description of a job of six layers."""
    num_layers = 6
    boundaries = {
        stages: [round(stage * num_layers / stages) for stage in range(stages + 1)]
        for stages in range(1, num_layers + 1)
    }
    entries = [table(count) for count in range(max_instances + 1)]
    for entry in entries:
        assert entry is None or ParallelConfig(*entry).num_instances <= max_instances
    options.setdefault("max_step_failures", 1000)
    return JobSpec(num_layers, [1000] * num_layers, entries, boundaries, "f", **options)
