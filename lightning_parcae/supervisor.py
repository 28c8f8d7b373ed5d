"""Starts a coordinator and local instances, watches them, shows one console, and cleans up.

An instance's death is an event, never an error of the supervisor: the job goes on with the others. Faults can be
injected by a script. The module loads neither torch nor Lightning.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_parcae.console import Console, LogFollower
from lightning_parcae.control.service import AdminClient
from lightning_parcae.errors import MembershipError, ParcaeError
from lightning_parcae.faults import ROLES, FaultEvent, FaultRun, FaultScript
from lightning_parcae.job_files import JOB_FILE, run_dir_lock, write_job_file, write_secret
from lightning_parcae.processes import ChildProcess, describe_exit
from lightning_parcae.timeline import JobView

__all__ = ["ExitCode", "FaultScript", "InstanceRecord", "Supervisor"]

_log = logging.getLogger(__name__)
_TICK_S = 0.05
_STEP_POLL_S = 0.05
_START_TIMEOUT_S = 30.0
_MAX_CRASHES = 3
_LONGEST_STEP_S = 30.0
_SETTLING_S = 1.0
_RECORDS = ("timeline.jsonl", "processes.jsonl", "coordinator.log", "commits")


class ExitCode:
    """What the exit code of a job says."""

    FINISHED = 0
    FAILED = 1
    USAGE = 2
    STATE_LOST = 3
    TOO_FEW_INSTANCES = 4
    REFUSED = 5
    INTERRUPTED = 130


@dataclass(slots=True)
class InstanceRecord:
    """What the supervisor knows of one instance that it has started.

    Attributes:
        name: Its name in the job.
        process: Its process.
        local_index: Its number among the living instances of this machine; decides which devices it takes.
        node: Its name in the trace that is replayed, if any.
        kill_at: When it is killed if it still lives, in seconds of the monotonic clock.
        signals: Signals that this supervisor has sent to it.
        is_gone: Whether its end has been noted.
        lived_at_finish: Whether it was running when the job finished; then its exit code counts.
    """

    name: str
    process: ChildProcess
    local_index: int
    node: str | None = None
    kill_at: float | None = None
    signals: list[int] = field(default_factory=list)
    is_gone: bool = False
    lived_at_finish: bool = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    @property
    def is_held(self) -> bool:
        """Whether it was stopped, here or by somebody else, and not told to go on; seen before the kernel shows it."""
        told = [number for number in self.signals if number in (signal.SIGSTOP, signal.SIGCONT)]
        return told[-1] == signal.SIGSTOP if told else self.process.is_stopped

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while it lives."""
        return self.process.exit_code


