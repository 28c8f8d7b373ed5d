"""``parcae forecast``: tables, JSON, figures, and one clear line for bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.cli import main
from lightning_parcae.forecast_command import explained
from lightning_parcae.simulation.forecast_plots import plot_forecasts
from lightning_parcae.simulation.forecasts import FORECASTERS, compare_forecasters, known_forecasters

QUICK = ["--forecaster", "events,auto", "--workers", "1", "--horizon", "4"]


@pytest.fixture
def falling(tmp_path: Path) -> str:
    """A file with a count a minute: an instance goes every other minute, and all come back at once."""
    path = tmp_path / "falling.csv"
    path.write_text("time_s,count\n" + "".join(f"{minute * 60},{20 - minute // 2 % 12}\n" for minute in range(120)))
    return str(path)


def forecast(*arguments: str) -> int:
    return main(["forecast", *arguments])


def test_table_marks_the_best_and_says_whom_a_job_would_use(falling: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert forecast("--trace", falling, *QUICK) == 0
    printed = capsys.readouterr().out
    assert "4 intervals of 60 s ahead, 105 forecasts" in printed
    lines = [line for line in printed.splitlines() if "│" in line]
    assert [line.split("│")[1].strip() for line in lines] == ["* event rates", "chooser", "last value"]
    assert "* event rates is the best of these: its CRPS is" in printed
    assert "forecaster=auto in a job, after this trace: event rates: skill +" in printed


def test_several_traces_a_segment_json_and_plots(
    falling: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "plot.svg"
    options = ("--segment", "20m:100m", "--first", "6", "--stride", "2", "--json", str(out), "--plot", str(plot))
    assert forecast("--trace", falling, "aws-p3", *QUICK, *options) == 0
    capsys.readouterr()
    mine, example = json.loads(out.read_text())
    assert (mine["horizon"], mine["first"], mine["stride"], mine["num_changes"]) == (4, 6, 2, 39)
    assert example["trace"].startswith("aws-p3")
    for one in (mine, example):
        scores = {test["key"]: test["result"] for test in one["tests"]}
        assert set(scores) == {"last_value", "events", "auto"}
        assert {test["num_forecasts"] for test in scores.values()} == {36}
        assert scores["last_value"]["skill"] == 0.0
        assert len(scores["auto"]["errors_ahead"]) == 4
    drawn = [(tmp_path / f"plot-{number}.svg").read_text() for number in (1, 2)]
    assert all("<svg" in text for text in drawn) and drawn[0] != drawn[1]


def test_json_alone_can_be_printed(falling: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert forecast("--trace", falling, *QUICK, "--json", "-") == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert one["tests"][0]["key"] == "events"


def test_processes_and_this_process_find_the_same(falling: str) -> None:
    trace = AvailabilityTrace.read(falling)

    def scores(workers: int) -> list[Any]:
        told: list[float] = []
        (one,) = compare_forecasters(
            [trace], "events", horizon=3, workers=workers, progress=lambda done, total: told.append(done / total)
        )
        assert told == sorted(told) and told[-1] == 1.0
        return [(test.key, test.result.mean, test.bands) for test in one.tests]

    assert scores(1) == scores(2)


def test_nothing_to_forecast_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "constant.csv"
    path.write_text("".join(f"{minute * 60000},16\n" for minute in range(60)))
    assert forecast("--trace", str(path), *QUICK) == 0
    printed = capsys.readouterr().out
    assert "never changes in this trace: there is nothing to forecast" in printed
    assert "* last value" in printed


def test_no_change_may_be_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    trace = AvailabilityTrace.from_counts([8] * 70 + [7] * 70)
    (one,) = compare_forecasters([trace], "events,auto", horizon=3, workers=1)
    assert one.best.key == "last_value"
    assert explained(one)[0] == "* None is better than to expect no change."


def test_figure_shows_the_band_of_the_chooser_and_errors_by_lead(falling: str) -> None:
    trace = AvailabilityTrace.read(falling)
    (one,) = compare_forecasters([trace], "events,auto", horizon=6, first=12, stride=1, workers=1)
    figure = plot_forecasts(one, trace)
    over_time, by_lead = figure.axes
    labels = [text.get_text() for text in over_time.get_legend().get_texts()]
    assert labels == ["80 % band of chooser, 5 min ahead", "instances"]
    assert len(by_lead.lines) == 3
    yardstick = next(line for line in by_lead.lines if str(line.get_label()).startswith("last value"))
    errors = next(test.result.errors_ahead for test in one.tests if test.key == "last_value")
    assert tuple(yardstick.get_ydata()) == errors  # type: ignore[arg-type]
    assert errors[0] < errors[-1]


def test_a_band_is_what_was_forecast_then() -> None:
    trace = AvailabilityTrace.from_counts([9, 8, 7, 6, 5, 4, 3, 2])
    (one,) = compare_forecasters([trace], "last_value", horizon=2, interval_s=60.0, first=3, stride=2, workers=1)
    assert [(band.time_s, band.ahead_s, band.low, band.median, band.high) for band in one.best.bands] == [
        (120.0, 120.0, 7, 7, 7),
        (240.0, 120.0, 5, 5, 5),
    ]


def test_a_trace_of_too_many_intervals_is_refused() -> None:
    trace = AvailabilityTrace.from_counts([3, 2], interval_s=60_000.0)
    with pytest.raises(ValueError, match="120000 intervals of 1 s are more than 100000: take longer intervals, or a s"):
        compare_forecasters([trace], "events", interval_s=1.0)


def test_every_forecaster_can_be_asked() -> None:
    assert known_forecasters("all") == tuple(FORECASTERS)
    assert known_forecasters("events, last_value") == ("last_value", "events")
    trace = AvailabilityTrace.from_counts([8, 7, 8, 6, 7, 8, 8, 5, 6, 7, 8, 8, 6, 7, 5, 6])
    (one,) = compare_forecasters([trace], "all", horizon=2, workers=1)
    assert {test.key for test in one.tests} == set(FORECASTERS)
    names = {test.key: test.result.name for test in one.tests}
    assert len(set(names.values())) == len(names)
    assert (names["auto"], names["auto_with_arima"]) == ("chooser", "chooser with ARIMA")
    assert [test.result.skill for test in one.tests] == sorted((test.result.skill for test in one.tests), reverse=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "nothing.csv"], "there is no trace nothing.csv"),
        (
            ["--trace", "aws-p3", "--forecaster", "oracle"],
            "there is no forecaster 'oracle'; there are last_value, events",
        ),
        (["--trace", "aws-p3", "--horizon", "0"], "horizon should be at least 1, got 0"),
        (["--trace", "aws-p3", "--first", "0"], "first should be at least 1, got 0"),
        (["--trace", "aws-p3", "--stride", "-1"], "stride should be at least 1, got -1"),
        (["--trace", "aws-p3", "--workers", "0"], "workers should be at least 1, got 0"),
        (["--trace", "aws-p3", "--interval", "0"], "an interval is 1 to 86400 s, got 0"),
        (["--trace", "aws-p3", "--interval", "nan"], "an interval is 1 to 86400 s, got nan"),
        (["--trace", "aws-p3", "--segment", ":1h", "--interval", "1e-3"], "an interval is 1 to 86400 s, got 0.001"),
        (["--trace", "aws-p3", "--interval", "1e5"], "an interval is 1 to 86400 s, got 100000"),
        (["--trace", "aws-p3", "--segment", "1h"], "no part of a trace: '1h'"),
        (["--trace", "aws-p3", "--segment", "0h:30h"], "cannot cut"),
        (["--trace", "aws-p3", "--plot", "out.gif"], "a plot is written as .png, .pdf, .svg"),
        (["--trace", "aws-p3", "--json", "no/such/out.json"], "there is no directory no/such"),
        (["--trace", "aws-p3", "gcp-v100", "--plot", "no/such/out.png"], "there is no directory no/such"),
        (
            ["--trace", "aws-p3", "--json", "x.svg", "--plot", "x.svg"],
            "--json and --plot would both be written to x.svg",
        ),
        (
            ["--trace", "aws-p3", "--segment", "0m:20m"],
            "12 intervals ahead, after the first 12, needs 24 intervals; the trace has 20 of 60 s; "
            "--horizon 6 --first 6 would fit",
        ),
        (["--trace", "aws-p3", "--segment", "0m:2m"], "an interval of at most 40 s would fit"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert forecast(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("parcae forecast: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_what_a_message_says_would_fit_fits(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--trace", "aws-p3", "--segment", "0m:20m", "--horizon", "6", "--first", "6", "--forecaster", "events"]
    assert forecast(*options, "--workers", "1") == 0
    assert "6 intervals of 60 s ahead" in capsys.readouterr().out


def test_a_figure_without_matplotlib_says_what_to_install(
    falling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert forecast("--trace", falling, *QUICK, "--plot", str(tmp_path / "out.png")) == 2
    assert "pip install 'lightning-parcae[plot]'" in capsys.readouterr().err
