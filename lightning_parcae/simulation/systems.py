"""What other systems would make of a trace: small models of their published behaviour, in continuous time.

Events happen at their real times and nothing changes between them. The models are not the systems: they say what is
documented about each, and where nothing is documented, they assume what favours it. Common to all: an instance counts
from the moment the trace gives it (its boot is outside the models), nothing is known of a preemption beforehand, the
profile's throughput is reached at once, and a restart that another change interrupts starts again.

``ondemand``: the fastest configuration for the trace's capacity, started once, paid at the on-demand price for its own
instances only.

``checkpoint`` (Varuna, EuroSys '22; its manual's page on morphing): a manager checkpoints and restarts all processes in
the best configuration. When instances come, workers are asked to write a checkpoint first and nothing is lost; when a
member is lost, the work since the last periodic checkpoint is done again. Assumed for it: periodic checkpoints cost
nothing, and a change among spares does not restart anybody. Restart times are the reference system's own checkpoint
baseline where the model has its constants. That baseline, though, restarts at every change and loses no work.

``redundant`` (Bamboo, NSDI '23): see :class:`~.system_pipelines.RedundantPipelines`. Assumed for it: the fastest depth
that its over-provisioning allows, and no time to load state. While neighbours stand in for each other it can go on with
fewer instances than any configuration needs, so for a while it may even pass the bound.

``replica_drop`` (torchft's README and lighthouse): see :class:`~.system_pipelines.ReplicaDrop`. Assumed for it: the
step that broke is not lost, survivors of several broken replicas form a new one, and the global batch is kept.

``elastic_restart`` (torchrun, PyTorch's pages on elastic): on a failure or a membership change all workers are stopped
and started again, and progress since the last checkpoint is lost. Assumed for it: 16.8 s, what a killed *worker*
cost in our measurement; with its agent, as when an instance goes, it was 51.8 s.

``bound``: at every moment the fastest configuration for the instances there, nothing ever lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.simulation.result import PolicyResult
from lightning_parcae.simulation.system_models import CheckpointRestart, ElasticRestart, Model, Unhindered
from lightning_parcae.simulation.system_pipelines import RedundantPipelines, ReplicaDrop
from lightning_parcae.simulation.system_terms import Choices, RestartTimes, SystemTerms
from lightning_parcae.simulation.system_timeline import Timeline
from lightning_parcae.simulation.workload import Workload

#: Systems that can be simulated: name, and what it does with the source.
SYSTEM_POLICIES: Mapping[str, str] = {
    "ondemand": "as many instances as the trace ever has, never preempted, paid on demand",
    "checkpoint": "restarts from a checkpoint in the best configuration (Varuna, EuroSys '22)",
    "redundant": "neighbours compute each other's stages and take over (Bamboo, NSDI '23)",
    "replica_drop": "whole replicas drop out and come back, stages fixed (torchft)",
    "elastic_restart": "any change restarts all workers, stages fixed (torchrun)",
    "bound": "always the fastest configuration, no overhead",
}

_MODELS: Mapping[str, Callable[[Choices, RestartTimes, SystemTerms, Timeline], Model]] = {
    "checkpoint": CheckpointRestart,
    "redundant": RedundantPipelines,
    "replica_drop": ReplicaDrop,
    "elastic_restart": ElasticRestart,
    "bound": Unhindered,
}


def simulate_system(
    system: str,
    trace: AvailabilityTrace,
    workload: Workload,
    *,
    terms: SystemTerms | None = None,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> PolicyResult:
    """Return what a system would make of a trace.

    Args:
        system: One of :data:`SYSTEM_POLICIES`.
        trace: The instances.
        workload: The model.
        terms: Times and factors of the system; the defaults if None.
        seed: Chooses who is preempted where the trace does not name them.
        progress: Called with the share that is done, 0 to 1.

    Raises:
        ValueError: If there is no such system, the trace has no length, or the stages asked for do not exist.
    """
    terms = terms if terms is not None else SystemTerms()
    if system not in SYSTEM_POLICIES:
        raise ValueError(f"no system {system!r}; there are {', '.join(SYSTEM_POLICIES)}")
    if not trace.end_s > 0:
        raise ValueError(f"{trace.source}: a trace of {trace.end_s:g} s cannot be simulated")
    choices = Choices(workload.profile, trace.capacity)
    if terms.num_stages is not None and choices.fastest(trace.capacity, terms.num_stages) is None:
        raise ValueError(
            f"{workload.name}: no configuration with {terms.num_stages} stages fits into the at most "
            f"{trace.capacity} instances of {trace.source}"
        )
    times = RestartTimes(workload, terms)
    timeline = Timeline(0.0 if system in ("ondemand", "bound") else terms.checkpoint_every_s)
    lengths = np.diff([*trace.times_s, trace.end_s])
    instance_s = float(np.dot(lengths, trace.counts))
    if system == "ondemand":
        instance_s = _rent(choices, times, timeline, trace)
    else:
        _replay(_MODELS[system](choices, times, terms, timeline), timeline, trace, seed, progress)
    spans, migrations, samples = timeline.finish()
    return PolicyResult(
        policy=system,
        trace=trace.source,
        profile=workload.name,
        seed=seed,
        duration_s=trace.end_s,
        spans=spans,
        migrations=migrations,
        samples=samples,
        instance_s=instance_s,
        uses_on_demand=system == "ondemand",
        notes=_notes(system, choices, trace, workload, terms),
    )


def _rent(choices: Choices, times: RestartTimes, timeline: Timeline, trace: AvailabilityTrace) -> float:
    """Train on instances that stay; return how many instance-seconds that takes."""
    config = choices.fastest(trace.capacity)
    if config is not None:
        start_s = times.processes_s(config, grows=True)
        timeline.pause(start_s, "start", config, choices.rate(config), "on demand")
    timeline.advance(trace.end_s)
    return 0.0 if config is None else config.num_instances * trace.end_s


def _replay(
    model: Model, timeline: Timeline, trace: AvailabilityTrace, seed: int, progress: Callable[[float], None] | None
) -> None:
    for time_s, lost, joined in _changes(trace, seed):
        if time_s >= trace.end_s:
            break
        _pass(model, timeline, time_s)
        model.change(time_s, lost, joined)
        if progress is not None:
            progress(time_s / trace.end_s)
    _pass(model, timeline, trace.end_s)
    if progress is not None:
        progress(1.0)


def _pass(model: Model, timeline: Timeline, until_s: float) -> None:
    while model.wake_s <= until_s:
        timeline.advance(model.wake_s)
        model.wake()
    timeline.advance(until_s)


def _changes(trace: AvailabilityTrace, seed: int) -> Iterator[tuple[float, list[str], list[str]]]:
    """Give the changes in order, one for each moment: who goes, and who comes."""
    moment: float | None = None
    lost: list[str] = []
    joined: list[str] = []
    for time_s, event in trace.events(seed=seed):
        if moment is not None and time_s != moment:
            yield moment, lost, joined
            lost, joined = [], []
        moment = time_s
        lost += event.get("remove", ())
        joined += event.get("add", ())
    if moment is not None:
        yield moment, lost, joined


def _notes(
    system: str, choices: Choices, trace: AvailabilityTrace, workload: Workload, terms: SystemTerms
) -> tuple[str, ...]:
    if choices.fastest(trace.capacity) is None:
        return (f"no configuration of {workload.name} fits into the at most {trace.capacity} instances",)
    notes: list[str] = []
    if system in ("replica_drop", "elastic_restart"):
        notes.append(f"{choices.fixed_stages(terms.num_stages)} stages throughout")
    if system == "redundant":
        notes.append(f"{choices.redundant_stages(terms.num_stages, terms.overprovision)} stages throughout")
    if system in ("checkpoint", "elastic_restart", "redundant", "replica_drop"):
        notes.append(f"a checkpoint every {terms.checkpoint_every_s:g} s of training")
    if system in ("checkpoint", "replica_drop", "ondemand") and workload.reference_cost is None:
        notes.append(f"processes start in {terms.restart_s:g} s: the model has no constants of the reference system")
    return tuple(notes)


__all__ = ["SYSTEM_POLICIES", "SystemTerms", "simulate_system"]
