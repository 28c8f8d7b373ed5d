"""Kills writers of checkpoints at random moments; prints what is left as JSON. Started by test_store.py.

Everything that touches the store runs in forked children: the clients of object stores are not safe to fork.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from typing import Any

import fsspec
import torch

from lightning_parcae.checkpoint.manifest import identifier_of
from lightning_parcae.checkpoint.store import FallbackStore

NUM_LAYERS = 3


def write_forever(store: FallbackStore, first_step: int, report: int) -> None:
    """Commit one checkpoint after the other; report that it begins, and each step when it is committed."""
    store.newest_complete()
    os.write(report, b"begin\n")
    step = first_step
    while True:
        name = identifier_of(step, 1)
        files = [
            store.write_layer(name, index, {"w": torch.full((200_000,), float(step)), "layer": index})
            for index in range(NUM_LAYERS)
        ]
        files.append(store.write_blob(name, "trainer", str(step).encode()))
        store.commit(name, step, files, num_layers=NUM_LAYERS)
        os.write(report, b"%d\n" % step)
        step += 1


def check(store: FallbackStore, report: int) -> None:
    """Load the newest checkpoint; report its step (-1: none) and how many were passed over."""
    newest = store.newest_complete()
    step = -1
    if newest is not None:
        step = newest.step
        assert store.read_blob(newest.identifier, "trainer") == str(step).encode()
        for index in range(NUM_LAYERS):
            layer = store.read_layer(newest.identifier, index)
            assert layer["layer"] == index
            assert torch.equal(layer["w"], torch.full((200_000,), float(step)))
    os.write(report, json.dumps([step, len(store.skipped)]).encode())


def in_child(body: Any) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            body(writer)
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    os.close(writer)
    return pid, reader


def read_lines(reader: int, count: int) -> bytes:
    data = b""
    while data.count(b"\n") < count:
        piece = os.read(reader, 1)
        if not piece:
            raise EOFError("the child ended by itself")
        data += piece
    return data


def read_all(reader: int) -> bytes:
    with os.fdopen(reader, "rb") as file:
        return file.read()


def main() -> None:
    url, options, attempts = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    fsspec.get_filesystem_class(url.partition(":")[0])  # Imports it once, not in each child.
    generator = random.Random(3)
    committed, tried, results = -1, 0, []
    period_s = 0.0
    for attempt in range(attempts):
        first_step = tried
        pid, reader = in_child(
            lambda report, first=first_step: write_forever(FallbackStore(url, storage_options=options), first, report)
        )
        begun = read_lines(reader, 1)
        start = time.monotonic()
        if attempt == 0:
            # How long one takes depends on the machine and on who else uses it.
            begun += read_lines(reader, 3)
            period_s = (time.monotonic() - start) / 3
        time.sleep(generator.uniform(0, 2 * period_s))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        reports = (begun + read_all(reader)).split()[1:]
        committed = int(reports[-1]) if reports else committed
        tried = first_step + len(reports) + 1
        pid, reader = in_child(lambda report: check(FallbackStore(url, storage_options=options), report))
        found, skipped = json.loads(read_all(reader) or b"[-2, 0]")
        os.waitpid(pid, 0)
        results.append({"committed": committed, "found": found, "skipped": skipped, "tried": tried - 1})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
