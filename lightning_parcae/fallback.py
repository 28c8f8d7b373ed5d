"""The fallback checkpoint of a running job: when it is due, who writes what, how it comes back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_parcae.checkpoint.manifest import StoredFile, identifier_of
from lightning_parcae.checkpoint.store import FallbackStore
from lightning_parcae.control.messages import CheckpointRef
from lightning_parcae.engine.session import Session
from lightning_parcae.engine.state import layer_state, load_layer
from lightning_parcae.errors import CheckpointError
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
        run: Larger than that of every earlier run that wrote to the same place, and the same on all members.
            Generations count from 1 in each run; added to them it keeps a new checkpoint of an old step apart from the
            old one.
    """

    def __init__(self, url: str, *, every_n_steps: int, run: int = 0) -> None:
        self._store = FallbackStore(url)
        self._every_n_steps = every_n_steps
        self._run = run
        self._last_step = 0
        self._last_epoch = 0

    def check_writable(self) -> None:
        """Fail now, with the fix, rather than when state is lost."""
        self._store.check_writable()

    def newest(self) -> CheckpointRef | None:
        """Return the newest complete checkpoint; None if none was ever completed.

        Raises:
            CheckpointError: If checkpoints were completed, but all of them are damaged: a job must not start from
                nothing without somebody's word.
        """
        found = self._store.newest_complete()
        damaged = {name: why for name, why in self._store.skipped.items() if self._store.was_committed(name)}
        if found is None and damaged:
            name, why = sorted(damaged.items())[-1]
            raise CheckpointError(
                f"{self._store.url} holds {len(damaged)} checkpoints of an earlier run, but none can be used ({name}: "
                f"{why}). Mend them, or move them away or use another fallback_dir to start from the beginning"
            )
        return found

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
            identifier = identifier_of(step, self._run + session.generation)
            reach("fallback")
            files: list[dict[str, Any]] = []
            try:
                for index, tree in _held(strategy):
                    files.append(self._store.write_layer(identifier, index, tree).to_json())
                if strategy.is_global_zero:
                    files.append(self._store.write_tree(identifier, "trainer", strategy.pack_trainer()).to_json())
            except CheckpointError as error:
                # the job does not need this checkpoint to go on; all members learn that it is incomplete
                return {"identifier": identifier, "error": str(error)}
            return {"identifier": identifier, "files": files}

        payloads = session.run("fallback checkpoint", attempt, lambda: None)
        self._last_step, self._last_epoch = step, epoch
        if not strategy.is_global_zero:
            return
        identifier = payloads[0]["identifier"]
        errors = [payload["error"] for payload in payloads if "error" in payload]
        if not errors:
            try:
                self._store.commit(
                    identifier,
                    step=step,
                    clock=session.clock,
                    num_layers=len(strategy.layers),
                    files=[StoredFile.from_json(file) for payload in payloads for file in payload["files"]],
                    reason=reason,
                )
            except CheckpointError as error:
                errors.append(str(error))
        if errors:
            log.warning("the fallback checkpoint of step %d was not written; training goes on: %s", step, errors[0])
            strategy.record_event("checkpoint_failed", {"identifier": identifier, "step": step, "error": errors[0]})
            return
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
