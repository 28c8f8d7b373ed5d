"""``parcae forecast``: how good forecasts of a trace would have been, as a table, JSON and a figure.

Bad input is a ``ValueError`` with one clear line, before anything is computed. This module itself loads nothing but the
standard library: what it needs is imported when the command runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_parcae.simulation.forecasts import TraceForecasts

_DEFAULT = "last_value,events,arima,auto"

_EPILOG = """\
forecasters: last_value (nothing changes: the yardstick, always there), events (rates learned from the past),
  events_hour (from the last 60 intervals), arima (1,1,0), auto_arima (order searched), auto (the job's chooser),
  auto_with_arima (the chooser with ARIMA among its candidates), or all

examples:
  parcae forecast --trace aws-p3
  parcae forecast --trace aws-p3 mine.csv --forecaster all --plot forecast.png
  parcae forecast --trace mine.csv --segment 5h:9h --interval 300 --horizon 6 --json out.json
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    command.epilog = _EPILOG
    command.add_argument(
        "--trace", nargs="+", required=True, metavar="FILE|NAME", help="availability traces: files, or examples by name"
    )
    command.add_argument("--segment", metavar="BEGIN:END", help="part of the traces: 5.5h:6.5h, 90m:, :2h")
    command.add_argument(
        "--forecaster", default=_DEFAULT, metavar="F[,F...]", help=f"whom to ask, or all (default {_DEFAULT})"
    )
    command.add_argument("--horizon", type=int, default=12, metavar="N", help="intervals ahead (default 12)")
    command.add_argument(
        "--interval", type=float, default=60.0, metavar="S", help="seconds of an interval, 1 to 86400 (default 60)"
    )
    command.add_argument("--first", type=int, default=12, metavar="N", help="intervals known at first (default 12)")
    command.add_argument("--stride", type=int, metavar="K", help="ask every K intervals (default: about 200 times)")
    command.add_argument("--workers", type=int, metavar="N", help="processes (default: all cores)")
    command.add_argument(
        "--json", type=Path, metavar="OUT", help="write everything as JSON; - prints it instead of tables"
    )
    command.add_argument(
        "--plot", type=Path, metavar="OUT", help="draw a figure: .png, .pdf or .svg; one for each trace"
    )


def run(options: argparse.Namespace) -> int:
    """Test forecasters and show how good they are.

    Raises:
        ValueError: If an option or a trace makes no sense, or a trace is too short.
        OSError: If a file cannot be read or written.
    """
    from lightning_parcae.simulation.compare import read_traces
    from lightning_parcae.simulation.forecast_plots import plot_forecasts
    from lightning_parcae.simulation.forecasts import compare_forecasters, known_forecasters
    from lightning_parcae.simulation.outputs import check_outputs
    from lightning_parcae.simulation.plots import check_figure_path, save_figure
    from lightning_parcae.simulation.progress import progress_bar
    from lightning_parcae.simulation.tables import terminal

    forecasters = known_forecasters(options.forecaster)
    prints_json = options.json == Path("-")
    if options.plot is not None:
        check_figure_path(options.plot)
    plots = _plot_paths(options.plot, len(options.trace))
    files = [("--plot", path) for path in plots]
    if options.json is not None and not prints_json:
        files.insert(0, ("--json", options.json))
    check_outputs(files, inputs=options.trace)
    traces = read_traces(options.trace, segment=options.segment)
    with progress_bar("forecasting", terminal(stderr=True)) as progress:
        compared = compare_forecasters(
            traces,
            forecasters,
            horizon=options.horizon,
            interval_s=options.interval,
            first=options.first,
            stride=options.stride,
            workers=options.workers,
            progress=progress,
        )
    text = json.dumps([one.to_json() for one in compared], indent=1)
    if prints_json:
        print(text)
    console = terminal(stderr=prints_json)
    if not prints_json:
        for one in compared:
            show_forecasts(one, console)
        if options.json is not None:
            options.json.write_text(text + "\n", encoding="utf-8")
            console.print(f"written: {options.json}", soft_wrap=True)
    for one, trace, path in zip(compared, traces, plots, strict=False):  # there may be no plots
        save_figure(plot_forecasts(one, trace), path)
        console.print(f"written: {path}", soft_wrap=True)
    return 0


def show_forecasts(compared: TraceForecasts, console: Console) -> None:
    """Print one trace's forecasters, the best first, and in words whom a job would use."""
    from rich.table import Table

    console.print(
        f"{compared.trace}: {compared.horizon} intervals of {compared.interval_s:g} s ahead, "
        f"{compared.best.result.num_forecasts} forecasts",
        style="bold",
        soft_wrap=True,
    )
    table = Table()
    table.add_column("forecaster", no_wrap=True)
    for name in ("CRPS skill", "error skill", "error / mean N", "in 80 % band", "s per call"):
        table.add_column(name, justify="right")
    for test in compared.tests:
        result = test.result
        is_best = test is compared.best
        table.add_row(
            f"{'* ' if is_best else '  '}{result.name}",
            "0" if test.key == "last_value" else f"{result.skill:+.1%}",
            "0" if test.key == "last_value" else f"{result.error_skill:+.1%}",
            f"{result.normalised_error:.4f}",
            f"{result.mean.coverage:.0%}",
            f"{result.seconds_per_call or 0.0:.4f}",
            style="bold" if is_best else None,
        )
    console.print(table)
    for line in explained(compared):
        console.print(line, soft_wrap=True)
    console.print()


def explained(compared: TraceForecasts) -> list[str]:
    """Return in plain words what the table says."""
    if compared.num_changes == 0:
        return ["The number of instances never changes in this trace: there is nothing to forecast."]
    best = compared.best
    if best.key == "last_value":
        lines = ["* None is better than to expect no change."]
    else:
        lines = [
            f"* {best.result.name} is the best of these: its CRPS is {best.result.skill:.1%} smaller than that of "
            '"nothing changes"; the error of its median alone is '
            f"{abs(best.result.error_skill):.1%} {'smaller' if best.result.error_skill >= 0 else 'larger'}."
        ]
    for test in compared.tests:
        if test.reason is not None and test.used is not None:
            lines.append(
                f"forecaster={'auto' if test.key == 'auto' else 'arima'} in a job, after this trace: {test.reason}. "
                f"Until then a forecaster was used in {test.used[0]:.0%} of the intervals, in full in "
                f"{test.used[1]:.0%}."
            )
    return lines


def _plot_paths(path: Path | None, num_traces: int) -> list[Path]:
    """Return the file of each trace's figure; with several traces, their number is part of its name."""
    if path is None or num_traces == 1:
        return [] if path is None else [path]
    return [path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(1, num_traces + 1)]
