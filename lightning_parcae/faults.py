"""What shall happen to the instances of a local job, and when: a script that reads as a sentence.

    FaultScript().kill("i2", at_step=12).notice("any", at_step=20, grace_s=30).add(2, at_s=45)

The supervisor carries it out. The module is pure: steps and seconds are told to it, and its choices are seeded.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from lightning_parcae.availability.trace import AvailabilityTrace

Action = Literal["kill", "stop", "cont", "notice", "add"]
_ACTIONS = get_args(Action)
_OPTIONS = ("at_step", "at_s", "min_pipelines", "grace_s", "via")
_KEYS = {*_ACTIONS, *_OPTIONS}
_NODE = "node:"
ROLES = ("any", "rank0", "spare", "stopped")


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """One thing that shall happen.

    Attributes:
        action: ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``cont`` (SIGCONT), ``notice`` (warned, killed when the grace is
            over) or ``add`` (new instances).
        target: An instance (``i2``); ``any`` (a member of the running generation), ``rank0``, ``spare`` or ``stopped``
            (one that was stopped before), which wait until there is one; or ``node:NAME`` (the instance that an ``add``
            for this node of a trace has started). Unused by ``add``.
        at_step: Happens as soon as the job has reported this optimizer step.
        at_s: Happens so many seconds after the first generation has formed.
        min_pipelines: Happens only while the job runs undisturbed with so many pipelines; until then it waits. With 2,
            a loss takes no state away that nobody else holds.
        grace_s: Seconds between a notice and the end of the instance.
        via: How a notice is given: SIGTERM to the process, as a cloud's shutdown does, or through the coordinator.
        count: Instances to add.
        node: Name in the trace of the instance to add.
    """

    action: Action
    target: str = ""
    at_step: int | None = None
    at_s: float | None = None
    min_pipelines: int = 0
    grace_s: float = 30.0
    via: Literal["signal", "coordinator"] = "signal"
    count: int = 1
    node: str | None = None

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS:
            raise ValueError(f"a fault is one of {', '.join(_ACTIONS)}, got {self.action!r}")
        if (self.at_step is None) == (self.at_s is None):
            raise ValueError(f"{self.action} needs either at_step or at_s, got {self.at_step} and {self.at_s}")
        if min(self.at_step or 0, self.at_s or 0.0, self.min_pipelines, self.grace_s) < 0:
            raise ValueError(
                f"{self.action} needs a step, time, number of pipelines and grace of at least 0, got {self}"
            )
        if self.via not in ("signal", "coordinator"):
            raise ValueError(f"a notice goes via signal or coordinator, got {self.via!r}")
        if self.action == "add" and self.count < 1:
            raise ValueError(f"add needs a count of at least 1, got {self.count}")
        if self.action != "add" and not self.target:
            raise ValueError(f"{self.action} needs the name of an instance, or any, rank0, spare or stopped")

    def __str__(self) -> str:
        when = f"step {self.at_step}" if self.at_step is not None else f"{self.at_s:.1f} s"
        what = f"add {self.count}" if self.action == "add" else f"{self.action} {self.target}"
        grace = f", {self.grace_s:g} s of grace" if self.action == "notice" else ""
        return f"{what} at {when}{grace}"


class FaultScript:
    """A list of :class:`FaultEvent`, written fluently, read from a file or made from an availability trace.

    Args:
        events: The events to begin with.
        seed: Decides who ``any`` and ``spare`` are.

    Example:
        >>> script = FaultScript(seed=1).kill("i2", at_step=12).add(2, at_step=20)
        >>> print(*script.events, sep="; ")
        kill i2 at step 12; add 2 at step 20
    """

    def __init__(self, events: Sequence[FaultEvent] = (), *, seed: int = 0) -> None:
        self.events = list(events)
        self.seed = seed
        self.initial_nodes: tuple[str, ...] = ()

    def kill(
        self, instance: str, *, at_step: int | None = None, at_s: float | None = None, min_pipelines: int = 0
    ) -> FaultScript:
        """Send SIGKILL to an instance."""
        return self._append(FaultEvent("kill", instance, at_step, at_s, min_pipelines))

    def stop(
        self, instance: str, *, at_step: int | None = None, at_s: float | None = None, min_pipelines: int = 0
    ) -> FaultScript:
        """Send SIGSTOP to an instance: it hangs, its connections stay open."""
        return self._append(FaultEvent("stop", instance, at_step, at_s, min_pipelines))

    def cont(
        self, instance: str, *, at_step: int | None = None, at_s: float | None = None, min_pipelines: int = 0
    ) -> FaultScript:
        """Send SIGCONT to an instance that was stopped."""
        return self._append(FaultEvent("cont", instance, at_step, at_s, min_pipelines))

    def notice(
        self,
        instance: str,
        grace_s: float = 30.0,
        *,
        at_step: int | None = None,
        at_s: float | None = None,
        min_pipelines: int = 0,
        via: Literal["signal", "coordinator"] = "signal",
    ) -> FaultScript:
        """Warn an instance, and kill it if it has not left when the grace is over."""
        return self._append(FaultEvent("notice", instance, at_step, at_s, min_pipelines, grace_s, via))

    def add(self, count: int = 1, *, at_step: int | None = None, at_s: float | None = None) -> FaultScript:
        """Start more instances."""
        return self._append(FaultEvent("add", "", at_step, at_s, count=count))

    def _append(self, event: FaultEvent) -> FaultScript:
        self.events.append(event)
        return self

    @classmethod
    def from_file(cls, path: str | Path, *, seed: int = 0) -> FaultScript:
        """Read a YAML or JSON list such as ``[{kill: i2, at_step: 12}, {add: 2, at_s: 30}]``.

        Raises:
            ValueError: If the file is not such a list; the message names the entry.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            entries = json.loads(text)
        except json.JSONDecodeError:
            import yaml

            try:
                entries = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(f"{path} is neither JSON nor YAML: {error}") from error
        if not isinstance(entries, list):
            raise ValueError(f"{path} must hold a list of faults, got {type(entries).__name__}")
        script = cls(seed=seed)
        for number, entry in enumerate(entries, start=1):
            try:
                script._append(_event_from(entry))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, fault {number}: {error}") from error
        return script

    @classmethod
    def from_trace(
        cls,
        trace: AvailabilityTrace,
        *,
        time_scale: float = 1.0,
        notice_s: float = 0.0,
        max_instances: int | None = None,
        seed: int = 0,
    ) -> FaultScript:
        """Replay an availability trace.

        Args:
            trace: Who was there when.
            time_scale: Trace seconds per second of the replay.
            notice_s: Seconds of warning before each removal, in seconds of the replay; 0 kills without warning.
            max_instances: Additions beyond so many instances at once are left out, and so are their removals.
            seed: As for the constructor.

        Returns:
            A script whose ``initial_nodes`` are the nodes to start with.
        """
        if time_scale <= 0:
            raise ValueError(f"time_scale must be more than 0, got {time_scale}")
        script = cls(seed=seed)
        alive: dict[str, float] = {}  # node -> when it was added
        events = list(trace.events())
        start_s = events[0][0] if events else 0.0
        for time_s, change in events:
            at_s = (time_s - start_s) / time_scale
            for node in change.get("remove", ()):
                if node in alive:
                    added_at_s = alive.pop(node)
                    action: Action = "notice" if notice_s > 0 else "kill"
                    # the warning comes before the loss that the trace records, but not before the node is there
                    when = max(added_at_s, at_s - notice_s)
                    script._append(FaultEvent(action, _NODE + node, at_s=when, grace_s=at_s - when))
            for node in change.get("add", ()):
                if max_instances is None or len(alive) < max_instances:
                    alive[node] = at_s
                    if at_s > 0:
                        script._append(FaultEvent("add", at_s=at_s, node=node))
            if at_s == 0:
                script.initial_nodes = tuple(alive)
        return script

    def start(self) -> FaultRun:
        """Return a fresh run of this script."""
        return FaultRun(self)


