"""What every test gets: known seeds, a restored process, and a failure if it leaves anything running.

Imports neither torch nor Lightning, so that the tests of the pure packages stay fast.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Read when torch and numpy are loaded. Tests run several processes on few cores: one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Inherited by every process that a test starts, however deep, so that orphans are found as well as children.
_MARK_NAME = "PARCAE_TEST_SESSION"
_MARK = f"{os.getpid()}-{secrets.token_hex(8)}"
os.environ[_MARK_NAME] = _MARK

import pytest  # noqa: E402  (after the thread setting)
from hypothesis import settings  # noqa: E402

# A shared machine makes any deadline per example a lottery; pytest-timeout bounds the test as a whole.
settings.register_profile("parcae", deadline=None, print_blob=True)
settings.load_profile("parcae")

_GRACE_S = 3.0
_SIGNALS = [
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
    signal.SIGCONT,
]
# Started by multiprocessing on first use, meant to live as long as the process.
_LASTING_PROCESSES = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
_LISTEN = "0A"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in tests/integration, and run it last: the cheap tests speak first."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent / "integration"):
            item.add_marker(pytest.mark.integration)
    items.sort(key=lambda item: item.get_closest_marker("integration") is not None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def _known_seeds() -> None:
    random.seed(20)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(20)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(20)


@pytest.fixture(autouse=True)
def _restored_process() -> Iterator[None]:
    """Put back signal handlers, environment, working directory and Lightning's notion of rank 0."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    environment = dict(os.environ)
    directory = Path.cwd()
    rank = _lightning_rank()
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
    for name in os.environ.keys() - environment.keys():
        # pytest's own, changed between the phases of a test
        if name != "PYTEST_CURRENT_TEST":
            del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"})
    os.chdir(directory)
    rank_zero = sys.modules.get("lightning_utilities.core.rank_zero")
    if rank_zero is not None:
        rank_zero.rank_zero_only.rank = 0 if rank is None else rank


def _lightning_rank() -> int | None:
    rank_zero = sys.modules.get("lightning_utilities.core.rank_zero")
    return None if rank_zero is None else getattr(rank_zero.rank_zero_only, "rank", None)


@pytest.fixture(autouse=True)
def _nothing_left_behind(_restored_process: None) -> Iterator[None]:
    """Fail a test that leaves a non-daemon thread, a process or a listening TCP socket of its own.

    What a fixture of wider scope started before the test is not the test's own. Left processes are killed, so that
    only one test fails for them.
    """
    threads = set(threading.enumerate())
    pids = _all_pids()
    sockets = _own_listening_sockets()
    yield
    left_threads = _what_stays(lambda: _left_threads(threads))
    left_processes = _what_stays(lambda: _left_processes(pids))
    left_sockets = _what_stays(lambda: sorted(_own_listening_sockets().items() - sockets.items()))
    for pid, _ in left_processes:
        _kill(pid)
    complaints = [
        *(f"thread {thread.name}" for thread in left_threads),
        *(f"process {pid} ({command})" for pid, command in left_processes),
        *(f"listening socket on port {port}" for _, port in left_sockets),
    ]
    if complaints:
        pytest.fail("the test left behind: " + ", ".join(complaints), pytrace=False)


def _what_stays(find: Callable[[], list[Any]]) -> list[Any]:
    """Return what ``find`` still finds when it has had time to go; at once if it finds nothing."""
    found = find()
    deadline = time.monotonic() + _GRACE_S
    while found and time.monotonic() < deadline:
        # sockets and processes may hang on a reference cycle
        gc.collect()
        time.sleep(0.02)
        found = find()
    return found


def _left_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]


def _all_pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def _left_processes(before: set[int]) -> list[tuple[int, str]]:
    """Find processes that are new and ours: a child of this process, or one that carries the session's mark."""
    if "multiprocessing" in sys.modules:
        # reaps the finished ones
        sys.modules["multiprocessing"].active_children()
    left = []
    mark = f"{_MARK_NAME}={_MARK}".encode()
    for pid in sorted(_all_pids() - before):
        # gone meanwhile, or another user's
        with contextlib.suppress(OSError, IndexError):
            # after the name in brackets, which may hold anything: state, parent, ...
            parent = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
            if any(name in command for name in _LASTING_PROCESSES):
                continue
            if parent == os.getpid() or mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                left.append((pid, command.decode(errors="replace")[:200] or "ended, but nobody waited for it"))
    return left


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    # an orphan is not ours to wait for
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _own_listening_sockets() -> dict[str, int]:
    """Return the ports this process listens on, by socket inode."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    if not inodes:
        return {}
    listening = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        # no IPv6 in this kernel
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and fields[9] in inodes:
                    listening[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return listening
