"""Every use of Lightning's private interface, in one place.

Nothing public hands a running ``Trainer`` to another process. What is needed for that is small, was stable over
Lightning 2.5 and 2.6, and is tested against the installed version by ``tests/test_lightning_internals.py``:

* a checkpoint dictionary as ``dump_checkpoint`` makes it, without tensors of layers;
* what such a checkpoint lacks for an exact continuation: the running means of logged values, the metrics that
  callbacks monitor, random number generators, ``should_stop``, the versions of loggers, callbacks without state;
* the loops' counters, loaded *inside* the running loop, so their restart machinery must be switched off again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.loggers.csv_logs import _ExperimentWriter
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import _TunerExitException

__all__ = ["ExitFitQuietly", "inject", "pack", "take_over_progress_bar", "take_over_rank_zero_files"]

ExitFitQuietly = _TunerExitException
"""Raised inside ``fit``, it makes ``fit`` return as if it had run to its end, teardown hooks included."""

_METRIC_FIELDS = ("value", "cumulated_batch_size", "_forward_cache", "has_reset", "_computed", "_update_count")


def _loops(loop: _Loop) -> Iterator[_Loop]:
    yield loop
    for value in vars(loop).values():
        if isinstance(value, _Loop):
            yield from _loops(value)


def _pack_results(results: _ResultCollection) -> list[dict[str, Any]]:
    packed = []
    for key, metric in results.items():
        if not metric.is_tensor:
            continue  # the state of a torchmetrics metric travels with the module that owns it
        meta = metric.meta
        packed.append(
            {
                "key": key,
                "meta": {
                    "fx": meta.fx,
                    "name": meta.name,
                    "prog_bar": meta.prog_bar,
                    "logger": meta.logger,
                    "on_step": meta.on_step,
                    "on_epoch": meta.on_epoch,
                    "reduce_fx": meta.reduce_fx.__name__,
                    "enable_graph": meta.enable_graph,
                    "add_dataloader_idx": meta.add_dataloader_idx,
                    "dataloader_idx": meta.dataloader_idx,
                    "metric_attribute": meta.metric_attribute,
                },
                "rank_zero_only": meta.sync.rank_zero_only,
                "state": {name: getattr(metric, name) for name in _METRIC_FIELDS if hasattr(metric, name)},
            }
        )
    return packed


def _unpack_results(results: _ResultCollection, packed: list[dict[str, Any]], trainer: pl.Trainer) -> None:
    results.clear()
    for item in packed:
        meta = _Metadata(**item["meta"])
        meta.sync = _Sync(fn=trainer.strategy.reduce, _should=False, rank_zero_only=item["rank_zero_only"])
        metric = _ResultMetric(meta, True)
        for name, value in item["state"].items():
            setattr(metric, name, value)
        results[item["key"]] = metric


_STATELESS_CALLBACK_FIELDS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (ModelCheckpoint, ("_last_global_step_saved", "_last_checkpoint_saved")),
)


def pack(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the trainer's state at a step boundary, without the tensors of pipelined layers.

    The strategy must return light states from ``lightning_module_state_dict`` and ``optimizer_state`` meanwhile.
    """
    epoch_loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    rng = _collect_rng_states()
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    for key in [key for key in checkpoint if "hyper_parameters" in key or "hparams" in key]:
        del checkpoint[key]  # the joiner runs the same script: it has them
    return {
        "checkpoint": checkpoint,
        "rng": {"torch": rng["torch"], "python": rng["python"], "numpy": _pack_numpy(rng.get("numpy"))},
        "results": [_pack_results(epoch_loop._results), _pack_results(epoch_loop.val_loop._results)],
        "callback_metrics": dict(connector._callback_metrics),
        "logged_metrics": dict(connector._logged_metrics),
        "progress_bar_metrics": dict(connector._progress_bar_metrics),
        "first_loop_iter": connector._first_loop_iter,
        "current_fx": connector._current_fx,
        "should_stop": trainer.should_stop,
        "max_epochs": trainer.fit_loop.max_epochs,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "val_has_run": epoch_loop.val_loop._has_run,
        "callback_fields": {
            str(index): {field: getattr(callback, field) for field in fields if hasattr(callback, field)}
            for index, callback in enumerate(trainer.callbacks)
            for kind, fields in _STATELESS_CALLBACK_FIELDS
            if isinstance(callback, kind)
        },
    }


def end_restart(trainer: pl.Trainer) -> None:
    """Switch off the restart machinery that loading counters has switched on."""
    for loop in _loops(trainer.fit_loop):
        loop.on_iteration_done()


def _pack_numpy(state: Any) -> Any:
    return None if state is None else list(state)


