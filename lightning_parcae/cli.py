"""The ``parcae`` command: run jobs, look at them, warn and stop them, read what they left, plan and simulate others.

A command with a module of its own (``parcae simulate``) is loaded when it is called: ``parcae --help`` is quick.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from lightning_parcae import __version__
from lightning_parcae.errors import ParcaeError
from lightning_parcae.job_files import JOB_FILE, run_dir_lock, write_job_file, write_secret

if TYPE_CHECKING:
    from lightning_parcae.control.service import AdminClient
    from lightning_parcae.faults import FaultScript

_EXIT_CODES = """\
exit codes: 0 finished, 1 the job failed (traceback shown), 2 wrong usage, 3 state lost and no checkpoint,
            4 too few instances for too long, 5 refused (versions, script or secret differ), 130 interrupted
"""
_MORE_EXIT_CODES = """\
            141 nobody reads the output any more, 143 profile, plan, forecast or simulate ended by SIGTERM
"""
_ENDING_S = 1.0  # what a command may take to end itself


#: Commands with a module of their own, and what they do.
_MODULES = {
    "profile": "measure a script's layers and the link between instances into a profile",
    "plan": "show which configurations are feasible and what the planner would do; nothing is trained",
    "forecast": "test forecasts of a trace against what came",
    "simulate": "tell what policies would train on traces, and what it would cost",
}


class _LazyCommand(argparse.ArgumentParser):
    """A command whose arguments are declared when it is called, by the module that carries it out."""

    module_name: str | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See :class:`argparse.ArgumentParser`."""
        name, self.module_name = self.module_name, None
        if name is not None:
            module = importlib.import_module(name)
            module.add_arguments(self)
            self.set_defaults(run=module.run)
        return super().parse_known_args(args, namespace)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        Its exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # The others have their own way to take a signal.
    signals = _ended_by_signals() if words and words[0] in _MODULES else contextlib.nullcontext()
    try:
        with signals:
            try:
                options = _parser().parse_args(words)
                code: int = options.run(options)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()  # whoever reads it may be gone
    except _Ended as ended:
        return 128 + ended.number
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (ParcaeError, ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return _leave_quietly()
        print(f"parcae {words[0]}: {error}", file=sys.stderr)
        return 2
    except SystemExit as error:
        # rich's way to end on a broken pipe
        if isinstance(error.__context__, BrokenPipeError):
            return _leave_quietly()
        raise
    return code


def _nobody_reads() -> bool:
    """Return whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # closed, or no file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _leave_quietly() -> int:
    """Let the interpreter end without another complaint about the pipe; return the exit code of its signal."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
    return 128 + signal.SIGPIPE


# -- signals ----------------------------------------------------------------------------------------------------------


class _Ended(KeyboardInterrupt):
    """A signal ends the command."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM end a command: soon, silently, and with nothing left.

    The command is left as by Ctrl-C, and ends what it has started. What an interrupted import may make of that (another
    error, or nothing at all) does not count: a second later the process and its children are ended where they are.

    Raises:
        _Ended: If a signal came, whatever became of the command.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    timer = threading.Timer(_ENDING_S, lambda: _end_here(128 + came[0]))
    timer.daemon = True
    hooks, logs = (sys.unraisablehook, threading.excepthook), logging.root.manager.disable

    def begin(number: int, frame: FrameType | None) -> None:
        if came:
            return
        came.append(number)
        timer.start()
        logging.disable(logging.CRITICAL)
        sys.unraisablehook = _say_nothing
        threading.excepthook = _say_nothing
        raise _Ended(number)

    # One that is ignored, as SIGINT in the background of a shell, stays so; None is a handler that cannot be put back.
    kept = (signal.SIG_IGN, None)
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) not in kept]
    before = {number: signal.signal(number, begin) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            timer.cancel()
            sys.unraisablehook, threading.excepthook = hooks
            logging.disable(logs)
            raise _Ended(came[0])


def _say_nothing(_: object) -> None:
    pass


def _end_here(code: int) -> None:
    """End this process and its children, and the process groups that these lead."""
    try:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)
    finally:
        os._exit(code)


def _children() -> list[int]:
    """Return the processes that this one has started, where the system tells."""
    pids: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # of a thread that has ended
            pids += map(int, path.read_text(encoding="ascii").split())
    return pids


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parcae",
        description="Train with PyTorch Lightning on instances that come and go.",
        epilog=_EXIT_CODES + _MORE_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lightning-parcae {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_LazyCommand)

    def add(name: str, run: Callable[[argparse.Namespace], int] | None, summary: str, **more: Any) -> _LazyCommand:
        command: _LazyCommand = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **more,
        )
        command.set_defaults(run=run)
        return command

    _add_run(add("run", _run, "run a script on local instances, with faults if you like", epilog=_EXIT_CODES))
    _add_coordinator(add("coordinator", _coordinator, "run the membership service of a job in the foreground"))
    command = add("status", _status, "show who is in a job and what it runs")
    command.add_argument("--json", action="store_true", help="print everything as JSON")
    _add_connection(command)
    command = add("preempt", _preempt, "give an instance notice, as a cloud does")
    command.add_argument("--instance", required=True, metavar="NAME", help="whom, for example i2")
    command.add_argument("--notice", type=_seconds, default=30.0, metavar="S", help="seconds of warning (default 30)")
    _add_connection(command)
    command = add("stop", _stop, "end a job after its current step")
    command.add_argument("--now", action="store_true", help="do not finish the current step")
    _add_connection(command)
    command = add("report", _report, "tell from a run directory what happened: layouts, pauses, samples")
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    command.add_argument("--samples", type=_count, metavar="N", help="samples in an epoch; counts what was left out")
    command.add_argument("--json", action="store_true", help="print everything as JSON")
    for name, summary in _MODULES.items():
        add(name, None, summary).module_name = f"lightning_parcae.{name}_command"
    command = add("demo", _demo, "watch two models train through a kill, a stop, a notice and two joins (2-3 min)")
    command.add_argument("--quick", action="store_true", help="fewer steps")
    command.add_argument("--keep", type=Path, metavar="DIR", help="leave logs, timelines and records there")
    command.add_argument("--model", choices=("digits", "chargpt", "both"), default="both")
    command = add("doctor", _doctor, "check that this machine can run a job; say what to mend")
    command.add_argument("--run-dir", type=Path, metavar="DIR", help="check that it can be written")
    return parser


def _add_run(command: argparse.ArgumentParser) -> None:
    command.usage = "parcae run [-n N] [options] (SCRIPT | -m MODULE) [ARGUMENT...]"
    command.add_argument("-n", "--num-instances", type=_count, metavar="N", help="instances to start (default 2)")
    command.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="logs, timeline, records (default parcae_runs/JOB)"
    )
    command.add_argument("--job-id", metavar="JOB", help="name of the job (default: made up)")
    command.add_argument(
        "--failure-timeout", type=_positive_seconds, default=20.0, metavar="S",
        help="an instance silent for so long counts as dead (default 20)",
    )  # fmt: skip
    command.add_argument("--restart", action="store_true", help="start a new instance for each one that dies")
    faults = command.add_argument_group("faults")
    faults.add_argument(
        "--faults", type=Path, metavar="FILE", help="YAML or JSON: [{kill: i2, at_step: 12}, {add: 1, at_s: 30}]"
    )
    faults.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay an availability trace; -n limits the instances"
    )
    faults.add_argument(
        "--time-scale", type=_positive_seconds, default=1.0, metavar="X", help="trace seconds per second"
    )
    faults.add_argument(
        "--notice", type=_seconds, default=0.0, metavar="S", help="warn so long before a removal (default: kill)"
    )
    faults.add_argument("--fault-seed", type=int, default=0, metavar="SEED", help="who 'any' is")
    what = command.add_argument_group("what to run")
    what.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module and its arguments"
    )
    what.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a script and its arguments")


def _add_coordinator(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--bind", default="127.0.0.1:0", metavar="HOST:PORT", help="where to listen (default: loopback)"
    )
    command.add_argument("--job-id", required=True, metavar="JOB")
    command.add_argument("--run-dir", type=Path, metavar="DIR", help="timeline and state (default parcae_runs/JOB)")
    command.add_argument("--expected", type=_count, metavar="N", help="wait for so many instances before the start")
    command.add_argument("--failure-timeout", type=_positive_seconds, default=20.0, metavar="S")
    command.epilog = (
        "The job's secret comes from PARCAE_SECRET_FILE or PARCAE_SECRET. On loopback one is made if there is none."
    )


def _add_connection(command: argparse.ArgumentParser) -> None:
    command.add_argument("--run-dir", type=Path, metavar="DIR", help="run directory of a job on this machine")
    command.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="else: its coordinator (default PARCAE_COORDINATOR); the secret is in PARCAE_SECRET_FILE or PARCAE_SECRET",
    )
    command.add_argument("--job-id", metavar="JOB", help="with --coordinator: the job (default PARCAE_JOB_ID)")


# -- run --------------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    """Run a script on local instances."""
    from lightning_parcae.supervisor import Supervisor, make_job_id

    words = list(options.script)
    if options.module is not None:
        words = ["-m", *options.module]
    if not words or words == ["-m"]:
        raise ValueError("what shall run? Give a script, or -m and a module: parcae run -n 4 train.py")
    if words[0] != "-m" and not Path(words[0]).is_file():
        raise ValueError(f"there is no script {words[0]}")
    script, num_instances = _fault_script(options)
    job_id = options.job_id or make_job_id()
    supervisor = Supervisor(
        [sys.executable, "-m", "lightning_parcae.run_script", *words],
        num_instances=num_instances,
        run_dir=options.run_dir or Path("parcae_runs") / job_id,
        job_id=job_id,
        script=script,
        failure_timeout_s=options.failure_timeout,
        restart=options.restart,
    )
    return supervisor.run()


def _fault_script(options: argparse.Namespace) -> tuple[FaultScript, int]:
    """Return the faults to inject, and how many instances to start with."""
    from lightning_parcae.faults import FaultScript

    num_instances: int = options.num_instances or 2
    script = FaultScript(seed=options.fault_seed)
    if options.trace is not None:
        from lightning_parcae.availability.trace import AvailabilityTrace

        script = FaultScript.from_trace(
            AvailabilityTrace.read(options.trace),
            time_scale=options.time_scale,
            notice_s=options.notice,
            max_instances=options.num_instances,
            seed=options.fault_seed,
        )
        num_instances = len(script.initial_nodes)
        if num_instances < 1:
            raise ValueError(f"the trace {options.trace} begins without any instance")
    if options.faults is not None:
        script.events += FaultScript.from_file(options.faults, seed=options.fault_seed).events
    return script, num_instances


# -- coordinator ------------------------------------------------------------------------------------------------------


def _coordinator(options: argparse.Namespace) -> int:
    """Run the membership service in the foreground."""
    import asyncio

    from lightning_parcae.control.transport import check_bind_host, load_secret, parse_address

    host, _ = parse_address(options.bind)
    run_dir = (options.run_dir or Path("parcae_runs") / options.job_id).absolute()
    secret = load_secret(os.environ)
    check_bind_host(host, secret)
    run_dir.mkdir(parents=True, exist_ok=True)
    with run_dir_lock(run_dir):
        secret_path = None
        if not secret:
            secret_path = run_dir / "secret"
            secret = write_secret(secret_path)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
        try:
            return asyncio.run(_serve(options, run_dir, secret, secret_path))
        finally:
            for path in (secret_path, run_dir / JOB_FILE):
                if path is not None:
                    path.unlink(missing_ok=True)


async def _serve(options: argparse.Namespace, run_dir: Path, secret: bytes, secret_path: Path | None) -> int:
    """Run the service until its job is over, or a signal ends it."""
    import asyncio

    from lightning_parcae.control.service import Service
    from lightning_parcae.control.transport import parse_address

    service = Service(secret, options.job_id, options.failure_timeout, run_dir=run_dir, expected=options.expected)
    address = await service.start(*parse_address(options.bind))
    write_job_file(run_dir, options.job_id, address)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, service.end)
    shown = secret_path or os.environ.get("PARCAE_SECRET_FILE") or "(a file with the same secret)"
    print("set on each instance, then start the script there as usual:")
    print(f"export PARCAE_COORDINATOR={_reachable(address)} PARCAE_JOB_ID={options.job_id}")
    print(f"export PARCAE_SECRET_FILE={shown}", flush=True)
    return await service.run()


def _reachable(address: str) -> str:
    """Return the address that others use for one that was bound."""
    import socket

    from lightning_parcae.control.transport import format_address, parse_address

    host, port = parse_address(address)
    return format_address(socket.gethostname() if host in ("0.0.0.0", "::") else host, port)


# -- commands to a running job ----------------------------------------------------------------------------------------


def _connect(options: argparse.Namespace) -> AdminClient:
    """Connect to a job's coordinator."""
    from lightning_parcae.control.service import AdminClient
    from lightning_parcae.control.transport import load_secret

    environ: Mapping[str, str] = os.environ
    if options.run_dir is not None:
        path = options.run_dir / JOB_FILE
        if not path.is_file():
            raise ValueError(f"no job runs in {options.run_dir}; `parcae report {options.run_dir}` tells what happened")
        job = json.loads(path.read_text(encoding="utf-8"))
        secret_path = options.run_dir / "secret"
        if secret_path.is_file():
            environ = {"PARCAE_SECRET_FILE": str(secret_path)}
        return AdminClient(job["coordinator"], load_secret(environ), job["job_id"])
    address = options.coordinator or environ.get("PARCAE_COORDINATOR")
    if not address:
        raise ValueError("which job? Give --run-dir DIR on its machine, or --coordinator HOST:PORT")
    job_id = options.job_id or environ.get("PARCAE_JOB_ID") or "parcae"
    return AdminClient(address, load_secret(environ), job_id)


def _status(options: argparse.Namespace) -> int:
    """Show who is in a job."""
    status = _connect(options).status()
    if options.json:
        print(json.dumps(status, indent=2))
        return 0
    config, progress = status["config"], status["progress"]
    layout = "no layout" if config is None else f"{config[0]}x{config[1]}"
    step = "" if progress is None else f", step {progress['step']}, epoch {progress['epoch']}"
    print(f"job {status['job_id']}: {status['phase']}, generation {status['generation']}, {layout}{step}")
    print(status["message"])
    for name, instance in status["instances"].items():
        role = _role(name, instance, status)
        print(f"  {name:8} {role:12} {instance['host']} pid {instance['pid']}, heard {instance['silent_s']:.1f} s ago")
    return 0


def _role(name: str, instance: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """Return what an instance does, in one or two words."""
    if instance["released"]:
        return "leaves"
    if instance["leaving"]:
        return "has notice"
    if name in status["active"]:
        return "rank 0" if name == status["active"][0] else "active"
    return "spare" if instance["ready"] else "warms up"


def _preempt(options: argparse.Namespace) -> int:
    """Give notice to an instance."""
    _connect(options).preempt(options.instance, options.notice)
    print(f"{options.instance} has {options.notice:g} s to leave")
    return 0


def _stop(options: argparse.Namespace) -> int:
    """End a job."""
    _connect(options).stop(graceful=not options.now)
    print("the job stops")
    return 0


def _report(options: argparse.Namespace) -> int:
    """Show what happened in a run."""
    from lightning_parcae.report import RunReport

    report = RunReport.read(options.run_dir, samples_per_epoch=options.samples)
    if options.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        report.show()
    return 0


def _demo(options: argparse.Namespace) -> int:
    """Run the demo."""
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise ValueError("the demo needs scikit-learn: pip install 'lightning-parcae[demo]'") from error
    from lightning_parcae.demo import DEFAULT_STEPS, MODELS, QUICK_STEPS, run_demo

    models = MODELS if options.model == "both" else (options.model,)
    return run_demo(models, steps=QUICK_STEPS if options.quick else DEFAULT_STEPS, keep=options.keep)


def _doctor(options: argparse.Namespace) -> int:
    """Check this machine."""
    from lightning_parcae.doctor import check_machine

    return check_machine(options.run_dir)


# -- arguments --------------------------------------------------------------------------------------------------------


def _count(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wanted a whole number of at least 1, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    """Return a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"wanted a number of at least 0, got {text!r}")
    return value


def _positive_seconds(text: str) -> float:
    """Return a number of more than 0."""
    value = _seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError("wanted a number of more than 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
