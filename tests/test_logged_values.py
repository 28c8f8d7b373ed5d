"""Values of ``self.log``: recorded, combined over pipelines, and handed on."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_parcae.logged_values import HookValues, LogRecorder, combine, to_tensor


def recorded(*calls: tuple[Any, ...], **options: Any) -> list[dict[str, Any]]:
    recorder = LogRecorder({})
    for name, value, *rest in calls:
        recorder(name, value, *rest, **options)
    return json.loads(json.dumps(recorder.records))  # as it travels


def test_numbers_and_tensors_keep_value_and_type() -> None:
    records = recorded(
        ("a", torch.tensor(0.1, dtype=torch.float64)),
        ("b", 0.25),
        ("c", torch.tensor([3])),
        ("d", True),
        ("e", torch.tensor(0.5, dtype=torch.bfloat16)),
        ("f", float("nan")),
    )
    tensors = [to_tensor(record, torch.device("cpu")) for record in records]
    assert [tensor.dtype for tensor in tensors] == [
        torch.float64,
        torch.float32,
        torch.float32,
        torch.float32,
        torch.bfloat16,
        torch.float32,
    ]
    assert tensors[0].item() == 0.1
    assert [tensor.item() for tensor in tensors[1:5]] == [0.25, 3.0, 1.0, 0.5]
    assert math.isnan(tensors[5].item())


def test_options_travel_and_those_of_other_strategies_do_not() -> None:
    (record,) = recorded(("a", 1.0, True, None, False, True), sync_dist=True, enable_graph=True, reduce_fx=torch.max)
    assert record["options"] == {
        "prog_bar": True,
        "logger": None,
        "on_step": False,
        "on_epoch": True,
        "reduce_fx": "max",
    }


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({"x": 1}, MisconfigurationException, "log_dict"),
        (torch.zeros(2), ValueError, r"shape \(2,\)"),
        ("text", ValueError, "got str"),
    ],
)
def test_what_cannot_be_logged_is_refused(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LogRecorder({})("a", value)


@pytest.mark.parametrize(
    ("how", "expected"), [("mean", (3 * 1.0 + 1 * 5.0) / 4), ("sum", 6.0), ("min", 1.0), ("max", 5.0)]
)
def test_pipelines_are_combined_by_weight(how: str, expected: float) -> None:
    parts = [(3.0, recorded(("a", 1.0), reduce_fx=how)), (0.0, []), (1.0, recorded(("a", 5.0), reduce_fx=how))]
    (record,) = combine(parts, batch_size=4)
    assert record["value"] == expected
    assert record["options"]["batch_size"] == 4


def test_batch_sizes_of_the_users_are_summed() -> None:
    parts = [(1.0, recorded(("a", 1.0), batch_size=7)), (1.0, recorded(("a", 2.0), batch_size=5))]
    assert combine(parts, batch_size=4)[0]["options"]["batch_size"] == 12


def test_one_pipeline_keeps_its_bits() -> None:
    value = 0.1 + 0.2
    assert combine([(7.0, recorded(("a", value)))], batch_size=7)[0]["value"] == value


def test_different_names_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="logged different values"):
        combine([(1.0, recorded(("a", 1.0))), (1.0, recorded(("b", 1.0)))], batch_size=2)


def test_nothing_is_combined_of_nothing() -> None:
    assert combine([], 4) == combine([(0.0, [])], 4) == []


def test_values_of_hooks_that_differ_are_found_once() -> None:
    first, second = HookValues(), HookValues()
    mine: dict[str, Any] = {}
    yours: dict[str, Any] = {}
    for values, metrics in ((first, mine), (second, yours)):
        values.logged_by_steps([{"name": "loss"}])
        metrics["old"] = torch.tensor(0.0)
        assert values.changes(metrics) == {}  # a member that has just begun
        values.voted(metrics)
    mine |= {"same": torch.tensor(1.0), "other": torch.tensor(2.0), "loss_epoch": torch.tensor(3.0)}
    yours |= {"same": torch.tensor(1.0), "other": torch.tensor(2.5), "loss_epoch": torch.tensor(3.5)}
    yours |= {"parcae/x": torch.tensor(1.0), "nan": torch.tensor(math.nan), "loss/dataloader_idx_1": torch.tensor(1.0)}
    mine["nan"] = torch.tensor(math.nan)
    yours["absent"] = torch.tensor(1.0)
    sent = [values.changes(metrics) for values, metrics in ((first, mine), (second, yours))]
    assert sent[0].keys() == {"same", "other", "nan"}
    assert sent[1].keys() == {"same", "other", "nan", "absent"}
    assert first.differing(mine, sent) == ["other", "absent"]
    assert first.differing(mine, sent) == []
    first.voted(mine)
    assert first.changes(mine) == {}


def test_a_value_of_a_member_that_has_only_just_begun_is_not_compared() -> None:
    values = HookValues()
    assert values.differing({"x": torch.tensor(1.0)}, [{}, values.changes({"x": torch.tensor(2.0)})]) == []
