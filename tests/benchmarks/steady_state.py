"""Step time of ParcaeStrategy against its peers, taking turns in one run on this machine.

    python tests/benchmarks/steady_state.py [--only ddp|pipeline] [--turns 10] [--steps-per-turn 5] [--out DIR]

ddp: P=1, D=2 against Lightning's ``strategy="ddp"`` with two processes over gloo. DDP runs one forward pass for each
rank, so each of our pipelines gets one micro-batch too.

pipeline: P=2, D=1 against torch.distributed.pipelining (ScheduleGPipe, two processes over gloo, a bare loop) and
against plain torchgpipe (GPipe with two partitions in plain Lightning), with the same micro-batches. torchgpipe has one
worker for each *device*, and two partitions on the CPU share one: that peer uses one core, ours uses two.

Same initial weights, batches, micro-batches and optimizer, no recomputation, one thread for each process. Contestants
take turns of a few steps; the others sleep meanwhile. Printed: the median step, its fastest tenth, the median processor
time of a step over all processes, and ours / peer for each: for the step the median over the turns and its quartiles.
On a machine where others work too, trust the processor time and the fastest tenth. The final parameters are
compared, so that it is known that the work was the same. DIR gets each step's time, the logs and ``report.txt``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

from tests.benchmarks import workloads  # noqa: E402
from tests.integration.jobs import Job, _run_instance, fork_server  # noqa: E402

START_TIMEOUT_S = 120.0
TURN_TIMEOUT_S = 60.0


class Contestant:
    """Processes that train in turns."""

    def __init__(self, name: str, label: str, num_processes: int, steps_per_turn: int, out: Path) -> None:
        context = fork_server()
        self.name, self.label, self.num_processes, self.out = name, label, num_processes, out
        self.go, self.done = context.Semaphore(0), context.Semaphore(0)
        self.gate = (self.go, self.done, steps_per_turn)
        self.processes: list[Any] = []
        out.mkdir(parents=True, exist_ok=True)

    def start(self, target: Callable[..., Any], **kwargs: Any) -> None:
        """Start one process of a peer."""
        log = self.out / f"{self.name}-{len(self.processes)}.log"
        arguments = ({"OMP_NUM_THREADS": "1"}, str(log), target, {**kwargs, "out": str(self.out), "gate": self.gate})
        process = fork_server().Process(target=_run_instance, args=arguments, daemon=True)
        process.start()
        self.processes.append(process)

    def take_turn(self, timeout_s: float = TURN_TIMEOUT_S) -> None:
        """Let the processes work for one turn."""
        for _ in range(self.num_processes):
            self.go.release()
        for _ in range(self.num_processes):
            if not self.done.acquire(timeout=timeout_s):
                raise SystemExit(f"{self.label} did not finish its turn in {timeout_s:g} s; see {self.out}")

    def finish(self) -> None:
        """Let the last step run and wait for the end."""
        for _ in range(self.num_processes):
            self.go.release()
        for process in self.processes:
            process.join(60)
            if process.exitcode != 0:
                raise SystemExit(f"{self.label} ended with {process.exitcode}; see {self.out}")

    def kill(self) -> None:
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
            process.join(10)

    def results(self) -> list[dict[str, Any]]:
        paths = sorted(self.out.glob(f"steps-{self.name}-*.json"))
        return [json.loads(path.read_text()) for path in paths]

    def step_times(self) -> list[list[float]]:
        """Seconds of each step on rank 0, by turn; the first turn warmed up."""
        turns = self.results()[0]["turns"][1:]
        return [[after - before for before, after in itertools.pairwise(turn)] for turn in turns]

    def cpu_times(self, steps_per_turn: int) -> list[float]:
        """Processor seconds of a step over all processes, by turn."""
        of_ranks = [[turn[0] + turn[1] for turn in result["usage"][1:]] for result in self.results()]
        return [sum(turn) / steps_per_turn for turn in zip(*of_ranks, strict=True)]

    def state(self) -> dict[str, Any]:
        import torch

        merged: dict[str, Any] = {}
        for path in sorted(self.out.glob(f"state-{self.name}-*.pt")):
            merged.update(torch.load(path, weights_only=True))
        # by position in the model: peers name the layers differently
        ordered = sorted(merged.items(), key=lambda item: int(item[0])) if self.name == "pipelining" else merged.items()
        return {str(i): value for i, (_, value) in enumerate(ordered)}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def ours(stack: ExitStack, out: Path, options: argparse.Namespace, shape: dict[str, int], **layout: int) -> Contestant:
    contestant = Contestant("parcae", f"ours, P={layout['num_stages']}", 2, options.steps_per_turn, out)
    strategy = {**layout, "micro_batch_size": shape["batch"] // shape["micro_batches"], "recompute": "never"}
    kwargs = {"out": str(out), "gate": contestant.gate, "shape": shape, "strategy": strategy}
    environment = {"PARCAE_COMMIT_RECORDS": "0"}
    job = Job(out / "job", workloads.run_parcae, kwargs, 2, environment, failure_timeout_s=20.0)
    stack.callback(job.stop)
    job.start()
    contestant.processes = list(job.processes.values())
    return contestant


def compete(contestants: list[Contestant], options: argparse.Namespace) -> None:
    for contestant in contestants:
        contestant.take_turn(START_TIMEOUT_S)
    for turn in range(options.turns):
        # a turn in the other order each time: who follows whom must not matter
        for contestant in contestants if turn % 2 else reversed(contestants):
            contestant.take_turn()
    for contestant in contestants:
        contestant.finish()


def tenth(ordered: list[float]) -> float:
    """Return the tenth percentile: a step that nobody has disturbed."""
    return ordered[len(ordered) // 10]


def report(contestants: list[Contestant], options: argparse.Namespace) -> list[str]:
    import torch

    first = contestants[0]
    own_turns = [statistics.median(turn) for turn in first.step_times()]
    own_cpu = first.cpu_times(options.steps_per_turn)
    own_state = first.state()
    own_steps = sorted(itertools.chain(*first.step_times()))
    names = ("step ms", "fastest", "cpu ms", "ours/peer", "quartiles", "fastest", "cpu", "differs")
    lines = [f"{'contestant':36s}" + "".join(f"{name:>12s}" for name in names)]
    for contestant in contestants:
        turns = [statistics.median(turn) for turn in contestant.step_times()]
        cpu = contestant.cpu_times(options.steps_per_turn)
        steps = sorted(itertools.chain(*contestant.step_times()))
        values = [statistics.median(steps), tenth(steps), statistics.median(cpu)]
        line = f"{contestant.label:36s}" + "".join(f"{value * 1e3:12.1f}" for value in values)
        if contestant is not first:
            ratios = sorted(a / b for a, b in zip(own_turns, turns, strict=True))
            low, middle, high = statistics.quantiles(ratios, n=4)
            cpu_ratio = statistics.median(a / b for a, b in zip(own_cpu, cpu, strict=True))
            state = contestant.state()
            difference = max(float((own_state[key] - state[key]).abs().max()) for key in own_state)
            line += (
                f"{middle:12.3f}{f'{low:.2f}-{high:.2f}':>12s}{tenth(own_steps) / tenth(steps):12.3f}{cpu_ratio:12.3f}"
            )
            line += f"{difference:12.0e}"
            torch.testing.assert_close(own_state, state, atol=5e-4, rtol=0.0)
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("ddp", "pipeline"))
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps-per-turn", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16, help="samples of the global batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches of the pipeline comparison")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="parcae-steady-"))
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        parser.error(f"--out {out} is not empty; give a new directory")
    # one step more than is measured: a turn ends when the next step begins
    shape = {name: getattr(options, name) for name in ("layers", "width", "tokens", "batch", "micro_batches")}
    shape["steps"] = (options.turns + 1) * options.steps_per_turn + 1
    shown: list[str] = []

    def show(line: str) -> None:
        print(line, flush=True)
        shown.append(line)
        (out / "report.txt").write_text("\n".join(shown) + "\n")

    show(f"{time.strftime('%Y-%m-%d %H:%M:%S')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, shape {shape}")
    for group in ("ddp", "pipeline") if options.only is None else (options.only,):
        folder = out / group
        with ExitStack() as stack:
            if group == "ddp":
                shape_here = {**shape, "micro_batches": 2}
                peers = [Contestant("ddp", 'Lightning strategy="ddp", 2 processes', 2, options.steps_per_turn, folder)]
                port = free_port()
                for rank in range(2):
                    peers[0].start(workloads.run_ddp, rank=rank, world=2, port=port, shape=shape_here)
                own = ours(stack, folder, options, shape_here, num_stages=1, num_pipelines=2)
            else:
                pipelining = Contestant("pipelining", "torch.distributed.pipelining", 2, options.steps_per_turn, folder)
                port = free_port()
                for rank in range(2):
                    pipelining.start(workloads.run_pipelining, rank=rank, port=port, shape=shape)
                gpipe = Contestant("gpipe", "torchgpipe, one process", 1, options.steps_per_turn, folder)
                gpipe.start(workloads.run_gpipe, shape=shape)
                peers = [pipelining, gpipe]
                own = ours(stack, folder, options, shape, num_stages=2, num_pipelines=1)
            for peer in peers:
                stack.callback(peer.kill)
            compete([own, *peers], options)
            show("")
            for line in report([own, *peers], options):
                show(line)
    show(f"\nload now {os.getloadavg()[0]:.1f}; raw times and logs in {out}")


if __name__ == "__main__":
    main()
