"""The elastic loader inside a real Trainer: Lightning counts, validates and resumes as with the user's loader."""

from __future__ import annotations

import multiprocessing
from itertools import chain

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset

from lightning_parcae.data import AbsentBatch, ElasticLoader, ReadPosition

CHANGES = {0: 2, 2: 3, 4: 1, 7: 2, 8: 4}


class Numbers(Dataset):
    def __init__(self, size, offset=0):
        self.size, self.offset = size, offset

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor(float(index + self.offset)), torch.rand(1)


class OnlyLoaders(SingleDeviceStrategy):
    """One instance of a job: reads for one pipeline, with the number of pipelines given by training batch."""

    def __init__(self, changes, pipeline):
        super().__init__("cpu")
        self.changes, self.pipeline = changes, pipeline
        self.at = ReadPosition(0, 1, 0)
        self.primary = None

    def process_dataloader(self, dataloader):
        training = self.lightning_module.trainer.training
        loader = ElasticLoader(
            dataloader,
            seed=5,
            micro_batch_size=1,
            position=(lambda: self.at) if training else (lambda: ReadPosition(0, 1, 0)),
            boundary=self.boundary if training and self.primary is None else None,
            is_training=training,
        )
        if training and self.primary is None:
            self.primary = loader
        return loader

    def boundary(self, loader):
        progress = self.lightning_module.trainer.fit_loop.epoch_loop.batch_progress
        assert progress.current.ready == progress.current.completed == loader.batch
        done = progress.total.ready
        num_pipelines = self.changes[max(start for start in self.changes if start <= done)]
        idle = self.pipeline >= num_pipelines
        if self.at is None or num_pipelines != self.at.num_pipelines or idle:
            self.at = None if idle else ReadPosition(done, num_pipelines, self.pipeline)


def flatten(batch):
    if isinstance(batch, AbsentBatch):
        return []
    if isinstance(batch, dict):
        return [[] if isinstance(batch[key], AbsentBatch) else batch[key][0].tolist() for key in sorted(batch)]
    return [[round(value, 6) for value in entry.flatten().tolist()] for entry in batch]


class Recorder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.steps, self.validations = [], []

    def training_step(self, batch, batch_idx):
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        where = (self.current_epoch, batch_idx, self.global_step, progress.is_last_batch)
        self.steps.append((where, flatten(batch)))
        return self.weight * 0

    def validation_step(self, batch, batch_idx):
        self.validations.append((self.current_epoch, self.global_step, batch_idx, flatten(batch)))

    def predict_step(self, batch, batch_idx):
        return batch[0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(make, *, changes=None, pipeline=0, ckpt_path=None, callbacks=(), **settings):
    model = Recorder()
    strategy = "auto" if changes is None else OnlyLoaders(changes, pipeline)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=bool(callbacks),
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, **settings},
    )
    trainer.fit(model, make(), DataLoader(Numbers(8), batch_size=4, shuffle=False), ckpt_path=ckpt_path)
    assert multiprocessing.active_children() == []
    return model


def shuffled(**settings):
    return DataLoader(Numbers(27), batch_size=6, shuffle=True, **settings)


def combined(mode):
    second = DataLoader(Numbers(11, 100), batch_size=5, shuffle=True)
    return CombinedLoader({"a": shuffled(), "b": second}, mode)


SCHEDULES = {
    "plain": (shuffled, {}),
    "workers": (lambda: shuffled(num_workers=1), {"max_epochs": 1}),
    "accumulate": (shuffled, {"accumulate_grad_batches": 2, "val_check_interval": 0.4}),
    "val_check_interval": (shuffled, {"val_check_interval": 2}),
    "limit_train_batches": (shuffled, {"limit_train_batches": 3}),
    "max_size_cycle": (lambda: combined("max_size_cycle"), {}),
    "min_size": (lambda: combined("min_size"), {}),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedule_is_that_of_plain_lightning_and_samples_those_of_one_pipeline(kind):
    make, settings = SCHEDULES[kind]
    plain = fit(make, **settings)
    one = fit(make, changes={0: 1}, **settings)
    assert [where for where, _ in one.steps] == [where for where, _ in plain.steps]
    assert [seen[:3] for seen in one.validations] == [seen[:3] for seen in plain.validations]
    many = [fit(make, changes=CHANGES, pipeline=pipeline, **settings) for pipeline in range(4)]
    for instance in many:
        assert [where for where, _ in instance.steps] == [where for where, _ in plain.steps]
        assert instance.validations == one.validations
    for number, (_, want) in enumerate(one.steps):
        parts = [instance.steps[number][1] for instance in many]
        columns = range(len(want))
        assert [list(chain(*(part[column] for part in parts if part))) for column in columns] == want


@pytest.mark.parametrize(
    ("saver", "at"),
    [
        ({"every_n_train_steps": 3, "save_top_k": -1}, 3),  # in the middle of epoch 0
        ({"every_n_train_steps": 7}, 7),  # in the middle of epoch 1
        ({"every_n_train_steps": 5, "save_top_k": -1}, 5),  # in on_train_batch_end of the last batch
        ({"every_n_epochs": 1, "save_on_train_epoch_end": True, "save_top_k": -1}, 5),
        ({"every_n_epochs": 1, "save_on_train_epoch_end": False, "save_top_k": -1}, 5),  # after the last validation
    ],
)
def test_a_native_checkpoint_resumes_exactly_and_without_a_warning(tmp_path, saver, at):
    want = fit(shuffled, changes=CHANGES)
    callback = ModelCheckpoint(tmp_path, filename="{step}", **saver)
    first = fit(shuffled, changes=CHANGES, callbacks=[callback])
    assert first.steps == want.steps
    saved = tmp_path / f"step={at}.ckpt"
    assert torch.load(saved, weights_only=True)["global_step"] == at
    callback = ModelCheckpoint(tmp_path, filename="{step}", **saver)
    # every warning is an error here, also Lightning's that the loader cannot be resumed
    resumed = fit(shuffled, changes=CHANGES, ckpt_path=saved, callbacks=[callback])
    assert resumed.steps == want.steps[at:]


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch")
        self.indices = []

    def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        assert prediction.tolist() == [float(index) for index in batch_indices]
        self.indices += batch_indices


def test_prediction_writers_see_the_indices_of_each_batch():
    writer = Writer()
    trainer = L.Trainer(
        strategy=OnlyLoaders({0: 1}, 0), accelerator="cpu", logger=False, callbacks=[writer], enable_progress_bar=False
    )
    trainer.predict(Recorder(), DataLoader(Numbers(10), batch_size=4))
    assert writer.indices == list(range(10))


def test_stopping_early_leaves_no_worker_and_the_module_reaches_its_dataset():
    class Stops(Recorder):
        def training_step(self, batch, batch_idx):
            assert self.trainer.train_dataloader.dataset.size == 27
            raise KeyError("stop")

    strategy = OnlyLoaders({0: 1}, 0)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(KeyError, match="stop"):
        trainer.fit(Stops(), shuffled(num_workers=1), DataLoader(Numbers(4)))
    strategy.primary.close()
    assert multiprocessing.active_children() == []
