"""Figures: what is drawn, without a display or global state, and what cannot be written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.simulation.plots import check_figure_path, plot_comparison, save_figure
from lightning_parcae.simulation.result import Comparison, ForecastBand, PolicyResult, Span

TRACE = AvailabilityTrace.from_counts([6, 6, 4, 4, 5, 6, 6, 6, 0, 6], source="here")
WIDE, DEEP = ParallelConfig(3, 2), ParallelConfig(1, 6)


def result(policy: str, rate: float, *, forecasts: tuple[ForecastBand, ...] = ()) -> PolicyResult:
    spans = (
        Span(0.0, 30.0, WIDE, 0.0, "start"),
        Span(30.0, 400.0, WIDE, rate),
        Span(400.0, 450.0, DEEP, rate),
        Span(450.0, 480.0, DEEP, 0.0, "pipeline"),
        Span(480.0, 540.0, None, 0.0, "waiting"),
        Span(540.0, 600.0, WIDE, rate),
    )
    return PolicyResult(policy, "here", "toy", 0, 600.0, spans, (), 480.0 * rate, 1.0, forecasts=forecasts)


BANDS = tuple(ForecastBand(time, 120.0, 3, 5, 6) for time in (0.0, 60.0, 120.0))
COMPARISON = Comparison((result("liveput", 8.0, forecasts=BANDS), result("reactive", 7.0), result("bound", 9.0)))


@pytest.fixture(autouse=True)
def _no_pyplot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever imports pyplot in these tests gets an ImportError."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)


def test_everything_is_drawn() -> None:
    figure = plot_comparison(COMPARISON, TRACE)
    over_time, layouts, samples = figure.axes
    labels = [text.get_text() for text in over_time.get_legend().get_texts()]
    assert labels == ["forecast 2 min ahead, 10 to 90 %", "instances", "preempted", "allocated"]
    assert [label.get_text() for label in layouts.get_yticklabels()] == ["liveput", "reactive", "bound"]
    assert [text.get_text() for text in layouts.get_legend().get_texts()] == ["2 stages", "6 stages", "time lost"]
    named = [text.get_text() for text in layouts.texts]
    assert named.count(str(WIDE)) == 6 and named.count(str(DEEP)) == 3
    lines = {line.get_label(): line.get_ydata()[-1] for line in samples.get_lines()}
    # from the most to the fewest, in thousands
    assert list(lines.items()) == [("bound, 7.2/s", 4.32), ("liveput, 6.4/s", 3.84), ("reactive, 5.6/s", 3.36)]
    assert samples.get_xlim() == (0, 10) and samples.get_xlabel() == "minutes"


def test_every_policy_has_its_own_line() -> None:
    many = Comparison(tuple(result(f"policy{index}", 5.0 + index) for index in range(14)))
    lines = plot_comparison(many, TRACE).axes[2].get_lines()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 14


def test_a_policy_that_never_runs_has_an_empty_strip() -> None:
    waits = PolicyResult("waits", "here", "toy", 0, 600.0, (Span(0.0, 600.0, None, 0.0, "waiting"),), (), 0.0, 1.0)
    figure = plot_comparison(Comparison((waits,)), TRACE)
    assert [line.get_label() for line in figure.axes[2].get_lines()] == ["waits, 0/s"]
    assert [label.get_text() for label in figure.axes[1].get_yticklabels()] == ["waits"]
    assert not figure.axes[1].texts


def test_another_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing was simulated on the trace 'there'"):
        plot_comparison(COMPARISON, AvailabilityTrace.from_counts([1], source="there"))


@pytest.mark.parametrize(("suffix", "begin"), [(".png", b"\x89PNG"), (".PDF", b"%PDF"), (".svg", b"<?xml")])
def test_the_suffix_is_the_format_and_the_file_is_the_same_again(tmp_path: Path, suffix: str, begin: bytes) -> None:
    paths = [tmp_path / f"{name}{suffix}" for name in ("one", "other")]
    for path in paths:
        save_figure(plot_comparison(COMPARISON, TRACE), path)
    first, second = (path.read_bytes() for path in paths)
    assert first.startswith(begin) and len(first) > 5000
    assert first == second


@pytest.mark.parametrize(
    ("name", "message"),
    [("plot.bmp", "written as .png, .pdf, .svg"), ("plot", "got .*plot'"), ("nowhere/plot.png", "no directory")],
)
def test_what_cannot_be_written_is_said_before(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_figure_path(tmp_path / name)


def test_without_matplotlib_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'lightning-parcae\[plot\]'"):
        check_figure_path(tmp_path / "plot.png")
