"""State arrives whole, or the puller learns at once and in words why it does not."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_parcae.control.transport import accept_authenticated, recv_frame, send_frame
from lightning_parcae.engine.transfer import StateClient, StateServer
from lightning_parcae.engine.wire import skeleton
from lightning_parcae.errors import MigrationError

SECRET = b"0123456789abcdef"
JOB = "job"
LONG_S = 20.0


def layer(index: int, num_floats: int = 1000) -> dict[str, Any]:
    return {
        "params": {"weight": torch.arange(num_floats, dtype=torch.float32) + index, "bias": torch.tensor(float(index))},
        "optimizer": {"weight": {"step": torch.tensor(3.0), "exp_avg": torch.zeros(num_floats)}},
        "empty": torch.empty(0),
        "name": f"layer {index}",
    }


def provide(key: str, generation: int) -> Any:
    if generation != 5:
        raise LookupError(f"generation 5 is served here, not {generation}")
    kind, _, index = key.partition(":")
    if kind == "big":
        return layer(int(index), 8_000_000)
    return {"layer": lambda: layer(int(index))}[kind]()


@contextlib.contextmanager
def serving(provider: Callable[[str, int], Any] = provide, **options: Any) -> Iterator[StateServer]:
    server = StateServer(provider, bind_host="127.0.0.1", secret=SECRET, job_id=JOB, **options)
    try:
        yield server
    finally:
        server.close()


def new_client(secret: bytes = SECRET, job_id: str = JOB) -> StateClient:
    return StateClient(secret, job_id, "incarnation")


@contextlib.contextmanager
def listening(handle: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server made of one function, for misbehaviour."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as sock:
                        handle(sock)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def relay(address: str, change: Callable[[int, bytearray], None]) -> Callable[[socket.socket], None]:
    """Pass bytes on to a server; what comes back is changed at its offset."""

    def handle(sock: socket.socket) -> None:
        host, _, port = address.partition(":")
        with socket.create_connection((host, int(port))) as upstream:
            offset = 0
            while True:
                for ready in select.select([sock, upstream], [], [])[0]:
                    data = bytearray(ready.recv(1 << 16))
                    if not data:
                        return
                    if ready is upstream:
                        change(offset, data)
                        offset += len(data)
                    (upstream if ready is sock else sock).sendall(data)

    return handle


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def state_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("parcae-state")]


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left["name"] == right["name"] and all(
        torch.equal(left["params"][name], right["params"][name]) for name in ("weight", "bias")
    )


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    before = descriptors()
    yield
    deadline = time.monotonic() + 2
    while (state_threads() or descriptors() > before) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert state_threads() == []
    assert descriptors() <= before


def test_a_tree_arrives_bit_for_bit() -> None:
    with serving() as server:
        client = new_client()
        result = client.fetch(server.address, "layer:7", 5, LONG_S)
    assert equal(result, layer(7))
    assert result["optimizer"]["weight"]["step"].item() == 3
    assert client.bytes_received == 4 * (1000 + 1 + 1 + 1000)


def test_many_trees_arrive_in_order_from_several_servers() -> None:
    with serving() as one, serving() as two:
        requests = [((one, two)[index % 3 == 0].address, f"layer:{index}") for index in range(20)]
        results = new_client().fetch_many(requests, 5, LONG_S, max_parallel=3)
    assert [result["name"] for result in results] == [f"layer {index}" for index in range(20)]
    assert all(equal(result, layer(index)) for index, result in enumerate(results))


@pytest.mark.parametrize("num_tensors", [1, 300, 3000])
def test_pieces_of_every_shape_arrive(num_tensors: int) -> None:
    sizes = [(index * 7919) % 5000 for index in range(num_tensors)]
    if num_tensors == 1:
        sizes = [3 * (1 << 20) + 5]
    tree = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
    with serving(lambda key, generation: tree) as server:
        result = new_client().fetch(server.address, "x", 1, LONG_S)
    assert all(torch.equal(sent, received) for sent, received in zip(tree, result, strict=True))


def test_nothing_requested_is_nothing() -> None:
    assert new_client().fetch_many([], 5, LONG_S) == []


def test_at_most_max_parallel_connections() -> None:
    lock = threading.Lock()
    now, most = 0, 0

    def slow(key: str, generation: int) -> Any:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1
        return {"key": key}

    with serving(slow) as server:
        requests = [(server.address, str(index)) for index in range(8)]
        results = new_client().fetch_many(requests, 1, LONG_S, max_parallel=3)
    assert [result["key"] for result in results] == [str(index) for index in range(8)]
    assert most in (2, 3)


def test_more_clients_than_connections_wait_for_their_turn() -> None:
    with serving(max_connections=1) as server:
        requests = [(server.address, f"layer:{index}") for index in range(6)]
        results = new_client().fetch_many(requests, 5, LONG_S, max_parallel=3)
    assert len(results) == 6


@pytest.mark.parametrize(
    ("key", "generation", "text"),
    [
        ("layer:1", 4, "generation 5 is served here, not 4"),
        ("trainer", 5, "trainer"),
        ("layer:x", 5, "ValueError: invalid literal"),
    ],
)
def test_what_the_provider_says_reaches_the_client(
    key: str, generation: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as server:
        with pytest.raises(MigrationError, match=text) as error:
            new_client().fetch(server.address, key, generation, LONG_S)
        assert f"{key!r} of generation {generation} from {server.address}" in str(error.value)
        # The connection and the server survive.
        assert equal(new_client().fetch(server.address, "layer:2", 5, LONG_S), layer(2))
    assert ("cannot serve" in caplog.text) == (key == "layer:x")


def test_what_cannot_travel_is_named() -> None:
    with (
        serving(lambda key, generation: {"callbacks": {"Mine": object()}}) as server,
        pytest.raises(MigrationError, match=r"trainer\.callbacks\.Mine is a object"),
    ):
        new_client().fetch(server.address, "trainer", 1, LONG_S)


def test_one_failure_stops_the_others() -> None:
    waiting = threading.Event()

    def provider(key: str, generation: int) -> Any:
        if key == "bad":
            waiting.wait(5)
            raise LookupError("no such layer")
        waiting.set()
        time.sleep(0.2)
        return layer(0, 4_000_000)

    with serving(provider) as server:
        start = time.monotonic()
        with pytest.raises(MigrationError, match="no such layer"):
            new_client().fetch_many([(server.address, key) for key in ["good", "bad", *["good"] * 50]], 1, LONG_S)
        assert time.monotonic() - start < 2


@pytest.mark.parametrize(("secret", "job_id"), [(b"another secret !", JOB), (b"", JOB), (SECRET, "another")])
def test_strangers_get_nothing(secret: bytes, job_id: str) -> None:
    served = []
    with (
        serving(lambda key, generation: served.append(key)) as server,
        pytest.raises(MigrationError, match=r"secret|another job"),
    ):
        new_client(secret, job_id).fetch(server.address, "layer:1", 5, LONG_S)
    assert served == []


def test_other_addresses_need_a_secret() -> None:
    with pytest.raises(ValueError, match="without a job secret"):
        StateServer(provide, bind_host="0.0.0.0", secret=b"", job_id=JOB)


def test_only_the_given_host_is_bound() -> None:
    with serving() as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", port), timeout=1):
            pass


def test_noise_does_not_disturb() -> None:
    with serving() as server:
        host, _, port = server.address.partition(":")
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"\xff" * 10_000, b""):
            with socket.create_connection((host, int(port))) as sock:
                sock.sendall(noise)
        assert equal(new_client().fetch(server.address, "layer:1", 5, LONG_S), layer(1))


def test_nobody_there_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(MigrationError, match="refused"):
        new_client().fetch(address, "layer:1", 5, LONG_S)


@pytest.mark.parametrize("address", ["nonsense", "host:port", "127.0.0.1"])
def test_a_wrong_address_is_said(address: str) -> None:
    with pytest.raises(MigrationError, match="host:port"):
        new_client().fetch(address, "layer:1", 5, LONG_S)


@pytest.mark.parametrize("position", [2000, 100_000, 31_000_000])
def test_damage_on_the_way_is_found(position: int) -> None:
    def flip(offset: int, data: bytearray) -> None:
        if offset <= position < offset + len(data):
            data[position - offset] ^= 0x10

    with (
        serving() as server,
        listening(relay(server.address, flip)) as address,
        pytest.raises(MigrationError, match=r"damaged|skeleton"),
    ):
        new_client().fetch(address, "big:0", 5, LONG_S)


def test_pages_in_the_wrong_order_are_found() -> None:
    torn = bytearray()

    def swap(offset: int, data: bytearray) -> None:
        if offset < 10_000_000 <= offset + len(data) and len(data) >= 16384 and not torn:
            torn.extend(data[:4096])
            data[:4096], data[4096:8192] = data[4096:8192], data[:4096]

    with (
        serving() as server,
        listening(relay(server.address, swap)) as address,
        pytest.raises(MigrationError, match="damaged"),
    ):
        new_client().fetch(address, "big:0", 5, LONG_S)
    assert torn


def test_an_end_before_the_end_is_found() -> None:
    def cut(offset: int, data: bytearray) -> None:
        if offset > 1_000_000:
            raise ConnectionError("cut")

    with (
        serving() as server,
        listening(relay(server.address, cut)) as address,
        pytest.raises(MigrationError, match=r"closed|reset"),
    ):
        new_client().fetch(address, "big:0", 5, LONG_S)


@pytest.mark.parametrize("answer", [b"[1]", b"{}", b'{"skeleton": -1, "bytes": 1}', b"nonsense", b'{"skeleton": "1"}'])
def test_a_server_that_lies_is_refused(answer: bytes) -> None:
    def handle(sock: socket.socket) -> None:
        accept_authenticated(sock, SECRET, JOB)
        recv_frame(sock)
        send_frame(sock, answer)
        sock.recv(1)

    with listening(handle) as address, pytest.raises(MigrationError, match="could not fetch"):
        new_client().fetch(address, "layer:1", 5, LONG_S)


def test_silence_ends_after_the_timeout() -> None:
    def handle(sock: socket.socket) -> None:
        accept_authenticated(sock, SECRET, JOB)
        recv_frame(sock)
        sock.recv(1)

    with listening(handle) as address:
        start = time.monotonic()
        with pytest.raises(MigrationError, match=r"nothing arrived for 0\.3 s"):
            new_client().fetch(address, "layer:1", 5, 0.3)
        assert 0.25 < time.monotonic() - start < 1


def test_a_slow_link_is_no_silence() -> None:
    def slow(offset: int, data: bytearray) -> None:
        time.sleep(0.1 if offset > 1000 else 0)

    tree = torch.ones(200_000)
    with serving(lambda key, generation: tree) as server, listening(relay(server.address, slow)) as address:
        start = time.monotonic()
        assert torch.equal(new_client().fetch(address, "x", 5, 0.5), tree)
        assert time.monotonic() - start > 0.5


def test_a_stopped_client_does_not_hold_the_server() -> None:
    with serving(idle_timeout_s=0.2) as server:
        client = new_client()
        sockets = _opened(client)
        sock = client._connect(server.address, 5.0, sockets)
        send_frame(sock, b'{"key": "big:0", "generation": 5}')
        deadline = time.monotonic() + 5
        while "parcae-state-connection" not in state_threads() and time.monotonic() < deadline:
            time.sleep(0.005)
        while "parcae-state-connection" in state_threads() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert "parcae-state-connection" not in state_threads()
        sockets.remove(sock)


def _opened(client: StateClient) -> Any:
    with client._call() as sockets:
        return sockets


@contextlib.contextmanager
def stalled_connect() -> Iterator[str]:
    """A listener whose queue is full: connecting to it waits."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def silent_server() -> contextlib.AbstractContextManager[str]:
    """Takes the handshake's first frame and says nothing."""

    def handle(sock: socket.socket) -> None:
        while sock.recv(10_000):
            pass

    return listening(handle)


