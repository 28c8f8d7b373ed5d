"""Who takes which place, and which layers move from whom to whom.

Places are an assignment problem: candidates against places, the price of a pair is the bytes of the place's stage that
the candidate lacks. Ties are broken exactly, without mixing bytes and preferences into one float: the dual prices of
the first solution say which pairs occur in *some* cheapest assignment, and the second solution chooses among these
pairs only. All places of a stage cost a candidate the same, so the dual has one price per stage and is found by
Bellman-Ford over ``P + 1`` nodes.

Symbols: ``N`` candidates, ``L`` layers, ``D`` pipelines, ``P`` stages in each, ``M = D * P`` places.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from lightning_parcae.errors import PlanError
from lightning_parcae.planning.layout import Layout
from lightning_parcae.planning.parallel_config import ParallelConfig

MigrationKind = Literal["initial", "none", "intra_stage", "inter_stage", "pipeline", "rollback"]

# Price of a pair that no cheapest assignment contains; far above any sum of preferences, small enough to stay exact.
_FORBIDDEN = 2.0**50


@dataclass(frozen=True, slots=True)
class Transfer:
    """One layer's state that goes from one instance to another.

    Attributes:
        layer: Index of the layer.
        source: Name of an instance that holds it.
        target: Name of the instance that needs it.
        num_bytes: Size of its state.
    """

    layer: int
    source: str
    target: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """A layout and how to get there. A value: it can be printed, costed, simulated and carried out.

    Attributes:
        layout: Where everyone will be.
        transfers: What moves, ordered by target and layer.
        kind: ``initial`` (nothing ran before), ``none`` (nobody changes place), ``intra_stage`` (places change, state
            does not move), ``inter_stage`` (state moves, same number of stages), ``pipeline`` (another number of
            stages) or ``rollback``.
        reason: One line for people.
    """

    layout: Layout
    transfers: tuple[Transfer, ...]
    kind: MigrationKind
    reason: str

    @property
    def num_bytes(self) -> int:
        """Bytes of state that move."""
        return sum(transfer.num_bytes for transfer in self.transfers)

    def bytes_by_source(self) -> dict[str, int]:
        """Return how many bytes each donor sends."""
        sent: dict[str, int] = {}
        for transfer in self.transfers:
            sent[transfer.source] = sent.get(transfer.source, 0) + transfer.num_bytes
        return sent

    def bytes_by_target(self) -> dict[str, int]:
        """Return how many bytes each receiver gets."""
        received: dict[str, int] = {}
        for transfer in self.transfers:
            received[transfer.target] = received.get(transfer.target, 0) + transfer.num_bytes
        return received


def decide_layout(
    *,
    generation: int,
    config: ParallelConfig,
    boundaries: Sequence[int],
    layer_bytes: Sequence[int],
    candidates: Sequence[str],
    holders: Mapping[str, Collection[int]],
    old: Layout | None,
    passengers_rank: bool,
) -> MigrationPlan:
    """Place candidates on a grid so that the fewest bytes move.

    Among the assignments that move equally few, the one in which most instances keep their old place wins, then the
    one in rank order: low ranks take places rather than high ones, along each pipeline in turn.

    Args:
        generation: Number of the new generation.
        config: Shape of the new grid.
        boundaries: Stage ``p`` holds layers ``boundaries[p] .. boundaries[p + 1] - 1``; length ``P + 1``.
        layer_bytes: State of each layer in bytes, length ``L``.
        candidates: Names that may take a place, in rank order: survivors first, joiners last.
        holders: Layers that each instance holds now. May name donors that are no candidates: instances that leave.
        old: The layout that ran before, or None.
        passengers_rank: Whether candidates without a place keep a rank (an urgent generation) or are left out (they
            become spares).

    Returns:
        The plan; its transfers never name a donor that lacks the layer.

    Raises:
        PlanError: If there are too few candidates, or nobody holds a layer that must move.
        ValueError: If the arguments contradict each other.
    """
    _check(config, boundaries, layer_bytes, candidates, holders)
    held = np.zeros((len(candidates), len(layer_bytes)), dtype=bool)  # (N, L)
    for row, name in enumerate(candidates):
        held[row, list(holders.get(name, ()))] = True
    sizes = np.asarray(layer_bytes, dtype=np.int64)
    missing = np.add.reduceat(np.where(held, 0, sizes), list(boundaries[:-1]), axis=1)  # (N, P), bytes

    same_stages = old is not None and old.boundaries == tuple(boundaries)
    indices = _indices_of_old_places(old, config) if old is not None and same_stages else {}
    kept = [indices.get(name, -1) for name in candidates]
    places = _assign(missing, config, kept)
    grid = tuple(tuple(candidates[row] for row in line) for line in places.reshape(-1, config.num_stages))
    placed = {name for line in grid for name in line}
    layout = Layout(
        generation=generation,
        grid=grid,
        order=tuple(name for name in candidates if passengers_rank or name in placed),
        boundaries=tuple(boundaries),
    )
    transfers = _spread(layout, candidates, holders, layer_bytes)
    kind = _kind(old, layout, transfers)
    return MigrationPlan(layout=layout, transfers=transfers, kind=kind, reason=_reason(old, layout, transfers, kind))


def _check(
    config: ParallelConfig,
    boundaries: Sequence[int],
    layer_bytes: Sequence[int],
    candidates: Sequence[str],
    holders: Mapping[str, Collection[int]],
) -> None:
    if len(candidates) < config.num_instances:
        raise PlanError(f"{config} needs {config.num_instances} instances, but there are {len(candidates)}")
    if len(set(candidates)) != len(candidates):
        raise ValueError(f"an instance can be a candidate once only, got {list(candidates)}")
    ends = list(boundaries)
    if len(ends) != config.num_stages + 1 or ends[0] != 0 or ends[-1] != len(layer_bytes):
        raise ValueError(
            f"{config} over {len(layer_bytes)} layers needs {config.num_stages + 1} boundaries from 0 to "
            f"{len(layer_bytes)}, got {ends}"
        )
    if any(low >= high for low, high in pairwise(ends)):
        raise ValueError(f"every stage needs at least one layer, got boundaries {ends}")
    if any(size < 0 for size in layer_bytes):
        raise ValueError(f"layer_bytes cannot be negative, got {list(layer_bytes)}")
    for name, layers in holders.items():
        if not all(0 <= layer < len(layer_bytes) for layer in layers):
            raise ValueError(f"{name} claims layers {sorted(layers)}, but the model has 0 to {len(layer_bytes) - 1}")


def _indices_of_old_places(old: Layout, config: ParallelConfig) -> dict[str, int]:
    """Return the index in the new grid, row by row, of each old place that it still has, by instance."""
    rows = old.grid[: config.num_pipelines]
    return {name: index for index, name in enumerate(name for row in rows for name in row)}


def _assign(missing: NDArray[np.int64], config: ParallelConfig, kept: Sequence[int]) -> NDArray[np.int64]:
    """Return the candidate of each place, row by row of the grid, shape ``(M,)``.

    Args:
        missing: Bytes that candidate ``n`` lacks of stage ``p``, shape ``(N, P)``.
        config: Shape of the grid.
        kept: Place that each candidate had before, or -1, length ``N``.
    """
    num_candidates, num_stages = missing.shape
    num_places = config.num_instances
    # Column j < M is place j; the others mean "no place". Stage P stands for these.
    stage_of_column = np.where(
        np.arange(num_candidates) < num_places, np.arange(num_candidates) % num_stages, num_stages
    )
    price = np.concatenate([missing, np.zeros((num_candidates, 1), dtype=np.int64)], axis=1)  # (N, P + 1)

    rows, columns = linear_sum_assignment(price[:, stage_of_column])
    stage_of_row = np.empty(num_candidates, dtype=np.int64)
    stage_of_row[rows] = stage_of_column[columns]
    tight = _tight(price, stage_of_row)  # (N, P + 1)

    ranks = np.arange(num_candidates, dtype=np.float64)
    # The larger the rank, the further back the place: by the rearrangement inequality the sorted order is the cheapest.
    preference = -np.outer(ranks, ranks)
    keeping = 2.0 * num_candidates**3  # one kept place outweighs every question of order
    for row, place in enumerate(kept):
        if place >= 0:
            preference[row, place] -= keeping
    rows, columns = linear_sum_assignment(np.where(tight[:, stage_of_column], preference, _FORBIDDEN))
    candidate_of_column = np.empty(num_candidates, dtype=np.int64)
    candidate_of_column[columns] = rows
    return candidate_of_column[:num_places]


def _tight(price: NDArray[np.int64], stage_of_row: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which (candidate, stage) pairs occur in some cheapest assignment, given one of them.

    Args:
        price: Bytes that move, shape ``(N, P + 1)``; the last column means "no place".
        stage_of_row: A cheapest assignment, shape ``(N,)``.
    """
    num_nodes = price.shape[1]
    change = price - np.take_along_axis(price, stage_of_row[:, None], axis=1)  # (N, P + 1), by moving one candidate
    far = np.iinfo(np.int64).max // 4
    edge = np.full((num_nodes, num_nodes), far, dtype=np.int64)  # (from stage, to stage)
    for stage in range(num_nodes):
        members = change[stage_of_row == stage]
        if len(members):
            edge[stage] = members.min(axis=0)
    distance = np.zeros(num_nodes, dtype=np.int64)
    while True:  # ends: a cheapest assignment leaves no negative cycle
        shorter = np.minimum(distance, (distance[:, None] + edge).min(axis=0))
        if np.array_equal(shorter, distance):
            break
        distance = shorter
    tight: NDArray[np.bool_] = change + distance[stage_of_row][:, None] == distance
    return tight


