"""``parcae demo``: two models train through a kill, a stop, a notice and two joins, and every promise is checked.

Each model runs twice: undisturbed in one process, and as a job of four local instances that a script disturbs. At the
end the two are compared: losses and weights, which samples were used, and whether the survivors are the processes that
were started.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from lightning_parcae.console import Console
from lightning_parcae.faults import FaultScript
from lightning_parcae.processes import ChildProcess
from lightning_parcae.report import RunReport
from lightning_parcae.sharding.ledger import Ledger
from lightning_parcae.supervisor import Supervisor
from lightning_parcae.timeline import describe_bytes

MODELS = ("digits", "chargpt")
_MODULE = "lightning_parcae.demo_models"
_NUM_INSTANCES = 4
DEFAULT_STEPS = 180
QUICK_STEPS = 120
_FAILURE_TIMEOUT_S = 4.0
#: Joiners need some seconds to warm up: a step takes at least so long, or a fast machine is done before they come.
_PACE_S = 0.12
_REFERENCE_TIMEOUT_S = 240.0
#: Both run in float64, so that what is left is the order of additions.
_LOSS_TOLERANCE = 1e-9
_SIZES = {"digits": 1797, "chargpt": 1500}


@dataclass(slots=True)
class DemoResult:
    """What one model's run showed.

    Attributes:
        model: The model.
        report: Its run directory, read.
        steps: Steps that the job made.
        first_loss: Loss of the first step.
        last_loss: Loss of the last step.
        num_committed: Samples committed.
        num_duplicated: Samples committed more often than once per epoch.
        num_lost: Samples left out.
        num_reread: Samples read again because a step was done again.
        loss_difference: Largest relative difference to the undisturbed process, over all steps.
        weight_difference: Largest difference of a weight at the end.
        survivors: Instances that were there at the end.
        broken: Promises that were broken, in words; empty if all were kept.
    """

    model: str
    report: RunReport
    steps: int = 0
    first_loss: float = float("nan")
    last_loss: float = float("nan")
    num_committed: int = 0
    num_duplicated: int = 0
    num_lost: int = 0
    num_reread: int = 0
    loss_difference: float = float("nan")
    weight_difference: float = float("nan")
    survivors: tuple[str, ...] = ()
    broken: list[str] = field(default_factory=list)


def run_demo(models: Sequence[str], *, steps: int, keep: Path | None = None) -> int:
    """Run the demo.

    Args:
        models: Which models to train.
        steps: Optimizer steps of each.
        keep: Where to leave logs, timelines and records; a temporary folder that is removed if None.

    Returns:
        0 if every promise was kept, 1 if one was broken, 130 if interrupted.
    """
    started_at = time.monotonic()
    folder = keep.absolute() if keep is not None else Path(tempfile.mkdtemp(prefix="parcae-demo-"))
    console = Console()
    try:
        references = {model: folder / model / "reference" for model in models}
        for path in [folder / model for model in models]:
            shutil.rmtree(path, ignore_errors=True)
        if not _run_references(references, steps, console):
            return 1
        results = []
        for model in models:
            supervisor = _supervisor(model, folder / model / "job", steps)
            code = supervisor.run()
            if code == 130:
                return code
            results.append(_check(model, supervisor, code, references[model], steps))
        _show(results, time.monotonic() - started_at, folder if keep is not None else None)
        return 1 if any(result.broken for result in results) else 0
    except KeyboardInterrupt:
        return 130
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _command(model: str, out: Path, steps: int, pace_s: float) -> list[str]:
    """Return what each instance runs, and the reference too."""
    command = [sys.executable, "-m", "lightning_parcae.run_script", "-m", _MODULE]
    return [*command, model, "--out", str(out), "--steps", str(steps), "--pace", str(pace_s)]


def _script(steps: int) -> FaultScript:
    """Return what happens to the job; each loss waits until two pipelines run again, as no checkpoint is kept."""
    return (
        FaultScript(seed=3)
        .add(2, at_step=2)
        .kill("any", at_step=steps // 12, min_pipelines=2)
        .stop("any", at_step=steps // 3, min_pipelines=2)
        .cont("stopped", at_step=steps // 3, min_pipelines=2)
        .notice("rank0", grace_s=30.0, at_step=steps // 2, min_pipelines=2)
    )


def _supervisor(model: str, run_dir: Path, steps: int) -> Supervisor:
    return Supervisor(
        _command(model, run_dir, steps, _PACE_S),
        num_instances=_NUM_INSTANCES,
        run_dir=run_dir,
        job_id=f"demo-{model}-{os.getpid()}",
        script=_script(steps),
        failure_timeout_s=_FAILURE_TIMEOUT_S,
    )


def _run_references(folders: dict[str, Path], steps: int, console: Console) -> bool:
    """Train each model undisturbed, one process each; return whether all came to their end."""
    console.event(f"reference: {' and '.join(folders)} undisturbed, one process each, {steps} steps")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PARCAE_")}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PARCAE_COMMIT_RECORDS": "0"}
    children: dict[str, ChildProcess] = {}
    try:
        for model, folder in folders.items():
            folder.mkdir(parents=True, exist_ok=True)
            command = _command(model, folder, steps, 0.0)
            children[model] = ChildProcess(command, environ=environ, log_path=folder / "log")
        deadline = time.monotonic() + _REFERENCE_TIMEOUT_S
        while any(child.poll() is None for child in children.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        for child in children.values():
            child.reap()
    for model, child in children.items():
        if child.exit_code != 0:
            console.block(child.log_path.read_text(encoding="utf-8", errors="replace")[-4000:])
            console.event(f"the undisturbed process of {model} failed; its log is above", "bad")
            return False
    return True


# -- checks -----------------------------------------------------------------------------------------------------------


def _check(model: str, supervisor: Supervisor, code: int, reference: Path, steps: int) -> DemoResult:
    """Compare a job with its reference."""
    run_dir = supervisor.run_dir
    result = DemoResult(model, RunReport.read(run_dir))
    if code != 0:
        result.broken.append(f"the job ended with exit code {code}, not 0")
    checks: list[Callable[[], None]] = [
        lambda: _check_losses(result, run_dir, reference, steps),
        lambda: _check_weights(result, run_dir, reference),
        lambda: _check_samples(result, run_dir, finished_steps=steps),
        lambda: _check_processes(result, supervisor),
    ]
    for check in checks:
        try:
            check()
        except (OSError, ValueError, KeyError) as error:
            # a run that broke leaves records out; that is a broken promise, not an error of the demo
            result.broken.append(f"not checked: {error}")
    left = [str(event) for event in supervisor.faults_left]
    if left:
        result.broken.append(f"did not happen: {'; '.join(left)}")
    return result


def _step_times(folder: Path) -> list[float]:
    """Return when each step was done, by the first instance that said so."""
    times: dict[int, float] = {}
    for path in sorted((folder / "losses").glob("*.jsonl")):
        for line in path.read_text(encoding="ascii").splitlines():
            record = json.loads(line)
            times[record["step"]] = min(record["time"], times.get(record["step"], math.inf))
    return [times[step] for step in sorted(times)]


def _losses(folder: Path) -> dict[int, list[float]]:
    """Return the losses that the instances recorded, by step."""
    losses: dict[int, list[float]] = {}
    for path in sorted((folder / "losses").glob("*.jsonl")):
        for line in path.read_text(encoding="ascii").splitlines():
            record = json.loads(line)
            losses.setdefault(record["step"], []).append(record["loss"])
    return losses


def _largest(differences: Iterable[float]) -> float:
    """Return the largest difference; infinity if one is not a number, which max() would pass over."""
    return max(math.inf if math.isnan(value) else value for value in differences)


def _check_losses(result: DemoResult, run_dir: Path, reference: Path, steps: int) -> None:
    """Each step's loss is the undisturbed process's, on every instance."""
    got, want = _losses(run_dir), _losses(reference)
    result.steps = len(got)
    if sorted(got) != list(range(1, steps + 1)):
        result.broken.append(f"{len(got)} of {steps} steps have a loss")
    result.first_loss, result.last_loss = got[min(got)][0], got[max(got)][0]
    result.loss_difference = _largest(
        abs(loss - want[step][0]) / abs(want[step][0]) for step, losses in got.items() for loss in losses
    )
    if not result.loss_difference <= _LOSS_TOLERANCE:
        result.broken.append(f"a loss differs by {result.loss_difference:.1e}, more than {_LOSS_TOLERANCE:g}")


def _check_weights(result: DemoResult, run_dir: Path, reference: Path) -> None:
    """The weights at the end are the undisturbed process's."""
    import torch

    got, want = (
        torch.load(folder / "final.ckpt", map_location="cpu", weights_only=True)["state_dict"]
        for folder in (run_dir, reference)
    )
    if got.keys() != want.keys():
        raise ValueError("the two checkpoints have different keys")
    result.weight_difference = _largest(float((got[name] - want[name]).abs().max()) for name in want)
    if not result.weight_difference <= _LOSS_TOLERANCE:
        result.broken.append(f"a weight differs by {result.weight_difference:.1e}, more than {_LOSS_TOLERANCE:g}")


