"""The connection of this process to the job: agreement on values, notices by signal, reports."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
import traceback
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lightning_parcae.control.agent import Agent
from lightning_parcae.control.messages import Failed, Notice, Progress, Welcome
from lightning_parcae.control.transport import check_bind_host, is_loopback, load_secret, parse_address
from lightning_parcae.engine.session import Endpoint
from lightning_parcae.errors import FencedError, JobFailedError, install_exit_codes
from lightning_parcae.notices.signals import SignalNotice

log = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 0.02
_AGREE_TIMEOUT_S = 60.0
_PREPARE_REMINDERS_S = (10.0, 60.0)


@dataclass(slots=True)
class Membership:
    """This process as an instance of the job.

    Attributes:
        agent: Control client.
        welcome: The coordinator's answer to the first hello.
        endpoint: Names, secrets and addresses for talking to peers.
    """

    agent: Agent
    welcome: Welcome
    endpoint: Endpoint
    _signal: SignalNotice | None = None
    _last_progress: float = 0.0

    def agree(self, key: str, value: Any) -> Any:
        """Return the value that the first instance to ask has given."""
        return self.agent.request("set_default", key, value, timeout_s=_AGREE_TIMEOUT_S)

    def wait_for_prepared_data(self, host_rank: int) -> bool:
        """Let one instance of each host prepare the data before the others use it.

        Args:
            host_rank: This instance's place on its host; 0 says that it has prepared the data.

        Returns:
            Whether this instance must prepare the data now, and then call this again with 0: the one that should have
            done it has gone before it was through.
        """
        host = socket.gethostname()
        key = f"prepared/{host}"
        if host_rank == 0:
            self.agree(key, True)
            return False
        started = time.monotonic()
        first_s, next_s = _PREPARE_REMINDERS_S
        slice_s = first_s
        while True:
            try:
                # no bound: the coordinator notices if the one that prepares dies, and a download may take hours
                is_prepared = self.agent.request("wait", key, None, timeout_s=slice_s)
                break
            except TimeoutError:
                waited_s = time.monotonic() - started
                log.warning("waiting for prepare_data of another instance on %s for %.0f s now", host, waited_s)
                slice_s = next_s
        if not is_prepared:
            log.warning("the instance that prepared the data on %s has gone; this one prepares it now", host)
        return not is_prepared

    def watch_signals(self) -> None:
        """Take SIGTERM as a notice from now on."""
        if self._signal is None:
            self._signal = SignalNotice(self._send_notice)
        self._signal.watch()

    def _send_notice(self) -> None:
        with contextlib.suppress(OSError):
            self.agent.send(Notice())

    def restore_signals(self) -> None:
        """Put the former SIGTERM handler back."""
        if self._signal is not None:
            self._signal.restore()

    def report_progress(self, step: int, epoch: int, batch: int, clock: int) -> None:
        """Tell the coordinator how far the job is, at a bounded rate."""
        now = time.monotonic()
        if now - self._last_progress >= _PROGRESS_INTERVAL_S:
            self._last_progress = now
            self.agent.send(Progress(step=step, epoch=epoch, batch=batch, clock=clock))

    def report_failure(self, error: BaseException, step: int) -> None:
        """Tell the coordinator that the user's code failed here, unless the job has ended anyway."""
        if isinstance(error, (FencedError, JobFailedError)):
            return
        text = "".join(traceback.format_exception(error))
        with contextlib.suppress(Exception):
            self.agent.send(Failed(step=step, error=f"{type(error).__name__}: {error}", traceback=text[-20_000:]))

    def close(self, *, goodbye: bool) -> None:
        """Leave the job."""
        self.restore_signals()
        self.agent.close(goodbye=goodbye)


def connect_membership(*, coordinator: str, job_id: str, failure_timeout_s: float, bind_host: str | None) -> Membership:
    """Connect this process to its job.

    Raises:
        MembershipError: If the coordinator cannot be reached or refuses this instance.
        ValueError: If an address is malformed, or a secret is missing where one is needed.
    """
    install_exit_codes()
    secret = load_secret(os.environ)
    host, port = parse_address(coordinator)
    local = bind_host or ("127.0.0.1" if is_loopback(host) else _address_towards(host, port))
    check_bind_host(local, secret)
    name = os.environ.get("PARCAE_INSTANCE") or f"{socket.gethostname()}-{os.getpid()}"
    incarnation = secrets.token_hex(8)
    agent = Agent(
        coordinator,
        secret,
        job_id=job_id,
        instance=name,
        incarnation=incarnation,
        failure_timeout_s=failure_timeout_s,
        versions=_versions(),
    )
    welcome = agent.connect(timeout_s=max(failure_timeout_s, 10.0))
    endpoint = Endpoint(
        name=name,
        job_id=job_id,
        incarnation=incarnation,
        secret=secret,
        bind_host=local,
        failure_timeout_s=failure_timeout_s,
    )
    return Membership(agent=agent, welcome=welcome, endpoint=endpoint)


def _address_towards(host: str, port: int) -> str:
    """Return the local address that packets to a host leave from; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _versions() -> dict[str, str]:
    found = {}
    for package, distribution in (
        ("lightning_parcae", "lightning-parcae"),
        ("lightning", "lightning"),
        ("torch", "torch"),
    ):
        try:
            found[package] = version(distribution)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found
