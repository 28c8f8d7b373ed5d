"""Frames, addresses, secrets and the handshake, over real sockets."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_parcae.control.transport import (
    MAX_FRAME_BYTES,
    MAX_UNAUTHENTICATED_FRAME_BYTES,
    ClientHandshake,
    PeerInfo,
    ServerHandshake,
    accept_authenticated,
    check_bind_host,
    close_in_child,
    connect_authenticated,
    format_address,
    is_loopback,
    load_secret,
    pack_frame,
    parse_address,
    recv_frame,
    send_frame,
    tune_socket,
)
from lightning_parcae.errors import MembershipError

SECRET = b"a secret of the job"


class Server:
    """Accepts one connection after the other, and keeps what came of each."""

    def __init__(self, secret: bytes = SECRET, job_id: str = "job", timeout_s: float = 2.0) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.outcomes: list[PeerInfo | Exception] = []
        self._settings = (secret, job_id, timeout_s)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self.socket.accept()
            except OSError:
                return
            with sock:
                try:
                    self.outcomes.append(accept_authenticated(sock, *self._settings))
                    send_frame(sock, b"welcome")
                except (MembershipError, OSError) as error:
                    self.outcomes.append(error)

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def connect(
    server: Server, secret: bytes = SECRET, job_id: str = "job", incarnation: str = "a#1", role: str = "instance"
) -> socket.socket:
    return connect_authenticated(server.address, secret, job_id, incarnation, role, 2.0)


def outcome(server: Server, count: int = 1) -> PeerInfo | Exception:
    deadline = time.monotonic() + 5
    while len(server.outcomes) < count and time.monotonic() < deadline:
        time.sleep(0.005)
    return server.outcomes[count - 1]


def test_the_right_secret_connects(server: Server) -> None:
    with connect(server) as sock:
        assert recv_frame(sock) == b"welcome"
        assert sock.gettimeout() is None
    assert outcome(server) == PeerInfo("instance", "job", "a#1")


def test_a_wrong_secret_is_noticed_by_the_client(server: Server) -> None:
    with pytest.raises(MembershipError, match="same job secret"):
        connect(server, secret=b"another secret here")
    assert isinstance(outcome(server), OSError)


def test_a_client_without_the_secret_is_refused(server: Server) -> None:
    """It must not help to leave the server's proof unchecked."""
    with socket.create_connection(parse_address(server.address)) as sock:
        client = ClientHandshake(b"guessed", PeerInfo("instance", "job", "a#1"))
        send_frame(sock, client.hello())
        recv_frame(sock)
        send_frame(sock, json.dumps({"proof": "0" * 64}).encode())
        assert "refused" in json.loads(recv_frame(sock))
        with pytest.raises(ConnectionError):
            recv_frame(sock)
    assert isinstance(outcome(server), MembershipError)


def test_another_job_is_refused_by_name(server: Server) -> None:
    with pytest.raises(MembershipError, match=r"another job than 'other'.*PARCAE_JOB_ID"):
        connect(server, job_id="other")


def test_another_protocol_version_is_refused_with_both(server: Server) -> None:
    with socket.create_connection(parse_address(server.address)) as sock:
        hello = json.loads(ClientHandshake(SECRET, PeerInfo("instance", "job", "a#1")).hello())
        send_frame(sock, json.dumps({**hello, "protocol": 99}).encode())
        refusal = json.loads(recv_frame(sock))["refused"]
    assert "version 1" in refusal
    assert "99" in refusal


def test_a_recorded_exchange_is_worth_nothing() -> None:
    peer = PeerInfo("instance", "job", "a#1")
    client, server = ClientHandshake(SECRET, peer), ServerHandshake(SECRET, "job")
    answer = client.answer(server.challenge(client.hello()))
    server.conclude(answer)
    again = ServerHandshake(SECRET, "job")
    again.challenge(client.hello())
    with pytest.raises(MembershipError):
        again.conclude(answer)


def test_a_reflected_proof_is_worth_nothing() -> None:
    client, server = ClientHandshake(SECRET, PeerInfo("instance", "job", "a#1")), ServerHandshake(SECRET, "job")
    challenge = json.loads(server.challenge(client.hello()))
    with pytest.raises(MembershipError):
        server.conclude(json.dumps({"proof": challenge["proof"]}).encode())


@pytest.mark.parametrize("changed", [PeerInfo("admin", "job", "a#1"), PeerInfo("instance", "job", "b#1")])
def test_the_proof_is_bound_to_role_and_incarnation(changed: PeerInfo) -> None:
    client, server = ClientHandshake(SECRET, PeerInfo("instance", "job", "a#1")), ServerHandshake(SECRET, "job")
    hello = json.loads(client.hello())
    hello.update(role=changed.role, incarnation=changed.incarnation)
    with pytest.raises(MembershipError):
        client.answer(server.challenge(json.dumps(hello).encode()))