def dripping_server() -> contextlib.AbstractContextManager[str]:
    """Begins a big answer and then sends a little at a time."""

    def handle(sock: socket.socket) -> None:
        accept_authenticated(sock, SECRET, JOB)
        recv_frame(sock)
        head, _ = skeleton(torch.empty(10_000_000, dtype=torch.uint8))
        send_frame(sock, b'{"skeleton": %d, "bytes": 10000000}' % len(head))
        sock.sendall(head)
        while True:
            sock.sendall(b"x" * 100)
            time.sleep(0.005)

    return listening(handle)


def time_to_cancel(address: str) -> float:
    """Cancel a fetch that waits; return the seconds until it has raised."""
    client = new_client()
    outcome: list[tuple[float, Exception]] = []

    def fetch() -> None:
        try:
            client.fetch_many([(address, f"layer:{index}") for index in range(8)], 5, LONG_S)
        except Exception as error:
            outcome.append((time.monotonic(), error))

    thread = threading.Thread(target=fetch)
    thread.start()
    time.sleep(0.15)
    assert thread.is_alive()
    start = time.monotonic()
    client.cancel()
    thread.join(5)
    released, error = outcome[0]
    assert isinstance(error, MigrationError)
    assert "cancelled" in str(error)
    with pytest.raises(MigrationError, match="cancelled"):
        client.fetch("127.0.0.1:1", "layer:1", 5, LONG_S)
    return released - start


