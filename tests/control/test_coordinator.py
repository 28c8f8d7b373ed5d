"""The coordinator's rules, each as a script of what instances say and what they are told."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from lightning_parcae.control.coordinator import Coordinator
from lightning_parcae.control.events import (
    AdminRequest,
    Answer,
    Close,
    Connected,
    CoordinatorEvent,
    Disconnected,
    Received,
    Record,
    Say,
    Send,
    Tick,
)
from lightning_parcae.control.messages import (
    Ack,
    CheckpointRef,
    Commit,
    Event,
    Failed,
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
    Plan,
    Prepare,
    Progress,
    Ready,
    Release,
    Reply,
    Request,
    Stop,
    Suspect,
    Welcome,
)
from lightning_parcae.planning.layout import Layout

M = TypeVar("M")

VERSIONS = {"lightning_parcae": "0.1", "lightning": "2.6", "torch": "2.13"}
TWO_STAGES: list[tuple[int, int] | None] = [None, None, (1, 2), (1, 2), (2, 2), (2, 2), (3, 2)]


def make_spec(**changes: Any) -> JobSpec:
    arguments: dict[str, Any] = {
        "num_layers": 4,
        "layer_bytes": [100] * 4,
        "table": TWO_STAGES,
        "boundaries": {1: [0, 4], 2: [0, 2, 4], 3: [0, 1, 2, 4], 4: [0, 1, 2, 3, 4]},
        "fingerprint": "f",
    }
    return JobSpec(**{**arguments, **changes})


class Job:
    """Instances that do nothing but what the script says; heartbeats come by themselves."""

    def __init__(self, *, expected: int | None = None, failure_timeout_s: float = 4.0, **spec: Any) -> None:
        self.coordinator = Coordinator("job", failure_timeout_s, expected=expected)
        self.spec = make_spec(**spec)
        self.now = 0.0
        self.inbox: dict[str, list[Message]] = {}
        self.records: list[Record] = []
        self.said: list[str] = []
        self.closed: list[str] = []
        self.answer: Answer | None = None
        self.lives: dict[str, int] = {}
        self.living: set[str] = set()
        self.silent: set[str] = set()
        self.held: dict[str, list[int]] = {}
        self.clock = 0

    def handle(self, event: CoordinatorEvent) -> None:
        for action in self.coordinator.handle(self.now, event):
            if isinstance(action, Send):
                self.inbox.setdefault(action.instance, []).append(action.message)
            elif isinstance(action, Close):
                self.closed.append(action.incarnation)
                self.living.discard(action.instance)
            elif isinstance(action, Record):
                self.records.append(action)
            elif isinstance(action, Say):
                self.said.append(action.text)
            else:
                self.answer = action

    # What instances do.

    def hello(self, name: str, **changes: Any) -> Hello:
        incarnation = f"{name}#{self.lives.get(name, 0)}"
        fields = {"host": "h", "pid": 1, "protocol": 1, "versions": VERSIONS, "incarnation": incarnation}
        return Hello(job_id="job", instance=name, **{**fields, **changes})

    def connect(self, *names: str, **changes: Any) -> None:
        for name in names:
            self.lives[name] = self.lives.get(name, 0) + 1
            self.living.add(name)
            self.held[name] = [0, 1, 2, 3]
            self.handle(Connected(self.hello(name, **changes)))

    def say(self, name: str, message: Message) -> None:
        self.handle(Received(name, message))

    def ready(self, *names: str, checkpoint: CheckpointRef | None = None) -> None:
        for name in names:
            self.say(name, Ready(self.spec, f"{name}:1", f"{name}:2", checkpoint))

    def join(self, *names: str) -> None:
        self.connect(*names)
        self.ready(*names)

    def acknowledge(self, *names: str, clock: int | None = None, at_boundary: bool = True) -> None:
        """Let instances stop for the newest Prepare that each of them has; without names, all of its members."""
        generation = self.coordinator.status()["generation"]
        for name in names or self.prepare_of(next(iter(self.members()))).members:
            at = self.clock if clock is None else clock
            self.say(name, Ack(generation, at, f"vote {at}", self.held[name], at_boundary))

    def form(self, *names: str) -> None:
        """Let instances form the newest generation; without names, all of its order."""
        layout = self.layout
        for name in names or layout.order:
            self.held[name] = list(layout.layers_of(name))
            self.say(name, Formed(layout.generation, 0.1, 10))
        self.clock = self.commit_of(layout.order[0]).clock + 1

    def step(self, count: int = 1) -> None:
        self.clock += count

    def kill(self, *names: str) -> None:
        for name in names:
            self.living.discard(name)
            self.handle(Disconnected(name, f"{name}#{self.lives[name]}"))

    def hello_again(self, name: str) -> None:
        self.handle(Connected(self.hello(name)))

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = round(self.now + 0.25, 6)
            for name in sorted(self.living - self.silent):
                self.say(name, Heartbeat(self.clock, self.clock))
            self.handle(Tick())

    def start(self, *names: str) -> None:
        """Start the job on some instances."""
        self.join(*names)
        self.acknowledge()
        self.form()

    def reconfigure(self) -> None:
        self.acknowledge()
        self.form()

    # What they are told.

    def told(self, name: str, kind: type[M]) -> list[M]:
        return [message for message in self.inbox.get(name, []) if isinstance(message, kind)]

    def members(self) -> list[str]:
        """Return who got the newest Prepare."""
        newest = self.coordinator.status()["generation"]
        return [name for name in self.inbox if any(p.generation == newest for p in self.told(name, Prepare))]

    def prepare_of(self, name: str) -> Prepare:
        return self.told(name, Prepare)[-1]

    def commit_of(self, name: str) -> Commit:
        return self.told(name, Commit)[-1]

    @property
    def newest_commit(self) -> Commit:
        commits = [commit for name in self.inbox for commit in self.told(name, Commit)]
        return max(commits, key=lambda commit: commit.generation)

    @property
    def layout(self) -> Layout:
        layout = self.newest_commit.layout
        assert layout is not None
        return layout

    @property
    def phase(self) -> str:
        return self.coordinator.phase

    def stop_of(self, name: str) -> Stop:
        return self.told(name, Stop)[-1]

    def recorded(self, event: str) -> list[dict[str, Any]]:
        return [record.fields for record in self.records if record.name == event]


def started(*names: str, **options: Any) -> Job:
    """Return a running job."""
    job = Job(expected=len(names), **options)
    job.start(*names)
    assert job.phase == "running"
    return job


# Starting.


def test_four_instances_start() -> None:
    job = Job(expected=4)
    job.join("a", "b", "c")
    assert job.phase == "waiting"
    job.connect("d")
    assert job.phase == "waiting"
    job.ready("d")
    assert job.phase == "preparing"
    assert job.prepare_of("a").members == ["a", "b", "c", "d"]
    job.acknowledge("a", "b", "c")
    assert job.told("a", Commit) == []
    job.acknowledge("d")
    commit = job.commit_of("d")
    assert commit.kind == "initial"
    assert commit.layout is not None and str(commit.layout.config) == "2x2"
    assert commit.fresh == ["a", "b", "c", "d"]
    assert commit.trainer_source == "a"
    assert {source for _, source, _ in commit.transfers} == {"a"}
    assert {target for _, _, target in commit.transfers} == {"b", "c", "d"}
    assert commit.addresses["c"] == ("c:1", "c:2")
    job.form("a", "b", "c")
    assert job.phase == "forming"
    job.form("d")
    assert job.phase == "running"
    assert job.recorded("formed")[0]["bytes_moved"] == 40


def test_welcome_tells_order_leader_and_host_rank() -> None:
    job = Job()
    job.connect("a", "b")
    job.connect("c", host="other")
    job.connect("d")
    welcomes = [job.told(name, Welcome)[0] for name in "abcd"]
    assert [welcome.order for welcome in welcomes] == [0, 1, 2, 3]
    assert [welcome.leader for welcome in welcomes] == [True, False, False, False]
    assert [welcome.host_rank for welcome in welcomes] == [0, 1, 0, 2]
    job.kill("a")
    job.connect("a")
    assert job.told("a", Welcome)[-1].order == 4
    assert job.told("a", Welcome)[-1].host_rank == 2


def test_the_leader_is_gone_after_the_start() -> None:
    job = started("a", "b")
    job.kill("a")
    job.connect("c")
    assert not job.told("c", Welcome)[0].leader


def test_one_dies_before_it_is_ready() -> None:
    job = Job(expected=3)
    job.join("a", "b")
    job.connect("c")
    job.kill("c")
    assert job.prepare_of("a").members == ["a", "b"]
    job.reconfigure()
    assert job.phase == "running"


def test_nobody_is_waited_for_longer_than_30_s() -> None:
    job = Job(expected=4)
    job.join("a", "b")
    job.connect("c")
    job.pass_time(29)
    assert job.phase == "waiting"
    job.pass_time(2)
    assert job.phase == "preparing"
    job.reconfigure()
    job.ready("c")
    assert job.phase == "running"  # three instances run no larger grid


def test_too_few_instances_wait_and_say_so() -> None:
    job = Job(expected=1)
    job.join("a")
    assert job.said[-1] == "waiting: 1 of at least 2 instances ready"
    job.pass_time(25)
    assert len(job.recorded("waiting")) == 3
    assert job.recorded("waiting")[-1]["since_s"] >= 20
    job.join("b")
    assert job.phase == "preparing"


def test_too_few_instances_for_too_long() -> None:
    job = Job(expected=1, min_instances_timeout_s=20.0)
    job.join("a")
    job.pass_time(19)
    assert job.told("a", Stop) == []
    job.pass_time(2)
    assert "waited 20 s for at least 2 instances, but only 1 are ready" in job.stop_of("a").reason
    assert job.coordinator.exit_code == 4


def test_a_member_dies_while_the_first_generation_is_prepared() -> None:
    job = Job(expected=4)
    job.join("a", "b", "c", "d")
    job.acknowledge("a", "b", "c")
    job.kill("d")
    assert str(job.layout.config) == "1x2"
    assert job.layout.order == ("a", "b")
    assert job.told("c", Commit)[-1].layout == job.layout  # c learns that it is a spare


def test_too_few_are_left_while_the_first_generation_is_prepared() -> None:
    job = Job(expected=2)
    job.join("a", "b")
    job.acknowledge("a")
    job.kill("b")
    assert job.phase == "waiting"
    job.join("c")
    assert job.prepare_of("a").members == ["a", "c"]
    job.reconfigure()
    assert job.phase == "running"


def test_a_member_dies_while_the_first_generation_forms() -> None:
    job = Job(expected=4)
    job.join("a", "b", "c", "d")
    job.acknowledge()
    job.form("a", "b")
    job.clock = 0
    job.held = {name: [0, 1, 2, 3] for name in job.held}
    job.kill("d")
    assert job.prepare_of("a").urgent
    job.acknowledge("a", "b", "c", clock=0, at_boundary=False)
    commit = job.newest_commit
    assert commit.kind == "initial"
    assert commit.layout is not None and set(commit.layout.order) == {"a", "b", "c"}  # c waits with a rank
    assert commit.trainer_source == "a"
    job.form()
    assert job.phase == "preparing"  # c becomes a spare
    job.reconfigure()
    assert job.phase == "running"
    assert job.layout.order == ("a", "b")


def test_a_checkpoint_is_resumed_from_at_the_start() -> None:
    job = Job(expected=2, has_fallback=True)
    job.connect("a", "b")
    job.ready("a", checkpoint=CheckpointRef("step-5", 5))
    job.ready("b", checkpoint=CheckpointRef("step-7", 7))
    job.acknowledge()
    commit = job.newest_commit
    assert commit.checkpoint == CheckpointRef("step-7", 7)
    assert (commit.kind, commit.transfers, commit.trainer_source) == ("initial", [], None)


# Planned changes.


def test_joiners_enter_together_at_a_boundary() -> None:
    job = started("a", "b")
    job.step(5)
    job.connect("c", "d")
    job.ready("c")
    assert job.phase == "running"
    job.ready("d")
    prepare = job.prepare_of("a")
    assert (prepare.urgent, prepare.members) == (False, ["a", "b", "c", "d"])
    job.ready("c", "d")
    job.connect("e")
    job.ready("e")
    job.acknowledge()
    commit = job.newest_commit
    assert commit.kind == "inter_stage"
    assert commit.fresh == ["c", "d"]
    assert commit.trainer_source == "a"
    assert commit.clock == job.clock
    assert {source for _, source, _ in commit.transfers} == {"a", "b"}
    assert job.layout.order == ("a", "b", "c", "d")
    job.form()
    assert job.phase == "running"
    assert job.coordinator.status()["spares"] == ["e"]


def test_a_planned_generation_waits_for_the_boundary_without_bound() -> None:
    job = started("a", "b")
    job.join("c", "d")
    job.pass_time(100)
    assert job.phase == "preparing"
    assert not job.prepare_of("a").urgent


def test_a_joiner_that_does_not_answer_is_left_out() -> None:
    job = started("a", "b")
    job.join("c", "d")
    job.acknowledge("a", "b", "c")
    job.pass_time(11)
    assert job.told("d", Fenced)
    assert job.layout.order == ("a", "b")
    assert job.newest_commit.kind == "none"


def test_a_joiner_dies_meanwhile() -> None:
    job = started("a", "b")
    job.join("c", "d")
    job.acknowledge("a", "d")
    job.kill("c")
    assert job.phase == "preparing"
    assert len(job.told("a", Prepare)) == 2  # nobody is interrupted for it
    job.acknowledge("b")
    assert job.layout.order == ("a", "b")
    job.form()
    assert job.coordinator.status()["spares"] == ["d"]


def test_a_member_falls_behind_a_planned_generation() -> None:
    """Its peers closed their connections after the vote that it still waits for."""
    job = started("a", "b", "c", "d")
    job.step(3)
    job.join("e", "f")
    job.acknowledge("a", "b", "c")
    job.say("d", Heartbeat(job.clock - 1, 1))
    job.silent = {"d"}
    job.pass_time(2.5)
    assert job.prepare_of("d").urgent
    assert job.prepare_of("d").members == ["a", "b", "c", "d"]
    job.acknowledge("a", "b", "c")
    job.acknowledge("d", clock=job.clock - 1, at_boundary=False)
    commit = job.commit_of("d")
    assert (commit.clock, commit.vote) == (job.clock, f"vote {job.clock}")


def test_a_broken_connection_during_a_planned_generation_is_no_link_error() -> None:
    job = started("a", "b")
    job.join("c", "d")
    job.acknowledge("a")
    job.say("b", Suspect(1, "connection closed by peer"))
    assert job.prepare_of("b").urgent
    job.acknowledge("a", "b")
    job.form()
    job.acknowledge()
    assert job.layout.order == ("a", "b", "c", "d")


def test_a_new_table_is_followed() -> None:
    job = started("a", "b", "c", "d")
    job.say("b", Plan([None, (1, 1), (1, 2), (1, 3), (1, 4)], "not rank 0"))
    assert job.phase == "running"
    job.say("a", Plan([None, (1, 5)], "impossible"))
    assert job.recorded("plan_refused")
    job.say("a", Plan([None, (1, 1), (1, 2), (1, 3), (1, 4)], "deeper is better"))
    job.acknowledge()
    assert str(job.layout.config) == "1x4"
    assert job.newest_commit.kind == "pipeline"
    job.form()
    assert job.phase == "running"


# Leaving.


def test_a_notice_with_a_spare() -> None:
    job = started("a", "b")
    job.join("c")
    job.step()
    job.say("b", Notice(30.0))
    assert job.prepare_of("b").members == ["a", "b", "c"]
    job.acknowledge()
    commit = job.commit_of("b")
    assert commit.layout is not None and commit.layout.order == ("a", "c")
    assert {(source, target) for _, source, target in commit.transfers} == {("b", "c")}
    job.form("a")
    assert job.told("b", Release) == []
    job.form("c")
    assert job.told("b", Release)
    job.say("b", Goodbye())
    assert job.phase == "running"
    assert job.recorded("died") == []


def test_a_leaving_member_dies_before_the_hand_over() -> None:
    job = started("a", "b", has_fallback=True)
    job.join("c")
    job.say("b", Notice(30.0))
    job.acknowledge()
    job.kill("b")
    assert job.prepare_of("a").urgent
    assert job.prepare_of("a").members == ["a", "c"]
    job.acknowledge("a", "c", at_boundary=False)
    assert job.newest_commit.rollback


def test_rank_0_leaves_and_still_hands_the_trainer_state_over() -> None:
    job = started("a", "b")
    job.join("c")
    job.say("a", Notice())
    job.acknowledge()
    commit = job.newest_commit
    assert commit.layout is not None and commit.layout.order == ("b", "c")
    assert (commit.trainer_source, commit.fresh) == ("a", ["c"])


def test_a_notice_while_too_few_would_be_left() -> None:
    job = started("a", "b")
    job.say("b", Notice(30.0))
    assert job.phase == "running"
    assert "too few instances would be left" in job.said[-1]
    job.join("c")
    job.acknowledge()
    assert job.layout.order == ("a", "c")


def test_a_notice_of_one_of_two_replicas() -> None:
    job = started("a", "b", "c", "d")
    job.say("d", Notice(30.0))
    job.acknowledge()
    layout = job.layout
    assert str(layout.config) == "1x2"
    assert "d" not in layout.order
    job.form()
    assert job.told("d", Release)
    assert len(job.coordinator.status()["spares"]) == 1


def train(job: Job, seconds: int) -> None:
    """Let a step pass each second."""
    for _ in range(seconds):
        job.step()
        job.pass_time(1.0)


def test_a_long_notice_is_used() -> None:
    job = started("a", "b")
    job.join("c")
    train(job, 10)
    job.say("b", Notice(120.0))
    train(job, 70)
    assert job.phase == "running"
    train(job, 6)  # 45 s are kept for the hand-over
    assert job.prepare_of("b").members == ["a", "b", "c"]
    job.acknowledge()
    assert job.layout.order == ("a", "c")


def test_joiners_that_make_the_job_larger_are_not_kept_waiting_by_a_long_notice() -> None:
    job = started("a", "b")
    train(job, 10)
    job.say("b", Notice(120.0))
    train(job, 5)
    job.join("c")
    assert job.phase == "running"  # it will take b's place
    job.join("d")
    job.reconfigure()
    assert str(job.layout.config) == "2x2" and "b" in job.layout.order
    job.join("e")
    train(job, 75)
    assert job.prepare_of("b").members == ["a", "b", "c", "d", "e"]
    job.acknowledge()
    assert str(job.layout.config) == "2x2" and "b" not in job.layout.order


def test_a_nearer_end_replaces_one_further_off() -> None:
    for second in (Notice(), Notice(20.0)):
        job = started("a", "b")
        job.join("c")
        train(job, 10)
        job.say("b", Notice(300.0))
        train(job, 3)
        assert job.phase == "running"
        job.say("b", second)
        assert job.prepare_of("b").members == ["a", "b", "c"]
        assert [record["grace_s"] for record in job.recorded("notice")] == [300.0, second.grace_s]
    job = started("a", "b")
    job.join("c")
    train(job, 10)
    job.say("b", Notice(60.0))
    job.say("b", Notice(300.0))  # the first one holds
    train(job, 16)
    assert job.prepare_of("b").members == ["a", "b", "c"]
    assert len(job.recorded("notice")) == 1


def test_a_repair_keeps_the_replica_of_a_long_notice() -> None:
    job = started("a", "b", "c", "d")
    train(job, 10)
    job.say("d", Notice(300.0))
    job.join("e")
    job.kill("b")
    job.acknowledge("a", "c", "d", at_boundary=False)
    job.form("a", "c", "d")
    job.acknowledge()
    assert "d" in job.layout.order and str(job.layout.config) == "2x2"


def test_who_is_not_due_stays_when_another_goes() -> None:
    job = started("a", "b", "c", "d")
    job.join("e")
    train(job, 10)
    job.say("c", Notice(400.0))
    job.say("d", Notice(49.0))
    train(job, 5)
    job.acknowledge()
    assert set(job.layout.order) == {"a", "b", "c", "e"}


def test_a_long_notice_is_no_reason_to_wait_with_a_repair() -> None:
    job = started("a", "b", "c", "d")
    train(job, 10)
    job.say("d", Notice(120.0))
    job.kill("d")
    assert job.prepare_of("a").urgent
    job.acknowledge("a", "b", "c", at_boundary=False)
    assert str(job.layout.config) == "1x2"


def test_a_long_notice_before_any_step_is_obeyed_at_once() -> None:
    job = started("a", "b")
    job.join("c")
    job.say("b", Notice(120.0))
    assert job.prepare_of("b").members == ["a", "b", "c"]


def test_a_notice_during_a_planned_generation() -> None:
    job = started("a", "b", "c", "d")
    job.join("e", "f")
    job.say("b", Notice(30.0))
    job.acknowledge()
    assert "b" not in job.layout.order
    assert str(job.layout.config) == "2x2"
    job.form()
    assert job.told("b", Release)


def test_a_spare_with_a_notice_may_go_at_once() -> None:
    job = started("a", "b")
    job.join("c")
    job.say("c", Notice(30.0))
    assert job.told("c", Release)
    assert job.phase == "running"


def test_a_notice_while_warming_up() -> None:
    job = started("a", "b")
    job.connect("c")
    job.say("c", Notice())
    assert job.told("c", Release)


def test_a_member_says_goodbye_unexpectedly() -> None:
    job = started("a", "b", "c", "d")
    job.say("d", Goodbye())
    assert job.prepare_of("a").urgent
    job.kill("d")
    job.acknowledge("a", "b", "c", at_boundary=False)
    assert str(job.layout.config) == "1x2"


# Deaths.


def test_a_death_with_a_replica() -> None:
    job = started("a", "b", "c", "d")
    job.step(10)
    before = job.layout
    job.kill("b")
    prepare = job.prepare_of("a")
    assert (prepare.urgent, prepare.members) == (True, ["a", "c", "d"])
    job.acknowledge("a", "c", at_boundary=False)
    job.acknowledge("d", clock=job.clock - 1, at_boundary=False)
    commit = job.newest_commit
    assert (commit.clock, commit.vote, commit.kind) == (job.clock, f"vote {job.clock}", "intra_stage")
    assert commit.transfers == []
    assert job.layout.order == ("a", "c", "d")  # one of them is a passenger
    assert job.layout.replicas_of_stage(1) == (before.grid[1][1],)
    job.form()
    assert job.phase == "preparing"
    assert not job.prepare_of("a").urgent
    job.reconfigure()
    assert job.phase == "running"
    assert len(job.layout.order) == 2
    assert len(job.coordinator.status()["spares"]) == 1


def test_survivors_without_a_place_keep_their_rank_until_the_boundary() -> None:
    job = started("a", "b", "c", "d")
    job.kill("a")
    job.acknowledge(at_boundary=False)
    assert job.layout.order == ("b", "c", "d")
    assert len({name for row in job.layout.grid for name in row}) == 2


def test_several_deaths_at_once() -> None:
    job = started("a", "b", "c", "d", "e", "f")
    job.step()
    stage0, stage1 = job.layout.replicas_of_stage(0), job.layout.replicas_of_stage(1)
    job.kill(stage0[0], stage1[1], stage0[2])
    generations = [prepare.generation for prepare in job.told(stage0[1], Prepare)]
    assert generations == [1, 2, 3, 4]
    job.acknowledge(at_boundary=False)
    assert str(job.layout.config) == "1x2"
    job.form()
    job.reconfigure()
    assert job.phase == "running"


def test_a_spare_takes_the_place_of_a_dead_member() -> None:
    """Mid-step the survivors go on with what they have; at the boundary the spare comes in."""
    job = started("a", "b", "c", "d")
    job.join("e")
    job.step()
    job.kill("d")
    assert "e" not in job.prepare_of("a").members
    job.acknowledge(at_boundary=False)
    assert str(job.layout.config) == "1x2"
    assert job.newest_commit.transfers == []
    job.form()
    assert "e" in job.prepare_of("a").members
    job.reconfigure()
    assert str(job.layout.config) == "2x2"
    assert job.phase == "running"


def test_stages_stay_if_spares_will_restore_them() -> None:
    """Three survivors could run three stages, but with the spare it will be two again: layers move once, not twice."""
    table = [None, (1, 1), (1, 2), (1, 3), (2, 2)]
    job = started("a", "b", "c", "d", table=table)
    job.join("e")
    job.kill("d")
    job.acknowledge(at_boundary=False)
    assert str(job.layout.config) == "1x2"
    assert job.newest_commit.transfers == []


def test_a_death_during_an_urgent_generation() -> None:
    job = started("a", "b", "c", "d")
    layout = job.layout
    job.kill(layout.grid[1][1])
    survivor = layout.grid[0]
    job.acknowledge(survivor[0])
    job.kill(layout.grid[1][0])
    assert job.prepare_of(survivor[0]).generation == 3
    job.acknowledge(*survivor, at_boundary=False)
    assert job.layout.grid == (survivor,)


def test_a_death_during_a_planned_generation() -> None:
    job = started("a", "b", "c", "d")
    job.join("e", "f")
    job.acknowledge("a", "e", "f")
    job.kill("d")
    prepare = job.prepare_of("a")
    assert (prepare.urgent, prepare.members) == (True, ["a", "b", "c"])
    job.acknowledge(at_boundary=False)
    job.form()
    job.reconfigure()
    assert str(job.layout.config) == "2x2"


def test_a_death_between_commit_and_formation_when_nobody_had_formed() -> None:
    """The joiners are still fresh, and come in with the next attempt."""
    job = started("a", "b", "c", "d")
    job.step()
    job.join("e", "f")
    job.acknowledge()
    assert str(job.layout.config) == "3x2"
    victim = job.layout.grid[0][0]
    job.kill(victim)
    assert job.prepare_of("e").urgent
    job.acknowledge(at_boundary=False)
    commit = job.newest_commit
    assert commit.fresh == ["e", "f"]
    assert commit.clock == job.clock
    assert set(job.layout.order) == {"a", "b", "c", "d", "e", "f"} - {victim}


def test_a_death_between_commit_and_formation_when_some_had_formed() -> None:
    """Everybody had entered the vote, so the joiners hold valid state; those behind get the vote."""
    job = started("a", "b", "c", "d")
    job.step()
    job.join("e", "f")
    job.acknowledge()
    layout, clock = job.layout, job.clock
    formed = [name for row in layout.grid for name in row if name not in ("e", "f")][1:]
    victim = next(name for name in layout.order if name not in formed and name not in ("e", "f"))
    job.form(*formed)
    job.held.update(e=[0, 1, 2, 3], f=[0, 1, 2, 3])  # they have not dropped what they came with
    job.kill(victim)
    job.acknowledge(*formed, clock=clock + 1, at_boundary=False)
    job.acknowledge("e", "f", clock=clock, at_boundary=False)
    commit = job.newest_commit
    assert (commit.clock, commit.fresh) == (clock + 1, [])
    assert commit.transfers == []
    for name in ("e", "f"):
        place = job.layout.place_of(name)
        assert place is None or place[1] == layout.place_of(name)[1]  # type: ignore[index]


def test_members_more_than_one_vote_apart_are_an_error() -> None:
    job = started("a", "b", "c", "d")
    job.step(5)
    job.kill("d")
    job.acknowledge("a", "b", at_boundary=False)
    job.acknowledge("c", clock=job.clock - 2, at_boundary=False)
    assert "one vote at most" in job.stop_of("a").reason


def test_the_table_would_wait_but_all_state_is_there() -> None:
    job = started("a", "b", "c", "d", table=[None, None, None, None, (2, 2)])
    job.kill("b")
    job.acknowledge(at_boundary=False)
    assert str(job.layout.config) == "1x2"
    job.form()
    assert job.phase == "running"


# State that nobody holds.


def test_lost_state_without_a_fallback() -> None:
    job = started("a", "b")
    stage = job.layout.grid[0].index("b")
    job.kill("b")
    job.acknowledge("a", at_boundary=False)
    stop = job.stop_of("a")
    assert f"stage {stage} was held only by b, and is lost (b died)" in stop.reason
    assert "fallback_dir" in stop.reason and "num_pipelines >= 2" in stop.reason
    assert (stop.exit_code, stop.graceful) == (3, False)
    assert job.phase == "stopped"


def test_lost_state_comes_back_from_the_fallback() -> None:
    job = started("a", "b", has_fallback=True)
    job.step(7)
    job.connect("c")
    job.ready("c", checkpoint=CheckpointRef("step-2", 2))
    job.kill("b")
    job.acknowledge("a", at_boundary=False)
    assert job.prepare_of("c").members == ["a", "c"]  # the spare goes back as well, its checkpoint may be old
    job.acknowledge("a", "c")
    assert all(job.commit_of(name).rollback and job.commit_of(name).layout is None for name in "ac")
    assert job.phase == "waiting"
    job.ready("a", "c", checkpoint=CheckpointRef("step-6", 6))
    job.acknowledge()
    commit = job.newest_commit
    assert (commit.kind, commit.checkpoint) == ("rollback", CheckpointRef("step-6", 6))
    assert commit.clock >= job.clock
    job.form()
    assert job.phase == "running"


def test_lost_state_and_no_checkpoint_yet() -> None:
    job = started("a", "b", has_fallback=True)
    job.kill("b")
    job.acknowledge("a", at_boundary=False)
    job.ready("a")
    job.join("c")
    job.acknowledge()
    assert "no complete checkpoint" in job.stop_of("a").reason
    assert job.coordinator.exit_code == 3


def test_all_members_die_and_a_spare_goes_back() -> None:
    job = started("a", "b", has_fallback=True)
    job.join("c")
    job.kill("a", "b")
    assert job.prepare_of("c").urgent
    job.acknowledge("c")
    assert job.commit_of("c").rollback
    job.ready("c", checkpoint=CheckpointRef("step-3", 3))
    job.connect("d")
    job.ready("d", checkpoint=CheckpointRef("step-3", 3))
    job.reconfigure()
    assert job.newest_commit.checkpoint == CheckpointRef("step-3", 3)


def test_all_members_die_and_others_come_later() -> None:
    job = started("a", "b", has_fallback=True)
    job.kill("a", "b")
    assert job.phase == "waiting"
    job.pass_time(100)
    job.connect("c", "d")
    job.ready("c", "d", checkpoint=CheckpointRef("step-3", 3))
    job.reconfigure()
    assert job.newest_commit.kind == "rollback"


def test_all_members_die_without_a_fallback() -> None:
    job = started("a", "b")
    job.join("c")
    job.kill("a", "b")
    assert job.phase in ("stopped", "preparing")
    assert "fallback_dir" in job.stop_of("c").reason


def test_the_only_holder_dies_while_a_joiner_forms() -> None:
    """The joiner must not start the job from scratch, as if it were the first."""
    job = started("a", table=[None, (1, 1), (2, 1)])
    job.step(9)
    job.join("b")
    job.acknowledge()
    job.kill("a")
    job.acknowledge("b", clock=0)
    assert "fallback_dir" in job.stop_of("b").reason


# Silence, zombies and links.


def test_a_silent_member_is_declared_dead_and_fenced() -> None:
    job = started("a", "b", "c", "d")
    job.silent = {"b"}
    job.pass_time(3.75)
    assert job.recorded("died") == []
    job.pass_time(1)
    assert "nothing was heard from it for 4." in job.recorded("died")[0]["reason"]
    assert job.told("b", Fenced)
    assert "b#1" in job.closed
    assert job.prepare_of("a").members == ["a", "c", "d"]


def test_a_zombie_is_not_let_in_again() -> None:
    job = started("a", "b", "c", "d")
    job.kill("b")
    before = len(job.told("b", Fenced))
    job.hello_again("b")
    assert len(job.told("b", Fenced)) == before + 1
    assert "its connection was closed" in job.told("b", Fenced)[-1].reason
    job.say("b", Formed(1))  # what it still says changes nothing
    assert "b" not in job.coordinator.status()["instances"]


def test_a_warming_instance_may_be_silent_for_longer() -> None:
    job = started("a", "b")
    job.connect("c")
    job.silent = {"c"}
    job.pass_time(29)
    assert job.recorded("died") == []
    job.pass_time(2)
    assert job.recorded("died")[0]["instance"] == "c"
    assert job.phase == "running"


def test_a_pause_of_the_coordinator_kills_nobody() -> None:
    job = started("a", "b")
    job.pass_time(1)
    job.now += 60
    job.handle(Tick())
    assert job.recorded("died") == []
    assert job.recorded("coordinator_paused")
    job.pass_time(10)
    assert job.phase == "running"


def test_a_member_that_does_not_stop_is_declared_dead() -> None:
    job = started("a", "b", "c", "d")
    job.kill("b")
    job.acknowledge("a", "c", at_boundary=False)
    job.pass_time(59.5)  # its heartbeats come: it may be busy in a long step
    assert job.phase == "preparing"
    job.pass_time(1)
    assert "did not stop within 60 s" in job.told("d", Fenced)[0].reason
    assert job.prepare_of("a").members == ["a", "c"]


def test_a_suspicion_without_a_death_is_a_link_error() -> None:
    job = started("a", "b")
    job.step(3)
    job.say("a", Suspect(1, "Connection reset"))
    assert job.phase == "running"
    job.pass_time(1.5)  # long before the failure timeout all have shown that they live
    prepare = job.prepare_of("a")
    assert prepare.urgent
    assert "Connection reset" in prepare.reason
    job.acknowledge(at_boundary=False)
    assert job.newest_commit.kind == "none"
    job.form()
    assert job.phase == "running"


def test_a_suspicion_waits_for_a_silent_member_to_be_found() -> None:
    job = started("a", "b", "c", "d")
    job.silent = {"d"}
    job.pass_time(1)
    job.say("a", Suspect(1, "timeout"))
    job.pass_time(2.5)
    assert job.phase == "running"
    job.pass_time(1)
    assert job.recorded("died")[0]["instance"] == "d"


def test_an_old_suspicion_is_ignored() -> None:
    job = started("a", "b", "c", "d")
    job.kill("d")
    job.acknowledge(at_boundary=False)
    job.form()
    job.reconfigure()
    job.say("a", Suspect(1, "late"))
    job.pass_time(10)
    assert job.phase == "running"


def test_link_errors_without_progress_end_the_job() -> None:
    job = started("a", "b")
    job.step(3)
    for _ in range(3):
        job.say("a", Suspect(job.layout.generation, "no route"))
        job.pass_time(2)
        job.acknowledge(at_boundary=False)
        if job.phase == "forming":
            job.form()
    assert "communication failed 3 times without progress" in job.stop_of("a").reason
    assert "no route" in job.stop_of("a").reason


def test_link_errors_with_progress_between_go_on() -> None:
    job = started("a", "b")
    for _ in range(5):
        job.step(3)
        job.say("a", Suspect(job.layout.generation, "no route"))
        job.pass_time(2)
        job.acknowledge(at_boundary=False)
        job.form()
    assert job.phase == "running"


def test_a_formation_that_takes_too_long_is_tried_again_and_then_given_up() -> None:
    job = started("a", "b")
    job.say("a", Suspect(1, "x"))
    job.pass_time(2)
    job.acknowledge(at_boundary=False)
    for attempt in range(3):
        job.form("a")
        job.clock -= 1
        assert job.phase == "forming"
        job.pass_time(31)
        if attempt < 2:
            job.acknowledge(at_boundary=False)
    assert "was not formed in time by b, 3 times in a row" in job.stop_of("a").reason


def test_the_same_step_fails_three_times() -> None:
    job = Job(expected=8, table=[None, (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1)])
    job.start("a", "b", "c", "d", "e", "f", "g", "h")
    job.step(5)
    for name in "hgf":
        job.kill(name)
        job.acknowledge(at_boundary=False)
        if job.phase == "forming":
            job.form()
    reason = job.stop_of("a").reason
    assert "3 times in a row by the death of h; g; f" in reason


def test_steps_between_deaths_start_the_count_again() -> None:
    job = Job(expected=8, table=[None, (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1)])
    job.start("a", "b", "c", "d", "e", "f", "g", "h")
    for name in "hgfedc":
        job.step(2)
        job.kill(name)
        job.acknowledge(at_boundary=False)
        job.form()
    assert job.phase == "running"


# Connections.


def test_a_connection_that_broke_unnoticed_comes_back() -> None:
    job = started("a", "b")
    job.join("c", "d")
    job.acknowledge("a", "b")
    job.inbox["c"].clear()
    job.handle(Connected(job.hello("c", incarnation="c#1")))
    assert [type(message) for message in job.inbox["c"]] == [Welcome, Prepare]
    assert job.told("c", Welcome)[0].order == 2
    job.acknowledge("c", "d")
    job.inbox["c"].clear()
    job.handle(Connected(job.hello("c", incarnation="c#1")))
    assert [type(message) for message in job.inbox["c"]] == [Welcome, Prepare, Commit]
    job.form()
    assert job.phase == "running"


def test_a_second_instance_of_the_same_name_is_refused() -> None:
    job = started("a", "b")
    job.handle(Connected(job.hello("a", incarnation="other", pid=77)))
    assert "alive already (host h, pid 1)" in job.stop_of("a").reason
    assert job.closed == ["other"]
    assert job.phase == "running"


def test_a_name_may_be_used_again_after_its_instance_died() -> None:
    job = started("a", "b", "c", "d")
    job.kill("d")
    job.join("d")
    job.acknowledge("a", "b", "c", at_boundary=False)
    job.form()
    job.acknowledge()
    assert "d" in job.layout.order
    assert job.newest_commit.fresh == ["d"]


def test_the_end_of_an_old_connection_does_not_end_the_new_one() -> None:
    job = started("a", "b")
    job.handle(Disconnected("a", "a#0"))
    assert job.phase == "running"


@pytest.mark.parametrize("package", ["lightning_parcae", "lightning", "torch"])
def test_other_versions_are_refused(package: str) -> None:
    job = Job()
    job.connect("a")
    job.connect("b", versions={**VERSIONS, package: "9.9"})
    reason = job.stop_of("b").reason
    assert f"{package} {VERSIONS[package]}, but b has {package} 9.9" in reason
    assert job.stop_of("b").exit_code == 5
    assert job.told("a", Stop) == []


def test_another_script_is_refused() -> None:
    job = started("a", "b")
    job.connect("c")
    job.spec = make_spec(fingerprint="g")
    job.ready("c")
    reason = job.stop_of("c").reason
    assert "its fingerprint is g, the job's is f" in reason
    assert job.told("a", Stop) == []
    job.kill("c")
    assert job.phase == "running"
    assert job.recorded("died") == []


def test_the_first_of_nobody_does_not_bind_the_others() -> None:
    """An instance with the wrong script that is gone again must not lock everybody out."""
    job = Job(expected=2)
    job.spec = make_spec(fingerprint="wrong")
    job.join("a")
    job.kill("a")
    job.spec = make_spec()
    job.join("b", "c")
    assert job.phase == "preparing"


# Ends.


def test_the_job_finishes_with_a_spare() -> None:
    job = started("a", "b")
    job.join("c")
    job.connect("d")
    job.say("a", Finished())
    assert job.phase == "running"
    job.say("b", Finished())
    assert job.phase == "done"
    assert job.told("c", JobFinished) == [JobFinished({"a": ("a:1", "a:2"), "b": ("b:1", "b:2")}, ["a", "b"])]
    assert job.told("d", Release)[0].reason == "the job is finished"
    assert job.told("a", JobFinished) == []  # they stay until the spare has the final state
    job.say("c", Finished())
    assert job.told("a", JobFinished) and job.told("b", JobFinished)
    job.connect("e")
    assert [type(message) for message in job.inbox["e"]] == [Welcome, Release]
    assert job.coordinator.exit_code == 0
    assert not job.coordinator.handle(job.now, Disconnected("a", "a#1")) or job.phase == "done"


def test_without_spares_the_holders_may_go_at_once() -> None:
    job = started("a", "b")
    job.say("a", Finished())
    job.say("b", Finished())
    assert job.told("a", JobFinished)


def test_a_spare_that_dies_keeps_nobody() -> None:
    job = started("a", "b")
    job.join("c")
    job.say("a", Finished())
    job.say("b", Finished())
    job.kill("c")
    assert job.told("a", JobFinished)
    assert job.recorded("died") == []


def test_the_job_finishes_while_a_joiner_waits() -> None:
    job = started("a", "b")
    job.join("c", "d")
    assert job.phase == "preparing"
    job.say("a", Finished())
    job.say("b", Finished())
    assert job.phase == "done"
    assert job.told("c", JobFinished)


def test_an_unfinished_member_dies_when_the_others_have_finished() -> None:
    job = started("a", "b")
    job.say("a", Finished())
    job.kill("b")
    assert job.phase == "done"


def test_a_member_that_missed_the_end_gets_the_final_state() -> None:
    job = started("a", "b", "c", "d")
    job.step(4)
    for name in "abc":
        job.say(name, Heartbeat(job.clock, 4))
        job.say(name, Finished())
    job.clock -= 1
    job.silent = {"a", "b", "c"}
    job.pass_time(2.5)
    assert job.prepare_of("d").urgent
    job.acknowledge("d", at_boundary=False)
    job.pass_time(0.25)
    assert job.phase == "done"
    assert job.told("d", JobFinished)[0].holders == ["a", "b", "c"]


def test_a_finished_member_may_leave_before_the_others() -> None:
    job = started("a", "b")
    job.say("a", Finished())
    job.say("a", Goodbye())
    assert job.phase == "running"
    job.say("b", Finished())
    assert job.phase == "done"


def test_a_failure_stops_all_others_with_its_traceback() -> None:
    job = started("a", "b")
    job.join("c")
    job.say("b", Failed(12, "ZeroDivisionError: division by zero", "Traceback: ..."))
    for name in "ac":
        stop = job.stop_of(name)
        assert stop.reason == "b failed at step 12: ZeroDivisionError: division by zero"
        assert (stop.traceback, stop.graceful, stop.exit_code) == ("Traceback: ...", False, 1)
    assert job.told("b", Stop) == []
    job.say("a", Failed(12, "a consequence", ""))
    assert len(job.told("c", Stop)) == 1
    job.connect("d")
    assert [type(message) for message in job.inbox["d"]] == [Welcome, Stop]
    assert job.coordinator.exit_code == 1


def test_a_joiner_that_fails_does_not_end_the_job() -> None:
    job = started("a", "b")
    job.connect("c")
    job.say("c", Failed(0, "FileNotFoundError: data", ""))
    assert job.phase == "running"
    assert "which goes on" in job.said[-1]


def test_a_failure_before_the_start_ends_the_job() -> None:
    job = Job(expected=2)
    job.connect("a", "b")
    job.say("a", Failed(0, "ImportError", ""))
    assert job.stop_of("b").reason.startswith("a failed at step 0")


# Commands and the rest.


def test_stop_by_command() -> None:
    job = started("a", "b")
    job.join("c")
    job.handle(AdminRequest(1, "stop", graceful=True))
    assert job.stop_of("a") == Stop(True, "stopped by command", None, 0)
    assert job.phase == "running"
    assert job.told("a", Release) == []
    assert job.told("c", Release)[0].reason == "the job was stopped"
    job.join("d")  # told to stop as well, and not planned in
    assert job.stop_of("d").graceful
    assert job.told("d", Release)
    for name in "abcd":
        job.say(name, Goodbye())
        assert job.phase == "running"
    assert job.coordinator.is_over
    assert job.coordinator.exit_code == 0


def test_stop_by_command_before_the_start() -> None:
    job = Job(expected=4)
    job.join("a")
    job.handle(AdminRequest(1, "stop"))
    assert job.phase == "stopped"
    assert job.stop_of("a").graceful
    assert job.told("a", Release)


def test_stop_now() -> None:
    job = started("a", "b")
    job.handle(AdminRequest(1, "stop", graceful=True))
    job.handle(AdminRequest(2, "stop", graceful=False))
    assert [stop.graceful for stop in job.told("a", Stop)] == [True, False]
    assert job.phase == "stopped"


def test_a_death_during_a_graceful_stop_is_repaired() -> None:
    job = started("a", "b", "c", "d")
    job.handle(AdminRequest(1, "stop"))
    job.kill("d")
    job.acknowledge(at_boundary=False)
    job.form()
    assert job.phase == "running"


def test_preempt_by_command() -> None:
    job = started("a", "b")
    job.join("c")
    job.handle(AdminRequest(1, "preempt", "b", 30.0))
    assert job.answer == Answer(1, {"done": True})
    assert job.prepare_of("b").members == ["a", "b", "c"]
    job.handle(AdminRequest(2, "preempt", "z"))
    assert job.answer is not None and "there are: a, b, c" in str(job.answer.error)


def test_status() -> None:
    job = started("a", "b")
    job.say("a", Progress(7, 1, 3, 9))
    job.handle(AdminRequest(1, "status"))
    assert job.answer is not None
    status = job.answer.value
    assert (status["phase"], status["generation"], status["config"]) == ("running", 1, [1, 2])
    assert status["progress"] == {"step": 7, "epoch": 1}
    assert status["instances"]["b"]["host"] == "h"


def test_values_are_written_once() -> None:
    job = Job()
    job.connect("a", "b", "c")
    job.say("a", Request(1, "wait", "seed"))
    job.say("b", Request(1, "get", "seed"))
    job.say("c", Request(5, "wait", "seed"))
    assert job.told("b", Reply) == [Reply(1, None)]
    job.kill("c")
    job.say("b", Request(2, "set_default", "seed", 42))
    assert job.told("a", Reply) == [Reply(1, 42)]
    assert job.told("b", Reply)[-1] == Reply(2, 42)
    job.say("a", Request(2, "set_default", "seed", 7))
    assert job.told("a", Reply)[-1] == Reply(2, 42)


def test_events_go_to_the_timeline() -> None:
    job = started("a", "b")
    job.say("a", Event("checkpoint", {"step": 3, "event": "odd"}))
    assert job.recorded("checkpoint") == [{"step": 3, "event": "odd", "instance": "a"}]


def test_progress_is_recorded_once_a_second_at_most() -> None:
    job = started("a", "b")
    for step in range(100):
        job.now += 0.05
        job.say("a", Progress(step, 0, step, step))
        job.say("b", Progress(-1, 0, 0, 0))
    assert len(job.recorded("progress")) in (5, 6)
    assert all(fields["step"] >= 0 for fields in job.recorded("progress"))


def test_generations_go_on_after_a_restart_of_the_coordinator() -> None:
    job = Job(expected=2)
    job.coordinator = Coordinator("job", 4.0, expected=2, generation=17)
    job.start("a", "b")
    assert job.layout.generation == 18


@pytest.mark.parametrize("arguments", [{"failure_timeout_s": 0}, {"failure_timeout_s": 1, "expected": 0}])
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Coordinator("job", **arguments)


# Members that come apart.


def beat(job: Job, seconds: float, operations: dict[str, tuple[int, str]]) -> None:
    """Let time pass in which members show clocks and operations."""
    until = job.now + seconds
    while job.now < until:
        job.now += 0.25
        for name, (clock, operation) in operations.items():
            job.say(name, Heartbeat(clock, 7, operation))
        job.handle(Tick())


def test_members_in_different_operations_stop_the_job() -> None:
    job = Job(expected=2)
    job.start("a", "b")
    apart = {"a": (5, "gather"), "b": (5, "training_step of batch 7 in epoch 0")}
    beat(job, 1.5, apart)
    assert job.phase == "running"
    beat(job, 1.5, apart)
    (stop,) = job.told("a", Stop)
    assert not stop.graceful
    assert stop.exit_code == 1
    assert "come apart: a runs 'gather', b runs 'training_step of batch 7 in epoch 0'" in stop.reason
    assert "call trainer.save_checkpoint and the like on every instance" in stop.reason


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((5, "training_step"), (5, "training_step")),  # a long step
        ((5, "training_step"), (5, "")),  # one is still in the user's code between two operations
        ((6, "validation_step"), (5, "training_step")),  # the end of a vote is under way
    ],
)
def test_members_that_will_meet_are_left_alone(a: tuple[int, str], b: tuple[int, str]) -> None:
    job = Job(expected=2)
    job.start("a", "b")
    beat(job, 30.0, {"a": a, "b": b})
    assert job.phase == "running"


def test_members_that_move_on_are_left_alone() -> None:
    job = Job(expected=2)
    job.start("a", "b")
    for clock in range(5, 15):
        beat(job, 1.5, {"a": (clock, "gather"), "b": (clock, "training_step")})
    assert job.phase == "running"


def test_nobody_has_come_apart_while_a_generation_forms() -> None:
    job = Job(expected=2, has_fallback=True)
    job.start("a", "b", "c", "d")
    job.kill("a")
    beat(job, 5.0, {"b": (5, "gather"), "c": (5, "training_step"), "d": (5, "training_step")})
    assert job.phase == "preparing"


def test_a_member_that_never_comes_to_the_boundary_stops_the_job() -> None:
    job = Job(expected=2)
    job.start("a", "b")
    job.say("a", Notice())
    job.join("c")
    assert not job.prepare_of("a").urgent
    job.acknowledge("a", "c", clock=5)
    beat(job, 1.5, {"a": (5, ""), "b": (5, "gather"), "c": (0, "")})
    assert job.phase == "preparing"
    beat(job, 1.5, {"a": (5, ""), "b": (5, "gather"), "c": (0, "")})
    (stop,) = job.told("a", Stop)
    assert "a waits at the step boundary, b runs 'gather'" in stop.reason


# Jobs without a step.


def test_a_fit_that_needs_no_batch_ends_the_job() -> None:
    job = Job(expected=2)
    job.connect("a", "b")
    job.say("a", Finished())
    job.say("a", Goodbye())
    job.pass_time(5.0)
    assert job.phase == "waiting"  # b may have more to do
    job.say("b", Finished())
    assert job.phase == "done"
    assert job.coordinator.exit_code == 0
    assert "died" not in [record.name for record in job.records]


def test_a_fit_that_needs_no_batch_does_not_wait_for_ever_for_others() -> None:
    job = Job()
    job.connect("a")
    job.say("a", Finished())
    job.say("a", Goodbye())
    assert job.phase == "waiting"
    job.pass_time(31.0)
    assert job.phase == "done"


def test_a_joiner_that_needs_no_batch_does_not_end_the_others() -> None:
    job = Job(expected=2)
    job.start("a", "b")
    job.connect("c")
    job.say("c", Finished())
    job.pass_time(40.0)
    assert job.phase == "running"


# Start-up.


def test_the_start_does_not_wait_for_one_that_will_not_come() -> None:
    job = Job(expected=3)
    job.join("a", "b")
    job.pass_time(1.0)
    assert job.phase == "waiting"
    job.handle(AdminRequest(1, "expect", count=2))
    assert job.phase == "preparing"


def test_the_next_instance_of_a_host_prepares_the_data() -> None:
    job = Job()
    job.connect("a", "b")
    job.connect("c", host="other")
    job.connect("d")
    for number, (name, host) in enumerate([("b", "h"), ("d", "h")]):
        job.say(name, Request(number, "wait", f"prepared/{host}"))
    assert job.told("b", Reply) == []
    job.kill("a")
    assert job.told("b", Reply) == [Reply(0, False)]
    assert job.told("d", Reply) == []
    job.kill("b")
    assert job.told("d", Reply) == [Reply(1, False)]
    job.connect("e")
    job.say("e", Request(5, "wait", "prepared/h"))
    job.say("d", Request(2, "set_default", "prepared/h", True))
    assert job.told("e", Reply) == [Reply(5, True)]


def test_one_that_asks_after_the_preparing_instance_died_prepares_the_data() -> None:
    job = Job()
    job.connect("a", "b")
    job.kill("a")
    job.say("b", Request(1, "wait", "prepared/h"))
    assert job.told("b", Reply) == [Reply(1, False)]
