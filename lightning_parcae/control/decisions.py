"""What to do once all members of an attempt have stopped: pure functions from their Acks to a layout.

Members never disagree by more than one vote: whoever completed vote ``M`` knows that everyone had entered it. So those
at ``M - 1`` take the result over and all are at ``M``. Layers count as held where they are valid at ``M``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_parcae.control.membership import Attempt
from lightning_parcae.control.messages import Ack, JobSpec, config_for
from lightning_parcae.errors import MembershipError, PlanError
from lightning_parcae.planning.layout import Layout
from lightning_parcae.planning.migration import MigrationPlan, decide_layout
from lightning_parcae.planning.parallel_config import ParallelConfig

Table = list[tuple[int, int] | None]


@dataclass(frozen=True, slots=True)
class Standpoint:
    """Where the job stands when all members have stopped.

    Attributes:
        layout: The newest layout that was completed; None if none was.
        active: Living members of that layout's group, by rank.
        fresh: Living members without valid state: joiners, and those of a generation that nobody completed.
        donors: Living members that left the group with that layout, and may still hold valid state.
        clock: Votes completed.
        vote: Result of the newest one.
        at_boundary: Whether all active members wait at a train boundary, where fresh ones may enter.
        holders: Layers valid at ``clock``, by member.
        completed: Whether somebody had completed the attempt that broke while it formed.
    """

    layout: Layout | None
    active: tuple[str, ...]
    fresh: tuple[str, ...]
    donors: tuple[str, ...]
    clock: int
    vote: str | None
    at_boundary: bool
    holders: dict[str, frozenset[int]]
    completed: bool

    @property
    def layers(self) -> frozenset[int]:
        """Layers that somebody holds."""
        return frozenset().union(*self.holders.values())


def take_stock(attempt: Attempt, broken: Attempt | None, layout: Layout | None, active: Sequence[str]) -> Standpoint:
    """Find out where the job stands.

    Args:
        attempt: An attempt whose members have all stopped.
        broken: An earlier attempt that was committed, and of which it is not known whether somebody completed it.
        layout: The newest layout that is known to have been completed.
        active: Members of its group, by rank.

    Raises:
        MembershipError: If active members are further apart than one vote.
    """
    acks = {name: attempt.acks[name] for name in attempt.members}
    entered = set(active) | set(broken.order if broken is not None else ())
    clocks = [ack.clock for name, ack in acks.items() if name in entered] or [ack.clock for ack in acks.values()]
    clock = max(clocks, default=0)
    fresh = set(attempt.joiners)
    start = None  # clock at which the attempt that broke began
    completed = entering = False
    if broken is not None and broken.commit is not None:
        start = broken.commit.clock
        clock = max(clock, start)
        if clock > start:  # somebody completed its "formed" vote, so everybody had its state in place
            layout, active, completed = broken.commit.layout, broken.order, True
        else:
            fresh |= set(broken.commit.fresh)
            entering = bool(broken.commit.fresh)  # so it was formed at a train boundary
    living = tuple(name for name in active if name in acks and name not in fresh)
    _check_together(living, acks, clock)
    holders = {}
    for name in living:
        held = frozenset(acks[name].layers)
        if completed and broken is not None and acks[name].clock < clock:
            held = _valid_layers(broken, name, held)
        holders[name] = held
    donors = tuple(name for name in acks if name not in living and name not in fresh)
    if completed and start is not None and clock <= start + 1:  # one vote later it is a step behind
        holders |= {name: frozenset(acks[name].layers) for name in donors}
    ahead = [acks[name] for name in living if acks[name].clock == clock]
    return Standpoint(
        layout=layout if living else None,
        active=living,
        fresh=tuple(name for name in attempt.members if name in fresh),
        donors=donors,
        clock=clock,
        vote=next((ack.vote for ack in ahead), None),
        at_boundary=entering or all(ack.at_boundary for ack in ahead),
        holders=holders,
        completed=completed,
    )


def _check_together(names: Sequence[str], acks: Mapping[str, Ack], clock: int) -> None:
    behind = [name for name in names if acks[name].clock < clock - 1]
    if behind:
        raise MembershipError(
            f"{behind[0]} stopped after {acks[behind[0]].clock} votes, but others after {clock}; members can differ "
            "by one vote at most, so this is a fault of lightning_parcae: please report it with the timeline"
        )


def _valid_layers(broken: Attempt, name: str, held: frozenset[int]) -> frozenset[int]:
    """Leave out layers that a member carries since its start-up, and that were never the job's.

    A member that entered with the broken attempt was about to drop them, but has not completed the vote after which
    it does.
    """
    commit = broken.commit
    if commit is None or commit.layout is None or name not in commit.fresh:
        return held
    if commit.kind == "initial" and name == commit.trainer_source:
        return held
    return held & frozenset(commit.layout.layers_of(name))


def smallest_start(table: Table) -> int | None:
    """Return the fewest instances that a table has a configuration for."""
    return next((count for count, entry in enumerate(table) if entry is not None), None)


def decide_start(
    *, generation: int, spec: JobSpec, table: Table, candidates: Sequence[str], from_checkpoint: bool
) -> MigrationPlan | None:
    """Lay out a job that starts, or starts again from a checkpoint; None if there are too few instances.

    The first candidate's weights count, so that all start equal even without a seed; from a checkpoint nothing moves.
    """
    config = config_for(table, len(candidates))
    if config is None:
        return None
    placed = list(candidates[: config.num_instances])
    everything = range(spec.num_layers)
    return decide_layout(
        generation=generation,
        config=config,
        boundaries=spec.boundaries[config.num_stages],
        layer_bytes=spec.layer_bytes,
        candidates=placed,
        holders={name: everything for name in (placed if from_checkpoint else placed[:1])},
        old=None,
        passengers_rank=False,
    )


def decide_next(
    *,
    generation: int,
    spec: JobSpec,
    table: Table,
    standpoint: Standpoint,
    leaving: Collection[str],
    num_spares: int,
    passengers_rank: bool,
) -> MigrationPlan | None:
    """Lay out a running job anew; None if its state is incomplete or no configuration fits.

    Args:
        generation: The new generation.
        spec: The job.
        table: The configuration for each number of usable instances.
        standpoint: Where the job stands; its layout is not None.
        leaving: Instances with a notice. They get no place if it can be helped.
        num_spares: Usable instances that are not members; they enter with the generation after.
        passengers_rank: Whether members without a place keep a rank until the next boundary.
    """
    old = standpoint.layout
    if old is None or len(standpoint.layers) < spec.num_layers:
        return None
    entering = standpoint.fresh if standpoint.at_boundary else ()
    everyone = (*standpoint.active, *entering)
    staying = tuple(name for name in everyone if name not in leaving)
    num_waiting = len(set(standpoint.fresh) - set(entering) - set(leaving))
    for candidates, config in _options(table, staying, everyone, num_spares + num_waiting, standpoint):
        boundaries = old.boundaries if config.num_stages == old.config.num_stages else ()
        try:
            plan = decide_layout(
                generation=generation,
                config=config,
                boundaries=spec.boundaries.get(config.num_stages, boundaries),
                layer_bytes=spec.layer_bytes,
                candidates=candidates,
                holders=standpoint.holders,
                old=old,
                passengers_rank=passengers_rank,
            )
        except PlanError:
            continue
        # In the middle of a step nobody can step aside, those with a notice neither.
        return replace(plan, layout=replace(plan.layout, order=everyone)) if passengers_rank else plan
    return None


def _options(
    table: Table, staying: Sequence[str], everyone: Sequence[str], num_others: int, standpoint: Standpoint
) -> Iterator[tuple[Sequence[str], ParallelConfig]]:
    """List who may take which grid, best first."""
    soon = config_for(table, len(staying) + num_others)
    as_before = _grid_in_place(staying, standpoint)
    if soon is not None:
        if soon.num_instances <= len(staying):
            yield staying, soon
        elif as_before is not None and as_before.num_stages == soon.num_stages:
            # The next generation takes spares in and has this many stages again: do not move all layers twice.
            yield staying, as_before
    for candidates in (staying, everyone):
        config = config_for(table, len(candidates))
        if config is not None:
            yield candidates, config
    # The table would wait, but these are in the middle of a step and have all the state: go on as far as it reaches.
    for candidates in (staying, everyone):
        config = _grid_in_place(candidates, standpoint)
        if config is not None:
            yield candidates, config


def _grid_in_place(candidates: Sequence[str], standpoint: Standpoint) -> ParallelConfig | None:
    """Return the largest grid with the old stages that candidates can fill without moving state, if there is one."""
    old = standpoint.layout
    if old is None:
        return None
    num_stages = old.config.num_stages
    replicas = [
        sum(set(old.layers_of_stage(stage)) <= standpoint.holders.get(name, frozenset()) for name in candidates)
        for stage in range(num_stages)
    ]
    num_pipelines = min(*replicas, len(candidates) // num_stages)
    return ParallelConfig(num_pipelines=num_pipelines, num_stages=num_stages) if num_pipelines >= 1 else None


def describe_missing(layout: Layout, layers: Collection[int]) -> str:
    """Name the stages whose state nobody holds, and who held them."""
    lines = []
    for stage in range(layout.config.num_stages):
        if not set(layout.layers_of_stage(stage)) <= set(layers):
            holders = sorted(layout.replicas_of_stage(stage))
            lines.append(f"stage {stage} was held only by {', '.join(holders)}")
    return "; ".join(lines) or "the layers that were on their way are lost"


def serial_share(transfers: Collection[tuple[int, str, str]], layer_bytes: Sequence[int]) -> float:
    """Return the share of the moved bytes that the busiest member sends or receives: it takes the time; 0 if none move.

    Members receive side by side; one that several ask sends to one after the other.
    """
    sent: dict[str, int] = {}
    received: dict[str, int] = {}
    for layer, source, target in transfers:
        sent[source] = sent.get(source, 0) + layer_bytes[layer]
        received[target] = received.get(target, 0) + layer_bytes[layer]
    total = sum(sent.values())
    return max(*sent.values(), *received.values()) / total if total else 0.0
