"""Measures the link between two hosts, or two processes of one: latency of small messages, bandwidth of a stream.

One side serves (``parcae profile --serve-link HOST:PORT``), the other one measures (``--link HOST:PORT``). Both prove
to each other that they know the job's secret, as everything does that connects hosts; without one only loopback
addresses are served. The numbers are those of one TCP connection. Failing: OSError (nobody listens, the peer is gone,
time is over) and MembershipError (another secret, no server of this kind).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lightning_parcae.control.transport import (
    accept_authenticated,
    check_bind_host,
    connect_authenticated,
    format_address,
    load_secret,
    parse_address,
    recv_exactly,
)
from lightning_parcae.errors import MembershipError
from lightning_parcae.planning.job_profile import LinkSpeed

log = logging.getLogger(__name__)

LINK_JOB = "parcae-link"
"""Name that both sides give as their job: no server of a training job takes it."""

_SIZE = struct.Struct(">I")
_CHUNK_BYTES = 1 << 20
_NUM_ECHOES = 20
_STREAM_S = 0.3  # long enough for TCP to open its window on a link of 100 ms
_MAX_STREAM_BYTES = 1 << 30
_PEER_TIMEOUT_S = 30.0


class LinkServer:
    """Answers whoever measures the link to this host, one after the other, in a thread.

    Args:
        address: ``host:port`` to listen on; port 0 for a free one.
        secret: Job secret; may be empty on loopback.

    Raises:
        ValueError: If the address is not loopback and there is no secret.
        OSError: If it cannot be listened on.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        host, port = parse_address(address)
        check_bind_host(host, secret)
        self._secret = secret
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=4)
        self.address = format_address(*self._socket.getsockname()[:2])
        self._thread = threading.Thread(target=self._run, name="parcae-link", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the server is closed."""
        self._thread.join(timeout_s)

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(_PEER_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            try:
                connection, peer = self._socket.accept()
            except OSError:
                return  # closed
            with connection:
                try:
                    accept_authenticated(connection, self._secret, LINK_JOB)
                    _answer(connection)
                    log.info("measured the link to %s", peer[0])
                except (OSError, MembershipError) as error:
                    log.warning("%s did not measure the link: %s", peer[0], error)


def _answer(connection: socket.socket) -> None:
    """Take messages of announced sizes, and answer each when it is complete; a size of 0 ends it."""
    connection.settimeout(_PEER_TIMEOUT_S)
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while size := _SIZE.unpack(recv_exactly(connection, _SIZE.size))[0]:
        left = size
        while left > 0:
            received = connection.recv_into(buffer, min(left, _CHUNK_BYTES))
            if not received:
                raise ConnectionResetError("the peer closed the connection")
            left -= received
        connection.sendall(_SIZE.pack(size))


def measure_link(address: str, secret: bytes, *, clock: Callable[[], float] = time.perf_counter) -> LinkSpeed:
    """Measure the link to a :class:`LinkServer`.

    Args:
        address: ``host:port`` of the server.
        secret: Job secret, as there.
        clock: Seconds.

    Raises:
        OSError: If the network fails.
        MembershipError: If the server refuses, or does not know the secret.
    """
    with connect_authenticated(address, secret, LINK_JOB, str(os.getpid()), "link") as connection:
        connection.settimeout(_PEER_TIMEOUT_S)
        echo_s = min(_exchange(connection, 1, clock) for _ in range(_NUM_ECHOES))
        size, took_s = _CHUNK_BYTES, 0.0
        while True:  # longer and longer, until start-up counts no more
            took_s = _exchange(connection, size, clock)
            if took_s >= _STREAM_S or size >= _MAX_STREAM_BYTES:
                break
            size *= 2
        connection.sendall(_SIZE.pack(0))
    return LinkSpeed(latency_s=echo_s / 2, bytes_per_s=size / max(took_s - echo_s, 1e-9))


def _exchange(connection: socket.socket, size: int, clock: Callable[[], float]) -> float:
    """Send a message of a size and wait for the answer; return the seconds."""
    chunk = bytes(min(size, _CHUNK_BYTES))
    started = clock()
    connection.sendall(_SIZE.pack(size) + (chunk if size < _CHUNK_BYTES else b""))
    for _ in range(size // _CHUNK_BYTES):
        connection.sendall(chunk)
    recv_exactly(connection, _SIZE.size)
    return clock() - started


def main() -> None:
    """Serve on loopback for the process that has started this one; its address goes into the file that is named."""
    server = LinkServer("127.0.0.1:0", load_secret(os.environ))
    path = Path(sys.argv[1])
    part = path.with_suffix(".part")
    part.write_text(server.address, encoding="ascii")
    part.replace(path)
    server.wait()


if __name__ == "__main__":
    main()
