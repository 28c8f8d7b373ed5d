"""Whatever dies, is lost or is damaged: the newest complete checkpoint is found, and the reason is said."""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import fsspec
import pytest
import requests
import torch
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

from lightning_parcae.checkpoint.manifest import StoredFile, identifier_of, layer_name
from lightning_parcae.checkpoint.store import FallbackStore, redact
from lightning_parcae.control.messages import CheckpointRef
from lightning_parcae.engine.wire import encode_tree
from lightning_parcae.errors import CheckpointError

NUM_LAYERS = 3
PASSWORD = "hunter22secret"


# For all, since what is started inside a test counts as left behind by it.
@pytest.fixture(scope="module", autouse=True)
def s3() -> Iterator[dict[str, Any]]:
    """Options of a bucket ``runs`` on a real server of the S3 protocol."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id="testing",
        aws_secret_access_key=PASSWORD,
        region_name="us-east-1",
    )
    client.create_bucket(Bucket="runs")
    client.close()
    options = {
        "endpoint_url": endpoint,
        "key": "testing",
        "secret": PASSWORD,
        "client_kwargs": {"region_name": "us-east-1"},
    }
    FallbackStore("s3://runs/warm", storage_options=options).check_writable()
    yield options
    for fs in S3FileSystem._cache.values():
        S3FileSystem.close_session(fs.loop, fs.s3)  # Or its connections are found unclosed when pytest ends.
    S3FileSystem.clear_instance_cache()
    server.stop()


Place = tuple[str, dict[str, Any]]


@pytest.fixture(params=["path", "file", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A URL that nothing exists below, and its storage options."""
    kind = request.param
    if kind == "s3":
        return f"s3://runs/{uuid.uuid4().hex}/job", request.getfixturevalue("s3")
    urls = {"path": f"{tmp_path}/a/b", "file": f"file://{tmp_path}/a b", "memory": f"memory://{uuid.uuid4().hex}/x"}
    return urls[kind], {}


def open_store(place: Place, **options: Any) -> FallbackStore:
    return FallbackStore(place[0], storage_options=place[1], **options)


def write(store: FallbackStore, step: int, generation: int = 1, *, commit: bool = True) -> list[StoredFile]:
    name = identifier_of(step, generation)
    files = [
        store.write_layer(name, index, {"weight": torch.full((1000,), step + index / 8), "step": step})
        for index in range(NUM_LAYERS)
    ]
    files.append(store.write_blob(name, "trainer", f"trainer of {step}".encode()))
    if commit:
        result = store.commit(name, step, files, num_layers=NUM_LAYERS, clock=2 * step, reason="test")
        assert result == CheckpointRef(name, step)
    return files


def assert_loads(store: FallbackStore, step: int) -> None:
    newest = store.newest_complete()
    assert newest is not None
    assert newest.step == step
    for index in range(NUM_LAYERS):
        layer = store.read_layer(newest.identifier, index)
        assert layer["step"] == step
        assert torch.equal(layer["weight"], torch.full((1000,), step + index / 8))
    assert store.read_blob(newest.identifier, "trainer") == f"trainer of {step}".encode()


def raw(place: Place) -> tuple[Any, str]:
    """The file system and directory, to do damage."""
    fs, root = fsspec.core.url_to_fs(place[0], **place[1])
    fs.invalidate_cache()
    return fs, root


def test_what_is_written_is_read_by_another_process_s_store(place: Place) -> None:
    store = open_store(place)
    store.check_writable()
    assert store.newest_complete() is None
    write(store, 10)
    other = open_store(place)
    assert_loads(other, 10)
    manifest = other.manifest(identifier_of(10, 1))
    assert (manifest.step, manifest.clock, manifest.num_layers, manifest.reason) == (10, 20, NUM_LAYERS, "test")
    fs, root = raw(place)
    names = sorted(path.rpartition("/")[2] for path in fs.find(root))
    assert names == [*(f"layer-000{index}.bin" for index in range(NUM_LAYERS)), "manifest.json", "trainer.bin"]


def test_several_instances_write_one_checkpoint(place: Place) -> None:
    name = identifier_of(7, 2)
    one, two = open_store(place), open_store(place)
    files = [one.write_layer(name, 0, [1]), two.write_layer(name, 1, [2])]
    sent = [StoredFile.from_json(json.loads(json.dumps(file.to_json()))) for file in files]
    one.commit(name, 7, sent, num_layers=2)
    assert two.newest_complete() == CheckpointRef(name, 7)
    assert open_store(place).read_layer(name, 1) == [2]


def test_the_newest_is_by_step_then_generation(place: Place) -> None:
    store = open_store(place, keep=5)
    for step, generation in ((100_000_000, 1), (9, 12), (9, 3)):
        write(store, step, generation)
    assert store.newest_complete() == CheckpointRef("step-100000000-g1", 100_000_000)
    store.prune(1)
    write(store, 100_000_000, 12)
    write(store, 100_000_000, 7)
    assert store.newest_complete() == CheckpointRef("step-100000000-g12", 100_000_000)


