"""Log files that another process continues."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_parcae.run_logs import RunLogs

LATER = 1_000_000


class Member:
    """An instance's logger; several live in this process, one after the other at work."""

    def __init__(self, directory: Path, rank: int, kind: Any = CSVLogger) -> None:
        self.logger = kind(directory)
        self.trainer = L.Trainer(logger=self.logger, accelerator="cpu", enable_progress_bar=False)
        self.rank = rank
        self.logs = RunLogs()
        self.logs.open(self.trainer, lambda key, value: 0)

    def log(self, step: int, **values: float) -> None:
        rank_zero_only.rank = self.rank
        self.logger.log_metrics(metrics=values, step=step)
        self.logger.save()

    def take_over(self) -> None:
        rank_zero_only.rank = self.rank = 0
        self.logs.take_over()

    def rows(self) -> list[dict[str, str]]:
        with (Path(self.logger.log_dir) / "metrics.csv").open(newline="") as file:
            return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.fixture(autouse=True)
def _rank() -> Iterator[None]:
    before = getattr(rank_zero_only, "rank", 0)
    yield
    rank_zero_only.rank = before


def test_the_next_rank_zero_appends_what_is_missing(tmp_path: Path) -> None:
    first, second = Member(tmp_path, 0), Member(tmp_path, 1)
    for step in range(4):
        for member in (first, second):
            if not (member is first and step == 3):  # killed before it logged step 3
                member.log(step, loss=step / 10)
                if step == 1:
                    member.log(step, val=0.5)
    second.take_over()
    second.log(4, loss=0.4)
    assert second.rows() == [
        {"loss": "0.0", "step": "0"},
        {"loss": "0.1", "step": "1"},
        {"step": "1", "val": "0.5"},
        {"loss": "0.2", "step": "2"},
        {"loss": "0.3", "step": "3"},
        {"loss": "0.4", "step": "4"},
    ]


def test_a_row_written_ahead_is_not_written_twice(tmp_path: Path) -> None:
    first, second = Member(tmp_path, 0), Member(tmp_path, 1)
    for step in range(3):
        first.log(step, loss=float(step))
        if step < 2:
            second.log(step, loss=float(step))
    second.take_over()
    second.log(2, loss=2.0)  # the batch was done again
    second.log(3, loss=3.0)
    assert [row["step"] for row in second.rows()] == ["0", "1", "2", "3"]


def test_the_same_values_twice_in_one_step_stay_twice(tmp_path: Path) -> None:
    first, second = Member(tmp_path, 0), Member(tmp_path, 1)
    for member in (first, second):
        member.log(3, val=1.0)
        member.log(3, val=2.0)  # two validations within one accumulated step
    second.take_over()
    assert [row["val"] for row in second.rows()] == ["1.0", "2.0"]


def test_a_half_written_line_is_removed(tmp_path: Path) -> None:
    first, second = Member(tmp_path, 0), Member(tmp_path, 1)
    for member in (first, second):
        member.log(0, loss=0.5)
        member.log(1, loss=0.25)
    path = Path(first.logger.log_dir) / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-6])
    second.take_over()
    assert [row["loss"] for row in second.rows()] == ["0.5", "0.25"]


def test_a_rewound_job_logs_its_steps_again(tmp_path: Path) -> None:
    member = Member(tmp_path, 0)
    for step in range(5):
        member.log(step, loss=float(step))
    member.logs.rewind(3)
    member.log(3, loss=30.0)
    assert [row["loss"] for row in member.rows()] == ["0.0", "1.0", "2.0", "30.0"]


def test_nothing_is_left_on_a_logger(tmp_path: Path) -> None:
    member = Member(tmp_path, 0)
    member.logs.close()
    assert "log_metrics" not in vars(member.logger)
    member.log(0, loss=1.0)
    assert len(member.rows()) == 1


def test_other_loggers_repeat_the_last_step(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first, second = Member(tmp_path, 0, TensorBoardLogger), Member(tmp_path, 1, TensorBoardLogger)
    for step in range(3):
        for member in (first, second):
            if not (member is first and step == 2):
                member.log(step, loss=float(step))
    second.take_over()
    for member in (first, second):
        member.logger.experiment.flush()
        member.logger.experiment.close()
    events = accumulator.EventAccumulator(str(second.logger.log_dir)).Reload()
    assert {event.step for event in events.Scalars("loss")} == {0, 1, 2}
