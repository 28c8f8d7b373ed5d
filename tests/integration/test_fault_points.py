"""Faults at every named point of the protocol, in every role; each job must end as one undisturbed process does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_parcae.testing import POINTS
from tests.integration.jobs import Job, running
from tests.integration.outcomes import assert_exactly_once, assert_same, results, settle, train_alone
from tests.integration.scripts import fit_regressor

pytestmark = pytest.mark.timeout(280)

NUM_SAMPLES = 101
EPOCHS = 14
# 26 batches an epoch; the last one has a single sample, so that one of two pipelines has nothing to do
SCRIPT = {"num_samples": NUM_SAMPLES, "batch_size": 4, "trainer": {"max_epochs": EPOCHS}}
ALREADY_HERE = ("set_up", "warm_up", "ready")

fired: dict[str, set[str]] = {point: set() for point in POINTS}
"""Roles in which each point has struck, over all tests of this file."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train_alone(tmp_path_factory.mktemp("reference"), fit_regressor, **SCRIPT)


class Ordeal:
    """A job that is brought back to its full grid after each fault.

    Args:
        job: The running job.
        grid: Pipelines and stages of the full grid.
        spares: Further instances.
    """

    def __init__(self, job: Job, grid: tuple[int, int], spares: int = 0) -> None:
        self.job = job
        self.grid = grid
        self.spares = spares
        self.killed: set[str] = set()
        self.stopped: set[str] = set()
        self.left: set[str] = set()
        self._num_added = 0

    @property
    def alive(self) -> list[str]:
        gone = self.killed | self.stopped | self.left
        return [name for name in self.job.processes if name not in gone]

    def layout(self) -> dict[str, Any]:
        layouts = [record["layout"] for record in self.job.timeline("committed") if record["layout"]]
        newest: dict[str, Any] = layouts[-1]
        return newest

    def who(self, role: str) -> str:
        """Return an instance in a role; one that is not rank 0 if the role does not say so."""
        layout = self.layout()
        zero, grid = layout["order"][0], layout["grid"]
        if role == "rank 0":
            return str(zero)
        if role == "spare":
            placed = {name for row in grid for name in row}
            return next(name for name in self.alive if name not in placed)
        stage = {"first": 0, "middle": 1, "last": -1}[role]
        return next(str(row[stage]) for row in grid if row[stage] != zero)

    def partner(self, name: str) -> str:
        """Return a member whose death together with ``name``'s leaves all state: another stage, another pipeline."""
        grid = self.layout()["grid"]
        row, stage = next((r, row.index(name)) for r, row in enumerate(grid) if name in row)
        other = (stage + 1) % len(grid[0])
        return str(grid[(row + 1) % len(grid)][other])

    def add(self) -> str:
        self._num_added += 1
        name = f"j{self._num_added}"
        self.job.add(name)
        return name

    def kill(self, name: str) -> None:
        self.job.kill(name)
        self.killed.add(name)

    def make_whole(self) -> None:
        """Add instances until the full grid runs again."""
        missing = self.grid[0] * self.grid[1] + self.spares - len(self.alive)
        for _ in range(missing):
            self.add()
        settle(self.job, self.grid, 90.0)
        count = self.grid[0] * self.grid[1] + self.spares + len(self.killed | self.stopped | self.left)
        self.job.wait_until(lambda: len(self.job.timeline("ready")) >= count - self._never_ready(), 60, "all ready")

    def _never_ready(self) -> int:
        ready = {record["instance"] for record in self.job.timeline("ready")}
        return len((self.killed | self.stopped | self.left) - ready)

    def strike(self, name: str, point: str, role: str, action: str = "kill") -> None:
        """Wait until an armed fault has struck, and until the coordinator has taken note."""
        job = self.job
        job.wait_until(
            lambda: any(f["point"] == point and f["instance"] == name for f in job.faults()), 60, f"{point} in {name}"
        )
        (self.killed if action == "kill" else self.stopped).add(name)
        fired[point].add(role)
        job.wait_until(
            lambda: any(r["instance"] == name for r in job.timeline("died")), 60, f"the death of {name} is seen"
        )

    def during_steps(self, point: str, role: str, action: str = "kill") -> None:
        name = self.who(role)
        self.job.arm(name, point, action)
        self.strike(name, point, role, action)
        self.make_whole()

    def during_repair(self, point: str, role: str, action: str = "kill") -> None:
        """Strike while the members regroup after another death."""
        name = self.who(role)
        other = self.partner(name)
        self.job.arm(name, point, action)
        self.kill(other)
        self.strike(name, point, role, action)
        self.make_whole()

    def during_join(self, point: str, role: str, action: str = "kill") -> None:
        """Strike while the grid grows by a joiner: in the joiner, or in a member that must give it its state."""
        lost = self.who("last")
        self.kill(lost)
        self.job.wait_until(lambda: any(r["instance"] == lost for r in self.job.timeline("died")), 30, "death seen")
        settle(self.job, (self.grid[0] - 1, self.grid[1]))
        if role == "joiner":
            name = f"j{self._num_added + 1}"
            self.job.arm(name, point, action)
            self.add()
        else:
            name = self.layout()["order"][-1]
            self.job.arm(name, point, action)
            self.add()
        self.strike(name, point, role, action)
        self.job.wait_until(lambda: len(self.alive) > 0, 1, "survivors")
        self.make_whole()

    def end(self, reference: dict[str, Any], timeout_s: float = 120.0) -> dict[str, int]:
        """Let the job run to its end and compare."""
        (self.job.run_dir / "hurry").touch()
        for name in self.stopped:  # the zombies
            self.job.signal(name, signal.SIGCONT)
        codes = self.job.join(timeout_s)
        for name, code in codes.items():
            want = {-signal.SIGKILL} if name in self.killed else {1} if name in self.stopped else {0}
            assert code in want, f"{name} ended with {code}\n{self.job.report()}"
        for name in self.stopped:
            assert "declared dead" in (self.job.run_dir / f"{name}.log").read_text()
        assert_same(self.job, reference, 1e-9)
        assert_exactly_once(self.job, NUM_SAMPLES, EPOCHS)
        finishers = set(self.job.processes) - self.killed - self.stopped - self.left
        assert set(results(self.job)) == finishers
        return codes


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    jobs: list[Any] = []

    def run(grid: tuple[int, int], *, spares: int = 0, sleep_s: float = 0.1, **strategy: Any) -> Ordeal:
        out = tmp_path / f"job{len(jobs)}"
        options = {"num_stages": grid[1], "failure_timeout": 4, **strategy}
        kwargs = {**SCRIPT, "out": str(out), "strategy": options, "sleep_s": sleep_s, "log_reads": True}
        context = running(Job(out, fit_regressor, kwargs, expected=grid[0] * grid[1] + spares))
        job = context.__enter__()
        jobs.append(context)
        settle(job, grid, 90.0)
        return Ordeal(job, grid, spares)

    yield run
    for context in jobs:
        context.__exit__(None, None, None)


def test_points_of_a_step(start: Any, reference: dict[str, Any]) -> None:
    ordeal = start((2, 2))
    ordeal.during_steps("boundary", "rank 0")
    ordeal.during_steps("batch", "first")
    ordeal.during_steps("forward", "last")
    ordeal.during_steps("backward", "first", "stop")
    ordeal.during_steps("reduction", "last")
    ordeal.during_steps("vote", "rank 0")
    ordeal.during_steps("voted", "first")
    ordeal.during_steps("stepped", "last")
    ordeal.end(reference)


def test_points_of_a_reconfiguration(start: Any, reference: dict[str, Any]) -> None:
    ordeal = start((2, 2))
    for point in ("acknowledge", "transfer", "formation", "settle"):
        ordeal.during_repair(point, "rank 0" if point in ("acknowledge", "settle") else "last")
        ordeal.during_join(point, "joiner" if point in ("transfer", "settle") else "donor")
    ordeal.end(reference)
