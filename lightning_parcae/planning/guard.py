"""Plan only as long as planning is not worse than reacting.

A law of events learned from the past may be wrong for long: bursts end, a limit is never left. So both policies are
followed on paper, from the same past, and where the planner has fallen behind plain reaction by more than a little, the
job reacts until the planner would have been ahead. A wrong forecast then costs about a migration and its way back each
time it misleads; nothing is lost where planning is ahead.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.replay import MembershipStep, PairPauses, Running, settle

# How far planning may fall behind: of an interval's training, and of all training so far.
_INTERVAL_SHARE = 0.15
_TOTAL_SHARE = 3e-4


class Guard:
    """Follow planning and reacting on paper.

    Args:
        rate: Samples per second of a configuration.
        pauses: Expected pauses between configurations.
        interval_s: Length of an interval.

    Attributes:
        planned: What would run if the planner had always been followed.
        reacted: What would run with reaction alone.
        reacts: Whether to react at present.
    """

    def __init__(
        self, rate: Callable[[ParallelConfig | None], float], pauses: PairPauses, *, interval_s: float
    ) -> None:
        self.planned = Running()
        self.reacted = Running()
        self.reacts = False
        self._rate = rate
        self._pauses = pauses
        self._interval_s = interval_s
        self._trained_planned = 0.0
        self._trained_reacted = 0.0

    def follow(
        self, planned: ParallelConfig | None, fastest: ParallelConfig | None, step: MembershipStep
    ) -> ParallelConfig | None:
        """Return which of two configurations to run, and book what each of them trains in this interval.

        Args:
            planned: What the planner wants to run, from :attr:`planned`.
            fastest: The fastest one for the instances there are.
            step: What has happened to the membership.
        """
        behind = self._trained_reacted - self._trained_planned
        slack = _INTERVAL_SHARE * self._rate(fastest) * self._interval_s
        # What planning loses by a migration reacting may lose by the next one: going back needs a lead.
        self.reacts = behind > (-slack if self.reacts else slack + _TOTAL_SHARE * self._trained_reacted)
        self.planned, trained = self._advanced(self.planned, planned, step)
        self._trained_planned += trained
        self.reacted, trained = self._advanced(self.reacted, fastest, step)
        self._trained_reacted += trained
        return fastest if self.reacts else planned

    def _advanced(self, running: Running, config: ParallelConfig | None, step: MembershipStep) -> tuple[Running, float]:
        pause_s, overlap_s = self._pauses(running.config, config, step)
        then, paused_s = settle(running, config, pause_s, overlap_s, interval_s=self._interval_s)
        return then, self._rate(config) * (self._interval_s - paused_s)
