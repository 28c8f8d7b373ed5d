"""``parcae simulate`` from the command line: tables, JSON, figures, lists, and mistakes in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_parcae.cli import main

_PLAIN = ["--workers", "1", "--policy", "liveput"]
_SOME = ["--trace", "aws-p3", "--profile", "bert"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "mine.txt"
    path.write_text("\n".join(map(str, [20, 20, 18, 18, 19, 20, 20, 12, 12, 20])) + "\n")
    return str(path)


def test_help_is_quick_and_names_the_commands() -> None:
    code = """
import sys
from lightning_parcae.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
print([name for name in ("numpy", "rich", "torch", "lightning") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, env=dict(os.environ), check=True
    )
    *help_lines, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    listed = {line.split()[0] for line in help_lines if line.startswith("    ") and line.strip()}
    assert {"simulate", "plan", "forecast", "profile"} <= listed


@pytest.mark.parametrize("command", ["simulate", "plan", "forecast", "profile"])
def test_each_command_has_its_own_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: parcae {command}" in capsys.readouterr().out


def test_the_tables_hold_policies_and_yardsticks(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", trace, "--profile", "bert", *_PLAIN, "--price", "1,3"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100 and err == ""
    names = [line.split()[0] for line in lines if line.startswith(("liveput", "ondemand", "bound"))]
    assert names[:6] == ["liveput", "ondemand", "bound"] * 2
    assert "Simulated, not measured." in out and "$ per M" in out and "tokens/s" in out


def test_json_is_complete_and_the_same_again(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--trace", trace, "aws-p3", "--profile", "bert", "--segment", ":8m", *_PLAIN, "--seeds", "2"]
    for name in ("one", "other"):
        assert main([*words, "--json", str(tmp_path / f"{name}.json"), "--warm-up", "5", "--term", "build_s=0.5"]) == 0
    one, other = ((tmp_path / f"{name}.json").read_text() for name in ("one", "other"))
    assert one == other
    value = json.loads(one)
    assert value["format"] == "lightning_parcae/comparison/1"
    assert value["settings"]["terms"] == {"build_s": 0.5, "warm_up_s": 5.0}
    assert [(run["policy"], run["seed"]) for run in value["results"][:4]] == [
        ("liveput", 0), ("liveput", 1), ("ondemand", 0), ("bound", 0)
    ]  # fmt: skip
    assert {run["duration_s"] for run in value["results"]} == {480.0}
    assert "written: " in capsys.readouterr().out
    assert main([*words, "--json", "-"]) == 0
    assert len(json.loads(capsys.readouterr().out)["results"]) == len(value["results"])


def test_a_figure_for_each_trace(trace: str, tmp_path: Path) -> None:
    plot = tmp_path / "what.svg"
    words = ["simulate", "--profile", "bert", "--segment", ":8m", *_PLAIN, "--plot", str(plot)]
    assert main([*words, "--trace", trace, "--bootstrap"]) == 0
    assert plot.read_text().startswith("<?xml")
    assert main([*words, "--trace", trace, "aws-p3"]) == 0
    assert sorted(path.name for path in tmp_path.glob("what-*")) == ["what-aws-p3.svg", "what-mine.svg"]


def test_the_lists_name_examples_policies_and_terms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--list"]) == 0
    out = capsys.readouterr().out
    for word in ("aws-p3", "uclasystem/bamboo", "gpt-1.5b", "published", "elastic_restart", "warm_up_s"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "what shall be simulated? Give --trace and --profile"),
        (["--trace", "aws-p3"], "what shall be simulated?"),
        (["--trace", "nowhere", "--profile", "bert"], "there is no trace nowhere: give a file, or one of the examples"),
        (["--trace", "aws-p3", "--profile", "nothing"], "there is no profile nothing"),
        (["--trace", "TRACE", "--profile", "TRACE"], "mine.txt"),
        (["--trace", "aws-p3", "--profile", "bert", "--segment", "5:6"], "'5' is no time with a unit s, m, h or d"),
        (["--trace", "aws-p3", "--profile", "bert", "--segment", "11h:12h"], "cannot cut 39600 to 43200 s"),
        (["--trace", "aws-p3", "--profile", "bert", "--price", "cheap"], "a price is SPOT or SPOT,ONDEMAND"),
        (["--trace", "aws-p3", "--profile", "bert", "--price", "3,1"], "not above the on-demand price"),
        (["--trace", "aws-p3", "--profile", "bert", "--plot", "plot.gif"], "a plot is written as .png, .pdf, .svg"),
        (["--trace", "aws-p3", "--profile", "bert", "--json", "nowhere/x"], "there is no directory nowhere"),
        (["--trace", "aws-p3", "--profile", "bert", "--term", "speed"], "a term is NAME=VALUE with a number"),
        (["--trace", "aws-p3", "--profile", "bert", "--term", "speed=1"], "there is no term 'speed'"),
        (["--trace", "aws-p3", "--profile", "bert", "--seeds", "0"], "--seeds should be 1 to 10000"),
        ([*_SOME, "--workers", "0"], "--workers should be 1 to 1000"),
        ([*_SOME, "--warm-up", "-1"], "--warm-up should be 0 to 86400, got -1"),
        ([*_SOME, "--seeds", "1000000"], "--seeds should be 1 to 10000"),
        ([*_SOME, "--seed", "-1"], "--seed should be 0 to"),
        ([*_SOME, "--interval", "1e308"], "--interval should be 1 to 86400, got 1e+308"),
        ([*_SOME, "--interval", "nan"], "--interval should be 1 to 86400, got nan"),
        ([*_SOME, "--horizon", "1001"], "--horizon should be 1 to 1000"),
        ([*_SOME, "--failure-timeout", "0"], "--failure-timeout should be 0.1 to"),
        ([*_SOME, "--term", "num_stages=2.5"], "--term: num_stages must be a whole number, got 2.5"),
        ([*_SOME, "--term", "start_share=2"], "--term: start_share must be a share of 0 to 1"),
        ([*_SOME, "--term", "restart_always=2"], "--term: restart_always must be 0 or 1"),
        ([*_SOME, "--term", "bytes_per_s=0"], "--term: bytes_per_s must be above 0"),
        ([*_SOME, "--term", "build_s=nan"], "--term: build_s must be at least 0, got nan"),
        ([*_SOME, "--term", "build_s=1", "--term", "build_s=2"], "--term build_s is given twice"),
        ([*_SOME, "--warm-up", "1", "--term", "warm_up_s=2"], "--warm-up and --term warm_up_s say the same"),
        ([*_SOME, "--accounting", "reference", "--warm-up", "1"], "--warm-up is for the job accounting"),
        ([*_SOME, "--model", "gpt-1.5b"], "no model 'gpt-1.5b': the example bert is a single model"),
        (["--trace", "TRACE", "--profile", "bert", "--json", "TRACE"], "would be written over an input"),
        (["--trace", "TRACE", "--profile", "bert", "--json", "a.svg", "--plot", "./a.svg"], "both be written"),
        ([*_SOME, "--json", "/"], "--json / cannot be written: it is a directory"),
        ([*_SOME, "--json", "/proc/nothing"], "--json /proc/nothing cannot be written"),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    words: list[str], message: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path(trace).read_bytes()
    assert main(["simulate", *(trace if word == "TRACE" else word for word in words)]) == 2
    assert Path(trace).read_bytes() == before
    out, err = capsys.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1
    assert err.startswith("parcae simulate: ") and message in err


def test_the_planning_interval_does_not_change_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "short.csv"
    path.write_text("0,20\n30000,18\n")
    words = ["simulate", "--trace", str(path), "--profile", "bert", "--workers", "1", "--json", "-"]
    for accounting in ("job", "reference"):
        for interval in ("20", "86400"):
            assert main([*words, "--accounting", accounting, "--interval", interval]) == 0
            runs = json.loads(capsys.readouterr().out)["results"]
            assert {run["duration_s"] for run in runs} == {90.0}
            assert {run["spans"][-1][1] for run in runs} == {90.0}


@pytest.mark.parametrize("more", [["--policy", "all"], [], ["--policy", "all", "--term", "bytes_per_s=1e9"]])
def test_the_reference_accounting_takes_any_profile(
    more: list[str], trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "tiny.json"
    rates = [[pipelines, stages, 10.0 * pipelines] for pipelines in (1, 2, 4) for stages in (1, 2)]
    profile.write_text(json.dumps({"format": "lightning_parcae/profile/1", "kind": "table", "name": "tiny",
                                   "samples_per_s": rates, "layer_bytes": [10**9, 10**9]}))  # fmt: skip
    words = ["simulate", "--trace", trace, "--profile", str(profile), "--accounting", "reference", "--workers", "1"]
    assert main([*words, *more]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "checkpoint: processes start in 16.8 s and load their state: not priced with the reference" in text


@pytest.mark.parametrize("more", [["--json", "-"], []])
def test_a_reader_that_has_gone_is_no_error(more: list[str], trace: str) -> None:
    read, write = os.pipe()
    os.close(read)
    words = ["simulate", "--trace", trace, "--profile", "bert", *_PLAIN, *more]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "lightning_parcae", *words],
            stdout=write, stderr=subprocess.PIPE, timeout=50, env=dict(os.environ), check=False,
        )  # fmt: skip
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_unknown_policy_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", "aws-p3", "--profile", "bert", "--policy", "luck"]) == 2
    first, *lines = capsys.readouterr().err.strip().splitlines()
    assert first.startswith("parcae simulate: there is no policy 'luck'")
    assert "liveput" in [line.split()[0] for line in lines]
