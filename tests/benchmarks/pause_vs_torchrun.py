"""The pause after ``kill -9`` of one of four workers: ParcaeStrategy against torchrun's elastic restart.

    python tests/benchmarks/pause_vs_torchrun.py [--kills 3] [--kill worker|instance] [--only ours|torchrun] [--out DIR]

Ours: four instances as P=1, D=4 and as P=2, D=2. One is killed, the pause is measured, a new instance joins, and the
next one is killed. Taken is the time from the kill to the first step that the survivors have completed in their new
layout. A normal step, also printed, lies within it: the pause proper is the difference, which is too close to zero for
a ratio. The same holds for torchrun.

torchrun: four agents (``--nnodes=1:4``, c10d rendezvous, ``--max-restarts=3``) with one worker each; Lightning DDP with
the same model and global batch, resuming from a checkpoint that is written every few steps. One worker is killed, or
with ``--kill instance`` one agent and its worker, as when a machine goes. The job then runs to its end. Two pauses are
taken: to the first step that anybody completes after the restart (the ratio that counts here, in favour of torchrun),
and to the first step beyond those that were done before the kill.

All times are of one clock. DIR gets the stamps of every step, the logs of every process and ``report.txt``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

from tests.benchmarks.stamps import read_stamps  # noqa: E402
from tests.integration.jobs import Job, running  # noqa: E402

LAYOUTS: dict[str, dict[str, int]] = {
    "P=1, D=4": {"num_stages": 1},
    "P=2, D=2": {"num_stages": 2},
}
Show = Callable[[str], None]


def steps_of(out: Path) -> list[tuple[float, int]]:
    """Return when each step was completed first."""
    first: dict[int, float] = {}
    for item in read_stamps(out):
        if item["event"] == "step":
            first.setdefault(item["step"], item["time"])
    return sorted((when, step) for step, when in first.items())


def normal_step(steps: list[tuple[float, int]]) -> float:
    return statistics.median(after[0] - before[0] for before, after in pairwise(steps))


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"timed out after {timeout_s:g} s waiting until {what}")
        time.sleep(0.05)


def pauses_of_ours(name: str, out: Path, shape: dict[str, int], num_kills: int, show: Show) -> list[float]:
    from tests.benchmarks import workloads

    out.mkdir(parents=True)
    kwargs = {"out": str(out), "shape": shape, "strategy": LAYOUTS[name]}
    job = Job(out, workloads.run_elastic_parcae, kwargs, 4, {"PARCAE_COMMIT_RECORDS": "0"}, failure_timeout_s=10.0)

    def last_step() -> int:
        return max([step for _, step in steps_of(out)], default=0)

    def members() -> list[str]:
        layouts = [record["layout"] for record in job.timeline("committed") if record["layout"]]
        return list(layouts[-1]["order"]) if layouts else []

    pauses = []
    with running(job):
        for kill in range(num_kills):
            wait_until(lambda: len(members()) == 4, 90, f"four instances work together (logs in {out})")
            begin = last_step() + 1
            wait_until(lambda begin=begin: last_step() >= begin + 6, 90, f"they have made some steps (logs in {out})")
            # the last member, then the first (rank 0), then one between
            victim = members()[(3, 0, 1)[kill % 3]]
            usual = normal_step([item for item in steps_of(out) if item[1] >= begin])
            killed_at = time.time()
            job.kill(victim)
            wait_until(
                lambda at=killed_at: any(record["time"] > at for record in job.timeline("formed")),
                60,
                f"the survivors go on (logs in {out})",
            )
            committed_at = next(r["time"] for r in job.timeline("committed") if r["time"] > killed_at)
            wait_until(lambda at=committed_at: steps_of(out)[-1][0] > at, 60, f"the next step (logs in {out})")
            resumed_at = next(when for when, _ in steps_of(out) if when > committed_at)
            pause = resumed_at - killed_at - usual
            pauses.append(resumed_at - killed_at)
            show(
                f"ours, {name}: {victim} killed; new layout decided after {committed_at - killed_at:.3f} s, next step "
                f"done after {resumed_at - killed_at:.3f} s, a normal step {usual:.3f} s: pause {pause:.3f} s"
            )
            if kill + 1 < num_kills:
                job.add(f"new{kill}")
    return pauses


def pause_of_torchrun(
    out: Path, shape: dict[str, int], every: int, kill_at: int, whole_instance: bool, show: Show
) -> tuple[float, float]:
    out.mkdir(parents=True)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=3"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=benchmark"]
    command += [str(Path(__file__).with_name("elastic_peer.py")), str(out), json.dumps(shape), str(every)]
    with contextlib.ExitStack() as stack:
        agents = []
        for index in range(4):
            log = stack.enter_context(open(out / f"agent-{index}.log", "wb"))
            # Otherwise workers meet in the agents' store under the number of their own agent's restarts, which differs
            # between agents after a kill: they find the addresses of dead processes there and fail again and again.
            environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            agent = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            stack.callback(_end, agent)
            agents.append(agent)

        def stamps(event: str, since: float = 0.0) -> list[dict[str, Any]]:
            return [item for item in read_stamps(out) if item["event"] == event and item["time"] > since]

        def is_reached(step: int) -> bool:
            if any(agent.poll() not in (None, 0, -signal.SIGKILL) for agent in agents):
                raise SystemExit(f"torchrun failed; see {out}/agent-*.log")
            return any(item["step"] >= step for item in stamps("step"))

        wait_until(lambda: is_reached(kill_at), 120, f"torchrun has made {kill_at} steps (logs in {out})")
        usual = normal_step(steps_of(out))
        # not the first agent: it serves the rendezvous, and the whole job would end with it
        workers = {_parent(item["pid"]): item["pid"] for item in stamps("process")}
        victim = agents[2]
        killed_at = time.time()
        if whole_instance:
            victim.kill()
        os.kill(workers[victim.pid], signal.SIGKILL)
        done = max(item["step"] for item in stamps("step"))
        wait_until(lambda: is_reached(shape["steps"]), 200, f"torchrun has made all steps (logs in {out})")
        for agent in agents:
            if agent is not victim or not whole_instance:
                code = agent.wait(60)
                if code:
                    raise SystemExit(f"an agent of torchrun ended with {code}; see {out}/agent-*.log")
    restarted = stamps("process", killed_at)
    pids = {item["pid"] for item in restarted}
    steps = [item for item in stamps("step", killed_at) if item["pid"] in pids]
    imported = [item["time"] for item in stamps("imported", killed_at)]
    first = min(item["time"] for item in steps)
    beyond = min(item["time"] for item in steps if item["step"] > done)
    resumed_with = min(item["step"] for item in steps)
    show(
        f"torchrun: worker killed at step {done}; {len(restarted)} workers started anew after "
        f"{restarted[0]['time'] - killed_at:.2f} s, had imported after {max(imported) - killed_at:.2f} s, first step "
        f"(number {resumed_with}) after {first - killed_at:.2f} s, step {done + 1} after {beyond - killed_at:.2f} s, "
        f"a normal step {usual:.3f} s"
    )
    return first - killed_at, beyond - killed_at


def _parent(pid: int) -> int:
    """Return the parent of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _end(agent: subprocess.Popen[bytes]) -> None:
    if agent.poll() is None:
        agent.terminate()
        try:
            agent.wait(15)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3, help="of ours, for each layout")
    parser.add_argument("--kill", choices=("worker", "instance"), default="worker", help="what torchrun loses")
    parser.add_argument("--only", choices=("ours", "torchrun"))
    parser.add_argument("--steps", type=int, default=40, help="of torchrun's job")
    parser.add_argument("--checkpoint-every", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="parcae-pause-"))
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        parser.error(f"--out {out} is not empty; give a new directory")
    shape = {name: getattr(options, name) for name in ("layers", "width", "tokens", "batch")}
    shown: list[str] = []

    def show(line: str) -> None:
        print(line, flush=True)
        shown.append(line)
        (out / "report.txt").write_text("\n".join(shown) + "\n")

    show(f"{time.strftime('%Y-%m-%d %H:%M:%S')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, shape {shape}")
    medians = {}
    if options.only != "torchrun":
        for name in LAYOUTS:
            folder = out / name.replace(", ", "-").replace("=", "")
            pauses = pauses_of_ours(name, folder, {**shape, "steps": 2000}, options.kills, show)
            medians[name] = statistics.median(pauses)
    if options.only != "ours":
        first, beyond = pause_of_torchrun(
            out / "torchrun",
            {**shape, "steps": options.steps},
            options.checkpoint_every,
            # in the middle between two checkpoints
            2 * options.checkpoint_every + options.checkpoint_every // 2 + 1,
            options.kill == "instance",
            show,
        )
        show("")
        heads = ("seconds", "torchrun / ours", "and redone steps")
        show(f"{'from kill -9 to the next step done':36s}" + "".join(f"{head:>18s}" for head in heads))
        for name, median in medians.items():
            label = f"ours, {name} (median of {options.kills})"
            show(f"{label:36s}{median:18.3f}{first / median:17.1f}x{beyond / median:17.1f}x")
        show(f"{f'torchrun, {options.kill} killed':36s}{first:18.3f}{'':18s}{f'({beyond:.3f} s)':>18s}")
    show(f"load now {os.getloadavg()[0]:.1f}; raw stamps and logs in {out}")


if __name__ == "__main__":
    main()
