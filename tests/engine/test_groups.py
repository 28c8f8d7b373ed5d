"""Groups over real processes: forming, talking, dying, hanging, aborting, forming again."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_parcae.engine import sockets
from lightning_parcae.engine.groups import SLOT_BYTES, Groups, RendezvousStore, _buckets
from lightning_parcae.engine.sockets import Endpoints
from lightning_parcae.errors import GenerationBrokenError
from lightning_parcae.planning.layout import Layout

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="sockets are found through /proc")
NAMES = ("a", "b", "c", "d")


# ---------------------------------------------------------------------------------------------- what the members run


class Worker:
    """Runs commands in the main thread of a member process; ``abort`` in another one, as the agent would."""

    def __init__(self, connection: Any, name: str) -> None:
        self.connection = connection
        self.name = name
        self.groups: Groups | None = None
        self.abort_event = threading.Event()
        self.store: RendezvousStore | None = None
        self.friends: list[socket.socket] = []
        self.iterator: Any = None
        self.commands: queue.Queue[Any] = queue.Queue()

    def run(self) -> None:
        torch.set_num_threads(1)
        threading.Thread(target=self.read, daemon=True).start()
        while (command := self.commands.get()) is not None:
            self.answer(*command)
        # Nothing here may wait for a peer that is gone.
        os._exit(0)

    def read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                name, arguments = self.connection.recv()
                if name in ("abort", "interrupt"):
                    self.answer(name, arguments)
                else:
                    self.commands.put((name, arguments))
        self.commands.put(None)

    def answer(self, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            result = ("ok", getattr(self, name)(*arguments))
        except Exception as error:
            result = (type(error).__name__, str(error))
        self.connection.send((name, *result, time.monotonic()))

    def store_address(self) -> str:
        if self.store is None:
            self.store = RendezvousStore("127.0.0.1")
        return self.store.address

    def form(self, layout: Layout, address: str, timeout_s: float) -> int:
        self.abort_event = threading.Event()
        self.groups = Groups.form(layout, self.name, address, "127.0.0.1", timeout_s, self.abort_event)
        return len(self.groups._state.connections)

    def abort(self) -> None:
        assert self.groups is not None
        self.groups.abort()

    def interrupt(self) -> None:
        self.abort_event.set()

    def close(self) -> None:
        assert self.groups is not None
        self.groups.close()

    def gather(self, payload: bytes, which: str = "world") -> list[bytes]:
        return self.group(which).all_gather_bytes(payload)

    def group(self, which: str) -> Any:
        return getattr(self.groups, which)

    def reduce(self, which: str, shapes: list[Any], value: float) -> list[Any]:
        tensors = [torch.full(shape, value, dtype=dtype) for shape, dtype in shapes]
        self.group(which).all_reduce_sum(tensors)
        return [tensor.double().unique().tolist() for tensor in tensors]

    def has(self, which: str) -> tuple[int, int] | None:
        group = self.group(which)
        return None if group is None else (group.rank, group.size)

    def send(self, peer: int, value: float, tag: int, numel: int = 5) -> None:
        self.group("world").send(torch.full((numel,), value), peer, tag)

    def recv(self, peer: int, tag: int, numel: int = 5) -> float:
        tensor = torch.zeros(numel)
        self.group("world").recv(tensor, peer, tag)
        return tensor.mean().item()

    def probe(self) -> tuple[float, float] | None:
        assert self.groups is not None
        link = self.groups.probe_link()
        return None if link is None else (link.latency_s, link.bytes_per_s)

    def befriend(self, port: int) -> None:
        self.friends.append(socket.create_connection(("127.0.0.1", port)))

    def greet(self) -> None:
        for friend in self.friends:
            friend.sendall(b"hello")

    def part(self) -> None:
        while self.friends:
            self.friends.pop().close()

    def start_loader(self) -> list[int]:
        loader: Any = DataLoader(list(range(64)), batch_size=2, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type]
        self.iterator = iter(loader)
        next(self.iterator)
        return [process.pid for process in self.iterator._workers]

    def counts(self) -> tuple[int, int]:
        deadline = time.monotonic() + 5
        while True:  # the last destructor runs in a thread of its own
            found = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
            time.sleep(0.05)
            if found == (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))):
                return found
            assert time.monotonic() < deadline

    def default_group_exists(self) -> bool:
        return dist.is_initialized()


def _serve(connection: Any, name: str) -> None:
    Worker(connection, name).run()


class Member:
    """A member process, driven from the test."""

    def __init__(self, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, name))
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def post(self, command: str, *arguments: Any) -> None:
        self.connection.send((command, arguments))

    def answer(self, timeout_s: float = 30.0) -> tuple[str, str, Any, float]:
        """Return command, "ok" or the error's name, the result or message, and when it came."""
        assert self.connection.poll(timeout_s), f"member {self.name} did not answer"
        answer: tuple[str, str, Any, float] = self.connection.recv()
        return answer

    def do(self, command: str, *arguments: Any) -> Any:
        self.post(command, *arguments)
        name, kind, result, _ = self.answer()
        assert (name, kind) == (command, "ok"), result
        return result

    def kill(self) -> float:
        at = time.monotonic()
        os.kill(self.pid, signal.SIGKILL)
        return at

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        self.process.kill()
        self.process.join(10)
        self.connection.close()


