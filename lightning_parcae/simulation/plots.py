"""A comparison as a figure: how many instances there were, what ran on them, and what each policy trained.

Figures are plain :class:`matplotlib.figure.Figure` objects: no global state, no display. matplotlib is an extra of the
package and is loaded when a figure is asked for. Colours are those of Okabe and Ito, told apart by colour-blind people.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.simulation.result import Comparison, ForecastBand, PolicyResult, Span, cumulative_samples

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".pdf", ".svg")

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_STYLES = ("-", "--", "-.", ":")
_YARDSTICKS = {"bound": "#7F7F7F", "ondemand": "#000000"}
_LOST = "#000000"
# A layout is named in the strip if its block is at least so wide, as a share of the trace.
_NAMED_SHARE = 0.035


def check_figure_path(path: Path) -> None:
    """Check before a long simulation that its figure can be written.

    Raises:
        ValueError: If the suffix is none of :data:`SUFFIXES`, the directory is missing, or matplotlib is.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"a plot is written as {', '.join(SUFFIXES)}, by its suffix; got {str(path)!r}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"there is no directory {path.parent} to write {path.name} to")
    _new_figure(1.0, 1.0)


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure, in the format of the suffix.

    Raises:
        ValueError: See :func:`check_figure_path`.
    """
    path = Path(path)
    check_figure_path(path)
    from matplotlib import rc_context

    # No dates and no random names, so that the same simulation writes the same file.
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with rc_context({"svg.hashsalt": "lightning_parcae"}):
        figure.savefig(path, dpi=150, metadata=dates.get(path.suffix.lower()))


def plot_comparison(comparison: Comparison, trace: AvailabilityTrace) -> Figure:
    """Draw availability with forecasts and events, the layouts of each policy, and the samples that each trained.

    Of several seeds the first one is drawn.

    Args:
        comparison: The results.
        trace: The trace to draw; its results are found by its name.

    Raises:
        ValueError: If nothing was simulated on that trace, or matplotlib is missing.
    """
    first: dict[str, PolicyResult] = {}
    for result in comparison.results:
        if result.trace == trace.source:
            first.setdefault(result.policy, result)
    results = list(first.values())
    if not results:
        raise ValueError(f"nothing was simulated on the trace {trace.source!r}; plot it with its own comparison")
    figure = _new_figure(11.0, 5.6 + 0.34 * len(results))
    heights = [2.0, 0.34 * len(results), 2.6]
    over_time, layouts, samples = figure.subplots(3, 1, sharex=True, height_ratios=heights)
    unit_s, unit = (3600.0, "hours") if trace.end_s > 2 * 3600 else (60.0, "minutes")
    figure.suptitle(f"{results[0].profile} on {trace.source} (simulated)", fontsize=11, fontweight="bold")
    _draw_availability(over_time, trace, _bands(results), unit_s)
    _draw_layouts(layouts, results, trace.end_s, unit_s)
    _draw_samples(samples, results, unit_s)
    samples.set_xlim(0, trace.end_s / unit_s)
    samples.set_xlabel(unit)
    return figure


def _new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        raise ValueError("plots need matplotlib: pip install 'lightning-parcae[plot]'") from error
    return NewFigure(figsize=(width, height), layout="constrained")


# --- availability -----------------------------------------------------------------------------------------------------


def _bands(results: Sequence[PolicyResult]) -> tuple[ForecastBand, ...]:
    """Return the forecasts of the first policy that made any, all for the same time ahead."""
    for result in results:
        if result.forecasts:
            ahead_s, _ = Counter(round(band.ahead_s, 3) for band in result.forecasts).most_common(1)[0]
            return tuple(band for band in result.forecasts if round(band.ahead_s, 3) == ahead_s)
    return ()


def _draw_availability(axes: Axes, trace: AvailabilityTrace, bands: Sequence[ForecastBand], unit_s: float) -> None:
    from matplotlib.ticker import MaxNLocator

    if bands:
        when = [(band.time_s + band.ahead_s) / unit_s for band in bands]
        low, high = [band.low for band in bands], [band.high for band in bands]
        label = f"forecast {bands[0].ahead_s / 60:.3g} min ahead, 10 to 90 %"
        axes.fill_between(when, low, high, step="post", color="#56B4E9", alpha=0.4, linewidth=0, label=label)
    times = [*trace.times_s, trace.end_s]
    counts = [*trace.counts, trace.counts[-1]]
    axes.step(
        [time / unit_s for time in times], counts, where="post", color="#000000", linewidth=1.2, label="instances"
    )
    for low_s, high_s in trace.gaps_s:
        axes.axvspan(low_s / unit_s, high_s / unit_s, facecolor="#DDDDDD", hatch="//", edgecolor="#BBBBBB", zorder=0)
    steps = [after - before for before, after in pairwise(trace.counts)]
    moves = list(zip(trace.times_s[1:], steps, strict=True))
    top = max(trace.capacity, max((band.high for band in bands), default=0), 1)
    # A rug below zero, where it hides nothing: longer marks for larger events.
    for sign, color, mark, label in ((-1, "#D55E00", "v", "preempted"), (1, "#009E73", "^", "allocated")):
        chosen = [(time / unit_s, abs(step)) for time, step in moves if step * sign > 0]
        if chosen:
            axes.scatter(
                [time for time, _ in chosen],
                [-0.06 * top if sign < 0 else -0.14 * top] * len(chosen),
                s=[8 + 6 * min(size, 8) for _, size in chosen],
                marker=mark,
                color=color,
                linewidths=0,
                label=label,
            )
    axes.set_ylim(-0.2 * top, 1.08 * top)
    ticks = MaxNLocator(nbins=5, integer=True).tick_values(0, top)
    axes.set_yticks([tick for tick in ticks if 0 <= tick <= 1.08 * top])
    axes.set_ylabel("instances")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    _plain(axes)


# --- layouts ----------------------------------------------------------------------------------------------------------


def _draw_layouts(axes: Axes, results: Sequence[PolicyResult], end_s: float, unit_s: float) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    depths = sorted({span.config.num_stages for one in results for span in one.spans if span.config is not None})
    shades = colormaps["viridis"]
    # Neither end of the map: black is lost time, and text must be legible on it.
    colors = {depth: shades(0.2 + 0.8 * (index / max(len(depths) - 1, 1))) for index, depth in enumerate(depths)}
    for row, result in enumerate(results):
        runs = [span for span in result.spans if span.cause is None and span.config is not None]
        for depth in depths:
            bars = [(one.start_s / unit_s, one.duration_s / unit_s) for one in runs if one.config.num_stages == depth]  # type: ignore[union-attr]
            axes.broken_barh(bars, (row - 0.42, 0.84), facecolor=colors[depth], linewidth=0)
        lost = [span for span in result.spans if span.cause not in (None, "waiting")]
        bars = [(span.start_s / unit_s, span.duration_s / unit_s) for span in lost]
        axes.broken_barh(bars, (row - 0.42, 0.84), facecolor=_LOST, linewidth=0)
        for span in _named(result.spans, end_s):
            red, green, blue, _ = colors[span.config.num_stages]  # type: ignore[union-attr]
            is_dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.45
            axes.text(
                (span.start_s + span.end_s) / 2 / unit_s,
                row,
                str(span.config),
                ha="center",
                va="center_baseline",
                fontsize=6.5,
                color="#FFFFFF" if is_dark else "#000000",
                clip_on=True,
            )
    axes.set_yticks(range(len(results)), [result.policy for result in results], fontsize=8)
    axes.set_ylim(len(results) - 0.5, -0.5)
    patches = [Patch(facecolor=colors[depth], label=f"{depth} stage{'s' if depth > 1 else ''}") for depth in depths]
    patches.append(Patch(facecolor=_LOST, label="time lost"))
    columns = 1 + (len(patches) - 1) // max(2 * len(results), 2)
    axes.legend(
        handles=patches,
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        frameon=False,
        fontsize=7,
        ncols=columns,
        handlelength=1.0,
        columnspacing=0.8,
    )
    _plain(axes)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)


def _named(spans: Sequence[Span], end_s: float) -> list[Span]:
    """Return where to name a configuration: the longest piece of each stretch of it, if it is wide enough."""
    longest: list[Span] = []
    for span in spans:
        if span.cause is not None or span.config is None:
            continue
        if longest and longest[-1].config == span.config:
            longest[-1] = max(longest[-1], span, key=lambda one: one.duration_s)
        else:
            longest.append(span)
    return [span for span in longest if span.duration_s >= _NAMED_SHARE * end_s]


# --- samples ----------------------------------------------------------------------------------------------------------


def _draw_samples(axes: Axes, results: Sequence[PolicyResult], unit_s: float) -> None:
    # From the most to the fewest, as the lines end.
    number = 0
    lines: dict[str, tuple[str, str]] = {}
    for result in results:
        if result.policy in _YARDSTICKS:
            lines[result.policy] = (_YARDSTICKS[result.policy], ":")
        else:
            lines[result.policy] = (_COLORS[number % len(_COLORS)], _STYLES[number // len(_COLORS) % len(_STYLES)])
            number += 1
    most = max(result.samples for result in results)
    scale, word = (1e6, "million ") if most >= 2e6 else (1e3, "thousand ") if most >= 2e3 else (1.0, "")
    for result in sorted(results, key=lambda one: -one.samples):
        times, totals = cumulative_samples(result.spans)
        color, style = lines[result.policy]
        axes.plot(
            [time / unit_s for time in times],
            [total / scale for total in totals],
            color=color,
            linestyle=style,
            linewidth=1.6,
            label=f"{result.policy}, {result.samples_per_s:.4g}/s",
        )
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"{word}samples")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.6)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
