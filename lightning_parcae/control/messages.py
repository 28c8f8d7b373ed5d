"""What instances and the coordinator say to each other.

A message is a frozen dataclass and travels as one JSON object: its fields, and its class name under ``"type"``. The
protocol version is checked once, in the handshake of :mod:`lightning_parcae.control.transport`. Whatever is unknown,
missing or of another type is refused as a whole, so that a message that arrives is a message that can be believed.
"""

from __future__ import annotations

import functools
import itertools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, Union

from lightning_parcae.errors import MembershipError
from lightning_parcae.planning.layout import Layout
from lightning_parcae.planning.parallel_config import ParallelConfig

PROTOCOL_VERSION = 1
"""Raised whenever a message changes; both sides must speak the same."""


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A complete checkpoint in the fallback store.

    Attributes:
        identifier: Its name in the store.
        step: Optimizer steps that it contains.
    """

    identifier: str
    step: int


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What the coordinator must know about the job; every instance of a job says the same.

    Attributes:
        num_layers: Layers of the whole model.
        layer_bytes: Bytes of state of each layer, length ``num_layers``.
        table: The configuration to take for each number of usable instances, from 0; as ``[D, P]``, or None to wait.
        boundaries: For each number of stages ``P`` of the table, the first layer of each stage, and ``num_layers`` at
            the end; length ``P + 1``.
        fingerprint: Differs where the scripts or their settings differ.
        max_step_failures: How often deaths may break the same step before the job stops.
        min_instances_timeout_s: Seconds to wait with too few instances before the job stops; None for ever.
        has_fallback: Whether there is a store to restore lost state from.
    """

    num_layers: int
    layer_bytes: list[int]
    table: list[tuple[int, int] | None]
    boundaries: dict[int, list[int]]
    fingerprint: str
    max_step_failures: int = 3
    min_instances_timeout_s: float | None = None
    has_fallback: bool = False

    def __post_init__(self) -> None:
        if self.num_layers < 1 or len(self.layer_bytes) != self.num_layers:
            raise ValueError(f"{self.num_layers} layers need as many sizes, got {len(self.layer_bytes)}")
        if self.max_step_failures < 1:
            raise ValueError(f"max_step_failures must be at least 1, got {self.max_step_failures}")
        for num_stages, starts in self.boundaries.items():
            ordered = all(a < b for a, b in itertools.pairwise(starts))
            if len(starts) != num_stages + 1 or not ordered or (starts[0], starts[-1]) != (0, self.num_layers):
                raise ValueError(
                    f"{num_stages} stages of {self.num_layers} layers need as many non-empty runs, got {starts}"
                )
        check_table(self.table, self.boundaries)

    def config_for(self, num_instances: int) -> ParallelConfig | None:
        """Return the configuration for a number of usable instances; None to wait."""
        return config_for(self.table, num_instances)


def check_table(table: list[tuple[int, int] | None], boundaries: Mapping[int, list[int]]) -> None:
    """Refuse a table of configurations that contradicts itself.

    Raises:
        ValueError: If an entry uses more instances than its index, or a number of stages without boundaries.
    """
    for num_instances, entry in enumerate(table):
        if entry is None:
            continue
        config = ParallelConfig(*entry)
        if config.num_instances > num_instances:
            raise ValueError(f"the table says {config} for {num_instances} instances, but that takes more")
        if config.num_stages not in boundaries:
            raise ValueError(f"the table says {config}, but no boundaries are given for {config.num_stages} stages")


def config_for(table: list[tuple[int, int] | None], num_instances: int) -> ParallelConfig | None:
    """Return a table's configuration for a number of usable instances; beyond its end, the last one."""
    entry = table[min(num_instances, len(table) - 1)] if table else None
    return None if entry is None else ParallelConfig(*entry)


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of an instance; again after a lost connection.

    Attributes:
        job_id: The job.
        instance: The instance's name, unique among the living.
        incarnation: The instance's process, unique for ever.
        host: Its machine.
        pid: Its process id there.
        protocol: Protocol version.
        versions: Versions of ``lightning_parcae``, ``lightning`` and ``torch``.
        address_hint: Host under which the others can reach it.
    """

    job_id: str
    instance: str
    incarnation: str
    host: str
    pid: int
    protocol: int
    versions: dict[str, str]
    address_hint: str = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I am alive; ``clock`` votes and ``step`` optimizer steps are behind me.

    Attributes:
        clock: Votes completed.
        step: Optimizer steps made.
        operation: What I do before the next vote; empty between two operations.
    """

    clock: int
    step: int
    operation: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """I am warm and wait at the first train boundary.

    Attributes:
        spec: The job as this instance sees it.
        state_address: ``host:port`` of its state server.
        store_address: ``host:port`` of its rendezvous store.
        checkpoint: The newest complete checkpoint that it sees.
    """

    spec: JobSpec
    state_address: str
    store_address: str
    checkpoint: CheckpointRef | None = None


