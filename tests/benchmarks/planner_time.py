"""Time per plan, cold and warm, on one core, for 32, 256 and 1000 instances.

    python tests/benchmarks/planner_time.py

A model of 48 equal layers with the cost model of this package. Cold: nothing is known yet. Warm: the same situation
again, as in a quiet interval. Changed: two instances are gone. All in milliseconds of processor time.
"""

from __future__ import annotations

import time

from lightning_parcae.availability.forecast import EventRates
from lightning_parcae.planning.cost import MeasuredCost
from lightning_parcae.planning.optimizer import LiveputOptimizer, Situation
from lightning_parcae.planning.profile import LayerCost, ModelProfile
from lightning_parcae.planning.replay import Running

LAYER = LayerCost(
    forward_s=0.01,
    backward_s=0.02,
    update_s=0.001,
    parameter_bytes=60 * 10**6,
    state_bytes=360 * 10**6,
    activation_bytes=10**8,
    output_bytes=6 * 10**6,
)


def main() -> None:
    print("| instances | configurations | planner | cold | warm | changed | decision |")
    print("|---|---|---|---|---|---|---|")
    for capacity in (32, 256, 1000):
        for horizon in (None, 12):
            profile = ModelProfile("48 layers", (LAYER,) * 48, 8 * capacity, 4 * capacity, memory_bytes=16e9)
            cost = MeasuredCost(
                layer_bytes=(LAYER.state_bytes,) * 48,
                boundaries={stages: profile.boundaries(stages) for stages in range(1, 49)},
            )
            law = EventRates().law([capacity], capacity=capacity)
            laws = (law,) * (horizon or 1)
            optimizer = LiveputOptimizer(profile, cost, capacity=capacity, horizon=horizon)
            first, cold = _timed(optimizer, Situation(capacity), laws)
            running = Running(first)
            _timed(optimizer, Situation(capacity, running), laws)
            _, warm = _timed(optimizer, Situation(capacity, running), laws)
            after, changed = _timed(optimizer, Situation(capacity - 2, running, num_lost=2), laws)
            kind = "value iteration, 30 sweeps" if horizon is None else f"horizon {horizon}"
            count = len(profile.configs(capacity))
            print(
                f"| {capacity} | {count} | {kind} | {cold:.1f} | {warm:.1f} | {changed:.1f} | {first} -> {after} |",
                flush=True,
            )


def _timed(optimizer: LiveputOptimizer, situation: Situation, laws: tuple) -> tuple:
    started = time.process_time()
    plan = optimizer.plan(situation, laws)
    return plan.config, 1e3 * (time.process_time() - started)


if __name__ == "__main__":
    main()
