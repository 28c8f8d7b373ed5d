"""The errors a user can meet; each message says what was wanted, what was found and what to do."""

from __future__ import annotations

import sys
from types import TracebackType

EXIT_REFUSED = 5


class ParcaeError(Exception):
    """Base of every error that this package raises on its own account."""


class PlanError(ParcaeError):
    """No layout fits, or a plan contradicts itself."""


class MembershipError(ParcaeError):
    """The coordinator cannot be reached, refuses this instance, or the protocol was broken."""


class RefusedError(MembershipError):
    """The job does not take this instance: versions, script, job id or job secret differ from the job's."""

    exit_code = EXIT_REFUSED


class FencedError(MembershipError):
    """This instance was declared dead while it was stopped; the job has gone on without it."""

    exit_code = EXIT_REFUSED


class JobFailedError(ParcaeError):
    """The job ended because another instance failed; the message carries that instance's traceback.

    Args:
        message: What happened, and what to do.
        exit_code: What the script should end with; :func:`install_exit_codes` sees to it.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class MigrationError(ParcaeError):
    """State that a plan needs could not be moved."""


class CheckpointError(ParcaeError):
    """A checkpoint is missing, incomplete or damaged."""


class GenerationBrokenError(ParcaeError):
    """A communication of this generation failed or was aborted; the members form the next generation.

    Internal: the strategy always catches it. Only the coordinator declares an instance dead.
    """


def install_exit_codes() -> None:
    """Let this process end with an error's ``exit_code`` instead of 1 when nobody catches it."""
    before = sys.excepthook
    if getattr(before, "knows_exit_codes", False):
        return

    def show_and_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        code = getattr(error, "exit_code", None)
        if isinstance(error, ParcaeError) and isinstance(code, int):
            raise SystemExit(code)

    show_and_end.knows_exit_codes = True  # type: ignore[attr-defined]
    sys.excepthook = show_and_end
