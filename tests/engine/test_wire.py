"""Trees of tensors keep every value, type and bit through their encoding."""

from __future__ import annotations

import enum
import json
import math
import pathlib
import queue
import struct
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_parcae.engine import wire

DTYPES = sorted(wire._DTYPES)


class Pair(NamedTuple):
    """A batch class of a user's script."""

    left: Any
    right: Any

    def swapped(self) -> Pair:
        """Swap the sides."""
        return Pair(self.right, self.left)


class Colour(enum.IntEnum):
    RED = 1


def whole(tree: Any) -> Any:
    return wire.decode_tree(b"".join(wire.encode_tree(tree)))


def streamed(tree: Any) -> Any:
    head, sources = wire.skeleton(tree)
    targets, rebuild = wire.allocate(head)
    for source, target in zip(sources, targets, strict=True):
        wire.byte_view(target)[:] = wire.byte_view(source)
    return rebuild()


def in_group(tree: Any) -> Any:
    group = QueueGroup()
    wire.send_tree(group, tree, peer=1, tag=7)
    result = wire.recv_tree(group, peer=0, tag=7)
    assert group.messages.empty()
    return result


class QueueGroup:
    """A group whose two ranks are one queue; checks what gloo needs of a message."""

    def __init__(self) -> None:
        self.messages: queue.Queue[tuple[Tensor, int]] = queue.Queue()

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        assert tensor.is_contiguous()
        assert tensor.numel()
        self.messages.put((tensor.clone(), tag))

    def recv(self, tensor: Tensor, peer: int, tag: int) -> None:
        sent, sent_tag = self.messages.get(timeout=5)
        assert (sent_tag, sent.shape, sent.dtype) == (tag, tensor.shape, tensor.dtype)
        tensor.copy_(sent)


def is_huge(value: object) -> bool:
    """Whether Python refuses to print it in decimal."""
    return type(value) is int and abs(value) > 2**1000


ways = pytest.mark.parametrize("way", [whole, streamed, in_group])


@ways
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_keeps_its_bits(way: Any, dtype: str) -> None:
    kind = wire._DTYPES[dtype]
    raw = torch.randint(0, 2 if kind is torch.bool else 256, (6 * kind.itemsize,), dtype=torch.uint8)
    tensor = raw.view(kind).reshape(2, 3)
    result = way({"x": tensor})["x"]
    assert (result.dtype, result.shape) == (kind, tensor.shape)
    assert torch.equal(result.view(torch.uint8), tensor.view(torch.uint8))


@ways
@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(3, 0, 2, dtype=torch.int64),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[::3],
        torch.tensor([float("nan")]).expand(4, 5),
        torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).imag,
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, requires_grad=True) * 2,
    ],
    ids=[
        "scalar",
        "empty",
        "empty3d",
        "transposed",
        "strided",
        "expanded",
        "channels",
        "conj",
        "imag",
        "param",
        "graph",
    ],
)
def test_every_layout_in_memory_arrives(way: Any, tensor: Tensor) -> None:
    result = way([tensor])[0]
    assert type(result) is Tensor
    assert (result.dtype, result.shape, result.is_contiguous(), result.requires_grad) == (
        tensor.dtype,
        tensor.shape,
        True,
        False,
    )
    torch.testing.assert_close(result, tensor.detach(), rtol=0, atol=0, equal_nan=True)


@ways
@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -1,
        2**63 - 1,
        2**64,
        -(10**5000),
        0.1,
        -0.0,
        5e-324,
        sys.float_info.max,
        math.inf,
        -math.inf,
        "",
        'quote " back \\ nul \0 \u00e9 \U0001f600',
        "\ud800",
        b"",
        bytes(range(256)),
        bytes(range(256)) * 20,
        1 - 2j,
        complex(math.inf, -0.0),
        [],
        (),
        {},
        [1, (2, [3]), {"a": {1: {}}}],
        {1: "a", -2: "b", False: "c", "1": "d", None: 1, 2.5: 2, ("x", 1): 3},
        {"list": [1], "tree": 2, "": 3},
        ["list", ["tensor", 0]],
        ("int", "0x10"),
        {3, 1, 2},
        frozenset({"b", ("a", 1)}),
        OrderedDict([("z", 1), ("a", 2)]),
        Counter({30: 1, 80: 2}),
        deque([1, 2], maxlen=3),
        timedelta(days=-1, seconds=5, microseconds=7),
        torch.Size([2, 3]),
        torch.float8_e5m2 if hasattr(torch, "float8_e5m2") else torch.half,
        torch.device("cuda:1"),
        pathlib.Path("/tmp/run 1/x.ckpt"),
        np.float32(0.1),
        np.float64("nan"),
        np.int64(-5),
        np.bool_(True),
        np.str_("abc"),
        np.datetime64("2026-01-01"),
    ],
    ids=lambda value: "int-huge" if is_huge(value) else f"{type(value).__name__}-{str(value)[:12]!a}",
)
def test_values_keep_value_and_type(way: Any, value: Any) -> None:
    result = way(value)
    assert type(result) is type(value)
    if isinstance(value, float):
        assert struct.pack(">d", result) == struct.pack(">d", value)
    else:
        assert repr(result) == repr(value) if not is_huge(value) else result == value
    if isinstance(value, dict):
        assert list(result) == list(value)
    if isinstance(value, np.generic):
        assert result.dtype == value.dtype


