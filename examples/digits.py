"""Train a residual classifier of handwritten digits on instances that come and go.

    parcae run -n 4 examples/digits.py              # four local instances; kill one with `kill -9` and watch
    python examples/digits.py                       # the same script as one undisturbed process

On a cluster, run the second line on each instance with PARCAE_COORDINATOR and PARCAE_SECRET_FILE set.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split

import lightning_parcae  # noqa: F401  makes strategy="parcae" known


class ResidualBlock(nn.Module):
    """Two convolutions around an identity; GroupNorm, because batch statistics depend on the micro-batch."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, images: Tensor) -> Tensor:
        return images + self.body(images)


class DigitsClassifier(L.LightningModule):
    """An ordinary LightningModule: its one ``nn.Sequential`` is what gets partitioned into stages.

    Args:
        width: Channels of the hidden layers.
        depth: Residual blocks.
        dropout: Share of activations dropped in each block.
        learning_rate: Peak learning rate.
    """

    def __init__(self, width: int = 24, depth: int = 4, dropout: float = 0.1, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            *(ResidualBlock(width, dropout) for _ in range(depth)),
            nn.Sequential(nn.GroupNorm(4, width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(width, 10),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        logits = self.net(images)
        self.log("val_loss", functional.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_accuracy", (logits.argmax(dim=1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams["learning_rate"], total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Digits(L.LightningDataModule):
    """scikit-learn's bundled digits: 1797 images of 8 x 8 pixels.

    Args:
        batch_size: The *global* batch: it stays the same however many instances there are.
        num_workers: Loader processes of each instance that reads.
    """

    def __init__(self, batch_size: int = 64, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.from_numpy(digits.images / 16.0).float().unsqueeze(1)
        data = TensorDataset(images, torch.from_numpy(digits.target).long())
        generator = torch.Generator().manual_seed(0)
        self.train_data, self.val_data = random_split(data, [1500, 297], generator=generator)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_data, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val_data, self.batch_size, num_workers=self.num_workers)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--num-workers", type=int, default=0)
    options = parser.parse_args()

    L.seed_everything(1)
    trainer = L.Trainer(
        strategy="parcae", accelerator="cpu", max_epochs=options.epochs, gradient_clip_val=1.0, log_every_n_steps=5
    )
    trainer.fit(DigitsClassifier(), datamodule=Digits(num_workers=options.num_workers))


if __name__ == "__main__":
    main()
