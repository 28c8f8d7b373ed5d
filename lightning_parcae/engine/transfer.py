"""Moving state between instances: each one serves what it holds, and whoever needs it pulls it.

No group is needed, so a joiner pulls while it is still outside. On an authenticated connection the client asks for a
key in a generation; the server answers with the skeleton of a tree (:mod:`lightning_parcae.engine.wire`) and its
buffers, sent from the memory of the tensors and received into the memory of the new ones, then a checksum of both::

    client -> server   frame {"key", "generation"}
    server -> client   frame {"skeleton", "bytes"}, skeleton, buffers, checksum     or     frame {"error"}

A stopped or vanished peer is noticed when nothing has moved for the timeout; however slow the link, moving state is
never cut off. Shutting a socket down from another thread releases whatever is blocked on it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from lightning_parcae.control.transport import (
    MAX_UNAUTHENTICATED_FRAME_BYTES,
    ClientHandshake,
    PeerInfo,
    accept_authenticated,
    check_bind_host,
    close_in_child,
    format_address,
    parse_address,
    recv_exactly,
    recv_frame,
    send_frame,
    tune_socket,
)
from lightning_parcae.engine.wire import allocate, byte_view, skeleton
from lightning_parcae.errors import MembershipError, MigrationError

__all__ = ["StateClient", "StateServer"]

_logger = logging.getLogger(__name__)

_ROLE = "state"
_CHECKSUM = struct.Struct(">I")
_PIECE_BYTES = 1 << 20  # Small enough that the checksum finds the bytes in the cache, large enough for few calls.
_MAX_VIEWS = 256  # Of one system call; Linux allows 1024.
_FOLDED_BYTES = 1 << 16
_LANES = 509
_MAX_SKELETON_BYTES = 1 << 28
_JOIN_TIMEOUT_S = 5.0


class StateServer:
    """Serves the state of this instance, one thread for each connection.

    Args:
        provider: Called with a key and a generation, in any thread; returns the tree, which must not change until the
            generation is over, or raises LookupError with a text for the client (no such key, another generation).
        bind_host: The only address to listen on.
        secret: The job's secret; empty on loopback.
        job_id: The only job that is served.
        port: Port to listen on; 0 for any.
        max_connections: Connections served at once; more wait.
        idle_timeout_s: Seconds without a byte moving after which a connection is closed.

    Raises:
        ValueError: If ``bind_host`` is not loopback and there is no secret.
        OSError: If the address cannot be bound.
    """

    def __init__(
        self,
        provider: Callable[[str, int], Any],
        *,
        bind_host: str,
        secret: bytes,
        job_id: str,
        port: int = 0,
        max_connections: int = 32,
        idle_timeout_s: float = 30.0,
    ) -> None:
        check_bind_host(bind_host, secret)
        self._provider = provider
        self._secret = secret
        self._job_id = job_id
        self._idle_timeout_s = idle_timeout_s
        family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
        self._listener = socket.create_server((bind_host, port), family=family, backlog=64)
        close_in_child(self._listener)
        self.address = format_address(bind_host, self._listener.getsockname()[1])
        """``host:port``, with the host that was given."""
        self._closed = threading.Event()
        self._slots = threading.BoundedSemaphore(max_connections)
        self._sockets = _Sockets()
        self._threads: set[threading.Thread] = set()  # Guarded by the lock.
        self._lock = threading.Lock()
        self._acceptor = threading.Thread(target=self._accept, name="parcae-state-server", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Close every connection and wait for the threads; may be called again."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # close() alone does not wake a blocked accept().
        self._sockets.shut_down()
        with self._lock:
            threads = [self._acceptor, *self._threads]
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _logger.warning("thread %s of the state server did not end within %g s", thread.name, _JOIN_TIMEOUT_S)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            self._slots.acquire()
            try:
                if self._closed.is_set():
                    return
                sock, _ = self._listener.accept()
            except OSError as error:
                self._slots.release()
                if self._closed.is_set():
                    return
                _logger.warning("the state server cannot accept a connection: %s", error)
                self._closed.wait(0.1)  # Out of file descriptors, say: do not spin.
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), name="parcae-state-connection", daemon=True)
            with self._lock:
                self._threads.add(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            self._sockets.add(sock)
            accept_authenticated(sock, self._secret, self._job_id)
            tune_socket(sock, self._idle_timeout_s)
            sock.settimeout(self._idle_timeout_s)
            while not self._closed.is_set():
                self._answer(sock)
        except (OSError, MembershipError, _ClosedError) as error:
            _logger.debug("a connection of the state server ended: %s", error)
        except Exception:
            _logger.exception("a connection of the state server failed")
        finally:
            self._sockets.remove(sock)
            with self._lock:
                self._threads.discard(threading.current_thread())
            self._slots.release()

    def _answer(self, sock: socket.socket) -> None:
        try:
            request = json.loads(recv_frame(sock, limit=MAX_UNAUTHENTICATED_FRAME_BYTES))
            key, generation = str(request["key"]), int(request["generation"])
        except (ValueError, KeyError, TypeError) as error:
            raise MembershipError(f"not a request: {error!r}") from error
        try:
            head, buffers = skeleton(self._provider(key, generation), root=key)
        except LookupError as error:
            text = str(error.args[0]) if error.args else f"there is no {key!r}"  # str(KeyError) is a repr.
            send_frame(sock, _dump({"error": text}))
            return
        except Exception as error:
            _logger.exception("cannot serve %r of generation %d", key, generation)
            send_frame(sock, _dump({"error": f"{type(error).__name__}: {error}"[:10_000]}))
            return
        send_frame(sock, _dump({"skeleton": len(head), "bytes": _num_bytes(buffers)}))
        sock.sendall(head)
        checksum = _send(sock, map(byte_view, buffers), zlib.crc32(head))
        sock.sendall(_CHECKSUM.pack(checksum))


class StateClient:
    """Pulls state from the servers of other instances.

    Args:
        secret: The job's secret; empty on loopback.
        job_id: The job.
        incarnation: This process.
    """

    def __init__(self, secret: bytes, job_id: str, incarnation: str) -> None:
        self._secret = secret
        self._peer = PeerInfo(_ROLE, job_id, incarnation)
        self._lock = threading.Lock()
        self._calls: set[_Sockets] = set()  # The sockets of each fetch that is going on. Guarded by the lock.
        self._cancelled = False
        self.bytes_received = 0
        """Bytes of all buffers received so far."""

    def fetch(self, address: str, key: str, generation: int, timeout_s: float) -> Any:
        """Pull one tree.

        Args:
            address: ``host:port`` of the server.
            key: What to ask for.
            generation: The generation the state must be of.
            timeout_s: Seconds without a byte arriving after which to give up.

        Raises:
            MigrationError: If the server does not have it, the connection fails, or :meth:`cancel` was called.
        """
        return self.fetch_many([(address, key)], generation, timeout_s)[0]

    def fetch_many(
        self, requests: Sequence[tuple[str, str]], generation: int, timeout_s: float, max_parallel: int = 4
    ) -> list[Any]:
        """Pull several trees over several connections at once.

        Args:
            requests: Pairs of a server's address and a key; fetched in about this order.
            generation: The generation the state must be of.
            timeout_s: Seconds without a byte arriving on a connection after which to give up.
            max_parallel: Most connections at once, at least 1.

        Returns:
            The trees, in the order of the requests.

        Raises:
            MigrationError: If any of them fails, or :meth:`cancel` was called. The others are stopped then.
        """
        if max_parallel < 1:
            raise ValueError(f"max_parallel must be at least 1, got {max_parallel}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        results: list[Any] = [None] * len(requests)
        work: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(len(requests)):
            work.put(index)
        failures: list[Exception] = []

        def pull() -> None:
            try:
                self._pull(requests, work, results, generation, timeout_s, sockets)
            except Exception as error:  # Of a thread: handed over below.
                failures.append(error)
                sockets.shut_down()

        with self._call() as sockets:
            threads = [
                threading.Thread(target=pull, name="parcae-state-fetch", daemon=True)
                for _ in range(min(max_parallel, len(requests)) - 1)
            ]
            for thread in threads:
                thread.start()
            if requests:
                pull()
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]
        return results

    def cancel(self) -> None:
        """Release every fetch at once, from any thread, and refuse later ones."""
        with self._lock:
            self._cancelled = True
            calls = list(self._calls)
        for sockets in calls:
            sockets.shut_down()

    @contextlib.contextmanager
    def _call(self) -> Iterator[_Sockets]:
        sockets = _Sockets()
        with self._lock:
            if self._cancelled:
                raise MigrationError("state cannot be fetched: this client was cancelled")
            self._calls.add(sockets)
        try:
            yield sockets
        finally:
            with self._lock:
                self._calls.discard(sockets)

    def _pull(
        self,
        requests: Sequence[tuple[str, str]],
        work: queue.SimpleQueue[int],
        results: list[Any],
        generation: int,
        timeout_s: float,
        sockets: _Sockets,
    ) -> None:
        """Fetch what is left of the work, keeping one connection open while the server stays the same."""
        connected = ""
        sock: socket.socket | None = None
        try:
            while True:
                try:
                    index = work.get_nowait()
                except queue.Empty:
                    return
                address, key = requests[index]
                try:
                    if sock is None or address != connected:
                        if sock is not None:
                            sockets.remove(sock)
                        sock = None
                        sock = self._connect(address, timeout_s, sockets)
                        connected = address
                    results[index] = self._ask(sock, key, generation)
                except (OSError, ValueError, MembershipError, _ClosedError, MigrationError, RuntimeError) as error:
                    raise self._failure(
                        f"{key!r} of generation {generation} from {address}", error, timeout_s
                    ) from error
        finally:
            if sock is not None:
                sockets.remove(sock)

    def _failure(self, what: str, error: Exception, timeout_s: float) -> MigrationError:
        if self._cancelled:
            return MigrationError(f"could not fetch {what}: cancelled")
        if isinstance(error, (TimeoutError, BlockingIOError)):
            return MigrationError(f"could not fetch {what}: nothing arrived for {timeout_s:g} s")
        return MigrationError(f"could not fetch {what}: {error}")

    def _connect(self, address: str, timeout_s: float, sockets: _Sockets) -> socket.socket:
        """Connect as transport.connect_authenticated does, on a socket that can be shut down meanwhile."""
        host, port = parse_address(address)
        deadline = time.monotonic() + timeout_s
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sockets.add(sock)
        try:
            close_in_child(sock)
            sock.settimeout(timeout_s)
            sock.connect(target)
            sockets.check()  # A shutdown before connect() has no effect.
            if sock.getsockname() == sock.getpeername():
                raise ConnectionRefusedError(f"nobody listens at {address}")
            handshake = ClientHandshake(self._secret, self._peer)
            send_frame(sock, handshake.hello())
            challenge = recv_frame(sock, limit=MAX_UNAUTHENTICATED_FRAME_BYTES, deadline=deadline)
            send_frame(sock, handshake.answer(challenge))
            handshake.conclude(recv_frame(sock, limit=MAX_UNAUTHENTICATED_FRAME_BYTES, deadline=deadline))
            tune_socket(sock, timeout_s)
            sock.settimeout(timeout_s)
        except BaseException:
            sockets.remove(sock)
            raise
        return sock

    def _ask(self, sock: socket.socket, key: str, generation: int) -> Any:
        send_frame(sock, _dump({"key": key, "generation": generation}))
        answer = json.loads(recv_frame(sock))
        if not isinstance(answer, dict):
            raise ValueError(f"the server answered {str(answer)[:100]!r}")
        if "error" in answer:
            raise MigrationError(str(answer["error"]))
        length, num_bytes = answer.get("skeleton"), answer.get("bytes")
        if type(length) is not int or type(num_bytes) is not int or not 0 <= length <= _MAX_SKELETON_BYTES:
            raise ValueError(f"the server answered {str(answer)[:100]!r}")
        head = recv_exactly(sock, length)
        tensors, rebuild = allocate(head)
        if _num_bytes(tensors) != num_bytes:
            raise ValueError(f"the server announced {num_bytes} bytes for a tree of {_num_bytes(tensors)}")
        checksum = _receive(sock, map(byte_view, tensors), zlib.crc32(head))
        (expected,) = _CHECKSUM.unpack(recv_exactly(sock, _CHECKSUM.size))
        if checksum != expected:
            raise ValueError(f"the bytes were damaged on the way (checksum {checksum:#x}, expected {expected:#x})")
        with self._lock:
            self.bytes_received += num_bytes
        return rebuild()


class _ClosedError(Exception):
    """A socket was to be used after its owner had shut all of them down."""


class _Sockets:
    """Sockets that another thread may shut down, all at once and for good."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._closed = False

    def add(self, sock: socket.socket) -> None:
        with self._lock:
            if not self._closed:
                self._sockets.add(sock)
                return
        sock.close()
        raise _ClosedError("closed")

    def check(self) -> None:
        if self._closed:
            raise _ClosedError("closed")

    def remove(self, sock: socket.socket) -> None:
        # Closed under the lock: shut_down() must not meet a descriptor that has been reused.
        with self._lock:
            self._sockets.discard(sock)
            sock.close()

    def shut_down(self) -> None:
        with self._lock:
            self._closed = True
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


