"""A comparison as tables for the terminal: throughput, money, and where the time went.

Runs of one policy with several seeds are one row of means. What is missing in the comparison (no prices, no run of
``bound`` to measure against) is left out of the tables, never guessed. On a narrow terminal the columns that do not fit
follow below, under the names again: numbers and names are never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lightning_parcae.simulation.result import CAUSES, Cause, Comparison, PolicyResult, Prices

#: Width where nobody says how wide the output may be: when it is piped.
PIPED_WIDTH = 100

Column = tuple[str, Sequence[str]]
"""A title, and the cells under it."""

_ACCOUNTINGS = {
    "job": "the package's coordinator and planner on a simulated clock",
    "reference": "one decision per interval, pauses as the reference system prices them",
}


@dataclass(frozen=True)
class PolicyRow:
    """One policy on one trace, mean of its seeds.

    Attributes:
        policy: Its name.
        num_runs: Seeds.
        samples_per_s: Throughput.
        spread: Standard deviation of the throughput over the seeds; None with a single one.
        tokens_per_s: Throughput in tokens; None if unknown.
        of_bound: Share of the zero-overhead bound; None if that was not simulated.
        of_on_demand: Throughput over that of on-demand instances; None if these were not simulated.
        goodput: Share of the time in which samples that count were trained.
        num_migrations: Changes of what ran.
        dollars: Cost of the instances; None without prices.
        dollars_per_million: Dollars per million samples; None without prices or samples.
        lost: Share of the time lost to each cause.
    """

    policy: str
    num_runs: int
    samples_per_s: float
    spread: float | None
    tokens_per_s: float | None
    of_bound: float | None
    of_on_demand: float | None
    goodput: float
    num_migrations: float
    dollars: float | None
    dollars_per_million: float | None
    lost: Mapping[Cause, float]


def comparison_rows(comparison: Comparison, trace: str) -> tuple[PolicyRow, ...]:
    """Return one row per policy, in the order of the comparison.

    Args:
        comparison: The results.
        trace: Name of the trace.

    Raises:
        ValueError: If nothing was simulated on that trace.
    """
    by_policy: dict[str, list[PolicyResult]] = {}
    for result in comparison.results:
        if result.trace == trace:
            by_policy.setdefault(result.policy, []).append(result)
    if not by_policy:
        names = ", ".join(dict.fromkeys(result.trace for result in comparison.results)) or "none"
        raise ValueError(f"nothing was simulated on the trace {trace!r}, only on {names}")
    means = {policy: mean(one.samples_per_s for one in runs) for policy, runs in by_policy.items()}
    return tuple(
        _row(policy, runs, means, comparison.prices, comparison.tokens_per_sample) for policy, runs in by_policy.items()
    )


def comparison_tables(comparison: Comparison, width: int = PIPED_WIDTH) -> Group:
    """Return the tables of every trace, within a width, and what the numbers are."""
    traces = dict.fromkeys(result.trace for result in comparison.results)
    parts: list[RenderableType] = []
    for trace in traces:
        rows = comparison_rows(comparison, trace)
        first = next(result for result in comparison.results if result.trace == trace)
        heading = Text(f"{first.profile} on {trace}, {describe_duration(first.duration_s)}", style="bold")
        parts += [heading, Text()]
        for table in (*_main_tables(rows, comparison, width), *_lost_tables(rows, width)):
            parts += [table, Text()]
    parts.append(Text(what_it_is(comparison), style="dim"))
    notes: dict[str, dict[str, None]] = {}
    for one in comparison.results:
        for note in one.notes:
            notes.setdefault(note, {})[one.policy] = None
    parts += [Text(f"{', '.join(policies)}: {note}", style="dim") for note, policies in notes.items()]
    return Group(*parts)


def show(comparison: Comparison, console: Console | None = None) -> None:
    """Print the tables to standard output, or to a console."""
    target = console if console is not None else terminal()
    target.print(comparison_tables(comparison, target.width))


def fitting_tables(
    title: str,
    names: Sequence[str],
    columns: Sequence[Column],
    width: int,
    *,
    styles: Sequence[str | None] = (),
) -> list[Table]:
    """Return the columns as one table, or as several below each other, each with the names and within a width.

    Args:
        title: Title of the names.
        names: Name of each row.
        columns: The others, numbers to the right.
        width: Characters there are.
        styles: Style of each row; none if empty.
    """
    tables: list[Table] = []
    held: list[Column] = []
    measure = Console(width=10_000)
    for column in columns:
        wider = _table(title, names, [*held, column], styles)
        if held and Measurement.get(measure, measure.options, wider).maximum > width:
            tables.append(_table(title, names, held, styles))
            held = [column]
        else:
            held.append(column)
    return [*tables, _table(title, names, held, styles)]


def _table(title: str, names: Sequence[str], columns: Sequence[Column], styles: Sequence[str | None]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    # Folded, and not cut, on a terminal that is narrower than any table can be.
    table.add_column(title, no_wrap=True, overflow="fold")
    for head, _ in columns:
        table.add_column(head, justify="right", no_wrap=True, overflow="fold")
    for index, name in enumerate(names):
        cells = (cells[index] for _, cells in columns)
        table.add_row(name, *cells, style=styles[index] if styles else None)
    return table


def terminal(*, stderr: bool = False) -> Console:
    """Return the terminal as it is, or something as wide as :data:`PIPED_WIDTH` when the output is piped."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=PIPED_WIDTH)


