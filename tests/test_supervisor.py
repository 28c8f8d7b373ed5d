"""The supervisor with real processes: a coordinator, and instances that speak its protocol but do not train."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lightning_parcae.console import Console
from lightning_parcae.errors import ParcaeError
from lightning_parcae.faults import FaultScript
from lightning_parcae.report import RunReport
from lightning_parcae.supervisor import ExitCode, Supervisor

_STUB = [sys.executable, str(Path(__file__).parent / "data" / "stub_instance.py")]


class _Run:
    """A run of the supervisor, and what it showed."""

    def __init__(
        self, run_dir: Path, *words: str, instances: int = 2, script: FaultScript | None = None, **more: object
    ) -> None:
        self.stream = io.StringIO()
        self.supervisor = Supervisor(
            [*_STUB, *words],
            num_instances=instances,
            run_dir=run_dir,
            env={"STUB_FAILURE_TIMEOUT": "2"},
            script=script,
            failure_timeout_s=2.0,
            console=Console(self.stream, bar_interval_s=0.2),
            **more,  # type: ignore[arg-type]
        )
        self.code = self.supervisor.run()
        self.shown = self.stream.getvalue()
        print(self.shown)

    def exit_codes(self) -> list[int | None]:
        return [record.exit_code for record in self.supervisor.instances.values()]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run directory; checks afterwards that nothing is left of the run."""
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _nothing_is_left(run_dir: Path) -> object:
    threads = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= threads
    for path in (run_dir / "secret", run_dir / "coordinator.address"):
        assert not path.exists()
    command_lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in command_lines if str(run_dir).encode() in line]


def test_a_job_ends_well(run_dir: Path) -> None:
    run = _Run(run_dir, "train", "10")
    assert run.code == ExitCode.FINISHED
    assert run.exit_codes() == [0, 0]
    assert "generation 1: 1x2 on i0 i1" in run.shown or "generation 1: 1x2 on i1 i0" in run.shown
    rank0 = run.supervisor.view.rank0
    assert run.shown.count(f"{rank0} starts with 3 words") == 1
    assert run.shown.count(f"{rank0} after fit") == 1
    assert (run_dir / "instance-i1.log").read_text().startswith("i1 starts")
    assert (run_dir / "secret").exists() is False


def test_faults_are_injected_and_survived(run_dir: Path) -> None:
    script = FaultScript().kill("rank0", at_step=10).add(2, at_step=20).notice("i2", at_step=60, min_pipelines=2)
    run = _Run(run_dir, "train", "150", instances=4, script=script)
    assert run.code == ExitCode.FINISHED, run.shown
    codes = run.exit_codes()
    assert sorted(codes) == [-9, 0, 0, 0, 0, 0]
    assert run.supervisor.faults_left == ()
    causes = [change.cause for change in run.supervisor.view.reconfigurations]
    assert {"start", "death", "join", "notice"} <= set(causes)
    # the log of rank 0 is followed when it moves, and nothing is said twice
    assert "rank 0 moves from" in run.shown
    rank0 = run.supervisor.view.rank0
    assert re.search(rf"^{rank0} step \d+", run.shown, re.MULTILINE)
    assert run.shown.count(" starts with 3 words") == 1
    assert run.shown.count("after fit") == 1
    report = RunReport.read(run_dir)
    assert report.layouts[:3] == ["2x2", "1x2", "2x2"]


def test_a_stopped_instance_is_fenced_out(run_dir: Path) -> None:
    script = FaultScript().stop("i1", at_step=5).cont("i1", at_s=4.0)
    run = _Run(run_dir, "train", "300", instances=4, script=script)
    assert run.code == ExitCode.FINISHED
    assert run.supervisor.instances["i1"].exit_code == 5
    assert "hang" in [change.cause for change in run.supervisor.view.reconfigurations]


