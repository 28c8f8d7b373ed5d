"""A profile in a running job: limits, the job's cuts, measured steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_parcae.errors import PlanError
from lightning_parcae.planning.job_profile import JobProfile, Limits, LinkSpeed, StepTime
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.policy import most_instances_table
from lightning_parcae.planning.profile import LayerCost, ModelProfile, ThroughputProfile, profile_from_json

FOUR = Limits(num_layers=4, max_pipelines=8)


def model(slow_first: float = 1.0) -> ModelProfile:
    layers = tuple(LayerCost(0.001 * factor, 0.002 * factor) for factor in (slow_first, 1.0, 1.0, 1.0))
    return ModelProfile("toy", layers, num_samples=80, num_microbatches=8, recompute=False)


@pytest.mark.parametrize(
    ("limits", "configs"),
    [
        (Limits(4, 8), {"1x1", "2x1", "3x1", "4x1", "1x2", "2x2", "1x3", "1x4"}),
        (Limits(4, 8, num_stages=2), {"1x2", "2x2"}),
        (Limits(4, 8, num_pipelines=1, min_stages=2), {"1x2", "1x3", "1x4"}),
        (Limits(4, 2, max_stages=2), {"1x1", "2x1", "1x2", "2x2"}),
    ],
)
def test_limits_hold(limits: Limits, configs: set[str]) -> None:
    profile = JobProfile(model(), limits)
    assert {str(config) for config in profile.configs(4)} == configs
    assert profile.samples_per_s(ParallelConfig(9, 1)) == 0.0
    table = profile.fastest_table(8)
    assert all(entry is None or limits.allow(entry) for entry in table)


def test_the_jobs_cuts_are_used() -> None:
    config = ParallelConfig(1, 2)
    even = JobProfile(model(slow_first=4.0), FOUR, cuts={2: (0, 2, 4)})
    uneven = JobProfile(model(slow_first=4.0), FOUR, cuts={2: (0, 1, 4)})
    assert even.samples_per_s(config) < uneven.samples_per_s(config)


def test_measured_steps_replace_and_correct() -> None:
    ran, other = ParallelConfig(2, 1), ParallelConfig(1, 1)
    plain = JobProfile(model(), FOUR)
    step = StepTime(work_s=2 * 80 / plain.samples_per_s(ran), other_s=0.01)
    profile = JobProfile(model(), FOUR, measured={ran: step}, caution=0.0)
    assert profile.samples_per_s(ran) == pytest.approx(80 / (step.work_s + 0.01))
    # twice the work, as there, and the same time beside it
    assert profile.samples_per_s(other) == pytest.approx(80 / (2 * 80 / plain.samples_per_s(other) + 0.01))
    cautious = JobProfile(model(), FOUR, measured={ran: step}, caution=0.1)
    assert cautious.samples_per_s(ran) == profile.samples_per_s(ran)
    assert cautious.samples_per_s(other) == pytest.approx(0.9 * profile.samples_per_s(other))


def test_a_table_keeps_its_proportions() -> None:
    rates = {ParallelConfig(1, 1): 10.0, ParallelConfig(2, 1): 15.0}
    measured = {ParallelConfig(1, 1): StepTime(0.5, 0.5)}
    profile = JobProfile(ThroughputProfile("given", rates), FOUR, measured=measured, num_samples=20)
    assert profile.samples_per_s(ParallelConfig(1, 1)) == pytest.approx(20.0)
    assert profile.samples_per_s(ParallelConfig(2, 1)) == pytest.approx(30.0)


def test_what_runs_is_kept_unless_something_is_clearly_faster() -> None:
    rates = {ParallelConfig(1, 2): 10.0, ParallelConfig(2, 1): 10.3}
    profile = JobProfile(ThroughputProfile("given", rates), FOUR)
    assert profile.fastest_table(2)[2] == ParallelConfig(2, 1)
    assert profile.fastest_table(2, keep=ParallelConfig(1, 2), noise=0.05)[2] == ParallelConfig(1, 2)
    assert profile.fastest_table(2, keep=ParallelConfig(1, 2), noise=0.01)[2] == ParallelConfig(2, 1)


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="is of 4 layers, but the model has 6"):
        JobProfile(model(), Limits(num_layers=6, max_pipelines=8))


def test_is_written_with_whole_steps() -> None:
    ran = ParallelConfig(2, 1)
    written = JobProfile(model(), FOUR, measured={ran: StepTime(0.2, 0.1)}).to_json()
    again = profile_from_json(written)
    assert isinstance(again, ModelProfile) and again.step_s == {ran: pytest.approx(0.3)}
    assert JobProfile(again, FOUR).samples_per_s(ran) == pytest.approx(80 / 0.3)


def heavy(memory_bytes: float | None) -> ModelProfile:
    """Four layers of 300 bytes of state, 100 of gradients and 10 for each micro-batch that is under way."""
    layer = LayerCost(0.001, 0.002, parameter_bytes=100, state_bytes=300, activation_bytes=10)
    return ModelProfile("toy", (layer,) * 4, 80, num_microbatches=8, recompute=False, memory_bytes=memory_bytes)


def test_where_all_fits_the_table_is_the_usual_one() -> None:
    for limits in (FOUR, Limits(4, 8, num_pipelines=2, min_stages=2), Limits(4, 2, max_stages=3)):
        usual = most_instances_table(
            num_layers=4,
            max_instances=20,
            max_pipelines=limits.max_pipelines,
            num_pipelines=limits.num_pipelines,
            min_stages=limits.min_stages,
            max_stages=limits.max_stages,
        )
        assert JobProfile(heavy(1e6), limits).most_instances_table(20) == usual


def test_the_table_holds_only_what_fits_into_memory() -> None:
    # two layers take 800 bytes and 20 for each of 8 / D micro-batches: in one pipeline they do not fit into a stage
    profile = JobProfile(heavy(900.0), FOUR, cuts={2: (0, 2, 4)})
    table = [str(config) for config in profile.most_instances_table(6)]
    assert table == ["None", "None", "None", "None", "2x2", "2x2", "3x2"]
    assert profile.samples_per_s(ParallelConfig(1, 2)) == 0.0 < profile.samples_per_s(ParallelConfig(2, 2))
    # the job cuts by other costs than the profile would, and its fullest stage is what counts
    uneven = JobProfile(heavy(900.0), FOUR, cuts={2: (0, 1, 4)})
    assert ParallelConfig(2, 2) not in uneven.most_instances_table(6)


def test_nothing_that_fits_is_said_with_the_numbers() -> None:
    gib = float(1 << 30)
    layers = tuple(replace(layer, state_bytes=int(3 * gib)) for layer in heavy(None).layers)
    profile = JobProfile(replace(heavy(2 * gib), layers=layers), FOUR)
    wanted = r"memory of an instance \(2 GiB\): the least that one needs is 3 GiB, as 8x4.*device_memory"
    with pytest.raises(PlanError, match=wanted):
        profile.most_instances_table(40)


def test_a_typical_link_is_the_middle_one() -> None:
    links = [LinkSpeed(0.3, 10.0), LinkSpeed(0.1, 30.0), LinkSpeed(0.2, 20.0)]
    assert LinkSpeed.typical(links) == LinkSpeed(0.2, 20.0)
    assert LinkSpeed.typical([]) is None
    assert LinkSpeed(1.1, 9.0).is_close(LinkSpeed(1.0, 10.0), 0.2)
    assert not LinkSpeed(1.0, 5.0).is_close(LinkSpeed(1.0, 10.0), 0.2)
    assert not LinkSpeed(2.0, 10.0).is_close(LinkSpeed(1.0, 10.0), 0.2)
