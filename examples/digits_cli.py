"""The digits example with LightningCLI: everything is in ``digits.yaml``.

parcae run -n 4 examples/digits_cli.py fit --config examples/digits.yaml
"""

from __future__ import annotations

from digits import Digits, DigitsClassifier
from lightning.pytorch.cli import LightningCLI


def main() -> None:
    """Run the subcommand that the command line names."""
    LightningCLI(DigitsClassifier, Digits)


if __name__ == "__main__":
    main()