def test_without_a_manifest_it_is_no_checkpoint(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(place)
    write(store, 10)
    write(store, 20, commit=False)
    assert_loads(store, 10)
    assert store.skipped == {identifier_of(20, 1): "manifest.json is missing: it was never finished"}
    assert "step-00000010-g1 is the newest complete one, 10 steps earlier" in caplog.text
    caplog.clear()
    store.newest_complete()
    assert caplog.text == ""  # Said once.


@pytest.mark.parametrize("damage", ["missing", "truncated", "longer", "manifest"])
def test_a_damaged_one_is_passed_over_and_named(place: Place, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    write(open_store(place), 10)
    write(open_store(place), 25)
    fs, root = raw(place)
    name = "manifest.json" if damage == "manifest" else "layer-0001.bin"
    path = f"{root}/{identifier_of(25, 1)}/{name}"
    data = fs.cat_file(path)
    if damage == "missing":
        fs.rm_file(path)
    else:
        fs.pipe_file(path, data + b"x" if damage == "longer" else data[:-7])
    store = open_store(place)
    assert_loads(store, 10)
    assert name in store.skipped[identifier_of(25, 1)]
    assert "15 steps earlier" in caplog.text
    assert name in caplog.text
    # It is not counted as one to keep, and goes when a newer one is there.
    write(store, 30)
    assert sorted(path.rpartition("/")[2] for path in fs.ls(root, detail=False, refresh=True)) == [
        identifier_of(10, 1),
        identifier_of(30, 1),
    ]


def test_damage_that_sizes_hide_is_found_on_reading(place: Place) -> None:
    write(open_store(place), 10)
    write(open_store(place), 20)
    fs, root = raw(place)
    path = f"{root}/{identifier_of(20, 1)}/layer-0002.bin"
    data = bytearray(fs.cat_file(path))
    data[-100] ^= 1
    fs.pipe_file(path, bytes(data))
    store = open_store(place)
    assert store.newest_complete() == CheckpointRef(identifier_of(20, 1), 20)
    assert store.read_layer(identifier_of(20, 1), 1)["step"] == 20
    with pytest.raises(CheckpointError, match=r"step-00000020-g1 .*layer-0002\.bin is damaged: .* hash"):
        store.read_layer(identifier_of(20, 1), 2)
    assert_loads(store, 10)
    assert "layer-0002.bin" in store.skipped[identifier_of(20, 1)]


def test_a_file_that_vanishes_is_named(place: Place) -> None:
    store = open_store(place)
    write(store, 10)
    write(store, 20)
    assert store.newest_complete() == CheckpointRef(identifier_of(20, 1), 20)
    fs, root = raw(place)
    fs.rm_file(f"{root}/{identifier_of(20, 1)}/trainer.bin")
    with pytest.raises(CheckpointError, match=r"could not read step-00000020-g1/trainer\.bin"):
        store.read_blob(identifier_of(20, 1), "trainer")
    assert_loads(store, 10)


def test_reading_what_was_never_there(place: Place) -> None:
    store = open_store(place)
    with pytest.raises(CheckpointError, match=r"could not read step-00000009-g1/manifest\.json"):
        store.read_layer(identifier_of(9, 1), 0)
    write(store, 10)
    with pytest.raises(CheckpointError, match=r"has no file layer-0009\.bin"):
        store.read_layer(identifier_of(10, 1), 9)


def test_a_moved_manifest_does_not_pass(place: Place) -> None:
    store = open_store(place)
    write(store, 10)
    fs, root = raw(place)
    data = fs.cat_file(f"{root}/{identifier_of(10, 1)}/manifest.json")
    write(store, 11, commit=False)
    fs.pipe_file(f"{root}/{identifier_of(11, 1)}/manifest.json", data)
    assert_loads(open_store(place), 10)


def test_commit_refuses_what_is_not_there(place: Place) -> None:
    store = open_store(place)
    files = write(store, 10, commit=False)
    name = identifier_of(10, 1)
    with pytest.raises(CheckpointError, match=r"no file for 1 of 4 layers: \[3\]"):
        store.commit(name, 10, files, num_layers=4)
    with pytest.raises(CheckpointError, match="does not name step 11"):
        store.commit(name, 11, files, num_layers=NUM_LAYERS)
    wrong = StoredFile(files[0].name, files[0].num_bytes + 1, files[0].sha256)
    with pytest.raises(CheckpointError, match=r"layer-0000\.bin is truncated"):
        store.commit(name, 10, [wrong, *files[1:]], num_layers=NUM_LAYERS)
    missing = StoredFile("other.bin", 1, "0" * 64)
    with pytest.raises(CheckpointError, match=r"other\.bin is missing"):
        store.commit(name, 10, [missing, *files], num_layers=NUM_LAYERS)
    assert store.newest_complete() is None


def test_a_committed_checkpoint_is_never_written_again(place: Place) -> None:
    store = open_store(place)
    files = write(store, 10)
    for again in (store, open_store(place)):
        with pytest.raises(CheckpointError, match="complete already and is not overwritten"):
            again.write_layer(identifier_of(10, 1), 0, [])
        with pytest.raises(CheckpointError, match="complete already"):
            again.commit(identifier_of(10, 1), 10, files, num_layers=NUM_LAYERS)
    assert_loads(store, 10)


def test_prune_keeps_the_newest_and_what_is_being_written(place: Place) -> None:
    store = open_store(place, keep=2)
    write(store, 5, commit=False)
    for step in (10, 20, 30):
        write(store, step)
    write(store, 40, commit=False)
    fs, root = raw(place)
    fs.pipe_file(f"{root}/notes.txt", b"not ours")
    assert sorted(store._list(root)) == ["notes.txt", *(identifier_of(step, 1) for step in (20, 30, 40))]
    assert store.prune(1) == [identifier_of(20, 1)]
    assert store.prune(1) == []
    assert_loads(store, 30)
    with pytest.raises(ValueError, match="at least 1"):
        store.prune(0)


def test_prune_without_a_complete_one_deletes_nothing(place: Place) -> None:
    store = open_store(place)
    write(store, 10, commit=False)
    write(store, 20, commit=False)
    assert store.prune() == []
    assert len(store._identifiers()) == 2


def test_the_check_leaves_nothing(place: Place) -> None:
    store = open_store(place)
    store.check_writable()
    fs, root = raw(place)
    assert not fs.exists(root) or fs.ls(root) == []


@pytest.mark.parametrize("identifier", ["..", "../other", "step-00000001-g1/..", "/etc", "", "step-1-g1"])
def test_no_path_leaves_the_directory(tmp_path: Path, identifier: str) -> None:
    store = FallbackStore(tmp_path / "run")
    with pytest.raises(ValueError, match="not the name of a checkpoint"):
        store.write_blob(identifier, "x", b"")
    with pytest.raises(ValueError, match="not the name of a checkpoint"):
        store.read_blob(identifier, "x")
    with pytest.raises(ValueError, match="cannot name a file"):
        store.write_blob(identifier_of(1, 1), "../x", b"")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_travel_names_its_owner(tmp_path: Path) -> None:
    store = FallbackStore(tmp_path)
    with pytest.raises(TypeError, match=r"trainer\.callbacks\.Mine\.foo is a object"):
        store.write_tree(identifier_of(1, 1), "trainer", {"callbacks": {"Mine": {"foo": object()}}})


def test_a_large_layer_is_written_in_pieces(place: Place) -> None:
    store = open_store(place)
    tree = {"w": torch.arange(10_000_000, dtype=torch.int32)}
    name = identifier_of(1, 1)
    store.commit(name, 1, [store.write_layer(name, 0, tree)], num_layers=1)
    assert torch.equal(open_store(place).read_layer(name, 0)["w"], tree["w"])


def test_a_step_taken_while_saving_does_not_mix_in(tmp_path: Path) -> None:
    # B-46: an asynchronous save that refers to live tensors holds two steps.
    store = FallbackStore(tmp_path)
    weights = [torch.full((300_000,), 1.0) for _ in range(4)]
    name = identifier_of(1, 1)
    staged = [encode_tree({"w": weight}, copy=True) for weight in weights]
    files: list[StoredFile] = []

    def save() -> None:
        files.extend(store.write_parts(name, layer_name(index), parts) for index, parts in enumerate(staged))

    thread = threading.Thread(target=save)
    thread.start()
    while thread.is_alive():
        for weight in weights:
            weight.add_(1.0)
    thread.join()
    store.commit(name, 1, files, num_layers=4)
    assert all(torch.equal(store.read_layer(name, index)["w"], torch.ones(300_000)) for index in range(4))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_killed_writer_leaves_the_last_good_one(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    # B-45: killed while saving, the file is truncated.
    url, options = f"file://{tmp_path}/run", {}
    if kind == "s3":
        url, options = f"s3://runs/{uuid.uuid4().hex}", request.getfixturevalue("s3")
    script = Path(__file__).with_name("killed_writers.py")
    root = str(Path(__file__).parents[2])
    ended = subprocess.run(
        [sys.executable, str(script), url, json.dumps(options), "20"],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "child:" not in ended.stderr
    results = json.loads(ended.stdout)
    assert len(results) == 20
    for result in results:
        assert result["committed"] <= result["found"] <= result["tried"]
    # The kills did hit: after a commit, and in the middle of writing.
    assert results[-1]["found"] > 0
    assert any(result["skipped"] > 0 for result in results)


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(
        CheckpointError, match=r"scheme 's4', which fsspec .* does not know; use a path, file://, s3://"
    ):
        FallbackStore("s4://bucket/run")


@pytest.mark.parametrize(("url", "text"), [("s3://", "names no bucket"), ("simplecache::s3://b/x", "chains")])
def test_unusable_urls_are_named(url: str, text: str, s3: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=text):
        FallbackStore(url, storage_options=s3)


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("abfs", "adlfs")])
def test_a_missing_package_is_named(scheme: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    # fsspec.registry is also the name of a read-only view, which hides the module.
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, scheme, raising=False)
    with pytest.raises(CheckpointError, match=rf"install it with `pip install {package}` on every instance"):
        FallbackStore(f"{scheme}://bucket/run")


def test_a_missing_bucket_is_named(s3: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"s3://nowhere/run: .*create the bucket, or correct the URL"):
        FallbackStore("s3://nowhere/run", storage_options=s3).check_writable()


def test_wrong_credentials_are_named_and_hidden(s3: dict[str, Any]) -> None:
    store = FallbackStore("s3://runs/denied", storage_options=s3)
    requests.post(f"{s3['endpoint_url']}/moto-api/reset-auth", data=b"0", timeout=5)  # From now on keys are checked.
    try:
        for attempt in (store.check_writable, store.newest_complete):
            with pytest.raises(CheckpointError, match="give this instance credentials that may") as error:
                attempt()
            assert PASSWORD not in str(error.value)
    finally:
        requests.post(f"{s3['endpoint_url']}/moto-api/reset-auth", data=b"inf", timeout=5)


def test_no_permission_is_named(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                closed.chmod(0o555)
                os.chdir(closed)  # The way there is closed to others, too.
                os.seteuid(65534)
            FallbackStore("." if os.geteuid() == 65534 else closed).check_writable()
        except CheckpointError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    assert "Permission denied" in text
    assert "give this instance credentials that may list, read, write and delete there" in text


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointError, match="a file is where a directory is needed"):
        FallbackStore(tmp_path / "run").check_writable()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FallbackStore(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store._fs, "open", full)
    with pytest.raises(CheckpointError, match=r"could not write step-00000001-g1/x\.bin in .*free some space"):
        store.write_blob(identifier_of(1, 1), "x", b"1")


def test_a_mistake_in_the_program_stays_one(tmp_path: Path) -> None:
    store = FallbackStore(tmp_path)
    with pytest.raises(TypeError):
        store.write_parts(identifier_of(1, 1), "x", [3])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"ftp://me:{PASSWORD}@127.0.0.1:9/run", "ftp://***@127.0.0.1:9/run"),
        (f"s5://me:{PASSWORD}@host/run?sig={PASSWORD}&x=1", "s5://***@host/run?sig=***&x=***"),
    ],
)
def test_no_message_shows_credentials(url: str, shown: str) -> None:
    with pytest.raises(CheckpointError) as error:
        FallbackStore(url).check_writable()
    shown_texts = []
    cause: BaseException | None = error.value
    while cause is not None:
        shown_texts.append(str(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    assert shown in shown_texts[0]
    assert all(PASSWORD not in text for text in shown_texts)


def test_secrets_of_options_are_hidden_in_any_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"secret": "abcd/efgh", "client_kwargs": {"aws_session_token": "tokentoken"}}
    monkeypatch.setattr("lightning_parcae.checkpoint.store.url_to_fs", lambda url, **_: fsspec.core.url_to_fs(url))
    store = FallbackStore(tmp_path, storage_options=options)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("refused: secret=abcd/efgh, abcd%2Fefgh, tokentoken")

    monkeypatch.setattr(store._fs, "pipe_file", fail)
    with pytest.raises(CheckpointError, match=r"refused: secret=\*\*\*, \*\*\*, \*\*\*") as error:
        store.check_writable()
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__


def test_redaction() -> None:
    assert (
        redact("see https://u:p@ss@h/x?a=1&b=2 and s3://bucket/key")
        == "see https://***@h/x?a=***&b=*** and s3://bucket/key"
    )


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1"):
        FallbackStore(tmp_path, keep=0)


def test_writers_in_threads(place: Place) -> None:
    store = open_store(place)
    name = identifier_of(1, 1)
    files: list[StoredFile] = []
    threads = [
        threading.Thread(target=lambda index=index: files.append(store.write_layer(name, index, [index])))
        for index in range(4)
    ]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.commit(name, 1, files, num_layers=4)
    assert [store.read_layer(name, index) for index in range(4)] == [[0], [1], [2], [3]]
    assert time.monotonic() - start < 20