def _spread(
    layout: Layout,
    candidates: Sequence[str],
    holders: Mapping[str, Collection[int]],
    layer_bytes: Sequence[int],
) -> tuple[Transfer, ...]:
    """Choose a donor for each missing layer, so that no donor sends much more than another."""
    names = list(dict.fromkeys([*candidates, *holders]))
    held = {name: frozenset(holders.get(name, ())) for name in names}
    donors = [[name for name in names if layer in held[name]] for layer in range(layout.num_layers)]
    wanted = [
        (layer, target)
        for row in layout.grid
        for stage, target in enumerate(row)
        for layer in layout.layers_of_stage(stage)
        if layer not in held[target]
    ]
    for layer, target in wanted:
        if not donors[layer]:
            place = layout.place_of(target)
            raise PlanError(
                f"nobody holds layer {layer}, which {target} needs for stage {place[1] if place else '?'}; "
                "its state must come from a checkpoint"
            )
    load = dict.fromkeys(names, 0)
    chosen: dict[tuple[int, str], str] = {}
    # Layers with few donors first, then large ones: the rest can still be laid around them.
    for layer, target in sorted(wanted, key=lambda pair: (len(donors[pair[0]]), -layer_bytes[pair[0]])):
        source = min(donors[layer], key=lambda name: load[name])  # the first, in rank order, of the least loaded
        load[source] += layer_bytes[layer]
        chosen[layer, target] = source
    return tuple(Transfer(layer, chosen[layer, target], target, int(layer_bytes[layer])) for layer, target in wanted)


def _kind(old: Layout | None, layout: Layout, transfers: Sequence[Transfer]) -> MigrationKind:
    if old is None:
        return "initial"
    if old.config.num_stages != layout.config.num_stages:
        return "pipeline"
    if any(transfer.num_bytes for transfer in transfers):
        return "inter_stage"
    return "none" if old.grid == layout.grid and old.boundaries == layout.boundaries else "intra_stage"


def _reason(old: Layout | None, layout: Layout, transfers: Sequence[Transfer], kind: MigrationKind) -> str:
    shape = str(layout.config) if old is None else f"{old.config} -> {layout.config}"
    name = kind.replace("_", "-")
    if not transfers:
        return f"{shape}: {name}, nothing moves"
    total = sum(transfer.num_bytes for transfer in transfers)
    donors = len({transfer.source for transfer in transfers})
    targets = len({transfer.target for transfer in transfers})
    return f"{shape}: {name}, {len(transfers)} layers ({total} bytes) move from {donors} to {targets} instances"
