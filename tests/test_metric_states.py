"""torchmetrics over pipelines: merged changes equal one metric that has seen everything."""

from __future__ import annotations

import json
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, MinMetric, PearsonCorrCoef
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score

from lightning_parcae.metric_states import MetricStates

CLASSES = 3


class Measured(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.nested = nn.ModuleDict({"mean": MeanMetric(), "min": MinMetric(), "max": MaxMetric()})
        self.curve = BinaryAUROC()
        self.both = MetricCollection({"a": MulticlassAccuracy(CLASSES), "f1": MulticlassF1Score(CLASSES)})


def batch(seed: int, count: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, CLASSES, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


def step(module: Measured, logits: Tensor, y: Tensor) -> None:
    module.accuracy(logits, y)
    for metric in module.nested.values():
        metric.update(logits[:, 0])
    module.curve.update(logits[:, 0].sigmoid(), (y == 0).int())
    module.both.update(logits, y)


def values(module: Measured) -> dict[str, Any]:
    return {
        "accuracy": module.accuracy.compute(),
        "step": module.accuracy._forward_cache,
        **{name: metric.compute() for name, metric in module.nested.items()},
        "curve": module.curve.compute(),
        **module.both.compute(),
    }


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.allclose(value, right[name], rtol=1e-6), (name, value, right[name])


@pytest.mark.parametrize("num_pipelines", [1, 2, 3])
def test_merged_changes_equal_one_process(num_pipelines: int) -> None:
    alone, members = Measured(), [Measured() for _ in range(num_pipelines + 1)]  # one more runs no step: a first stage
    states = [MetricStates(member) for member in members]
    for seed in range(4):
        logits, y = batch(seed)
        step(alone, logits, y)
        parts = []
        for member, state, rows in zip(members, states, torch.arange(len(y)).chunk(num_pipelines), strict=False):
            state.start()
            step(member, logits[rows], y[rows])
            parts.append(json.loads(json.dumps(state.take_changes())))
        for state in states:
            state.merge(parts)
        for member in members:
            assert_same(values(member), values(alone))


def test_one_pipeline_has_the_same_bits() -> None:
    alone, member = Measured(), Measured()
    state = MetricStates(member)
    for seed in range(3):
        step(alone, *batch(seed))
        state.start()
        step(member, *batch(seed))
        state.merge([state.take_changes()])
    expected = values(alone)
    assert all(torch.equal(value, expected[name]) for name, value in values(member).items())


def test_a_broken_attempt_is_forgotten() -> None:
    member = Measured()
    state = MetricStates(member)
    state.start()
    step(member, *batch(0))
    state.merge([state.take_changes()])
    before = values(member)
    state.start()
    step(member, *batch(1))
    state.cancel()
    assert_same(values(member), before)
    state.cancel()  # harmless


def test_a_joiner_takes_the_totals_over() -> None:
    member, joiner = Measured(), Measured()
    state = MetricStates(member)
    state.start()
    step(member, *batch(0))
    state.merge([state.take_changes()])
    MetricStates(joiner).load(state.state())
    expected = values(member)
    expected["step"] = found = torch.zeros(())
    assert_same({**values(joiner), "step": found}, expected)


def test_an_epoch_without_updates_and_a_reset_are_kept() -> None:
    member = Measured()
    state = MetricStates(member)
    state.start()
    assert state.take_changes() == {}
    state.merge([{}, {}])
    assert member.accuracy._update_count == 0


def test_a_metric_that_cannot_be_merged_is_refused() -> None:
    module = Measured()
    module.correlation = PearsonCorrCoef()
    with pytest.raises(MisconfigurationException, match=r"correlation \(PearsonCorrCoef\).*in its own way"):
        MetricStates(module)
