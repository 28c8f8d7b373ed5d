"""BatchNorm's running statistics over pipelines: the same as if one process had seen the whole batch.

In training each micro-batch is normalised by its own statistics, which do not depend on the layout. The *running*
statistics are an exponential mean with momentum ``m``. With several pipelines each replica follows its own
micro-batches only; here their parts are put together.

``"micro_batch"``: one update for each micro-batch k = 0 .. n-1 with statistic s_k gives

    r_n = (1-m)^n r_0 + sum_k m (1-m)^(n-1-k) s_k

which is linear in the statistics, so a replica that has seen micro-batches a .. b-1 and holds r' contributes
(1-m)^(n-b) (r' - (1-m)^(b-a) r_0).

``"deferred"``: one update for each batch, from the sums over its samples; the replicas' means and mean squares are
weighted by their samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_parcae.engine.groups import Group


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of the global batch a replica has seen.

    Attributes:
        microbatches: Its micro-batches.
        num_microbatches: Micro-batches of the global batch.
        weight: Its samples as a part of the global batch, from 0 to 1.
    """

    microbatches: range
    num_microbatches: int
    weight: float


def running_norms(layers: Sequence[nn.Module]) -> list[_BatchNorm]:
    """Return the BatchNorm modules that keep running statistics."""
    return [
        module
        for layer in layers
        for module in layer.modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    ]


def check_momentum(layers: Sequence[nn.Module]) -> None:
    """Refuse BatchNorm with a cumulative mean.

    Raises:
        ValueError: If a module has ``momentum=None``.
    """
    for module in running_norms(layers):
        if module.momentum is None:
            raise ValueError("BatchNorm with momentum=None keeps a cumulative mean, which cannot be shared over "
                             "pipelines; give it a momentum, such as 0.1")  # fmt: skip


def before_step(norms: Sequence[_BatchNorm]) -> list[tuple[Tensor, Tensor, int]]:
    """Remember the statistics that a step starts from."""
    return [
        (
            _mean(norm).clone(),
            _var(norm).clone(),
            int(norm.num_batches_tracked) if norm.num_batches_tracked is not None else 0,
        )
        for norm in norms
    ]


def combine(
    norms: Sequence[_BatchNorm],
    before: Sequence[tuple[Tensor, Tensor, int]],
    share: Share,
    group: Group,
    *,
    deferred: bool,
) -> None:
    """Put the replicas' parts together; collective over ``group``.

    Args:
        norms: The modules of this stage, in order.
        before: :func:`before_step`'s result for them.
        share: What this replica has seen.
        group: The replicas of this stage.
        deferred: Whether there is one update for each batch.
    """
    if not norms:
        return
    parts: list[Tensor] = []
    for norm, (mean, var, _) in zip(norms, before, strict=True):
        momentum = float(norm.momentum or 0.0)
        if deferred:
            parts += _deferred_part(norm, mean, var, momentum, share)
        else:
            parts += _micro_batch_part(norm, mean, var, momentum, share)
    group.all_reduce_sum(parts)
    for index, (norm, (mean, var, count)) in enumerate(zip(norms, before, strict=True)):
        momentum = float(norm.momentum or 0.0)
        first, second = parts[2 * index], parts[2 * index + 1]
        if deferred:
            _mean(norm).copy_((1 - momentum) * mean + momentum * first)
            _var(norm).copy_((1 - momentum) * var + momentum * (second - first * first))
            updates = 1
        else:
            kept = (1 - momentum) ** share.num_microbatches
            _mean(norm).copy_(kept * mean + first)
            _var(norm).copy_(kept * var + second)
            updates = share.num_microbatches
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.fill_(count + updates)


def _deferred_part(norm: _BatchNorm, mean: Tensor, var: Tensor, momentum: float, share: Share) -> list[Tensor]:
    if not share.microbatches or momentum == 0.0:
        return [torch.zeros_like(mean), torch.zeros_like(var)]
    seen_mean = (_mean(norm) - (1 - momentum) * mean) / momentum
    seen_var = (_var(norm) - (1 - momentum) * var) / momentum
    return [share.weight * seen_mean, share.weight * (seen_var + seen_mean * seen_mean)]


def _micro_batch_part(norm: _BatchNorm, mean: Tensor, var: Tensor, momentum: float, share: Share) -> list[Tensor]:
    if not share.microbatches:
        return [torch.zeros_like(mean), torch.zeros_like(var)]
    later = (1 - momentum) ** (share.num_microbatches - share.microbatches.stop)
    kept = (1 - momentum) ** len(share.microbatches)
    return [later * (_mean(norm) - kept * mean), later * (_var(norm) - kept * var)]


def _mean(norm: _BatchNorm) -> Tensor:
    assert norm.running_mean is not None
    return norm.running_mean


def _var(norm: _BatchNorm) -> Tensor:
    assert norm.running_var is not None
    return norm.running_var
