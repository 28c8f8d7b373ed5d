"""The guard bounds what planning may lose, whatever the planner wants."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_parcae.planning.cost import MeasuredCost
from lightning_parcae.planning.guard import Guard
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.replay import MembershipStep, PairPauses, Running, settle

FAST, SLOW = ParallelConfig(2, 2), ParallelConfig(1, 2)
RATES = {FAST: 10.0, SLOW: 6.0, None: 0.0}
COST = MeasuredCost(layer_bytes=(10,) * 4, formation_s=3.0)
QUIET = MembershipStep(4, 0, 0)


def guard() -> Guard:
    return Guard(RATES.__getitem__, PairPauses(COST), interval_s=60.0)


def trained(configs: list[ParallelConfig | None]) -> float:
    running, total, pauses = Running(), 0.0, PairPauses(COST)
    for config in configs:
        pause_s, overlap_s = pauses(running.config, config, QUIET)
        running, paused_s = settle(running, config, pause_s, overlap_s, interval_s=60.0)
        total += RATES[config] * (60.0 - paused_s)
    return total


@pytest.mark.parametrize("seed", range(6))
def test_a_planner_without_sense_loses_little(seed: int) -> None:
    rng = np.random.default_rng(seed)
    wanted = [(FAST, SLOW, None)[index] for index in rng.integers(0, 3, size=400)]
    watch = guard()
    followed = [watch.follow(config, FAST, QUIET) for config in wanted]
    reacting = trained([FAST] * 400)
    assert trained(wanted) < 0.8 * reacting
    # An interval until it is noticed, and a migration.
    assert trained(followed) > reacting - 2 * 600.0
    assert watch.reacts


def test_a_planner_that_is_ahead_is_followed_and_one_that_catches_up_is_followed_again() -> None:
    watch = guard()
    # Reacting waits for a while: something better than it is followed.
    assert [watch.follow(FAST, None, QUIET) for _ in range(5)] == [FAST] * 5
    assert not watch.reacts
    assert watch.planned == Running(FAST, 0.0)
    behind = guard()
    assert [behind.follow(SLOW, FAST, QUIET) for _ in range(3)] == [SLOW, FAST, FAST]
    for _ in range(6):
        behind.follow(FAST, SLOW, QUIET)
    assert behind.follow(FAST, SLOW, QUIET) == FAST
    assert not behind.reacts