class Members:
    def __init__(self) -> None:
        self.all = {name: Member(name) for name in NAMES}
        self.generation = 0

    @property
    def alive(self) -> list[Member]:
        return [member for member in self.all.values() if member.process.is_alive()]

    def together(self, members: list[Member], command: str, arguments: Callable[[Member], Any]) -> list[Any]:
        for member in members:
            member.post(command, *arguments(member))
        answers = [member.answer() for member in members]
        assert [answer[:2] for answer in answers] == [(command, "ok")] * len(members), answers
        return [answer[2] for answer in answers]

    def layout(self, members: list[Member], num_stages: int, absent: tuple[str, ...] = ()) -> Layout:
        self.generation += 1
        names = [member.name for member in members] + list(absent)
        count = len(names) // num_stages
        grid = tuple(tuple(names[p * num_stages : (p + 1) * num_stages]) for p in range(count))
        return Layout(self.generation, grid, tuple(names), tuple(range(num_stages + 1)))

    def form(self, members: list[Member] | None = None, num_stages: int = 1) -> list[Member]:
        members = members or self.alive
        layout = self.layout(members, num_stages)
        address = members[0].do("store_address")
        self.together(members, "form", lambda member: (layout, address, 20.0))
        return members


@pytest.fixture(scope="module")
def members() -> Iterator[Members]:
    made = Members()
    yield made
    for member in made.all.values():
        member.end()


# ------------------------------------------------------------------------------------------------------- the claims


def test_members_find_their_groups_and_no_default_group(members: Members) -> None:
    four = members.form(num_stages=2)
    assert members.together(four, "has", lambda m: ("world",)) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert members.together(four, "has", lambda m: ("pipeline",)) == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert members.together(four, "has", lambda m: ("replicas",)) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert members.together(four, "default_group_exists", lambda m: ()) == [False] * 4
    members.together(four, "close", lambda m: ())

    passenger = members.form(num_stages=3)[3]
    assert [passenger.do("has", which) for which in ("world", "pipeline", "replicas")] == [(3, 4), None, None]
    members.together(four, "close", lambda m: ())


