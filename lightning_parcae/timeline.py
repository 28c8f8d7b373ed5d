"""What the coordinator's timeline says: the state of the job at any moment, and a line for people about each event.

The timeline is a sequence of JSON objects ``{"time": unix seconds, "event": name, ...}``. The supervisor reads them as
they happen, reports read them from ``timeline.jsonl``. Pure: no clock, no I/O but :func:`read_timeline`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_parcae.planning.layout import Layout

Cause = Literal["start", "death", "hang", "link", "notice", "join", "change", "rollback"]
Level = Literal["info", "good", "warn", "bad"]
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """A line for people."""

    text: str
    level: Level = "info"


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """A generation that was formed.

    Attributes:
        time: When it was complete, unix seconds.
        generation: Its number.
        cause: Why it was formed: ``start``, ``death`` (a connection closed), ``hang`` (nothing was heard), ``link`` (a
            communication failed, nobody died), ``notice``, ``join``, ``change`` (of the plan) or ``rollback``.
        kind: Kind of migration: ``initial``, ``none``, ``intra_stage``, ``inter_stage``, ``pipeline`` or ``rollback``.
        layout: Who does what.
        pause_s: Longest time that a member stood still, in seconds.
        bytes_moved: State that was moved, in bytes.
        reason: Why, for people.
        step: Optimizer steps made before.
    """

    time: float
    generation: int
    cause: Cause
    kind: str
    layout: Layout
    pause_s: float
    bytes_moved: int
    reason: str
    step: int


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job was stopped before its end.

    Attributes:
        reason: Why, for people.
        exit_code: Exit code of the job.
        graceful: Whether the instances end as after a ``fit`` that is over.
        traceback: Of the failure that stopped it, if it was one.
    """

    reason: str
    exit_code: int
    graceful: bool
    traceback: str | None = None


