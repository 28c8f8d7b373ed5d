"""The coordinator as a process: sockets, time and files around the state machine.

    python -m lightning_parcae.control.service --bind 127.0.0.1:0 --job-id demo --run-dir runs/demo --address-file addr

The secret comes from ``PARCAE_SECRET_FILE`` or ``PARCAE_SECRET``. In the run directory it keeps ``timeline.jsonl``, one
JSON object ``{"time": unix seconds, "event": name, ...}`` per line, and ``state.json``, what should outlive it. It ends
some seconds after the job is over and the last instance has gone, with the job's exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
    AdminCall,
    AdminReply,
    Hello,
    Message,
    Pulse,
    TimelineEntry,
    decode,
    encode,
)
from lightning_parcae.control.transport import (
    PeerInfo,
    accept_authenticated_async,
    check_bind_host,
    connect_authenticated,
    format_address,
    load_secret,
    pack_frame,
    parse_address,
    read_frame,
    recv_frame,
    send_frame,
    tune_socket,
)
from lightning_parcae.errors import MembershipError

log = logging.getLogger(__name__)

MAX_UNAUTHENTICATED = 64
MAX_UNSENT_BYTES = 64 * 1024 * 1024
MAX_UNSENT_WATCH_BYTES = 8 * 1024 * 1024
KEPT_RECORDS = 20_000
CLOSE_TIMEOUT_S = 5.0
LINGER_S = 2.0
REFUSALS_SHOWN_EVERY_S = 1.0


class _RunFiles:
    """The timeline and the state in the run directory; a full disk must not end the job."""

    def __init__(self, run_dir: Path | None) -> None:
        self._run_dir = run_dir
        self._state: dict[str, Any] | None = None
        self._complained = False
        self._timeline = None
        if run_dir is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._timeline = (run_dir / "timeline.jsonl").open("a", encoding="utf-8", buffering=1)

    def read_generation(self, job_id: str) -> int:
        """Return the newest generation of an earlier coordinator of this job, 0 if there was none."""
        if self._run_dir is None:
            return 0
        try:
            state = json.loads((self._run_dir / "state.json").read_text(encoding="utf-8"))
            return int(state["generation"]) if state["job_id"] == job_id else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def append(self, record: dict[str, Any]) -> None:
        """Write a line of the timeline."""
        if self._timeline is not None:
            with self._complaining():
                self._timeline.write(json.dumps(record) + "\n")

    def keep(self, state: dict[str, Any]) -> None:
        """Write the state if it has changed."""
        if self._run_dir is None or state == self._state:
            return
        self._state = state
        with self._complaining():
            _write_atomically(self._run_dir / "state.json", json.dumps(state, indent=1) + "\n")

    @contextlib.contextmanager
    def _complaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._complained:
                log.error("the run directory %s cannot be written, the job goes on without: %s", self._run_dir, error)
            self._complained = True

    def close(self) -> None:
        """Close the timeline."""
        if self._timeline is not None:
            with contextlib.suppress(OSError):
                self._timeline.close()


def _write_atomically(path: Path, text: str) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _json_safe(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(item) for item in value]
    return value


class Service:
    """Carries messages between the instances and the coordinator.

    Args:
        secret: The job's secret; empty on loopback.
        job_id: The job.
        failure_timeout_s: See :class:`~lightning_parcae.control.coordinator.Coordinator`.
        run_dir: Where to write; None to write nothing.
        expected: Instances to wait for at the start.
    """

    def __init__(
        self,
        secret: bytes,
        job_id: str,
        failure_timeout_s: float,
        *,
        run_dir: Path | None = None,
        expected: int | None = None,
    ) -> None:
        self._secret = secret
        self._job_id = job_id
        self._failure_timeout_s = failure_timeout_s
        self._files = _RunFiles(run_dir)
        self._coordinator = Coordinator(
            job_id,
            failure_timeout_s,
            expected=expected,
            run_dir=None if run_dir is None else str(run_dir),
            generation=self._files.read_generation(job_id),
        )
        self._connections: dict[tuple[str, str], asyncio.StreamWriter] = {}
        self._watchers: set[asyncio.StreamWriter] = set()
        self._records: collections.deque[dict[str, Any]] = collections.deque(maxlen=KEPT_RECORDS)
        self._answers: dict[int, Answer] = {}
        self._num_requests = 0
        self._num_unauthenticated = 0
        self._num_refused = 0
        self._refusal_shown_at: float | None = None
        self._newest_refusal = ""
        self._conversations: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._ended = asyncio.Event()

    async def start(self, host: str, port: int) -> str:
        """Listen, and return the bound address.

        Raises:
            ValueError: If other machines could connect without a secret.
            OSError: If the address is taken or is not ours.
        """
        check_bind_host(host, self._secret)
        self._server = await asyncio.start_server(self._converse, host, port, backlog=1024)
        bound = self._server.sockets[0].getsockname()
        return format_address(bound[0], bound[1])

    async def run(self) -> int:
        """Serve until the job is over and all instances have gone; return the job's exit code."""
        interval_s = min(0.1, self._failure_timeout_s / 10)
        loop = asyncio.get_running_loop()
        pulse_at, over_since = loop.time(), None
        while not self._ended.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), interval_s)
            self._handle(Tick())
            self._show_refusals()
            now = loop.time()
            if now >= pulse_at:
                pulse_at = now + self._failure_timeout_s / 3
                for writer in list(self._connections.values()):
                    self._write(writer, Pulse())
            idle = self._coordinator.is_over and not self._connections
            over_since = None if not idle else over_since if over_since is not None else now
            if over_since is not None and now - over_since >= LINGER_S:
                break
        await self._shut_down()
        return self._coordinator.exit_code

    def end(self) -> None:
        """Make :meth:`run` return."""
        self._ended.set()

    async def _shut_down(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in [*self._connections.values(), *self._watchers]:
            writer.close()
        self._connections.clear()
        for task in self._conversations:
            task.cancel()
        await asyncio.gather(*self._conversations, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()
        self._files.close()

    # Connections.

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        try:
            peer = await self._authenticate(reader, writer)
            if peer is None:
                return
            if peer.role == "instance":
                await self._serve_instance(peer, reader, writer)
            elif peer.role == "admin":
                await self._serve_admin(reader, writer)
        except (OSError, MembershipError) as error:
            log.debug("a connection ended: %s", error)
        except asyncio.CancelledError:
            pass  # the service ends
        finally:
            self._conversations.discard(task)
            self._watchers.discard(writer)
            await _close(writer)

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> PeerInfo | None:
        origin = writer.get_extra_info("peername")
        if self._num_unauthenticated >= MAX_UNAUTHENTICATED:
            self._note_refusal(f"too many have not proved to know the secret; closed the one from {origin}")
            writer.transport.abort()
            return None
        self._num_unauthenticated += 1
        try:
            tune_socket(writer.get_extra_info("socket"), self._failure_timeout_s)
            return await accept_authenticated_async(reader, writer, self._secret, self._job_id)
        except (OSError, MembershipError) as error:
            self._note_refusal(f"refused the one from {origin}: {error}")
            return None
        finally:
            self._num_unauthenticated -= 1

    def _note_refusal(self, what: str) -> None:
        """Note a connection that was not taken; :meth:`_show_refusals` says so."""
        self._num_refused += 1
        self._newest_refusal = what
        self._show_refusals()

    def _show_refusals(self) -> None:
        """Warn of connections that were not taken, at a bounded rate: anybody can make many of them."""
        now = time.monotonic()
        last = self._refusal_shown_at
        if not self._num_refused or (last is not None and now - last < REFUSALS_SHOWN_EVERY_S):
            return
        count, self._num_refused = self._num_refused, 0
        self._refusal_shown_at = now
        log.warning("%s not taken: %s", "1 connection" if count == 1 else f"{count} connections", self._newest_refusal)

    async def _serve_instance(self, peer: PeerInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = decode(await read_frame(reader))
        if not isinstance(hello, Hello) or (hello.incarnation, hello.job_id) != (peer.incarnation, peer.job_id):
            raise MembershipError("an instance must introduce itself as what it has proved to be")
        key = (hello.instance, hello.incarnation)
        replaced = self._connections.get(key)
        self._connections[key] = writer
        if replaced is not None:
            replaced.transport.abort()
        try:
            self._handle(Connected(hello))
            while self._connections.get(key) is writer:
                message = decode(await read_frame(reader))
                if self._connections.get(key) is writer:
                    self._handle(Received(hello.instance, message))
        except MembershipError as error:
            log.error("%s broke the protocol: %s", hello.instance, error)
        finally:
            if self._connections.get(key) is writer:
                del self._connections[key]
                self._handle(Disconnected(hello.instance, hello.incarnation))

    async def _serve_admin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            call = decode(await read_frame(reader))
            if not isinstance(call, AdminCall):
                raise MembershipError("an admin connection takes commands only")
            if call.op == "watch":
                for record in self._records:
                    self._write(writer, TimelineEntry(record))
                self._watchers.add(writer)
                continue
            self._num_requests += 1
            number = self._num_requests
            self._handle(AdminRequest(number, call.op, call.instance, call.grace_s, call.graceful, call.count))
            answer = self._answers.pop(number)
            self._write(writer, AdminReply(answer.value, answer.error))

    # The state machine.

    def _handle(self, event: CoordinatorEvent) -> None:
        actions = self._coordinator.handle(asyncio.get_running_loop().time(), event)
        for action in actions:
            if isinstance(action, Send):
                writer = self._connections.get((action.instance, action.incarnation))
                if writer is not None:
                    self._write(writer, action.message)
            elif isinstance(action, Close):
                writer = self._connections.pop((action.instance, action.incarnation), None)
                if writer is not None:
                    writer.close()
                    # A stopped process does not read: its connection would never be flushed.
                    asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, writer.transport.abort)
            elif isinstance(action, Record):
                self._note(action)
            elif isinstance(action, Say):
                log.info("%s", action.text)
            else:
                self._answers[action.request] = action
        if actions:
            self._files.keep(self._coordinator.snapshot())

    def _note(self, action: Record) -> None:
        record = {"time": round(time.time(), 6), "event": action.name}
        record = {**record, **_json_safe(action.fields), **record}
        self._files.append(record)
        self._records.append(record)
        for watcher in list(self._watchers):
            if watcher.transport.get_write_buffer_size() > MAX_UNSENT_WATCH_BYTES:
                self._watchers.discard(watcher)
                watcher.transport.abort()
            else:
                self._write(watcher, TimelineEntry(record))

    def _write(self, writer: asyncio.StreamWriter, message: Message) -> None:
        if writer.is_closing():
            return
        writer.write(pack_frame(encode(message)))
        if writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.error("an instance does not read what it is sent; closing its connection")
            writer.transport.abort()


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close a connection, and do not wait for long for what is not sent yet."""
    writer.close()
    try:
        await asyncio.wait_for(writer.wait_closed(), CLOSE_TIMEOUT_S)
    except (OSError, asyncio.TimeoutError, asyncio.CancelledError):
        writer.transport.abort()


class AdminClient:
    """Commands to a running coordinator; each on a connection of its own, so that threads may share a client.

    Args:
        address: ``host:port`` of the coordinator.
        secret: The job's secret; empty on loopback.
        job_id: The job.
        timeout_s: How long to wait for an answer, in seconds.
    """

    def __init__(self, address: str, secret: bytes, job_id: str, timeout_s: float = 10.0) -> None:
        self._address = address
        self._secret = secret
        self._job_id = job_id
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._watching: set[socket.socket] = set()
        self._closed = False

    def status(self) -> dict[str, Any]:
        """Return the state of the job.

        Raises:
            MembershipError: If the coordinator refuses.
            OSError: If it cannot be reached.
        """
        value = self._call(AdminCall("status"))
        if not isinstance(value, dict):
            raise MembershipError(f"{self._address}: the status must be an object, got {type(value).__name__}")
        return value

    def preempt(self, instance: str, grace_s: float | None = None) -> None:
        """Give notice to an instance; errors as :meth:`status`."""
        self._call(AdminCall("preempt", instance=instance, grace_s=grace_s))

    def stop(self, graceful: bool = True) -> None:
        """End the job, after the current step if ``graceful``; errors as :meth:`status`."""
        self._call(AdminCall("stop", graceful=graceful))

    def expect(self, count: int) -> None:
        """Change how many instances the start waits for; errors as :meth:`status`."""
        self._call(AdminCall("expect", count=count))

    def watch(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the timeline, from the beginning and as they happen.

        Ends when the coordinator does, or :meth:`close` is called from another thread. Errors as :meth:`status`.
        """
        sock = self._connect()
        with self._lock:
            self._watching.add(sock)
            closed = self._closed
        try:
            if closed:
                return
            send_frame(sock, encode(AdminCall("watch")))
            while True:
                try:
                    message = decode(recv_frame(sock))
                except OSError:
                    return
                if isinstance(message, TimelineEntry):
                    yield message.record
        finally:
            with self._lock:
                self._watching.discard(sock)
            sock.close()

    def close(self) -> None:
        """End every :meth:`watch`."""
        with self._lock:
            self._closed = True
            for sock in self._watching:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _connect(self) -> socket.socket:
        sock = connect_authenticated(
            self._address, self._secret, self._job_id, f"admin-{os.getpid()}", "admin", self._timeout_s
        )
        tune_socket(sock, self._timeout_s)
        return sock

    def _call(self, call: AdminCall) -> Any:
        with contextlib.closing(self._connect()) as sock:
            send_frame(sock, encode(call))
            reply = decode(recv_frame(sock, deadline=time.monotonic() + self._timeout_s))
        if not isinstance(reply, AdminReply):
            raise MembershipError(f"{self._address}: expected an answer, got {type(reply).__name__}")
        if reply.error is not None:
            raise MembershipError(reply.error)
        return reply.value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lightning_parcae.control.service", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--bind", default="127.0.0.1:0", metavar="HOST:PORT", help="address to listen on; port 0: any")
    parser.add_argument("--job-id", required=True, help="name of the job; instances of other jobs are refused")
    parser.add_argument("--run-dir", type=Path, help="where to write timeline.jsonl and state.json")
    parser.add_argument("--expected", type=int, help="instances to wait for at the start, at most 30 s")
    parser.add_argument(
        "--failure-timeout", type=float, default=20.0, metavar="S", help="silence after which an instance is dead"
    )
    parser.add_argument("--address-file", type=Path, help="file to write the bound address to")
    return parser


async def _serve(options: argparse.Namespace, secret: bytes) -> int:
    host, port = parse_address(options.bind)
    service = Service(
        secret, options.job_id, options.failure_timeout, run_dir=options.run_dir, expected=options.expected
    )
    address = await service.start(host, port)
    log.info("coordinator of job %s listens on %s", options.job_id, address)
    if options.address_file is not None:
        _write_atomically(options.address_file, address + "\n")
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, service.end)
    return await service.run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the coordinator until its job is over; return the job's exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        return asyncio.run(_serve(options, load_secret(os.environ)))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"the coordinator cannot start: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
