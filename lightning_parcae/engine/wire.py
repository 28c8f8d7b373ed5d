"""Trees of tensors as bytes: a JSON skeleton and the raw tensor buffers, without pickle.

A *tree* is what a batch, a layer's state or a trainer's state is made of: dicts, lists, tuples, named tuples, sets,
numbers, strings, bytes, tensors, arrays. Its *skeleton* is JSON that holds everything but the memory of tensors, arrays
and long byte strings; these follow it as raw *buffers*, in order. Two forms share the skeleton:

* whole: :func:`encode_tree` and :func:`decode_tree`, for files; buffers start at multiples of 64 bytes;
* streamed: :func:`skeleton` and :func:`allocate`, for sockets and groups: the receiver allocates the tensors first and
  the bytes arrive in their memory, so nothing is flattened or copied.

Tensors arrive on the CPU, contiguous and detached; those of another device are copied to the CPU first. A tensor that
appears twice in a tree travels once and is one tensor again on arrival. A named tuple gets its class back if that class
is already loaded here under the same name with the same fields; nothing is imported for it, and otherwise it becomes a
``collections.namedtuple`` with the same name and fields. What does not fit raises a ``TypeError`` that names its path.
"""

from __future__ import annotations

import base64
import ctypes
import json
import math
import mmap
import pathlib
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import lru_cache
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "ALIGNMENT",
    "PeerGroup",
    "allocate",
    "byte_view",
    "decode_tree",
    "encode_tree",
    "recv_tree",
    "send_tree",
    "skeleton",
]

ALIGNMENT = 64

_FORMAT = 1
_PREFIX = struct.Struct("<4sQ")  # magic, length of the skeleton
_MAGIC = b"PTR1"
_INLINE_BYTES = 512  # Shorter byte strings travel inside the skeleton.
_HEADER_BYTES = 4096  # One message carries most skeletons; only longer ones need a second.
_LENGTH = struct.Struct("<Q")
_HUGE_BYTES = 4 << 20
_SMALL_BYTES = 64 << 10

# fmt: off
_DTYPE_NAMES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
)
# fmt: on
# Built from a fixed list: a name that arrives must not reach getattr.
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
_NAMES_OF_DTYPES = {dtype: name for name, dtype in _DTYPES.items()}
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_ARRAY_KINDS = "biufcSUMm"
_FITS = (
    "dict, list, tuple, namedtuple, set, deque, str, int, float, complex, bool, None, bytes, Path, timedelta, dense "
    "torch tensors, torch.Size/dtype/device, numpy arrays and scalars"
)


