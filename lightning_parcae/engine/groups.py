"""The communication groups of one generation: raw gloo process groups that can be abandoned and aborted.

torch.distributed's default group is never used: Lightning broadcasts on it every batch and in its SIGTERM handler. A
generation shares one gloo device; its groups are built in a daemon thread, so that the caller can leave a formation
that will not end (an absent or stopped member) at once. Every failure is a :class:`GenerationBrokenError`: who died is
for the coordinator to say.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_parcae.engine import sockets
from lightning_parcae.engine.rendezvous import RendezvousClient, RendezvousStore, split_address
from lightning_parcae.engine.sockets import Endpoints, OpenSocket
from lightning_parcae.errors import GenerationBrokenError
from lightning_parcae.planning.job_profile import LinkSpeed
from lightning_parcae.planning.layout import Layout

__all__ = ["SLOT_BYTES", "Group", "Groups", "Pending", "RendezvousStore"]

log = logging.getLogger(__name__)

SLOT_BYTES = 4096
"""Payloads up to this size are gathered by one collective."""

_LENGTH_BYTES = 8
_BUCKET_BYTES = 8 << 20
_ALONE_BYTES = 1 << 20  # from here on copying a tensor into a bucket and back costs more than a collective of its own
_BUCKETS_IN_FLIGHT = 2
_POLL_S = 0.002
_SHUT_DOWN_PAUSE_S = 0.005
_SLICE = timedelta(seconds=2)
_PROBE_TAG = 1_000_004
_PROBE_REPEATS = 3
_PROBE_SPREAD = 5.0  # longest over shortest of equal messages
_PROBE_BYTES = (1 << 16, 1 << 20)
_PROBE_S = 0.03  # the pause of a formation must not grow by more
_ECHO, _END = -1, 0
_device_lock = threading.Lock()


class Pending:
    """A send or receive under way; it keeps its tensor alive."""

    __slots__ = ("__weakref__", "_generation", "_is_send", "_work", "tensor")

    def __init__(self, generation: _Generation, work: Any, tensor: Tensor, is_send: bool) -> None:
        self._is_send = is_send
        self._generation = generation
        self._work = work
        self.tensor = tensor
        if work is not None:
            generation.pending.add(self)

    def wait(self) -> Tensor:
        """Block until the tensor has left or arrived.

        Raises:
            GenerationBrokenError: If the communication failed or was aborted.
        """
        if self._work is not None:
            if self._is_send:
                self._generation.wait_for_sends([self])
                return self.tensor
            try:
                # without a timeout of its own it would end with the one of the formation, in the middle of a long step
                self._work.wait(self._generation.op_timeout)
            except RuntimeError as error:
                raise self._generation.broken(error) from error
            self._work = None
        return self.tensor

    def forget(self) -> None:
        """Let go of a send that the peer is known to have received."""
        self._work = None

    def drop(self) -> Any:
        """Give up the operation, which would keep gloo's sockets and listener; waiting for it fails from now on."""
        work, self._work = self._work, _Dropped()
        return work


class _Dropped:
    def wait(self, timeout: timedelta | None = None) -> None:
        raise RuntimeError("the groups were closed before the operation was complete")


