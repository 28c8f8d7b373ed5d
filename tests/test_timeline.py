"""The state of a job, and what people are told, from the coordinator's own records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_parcae.report import RunReport
from lightning_parcae.sharding.ledger import CommitRecord
from lightning_parcae.timeline import JobView, read_timeline


def _layout(generation: int, grid: list[list[str]], order: list[str] | None = None) -> dict[str, Any]:
    stages = len(grid[0])
    names = [name for row in grid for name in row] if order is None else order
    return {"generation": generation, "grid": grid, "order": names, "boundaries": [*range(stages), 6]}


def _generation(
    generation: int, grid: list[list[str]], *, urgent: bool, reason: str, **more: Any
) -> list[dict[str, Any]]:
    committed = {"kind": "inter_stage", "fresh": [], "reason": reason, **more}
    formed = {"kind": committed["kind"], "pause_s": 0.1 * generation, "bytes_moved": 2000}
    return [
        {"event": "prepared", "generation": generation, "urgent": urgent, "members": [], "reason": reason},
        {"event": "committed", "generation": generation, "layout": _layout(generation, grid), **committed},
        {"event": "formed", "generation": generation, "config": [len(grid), len(grid[0])], **formed},
    ]


_EVENTS: list[dict[str, Any]] = [
    *({"event": "connected", "instance": f"i{index}"} for index in range(4)),
    *({"event": "ready", "instance": f"i{index}"} for index in range(4)),
    *_generation(1, [["i0", "i1"], ["i2", "i3"]], urgent=False, reason="4 instances are ready", kind="initial"),
    {"event": "progress", "step": 7},
    {"event": "died", "instance": "i0", "reason": "its connection was closed", "step": 7},
    *_generation(2, [["i1", "i2"]], urgent=True, reason="i0: its connection was closed"),
    {"event": "connected", "instance": "i4"},
    {"event": "ready", "instance": "i4"},
    *_generation(3, [["i1", "i2"], ["i3", "i4"]], urgent=False, reason="4 instances can run", fresh=["i4"]),
    {"event": "notice", "instance": "i2", "grace_s": 30.0},
    *_generation(4, [["i1", "i4"]], urgent=False, reason="i2 will be taken away"),
    {"event": "released", "instance": "i2", "reason": "the hand-over is done"},
    {"event": "left", "instance": "i2", "reason": "it said goodbye"},
    {"event": "died", "instance": "i4", "reason": "nothing was heard from it for 4.1 s", "step": 9},
    *_generation(5, [["i1", "i3"]], urgent=True, reason="i4: nothing was heard"),
    *_generation(6, [["i1", "i3"]], urgent=True, reason="communication failed"),
    {"event": "progress", "step": 11},
    {"event": "done", "generation": 6, "step": 12},
]


def test_a_job_from_start_to_end() -> None:
    view = JobView()
    lines = [line.text for line in (view.take({"time": 1.0, **event}) for event in _EVENTS) if line is not None]
    assert [change.cause for change in view.reconfigurations] == ["start", "death", "join", "notice", "hang", "link"]
    assert (view.rank0, view.step, view.is_finished, view.stop) == ("i1", 12, True, None)
    assert (view.ready, view.dead, view.spares) == ({"i1", "i3"}, {"i0", "i4"}, set())
    assert lines[:4] == [
        "generation 1: 2x2 on i0 i1 i2 i3",
        "i0 died: its connection was closed",
        "rank 0 moves from i0 to i1",
        "generation 2: 1x2 on i1 i2, spare i3; pause 0.20 s, 2.0 kB moved (i0: its connection was closed)",
    ]
    assert view.summary() == "finished at step 12 after 5 reconfiguration(s), longest pause 0.60 s"


def test_a_job_is_unsettled_while_something_will_change() -> None:
    view = JobView()
    settled = []
    for event in _EVENTS[8:22]:
        view.take({"time": 1.0, **event})
        settled.append((event["event"], view.is_settled))
    changes = [
        pair for pair, before in zip(settled, [None, *settled], strict=False) if before is None or pair[1] != before[1]
    ]
    assert changes == [
        ("prepared", False),
        ("formed", True),
        ("died", False),
        ("formed", True),
        ("prepared", False),
        ("formed", True),
        ("notice", False),
    ]


def test_a_failure_carries_its_traceback() -> None:
    view = JobView()
    view.take({"event": "failed", "instance": "i1", "step": 3, "error": "ValueError: no", "traceback": "Traceback ..."})
    view.take({"event": "stopped", "graceful": False, "reason": "i1 failed at step 3: no", "exit_code": 1})
    assert view.stop is not None
    assert (view.stop.traceback, view.stop.exit_code, view.is_finished) == ("Traceback ...", 1, False)


def test_a_report_reads_what_a_killed_writer_left(tmp_path: Path) -> None:
    text = "".join(json.dumps({"time": 100.0 + index, **event}) + "\n" for index, event in enumerate(_EVENTS))
    (tmp_path / "timeline.jsonl").write_text(text + '{"time": 1')
    (tmp_path / "commits").mkdir()
    for name in ("i1", "i3"):
        records = [CommitRecord(step, 0, step, (2 * step, 2 * step + 1)).to_json() + "\n" for step in range(3)]
        (tmp_path / "commits" / f"{name}.jsonl").write_text("".join(records))
    report = RunReport.read(tmp_path, samples_per_epoch=8)
    assert report.layouts == ["2x2", "1x2", "2x2", "1x2"]
    assert {item.cause: item.max_s for item in report.pauses}["hang"] == pytest.approx(0.5)
    (epoch,) = report.epochs
    assert (epoch.num_committed, len(epoch.left), epoch.is_exact) == (6, 2, True)
    values = report.to_json()
    assert json.loads(json.dumps(values)) == values
    report.show()


def test_a_damaged_timeline_is_refused(tmp_path: Path) -> None:
    (tmp_path / "timeline.jsonl").write_text('{"event": "no time"}\n{}\n')
    with pytest.raises(ValueError, match="line 1: not an event"):
        list(read_timeline(tmp_path / "timeline.jsonl"))
    with pytest.raises(ValueError, match=r"holds no timeline\.jsonl"):
        RunReport.read(tmp_path / "elsewhere")
