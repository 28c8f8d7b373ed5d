"""The reference system's cost tables take seconds to fill: one for all tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_parcae.planning.cost import ReferenceCost
from lightning_parcae.planning.profile import ThroughputProfile
from lightning_parcae.planning.space import ConfigSpace
from lightning_parcae.simulation.workload import read_workload

ReferenceModel = tuple[ThroughputProfile, ReferenceCost, ConfigSpace]


@pytest.fixture(scope="session")
def reference_model() -> Callable[[str], ReferenceModel]:
    """Return profile, cost and space (up to 32 instances) of a model of the reference system."""
    made: dict[str, ReferenceModel] = {}

    def make(model: str) -> ReferenceModel:
        if model not in made:
            workload = read_workload(model)
            profile, cost = workload.profile, workload.reference_cost
            assert isinstance(profile, ThroughputProfile)
            assert cost is not None
            made[model] = profile, cost, ConfigSpace(profile, cost, max_instances=32)
        return made[model]

    return make
