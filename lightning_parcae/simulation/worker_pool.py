"""Worker processes that leave nothing behind, however the work is left.

Workers are started afresh: nothing of this process, its threads and locks, is inherited. They never see a Ctrl-C: it is
for this process to end them, and it kills them as soon as anything is raised here. If this process is killed, they end
by themselves. A worker that ends by itself is a ParcaeError; what one raises is raised here.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, TypeVar

from lightning_parcae.errors import ParcaeError

Task = TypeVar("Task")
Result = TypeVar("Result")

_ENDING = {signal.SIGINT, signal.SIGTERM}


def run_in_processes(
    function: Callable[[Task], Result], tasks: Sequence[Task], workers: int, progress: Callable[[float, int], None]
) -> list[Result]:
    """Call a function for each task, in worker processes.

    Args:
        function: It, the tasks and its results are pickled.
        tasks: The tasks.
        workers: Number of processes.
        progress: Told how many are done, and of how many.

    Returns:
        The results in the order of the tasks.

    Raises:
        ParcaeError: If a worker ends by itself.
        Exception: What the first function that fails has raised; the others are ended.
    """
    with _pool(workers) as pool:
        # A worker starts with these blocked, and a signal that comes now is taken when all workers are known.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            futures: list[Future[Result]] = [pool.submit(function, task) for task in tasks]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        left = set(futures)
        while left:
            done, left = wait(left, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()  # raises at once what a worker raised
            progress(len(tasks) - len(left), len(tasks))
        return [future.result() for future in futures]


class _KnownProcesses(SpawnContext):
    """Starts processes afresh, and knows those that it has started."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[SpawnProcess] = []

    def Process(self, *args: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]  # noqa: N802
        """Make a process, see :class:`multiprocessing.Process`."""
        self.started.append(SpawnProcess(*args, **options))
        return self.started[-1]


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Offer worker processes that end with the block, however it is left, and with this process, however that ends."""
    context = _KnownProcesses()
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker, initargs=(theirs,))
    try:
        yield pool
    except BrokenProcessPool as error:
        raise ParcaeError(
            "a process of the simulation ended by itself: out of memory? In a script, the call must stand under "
            "`if __name__ == '__main__':`, or be given workers=1"
        ) from error
    except BaseException:
        for process in context.started:
            if process.pid is not None:
                process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        ours.close()
        theirs.close()


def _begin_worker(lifeline: Any) -> None:
    """Let a worker end when the process that started it closes its end of the pipe."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def watch() -> None:
        try:
            lifeline.recv()
        except EOFError:
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
