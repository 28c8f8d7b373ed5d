"""Random deaths, freezes, notices and arrivals: the job neither splits nor wedges, and loses nothing silently."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from simulated_job import World, make_spec

Table = Callable[[int], "tuple[int, int] | None"]

TABLES: dict[str, Table] = {
    "two stages": lambda n: (n // 2, 2) if n >= 2 else None,
    "all shapes": lambda n: {0: None, 1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 5: (2, 2), 6: (2, 3)}.get(n, (2, 3)),
    "one pipeline": lambda n: (1, min(n, 4)) if n >= 1 else None,
    "only 2x2": lambda n: (2, 2) if n >= 4 else None,
}
FAULTS_END_S = 12.0


def run_job(seed: int) -> World:
    """Run a job to its end under random faults, checking it all the way."""
    table = TABLES[list(TABLES)[seed % len(TABLES)]]
    has_fallback = seed % 3 != 0
    spec = make_spec(8, table, has_fallback=has_fallback)
    world = World(
        seed,
        spec,
        num_steps=40 + seed % 40,
        expected=4,
        max_link_delay_s=[0.002, 0.05, 0.3][seed % 5 // 2],
        formation_s=[0.1, 1.5][seed % 7 // 4],
    )
    rng = world.rng
    world.checkpoint_every = rng.choice([1, 3, 10]) if has_fallback else 0
    for index in range(rng.randint(2, 6)):
        world.add(f"i{index}")
    world.run(rng.uniform(0.0, 3.0))
    while world.now < FAULTS_END_S and world.phase not in ("done", "stopped"):
        _hurt(world)
        world.run(world.now + rng.choice([0.0, 0.01, 0.05, 0.3, 2.0]))
    while world.num_usable() < 5:
        world.add(f"i{len(world.members)}")
    world.run(world.now + 250.0, stop=lambda: world.phase in ("done", "stopped"))
    return world


def _hurt(world: World) -> None:
    rng, living = world.rng, world.living()
    what = rng.choice(["kill", "kill two", "freeze", "notice", "add", "add", "again", "nothing"])
    if not living or what == "add":
        world.add(f"i{len(world.members)}")
    elif what == "kill":
        world.kill(rng.choice(living))
    elif what == "kill two":
        for name in rng.sample(living, min(2, len(living))):
            world.kill(name)
    elif what == "freeze":
        world.freeze(rng.choice(living), rng.choice([0.5, 2.0, 20.0]))
    elif what == "notice":
        world.notice(rng.choice(living))
    elif what == "again":
        gone = [name for name, member in world.members.items() if not member.alive]
        if gone:
            world.add(rng.choice(gone))


def check_end(world: World) -> None:
    """The job is done; or it was stopped with a reason that the faults justify."""
    if world.phase == "stopped":
        (stopped,) = world.names("stopped")
        reason = stopped.fields["reason"]
        if world.spec.has_fallback:
            assert world.checkpoint is None or "no complete checkpoint" not in reason, reason
        allowed = ("fallback_dir", "no complete checkpoint") if not world.checkpoint else ()
        allowed += () if world.spec.has_fallback else ("fallback_dir",)
        assert any(words in reason for words in allowed), reason
    else:
        assert world.phase == "done", f"wedged in {world.phase} at {world.now}: {world.coordinator.status()}"
        steps = {member.step for member in world.members.values() if member.finished}
        assert steps == {world.num_steps}


@pytest.mark.parametrize("seed", range(int(os.environ.get("PARCAE_TEST_SEEDS", "48"))))
def test_random_faults(seed: int) -> None:
    check_end(run_job(seed))


@pytest.mark.parametrize("name", TABLES)
def test_undisturbed_job_forms_one_generation(name: str) -> None:
    world = World(1, make_spec(8, TABLES[name]), expected=4)
    for index in range(4):
        world.add(f"i{index}")
    world.run(100, stop=lambda: world.phase == "done")
    check_end(world)
    assert len(world.names("formed")) == 1
