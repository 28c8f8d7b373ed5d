"""Jobs of real processes for the integration tests.

Importing torch and Lightning costs 5-15 s a process, so instances are forked from one server process that has done it
already. Everything else is real: the coordinator is its own process, instances talk over sockets, kills are kills.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FAILURE_TIMEOUT_S = 4.0


def fork_server() -> Any:
    """Return the context whose processes start with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.preload"])
    return context


class _ArmedFaults(list[dict[str, Any]]):
    """Faults that the test adds while the instance runs: the lines of a file, see :meth:`Job.arm`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._num_read = 0

    def __bool__(self) -> bool:
        if self._path.exists():
            lines = self._path.read_text().splitlines()
            self.extend(json.loads(line) for line in lines[self._num_read :])
            self._num_read = len(lines)
        return len(self) > 0


def _run_instance(
    environment: dict[str, str], log_path: str, target: Callable[..., Any], kwargs: dict[str, Any]
) -> None:
    os.environ.update(environment)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    import faulthandler

    from lightning_parcae import testing

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # a daemon of the test's process, so that it ends with it; but it may have loader workers
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)  # as in any process on Linux
    testing._faults = testing._read()  # read again: the server process was started without
    if testing._faults is None:
        testing._faults = _ArmedFaults(Path(log_path).with_suffix(".faults"))
    code = 0
    try:
        target(**kwargs)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException as error:
        traceback.print_exc()
        code = getattr(error, "exit_code", 1)  # as install_exit_codes does
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as at the end of a script, but without the fork server's own clean-up


@dataclass
class Job:
    """A job with a coordinator and instances that tests kill, stop, warn and add.

    Attributes:
        run_dir: Logs, timeline, commit records and whatever the script writes.
        target: What each instance runs; importable, its keyword arguments picklable.
        kwargs: Its arguments.
        expected: Instances to wait for at the start.
        environment: Further variables for the instances.
    """

    run_dir: Path
    target: Callable[..., Any]
    kwargs: dict[str, Any]
    expected: int
    environment: dict[str, str] = field(default_factory=dict)
    failure_timeout_s: float = FAILURE_TIMEOUT_S
    processes: dict[str, Any] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    address: str = ""
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    _service: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the coordinator and the expected instances."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        address_file = self.run_dir / "address"
        command = [sys.executable, "-m", "lightning_parcae.control.service", "--bind", "127.0.0.1:0"]
        command += ["--job-id", "test", "--run-dir", str(self.run_dir), "--expected", str(self.expected)]
        command += ["--failure-timeout", str(self.failure_timeout_s), "--address-file", str(address_file)]
        with open(self.run_dir / "coordinator.log", "wb") as log:
            environment = {**os.environ, "PARCAE_SECRET": self.secret}
            self._service = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.wait_until(address_file.exists, 20, "the coordinator listens")
        self.address = address_file.read_text().strip()
        for index in range(self.expected):
            self.add(f"i{index}")

    def add(self, name: str, **environment: str) -> None:
        """Start an instance."""
        variables = {
            "PARCAE_COORDINATOR": self.address,
            "PARCAE_SECRET": self.secret,
            "PARCAE_JOB_ID": "test",
            "PARCAE_INSTANCE": name,
            "PARCAE_RUN_DIR": str(self.run_dir),
            "PARCAE_COMMIT_RECORDS": "1",
            "PARCAE_FAULT_LOG": str(self.run_dir / "faults.jsonl"),
            "OMP_NUM_THREADS": "1",
            **self.environment,
            **environment,
        }
        arguments = (variables, str(self.run_dir / f"{name}.log"), self.target, {**self.kwargs, "name": name})
        process = fork_server().Process(target=_run_instance, args=arguments, daemon=True)
        process.start()
        assert process.pid is not None
        self.processes[name], self.pids[name] = process, process.pid

    def signal(self, name: str, number: int) -> None:
        """Send a signal to an instance."""
        os.kill(self.pids[name], number)

    def kill(self, name: str) -> None:
        """SIGKILL an instance."""
        self.signal(name, signal.SIGKILL)

    def arm(self, name: str, point: str, action: str = "kill", step: int = 0) -> None:
        """Let a fault strike in an instance at a named point of the protocol; it may run already or start later."""
        path = self.run_dir / f"{name}.faults"
        fault = json.dumps({"point": point, "instance": name, "action": action, "step": step})
        part = path.with_suffix(".part")
        part.write_text((path.read_text() if path.exists() else "") + fault + "\n")
        part.replace(path)

    # ------------------------------------------------------------------ what happened

    def timeline(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return the coordinator's records, of one kind or all."""
        path = self.run_dir / "timeline.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        records = []
        for line in lines:
            with contextlib.suppress(ValueError):  # the last line may be half written
                records.append(json.loads(line))
        return [record for record in records if event is None or record["event"] == event]

    def faults(self) -> list[dict[str, Any]]:
        """Return the fault points that have struck."""
        path = self.run_dir / "faults.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def step(self) -> int:
        """Batches committed so far, by any instance's record."""
        steps = [-1]
        for path in (self.run_dir / "commits").glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 2000))
                lines = file.read().split(b"\n")
            for line in reversed(lines):
                with contextlib.suppress(ValueError):
                    steps.append(int(json.loads(line)["step"]))
                    break
        return max(steps)

    def rank_zero(self) -> str:
        """Return the name of the present rank 0."""
        layouts = [record["layout"] for record in self.timeline("committed") if record["layout"]]
        return str(layouts[-1]["order"][0])

    def place_of(self, pipeline: int, stage: int) -> str:
        """Return who holds a place now."""
        layouts = [record["layout"] for record in self.timeline("committed") if record["layout"]]
        return str(layouts[-1]["grid"][pipeline][stage])

    # ------------------------------------------------------------------ waiting

    def wait_until(self, condition: Callable[[], Any], timeout_s: float, what: str) -> None:
        """Poll until a condition holds; on time-out show what the job says."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"timed out after {timeout_s} s waiting until {what}\n{self.report()}")
            if self.processes and all(process.exitcode is not None for process in self.processes.values()):
                if condition():
                    return
                raise AssertionError(f"all instances ended while waiting until {what}\n{self.report()}")
            time.sleep(0.02)

    def wait_for_step(self, step: int, timeout_s: float = 60.0) -> None:
        """Wait until a batch has been committed."""
        self.wait_until(lambda: self.step >= step, timeout_s, f"step {step}")

    def wait_for_event(self, event: str, count: int = 1, timeout_s: float = 60.0) -> None:
        """Wait until the coordinator has recorded an event so many times."""
        self.wait_until(lambda: len(self.timeline(event)) >= count, timeout_s, f"{count} x {event}")

    def join(self, timeout_s: float = 120.0) -> dict[str, int]:
        """Wait until every instance has ended; return the exit codes, negative for signals."""
        deadline = time.monotonic() + timeout_s
        for name, process in self.processes.items():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                raise AssertionError(f"{name} still runs after {timeout_s} s\n{self.report()}")
        return {name: process.exitcode for name, process in self.processes.items()}

    def report(self) -> str:
        """Return the ends of all logs, and where the threads of what still runs are."""
        parts = []
        for process in self.processes.values():
            with contextlib.suppress(ValueError, OSError):  # closed already, or gone
                if process.exitcode is None:
                    os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        for path in sorted(self.run_dir.glob("*.log")):
            parts.append(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-25:]))
        events = [json.dumps(record) for record in self.timeline() if record["event"] != "progress"][-25:]
        return "\n".join([*parts, "--- timeline", *events])

    def stop(self) -> None:
        """End what still runs."""
        for process in self.processes.values():
            if process.exitcode is None and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            process.join(10)
            process.close()
        if self._service is not None:
            if self._service.poll() is None:
                self._service.kill()
            self._service.wait(10)


@contextlib.contextmanager
def running(job: Job) -> Iterator[Job]:
    """Start a job and leave nothing behind."""
    try:
        job.start()
        yield job
    finally:
        job.stop()
