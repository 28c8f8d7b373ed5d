"""Values that ``self.log`` receives where the loss is, and every member must know.

The user's step runs on the last stage of each pipeline. There, ``log`` is replaced by a :class:`LogRecorder`; the
records travel in the step's vote; every member combines them in the same way and hands them to the real ``log``. So
callbacks decide alike everywhere, and any member can become rank 0.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor


class LogRecorder:
    """Stands in for ``LightningModule.log`` while the user's step runs.

    Attributes:
        records: One JSON-able record for each call, in order.
    """

    def __init__(self, metric_names: Mapping[int, str]) -> None:
        self.records: list[dict[str, Any]] = []
        self._metric_names = metric_names

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Record a call of ``self.log(name, value, ...)``."""
        if args:
            positional = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
            kwargs = {**dict(zip(positional, args, strict=False)), **kwargs}
        for dropped in ("enable_graph", "sync_dist", "sync_dist_group"):
            kwargs.pop(dropped, None)  # values are combined by the vote, whatever sync_dist says
        reduce_fx = kwargs.get("reduce_fx", "mean")
        kwargs["reduce_fx"] = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
        record: dict[str, Any] = {"name": name, "options": kwargs}
        if id(value) in self._metric_names:
            record["metric"] = self._metric_names[id(value)]
        elif isinstance(value, Mapping):
            raise MisconfigurationException(f"self.log({name!r}, ...) got a dict; use self.log_dict for several values")
        elif isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"self.log({name!r}, ...) needs one value, got a tensor of shape {tuple(value.shape)}")
            detached = value.detach()
            dtype = detached.dtype if detached.is_floating_point() else torch.get_default_dtype()
            record["dtype"] = str(dtype)
            record["value"] = float(detached.to(dtype))
        elif isinstance(value, numbers.Number):
            record["dtype"] = str(torch.get_default_dtype())
            record["value"] = float(value)  # type: ignore[arg-type]
        else:
            raise ValueError(
                f"self.log({name!r}, ...) needs a number, a tensor or a metric, got {type(value).__name__}"
            )
        self.records.append(record)


def combine(parts: Sequence[tuple[float, Sequence[Mapping[str, Any]]]], batch_size: int) -> list[dict[str, Any]]:
    """Combine the records of all pipelines.

    Args:
        parts: For each pipeline, in order, its weight (samples, or the sum of loss weights) and its records.
        batch_size: Samples of the global batch.

    Returns:
        Records as the pipelines made them, with the combined ``value`` and ``batch_size``. ``mean`` is weighted by the
        pipelines' weights; ``sum``, ``min`` and ``max`` are what they say.

    Raises:
        MisconfigurationException: If the pipelines logged different names.
    """
    used = [(weight, list(records)) for weight, records in parts if weight > 0]
    if not used:
        return []
    names = [[record["name"] for record in records] for _, records in used]
    if any(other != names[0] for other in names[1:]):
        raise MisconfigurationException(
            f"the pipelines logged different values in one step: {names}; self.log must be called with the same names "
            "in the same order whatever the samples are"
        )
    combined = []
    for index, record in enumerate(used[0][1]):
        options = dict(record["options"])
        result = {**record, "options": options}
        sizes = [records[index]["options"].get("batch_size") for _, records in used]
        options["batch_size"] = batch_size if any(size is None for size in sizes) else sum(sizes)
        if "metric" not in record:
            values = [(weight, float(records[index]["value"])) for weight, records in used]
            result["value"] = _reduce(values, str(options["reduce_fx"]))
        combined.append(result)
    return combined


def _reduce(values: Sequence[tuple[float, float]], how: str) -> float:
    if len(values) == 1:
        return values[0][1]  # bit-equal to one process
    if how == "sum":
        return math.fsum(value for _, value in values)
    if how in ("min", "amin"):
        return min(value for _, value in values)
    if how in ("max", "amax"):
        return max(value for _, value in values)
    total = math.fsum(weight for weight, _ in values)
    return math.fsum(weight * value for weight, value in values) / total


def to_tensor(record: Mapping[str, Any], device: torch.device) -> Tensor:
    """Return a record's value with the dtype it was logged with."""
    return torch.tensor(record["value"], dtype=getattr(torch, record["dtype"].removeprefix("torch.")), device=device)


class HookValues:
    """Values that hooks outside of steps have logged, which should be the same on every member but need not be.

    A hook that computes a value from what its own instance has seen, such as outputs kept by ``validation_step``, logs
    a different one on each instance, and callbacks then decide differently. Each member sends in its vote what has
    changed since its last one; rank 0 compares.
    """

    def __init__(self) -> None:
        self._sent: dict[str, Any] | None = None  # None: this member begins, its values came from another
        self._from_steps: set[str] = set()
        self._reported: set[str] = set()

    def logged_by_steps(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Note what steps have logged: it was combined, so that it is the same everywhere."""
        self._from_steps.update(record["name"] for record in records)

    def changes(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return the values that hooks have logged since the last vote."""
        if self._sent is None:
            return {}
        return {
            name: float(value)
            for name, value in metrics.items()
            if self._sent.get(name) is not value and not self._is_from_step(name)
        }

    def _is_from_step(self, name: str) -> bool:
        if name.startswith("parcae"):
            return True
        bare = re.sub(r"/dataloader_idx_\d+$", "", name)
        return bare in self._from_steps or re.sub(r"_(step|epoch)$", "", bare) in self._from_steps

    def voted(self, metrics: Mapping[str, Any]) -> None:
        """Note that the present values have been sent."""
        self._sent = dict(metrics)

    def differing(self, metrics: Mapping[str, Any], sent: Sequence[Mapping[str, float]]) -> list[str]:
        """Return the names, each once, whose values here are not those that the members have sent."""
        found = []
        for name, value in ((name, value) for values in sent for name, value in values.items()):
            if name in self._reported or self._is_from_step(name):
                continue
            own = float(metrics[name]) if name in metrics else None
            if own is None or not (math.isclose(own, value, rel_tol=1e-5) or (math.isnan(own) and math.isnan(value))):
                self._reported.add(name)
                found.append(name)
        return found
