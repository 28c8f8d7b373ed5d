"""Traces that might have been: what happened to a real trace, in another order.

A block bootstrap: blocks of consecutive changes are drawn from the trace, with replacement, one after the other.
Within a block everything stays as it was, so that bursts stay bursts. Deterministic for a seed.
"""

from __future__ import annotations

import numpy as np

from lightning_parcae.availability.trace import AvailabilityTrace


def bootstrap_trace(
    trace: AvailabilityTrace,
    *,
    seed: int,
    block_s: float = 1800.0,
    interval_s: float = 60.0,
    most: int | None = None,
) -> AvailabilityTrace:
    """Return a trace of the same length, made of blocks of the given one's changes.

    Args:
        trace: Where the changes are from.
        seed: Which blocks are drawn.
        block_s: Length of a block.
        interval_s: Length of an interval; changes are those between intervals.
        most: Most instances; the given trace's if None. Counts stay between 0 and this.

    Raises:
        ValueError: If a block is shorter than an interval, or the bound is negative.
    """
    counts = trace.resample(interval_s)
    most = trace.capacity if most is None else most
    if block_s < interval_s or most < 0:
        raise ValueError(
            f"needed are blocks of at least {interval_s:g} s and a bound of at least 0, got {block_s:g}, {most}"
        )
    changes = np.diff(counts)
    made = [min(int(counts[0]), most)]
    if len(changes):
        size = min(int(block_s / interval_s), len(changes))
        rng = np.random.default_rng(seed)
        while len(made) < len(counts):
            first = int(rng.integers(0, len(changes) - size + 1))
            for change in changes[first : first + size].tolist():
                made.append(min(max(made[-1] + change, 0), most))
    return AvailabilityTrace.from_counts(
        made[: len(counts)], interval_s=interval_s, source=f"{trace.source}, bootstrap {seed}"
    )