def _check_samples(result: DemoResult, run_dir: Path, finished_steps: int) -> None:
    """Each sample was committed once per epoch, and was read for it."""
    paths = sorted((run_dir / "commits").glob("*.jsonl"))
    ledger = Ledger.from_files(paths)
    reports = ledger.report(_SIZES[result.model])
    result.num_committed = sum(epoch.num_committed for epoch in reports)
    result.num_duplicated = sum(sum(epoch.duplicated.values()) for epoch in reports)
    result.num_lost = sum(sum(epoch.lost.values()) for epoch in reports)
    result.broken.extend(str(epoch) for epoch in reports if not epoch.is_exact)
    if len(ledger.commits) != finished_steps:
        result.broken.append(f"{len(ledger.commits)} batches were committed in {finished_steps} steps")

    committed: Counter[int | str] = Counter()
    for of_step in ledger.commits.values():
        for record in of_step.values():
            committed.update(record.indices)
    reads = Ledger.from_files(sorted((run_dir / "reads").glob("*.jsonl"))).reads.get(None, Counter())
    unread = committed - reads
    result.num_reread = (reads - committed).total()
    if unread:
        result.broken.append(f"{unread.total()} samples were committed but not read")


def _check_processes(result: DemoResult, supervisor: Supervisor) -> None:
    """Who was there at the end is the process that was started under this name."""
    placed = {name for change in supervisor.view.reconfigurations for row in change.layout.grid for name in row}
    unused = sorted(set(supervisor.instances) - placed)
    if unused:
        result.broken.append(f"never took part: {' '.join(unused)}")
    result.survivors = tuple(name for name, record in supervisor.instances.items() if record.lived_at_finish)
    for path in sorted((supervisor.run_dir / "losses").glob("*.jsonl")):
        pids = {json.loads(line)["pid"] for line in path.read_text(encoding="ascii").splitlines()}
        if pids != {supervisor.instances[path.stem].pid}:
            result.broken.append(f"{path.stem} was started as {supervisor.instances[path.stem].pid}, but ran as {pids}")
    if not result.survivors:
        result.broken.append("no instance was there at the end")


