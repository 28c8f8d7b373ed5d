"""What-if: what policies would have trained on a trace of availability, and at what cost.

``simulate`` is the one call for notebooks; results are dataclasses, figures are matplotlib's::

    from lightning_parcae.simulation import plot_comparison, read_trace, show, simulate

    comparison = simulate("aws-p3", "gpt-1.5b", policies=["liveput", "reactive", "ondemand", "bound"])
    show(comparison)
    plot_comparison(comparison, read_trace("aws-p3")).savefig("what_if.png")

A public name is loaded when it is first asked for, so that importing the package is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_parcae.simulation.compare import known_policies, known_terms, parse_segment, resampled, simulate
    from lightning_parcae.simulation.plots import plot_comparison, save_figure
    from lightning_parcae.simulation.result import Comparison, ForecastBand, Migration, PolicyResult, Prices, Span
    from lightning_parcae.simulation.tables import comparison_rows, show
    from lightning_parcae.simulation.workload import PROFILES, TRACES, Workload, read_trace, read_workload

__all__ = [
    "PROFILES",
    "TRACES",
    "Comparison",
    "ForecastBand",
    "Migration",
    "PolicyResult",
    "Prices",
    "Span",
    "Workload",
    "comparison_rows",
    "known_policies",
    "known_terms",
    "parse_segment",
    "plot_comparison",
    "read_trace",
    "read_workload",
    "resampled",
    "save_figure",
    "show",
    "simulate",
]

_HOMES = {
    "compare": ("known_policies", "known_terms", "parse_segment", "resampled", "simulate"),
    "plots": ("plot_comparison", "save_figure"),
    "result": ("Comparison", "ForecastBand", "Migration", "PolicyResult", "Prices", "Span"),
    "tables": ("comparison_rows", "show"),
    "workload": ("PROFILES", "TRACES", "Workload", "read_trace", "read_workload"),
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
