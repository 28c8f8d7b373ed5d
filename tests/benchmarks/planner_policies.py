"""Score planning policies on traces, knowing only the past.

    python tests/benchmarks/planner_policies.py DATA [--profile gpt-1.5b] [--trace parcae/p3_counts.csv]
        [--cost measured] [--announced] [--rollback-s 2] [--horizon 12] [--intervals N]
        [--forecaster rates|chooser|arima|auto|none]

DATA is the folder of traces and profiles. Columns: samples per second of the zero-overhead bound, of the optimum with
the whole future known, of reacting at once, and of the planner; its share of the room between the last two;
milliseconds of processor time per plan.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from lightning_parcae.availability.arima import ArimaForecaster
from lightning_parcae.availability.backtest import ForecastChooser
from lightning_parcae.availability.forecast import EventLaw, EventRates, Forecaster, LastValue
from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.planning.cost import MeasuredCost, MigrationCost, ReferenceCost
from lightning_parcae.planning.optimizer import LiveputOptimizer, Situation
from lightning_parcae.planning.profile import ThroughputProfile
from lightning_parcae.planning.replay import Running, advance, best_possible, membership_steps, replay
from lightning_parcae.planning.space import ConfigSpace

FORECASTERS: dict[str, list[Forecaster]] = {
    "rates": [EventRates()],
    "none": [LastValue()],
    "arima": [ArimaForecaster()],
    "auto": [ArimaForecaster(None)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--profile", default="gpt-1.5b")
    parser.add_argument("--trace", default="parcae/p3_counts.csv")
    parser.add_argument("--cost", choices=("reference", "measured"), default="reference")
    parser.add_argument("--formation-s", type=float, default=0.2)
    parser.add_argument("--rollback-s", type=float, default=30.0)
    parser.add_argument("--announced", action="store_true")
    parser.add_argument("--horizon", type=int)
    parser.add_argument("--forecaster", choices=(*FORECASTERS, "chooser"), default="rates")
    parser.add_argument("--intervals", type=int)
    options = parser.parse_args()

    facts = json.loads((options.data / "parcae/profiles.json").read_text())
    profile = ThroughputProfile.from_reference(facts, options.profile)
    reference = ReferenceCost.from_reference(facts, options.profile)
    cost: MigrationCost = reference
    if options.cost == "measured":
        cost = MeasuredCost(
            layer_bytes=tuple(int(12 * params) for params in reference.layer_params),
            boundaries={stages: reference.boundaries(stages) for stages in range(1, 33)},
            formation_s=options.formation_s,
            rollback_s=options.rollback_s,
            is_announced=options.announced,
            bytes_per_s=9e8,  # about what the reference measured on 10 Gb/s
        )
    steps = membership_steps(AvailabilityTrace.read(options.data / options.trace))[: options.intervals]
    capacity = max(step.num_instances for step in steps)
    space = ConfigSpace(profile, cost, max_instances=capacity)
    optimizer = LiveputOptimizer(profile, cost, capacity=capacity, horizon=options.horizon)
    chooser = ForecastChooser([EventRates(), ArimaForecaster()], horizon=8, capacity=capacity)

    running, history, plan, spent = Running(), [], [], 0.0
    for step in steps:
        history.append(step.num_instances)
        started = time.process_time()
        laws: tuple[EventLaw, ...]
        if options.forecaster == "chooser":
            laws = chooser.update(step.num_instances).forecast.laws
        else:
            forecaster = FORECASTERS[options.forecaster][0]
            laws = forecaster.forecast(history, horizon=options.horizon or 8, capacity=capacity).laws
        stays = None if options.forecaster in ("rates", "none") else EventRates().law(history, capacity=capacity)
        config = optimizer.plan(Situation(step.num_instances, running, step.num_lost), laws, stays=stays).config
        spent += time.process_time() - started
        running = advance(running, config, step, space)[0]
        plan.append(config)
    planned = replay(plan, steps, space).samples_per_s
    reactive = replay([space.configs[space.fastest(step.num_instances)] for step in steps], steps, space).samples_per_s
    optimum = replay(best_possible(steps, space), steps, space).samples_per_s
    bound = float(np.mean([space.rates[space.fastest(step.num_instances)] for step in steps]))
    share = (planned - reactive) / (optimum - reactive) if optimum > reactive else 0.0
    print(
        f"{options.profile:10} {options.trace:26} {options.cost:9} {options.forecaster:8} bound {bound:9.3f}  "
        f"optimum {optimum:9.3f}  reactive {reactive:9.3f}  planner {planned:9.3f}  share {share:+.3f}  "
        f"against reactive {planned / max(reactive, 1e-12) - 1:+.4%}  {planned / max(bound, 1e-12):.2%} of the bound  "
        f"{1e3 * spent / len(steps):.1f} ms per plan"
    )


if __name__ == "__main__":
    main()
