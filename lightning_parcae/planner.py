"""The planner's thread in the running job.

It runs on rank 0 and moves with it: each interval and at every membership change it asks the coordinator for the
history, lets :class:`~lightning_parcae.planning.job_planner.JobPlanner` decide, and sends the coordinator a new table
if it differs. The coordinator carries it out, and goes on with the newest table when rank 0 is gone.

The training thread never waits for it. It only notes step times, and raises what has failed here at the next boundary.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol

from lightning_parcae.control.history import HISTORY_KEY
from lightning_parcae.control.messages import Event, Plan
from lightning_parcae.errors import JobFailedError, MembershipError, PlanError
from lightning_parcae.planning.job_history import JobHistory
from lightning_parcae.planning.job_planner import Decision, JobPlanner
from lightning_parcae.planning.job_profile import LinkSpeed, StepTime
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.policy import table_to_json

log = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 10.0
_RETRY_S = 0.5
_KEPT_STEPS = 32
_SLOW_FIRST_STEPS = 2
MIN_STEPS = 5
"""Steps of a configuration before its time counts as measured."""


class ControlLink(Protocol):
    """What the planner needs of :class:`~lightning_parcae.control.agent.Agent`."""

    def request(
        self, op: Literal["set_default", "wait", "get"], key: str, value: Any = None, *, timeout_s: float | None
    ) -> Any:
        """Ask the coordinator."""

    def send(self, message: Plan | Event) -> None:
        """Tell the coordinator; never waits."""


class StepTimes:
    """Measured step times by configuration. Written by the training thread, on every instance; read by the planner.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._times: dict[ParallelConfig, tuple[deque[float], deque[float]]] = {}
        self._config: ParallelConfig | None = None
        self._num_skipped = 0
        self._last_end: float | None = None

    def enter(self, config: ParallelConfig | None) -> None:
        """Begin a generation; its first steps do not count."""
        self._config, self._num_skipped, self._last_end = config, 0, None

    def note(self, started: float, *, is_whole: bool = True) -> None:
        """Note a step that has just been done.

        Args:
            started: When its work began, by the same clock.
            is_whole: Whether it was done in one attempt.
        """
        now, last = self._clock(), self._last_end
        self._last_end = now
        if self._config is None or not is_whole or last is None or self._num_skipped < _SLOW_FIRST_STEPS:
            self._num_skipped += 1
            return
        with self._lock:
            work, whole = self._times.setdefault(self._config, (deque(maxlen=_KEPT_STEPS), deque(maxlen=_KEPT_STEPS)))
            work.append(now - started)
            whole.append(now - last)

    def measured(self) -> dict[ParallelConfig, StepTime]:
        """Return the median times of the configurations that have run long enough."""
        with self._lock:
            times = {config: (list(work), list(whole)) for config, (work, whole) in self._times.items()}
        found = {}
        for config, (work, whole) in times.items():
            if len(work) >= MIN_STEPS:
                work_s = max(median(work), 1e-9)
                found[config] = StepTime(work_s, max(median(whole) - work_s, 0.0))
        return found


