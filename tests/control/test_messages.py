"""Messages survive the wire, and nothing else does."""

from __future__ import annotations

import json

import pytest

from lightning_parcae.control.messages import (
    Ack,
    AdminCall,
    CheckpointRef,
    Commit,
    Event,
    Goodbye,
    Heartbeat,
    Hello,
    JobFinished,
    JobSpec,
    Message,
    Plan,
    Ready,
    Request,
    Stop,
    config_for,
    decode,
    encode,
)
from lightning_parcae.errors import MembershipError
from lightning_parcae.planning.layout import Layout
from lightning_parcae.planning.parallel_config import ParallelConfig

SPEC = JobSpec(4, [1, 2, 3, 4], [None, (1, 1), (1, 2)], {1: [0, 4], 2: [0, 2, 4]}, "f", has_fallback=True)
MESSAGES: list[Message] = [
    Hello("job", "a", "a#1", "host", 7, 1, {"torch": "2.13"}),
    Heartbeat(3, 2),
    Ready(SPEC, "h:1", "h:2", CheckpointRef("step-2", 2)),
    Ready(SPEC, "h:1", "h:2"),
    Ack(1, 5, '[{"loss": 1.5}]', [0, 1], True),
    Plan([None, (1, 1)], "because"),
    Event("pause", {"seconds": 1.5, "nested": {"list": [None, True, "x"]}}),
    Request(1, "set_default", "seed", {"any": [1, 2.5, None]}),
    Goodbye(),
    Commit(
        generation=3,
        layout=Layout(3, (("a", "b"), ("c", "d")), ("a", "b", "c", "d", "e"), (0, 2, 4)),
        clock=9,
        vote=None,
        rollback=False,
        transfers=[(0, "a", "c")],
        addresses={"a": ("h:1", "h:2")},
        fresh=["c"],
        trainer_source="a",
        checkpoint=None,
        kind="inter_stage",
        reason="r",
    ),
    JobFinished({"a": ("h:1", "h:2")}, ["a"]),
    Stop(False, "r", "Traceback", 3),
    AdminCall("preempt", "a", 30.0),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (b"", "must be JSON"),
        (b"\x80\x04N.", "must be JSON"),
        (b"[" * 100_000, "must be JSON"),
        (b"[]", "unknown message"),
        (b"{}", "unknown message"),
        (b'{"type": "Layout"}', "unknown message"),
        (b'{"type": ["Ack"]}', "unknown message"),
        (b'{"type": "Heartbeat", "clock": 1}', "lacks its field 'step'"),
        (b'{"type": "Heartbeat", "clock": 1, "step": "2"}', "step must be int"),
        (b'{"type": "Heartbeat", "clock": true, "step": 2}', "clock must be int"),
        (b'{"type": "Heartbeat", "clock": 1.0, "step": 2}', "clock must be int"),
        (b'{"type": "Heartbeat", "clock": 1, "step": 2, "__class__": 3}', "unknown field"),
        (b'{"type": "Request", "request": 1, "op": "delete", "key": "k"}', "must be one of"),
        (b'{"type": "Plan", "table": [[1, 2, 3]]}', "a list of 2"),
        (b'{"type": "JobFinished", "addresses": [], "holders": []}', "must be an object"),
    ],
)
def test_malformed_messages_are_refused(payload: bytes, complaint: str) -> None:
    with pytest.raises(MembershipError, match=complaint):
        decode(payload)


def _changed_spec(**changes: object) -> bytes:
    value = json.loads(encode(Ready(SPEC, "h:1", "h:2")))
    value["spec"].update(changes)
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"layer_bytes": [1]}, "4 layers need as many sizes"),
        ({"boundaries": {"2": [0, 4]}}, "2 stages of 4 layers"),
        ({"boundaries": {"two": [0, 2, 4]}}, "whole numbers as keys"),
        ({"table": [None, [1, 2]]}, "takes more"),
        ({"table": [None, None, None, [1, 3]]}, "no boundaries"),
        ({"table": [[0, 1]]}, "at least 1 pipeline"),
        ({"max_step_failures": 0}, "at least 1"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(MembershipError, match=complaint):
        decode(_changed_spec(**changes))


def test_a_layout_that_contradicts_itself_is_refused() -> None:
    value = json.loads(encode(MESSAGES[9]))
    value["layout"]["order"] = ["a"]
    with pytest.raises(MembershipError, match="must be a layout"):
        decode(json.dumps(value).encode())


def test_what_is_not_json_is_not_encoded() -> None:
    with pytest.raises(TypeError):
        encode(Event("x", {"a": object()}))


def test_the_table_goes_on_as_it_ends() -> None:
    assert config_for([None, (1, 1)], 0) is None
    assert config_for([None, (1, 1)], 9) == ParallelConfig(1, 1)
    assert config_for([], 3) is None
