"""Train a small character-level GPT on the sources of the Python standard library, on instances that come and go.

parcae run -n 4 examples/chargpt.py             # four local instances; kill one with `kill -9` and watch
python examples/chargpt.py                      # the same script as one undisturbed process
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import lightning_parcae  # noqa: F401  makes strategy="parcae" known


class Characters(Dataset[Any]):
    """Pieces of a text, each with the characters that follow its own.

    Args:
        text: The text.
        context: Characters of a piece.
    """

    def __init__(self, text: str, context: int) -> None:
        self.alphabet = sorted(set(text))
        numbers = {char: number for number, char in enumerate(self.alphabet)}
        self.codes = torch.tensor([numbers[char] for char in text])
        self.context = context

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.codes[index * self.context : (index + 1) * self.context + 1]
        return piece[:-1], piece[1:]


class Embedding(nn.Module):
    """Embeds characters and their positions."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(context, width))

    def forward(self, characters: Tensor) -> Tensor:
        return self.token(characters) + self.position[: characters.shape[1]]


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a layer norm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.norm1(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return hidden + self.drop(self.feed(self.norm2(hidden)))


class CharGPT(L.LightningModule):
    """A small decoder-only transformer over characters; ``net`` is what gets partitioned into stages."""

    def __init__(self, vocabulary: int, context: int, width: int = 128, depth: int = 6, dropout: float = 0.1) -> None:
        super().__init__()
        self.net = nn.Sequential(
            Embedding(vocabulary, context, width),
            *(Block(width, 4, dropout) for _ in range(depth)),
            nn.LayerNorm(width),
            nn.Linear(width, vocabulary),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = functional.cross_entropy(self.net(inputs).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--context", type=int, default=64)
    options = parser.parse_args()

    L.seed_everything(1)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in sources)
    data = Characters("".join(char for char in text if char.isascii()), options.context)
    trainer = L.Trainer(strategy="parcae", accelerator="cpu", max_steps=options.steps, gradient_clip_val=1.0)
    trainer.fit(CharGPT(len(data.alphabet), options.context), DataLoader(data, batch_size=32, shuffle=True))


if __name__ == "__main__":
    main()
