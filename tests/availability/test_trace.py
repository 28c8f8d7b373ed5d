"""Availability traces: every format, order, gaps, resampling, slices, events, errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lightning_parcae.availability import trace_formats
from lightning_parcae.availability.trace import AvailabilityTrace

DATA = Path("/work/shared/data")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data folder is not here")

COUNTS = [2, 2, 3, 1]
SAME_TRACE = {
    "counts after each change": "0,1\n0,2\n120000,3\n180000,2\n180000,1\n",
    "counts out of order": "180000,1\n0,2\n120000,3\n",
    "counts with a byte-order mark and comments": "\ufeff# a trace\n0,2 # two\n\n120000, 3\r\n180000 ,1\r\n",
    "semicolons": "0;2\n120000;3\n180000;1\n",
    "named events": "0,add,a\n0,add,b\n120000,add,c\n180000,remove,a\n180000,remove,c\n",
    "named events, several per line": "0,add,a,b\n120000,add,c\n180000,remove,a,c\n",
    "dates": "2021-12-10, 13:00:00, 2\n2021-12-10, 13:03:00, 1\n2021-12-10, 13:02:00, 3\n",
    "ISO time stamps": "2021-12-10T13:00:00Z,2\n2021-12-10T13:02:00Z,3\n2021-12-10T13:03:00Z,1\n",
    "header in seconds": "time_s,count\n0,2\n120,3\n180,1\n",
    "header in minutes, other order": "count,time_min\n2,0\n3,2\n1,3\n",
    "header with unix seconds": "timestamp_s,instances\n1700000000,2\n1700000120,3\n1700000180,1\n",
    "header with date and time": "date,time,available\n2021-12-10,13:00:00,2\n2021-12-10,13:02:00,3\n"
    "2021-12-10,13:03:00,1\n",
    "header of events": "time_s,event,node\n0,add,a\n0,add,b\n120,add,c\n180,preempt,c\n180,preempt,a\n",
    "header in milliseconds": "ms,count\n0,2\n120000,3\n180000,1\n",
    "counts among which nothing happens": "0,2\n60000,no-op\n120000,3\n180000,1\n",
    "one count per line": "2\n2\n3\n1\n",
    "one count per line under a header": "count\n2\n2\n3\n1\n",
    "one count per line with a gap": "2\nnan\n3\n1\n",
    "trailing commas": "0,2,\n120000,3,\n180000,1,\n",
    "trailing commas under a header": "time_s,count,\n0,2,\n120,3,\n180,1,\n",
    "columns of spaces": "0    2\n120000 3\n180000 1\n",
    "tabs": "0\t2\n120000\t3\n180000\t1\n",
    "semicolons under a header": "time_s;count\n0;2\n120;3\n180;1\n",
    "quotes": '"time_s","count"\n"0","2"\n"120","3"\n"180","1"\n',
    "whole numbers with a point": "0,2.0\n120000,3.0\n180000,1.0\n",
    "header without a unit, in seconds": "time,count\n0,2\n60,2\n120,3\n180,1\n",
    "header without a unit, in milliseconds": "time,count\n0,2\n120000,3\n180000,1\n",
    "each second, without a header": "".join(f"{t},{2 if t < 120 else 3 if t < 180 else 1}\n" for t in range(181)),
    "unix seconds": "1700000000,2\n1700000120,3\n1700000180,1\n",
    "unix milliseconds": "1700000000000,2\n1700000120000,3\n1700000180000,1\n",
    "unix microseconds": "1700000000000000,2\n1700000120000000,3\n1700000180000000,1\n",
    "unix nanoseconds": "1700000000000000000,2\n1700000120000000000,3\n1700000180000000000,1\n",
    "header with unix seconds and no unit": "timestamp,instances\n1700000000,2\n1700000120,3\n1700000180,1\n",
    "header in nanoseconds": "time_ns,count\n0,2\n120000000000,3\n180000000000,1\n",
    "header with an ISO stamp": "datetime,num_instances\n2021-12-10T13:00:00+01:00,2\n2021-12-10T13:02:00+01:00,3\n"
    "2021-12-10T13:03:00+01:00,1\n",
    "more columns than needed": "timestamp,zone,count\n2021-12-10 13:00,a,2\n2021-12-10 13:02,a,3\n"
    "2021-12-10 13:03,a,1\n",
    "JSON counts": "[2, 2, 3, 1]",
    "JSON records in lines": '{"timestamp": "2021-12-10T13:00:00Z", "available": 2}\n'
    '{"timestamp": "2021-12-10T13:02:00Z", "available": 3}\n{"timestamp": "2021-12-10T13:03:00Z", "available": 1}\n',
    "JSON object with times": '{"times_s": [0, 120, 180], "counts": [2, 3, 1]}',
    "JSON object with time stamps": '{"timestamps": ["2021-12-10 13:00", "2021-12-10 13:02", "2021-12-10 13:03"],'
    '"counts": [2, 3, 1]}',
    "JSON object with an interval in words": '{"interval": "1 min", "counts": [2, 2, 3, 1]}',
    "JSON counts with a gap": "[2, null, 3, 1]",
    "JSON pairs": "[[0, 2], [120000, 3], [180000, 1]]",
    "JSON records": '[{"time_s": 0, "count": 2}, {"time_s": 120, "count": 3}, {"time_s": 180, "count": 1}]',
    "JSON object": '{"N": [2, 2, 3, 1]}',
    "JSON object with metadata": '{"metadata": {"gap_seconds": 60}, "data": [2, 2, 3, 1]}',
    "JSON lines of events": '[0, "add", {"nodes": ["a", "b"]}]\n[60000, "no-op", {"nodes": []}]\n'
    '[120000, "add", {"nodes": ["c"]}]\n[180000, "remove", {"nodes": ["a", "c"], "duration": 60000}]\n',
    "JSON array of events": '[[0, "add", {"nodes": ["a", "b"]}], [120000, "add", {"nodes": ["c"]}],'
    '[180000, "remove", {"nodes": ["a", "b"]}], [240000, "DONE", {"nodes": []}]]',
    "reference plans": json.dumps([{"interval": [0, 2, 0]}, {"interval": [2, 0, 0]}, {"interval": [2, 1, 0]}])[:-1]
    + ', {"interval": [3, 0, 2], "duration": 60000, "liveput-truth": [1, 1]}]',
}


@pytest.mark.parametrize("name", SAME_TRACE)
def test_every_format_gives_the_same_trace(name: str) -> None:
    trace = AvailabilityTrace.parse(SAME_TRACE[name])
    assert trace.resample(60.0).tolist() == COUNTS
    assert trace.end_s == 240.0
    assert trace.capacity == 3


def test_interval_of_a_json_object_is_obeyed() -> None:
    trace = AvailabilityTrace.parse('{"counts": [4, 5], "interval_s": 300}')
    assert trace.end_s == 600.0
    assert trace.resample(300.0).tolist() == [4, 5]
    assert AvailabilityTrace.parse('{"counts": [4, 5], "gap_ms": 30000}').end_s == 60.0


def test_gaps_are_remembered_and_filled_with_the_last_known_count() -> None:
    trace = AvailabilityTrace.parse("time_s,count\n0,\n60,4\n120,nan\n240,6\n300,null\n")
    assert trace.resample(60.0).tolist() == [4, 4, 4, 4, 6, 6]
    assert trace.gaps_s == ((0.0, 60.0), (120.0, 240.0), (300.0, 360.0))
    assert trace.statistics().gap_s == 240.0
    assert trace.slice(180.0, 330.0).gaps_s == ((0.0, 60.0), (120.0, 150.0))


def test_resampling_by_start_and_by_minimum() -> None:
    trace = AvailabilityTrace.parse("time_s,count\n0,5\n70,2\n100,4\n120,6\n", interval_s=60.0)
    assert trace.resample(60.0).tolist() == [5, 5, 6]
    assert trace.resample(60.0, how="min").tolist() == [5, 2, 6]
    assert trace.resample(1000.0, how="min").tolist() == [2]
    assert [trace.count_at(time) for time in (0, 69.9, 70, 1e9)] == [5, 5, 2, 6]
    with pytest.raises(ValueError, match="'start' or 'min'"):
        trace.resample(60.0, how="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="above 0 s"):
        trace.resample(0.0)


@pytest.mark.parametrize(
    "text", [SAME_TRACE["named events"], SAME_TRACE["JSON counts"], "time_s,count\n0,5\n70,2\n100,4\n"]
)
@pytest.mark.parametrize("interval_s", [7.0, 60.0, 100.0])
def test_allocations_and_preemptions_chain(text: str, interval_s: float) -> None:
    trace = AvailabilityTrace.parse(text)
    come, go = trace.allocations_and_preemptions(interval_s)
    assert (np.cumsum(come - go) == trace.resample(interval_s)).all()


def test_slice_starts_with_everyone_alive() -> None:
    trace = AvailabilityTrace.parse(SAME_TRACE["named events"])
    part = trace.slice(120.0, 240.0)
    assert part.resample(60.0).tolist() == [3, 1]
    assert part.events() == ((0.0, {"add": ["a", "b", "c"]}), (60.0, {"remove": ["a", "c"]}))
    assert part.end_s == 120.0
    assert trace.slice(200.0, 240.0).events() == ((0.0, {"add": ["b"]}),)
    for start, end in ((0.0, 241.0), (-1.0, 10.0), (30.0, 30.0)):
        with pytest.raises(ValueError, match="cannot cut"):
            trace.slice(start, end)


def test_slice_of_counts() -> None:
    part = AvailabilityTrace.parse("[2, 2, 3, 1]").slice(90.0, 190.0)
    assert (part.times_s, part.counts) == ((0.0, 30.0, 90.0), (2, 3, 1))


def test_events_of_named_trace_are_those_of_the_file() -> None:
    assert AvailabilityTrace.parse(SAME_TRACE["named events"]).events() == (
        (0.0, {"add": ["a", "b"]}),
        (120.0, {"add": ["c"]}),
        (180.0, {"remove": ["a", "c"]}),
    )


def test_events_of_counts_are_made_up_but_consistent_and_seeded() -> None:
    trace = AvailabilityTrace.from_counts([5, 3, 6, 0, 2])
    alive: set[str] = set()
    ever: set[str] = set()
    for time_s, change in trace.events(seed=3):
        added, removed = set(change.get("add", ())), set(change.get("remove", ()))
        assert removed <= alive
        assert not added & ever
        alive = alive - removed | added
        ever |= added
        assert len(alive) == trace.count_at(time_s)
    assert trace.events(seed=3) == trace.events(seed=3)
    assert len({str(trace.events(seed=seed)) for seed in range(8)}) > 1


def test_from_events_round_trip() -> None:
    trace = AvailabilityTrace.parse(SAME_TRACE["named events"])
    again = AvailabilityTrace.from_events(trace.events(), end_s=trace.end_s)
    assert again.events() == trace.events()
    assert again.resample(60.0).tolist() == COUNTS
    with pytest.raises(ValueError, match="before its last event"):
        AvailabilityTrace.from_events(trace.events(), end_s=10.0)
    empty = AvailabilityTrace.from_events([], end_s=60.0)
    assert empty.resample(60.0).tolist() == [0]


def test_an_instance_that_comes_and_goes_at_once_is_no_event() -> None:
    trace = AvailabilityTrace.parse("0,add,a\n60000,add,b\n60000,remove,b\n")
    assert trace.events() == ((0.0, {"add": ["a"]}),)


def test_a_trace_that_begins_late_begins_with_nobody() -> None:
    assert AvailabilityTrace.parse("120000,add,a\n").resample(60.0).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f: the file is empty"),
        ("# only a comment\n", "f: no rows found"),
        ("[]", "f: no rows found"),
        ("0,3\nsoon,4\n", "f:2: 'soon' is no time"),
        ("0,3\n1,many\n", "f:2: 'many' is no count"),
        ("0,3\n\n1,-4\n", "f:3: a count of instances must be a whole number of at least 0, got -4"),
        ("0,2.5\n", "f:1: a count of instances must be a whole number"),
        ("-5,3\n", "f:1: a time cannot be negative"),
        ("inf,3\n", "f:1: a time must be finite"),
        ("0,add,a\n0,explode,b\n", "f:2: '0, explode, b' is neither"),
        ("0,add,a\n60,add,a\n", "f:2: adds a, which is there already"),
        ("0,add,a\n60000,remove,b\n", "f:2: removes b, which is not there at 60 s"),
        ("0,add\n", "f:1: add names no instance"),
        ("0,add,a\n60,3\n", "f:2: a count among events"),
        ("time_s,colour\n0,red\n", "f:2: no count among the columns time_s, colour"),
        ("time_s,count\n0,3,4\n", "f:2: 3 cells under 2 columns"),
        ("count,time_s\n3\n", "f:2: the time is missing"),
        ("time_s,event,node\n0,explode,a\n", "f:2: 'explode' is no event"),
        ("nan\nnan\n", "f: every count is missing"),
        ("0,1000000000\n", "f:1: 1000000000 instances are more than the 100000 that are taken; is it a time"),
        ("0,1e300\n", "f:1: 1e300 instances are more"),
        ("0,inf\n", "f:1: a count of instances must be a whole number of at least 0, got inf"),
        ("[1, Infinity]", "f: item 1: a count of instances must be a whole number of at least 0, got inf"),
        ("nan,3\n", "f:1: a time must be finite, got nan"),
        ("0,3\n60000000000,4\n", "f: the trace would last 694 days, at most 400 are taken; name the unit in a header"),
        ("time_s,count\n0,3\n9e8,4\n", "f: the trace would last 1.04e.04 days, at most 400 are taken$"),
        ("2021-12-10 13:00,5\n60000,4\n", "f:2: times of another kind than in the rows before"),
        ("10/12/2021 13:00,5\n", "f:1: '10/12/2021 13:00' is no time; expected milliseconds or YYYY"),
        ("when,how many\n0,5\n", "f:1: 'when' is no time; .* header: time_s,count"),
        ("1" * 5000, r"f:1: a count of instances .* got 1{57}\.\.\.$"),
        ("[" * 100_000, "f:1: not JSON: nested too deeply"),
        ('{"metadata": {"gap_seconds": 300}, "data": [1, 2', "f:1: not JSON"),
        ('{"counts": [1], "interval": "soon"}', "f: interval: 'soon' is no interval"),
        ('{"counts": [1, 2], "times_s": [0]}', "f: 1 values under 'times_s' for 2 counts"),
        ('{"models": {}}', "keys models; .* this looks like a profile of a model"),
        ('{"format": "lightning_parcae/profile/1"}', "keys format; .* this looks like a profile of a model"),
        ("[true]", "f: item 0: 'True' is no count"),
        ("a b c\n", "f:1: 'a b' is no time"),
        ("1,2,3,4\n", "f:1: '1, 2, 3, 4' is neither"),
        ('[0, "add", {"nodes": ["a"]}]\n[60000, "add", \n', "f:2: not JSON"),
        ('[0, "add", {"nodes": "a"}]', "f:1: .* should be an object with a list of nodes"),
        ("[1, 2", "f:1: not JSON"),
        ('{"colour": 3}', "f: no list of counts among the keys colour"),
        ('{"counts": [1], "interval_s": 0}', "the interval must be above 0 s"),
        ('[1, "two", 3, 4]', "f: item 1: 'two' is no count"),
        ('[{"interval": [1, 2]}]', "f: item 0: 'interval' should be"),
        ("[1, -2]", "f: item 1: a count of instances must be"),
    ],
)
def test_errors_name_file_line_and_fault(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AvailabilityTrace.parse(text, source="f")


def test_read_errors_carry_the_path(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"0,3\n\xff\xfe,4\n")
    with pytest.raises(ValueError, match=r"trace\.csv: not a text file"):
        AvailabilityTrace.read(path)
    path.write_text("0,3\nx,4\n")
    with pytest.raises(ValueError, match=r"trace\.csv:2: 'x' is no time"):
        AvailabilityTrace.read(path)
    with pytest.raises(FileNotFoundError):
        AvailabilityTrace.read(tmp_path / "none.csv")


def test_read_refuses_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a folder, not a trace file"):
        AvailabilityTrace.read(tmp_path)


def test_skypilots_spot_traces_hold_available_instances() -> None:
    trace = AvailabilityTrace.parse('{"metadata": {"gap_seconds": 300}, "data": [0, 5, 16, 16, 0]}')
    assert trace.resample(300.0).tolist() == [0, 5, 16, 16, 0]
    assert trace.end_s == 1500.0


LONG = np.random.default_rng(0).integers(0, 50, size=3_000).tolist()
LONG_TEXTS: dict[str, str] = {
    "counts": "\n".join(map(str, LONG)),
    "counts under a header": "count\n" + "\n".join(map(str, LONG)),
    "time and count": "\n".join(f"{60_000 * at},{count}" for at, count in enumerate(LONG)),
    "out of order": "\n".join(f"{60_000 * at},{count}" for at, count in reversed(list(enumerate(LONG)))),
    "header": "count;time_s\n\n" + "\n".join(f"{count};{60 * at}" for at, count in enumerate(LONG)),
    "spaces": "\n".join(f"{60_000 * at}   {count}" for at, count in enumerate(LONG)),
    "unix seconds": "\n".join(f"{1_700_000_000 + 60 * at},{count}" for at, count in enumerate(LONG)),
    "gaps": "\n".join(f"{60_000 * at},{count if count else 'nan'}" for at, count in enumerate(LONG)),
    "JSON": json.dumps([count if count else None for count in LONG] * 2),
    "JSON object": json.dumps({"interval_s": 60, "data": LONG * 2}),
}


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_long_files_are_read_at_once_and_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = AvailabilityTrace.parse(LONG_TEXTS[name], source="f")
    monkeypatch.setattr(trace_formats, "_BULK_CHARS", 1_000)
    monkeypatch.setattr(trace_formats, "_ordered", pytest.fail)
    assert AvailabilityTrace.parse(LONG_TEXTS[name], source="f") == slow
    assert len(slow.counts) > 2_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time_s,count\n# note\n" + "0,5\n" * 60_000 + "\n9,-4\n", "f:60004: a count of instances must .* got -4"),
        ("0,5\n" * 60_000 + "nan,4\n", "f:60001: a time must be finite"),
        ("5\n" * 150_000 + "2000000\n", "f:150001: 2000000 instances are more than"),
        ("0,5\n" * 60_000 + "-1,4\n", "f:60001: a time cannot be negative"),
        (json.dumps([5] * 100_000 + [-1]), "f: item 100000: a count of instances must be"),
    ],
)
def test_faults_in_long_files(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AvailabilityTrace.parse(text, source="f")


def test_dates_are_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_formats, "_MOST_ROWS", 100)
    assert AvailabilityTrace.parse("2021-12-10 13:00,5\n" * 100).capacity == 5
    with pytest.raises(ValueError, match="f: more than 100 rows; so many are taken only if each is a plain count"):
        AvailabilityTrace.parse("2021-12-10 13:00,5\n" * 101, source="f")


@pytest.mark.parametrize("counts", [[], [3, -1]])
def test_from_counts_refuses_nonsense(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one count and none below 0"):
        AvailabilityTrace.from_counts(counts)


@needs_data
@pytest.mark.parametrize("name", ["p3_counts.csv", "p3_events.csv", "trace_stats.json"])
def test_the_papers_trace_has_the_papers_numbers(name: str) -> None:
    trace = AvailabilityTrace.read(DATA / "parcae" / name)
    stats = json.loads((DATA / "parcae" / "trace_stats.json").read_text())
    assert trace.resample(60.0).tolist() == stats["N"]
    numbers = trace.statistics()
    assert (numbers.num_intervals, numbers.min_instances, numbers.max_instances) == (683, 10, 32)
    assert (numbers.num_allocated, numbers.num_preempted) == (177 - 18, 167)
    assert (numbers.allocation_intervals, numbers.preemption_intervals) == (83, 79)
    assert numbers.mean_instances == pytest.approx(24.01, abs=0.005)
    assert numbers.instance_hours == pytest.approx(273, abs=0.5)
    assert numbers.median_lifetime_s in (None, 59 * 60)


@needs_data
@pytest.mark.parametrize("model", ["gpt-1.5b", "resnet152"])
@pytest.mark.parametrize(
    ("segment", "start"), [("hh_55_65", 330), ("hl_15_25", 90), ("lh_80_90", 480), ("ll_10_11", 600)]
)
def test_segments_are_slices_of_the_whole_trace(model: str, segment: str, start: int) -> None:
    part = AvailabilityTrace.read(DATA / "parcae" / "segments" / model / f"trace_{segment}.txt")
    whole = next((DATA / "parcae" / "reference_plans").glob(f"{model}*.json"))
    cut = AvailabilityTrace.read(whole).slice(start * 60.0, (start + 60) * 60.0)
    assert part.resample(60.0).tolist() == cut.resample(60.0).tolist()
    assert len(part.resample(60.0)) == 60


@needs_data
@pytest.mark.parametrize(
    ("name", "intervals", "low", "high"),
    [
        ("bamboo/v100x1-east1c.txt", 1452, 30, 80),
        ("bamboo/a100x1-east1b.txt", 1623, 17, 64),
        ("bamboo/g4dn-trace.csv", 647, 0, 24),
        ("spotserve/trace_0203_real.txt", 12, 6, 10),
        ("spotserve/trace_0506_real.txt", 17, 7, 10),
    ],
)
def test_other_public_traces_read(name: str, intervals: int, low: int, high: int) -> None:
    trace = AvailabilityTrace.read(DATA / name)
    numbers = trace.statistics(60.0)
    assert (numbers.num_intervals, numbers.min_instances, numbers.max_instances) == (intervals, low, high)
    assert list(trace.times_s) == sorted(trace.times_s)
    final = sum(len(change.get("add", ())) - len(change.get("remove", ())) for _, change in trace.events())
    assert final == trace.counts[-1]
