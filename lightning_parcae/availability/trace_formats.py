"""Reading availability traces: the format is found by looking at the content.

Read are, each also with blank lines, comments (``#``), a byte-order mark and rows out of order, with columns separated
by commas, semicolons, tabs or spaces:

* ``time_ms,count``: instances alive after a change.
* ``time_ms,add|remove,name[,name...]``: who comes and goes.
* ``YYYY-MM-DD, HH:MM:SS, count`` (or one ISO time stamp): samples; times count from the first one.
* the three above under a header row, which names the columns and with a suffix the unit: ``time_s,count``.
* one count per line, one line per interval; an empty cell, ``nan`` or ``null`` is a gap.
* JSON: a list of counts (``null`` is a gap), of ``[time_ms, count]`` pairs, of ``[time_ms, "add", {"nodes": [...]}]``
  rows or of ``{"interval": [before, in, out]}`` plans; the rows also one per line; or an object that holds counts under
  ``counts``, ``N``, ``data`` or ``availability``, and either their times (``times_s``, ``timestamps``) or the interval
  (``interval_s``, ``gap_seconds``). SkyPilot's spot traces are such objects. The README beside them says that ``data``
  is the number of available instances, and so it is read; files made from them for other simulators may hold 1 for
  "not available".

A number without a unit is a time in milliseconds, with three exceptions. If the first one is so large that it can only
count from 1970, it is seconds, milliseconds, micro- or nanoseconds, by its size. If rows of counts follow each other
within a second that way, they are seconds; under a header, if they do so within ten.

What cannot be read is refused with a ``ValueError`` of one line that names file, line, what was found and what is
wanted.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Clock = Literal["position", "unit", "bare", "column", "date"]

_OPERATIONS = {
    **dict.fromkeys(("add", "allocate", "allocation", "join"), "add"),
    **dict.fromkeys(("remove", "preempt", "preemption", "leave"), "remove"),
    **dict.fromkeys(("no-op", "noop", "migration", "done"), "none"),
}
_SECONDS_PER_UNIT = {
    **dict.fromkeys(("ns", "nanoseconds"), 1e-9),
    **dict.fromkeys(("us", "microseconds"), 1e-6),
    **dict.fromkeys(("ms", "milliseconds"), 1e-3),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
}
_TIME_COLUMNS = ("time", "times", "timestamp", "timestamps", "t", "ts", "date", "datetime", "elapsed", "offset")
_COUNT_COLUMNS = ("count", "counts", "n", "num_instances", "instances", "available", "availability", "num", "size")
_OPERATION_COLUMNS = ("operation", "op", "event", "action")
_NAME_COLUMNS = ("name", "node", "nodes", "instance", "instance_id", "id")
_COUNT_KEYS = ("counts", "count", "N", "data", "availability", "values", "available")
_INTERVAL_KEYS = {
    **{
        f"{word}{unit}": scale
        for word in ("interval", "gap")
        for unit, scale in (("", 1.0), ("_s", 1.0), ("_ms", 1e-3))
    },
    **{f"{word}_{unit}": _SECONDS_PER_UNIT[unit] for word in ("interval", "gap") for unit in ("seconds", "minutes")},
}
_SINCE_1970_S = 1e9  # a first time stamp beyond 2001 counts from 1970, not from the start of the trace
_MOST_INSTANCES = 100_000
_LONGEST_S = 400 * 86_400.0  # longer traces have another unit than was thought
_MOST_ROWS = 250_000
_BULK_CHARS = 200_000  # text beyond this is first tried as plain numbers, many times as fast


@dataclass(slots=True)
class Row:
    """One line of a trace, in whatever format: a count, or instances that come or go.

    Attributes:
        time_s: Seconds from the start.
        where: File and line, for errors.
        count: Instances alive from then on, None for a gap or an event.
        is_gap: Whether the count is unknown from then on.
        add: Names that come.
        remove: Names that go.
        until_s: How long the row is known to hold, or None.
        clock: Where the time is from: the position among counts, a number with a unit, a bare number or one under a
            column name (both taken as milliseconds for now), or a date.
    """

    time_s: float
    where: str
    count: int | None = None
    is_gap: bool = False
    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    until_s: float | None = None
    clock: Clock = "position"


@dataclass(slots=True)
class Rows:
    """The rows of a trace in order of time: events with names, or counts.

    Attributes:
        events: Who comes and goes; empty if there are counts.
        times_s: When each count was taken, ascending; empty if there are events.
        counts: Instances alive from then on, NaN where they are unknown; same length.
        last_s: Time of the last row of any kind.
        end_s: End of the trace where it says so, else None.
    """

    events: list[Row] = field(default_factory=list)
    times_s: Floats = field(default_factory=lambda: np.zeros(0))
    counts: Floats = field(default_factory=lambda: np.zeros(0))
    last_s: float = 0.0
    end_s: float | None = None


def parse(text: str, source: str, interval_s: float) -> Rows:
    """Read a trace of any known format.

    Args:
        text: The content of the file.
        source: Its name, for errors.
        interval_s: Seconds per value for counts that carry no time.

    Raises:
        ValueError: If the content is no trace; the message names the line.
    """
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise ValueError(f"{source}: the file is empty; a trace needs at least one row")
    is_json = text.lstrip()[0] in "[{"
    if len(text) > _BULK_CHARS:
        bulk = (_bulk_json if is_json else _bulk_table)(text, source, interval_s)
        if bulk is not None:
            return bulk
    read = (_json_rows if is_json else _table_rows)(text, source, interval_s)
    rows = list(itertools.islice(read, _MOST_ROWS + 1))
    if len(rows) > _MOST_ROWS:
        raise ValueError(
            f"{source}: more than {_MOST_ROWS} rows; so many are taken only if each is a plain count, or time and count"
        )
    if not rows:
        raise ValueError(f"{source}: no rows found; a trace needs at least one")
    return _ordered(rows, source)


def _ordered(rows: list[Row], source: str) -> Rows:
    counted = [row for row in rows if row.count is not None or row.is_gap]
    if counted and any(row.add or row.remove for row in rows):
        raise ValueError(
            f"{counted[0].where}: a count among events; a trace holds either counts or add and remove rows"
        )
    clock = rows[0].clock
    other = next((row for row in rows if row.clock != clock), None)
    if other is not None:
        raise ValueError(f"{other.where}: times of another kind than in the rows before; use one kind throughout")
    rows.sort(key=lambda row: row.time_s)  # stable: of equal times, the later line wins
    times = np.array([row.time_s for row in rows])
    if times[0] < 0 and clock != "date":
        raise ValueError(f"{rows[0].where}: a time cannot be negative, got {times[0]:g} s")
    scale, start_s = _scale_and_start(times, clock, is_named=not counted)
    times = np.round(times * scale - start_s, 6)  # what a unit of nanoseconds adds is not meant
    last_s = float(times[-1])
    _check_length(last_s, source, clock)
    until_s = max((row.until_s for row in rows if row.until_s is not None), default=-math.inf) * scale - start_s
    end_s = until_s if until_s >= last_s else None
    if not counted:
        for row, time_s in zip(rows, times.tolist(), strict=True):
            row.time_s = time_s
        return Rows(events=rows, last_s=last_s, end_s=end_s)
    known = np.array([row.count is not None or row.is_gap for row in rows])
    counts = np.array([math.nan if row.count is None else float(row.count) for row in rows])
    return _counts(times[known], counts[known], source, last_s, end_s)


def _counts(times: Floats, counts: Floats, source: str, last_s: float, end_s: float | None) -> Rows:
    if np.isnan(counts).all():
        raise ValueError(f"{source}: every count is missing")
    return Rows(times_s=times, counts=counts, last_s=last_s, end_s=end_s)


def _scale_and_start(times: Floats, clock: Clock, *, is_named: bool) -> tuple[float, float]:
    """Return what sorted times are to be multiplied by, and what is the start of the trace then."""
    scale = _scale(times, clock, is_named=is_named) if clock in ("bare", "column") else 1.0
    first_s = float(times[0]) * scale
    return scale, first_s if clock == "date" or first_s >= _SINCE_1970_S else 0.0


def _scale(times: Floats, clock: Clock, *, is_named: bool) -> float:
    """Return what times without a unit, taken as milliseconds, are to be multiplied by; see the top of the module."""
    first, last = times[0] * 1e3, times[-1] * 1e3
    if first >= _SINCE_1970_S:
        return next((scale for most, scale in ((1e11, 1e3), (1e14, 1.0), (1e17, 1e-3)) if first < most), 1e-6)
    gaps = np.diff(np.unique(times))
    if not is_named and len(gaps) and last <= 1e7 and float(np.median(gaps)) < (10.0 if clock == "column" else 1.0):
        return 1e3
    return 1.0


def _check_length(length_s: float, source: str, clock: Clock) -> None:
    if length_s > _LONGEST_S and clock != "position":
        hint = "; name the unit in a header, such as time_s,count" if clock in ("bare", "column") else ""
        raise ValueError(f"{source}: the trace would last {length_s / 86_400:.3g} days, at most 400 are taken{hint}")


# --- tables -----------------------------------------------------------------------------------------------------------


def _table_rows(text: str, source: str, interval_s: float) -> Iterator[Row]:
    header: list[str] | None = None
    seen = 0  # rows before this one, for counts without a time
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", 1)[0]
        # A blank line is nothing in a table, but a missing value among bare counts cannot be told from it.
        if not content.strip():
            continue
        where = f"{source}:{number}"
        cells = _cells(content)
        if seen == 0 and header is None and _is_header(cells):
            header = [_column(cell) for cell in cells]
            continue
        if header is not None:
            yield _row_under_header(header, cells, where, seen * interval_s, interval_s)
        else:
            yield _bare_row(cells, where, seen * interval_s, interval_s)
        seen += 1


def _cells(line: str) -> list[str]:
    cells = [cell.strip().strip("\"'") for cell in line.strip("\r\n").split(_delimiter(line))]
    while len(cells) > 2 and not cells[-1]:
        cells.pop()  # a trailing comma
    return cells


def _delimiter(line: str) -> str | None:
    return next((mark for mark in (",", ";", "\t") if mark in line), None)


def _bulk_table(text: str, source: str, interval_s: float) -> Rows | None:
    """Read one or two columns of plain numbers at once; None if it is anything else, or has a fault to be told."""
    first, _, rest = text.lstrip().partition("\n")
    cells = [_column(cell) for cell in _cells(first)]
    header = _is_header(_cells(first))
    stems = [_split_unit(name) for name in cells] if header else [("time", None), ("count", None)][-len(cells) :]
    kinds = ["time" if stem in _TIME_COLUMNS else "count" if stem in _COUNT_COLUMNS else "" for stem, _ in stems]
    if len(cells) > 2 or "count" not in kinds or len(set(kinds)) < len(kinds) or "" in kinds:
        return None
    try:
        table = np.loadtxt(io.StringIO(rest if header else text), delimiter=_delimiter(first), ndmin=2)
    except ValueError:
        return None
    if table.shape[1] != len(kinds):
        return None
    counts = table[:, kinds.index("count")]
    is_fine = _is_fine(counts)
    if "time" in kinds:
        is_fine &= np.isfinite(table[:, kinds.index("time")])
    if not is_fine.all():
        _fail_at(int(np.argmin(is_fine)), header, text, source)
    if "time" not in kinds:
        times = np.arange(len(counts), dtype=np.float64) * interval_s
        return _counts(times, counts, source, float(times[-1]), len(counts) * interval_s)
    unit = stems[kinds.index("time")][1]
    times = table[:, kinds.index("time")] * (1e-3 if unit is None else unit)
    if times.min() < 0:
        return None
    order = np.argsort(times, kind="stable")
    times, counts = times[order], counts[order]
    clock: Clock = "unit" if unit is not None else "column" if header else "bare"
    scale, start_s = _scale_and_start(times, clock, is_named=False)
    times = np.round(times * scale - start_s, 6)
    _check_length(float(times[-1]), source, clock)
    return _counts(times, counts, source, float(times[-1]), None)


def _is_header(cells: Sequence[str]) -> bool:
    names = [_column(cell) for cell in cells]
    known = (*_TIME_COLUMNS, *_COUNT_COLUMNS, *_OPERATION_COLUMNS, *_NAME_COLUMNS)
    return any(_split_unit(name)[0] in known for name in names) and not any(_is_number(cell) for cell in cells)


def _column(cell: str) -> str:
    return re.sub(r"\W+", "_", cell.strip().lower()).strip("_")


def _split_unit(name: str) -> tuple[str, float | None]:
    """Split ``time_ms`` into ``time`` and the seconds of its unit."""
    if name in _SECONDS_PER_UNIT:
        return "time", _SECONDS_PER_UNIT[name]
    stem, _, unit = name.rpartition("_")
    if stem in _TIME_COLUMNS and unit in _SECONDS_PER_UNIT:
        return stem, _SECONDS_PER_UNIT[unit]
    return name, None


def _row_under_header(header: Sequence[str], cells: Sequence[str], where: str, at_s: float, interval_s: float) -> Row:
    if len(cells) > len(header) and not any(name in _NAME_COLUMNS for name in header):
        _fail(where, f"{len(cells)} cells under {len(header)} columns ({', '.join(header)})")
    stems = [_split_unit(name) for name in header]
    times = [index for index, (stem, _) in enumerate(stems) if stem in _TIME_COLUMNS]
    if any(index >= len(cells) for index in times):
        _fail(where, f"the time is missing: {len(cells)} cells under the columns {', '.join(header)}")
    until_s = None
    clock: Clock = "position"
    if times:
        stamp = " ".join(cells[index] for index in times)
        unit = next((scale for index, (_, scale) in enumerate(stems) if index in times and scale is not None), None)
        at_s, clock = _seconds(stamp, unit, where, "column")
    else:
        until_s = at_s + interval_s
    operation = next((index for index, name in enumerate(header) if name in _OPERATION_COLUMNS), None)
    if operation is not None and operation < len(cells):
        first = next((index for index, name in enumerate(header) if name in _NAME_COLUMNS), operation + 1)
        return _event(at_s, clock, cells[operation], [cell for cell in cells[first:] if cell], where)
    count = next((index for index, name in enumerate(header) if name in _COUNT_COLUMNS), None)
    if count is None:
        _fail(where, f"no count among the columns {', '.join(header)}; name one of them 'count'")
    value = cells[count] if count < len(cells) else ""
    return _counted(at_s, clock, value, where, until_s)


def _bare_row(cells: Sequence[str], where: str, at_s: float, interval_s: float) -> Row:
    if len(cells) == 1:
        return _counted(at_s, "position", cells[0], where, at_s + interval_s)
    if cells[1].lower() in _OPERATIONS:
        return _event(*_seconds(cells[0], None, where), cells[1], [cell for cell in cells[2:] if cell], where)
    if len(cells) == 2:
        return _counted(*_seconds(cells[0], None, where), cells[1], where, None)
    if len(cells) == 3 and not _is_number(cells[0]):
        return _counted(*_seconds(f"{cells[0]} {cells[1]}", None, where), cells[2], where, None)
    return _fail(
        where,
        f"{_shown(', '.join(cells))} is neither 'time_ms, count' nor 'time_ms, add|remove, name' "
        "nor 'date, time, count'",
    )


def _fail_at(index: int, header: bool, text: str, source: str) -> NoReturn:
    """Say what is wrong with a row that was read in bulk."""
    lines = [(number, line.split("#", 1)[0]) for number, line in enumerate(text.splitlines(), start=1)]
    lines = [(number, line) for number, line in lines if line.strip()]
    number, line = lines[index + header]
    names = [_column(cell) for cell in _cells(lines[0][1])] if header else ["time", "count"][-len(_cells(line)) :]
    _row_under_header(names, _cells(line), f"{source}:{number}", 0.0, 1.0)
    raise AssertionError(f"{source}:{number} was refused for nothing")


# --- JSON -------------------------------------------------------------------------------------------------------------


def _json_rows(text: str, source: str, interval_s: float) -> Iterator[Row]:
    try:
        value = _loads(text)
    except json.JSONDecodeError as error:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
        try:
            _loads(lines[0][1])
        except json.JSONDecodeError:
            raise ValueError(f"{source}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from error
        yield from _json_lines(lines, source, interval_s)
        return
    if isinstance(value, list) and len(value) == 3 and isinstance(value[1], str):
        yield _json_event(value, f"{source}:1")
    elif isinstance(value, list):
        yield from _json_items(value, source, interval_s)
    else:
        yield from _json_object(value, source, interval_s)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", "", 0) from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise json.JSONDecodeError(str(error), "", 0) from error


def _json_lines(lines: Sequence[tuple[int, str]], source: str, interval_s: float) -> Iterator[Row]:
    for index, (number, line) in enumerate(lines):
        where = f"{source}:{number}"
        try:
            value = _loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON: {error.msg} (column {error.colno})") from error
        yield _json_item(value, where, index * interval_s, interval_s)


def _json_items(values: Sequence[Any], source: str, interval_s: float) -> Iterator[Row]:
    at_s = 0.0
    for index, value in enumerate(values):
        row = _json_item(value, f"{source}: item {index}", at_s, interval_s)
        at_s = row.until_s if row.until_s is not None else at_s + interval_s
        yield row


def _json_item(value: Any, where: str, at_s: float, interval_s: float) -> Row:
    if isinstance(value, list) and len(value) >= 2 and isinstance(value[1], str) and value[1].lower() in _OPERATIONS:
        return _json_event(value, where)
    if isinstance(value, list) and len(value) == 2:
        return _counted(*_seconds(str(value[0]), None, where), _json_text(value[1]), where, None)
    if isinstance(value, dict) and "interval" in value:
        return _json_plan(value, where, at_s)
    if isinstance(value, dict):
        return _row_under_header(
            [_column(key) for key in value], [_json_text(cell) for cell in value.values()], where, at_s, interval_s
        )
    if value is None or isinstance(value, (int, float)):
        return _counted(at_s, "position", _json_text(value), where, at_s + interval_s)
    return _fail(where, f"{_shown(value)} is no count, no [time_ms, count] and no [time_ms, 'add', {{'nodes': [...]}}]")


def _json_event(value: Sequence[Any], where: str) -> Row:
    details = value[2] if len(value) > 2 else {}
    if not isinstance(details, dict) or not isinstance(details.get("nodes", []), list):
        _fail(where, f"{_shown(details)} should be an object with a list of nodes")
    at_s, clock = _seconds(str(value[0]), None, where)
    row = _event(at_s, clock, str(value[1]), [str(name) for name in details.get("nodes", [])], where)
    if "duration" in details:
        row.until_s = at_s + _seconds(str(details["duration"]), None, where)[0]
    elif str(value[1]).lower() == "done":
        row.until_s = at_s
    return row


def _json_plan(value: Mapping[str, Any], where: str, at_s: float) -> Row:
    interval = value["interval"]
    if not (isinstance(interval, list) and len(interval) == 3 and all(isinstance(item, int) for item in interval)):
        _fail(where, f"'interval' should be [instances before, in, out], got {_shown(interval)}")
    before, come, go = interval
    until_s = at_s + _seconds(str(value.get("duration", 60_000)), None, where)[0]
    return _counted(at_s, "position", str(before + come - go), where, until_s)


def _json_object(value: Mapping[str, Any], source: str, interval_s: float) -> Iterator[Row]:
    counts, times, interval_s = _parts(value, source, interval_s)
    if times is None:
        yield from _json_items(counts, source, interval_s)
        return
    if len(value[times]) != len(counts):
        _fail(source, f"{len(value[times])} values under {times!r} for {len(counts)} counts")
    for index, (time, count) in enumerate(zip(value[times], counts, strict=True)):
        cells = [_json_text(time), _json_text(count)]
        yield _row_under_header([_column(times), "count"], cells, f"{source}: item {index}", 0.0, interval_s)


def _parts(value: Mapping[str, Any], source: str, interval_s: float) -> tuple[list[Any], str | None, float]:
    """Find the counts of an object, the key of their times if there is one, and their interval."""
    counts = next((value[key] for key in _COUNT_KEYS if isinstance(value.get(key), list)), None)
    if counts is None:
        is_profile = "models" in value or "profile" in str(value.get("format", ""))
        hint = "; this looks like a profile of a model" if is_profile else ""
        keys = _cut(", ".join(value)) if value else "none"
        _fail(source, f"no list of counts among the keys {keys}; expected one of {', '.join(_COUNT_KEYS)}{hint}")
    lists = (key for key in value if isinstance(value[key], list))
    times = next((key for key in lists if _split_unit(_column(key))[0] in _TIME_COLUMNS), None)
    metadata = value.get("metadata")
    for part in (metadata if isinstance(metadata, dict) else {}, value):
        for key, scale in _INTERVAL_KEYS.items():
            if key in part:
                interval_s = _interval(part[key], scale, f"{source}: {key}")
    return counts, times, interval_s


def _bulk_json(text: str, source: str, interval_s: float) -> Rows | None:
    """Read a plain list of counts at once; None if it is anything else."""
    try:
        value = _loads(text)
    except json.JSONDecodeError:
        return None
    times = None
    if isinstance(value, dict):
        value, times, interval_s = _parts(value, source, interval_s)
    if times is not None or not isinstance(value, list) or {type(item) for item in value} - {int, float, type(None)}:
        return None
    counts = np.array([math.nan if item is None else item for item in value], dtype=np.float64)
    is_fine = _is_fine(counts)
    if not is_fine.all():
        index = int(np.argmin(is_fine))
        _counted(0.0, "position", _json_text(value[index]), f"{source}: item {index}", None)
    stamps = np.arange(len(counts), dtype=np.float64) * interval_s
    return _counts(stamps, counts, source, float(stamps[-1]), len(counts) * interval_s)


def _is_fine(counts: Floats) -> NDArray[np.bool_]:
    """Return which counts are whole numbers within limits, or missing."""
    fine: NDArray[np.bool_] = np.isnan(counts) | (
        (counts >= 0) & (counts <= _MOST_INSTANCES) & (counts == np.floor(counts))
    )
    return fine


def _interval(value: Any, scale: float, where: str) -> float:
    """Read ``300``, ``"300"`` or ``"5 min"``."""
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([a-z]*)\s*", "" if isinstance(value, bool) else str(value))
    if match is None or not _is_number(match[1]) or (match[2] and match[2] not in _SECONDS_PER_UNIT):
        _fail(where, f"{_shown(value)} is no interval; expected a number, or a number and a unit such as '5 min'")
    seconds = float(match[1]) * (_SECONDS_PER_UNIT[match[2]] if match[2] else scale)
    if not (math.isfinite(seconds) and seconds > 0):
        _fail(where, f"the interval must be above 0 s, got {seconds:g}")
    return seconds


# --- cells ------------------------------------------------------------------------------------------------------------


def _json_text(value: Any) -> str:
    return "" if value is None else str(value)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _shown(value: Any) -> str:
    """Return a value for a message, cut where it is long."""
    return repr(_cut(value)) if isinstance(value, str) else _cut(repr(value))


def _seconds(cell: str, scale: float | None, where: str, clock: Clock = "bare") -> tuple[float, Clock]:
    """Read a time, and say of what kind it is: a number, milliseconds without a unit, or a date.

    Args:
        cell: The text.
        scale: Seconds of the unit; None if there is none.
        where: For errors.
        clock: What a number without a unit is.
    """
    if _is_number(cell):
        seconds = float(cell) * (1e-3 if scale is None else scale)
        if not math.isfinite(seconds):
            _fail(where, f"a time must be finite, got {_cut(cell)}")
        return seconds, clock if scale is None else "unit"
    stamp = cell.strip().replace("/", "-")
    stamp = f"{stamp[:-1]}+00:00" if stamp.endswith(("Z", "z")) else stamp
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        _fail(
            where,
            f"{_shown(cell)} is no time; expected milliseconds or YYYY-MM-DD HH:MM:SS (or a header: time_s,count)",
        )
    # Naive stamps are differences within one file only; any fixed zone serves.
    return (moment - datetime(1970, 1, 1, tzinfo=moment.tzinfo)).total_seconds(), "date"


def _counted(at_s: float, clock: Clock, cell: str, where: str, until_s: float | None) -> Row:
    if cell.lower() in ("", "nan", "null", "none", "na", "n/a", "-"):
        return Row(at_s, where, is_gap=True, until_s=until_s, clock=clock)
    try:
        value = float(cell)
    except ValueError:
        _fail(where, f"{_shown(cell)} is no count of instances")
    if not (math.isfinite(value) and value >= 0 and value == int(value)):
        _fail(where, f"a count of instances must be a whole number of at least 0, got {_cut(cell)}")
    if value > _MOST_INSTANCES:
        _fail(where, f"{_cut(cell)} instances are more than the {_MOST_INSTANCES} that are taken; is it a time?")
    return Row(at_s, where, count=int(value), until_s=until_s, clock=clock)


def _event(at_s: float, clock: Clock, operation: str, names: Sequence[str], where: str) -> Row:
    kind = _OPERATIONS.get(operation.lower())
    if kind is None:
        _fail(where, f"{_shown(operation)} is no event; expected add or remove")
    if kind != "none" and not names:
        _fail(where, f"{operation} names no instance")
    return Row(
        at_s,
        where,
        add=tuple(names) if kind == "add" else (),
        remove=tuple(names) if kind == "remove" else (),
        until_s=at_s if operation.lower() == "done" else None,
        clock=clock,
    )


def _fail(where: str, what: str) -> NoReturn:
    raise ValueError(f"{where}: {what}")
