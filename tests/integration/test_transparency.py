"""Promise 1: whatever the layout and whatever dies, the job equals one undisturbed process."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.jobs import Job, running
from tests.integration.outcomes import (
    assert_exactly_once,
    assert_same,
    diaries,
    is_settled,
    load_result,
    results,
    settle,
    train_alone,
)
from tests.integration.scripts import fit_regressor

pytestmark = pytest.mark.timeout(200)

NUM_SAMPLES = 101
EPOCHS = 8  # of 7 batches: 56 steps
SCRIPT = {"num_samples": NUM_SAMPLES, "batch_size": 16, "trainer": {"max_epochs": EPOCHS}}
FAILURE_TIMEOUT_S = 4


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = train_alone(tmp_path_factory.mktemp("reference"), fit_regressor, **SCRIPT)
    assert len(result["steps"]) == 56
    return result


def make_job(out: Path, expected: int, **options: Any) -> Job:
    strategy = {"failure_timeout": FAILURE_TIMEOUT_S, **options.pop("strategy")}
    script = {**SCRIPT, "sleep_s": 0.1, "log_reads": True, **options}
    return Job(out, fit_regressor, {**script, "out": str(out), "strategy": strategy}, expected=expected)


def has(job: Job, event: str, name: str) -> bool:
    return any(record["instance"] == name for record in job.timeline(event))


def lose(job: Job, name: str) -> None:
    """Wait until the job has gone on without an instance."""
    job.wait_until(lambda: has(job, "died", name) or has(job, "left", name), 40, f"{name} is gone")
    step = job.step
    job.wait_until(lambda: is_settled(job) and job.step > step, 40, "the job goes on")


def in_grid(job: Job) -> list[str]:
    layout = next(record["layout"] for record in reversed(job.timeline("committed")) if record["layout"])
    return [name for row in layout["grid"] for name in row]


@pytest.mark.parametrize(
    ("num_pipelines", "num_stages", "num_workers"),
    [(1, 4, 0), (2, 2, 2), (2, 2, 0), (4, 1, 0)],
    ids=["4x1", "2x2-workers", "2x2", "1x4"],
)
def test_kill_stop_notice_and_join(
    tmp_path: Path, reference: dict[str, Any], num_pipelines: int, num_stages: int, num_workers: int
) -> None:
    has_replicas = num_pipelines > 1
    # without replicas only a spare can be lost without its state: two spares, one to be killed and one to be stopped
    count = num_pipelines * num_stages + (0 if has_replicas else 2)
    strategy = {"num_stages": num_stages, "num_pipelines": None if has_replicas else 1}
    job = make_job(tmp_path / "job", count, strategy=strategy, num_workers=num_workers)
    grid = (num_pipelines, num_stages)
    with running(job):
        settle(job, grid, 90)
        job.wait_for_step(3)
        spares = sorted(set(job.processes) - set(in_grid(job)))
        killed = in_grid(job)[-1] if has_replicas else spares[0]
        job.kill(killed)
        lose(job, killed)
        job.add("j0")
        settle(job, grid)
        job.wait_for_step(job.step + 2)

        stopped = in_grid(job)[0] if has_replicas else spares[1]
        job.signal(stopped, signal.SIGSTOP)
        lose(job, stopped)
        job.signal(stopped, signal.SIGCONT)
        job.add("j1")
        settle(job, grid)
        job.wait_until(lambda: has(job, "ready", "j1"), 40, "j1 is ready")
        job.wait_for_step(job.step + 2)

        leaving = in_grid(job)[0]
        job.signal(leaving, signal.SIGTERM)
        lose(job, leaving)
        job.add("j2")
        job.wait_until(lambda: has(job, "ready", "j2"), 40, "j2 is ready")
        settle(job, grid)
        assert job.step < 50, "the events came too late to matter; make the steps slower"
        (job.run_dir / "hurry").touch()
        codes = job.join()
        assert codes == {name: 0 for name in codes} | {killed: -signal.SIGKILL, stopped: 5}, job.report()
        assert "declared dead" in (job.run_dir / f"{stopped}.log").read_text()
        assert not (job.run_dir / f"result-{leaving}.pt").exists()  # it left inside of fit
        assert not job.timeline("rolled_back")
        assert_same(job, reference, 1e-9 if has_replicas else 0.0)
        assert_exactly_once(job, NUM_SAMPLES, EPOCHS)
        survivors = set(codes) - {killed, stopped, leaving, "j0", "j1", "j2"}
        assert len(survivors) >= 1
        for name in survivors:  # in one process from the first step to the last
            assert len(load_result(job.run_dir, name)["steps"]) == 56 or not has_replicas


@pytest.mark.parametrize("num_lost", [1, 4], ids=["one", "all"])
def test_lost_state_comes_back_from_the_fallback(tmp_path: Path, reference: dict[str, Any], num_lost: int) -> None:
    strategy = {
        "num_stages": 4,
        "num_pipelines": 1,
        "fallback_dir": str(tmp_path / "fallback"),
        "fallback_every_n_steps": 5,
    }
    job = make_job(tmp_path / "job", 4, strategy=strategy)
    with running(job):
        settle(job, (1, 4), 90)
        job.wait_for_step(12)
        victims = in_grid(job)[:num_lost]
        for name in victims:
            job.kill(name)
        for index in range(num_lost):
            job.add(f"j{index}")
        job.wait_for_event("restored")
        (job.run_dir / "hurry").touch()
        codes = job.join()
        assert codes == {name: -signal.SIGKILL if name in victims else 0 for name in codes}, job.report()
        (restored,) = job.timeline("restored")
        (gone_back,) = job.timeline("rolled_back")
        checkpoints = [record for record in job.timeline("checkpoint") if record["time"] < gone_back["time"]]
        assert restored["step"] == checkpoints[-1]["step"] >= 10
        assert restored["checkpoint"] == checkpoints[-1]["identifier"]
        # the last step may have been committed by the one that died alone
        assert gone_back["step"] - restored["step"] == restored["steps_lost"] >= 12 - restored["step"]
        assert "steps are lost" in (job.run_dir / "coordinator.log").read_text()
        assert_same(job, reference, 0.0, num_starts=2)
        assert_exactly_once(job, NUM_SAMPLES, EPOCHS)


def test_lost_state_without_a_fallback_ends_the_job(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", 5, strategy={"num_stages": 4, "num_pipelines": 1})
    with running(job):
        settle(job, (1, 4), 90)
        job.wait_for_step(3)
        victim = in_grid(job)[2]
        job.kill(victim)
        codes = job.join(30)
        assert codes == {name: -signal.SIGKILL if name == victim else 3 for name in codes}
        assert job._service is not None and job._service.wait(30) == 3
        for name in set(codes) - {victim}:
            text = (job.run_dir / f"{name}.log").read_text()
            assert f"stage 2 was held only by {victim}" in text and "fallback_dir" in text


def test_each_step_in_single_precision(tmp_path: Path) -> None:
    """With a learning rate of 0 every step starts from the same state, and the moments add up what the gradients were.

    A whole run of Adam in single precision drifts by the order of the sums alone.
    """
    options = {**SCRIPT, "double": False, "rate": 0.0, "trainer": {"max_epochs": 4, "gradient_clip_val": 0.5}}
    reference = train_alone(tmp_path / "reference", fit_regressor, **options)
    job = make_job(tmp_path / "job", 4, strategy={"num_stages": 2}, **options)
    with running(job):
        settle(job, (2, 2), 90)
        job.wait_for_step(5)
        job.kill("i1")
        lose(job, "i1")
        job.add("j0")
        settle(job, (2, 2))
        (job.run_dir / "hurry").touch()
        codes = job.join()
        assert codes == {name: -signal.SIGKILL if name == "i1" else 0 for name in codes}, job.report()
        wanted = {tuple(entry[:3]): entry[3] for entry in reference["steps"]}
        for key, entries in diaries(job).items():
            for entry in entries:
                assert entry[3] == pytest.approx(wanted[key], rel=1e-5)
        for result in results(job).values():
            for index, moment in reference["moments"].items():
                assert float((result["moments"][index] - moment).norm()) <= 1e-5 * float(moment.norm())
            for name, value in reference["state_dict"].items():
                assert torch.equal(result["state_dict"][name], value)
