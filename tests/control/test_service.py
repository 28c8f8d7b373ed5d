"""The coordinator service and the agents, over real sockets and with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_service import SECRET, SPEC, LiveService, Puppet, ending, eventually, start_instance

from lightning_parcae.control import service as service_module
from lightning_parcae.control.agent import Agent
from lightning_parcae.control.messages import Event, Failed, Hello, Notice, Ready, encode
from lightning_parcae.control.service import AdminClient, Service
from lightning_parcae.control.transport import (
    accept_authenticated_async,
    connect_authenticated,
    parse_address,
    recv_frame,
    send_frame,
)
from lightning_parcae.errors import FencedError, JobFailedError, MembershipError, RefusedError


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LiveService]:
    running = LiveService(tmp_path / "run", expected=2)
    yield running
    running.end()


def start(service: LiveService, *names: str) -> list[Puppet]:
    puppets = [Puppet(service.agent(name)) for name in names]
    eventually(lambda: service.admin().status()["phase"] == "running")
    return puppets


def close(puppets: list[Puppet]) -> None:
    for puppet in puppets:
        puppet.close()


def timeline(service: LiveService) -> list[dict[str, object]]:
    assert service.run_dir is not None
    return [json.loads(line) for line in (service.run_dir / "timeline.jsonl").read_text().splitlines()]


def test_a_job_from_start_to_end(service: LiveService) -> None:
    before = time.time()
    puppets = start(service, "a", "b")
    assert [puppet.welcome.order for puppet in puppets] == [0, 1]
    assert puppets[0].welcome.leader
    assert puppets[0].welcome.run_dir == str(service.run_dir)
    assert puppets[0].agent.prepare_seen == 1
    assert puppets[0].agent.commit_of(1) is not None
    assert puppets[0].agent.commit_of(2) is None
    state = json.loads((service.run_dir / "state.json").read_text()) if service.run_dir else {}
    assert (state["job_id"], state["generation"], state["phase"]) == ("job", 1, "running")
    puppets[0].agent.send(Event("strange", {"loss": float("nan"), "deep": [float("inf"), 1]}))
    for puppet in puppets:
        puppet.finish()
    for puppet in puppets:
        assert puppet.agent.wait(lambda agent: agent.job_finished, 5.0) is not None
    close(puppets)
    assert service.join(10) == 0
    events = timeline(service)
    names = [event["event"] for event in events]
    assert names[:4] == ["connected", "connected", "ready", "ready"] or sorted(names[:4])[:2] == ["connected"] * 2
    assert {"prepared", "committed", "formed", "finished", "done", "left"} <= set(names)
    assert all(before - 1 < float(str(event["time"])) < time.time() + 1 for event in events)
    (strange,) = [event for event in events if event["event"] == "strange"]
    assert (strange["loss"], strange["deep"]) == (None, [None, 1])


def test_kill_is_seen_at_once(service: LiveService) -> None:
    with ending(start_instance(service, "a")) as victim:
        puppets = start(service, "b")
        killed = time.time()
        victim.kill()
        at, prepare = eventually(lambda: len(puppets[0].prepares) > 1 and puppets[0].prepares[-1])
        assert prepare.urgent
        assert at - killed < 1.0  # usually 0.01
        assert puppets[0].urgent_calls == [prepare.generation]
        eventually(lambda: puppets[0].generation == prepare.generation)
        close(puppets)


def test_kill_is_seen_at_once_though_a_forked_worker_lives(service: LiveService, tmp_path: Path) -> None:
    fork = (
        "import os, pathlib\n"
        "worker = os.fork()\n"
        "if worker == 0: time.sleep(30); os._exit(0)\n"
        f"pathlib.Path({str(tmp_path / 'worker')!r}).write_text(str(worker))"
    )
    with ending(start_instance(service, "a", fork)) as victim:
        worker = int((tmp_path / "worker").read_text())
        try:
            puppets = start(service, "b")
            killed = time.time()
            victim.kill()
            at, _ = eventually(lambda: len(puppets[0].prepares) > 1 and puppets[0].prepares[-1])
            assert at - killed < 1.0
            os.kill(worker, 0)  # it does live
            close(puppets)
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_stopped_process_is_fenced_when_its_lease_ends(tmp_path: Path) -> None:
    service = LiveService(tmp_path, failure_timeout_s=1.0, expected=2)
    try:
        with ending(start_instance(service, "a")) as victim:
            puppets = start(service, "b")
            stopped = time.time()
            victim.send_signal(signal.SIGSTOP)
            at, prepare = eventually(lambda: len(puppets[0].prepares) > 1 and puppets[0].prepares[-1])
            assert 0.7 < at - stopped < 4.0
            assert prepare.members == ["b"]
            victim.send_signal(signal.SIGCONT)
            assert victim.stdout is not None
            last_words = victim.stdout.readline()
            assert last_words.startswith("FencedError a was declared dead (nothing was heard from it for 1.")
            close(puppets)
    finally:
        service.end()


def test_a_dead_incarnation_cannot_come_back(service: LiveService) -> None:
    puppet = Puppet(service.agent("a", incarnation="a#1"))
    puppet.close(goodbye=False)
    eventually(lambda: service.admin().status()["instances"] == {})
    with pytest.raises(FencedError, match="declared dead"):
        service.agent("a", incarnation="a#1").connect(5.0)
    again = Puppet(service.agent("a", incarnation="a#2"))
    again.close()


def test_a_cut_connection_means_death_to_the_coordinator(service: LiveService) -> None:
    agent = service.agent("a")
    calls: list[int] = []
    agent.on_urgent = calls.append
    agent.connect(5.0)
    assert agent._sock is not None
    agent._sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(FencedError):
        agent.wait(lambda _: None, 5.0)
    eventually(lambda: calls == [-1])
    agent.close(goodbye=True)


class Proxy:
    """Forwards connections; can cut the clients' side and leave the server's side open, as a broken path does."""

    def __init__(self, target: str) -> None:
        self._target = parse_address(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._left_open: list[socket.socket] = []
        self._cutting = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            if self._cutting.is_set():
                for client, server in self._pairs:
                    client.close()
                    self._left_open.append(server)
                self._pairs.clear()
                self._cutting.clear()
            sockets = [self._listener, *(sock for pair in self._pairs for sock in pair)]
            for sock in select.select(sockets, [], [], 0.02)[0]:
                if sock is self._listener:
                    self._pairs.append((sock.accept()[0], socket.create_connection(self._target)))
                else:
                    self._forward(sock)

    def _forward(self, sock: socket.socket) -> None:
        for pair in list(self._pairs):
            if sock in pair:
                data = sock.recv(65536)
                if data:
                    pair[1 - pair.index(sock)].sendall(data)
                else:
                    self._pairs.remove(pair)
                    pair[0].close()
                    pair[1].close()

    def cut(self) -> None:
        self._cutting.set()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        for sock in [self._listener, *self._left_open, *(sock for pair in self._pairs for sock in pair)]:
            sock.close()


def test_a_connection_that_breaks_unnoticed_by_the_coordinator_is_built_up_again(service: LiveService) -> None:
    proxy = Proxy(service.address)
    try:
        first = Puppet(service.agent("a", address=proxy.address))
        second = Puppet(service.agent("b"))
        eventually(lambda: service.admin().status()["phase"] == "running")
        proxy.cut()
        eventually(lambda: any(event["event"] == "reconnected" for event in timeline(service)))
        eventually(lambda: first.agent.state == "connected")
        third = Puppet(service.agent("c"))  # and the job goes on with it
        eventually(lambda: first.generation == 2)
        assert first.agent.request("set_default", "k", 1, timeout_s=5.0) == 1
        close([first, second, third])
    finally:
        proxy.end()


def test_the_coordinator_dies(tmp_path: Path) -> None:
    service = LiveService(tmp_path, failure_timeout_s=0.6)
    agent = service.agent("a")
    calls: list[int] = []
    agent.on_urgent = calls.append
    agent.connect(5.0)
    service.end()
    started = time.monotonic()
    with pytest.raises(MembershipError, match="cannot be reached"):
        agent.wait(lambda _: None, 10.0)
    assert time.monotonic() - started < 4
    assert agent.state == "lost"
    eventually(lambda: calls == [-1])
    agent.close(goodbye=True)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    started = time.monotonic()
    with pytest.raises(MembershipError, match="PARCAE_COORDINATOR"):
        Agent(address, SECRET, "job", "a", 1.0).connect(0.3)
    assert time.monotonic() - started < 3


def test_wrong_secret_and_wrong_job(service: LiveService) -> None:
    with pytest.raises(MembershipError, match="same job secret"):
        service.agent("a", secret=b"not the secret at all").connect(5.0)
    with pytest.raises(MembershipError, match="another job"):
        service.agent("a", job_id="other").connect(5.0)
    with pytest.raises(MembershipError, match="same job secret"):
        AdminClient(service.address, b"not the secret at all", "job").status()


def test_other_versions_are_refused(service: LiveService) -> None:
    puppet = Puppet(service.agent("a"))
    other = Agent(service.address, SECRET, "job", "b", 1.0, versions={"torch": "3"})
    with pytest.raises(MembershipError, match="torch 2, but b has torch 3"):
        other.connect(5.0)
    with pytest.raises(MembershipError, match="alive already"):
        service.agent("a").connect(5.0)
    puppet.close()


def test_noise_on_the_port_hurts_nobody(service: LiveService) -> None:
    puppets = start(service, "a", "b")
    address = parse_address(service.address)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(5)]
        for noise in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(16).replace(b"\0", b"x") * 655_360, b"\xff" * 100):
            with socket.create_connection(address, timeout=5) as sock, contextlib.suppress(ConnectionError):
                sock.sendall(noise)
                assert sock.recv(10) == b""
        assert service.admin().status()["phase"] == "running"
        assert len(silent) == 5
    assert puppets[0].agent.request("get", "k", timeout_s=5.0) is None
    assert len(puppets[0].prepares) == 1
    close(puppets)


def test_unauthenticated_connections_are_limited(service: LiveService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_UNAUTHENTICATED", 8)
    puppets = start(service, "a", "b")
    address = parse_address(service.address)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(address, timeout=3)) for _ in range(8)]
        eventually(lambda: service.service._num_unauthenticated == 8)
        with socket.create_connection(address, timeout=3) as late, contextlib.suppress(ConnectionError):
            assert late.recv(1) == b""
        assert puppets[0].agent.request("get", "k", timeout_s=5.0) is None
        held.pop().close()
        eventually(lambda: service.service._num_unauthenticated == 7)
        assert service.admin().status()["phase"] == "running"
    close(puppets)


def test_the_handshake_has_a_deadline() -> None:
    async def main() -> float:
        outcome: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await accept_authenticated_async(reader, writer, SECRET, "job", 0.2)
            except Exception as error:
                outcome.set_result(error)
            writer.close()

        async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            started = time.monotonic()
            writer.write(b"\0")
            assert isinstance(await outcome, TimeoutError)
            writer.close()
            return time.monotonic() - started

    assert asyncio.run(main()) < 2


def test_an_instance_that_breaks_the_protocol_is_dropped(service: LiveService) -> None:
    puppets = start(service, "a", "b")
    sock = connect_authenticated(service.address, SECRET, "job", "c#1", "instance", 5.0)
    with sock:
        send_frame(sock, encode(Hello("job", "c", "c#1", "h", 1, 1, {"torch": "2"})))
        recv_frame(sock)
        eventually(lambda: "c" in service.admin().status()["instances"])
        send_frame(sock, b'{"type": "Heartbeat", "clock": "x", "step": 0}')
        eventually(lambda: "c" not in service.admin().status()["instances"])
    with connect_authenticated(service.address, SECRET, "job", "d#1", "instance", 5.0) as sock:
        send_frame(sock, encode(Hello("job", "a", "a#9", "h", 1, 1, {})))  # not what it proved to be
        with pytest.raises(ConnectionError):
            recv_frame(sock)
    with (
        connect_authenticated(service.address, SECRET, "job", "d#1", "state", 5.0) as sock,
        pytest.raises(ConnectionError),
    ):
        recv_frame(sock)
    assert service.admin().status()["phase"] == "running"
    close(puppets)


def test_values(service: LiveService) -> None:
    puppets = [Puppet(service.agent(name)) for name in "ab"]
    first, second = (puppet.agent for puppet in puppets)
    answers: list[object] = []
    waiter = threading.Thread(target=lambda: answers.append(second.request("wait", "seed", timeout_s=5.0)))
    waiter.start()
    with pytest.raises(TimeoutError, match="no instance has set it"):
        first.request("wait", "never", timeout_s=0.1)
    assert first.request("set_default", "seed", {"deep": [1, None]}, timeout_s=5.0) == {"deep": [1, None]}
    assert second.request("set_default", "seed", 7, timeout_s=5.0) == {"deep": [1, None]}
    assert second.request("get", "seed", timeout_s=5.0) == {"deep": [1, None]}
    waiter.join(5)
    assert answers == [{"deep": [1, None]}]
    close(puppets)


def test_a_failure_reaches_the_others_with_its_traceback(service: LiveService) -> None:
    puppets = start(service, "a", "b")
    puppets[0].agent.send(Failed(3, "ValueError: bad loss", "Traceback (most recent call last): ..."))
    with pytest.raises(JobFailedError, match=r"(?s)a failed at step 3: ValueError: bad loss.*Traceback"):
        puppets[1].agent.wait(lambda _: None, 5.0)
    assert puppets[1].urgent_calls == [-1]
    close(puppets)
    assert service.join(10) == 1


def test_an_error_in_on_urgent_reaches_the_training_thread(service: LiveService) -> None:
    puppets = start(service, "a", "b")

    def fail(_: int) -> None:
        raise RuntimeError("cannot shut the sockets")

    puppets[1].agent.on_urgent = fail
    puppets[0].close(goodbye=False)
    with pytest.raises(MembershipError, match="cannot shut the sockets"):
        puppets[1].agent.wait(lambda _: None, 5.0)
    puppets[1].close()


def test_admin_commands(service: LiveService) -> None:
    puppets = start(service, "a", "b", "c")
    admin = service.admin()
    eventually(lambda: admin.status()["config"] == [3, 1])
    seen: list[str] = []
    watcher = threading.Thread(target=lambda: seen.extend(event["event"] for event in admin.watch()))
    watcher.start()
    admin.preempt("c", 30.0)
    assert puppets[2].agent.wait(lambda agent: agent.released, 5.0) is not None
    with pytest.raises(MembershipError, match="there are: a, b"):
        admin.preempt("z")
    puppets[2].close()
    admin.stop(graceful=True)
    stop = puppets[0].agent.wait(lambda agent: agent.stop_request, 5.0)
    assert stop is not None and stop.graceful
    close(puppets[:2])
    assert service.join(10) == 0
    watcher.join(5)
    assert not watcher.is_alive()
    assert seen[0] == "connected"
    assert {"notice", "released", "stop_requested", "stopped"} <= set(seen)


def test_watching_can_be_ended_from_here(service: LiveService) -> None:
    admin = service.admin()
    watcher = threading.Thread(target=lambda: list(admin.watch()))
    watcher.start()
    eventually(lambda: service.service._watchers)
    admin.close()
    watcher.join(5)
    assert not watcher.is_alive()


def test_sending_never_blocks(tmp_path: Path) -> None:
    """Not even while the coordinator is stopped; all arrives when it goes on."""
    with _service_process(tmp_path) as (process, address):
        agent = Agent(address, SECRET, "job", "a", 10.0, versions={})
        agent.connect(10.0)
        process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        for number in range(40):
            agent.send(Event("large", {"number": number, "text": "x" * 500_000}))
        assert time.monotonic() - started < 2.0
        process.send_signal(signal.SIGCONT)
        assert agent.request("get", "k", timeout_s=20.0) is None
        agent.close(goodbye=True)
        lines = (tmp_path / "run" / "timeline.jsonl").read_text().splitlines()
        numbers = [json.loads(line).get("number") for line in lines]
        assert [number for number in numbers if number is not None] == list(range(40))


@contextlib.contextmanager
def _service_process(tmp_path: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    address_file = tmp_path / "address"
    command = [sys.executable, "-m", "lightning_parcae.control.service", "--job-id", "job", "--expected", "2"]
    command += ["--run-dir", str(tmp_path / "run"), "--address-file", str(address_file), *arguments]
    root = Path(__file__).resolve().parents[2]
    environ = {**os.environ, "PARCAE_SECRET_FILE": str(secret), "PYTHONPATH": str(root)}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environ, stderr=log)
    try:
        eventually(lambda: address_file.exists() or process.poll() is not None, 20)
        yield process, address_file.read_text().strip() if address_file.exists() else ""
    finally:
        process.kill()
        process.wait()


def test_the_service_as_a_process(tmp_path: Path) -> None:
    with _service_process(tmp_path, "--failure-timeout", "2") as (process, address):
        puppets = [Puppet(Agent(address, SECRET, "job", name, 2.0, versions={"torch": "2"})) for name in ("a", "b")]
        eventually(lambda: all(puppet.generation == 1 for puppet in puppets))
        for puppet in puppets:
            puppet.finish()
        for puppet in puppets:
            puppet.agent.wait(lambda agent: agent.job_finished, 5.0)
            puppet.close()
        assert process.wait(10) == 0
    log = (tmp_path / "log").read_text()
    assert "waiting: 1 of 2 instances ready" in log
    assert "the job is finished" in log
    assert SECRET.decode() not in log


def test_the_service_ends_on_sigterm(tmp_path: Path) -> None:
    with _service_process(tmp_path) as (process, address):
        agent = Agent(address, SECRET, "job", "a", 0.5, versions={})
        agent.connect(5.0)
        process.send_signal(signal.SIGTERM)
        process.wait(5)
        agent.close(goodbye=False)


@pytest.mark.parametrize(
    ("arguments", "environ", "complaint"),
    [
        (["--bind", "0.0.0.0:0"], {}, "refusing to listen on 0.0.0.0 without a job secret"),
        (["--bind", "nonsense"], {}, "host:port"),
        (["--failure-timeout", "-1"], {}, "must be positive"),
        ([], {"PARCAE_SECRET": "short"}, "at least 16 characters"),
    ],
)
def test_the_service_refuses_to_start(
    arguments: list[str],
    environ: dict[str, str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(service_module.logging, "basicConfig", lambda **_: None)
    for name in ("PARCAE_SECRET", "PARCAE_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert service_module.main(["--job-id", "job", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_the_service_loads_neither_torch_nor_lightning() -> None:
    code = (
        "import sys, lightning_parcae.control.service, lightning_parcae.control.agent\n"
        "print(sorted({'torch', 'lightning', 'pytorch_lightning', 'pmdarima', 'pandas'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_generations_go_on_where_an_earlier_coordinator_ended(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"job_id": "job", "generation": 41}))
    service = LiveService(tmp_path, expected=1)
    try:
        puppets = start(service, "a")
        assert puppets[0].generation == 42
        close(puppets)
    finally:
        service.end()


def test_a_damaged_state_file_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    service = LiveService(tmp_path)
    service.end()


def test_a_full_disk_does_not_end_the_job(tmp_path: Path) -> None:
    service = LiveService(tmp_path / "run", expected=1)
    try:
        timeline_file = service.service._files._timeline
        assert timeline_file is not None
        service.service._files._timeline = open("/dev/full", "w", buffering=1)  # noqa: SIM115
        puppets = start(service, "a")
        close(puppets)
        full = service.service._files._timeline
        service.service._files._timeline = timeline_file
        with contextlib.suppress(OSError):
            full.close()
    finally:
        service.end()


def test_connections_leave_nothing_behind(service: LiveService) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    Puppet(service.agent("warm")).close()
    eventually(lambda: service.admin().status()["instances"] == {})
    before, threads = descriptors(), threading.active_count()
    for number in range(30):
        Puppet(service.agent(f"i{number}")).close(goodbye=bool(number % 2))
    eventually(lambda: service.admin().status()["instances"] == {})
    eventually(lambda: descriptors() <= before + 1)
    assert threading.active_count() == threads


def test_an_agent_must_be_connected(service: LiveService) -> None:
    agent = service.agent("a")
    with pytest.raises(MembershipError, match="not connected"):
        agent.wait(lambda _: None, 1.0)
    agent.send(Ready(SPEC, "a:1", "a:2"))
    agent.close(goodbye=True)
    with pytest.raises(ValueError, match="failure_timeout_s"):
        service.agent("a", failure_timeout_s=0)


def test_a_notice_from_another_thread(service: LiveService) -> None:
    puppets = start(service, "a", "b")
    thread = threading.Thread(target=lambda: puppets[1].agent.send(Notice(30.0)))
    thread.start()
    assert puppets[1].agent.wait(lambda agent: agent.released, 5.0) is not None
    thread.join()
    close(puppets)


def test_the_service_needs_a_secret_to_be_reached_from_outside() -> None:
    async def main() -> None:
        await Service(b"", "job", 1.0).start("0.0.0.0", 0)

    with pytest.raises(ValueError, match="PARCAE_SECRET_FILE"):
        asyncio.run(main())


def test_refused_connections_are_counted_instead_of_shown_one_by_one(
    service: LiveService, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        with pytest.raises(RefusedError):
            connect_authenticated(service.address, b"another secret!!", "job", "x", "instance")
    eventually(lambda: "connections not taken" in caplog.text)
    shown = [record.getMessage() for record in caplog.records if "not taken" in record.getMessage()]
    assert len(shown) <= 4
    assert "refused the one from" in shown[0]


def test_who_is_refused_knows_the_exit_code(service: LiveService) -> None:
    for options in ({"secret": b"another secret!!"}, {"job_id": "another"}):
        with pytest.raises(RefusedError) as caught:
            service.agent("a", **options).connect(5.0)
        assert caught.value.exit_code == 5
