"""Measuring a link: numbers that make sense, and the rules of every other connection."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator

import pytest

from lightning_parcae.control.link import LinkServer, measure_link
from lightning_parcae.control.transport import parse_address
from lightning_parcae.errors import MembershipError

SECRET = b"0123456789abcdef"


@pytest.fixture
def server() -> Iterator[LinkServer]:
    served = LinkServer("127.0.0.1:0", SECRET)
    yield served
    served.close()


def test_measures_latency_and_bandwidth(server: LinkServer) -> None:
    link = measure_link(server.address, SECRET)
    assert 0 < link.latency_s < 1.0
    assert link.bytes_per_s > 1e6


def test_numbers_are_those_of_the_clock(server: LinkServer) -> None:
    # Readings are 0.1 s apart while the twenty echoes are timed, and 0.5 s for the stream, which then is long enough.
    readings = itertools.chain((0.1 * index for index in range(40)), (10.0, 10.5))
    link = measure_link(server.address, SECRET, clock=lambda: next(readings))
    assert link.latency_s == pytest.approx(0.05)
    assert link.bytes_per_s == pytest.approx((1 << 20) / 0.4)


def test_the_server_outlives_a_client_that_goes(server: LinkServer, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(MembershipError, match="secret"):
        measure_link(server.address, b"another secret that is long")
    with socket.create_connection(parse_address(server.address)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert measure_link(server.address, SECRET).bytes_per_s > 0
    assert "did not measure the link" in caplog.text


def test_nobody_listens_where_a_server_was_closed() -> None:
    served = LinkServer("127.0.0.1:0", b"")
    assert measure_link(served.address, b"").latency_s > 0
    served.close()
    with pytest.raises(OSError, match=r"refused|nobody"):
        measure_link(served.address, b"")


def test_other_hosts_are_served_with_a_secret_only() -> None:
    with pytest.raises(ValueError, match="without a job secret"):
        LinkServer("0.0.0.0:0", b"")
