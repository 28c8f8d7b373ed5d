"""How commands end that nobody waits for any more: interrupted, terminated, or with a reader that has gone."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_parcae.cli import _ended_by_signals

_ALL = ("forecast", "--trace", "aws-p3", "gcp-v100", "--forecaster", "all", "--workers", "2")
_SIMULATE = ("simulate", "--trace", "aws-p3", "gcp-v100", "--profile", "bert", "--policy", "all", "--workers", "2")
_LONG_S = 20.0
# Far more than it takes, far less than what is interrupted would take.
_END_S = 5.0


@contextlib.contextmanager
def _started(*words: str, cwd: Path, path: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start a command as a terminal does: the leader of a group, with SIGINT not ignored."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    # Buffered, as by default: the interpreter writes the last lines when it ends.
    environ = {
        **os.environ,
        "PYTHONUNBUFFERED": "",
        "PYTHONPATH": os.pathsep.join(paths if path is None else [str(path), *paths]),
    }
    command = [sys.executable, "-m", "lightning_parcae", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, cwd=cwd, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LONG_S
    while not is_so():
        assert time.monotonic() < deadline, "it has not come to that"
        time.sleep(0.02)


def _children(pid: int) -> list[int]:
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _ends(process: subprocess.Popen[str], code: int, *pids: int, said: str = "") -> None:
    """Check that a command ends with a code and without a word, and so do other processes."""
    output, errors = process.communicate(timeout=_END_S)
    assert (process.returncode, output, errors) == (code, said, "")
    _wait_until(lambda: not any(_is_alive(pid) for pid in pids))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("words", "number", "to_group", "worker_cpu_s"),
    [
        (_ALL, signal.SIGINT, False, 0.8),
        (_ALL, signal.SIGINT, True, 0.8),
        (_SIMULATE, signal.SIGTERM, False, 0.8),
        (_ALL, signal.SIGINT, True, 0.0),
        (_SIMULATE, signal.SIGTERM, True, 0.0),
    ],
)
def test_a_signal_ends_workers_and_all(
    words: tuple[str, ...], number: signal.Signals, to_group: bool, worker_cpu_s: float, tmp_path: Path
) -> None:
    """Of workers that have just been started, and of workers at work."""
    with _started(*words, cwd=tmp_path) as process:
        # Besides the two there is multiprocessing's resource tracker, which needs next to no time.
        needed = 2 if worker_cpu_s else 3
        _wait_until(lambda: sum(_cpu_s(pid) >= worker_cpu_s for pid in _children(process.pid)) >= needed)
        workers = _children(process.pid)
        (os.killpg if to_group else os.kill)(process.pid, number)
        _ends(process, 128 + number, *workers)


@pytest.mark.parametrize("reaction", ["raise NameError('nothing')", "time.sleep(60)"])
def test_what_an_import_makes_of_an_interrupt_does_not_count(reaction: str, tmp_path: Path) -> None:
    (tmp_path / "pmdarima.py").write_text(
        "import time\n"
        "try:\n"
        "    open('begun', 'w').close()\n"
        "    time.sleep(60)\n"
        "except BaseException:\n"
        f"    {reaction}\n"
    )
    words = ("forecast", "--trace", "aws-p3", "--forecaster", "arima", "--workers", "1")
    with _started(*words, cwd=tmp_path, path=tmp_path) as process:
        _wait_until((tmp_path / "begun").exists)
        process.send_signal(signal.SIGINT)
        _ends(process, 130)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_script_that_is_measured_goes_with_what_it_has_started(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(
        "import os, subprocess, time\n"
        "pid = subprocess.Popen(['sleep', '777']).pid\n"
        "open('pid.new', 'w').write(str(pid))\n"
        "os.rename('pid.new', 'pid')\n"
        "time.sleep(777)\n"
    )
    with _started("profile", "hangs.py", cwd=tmp_path) as process:
        _wait_until((tmp_path / "pid").exists)
        sleeper = int((tmp_path / "pid").read_text())
        process.send_signal(number)
        said = "measuring hangs.py on this machine, as one instance; nothing of this run is kept\n"
        _ends(process, 128 + number, sleeper, said=said)


def test_an_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a shell
    with _ended_by_signals():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)


def _swallow_a_signal() -> None:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    except BaseException as error:  # as libraries do while they are imported
        raise ImportError("odd") from error


def test_handlers_and_hooks_are_put_back() -> None:
    before = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.unraisablehook)
    with pytest.raises(KeyboardInterrupt), _ended_by_signals():
        _swallow_a_signal()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.unraisablehook) == before
    assert logging.root.manager.disable == logging.NOTSET


@pytest.mark.parametrize(
    "words",
    [
        ("forecast", "--trace", "aws-p3", "--forecaster", "events", "--workers", "1", "--json", "-"),
        ("simulate", "--list"),
        ("plan", "--profile", "bert", "--json"),
        ("--help",),
    ],
)
def test_a_reader_that_has_gone_is_no_error(words: tuple[str, ...], tmp_path: Path) -> None:
    with _started(*words, cwd=tmp_path) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(_LONG_S) == 141
