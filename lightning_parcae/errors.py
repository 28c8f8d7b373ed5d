"""The errors a user can meet; each message says what was wanted, what was found and what to do."""

from __future__ import annotations


class ParcaeError(Exception):
    """Base of every error that this package raises on its own account."""


class PlanError(ParcaeError):
    """No layout fits, or a plan contradicts itself."""


class MembershipError(ParcaeError):
    """The coordinator cannot be reached, refuses this instance, or the protocol was broken."""


class FencedError(MembershipError):
    """This instance was declared dead while it was stopped; the job has gone on without it."""


class JobFailedError(ParcaeError):
    """The job ended because another instance failed; the message carries that instance's traceback.

    Args:
        message: What happened, and what to do.
        exit_code: What the script should end with; ``parcae run`` sees to it.
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
