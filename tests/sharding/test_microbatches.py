"""Micro-batch borders and the shares of the pipelines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_parcae.sharding.microbatches import cut, default_micro_batch_size, share


@given(num_samples=st.integers(0, 200), size=st.integers(1, 50))
def test_micro_batches_cover_the_batch_in_order_and_only_the_last_is_ragged(num_samples, size):
    pieces = cut(num_samples, size)
    assert [sample for piece in pieces for sample in piece] == list(range(num_samples))
    assert all(len(piece) == size for piece in pieces[:-1])
    assert all(0 < len(piece) <= size for piece in pieces)


@given(num_microbatches=st.integers(0, 60), num_pipelines=st.integers(1, 12))
def test_shares_are_consecutive_complete_and_even(num_microbatches, num_pipelines):
    shares = [share(num_microbatches, num_pipelines, pipeline) for pipeline in range(num_pipelines)]
    assert [micro for taken in shares for micro in taken] == list(range(num_microbatches))
    sizes = [len(taken) for taken in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("batch_size", "size"), [(1, 1), (7, 1), (8, 1), (9, 2), (64, 8), (65, 9)])
def test_the_default_size_gives_at_most_eight_micro_batches(batch_size, size):
    assert default_micro_batch_size(batch_size) == size
    assert len(cut(batch_size, size)) <= 8


@pytest.mark.parametrize(
    "call",
    [
        lambda: cut(4, 0),
        lambda: cut(-1, 2),
        lambda: share(4, 2, 2),
        lambda: share(4, 0, 0),
        lambda: share(-1, 1, 0),
        lambda: default_micro_batch_size(0),
    ],
)
def test_arguments_out_of_range_are_refused(call):
    with pytest.raises(ValueError, match="got"):
        call()
