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
    """Commit one checkpoint after the other; report each step when it is committed."""
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


def read_all(reader: int) -> bytes:
    with os.fdopen(reader, "rb") as file:
        return file.read()


def main() -> None:
    url, options, attempts, longest_s = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    fsspec.get_filesystem_class(url.partition(":")[0])  # Imports it once, not in each child.
    generator = random.Random(3)
    committed, tried, results = -1, 0, []
    for _ in range(attempts):
        first_step = tried
        pid, reader = in_child(
            lambda report, first=first_step: write_forever(FallbackStore(url, storage_options=options), first, report)
        )
        time.sleep(generator.uniform(0, longest_s))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        reports = read_all(reader).split()
        committed = int(reports[-1]) if reports else committed
        tried = first_step + len(reports) + 1
        pid, reader = in_child(lambda report: check(FallbackStore(url, storage_options=options), report))
        found, skipped = json.loads(read_all(reader) or b"[-2, 0]")
        os.waitpid(pid, 0)
        results.append({"committed": committed, "found": found, "skipped": skipped, "tried": tried - 1})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
