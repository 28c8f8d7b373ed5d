"""Bootstrapped traces are made of the given one's changes."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.simulation.bootstrap import bootstrap_trace
from lightning_parcae.simulation.workload import read_trace


def test_deterministic_in_bounds_and_of_the_same_length() -> None:
    trace = read_trace("aws-p3")
    made = [bootstrap_trace(trace, seed=seed, most=32).resample(60.0) for seed in range(6)]
    for seed, counts in enumerate(made):
        assert (counts == bootstrap_trace(trace, seed=seed, most=32).resample(60.0)).all()
        assert len(counts) == trace.num_intervals(60.0)
        assert counts[0] == trace.count_at(0.0)
        assert counts.min() >= 0
        assert counts.max() <= 32
    assert len({tuple(counts.tolist()) for counts in made}) == len(made)


def test_blocks_are_pieces_of_the_trace() -> None:
    # Every change occurs once in the source, so that a block can be found again.
    changes = np.arange(1, 41)
    trace = AvailabilityTrace.from_counts(np.concatenate([[1], 1 + np.cumsum(changes)]).tolist())
    made = np.diff(bootstrap_trace(trace, seed=3, block_s=600.0, most=10**6).resample(60.0))
    for first in range(0, len(made), 10):
        block = made[first : first + 10]
        assert (np.diff(block) == 1).all()
        assert set(block.tolist()) <= set(changes.tolist())


def test_short_traces_and_nonsense() -> None:
    single = AvailabilityTrace.from_counts([5])
    assert bootstrap_trace(single, seed=0).resample(60.0).tolist() == [5]
    assert bootstrap_trace(AvailabilityTrace.from_counts([0, 3]), seed=0, most=2).resample(60.0).tolist() == [0, 2]
    with pytest.raises(ValueError, match="blocks of at least 60 s"):
        bootstrap_trace(single, seed=0, block_s=10.0)
    with pytest.raises(ValueError, match="a bound of at least 0"):
        bootstrap_trace(single, seed=0, most=-1)
