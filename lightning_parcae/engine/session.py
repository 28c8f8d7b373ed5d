"""An instance's part in the job: votes, repairs, and the formation of generations.

A *vote* is the one point where the members of a generation meet: an all-gather of small JSON payloads. The *clock*
counts the votes since the start of the job. Control flow is the same on every member, so the clock names the point
that a member has reached, and if anybody has completed vote M, everybody had entered it.

Everything that can be broken by a death is an *operation*: some work, then a vote (:meth:`Session.run`). If the
generation breaks before the vote completes, the work is undone and done again in the next generation. If another
member did complete it, its result arrives with the COMMIT and is taken over: the survivors never disagree.

What it can fail with:

* :class:`GenerationBrokenError` never leaves :meth:`Session.run` or :meth:`Session.boundary`.
* :class:`RollbackRequired` unwinds the training loop: state was lost and comes back from a checkpoint.
* :class:`LeaveJob` ends the script with exit code 0 (a notice was obeyed, or the job is over).
* ``FencedError``, ``JobFailedError``, ``MembershipError`` end it with an error.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from lightning_parcae.control.agent import Agent
from lightning_parcae.control.messages import (
    Ack,
    CheckpointRef,
    Commit,
    Finished,
    Formed,
    JobFinished,
    JobSpec,
    Prepare,
    Ready,
    Release,
    Suspect,
)
from lightning_parcae.engine.groups import Groups, RendezvousStore
from lightning_parcae.engine.state import drop_layer, is_resident, layer_state, load_layer
from lightning_parcae.engine.transfer import StateClient, StateServer
from lightning_parcae.errors import GenerationBrokenError, MembershipError, MigrationError
from lightning_parcae.planning.job_profile import LinkSpeed
from lightning_parcae.planning.layout import Layout
from lightning_parcae.testing import reach

log = logging.getLogger(__name__)

Payload = dict[str, Any]

FINAL = 1 << 62
"""Stands for the generation when peers ask for the state at the end of ``fit``."""


class RollbackRequired(BaseException):
    """State was held by nobody who survived; the members start again from the newest checkpoint."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class LeaveJob(SystemExit):
    """This instance leaves the job; the script ends with ``code`` (0 after a notice)."""

    def __init__(self, reason: str, code: int = 0) -> None:
        super().__init__(code)
        self.reason = reason


class JobOver(BaseException):
    """``fit`` ended while this instance waited as a spare; it now holds the final state."""


class Host(Protocol):
    """The trainer around a session."""

    @property
    def layers(self) -> Sequence[nn.Module]:
        """Every layer of the pipelined module, resident or not."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers whose state belongs to the layers."""

    def pack_trainer(self) -> Any:
        """Return everything a joiner needs beside the layers, as a tree."""

    def inject_trainer(self, tree: Any) -> None:
        """Take over :meth:`pack_trainer`'s tree; called at a step boundary."""

    def restore(self, checkpoint: CheckpointRef, layers: Sequence[int]) -> None:
        """Take over the trainer state and the given layers from a checkpoint."""

    def enter(self, layout: Layout, groups: Groups | None, reason: str, pause_s: float) -> None:
        """Begin to work in a new generation: ranks, loaders, the pipeline."""

    def step_aside(self) -> None:
        """Give up the rank: this instance is a spare now, or about to leave."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a session needs to talk to its peers.

    Attributes:
        name: This instance.
        job_id: The job; part of every handshake.
        incarnation: This life of the instance.
        secret: Job secret.
        bind_host: Address that the state server, the store and gloo bind to.
        failure_timeout_s: Time without a sign of life after which a peer counts as gone, in seconds.
    """

    name: str
    job_id: str
    incarnation: str
    secret: bytes
    bind_host: str
    failure_timeout_s: float


class SoloSession:
    """One process, one pipeline, one stage: nothing to agree on."""

    solo = True
    generation = 1
    joined = True

    def __init__(self, num_layers: int) -> None:
        self.clock = 0
        self.layout = Layout(1, (("solo",),), ("solo",), (0, num_layers))

    def run(self, name: str, attempt: Callable[[], Payload], restore: Callable[[], None]) -> list[Payload]:
        """Do an operation; see :meth:`Session.run`."""
        payload = attempt()
        self.clock += 1
        return [payload]


