"""Speed of moving state against raw TCP on the same link, interleaved in one run of two processes.

    python tests/benchmarks/transfer.py [--megabytes 256] [--tensors 48] [--rounds 9]

Three ways take turns: raw sendall/recv_into between memory that exists already; the same into memory that is
allocated for each transfer, which is what a receiver of new state must do; StateServer to StateClient.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_parcae.engine.transfer import StateClient, StateServer
from lightning_parcae.engine.wire import byte_view

SECRET, JOB = b"0123456789abcdef", "benchmark"


def tensors(megabytes: int, count: int, value: float) -> list[torch.Tensor]:
    return [torch.full(((megabytes << 20) // 4 // count,), value) for _ in range(count)]


def serve(arguments: argparse.Namespace) -> None:
    """Sender: raw on request byte ``r``, and a state server."""
    state = tensors(arguments.megabytes, arguments.tensors, 1.0)
    server = StateServer(lambda key, generation: state, bind_host="127.0.0.1", secret=SECRET, job_id=JOB)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(json.dumps([listener.getsockname()[1], server.address]), flush=True)
        raw, _ = listener.accept()
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while raw.recv(1):
            for tensor in state:
                raw.sendall(byte_view(tensor))
        raw.close()
    server.close()


def receive_raw(raw: socket.socket, targets: list[torch.Tensor]) -> list[torch.Tensor]:
    raw.sendall(b"r")
    for tensor in targets:
        view = byte_view(tensor)
        offset = 0
        while offset < len(view):
            count = raw.recv_into(view[offset : offset + (8 << 20)])
            assert count
            offset += count
    return targets


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    command = [sys.executable, __file__, "--serve", *sys.argv[1:]]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert process.stdout is not None
        port, address = json.loads(process.stdout.readline())
        # Left first, also on an error: its end of file ends the other process.
        raw = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kept = tensors(arguments.megabytes, arguments.tensors, 0.0)
        size = kept[0].numel()
        client = StateClient(SECRET, JOB, "receiver")
        requests = [(address, "layer:0")]
        ways: dict[str, Callable[[], Any]] = {
            "raw TCP, memory kept": lambda: receive_raw(raw, kept),
            "raw TCP, fresh memory": lambda: receive_raw(raw, [torch.empty(size) for _ in range(arguments.tensors)]),
            "StateClient": lambda: client.fetch_many(requests, 1, 30.0)[0],
        }
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(arguments.rounds + 1):
            for name, way in ways.items():
                start = time.perf_counter()
                received = way()
                duration = time.perf_counter() - start
                assert all(float(tensor[-1]) == 1.0 for tensor in received)
                del received
                if turn:  # The first round warms up.
                    speeds[name].append((arguments.megabytes << 20) / duration / 1e9)
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.serve:
        serve(arguments)
        return
    speeds = measure(arguments)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    for name, median in medians.items():
        print(f"{name:24s} median {median:.2f} GB/s, best {max(speeds[name]):.2f} GB/s")
    for name in list(medians)[:2]:
        print(f"StateClient / {name}: {medians['StateClient'] / medians[name]:.0%}")


if __name__ == "__main__":
    main()
