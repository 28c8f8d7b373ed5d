"""The instance's side of the control connection.

Two daemon threads: one reads what the coordinator says, the other sends heartbeats and whatever the kernel did not
take at once, so that :meth:`Agent.send` never blocks the training thread. What was said is kept as state; the training
thread looks at it between steps, or sleeps in :meth:`Agent.wait` until it changes.

A lost connection is built up again. Messages that tell the coordinator where this instance stands are then sent once
more, and the coordinator repeats what it had said.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from lightning_parcae.control.messages import (
    PROTOCOL_VERSION,
    Ack,
    Commit,
    Failed,
    Fenced,
    Finished,
    Formed,
    Goodbye,
    Heartbeat,
    Hello,
    JobFinished,
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
    Welcome,
    decode,
    encode,
)
from lightning_parcae.control.transport import (
    connect_authenticated,
    pack_frame,
    recv_frame,
    send_frame,
    tune_socket,
)
from lightning_parcae.errors import FencedError, JobFailedError, MembershipError, RefusedError

log = logging.getLogger(__name__)

T = TypeVar("T")

State = Literal["new", "connected", "reconnecting", "lost", "closed"]

_MAX_BACKLOG_BYTES = 64 * 1024 * 1024
_FLUSH_TIMEOUT_S = 2.0
_KEPT_COMMITS = 8
# Where this instance stands: said again over a new connection. The newest of each kind is enough.
_REPEATED = (Ready, Ack, Formed, Notice, Plan, Finished, Failed)


class Agent:
    """Connection of one instance to the coordinator.

    Args:
        address: ``host:port`` of the coordinator.
        secret: The job's secret; empty on loopback.
        job_id: The job.
        instance: Name of this instance, unique among the living.
        failure_timeout_s: Silence after which an instance is dead, in seconds; heartbeats go out six times as often.
        on_urgent: Called in the agent's thread with the generation of an urgent Prepare, and with -1 when this instance
            is fenced, the job is stopped or the coordinator is gone. It must release blocked communication, and return
            soon. May be set later.
        versions: Versions of the packages that must not differ.
        incarnation: Names this process for ever; random by default.
        address_hint: Host under which others can reach this instance.

    Attributes:
        clock: Votes behind this instance; set by its owner, sent with heartbeats.
        step: Optimizer steps behind this instance; likewise.
        operation: What this instance does before the next vote, empty between two operations; likewise.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        job_id: str,
        instance: str,
        failure_timeout_s: float,
        on_urgent: Callable[[int], None] | None = None,
        versions: Mapping[str, str] | None = None,
        *,
        incarnation: str | None = None,
        address_hint: str = "",
    ) -> None:
        if not failure_timeout_s > 0:
            raise ValueError(f"failure_timeout_s must be positive, got {failure_timeout_s}")
        self.on_urgent = on_urgent
        self.clock = 0
        self.step = 0
        self.operation = ""
        self._address = address
        self._secret = secret
        self._failure_timeout_s = failure_timeout_s
        self._hello = Hello(
            job_id=job_id,
            instance=instance,
            incarnation=incarnation if incarnation is not None else uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            protocol=PROTOCOL_VERSION,
            versions=dict(versions or {}),
            address_hint=address_hint,
        )
        self._numbers = itertools.count(1)

        # Guards everything below; notified at each change. An RLock, so that conditions may use the properties.
        self._changed = threading.Condition(threading.RLock())
        self._state: State = "new"
        self._sock: socket.socket | None = None
        self._backlog = bytearray()
        self._repeated: dict[type[Any], Message] = {}
        self._unsent: list[Message] = []
        self._asked: dict[int, Request] = {}
        self._replies: dict[int, Any] = {}
        self._last_heard = 0.0
        self._error: Exception | None = None
        self._welcome: Welcome | None = None
        self._prepare: Prepare | None = None
        self._commits: dict[int, Commit] = {}
        self._stop: Stop | None = None
        self._fenced: str | None = None
        self._released: Release | None = None
        self._job_finished: JobFinished | None = None
        self._threads: list[threading.Thread] = []

    @property
    def incarnation(self) -> str:
        """This process' name."""
        return self._hello.incarnation

    @property
    def state(self) -> State:
        """State of the connection; ``lost`` means for good."""
        return self._state

    @property
    def newest_prepare(self) -> Prepare | None:
        """The newest Prepare that has come."""
        return self._prepare

    @property
    def prepare_seen(self) -> int:
        """Generation of the newest Prepare, 0 if none has come."""
        prepare = self._prepare
        return 0 if prepare is None else prepare.generation

    def commit_of(self, generation: int) -> Commit | None:
        """Return the Commit of a generation, if it has come."""
        with self._changed:
            return self._commits.get(generation)

    @property
    def stop_request(self) -> Stop | None:
        """The Stop that has come; one that is not graceful replaces one that is."""
        return self._stop

    @property
    def fenced(self) -> str | None:
        """Why this instance has been declared dead, if it has."""
        return self._fenced

    @property
    def released(self) -> Release | None:
        """The permission to leave."""
        return self._released

    @property
    def job_finished(self) -> JobFinished | None:
        """The news that ``fit`` has ended everywhere."""
        return self._job_finished

    def connect(self, timeout_s: float) -> Welcome:
        """Connect, introduce this instance, and start the threads.

        Args:
            timeout_s: How long to try, in seconds.

        Raises:
            FencedError: If this process was declared dead before.
            MembershipError: If the coordinator cannot be reached in time, or refuses.
        """
        deadline = time.monotonic() + timeout_s
        sock, answer = self._introduce(deadline)
        if not isinstance(answer, Welcome):
            sock.close()
            self._refused(answer)
        assert isinstance(answer, Welcome)
        with self._changed:
            self._welcome = answer
            self._sock = sock
            self._state = "connected"
            self._last_heard = time.monotonic()
        for name, target in (("read", self._read), ("write", self._write)):
            thread = threading.Thread(target=target, name=f"parcae-agent-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return answer

    def send(self, message: Message) -> None:
        """Send a message; thread-safe.

        Never waits: what the kernel does not take goes out later. A broken connection shows in :attr:`state` and in
        :meth:`wait`, not here.

        Raises:
            TypeError: If the message holds something that is not JSON.
            ValueError: If it is longer than a frame may be.
        """
        frame = pack_frame(encode(message))
        with self._changed:
            if isinstance(message, _REPEATED):
                self._repeated.pop(type(message), None)  # to the end: they are repeated in the order of their sending
                self._repeated[type(message)] = message
            if self._sock is None:
                if not isinstance(message, (Heartbeat, Progress, *_REPEATED)):
                    self._unsent.append(message)
                return
            self._push(frame)

    def request(
        self, op: Literal["set_default", "wait", "get"], key: str, value: Any = None, *, timeout_s: float | None
    ) -> Any:
        """Ask the job's key-value store; see :class:`~lightning_parcae.control.messages.Request`.

        Raises:
            TimeoutError: If no answer comes in time.
            ParcaeError: As :meth:`wait`.
        """
        question = Request(next(self._numbers), op, key, value)
        with self._changed:
            self._asked[question.request] = question
        try:
            self.send(question)

            def answer(agent: Agent) -> tuple[Any] | None:
                replies = agent._replies
                return (replies[question.request],) if question.request in replies else None

            found = self.wait(answer, timeout_s)
        finally:
            with self._changed:
                self._asked.pop(question.request, None)
                self._replies.pop(question.request, None)
        if found is None:
            hint = "no instance has set it" if op == "wait" else "the coordinator did not answer"
            raise TimeoutError(f"{op} of {key!r} was not answered within {timeout_s:g} s: {hint}")
        return found[0]

    def wait(self, condition: Callable[[Agent], T | None], timeout_s: float | None) -> T | None:
        """Sleep until a condition on this agent returns something.

        Args:
            condition: Called now and at each change, with the agent; None means not yet. It must not block.
            timeout_s: Seconds to wait at most; None for ever.

        Returns:
            What the condition returned, or None if the time is over.

        Raises:
            FencedError: If this instance has been declared dead.
            JobFailedError: If the job has been stopped.
            MembershipError: If the connection is lost for good.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = condition(self)
                if found is not None:
                    return found
                self.raise_if_over()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)

    def raise_if_over(self) -> None:
        """Raise what :meth:`wait` would raise if there is no more to wait for."""
        if self._fenced is not None:
            raise FencedError(self._fenced)
        if self._stop is not None and not self._stop.graceful:
            raise JobFailedError(_describe(self._stop), self._stop.exit_code)
        if self._error is not None:
            raise MembershipError(f"the connection to the coordinator at {self._address} is lost: {self._error}") from (
                self._error
            )
        if self._state in ("new", "closed"):
            raise MembershipError(f"this instance is not connected to the coordinator ({self._state})")

    def close(self, goodbye: bool) -> None:
        """Close the connection and end the threads.

        Args:
            goodbye: Whether to say that this instance leaves of its own accord. Without it the others take the end of
                the connection for a death.
        """
        with self._changed:
            connected = self._state == "connected"
        if goodbye and connected:
            with contextlib.suppress(OSError):
                self.send(Goodbye())
        deadline = time.monotonic() + _FLUSH_TIMEOUT_S
        with self._changed:
            while self._backlog and self._sock is not None and time.monotonic() < deadline:
                self._changed.wait(0.02)
            self._state = "closed"
            sock, self._sock = self._sock, None
            self._changed.notify_all()
        if sock is not None:
            # Only our direction first: closing with unread data in the buffer would make the kernel reset the
            # connection, and the other side might never read our last words.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        me = threading.current_thread()
        others = [thread for thread in self._threads if thread is not me]
        for thread in others:
            thread.join(1.0)
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            for thread in others:
                thread.join(1.0)
            sock.close()

    # Connecting.

    def _introduce(self, deadline: float) -> tuple[socket.socket, Message]:
        """Connect and say hello; return the connection and the first answer."""
        pause_s = 0.02
        while True:
            try:
                return self._introduce_once(deadline)
            except OSError as error:
                left = deadline - time.monotonic()
                if left <= pause_s:
                    raise MembershipError(
                        f"the coordinator at {self._address} cannot be reached: {error}; is it running, and is the "
                        "address right (PARCAE_COORDINATOR)?"
                    ) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)

    def _introduce_once(self, deadline: float) -> tuple[socket.socket, Message]:
        left = max(0.05, deadline - time.monotonic())
        hello = self._hello
        sock = connect_authenticated(
            self._address, self._secret, hello.job_id, hello.incarnation, "instance", min(left, 5.0)
        )
        try:
            tune_socket(sock, self._failure_timeout_s)
            send_frame(sock, encode(hello))
            answer = decode(recv_frame(sock, deadline=time.monotonic() + max(1.0, left)))
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
        return sock, answer

    def _refused(self, answer: Message) -> None:
        if isinstance(answer, Fenced):
            raise FencedError(answer.reason)
        reason = _describe(answer) if isinstance(answer, Stop) else f"it answered {type(answer).__name__}"
        raise RefusedError(f"the coordinator at {self._address} refuses this instance: {reason}")

    def _reconnect(self, cause: Exception) -> bool:
        """Build the connection up again after it broke; return whether there is more to read."""
        with self._changed:
            over = self._fenced is not None or self._released is not None or self._job_finished is not None
            if self._is_closed() or self._error is not None:
                return False
            sock, self._sock = self._sock, None
            self._backlog.clear()
            self._state = "reconnecting"
            self._changed.notify_all()
        if sock is not None:
            sock.close()
        if over or self._stop is not None:
            self._give_up(MembershipError("it closed the connection when the job was over"), release=False)
            return False
        log.warning("the connection to the coordinator broke (%s); connecting again", cause)
        try:
            sock, answer = self._introduce(time.monotonic() + self._failure_timeout_s)
        except MembershipError as error:
            self._give_up(error)
            return False
        if not isinstance(answer, Welcome):
            sock.close()
            self._take(answer)
            self._give_up(MembershipError("it refuses this instance"), release=False)
            return False
        with self._changed:
            if self._is_closed():
                sock.close()
                return False
            self._sock = sock
            self._state = "connected"
            self._last_heard = time.monotonic()
            repeated, unsent, self._unsent = list(self._repeated.values()), self._unsent, []
            others = [message for message in unsent if not isinstance(message, Request)]
            for message in [*repeated, *self._asked.values(), *others]:
                self._push(pack_frame(encode(message)))
            self._changed.notify_all()
        return True

    def _is_closed(self) -> bool:
        return self._state == "closed"

    def _give_up(self, error: Exception, *, release: bool = True) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            if not self._is_closed():
                self._state = "lost"
            sock = self._sock
            self._changed.notify_all()
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if release:
            log.error("the coordinator is lost: %s", error)
            self._interrupt(-1)

    # The threads.

    def _read(self) -> None:
        while True:
            with self._changed:
                sock = self._sock
            if sock is None:
                return
            try:
                message = decode(recv_frame(sock))
            except (OSError, MembershipError) as error:
                if not self._reconnect(error):
                    return
                continue
            self._take(message)

    def _take(self, message: Message) -> None:
        urgent: int | None = None
        with self._changed:
            self._last_heard = time.monotonic()
            if isinstance(message, Prepare):
                if message.generation >= self.prepare_seen:  # the same again after a new connection
                    is_new = message.generation > self.prepare_seen
                    self._prepare = message
                    urgent = message.generation if message.urgent and is_new else None
            elif isinstance(message, Commit):
                self._commits[message.generation] = message
                for generation in sorted(self._commits)[:-_KEPT_COMMITS]:
                    del self._commits[generation]
            elif isinstance(message, Stop):
                if self._stop is None or not message.graceful:
                    self._stop = message
                urgent = None if message.graceful else -1
            elif isinstance(message, Fenced):
                self._fenced = message.reason
                urgent = -1
            elif isinstance(message, Release):
                self._released = message
            elif isinstance(message, JobFinished):
                self._job_finished = message
            elif isinstance(message, Reply):
                if message.request in self._asked:
                    self._replies[message.request] = message.value
            elif isinstance(message, Welcome):
                self._welcome = message
            self._changed.notify_all()
        if urgent is not None:
            self._interrupt(urgent)

    def _interrupt(self, generation: int) -> None:
        if self.on_urgent is None:
            return
        try:
            self.on_urgent(generation)
        except Exception as error:  # hand it to the training thread
            log.exception("releasing blocked communication failed")
            with self._changed:
                if self._error is None:
                    self._error = error
                self._changed.notify_all()

    def _write(self) -> None:
        interval_s = self._failure_timeout_s / 6
        next_beat = time.monotonic()
        while True:
            with self._changed:
                if self._state in ("closed", "lost"):
                    return
                now = time.monotonic()
                if now - next_beat > 1.0:  # this process stood still; what came meanwhile is not yet read
                    self._last_heard = now
                if now >= next_beat:
                    next_beat = now + interval_s
                    if self._sock is not None:
                        self._push(pack_frame(encode(Heartbeat(self.clock, self.step, self.operation))))
                silent_s = now - self._last_heard
                connected = self._state == "connected"
                sock = self._sock if self._backlog else None
                if sock is None:
                    self._changed.wait(max(0.0, next_beat - now))
            if connected and silent_s > self._patience_s:
                self._give_up(MembershipError(f"nothing was heard from it for {silent_s:.0f} s"))
            elif sock is not None:
                with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                    select.select([], [sock], [], min(0.05, interval_s))
                with self._changed:
                    if self._sock is sock:
                        self._push(b"")

    @property
    def _patience_s(self) -> float:
        """How long the coordinator may be silent, though connected. It sends a Pulse three times per timeout."""
        return max(10 * self._failure_timeout_s, 60.0)

    def _push(self, frame: bytes) -> None:
        """Hand bytes to the kernel, as many as it takes at once; the lock is held."""
        sock = self._sock
        if sock is None:
            return
        had_backlog = bool(self._backlog)
        self._backlog += frame
        try:
            while self._backlog:
                sent = sock.send(self._backlog, socket.MSG_DONTWAIT)
                del self._backlog[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            # The reader meets the same error and connects again; make sure that it does.
            self._backlog.clear()
            if error.errno != errno.EBADF:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        if len(self._backlog) > _MAX_BACKLOG_BYTES:
            self._backlog.clear()
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if bool(self._backlog) != had_backlog:
            self._changed.notify_all()


def _describe(stop: Stop) -> str:
    return stop.reason if stop.traceback is None else f"{stop.reason}\n\n{stop.traceback}"
