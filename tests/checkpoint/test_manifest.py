"""A manifest says exactly what belongs to a checkpoint, or is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_parcae.checkpoint.manifest import (
    Manifest,
    StoredFile,
    file_name,
    identifier_of,
    layer_name,
    parse_identifier,
)

FILES = tuple(StoredFile(f"{name}.bin", 5, "0f" * 32) for name in ("layer-0000", "layer-0001", "trainer"))
MANIFEST = Manifest("step-00000012-g3", 12, 34, 2, "notice of node-1", FILES)


def test_a_manifest_survives_its_file() -> None:
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST
    assert MANIFEST.file("trainer.bin") == FILES[2]
    assert MANIFEST.file("other.bin") is None


def test_any_damaged_byte_is_found() -> None:
    data = MANIFEST.to_bytes()
    for position in range(len(data)):
        for damage in (data[:position], data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]):
            try:
                found = Manifest.from_bytes(damage)
            except ValueError:
                continue
            assert found == MANIFEST  # White space only.


@pytest.mark.parametrize("data", [b"", b"[]", b"1", b"{}", b'{"format": 1}', b"\xff", b"[" * 100_000])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Manifest.from_bytes(data)


def test_another_format_is_named() -> None:
    data = json.dumps({**json.loads(MANIFEST.to_bytes()), "format": 2}).encode()
    with pytest.raises(ValueError, match="format 2 is not the 1"):
        Manifest.from_bytes(data)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"step": 13}, "does not name step 13"),
        ({"identifier": "newest"}, "does not name step"),
        ({"num_layers": 4}, r"no file for 2 of 4 layers: \[2, 3\]"),
        ({"files": (*FILES, FILES[0])}, "twice"),
    ],
)
def test_contradictions_are_refused(change: dict[str, Any], text: str) -> None:
    fields = {name: getattr(MANIFEST, name) for name in Manifest.__slots__}
    with pytest.raises(ValueError, match=text):
        Manifest(**{**fields, **change})


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a\\b", ".hidden", "a..b", "a b", "x\0", "\u00e9", "x" * 300]
)
def test_no_name_leaves_the_directory(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a file"):
        file_name(name)
    with pytest.raises(ValueError, match=r"."):
        StoredFile(f"{name}.bin", 1, "0" * 64)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"name": "a.bin", "num_bytes": -1, "sha256": "0" * 64},
        {"name": "a.bin", "num_bytes": 1, "sha256": "x"},
        3,
        None,
    ],
)
def test_what_is_no_file_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"file|cannot be"):
        StoredFile.from_json(value)


def test_files_travel_as_json() -> None:
    assert StoredFile.from_json(json.loads(json.dumps(FILES[0].to_json()))) == FILES[0]


def test_identifiers_sort_and_parse() -> None:
    assert parse_identifier(identifier_of(10**9, 12)) == (10**9, 12)
    for text in (
        "step-12-g1",
        "step-00000012",
        "step-00000012-g",
        "xstep-00000012-g1",
        "step-00000012-g1/..",
        "step-0000001\u0662-g1",
    ):
        assert parse_identifier(text) is None
    with pytest.raises(ValueError, match="at least 0"):
        identifier_of(-1, 0)
    with pytest.raises(ValueError, match="at least 0"):
        layer_name(-1)