def _dump(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _batches(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Cut buffers into pieces and gather these into lists of about one piece's size."""
    batch: list[memoryview] = []
    room = _PIECE_BYTES
    for view in views:
        offset = 0
        while offset < len(view):
            piece = view[offset : offset + room]
            batch.append(piece)
            offset += len(piece)
            room -= len(piece)
            if not room or len(batch) == _MAX_VIEWS:
                yield batch
                batch, room = [], _PIECE_BYTES
    if batch:
        yield batch


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Drop the first bytes of a list of buffers."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


def _add_checksum(piece: memoryview, checksum: int) -> int:
    """Continue a checksum over a piece; both sides cut the same pieces.

    A CRC-32 alone runs at 7 GB/s and takes 40 % of loopback's speed. A large piece is folded first, at 32 GB/s: its
    64-bit words are added up in lanes, and the CRC is taken of the sums. Any damage within a word changes them, and
    since the number of lanes is prime, so do words, cache lines or pages in the wrong order.
    """
    if len(piece) < _FOLDED_BYTES:
        return zlib.crc32(piece, checksum)
    num_rows = len(piece) // (8 * _LANES)
    sums = np.frombuffer(piece, dtype=np.uint64, count=num_rows * _LANES).reshape(num_rows, _LANES).sum(axis=0)
    return zlib.crc32(piece[8 * num_rows * _LANES :], zlib.crc32(sums.tobytes(), checksum))


def _send(sock: socket.socket, views: Iterable[memoryview], checksum: int) -> int:
    """Send buffers from their own memory; return the checksum continued over them."""
    for batch in _batches(views):
        for piece in batch:
            checksum = _add_checksum(piece, checksum)
        left = batch
        while left:
            left = _after(left, sock.sendmsg(left))
    return checksum


def _receive(sock: socket.socket, views: Iterable[memoryview], checksum: int) -> int:
    """Fill buffers in their own memory; return the checksum continued over them."""
    for batch in _batches(views):
        left = batch
        while left:
            count = sock.recvmsg_into(left)[0]
            if not count:
                raise ConnectionResetError("the server closed the connection before the end")
            left = _after(left, count)
        for piece in batch:
            checksum = _add_checksum(piece, checksum)
    return checksum
