"""What the terminal shows when a progress bar, a log and events share it."""

from __future__ import annotations

import io
from pathlib import Path

from lightning_parcae.console import Console, LogFollower


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _screen(text: str) -> list[str]:
    """Return the lines that a terminal would show."""
    lines = [""]
    column = 0
    for part in text.replace("\x1b[?25h", "").replace("\x1b[K", "\v").split("\x1b["):
        part = part.partition("m")[2] if part[:1].isdigit() else part
        for char in part:
            if char == "\n":
                lines.append("")
                column = 0
            elif char == "\r":
                column = 0
            elif char == "\v":
                lines[-1] = lines[-1][:column]
            else:
                lines[-1] = lines[-1][:column] + char + lines[-1][column + 1 :]
                column += 1
    return lines


def test_an_event_takes_the_place_of_the_bar_on_a_terminal() -> None:
    stream = _Terminal()
    console = Console(stream)
    console.log("start\n\rstep 1/9 |#   |")
    console.event("i2 died")
    console.log("\rstep 2/9 |##  |")
    console.log("\rstep 9/9 |####|\n")
    console.finish()
    lines = _screen(stream.getvalue())
    assert lines[0] == "start"
    assert lines[1].endswith("i2 died")
    assert lines[2:] == ["step 9/9 |####|", ""]


def test_an_event_does_not_swallow_an_unfinished_line() -> None:
    stream = _Terminal()
    console = Console(stream)
    console.log("half a line")
    console.event("i2 died")
    assert _screen(stream.getvalue())[0] == "half a line"


def test_elsewhere_lines_are_whole_and_bars_are_rare() -> None:
    stream = io.StringIO()
    console = Console(stream, bar_interval_s=1000.0)
    console.log("sta")
    console.event("i2 died")
    console.log("rt\n")
    for step in range(1, 10):
        console.log(f"\rstep {step}/9")
    console.log("\ndone\n\nend")
    console.finish()
    lines = stream.getvalue().split("\n")
    assert lines[0].startswith("[parcae ")
    assert lines[0].endswith("i2 died")
    assert lines[1:] == ["start", "step 1/9", "step 9/9", "done", "", "end", ""]
    assert console.has_shown("step 5/9")
    assert not console.has_shown("step 10")


def test_a_reader_that_goes_does_not_stop_the_job() -> None:
    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    console = Console(Gone())
    console.event("first")
    console.log("second\n")


def test_following_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    follower = LogFollower(path)
    assert follower.read() == ""
    data = "a\u00fcb".encode()
    path.write_bytes(data[:2])  # half a character
    assert follower.read() == "a"
    path.write_bytes(data)
    assert follower.read() == "\u00fcb"
    late = LogFollower(path)
    late.skip_to_end()
    assert late.read() == ""
