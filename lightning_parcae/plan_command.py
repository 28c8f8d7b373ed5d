"""``parcae plan``: which configurations are feasible, how they compare, and what the job's planner would do now.

A dry run: nothing is trained. With a script, its module is measured on this machine first. The plan is made by
:class:`~lightning_parcae.planning.job_planner.JobPlanner`, as in a running job; every number of instances has one, and
"wait" is one. Bad input is a ``ValueError`` with one clear line.

Symbols: ``D`` pipelines, ``P`` stages, ``N`` instances, ``m`` micro-batches of a global batch, ``q`` of a pipeline.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_parcae.errors import JobFailedError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from lightning_parcae.planning.job_history import JobHistory
    from lightning_parcae.planning.job_planner import JobModel
    from lightning_parcae.planning.parallel_config import ParallelConfig
    from lightning_parcae.planning.policy import LayoutTable
    from lightning_parcae.simulation.workload import Workload

# The planner's default interval: its prior of event rates is per minute.
_INTERVAL_S = 60.0
# How far ahead losses are counted for the column of liveput.
_AHEAD = 10
_SHOWN = 15
_NEARBY = 8
_GIB = 2**30
_MOST_INSTANCES = 100_000
_DEFAULT_INSTANCES = 8
_MOST_AHEAD = 1_000
_LATEST_S = 86_400.0
_EPILOG = """\
examples:
  parcae plan --profile gpt-1.5b --instances 20
  parcae plan --profile gpt-1.5b --instances 20 --history aws-p3 --notice 2@90 --running 2x9
  parcae plan --instances 12 train.py --config config.yaml    measures the module of train.py here; trains nothing

Options come before the script; what follows it is the script's own.
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    command.usage = "parcae plan [--instances N] [options] (--profile FILE|NAME | SCRIPT [ARGUMENT...])"
    command.epilog = _EPILOG
    command.add_argument(
        "--instances", type=int, default=_DEFAULT_INSTANCES, metavar="N",
        help=f"instances now, noticed ones included (default {_DEFAULT_INSTANCES})",
    )  # fmt: skip
    command.add_argument("--max-instances", type=int, metavar="C", help="most instances there can be")
    command.add_argument("--profile", metavar="FILE|NAME", help="a profile file, or an example by name")
    command.add_argument("--model", metavar="M", help="which model of a profile file that holds several")
    command.add_argument("--memory", type=float, metavar="GIB", help="memory of an instance; bounds the configurations")
    state = command.add_argument_group("what is known")
    state.add_argument("--running", metavar="DxP", help="what runs (default: what a job starts with)")
    state.add_argument(
        "--history",
        metavar="N,N,...|FILE|NAME",
        help="instances of each past minute, or a trace (default: nothing known)",
    )
    state.add_argument("--notice", action="append", default=[], metavar="K@S", help="K instances will go in S seconds")
    state.add_argument(
        "--joining", action="append", default=[], metavar="K@S", help="K more will be ready in S seconds"
    )
    how = command.add_argument_group("how")
    how.add_argument("--policy", choices=("liveput", "reactive", "fixed"), default="liveput")
    how.add_argument("--horizon", type=int, metavar="N", help="intervals to look ahead, 1 to 1000 (default: many)")
    how.add_argument("--forecaster", choices=("auto", "events", "last_value"), default="auto")
    command.add_argument("--all", action="store_true", help=f"show all configurations, not the best {_SHOWN}")
    command.add_argument("--json", action="store_true", help="print everything as JSON")
    command.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a script and its arguments")


@dataclass(frozen=True)
class ConfigRow:
    """A feasible configuration.

    Attributes:
        config: The configuration.
        samples_per_s: Throughput.
        step_s: Seconds of a step.
        memory_bytes: Memory of the fullest stage; None if the profile does not know it.
        bubble: Share of a step in which a stage has nothing to do, from the micro-batches alone; None if unknown.
        liveput: Expected samples per second when the losses of the next minutes have struck it and only survivors
            swapped places.
    """

    config: ParallelConfig
    samples_per_s: float
    step_s: float
    memory_bytes: float | None
    bubble: float | None
    liveput: float


