"""A choice of data-parallel and pipeline degree.

Symbols: ``D`` pipelines (data-parallel replicas), ``P`` stages in each.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class ParallelConfig:
    """A grid of ``num_pipelines`` x ``num_stages`` instances.

    Attributes:
        num_pipelines: Data-parallel pipelines ``D``, at least 1.
        num_stages: Stages ``P`` of each pipeline, at least 1.
    """

    num_pipelines: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.num_pipelines < 1 or self.num_stages < 1:
            raise ValueError(
                f"a configuration needs at least 1 pipeline and 1 stage, got {self.num_pipelines} x {self.num_stages}"
            )

    @property
    def num_instances(self) -> int:
        """Instances in the grid, ``D * P``."""
        return self.num_pipelines * self.num_stages

    def __str__(self) -> str:
        return f"{self.num_pipelines}x{self.num_stages}"
