"""The name "parcae", and every form in which a command line or a YAML file may ask for the strategy."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import StrategyRegistry

import lightning_parcae
from lightning_parcae import ParcaeStrategy, registration

pytestmark = pytest.mark.filterwarnings("ignore")


def command_line(*arguments: str) -> Any:
    cli = LightningCLI(
        BoringModel,
        args=list(arguments),
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
        trainer_defaults={"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False},
    )
    return cli.trainer.strategy


def refused(*arguments: str) -> str:
    """Return what the command line says against the arguments."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as stop:
        command_line(*arguments)
    assert stop.value.code == 2
    return errors.getvalue()


def test_the_name_is_registered_once_and_makes_the_strategy() -> None:
    assert "parcae" in StrategyRegistry
    registration.register_when_imported()
    assert not any(isinstance(finder, registration._StrategiesFinder) for finder in sys.meta_path)
    assert isinstance(StrategyRegistry.get("parcae"), ParcaeStrategy)
    assert lightning_parcae.ParcaeStrategy is ParcaeStrategy
    trainer = L.Trainer(strategy="parcae", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, ParcaeStrategy)


def test_lightning_names_it_among_the_registered_ones() -> None:
    with pytest.raises(ValueError, match="invalid strategy name"):
        L.Trainer(strategy="parcea", accelerator="cpu")


@pytest.mark.parametrize(
    ("arguments", "micro_batch_size"),
    [
        (["--trainer.strategy=parcae"], None),
        (["--trainer.strategy=ParcaeStrategy", "--trainer.strategy.micro_batch_size=3"], 3),
        (["--trainer.strategy=lightning_parcae.ParcaeStrategy", "--trainer.strategy.init_args.micro_batch_size=3"], 3),
    ],
)
def test_command_lines(arguments: list[str], micro_batch_size: int | None) -> None:
    strategy = command_line(*arguments)
    assert isinstance(strategy, ParcaeStrategy)
    assert strategy._micro_batch_size == micro_batch_size


@pytest.mark.parametrize(
    "text",
    [
        "class_path: lightning_parcae.ParcaeStrategy\ninit_args: {micro_batch_size: 3}",
        "init_args: {micro_batch_size: 3}\nclass_path: lightning_parcae.ParcaeStrategy",
        "class_path: ParcaeStrategy\ninit_args: {micro_batch_size: 3, recompute: always, loss_weight: builtins.len}",
    ],
)
def test_yaml_forms(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"strategy": yaml.safe_load(text)}}))
    strategy = command_line(f"--config={path}")
    assert isinstance(strategy, ParcaeStrategy)
    assert strategy._micro_batch_size == 3
    overridden = command_line(f"--config={path}", "--trainer.strategy.init_args.micro_batch_size=5")
    assert overridden._micro_batch_size == 5


def test_a_printed_configuration_makes_the_same_strategy(tmp_path: Path) -> None:
    output = io.StringIO()
    arguments = ["--trainer.strategy=lightning_parcae.ParcaeStrategy", "--trainer.strategy.micro_batch_size=3"]
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as stop:
        command_line(*arguments, "--trainer.strategy.failure_timeout=7.5", "--print_config")
    assert stop.value.code == 0
    printed = yaml.safe_load(output.getvalue())["trainer"]["strategy"]
    assert printed["class_path"].endswith("ParcaeStrategy")
    assert printed["init_args"]["failure_timeout"] == 7.5
    assert not [name for name in printed["init_args"] if "secret" in name]
    path = tmp_path / "config.yaml"
    path.write_text(output.getvalue())
    strategy = command_line(f"--config={path}")
    assert (strategy._micro_batch_size, strategy.failure_timeout_s) == (3, 7.5)


def test_a_wrong_key_or_value_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    wrong = {"class_path": "lightning_parcae.ParcaeStrategy", "init_args": {"micro_batches": 3}}
    path.write_text(yaml.safe_dump({"trainer": {"strategy": wrong}}))
    for arguments in (
        [f"--config={path}"],
        ["--trainer.strategy=lightning_parcae.ParcaeStrategy", "--trainer.strategy.micro_batches=3"],
    ):
        message = refused(*arguments)
        assert "'lightning_parcae.ParcaeStrategy'" in message
        assert "micro_batches" in message and "not accepted" in message
    message = refused("--trainer.strategy=lightning_parcae.ParcaeStrategy", "--trainer.strategy.recompute=sometimes")
    assert "'never', 'except_last', 'always'" in message


def test_the_help_lists_the_valid_keys() -> None:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit):
        command_line("--trainer.strategy.help=lightning_parcae.ParcaeStrategy")
    text = output.getvalue()
    for name in ("micro_batch_size", "num_stages", "failure_timeout", "fallback_dir", "loss_weight"):
        assert name in text
    assert "Samples in each micro-batch" in text