class _Generation:
    """What the groups of one generation share: the abort switch and the sockets behind it."""

    def __init__(self, number: int, abort_event: threading.Event | None, op_timeout_s: float) -> None:
        self.number = number
        self.op_timeout = timedelta(seconds=op_timeout_s)
        self.endpoints = Endpoints()
        self.connections: list[OpenSocket] = []
        self.is_aborted = False
        self.pending: weakref.WeakSet[Pending] = weakref.WeakSet()
        self._abort_event = abort_event
        self._sender: _SendWaiter | None = None

    def check(self) -> None:
        if self.is_aborted or (self._abort_event is not None and self._abort_event.is_set()):
            raise self.broken(None)

    def broken(self, error: BaseException | None) -> GenerationBrokenError:
        if self.is_aborted or (self._abort_event is not None and self._abort_event.is_set()):
            return GenerationBrokenError(f"generation {self.number} was aborted")
        return GenerationBrokenError(f"a communication of generation {self.number} failed: {error}")

    def abort(self) -> int:
        self.is_aborted = True
        # Reading first: gloo then sees the end of the stream and fails what is pending. If writing failed first, it
        # would lose a send that is just about to start: nobody would ever be told.
        count = sockets.shut_down(self.connections, socket.SHUT_RD)
        time.sleep(_SHUT_DOWN_PAUSE_S)
        sockets.shut_down(self.connections)
        return count

    def wait_for_sends(self, sends: list[Pending]) -> None:
        """Wait in another thread: gloo can lose a send whose connection breaks as it starts, and wait for ever."""
        if self._sender is None:
            self._sender = _SendWaiter()
        done = self._sender.wait_for(sends)
        while not done.event.wait(_POLL_S * 10):
            if self.is_aborted or (self._abort_event is not None and self._abort_event.is_set()):
                self._sender = None  # it may be stuck; it ends with the operation
                raise self.broken(None)
        if done.error is not None:
            raise self.broken(done.error) from done.error

    def wait_for_collective(self, work: Any) -> None:
        # Unlike one of a send or receive, the timeout of this wait leaves the operation alone.
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                if work.is_completed() or self.is_aborted:
                    raise self.broken(error) from error
                self.check()

    def end(self) -> None:
        if self._sender is not None:
            self._sender.end()
            self._sender = None


@dataclass(slots=True)
class _Done:
    event: threading.Event
    error: RuntimeError | None = None


