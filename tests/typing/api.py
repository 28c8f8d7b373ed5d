"""The public API as a type checker sees it. Never run; `mypy` reads it."""

from __future__ import annotations

import lightning.pytorch as L
from lightning.pytorch.strategies import Strategy

import lightning_parcae
from lightning_parcae import ParcaeCallback, ParcaeStrategy
from lightning_parcae.errors import (
    CheckpointError,
    FencedError,
    MembershipError,
    MigrationError,
    ParcaeError,
    PlanError,
)
from lightning_parcae.planning.layout import Layout
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.policy import most_instances_table

version: str = lightning_parcae.__version__


def by_name() -> L.Trainer:
    return L.Trainer(strategy="parcae", accelerator="cpu", devices=4)


def by_defaults() -> Strategy:
    strategy: Strategy = ParcaeStrategy()
    return strategy


def by_arguments() -> L.Trainer:
    strategy = ParcaeStrategy(
        num_stages=2,
        num_pipelines=2,
        micro_batch_size=8,
        pipeline_module="net",
        devices_per_instance=1,
        recompute="except_last",
        batch_norm="deferred",
        balance="time",
        loss_weight=lambda batch: float(len(batch)),
        fallback_dir="s3://bucket/run",
        fallback_every_n_steps=50,
        failure_timeout=10.0,
        min_instances_timeout=3600.0,
        seed=20,
    )
    return L.Trainer(strategy=strategy, callbacks=[ParcaeCallback()])


def by_bounds() -> ParcaeStrategy:
    return ParcaeStrategy(min_stages=1, max_stages=4)


def mistakes_are_seen() -> None:
    ParcaeStrategy(recompute="sometimes")  # type: ignore[arg-type]
    ParcaeStrategy(num_stage=2)  # type: ignore[call-arg]


def errors_have_one_base() -> list[type[ParcaeError]]:
    return [PlanError, MembershipError, FencedError, MigrationError, CheckpointError]


def values() -> tuple[int, tuple[int, int] | None, range]:
    config: ParallelConfig = ParallelConfig(num_pipelines=2, num_stages=2)
    table: tuple[ParallelConfig | None, ...] = most_instances_table(num_layers=4, max_instances=8, max_pipelines=4)
    layout = Layout(generation=1, grid=(("a", "b"),), order=("a", "b"), boundaries=(0, 2, 4))
    return config.num_instances + len(table), layout.place_of("a"), layout.layers_of("b")
