"""The records that the coordinator keeps: instances, and the attempt to form the next generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_parcae.control.messages import Ack, Commit, Formed, Hello, Ready

Cause = Literal["death", "link", "formation"]


@dataclass(slots=True)
class Instance:
    """A living instance.

    Attributes:
        hello: How it introduced itself.
        order: How many joined before.
        last_seen: When its newest message came.
        ready: Its newest Ready; None while it warms up.
        leaving: Whether it has a notice.
        leaves_at: When it will be taken away, if known.
        released: Whether it has been told to leave.
        finished: Whether its ``fit`` is over.
        clock: Votes behind it, by its newest heartbeat.
        step: Optimizer steps behind it, by its newest heartbeat.
        operation: What it does before its next vote, by its newest heartbeat; empty between two operations.
        stands_since: When a heartbeat first showed this clock and operation.
        stands_until: When the newest heartbeat showed them.
    """

    hello: Hello
    order: int
    last_seen: float
    ready: Ready | None = None
    leaving: bool = False
    leaves_at: float | None = None
    released: bool = False
    finished: bool = False
    clock: int = 0
    step: int = 0
    operation: str = ""
    stands_since: float = 0.0
    stands_until: float = 0.0

    def stand(self, now: float, clock: int, operation: str) -> None:
        """Note what a heartbeat says of its main thread."""
        if (clock, operation) != (self.clock, self.operation):
            self.clock, self.operation, self.stands_since = clock, operation, now
        self.stands_until = now

    @property
    def is_usable(self) -> bool:
        """Whether it can be given work that lasts."""
        return self.ready is not None and not self.leaving and not self.released

    def describe(self, now: float) -> dict[str, Any]:
        """Return what ``parcae status`` shows."""
        return {
            "host": self.hello.host,
            "pid": self.hello.pid,
            "incarnation": self.hello.incarnation,
            "order": self.order,
            "ready": self.ready is not None,
            "finished": self.finished,
            "leaving": self.leaving,
            "leaves_in_s": None if self.leaves_at is None else round(self.leaves_at - now, 3),
            "released": self.released,
            "clock": self.clock,
            "step": self.step,
            "silent_s": round(now - self.last_seen, 3),
        }


@dataclass(slots=True)
class Attempt:
    """An attempt to form a generation: from its Prepare until all have formed it, or it is broken.

    Attributes:
        generation: Its number.
        urgent: Whether members stop at once.
        reason: Why it is made, for people.
        members: Who must stop for it and is alive; the active ones first, by rank.
        asked: Its members as a set, for quick look-ups, until it is committed.
        joiners: Those members that enter the job with it.
        going: Active members with a notice that give their places away with it, though they are not due yet.
        prepared_at: When the Prepare was sent.
        cause: What broke the generation before, if something did.
        lost: Who died, for ``cause == "death"``.
        was_formed: Whether the broken generation was running; if not, it broke while it formed.
        rollback: Why all must go back to a checkpoint, if they must.
        acks: Who has stopped, and where.
        first_stopped_at: When the first active member stopped.
        all_active_stopped_at: When the last active member stopped.
        commit: The Commit that was sent.
        ranked: The committed layout's members; empty before.
        deadline: When all must have formed it.
        formed: Who has formed it.
    """

    generation: int
    urgent: bool
    reason: str
    members: list[str]
    asked: frozenset[str]
    joiners: frozenset[str]
    prepared_at: float
    cause: Cause | None = None
    lost: list[str] = field(default_factory=list)
    was_formed: bool = False
    going: frozenset[str] = frozenset()
    rollback: str | None = None
    acks: dict[str, Ack] = field(default_factory=dict)
    first_stopped_at: float | None = None
    all_active_stopped_at: float | None = None
    commit: Commit | None = None
    ranked: frozenset[str] = frozenset()
    deadline: float = 0.0
    formed: dict[str, Formed] = field(default_factory=dict)

    @property
    def order(self) -> tuple[str, ...]:
        """The committed layout's members by rank."""
        return self.commit.layout.order if self.commit is not None and self.commit.layout is not None else ()

    @property
    def is_forming(self) -> bool:
        """Whether the Commit has been sent."""
        return self.commit is not None

    @property
    def needed(self) -> frozenset[str]:
        """Without whom it cannot succeed: once it is committed, the layout's members and whoever serves state."""
        if self.commit is None:
            return frozenset(self.members)
        donors = {source for _, source, _ in self.commit.transfers}
        if self.commit.fresh and self.commit.trainer_source is not None:
            donors.add(self.commit.trainer_source)
        return self.ranked | donors

    def needs(self, name: str) -> bool:
        """Whether it cannot succeed without an instance."""
        return name in self.needed
