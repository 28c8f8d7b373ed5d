"""Liveput: the throughput that a parallel configuration keeps under preemption. Exact, not sampled.

Symbols follow Duan et al., NSDI '24:

    N   instances, of which D * P have a place and the others are spares
    D   data-parallel pipelines
    P   stages in each pipeline
    k   instances lost, every set of k equally likely
    r   replicas of a stage that are left

Intra-stage migration moves a survivor to any pipeline, never to another stage, so the stage with the fewest survivors
sets how many pipelines stay complete. With ``k`` of ``N`` lost uniformly,

    P(every stage keeps at least d) = [x^k] (sum_{j=0}^{D-d} C(D,j) x^j)^P * (1+x)^(N-D*P) / C(N,k).

Each factor is multiplied by powers of ``t = k / N`` and ``1 - t`` so that its coefficients are binomial probabilities;
these powers cancel in the quotient, nothing overflows, and as all terms are positive nothing cancels either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, xlog1py, xlogy

from lightning_parcae.planning.parallel_config import ParallelConfig

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MigrationKinds:
    """How likely each way of going on is, for one configuration and one number of losses. Sums to 1.

    Attributes:
        none: Only spares were lost and nothing changes.
        intra_stage: Survivors swap pipelines, no state moves.
        inter_stage: Some stage lacks replicas, but each has one left to copy from.
        rollback: Some stage has no replica left: its state comes from a copy elsewhere.
    """

    none: float
    intra_stage: float
    inter_stage: float
    rollback: float


def fewest_replicas(replicas: Sequence[int], num_spares: int, num_lost: int) -> Floats:
    """Return the distribution of the fewest replicas that any stage keeps.

    Known victims are left out of ``replicas`` and ``num_spares`` beforehand; what is drawn here are unknown ones.

    Args:
        replicas: Live replicas of each stage, length ``P``.
        num_spares: Live instances without a place.
        num_lost: Unknown victims ``k``, drawn uniformly from all of these.

    Returns:
        Probability of each minimum from 0 to ``min(replicas)``, shape ``(min(replicas) + 1,)``.

    Raises:
        ValueError: If there is no stage, a count is negative, or more are lost than there are.

    Example:
        Two pipelines of two stages and no spare: the second victim hits the first one's stage once in three times.

        >>> fewest_replicas([2, 2], num_spares=0, num_lost=2).round(4)
        array([0.3333, 0.6667, 0.    ])
    """
    total = sum(replicas) + num_spares
    if not replicas or min(replicas) < 0 or num_spares < 0:
        raise ValueError(f"needed are stages with at least 0 replicas and 0 spares, got {list(replicas)}, {num_spares}")
    if not 0 <= num_lost <= total:
        raise ValueError(f"{num_lost} of {total} instances cannot be lost")
    most = min(replicas)
    keeps = np.zeros(most + 2)  # keeps[d]: every stage keeps at least d
    sizes = {size: replicas.count(size) for size in set(replicas)}
    tilt = num_lost / total if total else 0.0
    every = float(_binomial(total, tilt, num_lost)[num_lost])
    spares = _binomial(num_spares, tilt, num_lost)
    losses = {size: _binomial(size, tilt, num_lost) for size in sizes}
    certain = most - num_lost  # even if all victims were of the smallest stage, so many replicas are left
    keeps[: max(certain, 0) + 1] = 1.0
    for least in range(max(certain, 0) + 1, most + 1):
        ways = spares
        for size, count in sizes.items():
            ways = _times(ways, _power(losses[size][: size - least + 1], count, num_lost), num_lost)
        keeps[least] = ways[num_lost] / every if len(ways) > num_lost else 0.0
    distribution: Floats = np.clip(keeps[:-1] - keeps[1:], 0.0, 1.0)
    return distribution


def _binomial(number: int, chance: float, most: int) -> Floats:
    """Return the binomial probabilities of 0 to ``min(number, most)`` successes."""
    count = np.arange(min(number, most) + 1)
    ways = gammaln(number + 1) - gammaln(count + 1) - gammaln(number - count + 1)
    probabilities: Floats = np.exp(ways + xlogy(count, chance) + xlog1py(number - count, -chance))
    return probabilities


def _times(left: Floats, right: Floats, degree: int) -> Floats:
    product: Floats = np.convolve(left, right)[: degree + 1]
    return product


def _power(base: Floats, exponent: int, degree: int) -> Floats:
    result = np.ones(1)
    while exponent:
        if exponent & 1:
            result = _times(result, base, degree)
        exponent >>= 1
        if exponent:
            base = _times(base, base, degree)
    return result


def surviving_pipelines(
    config: ParallelConfig,
    num_instances: int,
    num_lost: int,
    *,
    victims: Sequence[int] | None = None,
    devices_per_instance: int = 1,
) -> Floats:
    """Return the distribution of the pipelines that intra-stage migration keeps complete.

    Args:
        config: The grid, in devices.
        num_instances: Instances that are there, known victims included, at least as many as the grid needs.
        num_lost: Unknown victims, drawn uniformly from those that are not known ones.
        victims: Known victims (noticed ones): how many of each stage of the grid of instances, length ``P``, with the
            victims among the spares as an optional last entry.
        devices_per_instance: Devices of an instance. They take consecutive stages of one pipeline if ``P`` can be
            divided by it, else the same stage of as many pipelines.

    Returns:
        Probability of ``0 .. D`` complete pipelines, shape ``(D + 1,)``.

    Raises:
        ValueError: If the grid does not fit the instances or the devices.
    """
    pipelines, stages, width = instance_grid(config, devices_per_instance)
    spares = num_instances - pipelines * stages
    if spares < 0:
        raise ValueError(
            f"{config} with {devices_per_instance} devices per instance needs {pipelines * stages} instances, "
            f"but there are {num_instances}"
        )
    known = list(victims) if victims is not None else [0] * stages
    known += [0] * (stages + 1 - len(known))
    if len(known) != stages + 1 or min(known) < 0 or max(known[:-1]) > pipelines or known[-1] > spares:
        raise ValueError(
            f"victims must be at most {pipelines} of each of {stages} stages and {spares} spares, got {victims}"
        )
    fewest = fewest_replicas([pipelines - gone for gone in known[:-1]], spares - known[-1], num_lost)
    complete = np.zeros(config.num_pipelines + 1)
    complete[np.arange(len(fewest)) * width] = fewest
    return complete


def instance_grid(config: ParallelConfig, devices_per_instance: int) -> tuple[int, int, int]:
    """Return pipelines and stages of the grid of instances, and how many pipelines an instance serves.

    Raises:
        ValueError: If neither ``P`` nor ``D`` can be divided by the devices of an instance.
    """
    if devices_per_instance < 1:
        raise ValueError(f"an instance has at least 1 device, got {devices_per_instance}")
    if config.num_stages % devices_per_instance == 0:
        return config.num_pipelines, config.num_stages // devices_per_instance, 1
    if config.num_pipelines % devices_per_instance == 0:
        return config.num_pipelines // devices_per_instance, config.num_stages, devices_per_instance
    raise ValueError(
        f"{config} does not divide over instances of {devices_per_instance} devices: neither its stages nor its "
        "pipelines are a multiple of it"
    )


def liveput(
    config: ParallelConfig,
    num_instances: int,
    losses: Mapping[int, float] | Sequence[float],
    throughput: Callable[[ParallelConfig], float],
    *,
    victims: Sequence[int] | None = None,
    devices_per_instance: int = 1,
) -> float:
    """Return the expected throughput of a configuration when some instances are lost.

    Liveput(D, P) = E[throughput(D', P)], with D' the pipelines that intra-stage migration keeps complete. What other
    migrations win back costs time; :mod:`lightning_parcae.planning.optimizer` weighs that.

    Args:
        config: The grid, in devices.
        num_instances: Instances that are there.
        losses: Probability of each number of unknown victims: a mapping, or a sequence indexed by the number.
        throughput: Samples per second of a configuration; 0 where it cannot run.
        victims: Known victims, see :func:`surviving_pipelines`.
        devices_per_instance: Devices of an instance.

    Returns:
        Samples per second.

    Raises:
        ValueError: If the probabilities are no distribution, or the grid does not fit.

    Example:
        >>> liveput(ParallelConfig(2, 2), 4, {0: 0.5, 1: 0.5}, lambda config: 10.0 * config.num_pipelines)
        15.0
    """
    chances = dict(losses) if isinstance(losses, Mapping) else dict(enumerate(losses))
    if any(chance < 0 for chance in chances.values()) or abs(sum(chances.values()) - 1.0) > 1e-9:
        raise ValueError(f"probabilities must be at least 0 and sum to 1, got {chances}")
    rates = np.array(
        [0.0] + [throughput(ParallelConfig(count, config.num_stages)) for count in range(1, config.num_pipelines + 1)]
    )
    expected = 0.0
    for num_lost, chance in chances.items():
        if chance:
            complete = surviving_pipelines(
                config, num_instances, num_lost, victims=victims, devices_per_instance=devices_per_instance
            )
            expected += chance * float(complete @ rates)
    return expected


def migration_kinds(config: ParallelConfig, num_instances: int, num_lost: int, num_pipelines: int) -> MigrationKinds:
    """Return how likely each kind of migration to ``num_pipelines`` pipelines of as many stages is.

    Args:
        config: The grid that runs.
        num_instances: Instances that are there, before the loss.
        num_lost: Victims, drawn uniformly.
        num_pipelines: Pipelines afterwards; more than now is an inter-stage migration.

    Raises:
        ValueError: If the new grid needs more instances than are left, joiners not counted, and is no growth.
    """
    fewest = surviving_pipelines(config, num_instances, num_lost)
    alive = float(fewest[1:].sum())
    if num_pipelines > config.num_pipelines:
        return MigrationKinds(none=0.0, intra_stage=0.0, inter_stage=alive, rollback=1.0 - alive)
    if num_pipelines < 1 or num_pipelines * config.num_stages > num_instances - num_lost:
        raise ValueError(
            f"{num_pipelines} pipelines of {config.num_stages} stages do not fit the {num_instances - num_lost} "
            f"instances left"
        )
    none = 0.0
    if num_pipelines == config.num_pipelines:  # complete and nobody of the grid lost: k uniform ones are all spares
        spares = num_instances - config.num_instances
        none = float(fewest_replicas([config.num_instances], spares, num_lost)[-1])
    enough = float(fewest[num_pipelines:].sum())
    return MigrationKinds(
        none=none,
        intra_stage=max(enough - none, 0.0),
        inter_stage=max(alive - enough, 0.0),
        rollback=1.0 - alive,
    )


def expected_missing_replicas(config: ParallelConfig, num_instances: int, num_lost: int, num_pipelines: int) -> float:
    """Return the expected number of stage states that must be copied to get ``num_pipelines`` pipelines.

    The sum over the stages of ``max(0, num_pipelines - r)``; by linearity, ``P`` times that of one stage.
    """
    depth = config.num_pipelines
    left = fewest_replicas([depth], num_instances - depth, num_lost)  # of one stage; the others are "spares" to it
    return config.num_stages * float(left @ np.maximum(num_pipelines - np.arange(depth + 1), 0))
