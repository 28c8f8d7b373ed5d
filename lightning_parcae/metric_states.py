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
from torch import Tensor
from torchmetrics import Metric

from lightning_parcae.engine.wire import decode_tree, encode_tree


class MetricStates:
    """The metrics of a module.

    Args:
        module: The user's module.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._metrics = {name: child for name, child in module.named_modules() if isinstance(child, Metric)}
        self._totals: dict[str, dict[str, Any]] | None = None
        self.names = {id(metric): name for name, metric in self._metrics.items()}
        for metric in self._metrics.values():
            metric.sync_on_compute = False  # every member holds the whole state

    def start(self) -> None:
        """Put the totals aside: what follows is one step's change."""
        self._totals = {name: _read(metric) for name, metric in self._metrics.items()}
        for metric in self._metrics.values():
            metric.reset()

    def take_changes(self) -> dict[str, Any]:
        """Return what the step has added, as JSON values, and put the totals back."""
        changes = {}
        for name, metric in self._metrics.items():
            if metric._update_count:
                state = {key: getattr(metric, key) for key in metric._defaults}
                text = base64.b64encode(b"".join(bytes(part) for part in encode_tree(state))).decode()
                changes[name] = {"count": int(metric._update_count), "state": text}
        forward = {name: metric._forward_cache for name, metric in self._metrics.items()}
        self.cancel()
        for name, value in forward.items():
            self._metrics[name]._forward_cache = value
        return changes

    def cancel(self) -> None:
        """Put the totals back and forget what was added since."""
        if self._totals is None:
            return
        for name, total in self._totals.items():
            _write(self._metrics[name], total)
        self._totals = None

    def merge(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Add the changes of all pipelines, in their order."""
        self.cancel()
        for part in parts:
            for name, change in part.items():
                metric = self._metrics[name]
                state = decode_tree(base64.b64decode(change["state"]))
                if metric._update_count == 0:
                    for key, value in state.items():
                        setattr(metric, key, _moved(value, metric.device))
                else:
                    _reduce_into(metric, state)
                metric._update_count += int(change["count"])
                metric._computed = None

    def state(self) -> dict[str, Any]:
        """Return all totals, for a joiner."""
        return {name: _read(metric) for name, metric in self._metrics.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over :meth:`state`'s totals."""
        for name, total in state.items():
            _write(self._metrics[name], total)


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


def _reduce_into(metric: Metric, change: Mapping[str, Any]) -> None:
    """Merge one step's change into a metric that has been updated before."""
    for key, added in change.items():
        total = getattr(metric, key)
        how = getattr(metric._reductions[key], "__name__", None)
        added = _moved(added, metric.device)
        if isinstance(total, list):
            merged: Any = [*total, *added]
        elif how == "dim_zero_sum":
            merged = total + added
        elif how == "dim_zero_max":
            merged = torch.maximum(total, added)
        elif how == "dim_zero_min":
            merged = torch.minimum(total, added)
        elif how == "dim_zero_mean":
            count = metric._update_count
            merged = (total * count + added) / (count + 1)
        elif how == "dim_zero_cat":
            merged = torch.cat([total, added])
        else:
            raise TypeError(
                f"the metric {type(metric).__name__} reduces its state {key!r} in its own way, which cannot be "
                "followed over pipelines; use a state with dist_reduce_fx 'sum', 'mean', 'min', 'max' or 'cat'"
            )
        setattr(metric, key, merged)
