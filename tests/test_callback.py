"""What ParcaeCallback counts, logs and says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_parcae import ParcaeCallback
from lightning_parcae.planning.layout import Layout

LAYOUTS = [
    Layout(1, (("a", "b"),), ("a", "b"), (0, 2, 4)),
    Layout(2, (("a", "b"), ("c", "d")), ("a", "b", "c", "d"), (0, 2, 4)),
    Layout(3, (("c",),), ("c",), (0, 4)),
]


@pytest.fixture
def trainer(tmp_path: Path) -> L.Trainer:
    return L.Trainer(accelerator="cpu", logger=CSVLogger(tmp_path), log_every_n_steps=5, enable_progress_bar=False)


def test_generations_pauses_and_replays_are_counted(trainer: L.Trainer) -> None:
    callback = ParcaeCallback()
    assert callback.metrics == {}
    callback.on_generation(trainer, LAYOUTS[0], "start", 0.0)
    callback.on_replay(16)
    callback.on_generation(trainer, LAYOUTS[1], "joined", 0.5)
    assert callback.metrics == {
        "parcae/instances": 4.0,
        "parcae/num_pipelines": 2.0,
        "parcae/num_stages": 2.0,
        "parcae/generation": 2.0,
        "parcae/reconfigurations": 1.0,
        "parcae/pause_s": 0.5,
        "parcae/samples_replayed": 16.0,
    }


def test_a_joiner_counts_on(trainer: L.Trainer) -> None:
    callback, joiner = ParcaeCallback(), ParcaeCallback()
    callback.on_generation(trainer, LAYOUTS[0], "start", 0.0)
    joiner.take_over(callback.counts())  # packed before the generation that it joins in
    for member in (callback, joiner):
        member.on_generation(trainer, LAYOUTS[1], "joined", 0.25)
        member.on_generation(trainer, LAYOUTS[2], "died", 0.25)
    assert joiner.metrics == callback.metrics
    assert joiner.metrics["parcae/reconfigurations"] == 2.0


def test_nothing_is_added_to_checkpoints() -> None:
    assert ParcaeCallback().state_dict() == {}


def test_rank_zero_says_one_line(trainer: L.Trainer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        ParcaeCallback().on_generation(trainer, LAYOUTS[1], "c joined", 0.125)
    (line,) = [record.getMessage() for record in caplog.records if "generation" in record.getMessage()]
    assert "generation 2 trains on 4 instances, 2x2 (pipelines x stages), after a pause of 0.1" in line
    assert "c joined" in line


def test_rows_are_written_after_a_change_and_at_intervals(trainer: L.Trainer) -> None:
    rows: list[tuple[int, dict[str, Any]]] = []
    trainer.loggers[0].log_metrics = lambda metrics, step: rows.append((step, metrics))  # type: ignore[method-assign]
    callback = ParcaeCallback()
    loop = trainer.fit_loop.epoch_loop
    module = L.LightningModule()
    for step in range(12):
        if step == 7:
            callback.on_generation(trainer, LAYOUTS[1], "joined", 0.0)
        if step == 1:
            callback.on_generation(trainer, LAYOUTS[0], "start", 0.0)
        loop._batches_that_stepped = step
        loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
        callback.on_train_batch_end(trainer, module)
    assert [step for step, _ in rows] == [1, 5, 7, 10]
    assert [metrics["parcae/generation"] for _, metrics in rows] == [1.0, 1.0, 2.0, 2.0]


def test_beside_another_strategy_it_does_nothing(trainer: L.Trainer) -> None:
    callback = ParcaeCallback()
    callback.on_train_batch_start(trainer, L.LightningModule(), None, 0)
    callback.on_validation_batch_start(trainer, L.LightningModule(), None, 0)
    callback.on_train_batch_end(trainer, L.LightningModule())
