"""The test suite's own guard: it must see what a test leaves behind, and only that."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def guarded(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(
        (Path(__file__).parent / "conftest.py").read_text().replace("_GRACE_S = 3.0", "_GRACE_S = 0.3")
    )
    return pytester


def run(guarded: pytest.Pytester, body: str) -> pytest.RunResult:
    guarded.makepyfile(body)
    return guarded.runpytest_inprocess("-p", "no:cacheprovider")


def test_thread_process_and_socket_left_behind_each_fail_their_own_test(guarded: pytest.Pytester) -> None:
    result = run(
        guarded,
        """
        import multiprocessing, os, socket, subprocess, sys, threading
        kept = []
        def test_thread():
            event = threading.Event()
            thread = threading.Thread(target=event.wait, args=(1.0,), name="straggler")
            kept.append(thread)
            thread.start()
        def test_process():
            kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"]))
        def test_orphan():
            code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'])"
            subprocess.run([sys.executable, "-c", code], check=True)
        def test_socket():
            kept.append(socket.create_server(("127.0.0.1", 0)))
        def test_clean():
            subprocess.run([sys.executable, "-c", ""], check=True)
            socket.create_server(("127.0.0.1", 0)).close()
        def test_close_the_kept():
            kept[0].join()
            kept[1].wait()
            kept[2].close()
        """,
    )
    result.assert_outcomes(passed=6, errors=4)
    text = result.stdout.str()
    assert "left behind: thread straggler" in text
    assert text.count("time.sleep(30)") >= 2
    assert "left behind: listening socket on port" in text


def test_environment_signals_and_directory_are_put_back(guarded: pytest.Pytester) -> None:
    result = run(
        guarded,
        """
        import os, signal
        def test_change(tmp_path):
            os.environ["PARCAE_SOMETHING"] = "1"
            os.environ["PATH"] = "nowhere"
            os.chdir(tmp_path)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        def test_see_nothing_of_it(tmp_path):
            assert "PARCAE_SOMETHING" not in os.environ and os.environ["PATH"] != "nowhere"
            assert os.getcwd() != str(tmp_path)
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
        """,
    )
    result.assert_outcomes(passed=2)
