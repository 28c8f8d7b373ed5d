"""Profiles: tables, the layer model, its correction by measurements, splits, JSON."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import (
    LayerCost,
    ModelProfile,
    ThroughputProfile,
    best_config,
    read_profile,
)

REFERENCE = Path("/work/shared/data/parcae")
needs_data = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the shared data folder is not here")


def layered(times: list[float], **changes: object) -> ModelProfile:
    layers = tuple(
        LayerCost(
            forward_s=time,
            backward_s=2 * time,
            update_s=time / 10,
            parameter_bytes=1000,
            state_bytes=4000,
            activation_bytes=500,
            output_bytes=100,
        )
        for time in times
    )
    arguments: dict[str, object] = {"num_samples": 32, "num_microbatches": 8, "link_bytes_per_s": 1e6}
    return ModelProfile("toy", layers, **(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("times", [[1, 1, 1, 1], [3, 1, 1, 1, 5, 2], [0, 0, 4, 0, 1, 1, 1], [2]])
def test_split_is_the_best_of_all(times: list[float]) -> None:
    profile = layered(times)
    for stages in range(1, len(times) + 1):

        def slowest(edges: tuple[int, ...]) -> float:
            return max(sum(times[low:high]) for low, high in itertools.pairwise(edges))

        splits = [(0, *inner, len(times)) for inner in itertools.combinations(range(1, len(times)), stages - 1)]
        chosen = profile.boundaries(stages)
        assert chosen in splits
        assert slowest(chosen) == min(slowest(split) for split in splits)
    with pytest.raises(ValueError, match="cannot make"):
        profile.boundaries(len(times) + 1)


def test_step_time_follows_the_schedule() -> None:
    profile = layered([1.0, 1.0], link_latency_s=0.0)
    # One stage, one pipeline: 8 micro-batches, forward and recompute and backward of both layers, then the update.
    assert profile.modelled_step_s(ParallelConfig(1, 1)) == pytest.approx(8 * (2 + 6) + 0.2)
    # Two stages: filled once, then the slowest stage 7 times; two hops of 100 bytes.
    assert profile.modelled_step_s(ParallelConfig(1, 2)) == pytest.approx(2 + 7 + 6 + 21 + 2e-4 + 0.1)
    # Two pipelines: half the micro-batches, and each way 1000 bytes of gradients per layer, ring of two.
    assert profile.modelled_step_s(ParallelConfig(2, 1)) == pytest.approx(4 * 8 + 0.2 + 2e-3)
    # Three pipelines are as slow as the one with three micro-batches.
    assert profile.modelled_step_s(ParallelConfig(3, 1)) > 3 * 8


def test_recompute_can_be_switched_off() -> None:
    assert layered([1.0], recompute=False, link_latency_s=0.0).modelled_step_s(ParallelConfig(1, 1)) == pytest.approx(
        24.1
    )


def test_memory_and_limits_say_what_can_run() -> None:
    profile = layered([1.0, 1.0, 1.0, 1.0], memory_bytes=2 * 5000 + 2 * 500 + 8 * 100)
    assert not profile.fits(ParallelConfig(1, 1))
    assert profile.samples_per_s(ParallelConfig(1, 1)) == 0.0
    assert profile.fits(ParallelConfig(1, 2))
    assert profile.configs(4) == (
        ParallelConfig(1, 2),
        ParallelConfig(1, 3),
        ParallelConfig(1, 4),
        ParallelConfig(2, 2),
    )
    assert not profile.fits(ParallelConfig(1, 5))
    assert not profile.fits(ParallelConfig(9, 2))
    without = layered([1.0] * 4, recompute=False)
    assert without.stage_memory_bytes(ParallelConfig(1, 2)) == 2 * 5000 + 8 * 2 * 500
    assert {config.num_pipelines for config in layered([1.0], max_pipelines=2).configs(9)} == {1, 2}
    assert {config.num_stages for config in layered([1.0] * 4, min_stages=3).configs(9)} == {3, 4}


def test_measured_steps_replace_and_correct_the_model() -> None:
    profile = layered([1.0] * 4)
    there, elsewhere = ParallelConfig(2, 2), ParallelConfig(1, 4)
    measured = profile.with_step(there, 2 * profile.modelled_step_s(there))
    assert measured.step_time_s(there) == 2 * profile.modelled_step_s(there)
    assert measured.step_time_s(elsewhere) == pytest.approx(2 * profile.modelled_step_s(elsewhere))
    # A second measurement pulls what is near to itself.
    both = measured.with_step(ParallelConfig(1, 3), profile.modelled_step_s(ParallelConfig(1, 3)))
    assert 1.0 < both.correction(elsewhere) < both.correction(ParallelConfig(2, 1)) < 2.0
    assert measured.with_step(there, 10.0, weight=0.5).step_s[there] == pytest.approx(
        (measured.step_s[there] + 10.0) / 2
    )
    assert profile.step_s == {}
    for seconds, weight in ((0.0, 1.0), (float("nan"), 1.0), (1.0, 0.0), (1.0, 2.0)):
        with pytest.raises(ValueError, match="a step takes more than 0 s"):
            profile.with_step(there, seconds, weight=weight)


def test_profiles_survive_json(tmp_path: Path) -> None:
    table = ThroughputProfile("t", {ParallelConfig(2, 3): 5.0, ParallelConfig(1, 2): 3.0})
    model = layered([1.0, 2.0], memory_bytes=1e9).with_step(ParallelConfig(2, 1), 3.0)
    for profile in (table, model):
        path = tmp_path / "profile.json"
        path.write_text(json.dumps(profile.to_json()))
        assert read_profile(path) == profile


def test_best_config_prefers_few_pipelines_on_ties() -> None:
    table = ThroughputProfile("t", {ParallelConfig(2, 2): 5.0, ParallelConfig(1, 4): 5.0, ParallelConfig(1, 2): 3.0})
    assert [best_config(table, n) for n in range(6)] == [
        None,
        None,
        ParallelConfig(1, 2),
        ParallelConfig(1, 2),
        ParallelConfig(1, 4),
        ParallelConfig(1, 4),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "p.json: not JSON: line 1, column 2: Expecting"),
        ("", "p.json: not JSON: line 1, column 1: Expecting value"),
        ("[" * 100_000, "nested too deeply"),
        ("0,18\n60000,17\n", "p.json: not JSON: line 1, column 2"),
        ("[]", "not a profile: the format should be"),
        ('{"format": "lightning_parcae/profile/1"}', "not a profile: 'kind' is missing"),
        (
            '{"format": "lightning_parcae/profile/1", "kind": "model", "layers": [{}], "name": ""}',
            "layer 0: forward_s and",
        ),
        (
            '{"format": "lightning_parcae/profile/1", "kind": "table", "name": "x", "samples_per_s": [[1, 2, -3]]}',
            r"samples_per_s, row 0: samples/s must be above 0, got .1, 2, -3.$",
        ),
        ('{"models": {}}', "say which model"),
    ],
)
def test_what_is_no_profile_is_refused_with_the_path(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_profile(path)
    with pytest.raises(ValueError, match=r"p\.json"):
        read_profile(path)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="forward_s must be at least 0"):
        LayerCost(forward_s=-1.0, backward_s=0.0)
    with pytest.raises(ValueError, match="needed are layers"):
        ModelProfile("none", (), 1, 1)
    for name, value in (
        ("num_samples", 0),
        ("num_microbatches", 2.5),
        ("min_stages", 0),
        ("max_pipelines", 0),
        ("memory_bytes", -1.0),
        ("link_bytes_per_s", float("nan")),
        ("link_latency_s", float("inf")),
    ):
        with pytest.raises(ValueError, match=f"toy: {name} must be"):
            layered([1.0], **{name: value})
    with pytest.raises(ValueError, match="a step of 1x1 takes more than 0 s, got nan"):
        layered([1.0], step_s={ParallelConfig(1, 1): float("nan")})
    with pytest.raises(ValueError, match="at most 1000 layers"):
        layered([1.0] * 1001)


def test_folders_are_no_profiles(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a folder, not a file"):
        read_profile(tmp_path)


@needs_data
@pytest.mark.parametrize("model", ["gpt-1.5b", "gpt-6.7b", "bert", "resnet152", "vgg19"])
def test_reference_profiles_load(model: str) -> None:
    profile = read_profile(REFERENCE / "profiles.json", model)
    assert isinstance(profile, ThroughputProfile)
    data = json.loads((REFERENCE / "profiles.json").read_text())
    rows = data["models"][model]["throughput"]
    assert len(profile.configs(10**6)) == len(rows)
    assert profile.samples_per_s(ParallelConfig(rows[0]["dp"], rows[0]["pp"])) == rows[0]["samples_per_s"]
    with pytest.raises(ValueError, match="no model 'x'; the file holds gpt"):
        read_profile(REFERENCE / "profiles.json", "x")
    with pytest.raises(ValueError, match="say which model"):
        read_profile(REFERENCE / "profiles.json")


@needs_data
@pytest.mark.parametrize("name", ["gpt-1.5b_p3_gbs128_mbs1", "resnet152_gbs2048_mbs32"])
def test_throughput_optimal_plans_of_the_reference_are_reproduced_exactly(name: str) -> None:
    profile = read_profile(REFERENCE / "profiles.json", name.partition("_")[0])
    plan = json.loads((REFERENCE / "reference_plans" / f"{name}.json").read_text())
    assert len(plan) == 683
    for step in plan:
        before, come, go = step["interval"]
        assert best_config(profile, before + come - go) == ParallelConfig(*step["throughut-opt"])
