"""Where a step of ParcaeStrategy spends its time.

    python tests/benchmarks/profile_step.py [--stages 1] [--pipelines 2] [--steps 30] [--out DIR]

Functions of the strategy are wrapped by clocks, in every instance and thread. Printed for each: calls in a step, wall
and processor milliseconds of a step, callees included. Parts lie within each other, as the indentation shows. Wall
time that is no processor time is waiting: for a peer, or for a core if others work on this machine. Forward passes run
in a thread of torchgpipe, whose processor time their callers do not have.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

from tests.benchmarks import workloads  # noqa: E402
from tests.integration.jobs import Job, fork_server, running  # noqa: E402

PARTS = (
    ("lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop.advance", 0),
    ("lightning_parcae.data:ElasticLoader.__next__", 1),
    ("torch.optim:SGD.step", 1),
    ("lightning_parcae.strategy:ParcaeStrategy.training_step", 2),
    ("lightning_parcae.batch_operation:BatchOperation._save", 3),
    ("lightning_parcae.batch_operation:BatchOperation._train_once", 3),
    ("lightning_parcae.batch_operation:seed_everything_local", 4),
    ("lightning_parcae.batch_operation:BatchOperation._pass_batch", 4),
    ("lightning_parcae.engine.pipeline:StagePipeline.forward", 4),
    ("lightning_parcae.engine.pipeline:_Segment.compute", 5),
    ("torch.nn:TransformerEncoderLayer.forward", 6),
    ("lightning_parcae.engine.channel:GroupChannel.recv_activation", 6),
    ("lightning_parcae.engine.channel:GroupChannel.send_activation", 6),
    ("torch.autograd:backward", 4),
    ("lightning_parcae.engine.channel:GroupChannel.recv_gradient", 5),
    ("lightning_parcae.engine.channel:GroupChannel.send_gradient", 5),
    ("lightning_parcae.batch_operation:BatchOperation._reduce", 4),
    ("lightning_parcae.engine.groups:Group.all_reduce_sum", 5),
    ("lightning_parcae.engine.session:Session._vote", 3),
    ("lightning_parcae.engine.groups:Group.all_gather_bytes", 4),
    ("lightning_parcae.batch_operation:BatchOperation._conclude_training", 3),
    ("lightning_parcae.strategy:ParcaeStrategy._after_commit", 3),
)

_times: dict[str, list[float]] = {}
_lock = threading.Lock()


def _clock(path: str) -> None:
    module, _, name = path.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, attribute = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    function = getattr(owner, attribute)
    total = _times[path] = [0.0, 0.0, 0.0]
    depth = threading.local()

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if getattr(depth, "inside", False):
            return function(*args, **kwargs)
        depth.inside = True
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            depth.inside = False
            with _lock:
                total[0] += 1
                total[1] += time.perf_counter() - wall
                total[2] += time.thread_time() - cpu

    setattr(owner, attribute, timed)


class _FreeGate:
    """Goes at once; the first turn warms up, and the clocks start after it."""

    def __init__(self) -> None:
        self.turn = 0

    def acquire(self) -> None:
        self.turn += 1
        if self.turn == 2:
            for total in _times.values():
                total[:] = [0.0, 0.0, 0.0]

    def release(self) -> None:
        pass


def run_profiled(name: str, out: str, shape: dict[str, int], strategy: dict[str, Any]) -> None:
    for path, _ in PARTS:
        _clock(path)
    gate = _FreeGate()
    workloads.run_parcae(name, out, (gate, gate, shape["warm_up"]), shape, strategy)
    Path(out, f"profile-{name}.json").write_text(json.dumps(_times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--pipelines", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--micro-batches", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="parcae-profile-"))
    warm_up = 5
    micro_batches = options.micro_batches or (2 if options.stages == 1 else 4)
    shape = {name: getattr(options, name) for name in ("layers", "width", "tokens", "batch")}
    shape.update(steps=options.steps + warm_up, warm_up=warm_up, micro_batches=micro_batches)
    strategy = {
        "num_stages": options.stages,
        "num_pipelines": options.pipelines,
        "micro_batch_size": options.batch // micro_batches,
        "recompute": "never",
    }
    fork_server()
    kwargs = {"out": str(out), "shape": shape, "strategy": strategy}
    instances = options.stages * options.pipelines
    # as a module: instances must find these functions under a name that can be imported
    from tests.benchmarks import profile_step

    job = Job(out, profile_step.run_profiled, kwargs, instances, {"PARCAE_COMMIT_RECORDS": "0"}, 20.0)
    with running(job):
        codes = job.join()
    if any(codes.values()):
        raise SystemExit(f"instances ended with {codes}; see {out}")
    for index in range(instances):
        times = json.loads((out / f"profile-i{index}.json").read_text())
        print(f"\ninstance i{index}" + " " * 48 + "calls   wall ms    cpu ms")
        for path, indent in PARTS:
            calls, wall, cpu = (value / options.steps for value in times[path])
            if calls:
                label = "  " * indent + path.partition(":")[2]
                print(f"{label:56s} {calls:6.1f} {wall * 1e3:9.2f} {cpu * 1e3:9.2f}")


if __name__ == "__main__":
    main()