class _SendWaiter:
    """A thread that waits for sends."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[list[Any], _Done] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="parcae-sends", daemon=True).start()

    def wait_for(self, sends: list[Pending]) -> _Done:
        done = _Done(threading.Event())
        self._queue.put((sends, done))
        return done

    def end(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            sends, done = item
            try:
                for send in sends:
                    work = send._work
                    if work is not None:
                        work.wait(send._generation.op_timeout)
                        send._work = None
            except RuntimeError as error:
                done.error = error
            done.event.set()
            del item, sends, done


class Group:
    """Members of a generation that talk to each other.

    Ranks, peers and sources are positions in this group. One thread at a time may use each direction to a peer.
    """

    def __init__(self, backend: Any, rank: int, size: int, generation: _Generation) -> None:
        self.rank = rank
        self.size = size
        self._backend = backend
        self._generation = generation
        # Kept from step to step: the page faults of fresh memory cost as much as the copies into it.
        self._free_buffers: list[Tensor] = []

    def isend(self, tensor: Tensor, peer: int, tag: int = 0) -> Pending:
        """Start to send a contiguous CPU tensor; do not write to it before ``wait()`` has returned."""
        self._generation.check()
        if tensor.numel() == 0:
            return Pending(self._generation, None, tensor, False)
        try:
            return Pending(self._generation, self._backend.send([tensor], peer, tag), tensor, True)
        except RuntimeError as error:
            raise self._generation.broken(error) from error

    def irecv(self, tensor: Tensor, peer: int, tag: int = 0) -> Pending:
        """Start to receive into a contiguous CPU tensor; ``wait()`` returns it filled."""
        self._generation.check()
        if tensor.numel() == 0:
            return Pending(self._generation, None, tensor, False)
        try:
            return Pending(self._generation, self._backend.recv([tensor], peer, tag), tensor, False)
        except RuntimeError as error:
            raise self._generation.broken(error) from error

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> None:
        """Send a contiguous CPU tensor; returns when the peer has posted its receive."""
        self.isend(tensor, peer, tag).wait()

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> None:
        """Fill a contiguous CPU tensor with what the peer sends under ``tag``."""
        self.irecv(tensor, peer, tag).wait()

    def wait_for_sends(self, sends: Sequence[Pending]) -> None:
        """Return when all have left.

        Raises:
            GenerationBrokenError: If the communication failed or was aborted.
        """
        if sends:
            self._generation.wait_for_sends(list(sends))

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Gather everybody's payload, by rank.

        One collective if nobody's payload is longer than :data:`SLOT_BYTES`, two otherwise.

        Raises:
            GenerationBrokenError: If the communication failed or was aborted.
        """
        self._generation.check()
        if self.size == 1:
            return [payload]
        length = len(payload)
        header = length.to_bytes(_LENGTH_BYTES, "little")
        gathered = self._all_gather(header + payload[:SLOT_BYTES], _LENGTH_BYTES + SLOT_BYTES)
        lengths = [int.from_bytes(item[:_LENGTH_BYTES], "little") for item in gathered]
        if max(lengths) > SLOT_BYTES:
            gathered = self._all_gather(payload, max(lengths))
            return [item[:count] for item, count in zip(gathered, lengths, strict=True)]
        return [item[_LENGTH_BYTES : _LENGTH_BYTES + count] for item, count in zip(gathered, lengths, strict=True)]

    def _all_gather(self, payload: bytes, width: int) -> list[bytes]:
        mine = torch.zeros(width, dtype=torch.uint8)
        mine.numpy()[: len(payload)] = memoryview(payload)
        everybodys = torch.empty(self.size, width, dtype=torch.uint8)
        try:
            work = self._backend.allgather([list(everybodys.unbind())], [mine])
        except RuntimeError as error:
            raise self._generation.broken(error) from error
        self._generation.wait_for_collective(work)
        return [row.numpy().tobytes() for row in everybodys.unbind()]

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Add up each tensor over the members, in place, with the same bits on each of them.

        All members pass tensors of the same shapes and dtypes in the same order. Small ones travel together.

        Raises:
            GenerationBrokenError: If the communication failed or was aborted.
        """
        self._generation.check()
        if self.size == 1:
            return
        running: list[tuple[list[Tensor], Tensor, Tensor | None, Any]] = []
        try:
            for bucket in _buckets(tensors):
                if len(running) == _BUCKETS_IN_FLIGHT:
                    self._finish(*running.pop(0))
                flat, buffer = self._flatten(bucket)
                running.append((bucket, flat, buffer, self._backend.allreduce([flat])))
            for item in running:
                self._finish(*item)
        except RuntimeError as error:
            raise self._generation.broken(error) from error

    def _finish(self, bucket: list[Tensor], flat: Tensor, buffer: Tensor | None, work: Any) -> None:
        self._generation.wait_for_collective(work)
        if flat.data_ptr() == bucket[0].data_ptr():
            return
        offset = 0
        for tensor in bucket:
            tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()
        if buffer is not None:
            self._free_buffers.append(buffer)

    def _flatten(self, bucket: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the bucket as one CPU tensor, and the buffer it lies in if that can be used again."""
        first = bucket[0]
        if first.device.type != "cpu":
            return torch.cat([tensor.reshape(-1) for tensor in bucket]).cpu(), None
        if len(bucket) == 1:
            return first.reshape(-1), None  # reduced where it lies, if it is contiguous
        buffer = self._free_buffers.pop() if self._free_buffers else torch.empty(_BUCKET_BYTES, dtype=torch.uint8)
        flat = buffer.view(first.dtype)[: sum(tensor.numel() for tensor in bucket)]
        torch.cat([tensor.reshape(-1) for tensor in bucket], out=flat)
        return flat, buffer

    def _drop(self) -> None:
        self._backend = None
        self._free_buffers = []


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors of one dtype and device, in order, until a bucket is full."""
    buckets: list[list[Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        tensor = tensor.detach()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        size = tensor.numel() * tensor.element_size()
        if size == 0:
            continue
        if size >= _ALONE_BYTES:
            buckets.append([tensor])
            continue
        key = (tensor.dtype, tensor.device)
        bucket, filled = filling.get(key, ([], 0))
        if bucket and filled + size > _BUCKET_BYTES:
            bucket, filled = [], 0
        if not bucket:
            buckets.append(bucket)
        bucket.append(tensor)
        filling[key] = (bucket, filled + size)
    return buckets


def _measure_link(group: Group, peer: int) -> LinkSpeed | None:
    data = torch.zeros(_PROBE_BYTES[-1], dtype=torch.uint8)

    def exchange(size: int) -> float:
        """Send an order and what it announces, and wait for the order's return; return the seconds."""
        order = torch.tensor([size])
        started = time.perf_counter()
        sends = [group.isend(order, peer, _PROBE_TAG), group.isend(data[: max(size, 0)], peer, _PROBE_TAG)]
        group.recv(torch.zeros_like(order), peer, _PROBE_TAG)
        took = time.perf_counter() - started
        group.wait_for_sends(sends)
        return took

    deadline = time.perf_counter() + _PROBE_S

    def repeat(size: int) -> list[float]:
        """Repeat an exchange within the time that is left; return the times."""
        times = [exchange(size)]
        while len(times) < _PROBE_REPEATS and time.perf_counter() + min(times) < deadline:
            times.append(exchange(size))
        return times

    echoes = repeat(_ECHO)
    size, times = 0, echoes
    for size in _PROBE_BYTES:
        times = repeat(size)
        if time.perf_counter() + min(times) * _PROBE_BYTES[-1] / size > deadline:
            break
    group.send(torch.tensor([_END]), peer, _PROBE_TAG)
    if any(max(found) > _PROBE_SPREAD * min(found) for found in (echoes, times)):
        return None  # a host is so busy that this says more of it than of the link
    echo_s, took_s = min(echoes), min(times)
    return LinkSpeed(latency_s=echo_s / 2, bytes_per_s=size / max(took_s - echo_s, took_s / 2))


