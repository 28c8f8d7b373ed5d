"""When fallback checkpoints are due, and how a run by itself goes on from one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parcae import ParcaeStrategy
from lightning_parcae.errors import CheckpointError
from lightning_parcae.fallback import Fallback

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(L.LightningModule):
    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.fail_at = fail_at
        self.losses: list[tuple[int, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == self.fail_at:
            raise RuntimeError("out of luck")
        loss = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append((self.global_step, float(outputs["loss"])))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def run(
    directory: Path | None, fail_at: int | None = None, callbacks: list[Any] | None = None, **arguments: Any
) -> tuple[Model, L.Trainer]:
    L.seed_everything(1, verbose=False)
    model = Model(fail_at)
    trainer = L.Trainer(
        strategy=ParcaeStrategy(fallback_dir=None if directory is None else str(directory), **arguments),
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(3))
    trainer.fit(model, DataLoader(TensorDataset(x), batch_size=4, shuffle=True))
    return model, trainer


def test_checkpoints_are_due_at_intervals_and_at_epoch_ends(tmp_path: Path) -> None:
    fallback = Fallback(str(tmp_path), every_n_steps=10)
    assert not fallback.is_due(0, 0, "interval")
    assert not fallback.is_due(9, 0, "interval")
    assert fallback.is_due(10, 0, "interval")
    assert fallback.is_due(3, 1, "interval")
    assert fallback.is_due(3, 0, "stopped")
    fallback.go_to([10, 1])
    assert fallback.position() == [10, 1]
    assert not fallback.is_due(10, 1, "stopped")  # there is nothing new
    assert not fallback.is_due(19, 1, "interval")
    assert fallback.is_due(20, 1, "interval")


# epochs have five steps: one is written at 5, the next one at 7
@pytest.mark.parametrize(("fail_at", "newest"), [(8, 7), (12, 12)])
def test_a_run_that_ended_goes_on_from_its_newest_checkpoint(tmp_path: Path, fail_at: int, newest: int) -> None:
    whole, _ = run(None)
    with pytest.raises(RuntimeError, match="out of luck"):
        run(tmp_path, fail_at, fallback_every_n_steps=2)
    again, trainer = run(tmp_path, fallback_every_n_steps=2)
    first = again.losses[0][0]
    assert first == newest + 1
    assert again.losses == whole.losses[first - 1 :]
    assert trainer.global_step == 15
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))


def test_a_store_that_fails_meanwhile_costs_checkpoints_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, _ = run(None)
    store = tmp_path / "store"

    class Breaker(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 6:  # a file where the directory was: nothing can be written there
                shutil.rmtree(store)
                store.write_text("not a directory")

    broken, trainer = run(store, fallback_every_n_steps=2, callbacks=[Breaker()])
    assert trainer.global_step == 15
    assert broken.losses == whole.losses
    assert "was not written; training goes on" in caplog.text


def test_a_new_run_does_not_meet_the_names_of_an_old_one(tmp_path: Path) -> None:
    run(tmp_path, fallback_every_n_steps=4)
    old = {path.name for path in tmp_path.iterdir()}
    for path in tmp_path.glob("*/manifest.json"):
        path.unlink()  # as if none had ever been finished: the new run starts at the beginning, through old steps
    _, trainer = run(tmp_path, fallback_every_n_steps=4)
    assert trainer.global_step == 15
    assert {path.name for path in tmp_path.iterdir()} - old


def test_a_run_does_not_start_from_nothing_beside_damaged_checkpoints(tmp_path: Path) -> None:
    run(tmp_path, fallback_every_n_steps=4)
    for path in tmp_path.glob("*/layer-0000.bin"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"none can be used .*move them away"):
        run(tmp_path, fallback_every_n_steps=4)


def test_few_checkpoints_are_kept(tmp_path: Path) -> None:
    run(tmp_path, fallback_every_n_steps=1)
    names = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step-"))
    assert len(names) == 2
    assert names[-1].startswith("step-00000014")
