"""Building a job's planner, and what of it the user sets and sees."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_parcae import ParcaeCallback, ParcaeStrategy
from lightning_parcae.control.messages import JobSpec
from lightning_parcae.errors import PlanError
from lightning_parcae.planner import Planner
from lightning_parcae.planning.job_planner import PlannerSettings
from lightning_parcae.planning.job_profile import Limits
from lightning_parcae.planning.layout import Layout
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import LayerCost, ModelProfile
from lightning_parcae.planning.script_report import ScriptReport
from lightning_parcae.profiling import (
    ScriptMeasurement,
    SilentLogger,
    build_planner,
    measure_profile,
    memory_of,
    read_given_profile,
    within_memory,
)

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


LIMITS = Limits(num_layers=3, max_pipelines=4)
GIVEN = ModelProfile("given", (LayerCost(1.0, 2.0),) * 3, num_samples=16, num_microbatches=4)


def build(settings: PlannerSettings | None = None, base: ModelProfile = GIVEN) -> Planner:
    return build_planner(_NoLink(), settings or PlannerSettings(), SPEC, LIMITS, base, num_samples=16)


def measure(memory_bytes: float | None = None) -> ModelProfile:
    return measure_profile(
        LIMITS,
        layers=[nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)],
        sample=torch.randn(4, 8),
        context=contextlib.nullcontext,
        num_samples=16,
        recompute=False,
        memory_bytes=memory_bytes,
    )


def test_layers_are_measured() -> None:
    model = build(base=measure())._job.model
    assert isinstance(model.profile, ModelProfile)
    assert all(layer.forward_s > 0 for layer in model.profile.layers)
    assert model.profile.num_samples == 16 and model.profile.num_microbatches == 4
    assert model.cuts[2] == (0, 1, 3) and model.layer_bytes == (10, 20, 30)
    assert model.start_table == (None, ParallelConfig(1, 1), ParallelConfig(2, 1))


def test_a_given_profile_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(GIVEN.to_json()))
    assert read_given_profile(str(path), LIMITS, memory_bytes=None) == GIVEN
    assert read_given_profile(str(path), LIMITS, memory_bytes=5.0) == replace(GIVEN, memory_bytes=5.0)
    path.write_text(json.dumps(replace(GIVEN, memory_bytes=7.0).to_json()))
    assert read_given_profile(str(path), LIMITS, memory_bytes=None) == replace(GIVEN, memory_bytes=7.0)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"profile\.json: not a profile"):
        read_given_profile(str(path), LIMITS, memory_bytes=None)
    other = ModelProfile("other", (LayerCost(1.0, 2.0),) * 9, num_samples=16, num_microbatches=4)
    path.write_text(json.dumps(other.to_json()))
    with pytest.raises(ValueError, match="is of 9 layers, but the model has 3"):
        read_given_profile(str(path), LIMITS, memory_bytes=None)


class _Properties:
    total_memory = 10 << 30


def test_memory_is_what_the_devices_have_together(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, first, second = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    asked = []

    def ask(device: torch.device) -> _Properties:
        asked.append(device)
        return _Properties()

    monkeypatch.setattr(torch.cuda, "get_device_properties", ask)
    assert memory_of([first, second], None) == pytest.approx(0.9 * (20 << 30))
    assert asked == [first, second]
    assert memory_of([cpu], None) is None
    assert memory_of([cpu], 2.5) == memory_of([first], 2.5) == 2.5 * (1 << 30)


def test_a_job_starts_with_what_fits_into_memory() -> None:
    spec = replace(SPEC, table=[None, (1, 1), (2, 1), (3, 1), (4, 1), (4, 1), (3, 2)])
    base = measure()
    assert within_memory(spec, base, LIMITS) is spec  # no limit is known
    # 4 micro-batches of 256 bytes: one pipeline of one stage has 4 of them under way, two have 2 each
    two = base.stage_memory_bytes(ParallelConfig(2, 1))
    assert within_memory(spec, replace(base, memory_bytes=two), LIMITS).table == [None, None, *spec.table[2:]]
    small = replace(base, memory_bytes=base.stage_memory_bytes(ParallelConfig(1, 3)))
    assert within_memory(spec, small, LIMITS).table == [None, None, (1, 2), (1, 3), (2, 2), (2, 2), (3, 2)]
    # a job that cuts behind the second layer has two layers' activations in the first stage
    spec = replace(spec, boundaries={**SPEC.boundaries, 2: [0, 2, 3]})
    assert within_memory(spec, small, LIMITS).table == [None, None, None, (1, 3), (2, 2), (2, 2), (3, 2)]
    with pytest.raises(PlanError, match="no configuration fits into the memory"):
        within_memory(spec, replace(base, memory_bytes=10.0), LIMITS)


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
        ({"device_memory": 0.0}, "device_memory must be above 0 GiB"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParcaeStrategy(**arguments)


def test_a_script_is_measured_in_steps_and_the_slow_ones_do_not_count(tmp_path: Path) -> None:
    now = 0.0
    path = tmp_path / "report.json"
    measurement = ScriptMeasurement(path, num_steps=3, clock=lambda: now)
    measurement.reach(reached="fit")
    assert ScriptReport.from_json(path.read_text()).reached == "fit" and not measurement.has_layers
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)]
    measurement.take_layers(measure(), layers, "cpu")
    assert measurement.has_layers and measurement.report.layer_names == ("Linear", "Tanh", "Linear")
    for index in range(5):
        assert not measurement.is_complete
        started = now + 0.25
        now = started + (7.0 if index < 2 else 1.0)
        measurement.note(started)
    assert measurement.is_complete
    measurement.finish(layers, [torch.optim.SGD(layers[0].parameters(), lr=0.1)])
    report = ScriptReport.from_json(path.read_text())
    assert report.reached == "steps" and report.num_steps == 3 and not report.is_guessed
    assert report.profile is not None and report.profile.step_s == {ParallelConfig(1, 1): pytest.approx(1.25)}
    assert report.other_s == pytest.approx(0.25)
    assert report.profile.layers[0].state_bytes == 4 * (64 + 8)  # without what SGD does not keep


def test_layers_that_could_not_be_run_are_marked(tmp_path: Path) -> None:
    measurement = ScriptMeasurement(tmp_path / "report.json", num_steps=3)
    measurement.take_layers(GIVEN, [nn.Tanh()] * 3, "cpu")
    measurement.finish([nn.Tanh()] * 3, [])
    assert measurement.report.is_guessed and measurement.report.num_steps == 0
    assert measurement.report.reached == "steps"


def test_a_silent_logger_writes_nothing_where_the_other_one_does(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    silent = SilentLogger(logger)
    silent.log_metrics({"loss": 1.0}, 1)
    silent.experiment.add_scalar("loss", 1.0)
    silent.save()
    silent.finalize("success")
    assert (silent.save_dir, silent.name, silent.version) == (logger.log_dir, logger.name, logger.version)
    assert not list(tmp_path.rglob("*.*"))


def test_the_callback_shows_the_newest_plan() -> None:
    callback = ParcaeCallback()
    callback._layout = Layout(1, (("a",),), ("a",), (0, 3))
    assert not any("liveput" in name for name in callback.metrics)
    callback.watch_planner(lambda: {"parcae/liveput": 12.5})
    assert callback.metrics["parcae/liveput"] == 12.5
