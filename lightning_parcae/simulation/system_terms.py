"""What the other systems' pauses last, each number with its source, and which configurations they choose from.

Numbers that nobody documents are marked *assumed*; they are chosen in favour of the system. Every one can be replaced.
Bad terms are refused with a ``ValueError``.

Symbols: ``D`` pipelines, ``P`` stages in each, ``N`` instances.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import pairwise

from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import Profile
from lightning_parcae.simulation.workload import Workload


@dataclass(frozen=True)
class SystemTerms:
    """Times and factors of the other systems.

    Attributes:
        checkpoint_every_s: Training time between two checkpoints, written in the background at no cost; 0 means that no
            step is ever lost, ``inf`` that none is written. Assumed: Varuna's manual (``docs/morphing.rst``) asks for a
            high frequency, and so does torchrun's, both without a number.
        restart_s: Killing and starting all processes, rendezvous and imports included. Measured: torchrun with
            Lightning after a killed worker, 16.83 s (``docs/benchmarks.md``; with the agent killed too, 51.83 s).
            Used for torchrun's kind, and for the others where the model has no constants of the reference system.
        checkpoint_s: Saving and loading a checkpoint at a restart: 14 s in the reference system's own
            checkpoint baseline. Used only together with its other constants.
        restart_always: Whether ``checkpoint`` restarts also when only spares come or go. The reference system's
            baseline does; assumed not, in its favour.
        bytes_per_s: Speed of loading state where the model has no measured link. The reference system measured 1 GiB in
            1.198 s on 10 Gb/s.
        overprovision: How many times deeper a pipeline with redundant computation is than the shallowest one that fits.
            Bamboo's simulator trains on 8 stages what needs 5 on demand, and on 6 what needs 4.
        redundant_slowdown: Step time with the successor's forward pass, over that without. Assumed: most of it fits
            into the bubbles. (In Bamboo's simulator 24 instances with 8 stages make 264 samples in 3.08 s, 15 on-demand
            ones with 5 stages in 4.25 s: a factor of 1.16 an instance, of which deeper pipelines are a part.)
        overloaded_slowdown: Step time while an instance computes two stages, over that before: 1.5 in Bamboo's
            simulator.
        absorb_s: Pause until the neighbour has taken over a lost stage. Assumed.
        reconfigure_s: Pause to spread stages anew. 5, 10 or 20 s by model in Bamboo's simulator, its median here.
        global_rendezvous_s: Pause of a restart of everyone from a checkpoint. 30 s in Bamboo's simulator, which counts
            no time for loading.
        overloaded_share: Twice the overloaded instances over all, above which stages are spread anew. 5 % in Bamboo's
            simulator.
        quorum_s: Pause of the other replicas when one is lost: torchft's default heartbeat timeout
            (``heartbeat_timeout_ms``). That new process groups take no time is assumed.
        join_s: Pause of the other replicas when one comes back. Assumed.
        num_stages: Stages of the systems that keep them fixed; None means the best for the trace's capacity.
    """

    checkpoint_every_s: float = 60.0
    restart_s: float = 16.8
    checkpoint_s: float = 14.0
    restart_always: bool = False
    bytes_per_s: float = 0.896e9
    overprovision: float = 1.5
    redundant_slowdown: float = 1.1
    overloaded_slowdown: float = 1.5
    absorb_s: float = 1.0
    reconfigure_s: float = 10.0
    global_rendezvous_s: float = 30.0
    overloaded_share: float = 0.05
    quorum_s: float = 5.0
    join_s: float = 1.0
    num_stages: int | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in ("num_stages", "restart_always"):
                continue
            least = 1.0 if one.name in ("overprovision", "redundant_slowdown", "overloaded_slowdown") else 0.0
            is_finite = math.isfinite(value) or one.name == "checkpoint_every_s"
            if not (is_finite and value >= least):
                raise ValueError(f"{one.name} must be a number of at least {least:g}, got {value}")
        if self.bytes_per_s == 0:
            raise ValueError("bytes_per_s must be above 0")
        if self.restart_always not in (False, True):
            raise ValueError(f"restart_always must be 0 or 1, got {self.restart_always}")
        if self.num_stages is not None and not (self.num_stages >= 1 and self.num_stages == int(self.num_stages)):
            raise ValueError(f"num_stages must be a whole number of at least 1, or None, got {self.num_stages}")


class RestartTimes:
    """How long processes of a model take to start, and its state to load.

    Args:
        workload: The model; its constants of the reference system are used where it has them.
        terms: For models that have none.
    """

    def __init__(self, workload: Workload, terms: SystemTerms) -> None:
        self._workload = workload
        self._terms = terms
        self._cost = workload.reference_cost

    def processes_s(self, config: ParallelConfig, *, grows: bool) -> float:
        """Return the seconds to start everyone, no state loaded."""
        if self._cost is None:
            return self._terms.restart_s
        return self._cost.restart_s(config, grows=grows)

    def from_checkpoint_s(self, config: ParallelConfig, *, grows: bool) -> float:
        """Return the seconds of a restart from a checkpoint.

        With the reference system's constants this is its checkpoint baseline: processes, 14 s, and one stage after the
        other over the link.
        """
        loading = sum(self._transfer_s(size) for size in self._stage_bytes(config.num_stages))
        extra = 0.0 if self._cost is None else self._terms.checkpoint_s
        return self.processes_s(config, grows=grows) + extra + loading

    def stage_s(self, config: ParallelConfig) -> float:
        """Return the seconds to load the largest stage, all instances at the same time."""
        return max(self._transfer_s(size) for size in self._stage_bytes(config.num_stages))

    def _transfer_s(self, num_bytes: float) -> float:
        return num_bytes / self._terms.bytes_per_s if self._cost is None else self._cost.transfer_s(num_bytes)

    def _stage_bytes(self, num_stages: int) -> list[int]:
        sizes = self._workload.layer_bytes
        edges = self._workload.cuts.get(num_stages)
        if edges is None:
            edges = tuple(len(sizes) * index // num_stages for index in range(num_stages + 1))
        return [sum(sizes[low:high]) for low, high in pairwise(edges)]


class Choices:
    """The configurations of a profile, looked up in constant time.

    Args:
        profile: Throughput and limits.
        capacity: Most instances there ever are.
    """

    def __init__(self, profile: Profile, capacity: int) -> None:
        self._rates = {config: profile.samples_per_s(config) for config in profile.configs(capacity)}
        self._rates = {config: rate for config, rate in self._rates.items() if rate > 0}
        self._fastest = self._table(capacity, lambda config: True)
        self._with_stages: dict[int, list[ParallelConfig | None]] = {}
        self.capacity = capacity

    def rate(self, config: ParallelConfig) -> float:
        """Return samples per second."""
        return self._rates[config]

    def fastest(self, num_instances: int, num_stages: int | None = None) -> ParallelConfig | None:
        """Return the fastest configuration for so many instances; of equally fast ones the one with the smallest ``D``.

        Args:
            num_instances: Instances there are.
            num_stages: Only configurations of so many stages; None means any.
        """
        if num_stages is None:
            return self._fastest[num_instances]
        if num_stages not in self._with_stages:
            self._with_stages[num_stages] = self._table(self.capacity, lambda config: config.num_stages == num_stages)
        return self._with_stages[num_stages][num_instances]

    def fixed_stages(self, wanted: int | None) -> int | None:
        """Return the stages of a system that keeps them: those asked for, or the best for the capacity."""
        best = self._fastest[self.capacity]
        return wanted if wanted is not None else best.num_stages if best is not None else None

    def redundant_stages(self, wanted: int | None, overprovision: float) -> int | None:
        """Return the stages of pipelines with redundancy: the fastest for the capacity that are deep enough."""
        if wanted is not None or not self._rates:
            return wanted
        depths = {config.num_stages for config in self._rates}
        least = min(math.ceil(overprovision * min(depths)), max(depths))
        deep = [config for config in self._rates if config.num_stages >= least]
        return max(deep, key=lambda config: (self._rates[config], -config.num_pipelines)).num_stages

    def _table(self, capacity: int, wanted: Callable[[ParallelConfig], bool]) -> list[ParallelConfig | None]:
        table: list[ParallelConfig | None] = [None] * (capacity + 1)
        for config in self._rates:
            if wanted(config):
                table[config.num_instances] = self._better(table[config.num_instances], config)
        for count in range(1, capacity + 1):
            smaller = table[count - 1]
            if smaller is not None:
                table[count] = self._better(table[count], smaller)
        return table

    def _better(self, one: ParallelConfig | None, other: ParallelConfig) -> ParallelConfig:
        if one is None or self._rates[other] > self._rates[one]:
            return other
        return min(one, other) if self._rates[other] == self._rates[one] else one
