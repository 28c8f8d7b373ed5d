"""What the instances of the feature tests run: Lightning scripts that use much of what Lightning offers."""

from __future__ import annotations

import atexit
import os
import random
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_parcae import ParcaeStrategy, membership

CLASSES = 3


class Points(Dataset[Any]):
    """Samples that depend on their index only, in the form that is asked for."""

    def __init__(self, length: int, dtype: torch.dtype = torch.float64, form: str = "dict") -> None:
        self.length, self.dtype, self.form = length, dtype, form

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(500 + index)
        x = torch.randn(8, generator=generator, dtype=self.dtype)
        y = int(x.sum() > 0) + int(x[0] > 0.5)
        tokens = 1 + index % 7
        if self.form == "dict":
            return {"x": x, "extra": (torch.tensor(y), {"tokens": tokens})}
        return x, torch.tensor(y), tokens


class Unsized(IterableDataset[Any]):
    """A stream without a length."""

    def __iter__(self) -> Any:
        yield from (Points(20)[index] for index in range(20))


def unpack(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, targets and token counts of a batch in either form."""
    if isinstance(batch, Mapping):
        return batch["x"], batch["extra"][0], batch["extra"][1]["tokens"]
    return batch[0], batch[1], batch[2]


def count_tokens(batch: Any) -> float:
    """Return the weight of a batch whose loss is a mean over tokens."""
    return float(unpack(batch)[2].sum())


class Block(nn.Module):
    """A layer with a BatchNorm inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


def build_net(norm: str | None, dropout: float) -> nn.Sequential:
    """Return seven to nine layers."""
    layers: list[nn.Module] = [nn.Linear(8, 16, bias=norm is None)]
    if norm == "batch":
        layers.append(nn.BatchNorm1d(16))
    layers += [nn.Tanh(), nn.Linear(16, 16)]
    if dropout:
        layers.append(nn.Dropout(dropout))
    layers.append(nn.ReLU(inplace=True))
    layers.append(Block() if norm == "batch" else nn.Linear(16, 16))
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(16, CLASSES))


