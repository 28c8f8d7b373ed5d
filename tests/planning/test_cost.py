"""Expected pauses equal the mean over every possible set of victims."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest

from lightning_parcae.planning.cost import (
    MeasuredCost,
    ReferenceCost,
    expected_pause_s,
    victims_in_grids,
    worst_losses,
)
from lightning_parcae.planning.liveput import fewest_replicas
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.simulation.workload import read_workload

LINK = ((0.0, 0.5), (100.0, 1.0), (1000.0, 12.0))


def reference(rule: dict[str, object] | None = None) -> ReferenceCost:
    return ReferenceCost(
        layer_params=(9.0, 5.0, 5.0, 5.0, 5.0, 2.0, 7.0),
        link=LINK,
        build_s={stages: 0.1 * stages for stages in range(1, 7)},
        process_s=0.24,
        rendezvous_s=6.6,
        group_s=rule if rule is not None else {"per_group_add_s": 0.5, "per_group_remove_s": 0.04},
        group_base_s=0.035,
    )


def reference_pause(cost: ReferenceCost, old: ParallelConfig, new: ParallelConfig, victims: tuple[int, ...]) -> float:
    """Price one set of victims by the rules of facts/parcae.md section 4, one step after the other."""
    depth, stages, target = old.num_pipelines, old.num_stages, new.num_pipelines
    if not victims and old == new:
        return 0.0
    restart = cost.restart_s(new, grows=new.num_instances > old.num_instances - len(victims))
    grid = [victim for victim in victims if victim < old.num_instances]
    old_edges, new_edges = cost.boundaries(stages), cost.boundaries(new.num_stages)
    state = [12 * sum(cost.layer_params[low:high]) for low, high in itertools.pairwise(new_edges)]
    if new.num_stages == stages:
        left = [depth - sum(victim % stages == stage for victim in grid) for stage in range(stages)]
        if min(left) >= target:
            return cost.intra_stage_s(new)
        slowest = serial = 0.0
        for stage, alive in enumerate(left):
            needed = max(target - alive, 0)
            if needed:
                slowest = max(slowest, cost.transfer_s(state[stage]))
                if needed == target or (stage == stages - 1 and needed == target - 1):
                    serial += cost.transfer_s(state[stage])
        return max(slowest, serial) + restart
    free = [place for place in range(old.num_instances) if place not in grid]
    missing = 0.0
    for low, high in itertools.pairwise(new_edges):

        def lacks(place: int, low: int = low, high: int = high) -> float:
            held = range(old_edges[place % stages], old_edges[place % stages + 1])
            return sum(cost.layer_params[layer] for layer in range(low, high) if layer not in held)

        if free:
            best = min(free, key=lacks)
            missing = lacks(best)
            free.remove(best)
    pause = cost.transfer_s(12 * missing) + restart
    return pause + (max(cost.transfer_s(size) for size in state) if target > 1 else 0.0)


OLD = [ParallelConfig(1, 3), ParallelConfig(2, 2), ParallelConfig(2, 3), ParallelConfig(3, 2)]
NEW = [ParallelConfig(d, p) for d in range(1, 4) for p in range(1, 5) if d * p <= 8]


@pytest.mark.parametrize("old", OLD)
@pytest.mark.parametrize(("spares", "num_lost"), [(0, 0), (0, 1), (2, 1), (1, 2), (0, 3), (2, 4)])
def test_reference_pauses_equal_enumeration(old: ParallelConfig, spares: int, num_lost: int) -> None:
    cost = reference()
    present = old.num_instances + spares
    configs = tuple(dict.fromkeys([old, *NEW]))
    if num_lost > 2:  # beyond two victims the greedy match is sampled, see the next test
        configs = tuple(config for config in configs if config.num_stages == old.num_stages)
    got = cost.matrix(configs, present, num_lost)[0]
    for column, new in enumerate(configs):
        pauses = [
            reference_pause(cost, old, new, victims) for victims in itertools.combinations(range(present), num_lost)
        ]
        assert got[column] == pytest.approx(np.mean(pauses), rel=1e-9), new


def test_sampled_match_is_close() -> None:
    cost, old = reference(), ParallelConfig(3, 3)
    for new in (ParallelConfig(2, 2), ParallelConfig(1, 4), ParallelConfig(3, 1)):
        pauses = [reference_pause(cost, old, new, victims) for victims in itertools.combinations(range(10), 3)]
        got = expected_pause_s(cost, old, new, num_instances=10, num_lost=3)
        assert got == pytest.approx(np.mean(pauses), rel=0.05)


def test_reference_rules_for_groups_and_transfers() -> None:
    cost = reference()
    assert [cost.transfer_s(size) for size in (0.0, 50.0, 100.0, 550.0, 2000.0)] == [0.5, 0.75, 1.0, 6.5, 24.0]
    assert cost.boundaries(4) == (0, 2, 4, 6, 7)
    assert cost.groups_s(ParallelConfig(2, 3), grows=True) == pytest.approx(0.035 + 12 * 0.5)
    per_instance = reference({"per_instance_add_s": 0.44, "per_instance_remove_s": 0.34})
    assert per_instance.groups_s(ParallelConfig(2, 3), grows=False) == pytest.approx(0.035 + 6 * 0.34)
    steps = reference({"by_pipelines_s": [[1, 1.0], [6, 1.5], [12, 2.0]], "add_factor": 1.5})
    times = [steps.groups_s(ParallelConfig(depth, 2), grows=True) for depth in (5, 6, 12)]
    assert times == pytest.approx([1.535, 2.285, 3.035])
    first = expected_pause_s(cost, None, ParallelConfig(1, 2), num_instances=3)
    assert first == pytest.approx(0.5 + cost.restart_s(ParallelConfig(1, 2), grows=True))
    assert cost.overlap((ParallelConfig(1, 2),)).tolist() == [cost.restart_s(ParallelConfig(1, 2), grows=False)]


def measured_pause(cost: MeasuredCost, old: ParallelConfig, new: ParallelConfig, victims: tuple[int, ...]) -> float:
    grid = [victim for victim in victims if victim < old.num_instances]
    if not grid and old == new:
        return 0.0
    pause = cost.formation_s + cost.build_s + (cost.detection_s if grid and not cost.is_announced else 0.0)
    gone = Counter(victim % old.num_stages for victim in grid)
    left = old.num_pipelines - max(gone.values(), default=0)
    donors = old.num_pipelines if cost.is_announced else max(left, 1)
    count = len(cost.layer_bytes)
    edges = [
        cost.boundaries.get(
            config.num_stages, tuple(count * i // config.num_stages for i in range(config.num_stages + 1))
        )
        for config in (old, new)
    ]
    if left == 0 and not cost.is_announced:
        pause += cost.rollback_s
    largest = max(sum(cost.layer_bytes[low:high]) for low, high in itertools.pairwise(edges[1]))
    if new.num_stages == old.num_stages:
        rounds = math.ceil(max(new.num_pipelines - left, 0) / donors)
        return pause + rounds * largest / cost.bytes_per_s
    lacks = [
        min(
            sum(cost.layer_bytes[layer] for layer in range(low, high) if not held[0] <= layer < held[1])
            for held in itertools.pairwise(edges[0])
        )
        for low, high in itertools.pairwise(edges[1])
    ]
    moved = max(lacks) * math.ceil(new.num_pipelines / donors)
    if new.num_instances > old.num_instances - len(grid):
        moved = max(moved, largest)  # somebody had no place
    return pause + moved / cost.bytes_per_s


@pytest.mark.parametrize("old", OLD)
@pytest.mark.parametrize(("spares", "num_lost"), [(0, 0), (2, 1), (1, 2), (2, 4), (1, 3)])
@pytest.mark.parametrize("is_announced", [False, True])
def test_measured_pauses_equal_enumeration(old: ParallelConfig, spares: int, num_lost: int, is_announced: bool) -> None:
    cost = MeasuredCost(
        layer_bytes=(9, 5, 5, 1, 5, 2, 7), boundaries={3: (0, 1, 5, 7)}, bytes_per_s=10.0, is_announced=is_announced
    )
    present = old.num_instances + spares
    configs = tuple(dict.fromkeys([old, *NEW]))
    got = cost.matrix(configs, present, num_lost)[0]
    for column, new in enumerate(configs):
        pauses = [
            measured_pause(cost, old, new, victims) for victims in itertools.combinations(range(present), num_lost)
        ]
        assert got[column] == pytest.approx(np.mean(pauses), rel=1e-9), new


def test_measured_terms_can_be_replaced_and_saved() -> None:
    cost = MeasuredCost(layer_bytes=(10, 20), boundaries={2: (0, 1, 2)})
    old, new = ParallelConfig(2, 2), ParallelConfig(1, 2)
    before = expected_pause_s(cost, old, new, num_instances=4, num_lost=1)
    slower = cost.with_terms(formation_s=1.2)
    assert expected_pause_s(slower, old, new, num_instances=4, num_lost=1) == pytest.approx(before + 1.0)
    assert expected_pause_s(cost, old, new, num_instances=4, num_lost=1) == before
    assert MeasuredCost.from_json(json.loads(json.dumps(slower.to_json()))) == slower
    assert expected_pause_s(cost, None, new, num_instances=4) == pytest.approx(0.25)
    assert cost.overlap((new,)).tolist() == [0.2]
    for wrong in ({}, {"layer_bytes": [1], "colour": 3}, {"layer_bytes": [1], "boundaries": 3}):
        with pytest.raises(ValueError, match="not a migration cost"):
            MeasuredCost.from_json(wrong)
    with pytest.raises(ValueError, match="bandwidth above 0"):
        MeasuredCost(layer_bytes=(1,), bytes_per_s=0.0)


@pytest.mark.parametrize(("present", "num_lost"), [(5, 0), (5, 2), (9, 4), (6, 6)])
def test_victims_in_grids_are_hypergeometric(present: int, num_lost: int) -> None:
    sizes = np.array([0, 1, 3, 5, 20])
    got = victims_in_grids(present, sizes, num_lost)
    for row, size in enumerate(sizes):
        inside = min(int(size), present)
        expected = [
            math.comb(inside, count) * math.comb(present - inside, num_lost - count) / math.comb(present, num_lost)
            for count in range(num_lost + 1)
        ]
        assert got[row] == pytest.approx(expected, abs=1e-12)
    with pytest.raises(ValueError, match="cannot be lost"):
        victims_in_grids(present, sizes, present + 1)


@pytest.mark.parametrize(
    ("model", "config", "intra", "addition"),
    [
        ("gpt-1.5b", (4, 8), 2.0, 35.8),
        ("gpt-1.5b", (2, 13), 1.9, 32.2),
        ("gpt-6.7b", (1, 13), 3.5, 38.1),
        ("bert", (8, 4), 1.6, 11.5),
        ("resnet152", (16, 2), 2.1, 13.6),
        ("vgg19", (16, 2), 11.0, 24.6),
    ],
)
def test_reference_totals_are_those_of_the_facts(
    model: str, config: tuple[int, int], intra: float, addition: float
) -> None:
    cost = read_workload(model).reference_cost
    assert cost is not None
    grid = ParallelConfig(*config)
    assert cost.intra_stage_s(grid) == pytest.approx(intra, abs=0.06)
    # An addition: the grid grows by one pipeline, or stays and is joined anew, plus the slowest stage.
    edges = cost.boundaries(grid.num_stages)
    slowest = max(cost.transfer_s(12 * sum(cost.layer_params[low:high])) for low, high in itertools.pairwise(edges))
    assert cost.restart_s(grid, grows=True) + slowest == pytest.approx(addition, abs=0.06)
    with pytest.raises(ValueError, match="no model 'x'"):
        ReferenceCost.from_reference({"models": {}}, "x")


def test_a_restart_from_a_checkpoint_loads_every_stage_and_the_first_one_none() -> None:
    cost, config = reference(), ParallelConfig(2, 3)
    edges = cost.boundaries(3)
    stages = sum(cost.transfer_s(12 * sum(cost.layer_params[low:high])) for low, high in itertools.pairwise(edges))
    restart_s = cost.restart_s(config, grows=True)
    assert cost.reload_s(config, grows=True, is_first=True) == pytest.approx(restart_s + stages)
    assert cost.reload_s(config, grows=True, is_first=False) == pytest.approx(restart_s + stages + 14.0)


@pytest.mark.parametrize("victims", [0, 1, 3, 8, 9, 12, 40])
def test_worst_losses_are_those_of_the_fewest_replicas(victims: int) -> None:
    configs = tuple(ParallelConfig(d, p) for d, p in ((1, 1), (1, 7), (5, 1), (2, 3), (7, 4), (60, 16)))
    got = worst_losses(configs, victims)
    for row, config in enumerate(configs):
        lost = min(victims, config.num_instances)
        left = fewest_replicas([config.num_pipelines] * config.num_stages, 0, lost)
        expected = np.zeros(got.shape[1])
        expected[: len(left)] = left[::-1][: got.shape[1]]
        assert got[row] == pytest.approx(expected, abs=1e-12), config
