"""What cannot be trained exactly is refused before the first step, with the reason and the change to make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

from lightning_parcae.engine.batch_norms import check_momentum
from lightning_parcae.engine.partition import check_pipeline, find_sequential

_CALLBACKS = {
    "StochasticWeightAveraging": "it averages parameters that live on other instances",
    "WeightAveraging": "it averages parameters that live on other instances",
    "ModelPruning": "it replaces parameters while stages hold them",
    "BatchSizeFinder": "it changes the batch size, which is the global batch here",
    "LearningRateFinder": "it runs and rewinds steps outside of the step protocol",
}
_OPTIMIZERS = {
    "LBFGS": "it needs the gradients of the whole model in one process",
    "SparseAdam": "its sparse gradients cannot be summed over pipelines",
}


def refuse_settings(module: pl.LightningModule, precision: Precision, *, syncs_batch_norm: bool = False) -> None:
    """Refuse what does not fit the step protocol, whatever the model.

    Raises:
        MisconfigurationException: With the reason and the change to make.
    """
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"{type(module).__name__} uses manual optimization, whose backward calls cannot be pipelined. "
            "Remove `self.automatic_optimization = False` and return the loss from training_step"
        )
    if syncs_batch_norm:
        raise MisconfigurationException(
            "sync_batchnorm=True is for strategies that do not cut batches. Leave it out and choose "
            "ParcaeStrategy(batch_norm='deferred'), whose running statistics are those of the whole batch"
        )
    callbacks: Sequence[Any] = module.trainer.callbacks if module._trainer is not None else ()  # type: ignore[attr-defined]
    for callback in callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in _CALLBACKS:
                raise MisconfigurationException(
                    f"the callback {type(callback).__name__} cannot be used with ParcaeStrategy: "
                    f"{_CALLBACKS[kind.__name__]}. Remove it"
                )
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        raise MisconfigurationException(
            "precision='16-mixed' scales the loss by a factor that all stages would have to agree on; "
            "use precision='bf16-mixed' or '32-true'"
        )


def refuse_model(module: pl.LightningModule, name: str | None, *, batch_norm: str | None, fewest_stages: int) -> str:
    """Refuse a model that cannot be cut into stages.

    Args:
        module: The user's module.
        name: The path of the pipelined module that the user gave, or None.
        batch_norm: What the user chose for BatchNorm.
        fewest_stages: Stages that there must be.

    Returns:
        The path of the module to pipeline.

    Raises:
        MisconfigurationException: With the reason and the change to make.
    """
    try:
        path = find_sequential(module, name)
        check_pipeline(module, path, batch_norm=batch_norm)
        check_momentum(list(module.get_submodule(path).children()))
    except ValueError as error:
        raise MisconfigurationException(str(error)) from error
    num_layers = len(module.get_submodule(path))  # type: ignore[arg-type]
    if fewest_stages > num_layers:
        raise MisconfigurationException(
            f"{fewest_stages} stages need at least {fewest_stages} layers, but {path} has {num_layers}; "
            "lower num_stages or min_stages, or split the layers"
        )
    return path


def refuse_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that cannot work on one stage alone.

    Raises:
        MisconfigurationException: With the reason and the change to make.
    """
    for optimizer in optimizers:
        for kind in type(optimizer).__mro__:
            if kind.__name__ in _OPTIMIZERS:
                raise MisconfigurationException(
                    f"{type(optimizer).__name__} cannot be used with ParcaeStrategy: {_OPTIMIZERS[kind.__name__]}. "
                    "Use SGD, Adam, AdamW or another optimizer that updates each parameter by itself"
                )


@contextmanager
def one_optimizer() -> Iterator[None]:
    """Say what to do where Lightning would advise manual optimization, which is refused as well.

    Raises:
        MisconfigurationException: If there are several optimizers.
    """
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise MisconfigurationException(
            "ParcaeStrategy trains with one optimizer, but configure_optimizers returned several; give one optimizer "
            "several parameter groups instead"
        ) from error


def refuse_loaders(trainer: pl.Trainer) -> None:
    """Refuse to train on several loaders at once.

    Raises:
        MisconfigurationException: With the change to make.
    """
    loaders = trainer.fit_loop._combined_loader
    if loaders is not None and len(loaders.flattened) > 1:
        raise MisconfigurationException(
            f"ParcaeStrategy trains on one DataLoader, but there are {len(loaders.flattened)}; join them into one "
            "dataset, such as torch.utils.data.StackDataset or ConcatDataset"
        )
