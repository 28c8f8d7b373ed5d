"""The log files of a run, which go on in one directory when rank 0 moves.

Every member remembers the last rows that Lightning has logged. A member that becomes rank 0 continues the files of the
one before: it adds the rows that this one had no time to write, and leaves out those that it wrote ahead of the others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_parcae import lightning_internals

_NUM_REMEMBERED = 200
"""Rows kept of each logger: far more than a batch, or the end of an epoch, logs."""

_Row = tuple[int | None, frozenset[str]]


class RunLogs:
    """The loggers of a trainer while an instance fits."""

    def __init__(self) -> None:
        self._followed: list[_FollowedLogger] = []

    def open(self, trainer: pl.Trainer, agree: Callable[[str, Any], Any]) -> None:
        """Use the directories that the first instance has chosen, and remember what is logged from here on."""
        self.close()
        for index, logger in enumerate(trainer.loggers):
            if hasattr(logger, "_version"):
                logger._version = agree(f"logger/{index}/version", logger.version)
            self._followed.append(_FollowedLogger(logger))

    def close(self) -> None:
        """Leave the loggers as they were."""
        for followed in self._followed:
            followed.close()
        self._followed = []

    def versions(self) -> list[Any]:
        """Return the versions of the loggers, for a joiner."""
        return [getattr(followed.logger, "_version", None) for followed in self._followed]

    def use_versions(self, versions: list[Any]) -> None:
        """Log where another instance does."""
        for followed, version in zip(self._followed, versions, strict=True):
            if version is not None:
                followed.logger._version = version  # type: ignore[attr-defined]

    def take_over(self) -> None:
        """Continue the files of the run: this process has just become rank 0."""
        for followed in self._followed:
            followed.take_over()

    def rewind(self, step: int) -> None:
        """Forget what was logged from a step on, for the job has gone back to it."""
        for followed in self._followed:
            followed.rewind(step)


class _FollowedLogger:
    """A logger whose last rows are known."""

    def __init__(self, logger: Logger) -> None:
        self.logger = logger
        self._write = logger.log_metrics
        self._rows: deque[tuple[dict[str, float], int | None]] = deque(maxlen=_NUM_REMEMBERED)
        self._ahead: Counter[_Row] = Counter()  # rows that the former rank 0 wrote before the others had them
        logger.log_metrics = self._log  # type: ignore[method-assign]

    def close(self) -> None:
        vars(self.logger).pop("log_metrics", None)

    def _log(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._rows.append((dict(metrics), step))
        row = self._row(metrics, step)
        if self._ahead[row] > 0:
            self._ahead[row] -= 1
            return
        self._write(metrics, step)

    def _row(self, metrics: Mapping[str, Any], step: int | None) -> _Row:
        prefix = getattr(self.logger, "_prefix", "")
        return step, frozenset(f"{prefix}-{name}" if prefix else name for name in metrics)

    def take_over(self) -> None:
        if isinstance(self.logger, CSVLogger):
            self._take_over_csv(self.logger)
        elif self._rows:
            # what was written is not known; the same value twice does no harm where a missing one would
            last = self._rows[-1][1]
            for metrics, step in self._rows:
                if step == last:
                    self._write(metrics, step)
        self.logger.save()

    def _take_over_csv(self, logger: CSVLogger) -> None:
        written = Counter(lightning_internals.continue_csv(logger))
        for metrics, step in self._rows:
            row = self._row(metrics, step)
            if written[row] > 0:
                written[row] -= 1
            else:
                self._write(metrics, step)
        last = max((step for _, step in self._rows if step is not None), default=-1)
        self._ahead = Counter({row: n for row, n in written.items() if n > 0 and row[0] is not None and row[0] >= last})

    def rewind(self, step: int) -> None:
        self._rows.clear()
        self._ahead.clear()
        if isinstance(self.logger, CSVLogger):
            lightning_internals.cut_csv(self.logger, step)
