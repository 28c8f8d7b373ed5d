"""``parcae profile``: measures a user's script and the link between instances into a JSON profile.

The script runs unchanged, as one process that trains by itself; :class:`~lightning_parcae.profiling.ScriptMeasurement`
ends it after a few steps, before it has written anything. What it says stays in a log that is shown if it fails.

Failing: JobFailedError if the script itself fails (with what it said), PlanError if it cannot be measured (it makes no
ParcaeStrategy, does not come to training, takes too long, is refused). No process outlives the command.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_parcae.control.link import LinkServer, measure_link
from lightning_parcae.control.transport import load_secret
from lightning_parcae.errors import JobFailedError, ParcaeError, PlanError
from lightning_parcae.planning.job_profile import LinkSpeed
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import LayerCost, ModelProfile
from lightning_parcae.planning.script_report import REPORT_VARIABLE, STEPS_VARIABLE, ScriptReport
from lightning_parcae.processes import ChildProcess, describe_exit
from lightning_parcae.simulation.outputs import check_outputs

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_STEPS = 10
LOOPBACK = "loopback"
"""Where a link was measured that is none."""

_GIB = 1 << 30
_MIB = 1 << 20
_POLL_S = 0.05
_ENDING_S = 30.0  # what a script may do when it is told to end
_LINK_START_S = 30.0
_NUM_LINES = 30
_EPILOG = """\
Options come before the script; what follows it is the script's. With --link, the other host runs
`parcae profile --serve-link HOST:PORT`, and both have the same PARCAE_SECRET_FILE (or PARCAE_SECRET).

exit codes: 0 measured, 1 the script failed (traceback shown), 2 it cannot be measured, or wrong usage, 130 interrupted,
            141 nobody reads the output any more, 143 ended by SIGTERM
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``parcae profile``."""
    command.usage = (
        "parcae profile [-o FILE] [options] SCRIPT [ARGUMENT...]\n       parcae profile --serve-link HOST:PORT"
    )
    command.epilog = _EPILOG
    command.add_argument(
        "-o", "--output", type=Path, default=Path("profile.json"), metavar="FILE", help="default profile.json"
    )
    command.add_argument(
        "--link",
        action="append",
        metavar="HOST:PORT",
        help="measure the link to a host that serves it; may be repeated, the slowest counts (default: loopback)",
    )
    command.add_argument("--serve-link", metavar="HOST:PORT", help="answer those who measure the link to here")
    command.add_argument("--memory", type=_positive, metavar="GIB", help="of an instance (default: ask CUDA devices)")
    command.add_argument(
        "--timeout", type=_positive, default=DEFAULT_TIMEOUT_S, metavar="S", help="default %(default)g seconds"
    )
    command.add_argument("--steps", type=_count, default=DEFAULT_STEPS, metavar="N", help="default %(default)d")
    command.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a script and its arguments")


def run(options: argparse.Namespace) -> int:
    """Measure, or serve whoever measures.

    Returns:
        The exit code.
    """
    from lightning_parcae.simulation.tables import terminal

    console = terminal()
    if options.serve_link is not None:
        if options.script:
            raise ValueError("--serve-link measures no script; leave the script out")
        server = LinkServer(options.serve_link, load_secret(os.environ))
        console.print(f"serving the link on {server.address}; Ctrl-C ends it", highlight=False)
        try:
            server.wait()
        finally:
            server.close()
        return 0
    if not options.script:
        raise ValueError("what shall be measured? Give a script: parcae profile train.py")
    script, *arguments = options.script
    output: Path = options.output
    check_outputs([("-o", output)], inputs=[script])
    _check_script(script)
    link, where = measure_links(options.link or ())
    say = partial(console.print, highlight=False, soft_wrap=True)
    say(f"measuring {script} on this machine, as one instance; nothing of this run is kept")
    try:
        report = run_script(Path(script), arguments, timeout_s=options.timeout, num_steps=options.steps)
    except JobFailedError as error:
        print(f"parcae profile: {error}", file=sys.stderr)
        return error.exit_code
    profile = complete(report, link, where=where, memory_gib=options.memory)
    output.write_text(json.dumps(profile.to_json(), indent=1) + "\n", encoding="utf-8")
    show(console, replace(report, profile=profile), where)
    say(f"the profile is in {output}; `parcae plan --profile {output}` uses it")
    return 0


def measure_script(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    num_steps: int = DEFAULT_STEPS,
    links: Sequence[str] = (),
    memory_gib: float | None = None,
) -> ModelProfile:
    """Measure a user's script on this machine.

    Args:
        script: Path of the script.
        arguments: Its arguments.
        timeout_s: Seconds after which it is ended.
        num_steps: Training steps to measure.
        links: Addresses of link servers; none for the loopback of this machine, which says nothing about a network.
        memory_gib: Memory of an instance; None to ask its CUDA devices.

    Raises:
        JobFailedError: If the script fails; the message holds what it said last.
        PlanError: If it cannot be measured.
    """
    _check_script(str(script))
    link, where = measure_links(links)
    report = run_script(script, arguments, timeout_s=timeout_s, num_steps=num_steps)
    return complete(report, link, where=where, memory_gib=memory_gib)


# -- the script -------------------------------------------------------------------------------------------------------


def run_script(script: Path, arguments: Sequence[str], *, timeout_s: float, num_steps: int) -> ScriptReport:
    """Run a script until it is measured, and end it; raises as :func:`measure_script`."""
    _check_script(str(script))
    with tempfile.TemporaryDirectory(prefix="parcae-profile-") as folder:
        report_path, log_path = Path(folder) / "report.json", Path(folder) / "log"
        environ = _environment(report_path, num_steps)
        command = [sys.executable, "-m", "lightning_parcae.run_script", str(script), *arguments]
        child = ChildProcess(command, environ=environ, log_path=log_path)
        try:
            ended = _wait(child, report_path, timeout_s)
        finally:
            child.reap()
        report = _read(report_path)
        text = log_path.read_text(encoding="utf-8", errors="replace")
    if report.reached == "steps" and report.profile is not None:
        return report
    if report.refusal is not None:
        raise PlanError(f"{script} cannot be trained as it is: {report.refusal}")
    if not ended:
        raise PlanError(f"{script} was not measured within {timeout_s:g} s: {_how_far(report)}. Raise --timeout")
    if child.exit_code:
        how = f"{script} {describe_exit(child.exit_code)} {_before(report)}"
        said = _last_words(text)
        raise JobFailedError(f"{how}; it said last:\n{said}" if said else f"{how}; it said nothing")
    raise PlanError(f"{script} ended without being measured: {_how_far(report)}")


def _environment(report_path: Path, num_steps: int) -> dict[str, str]:
    """Return the script's environment: nothing of a job that this process may be part of."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PARCAE_")}
    steps = {REPORT_VARIABLE: str(report_path), STEPS_VARIABLE: str(num_steps)}
    # one thread, as the instances that `parcae run` starts
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **ours, **steps}


