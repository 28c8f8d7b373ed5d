"""Metrics and one line for every reconfiguration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_parcae import lightning_internals
from lightning_parcae.planning.layout import Layout
from lightning_parcae.testing import reach


class ParcaeCallback(Callback):
    """Logs ``parcae/*`` metrics and says what each reconfiguration was for.

    ``ParcaeStrategy`` adds one by itself. The metrics are written after each reconfiguration and every
    ``log_every_n_steps``: ``parcae/instances``, ``parcae/num_pipelines``, ``parcae/num_stages``,
    ``parcae/generation``, ``parcae/reconfigurations``, ``parcae/pause_s`` (all pauses so far) and
    ``parcae/samples_replayed`` (samples of batches that were done again). With a planner also those of its newest
    plan: ``parcae/liveput`` (expected samples per second, migrations included), ``parcae/forecast_lost`` (instances
    expected to be lost over its horizon), ``parcae/forecast_skill`` (against "nothing changes"; 0 if nobody has any)
    and ``parcae/plan_s`` (seconds it took to plan).
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._has_begun = False  # whether the job has had a generation before
        self._num_reconfigurations = 0
        self._pause_s = 0.0
        self._samples_replayed = 0
        self._is_new = False
        self._planner_metrics: Callable[[], Mapping[str, float]] = dict

    def watch_planner(self, metrics: Callable[[], Mapping[str, float]]) -> None:
        """Log a planner's metrics, too; called by the strategy."""
        self._planner_metrics = metrics

    def on_generation(self, trainer: pl.Trainer, layout: Layout, reason: str, pause_s: float) -> None:
        """Take note of a new generation; called by the strategy on every member."""
        if self._has_begun:
            self._num_reconfigurations += 1
        self._has_begun = True
        self._pause_s += pause_s
        self._layout = layout
        self._is_new = True
        # under a supervisor the console shows the coordinator's line for it
        if trainer.is_global_zero and os.environ.get("PARCAE_SUPERVISED") != "1":
            lightning_internals.say(
                trainer,
                f"parcae: generation {layout.generation} trains on {len(layout.order)} instances, "
                f"{layout.config.num_pipelines}x{layout.config.num_stages} (pipelines x stages), after a pause of "
                f"{pause_s:.2f} s ({reason})",
            )

    def on_replay(self, num_samples: int) -> None:
        """Take note of a batch that is done again; called by the strategy."""
        self._samples_replayed += num_samples

    @property
    def metrics(self) -> dict[str, float]:
        """The present values."""
        if self._layout is None:
            return {}
        return {
            "parcae/instances": float(len(self._layout.order)),
            "parcae/num_pipelines": float(self._layout.config.num_pipelines),
            "parcae/num_stages": float(self._layout.config.num_stages),
            "parcae/generation": float(self._layout.generation),
            "parcae/reconfigurations": float(self._num_reconfigurations),
            "parcae/pause_s": self._pause_s,
            "parcae/samples_replayed": float(self._samples_replayed),
            **self._planner_metrics(),
        }

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        every_n_steps = max(trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]
        if self._layout is None or not (self._is_new or trainer.global_step % every_n_steps == 0):
            return
        self._is_new = False
        # the loggers of rank 0 alone write them: each member measures its pauses for itself
        for logger in trainer.loggers:
            logger.log_metrics(self.metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
            logger.save()

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        _use_global_batch_size(trainer)

    @override
    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        _use_global_batch_size(trainer, dataloader_idx)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        reach("epoch_end")

    def counts(self) -> dict[str, Any]:
        """Return what has been counted since the start of the job, for a joiner.

        Not in ``state_dict``: it would only make a Trainer without this callback warn when it loads a checkpoint.
        """
        return {
            "has_begun": self._has_begun,
            "num_reconfigurations": self._num_reconfigurations,
            "pause_s": self._pause_s,
            "samples_replayed": self._samples_replayed,
        }

    def take_over(self, counts: Mapping[str, Any]) -> None:
        """Go on counting where another member is."""
        self._has_begun = counts["has_begun"]
        self._num_reconfigurations = counts["num_reconfigurations"]
        self._pause_s = counts["pause_s"]
        self._samples_replayed = counts["samples_replayed"]


def _use_global_batch_size(trainer: pl.Trainer, *validation_loader: int) -> None:
    use = getattr(trainer.strategy, "use_global_batch_size", None)
    if use is not None:  # the callback does nothing beside another strategy
        use(*validation_loader)