class FaultRun:
    """One run of a script: hands out each event once, when it is due, and picks the victims.

    Args:
        script: The script to run; it is not changed.
    """

    def __init__(self, script: FaultScript) -> None:
        self._pending = list(script.events)
        self._random = random.Random(script.seed)

    @property
    def left(self) -> tuple[FaultEvent, ...]:
        """The events that have not been handed out."""
        return tuple(self._pending)

    def due(self, step: int, elapsed_s: float | None, num_pipelines: int) -> list[FaultEvent]:
        """Take the events that are due; of those that wait for pipelines, one at a time.

        Args:
            step: The newest optimizer step that the job has reported; 0 before the first.
            elapsed_s: Seconds since the first generation formed, None before.
            num_pipelines: Pipelines that run now, 0 while the job is disturbed.
        """
        due: list[FaultEvent] = []
        may_disturb = True
        for event in self._pending if elapsed_s is not None else ():
            at_s = math.inf if event.at_s is None else event.at_s
            at_step = math.inf if event.at_step is None else event.at_step
            if step < at_step and (elapsed_s is None or elapsed_s < at_s):
                continue
            if event.min_pipelines:
                if not may_disturb or num_pipelines < event.min_pipelines:
                    continue
                may_disturb = False
            due.append(event)
        self._pending = [event for event in self._pending if not any(event is taken for taken in due)]
        return due

    def put_back(self, event: FaultEvent) -> None:
        """Let an event wait that nobody is there for, if somebody may come."""
        self._pending.insert(0, event)

    def victim(
        self,
        target: str,
        *,
        order: Sequence[str],
        spares: Sequence[str],
        stopped: Sequence[str] = (),
        nodes: Mapping[str, str],
    ) -> str | None:
        """Return the instance that a target means now, or None if there is none.

        Args:
            target: As in :class:`FaultEvent`.
            order: Members of the running generation that still live, by rank.
            spares: Ready instances without a place.
            stopped: Instances that do not run because of a signal.
            nodes: Instance started for each node of a trace.
        """
        if target.startswith(_NODE):
            return nodes.get(target.removeprefix(_NODE))
        if target == "rank0":
            return order[0] if order else None
        if target in ("any", "spare", "stopped"):
            choices = {"any": order, "spare": spares, "stopped": stopped}[target]
            return self._random.choice(choices) if choices else None
        return target


def _event_from(entry: object) -> FaultEvent:
    """Build an event from one entry of a file."""
    if not isinstance(entry, dict):
        raise TypeError(f"expected an object such as {{kill: i2, at_step: 12}}, got {entry!r}")
    unknown = sorted(set(map(str, entry)) - _KEYS)
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}")
    named = [action for action in _ACTIONS if action in entry]
    if len(named) != 1:
        raise ValueError(f"expected exactly one of {', '.join(_ACTIONS)}, got {named or 'none'}")
    action = named[0]
    values: dict[str, Any] = {key: entry[key] for key in _OPTIONS if key in entry}
    for key in ("at_s", "grace_s"):
        if key in values:
            values[key] = float(values[key])
    if action == "add":
        return FaultEvent(action, count=int(entry["add"]), **values)
    return FaultEvent(action, target=str(entry[action]), **values)
