"""How long an instance with a notice may train on."""

from __future__ import annotations

import pytest

from lightning_parcae.control.hand_over import MIN_RESERVE_S, HandOver


def test_nothing_is_known_before_steps_have_been_seen() -> None:
    hand_over = HandOver()
    assert hand_over.reserve_s(5.0, 0) is None
    hand_over.formed(10.0, step=0, pause_s=0.5)
    assert hand_over.reserve_s(11.0, 1) is None
    assert hand_over.reserve_s(12.0, 2) == MIN_RESERVE_S


def test_long_steps_and_pauses_need_more() -> None:
    hand_over = HandOver()
    hand_over.formed(0.0, step=100, pause_s=5.0)
    hand_over.formed(10.0, step=100, pause_s=1.0)
    assert hand_over.reserve_s(90.0, 104) == pytest.approx(15 + 3 * (20 + 5))


def test_a_step_that_takes_longer_than_before_counts() -> None:
    hand_over = HandOver()
    hand_over.formed(0.0, step=0, pause_s=0.0)
    hand_over.formed(100.0, step=10, pause_s=0.0)  # 10 s each until now
    assert hand_over.reserve_s(101.0, 10) == MIN_RESERVE_S
    assert hand_over.reserve_s(130.0, 10) == pytest.approx(15 + 3 * 30)
    assert hand_over.reserve_s(130.0, 4) == pytest.approx(15 + 3 * 30)  # back at an older step


def test_old_pauses_are_forgotten() -> None:
    hand_over = HandOver()
    for index in range(12):
        hand_over.formed(100.0 * index, step=100 * index, pause_s=60.0 if index == 0 else 1.0)
    assert hand_over.reserve_s(1200.0, 1200) == MIN_RESERVE_S
