"""What the instances of the planner's integration tests run."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parcae import ParcaeStrategy, profiling
from lightning_parcae.availability.forecast import EventLaw, Forecast
from lightning_parcae.engine.groups import Groups
from lightning_parcae.planning.job_planner import JobModel, JobPlanner, PlannerSettings
from lightning_parcae.planning.job_profile import LinkSpeed
from tests.integration.scripts import fit_regressor

SCHEDULE = "schedule.json"


class Oracle:
    """Reads in a file when instances will be killed: a forecaster with skill.

    Args:
        path: The file: a list of unix times.
        interval_s: Length of an interval.
    """

    name = "oracle"

    def __init__(self, path: Path, interval_s: float) -> None:
        self._path = path
        self._interval_s = interval_s

    def forecast(self, history: ArrayLike, *, horizon: int, capacity: int) -> Forecast:
        kills = json.loads(self._path.read_text()) if self._path.exists() else []
        ahead = [int((kill - time.time()) // self._interval_s) for kill in kills]
        return Forecast(tuple(EventLaw.certain(ahead.count(index)) for index in range(horizon)), self.name)


def fit_with_oracle(name: str, out: str, **kwargs: Any) -> None:
    """Run the usual script, with a forecaster that knows what will happen."""

    def build(model: JobModel, settings: PlannerSettings, *, candidates: Any = ()) -> JobPlanner:
        settings = replace(settings, min_scores=4, horizon_scored=2)
        return JobPlanner(model, settings, candidates=(Oracle(Path(out) / SCHEDULE, settings.interval_s),))

    profiling.JobPlanner = build  # type: ignore[attr-defined,assignment]
    fit_regressor(name, out, **kwargs)


LINK = LinkSpeed(latency_s=0.0005, bytes_per_s=2.5e8)


def fit_with_link(name: str, out: str, **kwargs: Any) -> None:
    """Run the usual script; every probe finds the same link, and is noted. Who shall die does so while it is asked."""
    probe = Groups.probe_link

    def probe_link(groups: Groups) -> LinkSpeed | None:
        with (Path(out) / f"probes-{name}.txt").open("a") as file:
            file.write(f"{groups.generation}\n")
        if (Path(out) / f"dies-{name}").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        probe(groups)
        return LINK if groups.world.rank % 2 == 0 else None

    Groups.probe_link = probe_link  # type: ignore[method-assign]
    fit_regressor(name, out, **kwargs)


class _Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Data(BoringDataModule):
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.random_train, batch_size=8)

    def val_dataloader(self) -> list[Any]:  # type: ignore[override]
        return []


def fit_from_yaml(name: str, out: str, config: str) -> None:
    """Train as a LightningCLI does, then write what the planner was told."""
    warnings.filterwarnings("ignore")
    cli = LightningCLI(_Model, _Data, save_config_callback=None, args=["fit", "--config", config])
    strategy = cli.trainer.strategy
    assert isinstance(strategy, ParcaeStrategy) and strategy._planner is not None
    job = strategy._planner._job
    told = {"settings": asdict(job.settings), "profile": job.profile.to_json()}
    (Path(out) / "planner.json").write_text(json.dumps(told))
