"""``parcae doctor``: can this machine run a job, and if not, what to mend."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_OLDEST_LIGHTNING, _FIRST_UNTESTED_LIGHTNING = (2, 5), (2, 8)
_BAD_LIGHTNING = ("2.6.2", "2.6.3")
_OLDEST_TORCH = (2, 5)
_GLOO = """\
import datetime, torch, torch.distributed as dist
store = dist.HashStore()
group = dist.ProcessGroupGloo(store, 0, 1, datetime.timedelta(seconds=10))
group.allreduce([torch.ones(1)]).wait()
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check.

    Attributes:
        name: What was checked.
        found: What was found.
        fix: What to do about it; None if it is well.
    """

    name: str
    found: str
    fix: str | None = None


def check_machine(run_dir: Path | None = None) -> int:
    """Print what was found; return 0 if all is well, 1 otherwise."""
    checks: list[Callable[[], Finding]] = [
        check_python,
        check_lightning,
        check_torch,
        check_torchgpipe,
        check_gloo,
        check_loopback,
        lambda: check_run_dir(run_dir),
        check_secret,
    ]
    findings = [check() for check in checks]
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{'ok  ' if finding.fix is None else 'BAD '} {finding.name:{width}}  {finding.found}")
        if finding.fix is not None:
            print(f"     {'':{width}}  -> {finding.fix}")
    return 1 if any(finding.fix is not None for finding in findings) else 0


def check_python() -> Finding:
    """Python and the platform."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    if sys.platform != "linux":
        return Finding("python", found, "instances need Linux: sockets of a hung peer are released through /proc")
    return Finding("python", found)


def check_lightning() -> Finding:
    """Lightning's version lies in the tested window."""
    version = _version("lightning")
    if version is None:
        return Finding("lightning", "not installed", "pip install 'lightning>=2.5,<2.8,!=2.6.2,!=2.6.3'")
    if version in _BAD_LIGHTNING:
        return Finding(
            "lightning",
            f"{version}, a malicious upload",
            "pip install --upgrade 'lightning>=2.6.6'; check this machine",
        )
    if not _OLDEST_LIGHTNING <= _numbers(version) < _FIRST_UNTESTED_LIGHTNING:
        return Finding("lightning", f"{version}, not tested", "pip install 'lightning>=2.5,<2.8,!=2.6.2,!=2.6.3'")
    return Finding("lightning", version)


def check_torch() -> Finding:
    """Torch is new enough."""
    version = _version("torch")
    if version is None or _numbers(version) < _OLDEST_TORCH:
        return Finding("torch", version or "not installed", "pip install 'torch>=2.5'")
    return Finding("torch", version)


def check_torchgpipe() -> Finding:
    """Torchgpipe can be imported beside this torch."""
    error = _run("import torchgpipe")
    version = _version("torchgpipe")
    if error is not None:
        return Finding("torchgpipe", f"{version or 'not installed'}: {error}", "pip install 'torchgpipe>=0.0.7'")
    return Finding("torchgpipe", str(version))


def check_gloo() -> Finding:
    """A gloo group of one can reduce."""
    error = _run(_GLOO)
    if error is not None:
        return Finding("gloo", error, "install a torch build with distributed support, and let it use the loopback")
    return Finding("gloo", "a group forms and reduces")


def check_loopback() -> Finding:
    """A port on the loopback interface can be listened on."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5.0):
            return Finding("loopback", "127.0.0.1 can be listened on and reached")
    except OSError as error:
        return Finding("loopback", str(error), "allow local connections to 127.0.0.1 (sandbox or firewall)")


def check_run_dir(run_dir: Path | None) -> Finding:
    """The run directory, or the present one, can be written."""
    folder = Path.cwd() if run_dir is None else run_dir
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return Finding("run directory", f"{folder} can be written")
    except OSError as error:
        return Finding("run directory", f"{folder}: {error.strerror}", "choose another with --run-dir")


def check_secret() -> Finding:
    """The job secret, if one is set, can be read by nobody else."""
    from lightning_parcae.control.transport import load_secret

    try:
        secret = load_secret(os.environ)
    except ValueError as error:
        return Finding(
            "job secret", str(error), "make one with: python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    path = os.environ.get("PARCAE_SECRET_FILE")
    if secret and path and os.stat(path).st_mode & 0o077:
        return Finding("job secret", f"{path} can be read by others", f"chmod 600 {path}")
    return Finding("job secret", "set" if secret else "none set; needed for jobs over several machines only")


def _run(code: str) -> str | None:
    """Run a program in a fresh interpreter; return the last line of its error, or None if it ended well."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "did not end within 120 s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"ended with exit code {done.returncode}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version."""
    major, _, rest = version.partition(".")
    return int(major), int(rest.partition(".")[0])
