"""Pure decisions about generations that are not seen through the coordinator's tests."""

from __future__ import annotations

import pytest

from lightning_parcae.control.decisions import serial_share


@pytest.mark.parametrize(
    ("transfers", "share"),
    [
        ([], 0.0),
        ([(0, "a", "b")], 1.0),
        ([(0, "a", "b"), (1, "c", "d")], 0.75),  # side by side: the larger one counts
        ([(0, "a", "b"), (1, "a", "c")], 1.0),  # one donor, one after the other
        ([(0, "a", "c"), (1, "b", "c"), (0, "a", "d"), (1, "b", "d")], 0.75),  # b sends its layer twice
        ([(2, "a", "b")], 0.0),  # a layer without state
    ],
)
def test_the_busiest_member_takes_the_time(transfers: list[tuple[int, str, str]], share: float) -> None:
    assert serial_share(transfers, [100, 300, 0]) == pytest.approx(share)
