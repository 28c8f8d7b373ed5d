"""What Lightning offers, on several instances that come and go, against one undisturbed process."""

from __future__ import annotations

import csv
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.integration import jobs
from tests.integration.feature_scripts import (
    Classifier,
    Data,
    Points,
    evaluate_classifier,
    fit_classifier,
    refuse,
    unpack,
)
from tests.integration.jobs import running

pytestmark = [
    pytest.mark.timeout(150),
    # Lightning and torchmetrics on small runs
    pytest.mark.filterwarnings("ignore"),
]


class Job(jobs.Job):
    """A job whose instances come in the order of their names: the first is rank 0."""

    def add(self, name: str, **environment: str) -> None:
        super().add(name, **environment)
        self.wait_for_event("connected", len(self.processes))


EXACT = ("data_epochs", "epoch", "global_step", "stopped_epoch")


def results_of(run_dir: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(run_dir.glob("result-*.pt")):
        found[path.stem.removeprefix("result-")] = torch.load(path, weights_only=False)
    return found


def assert_follows(result: dict[str, Any], solo: dict[str, Any], tolerance: float) -> None:
    """Compare an instance with the undisturbed process; a tolerance of 0 asks for the same bits."""
    steps = {step[:3]: step[3:] for step in solo["steps"]}
    for *point, loss, rate in result["steps"]:
        expected_loss, expected_rate = steps[tuple(point)]
        assert abs(loss - expected_loss) <= tolerance, (point, loss, expected_loss)
        assert rate == pytest.approx(expected_rate, rel=1e-12, abs=0) if tolerance else rate == expected_rate
    assert result["state_dict"].keys() == solo["state_dict"].keys()
    for name, value in solo["state_dict"].items():
        assert torch.allclose(result["state_dict"][name], value, rtol=0, atol=tolerance), name
    assert result["metrics"].keys() == solo["metrics"].keys()
    for name, value in solo["metrics"].items():
        assert result["metrics"][name] == pytest.approx(value, rel=0, abs=max(tolerance, 1e-12)), name
    for name in EXACT:
        assert result[name] == solo[name], name
    assert result["best"] == solo["best"]
    assert [name for name, _ in result["best_k"]] == [name for name, _ in solo["best_k"]]
    for stage in ("validated", "tested"):
        for values, expected in zip(result[stage], solo[stage], strict=True):
            assert values == pytest.approx(expected, rel=0, abs=max(tolerance, 1e-12))
    for batch, expected in zip(result["predicted"], solo["predicted"], strict=True):
        assert torch.allclose(batch, expected, rtol=0, atol=tolerance)


def rows_of(run_dir: Path) -> list[dict[str, str]]:
    """Return the rows of the only metrics.csv."""
    (path,) = (run_dir / "csv").rglob("metrics.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def assert_one_run(run_dir: Path, solo_dir: Path) -> None:
    """What one process logs is in the CSV file once, and in TensorBoard's files; both in one directory."""

    def logged(directory: Path) -> Counter[tuple[str, ...]]:
        names = ("train_loss_step", "train_accuracy_epoch", "val_loss", "val_loss/dataloader_idx_0", "hook_value")
        return Counter((row["step"], *[name for name in names if row.get(name)]) for row in rows_of(directory))

    def without_our_own(rows: Counter[tuple[str, ...]]) -> Counter[tuple[str, ...]]:
        return Counter({row: count for row, count in rows.items() if len(row) > 1})

    assert without_our_own(logged(run_dir)) == without_our_own(logged(solo_dir))
    steps = {int(row["step"]) for row in rows_of(solo_dir) if row["train_loss_step"]}
    assert len(steps) > 4
    (directory,) = (run_dir / "tensorboard").iterdir()
    events = EventAccumulator(str(directory)).Reload()
    assert {event.step for event in events.Scalars("train_loss_step")} == steps


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A 2x2 job that loses a stage, rank 0 and an instance with a notice, and gets a new one; and its reference."""
    solo_dir, out = tmp_path_factory.mktemp("solo"), tmp_path_factory.mktemp("job")
    common: dict[str, Any] = {
        "trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3, "val_check_interval": 0.5},
    }
    strategy: dict[str, Any] = {"batch_norm": "deferred", "micro_batch_size": 4}
    solo = fit_classifier("solo", str(solo_dir), strategy=strategy, **common)
    kwargs = {
        "out": str(out),
        "strategy": {**strategy, "num_stages": 2},
        "model": {"sleep_s": 0.05},
        **common,
    }
    job = Job(out, fit_classifier, kwargs, expected=5)
    # rank 0 dies with half of a window of accumulated gradients; a later one in validation
    faults = (
        '[{"point": "backward", "instance": "i3", "step": 2, "action": "kill"},'
        '{"point": "forward", "instance": "i0", "step": 4, "action": "kill"},'
        '{"point": "validation", "instance": "i1", "step": 7, "action": "kill"}]'
    )
    job.environment["PARCAE_FAULT_POINTS"] = faults
    with running(job):
        job.wait_for_event("died", 1)
        job.add("i5")
        job.wait_for_event("died", 2)
        job.add("i6")
        codes = job.join()
        assert codes == {"i0": -9, "i1": -9, "i2": 0, "i3": -9, "i4": 0, "i5": 0, "i6": 0}, job.report()
        assert {fault["point"] for fault in job.faults()} == {"backward", "forward", "validation"}
    solo["directory"] = solo_dir
    return out, solo


def test_a_job_with_many_features_follows_one_process(two_by_two: tuple[Path, dict[str, Any]]) -> None:
    out, solo = two_by_two
    results = results_of(out)
    assert set(results) == {"i2", "i4", "i5", "i6"}
    for result in results.values():
        assert_follows(result, solo, 1e-9)
    noted = {tuple(step[:3]) for result in results.values() for step in result["steps"]}
    assert noted <= {tuple(step[:3]) for step in solo["steps"]}


def test_transfer_hooks_see_real_batches_only(two_by_two: tuple[Path, dict[str, Any]]) -> None:
    out, _ = two_by_two
    assert {kind for result in results_of(out).values() for kind in result["seen_by_hooks"]} == {"dict"}


def test_logs_go_on_in_one_directory(two_by_two: tuple[Path, dict[str, Any]]) -> None:
    out, solo = two_by_two
    assert_one_run(out, solo["directory"])
    for result in results_of(out).values():
        assert all(directory.startswith(str(out)) for directory in result["log_dirs"])
    last = [row for row in rows_of(out) if row["parcae/generation"]][-1]
    assert float(last["parcae/reconfigurations"]) >= 3
    assert float(last["parcae/samples_replayed"]) >= 16
    assert float(last["parcae/pause_s"]) > 0


def test_each_reconfiguration_is_one_line_on_rank_zero(two_by_two: tuple[Path, dict[str, Any]]) -> None:
    out, _ = two_by_two
    lines = [
        line for path in out.glob("*.log") for line in path.read_text().splitlines() if "parcae: generation" in line
    ]
    generations = [line.split("generation ")[1].split()[0] for line in lines]
    assert len(generations) == len(set(generations)) >= 4, lines
    assert all("after a pause of" in line and "(" in line for line in lines)


def test_checkpoints_load_without_the_package(two_by_two: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out, solo = two_by_two
    result = next(iter(results_of(out).values()))
    path, paths = result["best_path"], result["best_paths"]
    reference = torch.load(solo["best_path"], weights_only=False)
    checkpoint = torch.load(path, weights_only=False)
    assert checkpoint["state_dict"].keys() == reference["state_dict"].keys()
    assert checkpoint["optimizer_states"][0]["state"].keys() == reference["optimizer_states"][0]["state"].keys()
    for index, state in reference["optimizer_states"][0]["state"].items():
        for name, value in state.items():
            assert torch.allclose(checkpoint["optimizer_states"][0]["state"][index][name], value, rtol=0, atol=1e-9)
    assert not [name for name in checkpoint["callbacks"] if "arcae" in name]
    module = Classifier.load_from_checkpoint(path)
    assert module.hparams["sleep_s"] == 0.05
    for name, value in reference["state_dict"].items():
        assert torch.allclose(module.state_dict()[name].to(value.dtype), value, rtol=0, atol=1e-6), name
    x = unpack(torch.utils.data.default_collate([Points(3, torch.float32)[0]]))[0]
    assert module.eval().net(x).shape == (1, 3)
    # another epoch in plain Lightning
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=6,
        accumulate_grad_batches=2,
        logger=False,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        precision="64-true",
    )
    earlier = min(paths, key=lambda path: torch.load(path, weights_only=False)["global_step"])
    trainer.fit(Classifier(), datamodule=Data(), ckpt_path=earlier, weights_only=False)
    assert trainer.global_step == solo["global_step"]


def test_no_half_written_checkpoint_is_left(two_by_two: tuple[Path, dict[str, Any]]) -> None:
    out, _ = two_by_two
    written = list(out.rglob("*.ckpt"))
    assert len(written) >= 3
    for path in written:
        torch.load(path, weights_only=False)


def test_a_checkpoint_goes_on_at_another_layout(two_by_two: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out, _ = two_by_two
    paths = next(iter(results_of(out).values()))["best_paths"]
    common: dict[str, Any] = {
        "trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3, "val_check_interval": 0.5},
        "ckpt_path": min(paths, key=lambda path: torch.load(path, weights_only=False)["global_step"]),
        "seed": None,
    }
    strategy: dict[str, Any] = {"batch_norm": "deferred", "micro_batch_size": 4}
    (tmp_path / "solo").mkdir()
    solo = fit_classifier("solo", str(tmp_path / "solo"), strategy={**strategy, "seed": 1}, **common)
    kwargs = {"out": str(tmp_path / "job"), "strategy": {**strategy, "num_pipelines": 1, "seed": 1}, **common}
    job = Job(tmp_path / "job", fit_classifier, kwargs, expected=4)
    with running(job):
        assert set(job.join().values()) == {0}, job.report()
        assert [event["config"] for event in job.timeline("formed")] == [[1, 4]]
    for result in results_of(tmp_path / "job").values():
        assert_follows(result, solo, 0.0)


def test_one_pipeline_gives_the_same_bits_through_notices(tmp_path: Path) -> None:
    """Windows of three, clipped by value; notices in mid-window; two local devices; a bar that moves with rank 0."""
    common: dict[str, Any] = {
        "model": {"schedule": "plateau"},
        "data": {"form": "tuple"},
        "bar": "tqdm",
        "stop_early": False,
        "trainer": {
            "max_epochs": 5,
            "accumulate_grad_batches": 3,
            "gradient_clip_val": 0.05,
            "gradient_clip_algorithm": "value",
            "val_check_interval": 3,
            "check_val_every_n_epoch": None,
            "limit_train_batches": 3,
        },
    }
    strategy: dict[str, Any] = {"batch_norm": "micro_batch", "micro_batch_size": 4}
    (tmp_path / "solo").mkdir()
    solo = fit_classifier("solo", str(tmp_path / "solo"), strategy=strategy, **common)
    out = tmp_path / "job"
    options = {"num_pipelines": 1, "max_stages": 3, "devices_per_instance": 2}
    kwargs = {"out": str(out), "strategy": {**strategy, **options}, **common}
    kwargs["model"] = {"schedule": "plateau", "sleep_s": 0.06}
    job = Job(out, fit_classifier, kwargs, expected=3)
    with running(job):
        job.wait_for_step(3)
        job.signal("i1", signal.SIGTERM)
        job.add("i5")
        job.wait_for_step(6)
        job.signal("i0", signal.SIGTERM)
        assert set(job.join().values()) == {0}, job.report()
        assert len(job.timeline("formed")) >= 3, job.report()
    results = results_of(out)
    assert set(results) == {"i2", "i5"}
    for result in results.values():
        assert_follows(result, solo, 0.0)
    assert_one_run(out, tmp_path / "solo")
    assert "Epoch 0:" in (out / "i0.log").read_text()
    assert "Epoch 4: 100%" in (out / "i2.log").read_text()
    assert "Epoch" not in (out / "i5.log").read_text()


def test_pipelines_without_samples_and_losses_over_tokens(tmp_path: Path) -> None:
    """Three or four pipelines of one stage; the last batch has one micro-batch; user code that catches everything."""
    common: dict[str, Any] = {
        "model": {"norm": None, "token_mean": True, "swallow": True, "schedule": "epoch"},
        "data": {"form": "tuple", "num_samples": 51, "val_loaders": 1},
        "weigh_tokens": True,
        "bar": "rich",
        "stop_early": False,
        "trainer": {
            "max_epochs": 4,
            "check_val_every_n_epoch": 2,
            "gradient_clip_val": 0.3,
            "accumulate_grad_batches": 2,
            "max_time": {"hours": 1},
        },
    }
    (tmp_path / "solo").mkdir()
    solo = fit_classifier("solo", str(tmp_path / "solo"), strategy={"micro_batch_size": 5}, **common)
    plain = fit_classifier("plain", str(tmp_path / "solo"), **{**common, "weigh_tokens": False})
    out = tmp_path / "job"
    kwargs = {"out": str(out), "strategy": {"micro_batch_size": 5, "num_stages": 1}, **common}
    kwargs["model"] = {**common["model"], "sleep_s": 0.06}
    job = Job(out, fit_classifier, kwargs, expected=4)
    job.environment["PARCAE_FAULT_POINTS"] = (
        '[{"point": "reduction", "instance": "i0", "step": 2, "action": "kill"},'
        '{"point": "vote", "instance": "i1", "step": 4, "action": "kill"}]'
    )
    with running(job):
        codes = job.join()
        assert codes == {"i0": -9, "i1": -9, "i2": 0, "i3": 0}, job.report()
    results = results_of(out)
    for result in results.values():
        assert_follows(result, solo, 1e-9)
        assert result["num_swallowed"] == 0
    assert len(plain["steps"]) == len(solo["steps"])
    assert "Epoch" in (out / "i2.log").read_text()


def test_a_kill_while_a_checkpoint_is_written_leaves_whole_files(tmp_path: Path) -> None:
    """Rank 0 dies at the point of writing; the next one writes it, from the same step."""
    common: dict[str, Any] = {"model": {"norm": None}, "stop_early": False, "trainer": {"max_epochs": 6}}
    (tmp_path / "solo").mkdir()
    solo = fit_classifier("solo", str(tmp_path / "solo"), strategy={"micro_batch_size": 4}, **common)
    out = tmp_path / "job"
    kwargs = {"out": str(out), "strategy": {"micro_batch_size": 4, "num_stages": 2}, **common}
    kwargs["model"] = {"norm": None, "sleep_s": 0.06}
    job = Job(out, fit_classifier, kwargs, expected=4)
    job.environment["PARCAE_FAULT_POINTS"] = (
        '[{"point": "save", "instance": "i0", "step": 3, "action": "kill"},'
        '{"point": "gather", "instance": "i3", "step": 15, "action": "kill"}]'
    )
    with running(job):
        job.wait_for_event("died")
        job.add("i4")
        assert job.join() == {"i0": -9, "i1": 0, "i2": 0, "i3": -9, "i4": 0}, job.report()
        assert {fault["point"] for fault in job.faults()} == {"save", "gather"}
    for result in results_of(out).values():
        assert_follows(result, solo, 1e-9)
    names = {path.name for path in (tmp_path / "solo").rglob("*.ckpt")}
    written = {path.name: path for path in out.rglob("*.ckpt")}
    assert set(written) >= names
    for name in names:
        (reference,) = (tmp_path / "solo").rglob(name)
        ours, theirs = (torch.load(path, weights_only=False) for path in (written[name], reference))
        assert ours["global_step"] == theirs["global_step"]
        for key, value in theirs["state_dict"].items():
            assert torch.allclose(ours["state_dict"][key], value, rtol=0, atol=1e-9), (name, key)


def test_bf16_without_a_seed_is_the_same_on_all_instances(tmp_path: Path) -> None:
    out = tmp_path / "job"
    kwargs: dict[str, Any] = {
        "out": str(out),
        "strategy": {"num_stages": 2, "micro_batch_size": 4},
        "model": {"norm": None, "sleep_s": 0.04},
        "data": {"double": False},
        "trainer": {"precision": "bf16-mixed", "max_epochs": 4},
        "seed": None,
        "stop_early": False,
    }
    job = Job(out, fit_classifier, kwargs, expected=4)
    with running(job):
        job.wait_for_step(2)
        job.add("i4")
        job.wait_for_step(6)
        job.kill("i3")
        codes = job.join()
        assert codes == {"i0": 0, "i1": 0, "i2": 0, "i3": -9, "i4": 0}, job.report()
    first, *others = results_of(out).values()
    assert len(others) == 3
    for other in others:
        for name, value in first["state_dict"].items():
            assert torch.equal(other["state_dict"][name], value), name
        assert other["metrics"] == first["metrics"]
        assert other["tested"] == first["tested"]
        assert (other["best"], other["global_step"], other["epoch"]) == (
            first["best"],
            first["global_step"],
            first["epoch"],
        )


def test_evaluation_without_training(tmp_path: Path) -> None:
    job = Job(tmp_path, evaluate_classifier, {"out": str(tmp_path)}, expected=2)
    with running(job):
        assert set(job.join().values()) == {0}, job.report()
        assert not job.timeline("died"), job.report()
    first, second = results_of(tmp_path).values()
    assert first["validated"] == second["validated"]
    assert first["tested"] == second["tested"]
    tables = [name for name in ("i0", "i1") if "test_loss" in (tmp_path / f"{name}.log").read_text()]
    assert len(tables) == 1


def test_a_mistake_in_training_step_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {
        "out": str(tmp_path),
        "strategy": {"num_stages": 2, "micro_batch_size": 4},
        "model": {"norm": None, "fail_at": ("i1", 4)},
        "stop_early": False,
    }
    job = Job(tmp_path, fit_classifier, kwargs, expected=4)
    with running(job):
        assert set(job.join().values()) == {1}, job.report()
        (stopped,) = job.timeline("stopped")
    assert "ValueError: the user's own mistake" in stopped["reason"]
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in ("i0", "i1", "i2", "i3")}
    assert logs["i1"].count('raise ValueError("the user\'s own mistake")') == 1
    for name in ("i0", "i2", "i3"):  # they say why they end: with the traceback of the one that failed
        assert "JobFailedError" in logs[name] and logs[name].count("ValueError: the user's own mistake") <= 2


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("two_calls", "called the pipelined module 2 times"),
        ("no_length", "iterable dataset without a length"),
        ("fallback", "/proc/nowhere"),
    ],
)
def test_refusals_end_every_instance_before_the_first_step(tmp_path: Path, case: str, message: str) -> None:
    job = Job(tmp_path, refuse, {"out": str(tmp_path), "case": case}, expected=2)
    with running(job):
        assert set(job.join(30).values()) == {1}, job.report()
        assert job.step == -1
    text = "".join((tmp_path / f"{name}.log").read_text() for name in ("i0", "i1"))
    assert message in text


@pytest.mark.parametrize(
    ("case", "message", "code"), [("other_shape", "fingerprint", 5), ("other_version", "0.0.1", 5)]
)
def test_an_instance_that_does_not_fit_is_refused_alone(tmp_path: Path, case: str, message: str, code: int) -> None:
    job = jobs.Job(tmp_path, refuse, {"out": str(tmp_path), "case": case}, expected=2)
    with running(job):
        job.wait_for_event("formed")
        job.add("odd")
        assert job.join(40) == {"i0": 0, "i1": 0, "odd": code}, job.report()
    assert message in (tmp_path / "odd.log").read_text()
