"""What is used of Lightning's private interface, against the installed version."""

from __future__ import annotations

import json
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parcae import lightning_internals
from lightning_parcae.engine.wire import decode_tree, encode_tree

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_BATCHES = 7


class Model(L.LightningModule):
    def __init__(self, schedule: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.schedule = schedule
        self.steps: list[tuple[Any, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).pow(2).mean())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        self.steps.append((self.current_epoch, batch_idx, self.global_step, outputs["loss"].item(), rate))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedulers = torch.optim.lr_scheduler
        if self.schedule == "plateau":
            plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}
        made: Any = {
            "one_cycle": lambda: schedulers.OneCycleLR(optimizer, 0.1, total_steps=100),
            "multi_step": lambda: schedulers.MultiStepLR(optimizer, [3, 5, 5]),
            "warm_restarts": lambda: schedulers.CosineAnnealingWarmRestarts(optimizer, 3),
            "lambda": lambda: schedulers.LambdaLR(optimizer, lambda step: 0.9**step),
            "sequential": lambda: schedulers.SequentialLR(
                optimizer, [schedulers.LinearLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)], [4]
            ),
        }[self.schedule]()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, "interval": "step"}}


class Handover:
    """A loader that packs the trainer at one boundary, or takes that state over at its first one."""

    def __init__(self, at: int | None, state: Any = None) -> None:
        data = TensorDataset(torch.randn(NUM_BATCHES * 3, 4, generator=torch.Generator().manual_seed(1)))
        self.batches = list(DataLoader(data, batch_size=3))
        self.at, self.state = at, state
        self.position = self.count = 0
        self.trainer: Any = None
        self.model: Any = None

    def __len__(self) -> int:
        return NUM_BATCHES

    def __iter__(self) -> Handover:
        self.position = 0
        return self

    def __next__(self) -> Any:
        if self.position >= NUM_BATCHES:
            raise StopIteration
        if self.count == self.at:
            tree = {
                "position": self.position,
                "trainer": lightning_internals.pack(self.trainer),
                "model": self.model.state_dict(),
                "optimizer": self.trainer.optimizers[0].state_dict(),
            }
            self.state = decode_tree(b"".join(bytes(part) for part in encode_tree(tree)))
        elif self.count == 0 and self.state is not None:
            lightning_internals.inject(self.trainer, self.state["trainer"])
            self.position = self.state["position"]
        self.count += 1
        self.position += 1
        return self.batches[self.position - 1]


def run(schedule: str, handover: Handover, seed: int, **options: Any) -> tuple[Model, L.Trainer]:
    L.seed_everything(seed, verbose=False)
    model = Model(schedule)
    stopping = EarlyStopping("val", patience=2)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        logger=False,
        callbacks=[stopping],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    handover.trainer, handover.model = trainer, model
    trainer.fit(model, handover, DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2))
    return model, trainer


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("one_cycle", {}),
        ("multi_step", {"accumulate_grad_batches": 1, "val_check_interval": 0.5}),
        ("warm_restarts", {"val_check_interval": 2}),
        ("lambda", {"limit_train_batches": 5}),
        ("sequential", {"val_check_interval": 4, "check_val_every_n_epoch": None}),
        ("plateau", {"check_val_every_n_epoch": 1}),
    ],
)
@pytest.mark.parametrize("at", [0, 3, 7, 9])
def test_a_joiner_goes_on_exactly_at_any_boundary(schedule: str, options: dict[str, Any], at: int) -> None:
    donor = Handover(at)
    whole, trainer = run(schedule, donor, seed=1, **options)
    assert donor.state is not None
    joiner, joined = run(schedule, Handover(None, donor.state), seed=2, **options)
    assert joiner.steps == whole.steps[at:]
    assert joined.callback_metrics == trainer.callback_metrics
    for name, value in whole.state_dict().items():
        assert torch.equal(joiner.state_dict()[name], value)
    assert (joined.global_step, joined.current_epoch, joined.should_stop) == (
        trainer.global_step,
        trainer.current_epoch,
        trainer.should_stop,
    )


