"""The blackboard: values wait for readers, readers wait for values, and nobody can break it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from lightning_parcae.engine.rendezvous import RendezvousClient, RendezvousStore, split_address


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    made = RendezvousStore("127.0.0.1")
    yield made
    made.close()


def test_readers_wait_for_values(store: RendezvousStore) -> None:
    reader, writer = RendezvousClient(store.address, 10), RendezvousClient(store.address, 10)
    writer.set("early", b"1")
    found: dict[str, bytes] = {}
    thread = threading.Thread(target=lambda: reader.collect(["late", "early"], found.__setitem__))
    thread.start()
    while "early" not in found:
        time.sleep(0.001)
    assert "late" not in found
    writer.set("late", "two")
    thread.join(10)
    assert found == {"early": b"1", "late": b"two"}
    assert writer.get("late") == b"two"
    reader.wait(["early", "late"])
    reader.close()
    writer.close()


def test_closing_a_client_releases_it(store: RendezvousStore) -> None:
    client = RendezvousClient(store.address, 30)
    errors: list[Exception] = []

    def read() -> None:
        try:
            client.get("never")
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.05)
    client.close()
    thread.join(5)
    assert not thread.is_alive() and errors
    other = RendezvousClient(store.address, 5)  # the store has not been hurt
    other.set("never", b"x")
    assert other.get("never") == b"x"
    other.close()


def test_a_reader_gives_up_in_time(store: RendezvousStore) -> None:
    client = RendezvousClient(store.address, 0.05)
    with pytest.raises(TimeoutError):
        client.get("never")
    client.close()


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"S\x00\x01\xff\xff\xff\xffk", b"\x00" * 64])
def test_strangers_are_sent_away(store: RendezvousStore, garbage: bytes) -> None:
    with socket.create_connection(split_address(store.address), timeout=5) as stranger:
        stranger.sendall(garbage)
        assert stranger.recv(100) == b""
    client = RendezvousClient(store.address, 5)
    client.set("k", b"v")
    assert client.get("k") == b"v"
    client.close()


def test_large_values_and_a_store_that_goes() -> None:
    store = RendezvousStore("127.0.0.1")
    client = RendezvousClient(store.address, 5)
    value = bytes(range(256)) * 1000
    client.set("k", value)
    assert client.get("k") == value
    store.close()
    with pytest.raises(ConnectionError):
        client.get("k")
    client.close()


@pytest.mark.parametrize("address", ["", "nowhere", "host:", ":1", "host:x"])
def test_bad_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)
