"""Make the name ``"parcae"`` known to Lightning without loading Lightning.

Lightning has no entry point for strategies, so the name is added to its registry when ``lightning.pytorch.strategies``
is imported. If it is imported already, the name is added at once; else a finder on ``sys.meta_path`` waits for that
one import, steps aside while it is carried out, and adds the name afterwards.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_STRATEGIES = "lightning.pytorch.strategies"


def _make_strategy(**init_args: Any) -> Any:
    """Build the strategy when a Trainer asks for it by name."""
    from lightning_parcae.strategy import ParcaeStrategy

    return ParcaeStrategy(**init_args)


def _register(strategies: ModuleType) -> None:
    """Add the name to the registry of an imported ``lightning.pytorch.strategies``; harmless if it is there."""
    registry = strategies.StrategyRegistry
    if "parcae" not in registry:
        registry.register(
            "parcae", _make_strategy, description="Elastic pipeline and data parallel training on spot instances"
        )


class _RegisterAfterLoading(importlib.abc.Loader):
    """The module's own loader, followed by the registration."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _StrategiesFinder(importlib.abc.MetaPathFinder):
    """Wraps the loader of one module and leaves every other import alone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _STRATEGIES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisterAfterLoading(spec.loader)
        return spec


def register_when_imported() -> None:
    """Register ``"parcae"`` now if Lightning is loaded, else as soon as it is."""
    strategies = sys.modules.get(_STRATEGIES)
    if strategies is not None and hasattr(strategies, "StrategyRegistry"):
        _register(strategies)
    elif not any(isinstance(finder, _StrategiesFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _StrategiesFinder())
