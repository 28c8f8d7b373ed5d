"""Checkpoints of the whole model while each member holds a stage: anyone's Trainer can load them.

Keys and optimizer indices are those of the unpartitioned model, because every member keeps every parameter registered;
what is missing on rank 0 is the tensors of the layers that others hold, and these are fetched for each checkpoint.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from torch.optim import Optimizer

from lightning_parcae.engine.session import Session
from lightning_parcae.lightning_internals import hide_loader_position
from lightning_parcae.testing import reach

if TYPE_CHECKING:
    from lightning_parcae.strategy import ParcaeStrategy


class WholeState:
    """Collects the state of the whole model on rank 0 and writes it.

    Args:
        strategy: The strategy of this instance.
    """

    def __init__(self, strategy: ParcaeStrategy) -> None:
        self._strategy = strategy
        self._gathered: dict[int, Any] | None = None
        self._gathered_generation = -1

    def complete_module(self, state: dict[str, Any], session: Session) -> dict[str, Any]:
        """Put the layers that rank 0 does not hold into a module's state; an operation of all members."""
        names = [name for name, _ in self._strategy.pipelined.named_children()]
        for index, tree in self._gather(session).items():
            prefix = f"{self._strategy.pipeline_path}.{names[index]}."
            for kind in ("parameters", "buffers"):
                for name, value in tree[kind].items():
                    if prefix + name in state:  # buffers may be non-persistent
                        state[prefix + name] = value
        return state

    def _gather(self, session: Session) -> dict[int, Any]:
        gathered: dict[int, Any] = {}

        def attempt() -> dict[str, Any]:
            reach("gather")
            gathered.clear()
            session.serve_layers()
            missing = sorted(set(range(len(self._strategy.layers))) - session.resident)
            if session.rank == 0 and missing:
                gathered.update(session.fetch_layers(missing))
            return {"gather": True}

        session.run("gather", attempt, lambda: None)
        self._gathered, self._gathered_generation = gathered, session.generation
        return gathered

    def complete_optimizer(self, state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Put what was gathered for the module's state into the optimizer's."""
        if self._gathered is None:
            return state
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        position = {id(parameter): index for index, parameter in enumerate(parameters)}
        layers = self._strategy.layers
        for index, tree in self._gathered.items():
            by_name = dict(layers[index].named_parameters())
            for name, entries in tree["optimizers"][0].items():
                place = position.get(id(by_name[name]))
                if place is not None and entries:
                    state["state"][place] = entries
        state["state"] = dict(sorted(state["state"].items()))
        return state

    def save(self, checkpoint: dict[str, Any], path: _PATH, options: Any | None, session: Session) -> None:
        """Write a checkpoint on rank 0; an operation of all members."""
        weights_only = "optimizer_states" not in checkpoint
        box = [checkpoint]

        def attempt() -> dict[str, Any]:
            while self._gathered_generation != session.generation:
                # the generation broke since the state was collected: rank 0 may be another instance now
                box[0] = self._strategy.trainer._checkpoint_connector.dump_checkpoint(weights_only)
            reach("save")
            if session.rank == 0:
                self.write(box[0], path, options)
            return {"saved": str(path)}

        session.run("save", attempt, lambda: None)
        self._gathered = None

    def write(self, checkpoint: dict[str, Any], path: _PATH, options: Any | None) -> None:
        """Write a checkpoint so that a kill leaves the old file or the new one, never half of one."""
        checkpoint = hide_loader_position(checkpoint)
        plugin = self._strategy.checkpoint_io
        if "://" in str(path) or type(plugin) is not TorchCheckpointIO:
            plugin.save_checkpoint(checkpoint, path, storage_options=options)  # has its own way of being complete
            return
        part = f"{path}.part"
        plugin.save_checkpoint(checkpoint, part, storage_options=options)
        os.replace(part, path)
