"""Jobs that begin or end in unusual ways: none of them may hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.ending_scripts import fit
from tests.integration.jobs import Job, running

pytestmark = [pytest.mark.timeout(150), pytest.mark.filterwarnings("ignore")]


def make_job(tmp_path: Path, expected: int = 2, **options: Any) -> Job:
    return Job(tmp_path / "run", fit, {"out": str(tmp_path / "run"), **options}, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"trainer": {"max_epochs": 0}},
        {"trainer": {"limit_train_batches": 0}},
        {"num_samples": 3, "drop_last": True},
    ],
    ids=["no epochs", "no batches", "less than a batch"],
)
def test_a_fit_that_needs_no_batch_ends(tmp_path: Path, options: dict[str, Any]) -> None:
    with running(make_job(tmp_path, **options)) as job:
        assert job.join(60) == {"i0": 0, "i1": 0}
        assert job._service is not None
        assert job._service.wait(15) == 0
        assert len(job.timeline("done")) == 1
        assert not job.timeline("died")
        for name in job.processes:
            assert (job.run_dir / f"returned-{name}").read_text() == "0"


def test_a_checkpoint_saved_on_one_instance_only_stops_the_job(tmp_path: Path) -> None:
    with running(make_job(tmp_path, saves_alone=True)) as job:
        assert job.join(90) == {"i0": 1, "i1": 1}
        (stopped,) = job.timeline("stopped")
        assert "the instances have come apart" in stopped["reason"]
        assert "runs 'gather'" in stopped["reason"]
        assert "call trainer.save_checkpoint and the like on every instance" in stopped["reason"]


def test_another_instance_prepares_the_data_after_a_death(tmp_path: Path) -> None:
    with running(make_job(tmp_path, expected=3, dies_in_prepare_data=True)) as job:
        codes = job.join(90)
        dead = (job.run_dir / "prepared").read_text().split()[0]
        assert codes == {name: -9 if name == dead else 0 for name in codes}
        assert len((job.run_dir / "prepared").read_text().split()) == 2
        assert any("this one prepares it now" in path.read_text() for path in job.run_dir.glob("i*.log"))
