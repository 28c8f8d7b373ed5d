"""The bar is there only when somebody watches."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lightning_parcae.simulation import progress


def test_a_bar_shows_only_where_somebody_watches_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(*, is_terminal: bool, after_s: float) -> str:
        monkeypatch.setattr(progress, "_AFTER_S", after_s)
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=is_terminal, width=80)
        with progress.progress_bar("simulating", console) as tell:
            tell(0.5, 4)
            tell(2, 4)
        return stream.getvalue()

    assert "simulating" in shown(is_terminal=True, after_s=0.0)
    assert shown(is_terminal=True, after_s=1e9) == ""
    assert shown(is_terminal=False, after_s=0.0) == ""
