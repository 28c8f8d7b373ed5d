"""The arrays a plan chooses from."""

from __future__ import annotations

import pytest

from lightning_parcae.planning.cost import MeasuredCost, expected_pause_s
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import ThroughputProfile, best_config
from lightning_parcae.planning.space import ConfigSpace

RATES = {ParallelConfig(d, p): 10.0 * d * p / (p + 1) - d for d in range(1, 5) for p in range(1, 5)}
PROFILE = ThroughputProfile("toy", {config: rate for config, rate in RATES.items() if rate > 0})
COST = MeasuredCost(layer_bytes=(10**8,) * 8)


def test_entries_follow_the_profile() -> None:
    space = ConfigSpace(PROFILE, COST, max_instances=9)
    assert space.configs[0] is None
    assert set(space.configs[1:]) == set(PROFILE.configs(9))
    for config in PROFILE.configs(9):
        entry = space.index(config)
        assert (space.rates[entry], space.sizes[entry]) == (PROFILE.samples_per_s(config), config.num_instances)
    for count in range(12):
        assert space.configs[space.fastest(count)] == best_config(PROFILE, min(count, 9))


def test_waiting_costs_nothing_and_starting_what_a_start_costs() -> None:
    space = ConfigSpace(PROFILE, COST, max_instances=6)
    pauses = space.pauses_s(6, 2)
    assert (pauses[:, 0] == 0).all()
    assert pauses[0, 1:] == pytest.approx(COST.initial(space.configs[1:]))  # type: ignore[arg-type]
    old, new = ParallelConfig(2, 2), ParallelConfig(1, 3)
    exact = expected_pause_s(COST, old, new, num_instances=6, num_lost=2)
    assert pauses[space.index(old), space.index(new)] == pytest.approx(exact)
    assert space.pauses_s(6, 2) is pauses
    assert space.pauses_s(5, 0) is space.pauses_s(6, 0)


def test_pruning_keeps_the_best_of_every_size_and_what_it_is_told_to() -> None:
    kept = ParallelConfig(1, 1)
    space = ConfigSpace(PROFILE, COST, max_instances=16, min_instances=8, keep=(kept,), prune_below=0.85)
    whole = ConfigSpace(PROFILE, COST, max_instances=16)
    assert 2 < len(space) < len(whole)
    assert kept in space.configs
    for count in range(8, 17):
        assert best_config(PROFILE, count) in space.configs
        assert space.configs[space.fastest(count)] == best_config(PROFILE, count)


def test_nothing_fits_is_a_space_too() -> None:
    space = ConfigSpace(ThroughputProfile("none", {}), COST, max_instances=3, prune_below=0.5)
    assert space.configs == (None,)
    assert space.pauses_s(3, 1).tolist() == [[0.0]]
    assert space.fastest(3) == 0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="min_instances <= max_instances"):
        ConfigSpace(PROFILE, COST, max_instances=3, min_instances=4)
