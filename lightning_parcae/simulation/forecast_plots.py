"""A back-test of forecasters as a figure: what was expected some intervals ahead, and how errors grow with time.

Figures are plain :class:`matplotlib.figure.Figure` objects: no global state, no display. matplotlib is an extra of the
package; without it a ValueError says how to install it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_parcae.availability.trace import AvailabilityTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_parcae.simulation.forecasts import ForecastTest, TraceForecasts

# Okabe and Ito's colours, told apart by colour-blind people.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def plot_forecasts(compared: TraceForecasts, trace: AvailabilityTrace) -> Figure:
    """Draw a trace with the forecasts for it, and the error of each forecaster by how far it looks ahead.

    The band is the chooser's, if it was tested, else that of the best.

    Args:
        compared: The forecasters compared.
        trace: The trace that they were asked about.

    Raises:
        ValueError: If matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        raise ValueError("plots need matplotlib: pip install 'lightning-parcae[plot]'") from error
    figure = NewFigure(figsize=(11.0, 7.0), layout="constrained")
    over_time, by_lead = figure.subplots(2, 1, height_ratios=[3, 2])
    figure.suptitle(f"forecasts of {compared.trace}", fontsize=11, fontweight="bold")
    drawn = next((test for test in compared.tests if test.key == "auto"), compared.best)
    _draw_trace(over_time, trace, compared, drawn)
    _draw_errors(by_lead, compared)
    return figure


def _draw_trace(axes: Axes, trace: AvailabilityTrace, compared: TraceForecasts, drawn: ForecastTest) -> None:
    unit_s, unit = (3600.0, "hours") if trace.end_s > 2 * 3600 else (60.0, "minutes")
    when = [(band.time_s + band.ahead_s) / unit_s for band in drawn.bands]
    ahead = f"{drawn.bands[0].ahead_s / 60:.3g} min ahead"
    low, high = [band.low for band in drawn.bands], [band.high for band in drawn.bands]
    label = f"80 % band of {drawn.result.name}, {ahead}"
    axes.fill_between(when, low, high, step="post", color="#56B4E9", alpha=0.45, linewidth=0, label=label)
    times = [time / unit_s for time in (*trace.times_s, trace.end_s)]
    axes.step(times, (*trace.counts, trace.counts[-1]), where="post", color="#000000", linewidth=1.1, label="instances")
    axes.set_xlim(0, trace.end_s / unit_s)
    axes.set_ylim(0, 1.08 * max(trace.capacity, *high, 1))
    axes.set_xlabel(unit)
    axes.set_ylabel("instances")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=2, frameon=False, fontsize=8)
    _plain(axes)


def _draw_errors(axes: Axes, compared: TraceForecasts) -> None:
    minutes = [(index + 1) * compared.interval_s / 60 for index in range(compared.horizon)]
    number = 0
    for test in compared.tests:
        is_yardstick = test.key == "last_value"
        color = "#000000" if is_yardstick else _COLORS[number % len(_COLORS)]
        number += not is_yardstick
        axes.plot(
            minutes,
            test.result.errors_ahead,
            color=color,
            linestyle=":" if is_yardstick else "-",
            marker=".",
            label=f"{test.result.name}, CRPS skill {test.result.skill:+.1%}",
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes ahead")
    axes.set_ylabel("mean absolute error\nof the median, instances")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.6)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