def what_it_is(comparison: Comparison) -> str:
    """Return the line that says how the numbers came about."""
    settings = comparison.settings
    accounting = str(settings.get("accounting", ""))
    words = [f"Simulated, not measured. Accounting {accounting!r}: {_ACCOUNTINGS.get(accounting, 'unknown')}."]
    notice_s = float(settings.get("notice_s", 0.0))
    notice = f"Notice {notice_s:g} s, for the policies that can use it."
    words.append(notice if notice_s else "Instances vanish without notice.")
    terms = settings.get("terms", {})
    if terms:
        words.append("Changed terms: " + ", ".join(f"{name} {value:g}" for name, value in terms.items()) + ".")
    seeds = settings.get("seeds", ())
    if len(seeds) > 1:
        words.append(f"Where chance plays a part: mean and standard deviation of {len(seeds)} seeds.")
    return " ".join(words)


def describe_duration(seconds: float) -> str:
    """Return a length of time as people write it."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _row(
    policy: str,
    runs: Sequence[PolicyResult],
    means: Mapping[str, float],
    prices: Prices | None,
    tokens_per_sample: int | None,
) -> PolicyRow:
    rate = means[policy]
    samples = sum(run.samples for run in runs)
    lost = {
        cause: mean(run.lost_s.get(cause, 0.0) / run.duration_s for run in runs)
        for cause in CAUSES
        if any(cause in run.lost_s for run in runs)
    }
    dollars = None if prices is None else mean(run.dollars(prices) for run in runs)
    return PolicyRow(
        policy=policy,
        num_runs=len(runs),
        samples_per_s=rate,
        spread=stdev(run.samples_per_s for run in runs) if len(runs) > 1 else None,
        tokens_per_s=None if tokens_per_sample is None else rate * tokens_per_sample,
        of_bound=_ratio(rate, means.get("bound")),
        of_on_demand=_ratio(rate, means.get("ondemand")),
        goodput=mean(run.goodput for run in runs),
        num_migrations=mean(len(run.migrations) for run in runs),
        dollars=dollars,
        dollars_per_million=None if dollars is None or samples <= 0 else dollars * len(runs) / samples * 1e6,
        lost=lost,
    )


def _ratio(value: float, base: float | None) -> float | None:
    return value / base if base else None


def _main_tables(rows: Sequence[PolicyRow], comparison: Comparison, width: int) -> list[Table]:
    columns: list[tuple[str, Callable[[PolicyRow], str]]] = [("samples/s", _rate)]
    if comparison.tokens_per_sample is not None:
        columns.append(("tokens/s", lambda row: _number(row.tokens_per_s)))
    columns.append(("of\nbound", lambda row: _percent(row.of_bound)))
    columns.append(("migra-\ntions", lambda row: f"{row.num_migrations:.{0 if row.num_runs == 1 else 1}f}"))
    columns.append(("speed vs\non-demand", lambda row: _percent(row.of_on_demand)))
    if comparison.prices is not None:
        base = next((row.dollars_per_million for row in rows if row.policy == "ondemand"), None)
        columns.append(("$", lambda row: _money(row.dollars)))
        columns.append(("$ per M\nsamples", lambda row: _money(row.dollars_per_million)))
        columns.append(("$/M vs\non-demand", lambda row: _percent(_ratio_or_none(row.dollars_per_million, base))))
    shown = [(title, cells) for title, show_one in columns if any(cells := [show_one(row) for row in rows])]
    return fitting_tables("policy", [row.policy for row in rows], shown, width)


def _lost_tables(rows: Sequence[PolicyRow], width: int) -> Sequence[RenderableType]:
    causes = [cause for cause in CAUSES if any(row.lost.get(cause) for row in rows)]
    if not causes:
        return [Text("no time was lost")]
    columns: list[Column] = [("good-\nput", [f"{row.goodput:.2%}"[:-1] for row in rows])]
    for cause in causes:
        shares = [f"{row.lost[cause]:.2%}"[:-1] if cause in row.lost else "" for row in rows]
        columns.append((cause.replace("_", "-\n"), shares))
    return fitting_tables("time, % of the trace", [row.policy for row in rows], columns, width)


def _ratio_or_none(value: float | None, base: float | None) -> float | None:
    return None if value is None else _ratio(value, base)


def _rate(row: PolicyRow) -> str:
    spread = f" +-{float(f'{row.spread:.2g}'):,g}" if row.spread else ""
    return _number(row.samples_per_s) + spread


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value >= 1e6:
        return f"{value / 1e6:,.4g}M"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _money(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if value < 1e4 else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
