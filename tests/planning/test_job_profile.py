"""A profile in a running job: limits, the job's cuts, measured steps."""

from __future__ import annotations

import pytest

from lightning_parcae.planning.job_profile import JobProfile, Limits, StepTime
from lightning_parcae.planning.parallel_config import ParallelConfig
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
