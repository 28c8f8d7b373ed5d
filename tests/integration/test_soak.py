"""A run through random events; PARCAE_SOAK_EVENTS=100 for the long one, or python -m tests.integration.soak."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.integration.soak import assert_flat, soak

NUM_EVENTS = int(os.environ.get("PARCAE_SOAK_EVENTS", "20"))


@pytest.mark.timeout(120 + 12 * NUM_EVENTS)
def test_random_events(tmp_path: Path) -> None:
    result = soak(tmp_path, NUM_EVENTS, seed=int(os.environ.get("PARCAE_SOAK_SEED", "1")))
    sys.stdout.write(result.describe() + "\n")
    assert_flat(result.usage)
    assert {happening.kind for happening in result.happenings} == {"kill", "stop", "notice", "join"}