class Planner:
    """One instance's planner; its thread runs while this instance is rank 0.

    Args:
        link: Connection to the coordinator.
        job: What decides.
        profile_path: Where the profile with what was measured is written; None for nowhere.
        on_end: Called in the thread when it ends.

    Attributes:
        steps: Step times, noted by the training thread.
        link: What a probe has found between the members; set by the training thread.
    """

    def __init__(
        self,
        link: ControlLink,
        job: JobPlanner,
        *,
        profile_path: Path | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.steps = StepTimes()
        self.link: LinkSpeed | None = None
        self._control = link
        self._job = job
        self._profile_path = profile_path
        self._on_end = on_end
        self._interval_s = job.settings.interval_s
        self._is_on = job.settings.policy != "fixed"
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._last_thread: threading.Thread | None = None  # told to stop, perhaps still busy
        self._failure: Exception | None = None
        self._metrics: dict[str, float] = {}
        self._has_spoken = False  # whether the timeline knows that this instance plans

    @property
    def metrics(self) -> dict[str, float]:
        """The newest plan in numbers, as ``parcae/*`` metrics; empty where no plan was made."""
        return dict(self._metrics)

    @property
    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def enter(self, config: ParallelConfig, *, is_zero: bool) -> None:
        """Take note of a new generation; called by the training thread.

        Args:
            config: What runs.
            is_zero: Whether this instance is rank 0.
        """
        self.steps.enter(config)
        if not is_zero or not self._is_on:
            self.stop()
        elif self._thread is None:
            self._stopping, self._has_spoken = threading.Event(), False
            arguments = (self._stopping, self._last_thread)
            self._thread = threading.Thread(target=self._run, args=arguments, name="parcae-planner", daemon=True)
            self._thread.start()
        else:
            self.notify()

    def notify(self) -> None:
        """Plan again now: something has changed."""
        self._wake.set()

    def stop(self, wait_s: float = 0.0) -> None:
        """End the thread, which may be busy for some more milliseconds.

        Args:
            wait_s: Seconds to wait for that.
        """
        thread, self._thread = self._thread, None
        self._last_thread = thread if thread is not None else self._last_thread
        self._stopping.set()
        self._wake.set()
        self._metrics = {}
        if thread is not None and wait_s > 0:
            thread.join(wait_s)

    def raise_if_failed(self) -> None:
        """Raise what has failed in the thread.

        Raises:
            PlanError: With the failure as its cause.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise PlanError(
                f"the planner failed: {type(failure).__name__}: {failure}. This is a fault of lightning_parcae or of a "
                "profile: please report it with the traceback; policy='fixed' trains without a planner"
            ) from failure

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self, stopping: threading.Event, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            while not stopping.is_set():
                self._wake.clear()
                self._wake.wait(self._plan_once(stopping))
        except (MembershipError, JobFailedError) as error:
            log.debug("the planner ends: %s", error)  # the training thread meets the same
        except Exception as error:
            if not stopping.is_set():
                self._failure = error
        finally:
            self._on_end()

    def _plan_once(self, stopping: threading.Event) -> float:
        """Plan; return how long to wait until the next time, in seconds."""
        try:
            answer = self._control.request("get", HISTORY_KEY, timeout_s=_ANSWER_TIMEOUT_S)
        except TimeoutError:
            return self._interval_s
        history = JobHistory.from_json(answer)
        started = time.perf_counter()
        if self.link is not None:
            self._job.take_link(self.link)
        decision = self._job.decide(history, self.steps.measured())
        seconds = time.perf_counter() - started
        if decision is None:
            return min(_RETRY_S, self._interval_s)
        if not stopping.is_set():
            self._metrics = {
                "parcae/liveput": decision.samples_per_s,
                "parcae/forecast_lost": decision.expected_lost,
                "parcae/forecast_skill": decision.skill,
                "parcae/plan_s": seconds,
                **({} if decision.forecast_mae is None else {"parcae/forecast_mae": decision.forecast_mae}),
            }
            if not self._has_spoken:
                self._has_spoken = True
                self._control.send(Event("planner", self._describe(decision)))
            self._announce(decision, history, seconds)
        since = history.started_at if history.started_at is not None else history.now
        # a little later than the interval's beginning, so that the next question falls into it
        return self._interval_s - (history.now - since) % self._interval_s + 1e-3

    def _describe(self, decision: Decision) -> dict[str, Any]:
        settings = self._job.settings
        said: dict[str, Any] = {
            "policy": settings.policy,
            "interval_s": settings.interval_s,
            "intervals": decision.num_intervals,
        }
        if self.link is not None:
            said["link"] = {"latency_s": self.link.latency_s, "bytes_per_s": self.link.bytes_per_s}
        return said

    def _announce(self, decision: Decision, history: JobHistory, seconds: float) -> None:
        pairs = table_to_json(decision.table)
        table = [None if pair is None else (pair[0], pair[1]) for pair in pairs]
        if tuple(table) == history.table:
            return
        log.info("plan: %s (forecast: %s)", decision.reason, decision.forecast_by)
        details = {**decision.details(), "plan_s": round(seconds, 5), "num_instances": history.num_instances}
        self._control.send(Plan(table=table, reason=decision.reason, details=details))
        self._write_profile()

    def _write_profile(self) -> None:
        """Keep what was measured where `parcae plan` and the next run can read it."""
        path = self._profile_path
        if path is None:
            return
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(self._job.profile.to_json(), indent=1), encoding="utf-8")
            part.replace(path)
        except OSError as error:  # a full disk must not end the job
            log.warning("the profile could not be written to %s: %s", path, error)
            self._profile_path = None
