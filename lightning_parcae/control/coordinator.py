"""The coordinator's rules as a state machine: events in, actions out, and no I/O, clock or randomness.

Four phases::

    waiting --Prepare--> preparing --all Acks, Commit--> forming --all Formed--> running
       ^                     |  ^                           |                       |
       |                     |  +------ death, link error, notice, joiner, plan ----+
       +---- rollback -------+

and two ends, ``done`` and ``stopped``. Every Prepare has a larger generation number than the one before, and a
generation gets one layout at most. A *planned* Prepare waits for the next train boundary, an *urgent* one interrupts.
A planned Prepare is never replaced by another planned one: members vote on the newest Prepare that all have seen, and
two of them in flight could stop members at different boundaries. Joiners that die meanwhile are left out at the Commit.

What the rules rely on is said in :mod:`lightning_parcae.control.decisions`; that the job neither splits nor wedges is
tested against random events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_parcae.control.decisions import (
    Standpoint,
    Table,
    decide_next,
    decide_start,
    describe_missing,
    serial_share,
    smallest_start,
    take_stock,
)
from lightning_parcae.control.events import (
    Action,
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
)
from lightning_parcae.control.failure_counts import FailureCounts
from lightning_parcae.control.hand_over import HandOver
from lightning_parcae.control.history import HISTORY_KEY, AvailabilityHistory
from lightning_parcae.control.membership import Attempt, Cause
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
    check_table,
    config_for,
)
from lightning_parcae.control.roster import Roster
from lightning_parcae.control.startup_values import StartupValues
from lightning_parcae.errors import EXIT_REFUSED, MembershipError
from lightning_parcae.planning.job_history import PastReconfiguration
from lightning_parcae.planning.layout import Layout
from lightning_parcae.planning.migration import MigrationPlan
from lightning_parcae.planning.parallel_config import ParallelConfig

Phase = Literal["waiting", "preparing", "forming", "running", "done", "stopped"]

START_WAIT_S = 30.0
MAX_FRUITLESS = 3
WAITING_RECORD_EVERY_S = 10.0
PROGRESS_RECORD_EVERY_S = 1.0
MIN_ACK_TIMEOUT_S = 10.0
MIN_BUSY_TIMEOUT_S = 60.0
MIN_FORMATION_TIMEOUT_S = 30.0
MIN_BYTES_PER_S = 20e6
MIN_APART_S = 2.0
MAX_EARLY_S = 30.0
PREPARED_KEY = "prepared/"

EXIT_STATE_LOST = 3
EXIT_TOO_FEW_INSTANCES = 4


@dataclass(slots=True)
class _Suspicion:
    """A communication error that may turn out to be a death."""

    generation: int
    since: float
    errors: dict[str, str]


class Coordinator:
    """Decides who is alive, and forms generations.

    Args:
        job_id: The job.
        failure_timeout_s: Silence after which an instance is dead, in seconds. Other bounds follow from it.
        expected: Instances to wait for at the start, at most 30 s after the first one is ready; None if unknown.
        run_dir: Told to the instances.
        generation: Number of the newest generation of an earlier coordinator of this job.
    """

    def __init__(
        self,
        job_id: str,
        failure_timeout_s: float,
        *,
        expected: int | None = None,
        run_dir: str | None = None,
        generation: int = 0,
    ) -> None:
        if not failure_timeout_s > 0:
            raise ValueError(f"failure_timeout_s must be positive, got {failure_timeout_s}")
        if expected is not None and expected < 1:
            raise ValueError(f"expected must be at least 1 instance, got {expected}")
        self.job_id = job_id
        self.failure_timeout_s = failure_timeout_s
        self._expected = expected
        self._run_dir = run_dir

        self._now = 0.0
        self._actions: list[Action] = []
        self._last_tick: float | None = None
        self._last_said = ""
        self._waiting_recorded_at: float | None = None
        self._progress_recorded_at: float | None = None

        self._instances = Roster(failure_timeout_s)
        self._spec: JobSpec | None = None
        self._table: Table = []
        self._values = StartupValues()
        self._history = AvailabilityHistory()
        self._hand_over = HandOver()
        self._progress: Progress | None = None
        self._checkpoint: CheckpointRef | None = None

        self._generation = generation
        self._layout: Layout | None = None  # newest one known to be complete
        self._active: list[str] = []  # living members of its group, by rank
        self._attempt: Attempt | None = None
        self._broken: Attempt | None = None  # committed, but not known to be complete
        self._suspicion: _Suspicion | None = None
        self._started = False  # some generation was formed
        self._needs_checkpoint = False
        self._lost_at = 0  # optimizer steps made when the job went back to a checkpoint
        self._interrupted = False  # a start broke, and those that wait have been interrupted
        self._waiting_since: float | None = None  # there are too few instances
        self._first_ready_at: float | None = None  # of those that wait for a generation
        self._failures = FailureCounts()

        self._stop: Stop | None = None
        self._over: Literal["done", "stopped"] | None = None
        self._first_finished_at: float | None = None
        self._first_idle_at: float | None = None  # the first instance whose fit has needed no step has ended it
        self._pulling: set[str] = set()  # spares that lack the final state
        self._pull_deadline = 0.0

        self._handlers: dict[type[Any], Callable[[str, Any], None]] = {
            Heartbeat: self._on_heartbeat,
            Ready: self._on_ready,
            Ack: self._on_ack,
            Formed: self._on_formed,
            Suspect: self._on_suspect,
            Notice: self._on_notice,
            Progress: self._on_progress,
            Plan: self._on_plan,
            Failed: self._on_failed,
            Finished: self._on_finished,
            Goodbye: self._on_goodbye,
            Event: self._on_event,
            Request: self._on_request,
        }

    @property
    def phase(self) -> Phase:
        """Where the machine is."""
        if self._over is not None:
            return self._over
        if self._attempt is not None:
            return "forming" if self._attempt.is_forming else "preparing"
        return "waiting" if self._layout is None else "running"

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be decided: the job is done, has failed, or was stopped and all have gone."""
        return self._over is not None or (self._stop is not None and not self._instances)

    @property
    def exit_code(self) -> int:
        """Exit code of the job once it is over."""
        return self._stop.exit_code if self._stop is not None and self._over != "done" else 0

    def handle(self, now: float, event: CoordinatorEvent) -> list[Action]:
        """Take one event and return what to do, in order.

        Args:
            now: Reading of a clock that never goes back, in seconds.
            event: What happened.
        """
        self._now = now
        self._actions = []
        if isinstance(event, Received):
            self._on_received(event.instance, event.message)
            if isinstance(event.message, (Heartbeat, Progress, Event, Request)):
                return self._actions
        elif isinstance(event, Connected):
            self._on_connected(event.hello)
        elif isinstance(event, Disconnected):
            self._on_disconnected(event)
        elif isinstance(event, AdminRequest):
            self._on_admin(event)
        else:
            self._on_tick()
        self._advance()
        return self._actions

    # Output.

    def _send(self, name: str, message: Message) -> None:
        self._actions.append(Send(name, self._instances[name].hello.incarnation, message))

    def _send_all(self, names: Iterable[str], message: Message) -> None:
        for name in names:
            if name in self._instances:
                self._send(name, message)

    def _record(self, event: str, /, **fields: Any) -> None:
        self._actions.append(Record(event, fields))

    def _say(self, text: str) -> None:
        if text != self._last_said:
            self._last_said = text
            self._actions.append(Say(text))

    # Arrivals.

    def _on_connected(self, hello: Hello) -> None:
        is_new = hello.instance not in self._instances
        admitted = self._instances.admit(hello, self._now, versions_are_fixed=self._started)
        if isinstance(admitted, (Fenced, Stop)):
            self._record("refused", instance=hello.instance, incarnation=hello.incarnation, reason=admitted.reason)
            self._say(f"refused {hello.instance}: {admitted.reason}")
            self._actions.append(Send(hello.instance, hello.incarnation, admitted))
            self._actions.append(Close(hello.instance, hello.incarnation))
            return
        if is_new:
            self._history.connected(self._now, hello.instance)
        event = "connected" if is_new else "reconnected"
        self._record(event, instance=hello.instance, host=hello.host, pid=hello.pid, order=admitted.order)
        welcome = self._instances.welcome(
            admitted, started=self._started, generation=self._generation, run_dir=self._run_dir
        )
        self._send(hello.instance, welcome)
        self._repeat(hello.instance)

    def _repeat(self, name: str) -> None:
        """Say again what an instance must know, in case it was lost with a connection or said before it came."""
        attempt = self._attempt
        if self._over == "done":
            self._dismiss(name)
        elif self._stop is not None:
            self._send(name, self._stop)
        elif self._instances[name].released:
            self._send(name, Release("the hand-over is done"))
        elif attempt is not None and name in attempt.members:
            self._send(name, self._prepare_of(attempt))
            if attempt.commit is not None:
                self._send(name, attempt.commit)

    def _dismiss(self, name: str) -> None:
        """Tell an instance that the job is done; whoever holds the final state stays until the spares have it."""
        instance = self._instances[name]
        if instance.ready is None:
            self._release(name, "the job is finished")
        elif not instance.finished or not self._pulling:
            holders = [other for other in self._instances if self._instances[other].finished]
            self._send(name, JobFinished(addresses=self._instances.addresses(holders), holders=holders))

    def _has_pulled(self, name: str) -> None:
        """Let the holders of the final state go when the last spare has it."""
        if name in self._pulling:
            self._pulling.discard(name)
            for holder in self._instances if not self._pulling else ():
                if self._instances[holder].finished:
                    self._dismiss(holder)

    # Departures.

    def _on_disconnected(self, event: Disconnected) -> None:
        instance = self._instances.get(event.instance)
        if instance is not None and instance.hello.incarnation == event.incarnation:
            died = not (instance.released or instance.finished)
            self._lose(event.instance, "its connection was closed", died=died)

    def _declare_dead(self, name: str, reason: str) -> None:
        hello = self._instances[name].hello
        self._send(name, Fenced(f"{name} was declared dead ({reason}); the job has gone on without it"))
        self._actions.append(Close(name, hello.incarnation))
        self._lose(name, reason)

    def _lose(self, name: str, reason: str, *, died: bool = True) -> None:
        """Take an instance out of the books, and react if the job needed it."""
        instance = self._instances.remove(name, reason)
        self._values.forget(name)
        self._ask_next_to_prepare()
        self._history.gone(self._now, name)
        self._has_pulled(name)
        died = died and self._over is None
        self._record("died" if died else "left", instance=name, reason=reason, step=instance.step)
        if instance.finished:  # it took part in every vote; if the others miss it all the same, they will say so
            self._active = [other for other in self._active if other != name]
        attempt, was_active = self._attempt, name in self._active
        needed = attempt.needs(name) if attempt is not None and (attempt.urgent or attempt.is_forming) else was_active
        self._active = [other for other in self._active if other != name]
        if attempt is not None:
            attempt.members = [other for other in attempt.members if other != name]
            attempt.asked -= {name}
            attempt.acks.pop(name, None)
        if self._over is not None or not needed or self._all_finished():
            return
        if self._stop is not None and not died:
            return  # a graceful stop: everyone leaves as soon as it is through
        self._regroup("death", f"{name}: {reason}" if died else f"{name} left", lost=name)

    # Messages.

    def _on_received(self, name: str, message: Message) -> None:
        instance = self._instances.get(name)
        if instance is None:
            return
        instance.last_seen = self._now
        handler = self._handlers.get(type(message))
        if handler is None:
            self._record("refused_message", instance=name, message=type(message).__name__)
        else:
            handler(name, message)

    def _on_heartbeat(self, name: str, message: Heartbeat) -> None:
        instance = self._instances[name]
        instance.step = message.step
        instance.stand(self._now, message.clock, message.operation)

    def _on_ready(self, name: str, message: Ready) -> None:
        instance = self._instances[name]
        spec = self._spec
        if spec is None or not (self._started or any(item.ready for item in self._instances.values())):
            self._spec, self._table = message.spec, list(message.spec.table)
        elif message.spec.fingerprint != spec.fingerprint:
            self._refuse_script(name, spec.fingerprint, message.spec.fingerprint)
            return
        if instance.ready is None:
            self._record("ready", instance=name, checkpoint=message.checkpoint and message.checkpoint.identifier)
            self._history.ready(self._now, name)
        instance.ready = message
        if self._first_ready_at is None:
            self._first_ready_at = self._now
        if self._waiting_since is None:
            self._waiting_since = self._now
        if self._over == "done":
            self._dismiss(name)

    def _refuse_script(self, name: str, ours: str, theirs: str) -> None:
        reason = (
            f"{name} runs another script than the job, or the same with other settings: its fingerprint is {theirs}, "
            f"the job's is {ours}; start every instance with the same script and arguments"
        )
        self._record("refused", instance=name, reason=reason)
        self._say(f"refused {name}: {reason}")
        self._send(name, Stop(graceful=False, reason=reason, exit_code=EXIT_REFUSED))
        self._instances[name].released = True

    def _on_ack(self, name: str, message: Ack) -> None:
        attempt = self._attempt
        if attempt is None or attempt.is_forming or message.generation != attempt.generation:
            return  # for an attempt that has been given up
        if name not in attempt.asked or name in attempt.acks:
            return
        attempt.acks[name] = message
        self._instances[name].step = max(self._instances[name].step, message.step)
        if attempt.first_stopped_at is None and name in self._active:
            attempt.first_stopped_at = self._now
        if attempt.all_active_stopped_at is not None or len(attempt.acks) < len(self._active):
            return  # this is asked at each of many Acks
        if not set(self._active) - set(attempt.acks):
            attempt.all_active_stopped_at = self._now

    def _on_formed(self, name: str, message: Formed) -> None:
        attempt = self._attempt
        if attempt is not None and message.generation == attempt.generation and name in attempt.ranked:
            attempt.formed[name] = message

    def _on_suspect(self, name: str, message: Suspect) -> None:
        attempt = self._attempt
        if attempt is None or not (attempt.urgent or attempt.is_forming):
            current = self._layout.generation if self._layout is not None else None
        else:
            current = attempt.generation if attempt.is_forming else None
        if message.generation != current or self._over is not None:
            return  # that generation has been given up already
        if self._suspicion is None:
            self._suspicion = _Suspicion(message.generation, self._now, {})
        if name not in self._suspicion.errors:
            self._suspicion.errors[name] = message.error
            self._record("suspected", instance=name, generation=message.generation, error=message.error)

    def _on_notice(self, name: str, message: Notice) -> None:
        instance = self._instances[name]
        leaves_at = None if message.grace_s is None else self._now + message.grace_s
        known = instance.leaves_at if instance.leaving else math.inf
        if known is not None and (leaves_at is None or leaves_at < known):  # a nearer end replaces one further off
            self._instances.give_notice(name, leaves_at)
            self._history.noticed(self._now, name, leaves_at)
            self._record("notice", instance=name, grace_s=message.grace_s)
            soon = "" if message.grace_s is None else f" in {message.grace_s:g} s"
            self._say(f"{name} will be taken away{soon}")

    def _on_progress(self, name: str, message: Progress) -> None:
        if not self._active or name != self._active[0]:
            return
        self._progress = message
        last = self._progress_recorded_at
        if last is None or self._now - last >= PROGRESS_RECORD_EVERY_S:
            self._progress_recorded_at = self._now
            self._record("progress", step=message.step, epoch=message.epoch, batch=message.batch, clock=message.clock)

    def _on_plan(self, name: str, message: Plan) -> None:
        if self._spec is None or not self._active or name != self._active[0]:
            return
        try:
            check_table(message.table, self._spec.boundaries)
        except ValueError as error:
            self._record("plan_refused", instance=name, error=str(error))
            return
        if message.table != self._table:
            self._table = list(message.table)
            table = [entry and list(entry) for entry in message.table]
            self._record("plan", **{**message.details, "instance": name, "table": table, "reason": message.reason})

    def _on_failed(self, name: str, message: Failed) -> None:
        self._record("failed", instance=name, step=message.step, error=message.error, traceback=message.traceback)
        reason = f"{name} failed at step {message.step}: {message.error}"
        takes_part = name in self._active or (self._attempt is not None and name in self._attempt.order)
        if self._started and not takes_part:
            self._say(f"{reason}; it had no part in the job, which goes on")
        if self._over is not None or (self._started and not takes_part):
            return
        self._end(Stop(graceful=False, reason=reason, traceback=message.traceback or None), spare=name)

    def _on_finished(self, name: str, _: Finished) -> None:
        if self._over == "done":
            self._has_pulled(name)
        elif name in self._active or (self._attempt is not None and name in self._attempt.order):
            self._instances[name].finished = True
            self._record("finished", instance=name)
            if self._first_finished_at is None:
                self._first_finished_at = self._now
        elif self._instances[name].ready is None and not self._started:  # no batch, so it never asked for a place
            self._instances[name].finished = True
            self._record("finished", instance=name)
            if self._first_idle_at is None:
                self._first_idle_at = self._now

    def _on_goodbye(self, name: str, _: Goodbye) -> None:
        self._lose(name, "it said goodbye", died=False)

    def _on_event(self, name: str, message: Event) -> None:
        self._record(message.name, **{**message.fields, "instance": name})

    def _on_request(self, name: str, message: Request) -> None:
        if message.key == HISTORY_KEY and message.op == "get":
            config = None if self._layout is None else self._layout.config
            state = {
                "phase": self.phase,
                "config": None if config is None else [config.num_pipelines, config.num_stages],
                "table": [entry and list(entry) for entry in self._table],
            }
            self._send(name, Reply(message.request, {**self._history.describe(self._now), **state}))
            return
        for receiver, reply in self._values.handle(name, message):
            self._send_all([receiver], reply)
        if message.op == "wait":
            self._ask_next_to_prepare()

    def _ask_next_to_prepare(self) -> None:
        """Tell an instance that waits for the data of its host if it has become the one that must prepare it."""
        for key, name in self._values.waiting_for(PREPARED_KEY):
            if self._instances.is_oldest_of_host(name):
                for reply in self._values.give_up(key, name, False):
                    self._send(name, reply)

    # Commands.

    def _on_admin(self, event: AdminRequest) -> None:
        error = None
        value: Any = {"done": True}
        if event.op == "status":
            value = self.status()
        elif event.op == "stop":
            self._record("stop_requested", graceful=event.graceful)
            if self._over is None and (self._stop is None or not event.graceful):
                self._end(Stop(graceful=event.graceful, reason="stopped by command", exit_code=0))
        elif event.op == "expect":
            self._expected = max(1, event.count)
        elif event.instance is not None and event.instance in self._instances:
            self._on_notice(event.instance, Notice(event.grace_s))
        else:
            value = None
            error = f"no instance is named {event.instance!r}; there are: {', '.join(self._instances) or 'none'}"
        self._actions.append(Answer(event.request, value, error))

    def status(self) -> dict[str, Any]:
        """Return the state of the job as JSON values."""
        layout, attempt = self._layout, self._attempt
        return {
            **self.snapshot(),
            "config": None if layout is None else [layout.config.num_pipelines, layout.config.num_stages],
            "active": list(self._active),
            "spares": self._spares(),
            "preparing": None if attempt is None else {"reason": attempt.reason, "members": list(attempt.members)},
            "progress": None
            if self._progress is None
            else {"step": self._progress.step, "epoch": self._progress.epoch},
            "instances": {name: self._instances[name].describe(self._now) for name in self._instances},
            "message": self._last_said,
        }

    def snapshot(self) -> dict[str, Any]:
        """Return what should outlive this process, as JSON values; changes rarely."""
        return {
            "job_id": self.job_id,
            "phase": self.phase,
            "generation": self._generation,
            "layout": None if self._layout is None else self._layout.to_json(),
            "checkpoint": None
            if self._checkpoint is None
            else {"identifier": self._checkpoint.identifier, "step": self._checkpoint.step},
            "stop": None if self._stop is None else self._stop.reason,
        }

    # Time.

    def _on_tick(self) -> None:
        self._forgive_own_pause()
        for name in self._instances.overdue(self._now):
            silent_s = self._now - self._instances[name].last_seen
            self._declare_dead(name, f"nothing was heard from it for {silent_s:.1f} s")
        if self._over is None:
            self._check_acks()
            self._check_finish()
            self._check_formation()
            self._check_suspicion()
            self._check_apart()
            self._check_waiting()
        elif self._pulling and self._now > self._pull_deadline:
            for name in list(self._pulling):
                self._has_pulled(name)  # its own trouble now

    def _forgive_own_pause(self) -> None:
        """Shift all bounds if this process itself stood still: the messages that came meanwhile are not yet read."""
        last, self._last_tick = self._last_tick, self._now
        if last is None or self._now - last <= max(1.0, self.failure_timeout_s / 2):
            return
        pause = self._now - last
        self._record("coordinator_paused", pause_s=round(pause, 3))
        self._instances.renew(self._now)
        if self._attempt is not None:
            self._attempt.prepared_at += pause
            self._attempt.deadline += pause
            if self._attempt.all_active_stopped_at is not None:
                self._attempt.all_active_stopped_at += pause
        if self._suspicion is not None:
            self._suspicion.since = self._now

    def _check_acks(self) -> None:
        attempt = self._attempt
        if attempt is None or attempt.is_forming:
            return
        if self._is_left_behind(attempt):
            self._regroup(None, attempt.reason)
            return
        # A planned Prepare waits for a boundary as long as it takes, but then nobody waits for a joiner.
        late = [name for name in attempt.members if name not in attempt.acks]
        if attempt.urgent and late and all(self._instances[name].finished for name in late):
            self._finish()  # they hold the final state and have gone on; the others can have it from them
            return
        since = attempt.prepared_at if attempt.urgent or not self._active else attempt.all_active_stopped_at
        if since is None:
            return
        for name in late:
            # A member sends heartbeats while its main thread is busy in a long step or in the user's code; that must
            # end, but its state is worth a wait. One that only waits for a place answers at once.
            timeout_s = max(self.failure_timeout_s, MIN_ACK_TIMEOUT_S)
            if name in self._active:
                timeout_s = max(6 * self.failure_timeout_s, MIN_BUSY_TIMEOUT_S)
            if self._now - since > timeout_s and name in self._instances and self._over is None:
                self._declare_dead(name, f"it did not stop within {timeout_s:g} s for generation {attempt.generation}")

    def _is_left_behind(self, attempt: Attempt) -> bool:
        """Whether a member waits for the end of a vote after which others have stopped and closed their connections."""
        stopped = [attempt.acks[name].clock for name in self._active if name in attempt.acks]
        since = attempt.first_stopped_at
        if attempt.urgent or since is None or not stopped or self._now - since <= self.failure_timeout_s / 2:
            return False
        late = [name for name in self._active if name not in attempt.acks]
        return any(self._instances[name].clock < max(stopped) for name in late)

    def _check_finish(self) -> None:
        """Interrupt a member that waits for the end of the last vote, after which others have closed theirs."""
        since, attempt = self._first_finished_at, self._attempt
        if since is None or self._now - since <= self.failure_timeout_s / 2 or (attempt is not None and attempt.urgent):
            return
        finished = [self._instances[name].clock for name in self._active if self._instances[name].finished]
        late = [name for name in self._active if not self._instances[name].finished]
        if finished and any(self._instances[name].clock < max(finished) for name in late):
            self._regroup(None, f"{', '.join(late)} missed the end")

    def _check_formation(self) -> None:
        attempt = self._attempt
        if attempt is None or not attempt.is_forming or self._now <= attempt.deadline:
            return
        late = [name for name in attempt.order if name not in attempt.formed]
        self._failures.num_late_formations += 1
        reason = f"generation {attempt.generation} was not formed in time by {', '.join(late)}"
        if self._failures.num_late_formations >= MAX_FRUITLESS:
            reason += f", {MAX_FRUITLESS} times in a row; look for errors in the output of these instances"
            self._end(Stop(graceful=False, reason=reason))
        else:
            self._regroup("formation", reason)

    def _check_suspicion(self) -> None:
        suspicion = self._suspicion
        if suspicion is None:
            return
        forming = self._attempt is not None and self._attempt.is_forming
        members = self._attempt.members if self._attempt is not None and forming else self._active
        # A member heard from well after the error is alive, so the error was the link's.
        proven_at = suspicion.since + self.failure_timeout_s / 6
        proven = all(self._instances[name].last_seen > proven_at for name in members)
        if proven or self._now - suspicion.since > self.failure_timeout_s + 1:
            name, error = next(iter(suspicion.errors.items()))
            self._regroup("link", f"communication of {name} failed, but nobody died: {error}")

    def _check_apart(self) -> None:
        """Stop the job if two members wait for each other in different operations: they would for ever.

        They have completed the same votes, and each has shown its operation for two heartbeats at least.
        """
        attempt = self._attempt
        if self._layout is None or (attempt is not None and (attempt.urgent or attempt.is_forming)):
            return
        patience_s = max(2 * self.failure_timeout_s / 6, MIN_APART_S)
        seen: dict[int, dict[str, str]] = {}
        for name in self._active:
            instance = self._instances[name]
            what = f"runs {instance.operation!r}" if instance.operation else ""
            if attempt is not None and name in attempt.acks:
                what = "waits at the step boundary"
            if what and instance.stands_until - instance.stands_since > patience_s:
                seen.setdefault(instance.clock, {}).setdefault(what, name)
        for first in seen.values():
            if len(first) > 1:
                who = ", ".join(f"{name} {what}" for what, name in first.items())
                reason = (
                    f"the instances have come apart: {who}. Something that steers the loop differs between them: call "
                    "trainer.save_checkpoint and the like on every instance, and let hooks decide from logged values"
                )
                self._end(Stop(graceful=False, reason=reason))
                return

    def _check_waiting(self) -> None:
        spec, since = self._spec, self._waiting_since
        if self.phase != "waiting" or spec is None or since is None or spec.min_instances_timeout_s is None:
            return
        ready = len(self._spares())
        if self._now - since > spec.min_instances_timeout_s and config_for(self._table, ready) is None:
            reason = (
                f"waited {spec.min_instances_timeout_s:g} s for at least {smallest_start(self._table)} instances, but "
                f"only {ready} are ready; add instances, or raise min_instances_timeout"
            )
            self._end(Stop(graceful=False, reason=reason, exit_code=EXIT_TOO_FEW_INSTANCES))

    # Progress of the machine.

    def _advance(self) -> None:
        """Do what has become possible."""
        while self._over is None:
            before = (self._generation, self.phase)
            if self._all_finished() or self._is_idle():
                self._finish()
            elif self._attempt is not None and self._attempt.is_forming:
                self._try_complete(self._attempt)
            elif self._attempt is not None and self._is_torn_down(self._attempt):
                # The first to stop closed its connections while another still waited for the end of its last vote.
                self._regroup(None, self._attempt.reason)
            elif self._attempt is not None:
                self._invite_more(self._attempt)
                self._try_commit(self._attempt)
            elif self._layout is None:
                self._try_start()
            else:
                self._look_again()
            if (self._generation, self.phase) == before:
                break
        self._release_idle()

    def _is_torn_down(self, attempt: Attempt) -> bool:
        suspected = self._suspicion is not None and not attempt.urgent
        return suspected and any(name in attempt.acks for name in self._active)

    def _release_idle(self) -> None:
        """Let instances go that have nothing to hand over: those with a notice, and all when the job is to stop."""
        stopping = self._stop is not None and self._stop.graceful
        if self._over is not None and not stopping:
            return
        for name in self._instances if stopping else self._instances.leaving:
            instance = self._instances[name]
            busy = name in self._active or (self._attempt is not None and name in self._attempt.members)
            if instance.released or busy:
                continue
            if stopping:
                self._release(name, "the job was stopped")
            else:
                self._release(name, "the hand-over is done" if instance.ready else "it had not joined the job yet")

    def _release(self, name: str, reason: str) -> None:
        self._instances[name].released = True
        self._send(name, Release(reason))
        self._record("released", instance=name, reason=reason)

    def _spares(self) -> list[str]:
        return self._instances.usable(besides=self._active)

    def _try_start(self) -> None:
        ready = self._spares()
        if self._stop is not None:
            self._over = "stopped"
            return
        if self._spec is None:
            return
        if not ready:
            self._first_ready_at = None
        since = self._first_ready_at if self._first_ready_at is not None else self._now
        all_ready = all(item.ready or item.leaving or item.released for item in self._instances.values())
        all_here = self._started or (self._expected is not None and self._instances.num_names >= self._expected)
        config = config_for(self._table, len(ready))
        if config is None:
            self._wait(f"waiting: {len(ready)} of at least {smallest_start(self._table)} instances ready")
        elif not (all_ready and all_here) and self._now - since < START_WAIT_S:
            expected = len(self._instances) if self._expected is None else max(self._expected, len(self._instances))
            self._wait(f"waiting: {len(ready)} of {expected} instances ready, starting with fewer soon")
        else:
            reason = f"{len(ready)} instances are ready"
            self._prepare(reason, members=ready, joiners=ready, urgent=self._interrupted)

    def _wait(self, text: str) -> None:
        since = self._now - self._waiting_since if self._waiting_since is not None else 0.0
        self._say(text)
        last = self._waiting_recorded_at
        if last is None or self._now - last >= WAITING_RECORD_EVERY_S:
            self._waiting_recorded_at = self._now
            self._record("waiting", reason=text, since_s=round(since, 1))

    def _look_again(self) -> None:
        """Plan the next generation if the running one is not what it should be."""
        layout = self._layout
        if layout is None or self._stop is not None or self._suspicion is not None:
            return
        if any(self._instances[name].finished for name in self._active):
            return
        going = self._going()
        staying = [name for name in self._active if name not in going]
        spares = self._spares()
        config = config_for(self._table, len(staying) + len(spares))
        if config is None:
            if going:
                self._say(f"{', '.join(going)} will go, but too few instances would be left: going on until then")
            return
        placed = {name for row in layout.grid for name in row}
        passengers = [name for name in self._active if name not in placed]
        if config == layout.config and not going and not passengers:
            return
        if going:
            reason = f"{', '.join(going)} will be taken away"
        elif config != layout.config:
            reason = f"{len(staying) + len(spares)} instances can run as {config} instead of {layout.config}"
        else:
            reason = f"{', '.join(passengers)} become spares"
        joiners = self._joiners_for(config, staying)
        attempt = self._prepare(reason, members=[*self._active, *joiners], joiners=joiners)
        attempt.going = frozenset(going)

    def _going(self) -> list[str]:
        """Return the active instances with a notice that give their places away with the next planned generation.

        They train on until they are due; who is due soon goes with whoever is due.
        """
        noticed = [name for name in self._active if self._instances[name].leaving]
        if not any(map(self._is_due, noticed)):
            return []
        return [name for name in noticed if self._is_due(name, within_s=MAX_EARLY_S)]

    def _is_due(self, name: str, *, within_s: float = 0.0) -> bool:
        """Return whether an instance with a notice must hand over now, or within some time."""
        leaves_at = self._instances[name].leaves_at
        reserve_s = self._hand_over.reserve_s(self._now, self._newest_step())
        return leaves_at is None or reserve_s is None or self._now >= leaves_at - reserve_s - within_s

    def _must_go(self, attempt: Attempt, name: str) -> bool:
        """Return whether a member gets no place in what an attempt forms, if it can be helped."""
        instance = self._instances[name]
        if instance.leaving and name in self._active and not instance.released:
            return name in attempt.going or self._is_due(name)
        return not instance.is_usable

    def _newest_step(self) -> int:
        return max((self._instances[name].step for name in self._active), default=0)

    def _joiners_for(self, config: ParallelConfig, staying: list[str]) -> list[str]:
        return self._spares()[: max(0, config.num_instances - len(staying))]

    def _invite_more(self, attempt: Attempt) -> None:
        """Let instances that have become ready since a planned Prepare enter with it, as long as nobody has stopped.

        Else those that come together would enter in two generations. They wait for a place and stop at once.
        """
        if attempt.urgent or self._layout is None or not self._active or attempt.first_stopped_at is not None:
            return
        staying = [name for name in self._active if not self._must_go(attempt, name)]
        config = config_for(self._table, len(staying) + len(self._spares()))
        joiners = [] if config is None else self._joiners_for(config, staying)
        more = [name for name in joiners if name not in attempt.asked]
        if more:
            attempt.members = [*attempt.members, *more]
            attempt.asked |= set(more)
            attempt.joiners |= set(more)
            self._record("invited", generation=attempt.generation, instances=more)
            self._send_all(more, self._prepare_of(attempt))

    def _prepare(
        self,
        reason: str,
        *,
        members: list[str],
        joiners: Iterable[str] = (),
        urgent: bool = False,
        rollback: str | None = None,
    ) -> Attempt:
        self._generation += 1
        attempt = Attempt(
            generation=self._generation,
            urgent=urgent,
            reason=reason,
            members=list(members),
            asked=frozenset(members),
            joiners=frozenset(joiners),
            prepared_at=self._now,
            rollback=rollback,
        )
        self._attempt = attempt
        self._send_all(attempt.members, self._prepare_of(attempt))
        self._record("prepared", generation=attempt.generation, urgent=urgent, members=members, reason=reason)
        self._say(f"generation {attempt.generation}: {reason}")
        return attempt

    def _prepare_of(self, attempt: Attempt) -> Prepare:
        return Prepare(attempt.generation, attempt.urgent, list(attempt.members), attempt.reason)

    def _regroup(self, cause: Cause | None, reason: str, *, lost: str | None = None) -> None:
        """Interrupt the living members of a generation that broke, or that was breaking already."""
        self._suspicion = None
        before = self._attempt
        was_running = before is None or not (before.urgent or before.is_forming)
        if before is not None and before.is_forming:
            self._broken = before
        if before is None or was_running:
            members, joiners = list(self._active), frozenset[str]()
        else:
            members, joiners = list(before.members), before.joiners if not before.is_forming else frozenset()
        if not members:
            self._attempt = None
            self._all_lost(reason)
            return
        rollback = before.rollback if before is not None else None
        attempt = self._prepare(reason, members=members, joiners=joiners, urgent=True, rollback=rollback)
        attempt.cause, attempt.was_formed = cause, was_running
        if before is not None and before.urgent and not before.is_forming:  # the same break, seen more of
            attempt.was_formed = before.was_formed
            attempt.lost = list(before.lost)
        if lost is not None:
            attempt.lost.append(lost)

    def _try_commit(self, attempt: Attempt) -> None:
        if not attempt.members:
            self._attempt = None  # all joiners of a start are gone
            return
        if len(attempt.acks) < len(attempt.members):
            return
        try:
            standpoint = take_stock(attempt, self._broken, self._layout, self._active)
        except MembershipError as error:
            self._end(Stop(graceful=False, reason=str(error)))
            return
        if standpoint.completed and self._broken is not None:
            self._started = True
            self._needs_checkpoint = False
            self._say_what_is_lost(self._broken)
        self._broken = None
        self._layout, self._active = standpoint.layout, list(standpoint.active)
        if not self._may_go_on(attempt, standpoint):
            return
        if attempt.rollback is not None:
            self._roll_back(attempt, standpoint, attempt.rollback)
        elif self._layout is None and self._started and not self._needs_checkpoint:
            self._roll_back(
                attempt, standpoint, f"all instances that held the state of the job are gone ({attempt.reason})"
            )
        elif self._layout is None:
            self._commit_start(attempt, standpoint)
        else:
            self._commit_next(attempt, standpoint)

    def _may_go_on(self, attempt: Attempt, standpoint: Standpoint) -> bool:
        """Count failures that come again and again, and stop the job if there are too many."""
        failures = self._failures
        failures.stopped_at(standpoint.clock)
        if attempt.cause == "death" and (attempt.was_formed or standpoint.completed) and self._spec is not None:
            failures.deaths.append(", ".join(attempt.lost))
            if len(failures.deaths) >= self._spec.max_step_failures:
                reason = (
                    f"step {self._instances.step_of(attempt.members)} was broken {len(failures.deaths)} times in a row "
                    f"by the death of {'; '.join(failures.deaths)}: look there for a crash or for too little memory"
                )
                self._end(Stop(graceful=False, reason=reason))
        elif attempt.cause == "link":
            failures.num_link_errors += 1
            if failures.num_link_errors >= MAX_FRUITLESS:
                reason = f"communication failed {failures.num_link_errors} times without progress; {attempt.reason}"
                self._end(Stop(graceful=False, reason=reason))
        return self._over is None

    def _commit_start(self, attempt: Attempt, standpoint: Standpoint) -> None:
        spec = self._spec
        candidates = [name for name in attempt.members if self._instances[name].is_usable]
        seen = [self._instances[name].ready for name in candidates]
        checkpoints = [ready.checkpoint for ready in seen if ready is not None and ready.checkpoint is not None]
        checkpoint = max(checkpoints, key=lambda ref: (ref.step, ref.identifier), default=None)
        if self._needs_checkpoint and candidates and checkpoint is None:
            reason = (
                "the state of the job was lost with the instances that held it, and there is no complete checkpoint to "
                "go back to; set fallback_dir=... with a shorter interval, or use num_pipelines >= 2"
            )
            self._end(Stop(graceful=False, reason=reason, exit_code=EXIT_STATE_LOST))
            return
        plan = spec and decide_start(
            generation=attempt.generation,
            spec=spec,
            table=self._table,
            candidates=candidates,
            from_checkpoint=checkpoint is not None,
        )
        if not plan:
            self._attempt = None  # too few are left: wait for more
            self._interrupted = self._interrupted or attempt.urgent
            return
        if attempt.urgent:  # none of them waits as a spare would
            plan = replace(plan, layout=replace(plan.layout, order=_ranked(plan.layout.order, attempt.members)))
        order = list(plan.layout.order)
        commit = self._commit_of(attempt, standpoint, plan, fresh=order)
        if checkpoint is not None:
            kind = "rollback" if self._needs_checkpoint else "initial"
            commit = replace(commit, checkpoint=checkpoint, transfers=[], trainer_source=None, kind=kind)
        else:
            commit = replace(commit, trainer_source=order[0])
        self._checkpoint = checkpoint
        self._commit(attempt, commit)

    def _commit_next(self, attempt: Attempt, standpoint: Standpoint) -> None:
        spec = self._spec
        plan = spec and decide_next(
            generation=attempt.generation,
            spec=spec,
            table=self._table,
            standpoint=standpoint,
            leaving=[name for name in attempt.members if self._must_go(attempt, name)],
            num_spares=len(self._instances.usable(besides=attempt.members)),
            passengers_rank=attempt.urgent or not standpoint.at_boundary,
        )
        if plan:
            before = set(standpoint.active)
            entered = [name for name in plan.layout.order if name not in before]
            self._commit(attempt, self._commit_of(attempt, standpoint, plan, fresh=entered))
            return
        lacking = spec is not None and len(standpoint.layers) < spec.num_layers
        if lacking and standpoint.layout is not None:
            why = describe_missing(standpoint.layout, standpoint.layers)
            lost = f" ({', '.join(attempt.lost)} died)" if attempt.lost else ""
            self._roll_back(attempt, standpoint, f"{why}, and is lost{lost}")
        else:
            self._roll_back(attempt, standpoint, f"no configuration fits {len(standpoint.active)} instances")

    def _commit_of(self, attempt: Attempt, standpoint: Standpoint, plan: MigrationPlan, *, fresh: list[str]) -> Commit:
        ahead = [name for name in standpoint.active if attempt.acks[name].clock == standpoint.clock]
        return Commit(
            generation=attempt.generation,
            layout=plan.layout,
            clock=standpoint.clock,
            vote=standpoint.vote,
            rollback=False,
            transfers=[(transfer.layer, transfer.source, transfer.target) for transfer in plan.transfers],
            addresses=self._instances.addresses(attempt.members),
            fresh=fresh,
            trainer_source=next(iter(ahead), None),
            checkpoint=None,
            kind=plan.kind,
            reason=f"{attempt.reason}; {plan.reason}",
        )

    def _commit(self, attempt: Attempt, commit: Commit) -> None:
        spec = self._spec
        num_bytes = sum(spec.layer_bytes[layer] for layer, _, _ in commit.transfers) if spec is not None else 0
        if commit.checkpoint is not None and spec is not None:
            num_bytes = sum(spec.layer_bytes)
        attempt.commit = commit
        attempt.ranked = frozenset(attempt.order)
        self._suspicion, self._interrupted = None, False
        attempt.deadline = (
            self._now + max(3 * self.failure_timeout_s, MIN_FORMATION_TIMEOUT_S) + num_bytes / MIN_BYTES_PER_S
        )
        self._send_all(attempt.members, commit)
        # Members that were not taken in are spares again, unless they must hand something over.
        kept = {*self._active, *attempt.needed}
        attempt.members = [name for name in attempt.members if name in kept]
        self._record(
            "committed",
            generation=commit.generation,
            kind=commit.kind,
            layout=None if commit.layout is None else commit.layout.to_json(),
            clock=commit.clock,
            num_bytes=num_bytes,
            fresh=commit.fresh,
            checkpoint=None if commit.checkpoint is None else commit.checkpoint.identifier,
            checkpoint_step=None if commit.checkpoint is None else commit.checkpoint.step,
            ack_s=round(self._now - attempt.prepared_at, 4),
            reason=commit.reason,
        )

    def _try_complete(self, attempt: Attempt) -> None:
        if attempt.commit is None or attempt.commit.layout is None or len(attempt.formed) < len(attempt.ranked):
            return
        layout = attempt.commit.layout
        self._layout, self._active, self._attempt = layout, list(layout.order), None
        self._broken = self._suspicion = None
        self._started, self._needs_checkpoint = True, False
        for name in set(layout.order) & set(self._instances):  # what it stood at may be of before a return
            self._instances[name].operation, self._instances[name].stands_since = "", self._now
        self._waiting_since = self._first_ready_at = None
        self._say_what_is_lost(attempt)
        self._failures.num_late_formations = 0
        pause_s = max(item.pause_s for item in attempt.formed.values())
        self._record(
            "formed",
            generation=attempt.generation,
            kind=attempt.commit.kind,
            config=[layout.config.num_pipelines, layout.config.num_stages],
            pause_s=round(pause_s, 4),
            bytes_moved=sum(item.bytes_moved for item in attempt.formed.values()),
            total_s=round(self._now - attempt.prepared_at, 4),
        )
        self._note_past(attempt, attempt.commit)
        self._hand_over.formed(self._now, step=self._newest_step(), pause_s=pause_s)
        spares = len(self._spares())
        self._say(
            f"generation {attempt.generation}: running {layout.config} on {layout.config.num_instances} instances"
            + (f", {spares} spare" if spares else "")
        )

    def _note_past(self, attempt: Attempt, commit: Commit) -> None:
        """Remember what this reconfiguration took; a planner prices the next ones by it."""
        bytes_moved = sum(item.bytes_moved for item in attempt.formed.values())
        sizes = [] if self._spec is None else self._spec.layer_bytes
        self._history.formed(
            self._now,
            PastReconfiguration(
                kind=commit.kind,
                is_urgent=attempt.urgent,
                pause_s=max(item.pause_s for item in attempt.formed.values()),
                bytes_moved=bytes_moved,
                serial_bytes=bytes_moved * serial_share(commit.transfers, sizes),
            ),
        )

    # Going back.

    def _say_what_is_lost(self, attempt: Attempt) -> None:
        """Give the account of a completed return to a checkpoint."""
        commit = attempt.commit
        if commit is None or commit.checkpoint is None or commit.kind != "rollback":
            return
        checkpoint = commit.checkpoint
        num_lost = max(0, self._lost_at - checkpoint.step)
        self._record("restored", checkpoint=checkpoint.identifier, step=checkpoint.step, steps_lost=num_lost)
        self._say(f"went back to checkpoint {checkpoint.identifier}: {num_lost} steps are lost and done again")
        self._lost_at = 0
        self._progress = None
        for name in attempt.order:
            if name in self._instances:
                self._instances[name].step = checkpoint.step

    def _roll_back(self, attempt: Attempt, standpoint: Standpoint, reason: str) -> None:
        """Send all back to the newest checkpoint; first stop those that do not take part yet."""
        if self._spec is None or not self._spec.has_fallback:
            advice = "set fallback_dir=... so that the job can go back to a checkpoint, or use num_pipelines >= 2"
            self._end(Stop(graceful=False, reason=f"{reason}; {advice}", exit_code=EXIT_STATE_LOST))
            return
        others = [name for name in self._spares() if name not in attempt.members]
        if others:
            again = self._prepare(reason, members=[*attempt.members, *others], urgent=True, rollback=reason)
            again.joiners = frozenset([*others, *standpoint.fresh, *standpoint.donors])
            return
        commit = Commit(
            generation=attempt.generation,
            layout=None,
            clock=standpoint.clock,
            vote=standpoint.vote,
            rollback=True,
            transfers=[],
            addresses={},
            fresh=[],
            trainer_source=None,
            checkpoint=None,
            kind="rollback",
            reason=reason,
        )
        self._send_all(attempt.members, commit)
        self._note_lost_steps(attempt.members)
        self._record("rolled_back", generation=attempt.generation, step=self._lost_at, reason=reason)
        self._say(f"going back to the newest checkpoint: {reason}")
        for name in attempt.members:
            self._instances[name].ready = None
        self._wait_for_checkpoint()

    def _note_lost_steps(self, members: Iterable[str]) -> None:
        """Remember how far the job had come, for the account of what is lost."""
        reported = self._progress.step if self._progress is not None else 0
        self._lost_at = max(self._lost_at, reported, self._instances.step_of(members))

    def _wait_for_checkpoint(self) -> None:
        self._attempt = self._broken = self._layout = self._suspicion = None
        self._active = []
        self._needs_checkpoint = True
        self._waiting_since = self._now
        self._first_ready_at = None

    def _all_lost(self, reason: str) -> None:
        """Nobody is left of a generation."""
        self._broken = self._suspicion = None
        if self._stop is not None:
            self._over = "stopped"
            return
        if not self._started:
            self._layout, self._active = None, []  # nothing had been trained: start again with whoever comes
            return
        spares = self._spares()
        why = f"all instances that held the state of the job are gone ({reason})"
        if self._spec is None or not self._spec.has_fallback:
            advice = "set fallback_dir=... so that the job can go back to a checkpoint"
            self._end(Stop(graceful=False, reason=f"{why}; {advice}", exit_code=EXIT_STATE_LOST))
        elif spares:
            self._layout, self._active = None, []
            self._prepare(why, members=spares, joiners=spares, urgent=True, rollback=why)
        else:
            self._note_lost_steps(())
            self._record("rolled_back", generation=self._generation, step=self._lost_at, reason=why)
            self._say(f"going back to the newest checkpoint: {why}")
            self._wait_for_checkpoint()

    # Ends.

    def _is_idle(self) -> bool:
        """Whether ``fit`` has needed no step anywhere, as with ``max_epochs=0``."""
        since = self._first_idle_at
        if since is None or self._started or not all(item.finished for item in self._instances.values()):
            return False
        all_came = self._expected is not None and self._instances.num_names >= self._expected
        return all_came or self._now - since > START_WAIT_S

    def _all_finished(self) -> bool:
        return bool(self._active) and all(self._instances[name].finished for name in self._active)

    def _finish(self) -> None:
        self._over = "done"
        self._attempt = self._broken = self._suspicion = None
        self._record("done", generation=self._generation, step=self._progress.step if self._progress else None)
        self._say("the job is finished")
        known = {name: self._instances[name] for name in self._instances}
        self._pulling = {name for name, item in known.items() if item.ready is not None and not item.finished}
        num_bytes = sum(self._spec.layer_bytes) * len(self._pulling) if self._spec is not None else 0
        self._pull_deadline = self._now + max(self.failure_timeout_s, MIN_ACK_TIMEOUT_S) + num_bytes / MIN_BYTES_PER_S
        for name in self._instances:
            self._dismiss(name)

    def _end(self, stop: Stop, *, spare: str | None = None) -> None:
        """Stop the job; only a graceful stop of a running job goes on until all have finished."""
        self._stop = stop
        self._record("stopped", graceful=stop.graceful, reason=stop.reason, exit_code=stop.exit_code)
        self._say(f"stopping: {stop.reason}")
        self._send_all([name for name in self._instances if name != spare], stop)
        if not stop.graceful:
            self._over = "stopped"
            self._attempt = self._broken = self._suspicion = None


def _ranked(order: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Return names by rank, with others behind."""
    return tuple(dict.fromkeys([*order, *others]))
