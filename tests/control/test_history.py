"""The coordinator's memory: counts over time, notices, joiners, reconfigurations; and what a planner reads of it."""

from __future__ import annotations

import json

import pytest

from lightning_parcae.control.history import MAX_CHANGES, AvailabilityHistory
from lightning_parcae.planning.job_history import JobHistory, PastReconfiguration
from lightning_parcae.planning.parallel_config import ParallelConfig

RUNS = {"phase": "running", "config": [2, 2], "table": [None, [1, 1], [1, 2]]}
PAST = PastReconfiguration("intra_stage", True, 0.25, 1000, 500)


def read(history: AvailabilityHistory, now: float) -> JobHistory:
    return JobHistory.from_json(json.loads(json.dumps({**history.describe(now), **RUNS})))


def started(count: int) -> AvailabilityHistory:
    history = AvailabilityHistory()
    for index in range(count):
        history.connected(0.0, f"i{index}")
        history.ready(5.0 + index, f"i{index}")
    history.formed(10.0, PastReconfiguration("initial", False, 0.0, 0, 0))
    return history


def test_counts_are_of_those_that_can_be_given_work() -> None:
    history = started(4)
    history.gone(21.0, "i0")
    history.noticed(32.0, "i1", 92.0)
    history.connected(33.0, "j0")
    found = read(history, 45.0)
    assert found.counts(10.0) == [4, 4, 3, 2]
    assert found.num_instances == 2
    assert found.warming == (33.0,) and found.warm_up_s == 6.5
    assert found.notices == (92.0,)
    assert (found.num_announced, found.num_unannounced) == (1, 1)
    assert found.config == ParallelConfig(2, 2) and found.table == (None, (1, 1), (1, 2))


def test_a_notice_counts_once_and_ends_with_its_instance() -> None:
    history = started(3)
    history.noticed(20.0, "i0", None)
    history.gone(25.0, "i0")
    history.gone(26.0, "i1")
    found = read(history, 30.0)
    assert (found.num_announced, found.num_unannounced, found.notices) == (1, 1, ())
    assert found.num_instances == 1


def test_ready_again_after_a_rollback_changes_nothing() -> None:
    history = started(2)
    before = read(history, 20.0).changes
    history.ready(15.0, "i0")
    assert read(history, 20.0).changes == before


def test_an_instance_that_is_warned_while_it_warms_up_never_counts() -> None:
    history = started(2)
    history.connected(11.0, "j0")
    history.noticed(12.0, "j0", None)
    history.ready(13.0, "j0")
    found = read(history, 14.0)
    assert found.num_instances == 2 and found.num_announced == 0 and found.warming == ()


def test_reconfigurations_are_kept_but_not_starts() -> None:
    history = started(2)
    history.formed(20.0, PAST)
    history.formed(30.0, PastReconfiguration("rollback", False, 3.0, 0, 0))
    assert read(history, 31.0).reconfigurations == (PAST,)
    assert read(history, 31.0).started_at == 10.0


def test_known_steps_from_notices_and_joiners() -> None:
    history = started(3)  # joiners take 6 s as a rule
    history.connected(21.0, "j0")  # ready at 27: in this interval
    history.connected(26.0, "j1")  # ready at 32: in the next one
    history.noticed(26.0, "i0", 51.0)
    history.noticed(26.0, "i1", None)
    found = read(history, 26.0)
    assert found.known_steps(5.0) == ((1, 1), (0, 1))
    assert found.known_steps(10.0) == ((1, 2), (0, 0), (1, 0))


def test_a_long_history_stays_bounded() -> None:
    history = started(2)
    for index in range(MAX_CHANGES):
        history.connected(20.0 + index, "j")
        history.ready(20.25 + index, "j")
        history.gone(20.5 + index, "j")
    value = history.describe(1e5)
    assert len(value["changes"]) == MAX_CHANGES
    assert len(json.dumps(value)) < 200_000


@pytest.mark.parametrize("value", [{}, {**RUNS}, {**AvailabilityHistory().describe(0.0), **RUNS, "config": 3}])
def test_nonsense_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not the history of a job"):
        JobHistory.from_json(value)


def test_before_the_start_there_are_no_intervals() -> None:
    history = AvailabilityHistory()
    assert read(history, 3.0).counts(1.0) == []
    history.connected(0.0, "i0")
    history.ready(1.0, "i0")
    assert read(history, 3.0).counts(1.0) == []
