"""How a global batch is cut into micro-batches, and which of them a pipeline takes.

The borders of the *global micro-batches* depend on the number of samples and on the micro-batch size only,
never on how many pipelines there are; so dropout, normalisation and gradients of a micro-batch are the same
in every layout. A pipeline takes whole, consecutive micro-batches.
"""

from __future__ import annotations

_DEFAULT_NUM_MICROBATCHES = 8


def default_micro_batch_size(batch_size: int) -> int:
    """Return the micro-batch size that cuts a global batch into at most 8 micro-batches.

    Args:
        batch_size: Samples of a global batch, at least 1.

    Raises:
        ValueError: If ``batch_size`` is below 1.

    Example:
        >>> default_micro_batch_size(20)
        3
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    return -(-batch_size // _DEFAULT_NUM_MICROBATCHES)


def cut(num_samples: int, micro_batch_size: int) -> tuple[range, ...]:
    """Cut a global batch into micro-batches; the last one may be smaller.

    Args:
        num_samples: Samples of the global batch, at least 0.
        micro_batch_size: Samples of each micro-batch, at least 1.

    Returns:
        The sample positions (within the global batch) of each micro-batch.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> cut(7, 3)
        (range(0, 3), range(3, 6), range(6, 7))
    """
    if num_samples < 0 or micro_batch_size < 1:
        raise ValueError(
            "cutting a batch needs num_samples >= 0 and micro_batch_size >= 1, "
            f"got {num_samples} and {micro_batch_size}"
        )
    starts = range(0, num_samples, micro_batch_size)
    return tuple(range(start, min(start + micro_batch_size, num_samples)) for start in starts)


def share(num_microbatches: int, num_pipelines: int, pipeline: int) -> range:
    """Return the micro-batches one pipeline takes.

    The shares are consecutive, follow the order of the pipelines, and differ in size by at most 1. A share is
    empty where there are fewer micro-batches than pipelines.

    Args:
        num_microbatches: Micro-batches of the global batch, at least 0.
        num_pipelines: Pipelines ``D``, at least 1.
        pipeline: The pipeline, from 0 to ``D - 1``.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> [list(share(5, 3, pipeline)) for pipeline in range(3)]
        [[0, 1], [2, 3], [4]]
    """
    if num_microbatches < 0 or not 0 <= pipeline < num_pipelines:
        raise ValueError(
            "sharing needs num_microbatches >= 0 and 0 <= pipeline < num_pipelines, "
            f"got {num_microbatches} micro-batches, pipeline {pipeline} of {num_pipelines}"
        )
    each, extra = divmod(num_microbatches, num_pipelines)
    start = pipeline * each + min(pipeline, extra)
    return range(start, start + each + (pipeline < extra))
