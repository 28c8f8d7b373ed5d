"""Who holds which stage in one generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lightning_parcae.planning.parallel_config import ParallelConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """The members of a generation and their places in the grid.

    Attributes:
        generation: Version of the membership; grows with every change.
        grid: Instance names, indexed ``[pipeline][stage]``.
        order: Instance names by rank. Holds every name of the grid, and *passengers*: members without a
            place that follow the job to the next step boundary and wait there as spares.
        boundaries: Stage ``p`` holds the layers ``boundaries[p] .. boundaries[p + 1] - 1``; length ``P + 1``.
    """

    generation: int
    grid: tuple[tuple[str, ...], ...]
    order: tuple[str, ...]
    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        names = [name for row in self.grid for name in row]
        if len({len(row) for row in self.grid}) != 1 or not names:
            raise ValueError(f"the rows of a grid must have one length of at least 1, got {self.grid}")
        if len(set(names)) != len(names) or len(set(self.order)) != len(self.order):
            raise ValueError(f"an instance may take one place only, got grid {self.grid} and order {self.order}")
        if not set(names) <= set(self.order):
            raise ValueError(f"every instance of the grid needs a rank, got grid {self.grid} and order {self.order}")
        steps = self.boundaries
        if len(steps) != len(self.grid[0]) + 1 or steps[0] != 0 or any(a >= b for a, b in pairwise(steps)):
            raise ValueError(f"{len(self.grid[0])} stages need as many non-empty runs of layers, got {steps}")

    @property
    def config(self) -> ParallelConfig:
        """The shape of the grid."""
        return ParallelConfig(num_pipelines=len(self.grid), num_stages=len(self.grid[0]))

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return self.boundaries[-1]

    def rank_of(self, name: str) -> int:
        """Return the rank of a member."""
        return self.order.index(name)

    def place_of(self, name: str) -> tuple[int, int] | None:
        """Return ``(pipeline, stage)`` of an instance, or None if it has no place."""
        for pipeline, row in enumerate(self.grid):
            if name in row:
                return pipeline, row.index(name)
        return None

    def layers_of_stage(self, stage: int) -> range:
        """Return the layer indices of a stage."""
        return range(self.boundaries[stage], self.boundaries[stage + 1])

    def layers_of(self, name: str) -> range:
        """Return the layer indices an instance holds; empty without a place."""
        place = self.place_of(name)
        return range(0) if place is None else self.layers_of_stage(place[1])

    def replicas_of_stage(self, stage: int) -> tuple[str, ...]:
        """Return the instances that hold a stage, by pipeline."""
        return tuple(row[stage] for row in self.grid)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON values."""
        return {
            "generation": self.generation,
            "grid": [list(row) for row in self.grid],
            "order": list(self.order),
            "boundaries": list(self.boundaries),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Layout:
        """Build a layout from :meth:`to_json`'s values.

        Raises:
            ValueError: If the values do not form a layout.
        """
        try:
            return cls(
                generation=int(value["generation"]),
                grid=tuple(tuple(str(name) for name in row) for row in value["grid"]),
                order=tuple(str(name) for name in value["order"]),
                boundaries=tuple(int(index) for index in value["boundaries"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a layout: {value!r}") from error
