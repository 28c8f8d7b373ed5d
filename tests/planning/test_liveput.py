"""Liveput is exact: equal to enumeration on all small grids, to sampling on large ones."""

from __future__ import annotations

import itertools
from collections import Counter
from math import comb

import numpy as np
import pytest

from lightning_parcae.planning.liveput import (
    expected_missing_replicas,
    fewest_replicas,
    instance_grid,
    liveput,
    migration_kinds,
    surviving_pipelines,
)
from lightning_parcae.planning.parallel_config import ParallelConfig

SMALL_GRIDS = [(d, p, s) for d in range(1, 6) for p in range(1, 6) for s in range(4) if d * p + s <= 10]


def stage_of(index: int, config: ParallelConfig) -> int | None:
    return index % config.num_stages if index < config.num_instances else None


def enumerate_fewest(config: ParallelConfig, num_instances: int, num_lost: int) -> Counter[int]:
    """Count the sets of victims by the fewest replicas left."""
    outcomes: Counter[int] = Counter()
    for victims in itertools.combinations(range(num_instances), num_lost):
        gone = Counter(stage_of(index, config) for index in victims)
        outcomes[config.num_pipelines - max(gone[stage] for stage in range(config.num_stages))] += 1
    return outcomes


@pytest.mark.parametrize(("d", "p", "spares"), SMALL_GRIDS)
def test_distribution_equals_enumeration(d: int, p: int, spares: int) -> None:
    config = ParallelConfig(d, p)
    n = config.num_instances + spares
    for k in range(n + 1):
        outcomes = enumerate_fewest(config, n, k)
        expected = [outcomes[left] / comb(n, k) for left in range(d + 1)]
        assert surviving_pipelines(config, n, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("d", "p", "spares"), SMALL_GRIDS[::3])
def test_kinds_and_missing_replicas_equal_enumeration(d: int, p: int, spares: int) -> None:
    config = ParallelConfig(d, p)
    n = config.num_instances + spares
    for k, target in itertools.product(range(n), range(1, d + 3)):
        if target <= d and target * p > n - k:
            with pytest.raises(ValueError, match="do not fit"):
                migration_kinds(config, n, k, target)
            continue
        counts: Counter[str] = Counter()
        missing = 0
        for victims in itertools.combinations(range(n), k):
            gone = Counter(stage_of(index, config) for index in victims)
            left = [d - gone[stage] for stage in range(p)]
            missing += sum(max(target - count, 0) for count in left)
            if min(left) == 0:
                counts["rollback"] += 1
            elif min(left) < target:
                counts["inter_stage"] += 1
            elif target == d and sum(left) == d * p:
                counts["none"] += 1
            else:
                counts["intra_stage"] += 1
        kinds = migration_kinds(config, n, k, target)
        for kind in ("none", "intra_stage", "inter_stage", "rollback"):
            assert getattr(kinds, kind) == pytest.approx(counts[kind] / comb(n, k), abs=1e-12)
        assert expected_missing_replicas(config, n, k, target) == pytest.approx(missing / comb(n, k))


@pytest.mark.parametrize("replicas", [[3, 1, 2], [2, 0], [4], [1, 3]])
@pytest.mark.parametrize("spares", [0, 2])
def test_unequal_stages_equal_enumeration(replicas: list[int], spares: int) -> None:
    stages = [stage for stage, count in enumerate(replicas) for _ in range(count)] + [-1] * spares
    for k in range(len(stages) + 1):
        outcomes: Counter[int] = Counter()
        for victims in itertools.combinations(range(len(stages)), k):
            gone = Counter(stages[index] for index in victims)
            outcomes[min(count - gone[stage] for stage, count in enumerate(replicas))] += 1
        expected = [outcomes[left] / comb(len(stages), k) for left in range(min(replicas) + 1)]
        assert fewest_replicas(replicas, spares, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("d", "p", "n", "k"), [(4, 8, 32, 3), (20, 12, 256, 17), (30, 33, 1000, 40), (500, 2, 1000, 400)]
)
def test_large_grids_agree_with_sampling(d: int, p: int, n: int, k: int) -> None:
    config = ParallelConfig(d, p)
    exact = surviving_pipelines(config, n, k)
    assert exact.sum() == pytest.approx(1.0)
    rng = np.random.default_rng(5)
    draws = 2000
    sampled = np.zeros(d + 1)
    for _ in range(draws):
        victims = rng.choice(n, size=k, replace=False)
        gone = np.bincount(victims[victims < d * p] % p, minlength=p)
        sampled[d - gone.max()] += 1 / draws
    error = np.sqrt(exact * (1 - exact) / draws)
    assert (np.abs(sampled - exact) <= 4.5 * error + 1e-3).all()


