"""The fallback checkpoint of a running job: when it is due, who writes what, how it comes back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_parcae.checkpoint.manifest import StoredFile
from lightning_parcae.checkpoint.store import FallbackStore
from lightning_parcae.control.messages import CheckpointRef
from lightning_parcae.engine.session import Session
from lightning_parcae.engine.state import layer_state, load_layer
from lightning_parcae.testing import reach

if TYPE_CHECKING:
    from lightning_parcae.strategy import ParcaeStrategy

log = logging.getLogger(__name__)


class Fallback:
    """Writes the state of the job to a store that outlives every instance.

    Each layer is written by its holder in the first pipeline, the trainer state by rank 0, the manifest last. A death
    meanwhile makes the write begin again in the next generation; a checkpoint without a manifest does not exist.

    Args:
        url: Where to: any fsspec URL.
        every_n_steps: Optimizer steps between two checkpoints.
    """

    def __init__(self, url: str, *, every_n_steps: int) -> None:
        self._store = FallbackStore(url)
        self._every_n_steps = every_n_steps
        self._last_step = 0
        self._last_epoch = 0

    def check_writable(self) -> None:
        """Fail now, with the fix, rather than when state is lost."""
        self._store.check_writable()

    def newest(self) -> CheckpointRef | None:
        """Return the newest complete checkpoint."""
        return self._store.newest_complete()

    def position(self) -> list[int]:
        """Return the step and the epoch of the newest checkpoint, for a joiner: all members must write at once."""
        return [self._last_step, self._last_epoch]

    def go_to(self, position: Sequence[int]) -> None:
        """Take over :meth:`position` of another member."""
        self._last_step, self._last_epoch = position

    def is_due(self, step: int, epoch: int, reason: str) -> bool:
        """Say whether a checkpoint must be written before the next batch.

        Args:
            step: Optimizer steps so far.
            epoch: Epoch of the next batch.
            reason: ``"interval"``, or anything else to write if there is something new.
        """
        if step == self._last_step:
            return False
        return epoch != self._last_epoch or step - self._last_step >= self._every_n_steps or reason != "interval"

    def write(self, strategy: ParcaeStrategy, epoch: int, reason: str) -> None:
        """Write a checkpoint; an operation of all members, at a step boundary."""
        session = strategy.session
        step = strategy.trainer.global_step

        def attempt() -> dict[str, Any]:
            identifier = f"step-{step:08d}-g{session.generation}"
            reach("fallback")
            files = [self._store.write_layer(identifier, i, tree).to_json() for i, tree in _held(strategy)]
            if strategy.is_global_zero:
                files.append(self._store.write_tree(identifier, "trainer", strategy.pack_trainer()).to_json())
            return {"identifier": identifier, "files": files}

        payloads = session.run("fallback checkpoint", attempt, lambda: None)
        identifier = payloads[0]["identifier"]
        if strategy.is_global_zero:
            self._store.commit(
                identifier,
                step=step,
                clock=session.clock,
                num_layers=len(strategy.layers),
                files=[StoredFile.from_json(file) for payload in payloads for file in payload["files"]],
                reason=reason,
            )
            self._store.prune()
        self._last_step, self._last_epoch = step, epoch
        strategy.record_event("checkpoint", {"identifier": identifier, "step": step, "reason": reason})

    def restore(self, strategy: ParcaeStrategy, checkpoint: CheckpointRef, layers: Sequence[int]) -> None:
        """Take over the trainer state and the given layers of a checkpoint."""
        strategy.inject_trainer(self._store.read_tree(checkpoint.identifier, "trainer"))
        modules = strategy.layers
        for index in layers:
            load_layer(
                modules[index], strategy.optimizers, self._store.read_layer(checkpoint.identifier, index), copy=False
            )
        self._last_step, self._last_epoch = checkpoint.step, strategy.trainer.current_epoch


def _held(strategy: ParcaeStrategy) -> list[tuple[int, Any]]:
    """Return the layers that this member writes."""
    session = strategy.session
    if isinstance(session, Session):
        if session.place is None or session.place[0] != 0:
            return []
        held: Sequence[int] = sorted(session.resident)
    else:
        held = range(len(strategy.layers))
    return [(index, layer_state(strategy.layers[index], strategy.optimizers)) for index in held]
