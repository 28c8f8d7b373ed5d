"""What a checkpoint consists of, and how its parts are named.

A checkpoint is a directory ``step-00001234-g5`` (step, generation) with one file per layer, further named files, and a
manifest. The manifest is written last and lists every file with its size and hash: a directory without one, or with
one that does not describe what is there, is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "MANIFEST_NAME",
    "Manifest",
    "StoredFile",
    "file_name",
    "identifier_of",
    "layer_name",
    "parse_identifier",
]

MANIFEST_NAME = "manifest.json"

_FORMAT = 1
_IDENTIFIER = re.compile(r"step-([0-9]{8,18})-g([0-9]{1,18})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")  # No separator, no "..", no hidden file.
_HASH = re.compile(r"[0-9a-f]{64}")


def identifier_of(step: int, generation: int) -> str:
    """Name the checkpoint of a step taken in a generation.

    Example:
        >>> identifier_of(1234, 5)
        'step-00001234-g5'
    """
    if step < 0 or generation < 0:
        raise ValueError(f"step and generation must be at least 0, got {step} and {generation}")
    return f"step-{step:08d}-g{generation}"


def parse_identifier(identifier: str) -> tuple[int, int] | None:
    """Return step and generation of an identifier; None if it is none.

    Example:
        >>> parse_identifier("step-00001234-g5")
        (1234, 5)
    """
    match = _IDENTIFIER.fullmatch(identifier)
    return None if match is None else (int(match[1]), int(match[2]))


def layer_name(index: int) -> str:
    """Name a layer's file, without its suffix.

    Example:
        >>> layer_name(3)
        'layer-0003'
    """
    if index < 0:
        raise ValueError(f"a layer index must be at least 0, got {index}")
    return f"layer-{index:04d}"


def file_name(name: str) -> str:
    """Return the file of a named part.

    Raises:
        ValueError: If the name could leave the checkpoint's directory or take the manifest's place.
    """
    if not _NAME.fullmatch(name) or len(name) > 200:
        raise ValueError(
            f"{name!r} cannot name a file of a checkpoint: use ASCII letters, digits, '_', '-' and single '.'"
        )
    return f"{name}.bin"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a checkpoint, as it was written.

    Attributes:
        name: File name in the checkpoint's directory.
        num_bytes: Its size.
        sha256: Hash of its bytes, 64 hexadecimal digits.
    """

    name: str
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        stem, _, suffix = self.name.rpartition(".")
        if suffix != "bin" or file_name(stem) != self.name:
            raise ValueError(f"{self.name!r} is not the name of a file of a checkpoint")
        if self.num_bytes < 0 or not _HASH.fullmatch(self.sha256):
            raise ValueError(f"{self.name}: {self.num_bytes} bytes with hash {self.sha256!r} cannot be")

    def to_json(self) -> dict[str, Any]:
        """Return the file as JSON values."""
        return {"name": self.name, "num_bytes": self.num_bytes, "sha256": self.sha256}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StoredFile:
        """Build a file from :meth:`to_json`'s values.

        Raises:
            ValueError: If the values describe no file.
        """
        try:
            return cls(str(value["name"]), int(value["num_bytes"]), str(value["sha256"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a file of a checkpoint: {value!r}") from error


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that belongs to one checkpoint.

    Attributes:
        identifier: Name of the checkpoint's directory.
        step: Optimizer steps taken.
        clock: Votes completed since the start of the job.
        num_layers: Layers of the whole model.
        reason: Why it was written, for people.
        files: Every file but the manifest.
    """

    identifier: str
    step: int
    clock: int
    num_layers: int
    reason: str
    files: tuple[StoredFile, ...]

    def __post_init__(self) -> None:
        parsed = parse_identifier(self.identifier)
        if parsed is None or parsed[0] != self.step:
            raise ValueError(f"identifier {self.identifier!r} does not name step {self.step}")
        names = [file.name for file in self.files]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.identifier} lists a file twice: {sorted(names)}")
        missing = _missing_layers(names, self.num_layers)
        if missing:
            raise ValueError(f"{self.identifier} has no file for {len(missing)} of {self.num_layers} layers: {missing}")

    def file(self, name: str) -> StoredFile | None:
        """Return a listed file by its name."""
        return next((file for file in self.files if file.name == name), None)

    def to_bytes(self) -> bytes:
        """Return the manifest as the bytes of its file."""
        body = {
            "format": _FORMAT,
            "identifier": self.identifier,
            "step": self.step,
            "clock": self.clock,
            "num_layers": self.num_layers,
            "reason": self.reason,
            "files": [file.to_json() for file in sorted(self.files, key=lambda file: file.name)],
        }
        return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode("ascii")

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read a manifest.

        Raises:
            ValueError: If the bytes are no manifest, a damaged one, or one of another format.
        """
        try:
            body = json.loads(data)
            if body["format"] != _FORMAT:
                raise ValueError(f"format {body['format']!r} is not the {_FORMAT} that this version reads")
            if body.pop("sha256") != _digest(body):
                raise ValueError("its hash does not match its content")
            return cls(
                identifier=str(body["identifier"]),
                step=int(body["step"]),
                clock=int(body["clock"]),
                num_layers=int(body["num_layers"]),
                reason=str(body["reason"]),
                files=tuple(StoredFile.from_json(file) for file in body["files"]),
            )
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a manifest: {error!r}") from error


def _missing_layers(names: Iterable[str], num_layers: int) -> list[int]:
    present = set(names)
    return [index for index in range(num_layers) if file_name(layer_name(index)) not in present]


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode("ascii")).hexdigest()
