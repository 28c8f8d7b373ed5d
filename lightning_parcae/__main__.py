"""``python -m lightning_parcae``: the ``parcae`` command."""

from __future__ import annotations

import sys

from lightning_parcae.cli import main

if __name__ == "__main__":
    sys.exit(main())