class PeerGroup(Protocol):
    """What :func:`send_tree` and :func:`recv_tree` need of a group: blocking messages into and out of tensors."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Send a tensor's bytes to a rank."""

    def recv(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Fill a tensor with the bytes a rank sends."""


def byte_view(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as writable bytes."""
    return memoryview(cast("Any", _as_bytes(tensor).numpy()))


def skeleton(tree: Any, *, root: str = "") -> tuple[bytes, list[Tensor]]:
    """Split a tree into its skeleton and its buffers.

    The buffers refer to the tree's own memory wherever it is contiguous and on the CPU: send them before it changes.

    Args:
        tree: The tree.
        root: What error messages call the tree, e.g. ``"trainer"``.

    Returns:
        The skeleton, and the contiguous CPU tensors whose bytes follow it.

    Raises:
        TypeError: If a value does not fit; the message names its path and type.
    """
    encoder = _Encoder()
    try:
        node = encoder.encode(tree, root)
        body = {"format": _FORMAT, "order": sys.byteorder, "tensors": encoder.specs, "tree": node}
        return json.dumps(body, separators=(",", ":"), allow_nan=False).encode("ascii"), encoder.buffers
    except RecursionError as error:
        raise TypeError(f"{root or 'the tree'} contains itself or is nested too deep to travel") from error


def allocate(skeleton_bytes: bytes | bytearray | memoryview) -> tuple[list[Tensor], Callable[[], Any]]:
    """Allocate the buffers of a skeleton.

    Args:
        skeleton_bytes: The skeleton of :func:`skeleton`.

    Returns:
        Uninitialised CPU tensors in the order their bytes arrive, and a function that builds the tree once these
        are filled.

    Raises:
        ValueError: If the bytes are no skeleton.
    """
    specs, rebuild = _parse(skeleton_bytes)
    tensors = [_empty(dtype, shape) for dtype, shape in specs]
    return tensors, lambda: rebuild(tensors)


def encode_tree(tree: Any, *, root: str = "", copy: bool = False) -> list[memoryview | bytes]:
    """Encode a tree for a file.

    Args:
        tree: The tree.
        root: What error messages call the tree.
        copy: Whether the parts are a private copy. Otherwise they refer to the tree's memory, and a training step
            taken while they are being written mixes two states.

    Returns:
        The bytes of the encoding in parts: the length-prefixed skeleton, then the buffers, each at a multiple of
        64 bytes.

    Raises:
        TypeError: If a value does not fit; the message names its path and type.
    """
    head, buffers = skeleton(tree, root=root)
    first = _PREFIX.pack(_MAGIC, len(head)) + head
    parts: list[memoryview | bytes] = [first + bytes(-len(first) % ALIGNMENT)]
    for tensor in buffers:
        view = byte_view(tensor)
        if not len(view):
            continue
        parts.append(bytes(view) if copy else view)
        if len(view) % ALIGNMENT:
            parts.append(bytes(-len(view) % ALIGNMENT))
    return parts


def decode_tree(buffer: bytes | bytearray | memoryview) -> Any:
    """Decode the joined parts of :func:`encode_tree`; the tensors get memory of their own.

    Raises:
        ValueError: If the bytes are not exactly one encoded tree.
    """
    data = memoryview(buffer).cast("B")
    if len(data) < _PREFIX.size:
        raise ValueError(f"not an encoded tree: {len(data)} bytes are shorter than the {_PREFIX.size} of its prefix")
    magic, length = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError(f"not an encoded tree: it begins with {magic!r} instead of {_MAGIC!r}")
    offset = _PREFIX.size + length
    if offset > len(data):
        raise ValueError(f"truncated tree: the skeleton ends at byte {offset}, but there are {len(data)} bytes")
    specs, rebuild = _parse(data[_PREFIX.size : offset])
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in specs]
    # Checked before anything is allocated: a damaged skeleton must not ask for terabytes.
    expected = _aligned(offset) + sum(_aligned(size) for size in sizes)
    if expected != len(data):
        raise ValueError(f"damaged tree: its skeleton wants {expected} bytes, but there are {len(data)}")
    tensors = [_empty(dtype, shape) for dtype, shape in specs]
    offset = _aligned(offset)
    for tensor, size in zip(tensors, sizes, strict=True):
        if size:
            byte_view(tensor)[:] = data[offset : offset + size]
        offset += _aligned(size)
    return rebuild(tensors)


def send_tree(group: PeerGroup, tree: Any, peer: int, tag: int) -> None:
    """Send a tree to a rank of a group, large tensors from their own memory and small ones in one message.

    Raises:
        TypeError: If a value does not fit; nothing has been sent then.
    """
    head, buffers = skeleton(tree)
    first = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
    room = _HEADER_BYTES - _LENGTH.size
    view = byte_view(first)
    _LENGTH.pack_into(view, 0, len(head))
    view[_LENGTH.size : _LENGTH.size + min(room, len(head))] = head[:room]
    group.send(first, peer, tag)
    if len(head) > room:
        group.send(torch.frombuffer(bytearray(head[room:]), dtype=torch.uint8), peer, tag)
    small, large = _by_size(buffers)
    if small:
        group.send(torch.cat(small), peer, tag)
    for memory in large:
        group.send(memory, peer, tag)


