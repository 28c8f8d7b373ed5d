"""How fast each configuration trains, and whether it fits into memory.

A profile answers two questions, whatever is behind it: which configurations can run, and at how many samples per
second. :class:`ThroughputProfile` is a table of measurements. :class:`ModelProfile` computes the answer from what was
measured of single layers and links, and lets measured steps correct it.

Symbols: ``D`` pipelines, ``P`` stages in each, ``m`` micro-batches of a global batch, ``q`` of the fullest pipeline.

Values that make no sense, and files that are no profile, are refused with a ``ValueError`` of one line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_parcae.planning.parallel_config import ParallelConfig

_FORMAT = "lightning_parcae/profile/1"
# Beyond these it is a mistake in the file, and would take minutes to find out otherwise.
_MOST_LAYERS = 1_000
_MOST_MICROBATCHES = 100_000
_MOST_INSTANCES = 100_000
# Beyond these a throughput is no measurement, and times of steps come out as 0 or without end.
_LEAST_RATE, _MOST_RATE = 1e-9, 1e12
_MOST_SAMPLES = 1_000_000_000
#: Keys of a file that say more about the model than a profile needs; whoever wants them reads them.
_OTHER_KEYS = ("format", "kind", "tokens_per_sample", "layer_bytes")


class Profile(Protocol):
    """What the optimizer asks of a profile."""

    def configs(self, max_instances: int) -> tuple[ParallelConfig, ...]:
        """Return every configuration that can run on at most so many instances, by ``D``, then ``P``."""
        ...

    def samples_per_s(self, config: ParallelConfig) -> float:
        """Return the throughput of a configuration; 0 if it cannot run."""
        ...


def best_config(profile: Profile, num_instances: int) -> ParallelConfig | None:
    """Return the fastest configuration for so many instances; of equally fast ones the one with the smallest ``D``."""
    best, rate = None, 0.0
    for config in profile.configs(num_instances):
        if profile.samples_per_s(config) > rate:
            best, rate = config, profile.samples_per_s(config)
    return best


@dataclass(frozen=True)
class ThroughputProfile:
    """Measured throughput by configuration; what was not measured cannot run.

    Attributes:
        name: Name of the model, for people.
        rates: Samples per second of each configuration.
    """

    name: str
    rates: Mapping[ParallelConfig, float]

    def __post_init__(self) -> None:
        for config, rate in self.rates.items():
            if not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"{self.name}: the throughput of {config} must be above 0 samples/s, got {rate}")
            if not _LEAST_RATE <= rate <= _MOST_RATE:
                raise ValueError(
                    f"{self.name}: the throughput of {config} must be {_LEAST_RATE:g} to {_MOST_RATE:g} samples/s, got "
                    f"{rate:g}"
                )

    def configs(self, max_instances: int) -> tuple[ParallelConfig, ...]:
        """See :class:`Profile`."""
        return tuple(sorted(config for config in self.rates if config.num_instances <= max_instances))

    def samples_per_s(self, config: ParallelConfig) -> float:
        """See :class:`Profile`."""
        return self.rates.get(config, 0.0)

    def to_json(self) -> dict[str, Any]:
        """Return the profile as JSON values."""
        rates = [[config.num_pipelines, config.num_stages, rate] for config, rate in sorted(self.rates.items())]
        return {"format": _FORMAT, "kind": "table", "name": self.name, "samples_per_s": rates}

    @classmethod
    def from_reference(cls, data: Mapping[str, Any], model: str) -> ThroughputProfile:
        """Read one model of the reference system's profiles (``data/parcae/profiles.json``).

        Raises:
            ValueError: If there is no such model.
        """
        if model not in data.get("models", {}):
            raise ValueError(f"no model {model!r}; the file holds {', '.join(data.get('models', {})) or 'none'}")
        facts = data["models"][model]
        if not (isinstance(facts, Mapping) and isinstance(facts.get("throughput"), list) and facts["throughput"]):
            raise ValueError(f"model {model!r} has no list of throughputs")
        keys = ("dp", "pp", "samples_per_s")
        rows = [[row.get(key) for key in keys] if isinstance(row, Mapping) else row for row in facts["throughput"]]
        return cls(model, _table(rows, f"throughput of {model}", "samples_per_s"))


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What one layer costs, for one micro-batch.

    Attributes:
        forward_s: Seconds of its forward pass.
        backward_s: Seconds of its backward pass, recompute not included.
        update_s: Seconds of its optimizer step.
        parameter_bytes: What its gradients take on the wire.
        state_bytes: Parameters, buffers and optimizer state.
        activation_bytes: What it keeps for its backward pass.
        output_bytes: What it hands to the next layer.
    """

    forward_s: float
    backward_s: float
    update_s: float = 0.0
    parameter_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0
    output_bytes: int = 0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not (_is_number(value) and value >= 0):
                raise ValueError(f"{name} must be at least 0, got {value!r}")