class Classifier(L.LightningModule):
    """A classifier that logs in every way; what it notes is compared between instances."""

    def __init__(
        self,
        norm: str | None = "batch",
        dropout: float = 0.1,
        schedule: str = "step",
        token_mean: bool = False,
        sleep_s: float = 0.0,
        swallow: bool = False,
        fail_at: tuple[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = build_net(norm, dropout)
        self.train_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.scores = MetricCollection(
            {"accuracy": MulticlassAccuracy(CLASSES, average="micro"), "f1": MulticlassF1Score(CLASSES)}, prefix="val_"
        )
        self.steps: list[tuple[int, int, int, float, float]] = []
        self.seen_by_hooks: list[str] = []
        self.num_calls = 0
        self.losses: list[float] = []
        self.num_swallowed = 0

    def loss_of(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, logits and targets."""
        x, y, tokens = unpack(batch)
        hparams: Any = self.hparams
        if hparams.swallow:
            try:
                logits = self.net(x)
            except Exception:
                self.num_swallowed += 1
                logits = torch.zeros(len(x), CLASSES, dtype=x.dtype, requires_grad=True)
        else:
            logits = self.net(x)
        each = nn.functional.cross_entropy(logits, y, reduction="none")
        loss = (each * tokens).sum() / tokens.sum() if hparams.token_mean else each.mean()
        return loss, logits, y

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_calls += 1
        fail_at = self.hparams["fail_at"]
        if fail_at and os.environ.get("PARCAE_INSTANCE") == fail_at[0] and self.global_step >= fail_at[1]:
            raise ValueError("the user's own mistake")
        loss, logits, y = self.loss_of(batch)
        self.losses.append(float(loss.detach()))
        self.train_accuracy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.log("largest", logits.detach().max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("smallest", logits.detach().min(), on_step=False, on_epoch=True, reduce_fx="min")
        self.log("samples", float(len(y)), on_step=False, on_epoch=True, reduce_fx="sum")
        return {"loss": loss, "note": "anything"}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss, logits, y = self.loss_of(batch)
        self.log("val_loss", loss)
        if dataloader_idx == 0:
            self.scores.update(logits, y)
            self.log_dict(self.scores, add_dataloader_idx=False)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss_of(batch)[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(unpack(batch)[0])

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen_by_hooks.append(type(batch).__name__)
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        time.sleep(self.hparams["sleep_s"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        self.steps.append((self.current_epoch, batch_idx, self.global_step, float(outputs["loss"]), rate))
        self.log("hook_value", float(batch_idx), on_step=False, on_epoch=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedulers = torch.optim.lr_scheduler
        kind = self.hparams["schedule"]
        if kind == "plateau":
            plateau = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train_loss_epoch"}}
        if kind == "step":
            steps = int(self.trainer.estimated_stepping_batches)
            one_cycle = schedulers.OneCycleLR(optimizer, 0.05, total_steps=steps + 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": one_cycle, "interval": "step"}}
        return {"optimizer": optimizer, "lr_scheduler": schedulers.MultiStepLR(optimizer, [1, 2])}


class Data(L.LightningDataModule):
    """A data module with a state of its own."""

    def __init__(
        self, form: str = "dict", num_samples: int = 58, batch_size: int = 16, double: bool = True, val_loaders: int = 2
    ) -> None:
        super().__init__()
        self.form, self.num_samples, self.batch_size, self.val_loaders = form, num_samples, batch_size, val_loaders
        self.dtype = torch.float64 if double else torch.float32
        self.num_epochs = 0

    def _loader(self, length: int, batch_size: int, **options: Any) -> DataLoader[Any]:
        return DataLoader(Points(length, self.dtype, self.form), batch_size=batch_size, **options)

    def train_dataloader(self) -> Any:
        return self._loader(self.num_samples, self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        loaders = [self._loader(13, 5), self._loader(9, 4)]
        return loaders[: self.val_loaders]

    def test_dataloader(self) -> Any:
        return self._loader(11, 4)

    def predict_dataloader(self) -> Any:
        return self._loader(7, 4)

    def state_dict(self) -> dict[str, Any]:
        return {"num_epochs": self.num_epochs, "nested": {"list": [1, 2.5, None]}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_epochs = state_dict["num_epochs"]


class CountEpochs(Callback):
    """Changes the data module's state."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.datamodule.num_epochs += 1  # type: ignore[attr-defined]


def fit_classifier(
    name: str,
    out: str,
    *,
    strategy: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    stop_early: bool = True,
    bar: str | None = None,
    seed: int | None = 1,
    ckpt_path: str | None = None,
    evaluate: bool = True,
    weigh_tokens: bool = False,
) -> dict[str, Any]:
    """Train, evaluate, and write what happened to ``<out>/result-<name>.pt``; without a strategy in plain Lightning."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if seed is not None:
        L.seed_everything(seed, verbose=False)
    monitored = "val_loss/dataloader_idx_0" if (data or {}).get("val_loaders", 2) > 1 else "val_loss"
    checkpoint = ModelCheckpoint(monitor=monitored, save_top_k=2, save_last=True)
    callbacks: list[Callback] = [checkpoint, CountEpochs()]
    if stop_early:
        callbacks.append(EarlyStopping(monitored, patience=2, min_delta=0.03))
    bars: dict[str, type[Callback]] = {"tqdm": TQDMProgressBar, "rich": RichProgressBar}
    if bar is not None:
        callbacks.append(bars[bar]())
    options: dict[str, Any] = {
        "max_epochs": 6,
        "log_every_n_steps": 1,
        "enable_progress_bar": bar is not None,
        "enable_model_summary": False,
        "precision": "64-true",
        **(trainer or {}),
    }
    if weigh_tokens:
        strategy = {**(strategy or {}), "loss_weight": count_tokens}
    fitter = L.Trainer(
        strategy="auto" if strategy is None else ParcaeStrategy(**{"policy": "fixed", **strategy}),
        accelerator="cpu",
        devices=1,
        default_root_dir=out,
        logger=[CSVLogger(out, name="csv"), TensorBoardLogger(out, name="tensorboard")],
        callbacks=callbacks,
        **options,
    )
    module, source = Classifier(**(model or {})), Data(**(data or {}))
    fitter.fit(module, datamodule=source, ckpt_path=ckpt_path)
    early = fitter.early_stopping_callback
    result: dict[str, Any] = {
        "steps": module.steps,
        "state_dict": {key: value.clone() for key, value in module.state_dict().items()},
        "metrics": {key: float(value) for key, value in fitter.callback_metrics.items()},
        "best": os.path.basename(checkpoint.best_model_path),
        "best_path": checkpoint.best_model_path,
        "best_paths": sorted(checkpoint.best_k_models),
        "best_k": sorted((os.path.basename(k), float(v)) for k, v in checkpoint.best_k_models.items()),
        "stopped_epoch": 0 if early is None else early.stopped_epoch,
        "global_step": fitter.global_step,
        "epoch": fitter.current_epoch,
        "data_epochs": source.num_epochs,
        "seen_by_hooks": sorted(set(module.seen_by_hooks)),
        "num_calls": module.num_calls,
        "num_swallowed": module.num_swallowed,
        "log_dirs": [str(logger.log_dir) for logger in fitter.loggers],
        "python_random": random.random(),
    }
    if evaluate:
        result["validated"] = fitter.validate(module, datamodule=source, verbose=False)
        result["tested"] = fitter.test(module, datamodule=source, verbose=False)
        result["predicted"] = fitter.predict(module, datamodule=source)
    torch.save(result, f"{out}/result-{name}.pt")
    return result


def evaluate_classifier(name: str, out: str) -> None:
    """Evaluate without training."""
    warnings.filterwarnings("ignore")
    L.seed_everything(1, verbose=False)
    fitter = L.Trainer(
        strategy=ParcaeStrategy(batch_norm="deferred"),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        precision="64-true",
    )
    module, source = Classifier(), Data()
    result = {
        "validated": fitter.validate(module, datamodule=source),
        "tested": fitter.test(module, datamodule=source),
        "predicted": fitter.predict(module, datamodule=source),
    }
    torch.save(result, f"{out}/result-{name}.pt")
    atexit._run_exitfuncs()  # as at the end of a script, which a forked process does not reach


def refuse(name: str, out: str, *, case: str) -> None:
    """Make a mistake that is seen when the job starts."""
    warnings.filterwarnings("ignore")
    L.seed_everything(1, verbose=False)
    module: L.LightningModule = Classifier(norm=None)
    loader: Any = DataLoader(Points(20), batch_size=8)
    strategy: dict[str, Any] = {"num_stages": 2}
    if case == "two_calls":
        module = CallsTwice(norm=None)
    elif case == "no_length":
        loader = DataLoader(Unsized(), batch_size=4)
    elif case == "fallback":
        strategy["fallback_dir"] = "/proc/nowhere/checkpoints"
    elif name == "odd" and case == "other_shape":
        module.net[-1] = nn.Linear(16, CLASSES, bias=False)
    elif name == "odd" and case == "other_version":
        membership._versions = lambda: {"lightning_parcae": "0.0.1", "lightning": "0.0.1", "torch": "0.0.1"}
    if case.startswith("other"):
        module.hparams["sleep_s"] = 0.2
    Path(out).mkdir(exist_ok=True)
    L.Trainer(
        strategy=ParcaeStrategy(**strategy),
        accelerator="cpu",
        devices=1,
        max_epochs=6 if case.startswith("other") else 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        precision="64-true",
    ).fit(module, loader)


class CallsTwice(Classifier):
    """Calls the pipelined module twice in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(batch)[0] + self.loss_of(batch)[0]