def test_the_first_answer_cannot_come_before_the_hello() -> None:
    proof = hmac.new(SECRET, b"", hashlib.sha256).hexdigest()
    with pytest.raises(MembershipError):
        ServerHandshake(SECRET, "job").conclude(json.dumps({"proof": proof}).encode())


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        bytes(random.Random(1).getrandbits(8) for _ in range(4096)) * 2560,
        pack_frame(b"not json"),
        pack_frame(b"[1, 2]"),
        pack_frame(b'{"protocol": 1}'),
        pack_frame(b"[" * 60_000),
        struct.pack(">I", MAX_UNAUTHENTICATED_FRAME_BYTES + 1) + bytes(100),
    ],
    ids=["http", "tls", "10 MB", "text", "list", "incomplete", "deep", "long"],
)
def test_noise_gets_no_answer(server: Server, noise: bytes) -> None:
    with socket.create_connection(parse_address(server.address), timeout=5) as sock:
        with contextlib.suppress(OSError):  # closed before all was sent
            sock.sendall(noise)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(100) == b""
    assert isinstance(outcome(server), MembershipError)
    with connect(server) as sock:
        assert recv_frame(sock) == b"welcome"


def test_silence_and_drops_end_at_the_deadline() -> None:
    server = Server(timeout_s=0.3)
    try:
        started = time.monotonic()
        with socket.create_connection(parse_address(server.address)) as sock:
            sock.settimeout(2)
            for byte in pack_frame(ClientHandshake(SECRET, PeerInfo("instance", "job", "a#1")).hello())[:50]:
                try:
                    sock.sendall(bytes([byte]))
                except OSError:
                    break
                time.sleep(0.05)
        assert isinstance(outcome(server), TimeoutError)
        assert time.monotonic() - started < 3
    finally:
        server.close()


def test_a_server_that_is_something_else_is_named() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(1000)
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    with listener, pytest.raises(MembershipError, match="does not speak this protocol"):
        connect_authenticated(f"127.0.0.1:{listener.getsockname()[1]}", SECRET, "job", "a#1", "instance", 2.0)
    thread.join()


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(OSError, match="refused"):
        connect_authenticated(f"127.0.0.1:{port}", SECRET, "job", "a#1", "instance", 1.0)


def test_frames_are_capped_before_they_are_read() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(struct.pack(">I", MAX_FRAME_BYTES + 1))
        with pytest.raises(MembershipError, match=str(MAX_FRAME_BYTES + 1)):
            recv_frame(right)
    with pytest.raises(ValueError, match="state server"):
        pack_frame(bytes(MAX_FRAME_BYTES + 1))


def test_a_frame_may_come_in_pieces() -> None:
    left, right = socket.socketpair()
    payload = bytes(range(256)) * 1000
    with left, right:
        thread = threading.Thread(target=send_frame, args=(left, payload))
        thread.start()
        assert recv_frame(right) == payload
        thread.join()
        left.sendall(pack_frame(b"cut")[:-1])
        left.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            recv_frame(right)


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x", "host:70000", "host:-1"])
def test_malformed_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_address(address)


@pytest.mark.parametrize("address", ["10.0.0.1:29400", "host.example:1", "[::1]:80"])
def test_addresses_round_trip(address: str) -> None:
    assert format_address(*parse_address(address)) == address


def test_secrets_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("in the file, long enough\n")
    assert load_secret({}) == b""
    assert load_secret({"PARCAE_SECRET": "from the environment"}) == b"from the environment"
    assert load_secret({"PARCAE_SECRET": "x", "PARCAE_SECRET_FILE": str(file)}) == b"in the file, long enough"
    with pytest.raises(ValueError, match="at least 16") as caught:
        load_secret({"PARCAE_SECRET": "hunter2"})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ValueError, match="cannot be read"):
        load_secret({"PARCAE_SECRET_FILE": str(tmp_path / "missing")})


def test_others_may_connect_only_with_a_secret() -> None:
    check_bind_host("0.0.0.0", SECRET)
    for host in ("127.0.0.1", "::1", "localhost"):
        assert is_loopback(host)
        check_bind_host(host, b"")
    for host in ("0.0.0.0", "::", "10.1.2.3", "node7"):
        with pytest.raises(ValueError, match="PARCAE_SECRET_FILE"):
            check_bind_host(host, b"")


def test_tuned_sockets_notice_vanished_hosts(server: Server) -> None:
    with connect(server) as sock:
        tune_socket(sock, 4.0)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 4000
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3


def _in_child(action: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if action() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_forked_children_do_not_hold_connections() -> None:
    left, right = socket.socketpair()
    other = socket.socket()
    close_in_child(left)
    descriptor, kept = left.fileno(), other.fileno()
    left.makefile("rb").close()

    def is_closed() -> bool:
        try:
            os.fstat(descriptor)
        except OSError:
            return os.fstat(kept) is not None
        return False

    with left, right, other:
        assert _in_child(is_closed)
        left.sendall(b"x")  # still open here
        assert right.recv(1) == b"x"