@pytest.mark.parametrize("stall", [stalled_connect, silent_server, dripping_server])
def test_cancel_releases_at_once(stall: Callable[[], contextlib.AbstractContextManager[str]]) -> None:
    with stall() as address:
        # Three tries: on a busy machine, waking a thread alone may take longer.
        assert any(time_to_cancel(address) < 0.05 for _ in range(3))


def test_cancel_in_the_middle_of_real_transfers() -> None:
    tree = layer(0, 20_000_000)
    client = new_client()
    with serving(lambda key, generation: tree) as server:
        timer = threading.Timer(0.05, client.cancel)
        timer.start()
        with pytest.raises(MigrationError, match="cancelled"):
            client.fetch_many([(server.address, "x")] * 100, 5, LONG_S)
        timer.join()


def test_closing_the_server_releases_its_clients() -> None:
    entered = threading.Event()
    leave = threading.Event()

    def provider(key: str, generation: int) -> Any:
        entered.set()
        leave.wait(0.3)
        return layer(0)

    def close_while_serving(server: StateServer) -> None:
        entered.wait(5)
        server.close()

    with serving(provider) as server:
        closer = threading.Thread(target=close_while_serving, args=(server,))
        closer.start()
        with pytest.raises(MigrationError, match=r"closed|reset"):
            new_client().fetch(server.address, "layer:0", 5, LONG_S)
        closer.join()
        server.close()
        with pytest.raises(MigrationError, match="refused"):
            new_client().fetch(server.address, "layer:0", 5, LONG_S)