@dataclass(frozen=True, slots=True)
class _Split:
    """What the stages of one split cost, for one micro-batch.

    Attributes:
        forward_s: Sum over the stages, and the slowest one.
        backward_s: Sum over the stages, and the slowest one.
        update_s: Of the slowest stage.
        reduce_bytes: Gradients of the largest stage.
        hops_s: Time of all transfers between stages, both ways.
        memory: Of each stage: fixed bytes, and bytes per micro-batch in flight.
    """

    forward_s: tuple[float, float]
    backward_s: tuple[float, float]
    update_s: float
    reduce_bytes: int
    hops_s: float
    memory: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ModelProfile:
    """Throughput and memory, computed from layers and links and corrected by measured steps.

    Attributes:
        name: Name of the model, for people.
        layers: Cost of each layer.
        num_samples: Samples of a global batch.
        num_microbatches: Micro-batches ``m`` of a global batch.
        link_bytes_per_s: Bandwidth between two instances.
        link_latency_s: Time of an empty message.
        memory_bytes: Memory of an instance; None means unlimited.
        recompute: Whether activations are computed again in the backward pass.
        min_stages: Fewest stages to consider.
        max_pipelines: Most pipelines to consider; None means one per micro-batch.
        step_s: Measured seconds per step; they replace the model, and correct it elsewhere.
    """

    name: str
    layers: tuple[LayerCost, ...]
    num_samples: int
    num_microbatches: int
    link_bytes_per_s: float = 1e9
    link_latency_s: float = 1e-4
    memory_bytes: float | None = None
    recompute: bool = True
    min_stages: int = 1
    max_pipelines: int | None = None
    step_s: Mapping[ParallelConfig, float] = field(default_factory=dict)
    _splits: dict[int, _Split] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(f"{self.name}: needed are layers, got none")
        for name in ("num_samples", "num_microbatches", "min_stages", "max_pipelines"):
            value = getattr(self, name)
            is_open = name == "max_pipelines" and value is None
            if not is_open and not (_is_number(value) and isinstance(value, (int, np.integer)) and value >= 1):
                raise ValueError(f"{self.name}: {name} must be a whole number of at least 1, got {value!r}")
        for name in ("link_bytes_per_s", "memory_bytes"):
            value = getattr(self, name)
            is_open = name == "memory_bytes" and value is None
            if not is_open and not (_is_number(value, finite=False) and value > 0):
                raise ValueError(f"{self.name}: {name} must be above 0, got {value!r}")
        if len(self.layers) > _MOST_LAYERS or self.num_microbatches > _MOST_MICROBATCHES:
            raise ValueError(
                f"{self.name}: at most {_MOST_LAYERS} layers and {_MOST_MICROBATCHES} micro-batches are taken, got "
                f"{len(self.layers)} and {self.num_microbatches}"
            )
        if self.num_samples > _MOST_SAMPLES:
            raise ValueError(f"{self.name}: at most {_MOST_SAMPLES} samples a step are taken, got {self.num_samples}")
        if not (_is_number(self.link_latency_s) and self.link_latency_s >= 0):
            raise ValueError(f"{self.name}: link_latency_s must be at least 0, got {self.link_latency_s!r}")
        for config, seconds in self.step_s.items():
            if not (_is_number(seconds) and seconds > 0):
                raise ValueError(f"{self.name}: a step of {config} takes more than 0 s, got {seconds!r}")
            if not _LEAST_RATE <= self.num_samples / seconds <= _MOST_RATE:
                raise ValueError(
                    f"{self.name}: a step of {config} should train {_LEAST_RATE:g} to {_MOST_RATE:g} samples/s, got "
                    f"{self.num_samples} samples in {seconds:g} s"
                )

    # --- what runs ----------------------------------------------------------------------------------------------------

    def configs(self, max_instances: int) -> tuple[ParallelConfig, ...]:
        """See :class:`Profile`."""
        most = min(self.max_pipelines or self.num_microbatches, self.num_microbatches, max_instances)
        grids = (
            ParallelConfig(count, stages)
            for count in range(1, most + 1)
            for stages in range(self.min_stages, min(len(self.layers), max_instances // count) + 1)
        )
        return tuple(config for config in grids if self.fits(config))

    def samples_per_s(self, config: ParallelConfig) -> float:
        """See :class:`Profile`."""
        if not self.fits(config):
            return 0.0
        return self.num_samples / self.step_time_s(config)

    def fits(self, config: ParallelConfig) -> bool:
        """Return whether a configuration has layers, micro-batches and memory enough."""
        most = min(self.max_pipelines or self.num_microbatches, self.num_microbatches)
        if not self.min_stages <= config.num_stages <= len(self.layers) or config.num_pipelines > most:
            return False
        return self.memory_bytes is None or self.stage_memory_bytes(config) <= self.memory_bytes

    def stage_memory_bytes(self, config: ParallelConfig) -> float:
        """Return the memory of the fullest stage: state, gradients and activations in flight."""
        in_flight = math.ceil(self.num_microbatches / config.num_pipelines)
        return max(fixed + in_flight * each for fixed, each in self._split(config.num_stages).memory)

    # --- time ---------------------------------------------------------------------------------------------------------

    def step_time_s(self, config: ParallelConfig) -> float:
        """Return the seconds of a step: measured, or modelled and corrected by what was measured."""
        measured = self.step_s.get(config)
        return measured if measured is not None else self.modelled_step_s(config) * self.correction(config)

    def modelled_step_s(self, config: ParallelConfig) -> float:
        """Return the seconds of a step as the layers and links alone suggest.

        The fullest pipeline passes ``q`` micro-batches through its stages, forward and then backward (GPipe): the
        slowest stage works ``q`` times, the others are filled and drained once. Then gradients are reduced and the
        optimizer steps, both as long as the largest stage takes.
        """
        rounds = math.ceil(self.num_microbatches / config.num_pipelines)
        split = self._split(config.num_stages)
        passes = sum(whole + (rounds - 1) * slowest for whole, slowest in (split.forward_s, split.backward_s))
        share = 2.0 * (config.num_pipelines - 1) / config.num_pipelines
        reduce_s = share * (split.reduce_bytes / self.link_bytes_per_s + self.link_latency_s)
        return max(passes + split.hops_s + reduce_s + split.update_s, 1e-9)

    def correction(self, config: ParallelConfig) -> float:
        """Return measured over modelled time, from the measured configurations, the nearest ones weighing most."""
        weight = total = 0.0
        for other, measured in self.step_s.items():
            distance = math.log2(other.num_pipelines / config.num_pipelines) ** 2
            distance += math.log2(other.num_stages / config.num_stages) ** 2
            # A factor common to all (a slow kernel) is the usual error, so that distant ones count too.
            near = 0.25 + math.exp(-distance)
            weight += near
            total += near * math.log(measured / self.modelled_step_s(other))
        return math.exp(total / weight) if weight else 1.0

    def with_step(self, config: ParallelConfig, seconds: float, *, weight: float = 1.0) -> ModelProfile:
        """Return a profile that has seen a step of a configuration.

        Args:
            config: What ran.
            seconds: Seconds of the step, above 0.
            weight: Share of the new value in the mean with the old one, 0 to 1.

        Raises:
            ValueError: If the time or the weight makes no sense.
        """
        if not (math.isfinite(seconds) and seconds > 0 and 0 < weight <= 1):
            raise ValueError(f"a step takes more than 0 s and weighs 0 to 1, got {seconds} and {weight}")
        old = self.step_s.get(config, seconds)
        updated = replace(self, step_s={**self.step_s, config: old + weight * (seconds - old)})
        # The splits do not depend on measured steps.
        updated._splits.update(self._splits)
        updated.__dict__["_cuts"] = self._cuts
        return updated

    # --- stages -------------------------------------------------------------------------------------------------------

    def boundaries(self, num_stages: int) -> tuple[int, ...]:
        """Return the split into consecutive stages whose slowest one is fastest, length ``num_stages + 1``.

        Raises:
            ValueError: If there are more stages than layers.
        """
        if not 1 <= num_stages <= len(self.layers):
            raise ValueError(f"{len(self.layers)} layers cannot make {num_stages} stages")
        cuts = [len(self.layers)]
        for stages in range(num_stages - 1, -1, -1):
            cuts.append(int(self._cuts[stages, cuts[-1]]))
        return tuple(reversed(cuts))

    def _split(self, num_stages: int) -> _Split:
        """Return what the stages of a split cost; worked out once for each number of stages."""
        if num_stages not in self._splits:
            self._splits[num_stages] = self._cost_split(num_stages)
        return self._splits[num_stages]

    def _cost_split(self, num_stages: int) -> _Split:
        forward, backward, update, reduce_bytes, memory, hops = [], [], [], [], [], 0.0
        for low, high in pairwise(self.boundaries(num_stages)):
            layers = self.layers[low:high]
            forward.append(sum(layer.forward_s for layer in layers))
            backward.append(sum(layer.backward_s for layer in layers) + (forward[-1] if self.recompute else 0.0))
            update.append(sum(layer.update_s for layer in layers))
            reduce_bytes.append(sum(layer.parameter_bytes for layer in layers))
            if high < len(self.layers):
                hops += 2 * (self.link_latency_s + self.layers[high - 1].output_bytes / self.link_bytes_per_s)
            state = sum(layer.state_bytes + layer.parameter_bytes for layer in layers)
            kept = sum(layer.activation_bytes for layer in layers)
            # With recompute, one micro-batch is whole at a time and of the others only the stage's input is kept.
            inputs = self.layers[low - 1].output_bytes if low else 0
            memory.append((state + kept, inputs) if self.recompute else (state, kept))
        return _Split(
            forward_s=(sum(forward), max(forward)),
            backward_s=(sum(backward), max(backward)),
            update_s=max(update),
            reduce_bytes=max(reduce_bytes),
            hops_s=hops,
            memory=tuple(memory),
        )

    @cached_property
    def _cuts(self) -> NDArray[np.int64]:
        """Where the last of ``s + 1`` stages over the first ``n`` layers begins, shape ``(L, L + 1)``."""
        times = [layer.forward_s * (2 if self.recompute else 1) + layer.backward_s for layer in self.layers]
        count = len(times)
        prefix = np.concatenate([[0.0], np.cumsum(times)])
        cuts = np.zeros((count, count + 1), dtype=np.int64)
        best = prefix.copy()  # slowest stage of the best split of the first n layers, one stage
        for stages in range(1, count):
            slower = np.full(count + 1, np.inf)
            for end in range(stages + 1, count + 1):
                starts = np.arange(stages, end)
                slowest = np.maximum(best[starts], prefix[end] - prefix[starts])
                # Of equally good splits the one with the most even rest: take the latest start that is as good.
                index = len(starts) - 1 - int(np.argmin(slowest[::-1]))
                slower[end], cuts[stages, end] = slowest[index], starts[index]
            best = slower
        return cuts

    # --- JSON ---------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the profile as JSON values."""
        steps = [[config.num_pipelines, config.num_stages, time] for config, time in sorted(self.step_s.items())]
        plain = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("layers", "step_s", "_splits")
        }
        layers = [asdict(layer) for layer in self.layers]
        return {"format": _FORMAT, "kind": "model", **plain, "layers": layers, "step_s": steps}


def profile_from_json(value: Mapping[str, Any]) -> ThroughputProfile | ModelProfile:
    """Build a profile from ``to_json``'s values.

    Raises:
        ValueError: If the values are no profile; the message says what is missing or wrong.
    """
    if not isinstance(value, Mapping) or value.get("format") != _FORMAT:
        found = value.get("format") if isinstance(value, Mapping) else f"a {type(value).__name__}"
        is_trace = not isinstance(value, Mapping) or bool({"counts", "data", "N"} & set(value))
        hint = "; this looks like a trace" if is_trace else ""
        raise ValueError(f"not a profile: the format should be {_FORMAT!r}, got {_cut(found)}{hint}")
    try:
        if value["kind"] == "table":
            rates = _table(value["samples_per_s"], "samples_per_s", "samples/s")
            if not rates:
                raise ValueError("not a profile: samples_per_s is empty, so nothing can run")
            return ThroughputProfile(str(value["name"]), rates)
        if value["kind"] != "model":
            raise ValueError(f"not a profile: the kind should be 'table' or 'model', got {_cut(value['kind'])}")
        fields = {key: item for key, item in value.items() if key not in (*_OTHER_KEYS, "layers", "step_s")}
        unknown = sorted(set(fields) - set(ModelProfile.__dataclass_fields__))
        if unknown or not isinstance(fields["name"], str) or not isinstance(fields.get("recompute", True), bool):
            what = f"unknown keys {', '.join(unknown)}" if unknown else "name is a text, recompute true or false"
            raise ValueError(f"not a profile: {what}")
        if not isinstance(value["layers"], list):
            raise ValueError(f"not a profile: layers should be a list, got {_cut(value['layers'])}")
        layers = tuple(_layer(layer, index) for index, layer in enumerate(value["layers"][: _MOST_LAYERS + 1]))
        return ModelProfile(layers=layers, step_s=_table(value.get("step_s", []), "step_s", "seconds"), **fields)
    except KeyError as error:
        raise ValueError(f"not a profile: {error} is missing") from error
    except TypeError as error:
        raise ValueError(f"not a profile: {error}") from error


def _is_number(value: Any, *, finite: bool = True) -> bool:
    is_real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return is_real and (math.isfinite(value) if finite else not math.isnan(value))


def _cut(value: Any) -> str:
    """Return a value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _layer(value: Any, index: int) -> LayerCost:
    try:
        if not isinstance(value, Mapping):
            raise TypeError(f"it should be an object, got {_cut(value)}")
        unknown = sorted(set(value) - set(LayerCost.__dataclass_fields__))
        if unknown:
            raise TypeError(f"unknown keys {', '.join(unknown)}")
        missing = [name for name in ("forward_s", "backward_s") if name not in value]
        if missing:
            raise TypeError(f"{' and '.join(missing)} missing")
        return LayerCost(**value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"not a profile: layer {index}: {error}") from error


def _table(rows: Any, name: str, unit: str) -> dict[ParallelConfig, float]:
    """Read rows of ``[D, P, value]``."""
    if not isinstance(rows, list):
        raise ValueError(f"{name} should be a list of [pipelines, stages, {unit}], got {_cut(rows)}")
    table: dict[ParallelConfig, float] = {}
    for index, row in enumerate(rows):
        where = f"{name}, row {index}"
        if not (isinstance(row, list) and len(row) == 3):
            raise ValueError(f"{where} should be [pipelines, stages, {unit}], got {_cut(row)}")
        if not all(_is_number(value) and value >= 1 and float(value).is_integer() for value in row[:2]):
            raise ValueError(f"{where}: pipelines and stages are whole numbers of at least 1, got {_cut(row)}")
        if not (_is_number(row[2]) and row[2] > 0):
            raise ValueError(f"{where}: {unit} must be above 0, got {_cut(row)}")
        config = ParallelConfig(int(row[0]), int(row[1]))
        if config.num_instances > _MOST_INSTANCES:
            raise ValueError(f"{where}: at most {_MOST_INSTANCES} instances are taken, got {_cut(row)}")
        if config in table:
            raise ValueError(f"{where}: {config} was given before")
        table[config] = float(row[2])
    return table


def load_json(path: str | Path) -> Any:
    """Read a JSON file; a byte-order mark is allowed.

    Raises:
        ValueError: If it is a folder, no text or no JSON; the message does not name the file.
        OSError: If it cannot be read.
    """
    if Path(path).is_dir():
        raise ValueError("a folder, not a file")
    try:
        return json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not a text file ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON: line {error.lineno}, column {error.colno}: {error.msg} (a profile is JSON)"
        ) from error
    except RecursionError as error:
        raise ValueError("not a profile: nested too deeply") from error


def read_profile(path: str | Path, model: str | None = None) -> ThroughputProfile | ModelProfile:
    """Read a profile file, ours or the reference system's.

    Args:
        path: A JSON file.
        model: Which model of a reference file; may be left out if there is only one.

    Raises:
        ValueError: If the file is no profile; the message names it.
    """
    try:
        value = load_json(path)
        if isinstance(value, dict) and isinstance(value.get("models"), dict):
            names = list(value["models"])
            if model is None and len(names) != 1:
                raise ValueError(f"say which model: {', '.join(names)}")
            return ThroughputProfile.from_reference(value, model if model is not None else names[0])
        return profile_from_json(value)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
