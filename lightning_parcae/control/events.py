"""What the coordinator hears, and what it answers: values without behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning_parcae.control.messages import Hello, Message


@dataclass(frozen=True, slots=True)
class Connected:
    """An authenticated instance has introduced itself, for the first time or again."""

    hello: Hello


@dataclass(frozen=True, slots=True)
class Received:
    """A message came over an instance's current connection."""

    instance: str
    message: Message


@dataclass(frozen=True, slots=True)
class Disconnected:
    """An instance's current connection was closed by the other side, or broke."""

    instance: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; needed at least every quarter of ``failure_timeout_s``."""


@dataclass(frozen=True, slots=True)
class AdminRequest:
    """Somebody asks; an :class:`Answer` with the same number follows at once."""

    request: int
    op: Literal["status", "preempt", "stop", "expect"]
    instance: str | None = None
    grace_s: float | None = None
    graceful: bool = True
    count: int = 1


CoordinatorEvent = Connected | Received | Disconnected | Tick | AdminRequest


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to an instance's connection; to another process of that name, send nothing."""

    instance: str
    incarnation: str
    message: Message


@dataclass(frozen=True, slots=True)
class Close:
    """Close an instance's connection once all that was sent is out; report no Disconnected for it."""

    instance: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Record:
    """A line for the timeline."""

    name: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Say:
    """A line for people; only when it differs from the one before."""

    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an :class:`AdminRequest`."""

    request: int
    value: Any = None
    error: str | None = None


Action = Send | Close | Record | Say | Answer
