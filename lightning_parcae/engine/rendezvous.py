"""Where the members of a generation find each other: a blackboard of small values.

The instance of rank 0 serves it; gloo's groups read and write it while they are built. torch's own TCPStore would do,
but its client looks names up backwards three times per connection (seconds each where DNS is slow), cannot be
interrupted, and logs a page of C++ frames whenever it is given up, which is normal here.

A request is ``op, length of key, length of value, key, value`` with op ``S`` (set) or ``G`` (get; answered when the key
is there); an answer is ``length of key, length of value, key, value``. There is no authentication, as in gloo itself:
private networks only.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from lightning_parcae.engine import sockets
from lightning_parcae.engine.sockets import Address, Endpoints

__all__ = ["RendezvousClient", "RendezvousStore", "split_address"]

_REQUEST = struct.Struct("!cHI")
_ANSWER = struct.Struct("!HI")
_MAX_VALUE_BYTES = 1 << 20
_MAX_ENTRIES = 1 << 14


def split_address(address: str) -> Address:
    """Split ``"host:port"``.

    Raises:
        ValueError: If it does not read like that.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f'a store address reads "host:port", got {address!r}')
    return host.strip("[]"), int(port)


class RendezvousStore:
    """The blackboard of this process, served by one thread.

    Args:
        bind_host: The only address it listens on.

    Attributes:
        address: Where it listens, ``"host:port"``.
    """

    def __init__(self, bind_host: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
        self._listener = socket.create_server((bind_host, 0), family=family, backlog=512)
        self._listener.setblocking(False)
        host, port = self._listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._endpoints = Endpoints(local={(host, port)})
        sockets.close_in_children(self._endpoints)
        # Old generations' values are forgotten when there is no room; nobody asks for them.
        self._values: OrderedDict[bytes, bytes] = OrderedDict()
        self._waiting: dict[bytes, list[_Connection]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="parcae-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; groups that are formed do not need it any more."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(5)

    def _serve(self) -> None:
        connections: set[_Connection] = set()
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._woken:
                        return
                    if key.fileobj is self._listener:
                        self._accept(connections)
                    elif not self._read(key.data):
                        self._drop(key.data)
                        connections.discard(key.data)
        finally:
            for connection in connections:
                connection.sock.close()
            self._selector.close()
            for sock in (self._listener, self._wake, self._woken):
                sock.close()

    def _accept(self, connections: set[_Connection]) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Answers are small and clients read them: a send that would block for a second ends the connection.
            sock.settimeout(1.0)
            connection = _Connection(sock)
            connections.add(connection)
            self._selector.register(sock, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> bool:
        try:
            data = connection.sock.recv(1 << 16)
            if not data:
                return False
            connection.buffer += data
            while (request := connection.next_request()) is not None:
                self._answer(connection, *request)
        except (OSError, ValueError):
            return False
        return True

    def _answer(self, connection: _Connection, op: bytes, key: bytes, value: bytes) -> None:
        if op == b"S":
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > _MAX_ENTRIES:
                self._values.popitem(last=False)
            for waiting in self._waiting.pop(key, []):
                with contextlib.suppress(OSError):  # its own turn will find it gone
                    waiting.answer(key, value)
        elif key in self._values:
            connection.answer(key, self._values[key])
        else:
            self._waiting.setdefault(key, []).append(connection)

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.sock)
        connection.sock.close()
        for key in [key for key, waiting in self._waiting.items() if connection in waiting]:
            self._waiting[key] = [other for other in self._waiting[key] if other is not connection]
            if not self._waiting[key]:
                del self._waiting[key]


class _Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = bytearray()

    def next_request(self) -> tuple[bytes, bytes, bytes] | None:
        """Take a complete request out of the buffer; a ValueError if it is none of ours."""
        if len(self.buffer) < _REQUEST.size:
            return None
        op, key_length, value_length = _REQUEST.unpack_from(self.buffer)
        if op not in (b"S", b"G") or value_length > _MAX_VALUE_BYTES:
            raise ValueError(f"not a request: {op!r} with {value_length} bytes")
        end = _REQUEST.size + key_length + value_length
        if len(self.buffer) < end:
            return None
        key = bytes(self.buffer[_REQUEST.size : _REQUEST.size + key_length])
        value = bytes(self.buffer[_REQUEST.size + key_length : end])
        del self.buffer[:end]
        return op, key, value

    def answer(self, key: bytes, value: bytes) -> None:
        self.sock.sendall(_ANSWER.pack(len(key), len(value)) + key + value)


class RendezvousClient(dist.Store):  # type: ignore[misc, unused-ignore]
    """A connection to a blackboard, in the form that torch's process groups want.

    Args:
        address: The store's ``"host:port"``.
        timeout_s: Seconds until an operation gives up.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        super().__init__()
        host, port = split_address(address)
        self._sock = socket.create_connection((host, port), timeout=timeout_s)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()
        self._endpoints = Endpoints(remote={self._sock.getpeername()[:2]})
        sockets.close_in_children(self._endpoints)

    @property
    def local_host(self) -> str:
        """The address of this host that faces the store."""
        return str(self._sock.getsockname()[0])

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value."""
        with self._lock:
            self._send(b"S", key.encode(), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Return a value as soon as somebody has written it."""
        found: list[bytes] = []
        self.collect([key], lambda _, value: found.append(value))
        return found[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all values have been written; the timeout is the connection's own."""
        self.collect(keys, lambda key, value: None)

    def collect(self, keys: Sequence[str], found: Callable[[str, bytes], object]) -> None:
        """Ask for several values at once and hand each over when it is there."""
        with self._lock:
            for key in keys:
                self._send(b"G", key.encode(), b"")
            for _ in keys:
                key_length, value_length = _ANSWER.unpack(self._receive(_ANSWER.size))
                key = self._receive(key_length).decode()
                found(key, self._receive(value_length))

    def close(self) -> None:
        """Make every operation fail, also one that another thread is in."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _send(self, op: bytes, key: bytes, value: bytes) -> None:
        self._sock.sendall(_REQUEST.pack(op, len(key), len(value)) + key + value)

    def _receive(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self._sock.recv(count - len(data))
            if not piece:
                raise ConnectionError("the rendezvous store has gone")
            data += piece
        return bytes(data)
