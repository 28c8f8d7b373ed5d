"""Back-test every forecaster on every trace.

    python tests/benchmarks/forecasters.py DATA [--horizon 8] [--stride 8] [--only parcae/p3_counts.csv]

DATA is the folder of traces. Each forecaster sees only the past. Errors are normalised by the mean number of instances;
skill is against "nothing changes"; the band should hold 80 %; seconds are of processor time, on one core.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from lightning_parcae.availability.arima import ArimaForecaster
from lightning_parcae.availability.backtest import ForecastChooser, backtest, score
from lightning_parcae.availability.forecast import EventRates, Forecaster, LastValue
from lightning_parcae.availability.trace import AvailabilityTrace

TRACES = (
    "parcae/p3_counts.csv",
    "bamboo/g4dn-trace.csv",
    "bamboo/v100x1-east1c.txt",
    "bamboo/a100x1-east1b.txt",
    "parcae/segments/gpt-1.5b/trace_hh_55_65.txt",
    "parcae/segments/gpt-1.5b/trace_hl_15_25.txt",
    "parcae/segments/gpt-1.5b/trace_lh_80_90.txt",
    "parcae/segments/gpt-1.5b/trace_ll_10_11.txt",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--horizon", type=int, default=8)
    parser.add_argument("--stride", type=int, default=8)
    parser.add_argument("--only")
    options = parser.parse_args()
    print("| trace | forecaster | forecasts | error | CRPS | in band | skill (error) | skill (CRPS) | s per call |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in TRACES if options.only is None else (options.only,):
        counts = AvailabilityTrace.read(options.data / name).resample(60.0)
        forecasters: list[Forecaster] = [
            LastValue(),
            EventRates(),
            EventRates(name="event rates, last hour", memory=60),
            ArimaForecaster((1, 1, 0)),
            ArimaForecaster(None),
        ]
        for forecaster in forecasters:
            result = backtest(
                forecaster, counts, horizon=options.horizon, stride=options.stride, first=16, clock=time.process_time
            )
            print(
                f"| {name} | {result.name} | {result.num_forecasts} | {result.normalised_error:.4f} | "
                f"{result.mean.crps:.3f} | {result.mean.coverage:.0%} | {result.error_skill:+.3f} | "
                f"{result.skill:+.3f} | {result.seconds_per_call:.4f} |",
                flush=True,
            )
        _chooser(name, counts, options.horizon)


def _chooser(name: str, counts: np.ndarray, horizon: int) -> None:
    capacity = int(counts.max())
    chooser = ForecastChooser([EventRates()], horizon=horizon, capacity=capacity)
    scores, base = [], []
    started = time.process_time()
    for index, count in enumerate(counts[:-horizon].tolist()):
        truth = counts[index + 1 : index + 1 + horizon]
        scores.append(score(chooser.update(count).forecast.counts(count, capacity), truth))
        base.append(float(np.abs(truth - count).mean()))
    spent = (time.process_time() - started) / max(len(scores), 1)
    error, crps, yardstick = (
        float(np.mean(values))
        for values in ([one.absolute_error for one in scores], [one.crps for one in scores], base)
    )
    print(
        f"| {name} | chooser (event rates) | {len(scores)} | {error / counts.mean():.4f} | {crps:.3f} | "
        f"{np.mean([one.coverage for one in scores]):.0%} | {1 - error / max(yardstick, 1e-9):+.3f} | "
        f"{1 - crps / max(yardstick, 1e-9):+.3f} | {spent:.4f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
