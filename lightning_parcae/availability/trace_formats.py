"""Reading availability traces: the format is found by looking at the content.

Read are, each also with blank lines, comments (``#``), a byte-order mark and rows out of order:

* ``time_ms,count``: instances alive after a change.
* ``time_ms,add|remove,name[,name...]``: who comes and goes.
* ``YYYY-MM-DD, HH:MM:SS, count`` (or one ISO time stamp): samples; times count from the first one.
* the three above under a header row, which names the columns and with a suffix the unit: ``time_s,count``.
* one count per line, one line per interval; an empty cell, ``nan`` or ``null`` is a gap.
* JSON: a list of counts (``null`` is a gap), of ``[time_ms, count]`` pairs, of ``[time_ms, "add", {"nodes": [...]}]``
  rows or of ``{"interval": [before, in, out]}`` plans; the rows also one per line; or an object that holds counts under
  ``counts``, ``N``, ``data`` or ``availability`` and says the interval (``interval_s``, ``gap_seconds``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

_OPERATIONS = {
    **dict.fromkeys(("add", "allocate", "allocation", "join"), "add"),
    **dict.fromkeys(("remove", "preempt", "preemption", "leave"), "remove"),
    **dict.fromkeys(("no-op", "noop", "migration", "done"), "none"),
}
_SECONDS_PER_UNIT = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0, "min": 60.0, "minutes": 60.0, "h": 3600.0}
_TIME_COLUMNS = ("time", "timestamp", "t", "date", "datetime", "elapsed", "seconds", "minutes", "ms")
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
_UNIX_TIME_S = 1e8  # a first time stamp beyond three years counts from 1970, not from the start of the trace


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
    """

    time_s: float
    where: str
    count: int | None = None
    is_gap: bool = False
    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    until_s: float | None = None


@dataclass(slots=True)
class Rows:
    """The rows of a trace in order of time.

    Attributes:
        rows: At least one.
        is_named: Whether the rows are events with names rather than counts.
        end_s: End of the trace where it says so, else None.
    """

    rows: list[Row] = field(default_factory=list)
    is_named: bool = False
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
    read = _json_rows if text.lstrip()[0] in "[{" else _table_rows
    rows = list(read(text, source, interval_s))
    if not rows:
        raise ValueError(f"{source}: no rows found; a trace needs at least one")
    return _ordered(rows, source)


def _ordered(rows: list[Row], source: str) -> Rows:
    named = [row for row in rows if row.count is None and not row.is_gap]
    counted = [row for row in rows if row.count is not None or row.is_gap]
    if counted and any(row.add or row.remove for row in named):
        raise ValueError(
            f"{counted[0].where}: a count among events; a trace holds either counts or add and remove rows"
        )
    ends = [row.until_s for row in rows if row.until_s is not None]
    rows = sorted(rows, key=lambda row: row.time_s)  # stable: of equal times, the later line wins
    first = rows[0].time_s
    if first > _UNIX_TIME_S:
        ends = [end - first for end in ends]
        for row in rows:
            row.time_s -= first
    elif first < 0:
        raise ValueError(f"{rows[0].where}: a time cannot be negative, got {first:g} s")
    if counted and all(row.is_gap for row in counted):
        raise ValueError(f"{source}: every count is missing")
    last = rows[-1].time_s
    return Rows(rows=rows, is_named=not counted, end_s=max(ends) if ends and max(ends) >= last else None)


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
    delimiter = next((mark for mark in (",", ";", "\t") if mark in line), None)
    cells = [cell.strip() for cell in line.strip("\r\n").split(delimiter)]
    return [cell.strip("\"'") for cell in cells]


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
    if times:
        stamp = " ".join(cells[index] for index in times)
        unit = next((scale for index, (_, scale) in enumerate(stems) if index in times and scale is not None), None)
        at_s = _seconds(stamp, unit, where)
    else:
        until_s = at_s + interval_s
    operation = next((index for index, name in enumerate(header) if name in _OPERATION_COLUMNS), None)
    if operation is not None and operation < len(cells):
        first = next((index for index, name in enumerate(header) if name in _NAME_COLUMNS), operation + 1)
        return _event(at_s, cells[operation], [cell for cell in cells[first:] if cell], where)
    count = next((index for index, name in enumerate(header) if name in _COUNT_COLUMNS), None)
    if count is None:
        _fail(where, f"no count among the columns {', '.join(header)}; name one of them 'count'")
    value = cells[count] if count < len(cells) else ""
    return _counted(at_s, value, where, until_s)


def _bare_row(cells: Sequence[str], where: str, at_s: float, interval_s: float) -> Row:
    if len(cells) == 1:
        return _counted(at_s, cells[0], where, at_s + interval_s)
    if len(cells) >= 2 and cells[1].lower() in _OPERATIONS:
        return _event(_seconds(cells[0], None, where), cells[1], [cell for cell in cells[2:] if cell], where)
    if len(cells) == 2:
        return _counted(_seconds(cells[0], None, where), cells[1], where, None)
    if len(cells) == 3 and not _is_number(cells[0]):
        return _counted(_seconds(f"{cells[0]} {cells[1]}", None, where), cells[2], where, None)
    return _fail(
        where,
        f"{', '.join(cells)!r} is neither 'time_ms, count' nor 'time_ms, add|remove, name' nor 'date, time, count'",
    )