def test_they_talk(members: Members) -> None:
    four = members.form(num_stages=2)
    names = [member.name.encode() for member in four]
    assert members.together(four, "gather", lambda m: (m.name.encode(),)) == [names] * 4
    longer = members.together(four, "gather", lambda m: (b"x" * (SLOT_BYTES + 1 if m.name == "c" else 3),))
    assert [[len(item) for item in items] for items in longer] == [[3, 3, SLOT_BYTES + 1, 3]] * 4
    assert members.together(four, "gather", lambda m: (b"",)) == [[b""] * 4] * 4

    four[0].post("send", 3, 2.5, 7)
    assert four[3].do("recv", 0, 7) == 2.5
    assert four[0].answer()[1] == "ok"

    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64]
    shapes: list[Any] = [((3,), dtype) for dtype in dtypes[:5]] + [((), torch.float32), ((0, 2), torch.float32)]
    shapes += [((3_000_000,), torch.float32), ((7, 2), torch.float32)]
    values = {member.name: float(rank + 1) for rank, member in enumerate(four)}
    sums = members.together(four, "reduce", lambda m: ("replicas", shapes, values[m.name]))
    expected = [[4.0], [6.0], [4.0], [6.0]]
    assert sums == [[[] if shape == (0, 2) else value for shape, _ in shapes] for value in expected]
    members.together(four, "close", lambda m: ())


def test_neighbours_measure_their_link(members: Members) -> None:
    four = members.form(members.alive[:4])
    found: list[list[tuple[float, float] | None]] = [[], [], [], []]
    while not (found[0] and found[2] and any(found[0]) and any(found[2])):  # a busy host gives no answer
        for of_one, link in zip(found, members.together(four, "probe", lambda m: ()), strict=True):
            of_one.append(link)
    assert not any(found[1]) and not any(found[3])
    for latency_s, bytes_per_s in filter(None, found[0] + found[2]):
        assert 0 < latency_s < 1.0 and 1e4 < bytes_per_s < 1e11
    assert members.together(four, "gather", lambda m: (b"x",)) == [[b"x"] * 4] * 4  # nothing is left on the way
    members.together(four, "close", lambda m: ())
    three = members.form(members.alive[:3])
    assert members.together(three, "probe", lambda m: ())[1:] == [None, None]
    members.together(three, "close", lambda m: ())


@linux_only
@pytest.mark.parametrize(
    ("command", "arguments"), [("recv", (1, 0)), ("gather", (b"x",)), ("reduce", None), ("probe", ())]
)
def test_abort_releases_what_waits_for_a_stopped_peer(
    members: Members, command: str, arguments: tuple[Any, ...] | None
) -> None:
    if arguments is None:
        arguments = ("world", [((1000,), torch.float32)], 1.0)
    four = members.form(num_stages=2)
    waiting, stopped = four[0], four[1]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        waiting.do("befriend", port)  # after this formation and before the next
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            waiting.post(command, *arguments)
            assert not waiting.connection.poll(0.3)
            asked = time.monotonic()
            waiting.post("abort")
            answers = [waiting.answer(), waiting.answer()]
            released = next(answer for answer in answers if answer[0] == command)
            assert released[1] == "GenerationBrokenError" and "aborted" in released[2]
            assert released[3] - asked < 0.05
            waiting.post("gather", b"again")
            assert waiting.answer()[1] == "GenerationBrokenError"
            # The survivors form at once, and connections of others have not been touched: one opened before this
            # formation, one after it.
            rest = members.form([member for member in four if member is not stopped])
            waiting.do("befriend", port)
            waiting.do("abort")
            waiting.do("greet")
            for _ in range(2):
                friend, _ = listener.accept()
                friend.settimeout(5)
                assert friend.recv(5) == b"hello"
                friend.close()
            members.together(rest, "close", lambda m: ())
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
    members.together([stopped], "close", lambda m: ())
    waiting.do("part")


def test_an_absent_member_holds_nobody(members: Members) -> None:
    three = members.alive[:3]
    address = three[0].do("store_address")
    incomplete = members.layout(three, 1, absent=("nobody",))
    for member in three:
        member.post("form", incomplete, address, 20.0)
    assert not three[0].connection.poll(0.2)
    for member in three:
        asked = time.monotonic()
        member.post("interrupt")
        answers = {answer[0]: answer for answer in (member.answer(), member.answer())}
        assert answers["form"][1] == "GenerationBrokenError"
        assert answers["form"][3] - asked < 0.1
    started = time.monotonic()
    members.form(three)
    assert time.monotonic() - started < 1.0
    members.together(three, "close", lambda m: ())

    late = members.layout(three, 1, absent=("nobody",))
    three[0].post("form", late, address, 0.3)
    answer = three[0].answer()
    assert answer[1] == "GenerationBrokenError" and "nobody" in answer[2]


