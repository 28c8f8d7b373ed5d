"""Back-test every forecaster on every trace there is.

    python tests/benchmarks/forecasters.py [--data DIR] [--horizon 12] [--stride 4] [--only aws-p3] [--workers 1]

The traces are the examples of the package and, with --data, every trace file in a folder. Each forecaster sees only the
past. The first table asks each one at the same moments (from the 12th interval on, every `stride` intervals): the error
of the median normalised by the mean number of instances; the share of the truth within the 80 % band; CRPS skill and
error skill against last value; seconds of processor time for one forecast. On traces of less than 200 intervals they
are asked at every interval; those of less than 24 are looked at a third of their length ahead, after the first third.

The second table scores the job's choosers as they are used: at every interval from the first one on. None may have more
than 1.01 times the CRPS or the error of last value.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.simulation.forecasts import FORECASTERS, compare_forecasters
from lightning_parcae.simulation.workload import TRACES, read_trace

_CHOOSERS = ("auto", "auto_with_arima")
_SUFFIXES = (".csv", ".txt")
_SHORT = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with more traces")
    parser.add_argument("--horizon", type=int, default=12)
    parser.add_argument("--stride", type=int, default=4)
    parser.add_argument("--only", help="the traces whose name contains this")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    traces = [read_trace(name) for name in TRACES]
    if options.data is not None:
        traces += _more_traces(options.data)
    traces = [trace for trace in traces if options.only is None or options.only in trace.source]
    direct = [name for name in FORECASTERS if name not in _CHOOSERS]
    print("| trace | ahead | forecaster | forecasts | error / N | in band | skill (CRPS) | skill (error) | s/call |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for trace in traces:
        ahead = _ahead(trace, options.horizon)
        stride = options.stride if trace.num_intervals(60.0) >= _SHORT else 1
        (compared,) = compare_forecasters(
            [trace], direct, horizon=ahead, first=ahead, stride=stride, workers=options.workers
        )
        for test in sorted(compared.tests, key=lambda test: direct.index(test.key)):
            result = test.result
            print(
                f"| {trace.source} | {ahead} | {result.name} | {result.num_forecasts} | "
                f"{result.normalised_error:.4f} | {result.mean.coverage:.0%} | {result.skill:+.3f} | "
                f"{result.error_skill:+.3f} | {result.seconds_per_call or 0:.4f} |",
                flush=True,
            )
    print("\n| trace | ahead | chooser | forecasts | CRPS / last value's | error / last value's | used | in full |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for trace in traces:
        ahead = _ahead(trace, options.horizon)
        (compared,) = compare_forecasters([trace], _CHOOSERS, horizon=ahead, first=1, stride=1, workers=options.workers)
        for test in compared.tests:
            if test.used is not None:
                result = test.result
                print(
                    f"| {trace.source} | {ahead} | {test.key} | {result.num_forecasts} | {1 - result.skill:.4f} | "
                    f"{1 - result.error_skill:.4f} | {test.used[0]:.0%} | {test.used[1]:.0%} |",
                    flush=True,
                )


def _ahead(trace: AvailabilityTrace, horizon: int) -> int:
    known = trace.num_intervals(60.0)
    return horizon if known >= 2 * horizon else max(known // 3, 1)


def _more_traces(folder: Path) -> list[AvailabilityTrace]:
    """Return the traces of a folder that are not among the examples."""
    known = {trace.counts for trace in (read_trace(name) for name in TRACES)}
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES):
        try:
            trace = AvailabilityTrace.read(path)
        except ValueError:
            continue  # not a trace
        if trace.counts not in known:
            known.add(trace.counts)
            named = AvailabilityTrace(
                trace.times_s, trace.counts, trace.end_s, trace.changes, trace.gaps_s, f"{path.parent.name}/{path.stem}"
            )
            found.append(named)
    return found


if __name__ == "__main__":
    main()
