"""Other systems' rules: what they do when instances come and go.

A model hears of every change of the membership and steers a :class:`~.system_timeline.Timeline`; between two changes it
may ask to be woken. Nothing is random here: who is lost is given by name.

Symbols: ``D`` pipelines, ``P`` stages in each, ``N`` instances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.simulation.result import Cause
from lightning_parcae.simulation.system_terms import Choices, RestartTimes, SystemTerms
from lightning_parcae.simulation.system_timeline import Timeline


class Model(Protocol):
    """What the simulation asks of a system.

    Attributes:
        wake_s: When :meth:`wake` is to be called if no change comes first; ``inf`` for never.
    """

    wake_s: float

    def change(self, now_s: float, lost: Sequence[str], joined: Sequence[str]) -> None:
        """Hear that instances have gone and come."""
        ...

    def wake(self) -> None:
        """Do what was to be done at :attr:`wake_s`."""
        ...


class Alive:
    """The instances there are, those that have been there longest first."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def update(self, lost: Sequence[str], joined: Sequence[str]) -> int:
        """Take note of a change; return how many there are."""
        for name in lost:
            del self.names[name]
        self.names.update(dict.fromkeys(joined))
        return len(self.names)

    def first(self, count: int) -> list[str]:
        """Return the names of those that have been there longest."""
        return [name for name, _ in zip(self.names, range(count), strict=False)]


class Unhindered:
    """The zero-overhead bound: at every moment the fastest configuration for the instances there."""

    wake_s = math.inf

    def __init__(self, choices: Choices, times: RestartTimes, terms: SystemTerms, timeline: Timeline) -> None:
        self._choices = choices
        self._timeline = timeline
        self._alive = Alive()

    def change(self, now_s: float, lost: Sequence[str], joined: Sequence[str]) -> None:
        """See :class:`Model`."""
        config = self._choices.fastest(self._alive.update(lost, joined))
        if config is None:
            self._timeline.wait()
        else:
            self._timeline.switch(config, self._choices.rate(config))

    def wake(self) -> None:
        """See :class:`Model`: never asked for."""


class CheckpointRestart:
    """Varuna's kind: all processes restart in the fastest configuration, from a checkpoint."""

    wake_s = math.inf

    def __init__(self, choices: Choices, times: RestartTimes, terms: SystemTerms, timeline: Timeline) -> None:
        self._choices = choices
        self._times = times
        self._timeline = timeline
        self._alive = Alive()
        self._members: set[str] = set()
        self._restarts_always = terms.restart_always

    def change(self, now_s: float, lost: Sequence[str], joined: Sequence[str]) -> None:
        """See :class:`Model`."""
        before, timeline = self._timeline.config, self._timeline
        members_lost = [name for name in lost if name in self._members]
        config = self._choices.fastest(self._alive.update(lost, joined))
        if members_lost:
            timeline.roll_back()
        if config is None:
            self._members = set()
            timeline.wait("too few instances")
        elif members_lost or config != before or self._restarts_always:
            if not members_lost:
                timeline.save()  # asked to stop, the workers write a checkpoint first
            self._restart(now_s, before, config, len(members_lost))

    def wake(self) -> None:
        """See :class:`Model`: never asked for."""

    def _restart(self, now_s: float, before: ParallelConfig | None, config: ParallelConfig, num_lost: int) -> None:
        timeline = self._timeline
        grows = before is None or config.num_instances > before.num_instances - num_lost
        if timeline.has_run:
            seconds = self._times.from_checkpoint_s(config, grows=grows)
        else:
            seconds = self._times.processes_s(config, grows=True)
        reason = f"{num_lost} members lost" if num_lost else f"{config} for the instances there"
        cause: Cause = "restart" if timeline.has_run else "start"
        timeline.pause(now_s + seconds, cause, config, self._choices.rate(config), reason)
        self._members = set(self._alive.first(config.num_instances))


class ElasticRestart:
    """torchrun's kind: any change restarts all workers, which load the last checkpoint; the stages stay."""

    wake_s = math.inf

    def __init__(self, choices: Choices, times: RestartTimes, terms: SystemTerms, timeline: Timeline) -> None:
        self._choices = choices
        self._times = times
        self._timeline = timeline
        self._alive = Alive()
        self._num_stages = choices.fixed_stages(terms.num_stages)
        self._restart_s = terms.restart_s

    def change(self, now_s: float, lost: Sequence[str], joined: Sequence[str]) -> None:
        """See :class:`Model`."""
        timeline = self._timeline
        count = self._alive.update(lost, joined)
        config = None if self._num_stages is None else self._choices.fastest(count, self._num_stages)
        timeline.roll_back()
        if config is None:
            timeline.wait(f"fewer than {self._num_stages} instances")
            return
        loading = self._times.stage_s(config) if timeline.has_run else 0.0
        cause: Cause = "restart" if timeline.has_run else "start"
        reason = f"{len(lost)} lost, {len(joined)} joined"
        timeline.pause(now_s + self._restart_s + loading, cause, config, self._choices.rate(config), reason)

    def wake(self) -> None:
        """See :class:`Model`: never asked for."""
