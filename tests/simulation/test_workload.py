"""Workloads and examples: what loads, from an installed package too, and one clear line for what does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from lightning_parcae.planning.cost import MeasuredCost
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import LayerCost, ModelProfile, ThroughputProfile
from lightning_parcae.simulation.workload import PROFILES, TRACES, read_trace, read_workload

EXAMPLES = resources.files("lightning_parcae.simulation.examples")
TABLE = ThroughputProfile("toy", {ParallelConfig(1, 2): 3.0, ParallelConfig(2, 2): 5.0}).to_json()
MODEL = ModelProfile("deep", (LayerCost(1.0, 2.0, state_bytes=10, parameter_bytes=5),) * 3, 8, 4).to_json()


@pytest.mark.parametrize(
    ("name", "minutes", "least", "most"),
    [("aws-p3", 683, 10, 32), ("aws-g4dn", 647, 0, 24), ("gcp-v100", 1452, 30, 80), ("gcp-a100", 1623, 17, 64)],
)
def test_example_traces_load_by_name(name: str, minutes: int, least: int, most: int) -> None:
    numbers = read_trace(name).statistics(60.0)
    assert (numbers.num_intervals, numbers.min_instances, numbers.max_instances) == (minutes, least, most)
    assert read_trace(name).source == name


@pytest.mark.parametrize("name", PROFILES)
def test_example_profiles_load_by_name(name: str) -> None:
    workload = read_workload(name)
    assert workload.name == name and workload.reference_cost is not None
    assert workload.num_layers == len(workload.layer_bytes) > 1
    assert workload.num_samples > 1
    deepest = max(config.num_stages for config in workload.profile.configs(64))
    assert all(edges[-1] == workload.num_layers for edges in workload.cuts.values()) and deepest in workload.cuts
    assert isinstance(workload.measured_cost(formation_s=0.3), MeasuredCost)


def test_every_example_is_a_package_file_with_its_licence() -> None:
    text = EXAMPLES.joinpath("ATTRIBUTION.md").read_text(encoding="utf-8")
    for file in [file for file, _ in TRACES.values()] + ["parcae-profiles.json"]:
        assert EXAMPLES.joinpath(file).is_file() and f"`{file}`" in text
    for licence, holder in (("LICENSE-parcae.txt", "Microsoft"), ("LICENSE-bamboo.txt", "UCLASystem")):
        words = EXAMPLES.joinpath(licence).read_text(encoding="utf-8")
        assert "MIT License" in words and holder in words and licence in text


def test_a_file_goes_before_an_example_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("aws-p3").write_text("5\n5\n")
    Path("bert").write_text(json.dumps(TABLE))
    assert read_trace("aws-p3").capacity == 5
    assert read_workload("bert").name == "toy"


def write(folder: Path, value: Any) -> Path:
    path = folder / "profile.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def test_own_profiles_of_both_kinds(tmp_path: Path) -> None:
    table = read_workload(
        write(tmp_path, TABLE | {"tokens_per_sample": 1024, "layer_bytes": [1, 2, 3], "num_samples": 64})
    )
    assert (table.name, table.tokens_per_sample, table.layer_bytes, table.num_samples) == ("toy", 1024, (1, 2, 3), 64)
    assert read_workload(write(tmp_path, TABLE)).layer_bytes == (0,)
    model = read_workload(write(tmp_path, MODEL | {"tokens_per_sample": 7}))
    assert (model.name, model.tokens_per_sample, model.layer_bytes, model.num_samples) == ("deep", 7, (10, 10, 10), 8)
    assert model.cuts[2] == model.profile.boundaries(2)  # type: ignore[union-attr]
    assert read_workload(write(tmp_path, "\ufeff" + json.dumps(TABLE))).name == "toy"


def test_one_model_of_the_reference_systems_file(tmp_path: Path) -> None:
    text = EXAMPLES.joinpath("parcae-profiles.json").read_text(encoding="utf-8")
    assert read_workload(write(tmp_path, text), model="bert").name == "bert"
    with pytest.raises(ValueError, match=r"profile\.json: it holds 5 models, say which: gpt-1\.5b, "):
        read_workload(write(tmp_path, text))
    with pytest.raises(ValueError, match=r"profile\.json: no model 'x'; the file holds gpt"):
        read_workload(write(tmp_path, text), model="x")


NO_PROFILE: dict[str, tuple[Any, str]] = {
    "empty": ("", "not JSON: line 1"),
    "cut off": (json.dumps(TABLE)[:40], "not JSON: line 1"),
    "nested without end": ("[" * 100_000, "nested too deeply"),
    "a trace of rows": ("0,18\n60000,17\n", r"not JSON: .* \(a profile is JSON\)"),
    "a trace of counts": ([1, 2, 3], "got 'a list'; this looks like a trace"),
    "a trace with metadata": ({"metadata": {"gap_seconds": 60}, "data": [1]}, "got None; this looks like a trace"),
    "another version": ({"format": "lightning_parcae/profile/2"}, "got 'lightning_parcae/profile/2'"),
    "another kind": (TABLE | {"kind": "x"}, "kind should be 'table' or 'model', got 'x'"),
    "nothing runs": (TABLE | {"samples_per_s": []}, "samples_per_s is empty"),
    "no list": (TABLE | {"samples_per_s": {"a": 1}}, "samples_per_s should be a list"),
    "short row": (TABLE | {"samples_per_s": [[1, 2, 3.0], [1, 2]]}, r"row 1 should be \[pipelines"),
    "negative": (TABLE | {"samples_per_s": [[1, 2, -1]]}, "row 0: samples/s must be above 0"),
    "zero": (TABLE | {"samples_per_s": [[1, 2, 0]]}, "row 0: samples/s must be above 0"),
    "not a number": (TABLE | {"samples_per_s": [[1, 2, float("nan")]]}, "row 0: samples/s must be above 0"),
    "infinite": (TABLE | {"samples_per_s": [[1, 2, float("inf")]]}, "row 0: samples/s must be above 0"),
    "no pipelines": (TABLE | {"samples_per_s": [[0, 2, 1.0]]}, "whole numbers of at least 1"),
    "negative stages": (TABLE | {"samples_per_s": [[1, -2, 1.0]]}, "whole numbers of at least 1"),
    "half a stage": (TABLE | {"samples_per_s": [[1, 1.5, 1.0]]}, "whole numbers of at least 1"),
    "a truth": (TABLE | {"samples_per_s": [[True, 1, 1.0]]}, "whole numbers of at least 1"),
    "twice": (TABLE | {"samples_per_s": [[1, 2, 1.0], [1, 2, 2.0]]}, "row 1: 1x2 was given before"),
    "huge": (TABLE | {"samples_per_s": [[10**9, 10**9, 1.0]]}, "at most 100000 instances"),
    "tokens": (TABLE | {"tokens_per_sample": "many"}, "tokens_per_sample should be a whole number"),
    "no tokens": (TABLE | {"tokens_per_sample": 0}, "tokens_per_sample should be a whole number"),
    "sizes": (TABLE | {"layer_bytes": [-1]}, "layer_bytes should list"),
    "infinite size": (TABLE | {"layer_bytes": [float("inf")]}, "layer_bytes should list"),
    "no sizes": (TABLE | {"layer_bytes": []}, "layer_bytes should list"),
    "no memory": (MODEL | {"memory_bytes": 3 * 2**30 / 1000, "layers": [MODEL["layers"][0] | {"state_bytes": 2**32}]},
                  "no configuration fits: the fullest stage takes 4 GiB at least, memory_bytes is 0.003 GiB"),
    "too deep": (MODEL | {"min_stages": 4}, "min_stages is 4, but there are only 3 layers"),
    "half a sample": (MODEL | {"num_samples": 1.5}, "num_samples must be a whole number of at least 1, got 1.5"),
    "words": (MODEL | {"memory_bytes": "8GB"}, "memory_bytes must be above 0, got '8GB'"),
    "no link": (MODEL | {"link_bytes_per_s": float("nan")}, "link_bytes_per_s must be above 0, got nan"),
    "latency": (MODEL | {"link_latency_s": -1}, "link_latency_s must be at least 0, got -1"),
    "too many": (MODEL | {"num_microbatches": 10**12}, "at most 1000 layers and 100000 micro-batches"),
    "too many layers": (MODEL | {"layers": MODEL["layers"] * 1000}, "at most 1000 layers"),
    "bad layer": (MODEL | {"layers": [{"forward_s": 1.0}]}, "layer 0: backward_s missing"),
    "bad time": (MODEL | {"layers": [{"forward_s": "1", "backward_s": 1}]}, "layer 0: forward_s must be at least 0"),
    "bad step": (MODEL | {"step_s": [[1, 1, 0]]}, "step_s, row 0: seconds must be above 0"),
    "unknown key": (MODEL | {"colour": 1}, "unknown keys colour"),
    "recompute": (MODEL | {"recompute": "no"}, "recompute true or false"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_PROFILE)
def test_what_is_no_profile_gets_one_clear_line(tmp_path: Path, name: str) -> None:
    value, message = NO_PROFILE[name]
    with pytest.raises(ValueError, match=rf"profile\.json: .*{message}") as caught:
        read_workload(write(tmp_path, value))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in keys[:-1]:
            data = data[key]
        del data[keys[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("models", "bert", "throughput"), "'bert' has no list of throughputs"),
        (without("models", "bert", "layer_params"), "'layer_params' is missing"),
        (without("common"), "'common' is missing"),
        (lambda data: data["models"]["bert"]["throughput"].append({"dp": 1}), "throughput of bert, row 62: pipelines"),
        (lambda data: data["models"].update(bert="x"), "'bert' has no list of throughputs"),
        (lambda data: data["models"].clear(), "it holds 0 models, say which: none"),
    ],
)
def test_a_damaged_file_of_the_reference_system(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    data = json.loads(EXAMPLES.joinpath("parcae-profiles.json").read_text(encoding="utf-8"))
    data["models"] = {"bert": data["models"]["bert"]}
    change(data)
    with pytest.raises(ValueError, match=rf"profile\.json: .*{message}"):
        read_workload(write(tmp_path, data))


def test_what_is_not_there_or_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no profile nowhere\.json: .* gpt-1\.5b, gpt-6\.7b, bert,"):
        read_workload("nowhere.json")
    with pytest.raises(ValueError, match=r"there is no trace nowhere\.csv: .* aws-p3, aws-g4dn, gcp-v100, gcp-a100"):
        read_trace("nowhere.csv")
    with pytest.raises(ValueError, match="a folder, not a file"):
        read_workload(tmp_path)
    with pytest.raises(ValueError, match="a folder, not a trace file"):
        read_trace(tmp_path)
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match="binary: not a text file"):
        read_workload(tmp_path / "binary")
    with pytest.raises(ValueError, match="binary: not a text file"):
        read_trace(tmp_path / "binary")