def test_known_victims_are_certain() -> None:
    config = ParallelConfig(3, 2)
    certain = surviving_pipelines(config, 7, 0, victims=[1, 2])
    assert certain == pytest.approx([0, 1, 0, 0])
    # One more unknown of the four left (2 and 1 replicas, one spare): only the lone replica matters for 0.
    assert surviving_pipelines(config, 7, 1, victims=[1, 2]) == pytest.approx([0.25, 0.75, 0, 0])
    assert surviving_pipelines(config, 7, 1, victims=[0, 0, 1]) == pytest.approx([0, 0, 1, 0])
    for victims in ([4, 0], [0, 0, 2], [-1, 0], [0, 0, 0, 0]):
        with pytest.raises(ValueError, match="victims must be at most 3 of each of 2 stages and 1 spares"):
            surviving_pipelines(config, 7, 0, victims=victims)


def test_several_devices_share_the_fate_of_their_instance() -> None:
    # Four stages on two-device instances are two stages of instances.
    deep = surviving_pipelines(ParallelConfig(3, 4), 6, 2, devices_per_instance=2)
    assert deep == pytest.approx(surviving_pipelines(ParallelConfig(3, 2), 6, 2))
    # Odd stages, even pipelines: an instance serves two pipelines, and takes both with it.
    wide = surviving_pipelines(ParallelConfig(4, 3), 6, 1, devices_per_instance=2)
    assert wide == pytest.approx([0, 0, 1, 0, 0])
    assert instance_grid(ParallelConfig(4, 3), 2) == (2, 3, 2)
    with pytest.raises(ValueError, match="does not divide over instances of 2 devices"):
        instance_grid(ParallelConfig(3, 3), 2)
    with pytest.raises(ValueError, match="at least 1 device"):
        instance_grid(ParallelConfig(3, 3), 0)


def test_liveput_is_the_expected_throughput() -> None:
    config = ParallelConfig(3, 2)
    rates = {1: 5.0, 2: 9.0, 3: 12.0}

    def throughput(config: ParallelConfig) -> float:
        assert config.num_stages == 2
        return rates[config.num_pipelines]

    losses = {0: 0.5, 2: 0.3, 4: 0.2}
    expected = sum(
        chance * count / comb(8, k) * rates.get(left, 0.0)
        for k, chance in losses.items()
        for left, count in enumerate_fewest(config, 8, k).items()
    )
    assert liveput(config, 8, losses, throughput) == pytest.approx(expected)
    assert liveput(config, 8, [0.5, 0.0, 0.3, 0.0, 0.2], throughput) == pytest.approx(expected)


def test_spares_absorb_preemptions() -> None:
    values = [liveput(ParallelConfig(2, 3), n, {2: 1.0}, lambda c: float(c.num_pipelines)) for n in range(6, 12)]
    assert values == sorted(values)
    assert values[0] < values[-1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fewest_replicas([], 0, 0), "needed are stages"),
        (lambda: fewest_replicas([1, -1], 0, 0), "needed are stages"),
        (lambda: fewest_replicas([1], -1, 0), "needed are stages"),
        (lambda: fewest_replicas([1], 1, 3), "3 of 2 instances cannot be lost"),
        (lambda: surviving_pipelines(ParallelConfig(2, 2), 3, 0), "needs 4 instances, but there are 3"),
        (lambda: liveput(ParallelConfig(1, 1), 1, {0: 0.5}, lambda _: 1.0), "sum to 1"),
        (lambda: liveput(ParallelConfig(1, 1), 1, {0: 1.5, 1: -0.5}, lambda _: 1.0), "at least 0"),
        (lambda: migration_kinds(ParallelConfig(1, 1), 1, 0, 0), "do not fit"),
    ],
)
def test_bad_arguments_are_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
