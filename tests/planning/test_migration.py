"""Assignment of instances to places: optimal against brute force, ties, donors, kinds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping, Sequence

import pytest

from lightning_parcae.errors import PlanError
from lightning_parcae.planning.layout import Layout
from lightning_parcae.planning.migration import MigrationPlan, decide_layout
from lightning_parcae.planning.parallel_config import ParallelConfig


def even(num_layers: int, num_stages: int) -> tuple[int, ...]:
    return tuple(num_layers * stage // num_stages for stage in range(num_stages + 1))


def decide(
    config: ParallelConfig,
    candidates: Sequence[str],
    holders: Mapping[str, Collection[int]],
    *,
    layer_bytes: Sequence[int],
    old: Layout | None = None,
    passengers_rank: bool = False,
) -> MigrationPlan:
    return decide_layout(
        generation=7,
        config=config,
        boundaries=even(len(layer_bytes), config.num_stages),
        layer_bytes=layer_bytes,
        candidates=candidates,
        holders=holders,
        old=old,
        passengers_rank=passengers_rank,
    )


def layout_of(grid: Sequence[Sequence[str]], num_layers: int) -> Layout:
    rows = tuple(tuple(row) for row in grid)
    order = tuple(name for row in rows for name in row)
    return Layout(generation=6, grid=rows, order=order, boundaries=even(num_layers, len(rows[0])))


def held_by(layout: Layout) -> dict[str, range]:
    return {name: layout.layers_of(name) for name in layout.order}


def objective(
    plan_grid: Sequence[str], boundaries: Sequence[int], config: ParallelConfig, **facts: object
) -> tuple[int, ...]:
    """Bytes moved, then minus the places kept, then minus the agreement of ranks and places."""
    candidates: Sequence[str] = facts["candidates"]  # type: ignore[assignment]
    holders: Mapping[str, Collection[int]] = facts["holders"]  # type: ignore[assignment]
    layer_bytes: Sequence[int] = facts["layer_bytes"]  # type: ignore[assignment]
    old: Layout | None = facts["old"]  # type: ignore[assignment]
    moved = kept = agreement = 0
    for index, name in enumerate(plan_grid):
        pipeline, stage = divmod(index, config.num_stages)
        layers = range(boundaries[stage], boundaries[stage + 1])
        moved += sum(layer_bytes[layer] for layer in layers if layer not in holders.get(name, ()))
        kept += old is not None and old.boundaries == tuple(boundaries) and old.place_of(name) == (pipeline, stage)
        agreement += candidates.index(name) * index
    spares = sorted(rank for rank, name in enumerate(candidates) if name not in plan_grid)
    agreement += sum(rank * index for index, rank in enumerate(spares, start=len(plan_grid)))
    return moved, -kept, -agreement


@pytest.mark.parametrize("seed", range(60))
def test_assignment_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    num_layers = rng.randint(2, 6)
    config = ParallelConfig(rng.randint(1, 3), rng.randint(1, min(2, num_layers)))
    names = [f"i{index}" for index in range(config.num_instances + rng.randint(0, 2))]
    rng.shuffle(names)
    layer_bytes = [rng.choice([0, 1, 7, 10**11]) for _ in range(num_layers)]
    holders = {name: [layer for layer in range(num_layers) if rng.random() < 0.5] for name in names}
    holders["donor"] = list(range(num_layers))
    old = None
    if rng.random() < 0.7:
        stages = rng.randint(1, min(2, num_layers))
        known = rng.sample([*names, "gone1", "gone2"], k=stages * rng.randint(1, len(names) // stages))
        old = layout_of([known[i : i + stages] for i in range(0, len(known), stages)], num_layers)

    plan = decide(config, names, holders, layer_bytes=layer_bytes, old=old)

    facts = {"candidates": names, "holders": holders, "layer_bytes": layer_bytes, "old": old}
    boundaries = even(num_layers, config.num_stages)
    best = min(
        objective(grid, boundaries, config, **facts) for grid in itertools.permutations(names, config.num_instances)
    )
    flat = [name for row in plan.layout.grid for name in row]
    assert objective(flat, boundaries, config, **facts) == best
    assert plan.num_bytes == best[0]
    for transfer in plan.transfers:
        assert transfer.layer in holders[transfer.source]
        assert transfer.layer not in holders[transfer.target]
        assert transfer.layer in plan.layout.layers_of(transfer.target)
        assert transfer.num_bytes == layer_bytes[transfer.layer]
    needed = {(name, layer) for name in flat for layer in plan.layout.layers_of(name) if layer not in holders[name]}
    assert {(transfer.target, transfer.layer) for transfer in plan.transfers} == needed
    assert len(plan.transfers) == len(needed)


def test_first_generation_is_in_rank_order_and_moves_nothing() -> None:
    names = [f"i{index}" for index in range(5)]
    plan = decide(ParallelConfig(2, 2), names, {name: range(4) for name in names}, layer_bytes=[10] * 4)
    assert plan.layout.grid == (("i0", "i1"), ("i2", "i3"))
    assert plan.layout.order == ("i0", "i1", "i2", "i3")
    assert (plan.kind, plan.transfers, plan.layout.generation) == ("initial", (), 7)


def test_passengers_keep_a_rank_only_if_asked() -> None:
    names = ["a", "b", "c"]
    holders = {name: range(2) for name in names}
    urgent = decide(ParallelConfig(1, 2), names, holders, layer_bytes=[1, 1], passengers_rank=True)
    planned = decide(ParallelConfig(1, 2), names, holders, layer_bytes=[1, 1], passengers_rank=False)
    assert urgent.layout.order == ("a", "b", "c")
    assert planned.layout.order == ("a", "b")


def test_intra_stage_migration_fills_a_gap_without_moving_state() -> None:
    old = layout_of([["a", "b"], ["c", "d"], ["e", "f"]], 4)
    holders = {name: layers for name, layers in held_by(old).items() if name not in ("a", "d")}
    plan = decide(ParallelConfig(2, 2), ["b", "c", "e", "f"], holders, layer_bytes=[5] * 4, old=old)
    assert plan.layout.grid == (("e", "b"), ("c", "f"))  # b and c stay where they were
    assert (plan.kind, plan.transfers) == ("intra_stage", ())


def test_inter_stage_migration_moves_one_stage_only() -> None:
    old = layout_of([["a", "b"], ["c", "d"], ["e", "f"]], 4)
    survivors = ["b", "d", "e", "f"]  # a and c, two replicas of stage 0, are gone
    holders = {name: layers for name, layers in held_by(old).items() if name in survivors}
    plan = decide(ParallelConfig(2, 2), survivors, holders, layer_bytes=[5] * 4, old=old)
    assert plan.kind == "inter_stage"
    assert plan.num_bytes == 10
    assert {transfer.source for transfer in plan.transfers} == {"e"}


def test_pipeline_migration_changes_the_number_of_stages() -> None:
    old = layout_of([["a", "b"], ["c", "d"]], 4)
    plan = decide(ParallelConfig(1, 3), ["a", "b", "c"], held_by(old), layer_bytes=[1, 2, 3, 4], old=old)
    assert plan.kind == "pipeline"
    assert "2x2 -> 1x3" in plan.reason


def test_nothing_to_do_is_kind_none() -> None:
    old = layout_of([["a", "b"], ["c", "d"]], 4)
    plan = decide(ParallelConfig(2, 2), ["a", "b", "c", "d"], held_by(old), layer_bytes=[1] * 4, old=old)
    assert (plan.kind, plan.layout.grid, plan.transfers) == ("none", old.grid, ())


def test_a_joiner_takes_the_empty_place_and_is_served_by_every_replica() -> None:
    old = layout_of([["a"], ["b"]], 6)
    plan = decide(ParallelConfig(3, 1), ["a", "b", "new"], held_by(old), layer_bytes=[4] * 6, old=old)
    assert plan.layout.grid == (("a",), ("b",), ("new",))
    assert plan.bytes_by_source() == {"a": 12, "b": 12}
    assert plan.bytes_by_target() == {"new": 24}


def test_a_leaving_donor_serves_but_takes_no_place() -> None:
    old = layout_of([["a", "b"]], 4)
    plan = decide(ParallelConfig(1, 2), ["b", "new"], held_by(old), layer_bytes=[3] * 4, old=old)
    assert plan.layout.grid == (("new", "b"),)
    assert {transfer.source for transfer in plan.transfers} == {"a"}
    assert "a" not in plan.layout.order


def test_donors_are_spread_around_a_scarce_layer() -> None:
    # Layer 0 is on one donor only; the others hold layers 1 and 2 too, so they should serve these.
    holders = {"new": [], "x": [0, 1, 2], "y": [1, 2]}
    plan = decide(ParallelConfig(1, 1), ["new"], holders, layer_bytes=[8, 4, 4])
    assert plan.bytes_by_source() == {"x": 8, "y": 8}


def test_large_clusters_are_quick_and_move_no_more_than_they_must() -> None:
    num_layers, stages = 48, 12
    names = [f"i{index}" for index in range(480)]
    old = layout_of([names[row * stages : (row + 1) * stages] for row in range(40)], num_layers)
    survivors = [name for index, name in enumerate(names) if index % 37]
    holders = {name: layers for name, layers in held_by(old).items() if name in survivors}
    plan = decide(ParallelConfig(38, 12), survivors, holders, layer_bytes=[10**9] * num_layers, old=old)
    left = [sum(name in holders for name in old.replicas_of_stage(stage)) for stage in range(stages)]
    assert plan.num_bytes == sum(max(0, 38 - count) for count in left) * 4 * 10**9


def test_too_few_candidates_is_a_plan_error() -> None:
    with pytest.raises(PlanError, match="2x2 needs 4 instances, but there are 3"):
        decide(ParallelConfig(2, 2), ["a", "b", "c"], {}, layer_bytes=[1] * 4)


def test_state_that_nobody_holds_is_a_plan_error_naming_it() -> None:
    with pytest.raises(PlanError, match="nobody holds layer 1, which b needs for stage 1"):
        decide(ParallelConfig(1, 2), ["a", "b"], {"a": [0], "b": [0]}, layer_bytes=[5, 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidates": ["a", "a"]}, "once only"),
        ({"boundaries": (0, 3)}, "needs 2 boundaries from 0 to 2"),
        ({"boundaries": (0, 1, 2)}, "needs 2 boundaries"),
        ({"layer_bytes": [1, -1]}, "cannot be negative"),
        ({"holders": {"a": [2]}}, "a claims layers"),
        ({"config": ParallelConfig(1, 2), "boundaries": (0, 0, 2)}, "at least one layer"),
    ],
)
def test_contradicting_arguments_are_refused(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "generation": 1,
        "config": ParallelConfig(1, 1),
        "boundaries": (0, 2),
        "layer_bytes": [1, 1],
        "candidates": ["a", "b"],
        "holders": {"a": [0, 1]},
        "old": None,
        "passengers_rank": False,
    }
    with pytest.raises(ValueError, match=message):
        decide_layout(**(arguments | changes))  # type: ignore[arg-type]
