"""A notice that comes as a signal: SIGTERM from the cloud's agent, a batch system, Kubernetes or a user."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)


class SignalNotice:
    """Calls ``notify`` when the process gets a signal, instead of what the signal did before.

    Args:
        notify: Called in a thread of its own; it may take locks and talk to the network.
        number: The signal.
    """

    def __init__(self, notify: Callable[[], None], number: signal.Signals = signal.SIGTERM) -> None:
        self._notify = notify
        self._number = number
        self._previous: Any = None
        self._is_watching = False

    def watch(self) -> None:
        """Install the handler, or install it again over one that somebody has installed since.

        Python allows that in the main thread only; elsewhere it is said in the log that the signal keeps its meaning.
        """
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "not in the main thread: %s will end this instance instead of being taken as a notice; use "
                "`parcae preempt`, or call fit in the main thread",
                self._number.name,
            )
            return
        if not self._is_watching:
            self._previous = signal.getsignal(self._number)
            self._is_watching = True
        signal.signal(self._number, self._on_signal)

    def restore(self) -> None:
        """Put back the handler that was there before the first :meth:`watch`."""
        if self._is_watching and threading.current_thread() is threading.main_thread():
            signal.signal(self._number, self._previous or signal.SIG_DFL)
            self._is_watching = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # not in the handler itself: the interrupted main thread may hold a lock that notify needs
        threading.Thread(target=self._notify, name="parcae-notice", daemon=True).start()
