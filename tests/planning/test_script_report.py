"""What a script tells `parcae profile`."""

from __future__ import annotations

import pytest

from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import LayerCost, ModelProfile
from lightning_parcae.planning.script_report import ScriptReport

PROFILE = ModelProfile("toy", (LayerCost(0.1, 0.2),), 8, 4, step_s={ParallelConfig(1, 1): 1.5})


@pytest.mark.parametrize(
    "report",
    [
        ScriptReport(),
        ScriptReport(reached="fit", refusal="no"),
        ScriptReport("steps", None, PROFILE, ("Linear",), "cuda", 9, 0.25, True),
    ],
)
def test_survives_json(report: ScriptReport) -> None:
    assert ScriptReport.from_json(report.to_json()) == report


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"profile": null, "reached": "mars", "layer_names": []}'])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"report|mars|Expecting value"):
        ScriptReport.from_json(text)
