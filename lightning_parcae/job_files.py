"""How commands on the same machine find a running job: its address and its secret, in the run directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from lightning_parcae.errors import ParcaeError

JOB_FILE = "job.json"
LOCK_FILE = "supervisor.lock"


@contextlib.contextmanager
def run_dir_lock(run_dir: Path) -> Iterator[None]:
    """Keep other jobs out of a run directory, whether ``parcae run`` or ``parcae coordinator`` starts them.

    Raises:
        ParcaeError: If the directory is in use.
    """
    with (run_dir / LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ParcaeError(
                f"the run directory {run_dir} is used by another job; wait for it or choose another --run-dir"
            ) from error
        yield


def write_job_file(run_dir: Path, job_id: str, address: str) -> None:
    """Tell commands on this machine how to reach a job; the file is there while the job runs."""
    values = {"job_id": job_id, "coordinator": address, "pid": os.getpid()}
    (run_dir / JOB_FILE).write_text(json.dumps(values) + "\n", encoding="utf-8")


def write_secret(path: Path) -> bytes:
    """Make a secret and write it where nobody else can read it; one that a killed process has left is replaced."""
    path.unlink(missing_ok=True)
    secret = secrets.token_hex(32).encode("ascii")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)
    return secret
