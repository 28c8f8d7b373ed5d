"""Every use of Lightning's private interface, in one place.

Nothing public hands a running ``Trainer`` to another process. What is needed for that is small, was stable over
Lightning 2.5 and 2.6, and is tested against the installed version by ``tests/test_lightning_internals.py``:

* a checkpoint dictionary as ``dump_checkpoint`` makes it, without tensors of layers;
* what such a checkpoint lacks for an exact continuation: the running means of logged values, the metrics that
  callbacks monitor, random number generators, ``should_stop``, the versions of loggers, callbacks without state;
* the loops' counters, loaded *inside* the running loop, so their restart machinery must be switched off again.
"""

from __future__ import annotations

import csv
import io
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
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

__all__ = [
    "ExitFitQuietly",
    "continue_csv",
    "cut_csv",
    "describe_settings",
    "end_restart",
    "find_loader_position",
    "hide_loader_position",
    "inject",
    "pack",
    "prepare_data",
    "reset_progress",
    "say",
    "take_over_progress_bar",
    "use_batch_size",
]

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
            for index, callback in enumerate(trainer.callbacks)  # type: ignore[attr-defined]
            for kind, fields in _STATELESS_CALLBACK_FIELDS
            if isinstance(callback, kind)
        },
    }


def end_restart(trainer: pl.Trainer) -> None:
    """Switch off the restart machinery that loading counters has switched on."""
    for loop in _loops(trainer.fit_loop):
        loop.on_iteration_done()


_POSITION = "parcae_train_loader"
"""Key of a checkpoint that holds the train loader's position, where plain Lightning does not look for it."""


def hide_loader_position(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint that a plain Trainer can load as well: it knows no state of its DataLoaders."""
    loops = checkpoint.get("loops")
    if not loops or "combined_loader" not in loops["fit_loop"]["state_dict"]:
        return checkpoint
    state = dict(loops["fit_loop"]["state_dict"])
    position = state.pop("combined_loader")
    fit_loop = {**loops["fit_loop"], "state_dict": state}
    return {**checkpoint, "loops": {**loops, "fit_loop": fit_loop}, _POSITION: position}


def find_loader_position(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`hide_loader_position` in a checkpoint that was read."""
    position = checkpoint.pop(_POSITION, None)
    if position is not None and "loops" in checkpoint:
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = position
    return checkpoint


_NOT_RESULTS = frozenset({"params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable"})
"""What parameter groups hold that changes no result, or is not the same on all machines."""


def _plain(values: Mapping[str, Any]) -> list[str]:
    """Describe settings by what prints alike in every process."""
    described = []
    for name, value in sorted(values.items()):
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, (list, tuple)) and all(isinstance(part, (int, float)) for part in value):
            value = list(value)
        elif not isinstance(value, (bool, int, float, str, type(None))):
            value = type(value).__name__
        described.append(f"{name}={value!r}")
    return described


def describe_settings(trainer: pl.Trainer) -> list[str]:
    """Describe what decides the results beside model and data: optimizer, schedulers and the Trainer's settings.

    To be called when the optimizers are new: training changes the values, and a joiner begins with the first ones.
    """
    described = []
    for optimizer in trainer.optimizers:
        described.append(type(optimizer).__name__)
        for group in optimizer.param_groups:
            settings = _plain({name: value for name, value in group.items() if name not in _NOT_RESULTS})
            described.append(f"{len(group['params'])} parameters: {', '.join(settings)}")
    for config in trainer.lr_scheduler_configs:
        how = {"interval": config.interval, "frequency": config.frequency, "monitor": config.monitor}
        state = {name: value for name, value in vars(config.scheduler).items() if not name.startswith("_")}
        state.pop("optimizer", None)
        described.append(f"{type(config.scheduler).__name__}: {', '.join(_plain({**state, **how}))}")
    values = {
        name: getattr(trainer, name)
        for name in (
            "gradient_clip_val",
            "accumulate_grad_batches",
            "max_epochs",
            "max_steps",
            "min_epochs",
            "min_steps",
            "precision",
            "val_check_interval",
            "check_val_every_n_epoch",
            "limit_train_batches",
            "limit_val_batches",
        )
    }
    algorithm = trainer.gradient_clip_algorithm
    values["gradient_clip_algorithm"] = None if algorithm is None else str(algorithm.value)
    return described + _plain(values)


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


