"""What is simulated: a model's profile with what its migrations move, and the examples that come with the package.

A profile file says how fast each configuration trains. For migrations the state of each layer is needed too: our own
profiles of layers have it, the reference system's do, a bare table of throughputs may give it as ``layer_bytes``.

What is no profile, or lets nothing run, is refused with a ``ValueError`` of one line that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from lightning_parcae.availability.trace import AvailabilityTrace
from lightning_parcae.planning.cost import MeasuredCost, ReferenceCost
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import ModelProfile, ThroughputProfile, load_json, profile_from_json

_EXAMPLES = "lightning_parcae.simulation.examples"
_REFERENCE_PROFILES = "parcae-profiles.json"

#: Example traces: name, file, and where it is from.
TRACES: Mapping[str, tuple[str, str]] = {
    "aws-p3": ("aws-p3.csv", "AWS p3.2xlarge spot, 11.4 h, 32 requested; JF-D/Parcae, MIT"),
    "aws-g4dn": ("aws-g4dn.csv", "AWS g4dn spot; uclasystem/bamboo, MIT"),
    "gcp-v100": ("gcp-v100.txt", "GCP V100 spot, 80 requested, a day; uclasystem/bamboo, MIT"),
    "gcp-a100": ("gcp-a100.txt", "GCP A100 spot, 64 requested, a day; uclasystem/bamboo, MIT"),
}

#: Example profiles: 32 p3.2xlarge (V100 16 GB, 10 Gb/s), from JF-D/Parcae.
PROFILES: tuple[str, ...] = ("gpt-1.5b", "gpt-6.7b", "bert", "resnet152", "vgg19")


@dataclass(frozen=True)
class Workload:
    """A model to train.

    Attributes:
        name: Name of the profile, for people.
        profile: Throughput of each configuration.
        layer_bytes: State of each layer; a single layer of 0 bytes if unknown.
        cuts: Boundaries of the layers for each number of stages; even where it is not given.
        num_samples: Samples of a global batch.
        tokens_per_sample: Length of a sample; None if it has no tokens, or is unknown.
        reference_cost: Migration costs of the reference system; None if there are none for this model.
    """

    name: str
    profile: ThroughputProfile | ModelProfile
    layer_bytes: tuple[int, ...]
    cuts: Mapping[int, tuple[int, ...]]
    num_samples: int = 1
    tokens_per_sample: int | None = None
    reference_cost: ReferenceCost | None = None

    @property
    def num_layers(self) -> int:
        """Layers of the model, or 1 if only its throughput is known."""
        return len(self.layer_bytes)

    def measured_cost(self, **terms: Any) -> MeasuredCost:
        """Return this package's own migration costs for this model.

        Args:
            **terms: Terms of :class:`~lightning_parcae.planning.cost.MeasuredCost` that differ from the defaults.
        """
        return MeasuredCost(layer_bytes=self.layer_bytes, boundaries=self.cuts, **terms)


def read_workload(source: str | Path, *, model: str | None = None) -> Workload:
    """Read a profile file, or an example by its name.

    Args:
        source: A file, or one of :data:`PROFILES`.
        model: Which model of a file of the reference system; may be left out if there is only one.

    Raises:
        ValueError: If it is no profile, has no such model, or no configuration can run; the message names the file,
            what was found and what is wanted.
        OSError: If it cannot be read.
    """
    if str(source) in PROFILES and not Path(source).is_file():
        if model not in (None, str(source)):
            raise ValueError(f"no model {model!r}: the example {source} is a single model; leave --model out")
        text = resources.files(_EXAMPLES).joinpath(_REFERENCE_PROFILES).read_text(encoding="utf-8")
        return _from_reference(json.loads(text), str(source))
    path = Path(source)
    if not path.exists():
        raise ValueError(f"there is no profile {source}: give a file, or one of the examples {', '.join(PROFILES)}")
    try:
        value = load_json(path)
        if isinstance(value, dict) and isinstance(value.get("models"), dict):
            names = list(value["models"])
            if model is None and len(names) != 1:
                raise ValueError(f"it holds {len(names)} models, say which: {', '.join(names) or 'none'}")
            workload = _from_reference(value, model if model is not None else names[0])
        else:
            workload = _from_own(value)
            if model not in (None, workload.name):
                raise ValueError(f"no model {model!r}: it holds a single one, {workload.name!r}; leave --model out")
        _check_feasible(workload.profile)
        return workload
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_trace(source: str | Path, *, interval_s: float = 60.0) -> AvailabilityTrace:
    """Read a trace file, or an example by its name.

    Args:
        source: A file, or one of :data:`TRACES`.
        interval_s: Seconds per row where rows have no time, and for which the last row holds where the file does not
            say when it ends. Not how often is planned.

    Raises:
        ValueError: If it is no trace; the message names file and line.
        OSError: If it cannot be read.
    """
    if str(source) in TRACES and not Path(source).is_file():
        text = resources.files(_EXAMPLES).joinpath(TRACES[str(source)][0]).read_text(encoding="utf-8")
        return AvailabilityTrace.parse(text, source=str(source), interval_s=interval_s)
    if not Path(source).exists():
        raise ValueError(f"there is no trace {source}: give a file, or one of the examples {', '.join(TRACES)}")
    return AvailabilityTrace.read(source, interval_s=interval_s)


def _check_feasible(profile: ThroughputProfile | ModelProfile) -> None:
    """Refuse a profile with which nothing can ever run."""
    if isinstance(profile, ThroughputProfile):
        return  # a table is not empty, and what it lists can run
    if profile.min_stages > len(profile.layers):
        raise ValueError(f"min_stages is {profile.min_stages}, but there are only {len(profile.layers)} layers")
    # More pipelines leave fewer micro-batches in each, so the most pipelines need the least memory.
    most = min(profile.max_pipelines or profile.num_microbatches, profile.num_microbatches)
    grids = [ParallelConfig(most, stages) for stages in range(profile.min_stages, len(profile.layers) + 1)]
    if not any(profile.fits(grid) for grid in grids):
        least = min(profile.stage_memory_bytes(grid) for grid in grids)
        raise ValueError(
            f"no configuration fits: the fullest stage takes {least / 2**30:.3g} GiB at least, memory_bytes is "
            f"{(profile.memory_bytes or 0) / 2**30:.3g} GiB"
        )


def _from_reference(data: Mapping[str, Any], model: str) -> Workload:
    profile = ThroughputProfile.from_reference(data, model)
    facts = data["models"][model]
    try:
        cost = ReferenceCost.from_reference(data, model) if model in PROFILES else None
        sizes = [float(count) for count in facts["layer_params"]]
        states = 12.0 if cost is None else cost.states_per_param
        layer_bytes = _layer_bytes([states * count for count in sizes])
        tokens = _whole(facts.get("seq_length"), "seq_length")
        num_samples = _whole(facts["global_batch"], "global_batch")
    except (KeyError, TypeError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"model {model!r} of the reference system's profiles: {what}") from error
    most = max(config.num_stages for config in profile.rates)
    return Workload(
        name=model,
        profile=profile,
        layer_bytes=layer_bytes,
        cuts={} if cost is None else {stages: cost.boundaries(stages) for stages in range(1, most + 1)},
        num_samples=num_samples or 1,
        tokens_per_sample=tokens,
        reference_cost=cost,
    )


def _from_own(value: Any) -> Workload:
    profile = profile_from_json(value)
    tokens = _whole(value.get("tokens_per_sample"), "tokens_per_sample")
    if isinstance(profile, ModelProfile):
        sizes = tuple(layer.state_bytes for layer in profile.layers)
        cuts = {stages: profile.boundaries(stages) for stages in range(1, len(sizes) + 1)}
        return Workload(profile.name, profile, sizes, cuts, profile.num_samples, tokens)
    layer_bytes = _layer_bytes(value.get("layer_bytes", [0]))
    num_samples = _whole(value.get("num_samples"), "num_samples") or 1
    return Workload(profile.name, profile, layer_bytes, {}, num_samples, tokens)


def _layer_bytes(sizes: Any) -> tuple[int, ...]:
    if not (isinstance(sizes, list) and sizes and all(_is_size(size) for size in sizes)):
        shown = repr(sizes)[:60]
        raise ValueError(f"layer_bytes should list the state of each layer in bytes, 0 or more, got {shown}")
    return tuple(int(size) for size in sizes)


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e18


def _whole(value: Any, name: str) -> int | None:
    """Return a whole number of at least 1, or None if there is none."""
    if value is None:
        return None
    if not (_is_size(value) and value >= 1 and value == int(value)):
        raise ValueError(f"{name} should be a whole number of at least 1, got {value!r:.60}")
    return int(value)
