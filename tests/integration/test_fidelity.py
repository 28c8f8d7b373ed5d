"""A job of real processes and the simulated job do the same with the same script.

The script has a kill, a joiner and a notice at given seconds, counted as the supervisor does: from the first formation
on. Compared are, from then until the end of the window, the order of all membership events and each layout with its
grid, which must be equal, and the samples, within 5 %.

The simulation is told, from the run, in which order the instances connected, how the layers were cut, how long a step
of each configuration took (the mean of those that no formation fell into) and how long the joiner took to get ready. It
is not told a single pause: these are the medians of another run, the soak's (``docs/benchmarks.md``).
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from lightning_parcae.faults import FaultEvent, FaultScript
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import ThroughputProfile
from lightning_parcae.simulation.job import Happening, JobSettings, SimulatedJob
from lightning_parcae.simulation.workload import Workload
from tests.integration.fidelity_script import BATCH, fit_slowly
from tests.integration.jobs import Job, running
from tests.integration.scripts import Regressor

pytestmark = pytest.mark.timeout(180)

NUM_INSTANCES = 4
WINDOW_S = 32.0
GRACE_S = 30.0
SCRIPT = FaultScript().kill("third", at_s=5.2).add(1, at_s=7.6).notice("first", GRACE_S, at_s=14.0)
# Medians of the soak: 0.13 s for a kill, 0.14 for a join, 0.15 for a notice.
PAUSES = {"formation_s": 0.13, "build_s": 0.0, "detection_s": 0.03}
# What the simulated coordinator and the real one must record in the same order, and what of each record.
FIELDS = {"ready": "instance", "notice": "instance", "died": "instance", "released": "instance", "left": "instance"}


def told(timeline: list[dict[str, Any]], start_s: float, end_s: float) -> list[tuple[str, Any]]:
    """Return what a timeline says of the membership in a window, without times and prose."""
    found: list[tuple[str, Any]] = []
    for record in timeline:
        event = record["event"]
        if not start_s <= record["time"] <= end_s:
            continue
        if event in FIELDS:
            found.append((event, record[FIELDS[event]]))
        elif event == "prepared":
            found.append((event, (record["generation"], record["urgent"], record["members"])))
        elif event == "committed":
            found.append((event, (record["generation"], record["kind"], record["layout"]["grid"], record["fresh"])))
        elif event == "formed":
            found.append((event, (record["generation"], record["config"])))
    return found


def steps_of(job: Job) -> dict[int, tuple[float, ParallelConfig]]:
    """Return when each step was done, by its earliest witness, and in which configuration."""
    found: dict[int, tuple[float, ParallelConfig]] = {}
    for path in job.run_dir.glob("steps-*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("]"):  # a killed instance may have written half a line
                step, config, moment = json.loads(line)
                if step not in found or moment < found[step][0]:
                    found[step] = (moment, ParallelConfig(*config))
    return found


def step_times(
    steps: dict[int, tuple[float, ParallelConfig]], timeline: list[dict[str, Any]]
) -> dict[ParallelConfig, float]:
    """Return the mean time of the undisturbed steps in each configuration."""
    stops = [record["time"] for record in timeline if record["event"] in ("committed", "formed", "died")]
    times: dict[ParallelConfig, list[float]] = {}
    for step, (moment, config) in steps.items():
        since = steps[step - 1][0] if step - 1 in steps else moment
        if since < moment and not any(since <= stop <= moment for stop in stops):
            times.setdefault(config, []).append(moment - since)
    return {config: fmean(lengths) for config, lengths in times.items()}


def inject(job: Job, event: FaultEvent, names: dict[str, str]) -> None:
    if event.action == "kill":
        job.kill(names[event.target])
    elif event.action == "notice":
        job.signal(names[event.target], signal.SIGTERM)
    else:
        job.add("joiner")


def carry_out(job: Job, script: FaultScript, names: dict[str, str], start_s: float) -> dict[str, float]:
    """Do what the script says until the window ends; return when each action was due, in unix seconds."""
    faults = script.start()
    when: dict[str, float] = {}
    while time.time() < start_s + WINDOW_S:
        for event in faults.due(0, time.time() - start_s, 0):
            when[event.action] = time.time()
            inject(job, event, names)
        time.sleep(0.005)
    assert not faults.left
    return when


def test_a_script_runs_as_it_is_simulated(tmp_path: Path) -> None:
    strategy = {"policy": "fixed", "num_stages": 2, "failure_timeout": 4}
    job = Job(tmp_path / "job", fit_slowly, {"out": str(tmp_path / "job"), "strategy": strategy}, NUM_INSTANCES)
    with running(job):
        job.wait_for_event("formed", timeout_s=90)
        start_s = job.timeline("formed")[0]["time"]
        order = [record["instance"] for record in job.timeline("connected")]
        names = dict(zip(("first", "second", "third", "fourth"), order, strict=True))
        when = carry_out(job, SCRIPT, names, start_s)
        timeline, steps = job.timeline(), steps_of(job)
    done = max(step for step, (moment, _) in steps.items() if moment <= start_s + WINDOW_S)

    ready_s = next(one["time"] for one in timeline if one["event"] == "ready" and one["instance"] == "joiner")
    warm_up_s = ready_s - when["add"]
    rates = {config: BATCH / length for config, length in step_times(steps, timeline).items()}
    settings = JobSettings(policy="fixed", warm_up_s=warm_up_s, failure_timeout_s=4.0, **PAUSES)
    begin_s = warm_up_s + settings.formation_s + settings.build_s  # nothing moves in a start of so small a model
    events = [
        *(Happening(0.0, "add", name) for name in order),
        Happening(begin_s + when["kill"] - start_s, "kill", names["third"]),
        Happening(begin_s + when["add"] - start_s, "add", "joiner"),
        Happening(begin_s + when["notice"] - start_s, "notice", names["first"], GRACE_S),
    ]
    layers = Regressor(torch.float32).net
    sizes = tuple(3 * sum(parameter.numel() * 4 for parameter in layer.parameters()) for layer in layers)
    cuts = {2: tuple(next(one["layout"]["boundaries"] for one in timeline if one["event"] == "committed"))}
    workload = Workload("real", ThroughputProfile("real", rates), sizes, cuts, num_samples=BATCH)
    simulated = SimulatedJob(events, begin_s + WINDOW_S, workload, settings)
    result = simulated.run()

    real = told(timeline, start_s + 1e-3, start_s + WINDOW_S)
    assert told(simulated.timeline, begin_s + 1e-3, begin_s + WINDOW_S) == real, json.dumps(timeline, indent=1)
    assert [event for event, _ in real].count("formed") >= 4  # so there was something to compare
    configs = {tuple(what[1]) for event, what in real if event == "formed"}
    assert configs == {(1, 2), (2, 2)}
    print(f"samples: {result.samples:.0f} simulated, {done * BATCH} real")
    assert result.samples == pytest.approx(done * BATCH, rel=0.05), (result.spans, rates, done)
