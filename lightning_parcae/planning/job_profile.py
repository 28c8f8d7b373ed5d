"""A profile as it holds in a running job: within the user's limits, cut as the job cuts, corrected by measured steps.

Symbols: ``D`` pipelines, ``P`` stages in each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Any

from lightning_parcae.errors import PlanError
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.policy import LayoutTable
from lightning_parcae.planning.profile import ModelProfile, ThroughputProfile

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user and the model allow.

    Attributes:
        num_layers: Layers of the model.
        max_pipelines: Most pipelines that can be fed.
        num_stages: Stages, if pinned.
        num_pipelines: Pipelines, if pinned.
        min_stages: Fewest stages.
        max_stages: Most stages; ``num_layers`` if None.
    """

    num_layers: int
    max_pipelines: int
    num_stages: int | None = None
    num_pipelines: int | None = None
    min_stages: int = 1
    max_stages: int | None = None

    def allow(self, config: ParallelConfig) -> bool:
        """Return whether a configuration is within the limits."""
        most = min(self.max_stages if self.max_stages is not None else self.num_layers, self.num_layers)
        return (
            self.min_stages <= config.num_stages <= most
            and config.num_pipelines <= self.max_pipelines
            and self.num_stages in (None, config.num_stages)
            and self.num_pipelines in (None, config.num_pipelines)
        )


@dataclass(frozen=True, slots=True)
class StepTime:
    """Measured time of the steps of one configuration.

    Attributes:
        work_s: Forward, backward, reduction and vote.
        other_s: Everything else, such as hooks, callbacks and reading data: the same in every configuration.
    """

    work_s: float
    other_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """What a link between two instances does.

    Attributes:
        latency_s: Time of an empty message.
        bytes_per_s: Bandwidth.
    """

    latency_s: float
    bytes_per_s: float

    @classmethod
    def typical(cls, links: Sequence[LinkSpeed]) -> LinkSpeed | None:
        """Return the medians of several links; None without any."""
        if not links:
            return None
        return cls(median(link.latency_s for link in links), median(link.bytes_per_s for link in links))

    def is_close(self, other: LinkSpeed, tolerance: float) -> bool:
        """Whether latency and bandwidth differ by at most a share of the other's."""
        pairs = ((self.latency_s, other.latency_s), (self.bytes_per_s, other.bytes_per_s))
        return all(abs(mine - theirs) <= tolerance * theirs for mine, theirs in pairs)


@dataclass(frozen=True)
class _CutProfile(ModelProfile):
    """A model profile whose stages are cut as the job cuts them."""

    cuts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def boundaries(self, num_stages: int) -> tuple[int, ...]:
        """See :class:`ModelProfile`; what is not given is cut as there."""
        return self.cuts[num_stages] if num_stages in self.cuts else ModelProfile.boundaries(self, num_stages)


