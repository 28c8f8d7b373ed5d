"""Framed, authenticated TCP: what every control and state connection starts with.

A frame is a 4-byte big-endian length and as many bytes. A connection opens with three frames that prove to each
side that the other one knows the job's secret, without sending it::

    client -> server   protocol, role, job id, incarnation, client nonce
    server -> client   server nonce, HMAC over ("server", all of the above, both nonces)
    client -> server   HMAC over ("client", the same)
    server -> client   ok

Nonces make a recorded exchange useless, the labels "server" and "client" make a reflected one useless, and the role
and the incarnation cannot be swapped for others. A server answers a mistake that it can name (protocol, job) with a
refusal; to anything else (HTTP, noise, silence) it says nothing and closes.

The handshake itself does no I/O (:class:`ServerHandshake`, :class:`ClientHandshake`); thin wrappers run it on
blocking sockets (agent, state server) and on asyncio streams (coordinator). Network trouble surfaces as OSError, which
is worth a retry; a refusal surfaces as MembershipError, which is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_parcae.control.messages import PROTOCOL_VERSION
from lightning_parcae.errors import MembershipError, RefusedError

MAX_FRAME_BYTES = 16 * 1024 * 1024
MAX_UNAUTHENTICATED_FRAME_BYTES = 64 * 1024
HANDSHAKE_TIMEOUT_S = 5.0
MIN_SECRET_BYTES = 16

_LENGTH = struct.Struct(">I")


def parse_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[ipv6]:port``.

    Raises:
        ValueError: If there is no host or no port from 0 to 65535.
    """
    host, separator, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not separator or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"an address must look like host:port, for example 10.0.0.1:29400, got {address!r}")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Join a host and a port; the inverse of :func:`parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def load_secret(environ: Mapping[str, str]) -> bytes:
    """Return the secret in the file that ``PARCAE_SECRET_FILE`` names, or in ``PARCAE_SECRET``; empty without both.

    Raises:
        ValueError: If the file cannot be read, or the secret is too short to withstand guessing.
    """
    path = environ.get("PARCAE_SECRET_FILE")
    if path:
        try:
            secret = Path(path).read_bytes().strip()
        except OSError as error:
            raise ValueError(f"PARCAE_SECRET_FILE={path} cannot be read: {error.strerror}") from error
        origin = f"the secret in {path}"
    else:
        secret = environ.get("PARCAE_SECRET", "").strip().encode()
        origin = "PARCAE_SECRET"
        if not secret:
            return b""
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"{origin} must have at least {MIN_SECRET_BYTES} characters, got {len(secret)}; "
            'make one with: python -c "import secrets; print(secrets.token_hex(32))"'
        )
    return secret


def is_loopback(host: str) -> bool:
    """Return whether a host name or address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind_host(host: str, secret: bytes) -> None:
    """Refuse to listen where other machines can connect without a secret.

    Raises:
        ValueError: If ``host`` is not loopback and ``secret`` is empty.
    """
    if not secret and not is_loopback(host):
        raise ValueError(
            f"refusing to listen on {host} without a job secret, since any machine could then join the job: "
            "set PARCAE_SECRET_FILE (or PARCAE_SECRET) to the same secret on every instance, or bind to 127.0.0.1"
        )


def tune_socket(sock: socket.socket, failure_timeout_s: float) -> None:
    """Make a TCP connection prompt, and make it notice a peer whose host vanished.

    Args:
        sock: A connected TCP socket.
        failure_timeout_s: Unacknowledged data may be this old, in seconds, before the kernel gives the peer up.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every platform has all of these; without them a vanished host is still found by the lease.
    options = {
        "TCP_KEEPIDLE": 1,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": max(1000, int(failure_timeout_s * 1000)),
    }
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_closed_in_children: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_child(sock: socket.socket) -> None:
    """Close a socket in every process forked from now on.

    A forked DataLoader worker that inherits a connection keeps it open after its parent was killed, so that the other
    side sees no end of file, and the death is found seconds later by the lease instead of at once.
    """
    _closed_in_children.add(sock)


def _close_after_fork() -> None:
    for sock in list(_closed_in_children):
        with contextlib.suppress(OSError):
            descriptor = sock.detach()  # not close(): that does nothing while a makefile() of the socket lives
            if descriptor >= 0:
                os.close(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_after_fork)


def pack_frame(payload: bytes) -> bytes:
    """Return a payload with its length in front.

    Raises:
        ValueError: If the payload is longer than 16 MiB.
    """
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(
            f"a frame may hold {MAX_FRAME_BYTES} bytes, got {len(payload)}; send large data by a state server"
        )
    return _LENGTH.pack(len(payload)) + payload


def _frame_length(header: bytes, limit: int) -> int:
    (length,) = _LENGTH.unpack(header)
    if length > limit:
        raise MembershipError(
            f"the peer announced a frame of {length} bytes where at most {limit} are allowed: "
            "it does not speak this protocol, or it is faulty"
        )
    return int(length)


def send_frame(sock: socket.socket, payload: bytes) -> None:
    """Send one frame on a blocking socket."""
    sock.sendall(pack_frame(payload))


def recv_exactly(sock: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Receive ``size`` bytes on a blocking socket.

    Args:
        sock: The socket; its timeout is changed if a deadline is given.
        size: Bytes to receive.
        deadline: Reading of ``time.monotonic`` after which to give up, however many bytes drip in before.

    Raises:
        ConnectionError: If the peer closes before.
        TimeoutError: If the deadline passes before.
    """
    pieces = bytearray()
    while len(pieces) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the peer did not send a whole frame in time")
            sock.settimeout(left)
        piece = sock.recv(min(size - len(pieces), 1 << 20))
        if not piece:
            raise ConnectionResetError("the peer closed the connection")
        pieces += piece
    return bytes(pieces)


def recv_frame(sock: socket.socket, *, limit: int = MAX_FRAME_BYTES, deadline: float | None = None) -> bytes:
    """Receive one frame on a blocking socket.

    Raises:
        MembershipError: If the frame is longer than ``limit`` bytes; nothing of it is read.
        ConnectionError: If the peer closes before the end of the frame.
        TimeoutError: If the deadline passes before.
    """
    return recv_exactly(sock, _frame_length(recv_exactly(sock, _LENGTH.size, deadline), limit), deadline)


async def read_frame(reader: asyncio.StreamReader, *, limit: int = MAX_FRAME_BYTES) -> bytes:
    """Receive one frame on an asyncio stream; errors as :func:`recv_frame`."""
    try:
        header = await reader.readexactly(_LENGTH.size)
        return await reader.readexactly(_frame_length(header, limit))
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("the peer closed the connection") from error


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Who has proved to know the secret.

    Attributes:
        role: What the peer wants to be: ``"instance"``, ``"admin"`` or ``"state"``.
        job_id: The job, same as ours.
        incarnation: The peer's process; different for each start of an instance.
    """

    role: str
    job_id: str
    incarnation: str


def _dump(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _load(frame: bytes, **wanted: type) -> dict[str, Any]:
    try:
        fields = json.loads(frame)
    except (ValueError, RecursionError) as error:
        raise MembershipError("the peer does not speak this protocol: its handshake is not JSON") from error
    if not isinstance(fields, dict):
        raise MembershipError("the peer does not speak this protocol: its handshake is not an object")
    if isinstance(fields.get("refused"), str):
        raise RefusedError(f"the server refused this connection: {fields['refused']}")
    for name, kind in wanted.items():
        if type(fields.get(name)) is not kind:
            raise MembershipError(f"the peer does not speak this protocol: no {name} in its handshake")
    return fields


def _proof(secret: bytes, side: str, peer: PeerInfo, client_nonce: str, server_nonce: str) -> str:
    said = [side, PROTOCOL_VERSION, peer.role, peer.job_id, peer.incarnation, client_nonce, server_nonce]
    return hmac.new(secret, json.dumps(said).encode(), hashlib.sha256).hexdigest()


class ClientHandshake:
    """The connecting side of a handshake, without I/O.

    Args:
        secret: The job's secret; empty on loopback.
        peer: What this side says it is.
    """

    def __init__(self, secret: bytes, peer: PeerInfo) -> None:
        self._secret = secret
        self._peer = peer
        self._nonce = secrets.token_hex(32)

    def hello(self) -> bytes:
        """Return the first frame."""
        return _dump(
            protocol=PROTOCOL_VERSION,
            role=self._peer.role,
            job_id=self._peer.job_id,
            incarnation=self._peer.incarnation,
            nonce=self._nonce,
        )

    def answer(self, challenge: bytes) -> bytes:
        """Check the server's proof and return ours.

        Raises:
            MembershipError: If the server refuses, or does not know the secret.
        """
        fields = _load(challenge, nonce=str, proof=str)
        expected = _proof(self._secret, "server", self._peer, self._nonce, fields["nonce"])
        if not hmac.compare_digest(fields["proof"].encode(), expected.encode()):
            raise RefusedError(
                "the server does not have the same job secret: set PARCAE_SECRET_FILE (or PARCAE_SECRET) "
                "to the same secret here and there"
            )
        return _dump(proof=_proof(self._secret, "client", self._peer, self._nonce, fields["nonce"]))

    def conclude(self, verdict: bytes) -> None:
        """Check the server's last frame.

        Raises:
            MembershipError: If the server refuses.
        """
        _load(verdict, ok=bool)


class ServerHandshake:
    """The accepting side of a handshake, without I/O.

    Args:
        secret: The job's secret; empty on loopback.
        job_id: The only job that is served.

    Attributes:
        refusal: The frame to send to the peer before closing after a MembershipError; None to say nothing.
    """

    def __init__(self, secret: bytes, job_id: str) -> None:
        self._secret = secret
        self._job_id = job_id
        self._nonce = secrets.token_hex(32)
        self._client_nonce = ""
        self._peer = PeerInfo("", "", "")
        self.refusal: bytes | None = None

    def _refuse(self, reason: str) -> MembershipError:
        self.refusal = _dump(refused=reason)
        return MembershipError(reason)

    def challenge(self, hello: bytes) -> bytes:
        """Take the client's first frame and return ours.

        Raises:
            MembershipError: If it is no handshake, or one for another protocol or job.
        """
        fields = _load(hello, protocol=int, role=str, job_id=str, incarnation=str, nonce=str)
        if fields["protocol"] != PROTOCOL_VERSION:
            raise self._refuse(
                f"protocol version {PROTOCOL_VERSION} is spoken here, but {fields['protocol']} there: "
                "install the same lightning_parcae everywhere"
            )
        if fields["job_id"] != self._job_id:
            raise self._refuse(
                f"another job than {fields['job_id']!r} runs here: give each instance the job id and the address "
                "of one job (PARCAE_JOB_ID, PARCAE_COORDINATOR)"
            )
        self._client_nonce = fields["nonce"]
        self._peer = PeerInfo(fields["role"], fields["job_id"], fields["incarnation"])
        return _dump(
            nonce=self._nonce, proof=_proof(self._secret, "server", self._peer, self._client_nonce, self._nonce)
        )

    def conclude(self, answer: bytes) -> tuple[bytes, PeerInfo]:
        """Check the client's proof; return the last frame and who it is.

        Raises:
            MembershipError: If the client does not know the secret.
        """
        fields = _load(answer, proof=str)
        expected = _proof(self._secret, "client", self._peer, self._client_nonce, self._nonce)
        if not self._client_nonce or not hmac.compare_digest(fields["proof"].encode(), expected.encode()):
            raise self._refuse("the job secret is not the same here and there")
        return _dump(ok=True), self._peer


def connect_authenticated(
    address: str, secret: bytes, job_id: str, incarnation: str, role: str, timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> socket.socket:
    """Connect to a server and pass its handshake.

    Args:
        address: ``host:port``.
        secret: The job's secret; empty on loopback.
        job_id: The job that the server must run.
        incarnation: This process.
        role: ``"instance"``, ``"admin"`` or ``"state"``.
        timeout_s: Seconds for connecting and handshake together.

    Returns:
        A blocking socket without timeout; it is closed in forked children.

    Raises:
        MembershipError: If the server refuses, does not know the secret or is something else.
        OSError: If the network fails or the time is over; worth a retry.
    """
    deadline = time.monotonic() + timeout_s
    sock = socket.create_connection(parse_address(address), timeout=timeout_s)
    try:
        if sock.getsockname() == sock.getpeername():
            # The kernel may pick the wanted port as our own when nobody listens there, and connect us to ourselves.
            raise ConnectionRefusedError(f"nobody listens at {address}")
        close_in_child(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = ClientHandshake(secret, PeerInfo(role, job_id, incarnation))
        send_frame(sock, handshake.hello())
        challenge = recv_frame(sock, limit=MAX_UNAUTHENTICATED_FRAME_BYTES, deadline=deadline)
        send_frame(sock, handshake.answer(challenge))
        handshake.conclude(recv_frame(sock, limit=MAX_UNAUTHENTICATED_FRAME_BYTES, deadline=deadline))
        sock.settimeout(None)
    except MembershipError as error:
        sock.close()
        raise type(error)(f"{address}: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def accept_authenticated(
    sock: socket.socket, secret: bytes, job_id: str, timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> PeerInfo:
    """Run the accepting side of the handshake on an accepted, blocking socket.

    The socket is closed in forked children, has no timeout afterwards, and stays open on errors (close it).

    Args:
        sock: What ``accept`` returned.
        secret: The job's secret; empty on loopback.
        job_id: The only job that is served.
        timeout_s: Seconds for the whole handshake.

    Raises:
        MembershipError: If the peer is refused; it has been told why where that helps it.
        OSError: If the network fails or the time is over.
    """
    close_in_child(sock)
    deadline = time.monotonic() + timeout_s
    sock.settimeout(timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    handshake = ServerHandshake(secret, job_id)
    try:
        hello = recv_frame(sock, limit=MAX_UNAUTHENTICATED_FRAME_BYTES, deadline=deadline)
        send_frame(sock, handshake.challenge(hello))
        verdict, peer = handshake.conclude(recv_frame(sock, limit=MAX_UNAUTHENTICATED_FRAME_BYTES, deadline=deadline))
        send_frame(sock, verdict)
    except MembershipError:
        if handshake.refusal is not None:
            with contextlib.suppress(OSError):
                send_frame(sock, handshake.refusal)
        raise
    sock.settimeout(None)
    return peer


async def accept_authenticated_async(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: bytes,
    job_id: str,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> PeerInfo:
    """Run the accepting side of the handshake on asyncio streams; as :func:`accept_authenticated`."""
    handshake = ServerHandshake(secret, job_id)

    async def converse() -> PeerInfo:
        hello = await read_frame(reader, limit=MAX_UNAUTHENTICATED_FRAME_BYTES)
        writer.write(pack_frame(handshake.challenge(hello)))
        verdict, peer = handshake.conclude(await read_frame(reader, limit=MAX_UNAUTHENTICATED_FRAME_BYTES))
        writer.write(pack_frame(verdict))
        return peer

    try:
        return await asyncio.wait_for(converse(), timeout_s)
    except asyncio.TimeoutError as error:  # another class than TimeoutError before Python 3.11
        raise TimeoutError(f"the peer did not finish the handshake within {timeout_s:g} s") from error
    except MembershipError:
        if handshake.refusal is not None:
            writer.write(pack_frame(handshake.refusal))
        raise
