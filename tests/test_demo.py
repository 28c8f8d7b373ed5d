"""The demo's checks see a broken promise; without training anything."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lightning_parcae import demo
from lightning_parcae.report import RunReport
from lightning_parcae.sharding.ledger import CommitRecord, ReadRecord
from lightning_parcae.supervisor import Supervisor
from lightning_parcae.timeline import JobView


def _write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))


def _losses(folder: Path, losses: list[float], *, pid: int = 7) -> None:
    records = [{"time": 0.0, "pid": pid, "step": step, "epoch": 0, "loss": loss} for step, loss in enumerate(losses, 1)]
    _write(folder / "losses" / "i0.jsonl", [json.dumps(record) for record in records])


def _samples(folder: Path, batches: list[tuple[int, ...]], reads: list[int]) -> None:
    commits = [CommitRecord(step, 0, step, batch).to_json() for step, batch in enumerate(batches)]
    _write(folder / "commits" / "i0.jsonl", commits)
    _write(folder / "reads" / "i0-7.jsonl", [ReadRecord(index).to_json() for index in reads])


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> demo.DemoResult:
    """Return a result without checks, of a data set of four samples."""
    monkeypatch.setitem(demo._SIZES, "digits", 4)
    return demo.DemoResult("digits", RunReport(tmp_path, JobView(), 0.0, 0.0, (), ()))


@pytest.mark.parametrize(
    ("losses", "broken"),
    [
        ([2.0, 1.0], []),
        ([2.0, 1.0 + 1e-12], []),
        ([2.0, 1.0 + 1e-6], ["a loss differs by 1.0e-06"]),
        ([2.0], ["1 of 2 steps have a loss"]),
        ([2.0, float("nan")], ["a loss differs by inf"]),
    ],
)
def test_losses(result: demo.DemoResult, tmp_path: Path, losses: list[float], broken: list[str]) -> None:
    _losses(tmp_path / "job", losses)
    _losses(tmp_path / "reference", [2.0, 1.0])
    demo._check_losses(result, tmp_path / "job", tmp_path / "reference", 2)
    assert len(result.broken) == len(broken)
    assert all(text in found for text, found in zip(broken, result.broken, strict=True))


@pytest.mark.parametrize(
    ("batches", "reads", "broken"),
    [
        ([(0, 1), (2, 3)], [0, 1, 2, 3, 2], []),
        ([(0, 1), (1, 3)], [0, 1, 1, 3], ["1 duplicated"]),
        ([(0, 1)], [0, 1], ["1 batches were committed in 2 steps"]),
        ([(0, 1), (2, 3)], [0, 1, 2], ["1 samples were committed but not read"]),
    ],
)
def test_samples(
    result: demo.DemoResult, tmp_path: Path, batches: list[tuple[int, ...]], reads: list[int], broken: list[str]
) -> None:
    _samples(tmp_path, batches, reads)
    demo._check_samples(result, tmp_path, finished_steps=2)
    assert len(result.broken) == len(broken)
    assert all(text in found for text, found in zip(broken, result.broken, strict=True))


@pytest.mark.parametrize(("pid", "broken"), [(7, []), (8, ["i0 was started as 7, but ran as {8}"])])
def test_processes(result: demo.DemoResult, tmp_path: Path, pid: int, broken: list[str]) -> None:
    _losses(tmp_path, [1.0], pid=pid)
    change = SimpleNamespace(layout=SimpleNamespace(grid=(("i0",),)))
    supervisor: Any = SimpleNamespace(
        run_dir=tmp_path,
        instances={"i0": SimpleNamespace(pid=7, lived_at_finish=True)},
        view=SimpleNamespace(reconfigurations=[change]),
    )
    demo._check_processes(result, cast(Supervisor, supervisor))
    assert result.broken == broken
    assert result.survivors == ("i0",)
