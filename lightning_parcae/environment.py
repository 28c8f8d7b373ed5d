"""Ranks that follow the membership, instead of environment variables."""

from __future__ import annotations

from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from typing_extensions import override


class ParcaeEnvironment(LightningEnvironment):
    """One process per instance; its rank and the world size change when the membership does.

    An instance that has no rank yet (it warms up, or waits as a spare) reports the rank :attr:`NO_RANK`, so that
    nothing that belongs to rank 0 (logs, checkpoints, the progress bar) is done twice.
    """

    NO_RANK = 1_000_000

    def __init__(self) -> None:
        super().__init__()
        self._rank = 0
        self._size = 1
        self._host_rank = 0

    def assign(self, rank: int, size: int) -> None:
        """Take a rank in a world of ``size`` members."""
        self._rank, self._size = rank, size
        # one object for Lightning, Fabric and the utilities: log lines and decorated functions follow at once
        rank_zero_only.rank = rank  # type: ignore[attr-defined]

    def assign_host_rank(self, host_rank: int) -> None:
        """Set this instance's place among the instances of its host; 0 prepares the data."""
        self._host_rank = host_rank

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @override
    def global_rank(self) -> int:
        return self._rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """Ignore: only the membership assigns ranks."""

    @override
    def world_size(self) -> int:
        return self._size

    @override
    def set_world_size(self, size: int) -> None:
        """Ignore: only the membership sets the size."""

    @override
    def local_rank(self) -> int:
        return self._host_rank

    @override
    def node_rank(self) -> int:
        return 0