class Session:
    """Membership of one instance, from its first step boundary to the end of ``fit``.

    Args:
        endpoint: Names, secrets and addresses.
        agent: Connected control client.
        host: The trainer around it.
    """

    solo = False

    def __init__(self, endpoint: Endpoint, agent: Agent, host: Host) -> None:
        self._endpoint = endpoint
        self._agent = agent
        self._host = host
        self.clock = 0
        self.layout: Layout | None = None
        self.joined = False
        self.stop_requested = False
        self.bytes_moved = 0
        self.link: LinkSpeed | None = None  # between the members, as the newest probe has found it
        self._generation = 0
        self._resident: set[int] = set()
        self._groups: Groups | None = None
        self._pending: Commit | None = None
        self._planned = 0  # newest generation that every member has seen announced
        self._acked = 0
        self._last_vote: str | None = None
        self._addresses: dict[str, tuple[str, str]] = {}
        self._pause_started: float | None = None
        self._ready_sent = False
        self._has_finished = False
        # released by the agent's thread
        self._lock = threading.Lock()
        self._interrupt = threading.Event()
        self._client: StateClient | None = None
        # read by the state server's threads
        self._serving = threading.Condition()
        self._served_generation = 0
        self._served_trainer: Any = None
        self._store = RendezvousStore(endpoint.bind_host)
        self._server = StateServer(
            self._provide, bind_host=endpoint.bind_host, secret=endpoint.secret, job_id=endpoint.job_id
        )

    # ------------------------------------------------------------------ what others may ask

    @property
    def generation(self) -> int:
        """Version of the membership this instance works in."""
        return self._generation

    @property
    def rank(self) -> int:
        """Rank in the present layout."""
        assert self.layout is not None
        return self.layout.rank_of(self._endpoint.name)

    @property
    def place(self) -> tuple[int, int] | None:
        """``(pipeline, stage)`` in the present layout; None for passengers and spares."""
        return None if self.layout is None or not self.joined else self.layout.place_of(self._endpoint.name)

    @property
    def stop_code(self) -> int:
        """Exit code that a graceful stop asks for; 0 without one."""
        stop = self._agent.stop_request
        return 0 if stop is None else stop.exit_code

    @property
    def resident(self) -> frozenset[int]:
        """Layers held here."""
        return frozenset(self._resident)

    def hold_all(self) -> None:
        """Declare that every layer is held here (the state after set-up)."""
        self._resident = set(range(len(self._host.layers)))

    # ------------------------------------------------------------------ operations

    def run(self, name: str, attempt: Callable[[], Payload], restore: Callable[[], None]) -> list[Payload]:
        """Do an operation until its vote has completed.

        Args:
            name: What it is. Members that meet in one vote with different operations have run different code.
            attempt: The work; returns this member's payload. Called again after each broken generation, in the new
                layout.
            restore: Undo what a broken attempt has done.

        Returns:
            The payloads of all members by rank.

        Raises:
            MembershipError: If the members have run different code.
        """
        outer = self._agent.operation
        try:
            while True:
                try:
                    self._form_pending()
                    self._agent.operation = name
                    payload = attempt()
                    reach("vote")
                    return self._vote(name, payload)
                except GenerationBrokenError as error:
                    adopted = self._repair(error)
                    if adopted is not None:
                        return adopted
                    restore()
        finally:
            self._agent.operation = outer

    def _vote(self, name: str, payload: Payload) -> list[Payload]:
        """Meet the other members; see the module's docstring."""
        groups = self._groups
        if groups is None:
            raise GenerationBrokenError("this generation has been torn down")
        stop = self._agent.stop_request
        payload["operation"] = name
        payload["seen"] = self._agent.prepare_seen
        payload["stop"] = stop is not None and stop.graceful
        texts = [part.decode() for part in groups.world.all_gather_bytes(json.dumps(payload).encode())]
        return self._complete_vote("[" + ",".join(texts) + "]")

    def _complete_vote(self, text: str) -> list[Payload]:
        payloads: list[Payload] = json.loads(text)
        self.clock += 1
        self._last_vote = text
        self._agent.operation = ""  # before the clock: a heartbeat in between must not show it with the next vote
        self._agent.clock = self.clock
        names = sorted({str(payload["operation"]) for payload in payloads})
        if len(names) > 1:
            raise MembershipError(
                f"the instances have come apart: one runs {names[0]}, another {names[1]}. Something that steers the "
                "loop differs between them: a callback's decision, trainer.should_stop, or a monitored value that is "
                "not logged with self.log"
            )
        self._planned = max(self._planned, min(int(payload["seen"]) for payload in payloads))
        self.stop_requested = self.stop_requested or any(payload["stop"] for payload in payloads)
        return payloads

    # ------------------------------------------------------------------ breaking and repairing

    def on_urgent(self, generation: int) -> None:
        """Release whatever is blocked; called in the agent's thread.

        Args:
            generation: The generation that replaces the broken one; -1 ends the job.
        """
        with self._lock:
            groups, client = self._groups, self._client
            if generation >= 0 and generation <= self._generation:
                return
            self._interrupt.set()
        if client is not None:
            client.cancel()
        if groups is not None:
            groups.abort()

    def _repair(self, error: GenerationBrokenError) -> list[Payload] | None:
        """Wait for the next generation after a break.

        Returns:
            The result of the vote that others completed, or None if the operation must be done again.
        """
        if self._pause_started is None:
            self._pause_started = time.monotonic()
        log.info("generation %d is broken at clock %d: %s", self._generation, self.clock, error)
        newest = self._agent.newest_prepare
        if newest is None or not newest.urgent or newest.generation <= self._generation:
            self._agent.send(Suspect(generation=self._generation, error=str(error)))
        self._tear_down()
        return self._accept(self._await_commit(at_boundary=False))

    def _tear_down(self) -> None:
        with self._lock:
            groups, self._groups = self._groups, None
        if groups is not None:
            groups.abort()
            groups.close()

    def _await_commit(self, *, at_boundary: bool) -> Commit:
        """Acknowledge announcements until one of them is committed."""

        def news(agent: Agent) -> Prepare | Commit | JobFinished | None:
            if agent.job_finished is not None:
                return agent.job_finished
            return self._next_announcement(agent, at_boundary=at_boundary)

        while True:
            item = self._agent.wait(news, timeout_s=None)
            if isinstance(item, Commit):
                return item
            if isinstance(item, JobFinished):
                raise JobOver  # the others have completed the last vote: this member had entered it
            assert isinstance(item, Prepare)
            self._acknowledge(item, at_boundary=at_boundary)

    def _next_announcement(self, agent: Agent, *, at_boundary: bool) -> Prepare | Commit | None:
        """Return an announcement that waits for this member's answer, or the commit of the one it has answered."""
        prepare = agent.newest_prepare
        if prepare is not None and prepare.generation > max(self._acked, self._generation):
            # away from a boundary, only an urgent one may be joined: a planned one waits for its boundary
            if (at_boundary or prepare.urgent) and self._endpoint.name in prepare.members:
                return prepare
        return agent.commit_of(self._acked) if self._acked > self._generation else None

    def _acknowledge(self, prepare: Prepare, *, at_boundary: bool) -> None:
        self._acked = prepare.generation
        reach("acknowledge")
        self._agent.send(
            Ack(
                generation=prepare.generation,
                clock=self.clock,
                vote=self._last_vote,
                layers=sorted(self._resident),
                at_boundary=at_boundary,
                step=self._agent.step,
            )
        )

    def _accept(self, commit: Commit) -> list[Payload] | None:
        """Take note of a commit; it is formed when the next operation starts."""
        if commit.rollback:
            self._generation = commit.generation
            raise RollbackRequired(commit.reason)
        self._pending = commit
        if commit.clock == self.clock:
            return None
        if commit.clock == self.clock + 1 and commit.vote is not None:
            return self._complete_vote(commit.vote)
        raise MembershipError(
            f"the members continue at vote {commit.clock}, but this instance has completed {self.clock}; "
            "it cannot follow and leaves the job"
        )

    # ------------------------------------------------------------------ formation

    def _form_pending(self) -> None:
        """Form the committed generation, and the ones that replace it if members die meanwhile."""
        while self._pending is not None:
            commit, self._pending = self._pending, None
            self._form_or_repair(commit)

    def _form_or_repair(self, commit: Commit) -> None:
        try:
            self._form(commit)
        except (GenerationBrokenError, MigrationError) as error:
            broken = error if isinstance(error, GenerationBrokenError) else GenerationBrokenError(str(error))
            if self._repair(broken) is not None:
                self.joined = True  # the formation was completed by another member: this one holds all it needs

    def _form(self, commit: Commit) -> None:
        assert commit.layout is not None
        layout = commit.layout
        name = self._endpoint.name
        with self._lock:
            # from here on only what replaces this generation may interrupt
            self._generation = commit.generation
            self._interrupt.clear()
            client = self._client = self._new_client()
        self._raise_if_superseded()
        self._addresses = dict(commit.addresses)
        try:
            reach("transfer")
            self._gather_state(commit, layout, client)
            reach("formation")
            groups = Groups.form(
                layout,
                name,
                store_address=self._addresses[layout.order[0]][1],
                bind_host=self._endpoint.bind_host,
                timeout_s=self._patience_s,
                abort_event=self._interrupt,
                failure_timeout_s=self._endpoint.failure_timeout_s,
            )
        finally:
            with self._lock:
                self._client = None
        with self._lock:
            self._groups = groups
        self._raise_if_superseded()
        payload: Payload = {"formed": commit.generation}
        if commit.fresh and (link := groups.probe_link()) is not None:  # there are links that nobody knows yet
            payload["link"] = [link.latency_s, link.bytes_per_s]
        payloads = self._vote("formation", payload)
        self.link = LinkSpeed.typical([LinkSpeed(*item["link"]) for item in payloads if "link" in item]) or self.link
        reach("settle")
        self._settle(commit, layout, groups)

    @property
    def _patience_s(self) -> float:
        """How long to wait for members that come later to a formation, in seconds.

        A member that has completed one vote more may still be busy in the user's code between two operations. As long
        as the coordinator waits; it interrupts if somebody dies.
        """
        return max(3 * self._endpoint.failure_timeout_s, 30.0)

    def _raise_if_superseded(self) -> None:
        stop = self._agent.stop_request
        if self._agent.fenced is not None or (stop is not None and not stop.graceful):
            raise GenerationBrokenError("the job ends")
        newest = self._agent.newest_prepare
        if newest is not None and newest.urgent and newest.generation > self._generation:
            raise GenerationBrokenError(f"generation {newest.generation} replaces this one")

    def _gather_state(self, commit: Commit, layout: Layout, client: StateClient) -> None:
        """Fetch what this instance needs and serve what the others need."""
        name = self._endpoint.name
        mine = layout.layers_of(name)
        fresh = name in commit.fresh and not self.joined
        if fresh:
            self.clock = commit.clock
            self._agent.clock = self.clock
            # what a fresh member holds is its own start-up state; only the first member's is the job's
            self._resident = set()
            if commit.kind == "initial" and commit.trainer_source == name:
                self.hold_all()
        self._serve(commit.generation, pack_trainer=commit.trainer_source == name and len(commit.fresh) > 0)
        if commit.checkpoint is not None:
            self._host.restore(commit.checkpoint, list(mine))
            self._resident = set(mine)
            return
        timeout_s = self._patience_s
        if fresh and commit.trainer_source is not None and commit.trainer_source != name:
            source = self._addresses[commit.trainer_source][0]
            self._host.inject_trainer(client.fetch(source, "trainer", commit.generation, timeout_s))
        wanted = [(layer, source) for layer, source, target in commit.transfers if target == name]
        wanted = [(layer, source) for layer, source in wanted if layer not in self._resident]
        requests = [(self._addresses[source][0], f"layer:{layer}") for layer, source in wanted]
        trees = client.fetch_many(requests, commit.generation, timeout_s) if requests else []
        for (layer, _), tree in zip(wanted, trees, strict=True):
            self._load(layer, tree)
        missing = set(mine) - self._resident
        if missing:
            raise MigrationError(f"generation {commit.generation} brings no source for the layers {sorted(missing)}")

    def _load(self, layer: int, tree: Any) -> None:
        self.bytes_moved += load_layer(self._host.layers[layer], self._host.optimizers, tree, copy=False)
        self._resident.add(layer)

    def _settle(self, commit: Commit, layout: Layout, groups: Groups) -> None:
        """Drop what now belongs to others and begin to work."""
        self.layout = layout
        self.joined = True
        self._planned = max(self._planned, commit.generation)
        mine = set(layout.layers_of(self._endpoint.name))
        for index, layer in enumerate(self._host.layers):
            if index not in mine and is_resident(layer):
                drop_layer(layer, self._host.optimizers)
        self._resident = mine
        pause_s = 0.0 if self._pause_started is None else time.monotonic() - self._pause_started
        self._pause_started = None
        self._stop_serving()
        self._host.enter(layout, groups, commit.reason, pause_s)
        self._agent.send(Formed(generation=commit.generation, pause_s=pause_s, bytes_moved=self.bytes_moved))
        self.bytes_moved = 0

    # ------------------------------------------------------------------ serving state

    def _serve(self, generation: int, *, pack_trainer: bool = False) -> None:
        tree = self._host.pack_trainer() if pack_trainer else None
        with self._serving:
            self._served_generation, self._served_trainer = generation, tree
            self._serving.notify_all()

    def _stop_serving(self) -> None:
        with self._serving:
            self._served_generation, self._served_trainer = 0, None

    def _provide(self, key: str, generation: int) -> Any:
        """Answer a peer; called in a thread of the state server.

        The peer may be faster than this member, whose main thread is still on its way to the formation.
        """
        with self._serving:
            self._serving.wait_for(lambda: self._served_generation >= generation, timeout=self._patience_s)
            if self._served_generation != generation:
                raise LookupError(
                    f"{self._endpoint.name} serves generation {self._served_generation}, not {generation}"
                )
            if key == "trainer":
                if self._served_trainer is None:
                    raise LookupError(f"{self._endpoint.name} is not the source of the trainer state")
                return self._served_trainer
        layer = int(key.removeprefix("layer:"))
        if layer not in self._resident:
            raise LookupError(f"{self._endpoint.name} does not hold layer {layer}")
        return layer_state(self._host.layers[layer], self._host.optimizers)

    def _new_client(self) -> StateClient:
        endpoint = self._endpoint
        return StateClient(secret=endpoint.secret, job_id=endpoint.job_id, incarnation=endpoint.incarnation)

    def fetch_layers(self, layers: Sequence[int]) -> dict[int, Any]:
        """Fetch layers that other members hold, inside an operation of which they are a part.

        Raises:
            GenerationBrokenError: If a holder does not answer.
        """
        assert self.layout is not None
        holder = {
            layer: self.layout.grid[0][stage]
            for stage in range(self.layout.config.num_stages)
            for layer in self.layout.layers_of_stage(stage)
        }
        with self._lock:
            client = self._client = self._new_client()
        self._raise_if_superseded()
        try:
            requests = [(self._addresses[holder[layer]][0], f"layer:{layer}") for layer in layers]
            trees = client.fetch_many(requests, self._generation, self._endpoint.failure_timeout_s)
        except MigrationError as error:
            raise GenerationBrokenError(str(error)) from error
        finally:
            with self._lock:
                self._client = None
        return dict(zip(layers, trees, strict=True))

    def serve_layers(self) -> None:
        """Let the other members fetch layers until the operation's vote; see :meth:`fetch_layers`."""
        self._serve(self._generation)

    # ------------------------------------------------------------------ the step boundary

    def boundary(self, ready: Callable[[], tuple[JobSpec, CheckpointRef | None]]) -> None:
        """Meet the changes of the membership between two steps.

        Returns when this instance is a member that has work to do.

        Args:
            ready: Describes the job; called when this instance has no place yet and asks for one.
        """
        self._form_pending()
        if self.joined and self._planned > self._generation:
            self._pause_started = time.monotonic()
            self._tear_down()
            commit = self._await_commit(at_boundary=True)
            if commit.rollback or _is_in(commit, self._endpoint.name):
                self._accept(commit)
                self._form_pending()
            else:
                self._step_aside(commit)
        while not self.joined:
            self._wait_for_place(ready)

    def _step_aside(self, commit: Commit) -> None:
        """Become a spare, or leave after a notice; until then serve the state that others need from here."""
        self._generation = commit.generation
        self.joined = False
        self._pause_started = None
        self._serve(commit.generation, pack_trainer=commit.trainer_source == self._endpoint.name)
        self._ready_sent = True  # the coordinator knows this spare
        self._host.step_aside()

    def _wait_for_place(self, ready: Callable[[], tuple[JobSpec, CheckpointRef | None]]) -> None:
        name = self._endpoint.name
        if not self._ready_sent:
            self._ready_sent = True
            spec, checkpoint = ready()
            self._agent.send(
                Ready(
                    spec=spec,
                    state_address=self._server.address,
                    store_address=self._store.address,
                    checkpoint=checkpoint,
                )
            )

        def news(agent: Agent) -> Prepare | Commit | Release | JobFinished | None:
            if agent.released is not None:
                return agent.released
            stop = agent.stop_request
            if stop is not None and stop.graceful:
                return Release(stop.reason)
            if agent.job_finished is not None:
                return agent.job_finished
            return self._next_announcement(agent, at_boundary=True)

        reach("ready")
        item = self._agent.wait(news, timeout_s=None)
        if isinstance(item, Release):
            raise LeaveJob(item.reason, self.stop_code)
        if isinstance(item, JobFinished):
            self._take_final_state(item)
            raise JobOver
        if isinstance(item, Prepare):
            self._acknowledge(item, at_boundary=True)
            return
        assert isinstance(item, Commit)
        if item.rollback or _is_in(item, name):
            self._accept_place(item)
        else:
            self._step_aside(item)

    def _accept_place(self, commit: Commit) -> None:
        if commit.rollback:
            self._generation = commit.generation
            raise RollbackRequired(commit.reason)
        if not self.joined:
            self.clock = commit.clock
        self._pending = commit
        self._form_pending()

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """Collect the whole model on this member and tell the coordinator that ``fit`` is over.

        An operation of all members.
        """

        def attempt() -> Payload:
            reach("finish")
            self.serve_layers()
            missing = sorted(set(range(len(self._host.layers))) - self._resident)
            for layer, tree in self.fetch_layers(missing).items() if missing else ():
                # not resident as far as the layout goes: a peer that asks is sent to the holder
                load_layer(self._host.layers[layer], self._host.optimizers, tree, copy=False)
            return {"finished": True}

        # JobOver: the others have completed this very vote, so everything was here when it was entered
        with contextlib.suppress(JobOver):
            self.run("finish", attempt, lambda: None)
        self.hold_all()
        self._tear_down()
        self._serve(FINAL, pack_trainer=True)
        self._has_finished = True
        self._agent.send(Finished())

    def wait_for_spares(self) -> None:
        """Keep serving the final state until the coordinator says that the spares have it; it bounds the time.

        Returns at once where there is nothing to serve, since ``fit`` has needed no batch or this is a spare.
        """
        if not self._has_finished:
            if self.layout is None and self._agent.job_finished is None:
                self._agent.send(Finished())  # nobody else has more to do than this instance had
            return

        def news(agent: Agent) -> bool | None:
            return True if agent.released is not None or agent.job_finished is not None else None

        try:
            self._agent.wait(news, timeout_s=None)
        except MembershipError:
            log.info("the coordinator has gone; the job is over for this instance anyway")

    def _take_final_state(self, finished: JobFinished) -> None:
        addresses = [finished.addresses[holder][0] for holder in finished.holders]
        last: MigrationError | None = None
        for address in addresses:
            client = self._new_client()
            try:
                self._host.inject_trainer(client.fetch(address, "trainer", FINAL, self._endpoint.failure_timeout_s))
                layers = range(len(self._host.layers))
                trees = client.fetch_many(
                    [(address, f"layer:{layer}") for layer in layers],
                    FINAL,
                    self._endpoint.failure_timeout_s,
                )
            except MigrationError as error:
                last = error
                continue
            for layer, tree in zip(layers, trees, strict=True):
                self._load(layer, tree)
            self._agent.send(Finished())
            return
        raise MigrationError(f"none of {list(finished.holders)} served the final state: {last}")

    def begin_again(self) -> None:
        """Forget all state after a rollback; the instance warms up and asks for a place again."""
        self._tear_down()
        self._stop_serving()
        self.joined = False
        self.layout = None
        self._resident = set()
        self._pending = None
        self._pause_started = None
        self._ready_sent = False
        self._last_vote = None

    def close(self) -> None:
        """Release every socket and thread."""
        self._tear_down()
        self._server.close()
        self._store.close()


def _is_in(commit: Commit, name: str) -> bool:
    return commit.layout is not None and name in commit.layout.order
