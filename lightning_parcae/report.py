"""What happened in a run, told from its run directory: layouts over time, pauses by cause, samples used."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_parcae.sharding.ledger import EpochReport, Ledger
from lightning_parcae.timeline import JobView, Level, Reconfiguration, describe_bytes, read_timeline

_COLORS: dict[Level, str] = {"info": "", "good": "green", "warn": "yellow", "bad": "red"}


@dataclass(frozen=True, slots=True)
class PauseStatistics:
    """Pauses of one cause.

    Attributes:
        cause: Why generations were formed, see :class:`~lightning_parcae.timeline.Reconfiguration`.
        count: How many.
        median_s: Median pause in seconds.
        p95_s: 95th percentile (nearest rank) in seconds.
        max_s: Longest in seconds.
    """

    cause: str
    count: int
    median_s: float
    p95_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run directory, read.

    Attributes:
        run_dir: The directory.
        view: The state of the job at the end.
        begin: First event, unix seconds.
        end: Last event, unix seconds.
        lines: What happened: seconds since the first event, level, text.
        epochs: Account of the samples; empty if the job wrote no commit records.
    """

    run_dir: Path
    view: JobView
    begin: float
    end: float
    lines: tuple[tuple[float, Level, str], ...]
    epochs: tuple[EpochReport, ...]

    @classmethod
    def read(cls, run_dir: Path, *, samples_per_epoch: int | None = None) -> RunReport:
        """Read a run directory.

        Args:
            run_dir: With a ``timeline.jsonl``, and commit records if the job wrote them.
            samples_per_epoch: Size of the data set. By default every sample that was ever used is expected once in
                each epoch, so that a sample that was never used is not missed.

        Raises:
            ValueError: If there is no timeline, or it is damaged.
        """
        path = run_dir / "timeline.jsonl"
        if not path.is_file():
            raise ValueError(f"{run_dir} holds no timeline.jsonl; give the run directory of a job")
        view = JobView()
        lines: list[tuple[float, Level, str]] = []
        begin = end = 0.0
        for record in read_timeline(path):
            end = float(record["time"])
            begin = begin or end
            line = view.take(record)
            if line is not None:
                lines.append((end - begin, line.level, line.text))
        ledger = Ledger.from_files(sorted((run_dir / "commits").glob("*.jsonl")))
        used = {index for of_step in ledger.commits.values() for record in of_step.values() for index in record.indices}
        epochs = ledger.report(used if samples_per_epoch is None else samples_per_epoch)
        return cls(run_dir, view, begin, end, tuple(lines), tuple(epochs))

    @property
    def layouts(self) -> list[str]:
        """Configurations in the order they ran, each change once."""
        names: list[str] = []
        for change in self.view.reconfigurations:
            name = str(change.layout.config)
            if not names or names[-1] != name:
                names.append(name)
        return names

    @property
    def pauses(self) -> list[PauseStatistics]:
        """Pauses by cause, in the order of their first appearance; a start is no pause."""
        by_cause: dict[str, list[float]] = {}
        for change in self.view.reconfigurations:
            if change.cause == "start":
                continue
            by_cause.setdefault(change.cause, []).append(change.pause_s)
        return [
            PauseStatistics(cause, len(values), statistics.median(values), _percentile(values, 0.95), max(values))
            for cause, values in by_cause.items()
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "run_dir": str(self.run_dir),
            "outcome": self.view.summary(),
            "exit_code": 0 if self.view.stop is None else self.view.stop.exit_code,
            "steps": self.view.step,
            "duration_s": round(self.end - self.begin, 3),
            "generations": [_generation_to_json(item, self.begin) for item in self.view.reconfigurations],
            "pauses": {
                item.cause: {"count": item.count, "median_s": item.median_s, "p95_s": item.p95_s, "max_s": item.max_s}
                for item in self.pauses
            },
            "rollbacks": self.view.num_rollbacks,
            "epochs": [
                {
                    "epoch": epoch.epoch,
                    "expected": epoch.num_expected,
                    "committed": epoch.num_committed,
                    "duplicated": sum(epoch.duplicated.values()),
                    "lost": sum(epoch.lost.values()),
                    "left": sum(epoch.left.values()),
                }
                for epoch in self.epochs
            ],
        }

    def show(self, console: Console | None = None) -> None:
        """Print the report."""
        out = Console() if console is None else console
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.begin))
        out.print(Text(f"{self.run_dir}: started {started}, {self.end - self.begin:.1f} s; {self.view.summary()}"))
        out.print(self.generations_table())
        out.print(self.pauses_table())
        if self.epochs:
            for epoch in self.epochs:
                out.print(str(epoch), style="green" if epoch.is_exact else "red")
        else:
            out.print("no commit records: use ParcaeStrategy(commit_records=True), or set PARCAE_COMMIT_RECORDS=1")
        if self.view.stop is not None:
            out.print(Text(f"stopped: {self.view.stop.reason}", style="red"))

    def generations_table(self, title: str = "layouts over time") -> Table:
        """Return the layouts over time."""
        table = Table(title=title)
        for name in ("at", "step", "generation", "layout", "cause", "pause", "moved", "for"):
            table.add_column(name, justify="left" if name in ("layout", "cause") else "right")
        changes = self.view.reconfigurations
        ends = [change.time for change in changes[1:]] + [self.end]
        for change, end in zip(changes, ends, strict=True):
            table.add_row(
                f"{change.time - self.begin:.1f} s",
                str(change.step),
                str(change.generation),
                str(change.layout.config),
                change.cause,
                f"{change.pause_s:.2f} s",
                describe_bytes(change.bytes_moved),
                f"{end - change.time:.1f} s",
            )
        return table

    def pauses_table(self) -> Table:
        """Return the pauses by cause."""
        table = Table(title="pauses")
        table.add_column("cause")
        for name in ("count", "median", "p95", "longest"):
            table.add_column(name, justify="right")
        for item in self.pauses:
            table.add_row(
                item.cause, str(item.count), f"{item.median_s:.2f} s", f"{item.p95_s:.2f} s", f"{item.max_s:.2f} s"
            )
        return table


def _generation_to_json(change: Reconfiguration, begin: float) -> dict[str, Any]:
    return {
        "at_s": round(change.time - begin, 3),
        "step": change.step,
        "generation": change.generation,
        "config": [change.layout.config.num_pipelines, change.layout.config.num_stages],
        "grid": [list(row) for row in change.layout.grid],
        "cause": change.cause,
        "kind": change.kind,
        "pause_s": change.pause_s,
        "bytes_moved": change.bytes_moved,
        "reason": change.reason,
    }


def _percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
