"""Scripts of faults: when events are due, whom they hit, and what a file or a trace makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.faults import FaultEvent, FaultScript


def test_each_event_is_due_once() -> None:
    run = FaultScript().kill("i2", at_step=12).add(2, at_s=3.0).start()
    assert run.due(100, None, 2) == []  # nothing happens before the first generation
    assert [str(event) for event in run.due(11, 3.5, 2)] == ["add 2 at 3.0 s"]
    assert [event.action for event in run.due(13, 4.0, 2)] == ["kill"]
    assert run.due(14, 9.0, 2) == []
    assert run.left == ()


def test_events_that_wait_for_pipelines_come_one_at_a_time() -> None:
    run = FaultScript().kill("any", at_step=1, min_pipelines=2).stop("any", at_step=2, min_pipelines=2).start()
    assert run.due(5, 1.0, 1) == []
    assert [event.action for event in run.due(5, 1.0, 2)] == ["kill"]
    assert [event.action for event in run.due(5, 1.0, 2)] == ["stop"]


def test_victims_are_chosen_by_role_and_seed() -> None:
    run = FaultScript(seed=4).start()
    order, spares, nodes = ["i3", "i0", "i1"], ["i5"], {"node7": "i4"}

    def victim(target: str) -> str | None:
        return run.victim(target, order=order, spares=spares, nodes=nodes)

    assert victim("rank0") == "i3"
    assert victim("spare") == "i5"
    assert victim("i1") == "i1"
    assert victim("node:node7") == "i4"
    assert victim("node:gone") is None
    chosen = [victim("any") for _ in range(10)]
    again = FaultScript(seed=4).start()
    again.victim("spare", order=order, spares=spares, nodes=nodes)
    assert chosen == [again.victim("any", order=order, spares=spares, nodes=nodes) for _ in range(10)]
    assert run.victim("spare", order=order, spares=[], nodes={}) is None


@pytest.mark.parametrize(
    "text", ["[{kill: i2, at_step: 12}, {add: 1, at_s: 2}]", '[{"kill": "i2", "at_step": 12}, {"add": 1, "at_s": 2}]']
)
def test_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "faults"
    path.write_text(text)
    assert FaultScript.from_file(path).events == FaultScript().kill("i2", at_step=12).add(1, at_s=2.0).events


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill", "must hold a list"),
        ("[{kil: i2, at_step: 1}]", "fault 1: unknown key 'kil'; known are add, at_s"),
        ("[{add: 1, at_s: 1}, {kill: i2}]", "fault 2: kill needs either at_step or at_s"),
        ("[{kill: i2, add: 1, at_s: 1}]", "expected exactly one of"),
        ("[: {", "neither JSON nor YAML"),
        ("[{kill: i2, at_s: soon}]", "fault 1: could not convert"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        FaultScript.from_file(path)


def test_traces() -> None:
    trace = AvailabilityTrace.parse("0,add,a\n0,add,b\n60000,add,c\n120000,remove,b\n180000,add,d\n")
    script = FaultScript.from_trace(trace, time_scale=60.0)
    assert script.initial_nodes == ("a", "b")
    assert script.events == [
        FaultEvent("add", at_s=1.0, node="c"),
        FaultEvent("kill", "node:b", at_s=2.0, grace_s=0.0),
        FaultEvent("add", at_s=3.0, node="d"),
    ]
    warned = FaultScript.from_trace(trace, time_scale=60.0, notice_s=30.0, max_instances=2)
    assert warned.events == [
        FaultEvent("notice", "node:b", at_s=0.0, grace_s=2.0),  # it goes when the trace says so
        FaultEvent("add", at_s=3.0, node="d"),
    ]
