"""Exit codes of scripts that an error ends."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("FencedError('declared dead')", 5),
        ("RefusedError('the server does not have the same job secret')", 5),
        ("JobFailedError('too few', 4)", 4),
        ("MembershipError('cannot be reached')", 1),
        ("ValueError('of the user')", 1),
    ],
)
def test_uncaught_errors_end_the_script_with_their_code(error: str, code: int) -> None:
    lines = [
        "import atexit",
        "from lightning_parcae.errors import *",
        "from lightning_parcae.errors import install_exit_codes",
        "install_exit_codes()",
        "install_exit_codes()",
        "atexit.register(print, 'cleaned up')",
        f"raise {error}",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.count("Traceback") == 1
    assert done.stdout == "cleaned up\n"