# -- the table --------------------------------------------------------------------------------------------------------


def _generations_table(result: DemoResult) -> Table:
    """Return the layouts over time, each with how long no step was made for it."""
    table = Table(title=f"{result.model}: layouts over time")
    for name in ("at", "after step", "layout", "cause", "standstill", "of it, change", "moved"):
        table.add_column(name, justify="left" if name in ("layout", "cause") else "right")
    report = result.report
    times = _step_times(report.run_dir)
    usual_s = (
        statistics.median(after - before for before, after in itertools.pairwise(times)) if len(times) > 1 else 0.0
    )
    for change in report.view.reconfigurations:
        done = sum(moment <= change.time for moment in times)
        # from the last step before to the first one after, less what a step takes anyway: detection included
        standstill_s = times[done] - times[done - 1] - usual_s if 0 < done < len(times) else 0.0
        table.add_row(
            f"{change.time - report.begin:.1f} s",
            str(done),
            str(change.layout.config),
            change.cause,
            f"{max(0.0, standstill_s):.2f} s",
            f"{change.pause_s:.2f} s",
            describe_bytes(change.bytes_moved),
        )
    return table


def _show(results: Sequence[DemoResult], seconds: float, folder: Path | None) -> None:
    """Show what happened and what was promised."""
    out = RichConsole()
    for result in results:
        out.print(_generations_table(result))
    table = Table(title="the promises; differences to one undisturbed process, the largest of all")
    table.add_column("")
    for result in results:
        table.add_column(result.model, justify="right")
    rows: list[tuple[str, Callable[[DemoResult], str]]] = [
        ("steps", lambda r: str(r.steps)),
        ("loss", lambda r: f"{r.first_loss:.3f} > {r.last_loss:.3f}"),
        ("layouts over time", lambda r: " > ".join(r.report.layouts)),
        ("samples committed", lambda r: str(r.num_committed)),
        ("samples duplicated", lambda r: str(r.num_duplicated)),
        ("samples lost", lambda r: str(r.num_lost)),
        ("samples read again", lambda r: str(r.num_reread)),
        ("difference of a loss, relative", lambda r: f"{r.loss_difference:.1e}"),
        ("difference of a weight", lambda r: f"{r.weight_difference:.1e}"),
        ("survivors (same pids)", lambda r: " ".join(r.survivors)),
        ("promises broken", lambda r: str(len(r.broken))),
    ]
    for name, value in rows:
        table.add_row(name, *(value(result) for result in results))
    out.print(table)
    for result in results:
        for line in result.broken:
            out.print(Text(f"{result.model}: {line}", style="red"))
    kept = not any(result.broken for result in results)
    out.print(f"{'every promise kept' if kept else 'a promise was broken'} in {seconds:.0f} s")
    if folder is not None:
        out.print(f"logs, timelines and records: {folder}")
