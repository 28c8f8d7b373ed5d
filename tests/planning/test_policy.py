"""The table of configurations by number of instances."""

from __future__ import annotations

import itertools

import pytest

from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.policy import lookup, most_instances_table, table_from_json, table_to_json


def brute_force(
    n: int, layers: int, max_pipelines: int, num_stages: int | None, num_pipelines: int | None, least: int, most: int
) -> ParallelConfig | None:
    fits = [
        (d * p, -p, d)
        for d, p in itertools.product(range(1, max_pipelines + 1), range(least, min(most, layers) + 1))
        if d * p <= n and num_stages in (None, p) and num_pipelines in (None, d)
    ]
    if not fits:
        return None
    _, minus_p, d = max(fits)
    return ParallelConfig(d, -minus_p)


@pytest.mark.parametrize("max_pipelines", [1, 2, 5])
@pytest.mark.parametrize(
    ("layers", "least", "most"), [(1, 1, 99), (3, 1, 99), (7, 1, 99), (1, 1, 2), (7, 1, 2), (3, 3, 4), (7, 3, 4)]
)
def test_table_equals_brute_force(layers: int, max_pipelines: int, least: int, most: int) -> None:
    for stages in [None, *range(least, min(most, layers) + 1)]:
        for pipelines in [None, *range(1, max_pipelines + 1)]:
            table = most_instances_table(
                num_layers=layers,
                max_instances=24,
                max_pipelines=max_pipelines,
                num_stages=stages,
                num_pipelines=pipelines,
                min_stages=least,
                max_stages=most,
            )
            assert table == tuple(
                brute_force(n, layers, max_pipelines, stages, pipelines, least, most) for n in range(25)
            )


def test_fully_pinned_waits_until_the_grid_is_full() -> None:
    table = most_instances_table(num_layers=8, max_instances=7, max_pipelines=4, num_stages=3, num_pipelines=2)
    assert table == (None,) * 6 + (ParallelConfig(2, 3),) * 2


def test_zero_instances_is_a_table_too() -> None:
    assert most_instances_table(num_layers=3, max_instances=0, max_pipelines=1) == (None,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"max_instances": -1}, "max_instances at least 0"),
        ({"max_pipelines": 0}, "max_pipelines"),
        ({"num_stages": 5}, "num_stages=5 is impossible: a model of 4 layers can have 1 to 4 stages"),
        ({"num_pipelines": 3}, "num_pipelines=3 is impossible: a global batch feeds 1 to 2"),
        ({"min_stages": 5}, "at least 5 stages are wanted"),
        ({"max_stages": 2, "num_stages": 3}, "1 to 2 stages"),
    ],
)
def test_contradictions_are_refused_with_the_numbers(arguments: dict[str, int], message: str) -> None:
    limits = {"num_layers": 4, "max_instances": 8, "max_pipelines": 2} | arguments
    with pytest.raises(ValueError, match=message):
        most_instances_table(**limits)


def test_lookup_beyond_the_end_keeps_the_last_entry() -> None:
    table = most_instances_table(num_layers=1, max_instances=2, max_pipelines=4)
    assert [lookup(table, n) for n in (0, 2, 9)] == [None, ParallelConfig(2, 1), ParallelConfig(2, 1)]
    assert lookup((), 3) is None
    with pytest.raises(ValueError, match="negative"):
        lookup(table, -1)


def test_tables_survive_json() -> None:
    table = most_instances_table(num_layers=3, max_instances=7, max_pipelines=2, min_stages=2)
    values = table_to_json(table)
    assert values == [None, None, [1, 2], [1, 3], [2, 2], [2, 2], [2, 3], [2, 3]]
    assert table_from_json(values) == table
    for wrong in ([[1, 1]], [None, [1, 2]], [None, [1]]):
        with pytest.raises(ValueError, match="of a table should be None or"):
            table_from_json(wrong)