# --- JSON -------------------------------------------------------------------------------------------------------------


def _json_rows(text: str, source: str, interval_s: float) -> Iterator[Row]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
        try:
            json.loads(lines[0][1])
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


def _json_lines(lines: Sequence[tuple[int, str]], source: str, interval_s: float) -> Iterator[Row]:
    for index, (number, line) in enumerate(lines):
        where = f"{source}:{number}"
        try:
            value = json.loads(line)
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
        return _counted(_seconds(str(value[0]), None, where), _json_text(value[1]), where, None)
    if isinstance(value, dict) and "interval" in value:
        return _json_plan(value, where, at_s)
    if isinstance(value, dict):
        return _row_under_header(
            [_column(key) for key in value], [_json_text(cell) for cell in value.values()], where, at_s, interval_s
        )
    if value is None or isinstance(value, (int, float)):
        return _counted(at_s, _json_text(value), where, at_s + interval_s)
    return _fail(where, f"{value!r} is no count, no [time_ms, count] and no [time_ms, 'add', {{'nodes': [...]}}]")


def _json_event(value: Sequence[Any], where: str) -> Row:
    details = value[2] if len(value) > 2 else {}
    if not isinstance(details, dict) or not isinstance(details.get("nodes", []), list):
        _fail(where, f"{details!r} should be an object with a list of nodes")
    at_s = _seconds(str(value[0]), None, where)
    row = _event(at_s, str(value[1]), [str(name) for name in details.get("nodes", [])], where)
    if "duration" in details:
        row.until_s = at_s + _seconds(str(details["duration"]), None, where)
    elif str(value[1]).lower() == "done":
        row.until_s = at_s
    return row


def _json_plan(value: Mapping[str, Any], where: str, at_s: float) -> Row:
    interval = value["interval"]
    if not (isinstance(interval, list) and len(interval) == 3 and all(isinstance(item, int) for item in interval)):
        _fail(where, f"'interval' should be [instances before, in, out], got {interval!r}")
    before, come, go = interval
    until_s = at_s + _seconds(str(value.get("duration", 60_000)), None, where)
    return _counted(at_s, str(before + come - go), where, until_s)


def _json_object(value: Mapping[str, Any], source: str, interval_s: float) -> Iterator[Row]:
    counts = next((value[key] for key in _COUNT_KEYS if isinstance(value.get(key), list)), None)
    if counts is None:
        _fail(source, f"no list of counts among the keys {', '.join(value)}; expected one of {', '.join(_COUNT_KEYS)}")
    metadata = value.get("metadata")
    for part in (metadata if isinstance(metadata, dict) else {}, value):
        for key, scale in _INTERVAL_KEYS.items():
            if isinstance(part.get(key), (int, float)):
                interval_s = float(part[key]) * scale
    if not (math.isfinite(interval_s) and interval_s > 0):
        _fail(source, f"the interval must be above 0 s, got {interval_s:g}")
    yield from _json_items(counts, source, interval_s)


# --- cells ------------------------------------------------------------------------------------------------------------


def _json_text(value: Any) -> str:
    return "" if value is None else str(value)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _seconds(cell: str, scale: float | None, where: str) -> float:
    """Read a time: a number (milliseconds unless the header says otherwise) or a time stamp."""
    if _is_number(cell):
        seconds = float(cell) * (1e-3 if scale is None else scale)
        if not math.isfinite(seconds):
            _fail(where, f"a time must be finite, got {cell!r}")
        return seconds
    stamp = cell.strip().replace("/", "-")
    stamp = f"{stamp[:-1]}+00:00" if stamp.endswith(("Z", "z")) else stamp
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        _fail(where, f"{cell!r} is no time; expected milliseconds or YYYY-MM-DD HH:MM:SS")
    # Naive stamps are differences within one file only; any fixed zone serves.
    return (moment - datetime(1970, 1, 1, tzinfo=moment.tzinfo)).total_seconds()


def _counted(at_s: float, cell: str, where: str, until_s: float | None) -> Row:
    if cell == "" or cell.lower() in ("nan", "null", "none", "na", "n/a", "-"):
        return Row(at_s, where, is_gap=True, until_s=until_s)
    try:
        value = float(cell)
    except ValueError:
        _fail(where, f"{cell!r} is no count of instances")
    if value < 0 or value != int(value):
        _fail(where, f"a count of instances must be a whole number of at least 0, got {cell}")
    return Row(at_s, where, count=int(value), until_s=until_s)


def _event(at_s: float, operation: str, names: Sequence[str], where: str) -> Row:
    kind = _OPERATIONS.get(operation.lower())
    if kind is None:
        _fail(where, f"{operation!r} is no event; expected add or remove")
    if kind != "none" and not names:
        _fail(where, f"{operation} names no instance")
    return Row(
        at_s,
        where,
        add=tuple(names) if kind == "add" else (),
        remove=tuple(names) if kind == "remove" else (),
        until_s=at_s if operation.lower() == "done" else None,
    )


def _fail(where: str, what: str) -> NoReturn:
    raise ValueError(f"{where}: {what}")
