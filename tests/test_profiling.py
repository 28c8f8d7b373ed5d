"""Building a job's planner, and what of it the user sets and sees."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_parcae import ParcaeCallback, ParcaeStrategy
from lightning_parcae.control.messages import JobSpec
from lightning_parcae.planner import Planner
from lightning_parcae.planning.job_planner import PlannerSettings
from lightning_parcae.planning.job_profile import Limits
from lightning_parcae.planning.layout import Layout
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import LayerCost, ModelProfile
from lightning_parcae.profiling import build_planner

SPEC = JobSpec(
    num_layers=3,
    layer_bytes=[10, 20, 30],
    table=[None, (1, 1), (2, 1)],
    boundaries={1: [0, 3], 2: [0, 1, 3], 3: [0, 1, 2, 3]},
    fingerprint="f",
)


class _NoLink:
    def request(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("nothing runs")

    send = request


def build(settings: PlannerSettings | None = None, **options: Any) -> Planner:
    given = {"context": contextlib.nullcontext, "num_samples": 16, "recompute": False, "sample": torch.randn(4, 8)}
    return build_planner(
        _NoLink(),
        settings or PlannerSettings(),
        SPEC,
        Limits(num_layers=3, max_pipelines=4),
        layers=[nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)],
        **{**given, **options},
    )


def test_layers_are_measured() -> None:
    model = build()._job.model
    assert isinstance(model.profile, ModelProfile)
    assert all(layer.forward_s > 0 for layer in model.profile.layers)
    assert model.profile.num_samples == 16 and model.profile.num_microbatches == 4
    assert model.cuts[2] == (0, 1, 3) and model.layer_bytes == (10, 20, 30)
    assert model.start_table == (None, ParallelConfig(1, 1), ParallelConfig(2, 1))


def test_a_given_profile_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    given = ModelProfile("given", (LayerCost(1.0, 2.0),) * 3, num_samples=16, num_microbatches=4)
    path.write_text(json.dumps(given.to_json()))
    assert build(profile=str(path))._job.model.profile == given
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"profile\.json: not a profile"):
        build(profile=str(path))
    other = ModelProfile("other", (LayerCost(1.0, 2.0),) * 9, num_samples=16, num_microbatches=4)
    path.write_text(json.dumps(other.to_json()))
    with pytest.raises(ValueError, match="is of 9 layers, but the model has 3"):
        build(profile=str(path))


def test_arima_is_a_candidate_only_where_it_is_asked_for() -> None:
    assert [one.name for one in build()._job._candidates] == ["event rates"]
    names = [one.name for one in build(PlannerSettings(forecaster="arima"))._job._candidates]
    assert names == ["event rates", "ARIMA(1,1,0)", "auto ARIMA"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "greedy"}, "policy must be one of 'liveput', 'reactive', 'fixed', got 'greedy'"),
        ({"forecaster": "prophet"}, "forecaster must be one of"),
        ({"interval": 0.0}, "interval must be above 0 seconds"),
        ({"horizon": 0}, "horizon must be at least 1"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParcaeStrategy(**arguments)


def test_the_callback_shows_the_newest_plan() -> None:
    callback = ParcaeCallback()
    callback._layout = Layout(1, (("a",),), ("a",), (0, 3))
    assert not any("liveput" in name for name in callback.metrics)
    callback.watch_planner(lambda: {"parcae/liveput": 12.5})
    assert callback.metrics["parcae/liveput"] == 12.5
