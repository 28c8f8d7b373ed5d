"""Find, tune, shut down and close the sockets of one generation by their endpoints.

Gloo offers no way to release an operation that waits for a stopped peer; shutting down its sockets does. Which sockets
are gloo's is decided by what they are connected to (the listener of our gloo device, or the listener a peer published),
never by when they appeared, so that a logger's or an object store's connection is never hit. Linux only: elsewhere
nothing is found, and a blocked operation ends at the timeout of its process group.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

Address = tuple[str, int]
_Made = TypeVar("_Made")
_FD_DIR = "/proc/self/fd"


@dataclass(frozen=True, slots=True)
class OpenSocket:
    """A socket of this process; the inode tells whether ``fd`` still names it."""

    fd: int
    inode: str


@dataclass(eq=False)
class Endpoints:
    """The addresses that belong to one owner (a generation or a rendezvous store).

    Attributes:
        local: Our listeners: sockets bound here, accepted ones included, belong to the owner.
        remote: Listeners of others: sockets connected to them belong to the owner.
    """

    local: set[Address] = field(default_factory=set)
    remote: set[Address] = field(default_factory=set)


_registered: weakref.WeakSet[Endpoints] = weakref.WeakSet()


def close_in_children(endpoints: Endpoints) -> None:
    """Close these sockets in forked children for as long as ``endpoints`` lives.

    A loader worker that inherits them keeps the connection open after its parent was killed, and peers learn of the
    death only when the worker has gone too: seconds instead of milliseconds.
    """
    _registered.add(endpoints)


def _numeric(address: object) -> Address | None:
    if not isinstance(address, tuple) or len(address) < 2:
        return None  # a UNIX socket
    host = str(address[0])
    return host.removeprefix("::ffff:"), int(address[1])


def _duplicate(fd: int) -> socket.socket:
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _sockets() -> Iterator[tuple[OpenSocket, socket.socket]]:
    """Yield every socket of this process with a duplicate to work on; the duplicate is closed afterwards."""
    try:
        names = os.listdir(_FD_DIR)
    except OSError:
        return
    for name in names:
        try:
            inode = os.readlink(f"{_FD_DIR}/{name}")
            if not inode.startswith("socket:"):
                continue
            copy = _duplicate(int(name))
        except OSError:
            continue  # closed by another thread meanwhile
        try:
            if os.readlink(f"{_FD_DIR}/{copy.fileno()}") == inode:
                yield OpenSocket(int(name), inode), copy
        except OSError:
            continue
        finally:
            copy.close()


def connected(endpoints: Endpoints) -> list[OpenSocket]:
    """Return the connected sockets (no listeners) that belong to ``endpoints``."""
    found = []
    for item, sock in _sockets():
        try:
            remote = _numeric(sock.getpeername())
            local = _numeric(sock.getsockname())
        except OSError:
            continue
        if remote in endpoints.remote or local in endpoints.local:
            found.append(item)
    return found


def listeners() -> dict[str, Address]:
    """Return the listening TCP sockets of this process, by inode."""
    found: dict[str, Address] = {}
    for item, sock in _sockets():
        with contextlib.suppress(OSError):
            address = _numeric(sock.getsockname())
            if address is not None and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[item.inode] = address
    return found


def make_with_listener(make: Callable[[], _Made], attempts: int = 50) -> tuple[_Made, Address | None]:
    """Make something that opens one listener, and say which one it opened.

    If another thread opens a listener at the same moment there are two candidates: then the thing is dropped and made
    again until there is no doubt.

    Returns:
        The thing, and the address of its listener or None where it cannot be known.
    """
    for _ in range(attempts):
        before = listeners()
        made = make()
        fresh = [address for inode, address in listeners().items() if inode not in before]
        if len(fresh) == 1:
            return made, fresh[0]
        if not fresh:
            return made, None
        del made
    return make(), None


def shut_down(items: list[OpenSocket], how: int = socket.SHUT_RDWR) -> int:
    """Shut the sockets down, those that are still the same; return how many."""
    count = 0
    for item in items:
        try:
            copy = _duplicate(item.fd)
        except OSError:
            continue
        with copy, contextlib.suppress(OSError):
            # The number may have been given to another file meanwhile.
            if os.readlink(f"{_FD_DIR}/{copy.fileno()}") == item.inode:
                copy.shutdown(how)
                count += 1
    return count


def tune(items: list[OpenSocket], timeout_s: float) -> None:
    """Let the kernel find a vanished host: keep-alive 1/1/3 and TCP_USER_TIMEOUT.

    Args:
        items: Connected sockets.
        timeout_s: Seconds after which unacknowledged data breaks the connection.
    """
    options = [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", None), 1),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPINTVL", None), 1),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPCNT", None), 3),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_USER_TIMEOUT", None), max(1, int(timeout_s * 1000))),
    ]
    wanted = {item.inode for item in items}
    for item, sock in _sockets():
        if item.inode in wanted:
            for level, option, value in options:
                if option is not None:
                    with contextlib.suppress(OSError):
                        sock.setsockopt(level, option, value)


def _close_inherited() -> None:
    # Runs in a forked child: no locks, no logging, nothing that could fail loudly.
    owners = list(_registered)
    if not owners:
        return
    every = Endpoints(set().union(*(o.local for o in owners)), set().union(*(o.remote for o in owners)))
    inherited = []
    for item, sock in _sockets():
        is_ours = False
        with contextlib.suppress(OSError):
            is_ours = _numeric(sock.getsockname()) in every.local
            is_ours = is_ours or _numeric(sock.getpeername()) in every.remote  # a listener has no peer
        if is_ours:
            inherited.append(item.fd)
    for fd in inherited:
        with contextlib.suppress(OSError):
            os.close(fd)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)
