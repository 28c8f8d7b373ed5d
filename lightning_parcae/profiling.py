"""Builds the planner of a job: measures the layers here, or reads the user's profile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from lightning_parcae.availability.forecast import Forecaster
from lightning_parcae.control.messages import JobSpec
from lightning_parcae.engine.measure import measure_layers
from lightning_parcae.forecast_process import ForecastProcess
from lightning_parcae.planner import ControlLink, Planner
from lightning_parcae.planning.job_planner import JobModel, JobPlanner, PlannerSettings
from lightning_parcae.planning.job_profile import JobProfile, Limits
from lightning_parcae.planning.policy import table_from_json
from lightning_parcae.planning.profile import ModelProfile, ThroughputProfile, read_profile

log = logging.getLogger(__name__)


def build_planner(
    link: ControlLink,
    settings: PlannerSettings,
    spec: JobSpec,
    limits: Limits,
    *,
    layers: Sequence[nn.Module],
    sample: Any,
    context: Callable[[], AbstractContextManager[Any]],
    num_samples: int,
    recompute: bool,
    profile: str | None = None,
    fallback_every_n_steps: int | None = None,
    run_dir: str | None = None,
) -> Planner:
    """Build this instance's planner.

    Args:
        link: Connection to the coordinator.
        settings: How to plan.
        spec: The job.
        limits: What may run.
        layers: The pipelined layers, all resident.
        sample: One micro-batch as the first layer gets it; None if unknown.
        context: What a step runs in, such as autocast.
        num_samples: Samples of a global batch.
        recompute: Whether activations are computed again.
        profile: Path of a profile to use instead of a measurement.
        fallback_every_n_steps: Steps between two fallback checkpoints; None if there are none.
        run_dir: Where the profile is kept, as ``profile.json``.

    Raises:
        ValueError: If the given profile cannot be read, or does not fit the model.
    """
    base: ModelProfile | ThroughputProfile
    if profile is not None:
        base = read_profile(profile)
        JobProfile(base, limits)  # says what does not fit
    else:
        base = ModelProfile(
            name="measured in the job",
            layers=tuple(measure_layers(layers, sample, context=context)),
            num_samples=num_samples,
            num_microbatches=limits.max_pipelines,
            recompute=recompute,
            min_stages=limits.min_stages,
        )
    model = JobModel(
        profile=base,
        limits=limits,
        layer_bytes=tuple(spec.layer_bytes),
        cuts={stages: tuple(starts) for stages, starts in spec.boundaries.items()},
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
        settings = replace(settings, max_scores=settings.min_scores)  # replayed at each change of rank 0
    return Planner(
        link,
        JobPlanner(model, settings, candidates=candidates),
        profile_path=path,
        on_end=lambda: None if process is None else process.close(),
    )
