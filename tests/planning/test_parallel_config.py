"""A grid of instances."""

from __future__ import annotations

import pytest

from lightning_parcae.planning.parallel_config import ParallelConfig


def test_counts_and_prints_itself() -> None:
    config = ParallelConfig(num_pipelines=3, num_stages=4)
    assert config.num_instances == 12
    assert str(config) == "3x4"


def test_sorts_by_pipelines_then_stages() -> None:
    grids = [ParallelConfig(2, 1), ParallelConfig(1, 9), ParallelConfig(1, 2)]
    assert sorted(grids) == [ParallelConfig(1, 2), ParallelConfig(1, 9), ParallelConfig(2, 1)]


@pytest.mark.parametrize(("pipelines", "stages"), [(0, 1), (1, 0), (-1, 2)])
def test_empty_grid_is_refused(pipelines: int, stages: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1 pipeline and 1 stage, got {pipelines} x {stages}"):
        ParallelConfig(pipelines, stages)
