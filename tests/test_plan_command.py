"""``parcae plan``: feasible configurations, a plan for every number of instances, and what is known beforehand."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_parcae import plan_command, profile_command
from lightning_parcae.cli import main
from lightning_parcae.errors import JobFailedError
from lightning_parcae.plan_command import ConfigRow, PlanReport, make_report
from lightning_parcae.planning.liveput import liveput
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import LayerCost, ModelProfile
from lightning_parcae.simulation.workload import Workload, read_workload

GIB = 2**30
LAYER = LayerCost(
    forward_s=0.01,
    backward_s=0.02,
    update_s=0.001,
    parameter_bytes=50_000_000,
    state_bytes=150_000_000,
    activation_bytes=80_000_000,
    output_bytes=4_000_000,
)
MODEL = ModelProfile("toy", (LAYER,) * 6, num_samples=64, num_microbatches=8)


def report(workload: Workload, *words: str) -> PlanReport:
    command = argparse.ArgumentParser()
    plan_command.add_arguments(command)
    return make_report(workload, command.parse_args(["--profile", "", *words]))


def row_of(found: PlanReport, config: ParallelConfig) -> ConfigRow:
    return next(row for row in found.rows if row.config == config)


@pytest.fixture(scope="module")
def gpt() -> Workload:
    return read_workload("gpt-1.5b")


@pytest.fixture
def model_file(tmp_path: Path) -> str:
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(MODEL.to_json()))
    return str(path)


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["liveput", "reactive", "fixed"])
def test_every_number_of_instances_has_a_plan(gpt: Workload, policy: str) -> None:
    for count in range(35):
        found = report(gpt, "--instances", str(count), "--policy", policy)
        if count < 6:
            assert found.chosen is None and found.rows == ()
            number = "1 instance" if count == 1 else f"{count} instances"
            assert found.reason == f"wait: {number}, the smallest configuration needs 6"
        else:
            assert found.chosen is not None and found.chosen.num_instances <= count
            assert found.chosen in [row.config for row in found.rows]
        assert all(config is None or config.num_instances <= index for index, config in enumerate(found.table))
        assert len(found.table) > count


def test_rows_are_the_feasible_configurations_by_liveput(gpt: Workload) -> None:
    found = report(gpt, "--instances", "20")
    assert {row.config for row in found.rows} == set(gpt.profile.configs(20))
    expected = [row.liveput for row in found.rows]
    assert expected == sorted(expected, reverse=True)
    row = row_of(found, ParallelConfig(3, 6))
    assert row.samples_per_s == gpt.profile.samples_per_s(row.config)
    assert row.step_s == pytest.approx(128 / row.samples_per_s)
    # the profile is a table: it knows no memory
    assert (row.memory_bytes, row.bubble) == (None, None)


def test_liveput_is_the_throughput_itself_if_nothing_is_expected(gpt: Workload) -> None:
    calm = report(gpt, "--instances", "20", "--forecaster", "last_value")
    assert all(row.liveput == pytest.approx(row.samples_per_s) for row in calm.rows)
    assert calm.expected_lost == 0 and calm.forecast_by == "last value"
    noticed = report(gpt, "--instances", "20", "--forecaster", "last_value", "--notice", "2@90")
    config = ParallelConfig(3, 6)
    assert row_of(noticed, config).liveput == pytest.approx(liveput(config, 20, {2: 1.0}, gpt.profile.samples_per_s))


def test_a_profile_of_layers_knows_memory_and_bubble() -> None:
    workload = Workload("toy", MODEL, (LAYER.state_bytes,) * 6, {}, MODEL.num_samples)
    row = row_of(report(workload, "--instances", "8"), ParallelConfig(2, 3))
    assert row.memory_bytes == MODEL.stage_memory_bytes(row.config)
    assert row.bubble == pytest.approx(2 / (4 + 2))
    assert row.step_s == pytest.approx(MODEL.step_time_s(row.config))


def test_what_is_known_changes_the_plan(gpt: Workload) -> None:
    leaving = report(gpt, "--instances", "20", "--running", "2x10", "--notice", "2@90")
    assert leaving.num_leaving == 2 and leaving.chosen is not None and leaving.chosen.num_instances <= 18
    assert leaving.expected_lost >= 2
    stormy = report(gpt, "--instances", "20", "--history", ",".join(["26,20"] * 20))
    calm = report(gpt, "--instances", "20", "--history", ",".join(["20"] * 40))
    assert stormy.expected_lost > 4 * calm.expected_lost
    example = report(gpt, "--instances", "20", "--history", "aws-p3")
    assert "event rates" in example.forecast_by
    grown = report(gpt, "--instances", "20", "--joining", "4@30")
    assert len(grown.table) > 24 and grown.running == report(gpt, "--instances", "20").running


def test_reactive_takes_the_fastest_from_what_runs(gpt: Workload) -> None:
    found = report(gpt, "--instances", "20", "--running", "1x6", "--policy", "reactive")
    assert found.running == ParallelConfig(1, 6)
    assert found.chosen == max(gpt.profile.configs(20), key=gpt.profile.samples_per_s)
    assert found.reason.startswith("1x6 -> ")


def ranks(text: str) -> list[int]:
    """Return the ranks that a printed table shows."""
    rows = [line.split() for line in text.splitlines()]
    return [int(row[0]) for row in rows if len(row) >= 6 and row[0].isdigit() and "x" in row[1]]


@pytest.mark.parametrize("width", [80, 60])
def test_nothing_is_cut_on_narrow_terminals(width: int) -> None:
    workload = Workload("toy", MODEL, (LAYER.state_bytes,) * 6, {}, MODEL.num_samples)
    stream = io.StringIO()
    found = report(workload, "--instances", "12", "--running", "2x6")
    plan_command._show(found, Console(file=stream, width=width), show_all=False)
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width and "\u2026" not in text
    for title in ("rank", "instances", "samples/s", "step", "memory", "bubble", "liveput", "runs"):
        assert title in text
    for row in found.rows[:15]:
        assert f"{row.samples_per_s:.4g}" in text and f"{row.liveput:.4g}" in text and f"{row.bubble:.1%}" in text


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_best_are_shown_and_all_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--profile", "gpt-1.5b", "--instances", "20"]
    assert main(words) == 0
    short = capsys.readouterr().out
    assert "6 more with --all" in short and ranks(short) == list(range(1, 16))
    chosen = short.partition("plan: run ")[2].split()[0]
    assert "event rates" in short and f": {chosen}" in short.partition("before a new plan")[2]
    assert max(map(len, short.splitlines())) <= 100
    assert main([*words, "--all"]) == 0
    whole = capsys.readouterr().out
    assert ranks(whole) == list(range(1, 22)) and "more with" not in whole and "0-5: wait" in whole


def test_json_holds_everything(model_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--profile", model_file, "--instances", "5", "--memory", "1.5", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["format"] == "lightning_parcae/plan/1" and value["num_instances"] == 5
    assert value["config"] in [row["config"] for row in value["configs"]]
    assert all(row["memory_bytes"] <= 1.5 * GIB for row in value["configs"])


def test_memory_bounds_the_configurations(model_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    def stages(*more: str) -> set[int]:
        assert main(["plan", "--profile", model_file, "--instances", "6", "--json", *more]) == 0
        return {row["config"][1] for row in json.loads(capsys.readouterr().out)["configs"]}

    assert min(stages()) == 1
    assert min(stages("--memory", "0.7")) > 1
    assert main(["plan", "--profile", model_file, "--instances", "6", "--memory", "0.01"]) == 2
    assert "too little memory?" in capsys.readouterr().err


def test_a_script_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    def measure(script: Path, arguments: Any, **more: Any) -> ModelProfile:
        asked.append((script, list(arguments), more))
        return MODEL

    monkeypatch.setattr(profile_command, "measure_script", measure)
    assert main(["plan", "--instances", "4", "--memory", "8", "train.py", "--epochs", "3", "--", "x"]) == 0
    assert asked == [(Path("train.py"), ["--epochs", "3", "--", "x"], {"memory_gib": 8.0})]
    out = capsys.readouterr().out
    assert out.startswith("toy on 4 instances") and " GB" in out and "bubble" in out


def test_a_script_that_fails_ends_with_its_own_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> ModelProfile:
        raise JobFailedError("train.py said: no")

    monkeypatch.setattr(profile_command, "measure_script", fail)
    assert main(["plan", "train.py"]) == 1
    assert "parcae plan: train.py said: no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either --profile FILE|NAME, or a script"),
        (["train.py", "--instances", "4"], "--instances stands after the script"),
        (["--instances", "4", "--profile", "bert", "train.py"], "give either --profile"),
        (["--instances", "-1", "--profile", "bert"], "--instances is 0 to 100000"),
        (["--instances", "4", "--profile", "bert", "--notice", "5@10"], "got 4 of which 5 go"),
        (["--instances", "4", "--profile", "bert", "--notice", "soon"], "are K@S, such as 2@90"),
        (["--instances", "4", "--profile", "bert", "--joining", "1"], "are K@S"),
        (["--instances", "4", "--profile", "bert", "--running", "9x9"], "9x9 cannot run on 4 instances"),
        (["--instances", "4", "--profile", "bert", "--running", "4"], "a configuration is DxP"),
        (["--instances", "4", "--profile", "bert", "--max-instances", "3"], "at least the 4 instances"),
        (["--instances", "4", "--profile", "bert", "--history", "7,x"], "there is no trace 7,x"),
        (["--instances", "4", "--profile", "bert", "--history", "7,999999999"], "the most that is planned for"),
        (["--instances", "4", "--profile", "bert", "--memory", "16"], "--memory needs a profile of layers"),
        (["--instances", "4", "--profile", "nothing"], "there is no profile nothing"),
        (["--profile", "bert", "--history", ""], "--history is empty"),
        (["--profile", "bert", "--horizon", "0"], "--horizon should be 1 to 1000"),
        (["--profile", "bert", "--horizon", "1000000"], "--horizon should be 1 to 1000"),
        (["--profile", "bert", "--joining", "999999999999@3"], "at most 100000 instances that come or go"),
        (["--profile", "bert", "--joining", "60000@3", "--joining", "60000@3"], "at most 100000 instances"),
        (["--profile", "bert", "--notice", f"1@{'9' * 400}"], "within 86400 s"),
        (["--profile", "bert", "--model", "gpt-1.5b"], "no model 'gpt-1.5b': the example bert is a single model"),
        (["--model", "bert", "train.py"], "--model bert is for a profile file"),
    ],
)
def test_mistakes_are_one_line_and_code_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1
    assert err.startswith("parcae plan: ") and message in err
