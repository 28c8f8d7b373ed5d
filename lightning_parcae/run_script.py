"""Run a user's script with ``"parcae"`` known to Lightning, as ``python script.py`` would run it otherwise.

python -m lightning_parcae.run_script train.py --lr 0.1
python -m lightning_parcae.run_script -m package.train --lr 0.1
"""

from __future__ import annotations

import os
import runpy
import sys

import lightning_parcae  # noqa: F401  registers the strategy
from lightning_parcae.errors import install_exit_codes


def main() -> None:
    """Run what the command line names as ``__main__``."""
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    arguments = arguments[1:] if is_module else arguments
    if not arguments:
        sys.exit("usage: python -m lightning_parcae.run_script (SCRIPT | -m MODULE) [ARGUMENT...]")
    sys.argv = list(arguments)
    install_exit_codes()
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