@dataclass(frozen=True, slots=True)
class Ack:
    """I have stopped for a Prepare.

    Attributes:
        generation: The Prepare's generation.
        clock: Votes completed.
        vote: The newest completed vote's result, opaque.
        layers: Layers held, valid at ``clock``.
        at_boundary: Whether this instance waits at a train boundary, where others may join.
        step: Optimizer steps made.
    """

    generation: int
    clock: int
    vote: str | None
    layers: list[int]
    at_boundary: bool
    step: int = 0


@dataclass(frozen=True, slots=True)
class Formed:
    """I have completed the "formed" vote of a generation, after a pause of so many seconds."""

    generation: int
    pause_s: float = 0.0
    bytes_moved: int = 0


@dataclass(frozen=True, slots=True)
class Suspect:
    """A communication of this generation failed."""

    generation: int
    error: str


@dataclass(frozen=True, slots=True)
class Notice:
    """I will be taken away, in ``grace_s`` seconds if known."""

    grace_s: float | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the job is; from rank 0."""

    step: int
    epoch: int
    batch: int
    clock: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A new table of configurations from rank 0's planner; see :class:`JobSpec`.

    Attributes:
        table: The configuration for each number of usable instances.
        reason: Why, for people.
        details: What else the timeline shows: the chosen configuration, the forecast.
    """

    table: list[tuple[int, int] | None]
    reason: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """The user's code failed here; the job cannot go on."""

    step: int
    error: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """``fit`` is over, and I hold the final state."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """I leave; the end of the connection that follows is no death."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something for the timeline."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """A question to the job's small key-value store; a :class:`Reply` with the same number follows.

    Attributes:
        request: Number, unique within the sender's life.
        op: ``set_default`` stores ``value`` unless the key exists and answers what is stored; ``get`` answers that or
            None; ``wait`` answers as soon as the key exists.
        key: The key. Those that begin with ``prepared/`` are set by the oldest instance of a host: a ``wait`` of the
            one that has become the oldest is answered with False, since nobody else will set the key.
        value: Any JSON value; for ``set_default``.
    """

    request: int
    op: Literal["set_default", "wait", "get"]
    key: str
    value: Any = None


@dataclass(frozen=True, slots=True)
class Welcome:
    """You are in.

    Attributes:
        instance: The receiver's name.
        order: How many instances joined before.
        leader: Whether no generation has been formed and the receiver is the oldest alive.
        host_rank: Living instances on the same host that joined before.
        generation: The newest generation so far, 0 if none.
        run_dir: The coordinator's run directory, if it has one.
    """

    instance: str
    order: int
    leader: bool
    host_rank: int
    generation: int
    run_dir: str | None = None


@dataclass(frozen=True, slots=True)
class Prepare:
    """Stop and send an Ack: at the next train boundary, or at once if ``urgent``."""

    generation: int
    urgent: bool
    members: list[str]
    reason: str


@dataclass(frozen=True, slots=True)
class Commit:
    """All members have stopped; form this generation.

    Attributes:
        generation: The generation.
        layout: Who does what. A receiver that is not in its ``order`` waits as a spare (a donor until released). None
            with ``rollback``.
        clock: Votes completed. A member of the order at ``clock - 1`` finishes that operation with ``vote``.
        vote: Result of vote number ``clock``.
        rollback: Unwind to the start of ``fit``, warm up and report Ready again.
        transfers: ``(layer, source, target)``; the target pulls.
        addresses: ``(state_address, store_address)`` of each receiver.
        fresh: Members of the order that need the trainer state.
        trainer_source: Who serves the trainer state.
        checkpoint: Restore everything from it; ``transfers`` is empty then and ``trainer_source`` None.
        kind: ``initial``, ``none``, ``intra_stage``, ``inter_stage``, ``pipeline`` or ``rollback``.
        reason: Why, for people.
    """

    generation: int
    layout: Layout | None
    clock: int
    vote: str | None
    rollback: bool
    transfers: list[tuple[int, str, str]]
    addresses: dict[str, tuple[str, str]]
    fresh: list[str]
    trainer_source: str | None
    checkpoint: CheckpointRef | None
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """Leave now with exit code 0."""

    reason: str


@dataclass(frozen=True, slots=True)
class JobFinished:
    """``fit`` has ended everywhere; whoever lacks the final state pulls it from a holder."""

    addresses: dict[str, tuple[str, str]]
    holders: list[str]


@dataclass(frozen=True, slots=True)
class Stop:
    """The job ends: after the current step if ``graceful``, else now."""

    graceful: bool
    reason: str
    traceback: str | None = None
    exit_code: int = 1


@dataclass(frozen=True, slots=True)
class Fenced:
    """You have been declared dead; the job goes on without you."""

    reason: str


