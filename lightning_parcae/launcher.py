"""How ``fit`` is entered: as an instance, or as the supervisor of local instances.

With ``Trainer(devices=n)`` and no coordinator, the user's process does not train. It starts ``n`` instances that run
the same script, watches them, and takes over what ``fit`` has produced; so a killed instance never ends the
user's terminal or the rest of the script.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

import __main__
from lightning_parcae import lightning_internals
from lightning_parcae.callback import ParcaeCallback
from lightning_parcae.engine.session import RollbackRequired
from lightning_parcae.errors import JobFailedError, install_exit_codes
from lightning_parcae.supervisor import ExitCode, Supervisor

if TYPE_CHECKING:
    from lightning_parcae.strategy import ParcaeStrategy

RESULT_VARIABLE = "PARCAE_RESULT"
"""Environment variable that tells an instance where the user's process waits for what ``fit`` has produced."""


def add_callback(trainer: pl.Trainer) -> None:
    """Give the trainer a :class:`ParcaeCallback` if it has none."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if not any(isinstance(callback, ParcaeCallback) for callback in callbacks):
        callbacks.insert(0, ParcaeCallback())


class InstanceLauncher(_Launcher):
    """Enters the trainer in this process, and again after a rollback."""

    def __init__(self, strategy: ParcaeStrategy) -> None:
        self._strategy = strategy

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Run ``function`` until it ends without a rollback."""
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return function(*args, **kwargs)
        add_callback(trainer)
        self._strategy.refuse_second_fit()
        initial = trainer.fit_loop.state_dict()
        while True:
            try:
                result = function(*args, **kwargs)
                break
            except lightning_internals.ExitFitQuietly:
                self._leave(trainer)
                raise
            except RollbackRequired as rollback:
                self._strategy.begin_again(rollback.reason)
                trainer._signal_connector.teardown()
                trainer.fit_loop.teardown()
                lightning_internals.reset_progress(trainer, initial)
        self._leave(trainer)
        return result

    def _leave(self, trainer: pl.Trainer) -> None:
        path = os.environ.get(RESULT_VARIABLE)
        if path and self._strategy.is_global_zero:
            write_result(trainer, Path(path))
        self._strategy.leave_job()
        if path:
            sys.stdout.flush()
            sys.exit(0)  # the rest of the script runs in the user's process

    @override
    def kill(self, signum: Any) -> None:
        """Do nothing: there are no other processes."""


class SupervisorLauncher(_Launcher):
    """Starts the instances of a one-machine job and returns their results."""

    def __init__(self, strategy: ParcaeStrategy) -> None:
        self._strategy = strategy
        self._has_fit = False

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return False

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Run ``fit`` in instances, and everything else in this process."""
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return function(*args, **kwargs)
        if self._has_fit:
            raise MisconfigurationException(
                "ParcaeStrategy starts its instances once for each script, and this is the second call of fit. Use one "
                "script for each fit, or start the instances with `parcae run`"
            )
        self._has_fit = True
        install_exit_codes()
        module: pl.LightningModule = args[0]
        trainer.strategy.connect(module)
        trainer._callback_connector._attach_model_callbacks()
        module.trainer = trainer
        if not is_overridden("configure_model", module):  # else the layers are built in the instances only
            self._strategy.check_module(module)
        run_dir = Path(self._strategy.run_dir or Path(trainer.default_root_dir) / "parcae_runs" / _stamp())
        result_path = run_dir / "result.pt"
        supervisor = Supervisor(
            script_command(),
            num_instances=self._strategy.num_local_instances,
            run_dir=run_dir,
            env={RESULT_VARIABLE: str(result_path)},
            failure_timeout_s=self._strategy.failure_timeout_s,
        )
        code = supervisor.run()
        if code == ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        if code != ExitCode.FINISHED:
            raise JobFailedError(f"the job ended with exit code {code}; its log is in {run_dir}", code)
        read_result(trainer, module, result_path)
        return None

    @override
    def kill(self, signum: Any) -> None:
        """Do nothing: the supervisor ends its instances itself."""


def _stamp() -> str:
    return time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}"


def script_command() -> Sequence[str]:
    """Return the command that runs this script again.

    Raises:
        MisconfigurationException: If there is no script, as in a notebook.
    """
    spec = getattr(__main__, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        name = spec.name.removesuffix(".__main__")
        return [sys.executable, "-m", name, *sys.argv[1:]]
    path = getattr(__main__, "__file__", None)
    if path is None or not os.path.exists(path):
        raise MisconfigurationException(
            "Trainer(strategy='parcae', devices=n) starts n instances of your script, but this is no script "
            "(a notebook, python -c or standard input). Put the code into a file, or use devices=1"
        )
    return [sys.executable, os.path.abspath(path), *sys.argv[1:]]


def write_result(trainer: pl.Trainer, path: Path) -> None:
    """Write what ``fit`` has produced, for the user's process."""
    checkpoint = trainer.checkpoint_callback
    result = {
        "state_dict": trainer.lightning_module.state_dict(),
        "callback_metrics": {name: value.cpu() for name, value in trainer.callback_metrics.items()},
        "best_model_path": str(getattr(checkpoint, "best_model_path", "") or ""),
        "last_model_path": str(getattr(checkpoint, "last_model_path", "") or ""),
        "best_model_score": getattr(checkpoint, "best_model_score", None),
        "fit_loop": trainer.fit_loop.state_dict(),
        "logger_versions": [getattr(logger, "version", None) for logger in trainer.loggers],
        "should_stop": trainer.should_stop,
    }
    part = path.with_suffix(".part")
    torch.save(result, part)
    os.replace(part, path)


def read_result(trainer: pl.Trainer, module: pl.LightningModule, path: Path) -> None:
    """Take over what the instances have produced.

    Raises:
        JobFailedError: If rank 0 has left no result.
    """
    if not path.exists():
        raise JobFailedError(f"the job finished, but {path} is missing; see the instances' logs in {path.parent}")
    result = torch.load(path, weights_only=True, map_location="cpu")
    module.load_state_dict(result["state_dict"])
    trainer.callback_metrics.update(result["callback_metrics"])
    checkpoint = trainer.checkpoint_callback
    for name in ("best_model_path", "last_model_path", "best_model_score"):
        if checkpoint is not None and hasattr(checkpoint, name):
            setattr(checkpoint, name, result[name])
    for logger, version in zip(trainer.loggers, result["logger_versions"], strict=True):
        if hasattr(logger, "_version"):
            logger._version = version  # what runs after fit is logged beside it
    trainer.fit_loop.load_state_dict(result["fit_loop"])
    lightning_internals.end_restart(trainer)
    trainer.should_stop = result["should_stop"]
    path.unlink()
