"""PyTorch Lightning strategy that trains on spot and preemptible instances as if nothing happened.

``import lightning_parcae`` makes ``Trainer(strategy="parcae")`` known. It loads neither torch nor Lightning: the name
is registered when Lightning's strategies are imported, before or after this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_parcae.registration import register_when_imported

if TYPE_CHECKING:
    from lightning_parcae.callback import ParcaeCallback
    from lightning_parcae.strategy import ParcaeStrategy

__version__ = "0.1.0"
__all__ = ["ParcaeCallback", "ParcaeStrategy", "__version__"]

register_when_imported()


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for."""
    if name == "ParcaeStrategy":
        from lightning_parcae.strategy import ParcaeStrategy

        return ParcaeStrategy
    if name == "ParcaeCallback":
        from lightning_parcae.callback import ParcaeCallback

        return ParcaeCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