def recv_tree(group: PeerGroup, peer: int, tag: int) -> Any:
    """Receive the tree that a rank sends with :func:`send_tree`.

    Raises:
        ValueError: If what arrives is no tree.
    """
    first = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
    group.recv(first, peer, tag)
    view = byte_view(first)
    (length,) = _LENGTH.unpack_from(view)
    room = _HEADER_BYTES - _LENGTH.size
    head = bytes(view[_LENGTH.size : _LENGTH.size + min(room, length)])
    if length > room:
        rest = torch.empty(length - room, dtype=torch.uint8)
        group.recv(rest, peer, tag)
        head += bytes(byte_view(rest))
    tensors, rebuild = allocate(head)
    small, large = _by_size(tensors)
    if small:
        packed = torch.empty(sum(memory.numel() for memory in small), dtype=torch.uint8)
        group.recv(packed, peer, tag)
        offset = 0
        for memory in small:
            memory.copy_(packed[offset : offset + memory.numel()])
            offset += memory.numel()
    for memory in large:
        group.recv(memory, peer, tag)
    return rebuild()


def _by_size(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Part the memory of tensors into small ones, which share a message (each costs up to 3 ms), and large ones."""
    memories = [_as_bytes(tensor) for tensor in tensors if tensor.numel()]
    small = [memory for memory in memories if memory.numel() < _SMALL_BYTES]
    return small, [memory for memory in memories if memory.numel() >= _SMALL_BYTES]


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT


def _as_bytes(tensor: Tensor) -> Tensor:
    # A contiguous tensor of one element may have any stride, which view() does not take.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _empty(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    # The device is named because a caller may run under torch.device("cuda") or "meta".
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    _ask_for_huge_pages(tensor)
    return tensor


def _ask_for_huge_pages(tensor: Tensor) -> None:
    """Let the kernel back a large new tensor with huge pages.

    Faulting fresh memory in by 4 KiB pages is as slow as loopback TCP (2.4 against 16 GB/s measured), so without this
    a receiver spends half its time there. A hint: where it is not understood, nothing changes.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes < _HUGE_BYTES or _madvise is None:
        return
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise(start, end - start, mmap.MADV_HUGEPAGE)


def _find_madvise() -> Any:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise


_madvise = _find_madvise()


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


class _Encoder:
    """Builds the nodes of one tree and collects its buffers.

    A node is a JSON scalar, a JSON object (a dict with string keys), or an array ``[tag, ...]``.
    """

    def __init__(self) -> None:
        self.specs: list[tuple[str, list[int]]] = []
        self.buffers: list[Tensor] = []
        self._index_of: dict[int, int] = {}  # By identity of the tensor or array, which the tree keeps alive.

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)  # Exact types: an IntEnum, a str subclass or a DTensor must not lose its class silently.
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**64 else ["int", hex(value)]  # Python limits long decimal ints.
        if kind is float:
            return value if math.isfinite(value) else ["float", struct.pack(">d", value).hex()]
        if kind is dict or kind is defaultdict:
            return self._mapping(value, path)
        if kind is list:
            return ["list", self._items(value, path)]
        if kind is tuple:
            return ["tuple", self._items(value, path)]
        if isinstance(value, Tensor):
            return ["tensor", self._tensor(value, path)]
        return self._rare(value, path)

    def _rare(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind is OrderedDict or kind is Counter:
            return ["ordered" if kind is OrderedDict else "counter", self._pairs(value, path)]
        if kind is bytes or kind is bytearray:
            return self._bytes(value)
        if kind is torch.Size:
            return ["size", list(value)]
        if kind is set or kind is frozenset:
            nodes = [self._key(item, path) for item in value]
            return [kind.__name__, sorted(nodes, key=json.dumps)]
        if kind is deque:
            return ["deque", self._items(value, path), value.maxlen]
        if kind is complex:
            return ["complex", self.encode(value.real, path), self.encode(value.imag, path)]
        if kind is timedelta:
            return ["timedelta", value.days, value.seconds, value.microseconds]
        if kind is torch.dtype and value in _NAMES_OF_DTYPES:
            return ["dtype", _NAMES_OF_DTYPES[value]]
        if kind is torch.device:
            return ["device", str(value)]
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value, path)
        if isinstance(value, (pathlib.PosixPath, pathlib.WindowsPath)):
            return ["path", str(value)]
        if isinstance(value, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
            nodes = [self.encode(item, _join(path, field)) for field, item in zip(kind._fields, value, strict=True)]
            return ["named", kind.__module__, kind.__qualname__, list(kind._fields), nodes]
        raise _does_not_fit(value, path)

    def _items(self, values: Iterable[Any], path: str) -> list[Any]:
        return [self.encode(value, f"{path}[{index}]") for index, value in enumerate(values)]

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        if all(type(key) is str for key in value):
            return {key: self.encode(item, _join(path, key)) for key, item in value.items()}
        return ["dict", self._pairs(value, path)]

    def _pairs(self, value: Mapping[Any, Any], path: str) -> list[Any]:
        return [[self._key(key, path), self.encode(item, _join(path, key))] for key, item in value.items()]

    def _key(self, key: Any, path: str) -> Any:
        if key is None or type(key) in (str, int, bool, float):
            return self.encode(key, path)
        if type(key) is tuple:
            return ["tuple", [self._key(item, path) for item in key]]
        raise TypeError(
            f"{path or 'the tree'} has the key or member {key!r} of type {_name_of(type(key))}, which cannot travel "
            "between instances; only str, int, float, bool, None and tuples of these can be keys and members of sets"
        )

    def _bytes(self, value: bytes | bytearray) -> Any:
        if len(value) <= _INLINE_BYTES:
            return ["bytes", base64.b64encode(value).decode("ascii")]
        # Copied into a bytearray: torch warns about read-only memory.
        return ["blob", self._add(torch.frombuffer(bytearray(value), dtype=torch.uint8))]

    def _tensor(self, value: Tensor, path: str) -> int:
        if id(value) in self._index_of:
            return self._index_of[id(value)]
        fits = type(value) in _PLAIN_TENSORS and value.layout is torch.strided and value.device.type != "meta"
        if not fits or value.dtype not in _NAMES_OF_DTYPES:
            raise TypeError(
                f"{path or 'the tree'} is a {_name_of(type(value))} with layout {value.layout}, dtype {value.dtype} on "
                f"device {value.device}, which cannot travel between instances; make it a dense torch.Tensor"
            )
        index = self._add(value.detach().cpu().resolve_conj().resolve_neg().contiguous())
        self._index_of[id(value)] = index
        return index

    def _array(self, value: Any, path: str) -> Any:
        dtype = value.dtype
        if dtype.kind not in _ARRAY_KINDS:
            raise TypeError(
                f"{path or 'the tree'} is a {_name_of(type(value))} of dtype {dtype}, which cannot travel between "
                "instances; use a numeric, bool, string or datetime dtype"
            )
        if isinstance(value, np.generic):
            return ["scalar", dtype.str, base64.b64encode(value.tobytes()).decode("ascii")]
        if id(value) not in self._index_of:
            memory = np.frombuffer(bytearray(value.tobytes()), dtype=np.uint8)  # Writable, or torch warns.
            if value.flags.c_contiguous and value.flags.writeable and value.nbytes:
                memory = value.reshape(-1).view(np.uint8)
            self._index_of[id(value)] = self._add(torch.from_numpy(memory))
        return ["array", dtype.str, list(value.shape), self._index_of[id(value)]]

    def _add(self, tensor: Tensor) -> int:
        self.specs.append((_NAMES_OF_DTYPES[tensor.dtype], list(tensor.shape)))
        self.buffers.append(tensor)
        return len(self.buffers) - 1


class _Decoder:
    """Builds the values of nodes."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._arrays: dict[tuple[int, str], np.ndarray[Any, Any]] = {}

    def decode(self, node: Any) -> Any:
        if isinstance(node, dict):
            return {key: self.decode(item) for key, item in node.items()}
        if not isinstance(node, list):
            return node
        tag, *values = node
        decode = self._DECODERS.get(tag)
        if decode is None:
            raise ValueError(f"unknown kind of value {tag!r}")
        return decode(self, *values)

    def _items(self, nodes: list[Any]) -> list[Any]:
        return [self.decode(node) for node in nodes]

    def _pairs(self, pairs: list[list[Any]]) -> dict[Any, Any]:
        return {self.decode(key): self.decode(item) for key, item in pairs}

    def _buffer(self, index: int) -> Tensor:
        if type(index) is not int or not 0 <= index < len(self._tensors):
            raise ValueError(f"there is no buffer {index!r} among {len(self._tensors)}")
        return self._tensors[index]

    def _array(self, dtype: str, shape: list[int], index: int) -> np.ndarray[Any, Any]:
        if (index, dtype) not in self._arrays:
            memory = self._buffer(index).numpy()
            flat = memory.view(_array_dtype(dtype)) if memory.size else np.zeros(math.prod(shape), _array_dtype(dtype))
            self._arrays[index, dtype] = flat.reshape(shape)
        return self._arrays[index, dtype]

    def _scalar(self, dtype: str, data: str) -> Any:
        kind = _array_dtype(dtype)
        return np.frombuffer(base64.b64decode(data), dtype=kind, count=1)[0] if data else np.zeros((), kind)[()]

    def _named(self, module: str, name: str, fields: list[str], nodes: list[Any]) -> Any:
        if len(fields) != len(nodes):
            raise ValueError(f"{len(nodes)} values for the {len(fields)} fields of {name!r}")
        # tuple.__new__ runs no code of the class.
        return tuple.__new__(_named_tuple_class(module, name, tuple(fields)), self._items(nodes))

    _DECODERS: ClassVar[dict[str, Callable[..., Any]]] = {
        "array": _array,
        "blob": lambda self, index: self._buffer(index).numpy().tobytes(),
        "bytes": lambda self, data: base64.b64decode(data),
        "complex": lambda self, real, imag: complex(self.decode(real), self.decode(imag)),
        "counter": lambda self, pairs: Counter(self._pairs(pairs)),
        "deque": lambda self, nodes, maxlen: deque(self._items(nodes), maxlen),
        "device": lambda self, name: torch.device(name),
        "dict": _pairs,
        "dtype": lambda self, name: _DTYPES[name],
        "float": lambda self, digits: struct.unpack(">d", bytes.fromhex(digits))[0],
        "frozenset": lambda self, nodes: frozenset(self._items(nodes)),
        "int": lambda self, digits: int(digits, 16),
        "list": _items,
        "named": _named,
        "ordered": lambda self, pairs: OrderedDict(self._pairs(pairs)),
        "path": lambda self, text: pathlib.Path(text),
        "scalar": _scalar,
        "set": lambda self, nodes: set(self._items(nodes)),
        "size": lambda self, sizes: torch.Size(sizes),
        "tensor": _buffer,
        "timedelta": lambda self, days, seconds, microseconds: timedelta(days, seconds, microseconds),
        "tuple": lambda self, nodes: tuple(self._items(nodes)),
    }


def _parse(
    data: bytes | bytearray | memoryview,
) -> tuple[list[tuple[torch.dtype, tuple[int, ...]]], Callable[[list[Tensor]], Any]]:
    """Read a skeleton: the dtypes and shapes of its buffers, and the function that builds the tree from these."""
    try:
        body = json.loads(bytes(data))
        if body["format"] != _FORMAT or body["order"] != sys.byteorder:
            found = f"format {body['format']!r}, {body['order']!r} endian"
            raise ValueError(f"wanted format {_FORMAT}, {sys.byteorder!r} endian, found {found}")
        specs = [(_DTYPES[name], tuple(int(size) for size in shape)) for name, shape in body["tensors"]]
        if any(size < 0 for _, shape in specs for size in shape):
            raise ValueError("a size is negative")
        node = body["tree"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not the skeleton of a tree: {error!r}") from error

    def rebuild(tensors: list[Tensor]) -> Any:
        try:
            return _Decoder(tensors).decode(node)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError, RuntimeError) as error:
            raise ValueError(f"not the skeleton of a tree: {error!r}") from error

    return specs, rebuild


def _array_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"dtype {name!r} may not travel")
    return dtype


@lru_cache(maxsize=256)
def _named_tuple_class(module: str, name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if found is not None and hasattr(found, "__dict__") else None
    if isinstance(found, type) and issubclass(found, tuple) and getattr(found, "_fields", None) == fields:
        return found
    structural = namedtuple(name.rpartition(".")[2], fields, rename=True)  # type: ignore[misc]
    return cast("type[tuple[Any, ...]]", structural)


def _name_of(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _does_not_fit(value: object, path: str) -> TypeError:
    return TypeError(
        f"{path or 'the tree'} is a {_name_of(type(value))}, which cannot travel between instances; keep it out, or "
        f"turn it into one of: {_FITS}"
    )
