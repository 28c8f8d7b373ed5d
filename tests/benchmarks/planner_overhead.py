"""Step time with the planner's thread on and off, taking turns within one run.

    python tests/benchmarks/planner_overhead.py [--turns 30] [--steps 12] [--interval 1] [--instances 32]

Two instances train one pipeline of two stages; rank 0 switches its planner on and off every few steps. The planner
works as if there were many instances (the history it reads is multiplied), plans every second instead of every minute,
and what it says is dropped, so that the layout stays. Printed: the median step of each state, the median over the turns
of their ratio with quartiles, the same for the processor time of rank 0's process (which counts the planner's thread,
and not what else runs on the machine), and what a plan takes. Divide the excess by 60 / interval for the default
interval.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

import lightning as L  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.callbacks import Callback  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from lightning_parcae import ParcaeStrategy  # noqa: E402
from lightning_parcae.planner import Planner  # noqa: E402
from tests.benchmarks.workloads import Encoder, Sequences, make_layers  # noqa: E402
from tests.integration.jobs import Job, running  # noqa: E402


class _ManyInstances:
    """The connection to the coordinator, as if each instance were many; nothing is sent."""

    def __init__(self, agent: Any, factor: int) -> None:
        self._agent = agent
        self._factor = factor

    def request(self, *arguments: Any, **options: Any) -> Any:
        answer = self._agent.request(*arguments, **options)
        return {**answer, "changes": [[moment, count * self._factor] for moment, count in answer["changes"]]}

    def send(self, message: Any) -> None:
        pass


class _Switch(Callback):
    """Switches rank 0's planner on and off, and notes the time of each step."""

    def __init__(self, out: str, name: str, steps: int, factor: int) -> None:
        self._path = Path(out) / f"steps-{name}.json"
        self._steps, self._factor = steps, factor
        self._rows: list[tuple[int, float, float]] = []  # turn, seconds, processor seconds
        self._plan_s: list[float] = []
        self._last: tuple[float, float] | None = None
        self._planner: Planner | None = None

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        now, strategy = (time.perf_counter(), time.process_time()), trainer.strategy
        assert isinstance(strategy, ParcaeStrategy)
        if not trainer.is_global_zero:
            return
        turn, within = divmod(batch_idx, self._steps)
        if self._last is not None and within > 1:
            self._rows.append((turn, now[0] - self._last[0], now[1] - self._last[1]))
        self._last = now
        planner = strategy._planner
        assert planner is not None
        if self._planner is None:
            self._planner = planner
            planner._control = _ManyInstances(planner._control, self._factor)
        if found := planner.metrics.get("parcae/plan_s"):
            self._plan_s.append(found)
        if within == 0 and turn % 2 == 0:
            assert strategy.session.layout is not None
            planner.enter(strategy.session.layout.config, is_zero=True)
        elif within == 0:
            planner.stop()

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        if self._rows:
            self._path.write_text(json.dumps({"steps": self._rows, "plan_s": self._plan_s}))


def fit_switching(name: str, out: str, *, turns: int, steps: int, interval: float, instances: int) -> None:
    """Train on one of the two instances."""
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    strategy = ParcaeStrategy(min_stages=2, max_stages=8, interval=interval, failure_timeout=10)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=turns * steps,
        max_epochs=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        callbacks=[_Switch(out, name, steps, instances // 2)],
    )
    data = Sequences(16 * turns * steps, 16, 128)
    trainer.fit(Encoder(torch.nn.Sequential(*make_layers(8, 128))), DataLoader(data, batch_size=16))


def report(label: str, rows: list[tuple[int, float]]) -> None:
    """Print both states and their ratio."""
    by_turn: dict[int, list[float]] = {}
    for turn, seconds in rows:
        by_turn.setdefault(turn, []).append(seconds)
    # the mean: a plan takes part of some steps, which a median would not see
    means = {turn: statistics.mean(times) for turn, times in by_turn.items()}
    on, off = ([seconds for turn, seconds in rows if turn % 2 == parity] for parity in (0, 1))
    ratios = [means[turn] / means[turn + 1] for turn in range(2, max(means), 2) if turn + 1 in means]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(label)
    print(f"  planner on:  {1e3 * statistics.median(on):8.2f} ms (mean {1e3 * statistics.mean(on):.2f})")
    print(f"  planner off: {1e3 * statistics.median(off):8.2f} ms (mean {1e3 * statistics.mean(off):.2f})")
    print(f"  on / off:    {middle:8.4f} (quartiles {low:.4f} to {high:.4f}, {len(ratios)} pairs of turns)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--instances", type=int, default=32)
    options = parser.parse_args()
    from tests.benchmarks.planner_overhead import fit_switching as target  # importable in the instances

    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder) / "job", target, {"out": f"{folder}/job", **vars(options)}, expected=2)
        with running(job):
            job.join(600.0)
            (path,) = job.run_dir.glob("steps-*.json")
        found = json.loads(path.read_text())
    for column, label in ((1, "step"), (2, "processor time of a step")):
        report(label, [(row[0], row[column]) for row in found["steps"]])
    if found["plan_s"]:
        print(f"a plan:            {1e3 * statistics.median(found['plan_s']):8.2f} ms, every {options.interval:g} s")


if __name__ == "__main__":
    main()
