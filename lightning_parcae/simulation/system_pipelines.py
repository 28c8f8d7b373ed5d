"""Systems whose pipelines live and die one by one: dropped and brought back, or kept alive by redundancy.

Symbols: ``D`` pipelines, ``P`` stages in each, ``N`` instances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.simulation.system_models import Alive
from lightning_parcae.simulation.system_terms import Choices, RestartTimes, SystemTerms
from lightning_parcae.simulation.system_timeline import Timeline


class ReplicaDrop:
    """torchft's kind: a replica that loses a member drops out, the others go on; the stages stay.

    Instances without a replica start a new one as soon as there are enough of them. It starts in the background and
    takes its state from a live replica, or from the checkpoint if none is left.
    """

    def __init__(self, choices: Choices, times: RestartTimes, terms: SystemTerms, timeline: Timeline) -> None:
        self.wake_s = math.inf
        self._choices = choices
        self._times = times
        self._terms = terms
        self._timeline = timeline
        self._num_stages = choices.fixed_stages(terms.num_stages) or 0
        largest = choices.fastest(choices.capacity, self._num_stages)
        self._most = 0 if largest is None else largest.num_pipelines
        self._replicas: list[set[str]] = []
        self._starting: list[tuple[float, set[str]]] = []  # in order of time
        self._spares: dict[str, None] = {}

    def change(self, now_s: float, lost: Sequence[str], joined: Sequence[str]) -> None:
        """See :class:`~.system_models.Model`."""
        num_before, before = len(self._replicas), self._config(len(self._replicas))
        self._remove(set(lost))
        self._spares.update(dict.fromkeys(joined))
        self._start_replicas(now_s)
        num_broken = num_before - len(self._replicas)
        config = self._config(len(self._replicas))
        if config is not None:
            if num_broken:
                self._pause(now_s + self._terms.quorum_s, config, f"{num_broken} replicas lost")
        else:
            self._start_over(was_running=before is not None)

    def wake(self) -> None:
        """See :class:`~.system_models.Model`: replicas are ready."""
        before = self._config(len(self._replicas))
        ready = [replica for ready_s, replica in self._starting if ready_s <= self.wake_s]
        self._starting = self._starting[len(ready) :]
        self._replicas += ready
        config = self._config(len(self._replicas))
        if config is not None and before is None:
            self._timeline.switch(config, self._choices.rate(config))  # the pause of starting over ends now
        elif config is not None and config != before:
            until_s = max(self.wake_s + self._terms.join_s, self._timeline.busy_until_s)
            self._pause(until_s, config, f"{len(ready)} replicas join")
        self._set_alarm()

    def _config(self, num_replicas: int) -> ParallelConfig | None:
        return self._choices.fastest(num_replicas * self._num_stages, self._num_stages)

    def _pause(self, until_s: float, config: ParallelConfig, reason: str) -> None:
        self._timeline.pause(until_s, "intra_stage", config, self._choices.rate(config), reason)

    def _remove(self, lost: set[str]) -> None:
        """Take away who is lost; the survivors of a broken replica are spares."""
        for name in lost & self._spares.keys():
            del self._spares[name]
        broken = [replica for replica in self._replicas if replica & lost]
        broken += [replica for _, replica in self._starting if replica & lost]
        if broken:
            self._replicas = [replica for replica in self._replicas if not replica & lost]
            self._starting = [(ready_s, replica) for ready_s, replica in self._starting if not replica & lost]
        for replica in broken:
            self._spares.update(dict.fromkeys(sorted(replica - lost)))

    def _start_replicas(self, now_s: float) -> None:
        stages = self._num_stages
        one = ParallelConfig(1, stages) if stages else None
        while one and len(self._spares) >= stages and len(self._replicas) + len(self._starting) < self._most:
            members = [name for name, _ in zip(self._spares, range(stages), strict=False)]
            for name in members:
                del self._spares[name]
            loading = self._times.stage_s(one) if self._timeline.has_run else 0.0
            self._starting.append((now_s + self._times.processes_s(one, grows=True) + loading, set(members)))
        self._starting.sort(key=lambda replica: replica[0])
        self._set_alarm()

    def _start_over(self, *, was_running: bool) -> None:
        """Nothing can run: wait for the first replica that is starting, if that is enough."""
        timeline = self._timeline
        if not self._replicas:
            timeline.roll_back()  # the last copy of the state is gone
        first_s = self.wake_s
        num_ready = len(self._replicas) + sum(ready_s <= first_s for ready_s, _ in self._starting)
        config = self._config(num_ready)
        if config is None:
            timeline.wait(f"too few replicas of {self._num_stages} instances")
        elif was_running or timeline.busy_until_s != first_s:
            cause: Literal["restart", "start"] = "restart" if timeline.has_run else "start"
            timeline.pause(first_s, cause, config, self._choices.rate(config), "no replica runs")

    def _set_alarm(self) -> None:
        self.wake_s = self._starting[0][0] if self._starting else math.inf


class RedundantPipelines:
    """Bamboo's kind: each instance also computes the next stage's forward pass, and takes that stage over.

    The rules are those of Bamboo's simulator (``project_pactum/simulation/simulator.py`` of uclasystem/bamboo): a lost
    instance's predecessor in the pipeline takes its stage over and is overloaded from then on. If the predecessor is
    overloaded or gone, or the lost one was overloaded, then everyone restarts from a checkpoint. Stages are spread anew
    if spares can relieve all who are overloaded, if too many are overloaded, or if there is enough for one more
    pipeline. A loss meanwhile starts that again.
    """

    def __init__(self, choices: Choices, times: RestartTimes, terms: SystemTerms, timeline: Timeline) -> None:
        self.wake_s = math.inf
        self._choices = choices
        self._terms = terms
        self._timeline = timeline
        self._num_stages = choices.redundant_stages(terms.num_stages, terms.overprovision) or 0
        self._alive = Alive()
        self._phase: Literal["waiting", "restarting", "spreading", "running"] = "waiting"
        self._running: ParallelConfig | None = None  # what the places below belong to
        self._stages_of: dict[str, list[tuple[int, int]]] = {}  # (pipeline, stage)
        self._holder: dict[tuple[int, int], str] = {}

    def change(self, now_s: float, lost: Sequence[str], joined: Sequence[str]) -> None:
        """See :class:`~.system_models.Model`."""
        is_hit = any(name in self._stages_of for name in lost)
        absorbed = [self._absorb(name) for name in lost]
        is_fatal = not all(absorbed)
        config = self._choices.fastest(self._alive.update(lost, joined), self._num_stages)
        if config is None:
            if is_fatal or self._phase in ("waiting", "restarting"):
                self._wait()
            elif is_hit or self._phase == "spreading":  # too few to spread the stages anew, but each has somebody
                self._go_on_overloaded(now_s)
        elif is_fatal or self._phase == "waiting" or (self._phase == "restarting" and lost):
            self._restart(now_s, config)
        elif (self._phase == "spreading" and lost) or (self._phase == "running" and self._should_spread(config)):
            self._phase, self.wake_s = "spreading", now_s + self._terms.reconfigure_s
            self._timeline.pause(self.wake_s, "pipeline", config, self._rate(config), f"{config} anew")
        elif self._phase == "running" and is_hit:
            self._go_on_overloaded(now_s)

    def wake(self) -> None:
        """See :class:`~.system_models.Model`: stages have been spread."""
        config = self._choices.fastest(len(self._alive.names), self._num_stages)
        self.wake_s = math.inf
        self._stages_of.clear()
        self._holder.clear()
        assert config is not None, "stages are spread only over enough instances"
        places = ((pipeline, stage) for pipeline in range(config.num_pipelines) for stage in range(config.num_stages))
        for name, place in zip(self._alive.names, places, strict=False):
            self._stages_of[name] = [place]
            self._holder[place] = name
        self._phase, self._running = "running", config
        self._timeline.switch(config, self._rate(config))

    @property
    def _num_overloaded(self) -> int:
        return len(self._holder) - len(self._stages_of)

    def _rate(self, config: ParallelConfig, *, is_overloaded: bool = False) -> float:
        slowdown = self._terms.redundant_slowdown * (self._terms.overloaded_slowdown if is_overloaded else 1.0)
        return self._choices.rate(config) / slowdown

    def _absorb(self, name: str) -> bool:
        """Let the predecessor of a lost instance take over; return whether it could."""
        stages = self._stages_of.pop(name, None)
        if stages is None:
            return True
        pipeline, stage = stages[0]
        predecessor = self._holder[pipeline, (stage - 1) % self._num_stages]
        if len(stages) > 1 or len(self._stages_of.get(predecessor, ())) != 1:
            return False
        self._stages_of[predecessor].append((pipeline, stage))
        self._holder[pipeline, stage] = predecessor
        return True

    def _should_spread(self, config: ParallelConfig) -> bool:
        overloaded = self._num_overloaded
        spares = len(self._alive.names) - len(self._stages_of)
        running = self._running
        if overloaded and (
            spares >= overloaded or 2 * overloaded / len(self._stages_of) > self._terms.overloaded_share
        ):
            return True
        return running is None or config.num_pipelines > running.num_pipelines

    def _go_on_overloaded(self, now_s: float) -> None:
        assert self._running is not None, "only what runs can be overloaded"
        self._phase, self.wake_s = "running", math.inf
        rate = self._rate(self._running, is_overloaded=self._num_overloaded > 0)
        until_s = now_s + self._terms.absorb_s
        self._timeline.pause(until_s, "inter_stage", self._running, rate, "a neighbour takes over")

    def _restart(self, now_s: float, config: ParallelConfig) -> None:
        self._timeline.roll_back()
        self._forget()
        self._phase, self.wake_s = "restarting", now_s + self._terms.global_rendezvous_s
        cause: Literal["restart", "start"] = "restart" if self._timeline.has_run else "start"
        self._timeline.pause(self.wake_s, cause, config, self._rate(config), "everyone restarts")

    def _wait(self) -> None:
        self._timeline.roll_back()
        self._forget()
        self._phase, self.wake_s = "waiting", math.inf
        self._timeline.wait(f"fewer than {self._num_stages} instances")

    def _forget(self) -> None:
        self._stages_of.clear()
        self._holder.clear()
