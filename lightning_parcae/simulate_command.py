"""``parcae simulate``: what policies would have trained on traces, as a table, JSON and a figure.

Bad input is a ``ValueError`` with one clear line, before anything is simulated. This module itself loads nothing but
the standard library: what it needs is imported when the command runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_parcae.simulation.result import Prices

#: Always simulated: what the others are measured against.
_YARDSTICKS = ("ondemand", "bound")
_DEFAULT = "liveput,reactive,checkpoint"
# More instances than an example needs.
_MANY = 1000
_MOST_SEEDS = 10_000
_MOST_WORKERS = 1_000

_EPILOG = """\
examples:
  parcae simulate --trace aws-p3 --profile gpt-1.5b
  parcae simulate --trace aws-p3 gcp-v100 --profile bert --policy all --price 0.92,3.06 --plot what_if.png
  parcae simulate --trace mine.csv --profile profile.json --segment 5.5h:6.5h --notice 120 --json out.json
  parcae simulate --list
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    command.epilog = _EPILOG
    command.add_argument("--list", action="store_true", help="list example traces and profiles, policies and terms")
    what = command.add_argument_group("what to simulate")
    what.add_argument("--trace", nargs="+", metavar="FILE|NAME", help="availability traces: files, or examples by name")
    what.add_argument("--profile", metavar="FILE|NAME", help="what is trained: a profile file, or an example by name")
    what.add_argument("--model", metavar="M", help="which model of a profile file that holds several")
    what.add_argument("--segment", metavar="BEGIN:END", help="part of the traces: 5.5h:6.5h, 90m:, :2h")
    what.add_argument(
        "--policy", default=_DEFAULT, metavar="P[,P...]",
        help=f"names, or all (default {_DEFAULT}); {' and '.join(_YARDSTICKS)} are always there to compare with",
    )  # fmt: skip
    how = command.add_argument_group("how")
    how.add_argument(
        "--accounting", choices=("job", "reference"), default="job",
        help="job: the real coordinator and planner on a simulated clock (default); reference: one decision per "
        "interval, pauses as the reference system prices them",
    )  # fmt: skip
    how.add_argument("--notice", type=float, default=0.0, metavar="S", help="warning before a preemption (default 0)")
    how.add_argument(
        "--interval", type=float, default=60.0, metavar="S",
        help="seconds between plans, 1 to 86400 (default 60). Traces are read alike whatever it is: one row a minute "
        "where rows have no time, and the last row holds for a minute where the file does not say when it ends",
    )  # fmt: skip
    how.add_argument(
        "--horizon", type=int, metavar="N", help="intervals that a plan looks ahead, 1 to 1000 (default: many)"
    )
    how.add_argument("--forecaster", choices=("auto", "events", "arima", "last_value"), default="auto")
    how.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="seeds to run where chance plays a part (default 1)"
    )
    how.add_argument(
        "--bootstrap", action="store_true",
        help="simulate, for each seed, a trace made of half-hour blocks of the given one's changes",
    )  # fmt: skip
    how.add_argument("--seed", type=int, default=0, metavar="SEED", help="the first seed (default 0)")
    how.add_argument("--warm-up", type=float, metavar="S", help="how long a joiner warms up before it can train")
    how.add_argument(
        "--failure-timeout", type=float, metavar="S", help="how long a silent instance counts as alive, at least 0.1"
    )
    how.add_argument(
        "--term",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another term of migrations, see --list; yes or no is 1 or 0",
    )
    how.add_argument("--workers", type=int, metavar="N", help="processes (default: all cores)")
    out = command.add_argument_group("what comes out")
    out.add_argument("--price", metavar="SPOT[,ONDEMAND]", help="dollars per instance-hour; adds the costs")
    out.add_argument("--json", type=Path, metavar="OUT", help="write everything as JSON; - prints it instead of tables")
    out.add_argument("--plot", type=Path, metavar="OUT", help="draw a figure: .png, .pdf or .svg; one for each trace")


def run(options: argparse.Namespace) -> int:
    """Simulate and show.

    Raises:
        ValueError: If an option, a trace or a profile makes no sense.
        OSError: If a file cannot be read or written.
    """
    from lightning_parcae.simulation.compare import chosen_policies, known_policies, read_traces, resampled, simulate
    from lightning_parcae.simulation.outputs import check_outputs
    from lightning_parcae.simulation.plots import check_figure_path, plot_comparison, save_figure
    from lightning_parcae.simulation.progress import progress_bar
    from lightning_parcae.simulation.tables import show, terminal

    if options.list:
        _show_lists(terminal())
        return 0
    if not options.trace or not options.profile:
        raise ValueError("what shall be simulated? Give --trace and --profile; --list shows the examples there are")
    _check_numbers(options)
    known = known_policies(options.accounting)
    policies = (*chosen_policies(options.policy, options.accounting), *(name for name in _YARDSTICKS if name in known))
    prices = None if options.price is None else parse_prices(options.price)
    terms = _terms(options)
    if options.plot is not None:
        check_figure_path(options.plot)
    plots = _plot_paths(options)
    files = [("--plot", path) for path in plots]
    if options.json is not None and options.json != Path("-"):
        files.insert(0, ("--json", options.json))
    check_outputs(files, inputs=(*options.trace, options.profile))
    traces = read_traces(options.trace, segment=options.segment)
    with progress_bar("simulating", terminal(stderr=True)) as progress:
        comparison = simulate(
            traces,
            options.profile,
            policies=policies,
            accounting=options.accounting,
            bootstrap=options.bootstrap,
            seeds=range(options.seed, options.seed + options.seeds),
            notice_s=options.notice,
            prices=prices,
            interval_s=options.interval,
            horizon=options.horizon,
            forecaster=options.forecaster,
            model=options.model,
            workers=options.workers,
            progress=progress,
            **terms,
        )
    if options.json == Path("-"):
        print(json.dumps(comparison.to_json(), indent=1))
        return 0
    console = terminal()
    show(comparison, console)
    if prices is not None and "," not in options.price:
        console.print("On-demand instances are counted at the same price: give --price SPOT,ONDEMAND.", style="dim")
    if options.json is not None:
        options.json.write_text(json.dumps(comparison.to_json(), indent=1) + "\n", encoding="utf-8")
        console.print(f"written: {options.json}", soft_wrap=True)
    for trace, path in zip(traces, plots, strict=False):  # no paths, no figures
        drawn = resampled(trace, seed=options.seed) if options.bootstrap else trace
        save_figure(plot_comparison(comparison, drawn), path)
        console.print(f"written: {path}", soft_wrap=True)
    return 0