def test_a_failure_is_shown_once_with_its_traceback(run_dir: Path) -> None:
    run = _Run(run_dir, "fail", "20")
    assert run.code == ExitCode.FAILED
    assert run.shown.count("ValueError: the stub fails at step") == 1
    assert run.exit_codes() == [1, 1]


def test_instances_that_crash_at_the_start(run_dir: Path) -> None:
    run = _Run(run_dir, "crash")
    assert run.code == ExitCode.FAILED
    assert run.shown.count("RuntimeError: the stub crashes") == 1


def test_the_start_does_not_wait_for_an_instance_that_crashed_before(run_dir: Path) -> None:
    started = time.monotonic()
    run = _Run(run_dir, "crash-i1", "5", instances=3)
    assert run.code == ExitCode.FINISHED
    assert time.monotonic() - started < 25.0  # it would wait 30 s
    assert "1x2 on" in run.shown


def test_what_to_do_when_all_are_gone_and_a_checkpoint_is_there(run_dir: Path) -> None:
    run = _Run(run_dir, "checkpoint", "3000", script=FaultScript().kill("i0", at_step=10).kill("i1", at_step=10))
    assert run.code == ExitCode.STATE_LOST
    assert "start the same command again, it goes on from the checkpoint of step 7" in run.shown


def test_restarts_are_given_up_when_nobody_joins(run_dir: Path) -> None:
    run = _Run(run_dir, "crash", instances=1, restart=True)
    assert run.code == ExitCode.FAILED
    assert len(run.supervisor.instances) == 3


def test_a_script_that_does_not_train(run_dir: Path) -> None:
    run = _Run(run_dir, "nofit")
    assert run.code == ExitCode.FINISHED
    assert run.shown.count("starts with 2 words") == 1


def test_one_job_at_a_time_in_a_run_directory(run_dir: Path) -> None:
    _Run(run_dir, "nofit")
    _Run(run_dir, "nofit")  # one after the other is well, and the first one's records are kept
    assert (run_dir / "previous-1" / "instance-i0.log").exists()
    other = subprocess.Popen(
        [sys.executable, "-c", f"import fcntl, time; f = open({str(run_dir / 'supervisor.lock')!r}, 'a'); "
         "fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); time.sleep(60)"], stdout=subprocess.PIPE,
    )  # fmt: skip
    with other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ParcaeError, match="is used by another job"):
            _Run(run_dir, "nofit")
        other.kill()


def _cli(run_dir: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lightning_parcae.cli", "run", "-n", "2", "--run-dir", str(run_dir), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _wait_for_generation(run_dir: Path) -> None:
    deadline = time.monotonic() + 20.0
    while not (run_dir / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("mode", "times"), [("train", 1), ("stubborn", 2)])
def test_interrupts(run_dir: Path, mode: str, times: int) -> None:
    with _cli(run_dir, _STUB[1], mode, "3000") as process:
        _wait_for_generation(run_dir)
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        shown, _ = process.communicate(timeout=20)
    assert process.returncode == ExitCode.INTERRUPTED
    assert "Traceback" not in shown
    assert ("killing all instances" in shown) == (times == 2)


def test_a_killed_supervisor_leaves_nobody_behind(run_dir: Path) -> None:
    with _cli(run_dir, _STUB[1], "train", "3000") as process:
        _wait_for_generation(run_dir)
        process.kill()
        process.wait()
    deadline = time.monotonic() + 5.0
    pids = re.findall(r'"pid": (\d+)', (run_dir / "processes.jsonl").read_text())
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    # the next job in this directory replaces what could not be cleaned up
    _Run(run_dir, "nofit")


def test_bad_arguments(run_dir: Path) -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Supervisor(["true"], num_instances=0, run_dir=run_dir)
    with pytest.raises(ValueError, match="more than 0"):
        Supervisor(["true"], num_instances=1, run_dir=run_dir, failure_timeout_s=0.0)
    assert os.getpid() > 0
