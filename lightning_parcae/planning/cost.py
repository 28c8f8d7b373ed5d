"""What a migration costs: expected seconds in which nothing is trained.

A cost model fills matrices: entry ``[i, j]`` is the expected pause on the way from configuration ``i`` to ``j`` when
``k`` of ``N`` instances, every set equally likely, are lost at that moment. What depends on the victims is worked out
given that exactly ``v`` of them had a place, once for each grid, and then mixed over the hypergeometric ``v``.

Symbols: ``N`` instances, ``k`` of them lost, ``v`` of these in the grid; ``D`` pipelines of ``P`` stages before,
``d`` of ``p`` after; ``S`` configurations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from math import comb
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from lightning_parcae.planning.liveput import fewest_replicas
from lightning_parcae.planning.parallel_config import ParallelConfig

Floats = NDArray[np.float64]
Configs = tuple[ParallelConfig, ...]

_DRAWS = 64  # sets of victims looked at where no closed form exists and there are too many to enumerate
_MOST_PAIRS = 150
# More victims than this change the greedy match's expectation by less than the draws do.
_MOST_MATCHED = 4
# Up to so many victims the polynomials of all grids are worked out at once, and nothing overflows.
_MOST_AT_ONCE = 8
_NEVER = 1e-12
_CHECKPOINT_S = 14.0  # the reference's price of saving and loading a checkpoint


class MigrationCost(Protocol):
    """What the optimizer asks of a cost model."""

    def matrix(self, configs: Configs, num_instances: int, num_lost: int) -> Floats:
        """Return the expected pauses in seconds between all pairs of configurations, shape ``(S, S)``.

        Entries from configurations that need more than ``num_instances`` have no meaning.
        """
        ...

    def initial(self, configs: Configs) -> Floats:
        """Return the pauses when nothing ran before, shape ``(S,)``."""
        ...

    def overlap(self, configs: Configs) -> Floats:
        """Return what is paid on top when a migration begins before the last one has ended, shape ``(S,)``."""
        ...


def victims_in_grids(num_instances: int, sizes: NDArray[np.int64], num_lost: int) -> Floats:
    """Return the hypergeometric distribution of the victims that had a place.

    Args:
        num_instances: Instances before the loss.
        sizes: Places of each grid, shape ``(S,)``; grids larger than ``num_instances`` count as full.
        num_lost: Victims among all instances.

    Returns:
        Probability of ``0 .. num_lost`` victims with a place, shape ``(S, num_lost + 1)``.
    """
    if not 0 <= num_lost <= num_instances:
        raise ValueError(f"{num_lost} of {num_instances} instances cannot be lost")
    inside = np.minimum(sizes, num_instances)[:, None]
    count = np.arange(num_lost + 1)[None, :]
    possible = (count <= inside) & (num_lost - count <= num_instances - inside)
    a, b = np.where(possible, count, 0), np.where(possible, num_lost - count, 0)
    outside = num_instances - inside
    log = gammaln(inside + 1) - gammaln(a + 1) - gammaln(inside - a + 1)
    log += gammaln(outside + 1) - gammaln(b + 1) - gammaln(np.maximum(outside - b, 0) + 1)
    log -= gammaln(num_instances + 1) - gammaln(num_lost + 1) - gammaln(num_instances - num_lost + 1)
    chances: Floats = np.where(possible, np.exp(log), 0.0)
    return chances


def _mixed(given: Callable[[int], Floats], configs: Configs, num_instances: int, num_lost: int) -> Floats:
    """Mix matrices for exactly ``v`` victims in the grid over the ``v`` that ``k`` uniform victims give."""
    sizes = np.array([config.num_instances for config in configs], dtype=np.int64)
    chances = victims_in_grids(num_instances, sizes, num_lost)
    total = np.zeros((len(configs), len(configs)))
    for victims in range(num_lost + 1):
        if chances[:, victims].max(initial=0.0) > _NEVER:
            total += chances[:, victims, None] * given(victims)
    return total


def worst_losses(configs: Configs, victims: int) -> Floats:
    """Return the distribution of the most replicas that any stage of a grid loses.

    Args:
        configs: The grids.
        victims: Losses among the places of each grid, drawn uniformly; more than there are count as all.

    Returns:
        Probability of 0, 1, ... replicas, shape ``(S, most + 1)``.
    """
    depth = np.array([config.num_pipelines for config in configs], dtype=np.int64)
    lost = np.minimum([config.num_instances for config in configs], victims)
    most = int(np.minimum(depth, lost).max(initial=0))
    worst = np.zeros((len(configs), most + 1))
    if victims <= _MOST_AT_ONCE:
        # Of all sets of victims, those that take at most j from each stage: [x^v] (sum_{i <= j} C(D, i) x^i)^P.
        stages = np.array([config.num_stages for config in configs], dtype=np.float64)
        powers = np.arange(victims + 1)
        ways = np.array([[float(comb(size, power)) for power in powers.tolist()] for size in depth.tolist()])
        at_most = np.where(powers[None, :] <= np.arange(most + 1)[:, None], ways[:, None, :], 0.0)  # (S, j, power)
        series = np.zeros_like(at_most)
        series[:, :, 0] = 1.0
        for power in range(1, victims + 1):  # the power of a series, by Miller's recurrence
            factors = powers[1 : power + 1] * (stages[:, None] + 1.0) - power
            terms = factors[:, None, :] * at_most[:, :, 1 : power + 1] * series[:, :, power - 1 :: -1][:, :, :power]
            series[:, :, power] = terms.sum(axis=2) / power
        wanted = series[np.arange(len(configs)), :, lost]
        total = np.array([float(comb(one.num_instances, int(gone))) for one, gone in zip(configs, lost, strict=True)])
        shares = np.clip(wanted / total[:, None], 0.0, 1.0)
        worst[:] = np.maximum(np.diff(shares, axis=1, prepend=0.0), 0.0)
    else:
        for row, config in enumerate(configs):
            left = fewest_replicas([config.num_pipelines] * config.num_stages, 0, int(lost[row]))
            worst[row, : len(left[::-1][: most + 1])] = left[::-1][: most + 1]
    return worst


# --- our own ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredCost:
    """Migration as this package does it; every term is measured in the running job and starts from a default.

    A pause is detection (if somebody died unannounced), formation of the new generation and rebuilding of the stage,
    plus the transfer of what moves: receivers work at the same time, a donor serves one receiver after another. Who had
    no place needs a whole stage; the dead serve nothing, those who go with a notice do.
    Joiners warm up while the others train and cost nothing.

    Attributes:
        layer_bytes: State of each layer.
        boundaries: Split of the layers for each number of stages; even where it is not given.
        detection_s: From a death to its being known.
        formation_s: Two phases and new groups.
        build_s: Rebuilding a stage.
        bytes_per_s: What a link moves.
        rollback_s: Coming back from a state that nobody held: loading it, and the steps lost on the way.
        is_announced: Whether losses are announced in time: then nothing has to be detected, and those who go still
            serve their state.
    """

    layer_bytes: tuple[int, ...]
    boundaries: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    detection_s: float = 0.1
    formation_s: float = 0.2
    build_s: float = 0.05
    bytes_per_s: float = 1e9
    rollback_s: float = 30.0
    is_announced: bool = False
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        times = (self.detection_s, self.formation_s, self.build_s, self.rollback_s)
        if not self.layer_bytes or min(self.layer_bytes) < 0 or min(times) < 0 or self.bytes_per_s <= 0:
            raise ValueError(
                f"needed are layers of at least 0 bytes, times of at least 0 s and a bandwidth above 0, got {self}"
            )

    def matrix(self, configs: Configs, num_instances: int, num_lost: int) -> Floats:
        """See :class:`MigrationCost`."""
        prices: dict[int, Floats] = self._cache.setdefault(("prices", configs), {})

        def given(victims: int) -> Floats:
            if victims not in prices:
                prices[victims] = self._price(configs, victims)
            return prices[victims]

        return _mixed(given, configs, num_instances, num_lost)

    def initial(self, configs: Configs) -> Floats:
        """See :class:`MigrationCost`."""
        return np.full(len(configs), self.formation_s + self.build_s)

    def overlap(self, configs: Configs) -> Floats:
        """See :class:`MigrationCost`: only the formation is done twice."""
        return np.full(len(configs), self.formation_s)

    def with_terms(self, **terms: float) -> MeasuredCost:
        """Return a copy with other terms, as the job has measured them."""
        return replace(self, **terms)  # type: ignore[arg-type]

    def _price(self, configs: Configs, victims: int) -> Floats:
        depth = np.array([config.num_pipelines for config in configs], dtype=np.int64)
        stages = np.array([config.num_stages for config in configs], dtype=np.int64)
        counts, number = np.unique(stages, return_inverse=True)
        detection = self.detection_s if victims and not self.is_announced else 0.0
        prices = np.full((len(configs), len(configs)), detection + self.formation_s + self.build_s)
        worst = worst_losses(configs, victims)  # (S, most + 1)
        largest = np.array([max(self._stage_bytes(count)) for count in counts.tolist()]) / self.bytes_per_s
        rounds = np.zeros((len(configs), len(configs)))  # of transfers one after the other, the number of stages kept
        serial = np.zeros((len(configs), len(configs)))  # and changed
        for lost in range(worst.shape[1]):
            left = np.maximum(depth - lost, 0)[:, None]
            donors = depth[:, None] if self.is_announced else np.maximum(left, 1)
            rounds += worst[:, lost, None] * np.ceil(np.maximum(depth[None, :] - left, 0) / donors)
            serial += worst[:, lost, None] * np.ceil(depth[None, :] / donors)
            if not self.is_announced:
                prices += np.where(left == 0, worst[:, lost, None] * self.rollback_s, 0.0)
        moved = self._moved_between(tuple(counts.tolist()))[number][:, number] * serial
        # Whoever had no place before needs a whole stage.
        places = depth * stages
        fresh = places[None, :] > (places - np.minimum(victims, places))[:, None]
        moved = np.maximum(moved, np.where(fresh, largest[number][None, :], 0.0))
        is_same = number[:, None] == number[None, :]
        prices += np.where(is_same, rounds * largest[number][:, None], moved)
        if not victims:
            np.fill_diagonal(prices, 0.0)
        return prices

    def _edges(self, num_stages: int) -> tuple[int, ...]:
        given = self.boundaries.get(num_stages)
        count = len(self.layer_bytes)
        return given if given is not None else tuple(count * index // num_stages for index in range(num_stages + 1))

    def _stage_bytes(self, num_stages: int) -> list[int]:
        edges = self._edges(num_stages)
        return [sum(self.layer_bytes[low:high]) for low, high in pairwise(edges)]

    def _moved_between(self, counts: tuple[int, ...]) -> Floats:
        """Return the longest time that an instance of one split needs to fill up to a stage of another one."""
        key = ("moved", counts)
        if key not in self._cache:
            prefix = np.concatenate([[0], np.cumsum(self.layer_bytes)])
            edges = [np.array(self._edges(count)) for count in counts]
            low, high = (np.concatenate(ends) for ends in zip(*((cut[:-1], cut[1:]) for cut in edges), strict=True))
            firsts = np.cumsum([0, *counts[:-1]])  # of the stages of each split
            seconds = np.empty((len(counts), len(counts)))
            for row, old in enumerate(edges):
                begin = np.maximum(low[:, None], old[:-1])
                end = np.maximum(np.minimum(high[:, None], old[1:]), begin)
                held = (prefix[end] - prefix[begin]).max(axis=1)  # by the best old stage
                lacks = prefix[high] - prefix[low] - held
                seconds[row] = np.maximum.reduceat(lacks, firsts) / self.bytes_per_s
            self._cache[key] = seconds
        moved: Floats = self._cache[key]
        return moved

    def to_json(self) -> dict[str, Any]:
        """Return the terms as JSON values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if not name.startswith("_")}
        values["boundaries"] = {str(count): list(edges) for count, edges in self.boundaries.items()}
        return values | {"layer_bytes": list(self.layer_bytes)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MeasuredCost:
        """Build the terms from :meth:`to_json`'s values.

        Raises:
            ValueError: If they do not fit.
        """
        try:
            fields = dict(value)
            fields["layer_bytes"] = tuple(int(size) for size in fields["layer_bytes"])
            edges = fields.get("boundaries", {}).items()
            fields["boundaries"] = {int(count): tuple(int(cut) for cut in cuts) for count, cuts in edges}
            return cls(**fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a migration cost: {type(error).__name__}: {error}") from error


# --- the reference system's -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReferenceCost:
    """Migration as the reference system prices it (facts in ``facts/parcae.md`` section 4), expectations exact.

    Its quirks are kept, as plans are scored with them: a pause is charged when only a spare leaves; a lost stage is
    charged serially, the last stage already when one replica is left; and a change of the number of stages is charged
    for the last stage's missing layers only, matched greedily. That match alone has no closed form: it is enumerated up
    to two victims and averaged over fixed draws beyond.

    Attributes:
        layer_params: Parameters of each layer.
        states_per_param: Bytes of state per parameter.
        link: Measured ``(bytes, seconds)`` of one transfer, ascending.
        build_s: Seconds to build a stage, by number of stages.
        process_s: Seconds to start a process.
        rendezvous_s: Seconds of a rendezvous, paid when the job grows; includes what else is paid then.
        group_s: Rule of the seconds to rebuild communication groups, see ``reference_groups.json``.
        group_base_s: Its constant part.
    """

    layer_params: tuple[float, ...]
    link: tuple[tuple[float, float], ...]
    build_s: Mapping[int, float]
    process_s: float
    rendezvous_s: float
    group_s: Mapping[str, Any]
    group_base_s: float
    states_per_param: float = 12.0
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @classmethod
    def from_reference(cls, data: Mapping[str, Any], model: str) -> ReferenceCost:
        """Read one model of ``data/parcae/profiles.json``.

        Raises:
            ValueError: If there is no such model.
        """
        groups = json.loads((Path(__file__).parent / "reference_groups.json").read_text(encoding="utf-8"))
        if model not in data.get("models", {}) or model not in groups["models"]:
            raise ValueError(f"no model {model!r}; known are {', '.join(groups['models'])}")
        facts, common = data["models"][model], data["common"]
        link = sorted((float(size), micros / 1e6) for size, micros in common["p2p_bytes_to_us_10Gbps"].items())
        return cls(
            layer_params=tuple(float(count) for count in facts["layer_params"]),
            link=tuple(link),
            build_s={int(stages): time / 1e3 for stages, time in facts["model_build_ms"].items()},
            process_s=facts["proc_init_ms"] / 1e3,
            rendezvous_s=(common["rendezvous_ms_on_add"] + facts["restart_extra_ms_on_add"]) / 1e3,
            group_s=groups["models"][model],
            group_base_s=groups["base_s"],
        )

    def matrix(self, configs: Configs, num_instances: int, num_lost: int) -> Floats:
        """See :class:`MigrationCost`."""
        sizes = np.array([config.num_instances for config in configs], dtype=np.int64)
        growing, shrinking = self._restarts(configs)
        restart = np.where(sizes[None, :] > sizes[:, None] - num_lost, growing[None, :], shrinking[None, :])
        chances = victims_in_grids(num_instances, sizes, num_lost)
        total: Floats = np.zeros((len(configs), len(configs)))
        for victims in range(num_lost + 1):
            if chances[:, victims].max(initial=0.0) > _NEVER:
                # Transfers and swaps, and the share of cases in which the processes restart.
                moved, restarts = self._given(configs, victims)
                total += chances[:, victims, None] * (moved + restarts * restart)
        if not num_lost:
            np.fill_diagonal(total, 0.0)
        return total

    def initial(self, configs: Configs) -> Floats:
        """See :class:`MigrationCost`."""
        pauses: Floats = np.array([self.restart_s(config, grows=True) for config in configs])
        for index, config in enumerate(configs):
            pauses[index] += self.transfer_s(0.0)
            if config.num_pipelines > 1:
                pauses[index] += max(self._stage_s(config.num_stages))
        return pauses

    def overlap(self, configs: Configs) -> Floats:
        """See :class:`MigrationCost`: a whole restart."""
        return np.array([self.restart_s(config, grows=False) for config in configs])

    # --- terms --------------------------------------------------------------------------------------------------------

    def transfer_s(self, num_bytes: float) -> float:
        """Return the seconds of one transfer: interpolated, beyond the largest measured size proportional."""
        size, seconds = self.link[-1]
        if num_bytes > size:
            return num_bytes / size * seconds
        return float(np.interp(num_bytes, [point[0] for point in self.link], [point[1] for point in self.link]))

    def groups_s(self, config: ParallelConfig, *, grows: bool) -> float:
        """Return the seconds to rebuild the communication groups."""
        rule = self.group_s
        if "by_pipelines_s" in rule:
            time = max(time for depth, time in rule["by_pipelines_s"] if config.num_pipelines >= depth)
            return self.group_base_s + float(time * (rule["add_factor"] if grows else 1.0))
        what = "add" if grows else "remove"
        if f"per_instance_{what}_s" in rule:
            return self.group_base_s + config.num_instances * float(rule[f"per_instance_{what}_s"])
        groups = config.num_pipelines + config.num_stages + 1 + config.num_instances
        return self.group_base_s + groups * float(rule[f"per_group_{what}_s"])

    def intra_stage_s(self, config: ParallelConfig) -> float:
        """Return the seconds of an intra-stage migration."""
        return self.groups_s(config, grows=False) + self.process_s

    def restart_s(self, config: ParallelConfig, *, grows: bool) -> float:
        """Return the seconds to restart the processes, transfers not included."""
        arrival = self.rendezvous_s if grows else 0.0
        build = self.build_s[config.num_stages]
        return arrival + self.groups_s(config, grows=grows) + self.process_s + build

    def reload_s(self, config: ParallelConfig, *, grows: bool, is_first: bool) -> float:
        """Return the seconds to restart everything from a checkpoint; the first start has none to save and load."""
        files = 0.0 if is_first else _CHECKPOINT_S
        return self.restart_s(config, grows=grows) + files + sum(self._stage_s(config.num_stages))

    def boundaries(self, num_stages: int) -> tuple[int, ...]:
        """Return the reference's split: even, one more to the first stage, the rest just before the last."""
        size, rest = divmod(len(self.layer_params) - 1, num_stages)
        chunks = [size + 1] + [size] * (num_stages - 1)
        for index in range(rest):
            chunks[-index - 2] += 1
        return (0, *np.cumsum(chunks).tolist())

    def _stage_s(self, num_stages: int) -> list[float]:
        """Return the seconds to transfer each stage's state."""
        key = ("stages", num_stages)
        if key not in self._cache:
            edges = self.boundaries(num_stages)
            self._cache[key] = [
                self.transfer_s(sum(self.layer_params[low:high]) * self.states_per_param)
                for low, high in pairwise(edges)
            ]
        seconds: list[float] = self._cache[key]
        return seconds

    # --- expectations, given exactly v victims in the grid ------------------------------------------------------------

    def _restarts(self, configs: Configs) -> tuple[Floats, Floats]:
        """Return the seconds to restart the processes when the job grows, and when it does not."""
        key = ("restarts", configs)
        if key not in self._cache:
            self._cache[key] = tuple(
                np.array([self.restart_s(config, grows=grows) for config in configs]) for grows in (True, False)
            )
        times: tuple[Floats, Floats] = self._cache[key]
        return times

    def _given(self, configs: Configs, victims: int) -> tuple[Floats, Floats]:
        """Return seconds that do not depend on growth, and the chance of a restart, each of shape ``(S, S)``."""
        key = (configs, victims)
        if key not in self._cache:
            stages = np.array([config.num_stages for config in configs], dtype=np.int64)
            depth = np.array([config.num_pipelines for config in configs], dtype=np.int64)
            counts, number = np.unique(stages, return_inverse=True)
            # Pipelines beyond the first are filled by a broadcast of the largest stage.
            spread = np.array([max(self._stage_s(count)) for count in counts.tolist()])[number] * (depth > 1)
            moved = np.zeros((len(configs), len(configs)))
            restarts = np.ones((len(configs), len(configs)))
            for row, old in enumerate(configs):
                if victims > old.num_instances:
                    continue
                missing = [self._missing_s(old, count, victims) for count in counts.tolist()]
                moved[row] = np.array(missing)[number] + spread
                for column in np.flatnonzero(stages == old.num_stages).tolist():
                    same = self._same_stages(old, configs[column].num_pipelines, victims)
                    moved[row, column], restarts[row, column] = same
            self._cache[key] = moved, restarts
        result: tuple[Floats, Floats] = self._cache[key]
        return result

    def _same_stages(self, old: ParallelConfig, target: int, victims: int) -> tuple[float, float]:
        key = ("same", old.num_pipelines, old.num_stages, target, victims)
        if key not in self._cache:
            self._cache[key] = self._expect_same_stages(old, target, victims)
        result: tuple[float, float] = self._cache[key]
        return result

    def _expect_same_stages(self, old: ParallelConfig, target: int, victims: int) -> tuple[float, float]:
        """Sum over the slowest short stage and the number of vanished stages of each transfer time."""
        depth, times = old.num_pipelines, self._stage_s(old.num_stages)
        # Stages with one transfer time and one rule of vanishing form a class: (seconds, vanishes at, count).
        last = (times[-1], 1 if target > 1 else 0, 1)
        classes = [(time, 0, times[:-1].count(time)) for time in sorted(set(times[:-1]))]
        classes = sorted([*classes, last])
        ways: dict[tuple[float, float], Floats] = {(0.0, 0.0): np.eye(1, victims + 1)[0]}
        for time, vanishes, count in classes:
            full = np.array([float(comb(depth, lost)) for lost in range(min(depth, victims) + 1)])
            left = depth - np.arange(len(full))
            is_short = left < target
            is_gone = is_short & (left <= vanishes)
            unhurt = _power(np.where(is_short, 0.0, full), count, victims)
            nxt: dict[tuple[float, float], Floats] = {}
            for gone in range(count + 1):
                some = comb(count, gone) * _times(
                    _power(np.where(is_gone, full, 0.0), gone, victims),
                    _power(np.where(is_gone, 0.0, full), count - gone, victims),
                    victims,
                )
                if not some.any():
                    continue
                for (slowest, serial), way in ways.items():
                    if gone == 0:
                        _add(nxt, (slowest, serial), _times(way, unhurt, victims))
                        short = _times(way, some - unhurt, victims)
                    else:
                        short = _times(way, some, victims)
                    if short.any():
                        _add(nxt, (max(slowest, time), serial + gone * time), short)
            ways = nxt
        total = float(comb(old.num_instances, victims))
        fine = ways.pop((0.0, 0.0), np.zeros(victims + 1))[victims] / total
        moved = sum(max(slowest, serial) * way[victims] for (slowest, serial), way in ways.items()) / total
        intra = self.intra_stage_s(ParallelConfig(target, old.num_stages))
        return float(moved + fine * intra), float(1.0 - fine)

    def _missing_s(self, old: ParallelConfig, num_stages: int, victims: int) -> float:
        """Return the expected seconds to fill up the last stage of another split."""
        if num_stages == old.num_stages:
            return 0.0
        counted = min(victims, _MOST_MATCHED)
        key = ("missing", old.num_pipelines, old.num_stages, num_stages, counted)
        if key not in self._cache:
            self._cache[key] = self._expect_missing_s(old, num_stages, counted)
        missing_s: float = self._cache[key]
        return missing_s

    def _expect_missing_s(self, old: ParallelConfig, num_stages: int, victims: int) -> float:
        """Match new stages greedily to survivors; return the expected seconds to fill the last one."""
        prefix = np.concatenate([[0.0], np.cumsum(self.layer_params)])
        before, after = np.array(self.boundaries(old.num_stages)), np.array(self.boundaries(num_stages))
        low = np.maximum(after[:-1][:, None], before[:-1][None, :])
        high = np.maximum(np.minimum(after[1:][:, None], before[1:][None, :]), low)
        missing = (prefix[after[1:]] - prefix[after[:-1]])[:, None] - (prefix[high] - prefix[low])  # (p, P)
        by_place = np.tile(missing, old.num_pipelines)  # (p, D * P), place = pipeline * P + stage
        alive = self._survivors(old.num_instances, victims)  # (draws, D * P)
        draws = np.arange(len(alive))
        needed = np.zeros(len(alive))
        for stage in range(num_stages):
            price = np.where(alive, by_place[stage], np.inf)
            best = price.argmin(axis=1)
            found = alive[draws, best]
            needed = np.where(found, by_place[stage][best], needed)
            alive[draws, best] = False
        values, counts = np.unique(needed, return_counts=True)
        seconds = [self.transfer_s(value * self.states_per_param) for value in values]
        return float(np.dot(seconds, counts) / len(alive))

    def _survivors(self, size: int, victims: int) -> NDArray[np.bool_]:
        sets: NDArray[np.int64]
        if victims == 0:
            sets = np.zeros((1, 0), dtype=np.int64)
        elif victims == 1 or (victims == 2 and comb(size, 2) <= _MOST_PAIRS):
            sets = np.array(list(combinations(range(size), victims)), dtype=np.int64)
        else:
            rng = np.random.default_rng(victims)
            sets = np.argsort(rng.random((_DRAWS, size)), axis=1)[:, :victims]
        alive = np.ones((len(sets), size), dtype=bool)
        np.put_along_axis(alive, sets, False, axis=1)
        return alive


def _times(left: Floats, right: Floats, degree: int) -> Floats:
    product = np.zeros(degree + 1)
    for power, factor in enumerate(left.tolist()):  # few and mostly zero: faster than a convolution
        if factor:
            end = min(len(right), degree + 1 - power)
            product[power : power + end] += factor * right[:end]
    return product


def _power(base: Floats, exponent: int, degree: int) -> Floats:
    result = np.zeros(degree + 1)
    result[0] = 1.0
    while exponent:
        if exponent & 1:
            result = _times(base, result, degree)
        exponent >>= 1
        if exponent:
            base = _times(base, base, degree)
    return result


def _add(ways: dict[tuple[float, float], Floats], key: tuple[float, float], way: Floats) -> None:
    ways[key] = ways[key] + way if key in ways else way


def expected_pause_s(
    cost: MigrationCost, old: ParallelConfig | None, new: ParallelConfig, *, num_instances: int, num_lost: int = 0
) -> float:
    """Return the expected pause of one migration in seconds.

    Args:
        cost: The cost model.
        old: What runs, or None.
        new: What is to run.
        num_instances: Instances before the loss.
        num_lost: Instances lost at that moment, drawn uniformly.
    """
    if old is None:
        return float(cost.initial((new,))[0])
    configs: Sequence[ParallelConfig] = (old,) if old == new else (old, new)
    return float(cost.matrix(tuple(configs), num_instances, num_lost)[0, -1])


__all__ = ["MeasuredCost", "MigrationCost", "ReferenceCost", "expected_pause_s", "victims_in_grids"]
