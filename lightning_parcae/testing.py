"""Faults at named points of the protocol, for tests of this package and of yours.

Set ``PARCAE_FAULT_POINTS`` to a JSON list, one object for each fault:

    [{"point": "backward", "instance": "i2", "step": 12, "action": "kill"}]

``point`` is one of :data:`POINTS`; ``instance`` a name (``PARCAE_INSTANCE``) or ``"*"``; ``step`` the optimizer step at
or after which it strikes (0 if left out); ``action`` is ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``raise`` (a
RuntimeError, as user code would) or ``notice`` (SIGTERM). Each fault strikes once in a process. What has struck is
appended, before it does, to the file that ``PARCAE_FAULT_LOG`` names.

Without the variable a point costs one comparison.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

POINTS = (
    "set_up",  # the process is connected, nothing is built
    "warm_up",  # the throw-away step
    "ready",  # waiting for a place
    "boundary",  # between two steps
    "batch",  # the batch is about to travel to the last stage
    "forward",
    "backward",
    "reduction",
    "vote",  # the step is computed, its vote is about to begin
    "voted",  # the vote has completed, the optimizer has not stepped
    "stepped",  # the optimizer has stepped
    "validation",
    "acknowledge",  # a generation was announced, the answer is about to be sent
    "transfer",  # state is about to be fetched
    "formation",  # the groups are about to be formed
    "settle",  # the generation is formed, old state is about to be dropped
    "gather",  # state is collected on rank 0
    "save",  # a checkpoint is about to be written
    "fallback",  # the fallback checkpoint is being written
    "epoch_end",
    "finish",  # the final state is being collected
)
"""Every named point, in the order of a run."""

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "notice": signal.SIGTERM}


def _read() -> list[dict[str, Any]] | None:
    text = os.environ.get("PARCAE_FAULT_POINTS")
    if not text:
        return None
    faults: list[dict[str, Any]] = json.loads(text)
    for fault in faults:
        if fault.get("point") not in POINTS:
            raise ValueError(f"PARCAE_FAULT_POINTS: no point {fault.get('point')!r}; there are {', '.join(POINTS)}")
        if fault.get("action") not in (*_SIGNALS, "raise"):
            raise ValueError(f"PARCAE_FAULT_POINTS: no action {fault.get('action')!r}; use kill, stop, notice or raise")
    name = os.environ.get("PARCAE_INSTANCE", "")
    return [fault for fault in faults if fault.get("instance", "*") in ("*", name)]


_faults = _read()
_step = 0


def reached_step(step: int) -> None:
    """Tell which optimizer step the process is at."""
    global _step
    _step = step


def reach(point: str) -> None:
    """Strike here if a fault waits for this point."""
    if not _faults:
        return
    for fault in list(_faults):
        if fault["point"] != point or _step < int(fault.get("step", 0)):
            continue
        _faults.remove(fault)
        _note(fault)
        if fault["action"] == "raise":
            raise RuntimeError(f"injected fault at {point}")
        os.kill(os.getpid(), _SIGNALS[fault["action"]])


def _note(fault: dict[str, Any]) -> None:
    path = os.environ.get("PARCAE_FAULT_LOG")
    if not path:
        return
    line = json.dumps({**fault, "instance": os.environ.get("PARCAE_INSTANCE", ""), "pid": os.getpid(), "step": _step})
    with open(path, "a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
