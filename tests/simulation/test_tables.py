"""A comparison as tables: the figures in them, and that they can be read where they are printed."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.simulation.result import Comparison, Migration, PolicyResult, Prices, Span
from lightning_parcae.simulation.tables import PIPED_WIDTH, comparison_rows, show

CONFIG = ParallelConfig(2, 3)
PRICES = Prices(spot=1.0, on_demand=3.0)


def result(policy: str, trained_s: float, *, seed: int = 0, trace: str = "here", **more: Any) -> PolicyResult:
    """Return 1000 s in which 10 samples/s were trained for a while, and then nothing."""
    spans = (Span(0.0, trained_s, CONFIG, 10.0), Span(trained_s, 1000.0, CONFIG, 0.0, "pipeline"))
    kept = tuple(span for span in spans if span.duration_s > 0)
    moves = (Migration(trained_s, "pipeline", CONFIG, CONFIG, 1000.0 - trained_s),) * (len(kept) - 1)
    return PolicyResult(policy, trace, "toy", seed, 1000.0, kept, moves, 10.0 * trained_s, 3600.0, **more)


def text(comparison: Comparison, width: int = PIPED_WIDTH) -> str:
    stream = io.StringIO()
    show(comparison, Console(file=stream, width=width))
    return stream.getvalue()


FULL = Comparison(
    (result("liveput", 800.0), result("ondemand", 900.0, uses_on_demand=True), result("bound", 1000.0)),
    prices=PRICES,
    tokens_per_sample=100,
    settings={"accounting": "job", "notice_s": 0.0},
)


def test_rows_compare_with_the_bound_and_with_on_demand() -> None:
    liveput, ondemand, bound = comparison_rows(FULL, "here")
    assert (liveput.policy, liveput.samples_per_s, liveput.tokens_per_s) == ("liveput", 8.0, 800.0)
    assert liveput.of_bound == pytest.approx(0.8) and bound.of_bound == 1.0
    assert liveput.of_on_demand == pytest.approx(8 / 9)
    assert liveput.goodput == pytest.approx(0.8) and dict(liveput.lost) == {"pipeline": pytest.approx(0.2)}
    assert (liveput.num_migrations, bound.num_migrations) == (1, 0)
    assert (liveput.dollars, ondemand.dollars) == (1.0, 3.0)
    assert liveput.dollars_per_million == pytest.approx(1e6 / 8000)
    assert liveput.spread is None


def test_seeds_are_one_row_of_means() -> None:
    runs = Comparison((result("liveput", 600.0), result("liveput", 800.0, seed=1)), prices=PRICES)
    (row,) = comparison_rows(runs, "here")
    assert (row.num_runs, row.samples_per_s, row.goodput) == (2, 7.0, pytest.approx(0.7))
    assert row.spread == pytest.approx(2**0.5)
    assert row.dollars_per_million == pytest.approx(1e6 / 7000)
    assert (row.of_bound, row.of_on_demand) == (None, None)
    assert "7 +-1.4" in text(runs)


def test_nothing_trained_has_no_price_per_sample() -> None:
    (row,) = comparison_rows(Comparison((result("liveput", 0.0),), prices=PRICES), "here")
    assert (row.dollars, row.dollars_per_million) == (1.0, None)


def test_a_trace_that_was_not_simulated_is_named() -> None:
    with pytest.raises(ValueError, match="nothing was simulated on the trace 'there', only on here"):
        comparison_rows(FULL, "there")


def test_the_tables_say_everything_within_the_width() -> None:
    lines = text(FULL).splitlines()
    assert max(map(len, lines)) <= PIPED_WIDTH
    assert lines[0].rstrip() == "toy on here, 16.7 min"
    (liveput, lost) = [line.split() for line in lines if line.startswith("liveput")]
    assert liveput == ["liveput", "8", "800", "80.0%", "1", "88.9%", "1.00", "125.00", "37.5%"]
    assert lost == ["liveput", "80.00", "20.00"]
    whole = " ".join(text(FULL).split())
    assert "Simulated, not measured. Accounting 'job': the package's coordinator and planner" in whole
    assert "Instances vanish without notice." in whole


def test_what_is_not_known_has_no_column() -> None:
    whole = text(Comparison((result("liveput", 1000.0),), settings={"accounting": "reference", "notice_s": 30.0}))
    assert not [word for word in ("$", "tokens", "bound", "on-", "pipeline") if word in whole]
    assert "no time was lost" in whole and "Notice 30 s" in whole


def test_the_widest_table_is_cut_nowhere_at_100_columns() -> None:
    causes = ("waiting", "start", "intra_stage", "inter_stage", "pipeline", "restart", "rollback", "redo")
    spans = tuple(Span(100.0 * index, 100.0 * index + 100.0, CONFIG, 0.0, cause) for index, cause in enumerate(causes))
    busy = Span(800.0, 1000.0, CONFIG, 123456.0)
    names = ("liveput", "ondemand", "elastic_restart", "bound")
    results = tuple(
        PolicyResult(name, "here", "toy", seed, 1000.0, (*spans, busy), (), samples, 3.6e8, name == "ondemand")
        for name in names
        for seed, samples in ((0, 2.4e7), (1, 2.5e7))
    )
    whole = text(Comparison(results, PRICES, 1024, {"accounting": "job"}))
    assert "\u2026" not in whole and max(map(len, whole.splitlines())) <= PIPED_WIDTH
    assert all(whole.count(name) == 2 for name in names[1:3])


@pytest.mark.parametrize("width", [80, 60])
def test_narrow_terminals_have_the_other_columns_below(width: int) -> None:
    causes = ("waiting", "start", "intra_stage", "inter_stage", "pipeline", "restart", "rollback", "redo")
    spans = tuple(Span(100.0 * index, 100.0 * index + 100.0, CONFIG, 0.0, cause) for index, cause in enumerate(causes))
    busy = Span(800.0, 1000.0, CONFIG, 123456.0)
    names = ("liveput", "ondemand", "elastic_restart", "bound")
    results = tuple(
        PolicyResult(name, "here", "toy", seed, 1000.0, (*spans, busy), (), samples, 3.6e8, name == "ondemand")
        for name in names
        for seed, samples in ((0, 2.4e7), (1, 2.5e7))
    )
    comparison = Comparison(results, PRICES, 1024, {"accounting": "job"})
    narrow, wide = text(comparison, width), text(comparison)
    assert "\u2026" not in narrow and max(map(len, narrow.splitlines())) <= width

    def cells(printed: str) -> list[str]:
        """Return all cells of one policy's rows but its name."""
        rows = [line.split() for line in printed.splitlines()]
        return [cell for row in rows if row[:1] == ["elastic_restart"] for cell in row[1:]]

    assert cells(narrow) == cells(wide) and len(cells(wide)) > 15


def test_notes_are_told_once() -> None:
    runs = (result("liveput", 800.0, notes=("as it is",)), result("fixed", 700.0, notes=("as it is", "slow")))
    lines = text(Comparison(runs)).splitlines()
    assert [line.rstrip() for line in lines[-2:]] == ["liveput, fixed: as it is", "fixed: slow"]


def test_each_trace_has_its_own_tables() -> None:
    both = text(Comparison((result("bound", 1000.0), result("bound", 500.0, trace="there"))))
    assert "toy on here" in both and "toy on there" in both
