"""What the instances of the fidelity test run: a step that takes half as long with twice the pipelines."""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_parcae import ParcaeStrategy
from tests.integration.scripts import Numbers, Regressor

STEP_S = 0.5
BATCH = 16


class Slow(Regressor):
    """Sleeps for what its part of the batch would take, which drowns the noise of a busy machine."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        layout = self.trainer.strategy.session.layout  # type: ignore[attr-defined]
        time.sleep(STEP_S / layout.config.num_pipelines)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        grid = self.trainer.strategy.session.layout.config  # type: ignore[attr-defined]
        assert self.diary is not None
        with open(self.diary, "a") as file:
            entry = [self.global_step, [grid.num_pipelines, grid.num_stages], time.time()]
            file.write(json.dumps(entry) + "\n")


def fit_slowly(name: str, out: str, *, strategy: dict[str, Any]) -> None:
    """Train until somebody ends it; note each step in ``<out>/steps-<name>.jsonl``."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        strategy=ParcaeStrategy(**strategy),
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        default_root_dir=out,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Slow(torch.float32)
    module.diary = f"{out}/steps-{name}.jsonl"
    trainer.fit(module, DataLoader(Numbers(BATCH * 2000, torch.float32), batch_size=BATCH))
