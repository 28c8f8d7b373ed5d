"""Children go with their parent, and what they have forked goes with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lightning_parcae.processes import ChildProcess, describe_exit


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def _wait_for(path: Path, timeout_s: float = 10.0) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().endswith("\n"):
            return path.read_text()
        time.sleep(0.01)
    raise TimeoutError(path)


def test_exit_codes_and_logs(tmp_path: Path) -> None:
    child = ChildProcess(
        [sys.executable, "-c", "import os; print('hello', os.environ['NAME']); raise SystemExit(3)"],
        environ={**os.environ, "NAME": "i0"},
        log_path=tmp_path / "log",
    )
    assert child.poll_until(10.0) == 3
    assert _is_alive(child.pid) is False  # a zombie: its pid is not given to another process
    assert child.send_signal(signal.SIGTERM) is False
    assert child.reap() == 3
    assert (tmp_path / "log").read_text() == "hello i0\n"
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-9) == "was killed by SIGKILL"


def test_a_killed_child_takes_its_workers_along(tmp_path: Path) -> None:
    code = f"""\
import os, time
if os.fork() == 0:
    open({str(tmp_path / "worker")!r}, "w").write(f"{{os.getpid()}}\\n")
time.sleep(60)
"""
    child = ChildProcess([sys.executable, "-c", code], environ=os.environ, log_path=tmp_path / "log")
    worker = int(_wait_for(tmp_path / "worker"))
    child.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 5.0
    while not child.is_stopped and time.monotonic() < deadline:
        time.sleep(0.01)
    assert child.is_stopped
    child.send_signal(signal.SIGKILL)
    assert child.poll_until(10.0) == -signal.SIGKILL
    assert child.reap() == -signal.SIGKILL
    deadline = time.monotonic() + 5.0
    while _is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _is_alive(worker)


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = f"""\
import os, sys, time
from pathlib import Path
from lightning_parcae.processes import ChildProcess
command = [sys.executable, "-c", "import time; time.sleep(60)"]
child = ChildProcess(command, environ=os.environ, log_path=Path({str(tmp_path / "log")!r}))
print(child.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _is_alive(pid)
        parent.kill()
    deadline = time.monotonic() + 5.0
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _is_alive(pid)
