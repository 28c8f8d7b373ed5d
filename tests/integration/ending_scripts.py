"""What the instances of the tests of unusual starts and ends run."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_parcae import ParcaeStrategy
from tests.integration.scripts import Numbers


class Model(L.LightningModule):
    """A regression that can be told to misbehave."""

    def __init__(self, name: str, out: str, *, dies_in_prepare_data: bool, saves_alone: bool) -> None:
        super().__init__()
        self.name, self.out = name, out
        self.dies_in_prepare_data, self.saves_alone = dies_in_prepare_data, saves_alone
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def prepare_data(self) -> None:
        """Note who prepares; the first one dies if it was told so, when others wait for it."""
        with open(f"{self.out}/prepared", "a", encoding="utf-8") as file:
            file.write(f"{self.name}\n")
        if self.dies_in_prepare_data and len(Path(f"{self.out}/prepared").read_text().split()) == 1:
            time.sleep(2.0)
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        """Return the loss of a batch."""
        x, y = batch
        return nn.functional.mse_loss(self.net(x).squeeze(-1), y)

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Call on one instance what all must call."""
        if self.saves_alone and self.trainer.global_step == 3 and self.trainer.is_global_zero:
            self.trainer.save_checkpoint(f"{self.out}/alone.ckpt")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(
    name: str,
    out: str,
    *,
    trainer: dict[str, Any] | None = None,
    num_samples: int = 64,
    drop_last: bool = False,
    dies_in_prepare_data: bool = False,
    saves_alone: bool = False,
) -> None:
    """Train, and say when ``fit`` has returned."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    fitter = L.Trainer(
        strategy=ParcaeStrategy(policy="fixed"),
        accelerator="cpu",
        devices=1,
        default_root_dir=out,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, **(trainer or {})},
    )
    data = Numbers(num_samples, torch.float32)
    loader = torch.utils.data.DataLoader(data, batch_size=8, drop_last=drop_last)
    fitter.fit(Model(name, out, dies_in_prepare_data=dies_in_prepare_data, saves_alone=saves_alone), loader)
    Path(f"{out}/returned-{name}").write_text(str(fitter.global_step), encoding="utf-8")