def test_a_nan_keeps_its_payload() -> None:
    odd = struct.unpack(">d", bytes.fromhex("fff8000000001234"))[0]
    assert struct.pack(">d", whole(odd)).hex() == "fff8000000001234"


@ways
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10)[::-2],
        np.array(5, dtype=np.float16),
        np.empty((2, 0)),
        np.array(["a", "bcd"]),
        np.array([b"xy"]),
        np.array([True, False]),
        np.array(["2026-01-01", "NaT"], dtype="datetime64[s]"),
        np.array(["", ""]),
    ],
    ids=lambda array: f"{array.dtype.str}{array.shape}",
)
def test_arrays_keep_dtype_and_shape(way: Any, array: np.ndarray[Any, Any]) -> None:
    result = way({"a": array})["a"]
    assert (type(result), result.dtype, result.shape) == (np.ndarray, array.dtype, array.shape)
    np.testing.assert_array_equal(result, array)


def test_a_read_only_array_travels() -> None:
    array = np.arange(4)
    array.flags.writeable = False
    result = whole(array)
    np.testing.assert_array_equal(result, array)
    result += 1  # What arrives is nobody else's memory.


@ways
def test_a_named_tuple_gets_its_loaded_class_back(way: Any) -> None:
    result = way(Pair(torch.ones(2), [1]))
    assert type(result) is Pair
    assert result.swapped().left == [1]


def test_a_packed_sequence_travels() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.zeros(2)])
    result = whole(packed)
    assert type(result) is type(packed)
    torch.testing.assert_close(result.data, packed.data)
    assert result.sorted_indices is None


def test_an_unknown_named_tuple_is_structural_and_nothing_is_imported() -> None:
    kind = namedtuple("kind", "a b")
    kind.__module__ = "wave"
    sys.modules.pop("wave", None)
    result = whole(kind(1, 2))
    assert "wave" not in sys.modules
    assert (type(result).__name__, result._asdict()) == ("kind", {"a": 1, "b": 2})


def test_a_name_that_is_not_that_named_tuple_is_not_used() -> None:
    for module, name in (("builtins", "tuple"), ("builtins", "str.upper"), ("os", "system"), (__name__, "Colour")):
        forged = wire.skeleton(Pair(1, 2))[0].replace(json.dumps(__name__).encode(), json.dumps(module).encode())
        forged = forged.replace(b'"Pair"', json.dumps(name).encode())
        result = wire.allocate(forged)[1]()
        assert type(result).__module__ == "lightning_parcae.engine.wire"
        assert tuple(result) == (1, 2)


def test_a_default_dict_becomes_a_dict() -> None:
    assert type(whole(defaultdict(int, a=1))) is dict


def test_a_shared_tensor_travels_once_and_stays_shared() -> None:
    tensor = torch.ones(100)
    array = np.ones(3)
    assert len(wire.skeleton([tensor, {"x": tensor}, array, array])[1]) == 2
    first, other, left, right = whole([tensor, {"x": tensor}, array, array])
    assert other["x"] is first
    assert left is right


def test_streaming_refers_to_the_memory_of_the_tree() -> None:
    tensor = torch.ones(3)
    assert wire.skeleton({"w": tensor})[1][0].data_ptr() == tensor.data_ptr()
    assert bytes(wire.encode_tree(tensor)[1])[:4] == b"\0\0\x80?"


def test_a_copy_does_not_change_with_the_tree() -> None:
    tensor = torch.zeros(3)
    parts = wire.encode_tree([tensor], copy=True)
    tensor += 1
    assert wire.decode_tree(b"".join(parts))[0].tolist() == [0, 0, 0]


def test_buffers_are_aligned() -> None:
    parts = wire.encode_tree([torch.ones(3), torch.ones(5, dtype=torch.uint8), torch.ones(7)])
    offset = 0
    for part in parts:
        if isinstance(part, memoryview):
            assert offset % wire.ALIGNMENT == 0
        offset += len(part)
    assert offset % wire.ALIGNMENT == 0


def test_a_skeleton_longer_than_one_message_travels() -> None:
    tree = {f"layer.{index}.weight": torch.full((2,), float(index)) for index in range(500)}
    result = in_group(tree)
    assert list(result) == list(tree)
    assert result["layer.499.weight"].tolist() == [499, 499]


def test_the_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        assert whole([torch.ones(2, device="cpu")])[0].device.type == "cpu"