@dataclass(slots=True)
class JobView:
    """The state of a job, kept by :meth:`take`.

    Attributes:
        layout: Layout of the newest generation that was committed.
        reconfigurations: Generations that were formed, in order.
        joined: Every instance that has connected.
        ready: Instances that are warm, and live.
        dead: Instances that were declared dead.
        gone: Instances that died, have left, or have been told to leave.
        leaving: Instances with a notice, and the grace if it is known.
        step: Newest optimizer step.
        epoch: Its data epoch.
        is_settled: Whether the newest generation is formed and nothing is known that will change it.
        is_finished: Whether ``fit`` is over.
        stop: How the job was stopped, if it was.
        num_rollbacks: How often all have gone back to a checkpoint.
        checkpoint_step: Optimizer steps in the newest fallback checkpoint; None before the first.
    """

    layout: Layout | None = None
    reconfigurations: list[Reconfiguration] = field(default_factory=list)
    joined: set[str] = field(default_factory=set)
    ready: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    leaving: dict[str, float | None] = field(default_factory=dict)
    step: int = 0
    epoch: int = 0
    is_settled: bool = False
    is_finished: bool = False
    stop: Ending | None = None
    num_rollbacks: int = 0
    checkpoint_step: int | None = None
    _committed: Record | None = field(default=None, init=False)
    _prepared: Record | None = field(default=None, init=False)
    _died_how: list[Cause] = field(default_factory=list, init=False)
    _traceback: str | None = field(default=None, init=False)

    @property
    def order(self) -> tuple[str, ...]:
        """Members of the newest generation, by rank."""
        return () if self.layout is None else self.layout.order

    @property
    def rank0(self) -> str | None:
        """The instance that logs and shows progress; None before the first generation."""
        return self.order[0] if self.order else None

    @property
    def spares(self) -> set[str]:
        """Ready instances without a place."""
        placed = set() if self.layout is None else {name for row in self.layout.grid for name in row}
        return self.ready - placed - set(self.leaving)

    @property
    def num_pipelines(self) -> int:
        """Pipelines of the newest generation, 0 before the first."""
        return 0 if self.layout is None else self.layout.config.num_pipelines

    def take(self, record: Record) -> Line | None:
        """Take in one event of the timeline.

        Returns:
            What to tell people about it, or None if nothing.
        """
        handler = _HANDLERS.get(str(record.get("event")))
        return None if handler is None else handler(self, record)

    def summary(self) -> str:
        """Return the outcome in half a sentence."""
        outcome = "finished" if self.is_finished else "ended" if self.stop is None else "stopped"
        changes = [item.pause_s for item in self.reconfigurations if item.cause != "start"]
        pauses = f", longest pause {max(changes):.2f} s" if changes else ""
        return f"{outcome} at step {self.step} after {len(changes)} reconfiguration(s){pauses}"

    def _on_connected(self, record: Record) -> Line | None:
        name = str(record["instance"])
        self.joined.add(name)
        self.dead.discard(name)
        self.gone.discard(name)
        return Line(f"{name} has connected and warms up") if self.layout is not None else None

    def _on_ready(self, record: Record) -> Line | None:
        name = str(record["instance"])
        self.ready.add(name)
        return Line(f"{name} is ready") if self.layout is not None else None

    def _on_refused(self, record: Record) -> Line | None:
        self.ready.discard(str(record["instance"]))
        return Line(f"{record['instance']} was refused: {record['reason']}", "bad")

    def _on_waiting(self, record: Record) -> Line | None:
        since = f", for {record['since_s']:.0f} s now" if record.get("since_s", 0.0) >= 1 else ""
        return Line(f"{record['reason']}{since}", "warn" if since else "info")

    def _on_notice(self, record: Record) -> Line | None:
        name, grace_s = str(record["instance"]), record.get("grace_s")
        self.leaving[name] = grace_s
        self.is_settled = False
        return Line(f"{name} has notice" + ("" if grace_s is None else f": {grace_s:g} s"), "warn")

    def _on_suspected(self, record: Record) -> Line | None:
        self.is_settled = False
        return None

    def _on_died(self, record: Record) -> Line | None:
        name, reason = str(record["instance"]), str(record["reason"])
        self._go(name)
        self.dead.add(name)
        self.is_settled = False
        self._died_how.append("death" if "connection" in reason else "hang")
        return Line(f"{name} died: {reason}", "warn")

    def _on_left(self, record: Record) -> Line | None:
        self._go(str(record["instance"]))
        return None

    def _on_released(self, record: Record) -> Line | None:
        self._go(str(record["instance"]))
        return Line(f"{record['instance']} leaves: {record['reason']}")

    def _go(self, name: str) -> None:
        self.gone.add(name)
        self.ready.discard(name)
        self.leaving.pop(name, None)

    def _on_prepared(self, record: Record) -> Line | None:
        self.is_settled = False
        self._prepared = record
        return None

    def _on_committed(self, record: Record) -> Line | None:
        self._committed = record
        if record.get("checkpoint_step") is not None:
            self.checkpoint_step = int(record["checkpoint_step"])
        if record.get("layout") is not None:
            before, self.layout = self.layout, Layout.from_json(record["layout"])
            if before is not None and before.order[0] != self.layout.order[0]:
                return Line(f"rank 0 moves from {before.order[0]} to {self.layout.order[0]}")
        return None

    def _on_formed(self, record: Record) -> Line | None:
        committed, layout = self._committed, self.layout
        if committed is None or layout is None or committed["generation"] != record["generation"]:
            return None  # the beginning of the timeline is missing
        change = Reconfiguration(
            time=float(record["time"]),
            generation=int(record["generation"]),
            cause=self._cause(committed, layout),
            kind=str(record["kind"]),
            layout=layout,
            pause_s=float(record["pause_s"]),
            bytes_moved=int(record["bytes_moved"]),
            reason=str((self._prepared or committed)["reason"]),
            step=self.step,
        )
        self.reconfigurations.append(change)
        self._died_how.clear()
        self.is_settled = not set(layout.order) & (set(self.leaving) | self.dead)
        names = " ".join(name for row in layout.grid for name in row)
        spares = " ".join(sorted(self.spares))
        text = f"generation {change.generation}: {layout.config} on {names}" + (f", spare {spares}" if spares else "")
        if change.cause == "start":
            return Line(text, "good")
        moved = f", {describe_bytes(change.bytes_moved)} moved" if change.bytes_moved else ""
        return Line(f"{text}; pause {change.pause_s:.2f} s{moved} ({change.reason})", "good")

    def _cause(self, committed: Record, layout: Layout) -> Cause:
        """Return why the generation that has been committed was formed."""
        if committed["kind"] == "rollback":
            return "rollback"
        if not self.reconfigurations:
            return "start"
        if self._died_how:
            return self._died_how[0]
        if self._prepared is not None and self._prepared["urgent"]:
            return "link"
        if set(self.reconfigurations[-1].layout.order) - set(layout.order):
            return "notice"
        return "join" if committed.get("fresh") else "change"

    def _on_rolled_back(self, record: Record) -> Line | None:
        self.is_settled = False
        self.num_rollbacks += 1
        return Line(f"going back to the newest checkpoint from step {self.step}: {record['reason']}", "bad")

    def _on_progress(self, record: Record) -> Line | None:
        self.step = int(record["step"])
        self.epoch = int(record.get("epoch", self.epoch))
        return None

    def _on_checkpoint(self, record: Record) -> Line | None:
        if record.get("step") is not None:
            self.checkpoint_step = int(record["step"])
        return None

    def _on_checkpoint_failed(self, record: Record) -> Line | None:
        return Line(f"the fallback checkpoint of step {record['step']} was not written: {record['error']}", "warn")

    def _on_failed(self, record: Record) -> Line | None:
        if self._traceback is None:
            self._traceback = str(record.get("traceback") or "")
        return None

    def _on_stopped(self, record: Record) -> Line | None:
        graceful = bool(record["graceful"])
        self.stop = Ending(str(record["reason"]), int(record["exit_code"]), graceful, self._traceback or None)
        return Line(f"the job stops: {self.stop.reason}", "warn" if graceful else "bad")

    def _on_done(self, record: Record) -> Line | None:
        self.is_finished = True
        self.step = int(record.get("step") or self.step)
        return None


_HANDLERS: dict[str, Callable[[JobView, Record], Line | None]] = {
    name.removeprefix("_on_"): handler for name, handler in vars(JobView).items() if name.startswith("_on_")
}


def read_timeline(path: Path) -> Iterator[dict[str, Any]]:
    """Read a ``timeline.jsonl``; a last line that was cut off is left out.

    Raises:
        ValueError: If another line is not a JSON object with a time and an event.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
            float(record["time"]), str(record["event"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not an event of a timeline: {line[:100]!r}") from error
        yield record


def describe_bytes(count: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
