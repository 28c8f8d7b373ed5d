"""Choose the configuration that trains most in expectation, migrations and coming preemptions included.

The value of running configuration ``s`` on ``N`` instances is what can still be trained from the next interval on:

    V(N, s) = sum over events e of P(e) * max over s' of [ rate(s') * (T - pause(s -> s'; N, e)) + V(N', s') ]

It is found backward: a number of sweeps under a law that stays (value iteration, the default), then the steps of a
forecast, then what is known for certain (notices, joiners that warm up). Without the sweeps it is the paper's dynamic
program over a fixed horizon. A pause longer than an interval counts as negative training there, which is the time that
is missing in the next one.

The first step is carried out, the rest is planned again in the next interval. The same values give, for every number of
instances that may come, what to do then: a table to look up when there is no time to plan.

Symbols: ``N`` instances, ``T`` length of an interval, ``S`` entries of the space, ``W`` numbers of instances looked at,
``M`` moves: combinations of ``N`` and an event that share one maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_parcae.availability.forecast import EventLaw, outcome
from lightning_parcae.planning.cost import MigrationCost
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.policy import LayoutTable
from lightning_parcae.planning.profile import Profile, best_config
from lightning_parcae.planning.replay import Running
from lightning_parcae.planning.space import ConfigSpace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NOTHING_RUNS = Running()
# Beyond this many losses at once the pause is that of this many: the exact price would take long, and changes nothing.
_MOST_LOST = 8
# Up to this capacity every number of instances is looked at; beyond it, those near the present one.
_SMALL = 16
# Parts of the moves that are worked on at once: the smaller ones leave more configurations out.
_BLOCKS = 4
# Prepared sets of events and spaces that are kept: megabytes each.
_MOST_LAWS = 8
_MOST_VALUES = 16


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known when a plan is made.

    Attributes:
        num_instances: Instances now, those with a notice included.
        running: What runs, and what is left of its migration.
        num_lost: Instances of the running configuration's time that are gone since it was decided.
        known: ``(lost, joined)`` of the next intervals, as far as it is known for certain.
    """

    num_instances: int
    running: Running = _NOTHING_RUNS
    num_lost: int = 0
    known: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run now, and what to do when the membership changes before the next plan.

    Attributes:
        config: What to run, None to wait.
        table: What to run for each number of instances, indexed by it.
        reason: One line for people.
        pause_s: Expected pause of getting there.
        samples_per_s: Expected throughput over the intervals looked at.
        expected_lost: Instances expected to be lost over the horizon.
    """

    config: ParallelConfig | None
    table: LayoutTable
    reason: str
    pause_s: float
    samples_per_s: float
    expected_lost: float


class LiveputOptimizer:
    """Plan by liveput.

    Args:
        profile: Throughput of each configuration.
        cost: Pauses between them.
        capacity: Most instances there can be.
        interval_s: Length of an interval ``T``.
        horizon: None plans with a value over many intervals; a number looks at that many, and no further.
        sweeps: Intervals that a law which stays is looked at, when ``horizon`` is None.
        window: How far from the present number of instances is looked, where the capacity is large.
        prune_below: Configurations slower than this share of the best of their size are not looked at.
        noise: Gains below this share of an interval's training are no reason to change.
        late_at_best: What of a pause exceeds an interval is charged at the rate of the fastest configuration for the
            instances there are, not of the one that is chosen: without it, slow ones are taken where long pauses are
            certain, because they miss less.
    """

    def __init__(
        self,
        profile: Profile,
        cost: MigrationCost,
        *,
        capacity: int,
        interval_s: float = 60.0,
        horizon: int | None = None,
        sweeps: int = 30,
        window: int = 12,
        prune_below: float = 0.85,
        noise: float = 1e-3,
        late_at_best: bool = False,
    ) -> None:
        if capacity < 0 or interval_s <= 0 or sweeps < 0 or window < 1 or (horizon is not None and horizon < 1):
            raise ValueError(
                "needed are a capacity of at least 0, an interval above 0 s, a horizon of at least 1 or None, got "
                f"{capacity}, {interval_s} and {horizon} (sweeps {sweeps}, window {window})"
            )
        self._profile = profile
        self._cost = cost
        self._capacity = capacity
        self._interval_s = interval_s
        self._horizon = horizon
        self._sweeps = sweeps
        self._window = window
        self._prune_below = prune_below
        self._noise = noise
        self._late_at_best = late_at_best
        self._spaces: dict[tuple[int, int, ParallelConfig | None], ConfigSpace] = {}
        self._values: dict[tuple[ConfigSpace, int, int], _Value] = {}
        self._fastest: list[ParallelConfig | None] = []

    def plan(self, situation: Situation, laws: Sequence[EventLaw], *, stays: EventLaw | None = None) -> Plan:
        """Decide what to run.

        Args:
            situation: What is known now.
            laws: Law of each coming interval; what is known for certain overrides the first ones.
            stays: Law of all later intervals; the last one of ``laws`` if None. Not used with a fixed horizon.

        Raises:
            ValueError: If the number of instances is negative.
        """
        now = situation.num_instances
        if now < 0 or situation.num_lost < 0:
            raise ValueError(f"counts cannot be negative, got {now} instances and {situation.num_lost} lost")
        ahead, tail, sweeps = self._ahead(situation, laws, stays)
        low, high = self._range(now, situation)
        space = self._space(low, high, situation.running.config)
        value = self._value(space, low, high)
        values = np.zeros((high - low + 1, len(space)))
        if sweeps:
            step = value.step(tail)
            for _ in range(sweeps):
                values = step(values)
        last: tuple[EventLaw, _Step] | None = None
        for law in reversed(ahead):
            if last is None or last[0] is not law:
                last = (law, value.step(law))
            values = last[1](values)

        old = space.index(situation.running.config)
        before = now + situation.num_lost
        pauses = value.pauses_s(before, situation.num_lost)[old]
        left = situation.running.remaining_s
        total = np.where(pauses > 0, pauses + (space.overlap_s if left > 0 else 0.0), left)
        worth = self._worth(value, total, values[now - low], now)
        chosen = self._choose(space, worth, old)
        expected_lost = sum(law.expected_lost for law in ahead) + tail.expected_lost * min(sweeps, 10 - len(ahead))
        span = 1 + len(ahead) + sweeps
        return Plan(
            config=space.configs[chosen],
            table=self._table(space, value, values, low, now, chosen),
            reason=self._reason(space, value, situation, old, chosen, total, expected_lost, len(ahead)),
            pause_s=float(total[chosen]),
            samples_per_s=max(float(worth[chosen]), 0.0) / (span * self._interval_s),
            expected_lost=expected_lost,
        )

    def _ahead(
        self, situation: Situation, laws: Sequence[EventLaw], stays: EventLaw | None
    ) -> tuple[list[EventLaw], EventLaw, int]:
        nothing = EventLaw.certain()
        known = [EventLaw.certain(lost, joined) for lost, joined in situation.known]
        tail = stays if stays is not None else (laws[-1] if laws else nothing)
        ahead = [*known, *laws[len(known) :]]
        if self._horizon is None:
            # A law that only repeats itself at the end is what the sweeps are for.
            while len(ahead) > len(known) and ahead[-1] is tail:
                ahead.pop()
            return ahead, tail, self._sweeps
        # The interval that begins now is one of the horizon, too.
        ahead = ahead[: self._horizon - 1]
        return ahead + [tail] * (self._horizon - 1 - len(ahead)), tail, 0

    def _range(self, now: int, situation: Situation) -> tuple[int, int]:
        top = max(self._capacity, now)
        if top <= _SMALL:
            return 0, top
        lost = sum(step[0] for step in situation.known)
        joined = sum(step[1] for step in situation.known)
        return max(0, now - self._window - lost), min(top, now + self._window + joined)

    def _space(self, low: int, high: int, current: ParallelConfig | None) -> ConfigSpace:
        key = (low, high, current)
        if key not in self._spaces:
            if len(self._spaces) >= 64:
                self._spaces.clear()
            keep = () if current is None else (current,)
            # The same tables serve as long as the running configuration is no special case.
            plain = self._spaces.get((low, high, None))
            if plain is not None and current in plain.configs:
                self._spaces[key] = plain
            else:
                space = ConfigSpace(
                    self._profile,
                    self._cost,
                    max_instances=high,
                    min_instances=low,
                    keep=keep,
                    prune_below=self._prune_below,
                )
                self._spaces[key] = space
                if current is not None and current in self._profile.configs(high):
                    self._spaces.setdefault((low, high, None), space)
        return self._spaces[key]

    def _value(self, space: ConfigSpace, low: int, high: int) -> _Value:
        key = (space, low, high)
        if key not in self._values:
            if len(self._values) >= _MOST_VALUES:
                self._values.clear()
            self._values[key] = _Value(space, low, high, self._capacity, self._interval_s, self._late_at_best)
        return self._values[key]

    def _worth(self, value: _Value, pauses: Floats, later: Floats, num_instances: int) -> Floats:
        return value.trained(pauses, num_instances) + later

    def _choose(self, space: ConfigSpace, worth: Floats, old: int) -> int:
        best = int(worth.argmax())
        margin = self._noise * float(space.rates[best]) * self._interval_s
        # Staying in a configuration that runs is kept on ties; waiting is not.
        return old if old and worth[old] >= worth[best] - margin else best

    def _table(self, space: ConfigSpace, value: _Value, values: Floats, low: int, now: int, chosen: int) -> LayoutTable:
        table = list(self._fastest_table(max(self._capacity, now)))
        for count in range(low, low + len(values)):
            pauses = value.pauses_s(now, max(now - count, 0))[chosen]
            worth = self._worth(value, pauses, values[count - low], count)
            table[count] = space.configs[self._choose(space, worth, chosen)]
        table[now] = space.configs[chosen]
        return tuple(table)

    def _fastest_table(self, size: int) -> list[ParallelConfig | None]:
        if len(self._fastest) <= size:
            best: list[tuple[float, ParallelConfig | None]] = [(0.0, None)] * (size + 1)
            for config in self._profile.configs(size):
                rate = self._profile.samples_per_s(config)
                if rate > best[config.num_instances][0]:
                    best[config.num_instances] = (rate, config)
            fastest: list[ParallelConfig | None] = []
            top: tuple[float, ParallelConfig | None] = (0.0, None)
            for entry in best:
                top = entry if entry[0] > top[0] else top
                fastest.append(top[1])
            self._fastest = fastest
        return self._fastest[: size + 1]

    def _reason(
        self,
        space: ConfigSpace,
        value: _Value,
        situation: Situation,
        old: int,
        chosen: int,
        pauses: Floats,
        expected_lost: float,
        num_ahead: int,
    ) -> str:
        now, config = situation.num_instances, space.configs[chosen]
        minutes = max(num_ahead, 1 if self._horizon is not None else 10) * self._interval_s / 60.0
        outlook = f"{expected_lost:.1f} losses expected within {minutes:.3g} min"
        if config is None:
            smallest = min((int(size) for size in space.sizes[1:]), default=None)
            if smallest is None:
                return f"wait: no configuration can run at all on {max(self._capacity, now)} instances"
            return f"wait: {now} instances, the smallest configuration looked at needs {smallest}"
        if old == 0:
            return f"start {config} on {now} instances: {outlook}"
        if chosen == old:
            faster = space.configs[space.fastest(now)]
            if faster == config:
                return f"{config} stays: the fastest for {now} instances; {outlook}"
            pause = float(pauses[space.index(faster)])
            return f"{config} stays: {faster} would be faster now, but costs {pause:.1f} s; {outlook}"
        text = f"{space.configs[old]} -> {config}: {outlook}, {now} instances, now it costs {pauses[chosen]:.1f} s"
        likely = round(expected_lost)
        if 0 < likely <= now - int(space.sizes[chosen]):
            later = float(value.pauses_s(now, likely)[old, chosen])
            text += f", later {later:.1f} s"
        return text


class _Value:
    """Backs values up over one interval.

    Args:
        space: The choices.
        low: Fewest instances looked at.
        high: Most instances looked at.
        capacity: Most instances there can be.
        interval_s: Length of an interval.
        late_at_best: See :class:`LiveputOptimizer`.
    """

    def __init__(
        self, space: ConfigSpace, low: int, high: int, capacity: int, interval_s: float, late_at_best: bool
    ) -> None:
        self._space = space
        self._low = low
        self._high = high
        self._capacity = capacity
        self._interval_s = interval_s
        self._late_at_best = late_at_best
        self._moves: dict[tuple[tuple[int, int], ...], _Moves] = {}

    def trained(self, pauses: Floats, num_instances: int) -> Floats:
        """Return what an interval trains after each pause, shape of ``pauses``; minus infinity what does not fit."""
        space = self._space
        left = self._interval_s - pauses
        gains = space.rates * left
        if self._late_at_best:
            best = space.rates[space.fastest(num_instances)]
            gains = np.where((left < 0) & (space.rates > 0), best * left, gains)
        return np.where(space.sizes <= num_instances, gains, -np.inf)

    def pauses_s(self, num_instances: int, num_lost: int) -> Floats:
        """Return the expected pauses, shape ``(S, S)``."""
        return self._space.pauses_s(num_instances, min(num_lost, _MOST_LOST, num_instances))

    def step(self, law: EventLaw) -> _Step:
        """Prepare the backing up under a law."""
        possible = [(kind, chance) for kind, chance in zip(law.kinds, law.chances, strict=True) if chance > 0]
        kinds = tuple(kind for kind, _ in possible)
        moves = self._moves.get(kinds)
        if moves is None:
            if len(self._moves) >= _MOST_LAWS:
                self._moves.clear()
            moves = self._moves[kinds] = self._find_moves(kinds)
        chances = np.array([chance for _, chance in possible])
        rows = np.arange(len(moves.of))
        mix = np.zeros((len(rows), moves.num_moves))
        for column, chance in enumerate(chances):
            mix[rows, moves.of[:, column]] += chance
        return _Step(moves, mix)

    def _find_moves(self, kinds: tuple[tuple[int, int], ...]) -> _Moves:
        # Without a loss it does not matter how many there were: such moves share one maximum.
        keys = []
        for count in range(self._low, self._high + 1):
            for kind in kinds:
                lost, after = outcome(count, kind, self._capacity)
                after = min(max(after, self._low), self._high)
                keys.append((after, count if lost else -1, min(lost, _MOST_LOST)))
        moves = sorted(set(keys))
        place = {move: index for index, move in enumerate(moves)}
        of = np.array([place[key] for key in keys], dtype=np.int64).reshape(-1, len(kinds))
        size = max(1, -(-len(moves) // _BLOCKS))
        blocks = [self._block(moves[first : first + size], first) for first in range(0, len(moves), size)]
        return _Moves(of, len(moves), len(self._space), blocks)

    def _block(self, moves: list[tuple[int, int, int]], first: int) -> _Block:
        sizes = self._space.sizes
        targets = np.flatnonzero(sizes <= moves[-1][0])
        sources = np.flatnonzero(sizes <= max(max(after, count) for after, count, _ in moves))
        gains = np.empty((len(targets), len(moves), len(sources)))
        for index, (after, count, lost) in enumerate(moves):
            trained = self.trained(self.pauses_s(max(count, 0), lost), after)
            gains[:, index] = trained[np.ix_(sources, targets)].T
        return _Block(
            slice(first, first + len(moves)),
            gains,
            np.array([after - self._low for after, _, _ in moves], dtype=np.int64),
            targets,
            sources,
        )


@dataclass(frozen=True, slots=True)
class _Block:
    """Some of the moves, as arrays without those configurations that fit none of them.

    Attributes:
        place: Which moves.
        gains: What the interval trains, shape ``(targets, moves, sources)``; minus infinity where it does not fit.
        after: Row of the number of instances afterwards, shape ``(moves,)``.
        targets: Entries that fit afterwards.
        sources: Entries that fit before.
    """

    place: slice
    gains: Floats
    after: Ints
    targets: Ints
    sources: Ints


@dataclass(frozen=True, slots=True)
class _Moves:
    """Ways from a number of instances to another, for some kinds of event.

    Attributes:
        of: Move of each number of instances and kind, shape ``(W, kinds)``.
        num_moves: Moves ``M``.
        num_entries: Entries ``S`` of the space.
        blocks: The moves, ordered by the number of instances afterwards.
    """

    of: Ints
    num_moves: int
    num_entries: int
    blocks: list[_Block]


@dataclass(frozen=True, slots=True)
class _Step:
    """One interval under one law.

    Attributes:
        moves: What can happen.
        mix: Chance of each move, shape ``(W, M)``.
    """

    moves: _Moves
    mix: Floats

    def __call__(self, values: Floats) -> Floats:
        """Return the values one interval earlier, shape ``(W, S)``; 0 where a configuration does not fit."""
        best = np.zeros((self.moves.num_moves, self.moves.num_entries))
        for block in self.moves.blocks:
            later = values[block.after[:, None], block.targets].T[:, :, None]
            best[block.place, block.sources] = (block.gains + later).max(axis=0)
        earlier: Floats = self.mix @ best
        return earlier


def reactive_plan(profile: Profile, num_instances: int) -> ParallelConfig | None:
    """Return what a policy without a future runs: the fastest configuration for the instances there are."""
    return best_config(profile, num_instances)