def test_a_killed_server_is_noticed_at_once() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        server = StateServer(lambda key, generation: time.sleep(60), bind_host="127.0.0.1", secret=SECRET, job_id=JOB)
        os.write(writer, server.address.encode())
        signal.pause()
    try:
        address = os.read(reader, 100).decode()
        killer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
        killer.start()
        start = time.monotonic()
        with pytest.raises(MigrationError, match=r"closed|reset"):
            new_client().fetch(address, "layer:0", 5, LONG_S)
        assert time.monotonic() - start < 1
        killer.join()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)


def open_sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in found if link.startswith("socket:")}


def test_a_forked_child_keeps_no_socket() -> None:
    others = open_sockets()
    with serving() as server, contextlib.ExitStack() as stack:
        client = new_client()
        sockets = _opened(client)
        stack.callback(sockets.remove, client._connect(server.address, 5.0, sockets))
        assert len(open_sockets() - others) == 3  # The listener and both ends.
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writer, b"%d" % len(open_sockets() - others))
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(writer)
        with os.fdopen(reader) as file:
            assert file.read() == "0"


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="max_parallel"):
        new_client().fetch_many([], 1, 1.0, max_parallel=0)
    with pytest.raises(ValueError, match="timeout_s"):
        new_client().fetch_many([], 1, 0.0)