def test_an_abort_that_comes_before_the_caller_has_the_groups_is_not_lost(members: Members) -> None:
    two = members.form(members.alive[:2])
    two[0].do("interrupt")  # only the event: as if the agent did not know the groups yet
    two[0].post("gather", b"x")
    assert two[0].answer()[1] == "GenerationBrokenError"
    members.together(two, "close", lambda m: ())


@linux_only
def test_fifty_formations_leave_nothing(members: Members) -> None:
    four = members.alive
    for _ in range(3):
        members.together(members.form(four, num_stages=2), "close", lambda m: ())
    before = members.together(four, "counts", lambda m: ())
    for index in range(50):
        members.form(four, num_stages=2)
        if index % 2:
            for member in four:
                member.do("abort")
        members.together(four, "close", lambda m: ())
    after = members.together(four, "counts", lambda m: ())
    for (fds, threads), (fds_after, threads_after) in zip(before, after, strict=True):
        assert fds_after <= fds + 1 and threads_after <= threads


def test_a_killed_peer_breaks_the_generation_even_if_its_loader_workers_live_on(members: Members) -> None:
    four = members.form(num_stages=2)
    victim, others = four[3], four[:3]
    workers = victim.do("start_loader")
    try:
        for member in others:
            member.post("gather", b"x")
        assert not others[0].connection.poll(0.2)
        killed = victim.kill()
        # Its neighbours in gloo's ring see it at once; whoever waits for another survivor is told by its agent.
        answers = [others[0].answer(), others[2].answer()]
        assert [answer[1] for answer in answers] == ["GenerationBrokenError"] * 2
        assert max(answer[3] for answer in answers) - killed < 0.5
        others[1].post("abort")
        assert {others[1].answer()[1], others[1].answer()[1]} == {"GenerationBrokenError", "ok"}
        assert all(os.path.exists(f"/proc/{pid}") for pid in workers)
    finally:
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        victim.process.join(10)
    members.together(others, "close", lambda m: ())
    members.together(members.form(others), "close", lambda m: ())


def test_a_killed_peer_breaks_a_receive(members: Members) -> None:
    trio = members.form(members.alive[:3])
    trio[0].post("recv", 2, 0)
    assert not trio[0].connection.poll(0.2)
    killed = trio[2].kill()
    answer = trio[0].answer()
    assert answer[1] == "GenerationBrokenError" and answer[3] - killed < 0.5
    # Those who do not wait for it are not disturbed.
    trio[0].post("send", 1, 1.5, 3)
    assert trio[1].do("recv", 0, 3) == 1.5
    assert trio[0].answer()[1] == "ok"
    trio[2].process.join(10)
    members.together(trio[:2], "close", lambda m: ())


# ------------------------------------------------------------------------------------------------------ in one process


def test_a_receive_outlasts_the_timeout_of_the_formation() -> None:
    layout = Layout(1, (("a", "b"),), ("a", "b"), (0, 1, 2))
    store = RendezvousStore("127.0.0.1")
    received = torch.zeros(3)

    def receive() -> None:
        groups = Groups.form(layout, "b", store.address, timeout_s=2.0)
        assert groups.pipeline is not None
        groups.pipeline.recv(received, 0)
        groups.close()

    receiver = threading.Thread(target=receive)
    receiver.start()
    groups = Groups.form(layout, "a", store.address, timeout_s=2.0)
    assert groups.pipeline is not None
    time.sleep(2.5)  # a long step on the first stage
    groups.pipeline.send(torch.ones(3), 1)
    receiver.join(10)
    groups.close()
    store.close()
    assert torch.equal(received, torch.ones(3))


