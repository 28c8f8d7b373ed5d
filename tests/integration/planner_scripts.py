"""What the instances of the planner's integration tests run."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from lightning_parcae import profiling
from lightning_parcae.availability.forecast import EventLaw, Forecast
from lightning_parcae.planning.job_planner import JobModel, JobPlanner, PlannerSettings
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
