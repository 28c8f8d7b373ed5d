"""Profile and planner of a job: measures the layers here, or reads the user's profile.

:class:`ScriptMeasurement` is what ``parcae profile`` finds in the script that it runs: the strategy measures instead of
training on.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from typing_extensions import override

from lightning_parcae.availability.forecast import Forecaster
from lightning_parcae.control.messages import JobSpec
from lightning_parcae.engine.measure import measure_layers, resident_bytes
from lightning_parcae.forecast_process import ForecastProcess
from lightning_parcae.planner import ControlLink, Planner
from lightning_parcae.planning.job_planner import JobModel, JobPlanner, PlannerSettings
from lightning_parcae.planning.job_profile import JobProfile, Limits
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.policy import table_from_json
from lightning_parcae.planning.profile import ModelProfile, ThroughputProfile, read_profile
from lightning_parcae.planning.script_report import REPORT_VARIABLE, STEPS_VARIABLE, ScriptReport

log = logging.getLogger(__name__)

_USABLE_SHARE = 0.9
"""Of a device's memory; the rest is for the CUDA context, kernels' work space and fragments."""

_GIB = 1 << 30

# Scored forecasts that a planner with ARIMA models remembers; a new rank 0 asks for as many again.
_ARIMA_SCORES = 60


def memory_of(devices: Sequence[torch.device], device_memory_gib: float | None) -> float | None:
    """Return the bytes that an instance may use on its devices.

    Args:
        devices: Local devices of the instance, which its stage is spread over.
        device_memory_gib: What the user says that an instance has; None to ask the devices.

    Returns:
        The bytes; None where nobody knows, as on CPU.
    """
    if device_memory_gib is not None:
        return device_memory_gib * _GIB
    if any(device.type != "cuda" for device in devices):
        return None
    return _USABLE_SHARE * sum(torch.cuda.get_device_properties(device).total_memory for device in devices)


def measure_profile(
    limits: Limits,
    *,
    layers: Sequence[nn.Module],
    sample: Any,
    context: Callable[[], AbstractContextManager[Any]],
    num_samples: int,
    recompute: bool,
    memory_bytes: float | None,
    name: str = "measured in the job",
) -> ModelProfile:
    """Measure the layers.

    Args:
        limits: What may run.
        layers: The pipelined layers, all resident.
        sample: One micro-batch as the first layer gets it; None if unknown.
        context: What a step runs in, such as autocast.
        num_samples: Samples of a global batch.
        recompute: Whether activations are computed again.
        memory_bytes: See :func:`memory_of`.
        name: Name of the profile.
    """
    return ModelProfile(
        name=name,
        layers=tuple(measure_layers(layers, sample, context=context)),
        num_samples=num_samples,
        num_microbatches=limits.max_pipelines,
        memory_bytes=memory_bytes,
        recompute=recompute,
        min_stages=limits.min_stages,
    )


def read_given_profile(path: str, limits: Limits, *, memory_bytes: float | None) -> ModelProfile | ThroughputProfile:
    """Read a profile that the user gives; what is known of the devices here counts more than what it says of them.

    Raises:
        ValueError: If it cannot be read, or does not fit the model.
    """
    base = read_profile(path)
    if isinstance(base, ModelProfile) and memory_bytes is not None:
        base = replace(base, memory_bytes=memory_bytes)
    JobProfile(base, limits)  # says what does not fit
    return base


def within_memory(spec: JobSpec, base: ModelProfile | ThroughputProfile, limits: Limits) -> JobSpec:
    """Let a job start with nothing that does not fit into memory.

    Raises:
        PlanError: If nothing fits.
    """
    if not isinstance(base, ModelProfile) or base.memory_bytes is None:
        return spec
    table = JobProfile(base, limits, cuts=_cuts_of(spec)).most_instances_table(len(spec.table) - 1)
    pairs = [None if config is None else (config.num_pipelines, config.num_stages) for config in table]
    return replace(spec, table=pairs)


def _cuts_of(spec: JobSpec) -> dict[int, tuple[int, ...]]:
    return {stages: tuple(starts) for stages, starts in spec.boundaries.items()}


def build_planner(
    link: ControlLink,
    settings: PlannerSettings,
    spec: JobSpec,
    limits: Limits,
    base: ModelProfile | ThroughputProfile,
    *,
    num_samples: int,
    fallback_every_n_steps: int | None = None,
    run_dir: str | None = None,
) -> Planner:
    """Build this instance's planner.

    Args:
        link: Connection to the coordinator.
        settings: How to plan.
        spec: The job.
        limits: What may run.
        base: The profile to plan with.
        num_samples: Samples of a global batch.
        fallback_every_n_steps: Steps between two fallback checkpoints; None if there are none.
        run_dir: Where the profile is kept, as ``profile.json``.
    """
    model = JobModel(
        profile=base,
        limits=limits,
        layer_bytes=tuple(spec.layer_bytes),
        cuts=_cuts_of(spec),
        start_table=table_from_json(spec.table),
        num_samples=num_samples,
        fallback_every_n_steps=fallback_every_n_steps,
    )
    path = None if run_dir is None else Path(run_dir) / "profile.json"
    candidates: tuple[Forecaster, ...] = ()
    process: ForecastProcess | None = None
    if settings.forecaster == "arima":
        # Not with "auto": a process more, and up to seconds of a core, for what is no better on any trace we know.
        process = ForecastProcess()
        candidates = (process.arima((1, 1, 0)), process.arima(None))
        settings = replace(settings, max_scores=_ARIMA_SCORES)  # replayed at each change of rank 0
    return Planner(
        link,
        JobPlanner(model, settings, candidates=candidates),
        profile_path=path,
        on_end=lambda: None if process is None else process.close(),
    )


class ScriptMeasurement:
    """Measures a user's script from the inside, for ``parcae profile``, and says how far it has come.

    Args:
        path: Where the report is written.
        num_steps: Training steps to measure.
        clock: Seconds.
    """

    _NUM_SLOW_STEPS = 2

    def __init__(self, path: Path, num_steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.report = ScriptReport()
        self._path = path
        self._num_steps = num_steps
        self._clock = clock
        self._num_seen = 0
        self._last_end: float | None = None
        self._work_s: list[float] = []
        self._whole_s: list[float] = []

    @classmethod
    def requested(cls) -> ScriptMeasurement | None:
        """Return what the environment asks for; None in a script that shall train."""
        path = os.environ.get(REPORT_VARIABLE)
        return None if not path else cls(Path(path), int(os.environ.get(STEPS_VARIABLE, "10")))

    def reach(self, **changes: Any) -> None:
        """Report more."""
        self.report = replace(self.report, **changes)
        part = self._path.with_suffix(".part")
        part.write_text(self.report.to_json(), encoding="utf-8")
        part.replace(self._path)

    def refuse(self, error: BaseException) -> None:
        """Report that the script cannot be trained as it is, unless the user's code has failed."""
        if isinstance(error, MisconfigurationException):
            self.reach(refusal=str(error))

    @property
    def has_layers(self) -> bool:
        """Whether the layers are measured."""
        return self.report.profile is not None

    def take_layers(self, profile: ModelProfile, layers: Sequence[nn.Module], device: str) -> None:
        """Report the measured layers; the steps begin."""
        names = tuple(type(layer).__name__ for layer in layers)
        is_guessed = not any(layer.output_bytes for layer in profile.layers)
        self.reach(reached="layers", profile=profile, layer_names=names, device=device, is_guessed=is_guessed)

    def note(self, started: float) -> None:
        """Note a training step that has just been done; the first ones are slow and do not count."""
        now, last = self._clock(), self._last_end
        self._last_end = now
        self._num_seen += 1
        if last is not None and self._num_seen > self._NUM_SLOW_STEPS:
            self._work_s.append(now - started)
            self._whole_s.append(now - last)

    @property
    def is_complete(self) -> bool:
        """Whether enough steps were measured."""
        return len(self._whole_s) >= self._num_steps

    def finish(self, layers: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Report the step time, and the state as the optimizer has made it."""
        profile = self.report.profile
        assert profile is not None
        if not self._whole_s:
            self.reach(reached="steps")
            return
        costs = tuple(
            replace(cost, state_bytes=resident_bytes(layer, optimizers))
            for cost, layer in zip(profile.layers, layers, strict=True)
        )
        whole_s = median(self._whole_s)
        self.reach(
            reached="steps",
            profile=replace(profile, layers=costs, step_s={ParallelConfig(1, 1): whole_s}),
            num_steps=len(self._whole_s),
            other_s=max(whole_s - median(self._work_s), 0.0),
        )


class SilentLogger(DummyLogger):
    """Stands for a logger while a script is measured: it knows where that one writes, and writes nothing."""

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self._directory = getattr(logger, "log_dir", None) or logger.save_dir
        self._silenced = (logger.name, logger.version)

    @property
    @override
    def save_dir(self) -> str | None:
        return self._directory

    @property
    @override
    def name(self) -> str | None:  # type: ignore[override]
        return self._silenced[0]

    @property
    @override
    def version(self) -> int | str | None:  # type: ignore[override]
        return self._silenced[1]
