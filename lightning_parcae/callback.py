"""Metrics and one line for every reconfiguration."""

from __future__ import annotations

import logging
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_parcae.planning.layout import Layout
from lightning_parcae.testing import reach

log = logging.getLogger(__name__)


class ParcaeCallback(Callback):
    """Logs ``parcae/*`` metrics and says what each reconfiguration was for.

    ``ParcaeStrategy`` adds one by itself. The metrics are written after each reconfiguration and every
    ``log_every_n_steps``: ``parcae/instances``, ``parcae/num_pipelines``, ``parcae/num_stages``,
    ``parcae/generation``, ``parcae/reconfigurations``, ``parcae/pause_s`` (all pauses so far) and
    ``parcae/samples_replayed`` (samples of batches that were done again).
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._num_reconfigurations = 0
        self._pause_s = 0.0
        self._samples_replayed = 0
        self._is_new = False
        self._started = time.monotonic()

    def on_generation(self, trainer: pl.Trainer, layout: Layout, reason: str, pause_s: float) -> None:
        """Take note of a new generation; called by the strategy on every member."""
        if self._layout is not None:
            self._num_reconfigurations += 1
        self._pause_s += pause_s
        self._layout = layout
        self._is_new = True
        if trainer.is_global_zero:
            log.info(
                "generation %d: %s on %d instances after %.2f s (%s)",
                layout.generation,
                layout.config,
                len(layout.order),
                pause_s,
                reason,
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
        }

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        step = trainer.global_step
        if self._layout is None or not (self._is_new or step % max(trainer.log_every_n_steps, 1) == 0):
            return
        self._is_new = False
        # rank 0 alone writes them: the pauses are measured by each member for itself
        for logger in trainer.loggers:
            logger.log_metrics(self.metrics, step=step)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        reach("epoch_end")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "num_reconfigurations": self._num_reconfigurations,
            "pause_s": self._pause_s,
            "samples_replayed": self._samples_replayed,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_reconfigurations = state_dict["num_reconfigurations"]
        self._pause_s = state_dict["pause_s"]
        self._samples_replayed = state_dict["samples_replayed"]