def _answer_probe(group: Group, peer: int) -> None:
    order, data = torch.zeros(1, dtype=torch.int64), torch.empty(_PROBE_BYTES[-1], dtype=torch.uint8)
    while True:
        group.recv(order, peer, _PROBE_TAG)
        size = int(order)
        if size == _END:
            return
        group.recv(data[: max(size, 0)], peer, _PROBE_TAG)
        group.send(order, peer, _PROBE_TAG)


class Groups:
    """The groups that one instance is in during one generation.

    Attributes:
        generation: Number of the generation.
        world: All members, by rank.
        pipeline: The members of my pipeline, by stage; None if it has one stage or I have no place.
        replicas: The members of my stage, by pipeline; None if there is one pipeline or I have no place.
    """

    def __init__(self, state: _Generation, world: Group, pipeline: Group | None, replicas: Group | None) -> None:
        self.generation = state.number
        self.world = world
        self.pipeline = pipeline
        self.replicas = replicas
        self._state = state

    @classmethod
    def form(
        cls,
        layout: Layout,
        me: str,
        store_address: str,
        bind_host: str = "127.0.0.1",
        timeout_s: float = 30.0,
        abort_event: threading.Event | None = None,
        *,
        op_timeout_s: float = 3600.0,
        failure_timeout_s: float = 10.0,
    ) -> Groups:
        """Meet the other members of a generation.

        Args:
            layout: The generation's members and places; each generation number is formed once.
            me: My name in ``layout.order``.
            store_address: The store of rank 0's instance, ``"host:port"``.
            bind_host: Local address that peers can reach me at.
            timeout_s: Seconds until a formation with absent members is given up.
            abort_event: Set by another thread to leave the formation at once. Operations look at it too before they
                start, so an abort that arrives while the caller stores the result is not lost.
            op_timeout_s: Seconds after which a blocked operation fails where sockets cannot be shut down.
            failure_timeout_s: Seconds after which the kernel gives up on a vanished host.

        Raises:
            GenerationBrokenError: If the generation was not formed.
        """
        formation = _Formation(layout, me, store_address, bind_host, timeout_s, op_timeout_s, failure_timeout_s)
        formation.state = _Generation(layout.generation, abort_event, op_timeout_s)
        if len(layout.order) == 1:
            return cls(formation.state, Group(None, 0, 1, formation.state), None, None)
        # A daemon: gloo can wait for a peer's connection with nothing that would wake it before its timeout.
        threading.Thread(target=formation.run, name=f"parcae-form-{layout.generation}", daemon=True).start()
        deadline = time.monotonic() + timeout_s
        reason = ""
        while not formation.done.wait(_POLL_S):
            if abort_event is not None and abort_event.is_set():
                reason = "aborted"
            elif time.monotonic() > deadline:
                reason = f"not complete after {timeout_s:g} s; {formation.missing()}"
            if reason:
                break
        groups, error = formation.take(abandon=bool(reason))
        if groups is None:
            raise GenerationBrokenError(
                f"formation of generation {layout.generation} failed: {reason or error}"
            ) from error
        return groups

    def probe_link(self) -> LinkSpeed | None:
        """Measure the link to a neighbour, as the messages of a step meet it; all members call it together.

        Members pair up by rank: 0 and 1, 2 and 3. It takes a few messages and at most one of a megabyte, less where
        that would take long.

        Returns:
            What the member with the lower rank has measured; None for the other one, for one without a partner, and
            where equal messages took very different times.

        Raises:
            GenerationBrokenError: If the communication failed or was aborted.
        """
        peer = self.world.rank ^ 1
        if peer >= self.world.size:
            return None
        if self.world.rank < peer:
            return _measure_link(self.world, peer)
        _answer_probe(self.world, peer)
        return None

    def abort(self) -> None:
        """Release whatever is blocked on this generation, within milliseconds; may be called from any thread."""
        count = self._state.abort()
        log.debug("generation %d aborted, %d connections shut down", self.generation, count)

    def close(self) -> None:
        """Drop the groups; no operation may be running. Peers that still wait for us get an error."""
        self._state.is_aborted = True
        self._state.end()
        held = [group for group in (self.world, self.pipeline, self.replicas) if group is not None]
        backends = [group._backend for group in held if group._backend is not None]
        backends += [pending.drop() for pending in list(self._state.pending) if pending._work is not None]
        for group in held:
            group._drop()
        if not backends:
            return
        # gloo closes the pairs one after the other (10 ms each) unless they are shut down already.
        sockets.shut_down(self._state.connections)
        self._state.connections = []
        # A collective that is still stuck would block the destructor until its timeout: never in the caller's thread.
        dropper = threading.Thread(target=backends.clear, name="parcae-drop", daemon=True)
        dropper.start()
        dropper.join(0.5)


