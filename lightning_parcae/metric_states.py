"""torchmetrics metrics that are updated where the loss is, and known everywhere.

During a step each metric starts from its default state, so that afterwards it holds what this step has added. These
changes travel in the vote and are merged, in the order of the pipelines, into every member's metric, with the
reduction that the metric names for each state.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_parcae.engine.wire import decode_tree, encode_tree


class MetricStates:
    """The metrics of a module.

    Args:
        module: The user's module.

    Raises:
        MisconfigurationException: If a metric's state cannot be merged over pipelines.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._metrics = {name: child for name, child in module.named_modules() if isinstance(child, Metric)}
        self._totals: dict[str, dict[str, Any]] | None = None
        self.names = {id(metric): name for name, metric in self._metrics.items()}
        for name, metric in self._metrics.items():
            _refuse_unmergeable(name, metric)
            metric.sync_on_compute = False  # every member holds the whole state
        for child in module.modules():
            if isinstance(child, MetricCollection):
                # a group shares the state of its first metric, once it has seen data; that would be on last stages only
                child._enable_compute_groups = False
                child._groups_checked = False

    def start(self) -> None:
        """Put the totals aside: what follows is one step's change."""
        self._totals = {
            name: {**_read(metric), "step_value": metric._forward_cache} for name, metric in self._metrics.items()
        }
        for metric in self._metrics.values():
            metric.reset()

    def take_changes(self) -> dict[str, Any]:
        """Return what the step has added, as JSON values, and put the totals back."""
        changes = {}
        for name, metric in self._metrics.items():
            if metric._update_count:
                state = {key: getattr(metric, key) for key in metric._defaults}
                text = base64.b64encode(b"".join(bytes(part) for part in encode_tree(state))).decode()
                has_value = metric._forward_cache is not None  # the metric was called, not only updated
                changes[name] = {"count": int(metric._update_count), "state": text, "has_value": has_value}
        self.cancel()
        return changes

    def cancel(self) -> None:
        """Put the totals back and forget what was added since."""
        if self._totals is None:
            return
        for name, total in self._totals.items():
            _write(self._metrics[name], total)
            self._metrics[name]._forward_cache = total["step_value"]
        self._totals = None

    def merge(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Add the changes of all pipelines, in their order; the value of the step is taken over all of them."""
        self.cancel()
        for name, metric in self._metrics.items():
            changes = [part[name] for part in parts if name in part]
            if not changes:
                continue
            total = _read(metric)
            metric.reset()
            for change in changes:
                state = decode_tree(base64.b64decode(change["state"]))
                _add(metric, {"state": state, "count": change["count"]})
            step = _read(metric)
            value = metric.compute() if any(change["has_value"] for change in changes) else None
            _write(metric, total)
            _add(metric, step)
            metric._forward_cache = value

    def state(self) -> dict[str, Any]:
        """Return all totals, for a joiner."""
        return {name: _read(metric) for name, metric in self._metrics.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over :meth:`state`'s totals."""
        for name, total in state.items():
            _write(self._metrics[name], total)


_MERGEABLE = ("dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_mean", "dim_zero_cat")


def _refuse_unmergeable(name: str, metric: Metric) -> None:
    for key, default in metric._defaults.items():
        how = getattr(metric._reductions[key], "__name__", None)
        if isinstance(default, Tensor) and how not in _MERGEABLE:
            raise MisconfigurationException(
                f"the metric {name} ({type(metric).__name__}) reduces its state {key!r} in its own way, which cannot "
                "be followed over pipelines; use a metric whose states have dist_reduce_fx 'sum', 'mean', 'min', 'max' "
                "or 'cat', or compute it in validate() or test(), which run in one process"
            )


def _read(metric: Metric) -> dict[str, Any]:
    return {
        "state": {
            key: list(value) if isinstance(value, list) else value
            for key, value in ((key, getattr(metric, key)) for key in metric._defaults)
        },
        "count": int(metric._update_count),
    }


def _write(metric: Metric, total: Mapping[str, Any]) -> None:
    for key, value in total["state"].items():
        setattr(metric, key, _moved(value, metric.device))
    metric._update_count = total["count"]
    metric._computed = None


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return [item.to(device) for item in value]


def _add(metric: Metric, change: Mapping[str, Any]) -> None:
    """Merge a change into a metric."""
    if metric._update_count == 0:
        _write(metric, change)
        return
    for key, value in change["state"].items():
        added, total = _moved(value, metric.device), getattr(metric, key)
        how = getattr(metric._reductions[key], "__name__", None)
        if isinstance(total, list):
            merged: Any = [*total, *added]
        elif how == "dim_zero_sum":
            merged = total + added
        elif how == "dim_zero_max":
            merged = torch.maximum(total, added)
        elif how == "dim_zero_min":
            merged = torch.minimum(total, added)
        elif how == "dim_zero_mean":
            before, new = metric._update_count, change["count"]
            merged = (total * before + added * new) / (before + new)
        else:
            merged = torch.cat([total, added])
        setattr(metric, key, merged)
    metric._update_count += int(change["count"])
    metric._computed = None
