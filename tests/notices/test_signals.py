"""SIGTERM is a notice: the process lives on, somebody is told, and the former handler comes back."""

from __future__ import annotations

import logging
import os
import signal
import threading

import pytest

from lightning_parcae.notices.signals import SignalNotice


def test_a_signal_tells_and_does_not_end_the_process() -> None:
    told = threading.Event()
    former = signal.getsignal(signal.SIGTERM)
    notice = SignalNotice(told.set)
    notice.watch()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert told.wait(5)
    finally:
        notice.restore()
    assert signal.getsignal(signal.SIGTERM) is former


def test_the_one_that_is_told_may_take_the_lock_that_the_main_thread_holds() -> None:
    lock, told = threading.Lock(), threading.Event()

    def tell() -> None:
        with lock:
            told.set()

    notice = SignalNotice(tell)
    notice.watch()
    try:
        with lock:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not told.wait(0.05)
        assert told.wait(5)
    finally:
        notice.restore()


def test_watching_again_wins_over_a_later_handler_and_restores_the_first() -> None:
    told, later = threading.Event(), threading.Event()
    former = signal.getsignal(signal.SIGTERM)
    notice = SignalNotice(told.set)
    notice.watch()
    signal.signal(signal.SIGTERM, lambda number, frame: later.set())
    notice.watch()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert told.wait(5)
    finally:
        notice.restore()
    assert not later.is_set()
    assert signal.getsignal(signal.SIGTERM) is former


def test_outside_of_the_main_thread_it_says_what_will_happen(caplog: pytest.LogCaptureFixture) -> None:
    former = signal.getsignal(signal.SIGTERM)
    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=SignalNotice(lambda: None).watch)
        thread.start()
        thread.join(5)
    assert "SIGTERM will end this instance" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is former
