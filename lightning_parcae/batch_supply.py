"""Which loader hands out which part of a batch on this instance, and what Lightning does with it on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_parcae.data import AbsentBatch, ElasticLoader, ReadPosition
from lightning_parcae.engine.session import Session, SoloSession
from lightning_parcae.sharding.order import derive_seed

_LOCAL = ReadPosition(version=0, num_pipelines=1, pipeline=0)


class BatchSupply:
    """The loaders of one trainer.

    Args:
        micro_batch_size: See ``ParcaeStrategy``.
        boundary: Called between two training steps.

    Attributes:
        train_loader: The loader that ``fit`` trains on.
    """

    def __init__(self, *, micro_batch_size: int | None, boundary: Callable[[ElasticLoader], None]) -> None:
        self._micro_batch_size = micro_batch_size
        self._boundary = boundary
        self._session: Session | SoloSession | None = None
        self._module: pl.LightningModule | None = None
        self.train_loader: ElasticLoader | None = None

    # ------------------------------------------------------------------ the life of a fit

    def open(self, module: pl.LightningModule, session: Session | SoloSession) -> None:
        """Read what the session's layout says from here on."""
        self._module, self._session = module, session
        transfer = type(module)._on_before_batch_transfer.__get__(module)

        def skip_absent(batch: Any, dataloader_idx: int = 0) -> Any:
            # the user's transfer hooks see real batches only
            return batch if isinstance(batch, AbsentBatch) else transfer(batch, dataloader_idx=dataloader_idx)

        object.__setattr__(module, "_on_before_batch_transfer", skip_absent)

    def close(self) -> None:
        """Read whole batches from here on, and end the workers."""
        self._session = None
        if self._module is not None:
            self._module.__dict__.pop("_on_before_batch_transfer", None)
        if self.train_loader is not None:
            self.train_loader.close()

    # ------------------------------------------------------------------ loaders

    def wrap(self, dataloader: object, trainer: pl.Trainer, seed: int) -> object:
        """Return what Lightning reads from instead of a user's loader.

        Raises:
            MisconfigurationException: If it cannot be read exactly once.
        """
        fitting = trainer.state.fn == TrainerFn.FITTING
        if trainer.state.fn == TrainerFn.PREDICTING or not (fitting or isinstance(dataloader, DataLoader)):
            return dataloader
        if not isinstance(dataloader, DataLoader):
            raise MisconfigurationException(
                f"ParcaeStrategy needs a torch DataLoader, got {type(dataloader).__name__}; without one it cannot tell "
                "which samples a step has used"
            )
        training = fitting and trainer.state.stage == RunningStage.TRAINING
        if training and self.train_loader is not None and trainer.fit_loop._combined_loader is None:
            self.train_loader.close()
        loader = ElasticLoader(
            dataloader,
            seed=derive_seed(seed, "train" if training else "evaluation"),
            micro_batch_size=self._micro_batch_size,
            position=lambda: self._position(trainer),
            boundary=self._at_boundary if training else None,
            is_training=training,
        )
        if training:
            self.train_loader = loader
        return loader

    def _at_boundary(self, loader: ElasticLoader) -> None:
        self.train_loader = loader
        self._boundary(loader)

    def _position(self, trainer: pl.Trainer) -> ReadPosition | None:
        """Say which part of each global batch this instance reads now."""
        session = self._session
        if session is None or isinstance(session, SoloSession) or trainer.sanity_checking:
            return _LOCAL
        place = session.place
        if place is None or place[1] != 0:
            return None
        assert session.layout is not None
        return ReadPosition(
            version=session.generation, num_pipelines=session.layout.config.num_pipelines, pipeline=place[0]
        )

    # ------------------------------------------------------------------ batches

    def reread(self, loader: ElasticLoader, trainer: pl.Trainer, dataloader_idx: int = 0) -> Any:
        """Return the batch handed out last once more, cut for the present layout and ready for a step."""
        return self.prepare(loader.reread(self._position(trainer)), trainer, dataloader_idx)

    def prepare(self, batch: Any, trainer: pl.Trainer, dataloader_idx: int = 0) -> Any:
        """Treat a batch that was not fetched by Lightning's loop as the loop treats the others."""
        module, precision = trainer.lightning_module, trainer.precision_plugin
        assert isinstance(precision, Precision)
        batch = precision.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)

    @staticmethod
    def validation_loader(trainer: pl.Trainer, dataloader_idx: int) -> ElasticLoader:
        """Return the loader of the batch that ``validation_step`` is called with.

        Raises:
            MisconfigurationException: If one batch comes from several loaders.
        """
        combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
        assert combined is not None
        if combined._mode != "sequential":
            raise MisconfigurationException(
                f"the validation loaders are combined with mode={combined._mode!r}, whose batches cannot be cut; "
                "return a list of loaders, which are read one after the other"
            )
        loader = combined.flattened[dataloader_idx]
        assert isinstance(loader, ElasticLoader)
        return loader