def _wait(child: ChildProcess, report_path: Path, timeout_s: float) -> bool:
    """Wait for the end of a script; return whether it came by itself, or everything was measured."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if child.poll() is not None:
            return True
        if _read(report_path).reached == "steps":
            child.poll_until(_ENDING_S)
            return True
        time.sleep(_POLL_S)
    return False


def _read(path: Path) -> ScriptReport:
    return ScriptReport.from_json(path.read_text(encoding="utf-8")) if path.exists() else ScriptReport()


def _how_far(report: ScriptReport) -> str:
    return {
        "nothing": "it made no ParcaeStrategy; use Trainer(strategy='parcae') and `import lightning_parcae`",
        "strategy": "it made a ParcaeStrategy, but did not come to the set-up of fit",
        "fit": "fit was set up, but no layer was measured before",
        "layers": "the layers were measured, but the steps were not",
        "steps": "fit made no step",
    }[report.reached]


def _before(report: ScriptReport) -> str:
    """Return how far a script came that has ended with an error; what to change it has said itself."""
    return {
        "nothing": "before it made a Trainer with a ParcaeStrategy",
        "strategy": "after it made a ParcaeStrategy, before the set-up of fit",
        "fit": "in the set-up of fit, before a layer was measured",
        "layers": "in its first steps",
        "steps": "after its last step",
    }[report.reached]


def _check_script(script: str) -> None:
    if script and Path(script).is_dir():
        raise PlanError(f"{script} is a directory, not a script; name the file, such as {Path(script) / 'train.py'}")
    if not script or not Path(script).is_file():
        raise PlanError(f"there is no script {script!r}")


def _last_words(text: str) -> str:
    """Return the last traceback of a log, or its last lines if there is none."""
    lines = text.splitlines()
    begins = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    return "\n".join(lines[begins[-1] :] if begins else lines[-_NUM_LINES:])


def complete(report: ScriptReport, link: LinkSpeed, *, where: str, memory_gib: float | None) -> ModelProfile:
    """Return the profile of a script with what its process could not know.

    Args:
        report: What the script has told.
        link: The link between two instances.
        where: Where it was measured; becomes part of the profile's name.
        memory_gib: Memory of an instance; None for what the script's devices have.
    """
    profile = report.profile
    assert profile is not None
    return replace(
        profile,
        name=f"{profile.name} on {report.device}, link: {where}",
        link_bytes_per_s=link.bytes_per_s,
        link_latency_s=link.latency_s,
        memory_bytes=profile.memory_bytes if memory_gib is None else memory_gib * _GIB,
    )


# -- the link ---------------------------------------------------------------------------------------------------------


def measure_links(addresses: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[LinkSpeed, str]:
    """Measure the links to some servers, or between two processes of this machine; return the slowest, and where."""
    environ = os.environ if environ is None else environ
    if not addresses:
        return _measure_loopback(environ), LOOPBACK
    found = [_measure_link(address, load_secret(environ)) for address in addresses]
    speed = LinkSpeed(max(link.latency_s for link in found), min(link.bytes_per_s for link in found))
    return speed, ", ".join(addresses)


def _measure_link(address: str, secret: bytes) -> LinkSpeed:
    try:
        return measure_link(address, secret)
    except ValueError as error:
        raise PlanError(f"--link {address}: {error}") from error
    except (OSError, ParcaeError) as error:
        why = str(error).removeprefix(f"{address}: ")
        raise PlanError(
            f"--link {address}: {why}; does `parcae profile --serve-link` run there, with the same secret?"
        ) from error


def _measure_loopback(environ: Mapping[str, str]) -> LinkSpeed:
    secret = secrets.token_hex(32)
    with tempfile.TemporaryDirectory(prefix="parcae-link-") as folder:
        address_path, log_path = Path(folder) / "address", Path(folder) / "log"
        own = {name: value for name, value in environ.items() if not name.startswith("PARCAE_")}
        command = [sys.executable, "-m", "lightning_parcae.control.link", str(address_path)]
        child = ChildProcess(command, environ={**own, "PARCAE_SECRET": secret}, log_path=log_path)
        try:
            deadline = time.monotonic() + _LINK_START_S
            while not address_path.exists():
                if child.poll() is not None or time.monotonic() > deadline:
                    said = _last_words(log_path.read_text(encoding="utf-8", errors="replace"))
                    raise PlanError(f"the loopback link could not be measured: {said}")
                time.sleep(_POLL_S)
            return measure_link(address_path.read_text(encoding="ascii"), secret.encode())
        finally:
            child.reap()


# -- what is shown ----------------------------------------------------------------------------------------------------


def show(console: Console, report: ScriptReport, where: str) -> None:
    """Print the layers, the step and the link."""
    from lightning_parcae.simulation.tables import fitting_tables

    profile = report.profile
    assert profile is not None
    names = [f"{index} {name}" for index, name in enumerate(report.layer_names)]
    cells = [_cells(layer) for layer in (*profile.layers, _sum(profile.layers))]
    titles = ("forward\nms", "backward\nms", "weights\nMiB", "state\nMiB", "activations\nMiB", "output\nMiB")
    columns = list(zip(titles, zip(*cells, strict=True), strict=True))
    styles = [*(None for _ in names), "bold"]
    console.print(f"{profile.name}: one micro-batch", style="bold", highlight=False, soft_wrap=True)
    for table in fitting_tables("layer", [*names, "all"], columns, console.width, styles=styles):
        console.print("", table, sep="\n")
    console.print()
    for line in _remarks(report, where):
        console.print(line, highlight=False, soft_wrap=True)


def _cells(layer: LayerCost) -> list[str]:
    times = [f"{1e3 * seconds:.3f}" for seconds in (layer.forward_s, layer.backward_s)]
    sizes = (layer.parameter_bytes, layer.state_bytes, layer.activation_bytes, layer.output_bytes)
    return [*times, *(f"{size / _MIB:.3f}" for size in sizes)]


def _sum(layers: Sequence[LayerCost]) -> LayerCost:
    return LayerCost(**{item.name: sum(getattr(layer, item.name) for layer in layers) for item in fields(LayerCost)})


def _remarks(report: ScriptReport, where: str) -> list[str]:
    """Return what must be said beside the table, a line each."""
    profile = report.profile
    assert profile is not None
    alone = ParallelConfig(1, 1)
    lines = []
    if report.is_guessed:
        lines.append("the layers could not be run one by one: their times are guessed from their sizes")
    batch = f"{profile.num_samples} samples in {profile.num_microbatches} micro-batches"
    if report.num_steps:
        lines.append(
            f"a step of {batch} takes {1e3 * profile.step_s[alone]:.1f} ms (median of {report.num_steps}; "
            f"{1e3 * report.other_s:.1f} ms of it for data, hooks and the optimizer); the layers alone say "
            f"{1e3 * profile.modelled_step_s(alone):.1f} ms"
        )
    else:
        lines.append(f"fit ended before a step of {batch} could be measured: the times are those of the layers alone")
    whole = replace(profile, memory_bytes=None, min_stages=1)
    has = "no limit is known" if profile.memory_bytes is None else f"an instance has {_size(profile.memory_bytes)}"
    lines.append(f"one stage needs {_size(whole.stage_memory_bytes(alone))} of memory by these figures; {has}")
    link = f"link ({where}): {1e6 * profile.link_latency_s:.0f} us, {profile.link_bytes_per_s / 1e6:.0f} MB/s"
    lines.append(link + ("; this says nothing about your network, see --link" if where == LOOPBACK else ""))
    return lines


def _size(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.2f} MiB"


# -- arguments --------------------------------------------------------------------------------------------------------


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wanted a whole number of at least 1, got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"wanted a number of more than 0, got {text!r}")
    return value
