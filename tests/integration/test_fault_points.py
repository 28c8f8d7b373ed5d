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
# 11 batches an epoch; the last one has a single sample, so that one of two pipelines has nothing to do
SCRIPT = {"num_samples": NUM_SAMPLES, "batch_size": 10, "trainer": {"max_epochs": EPOCHS}}

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
        self._num_added = 0

    @property
    def alive(self) -> list[str]:
        return [name for name in self.job.processes if name not in self.killed | self.stopped]

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
        name = f"j{self._num_added + 1}" if role == "joiner" else self.layout()["order"][-1]
        self.job.arm(name, point, action)
        self.add()
        self.strike(name, point, role, action)
        self.make_whole()

    def newcomer(self, point: str) -> None:
        """Kill an instance before it has a place; nobody waits for it."""
        name = f"j{self._num_added + 1}"
        generation = self.layout()["generation"]
        self.job.arm(name, point)
        self.add()
        self.strike(name, point, "newcomer")
        settle(self.job)
        if point != "ready":  # then it may have been planned in already
            assert self.layout()["generation"] == generation

    def leaving(self, point: str) -> None:
        """Kill an instance while it hands over after a notice."""
        name = self.who("last")
        self.job.arm(name, point)
        self.job.signal(name, signal.SIGTERM)
        self.strike(name, point, "leaving")
        self.make_whole()

    def all_at_once(self) -> None:
        """Kill all but one member of a job without pipelining at the same moment."""
        victims = self.layout()["order"][:-1]
        for name in victims:
            self.kill(name)
        self.job.wait_until(
            lambda: set(victims) <= {record["instance"] for record in self.job.timeline("died")}, 30, "deaths are seen"
        )
        self.make_whole()

    def end(self, reference: dict[str, Any], timeout_s: float = 120.0) -> dict[str, int]:
        """Let the job run to its end and compare."""
        (self.job.run_dir / "hurry").touch()
        for name in self.stopped:  # the zombies
            self.job.signal(name, signal.SIGCONT)
        codes = self.job.join(timeout_s)
        for name, code in codes.items():
            want = {-signal.SIGKILL} if name in self.killed else {5} if name in self.stopped else {0}
            assert code in want, f"{name} ended with {code}\n{self.job.report()}"
        for name in self.stopped:
            assert "declared dead" in (self.job.run_dir / f"{name}.log").read_text()
        assert_same(self.job, reference, 1e-9)
        assert_exactly_once(self.job, NUM_SAMPLES, EPOCHS)
        finishers = set(self.job.processes) - self.killed - self.stopped
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
    ordeal.during_repair("acknowledge", "rank 0")
    ordeal.during_repair("transfer", "first")
    ordeal.during_repair("formation", "last")
    ordeal.during_join("acknowledge", "joiner")
    ordeal.during_join("transfer", "joiner", "stop")
    ordeal.during_join("formation", "joiner")
    ordeal.during_join("settle", "joiner")
    ordeal.end(reference)


def test_donors_and_newcomers(start: Any, reference: dict[str, Any]) -> None:
    ordeal = start((3, 1))
    ordeal.during_repair("settle", "rank 0")
    for point in ("acknowledge", "transfer", "formation", "settle"):
        ordeal.during_join(point, "donor")
    for point in ("set_up", "warm_up", "ready"):
        ordeal.newcomer(point)
    ordeal.leaving("acknowledge")
    ordeal.all_at_once()
    ordeal.end(reference)


def test_middle_stage_and_epoch_end(start: Any, reference: dict[str, Any], tmp_path: Path) -> None:
    ordeal = start((2, 3), fallback_dir=str(tmp_path / "fallback"), fallback_every_n_steps=20)
    for point in ("forward", "backward", "reduction", "vote"):
        ordeal.during_steps(point, "middle")
    ordeal.during_steps("validation", "last")
    ordeal.during_steps("gather", "rank 0")
    ordeal.during_steps("save", "rank 0")
    ordeal.during_steps("epoch_end", "first")
    ordeal.during_steps("fallback", "last")
    ordeal.end(reference)
    assert not ordeal.job.timeline("rolled_back")


@pytest.mark.parametrize("role", ["rank 0", "last"])
def test_finish_with_a_spare_waiting(start: Any, reference: dict[str, Any], role: str) -> None:
    ordeal = start((2, 2), spares=1, sleep_s=0.0)
    name = ordeal.who(role)
    ordeal.job.arm(name, "finish")
    ordeal.strike(name, "finish", role)
    ordeal.end(reference)


def test_every_point_has_struck() -> None:
    if not {"stepped", "transfer", "ready", "fallback", "finish"} <= {point for point in fired if fired[point]}:
        pytest.skip("needs all other tests of this file to have run, and to have passed")
    for point, roles in fired.items():
        print(f"{point:12s} {', '.join(sorted(roles))}")
    assert not [point for point, roles in fired.items() if not roles]