def parse_prices(text: str) -> Prices:
    """Return the prices that ``SPOT`` or ``SPOT,ONDEMAND`` says.

    Raises:
        ValueError: If they are none.
    """
    from lightning_parcae.simulation.result import Prices

    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not 1 <= len(values) <= 2:
        raise ValueError(
            f"a price is SPOT or SPOT,ONDEMAND in dollars per instance-hour, such as 0.92,3.06; got {text!r}"
        )
    return Prices(spot=values[0], on_demand=values[-1])


def _check_numbers(options: argparse.Namespace) -> None:
    from lightning_parcae.simulation.compare import INTERVAL_S, LEAST_FAILURE_TIMEOUT_S, MOST_INTERVALS_AHEAD

    limits: tuple[tuple[str, float | None, float, float], ...] = (
        ("--notice", options.notice, 0, 86400),
        ("--interval", options.interval, *INTERVAL_S),
        ("--horizon", options.horizon, 1, MOST_INTERVALS_AHEAD),
        ("--seeds", options.seeds, 1, _MOST_SEEDS),
        ("--seed", options.seed, 0, 2**31),
        ("--warm-up", options.warm_up, 0, 86400),
        ("--failure-timeout", options.failure_timeout, LEAST_FAILURE_TIMEOUT_S, 86400),
        ("--workers", options.workers, 1, _MOST_WORKERS),
    )
    for option, value, least, most in limits:
        if value is not None and not least <= value <= most:  # nan too
            raise ValueError(f"{option} should be {least:.12g} to {most:.12g}, got {value:g}")


def _terms(options: argparse.Namespace) -> dict[str, Any]:
    from lightning_parcae.simulation.compare import check_terms

    terms: dict[str, Any] = {}
    for word in options.term:
        name, _, value = word.partition("=")
        name = name.strip().replace("-", "_")
        try:
            number = float(value)
        except ValueError:
            raise ValueError(
                f"--term: a term is NAME=VALUE with a number, such as bytes_per_s=1e9; got {word!r}"
            ) from None
        if name in terms:
            raise ValueError(f"--term {name} is given twice")
        terms[name] = int(number) if value.strip().isdigit() else number
    try:
        check_terms(terms, options.accounting)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--term: {error}") from error
    for option, name, given in (
        ("--warm-up", "warm_up_s", options.warm_up),
        ("--failure-timeout", "failure_timeout_s", options.failure_timeout),
    ):
        if given is None:
            continue
        if options.accounting != "job":
            raise ValueError(
                f"{option} is for the job accounting: the {options.accounting} accounting has no such time"
            )
        if name in terms:
            raise ValueError(f"{option} and --term {name} say the same: give one of them")
        terms[name] = given
    return terms


def _plot_paths(options: argparse.Namespace) -> list[Path]:
    """Return where to write the figure of each trace; with several, the trace is part of the file's name."""
    plot: Path | None = options.plot
    if plot is None or len(options.trace) == 1:
        return [] if plot is None else [plot]
    paths: list[Path] = []
    for number, name in enumerate(options.trace, start=1):
        path = plot.with_name(f"{plot.stem}-{Path(name).stem}{plot.suffix}")
        if path in paths:  # files of one name in several directories
            path = path.with_name(f"{path.stem}-{number}{path.suffix}")
        paths.append(path)
    return paths


def _show_lists(console: Console) -> None:
    from rich.padding import Padding
    from rich.table import Table

    from lightning_parcae.simulation.compare import Accounting, known_policies, known_terms
    from lightning_parcae.simulation.workload import PROFILES, TRACES, read_workload

    def show(title: str, rows: Iterable[Sequence[str]]) -> None:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(title, style="bold")
        console.print(Padding(table, (0, 0, 1, 2)))

    show("example traces (--trace)", ((name, source) for name, (_, source) in TRACES.items()))
    profiles = []
    for name in PROFILES:
        profile = read_workload(name).profile
        configs = profile.configs(_MANY)
        best = max(configs, key=profile.samples_per_s)
        rate = profile.samples_per_s(best)
        profiles.append((name, f"{len(configs)} configurations, the fastest is {best} with {rate:.4g} samples/s"))
    show("example profiles (--profile): 32 p3.2xlarge; JF-D/Parcae, MIT", profiles)
    accountings: tuple[Accounting, ...] = ("job", "reference")
    for accounting in accountings:
        show(f"policies with --accounting {accounting} (--policy)", known_policies(accounting).items())
        terms = known_terms(accounting).items()
        values = ((name, "chosen by the model" if value is None else f"{value:g}") for name, value in terms)
        show(f"terms with --accounting {accounting} (--term NAME=VALUE) and their defaults", values)