def test_hyper_parameters_do_not_travel() -> None:
    donor = Handover(2)
    run("lambda", donor, seed=1)
    assert not [key for key in donor.state["trainer"]["checkpoint"] if "hyper" in key]
    json.dumps(donor.state["trainer"]["should_stop"])


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_the_bar_moves_to_the_new_rank_zero(kind: Any, capfd: pytest.CaptureFixture[str]) -> None:
    class MovesAt(Handover):
        def __next__(self) -> Any:
            batch = super().__next__()
            if self.count == 2:  # as on an instance that was not rank 0 until now
                lightning_internals.take_over_progress_bar(self.trainer, is_rank_zero=False)
            if self.count == 10:
                lightning_internals.take_over_progress_bar(self.trainer, is_rank_zero=True)
                lightning_internals.say(self.trainer, "a line of its own [1x2]")
            return batch

    bar = kind(refresh_rate=1)
    bar.disable()
    loader = MovesAt(None)
    model = Model("lambda")
    loader.model = model
    loader.trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        callbacks=[bar],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    loader.trainer.fit(model, loader, DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2))
    output = "".join(capfd.readouterr())
    assert "a line of its own [1x2]" in output
    assert "Epoch 1" in output and "7/7" in output
    assert "Epoch 0" not in output


def test_without_a_bar_a_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    trainer = L.Trainer(accelerator="cpu", enable_progress_bar=False, logger=False, enable_checkpointing=False)
    with caplog.at_level("INFO"):
        lightning_internals.say(trainer, "hello")
    assert "hello" in caplog.text


def test_state_of_a_checkpoint_callback_travels() -> None:
    fields = dict(lightning_internals._STATELESS_CALLBACK_FIELDS)[ModelCheckpoint]
    callback = ModelCheckpoint()
    assert all(hasattr(callback, field) for field in fields)


def described(schedule: str = "multi_step", change: Any = None, **options: Any) -> list[str]:
    seen: list[list[str]] = []

    class Look(L.Callback):
        def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
            trainer.strategy.connect(module)
            trainer.strategy.setup_optimizers(trainer)
            if change is not None:
                change(trainer.optimizers[0])
            seen.append(lightning_internals.describe_settings(trainer))
            trainer.should_stop = True

    settings: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 1, **options}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = L.Trainer(callbacks=[Look()], limit_val_batches=0, **quiet, **settings)  # type: ignore[arg-type]
    trainer.fit(Model(schedule), DataLoader(TensorDataset(torch.zeros(2, 4)), batch_size=2))
    return seen[0]


def test_settings_that_decide_the_results_are_described_and_devices_are_not() -> None:
    first = described()
    assert first == described(change=lambda optimizer: optimizer.param_groups[0].update(fused=True, foreach=False))
    assert first != described("one_cycle")
    assert first != described(change=lambda optimizer: optimizer.param_groups[0].update(lr=0.1))
    assert first != described(change=lambda optimizer: optimizer.param_groups[0].update(weight_decay=0.1))
    for options in (
        {"gradient_clip_val": 0.5},
        {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
        {"max_steps": 5},
        {"max_epochs": 2},
        {"precision": "bf16-mixed"},
        {"limit_train_batches": 1.0},
        {"val_check_interval": 1},
    ):
        assert described(**options) != first, options
    for schedule in ("plateau", "warm_restarts", "lambda", "sequential"):
        assert described(schedule) == described(schedule)
    assert "0x" not in " ".join(described("lambda") + described("sequential"))


def test_the_position_of_the_train_loader_is_hidden_from_plain_lightning() -> None:
    checkpoint = {"loops": {"fit_loop": {"state_dict": {"combined_loader": [{"batch": 3}], "x": 1}, "y": 2}}, "z": 3}
    hidden = lightning_internals.hide_loader_position(checkpoint)
    assert hidden["loops"] == {"fit_loop": {"state_dict": {"x": 1}, "y": 2}}
    assert "combined_loader" in checkpoint["loops"]["fit_loop"]["state_dict"]  # type: ignore[index]
    assert lightning_internals.find_loader_position(hidden) == checkpoint
    weights = {"state_dict": {}}
    assert lightning_internals.hide_loader_position(weights) is weights
    assert lightning_internals.find_loader_position(weights) == weights