class _Formation:
    """Builds the groups of one generation in its own thread."""

    state: _Generation

    def __init__(
        self,
        layout: Layout,
        me: str,
        store_address: str,
        bind_host: str,
        timeout_s: float,
        op_timeout_s: float,
        failure_timeout_s: float,
    ) -> None:
        self.done = threading.Event()
        self._layout = layout
        self._me = me
        split_address(store_address)  # a bad one is the caller's error, not the generation's
        self._store_address = store_address
        self._bind_host = bind_host
        self._timeout = timedelta(seconds=timeout_s)
        self._op_timeout = timedelta(seconds=op_timeout_s)
        self._failure_timeout_s = failure_timeout_s
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._groups: Groups | None = None
        self._error: Exception | None = None
        self._store: RendezvousClient | None = None
        self._present: set[int] = set()

    def missing(self) -> str:
        names = [name for rank, name in enumerate(self._layout.order) if rank not in self._present]
        return f"missing: {', '.join(names)}" if names else "all members were present"

    def take(self, *, abandon: bool) -> tuple[Groups | None, Exception | None]:
        """Return the outcome; with ``abandon`` make the thread end as early as it can and drop what it builds."""
        with self._lock:
            groups, self._groups = self._groups, None
            if not abandon:
                return groups, self._error
            self._is_abandoned = True
        if groups is not None:
            groups.close()
        self.state.is_aborted = True
        if self._store is not None:
            self._store.close()
        sockets.shut_down(sockets.connected(self.state.endpoints))
        return None, self._error

    def run(self) -> None:
        try:
            groups = self._form()
            with self._lock:
                is_wanted = not self._is_abandoned
                if is_wanted:
                    self._groups = groups
            if not is_wanted:
                groups.close()
        except Exception as error:  # handed over to the thread that waits for the outcome
            self._error = error.with_traceback(None)  # the frames would keep half-built groups alive
        finally:
            if self._store is not None:
                self._store.close()  # formed groups have no use for it
            self.done.set()

    def _form(self) -> Groups:
        layout = self._layout
        rank = layout.rank_of(self._me)
        store = self._store = RendezvousClient(self._store_address, self._timeout.total_seconds())
        if self._is_abandoned:
            store.close()
        with _device_lock:
            host = self._local_host(store)
            device, address = sockets.make_with_listener(
                lambda: dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
            )
        endpoints = self.state.endpoints
        sockets.close_in_children(endpoints)
        if address is not None:
            endpoints.local.add(address)
        store.set(self._key(f"member/{rank}"), "" if address is None else f"{address[0]}:{address[1]}")
        self._meet(store, endpoints)

        place = layout.place_of(self._me)
        world = self._group("world", list(layout.order), store, device)
        pipeline = replicas = None
        if place is not None:
            row = list(layout.grid[place[0]])
            column = list(layout.replicas_of_stage(place[1]))
            if len(row) > 1:
                pipeline = self._group(f"pipeline/{place[0]}", row, store, device)
            if len(column) > 1:
                replicas = self._group(f"replicas/{place[1]}", column, store, device, threads=_BUCKETS_IN_FLIGHT)
        self.state.connections = sockets.connected(endpoints)
        if not self.state.connections:
            log.warning(
                "the connections of gloo cannot be found here; a hung peer is noticed only after %s", self._op_timeout
            )
        sockets.tune(self.state.connections, self._failure_timeout_s)
        return Groups(self.state, world, pipeline, replicas)

    def _local_host(self, store: RendezvousClient) -> str:
        # Peers must be told an address they can connect to: the one that faces the store.
        return store.local_host if self._bind_host in ("", "0.0.0.0", "::") else self._bind_host

    def _meet(self, store: RendezvousClient, endpoints: Endpoints) -> None:
        """Wait until every member has published its address.

        Only then are groups built, so that an absent member holds nobody inside gloo.
        """
        order = self._layout.order
        ranks = {self._key(f"member/{rank}"): rank for rank in range(len(order))}

        def found(key: str, value: bytes) -> None:
            self._present.add(ranks[key])
            if value and order[ranks[key]] != self._me:
                endpoints.remote.add(split_address(value.decode()))

        store.collect(list(ranks), found)

    def _key(self, name: str) -> str:
        return f"parcae/{self._layout.generation}/{name}"

    def _group(self, name: str, members: list[str], store: RendezvousClient, device: Any, threads: int = 1) -> Group:
        if self._is_abandoned:
            raise GenerationBrokenError(f"generation {self._layout.generation} was abandoned")
        rank = members.index(self._me)
        options = cast(Any, dist.ProcessGroupGloo)._Options()
        options._devices = [device]
        options._threads = threads
        options._timeout = self._timeout
        backend = dist.ProcessGroupGloo(dist.PrefixStore(self._key(name), store), rank, len(members), options)
        backend._set_default_timeout(self._op_timeout)
        return Group(backend, rank, len(members), self.state)