def continue_csv(logger: CSVLogger) -> list[tuple[int | None, frozenset[str]]]:
    """Let a ``CSVLogger`` append to the ``metrics.csv`` that another process has begun.

    By itself it deletes the file on its first use, because it takes it for an older run's. A half-written last line,
    left by a kill, is removed.

    Returns:
        For each row of the file, its step and the names of its values.
    """
    if logger._experiment is None:
        check = _ExperimentWriter._check_log_dir_exists
        _ExperimentWriter._check_log_dir_exists = lambda self: None  # type: ignore[method-assign]
        try:
            writer = logger.experiment
        finally:
            _ExperimentWriter._check_log_dir_exists = check  # type: ignore[method-assign]
    else:
        writer = logger._experiment
    if not writer._fs.isfile(writer.metrics_file_path):
        return []
    with writer._fs.open(writer.metrics_file_path, "r", newline="") as file:
        text = file.read()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        _write_file(writer, whole)
    rows = list(csv.DictReader(io.StringIO(whole, newline="")))
    writer.metrics_keys = next(csv.reader(io.StringIO(whole, newline="")), [])
    return [
        (int(row["step"]) if row.get("step") else None, frozenset(k for k, v in row.items() if v and k != "step"))
        for row in rows
    ]


def cut_csv(logger: CSVLogger, step: int) -> None:
    """Remove the rows of a step and of all after it; does nothing where the logger does not write."""
    writer = logger._experiment
    if writer is None or not writer._fs.isfile(writer.metrics_file_path):
        return
    with writer._fs.open(writer.metrics_file_path, "r", newline="") as file:
        rows = list(csv.DictReader(file))
    kept = io.StringIO(newline="")
    table = csv.DictWriter(kept, fieldnames=writer.metrics_keys)
    table.writeheader()
    table.writerows(row for row in rows if not row.get("step") or int(row["step"]) < step)
    _write_file(writer, kept.getvalue())


def _write_file(writer: _ExperimentWriter, text: str) -> None:
    part = f"{writer.metrics_file_path}.part"
    with writer._fs.open(part, "w", newline="") as file:
        file.write(text)
    writer._fs.mv(part, writer.metrics_file_path)


def take_over_progress_bar(trainer: pl.Trainer, *, is_rank_zero: bool) -> None:
    """Show the progress bar on rank 0 and nowhere else; called in the middle of ``fit``."""
    bar = trainer.progress_bar_callback
    if bar is None:
        return
    if not is_rank_zero:
        bar.disable()
        if isinstance(bar, TQDMProgressBar) and bar._train_progress_bar is not None:
            bar._train_progress_bar.close()  # does nothing where none was shown
        elif isinstance(bar, RichProgressBar):
            bar._stop_progress()
        return
    bar.enable()
    if isinstance(bar, TQDMProgressBar):
        shown = bar._train_progress_bar
        if bar.is_enabled and (shown is None or shown.disable):
            total = bar.total_train_batches
            bar.train_progress_bar = bar.init_train_tqdm()
            bar.train_progress_bar.reset(total if total != float("inf") else None)
            bar.train_progress_bar.initial = 0
            bar.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")
            bar.train_progress_bar.n = trainer.fit_loop.epoch_loop.batch_progress.current.completed
    elif isinstance(bar, RichProgressBar) and bar.is_enabled and (bar.progress is None or bar._progress_stopped):
        bar._init_progress(trainer)
        bar._initialize_train_progress_bar_id()


def say(trainer: pl.Trainer, line: str) -> None:
    """Show a line on rank 0's console, above the progress bar if there is one."""
    if not trainer.is_global_zero:
        return
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar) and bar._train_progress_bar is not None and not bar._train_progress_bar.disable:
        bar._train_progress_bar.write(line)
    elif isinstance(bar, RichProgressBar) and bar.progress is not None and not bar._progress_stopped:
        bar.progress.console.print(line, markup=False, highlight=False)
    else:
        rank_zero_info(line)


def prepare_data(trainer: pl.Trainer) -> None:
    """Call the ``prepare_data`` hooks again, after this instance has become the one of its host that must."""
    trainer._data_connector.prepare_data()


def use_batch_size(trainer: pl.Trainer, batch_size: int) -> None:
    """Weigh what hooks log in the present batch by the global batch, whatever part of it was read here."""
    results = trainer._results
    if results is not None:
        results.batch_size = batch_size
