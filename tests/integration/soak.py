"""Random kills, stops, notices and joins in one run, with at least one replica left each time.

python -m tests.integration.soak --events 100
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.jobs import Job, running
from tests.integration.outcomes import (
    assert_exactly_once,
    assert_same,
    diaries,
    is_settled,
    settle,
    train_alone,
)
from tests.integration.scripts import fit_regressor

NUM_SAMPLES = 101
BATCHES = 26
FEWEST, MOST = 4, 6


@dataclass(slots=True)
class Happening:
    """One event of the soak.

    Attributes:
        kind: kill, stop, notice or join.
        name: Instance it was done to.
        at: When, in Unix seconds.
        settled_at: When the job ran on in a settled layout.
    """

    kind: str
    name: str
    at: float
    settled_at: float = 0.0


@dataclass(slots=True)
class Soak:
    """What a soak has measured.

    Attributes:
        happenings: The events.
        usage: Samples of the lasting instance: threads, open files, resident bytes.
        stalls: Longest time without a committed step beyond the usual, in seconds, by kind of event.
        differences: Largest differences from the reference.
    """

    happenings: list[Happening] = field(default_factory=list)
    usage: list[tuple[int, int, int]] = field(default_factory=list)
    stalls: dict[str, list[float]] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)

    def describe(self) -> str:
        """Return the figures as text."""
        lines = []
        for kind, values in sorted(self.stalls.items()):
            ordered = sorted(values)
            p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
            lines.append(
                f"{kind:7s} {len(values):3d} events: median {statistics.median(values):.3f} s, p95 {p95:.3f} s; "
                + " ".join(f"{value:.2f}" for value in values)
            )
        first, last = self.usage[len(self.usage) // 3], self.usage[-1]
        memory = f"MiB {first[2] >> 20} -> {last[2] >> 20}"
        lines.append(f"threads {first[0]} -> {last[0]}, files {first[1]} -> {last[1]}, {memory}")
        lines.append(f"differences {self.differences}")
        return "\n".join(lines)


def usage_of(pid: int) -> tuple[int, int, int]:
    """Return the number of threads and open files, and the resident bytes, of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(status["Threads"]), len(os.listdir(f"/proc/{pid}/fd")), int(status["VmRSS"].split()[0]) * 1024


def soak(out: Path, num_events: int, seed: int = 1) -> Soak:
    """Run a job through random events; assert everything that can be asserted of it."""
    rng = random.Random(seed)
    epochs = 3 + (num_events * 20) // BATCHES
    # With a rate of 0.02 the order of sums alone (two pipelines, no events) grows from 1e-16 to 1e-2 in 650 steps.
    script = {"num_samples": NUM_SAMPLES, "batch_size": 4, "trainer": {"max_epochs": epochs}, "rate": 1e-3}
    reference = train_alone(out / "reference", fit_regressor, timeout_s=60 + num_events * 6, **script)
    strategy = {"num_stages": 2, "failure_timeout": 4}
    job_dir = out / "job"
    kwargs = {**script, "out": str(job_dir), "strategy": strategy, "sleep_s": 0.08, "log_reads": True}
    result = Soak()
    job = Job(job_dir, fit_regressor, kwargs, expected=5)
    lasting = "i4"
    alive = {f"i{index}" for index in range(5)}
    want_code: dict[str, int] = {}
    with running(job):
        settle(job, (2, 2), 90)
        for number in range(num_events):
            _one_event(job, rng, alive, lasting, want_code, result, number)
            result.usage.append(usage_of(job.pids[lasting]))
        (job_dir / "hurry").touch()
        codes = job.join(120 + num_events)
        for name, code in codes.items():
            assert code == want_code.get(name, 0), f"{name} ended with {code}\n{job.report()}"
        result.differences = assert_same(job, reference, 1e-9)
        assert_exactly_once(job, NUM_SAMPLES, epochs)
        assert not job.timeline("rolled_back")
        result.stalls = _stalls(job, result.happenings)
    return result


def _one_event(
    job: Job, rng: random.Random, alive: set[str], lasting: str, want_code: dict[str, int], result: Soak, number: int
) -> None:
    grid = next(r["layout"] for r in reversed(job.timeline("committed")) if r["layout"])["grid"]
    placed = {name for row in grid for name in row}
    victims = sorted(alive - {lasting})
    kinds = ["join"] if len(alive) <= FEWEST else ["kill", "stop", "notice"]
    if FEWEST < len(alive) < MOST:
        kinds.append("join")
    kind = rng.choice(kinds)
    name = f"j{number}" if kind == "join" else rng.choice(victims)
    time.sleep(rng.random() * 0.3)  # at any point of a step
    happening = Happening(kind, name, time.time())
    result.happenings.append(happening)
    if kind == "join":
        alive.add(name)
        job.add(name)
        job.wait_until(lambda: _has(job, "ready", name), 60, f"{name} is ready")
    else:
        alive.discard(name)
        number_of = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "notice": signal.SIGTERM}[kind]
        want_code[name] = {"kill": -signal.SIGKILL, "stop": 5, "notice": 0}[kind]
        job.signal(name, number_of)
        gone = ("died", "left", "released") if kind == "notice" else ("died",)
        job.wait_until(lambda: any(_has(job, event, name) for event in gone), 40, f"{name} is seen to go ({kind})")
        if kind == "stop":
            job.signal(name, signal.SIGCONT)
    step = job.step
    job.wait_until(lambda: is_settled(job) and job.step > step, 60, f"the job goes on after {kind} of {name}")
    # a planned generation may follow at once, to take a spare in
    config = (len(alive) // 2, 2)
    settle(job, config, 60)
    happening.settled_at = time.time()
    assert placed  # for the reader of a failure: who had a place


def _has(job: Job, event: str, name: str) -> bool:
    return any(record["instance"] == name for record in job.timeline(event))


def _stalls(job: Job, happenings: list[Happening]) -> dict[str, list[float]]:
    times = sorted(min(entry[5] for entry in entries) for entries in diaries(job).values())
    gaps = [(later - earlier, earlier, later) for earlier, later in itertools.pairwise(times)]
    usual = statistics.median(gap for gap, _, _ in gaps)
    found: dict[str, list[float]] = {}
    for happening in happenings:
        during = [gap for gap, start, end in gaps if end >= happening.at and start <= happening.settled_at]
        found.setdefault(happening.kind, []).append(round(max(during, default=usual) - usual, 3))
    return found


def assert_flat(usage: list[tuple[int, int, int]]) -> None:
    """Check that neither threads nor open files nor memory grow after the first third."""
    early = usage[len(usage) // 3 : len(usage) // 3 + 3]
    late = usage[-3:]
    for index, allowed in ((0, 3), (1, 8), (2, 48 << 20)):
        before, after = max(row[index] for row in early), min(row[index] for row in late)
        what = ("threads", "files", "bytes")[index]
        assert after <= before + allowed, f"{what} grew from {before} to {after}: {usage}"


def main() -> None:
    """Run a soak from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        result = soak(Path(out), options.events, options.seed)
    assert_flat(result.usage)
    sys.stdout.write(result.describe() + "\n")
    if options.json is not None:
        figures: dict[str, Any] = {"stalls_s": result.stalls, "usage": result.usage, "differences": result.differences}
        options.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
