"""What the instances of the integration tests run: ordinary Lightning code."""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_parcae import ParcaeStrategy


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Samples that depend on their index only; each read is noted in a file."""

    def __init__(self, length: int, dtype: torch.dtype, reads: str | None = None) -> None:
        self.length, self.dtype, self.reads = length, dtype, reads

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.reads is not None:
            with open(f"{self.reads}/{os.getpid()}.jsonl", "a") as file:
                file.write(json.dumps({"index": index}) + "\n")
        generator = torch.Generator().manual_seed(1000 + index)
        x = torch.randn(8, generator=generator, dtype=self.dtype)
        return x, x.sum() * 0.5 + torch.randn((), generator=generator, dtype=self.dtype) * 0.1


class Regressor(L.LightningModule):
    """Nine layers with dropout; notes what each step did."""

    def __init__(self, dtype: torch.dtype, sleep_s: float = 0.0, hurry: str | None = None) -> None:
        super().__init__()
        self.hurry = hurry
        self.rate = 0.02
        self.diary: str | None = None
        self.objects: set[tuple[int, int]] = set()
        self.net = nn.Sequential(
            nn.Linear(8, 32),
            nn.Tanh(),
            nn.Dropout(0.2),
            nn.Linear(32, 32),
            nn.Tanh(),
            nn.Dropout(0.1),
            nn.Linear(32, 16),
            nn.Tanh(),
            nn.Linear(16, 1),
        ).to(dtype)
        self.sleep_s = sleep_s
        self.steps: list[tuple[int, int, int, float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = (self.net(x).squeeze(-1) - y).pow(2).mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", (self.net(x).squeeze(-1) - y).pow(2).mean())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.hurry is None or not os.path.exists(self.hurry):  # the test has seen what it wanted
            time.sleep(self.sleep_s)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        self.objects.add((id(self), id(self.optimizers().optimizer)))  # type: ignore[union-attr]
        self.steps.append((self.current_epoch, batch_idx, self.global_step, float(outputs["loss"]), rate))
        if self.diary is not None:
            with open(self.diary, "a") as file:
                file.write(json.dumps([*self.steps[-1], time.time()]) + "\n")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit_regressor(
    name: str,
    out: str,
    *,
    strategy: dict[str, Any],
    trainer: dict[str, Any] | None = None,
    double: bool = True,
    sleep_s: float = 0.05,
    num_workers: int = 0,
    num_samples: int = 101,
    batch_size: int = 16,
    log_reads: bool = False,
    rate: float = 0.02,
) -> None:
    """Train, then write what happened to ``<out>/result-<name>.pt``."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    dtype = torch.float64 if double else torch.float32
    reads = None
    if log_reads:
        reads = f"{out}/reads"
        Path(reads).mkdir(parents=True, exist_ok=True)
    checkpoint = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
    callbacks = [checkpoint, EarlyStopping("val_loss", patience=50), LearningRateMonitor("step")]
    options: dict[str, Any] = {
        "max_epochs": 8,
        "gradient_clip_val": 0.5,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "precision": "64-true" if double else "32-true",
        **(trainer or {}),
    }
    fitter = L.Trainer(
        strategy=ParcaeStrategy(**{"policy": "fixed", **strategy}),
        accelerator="cpu",
        devices=1,
        default_root_dir=out,
        logger=CSVLogger(out),
        callbacks=callbacks,
        **options,
    )
    module = Regressor(dtype, sleep_s, hurry=f"{out}/hurry")
    module.rate = rate
    module.diary = f"{out}/steps-{name}.jsonl"
    before = {id(p) for p in module.parameters()}
    train = DataLoader(Numbers(num_samples, dtype, reads), batch_size=batch_size, shuffle=True, num_workers=num_workers)
    fitter.fit(module, train, DataLoader(Numbers(13, dtype), batch_size=8))
    torch.save(
        {
            "steps": module.steps,
            "state_dict": dict(module.state_dict()),
            "metrics": {key: float(value) for key, value in fitter.callback_metrics.items()},
            "best": os.path.basename(checkpoint.best_model_path),
            "global_step": fitter.global_step,
            "epoch": fitter.current_epoch,
            "pid": os.getpid(),
            "same_parameters": before == {id(p) for p in module.parameters()},
            "num_objects": len(module.objects),
            "moments": {i: s["exp_avg"] for i, s in fitter.optimizers[0].state_dict()["state"].items()},
            "log_dir": str(fitter.loggers[0].log_dir),
        },
        f"{out}/result-{name}.pt",
    )
