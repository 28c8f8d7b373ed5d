"""What the demo trains: a residual classifier of handwritten digits, and a character-level GPT.

Ordinary Lightning modules, each with one ``nn.Sequential``. Nothing here knows of pipelines or of instances that go;
only the data set writes down what is read, and a callback what the loss is, so that the demo can check the promises.

    python -m lightning_parcae.run_script -m lightning_parcae.demo_models digits --out DIR --steps 120
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_parcae.sharding.ledger import ReadRecord
from lightning_parcae.strategy import ParcaeStrategy

MODELS = ("digits", "chargpt")
_SEED = 7
_BATCH_SIZE = 36


class ResidualBlock(nn.Module):
    """Two convolutions with group normalisation around an identity."""

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

    @override
    def forward(self, images: Tensor) -> Tensor:
        change: Tensor = self.body(images)
        return images + change


class TransformerBlock(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a layer norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )
        self.drop = nn.Dropout(dropout)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.norm1(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        change: Tensor = self.feed(self.norm2(hidden))
        return hidden + change


class TokenEmbedding(nn.Module):
    """Embeds characters and their positions."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(context, width))

    @override
    def forward(self, characters: Tensor) -> Tensor:
        hidden: Tensor = self.token(characters)
        return hidden + self.position[: characters.shape[1]]


class _Trained(pl.LightningModule):
    """What both models share: AdamW with warm-up and a cosine schedule, per step."""

    def __init__(self, steps: int, learning_rate: float) -> None:
        super().__init__()
        self.steps, self.learning_rate = steps, learning_rate
        self.net: nn.Sequential

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.05)
        warm_up = max(1, self.steps // 10)

        def factor(step: int) -> float:
            done = min(1.0, step / self.steps)
            return min(1.0, (step + 1) / warm_up) * 0.5 * (1.0 + math.cos(math.pi * done))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class DigitsClassifier(_Trained):
    """A residual network for images of 8 x 8 pixels."""

    def __init__(self, steps: int, width: int = 24, depth: int = 4, dropout: float = 0.1) -> None:
        super().__init__(steps, learning_rate=3e-3)
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            *(ResidualBlock(width, dropout) for _ in range(depth)),
            nn.Sequential(nn.GroupNorm(4, width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(width, 10),
        )

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self.net(images)
        loss = functional.cross_entropy(logits, labels)
        self.log("loss", loss, prog_bar=True)
        self.log("accuracy", (logits.argmax(dim=1) == labels).to(loss.dtype).mean(), prog_bar=True)
        return loss


class CharGPT(_Trained):
    """A small decoder-only transformer over characters."""

    def __init__(self, steps: int, vocabulary: int, context: int, width: int = 48, depth: int = 4) -> None:
        super().__init__(steps, learning_rate=2e-3)
        self.net = nn.Sequential(
            TokenEmbedding(vocabulary, context, width),
            *(TransformerBlock(width, heads=4, dropout=0.1) for _ in range(depth)),
            nn.LayerNorm(width),
            nn.Linear(width, vocabulary),
        )

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = functional.cross_entropy(self.net(inputs).flatten(0, 1), targets.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss


class RecordedDataset(Dataset[Any]):
    """A data set that writes down which samples are read, one file per process.

    Args:
        inputs: Samples along the first axis.
        targets: Their targets.
        folder: Where to write, or None to write nothing.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, folder: Path | None) -> None:
        self._inputs, self._targets, self._folder = inputs, targets, folder

    def __len__(self) -> int:
        return len(self._inputs)

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._folder is not None:
            _append(self._folder / f"{_instance()}-{os.getpid()}.jsonl", ReadRecord(int(index)).to_json())
        return self._inputs[index], self._targets[index]


class LossRecord(pl.Callback):
    """Writes the loss of each step, and who computed it.

    Args:
        folder: Gets one file per instance.
        pace_s: Seconds that a step takes at least, so that there is time to watch.
    """

    def __init__(self, folder: Path, pace_s: float = 0.0) -> None:
        self._folder, self._pace_s = folder, pace_s
        self._began_at = 0.0

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._began_at = time.monotonic()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        record = {
            "time": time.time(),
            "pid": os.getpid(),
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "loss": float(outputs["loss"]),
        }
        _append(self._folder / f"{_instance()}.jsonl", json.dumps(record))
        time.sleep(max(0.0, self._pace_s - (time.monotonic() - self._began_at)))


def digits_data(folder: Path | None = None) -> RecordedDataset:
    """Return scikit-learn's bundled digits: 1797 images of 8 x 8 pixels, in float64."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images / 16.0).to(torch.float64).unsqueeze(1)
    return RecordedDataset(images, torch.from_numpy(digits.target).long(), folder)


def source_text(max_chars: int) -> str:
    """Return the sources of the Python standard library, one after the other, up to so many characters."""
    text = ""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="ignore")
        if len(text) >= max_chars:
            break
    return "".join(char for char in text[:max_chars] if char == "\n" or " " <= char <= "~")


def text_data(context: int, samples: int, folder: Path | None = None) -> tuple[RecordedDataset, int]:
    """Return pieces of the standard library's sources with the characters that follow, and the size of the alphabet."""
    text = source_text(samples * context + 2 * context)
    alphabet = {char: number for number, char in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[char] for char in text])
    count = min(samples, (len(codes) - 1) // context)
    inputs = codes[: count * context].view(count, context)
    return RecordedDataset(inputs, codes[1 : count * context + 1].view(count, context), folder), len(alphabet)


def _instance() -> str:
    """Return the name of this instance."""
    return os.environ.get("PARCAE_INSTANCE", "solo")


def _append(path: Path, line: str) -> None:
    """Add a line to a file with one write, so that a kill leaves whole lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode("ascii"))
    finally:
        os.close(descriptor)


def main() -> None:
    """Train one of the models; in the demo, each instance and the undisturbed reference run this."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--pace", type=float, default=0.0, metavar="S", help="seconds that a step takes at least")
    options = parser.parse_args()

    pl.seed_everything(_SEED)
    data: RecordedDataset
    model: pl.LightningModule
    if options.model == "digits":
        data, model = digits_data(options.out / "reads"), DigitsClassifier(options.steps)
    else:
        data, vocabulary = text_data(context=48, samples=1500, folder=options.out / "reads")
        model = CharGPT(options.steps, vocabulary, context=48)
    loader = DataLoader(data, batch_size=_BATCH_SIZE, shuffle=True)
    is_job = "PARCAE_COORDINATOR" in os.environ
    trainer = pl.Trainer(
        strategy=ParcaeStrategy(
            micro_batch_size=_BATCH_SIZE // 6,
            # the reference is one undisturbed process
            min_stages=2 if is_job else 1,
            max_stages=3,
            policy="fixed",  # a planner would rightly leave instances of a small machine idle: they share its cores
            failure_timeout=4.0,
            commit_records=True,
        ),
        accelerator="cpu",
        devices=1,
        precision="64-true",
        max_epochs=1 + options.steps // len(loader),
        max_steps=options.steps,
        gradient_clip_val=1.0,
        callbacks=[LossRecord(options.out / "losses", options.pace)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=options.out,
    )
    trainer.fit(model, loader)
    trainer.save_checkpoint(options.out / "final.ckpt", weights_only=True)
    print(f"{options.model}: {trainer.global_step} steps, loss {float(trainer.callback_metrics['loss']):.4f}")


if __name__ == "__main__":
    main()
