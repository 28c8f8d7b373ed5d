"""The configurations that a plan chooses from, as arrays.

Entry 0 stands for "nothing runs": the job waits. Changing to it is free, changing from it costs what a start costs.

Symbols: ``S`` entries, ``N`` instances, ``k`` of them lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_parcae.planning.cost import MigrationCost
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import Profile

Floats = NDArray[np.float64]


class ConfigSpace:
    """Configurations with their throughput and the pauses between them.

    Args:
        profile: Throughput and limits.
        cost: Pauses.
        max_instances: Most instances to consider.
        min_instances: Fewest instances to consider; only matters for what pruning may drop.
        keep: Configurations that are never dropped.
        prune_below: Configurations slower than this share of the fastest one that needs no more instances are dropped,
            0 to 1; above 0 also those that leave a whole pipeline idle even at ``min_instances``. Never dropped are
            the fastest one for each number of instances from ``min_instances`` on, and ``keep``.

    Attributes:
        configs: The choices; entry 0 is None.
        rates: Samples per second, shape ``(S,)``.
        sizes: Instances in the grid, shape ``(S,)``.
        overlap_s: What is paid on top when a migration begins before the last one ended, shape ``(S,)``.
    """

    def __init__(
        self,
        profile: Profile,
        cost: MigrationCost,
        *,
        max_instances: int,
        min_instances: int = 0,
        keep: Sequence[ParallelConfig] = (),
        prune_below: float = 0.0,
    ) -> None:
        if not 0 <= min_instances <= max_instances or not 0 <= prune_below <= 1:
            raise ValueError(
                f"needed are 0 <= min_instances <= max_instances and a share from 0 to 1, got {min_instances}, "
                f"{max_instances} and {prune_below}"
            )
        chosen = _pruned(profile, max_instances, min_instances, keep, prune_below)
        self._cost = cost
        self._real = chosen
        self._pauses: dict[tuple[int, int], Floats] = {}
        self._index = {config: index for index, config in enumerate(chosen, start=1)}
        self.configs: tuple[ParallelConfig | None, ...] = (None, *chosen)
        self.rates: Floats = np.array([0.0, *(profile.samples_per_s(config) for config in chosen)])
        self.sizes: NDArray[np.int64] = np.array([0, *(config.num_instances for config in chosen)], dtype=np.int64)
        self.overlap_s: Floats = np.concatenate([[0.0], cost.overlap(chosen)]) if chosen else np.zeros(1)
        self._initial_s = cost.initial(chosen) if chosen else np.zeros(0)
        # By speed, of equally fast ones the one with the smallest D: what a table without a future would say.
        self._fastest = np.array([self._fastest_within(count) for count in range(max_instances + 1)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.configs)

    def index(self, config: ParallelConfig | None) -> int:
        """Return the entry of a configuration.

        Raises:
            KeyError: If it is not in the space.
        """
        return 0 if config is None else self._index[config]

    def fastest(self, num_instances: int) -> int:
        """Return the entry with the highest throughput for so many instances; 0 if none fits."""
        return int(self._fastest[min(num_instances, len(self._fastest) - 1)])

    def pauses_s(self, num_instances: int, num_lost: int) -> Floats:
        """Return the expected pauses in seconds when ``k`` of ``N`` instances are lost, shape ``(S, S)``."""
        # Without a loss, who is a spare does not matter.
        key = (num_instances if num_lost else -1, num_lost)
        if key not in self._pauses:
            pauses = np.zeros((len(self), len(self)))
            if self._real:
                pauses[0, 1:] = self._initial_s
                present = max(num_instances, 0) if num_lost else int(self.sizes.max())
                pauses[1:, 1:] = self._cost.matrix(self._real, present, num_lost)
            self._pauses[key] = pauses
        return self._pauses[key]

    def _fastest_within(self, num_instances: int) -> int:
        fits = np.where(self.sizes <= num_instances, self.rates, -1.0)
        return int(fits.argmax())


def _pruned(
    profile: Profile, max_instances: int, min_instances: int, keep: Sequence[ParallelConfig], prune_below: float
) -> tuple[ParallelConfig, ...]:
    configs = profile.configs(max_instances)
    rates = np.array([profile.samples_per_s(config) for config in configs])
    sizes = np.array([config.num_instances for config in configs], dtype=np.int64)
    alive = rates > 0
    best = np.zeros(max_instances + 1)  # fastest that needs at most N
    np.maximum.at(best, sizes[alive], rates[alive])
    best = np.maximum.accumulate(best)
    wanted = alive & (rates >= prune_below * best[sizes]) if len(configs) else alive
    if prune_below > 0 and len(configs):
        stages = np.array([config.num_stages for config in configs], dtype=np.int64)
        wanted &= (rates >= prune_below * best[np.maximum(sizes, min_instances)]) & (sizes + stages > min_instances)
        for count in range(min_instances, max_instances + 1):
            fits = np.where((sizes <= count) & alive, rates, -1.0)
            if fits.max(initial=-1.0) > 0:
                wanted[int(fits.argmax())] = True
    chosen = [config for config, take in zip(configs, wanted, strict=True) if take]
    extra = [config for config in dict.fromkeys(keep) if config not in set(chosen)]
    return tuple(sorted([*chosen, *extra]))
