"""One readable terminal for many processes: the log of rank 0 as it grows, and one line for each event."""

from __future__ import annotations

import codecs
import re
import sys
import time
from pathlib import Path
from typing import TextIO

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_COLORS = {"info": "36", "good": "32", "warn": "33", "bad": "31"}
_KEPT_CHARS = 65536


class LogFollower:
    """Reads what has been added to a log file since the last time.

    Args:
        path: The file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def skip_to_end(self) -> None:
        """Go on from the present end of the file."""
        self._offset = self.path.stat().st_size if self.path.exists() else 0
        self._decoder.reset()

    def read(self) -> str:
        """Return the text added since the last call."""
        if not self.path.exists():
            return ""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        return self._decoder.decode(data)


class Console:
    """Writes log text and event lines to one stream so that neither tears the other.

    On a terminal, log text passes as it is, and an event line takes the place of the progress bar, which is drawn again
    below it. Elsewhere (a file, a CI log) each line is written once it is complete, and a progress bar only from time
    to time.

    Args:
        stream: Where to write; standard output if None.
        bar_interval_s: How often a progress bar is written when the stream is not a terminal.
    """

    def __init__(self, stream: TextIO | None = None, *, bar_interval_s: float = 10.0) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._is_tty = self._stream.isatty()
        self._bar_interval_s = bar_interval_s
        self._bar_written_at = -float("inf")
        self._line = ""  # what stands in the unfinished line
        self._last_line = ""
        self._last_step = 0
        self._is_broken = False
        self._shown = ""

    def log(self, text: str) -> None:
        """Pass on text of an instance's log."""
        if not text:
            return
        self._shown = (self._shown + text)[-_KEPT_CHARS:]
        *complete, self._line = (self._line + text).split("\n")
        if self._is_tty:
            self._write(text)
            return
        for line in complete:
            self._write_line(line)
        drawings = [drawing for drawing in self._line.split("\r") if drawing.strip()]
        if "\r" in self._line and drawings:
            # a progress bar: only its newest drawing is kept, and written from time to time
            self._line = "\r" + drawings[-1]
            if time.monotonic() - self._bar_written_at >= self._bar_interval_s:
                self._bar_written_at = time.monotonic()
                self._write_line(drawings[-1])

    @property
    def environ(self) -> dict[str, str]:
        """Variables that make instances, whose output goes to a file, draw their progress bars for this stream."""
        return {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"} if self._is_tty else {}

    def progress(self, step: int, epoch: int) -> None:
        """Say how far the job is, from time to time, where no bar can be drawn."""
        now = time.monotonic()
        if self._is_tty or step == self._last_step or now - self._bar_written_at < self._bar_interval_s:
            return
        rate = (step - self._last_step) / (now - self._bar_written_at)
        speed = f", {rate:.1f} steps/s" if self._last_step and rate > 0 else ""
        self._bar_written_at, self._last_step = now, step
        self.event(f"step {step}, epoch {epoch}{speed}")

    def event(self, text: str, level: str = "info") -> None:
        """Write an event line, stamped with the time of day."""
        stamp = time.strftime("%H:%M:%S")
        label = f"\x1b[{_COLORS[level]}m[parcae {stamp}]\x1b[0m" if self._is_tty else f"[parcae {stamp}]"
        self.block(f"{label} {text}")

    def block(self, text: str) -> None:
        """Write whole lines of our own."""
        if self._is_tty and self._line:
            # a bar is drawn again by its owner, other unfinished text would be lost
            self._write("\r\x1b[K" if "\r" in self._line else "\n")
            self._line = ""
        self._write(text.rstrip("\n") + "\n")

    def has_shown(self, text: str) -> bool:
        """Return whether the log text written lately contains ``text``."""
        return text in self._shown

    def finish(self) -> None:
        """End an unfinished line."""
        if self._is_tty:
            # a bar whose process was killed has hidden the cursor
            self._write("\n\x1b[?25h" if self._line else "\x1b[?25h")
        elif self._line:
            self._write_line(self._line)
        self._line = ""

    def _write_line(self, line: str) -> None:
        """Write one complete line as it would look on a terminal in the end, unless it stands there already."""
        final = _ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip()
        if (final or not line.strip()) and not ("\r" in line and final == self._last_line):
            self._last_line = final
            self._write(final + "\n")

    def _write(self, text: str) -> None:
        """Write, whatever the stream can show; if its reader has gone, the log files still have everything."""
        if self._is_broken:
            return
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(text.encode("ascii", "replace").decode("ascii"))
            self._stream.flush()
        except OSError:
            self._is_broken = True