@dataclass(frozen=True, slots=True)
class Pulse:
    """The coordinator is alive."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a :class:`Request`."""

    request: int
    value: Any = None


@dataclass(frozen=True, slots=True)
class AdminCall:
    """A command from ``parcae status`` and its like.

    Attributes:
        op: ``status``, ``preempt``, ``stop``, ``expect``, or ``watch``, which streams :class:`TimelineEntry` messages.
        instance: Whom to preempt.
        grace_s: Seconds of warning, for ``preempt``.
        graceful: Whether to finish the current step, for ``stop``.
        count: How many instances to wait for before the start, for ``expect``.
    """

    op: Literal["status", "preempt", "stop", "expect", "watch"]
    instance: str | None = None
    grace_s: float | None = None
    graceful: bool = True
    count: int = 1


@dataclass(frozen=True, slots=True)
class AdminReply:
    """The answer to an :class:`AdminCall`; ``error`` says why it was not done."""

    value: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One line of the timeline as it is written."""

    record: dict[str, Any]


Message = (
    Hello
    | Heartbeat
    | Ready
    | Ack
    | Formed
    | Suspect
    | Notice
    | Progress
    | Plan
    | Failed
    | Finished
    | Goodbye
    | Event
    | Request
    | Welcome
    | Prepare
    | Commit
    | Release
    | JobFinished
    | Stop
    | Fenced
    | Pulse
    | Reply
    | AdminCall
    | AdminReply
    | TimelineEntry
)

_TYPES: dict[str, type[Any]] = {cls.__name__: cls for cls in typing.get_args(Message)}


def encode(message: Message) -> bytes:
    """Return a message as JSON.

    Raises:
        TypeError: If a field that may hold any JSON value holds something else.
    """
    return json.dumps({"type": type(message).__name__, **_fields_to_json(message)}).encode()


def decode(payload: bytes) -> Message:
    """Return the message that :func:`encode` wrote.

    Raises:
        MembershipError: If it is not exactly that.
    """
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise MembershipError(f"a message must be JSON, got {payload[:60]!r}") from error
    kind = value.pop("type", None) if isinstance(value, dict) else None
    cls = _TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise MembershipError(f"an unknown message arrived: {payload[:60]!r}")
    message: Message = _build(cls, value, cls.__name__)
    return message


def _fields_to_json(record: Any) -> dict[str, Any]:
    return {item.name: _to_json(getattr(record, item.name)) for item in fields(record)}


def _to_json(value: Any) -> Any:
    if isinstance(value, Layout):
        return value.to_json()
    if is_dataclass(value) and not isinstance(value, type):
        return _fields_to_json(value)
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    return value


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(cls: type[Any], value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(where, "an object", value)
    hints = _hints(cls)  # type: ignore[arg-type]  # mypy takes a type for unhashable
    unknown = value.keys() - hints.keys()
    if unknown:
        raise MembershipError(f"{where} has an unknown field: {sorted(unknown)[0]!r:.60}")
    arguments = {}
    for item in fields(cls):
        if item.name in value:
            arguments[item.name] = _convert(hints[item.name], value[item.name], f"{where}.{item.name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise MembershipError(f"{where} lacks its field {item.name!r}")
    try:
        return cls(**arguments)
    except (ValueError, TypeError) as error:
        raise MembershipError(f"{where} contradicts itself: {error}") from error


def _wrong(where: str, wanted: str, value: Any) -> MembershipError:
    return MembershipError(f"{where} must be {wanted}, got {value!r:.60}")


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Return a JSON value as a type hint wants it, or raise MembershipError."""
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):  # only "X | None" occurs
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if value is None else _convert(inner, value, where)
    if origin is Literal:
        if value not in arguments:
            raise _wrong(where, f"one of {arguments}", value)
        return value
    if origin is list:
        if not isinstance(value, list):
            raise _wrong(where, "a list", value)
        return [_convert(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    if origin is tuple:
        if not isinstance(value, list) or len(value) != len(arguments):
            raise _wrong(where, f"a list of {len(arguments)}", value)
        return tuple(_convert(kind, item, where) for kind, item in zip(arguments, value, strict=True))
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong(where, "an object", value)
        return {_key(arguments[0], key, where): _convert(arguments[1], item, where) for key, item in value.items()}
    if hint is Layout:
        if not isinstance(value, dict):
            raise _wrong(where, "a layout", value)
        try:
            return Layout.from_json(value)
        except ValueError as error:
            raise _wrong(where, "a layout", value) from error
    if is_dataclass(hint):
        return _build(hint, value, where)  # type: ignore[arg-type]
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:  # not isinstance: True is no int here
        raise _wrong(where, hint.__name__, value)
    return value


def _key(hint: Any, key: str, where: str) -> Any:
    if hint is not int:
        return key
    try:
        return int(key)
    except ValueError as error:
        raise _wrong(where, "an object with whole numbers as keys", key) from error
