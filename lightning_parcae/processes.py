"""Child processes that do not outlive their parent and leave nothing behind.

Each child leads a session of its own, so that Ctrl-C in the terminal does not reach it. The kernel kills it when its
parent goes, however the parent goes. What it has forked (loader workers) goes with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# Runs before the command, in the child: a preexec_fn would run Python between fork and exec, which may deadlock in a
# parent with threads. PR_SET_PDEATHSIG (1) survives exec. The parent may have died before the call: hence the check.
_DIE_WITH_PARENT = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class ChildProcess:
    """A started child.

    The kernel ties a child to the *thread* that started it: start children from a thread that outlives them.

    Args:
        command: Program and arguments.
        environ: The whole environment of the child.
        log_path: Standard output and error are appended to this file.
    """

    def __init__(self, command: Sequence[str], *, environ: Mapping[str, str], log_path: Path) -> None:
        self.log_path = log_path
        self.started_at = time.time()
        self.exit_code: int | None = None
        arguments = list(command)
        if sys.platform == "linux":
            arguments = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *arguments]
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                arguments,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal that killed it), or None while the child lives.

        A child that has ended stays a zombie until :meth:`reap`, so that its pid and group cannot mean another process.
        """
        if self.exit_code is None:
            try:
                status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # someone else in this process has waited for it
                self.exit_code = self._process.wait()
            else:
                if status is not None:
                    exited = status.si_code == os.CLD_EXITED
                    self.exit_code = status.si_status if exited else -status.si_status
        return self.exit_code

    def send_signal(self, number: int) -> bool:
        """Send a signal to the child alone; return False if it has ended."""
        if self.poll() is not None:
            return False
        os.kill(self.pid, number)
        return True

    @property
    def is_stopped(self) -> bool:
        """Whether the child was stopped by a signal and not continued."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"

    def reap(self) -> int:
        """Kill the child if it lives, kill what it has left in its process group, and return the exit code."""
        if self._process.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._process.kill()
            self.poll_until(5.0)
            code = self._process.wait()
            self.exit_code = code if self.exit_code is None else self.exit_code
        assert self.exit_code is not None
        return self.exit_code

    def poll_until(self, timeout_s: float) -> int | None:
        """Wait for the end of the child, at most so long."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.exit_code


def describe_exit(exit_code: int) -> str:
    """Return how a process ended, in words."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
