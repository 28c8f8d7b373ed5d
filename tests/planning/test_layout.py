"""Who holds which stage."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_parcae.planning.layout import Layout
from lightning_parcae.planning.parallel_config import ParallelConfig

LAYOUT = Layout(
    generation=4,
    grid=(("a", "b"), ("c", "d")),
    order=("b", "a", "passenger", "c", "d"),
    boundaries=(0, 3, 5),
)


def test_answers_where_everyone_is() -> None:
    assert LAYOUT.config == ParallelConfig(2, 2)
    assert LAYOUT.num_layers == 5
    assert [LAYOUT.rank_of(name) for name in ("a", "passenger")] == [1, 2]
    assert [LAYOUT.place_of(name) for name in ("a", "d", "passenger")] == [(0, 0), (1, 1), None]
    assert LAYOUT.layers_of_stage(1) == range(3, 5)
    assert [list(LAYOUT.layers_of(name)) for name in ("c", "d", "passenger")] == [[0, 1, 2], [3, 4], []]
    assert LAYOUT.replicas_of_stage(1) == ("b", "d")


def test_survives_json() -> None:
    assert Layout.from_json(json.loads(json.dumps(LAYOUT.to_json()))) == LAYOUT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": ()}, "one length of at least 1"),
        ({"grid": ((),)}, "one length of at least 1"),
        ({"grid": (("a", "b"), ("c",))}, "one length of at least 1"),
        ({"grid": (("a", "b"), ("a", "d"))}, "one place only"),
        ({"order": ("a", "a", "b", "c", "d")}, "one place only"),
        ({"order": ("a", "b", "c")}, "needs a rank"),
        ({"boundaries": (0, 5)}, "2 stages need as many non-empty runs of layers"),
        ({"boundaries": (1, 3, 5)}, "non-empty runs"),
        ({"boundaries": (0, 3, 3)}, "non-empty runs"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    fields = {"generation": 1, "grid": LAYOUT.grid, "order": LAYOUT.order, "boundaries": LAYOUT.boundaries}
    with pytest.raises(ValueError, match=message):
        Layout(**(fields | changes))


@pytest.mark.parametrize("value", [{}, {"generation": 1, "grid": 3, "order": [], "boundaries": []}])
def test_what_is_no_layout_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a layout"):
        Layout.from_json(value)
