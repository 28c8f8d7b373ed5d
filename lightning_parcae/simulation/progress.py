"""A progress bar on the terminal, for what may take long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_AFTER_S = 1.0


@contextmanager
def progress_bar(text: str, console: Console) -> Iterator[Callable[[float, int], None]]:
    """Offer something to call with what is done, and of how much.

    It becomes a bar when that takes more than a second and somebody is watching.
    """
    bar: Progress | None = None
    started = time.monotonic()

    def tell(done: float, total: int) -> None:
        nonlocal bar
        if bar is None:
            if not console.is_terminal or time.monotonic() - started < _AFTER_S:
                return
            parts = (TextColumn(text), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            bar = Progress(*parts, console=console, transient=True)
            bar.add_task(text, total=total)
            bar.start()
        bar.update(bar.task_ids[0], completed=done)

    try:
        yield tell
    finally:
        if bar is not None:
            bar.stop()
