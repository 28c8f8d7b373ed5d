"""What an instance tells the coordinator about the job when it asks for a place."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from torch import nn

from lightning_parcae.control.messages import JobSpec
from lightning_parcae.engine.partition import fingerprint, parameter_bytes, stage_boundaries
from lightning_parcae.planning.job_profile import Limits
from lightning_parcae.planning.policy import most_instances_table

MAX_INSTANCES = 1024
"""Layouts are planned for up to this many instances."""


def describe_job(
    module: pl.LightningModule,
    pipeline_path: str,
    layers: Sequence[nn.Module],
    *,
    limits: Limits,
    costs: Sequence[float],
    settings: Sequence[object],
    max_step_failures: int,
    min_instances_timeout_s: float | None,
    has_fallback: bool,
) -> JobSpec:
    """Describe the job.

    Args:
        module: The user's module.
        pipeline_path: Where its pipelined part lies.
        layers: The layers of that part.
        limits: What the user and the model allow.
        costs: Cost of each layer, which the stages are balanced by.
        settings: What must be the same on every instance beside the model.
        max_step_failures: See ``ParcaeStrategy``.
        min_instances_timeout_s: See ``ParcaeStrategy``.
        has_fallback: Whether there are checkpoints to go back to.
    """
    longest = min(limits.max_stages or len(layers), len(layers))
    table = most_instances_table(
        num_layers=len(layers),
        max_instances=min(MAX_INSTANCES, limits.max_pipelines * longest),
        max_pipelines=limits.max_pipelines,
        num_stages=limits.num_stages,
        num_pipelines=limits.num_pipelines,
        min_stages=limits.min_stages,
        max_stages=longest,
    )
    return JobSpec(
        num_layers=len(layers),
        layer_bytes=[3 * parameter_bytes(layer) for layer in layers],  # parameters and two moments
        table=[None if entry is None else (entry.num_pipelines, entry.num_stages) for entry in table],
        boundaries={stages: list(stage_boundaries(costs, stages)) for stages in range(1, longest + 1)},
        fingerprint=fingerprint(module, pipeline_path, settings),
        max_step_failures=max_step_failures,
        min_instances_timeout_s=min_instances_timeout_s,
        has_fallback=has_fallback,
    )