class Supervisor:
    """Runs a job of local instances to its end.

    Args:
        command: Program and arguments of each instance.
        num_instances: Instances to start with, at least 1.
        run_dir: Folder for logs, the timeline and commit records; made if absent. One job at a time.
        job_id: Name of the job; made up if None.
        env: Added to the environment of each instance.
        script: Faults to inject and instances to add.
        failure_timeout_s: Seconds without a sign of life after which an instance counts as dead.
        restart: Start a new instance for each one that dies.
        console: Where to show the job; standard output if None.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        num_instances: int,
        run_dir: str | Path,
        job_id: str | None = None,
        env: Mapping[str, str] | None = None,
        script: FaultScript | None = None,
        failure_timeout_s: float = 20.0,
        restart: bool = False,
        console: Console | None = None,
    ) -> None:
        if num_instances < 1:
            raise ValueError(f"num_instances must be at least 1, got {num_instances}")
        if failure_timeout_s <= 0:
            raise ValueError(f"failure_timeout_s must be more than 0, got {failure_timeout_s}")
        if not command:
            raise ValueError("command must name a program")
        self.command = tuple(command)
        self.num_instances = num_instances
        self.run_dir = Path(run_dir).absolute()
        self.job_id = job_id or make_job_id()
        self.instances: dict[str, InstanceRecord] = {}
        self.view = JobView()
        self._env = dict(env or {})
        self._script = script or FaultScript()
        self._failure_timeout_s = failure_timeout_s
        self._restart = restart
        self._console = console or Console()
        self._faults: FaultRun = self._script.start()
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._coordinator: ChildProcess | None = None
        self._admin: AdminClient | None = None
        self._threads: list[threading.Thread] = []
        self._is_closing = threading.Event()
        self._address = ""
        self._secret_path = self.run_dir / "secret"
        self._nodes: dict[str, str] = {}
        self._follower: LogFollower | None = None
        self._interrupts = 0
        self._interrupts_seen = 0
        self._sign_at = 0.0  # of life, after an interrupt
        self._crashes = 0
        self._restart_at: list[float] = []
        self._formed_at: float | None = None
        self._over_at: float | None = None
        self._shows_logs = True
        self._error: str | None = None

    def run(self) -> int:
        """Run the job.

        Returns:
            The job's exit code, see :class:`ExitCode`.

        Raises:
            ParcaeError: If the run directory is in use or the coordinator does not start.
        """
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(run_dir_lock(self.run_dir))
            stack.enter_context(self._signals())
            stack.callback(self._clean_up)
            self._put_old_records_away()
            self._start_coordinator()
            nodes = list(self._script.initial_nodes)
            for index in range(self.num_instances):
                self._start_instance(nodes[index] if index < len(nodes) else None)
            self._console.event(
                f"job {self.job_id}: {self.num_instances} instance(s) starting; logs and timeline in {self.run_dir}"
            )
            while not self._is_over():
                self._turn(_TICK_S)
            self._turn(_TICK_S)
            code = self._exit_code()
            self._show_end(code)
        return code

    @property
    def faults_left(self) -> tuple[FaultEvent, ...]:
        """Scripted events that have not happened."""
        return self._faults.left

    def _undisturbed_pipelines(self) -> int:
        """Return how many pipelines run, 0 while a member is lost or a change is under way."""
        members = [self.instances[name] for name in self.view.order if name in self.instances]
        formed = self.view.reconfigurations
        if not formed or time.time() - formed[-1].time < _SETTLING_S:
            return 0
        is_disturbed = any(record.is_gone or record.kill_at is not None or record.is_held for record in members)
        return 0 if is_disturbed or not self.view.is_settled else self.view.num_pipelines

    def _turn(self, timeout_s: float) -> None:
        """Take what has happened, then do what is due."""
        self._take_events(timeout_s)
        self._follow_log()
        if self._over_at is None:
            self._console.progress(self.view.step, self.view.epoch)
        self._look_after_instances(time.monotonic())
        if self._interrupts > self._interrupts_seen:
            self._interrupt()
        if self._over_at is None:
            elapsed_s = None if self._formed_at is None else time.monotonic() - self._formed_at
            for event in self._faults.due(self.view.step, elapsed_s, self._undisturbed_pipelines()):
                self._inject(event)

    # -- start --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Count interrupts instead of dying from them; only possible in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def count(number: int, frame: FrameType | None) -> None:
            self._interrupts += 1

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, count) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _put_old_records_away(self) -> None:
        """Move the records of an earlier job in this run directory into a folder of their own."""
        old = [path for path in self.run_dir.iterdir() if path.name in _RECORDS or path.match("instance-*.log")]
        if not old:
            return
        number = 1
        while (self.run_dir / f"previous-{number}").exists():
            number += 1
        folder = self.run_dir / f"previous-{number}"
        folder.mkdir()
        for path in old:
            path.rename(folder / path.name)

    def _start_coordinator(self) -> None:
        """Start the membership service, and watch its events."""
        secret = write_secret(self._secret_path)
        address_path = self.run_dir / "coordinator.address"  # written by the service as soon as it listens
        address_path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "lightning_parcae.control.service", "--bind", "127.0.0.1:0"]
        command += ["--job-id", self.job_id, "--run-dir", str(self.run_dir), "--expected", str(self.num_instances)]
        command += ["--failure-timeout", str(self._failure_timeout_s), "--address-file", str(address_path)]
        environ = {**os.environ, "PARCAE_SECRET_FILE": str(self._secret_path)}
        log_path = self.run_dir / "coordinator.log"
        self._coordinator = ChildProcess(command, environ=environ, log_path=log_path)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not address_path.exists():
            if self._coordinator.poll() is not None or time.monotonic() > deadline:
                raise ParcaeError(f"the coordinator did not start:\n{_last_lines(log_path)}")
            time.sleep(0.01)
        self._address = address_path.read_text(encoding="ascii").strip()
        write_job_file(self.run_dir, self.job_id, self._address)
        self._admin = AdminClient(self._address, secret, self.job_id)
        threads = [threading.Thread(target=self._watch, name="parcae-watch", daemon=True)]
        if any(event.at_step is not None for event in self.faults_left):
            threads.append(threading.Thread(target=self._watch_steps, name="parcae-steps", daemon=True))
        for thread in threads:
            thread.start()
        self._threads = threads

    def _watch(self) -> None:
        """Put the coordinator's events into the queue until it closes the stream; runs in a thread."""
        assert self._admin is not None
        try:
            for event in self._admin.watch():
                self._events.put(event)
        except (MembershipError, OSError) as error:
            _log.debug("the event stream ended: %s", error)
        self._events.put(None)

    def _watch_steps(self) -> None:
        """Put the newest step into the queue, for faults at a step; the timeline has one per second only."""
        assert self._admin is not None
        step = 0
        while not self._is_closing.wait(_STEP_POLL_S) and any(event.at_step is not None for event in self.faults_left):
            with contextlib.suppress(MembershipError, OSError):
                progress = self._admin.status()["progress"]
                if progress is not None and progress["step"] > step:
                    step = progress["step"]
                    self._events.put({"event": "progress", "step": step})

    def _start_instance(self, node: str | None = None) -> None:
        """Start one more instance under the next free name."""
        name = f"i{len(self.instances)}"
        used = {record.local_index for record in self.instances.values() if not record.is_gone}
        local_index = next(index for index in range(len(self.instances) + 1) if index not in used)
        columns = shutil.get_terminal_size((120, 40)).columns
        environ = {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": str(columns),
            **self._console.environ,
            **os.environ,
            **self._env,
            "PARCAE_COORDINATOR": self._address,
            "PARCAE_SECRET_FILE": str(self._secret_path),
            "PARCAE_JOB_ID": self.job_id,
            "PARCAE_INSTANCE": name,
            "PARCAE_LOCAL_INDEX": str(local_index),
            "PARCAE_RUN_DIR": str(self.run_dir),
            "PARCAE_EXPECTED": str(self.num_instances),
            "PARCAE_SUPERVISED": "1",  # each reconfiguration is shown here: instances need not do it
            "PARCAE_FAILURE_TIMEOUT": str(self._failure_timeout_s),
        }
        process = ChildProcess(self.command, environ=environ, log_path=self.run_dir / f"instance-{name}.log")
        self.instances[name] = InstanceRecord(name, process, local_index, node)
        if node is not None:
            self._nodes[node] = name
        self._note("started", self.instances[name])

    # -- what happens -------------------------------------------------------------------------------------------------

    def _take_events(self, timeout_s: float) -> None:
        """Take the coordinator's events in; wait for the first one at most so long."""
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._events.get(timeout=timeout_s)
                timeout_s = 0.0
                if event is not None:
                    self._take_event(event)

    def _take_event(self, event: dict[str, Any]) -> None:
        """Take one event in: show it, and follow the log of rank 0."""
        rank0_before, step_before = self.view.rank0, self.view.step
        line = self.view.take(event)
        if self.view.rank0 is not None and self.view.rank0 != rank0_before:
            self._show_log_of(self.view.rank0, from_start=rank0_before is None)
        if self.view.step != step_before:
            self._sign_at = time.monotonic()
        if self._formed_at is None and self.view.reconfigurations:
            self._formed_at = time.monotonic()
        if line is not None:
            self._console.event(line.text, line.level)
        if self._over_at is None and (self.view.is_finished or self.view.stop is not None):
            self._over_at = time.monotonic()
            for record in self.instances.values():
                is_alive = record.process.poll() is None
                record.lived_at_finish = is_alive and record.name in self.view.joined - self.view.gone
                if is_alive and record.name not in self.view.joined:
                    # it would not find the coordinator any more
                    self._console.event(f"{record.name} is ended: the job is over, and it had not joined yet")
                    self._signal(record, signal.SIGKILL)
            if self.view.stop is not None and self.view.stop.traceback:
                self._follow_log()
                self._show_traceback(self.view.stop.traceback)

    def _show_traceback(self, traceback: str) -> None:
        """Show why the job failed, once; the dying instances' own words stay in their logs."""
        last_line = traceback.strip().splitlines()[-1]
        if not self._console.has_shown(last_line):
            self._console.block(traceback)
        self._shows_logs = False

    def _show_log_of(self, name: str, *, from_start: bool) -> None:
        """Pass on the log of another instance from now on."""
        self._follow_log()
        record = self.instances.get(name)
        if record is not None:
            self._follower = LogFollower(record.process.log_path)
            if not from_start:
                # what it wrote before repeats what the previous rank 0 wrote
                self._follower.skip_to_end()

    def _follow_log(self) -> None:
        """Pass on what rank 0 has written."""
        if self._follower is not None and self._shows_logs:
            self._console.log(self._follower.read())

    def _look_after_instances(self, now: float) -> None:
        """Note who has ended, kill whose time is over, start who shall come."""
        for record in self.instances.values():
            if record.is_gone:
                continue
            if record.process.poll() is not None:
                record.is_gone = True
                self._sign_at = now
                self._note("ended", record)
                self._show_exit(record)
                if self._restart and self._over_at is None and record.exit_code != 0:
                    self._plan_restart(record, now)
                if record.name not in self.view.joined and self._formed_at is None and self._over_at is None:
                    self._expect_fewer()
            elif record.kill_at is not None and now >= record.kill_at:
                self._signal(record, signal.SIGKILL)
                record.kill_at = None
            elif record.kill_at is None and (self._over_at is not None or self._interrupts_seen):
                self._limit_end(record, now)
        due = [when for when in self._restart_at if now >= when]
        self._restart_at = [when for when in self._restart_at if now < when]
        for _ in due:
            self._start_instance()
        if self._coordinator is not None and self._coordinator.poll() is not None and self._over_at is None:
            self._over_at = now
            self._error = f"the coordinator {describe_exit(self._coordinator.exit_code or 0)}"
            self._console.event(f"{self._error}; see {self._coordinator.log_path}", "bad")

    def _expect_fewer(self) -> None:
        """Let the start not wait for an instance that has ended before it connected."""
        lost = [record for record in self.instances.values() if record.is_gone and record.name not in self.view.joined]
        count = len(self.instances) + len(self._restart_at) - len(lost)
        if count < 1 or self._admin is None:
            return
        try:
            self._admin.expect(count)
        except (MembershipError, OSError) as error:
            _log.debug("the coordinator did not take the new number of instances: %s", error)

    def _limit_end(self, record: InstanceRecord, now: float) -> None:
        """Bound how long an instance may take to end when the job is over.

        After a success, code behind ``fit`` may run as long as it likes. A stopped process never ends by itself.
        """
        over_at = now if self._over_at is None else self._over_at
        is_graceful = (
            self.view.is_finished or self._over_at is None or self.view.stop is None or self.view.stop.graceful
        )
        if record.process.is_stopped:
            record.kill_at = now
        elif not is_graceful or record.name in self.view.dead or self._error is not None:
            record.kill_at = over_at + self._failure_timeout_s + 10.0
        elif self._interrupts_seen and now - self._sign_at > self._failure_timeout_s + _LONGEST_STEP_S:
            self._console.event(f"{record.name} does not stop: killing it", "bad")
            record.kill_at = now

    def _plan_restart(self, record: InstanceRecord, now: float) -> None:
        """Replace an instance that died, unless all die before they have joined."""
        self._crashes = 0 if record.name in self.view.joined else self._crashes + 1
        if self._crashes < _MAX_CRASHES:
            self._restart_at.append(now + 1.0)
        elif self._crashes == _MAX_CRASHES:
            self._console.event(f"{_MAX_CRASHES} instances in a row died before they joined; no more restarts", "bad")

    def _show_exit(self, record: InstanceRecord) -> None:
        """Show the end of an instance where the coordinator's events do not explain it."""
        code = record.exit_code or 0
        if code == 0 or -code in record.signals or self._over_at is not None or self._interrupts:
            return
        before = "had been declared dead, woke up and " if record.name in self.view.dead and code > 0 else ""
        self._console.event(
            f"{record.name} (pid {record.pid}) {before}{describe_exit(code)}; log: {record.process.log_path}", "warn"
        )

    # -- faults -------------------------------------------------------------------------------------------------------

    def _inject(self, event: FaultEvent) -> None:
        """Let a scripted event happen."""
        when = f"step {self.view.step}"
        if event.action == "add":
            for _ in range(event.count):
                self._start_instance(event.node)
            names = list(self.instances)[-event.count :]
            self._console.event(f"script at {when}: add {', '.join(names)}", "warn")
            return
        alive = {name: record for name, record in self.instances.items() if record.process.poll() is None}
        name = self._faults.victim(
            event.target,
            order=[name for name in self.view.order if name in alive],
            spares=sorted(self.view.spares & set(alive)),
            stopped=[name for name, record in alive.items() if record.is_held],
            nodes=self._nodes,
        )
        record = self.instances.get(name or "")
        if record is None and event.target in ROLES:
            self._faults.put_back(event)
            return
        if record is None or record.process.poll() is not None:
            self._console.event(f"script at {when}: {event.action} {event.target} left out, it is not there", "warn")
            return
        self._console.event(f"script at {when}: {event.action} {record.name} (pid {record.pid})", "warn")
        if event.action == "notice":
            self._give_notice(record, event)
        else:
            number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "cont": signal.SIGCONT}[event.action]
            self._signal(record, number)

    def _give_notice(self, record: InstanceRecord, event: FaultEvent) -> None:
        """Warn an instance, as a cloud does; the grace is enforced."""
        record.kill_at = time.monotonic() + event.grace_s
        if event.via == "signal":
            self._signal(record, signal.SIGTERM)
        else:
            assert self._admin is not None
            try:
                self._admin.preempt(record.name, event.grace_s)
            except (MembershipError, OSError) as error:
                self._console.event(f"the notice for {record.name} was not taken: {error}", "bad")

    def _signal(self, record: InstanceRecord, number: int) -> None:
        """Send a signal to an instance, and remember it."""
        record.signals.append(number)
        record.process.send_signal(number)

    def _interrupt(self) -> None:
        """Stop gracefully at the first interrupt, kill at the second."""
        self._interrupts_seen = self._interrupts
        if self._interrupts >= 2:
            self._console.event("interrupted again: killing all instances", "bad")
            for record in self.instances.values():
                if record.process.poll() is None:
                    self._signal(record, signal.SIGKILL)
            self._over_at = self._over_at or time.monotonic()
            return
        self._sign_at = time.monotonic()
        self._console.event("interrupted: stopping at the next step; once more kills at once", "warn")
        assert self._admin is not None
        try:
            self._admin.stop(graceful=True)
        except (MembershipError, OSError) as error:
            self._console.event(f"the coordinator did not take the stop ({error}): killing all instances", "bad")
            for record in self.instances.values():
                record.kill_at = time.monotonic()
        # those that have not joined yet do not hear of the stop
        for record in self.instances.values():
            if record.name not in self.view.joined and record.process.poll() is None:
                self._signal(record, signal.SIGKILL)

    # -- end ----------------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        """Return whether nobody lives and nobody will come."""
        if any(not record.is_gone for record in self.instances.values()):
            return False
        if self._over_at is not None or self._interrupts:
            return True
        if self._formed_at is None:
            return not self._restart_at
        # events at a step need somebody who makes steps
        return not (
            self._restart_at or any(event.action == "add" and event.at_s is not None for event in self.faults_left)
        )

    def _exit_code(self) -> int:
        """Return the exit code of the job."""
        if self._interrupts:
            return ExitCode.INTERRUPTED
        if self.view.stop is not None:
            return self.view.stop.exit_code
        codes = [record.exit_code or 0 for record in self.instances.values()]
        if self.view.is_finished:
            late = [record.exit_code for record in self.instances.values() if record.lived_at_finish]
            return ExitCode.FAILED if any(late) else ExitCode.FINISHED
        if self._error is not None or any(code > 0 for code in codes):
            return ExitCode.FAILED
        return ExitCode.STATE_LOST if any(codes) else ExitCode.FINISHED

    def _show_end(self, code: int) -> None:
        """Show how the job ended; the log of an instance if nothing has been shown that explains it."""
        self._follow_log()
        self._console.finish()
        records = list(self.instances.values())
        failed = next((record for record in records if (record.exit_code or 0) > 0), None)
        if self.view.rank0 is None and code == ExitCode.FINISHED and records:
            # a script that has not trained: its words are the result
            self._console.log(LogFollower(records[0].process.log_path).read())
            self._console.finish()
        elif (
            code == ExitCode.FAILED and failed is not None and (self.view.stop is None or not self.view.stop.traceback)
        ):
            self._console.block(f"last lines of {failed.process.log_path}:\n{_last_lines(failed.process.log_path)}")
        elif code == ExitCode.STATE_LOST and self.view.stop is None:
            step = self.view.checkpoint_step
            if step is None:
                advice = ", and with them the state of the job; with fallback_dir=... it can go on from a checkpoint"
            else:
                advice = f"; start the same command again, it goes on from the checkpoint of step {step}"
            self._console.event(f"all instances are gone{advice}", "bad")
        self._console.event(
            f"job {self.job_id}: {self.view.summary()}; exit code {code}",
            "good" if code == ExitCode.FINISHED else "bad",
        )

    def _note(self, what: str, record: InstanceRecord) -> None:
        """Add a line about a process to the run directory, for reports."""
        line = {"time": time.time(), "event": what, "instance": record.name, "pid": record.pid, "node": record.node}
        line["exit_code"] = record.exit_code
        with (self.run_dir / "processes.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _clean_up(self) -> None:
        """Leave no process, thread, port or secret behind."""
        self._is_closing.set()
        for record in self.instances.values():
            record.process.reap()
        if self._coordinator is not None:
            if self._coordinator.poll_until(0.3) is None:
                self._coordinator.send_signal(signal.SIGTERM)
                self._coordinator.poll_until(2.0)
            self._coordinator.reap()
        if self._admin is not None:
            self._admin.close()
        for thread in self._threads:
            thread.join(5.0)
        for path in (self._secret_path, self.run_dir / "coordinator.address", self.run_dir / JOB_FILE):
            path.unlink(missing_ok=True)


def make_job_id() -> str:
    """Return a name for a job that no other job has."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _last_lines(path: Path, count: int = 30) -> str:
    """Return the end of a log."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-count:])
