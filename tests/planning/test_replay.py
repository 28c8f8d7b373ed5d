"""Replaying plans, the best possible plan, and the reference system's scores."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.planning.cost import MeasuredCost
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import ThroughputProfile
from lightning_parcae.planning.replay import MembershipStep, Running, advance, best_possible, membership_steps, replay
from lightning_parcae.planning.space import ConfigSpace

PLANS = Path(__file__).parent.parent / "data" / "parcae_plans"

PROFILE = ThroughputProfile(
    "toy",
    {
        ParallelConfig(1, 1): 2.0,
        ParallelConfig(2, 1): 3.5,
        ParallelConfig(1, 2): 4.0,
        ParallelConfig(1, 3): 5.0,
        ParallelConfig(2, 2): 6.0,
    },
)


def space_with(**terms: float) -> ConfigSpace:
    return ConfigSpace(PROFILE, MeasuredCost(layer_bytes=(10,) * 6, **terms), max_instances=4)  # type: ignore[arg-type]


def test_steps_of_a_trace_chain() -> None:
    steps = membership_steps(AvailabilityTrace.from_counts([3, 3, 1, 4]))
    assert steps == (
        MembershipStep(0, 3, 0),
        MembershipStep(3, 0, 0),
        MembershipStep(3, 0, 2),
        MembershipStep(1, 3, 0),
    )


def test_instances_that_come_and_go_between_two_intervals_are_never_seen() -> None:
    text = "0,add,a\n61000,add,b\n62000,add,c\n63000,remove,b\n64000,remove,a\n120000,remove,c\n180000,add,d\n"
    steps = membership_steps(AvailabilityTrace.parse(text))
    assert steps[:3] == (MembershipStep(0, 1, 0), MembershipStep(1, 0, 0), MembershipStep(1, 0, 1))
    assert steps[3] == MembershipStep(0, 1, 0)
    burst = AvailabilityTrace.parse("0,add,a\n1000,add,b\n2000,remove,b\n2000,remove,a\n60000,add,c\n")
    assert all(step.num_lost <= step.num_before for step in membership_steps(burst))


def test_a_pause_longer_than_the_interval_goes_on_in_the_next_one() -> None:
    space = space_with(formation_s=70.0, build_s=0.0)
    stay = MembershipStep(4, 0, 0)
    big, small = ParallelConfig(2, 2), ParallelConfig(1, 2)
    score = replay([big, big], [MembershipStep(0, 4, 0), stay], space)
    assert score.samples.tolist() == [0.0, 50.0 * 6.0]
    assert score.paused_s.tolist() == [60.0, 10.0]
    assert score.num_migrations == 1
    # A second migration before the first one ended: its own 70 s and another formation, the rest is dropped.
    running, samples, paused, moved = advance(Running(big, 10.0), small, stay, space)
    assert (samples, paused, moved) == (0.0, 60.0, True)
    assert running.remaining_s == pytest.approx(70.0 + 70.0 - 60.0)
    assert advance(Running(big, 10.0), None, stay, space)[0] == Running(None, 0.0)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="interval 0: 2x2 needs more than the 3 instances"):
        replay([ParallelConfig(2, 2)], [MembershipStep(0, 3, 0)], space_with())


@pytest.mark.parametrize("seed", range(12))
def test_best_possible_equals_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    space = space_with(
        formation_s=float(rng.choice([0.5, 20.0, 50.0, 80.0])),
        build_s=float(rng.choice([0.0, 5.0])),
        bytes_per_s=float(rng.choice([1.0, 100.0])),
        rollback_s=float(rng.choice([0.0, 30.0])),
    )
    steps = membership_steps(AvailabilityTrace.from_counts(rng.integers(0, 5, size=5).tolist()))
    plan = best_possible(steps, space)
    best = -1.0
    for configs in itertools.product(
        *[
            [config for entry, config in enumerate(space.configs) if space.sizes[entry] <= step.num_instances]
            for step in steps
        ]
    ):
        best = max(best, float(replay(configs, steps, space).samples.sum()))
    assert replay(plan, steps, space).samples.sum() == pytest.approx(best)


@pytest.mark.parametrize(
    ("name", "scores", "segments", "optimum", "bound"),
    [
        (
            "gpt-1.5b_p3_gbs128_mbs1",
            {"throughut-opt": 33.919, "liveput-truth": 34.241, "liveput-predict": 31.780},
            (37.36, 38.76, 27.90, 28.11),
            34.767,
            36.750,
        ),
        (
            "resnet152_gbs2048_mbs32",
            {"throughut-opt": 2255.234, "liveput-truth": 2259.683, "liveput-predict": 2184.199},
            (2512.55, 2693.35, 1776.66, 1636.32),
            2259.59,
            2323.864,
        ),
    ],
)
def test_reference_scores_are_reproduced(
    reference_model: Callable[[str], Any],
    name: str,
    scores: dict[str, float],
    segments: tuple[float, ...],
    optimum: float,
    bound: float,
) -> None:
    _, _, space = reference_model(name.partition("_")[0])
    path = PLANS / f"{name}.json"
    steps = membership_steps(AvailabilityTrace.read(path))
    plans = json.loads(path.read_text())

    best = replay(best_possible(steps, space), steps, space).samples_per_s
    assert best == pytest.approx(optimum, rel=5e-4)
    for kind, expected in scores.items():
        score = replay([ParallelConfig(*plan[kind]) for plan in plans], steps, space)
        assert score.samples_per_s == pytest.approx(expected, rel=5e-4)
        assert score.samples_per_s <= best * (1 + 1e-12)
        if kind == "liveput-truth":
            hours = [score.between(first, first + 60) for first in (330, 90, 480, 600)]
            assert hours == pytest.approx(segments, rel=1e-3)
    fastest = [space.rates[space.fastest(step.num_instances)] for step in steps]
    assert np.mean(fastest) == pytest.approx(bound, rel=1e-5)

    # The true future over twelve intervals, planned again each interval, is the optimum.
    running, plan = Running(), []
    for index, step in enumerate(steps[:120]):
        config = best_possible(steps[index : index + 12], space, start=running)[0]
        running = advance(running, config, step, space)[0]
        plan.append(config)
    short = steps[:120]
    whole = replay(best_possible(short, space), short, space).samples_per_s
    assert replay(plan, short, space).samples_per_s == pytest.approx(whole, rel=2e-3)