@dataclass(frozen=True)
class PlanReport:
    """What the command tells.

    Attributes:
        workload: What is trained.
        num_instances: Instances now.
        num_leaving: Those of them that have a notice.
        running: What runs; None if nothing can.
        rows: Feasible configurations, the best liveput first.
        chosen: What to run; None to wait.
        reason: Why.
        table: What to run for each number of instances.
        forecast_by: Which forecaster was used, and why.
        expected_lost: Losses expected in the next minutes.
        expected_samples_per_s: Expected throughput, losses and migrations included; None if the policy expects none.
    """

    workload: Workload
    num_instances: int
    num_leaving: int
    running: ParallelConfig | None
    rows: tuple[ConfigRow, ...]
    chosen: ParallelConfig | None
    reason: str
    table: LayoutTable
    forecast_by: str
    expected_lost: float
    expected_samples_per_s: float | None

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values; configurations are ``[D, P]``."""
        from lightning_parcae.planning.policy import table_to_json

        running, chosen = table_to_json((self.running, self.chosen))
        return {
            "format": "lightning_parcae/plan/1",
            "profile": self.workload.name,
            "num_instances": self.num_instances,
            "num_leaving": self.num_leaving,
            "running": running,
            "config": chosen,
            "reason": self.reason,
            "samples_per_s": self.expected_samples_per_s,
            "forecast_by": self.forecast_by,
            "expected_lost": self.expected_lost,
            "table": table_to_json(self.table),
            "configs": [
                {
                    "config": table_to_json((row.config,))[0],
                    "samples_per_s": row.samples_per_s,
                    "step_s": row.step_s,
                    "memory_bytes": row.memory_bytes,
                    "bubble": row.bubble,
                    "liveput": row.liveput,
                }
                for row in self.rows
            ],
        }


def run(options: argparse.Namespace) -> int:
    """Plan and show.

    Raises:
        ValueError: If an option or a profile makes no sense, or nothing can ever run.
        OSError: If a file cannot be read.
    """
    from lightning_parcae.simulation.tables import terminal

    try:
        workload = _workload(options)
    except JobFailedError as error:  # of the script
        print(f"parcae plan: {error}", file=sys.stderr)
        return error.exit_code
    with terminal(stderr=True).status("planning"):  # many configurations take seconds
        report = make_report(workload, options)
    if options.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        _show(report, terminal(), show_all=options.all)
    return 0


# --- input ------------------------------------------------------------------------------------------------------------


def _workload(options: argparse.Namespace) -> Workload:
    from lightning_parcae.planning.profile import ModelProfile
    from lightning_parcae.simulation.workload import Workload, read_workload

    words = options.script[1:] if options.script[:1] == ["--"] else options.script
    if bool(words) == (options.profile is not None):
        raise ValueError(
            "give either --profile FILE|NAME, or a script whose module is measured here: parcae plan train.py"
        )
    if "--instances" in words[1:]:
        raise ValueError("--instances stands after the script and would be the script's: options come before it")
    if words and options.model is not None:
        raise ValueError(f"--model {options.model} is for a profile file: a script has one model")
    if not words:
        workload = read_workload(options.profile, model=options.model)
    else:
        from lightning_parcae.profile_command import measure_script

        profile = measure_script(Path(words[0]), words[1:], memory_gib=options.memory)
        sizes = tuple(layer.state_bytes for layer in profile.layers)
        cuts = {stages: profile.boundaries(stages) for stages in range(1, len(sizes) + 1)}
        workload = Workload(profile.name, profile, sizes, cuts, profile.num_samples)
    if options.memory is None:
        return workload
    if not isinstance(workload.profile, ModelProfile):
        raise ValueError(f"--memory needs a profile of layers; {workload.name} is a table of what has run")
    if not 0 < options.memory < math.inf:
        raise ValueError(f"--memory is in GiB and above 0, got {options.memory}")
    return replace(workload, profile=replace(workload.profile, memory_bytes=options.memory * _GIB))


def parse_config(text: str) -> ParallelConfig:
    """Return the configuration that ``DxP`` says.

    Raises:
        ValueError: If it is none.
    """
    from lightning_parcae.planning.parallel_config import ParallelConfig

    found = re.fullmatch(r"(\d+)[x*](\d+)", text.strip())
    if found is None or "0" in (found[1], found[2]):
        raise ValueError(f"a configuration is DxP, such as 4x5 for 4 pipelines of 5 stages; got {text!r}")
    return ParallelConfig(int(found[1]), int(found[2]))


def parse_history(text: str) -> tuple[int, ...]:
    """Return the instances of each past minute: numbers with commas, a trace file, or an example by its name.

    Raises:
        ValueError: If it is none of them.
        OSError: If it cannot be read.
    """
    from lightning_parcae.simulation.workload import read_trace

    if not text.strip():
        raise ValueError("--history is empty: give the instances of each past minute (20,20,18), or a trace")
    if re.fullmatch(r"[\d\s,]*\d[\d\s,]*", text):
        counts = tuple(int(word) for word in text.split(",") if word.strip())
        if max(counts) > _MOST_INSTANCES:
            raise ValueError(
                f"a history of {max(counts)} instances: the most that is planned for are {_MOST_INSTANCES}"
            )
        return counts
    return tuple(int(count) for count in read_trace(text).resample(_INTERVAL_S))


def parse_coming(words: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """Return ``(instances, seconds)`` of each ``K@S``.

    Raises:
        ValueError: If one is no such thing, or they are more or later than is planned for.
    """
    found: list[tuple[int, float]] = []
    for word in words:
        match = re.fullmatch(r"(\d+)@(\d+(?:\.\d*)?)", word.strip())
        if match is None:
            raise ValueError(f"instances that come or go are K@S, such as 2@90 for two in 90 seconds; got {word!r}")
        # More digits than that are too many, and Python refuses to read thousands of them.
        count, seconds = int(match[1][:9]), float(match[2])
        if sum(known for known, _ in found) + count > _MOST_INSTANCES or seconds > _LATEST_S:
            raise ValueError(
                f"planned is for at most {_MOST_INSTANCES} instances that come or go, within {_LATEST_S:g} s; got "
                f"{word!r}"
            )
        found.append((count, seconds))
    return tuple(found)


# --- planning ---------------------------------------------------------------------------------------------------------


def make_report(workload: Workload, options: argparse.Namespace) -> PlanReport:
    """Plan for what the options say.

    Raises:
        ValueError: If they contradict each other, or nothing can ever run.
    """
    from lightning_parcae.planning.job_planner import JobPlanner, PlannerSettings
    from lightning_parcae.planning.job_profile import StepTime
    from lightning_parcae.planning.policy import lookup
    from lightning_parcae.simulation.job import JobSettings, describe

    now: int = options.instances
    if options.horizon is not None and not 1 <= options.horizon <= _MOST_AHEAD:
        raise ValueError(f"--horizon should be 1 to {_MOST_AHEAD} intervals, got {options.horizon}")
    notices, joining = parse_coming(options.notice), parse_coming(options.joining)
    leaving, coming = (sum(count for count, _ in known) for known in (notices, joining))
    past = parse_history(options.history) if options.history is not None else ()
    if not 0 <= now <= _MOST_INSTANCES or leaving > now:
        raise ValueError(
            f"--instances is 0 to {_MOST_INSTANCES} and counts those with a notice, got {now} of which {leaving} go"
        )
    most = max(now + coming, *past, 1)
    if options.max_instances is not None:
        if not most <= options.max_instances <= _MOST_INSTANCES:
            raise ValueError(
                f"--max-instances should be at least the {most} instances that are, were or will be there, and at most "
                f"{_MOST_INSTANCES}, got {options.max_instances}"
            )
        most = options.max_instances
    smallest = _smallest_size(workload, most)
    room = 0 if options.max_instances is not None else _NEARBY
    _, model = describe(workload, JobSettings(), max(most + room, smallest))
    running = parse_config(options.running) if options.running is not None else lookup(model.start_table, now)
    if running is not None and (running.num_instances > now or workload.profile.samples_per_s(running) <= 0):
        raise ValueError(f"{running} cannot run on {_instances(now)} with the profile {workload.name}")
    history = _history(past, now, running, notices, joining)
    loss, forecast_by = _losses(options.forecaster, history, most, notices)
    rows = _rows(workload, model, now, loss)
    if running is None:
        reason = f"wait: {_instances(now)}, the smallest configuration needs {smallest}"
        return PlanReport(workload, now, leaving, None, (), None, reason, model.start_table, forecast_by, 0.0, None)
    if options.policy == "fixed":
        reason = f"{running}: policy fixed keeps the table that the job starts with"
        chosen = lookup(model.start_table, now - leaving)
        return PlanReport(
            workload, now, leaving, running, rows, chosen, reason, model.start_table, forecast_by, 0.0, None
        )
    settings = PlannerSettings(options.policy, _INTERVAL_S, options.horizon, options.forecaster)
    step = StepTime(workload.num_samples / workload.profile.samples_per_s(running))
    decision = JobPlanner(model, settings).decide(history, {running: step})
    assert decision is not None  # it runs, and it has been measured
    return PlanReport(
        workload=workload,
        num_instances=now,
        num_leaving=leaving,
        running=running,
        rows=rows,
        chosen=decision.config,
        reason=decision.reason,
        table=decision.table,
        forecast_by=decision.forecast_by,
        expected_lost=decision.expected_lost,
        expected_samples_per_s=decision.samples_per_s if options.policy == "liveput" else None,
    )


def _smallest_size(workload: Workload, most: int) -> int:
    """Return the instances of the smallest configuration that can run at all."""
    profile = workload.profile
    for size in (most, 8 * most + 64, 64 * most + 4096):
        sizes = [config.num_instances for config in profile.configs(size) if profile.samples_per_s(config) > 0]
        if sizes:
            return min(sizes)
    raise ValueError(
        f"no configuration of the profile {workload.name} can run, on any number of instances: too little memory?"
    )


def _history(
    past: Sequence[int],
    now: int,
    running: ParallelConfig | None,
    notices: Sequence[tuple[int, float]],
    joining: Sequence[tuple[int, float]],
) -> JobHistory:
    """Return what a job with such a past knows; its clock begins at 0."""
    from lightning_parcae.planning.job_history import JobHistory

    counts = [*(past or (now,)), now]
    now_s = (len(counts) - 1) * _INTERVAL_S
    leaving = sum(count for count, _ in notices)
    changes = [(index * _INTERVAL_S, count) for index, count in enumerate(counts)]
    changes[-1] = (now_s, now - leaving)  # with a notice an instance counts as gone
    slowest_s = max((seconds for _, seconds in joining), default=0.0)
    return JobHistory(
        now=now_s,
        started_at=0.0,
        changes=tuple(changes),
        warming=tuple(now_s + seconds - slowest_s for count, seconds in joining for _ in range(count)),
        warm_up_s=slowest_s if joining else None,
        notices=tuple(now_s + seconds for count, seconds in notices for _ in range(count)),
        num_announced=leaving,
        phase="running",
        config=running,
    )


def _losses(
    forecaster: str, history: JobHistory, capacity: int, notices: Sequence[tuple[int, float]]
) -> tuple[tuple[float, ...], str]:
    """Return the chance of each number of losses within the next minutes, and who says so."""
    import numpy as np

    from lightning_parcae.availability.forecast import NOTHING, EventRates

    rates = EventRates()
    law = NOTHING if forecaster == "last_value" else rates.law(history.counts(_INTERVAL_S), capacity=capacity)
    each = np.zeros(max(lost for lost, _ in law.kinds) + 1)
    for (lost, _), chance in zip(law.kinds, law.chances, strict=True):
        each[lost] += chance
    total = np.zeros(sum(count for count, seconds in notices if seconds <= _AHEAD * _INTERVAL_S) + 1)
    total[-1] = 1.0  # these are certain
    for _ in range(_AHEAD):
        total = np.convolve(total, each)
    return tuple(total.tolist()), "last value" if law is NOTHING else rates.name


def _rows(workload: Workload, model: JobModel, num_instances: int, losses: Sequence[float]) -> tuple[ConfigRow, ...]:
    from lightning_parcae.planning.liveput import liveput
    from lightning_parcae.planning.profile import ModelProfile

    profile = workload.profile
    # No more can be lost than are there.
    chances = [*losses[:num_instances], sum(losses[num_instances:])]
    total = sum(chances)
    chances = [chance / total for chance in chances]
    rows = []
    for config in profile.configs(num_instances):
        rate = profile.samples_per_s(config)
        if rate <= 0 or not model.limits.allow(config):
            continue
        memory = bubble = None
        if isinstance(profile, ModelProfile):
            memory = profile.stage_memory_bytes(config)
            rounds = math.ceil(profile.num_microbatches / config.num_pipelines)
            bubble = (config.num_stages - 1) / (rounds + config.num_stages - 1)
        expected = liveput(config, num_instances, chances, profile.samples_per_s)
        rows.append(ConfigRow(config, rate, workload.num_samples / rate, memory, bubble, expected))
    return tuple(sorted(rows, key=lambda row: (-row.liveput, -row.samples_per_s, row.config)))


# --- output -----------------------------------------------------------------------------------------------------------


def _show(report: PlanReport, console: Console, *, show_all: bool) -> None:
    from rich.padding import Padding

    console.print(f"{report.workload.name} on {_instances(report.num_instances)}", style="bold")
    if report.rows:
        console.print()
        for table in _config_tables(report, console.width, show_all=show_all):
            console.print(table, "", sep="\n")
    left = len(report.rows) - _SHOWN
    if left > 0 and not show_all:
        console.print(f"{left} more with --all", style="dim")
    chosen = "wait" if report.chosen is None else f"run {report.chosen}"
    if report.num_leaving:
        chosen += f" on the {_instances(report.num_instances - report.num_leaving)} without a notice"
    console.print(f"plan: {chosen}", style="bold")
    said = [report.reason]
    if report.expected_samples_per_s is not None:
        said.append(f"expected {report.expected_samples_per_s:.4g} samples/s, coming losses and migrations included")
    said.append(f"forecast by {report.forecast_by}")
    said.append("with so many instances at once, before a new plan is made:")
    said.append(describe_table(report.table, report.num_instances, None if show_all else _NEARBY))
    console.print(*(Padding(line, (0, 0, 0, 2), expand=False) for line in said), sep="")
    console.print(
        f"samples/s and step are the profile's. liveput: samples/s to be expected when the losses forecast for "
        f"{_AHEAD} min have struck, and survivors only swapped places.",
        style="dim",
    )


def _instances(count: int) -> str:
    return f"{count} instance{'' if count == 1 else 's'}"


def _config_tables(report: PlanReport, width: int, *, show_all: bool) -> list[Table]:
    from lightning_parcae.simulation.tables import Column, fitting_tables
    from lightning_parcae.timeline import describe_bytes

    rows = report.rows if show_all else report.rows[:_SHOWN]
    size = max(len(str(row.config)) for row in rows)
    names = [f"{rank:>4}  {row.config!s:>{max(size, 5)}}" for rank, row in enumerate(rows, start=1)]
    columns: list[Column] = [
        ("instances", [str(row.config.num_instances) for row in rows]),
        ("samples/s", [f"{row.samples_per_s:.4g}" for row in rows]),
        ("step", [_describe_seconds(row.step_s) for row in rows]),
    ]
    if any(row.memory_bytes is not None for row in rows):
        columns.append(("memory", [describe_bytes(round(row.memory_bytes or 0)) for row in rows]))
        columns.append(("bubble", [f"{row.bubble:.1%}" for row in rows]))
    columns.append(("liveput", [f"{row.liveput:.4g}" for row in rows]))
    marks = [("runs", report.running), ("planned", report.chosen)]
    columns.append(("", [", ".join(word for word, config in marks if config == row.config) for row in rows]))
    styles = ["bold" if row.config == report.chosen else None for row in rows]
    return fitting_tables(f"rank  {'D x P':>{max(size, 5)}}", names, columns, width, styles=styles)


def _describe_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def describe_table(table: Sequence[ParallelConfig | None], num_instances: int, nearby: int | None) -> str:
    """Return a table of configurations on one line, neighbours of the same configuration together.

    Args:
        table: Configuration for each number of instances.
        num_instances: Instances now.
        nearby: How far from them is told; None for the whole table.

    Example:
        >>> from lightning_parcae.planning.parallel_config import ParallelConfig
        >>> describe_table((None, ParallelConfig(1, 1), ParallelConfig(1, 1), ParallelConfig(3, 1)), 3, None)
        '0: wait, 1-2: 1x1, 3: 3x1'
    """
    low, high = (0, len(table) - 1) if nearby is None else (max(num_instances - nearby, 0), num_instances + nearby)
    parts: list[tuple[int, int, ParallelConfig | None]] = []
    for count in range(low, min(high, len(table) - 1) + 1):
        if parts and parts[-1][2] == table[count]:
            parts[-1] = (parts[-1][0], count, table[count])
        else:
            parts.append((count, count, table[count]))
    return ", ".join(
        f"{first if first == last else f'{first}-{last}'}: {'wait' if config is None else config}"
        for first, last, config in parts
    )


__all__ = ["PlanReport", "add_arguments", "make_report", "run"]