@pytest.mark.parametrize(
    ("tree", "path", "kind"),
    [
        ({"callbacks": {"MyCallback": {"state": {"foo": object()}}}}, "callbacks.MyCallback.state.foo", "object"),
        ({"a": [1, (2, Colour.RED)]}, "a[1][1]", "Colour"),
        (Pair(1, {"x": lambda: 0}), "right.x", "function"),
        ({"a": torch.ones(2, 2).to_sparse()}, "a", "sparse"),
        ({"a": torch.ones(2, device="meta")}, "a", "meta"),
        ({"a": torch.nn.UninitializedParameter()}, "a", "UninitializedParameter"),
        ({"a": np.array([None])}, "a", "object"),
        ({"a": np.zeros(2, dtype=[("x", "i4")])}, "a", "'x'"),
        ({"a": np.ma.masked_array([1], [True])}, "a", "MaskedArray"),
        ({"a": {Colour.RED: 1}}, "a", "Colour"),
        ({"a": {object()}}, "a", "object"),
        (range(3), "the tree", "range"),
        ({"a": type("Odd", (dict,), {})()}, "a", "Odd"),
    ],
)
def test_what_does_not_fit_is_named(tree: Any, path: str, kind: str) -> None:
    with pytest.raises(TypeError, match="cannot travel") as error:
        wire.encode_tree(tree)
    assert str(error.value).startswith(f"{path} ")
    assert kind in str(error.value)


def test_a_root_names_the_tree() -> None:
    with pytest.raises(TypeError, match=r"^trainer\.a\.b\[0\] is a range"):
        wire.encode_tree({"a": {"b": [range(2)]}}, root="trainer")


def test_a_cycle_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="trainer contains itself"):
        wire.encode_tree(loop, root="trainer")


def test_every_truncation_and_damage_is_a_value_error() -> None:
    data = b"".join(wire.encode_tree({"w": torch.ones(3), "n": [1, (2, "x")], "s": {1}}))
    for length in range(len(data)):
        with pytest.raises(ValueError, match="tree"):
            wire.decode_tree(data[:length])
    with pytest.raises(ValueError, match="damaged"):
        wire.decode_tree(data + b"\0")
    end = 12 + struct.unpack_from("<Q", data, 4)[0]
    for position in range(end):
        damaged = bytearray(data)
        damaged[position] ^= 0xFF
        with pytest.raises(ValueError, match="tree"):
            wire.decode_tree(damaged)


@pytest.mark.parametrize(
    "body",
    [
        "[]",
        "{}",
        '{"format":2,"order":"little","tensors":[],"tree":1}',
        '{"format":1,"order":"middle","tensors":[],"tree":1}',
        '{"format":1,"order":"little","tensors":[["load",[1]]],"tree":1}',
        '{"format":1,"order":"little","tensors":[["int8",[-1]]],"tree":1}',
        "[" * 100_000,
    ],
)
def test_a_forged_skeleton_is_refused(body: str) -> None:
    with pytest.raises(ValueError, match="not the skeleton"):
        wire.allocate(body.encode())


@pytest.mark.parametrize(
    "node",
    [
        ["tensor", 0],
        ["tensor", -1],
        ["eval", "1"],
        ["array", "O", [1], 0],
        ["scalar", "|O", "AAAAAAAAAAA="],
        ["dtype", "load"],
        ["named", "a", "b", ["x"], []],
        ["named", "a", "b c", ["x"], [1]],
        ["tuple"],
        [],
        [["list"], 1],
    ],
)
def test_a_forged_node_is_refused(node: Any) -> None:
    body = {"format": 1, "order": sys.byteorder, "tensors": [], "tree": node}
    _, rebuild = wire.allocate(json.dumps(body).encode())
    with pytest.raises(ValueError, match="not the skeleton"):
        rebuild()


def test_a_lying_size_does_not_allocate() -> None:
    head = wire.skeleton(torch.ones(8))[0].replace(b"[8]", b"[9" + b"0" * 15 + b"]")
    with pytest.raises(ValueError, match="damaged"):
        wire.decode_tree(struct.pack("<4sQ", b"PTR1", len(head)) + head + bytes(200))


def test_a_real_trainer_state_travels() -> None:
    model = torch.nn.Linear(3, 2)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    adam.step()
    schedulers: list[Any] = [
        torch.optim.lr_scheduler.MultiStepLR(adam, [2, 5]),
        torch.optim.lr_scheduler.CosineAnnealingLR(adam, 10),
        torch.optim.lr_scheduler.ReduceLROnPlateau(adam),
    ]
    state: dict[str, Any] = {
        "optimizer": adam.state_dict(),
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
    }
    result = whole(state)
    adam.load_state_dict(result["optimizer"])
    for scheduler, loaded in zip(schedulers, result["schedulers"], strict=True):
        scheduler.load_state_dict(loaded)
    assert result["schedulers"] == state["schedulers"]
    assert torch.equal(result["optimizer"]["state"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])


def test_threads_may_encode_at_once() -> None:
    tree: dict[str, Any] = {"w": torch.arange(1000), "p": Pair(1, 2)}
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(whole(tree))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(torch.equal(result["w"], tree["w"]) for result in results)


@pytest.mark.gpu
def test_a_cuda_tensor_arrives_on_the_cpu() -> None:
    result = whole([torch.ones(3, device="cuda")])[0]
    assert (result.device.type, result.tolist()) == ("cpu", [1, 1, 1])