def inject(trainer: pl.Trainer, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Take over :func:`pack`'s state inside the running loop, at a step boundary.

    Returns:
        The position of the train loader, if it has one.
    """
    connector, fit_loop, metrics = trainer._checkpoint_connector, trainer.fit_loop, trainer._logger_connector
    epoch_loop = fit_loop.epoch_loop
    checkpoint = dict(state["checkpoint"])
    connector._loaded_checkpoint = checkpoint
    try:
        connector.restore_datamodule()
        connector.restore_model()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        fit_loop.load_state_dict(checkpoint["loops"]["fit_loop"])
        positions, fit_loop._combined_loader_states_to_load = fit_loop._combined_loader_states_to_load, []
        connector.restore_optimizers_and_schedulers()
    finally:
        connector._loaded_checkpoint = {}
    end_restart(trainer)  # the counters are taken over inside a loop that runs
    if fit_loop._data_fetcher is not None:
        fit_loop._data_fetcher.fetched = epoch_loop.batch_progress.current.ready
    _unpack_results(epoch_loop._results, state["results"][0], trainer)
    _unpack_results(epoch_loop.val_loop._results, state["results"][1], trainer)
    metrics._callback_metrics = dict(state["callback_metrics"])
    metrics._logged_metrics = dict(state["logged_metrics"])
    metrics._progress_bar_metrics = dict(state["progress_bar_metrics"])
    metrics._first_loop_iter, metrics._current_fx = state["first_loop_iter"], state["current_fx"]
    trainer.should_stop = state["should_stop"]
    fit_loop.max_epochs = state["max_epochs"]
    trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
    epoch_loop.val_loop._has_run = state["val_has_run"]
    for index, fields in state["callback_fields"].items():
        for field, value in fields.items():
            setattr(trainer.callbacks[int(index)], field, value)  # type: ignore[attr-defined]
    rng = {"torch": state["rng"]["torch"], "python": _as_tuples(state["rng"]["python"])}
    if state["rng"]["numpy"] is not None:
        rng["numpy"] = tuple(state["rng"]["numpy"])
    _set_rng_states(rng)
    position = positions[0] if positions else None
    return dict(position) if position is not None else None


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


def reset_progress(trainer: pl.Trainer, initial: Mapping[str, Any]) -> None:
    """Put the loops back to where ``fit`` began, so that ``fit`` can be entered again in this process."""
    trainer.fit_loop.load_state_dict(dict(initial))
    end_restart(trainer)
    trainer.fit_loop._combined_loader = None
    trainer.fit_loop._combined_loader_states_to_load = []
    trainer.fit_loop.epoch_loop.val_loop._combined_loader = None
    trainer.should_stop = False
    trainer.state.stage = RunningStage.TRAINING


def take_over_rank_zero_files(trainer: pl.Trainer) -> None:
    """Continue the log files of the run: this process has just become rank 0.

    A ``CSVLogger`` deletes an existing ``metrics.csv`` on its first use, because it takes it for an older run's.
    """
    for logger in trainer.loggers:
        if not isinstance(logger, CSVLogger) or logger._experiment is not None:
            continue
        check = _ExperimentWriter._check_log_dir_exists
        _ExperimentWriter._check_log_dir_exists = lambda self: None  # type: ignore[method-assign]
        try:
            writer = logger.experiment
        finally:
            _ExperimentWriter._check_log_dir_exists = check  # type: ignore[method-assign]
        if os.path.exists(writer.metrics_file_path):
            with open(writer.metrics_file_path) as file:
                header = file.readline().strip()
            if header:
                writer.metrics_keys = header.split(",")


def take_over_progress_bar(trainer: pl.Trainer, *, is_rank_zero: bool) -> None:
    """Show the progress bar on rank 0 and nowhere else."""
    bar = trainer.progress_bar_callback
    if bar is None:
        return
    if not is_rank_zero:
        bar.disable()
        return
    bar.enable()
    if isinstance(bar, RichProgressBar):
        bar._init_progress(trainer)  # does nothing if it is shown already
    elif isinstance(bar, TQDMProgressBar) and trainer.training and trainer.state.stage == RunningStage.TRAINING:
        fresh = getattr(bar, "_train_progress_bar", None)
        if fresh is None or fresh.disable:
            bar.train_progress_bar = bar.init_train_tqdm()
            total = bar.total_train_batches
            bar.train_progress_bar.reset(total if total != float("inf") else None)
            bar.train_progress_bar.initial = 0
            bar.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")
            bar.train_progress_bar.n = trainer.fit_loop.epoch_loop.batch_progress.current.completed