def test_one_member_needs_no_network() -> None:
    layout = Layout(1, (("a",),), ("a",), (0, 3))
    groups = Groups.form(layout, "a", "127.0.0.1:1", "127.0.0.1", 1.0)
    assert groups.pipeline is None and groups.replicas is None
    assert groups.world.all_gather_bytes(b"x") == [b"x"]
    tensor = torch.ones(2)
    groups.world.all_reduce_sum([tensor])
    assert tensor.tolist() == [1.0, 1.0]
    groups.abort()
    with pytest.raises(GenerationBrokenError, match="generation 1 was aborted"):
        groups.world.all_gather_bytes(b"x")
    groups.close()


def test_the_store_listens_where_it_is_told_to() -> None:
    store = RendezvousStore("127.0.0.1")
    host, port = store.address.rsplit(":", 1)
    assert host == "127.0.0.1"
    assert (host, int(port)) in sockets.listeners().values()
    with socket.socket() as other:
        other.bind(("127.0.0.2", int(port)))  # would fail if every address were taken
    store.close()


def test_a_bad_store_address_is_refused() -> None:
    layout = Layout(1, (("a", "b"),), ("a", "b"), (0, 1, 2))
    with pytest.raises(ValueError, match='"host:port"'):
        Groups.form(layout, "a", "nowhere", "127.0.0.1", 1.0)


def test_a_store_that_is_gone_breaks_the_formation() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    layout = Layout(1, (("a", "b"),), ("a", "b"), (0, 1, 2))
    with pytest.raises(GenerationBrokenError, match="formation of generation 1"):
        Groups.form(layout, "a", f"127.0.0.1:{port}", "127.0.0.1", 1.0)


def test_small_tensors_share_buckets_and_large_ones_are_not_copied() -> None:
    small, large = [torch.ones(10) for _ in range(100)], torch.ones(4_000_000)
    doubles = [torch.ones(3, dtype=torch.float64)]
    buckets = _buckets([*small, large, *doubles, torch.ones(0)])
    assert [len(bucket) for bucket in buckets] == [100, 1, 1]
    assert buckets[1][0].data_ptr() == large.data_ptr()


@linux_only
def test_only_sockets_of_the_endpoints_are_found() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as ours,
        socket.create_server(("127.0.0.1", 0)) as theirs,
        socket.create_connection(ours.getsockname()) as to_ours,
        socket.create_connection(theirs.getsockname()) as to_theirs,
    ):
        accepted, _ = ours.accept()
        found = {item.fd for item in sockets.connected(Endpoints(local={ours.getsockname()}))}
        assert found == {accepted.fileno()}
        items = sockets.connected(Endpoints(remote={ours.getsockname()}))
        assert {item.fd for item in items} == {to_ours.fileno()}
        sockets.tune(items, 4.0)
        assert to_ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert to_theirs.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
        assert sockets.shut_down(items) == 1
        assert to_ours.recv(1) == b""
        accepted.close()
        # The number of a closed socket may belong to somebody else now.
        stale = [sockets.OpenSocket(to_theirs.fileno(), items[0].inode)]
        assert sockets.shut_down(stale) == 0


@linux_only
def test_a_listener_is_told_from_one_that_another_thread_opens_at_the_same_time() -> None:
    made: list[socket.socket] = []
    disturbing: list[socket.socket] = []

    def make() -> socket.socket:
        server = socket.create_server(("127.0.0.1", 0))
        made.append(server)
        if len(made) == 1:
            disturbing.append(socket.create_server(("127.0.0.1", 0)))
        return server

    _, address = sockets.make_with_listener(make)
    assert len(made) == 2 and address == made[1].getsockname()
    for server in [*made, *disturbing]:
        server.close()


@linux_only
def test_forked_children_close_registered_sockets_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours, socket.create_server(("127.0.0.1", 0)) as other:
        client = socket.create_connection(ours.getsockname())
        endpoints = Endpoints(remote={ours.getsockname()})
        sockets.close_in_children(endpoints)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            report = b""
            for sock in (client, ours, other):
                try:
                    os.fstat(sock.fileno())
                    report += b"o"
                except OSError:
                    report += b"c"
            os.write(write, report)
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(read, 10) == b"coo"
        os.close(read)
        os.close(write)
        client.close()
