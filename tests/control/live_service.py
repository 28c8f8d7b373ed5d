"""A coordinator service in a thread, and instances that follow the protocol without training."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_parcae.control.agent import Agent
from lightning_parcae.control.messages import Ack, Commit, Finished, Formed, JobSpec, Prepare, Ready
from lightning_parcae.control.service import AdminClient, Service
from lightning_parcae.errors import ParcaeError

SECRET = b"a secret of the job"
SPEC = JobSpec(2, [10, 10], [None, (1, 1), (2, 1), (3, 1), (4, 1)], {1: [0, 2]}, "f")


class LiveService:
    """A service in a thread of this process."""

    def __init__(
        self, run_dir: Path | None = None, *, failure_timeout_s: float = 3.0, expected: int | None = None
    ) -> None:
        self.failure_timeout_s = failure_timeout_s
        self.run_dir = run_dir
        self.exit_code: int | None = None
        self._options: dict[str, Any] = {"run_dir": run_dir, "expected": expected}
        self._up = threading.Event()
        self.address = ""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._up.wait(10)

    async def _run(self) -> None:
        self.service = Service(SECRET, "job", self.failure_timeout_s, **self._options)
        self._loop = asyncio.get_running_loop()
        self.address = await self.service.start("127.0.0.1", 0)
        self._up.set()
        self.exit_code = await self.service.run()

    def admin(self) -> AdminClient:
        return AdminClient(self.address, SECRET, "job")

    def agent(self, name: str, **options: Any) -> Agent:
        options = {"secret": SECRET, "job_id": "job", "failure_timeout_s": self.failure_timeout_s, **options}
        return Agent(options.pop("address", self.address), instance=name, versions={"torch": "2"}, **options)

    def end(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self.service.end)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def join(self, timeout_s: float) -> int | None:
        self._thread.join(timeout_s)
        return self.exit_code


class Puppet:
    """An instance that stops, forms and goes on as it is told."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.generation = 0
        self.prepares: list[tuple[float, Prepare]] = []
        self.urgent_calls: list[int] = []
        self.error: ParcaeError | None = None
        self._acked = 0
        agent.on_urgent = self.urgent_calls.append
        self.welcome = agent.connect(5.0)
        name = self.welcome.instance
        agent.send(Ready(SPEC, f"{name}:1", f"{name}:2"))
        self._thread = threading.Thread(target=self._obey)
        self._thread.start()

    def _obey(self) -> None:
        def news(agent: Agent) -> Prepare | Commit | bool | None:
            prepare = agent.newest_prepare
            if prepare is not None and prepare.generation > self._acked:
                return prepare
            over = agent.released is not None or agent.job_finished is not None
            commit = agent.commit_of(self._acked) if self._acked > self.generation else None
            return commit or (True if over else None)

        try:
            while True:
                item = self.agent.wait(news, None)
                if isinstance(item, Prepare):
                    self.prepares.append((time.time(), item))
                    self._acked = item.generation
                    self.agent.send(Ack(item.generation, self.agent.clock, "v", [0, 1], True))
                elif isinstance(item, Commit):
                    self.generation = item.generation
                    self.agent.clock = item.clock + 1
                    if item.layout is not None and self.welcome.instance in item.layout.order:
                        self.agent.send(Formed(item.generation))
                else:
                    return
        except ParcaeError as error:
            self.error = error

    def finish(self) -> None:
        self.agent.send(Finished())

    def close(self, goodbye: bool = True) -> None:
        self.agent.close(goodbye)
        self._thread.join(5)
        assert not self._thread.is_alive()


INSTANCE_SCRIPT = """
import sys
sys.path[:0] = {path!r}
import live_service, time
from lightning_parcae.control.agent import Agent
from lightning_parcae.errors import ParcaeError
agent = Agent({address!r}, live_service.SECRET, "job", {name!r}, {timeout!r}, versions={{"torch": "2"}})
puppet = live_service.Puppet(agent)
{extra}
print("up", flush=True)
puppet._thread.join()
print(type(puppet.error).__name__, puppet.error, flush=True)
"""


def start_instance(service: LiveService, name: str, extra: str = "") -> subprocess.Popen[str]:
    """Start an instance as a process of its own; it prints ``up``, and in the end what it died of."""
    here = Path(__file__).resolve()
    script = INSTANCE_SCRIPT.format(
        path=[str(here.parent), str(here.parents[2])],
        address=service.address,
        name=name,
        timeout=service.failure_timeout_s,
        extra=extra,
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@contextlib.contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Kill a process in the end."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def eventually(predicate: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Wait until something holds, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := predicate()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
    return found