class JobProfile:
    """Throughput of the configurations that a job may take; a :class:`~lightning_parcae.planning.profile.Profile`.

    A model's step time is replaced where steps were measured, and corrected elsewhere. A given table of throughputs
    keeps its proportions, and measured steps give its scale.

    Args:
        base: A model or a table.
        limits: What may run.
        cuts: The job's boundaries for each number of stages.
        measured: Step times by configuration.
        num_samples: Samples of a global batch, for a table.
        caution: Share by which a configuration that has not run is taken to be slower than the model says, as long as
            others have been measured: a change must be worth more than what the model may err.
    """

    def __init__(
        self,
        base: ModelProfile | ThroughputProfile,
        limits: Limits,
        *,
        cuts: Mapping[int, tuple[int, ...]] | None = None,
        measured: Mapping[ParallelConfig, StepTime] | None = None,
        num_samples: int = 1,
        caution: float = 0.1,
    ) -> None:
        self.limits = limits
        self._measured = dict(measured or {})
        self._caution = caution
        self._scale = 1.0
        self._other_s = median(step.other_s for step in self._measured.values()) if self._measured else 0.0
        if isinstance(base, ModelProfile):
            if len(base.layers) != limits.num_layers:
                raise ValueError(
                    f"the profile {base.name} is of {len(base.layers)} layers, but the model has {limits.num_layers}; "
                    "measure it again, or leave it out"
                )
            values = {item.name: getattr(base, item.name) for item in fields(ModelProfile) if item.init}
            base = _CutProfile(**values, cuts=dict(cuts or {}))
            known = {config: step.work_s for config, step in self._measured.items()}
            base = replace(base, step_s={**base.step_s, **known})
        else:
            ratios = [
                num_samples / (step.work_s + step.other_s) / base.rates[config]
                for config, step in self._measured.items()
                if config in base.rates
            ]
            self._scale = median(ratios) if ratios else 1.0
        self._base = base

    def configs(self, max_instances: int) -> tuple[ParallelConfig, ...]:
        """See :class:`~lightning_parcae.planning.profile.Profile`."""
        return tuple(config for config in self._base.configs(max_instances) if self.limits.allow(config))

    def samples_per_s(self, config: ParallelConfig) -> float:
        """See :class:`~lightning_parcae.planning.profile.Profile`."""
        if not self.limits.allow(config):
            return 0.0
        base = self._base
        if isinstance(base, ThroughputProfile):
            return base.samples_per_s(config) * self._scale
        if not base.fits(config):
            return 0.0
        if config in base.step_s and config not in self._measured:  # a whole step, of an earlier run
            return base.num_samples / base.step_s[config]
        rate = base.num_samples / (base.step_time_s(config) + self._other_s)
        return rate * (1.0 - self._caution) if self._measured and config not in self._measured else rate

    def to_json(self) -> dict[str, Any]:
        """Return the profile as JSON values, with whole steps as measured; limits and cuts are the job's own."""
        base = self._base
        if isinstance(base, ThroughputProfile):
            return base.to_json()
        values = {item.name: getattr(base, item.name) for item in fields(ModelProfile) if item.init}
        whole = {config: step.work_s + step.other_s for config, step in self._measured.items()}
        values["step_s"] = {**values["step_s"], **whole}
        return ModelProfile(**values).to_json()

    def most_instances_table(self, max_instances: int) -> LayoutTable:
        """Return, for each number of instances, what leaves the fewest idle, of equally many the fewest stages.

        As :func:`~lightning_parcae.planning.policy.most_instances_table`, of the configurations that fit into memory.

        Args:
            max_instances: Length of the table minus one.

        Raises:
            PlanError: If nothing fits, however many instances there are.
        """
        best: list[ParallelConfig | None] = [None] * (max_instances + 1)
        for config in sorted(self.configs(max_instances), key=lambda config: -config.num_stages):
            best[config.num_instances] = config  # the fewest stages come last
        if not any(best):
            raise PlanError(self._nothing_fits(max_instances))
        table: list[ParallelConfig | None] = []
        for entry in best:
            table.append(entry if entry is not None or not table else table[-1])
        return tuple(table)

    def _nothing_fits(self, max_instances: int) -> str:
        base = self._base
        assert isinstance(base, ModelProfile) and base.memory_bytes is not None
        free = replace(base, memory_bytes=None)
        allowed = [config for config in free.configs(max_instances) if self.limits.allow(config)]
        best = min(allowed, key=free.stage_memory_bytes, default=None)
        found = "none is allowed by the limits"
        if best is not None:
            found = f"the least that one needs is {free.stage_memory_bytes(best) / _GIB:.3g} GiB, as {best}"
        return (
            f"no configuration fits into the memory of an instance ({base.memory_bytes / _GIB:.3g} GiB): {found}, "
            "by what the layers have shown (state, gradients and activations of the fullest stage). Use smaller "
            "micro-batches, recompute='always', more stages or larger devices; or say with device_memory=... (GiB) "
            "that there is more"
        )

    def fastest_table(
        self, max_instances: int, *, keep: ParallelConfig | None = None, noise: float = 0.0
    ) -> LayoutTable:
        """Return the fastest configuration for each number of instances.

        Args:
            max_instances: Length of the table minus one.
            keep: What runs; it is kept where nothing is faster by more than ``noise``.
            noise: Share of the throughput.
        """
        exact: list[tuple[float, ParallelConfig | None]] = [(0.0, None)] * (max_instances + 1)
        for config in self.configs(max_instances):
            rate = self.samples_per_s(config)
            if rate > exact[config.num_instances][0]:
                exact[config.num_instances] = (rate, config)
        kept = 0.0 if keep is None else self.samples_per_s(keep) * (1.0 + noise)
        table: list[ParallelConfig | None] = []
        best: tuple[float, ParallelConfig | None] = (0.0, None)
        for count, entry in enumerate(exact):
            best = entry if entry[0] > best[0] else best
            stays = keep is not None and keep.num_instances <= count and best[0] <= kept
            table.append(keep if stays else best[1])
        return tuple(table)
