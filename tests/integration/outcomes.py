"""What a job must have done: the same as one undisturbed process, each sample once, and no restart of a survivor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_parcae.sharding.ledger import Ledger
from tests.integration.jobs import Job, _run_instance, fork_server

NOTICE, KILL, STOP = "notice", "kill", "stop"


def train_alone(out: Path, target: Callable[..., Any], timeout_s: float = 120.0, **kwargs: Any) -> dict[str, Any]:
    """Train in one process without any coordinator; return the result."""
    out.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": "1", "PARCAE_RUN_DIR": str(out)}
    arguments = {"strategy": {}, "sleep_s": 0.0, **kwargs, "name": "solo", "out": str(out)}
    process = fork_server().Process(
        target=_run_instance,
        args=(environment, str(out / "solo.log"), target, arguments),
        daemon=True,
    )
    process.start()
    process.join(timeout_s)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join(10)
    process.close()
    assert code == 0, f"the reference ended with {code}\n{(out / 'solo.log').read_text()}"
    return load_result(out, "solo")


def load_result(out: Path, name: str) -> dict[str, Any]:
    """Return what an instance has written at its end."""
    result: dict[str, Any] = torch.load(out / f"result-{name}.pt", weights_only=True)
    return result


def results(job: Job) -> dict[str, dict[str, Any]]:
    """Return the results of all instances that came to their end."""
    return {path.stem[7:]: load_result(job.run_dir, path.stem[7:]) for path in job.run_dir.glob("result-*.pt")}


def assert_same(
    job: Job, reference: dict[str, Any], tolerance: float, *, relative: float = 0.0, num_starts: int = 1
) -> dict[str, Any]:
    """Compare losses, learning rates, parameters and metrics of every instance with the reference.

    Args:
        job: A job that has ended.
        reference: What :func:`train_alone` returned.
        tolerance: Largest difference.
        relative: Part of a loss by which it may differ further.
        num_starts: How often ``fit`` may have been set up in one process: again after each return to a checkpoint.

    Returns:
        The largest differences.
    """
    wanted = {tuple(step[:3]): step[3:] for step in reference["steps"]}
    found = results(job)
    assert found, f"no instance came to its end\n{job.report()}"
    seen = set(diaries(job))
    largest = {"loss": 0.0, "rate": 0.0, "parameter": 0.0, "metric": 0.0}
    for entries in diaries(job).values():  # of those that were killed as well
        for step in entries:
            _enlarge(largest, "loss", abs(step[3] - wanted[tuple(step[:3])][0]) - relative * abs(step[3]))
    for name, result in found.items():
        for step in result["steps"]:
            key = tuple(step[:3])
            assert key in wanted, f"{name} made step {key}, which the reference does not have"
            _enlarge(largest, "loss", abs(step[3] - wanted[key][0]) - relative * abs(wanted[key][0]))
            _enlarge(largest, "rate", abs(step[4] - wanted[key][1]))
        assert result["state_dict"].keys() == reference["state_dict"].keys()
        for key, value in reference["state_dict"].items():
            _enlarge(largest, "parameter", float((result["state_dict"][key] - value).abs().max()))
        assert result["metrics"].keys() == reference["metrics"].keys(), (name, result["metrics"], reference["metrics"])
        for key, number in reference["metrics"].items():
            _enlarge(largest, "metric", abs(result["metrics"][key] - number))
        assert (result["global_step"], result["epoch"]) == (reference["global_step"], reference["epoch"]), name
        assert result["best"] == reference["best"], (name, result["best"], reference["best"])
        assert result["same_parameters"], f"{name} got other Parameter objects"
        assert result["num_objects"] <= num_starts, f"{name} got another module or optimizer"
        assert result["pid"] == job.pids[name], f"{name} was started again"
    assert not set(wanted) - seen, f"steps nobody has seen: {sorted(set(wanted) - seen)[:5]}"
    assert max(largest.values()) <= tolerance, f"{largest}\n{job.report()}"
    return largest


def diaries(job: Job) -> dict[tuple[int, ...], list[list[float]]]:
    """Return what every instance, killed ones included, has noted of each step: loss, rate and time behind the key."""
    noted: dict[tuple[int, ...], list[list[float]]] = {}
    for path in job.run_dir.glob("steps-*.jsonl"):
        for line in path.read_text().split("\n")[:-1]:
            entry = json.loads(line)
            noted.setdefault(tuple(entry[:3]), []).append(entry)
    return noted


def _enlarge(largest: dict[str, float], key: str, value: float) -> None:
    assert value == value, f"{key} is not a number"
    largest[key] = max(largest[key], value)


def assert_exactly_once(job: Job, num_samples: int, num_epochs: int) -> Ledger:
    """Check the account of samples, made from the commit records and the dataset's own notes of what was read."""
    ledger = Ledger.from_files((job.run_dir / "commits").glob("*.jsonl"))
    reports = ledger.report(num_samples, finished=True)
    assert [report.epoch for report in reports] == list(range(num_epochs))
    for report in reports:
        assert report.is_exact and report.num_committed == num_samples and not report.left, str(report)
    read: set[int] = set()
    for path in (job.run_dir / "reads").glob("*.jsonl"):
        lines = path.read_text().split("\n")
        read |= {json.loads(line)["index"] for line in lines[:-1]}  # a killed reader leaves half a line
    if (job.run_dir / "reads").exists():
        committed = [record for of_step in ledger.commits.values() for record in of_step.values()]
        used = {int(index) for record in committed for index in record.indices}
        assert used <= read, f"committed but never read: {sorted(used - read)[:5]}"
    return ledger


def is_settled(job: Job, config: tuple[int, int] | None = None) -> bool:
    """Whether the newest generation that was announced is running (in this configuration)."""
    announced = job.timeline("prepared")
    formed = job.timeline("formed")
    if not announced or not formed or announced[-1]["generation"] != formed[-1]["generation"]:
        return False
    return config is None or tuple(formed[-1]["config"]) == config


def settle(job: Job, config: tuple[int, int] | None = None, timeout_s: float = 60.0) -> None:
    """Wait until the job runs (in this configuration)."""
    job.wait_until(lambda: is_settled(job, config), timeout_s, f"the job runs as {config}")


def pauses(job: Job) -> dict[str, list[float]]:
    """Return the pause of each reconfiguration in seconds, by what it was made for."""
    cause: dict[int, str] = {}
    found: dict[str, list[float]] = {}
    for record in job.timeline():
        if record["event"] == "prepared":
            reason = record["reason"]
            kind = (
                "notice"
                if "will be taken away" in reason
                else "join"
                if "can run as" in reason
                else "stop"
                if "nothing was heard" in reason
                else "kill"
                if record["urgent"]
                else "other"
            )
            cause[record["generation"]] = kind
        elif record["event"] == "formed":
            found.setdefault(cause[record["generation"]], []).append(record["pause_s"])
    return found
