"""Which configuration to run for each number of instances.

A policy is a table: entry ``N`` is the configuration to take when ``N`` instances are there, or None when the job must
wait for more. A table can be looked up at once, on any instance, when one has died; nothing has to be solved then.

Symbols: ``N`` instances, ``D`` pipelines, ``P`` stages in each.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_parcae.planning.parallel_config import ParallelConfig

#: Configuration for each number of instances, indexed by ``N``; None means: wait.
LayoutTable = tuple[ParallelConfig | None, ...]


def lookup(table: Sequence[ParallelConfig | None], num_instances: int) -> ParallelConfig | None:
    """Return a table's entry for ``N`` instances; beyond its end the last entry holds.

    Raises:
        ValueError: If ``num_instances`` is negative.
    """
    if num_instances < 0:
        raise ValueError(f"a number of instances cannot be negative, got {num_instances}")
    if not table:
        return None
    return table[min(num_instances, len(table) - 1)]


def table_to_json(table: Sequence[ParallelConfig | None]) -> list[list[int] | None]:
    """Return a table as ``[D, P]`` pairs, None where the job waits."""
    return [None if config is None else [config.num_pipelines, config.num_stages] for config in table]


def table_from_json(values: Sequence[Sequence[int] | None]) -> LayoutTable:
    """Build a table from :func:`table_to_json`'s values.

    Raises:
        ValueError: If a value is no pair, or a configuration needs more instances than its index.
    """
    table: list[ParallelConfig | None] = []
    for count, value in enumerate(values):
        if value is not None and (len(value) != 2 or value[0] * value[1] > count):
            raise ValueError(f"entry {count} of a table should be None or [D, P] with D * P <= {count}, got {value}")
        table.append(None if value is None else ParallelConfig(int(value[0]), int(value[1])))
    return tuple(table)


def most_instances_table(
    *,
    num_layers: int,
    max_instances: int,
    max_pipelines: int,
    num_stages: int | None = None,
    num_pipelines: int | None = None,
    min_stages: int = 1,
    max_stages: int | None = None,
) -> LayoutTable:
    """Return, for each number of instances, the configuration that leaves the fewest idle.

    Of those that use equally many, the one with the fewest stages wins: it holds the most replicas of each stage.

    Args:
        num_layers: Layers of the model; a stage holds at least one.
        max_instances: Length of the table minus one, at least 0.
        max_pipelines: Most pipelines that can be fed, usually the micro-batches of a global batch.
        num_stages: Stages, if pinned.
        num_pipelines: Pipelines, if pinned.
        min_stages: Fewest stages that fit into memory.
        max_stages: Most stages, ``num_layers`` if None.

    Returns:
        Table of ``max_instances + 1`` entries; None where no configuration fits.

    Raises:
        ValueError: If the limits contradict each other, so that no number of instances would ever do.

    Example:
        >>> [str(config) for config in most_instances_table(num_layers=2, max_instances=5, max_pipelines=8)]
        ['None', '1x1', '2x1', '3x1', '4x1', '5x1']
        >>> table = most_instances_table(num_layers=6, max_instances=7, max_pipelines=2, min_stages=2)
        >>> [str(config) for config in table]
        ['None', 'None', '1x2', '1x3', '2x2', '1x5', '2x3', '2x3']
    """
    if num_layers < 1 or max_pipelines < 1 or min_stages < 1 or max_instances < 0:
        raise ValueError(
            "num_layers, max_pipelines and min_stages must be at least 1 and max_instances at least 0, got "
            f"{num_layers}, {max_pipelines}, {min_stages} and {max_instances}"
        )
    most_stages = num_layers if max_stages is None else min(max_stages, num_layers)
    if num_stages is not None and not min_stages <= num_stages <= most_stages:
        raise ValueError(
            f"num_stages={num_stages} is impossible: a model of {num_layers} layers can have {min_stages} to "
            f"{most_stages} stages here; pin fewer stages, or none"
        )
    if num_pipelines is not None and not 1 <= num_pipelines <= max_pipelines:
        raise ValueError(
            f"num_pipelines={num_pipelines} is impossible: a global batch feeds 1 to {max_pipelines} pipelines here; "
            "pin fewer pipelines, use smaller micro-batches, or a larger batch"
        )
    if min_stages > most_stages:
        raise ValueError(
            f"at least {min_stages} stages are wanted, but at most {most_stages} are possible for {num_layers} layers"
        )

    exact: list[ParallelConfig | None] = [None] * (max_instances + 1)  # best that uses exactly N
    stage_choices = range(min_stages, most_stages + 1) if num_stages is None else range(num_stages, num_stages + 1)
    for stages in stage_choices:  # ascending, so the first one found has the fewest stages
        pipelines = range(1, max_pipelines + 1) if num_pipelines is None else range(num_pipelines, num_pipelines + 1)
        for count in pipelines:
            if count * stages > max_instances:
                break
            if exact[count * stages] is None:
                exact[count * stages] = ParallelConfig(num_pipelines=count, num_stages=stages)

    table: list[ParallelConfig | None] = []
    best: ParallelConfig | None = None
    for config in exact:
        best = config if config is not None else best
        table.append(best)
    return tuple(table)
