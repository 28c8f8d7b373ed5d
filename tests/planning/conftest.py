"""The reference system's cost tables take seconds to fill: one for all tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_parcae.planning.cost import ReferenceCost
from lightning_parcae.planning.profile import ThroughputProfile
from lightning_parcae.planning.space import ConfigSpace

PROFILES = Path("/work/shared/data/parcae/profiles.json")

ReferenceModel = tuple[ThroughputProfile, ReferenceCost, ConfigSpace]


@pytest.fixture(scope="session")
def reference_model() -> Callable[[str], ReferenceModel]:
    """Return profile, cost and space (up to 32 instances) of a model of the reference system."""
    made: dict[str, ReferenceModel] = {}

    def make(model: str) -> ReferenceModel:
        if model not in made:
            data = json.loads(PROFILES.read_text())
            profile = ThroughputProfile.from_reference(data, model)
            cost = ReferenceCost.from_reference(data, model)
            made[model] = profile, cost, ConfigSpace(profile, cost, max_instances=32)
        return made[model]

    return make
