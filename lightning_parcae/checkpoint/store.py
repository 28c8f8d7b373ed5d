"""Checkpoints in any file system that fsspec reaches, for state that no surviving instance holds.

Every instance writes the layers it holds; when all are written, one instance commits them with a manifest. Whatever
dies in between, the newest committed checkpoint stays complete: files of a committed one are never written again, the
manifest comes last, and older checkpoints are deleted only after a newer one has been verified.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

import fsspec
from fsspec.core import url_to_fs
from fsspec.registry import known_implementations

from lightning_parcae.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    StoredFile,
    file_name,
    layer_name,
    parse_identifier,
)
from lightning_parcae.control.messages import CheckpointRef
from lightning_parcae.engine.wire import decode_tree, encode_tree
from lightning_parcae.errors import CheckpointError, ParcaeError

__all__ = ["FallbackStore", "redact"]

_logger = logging.getLogger(__name__)

_PIECE_BYTES = 32 << 20  # What is written at once, so that a remote file's buffer stays small.
# Here a file appears whole or not at all, and a directory need not be made. Elsewhere the manifest is moved into place.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "memory"})
_LOCAL = frozenset({"file", "local"})
_USER_INFO = re.compile(r"(?<=://)[^/\s'\"]*@")
_QUERY_VALUE = re.compile(r"([?&][^=&?\s'\"]+=)[^&\s'\"]+")
_SECRET_OPTION = re.compile(r"key|secret|token|pass|cred|sas|connection_string", re.IGNORECASE)


class FallbackStore:
    """Writes, finds and reads checkpoints below one URL.

    Args:
        url: A directory: a path or anything fsspec understands (``file://``, ``memory://``, ``s3://bucket/run``, ...).
        keep: Complete checkpoints that stay when a newer one is committed, at least 1.
        storage_options: Options of the fsspec file system, e.g. ``{"endpoint_url": ...}`` for S3.

    Attributes:
        url: The URL without credentials, for messages.
        skipped: What the last :meth:`newest_complete` passed over, and why, by identifier.

    Raises:
        CheckpointError: If the URL's scheme is unknown or its package is not installed.
    """

    def __init__(
        self, url: str | os.PathLike[str], *, keep: int = 2, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}: the newest checkpoint is never deleted")
        self._raw_url = os.fspath(url)
        self._options = dict(storage_options or {})
        self._secrets = sorted(_secrets_of(self._options), key=len, reverse=True)
        self.url = redact(self._raw_url, self._secrets)
        self.skipped: dict[str, str] = {}
        self._keep = keep
        self._fs, self._root = self._open()
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self._is_local = bool(protocols & _LOCAL)
        self._is_object_store = bool(protocols & _OBJECT_STORES)
        self._started: set[str] = set()
        self._manifests: dict[str, Manifest] = {}
        self._damaged: dict[str, str] = {}
        self._told: tuple[str | None, dict[str, str]] = (None, {})

    def check_writable(self) -> None:
        """Write, read and delete a small file.

        Raises:
            CheckpointError: If any of it fails; the message says what to change.
        """
        name = f"probe-{secrets.token_hex(8)}"
        path = f"{self._root}/{name}"
        with self._storage("test whether files can be written in", self.url):
            if not self._is_object_store:
                self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(path, name.encode())
            found = self._fs.cat_file(path)
            self._fs.rm_file(path)
        if found != name.encode():
            raise CheckpointError(f"{self.url} does not return what was written: wanted {name!r}, found {found[:50]!r}")

    def write_layer(self, identifier: str, index: int, tree: Any) -> StoredFile:
        """Write the state of a layer; :meth:`commit` needs what this returns.

        The tree is read while it is written: take no training step meanwhile, or encode it first with
        ``encode_tree(tree, copy=True)`` and hand the parts to :meth:`write_parts`.

        Raises:
            CheckpointError: If it cannot be written.
        """
        return self.write_tree(identifier, layer_name(index), tree)

    def write_tree(self, identifier: str, name: str, tree: Any) -> StoredFile:
        """Write a tree under a name, see :meth:`write_layer`."""
        return self.write_parts(identifier, name, encode_tree(tree, root=name))

    def write_blob(self, identifier: str, name: str, data: bytes | bytearray | memoryview) -> StoredFile:
        """Write bytes under a name; :meth:`commit` needs what this returns.

        Raises:
            CheckpointError: If they cannot be written.
        """
        return self.write_parts(identifier, name, [data])

    def write_parts(self, identifier: str, name: str, parts: Iterable[bytes | bytearray | memoryview]) -> StoredFile:
        """Write the parts of :func:`~lightning_parcae.engine.wire.encode_tree` under a name.

        Raises:
            CheckpointError: If they cannot be written.
        """
        target = file_name(name)
        path = self._path(identifier, target)
        digest = hashlib.sha256()
        num_bytes = 0
        with self._storage("write", f"{identifier}/{target}"):
            self._start(identifier)
            with self._fs.open(path, "wb") as file:
                for part in parts:
                    view = memoryview(part).cast("B")
                    for offset in range(0, len(view), _PIECE_BYTES):
                        piece = view[offset : offset + _PIECE_BYTES]
                        digest.update(piece)
                        file.write(piece)
                    num_bytes += len(view)
                self._make_durable(file)
        return StoredFile(target, num_bytes, digest.hexdigest())

    def commit(
        self,
        identifier: str,
        step: int,
        files: Iterable[StoredFile],
        *,
        num_layers: int,
        clock: int = 0,
        reason: str = "",
    ) -> CheckpointRef:
        """Make a checkpoint of files that have been written, then delete what it makes superfluous.

        Args:
            identifier: The checkpoint.
            step: Optimizer steps taken; must be the identifier's.
            files: Every file of the checkpoint, as returned when it was written, by whichever instance.
            num_layers: Layers of the whole model; each must be among the files.
            clock: Votes completed.
            reason: Why it was written, for people.

        Raises:
            CheckpointError: If a file is missing or has another size than was written; then there is no checkpoint.
        """
        try:
            manifest = Manifest(identifier, step, clock, num_layers, reason, tuple(files))
        except ValueError as error:
            raise CheckpointError(f"cannot commit {identifier!r} in {self.url}: {error}") from error
        with self._storage("commit", identifier):
            self._start(identifier)
            why = _difference(manifest, self._sizes(identifier))
            if why is None:
                self._put_manifest(identifier, manifest.to_bytes())
                self._started.discard(identifier)  # From now on writing into it is refused.
                why = self._why_incomplete(identifier)
        if why is not None:
            raise CheckpointError(f"cannot commit {identifier} in {self.url}: {why}")
        try:
            self.prune()
        except CheckpointError:
            _logger.warning("could not delete superfluous checkpoints; they stay", exc_info=True)
        return CheckpointRef(identifier, step)

    def newest_complete(self) -> CheckpointRef | None:
        """Find the newest checkpoint whose files are all there with the right sizes.

        What was damaged when this process read it is passed over, too.

        Raises:
            CheckpointError: If the store cannot be read.
        """
        skipped: dict[str, str] = {}
        newest = None
        with self._storage("list the checkpoints in", self.url):
            for identifier in self._identifiers():
                why = self._why_incomplete(identifier)
                if why is None:
                    newest = CheckpointRef(identifier, self._manifests[identifier].step)
                    break
                skipped[identifier] = why
        self.skipped = skipped
        self._tell(newest)
        return newest

    def was_committed(self, identifier: str) -> bool:
        """Return whether a checkpoint has a manifest, and so was complete at some time.

        Raises:
            CheckpointError: If the store cannot be read.
        """
        with self._storage("list", identifier):
            return MANIFEST_NAME in self._sizes(identifier)

    def manifest(self, identifier: str) -> Manifest:
        """Return the manifest of a checkpoint.

        Raises:
            CheckpointError: If there is none, or it is damaged.
        """
        if identifier not in self._manifests:
            data = self._read(identifier, MANIFEST_NAME)
            try:
                self._manifests[identifier] = _parse(identifier, data)
            except ValueError as error:
                raise self._damage(identifier, MANIFEST_NAME, str(error)) from error
        return self._manifests[identifier]

    def read_layer(self, identifier: str, index: int) -> Any:
        """Read and verify the state of a layer.

        Raises:
            CheckpointError: If its file is missing or damaged; the message names it.
        """
        return self.read_tree(identifier, layer_name(index))

    def read_tree(self, identifier: str, name: str) -> Any:
        """Read and verify a tree written with :meth:`write_tree`, see :meth:`read_layer`."""
        data = self.read_blob(identifier, name)
        try:
            return decode_tree(data)
        except ValueError as error:
            raise self._damage(identifier, file_name(name), str(error)) from error

    def read_blob(self, identifier: str, name: str) -> bytes:
        """Read and verify bytes written under a name.

        Raises:
            CheckpointError: If the file is missing or damaged; the message names it.
        """
        target = file_name(name)
        expected = self.manifest(identifier).file(target)
        if expected is None:
            raise CheckpointError(f"checkpoint {identifier} in {self.url} has no file {target}")
        data = self._read(identifier, target)
        if len(data) != expected.num_bytes:
            raise self._damage(identifier, target, f"wanted {expected.num_bytes} bytes, found {len(data)}")
        if hashlib.sha256(data).hexdigest() != expected.sha256:
            raise self._damage(identifier, target, "its content does not match its hash")
        return data

    def prune(self, keep: int | None = None) -> list[str]:
        """Delete old checkpoints: complete ones beyond the newest ``keep``, and unfinished ones older than the newest.

        The newest complete checkpoint always stays, and so does what is newer: it may be being written.

        Args:
            keep: How many complete ones stay, at least 1; by default the store's.

        Returns:
            The identifiers that were deleted.

        Raises:
            CheckpointError: If the store cannot be read or a file cannot be deleted.
        """
        keep = self._keep if keep is None else keep
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}: the newest checkpoint is never deleted")
        num_complete = 0
        deleted = []
        with self._storage("delete old checkpoints in", self.url):
            for identifier in self._identifiers():
                if self._why_incomplete(identifier) is None and num_complete < keep:
                    num_complete += 1
                elif num_complete:
                    self._delete(identifier)
                    deleted.append(identifier)
        return deleted

    def _open(self) -> tuple[Any, str]:
        scheme = self._raw_url.partition("://")[0] if "://" in self._raw_url else "file"
        if "::" in self._raw_url:
            raise CheckpointError(
                f"{self.url!r} chains file systems, which a checkpoint cannot use; give one plain URL"
            )
        try:
            fs, root = url_to_fs(self._raw_url, **self._options)
        except ImportError as error:
            known = known_implementations.get(scheme, {})
            package = known.get("class", scheme).partition(".")[0]
            wanted = str(known.get("err", error)) if package == "fsspec" else f"install it with `pip install {package}`"
            raise CheckpointError(
                f"{self.url} needs a package that is not installed here: {wanted} on every instance, or use another URL"
            ) from self._harmless(error)
        except ValueError as error:
            if scheme in fsspec.available_protocols():
                raise self._explained(error, "open", self.url) from self._harmless(error)
            raise CheckpointError(
                f"{self.url} has the scheme {scheme!r}, which fsspec {fsspec.__version__} does not know; use a path, "
                f"file://, s3://, gs://, abfs:// or another one it lists in fsspec.available_protocols()"
            ) from self._harmless(error)
        except Exception as error:  # Each file system raises errors of its own when its options do not fit.
            raise self._explained(error, "open", self.url) from self._harmless(error)
        root = str(root).rstrip("/")
        if not root and set([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol) & (
            _OBJECT_STORES - {"memory"}
        ):
            raise CheckpointError(f"{self.url} names no bucket; write {scheme}://BUCKET/DIRECTORY")
        return fs, root

    def _path(self, identifier: str, name: str = "") -> str:
        if parse_identifier(identifier) is None:
            raise ValueError(f"{identifier!r} is not the name of a checkpoint such as 'step-00001234-g5'")
        return f"{self._root}/{identifier}/{name}".rstrip("/")

    def _start(self, identifier: str) -> None:
        """Refuse to write into a committed checkpoint, and make the directory; once for each."""
        if identifier in self._started:
            return
        self._fs.invalidate_cache()
        if self._fs.exists(self._path(identifier, MANIFEST_NAME)):
            raise CheckpointError(
                f"checkpoint {identifier} in {self.url} is complete already and is not overwritten; use the identifier "
                f"of a newer generation, or delete its directory"
            )
        if not self._is_object_store:
            self._fs.makedirs(self._path(identifier), exist_ok=True)
        self._started.add(identifier)

    def _put_manifest(self, identifier: str, data: bytes) -> None:
        path = self._path(identifier, MANIFEST_NAME)
        if self._is_object_store:
            self._fs.pipe_file(path, data)
            return
        temporary = self._path(identifier, f".{MANIFEST_NAME}.{secrets.token_hex(4)}")
        with self._fs.open(temporary, "wb") as file:
            file.write(data)
            self._make_durable(file)
        if self._is_local:
            os.replace(temporary, path)  # mv() of older fsspec copies.
        else:
            self._fs.mv(temporary, path)

    def _make_durable(self, file: Any) -> None:
        """Bring a local file to the disk, lest a manifest survives a power failure that its files do not."""
        if self._is_local:
            file.flush()
            os.fsync(file.fileno())

    def _identifiers(self) -> list[str]:
        """Return what looks like a checkpoint, newest first."""
        found = {name: parsed for name in self._list(self._root) if (parsed := parse_identifier(name)) is not None}
        return sorted(found, key=lambda name: found[name], reverse=True)

    def _sizes(self, identifier: str) -> dict[str, int]:
        return self._list(self._path(identifier))

    def _list(self, path: str) -> dict[str, int]:
        """Return the sizes of what is in a directory now, by name; nothing if it does not exist."""
        self._fs.invalidate_cache()  # Other instances write here, too.
        try:
            entries = self._fs.ls(path or "/", detail=True)
        except FileNotFoundError:
            return {}
        return {entry["name"].rstrip("/").rpartition("/")[2]: int(entry.get("size") or 0) for entry in entries}

    def _why_incomplete(self, identifier: str) -> str | None:
        """Say what is wrong with a checkpoint as far as sizes show it; None if nothing is."""
        if identifier in self._damaged:
            return self._damaged[identifier]
        sizes = self._sizes(identifier)
        if MANIFEST_NAME not in sizes:
            return f"{MANIFEST_NAME} is missing: it was never finished"
        try:
            manifest = _parse(identifier, self._fs.cat_file(self._path(identifier, MANIFEST_NAME)))
        except (ValueError, FileNotFoundError) as error:
            return f"{MANIFEST_NAME} is damaged: {error}"
        why = _difference(manifest, sizes)
        if why is None:
            self._manifests[identifier] = manifest
        return why

    def _read(self, identifier: str, name: str) -> bytes:
        path = self._path(identifier, name)
        try:
            with self._storage("read", f"{identifier}/{name}"):
                return bytes(self._fs.cat_file(path))
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                self._damaged[identifier] = f"{name} is missing"
            raise

    def _damage(self, identifier: str, name: str, why: str) -> CheckpointError:
        """Remember that a checkpoint is damaged, and return the error that says so."""
        self._damaged[identifier] = f"{name} is damaged: {why}"
        self._manifests.pop(identifier, None)
        return CheckpointError(f"checkpoint {identifier} in {self.url}: {self._damaged[identifier]}")

    def _delete(self, identifier: str) -> None:
        _logger.info("delete checkpoint %s in %s", identifier, self.url)
        manifest = self._path(identifier, MANIFEST_NAME)
        # First the manifest: if this process dies now, what is left is not taken for a checkpoint.
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(manifest)
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(identifier), recursive=True)
        self._manifests.pop(identifier, None)
        self._started.discard(identifier)
        self._damaged.pop(identifier, None)

    def _tell(self, newest: CheckpointRef | None) -> None:
        """Log what was passed over, when that changes."""
        told = (None if newest is None else newest.identifier, self.skipped)
        if told == self._told:
            return
        self._told = told
        for identifier, why in self.skipped.items():
            parsed = parse_identifier(identifier)
            if newest is None or parsed is None:
                rest = "there is no older one"
            else:
                rest = f"{newest.identifier} is the newest complete one, {parsed[0] - newest.step} steps earlier"
            _logger.warning("checkpoint %s in %s cannot be used: %s; %s", identifier, self.url, why, rest)

    @contextlib.contextmanager
    def _storage(self, action: str, what: str) -> Iterator[None]:
        """Turn whatever a file system raises into an error that says what to do."""
        try:
            yield
        except ParcaeError:
            raise
        except (OSError, RuntimeError, NotImplementedError, ValueError) as error:
            raise self._explained(error, action, what) from self._harmless(error)
        except Exception as error:
            # Clients of object stores have errors of their own (botocore, aiohttp, gcsfs), which share no base class.
            if type(error).__module__.partition(".")[0] in ("builtins", "lightning_parcae"):
                raise  # A mistake in this program, not in the store.
            raise self._explained(error, action, what) from self._harmless(error)

    def _explained(self, error: Exception, action: str, what: str) -> CheckpointError:
        place = what if what == self.url else f"{what} in {self.url}"
        found = redact(f"{type(error).__name__}: {error}", [*self._secrets, *_passwords(self._raw_url)])
        return CheckpointError(f"could not {action} {place}: {found}; {_advice(error)}")

    def _harmless(self, error: Exception) -> Exception | None:
        """Return the error as a cause if its text, which a traceback shows, has no credentials."""
        chain: BaseException | None = error
        while chain is not None:
            text = str(chain)
            if redact(text, [*self._secrets, *_passwords(self._raw_url)]) != text:
                return None
            chain = chain.__cause__ or chain.__context__
        return error


def redact(text: str, secret_texts: Iterable[str] = ()) -> str:
    """Hide user names and passwords of URLs, values of their queries, and given secrets.

    Example:
        >>> redact("ftp://me:pw@host/run?sig=abc&x=1")
        'ftp://***@host/run?sig=***&x=***'
    """
    for secret in secret_texts:
        text = text.replace(secret, "***")
    return _QUERY_VALUE.sub(r"\1***", _USER_INFO.sub("***@", text))


def _difference(manifest: Manifest, sizes: Mapping[str, int]) -> str | None:
    """Say which file of a manifest is not as it should be."""
    for file in manifest.files:
        if file.name not in sizes:
            return f"{file.name} is missing"
        if sizes[file.name] != file.num_bytes:
            return f"{file.name} is truncated: wanted {file.num_bytes} bytes, found {sizes[file.name]}"
    return None


def _parse(identifier: str, data: bytes) -> Manifest:
    manifest = Manifest.from_bytes(data)
    if manifest.identifier != identifier:
        raise ValueError(f"it describes {manifest.identifier!r}")
    return manifest


def _secrets_of(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets_of(value)
        elif isinstance(value, str) and len(value) >= 4 and _SECRET_OPTION.search(str(name)):
            yield value
            yield quote(value, safe="")


def _passwords(url: str) -> list[str]:
    """Return the password in a URL, which an error may print without the URL."""
    match = _USER_INFO.search(url)
    password = match[0][:-1].partition(":")[2] if match else ""
    return [password] if len(password) >= 4 else []


def _advice(error: Exception) -> str:
    text = f"{type(error).__name__} {error}".lower()
    if "nosuchbucket" in text or "bucket does not exist" in text or "bucket not exists" in text:
        return "create the bucket, or correct the URL"
    if isinstance(error, FileNotFoundError):
        return "create the bucket or directory, or correct the URL"
    if isinstance(error, PermissionError) or any(
        word in text for word in ("credential", "accessdenied", "access denied", "forbidden", "invalidaccesskey", "403")
    ):
        return "give this instance credentials that may list, read, write and delete there"
    if isinstance(error, NotImplementedError):
        return "this file system cannot be written; use another URL"
    if isinstance(error, (NotADirectoryError, FileExistsError)):
        return "a file is where a directory is needed; use another path"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, or use another URL"
    return "check the URL, the storage options and the network"
