"""`parcae profile`: what a script is asked inside, what the command makes of it, and that nothing is left behind."""

from __future__ import annotations

import argparse
import io
import os
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parcae import ParcaeStrategy, profile_command
from lightning_parcae.control.link import LinkServer
from lightning_parcae.errors import JobFailedError, PlanError
from lightning_parcae.launcher import InstanceLauncher
from lightning_parcae.planning.job_profile import LinkSpeed
from lightning_parcae.planning.parallel_config import ParallelConfig
from lightning_parcae.planning.profile import LayerCost, ModelProfile, read_profile
from lightning_parcae.planning.script_report import REPORT_VARIABLE, STEPS_VARIABLE, ScriptReport

pytestmark = pytest.mark.filterwarnings("ignore:You are running on single node", "ignore:The `srun` command")
PROFILE = ModelProfile("toy", (LayerCost(0.001, 0.002, output_bytes=4),) * 2, 8, 4)
LINK = LinkSpeed(1e-4, 1e9)


# --- inside of the script ---------------------------------------------------------------------------------------------


class Small(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=8)


def fit(out: Path, strategy: ParcaeStrategy, module: Any = None, **options: Any) -> None:
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        default_root_dir=out,
        logger=CSVLogger(out / "logs"),
        callbacks=[ModelCheckpoint(out / "kept", every_n_train_steps=1), LearningRateMonitor()],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 50, "devices": 1, **options},
    )
    trainer.fit(module or Small(), loader(), loader())


@pytest.fixture
def report_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "report.json"
    monkeypatch.setenv(REPORT_VARIABLE, str(path))
    monkeypatch.setenv(STEPS_VARIABLE, "4")
    return path


def told(path: Path) -> ScriptReport:
    return ScriptReport.from_json(path.read_text())


def test_a_strategy_measures_and_ends_the_script_without_a_trace(report_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # the coordinator that the script names is not asked, and devices=4 starts no instances
    strategy = ParcaeStrategy(
        coordinator="127.0.0.1:1", min_stages=2, fallback_dir=str(out / "fallback"), run_dir=str(out / "run"),
        commit_records=True,
    )  # fmt: skip
    assert told(report_path).reached == "strategy"
    with pytest.raises(SystemExit) as ended:
        fit(out, strategy, devices=4)
    assert ended.value.code == 0
    assert isinstance(strategy._launcher, InstanceLauncher)
    report = told(report_path)
    assert report.reached == "steps" and report.num_steps == 4 and report.device == "cpu"
    profile = report.profile
    assert profile is not None and len(profile.layers) == 3 and profile.min_stages == 2
    assert (profile.num_samples, profile.num_microbatches) == (8, 8)
    assert profile.step_s[ParallelConfig(1, 1)] > 0 and profile.memory_bytes is None
    # two moments and two counts
    assert profile.layers[0].state_bytes == 3 * 4 * (4 * 8 + 8) + 2 * 4
    assert [path for path in out.rglob("*") if path.is_file()] == []


def test_a_fit_that_ends_early_is_measured_as_far_as_it_came(report_path: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path / "out", ParcaeStrategy(device_memory=2.0), max_steps=2)
    report = told(report_path)
    assert report.reached == "steps" and report.num_steps == 0
    assert report.profile is not None and report.profile.memory_bytes == 2 * (1 << 30)
    assert report.profile.step_s == {} and report.profile.layers[0].forward_s > 0


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Fails(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise ZeroDivisionError("the user's own")


def test_a_refusal_is_told_and_a_users_error_is_none(report_path: Path, tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException):
        fit(tmp_path / "out", ParcaeStrategy(), Manual())
    assert "manual optimization" in (told(report_path).refusal or "")
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "out", ParcaeStrategy(), Fails())
    report = told(report_path)
    assert report.reached == "fit" and report.refusal is None


# --- the command ------------------------------------------------------------------------------------------------------


def script(folder: Path, body: str, *, tells: ScriptReport | None = None) -> Path:
    """Write a script without torch that tells what the strategy would."""
    path = folder / "train.py"
    head = "import os, sys, time, subprocess\n"
    if tells is not None:
        head += f"open(os.environ[{REPORT_VARIABLE!r}], 'w').write({tells.to_json()!r})\n"
    path.write_text(head + textwrap.dedent(body))
    return path


def measure(path: Path, *arguments: str, timeout_s: float = 20.0) -> ScriptReport:
    return profile_command.run_script(path, arguments, timeout_s=timeout_s, num_steps=7)


DONE = ScriptReport("steps", None, PROFILE, ("A", "B"))


@pytest.mark.parametrize(
    ("tells", "message"),
    [
        (None, "it made no ParcaeStrategy; use Trainer\\(strategy='parcae'\\)"),
        (ScriptReport("strategy"), "it made a ParcaeStrategy, but did not come to the set-up of fit"),
        (ScriptReport("fit"), "fit was set up, but no layer was measured"),
        (ScriptReport("fit", refusal="no such thing"), "cannot be trained as it is: no such thing"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line(tmp_path: Path, tells: ScriptReport | None, message: str) -> None:
    with pytest.raises(PlanError, match=message) as found:
        measure(script(tmp_path, "print('done')", tells=tells))
    assert len(str(found.value).splitlines()) == 1


def test_a_script_that_fails_shows_its_traceback(tmp_path: Path) -> None:
    body = """
    print("much", "to", "say")
    def step():
        raise RuntimeError("out of luck")
    step()
    """
    with pytest.raises(JobFailedError) as found:
        measure(script(tmp_path, body))
    lines = str(found.value).splitlines()
    assert "ended with exit code 1 before it made a Trainer with a ParcaeStrategy; it said last:" in lines[0]
    assert lines[1] == "Traceback (most recent call last):" and "much to say" not in lines
    assert lines[-1] == "RuntimeError: out of luck"
    assert found.value.exit_code == 1


def test_what_ends_early_is_told_first_and_no_advice_is_given_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(JobFailedError) as found:
        measure(script(tmp_path, "sys.exit(3)"))
    assert str(found.value).endswith(
        "ended with exit code 3 before it made a Trainer with a ParcaeStrategy; it said nothing"
    )
    with pytest.raises(JobFailedError, match="in its first steps; it said last:\nno"):
        measure(script(tmp_path, "sys.exit('no')", tells=ScriptReport("layers")))


def test_a_directory_is_no_script(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is a directory, not a script"):
        profile_command.run(parsed("-o", str(tmp_path / "p.json"), str(tmp_path)))
    with pytest.raises(PlanError, match="there is no script ''"):
        profile_command.run(parsed("-o", str(tmp_path / "p.json"), ""))


def test_a_script_is_not_written_over(tmp_path: Path) -> None:
    path = script(tmp_path, "")
    with pytest.raises(ValueError, match=r"-o .*train\.py would be written over an input"):
        profile_command.run(parsed("-o", str(path), str(path)))
    assert path.read_text().startswith("import os")


@pytest.mark.parametrize(
    ("address", "message"),
    [("nowhere", "must look like host:port"), ("127.0.0.1:1", "refused"), ("127.0.0.1:99999", "must look like")],
)
def test_a_link_that_cannot_be_measured_names_the_address(address: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"^--link {address}: .*{message}"):
        profile_command.measure_links([address], {})


@pytest.mark.parametrize("width", [80, 60])
def test_the_layers_are_readable_on_narrow_terminals(width: int) -> None:
    layer = LayerCost(12.345678, 34.567891, parameter_bytes=10**12, state_bytes=3 * 10**12, activation_bytes=10**12)
    profile = replace(PROFILE, layers=(layer,) * 2)
    stream = io.StringIO()
    done = ScriptReport("steps", None, profile, ("TransformerEncoderLayer", "Linear"))
    profile_command.show(Console(file=stream, width=width), done, "loopback")
    text = stream.getvalue()
    table = text.partition("link (")[0]
    assert "\u2026" not in text and "0 TransformerEncoderLayer" in table
    for figure in ("12345.678", "69135.782", "953674.316", "2861022.949"):
        assert figure in table.split()


def test_a_script_that_takes_too_long_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    body = f"""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
    time.sleep(100)
    """
    with pytest.raises(PlanError, match=r"was not measured within 2 s: it made a ParcaeStrategy.*Raise --timeout"):
        measure(script(tmp_path, body, tells=ScriptReport("strategy")), timeout_s=2.0)
    for pid in (tmp_path / "pids").read_text().split():
        deadline = time.monotonic() + 5.0
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split():
            assert time.monotonic() < deadline, f"{pid} still runs"
            time.sleep(0.02)


def test_a_measured_script_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_command, "_ENDING_S", 0.2)
    assert measure(script(tmp_path, "time.sleep(100)", tells=DONE)) == DONE


def test_a_script_gets_its_arguments_and_nothing_of_a_job_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARCAE_COORDINATOR", "127.0.0.1:1")
    body = f"""
    assert sys.argv[1:] == ["--lr", "0.1"], sys.argv
    assert "PARCAE_COORDINATOR" not in os.environ and os.environ[{STEPS_VARIABLE!r}] == "7"
    """
    assert measure(script(tmp_path, body, tells=DONE), "--lr", "0.1") == DONE


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"there is no script .*train\.py"):
        measure(tmp_path / "train.py")


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    profile_command.add_arguments(parser)
    return parser.parse_args(arguments)


CLI_SCRIPT = """
import torch
import lightning_parcae
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

class Data(BoringDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.random_train, batch_size=4)

if __name__ == "__main__":
    LightningCLI(Model, Data, save_config_callback=None)
    print("fit has returned")
"""


def test_a_lightning_cli_is_measured_into_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "cli.py", tmp_path / "profile.json"
    path.write_text(CLI_SCRIPT)
    root = str(Path(profile_command.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("COLUMNS", "120")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    trainer = ["--trainer.strategy=parcae", "--trainer.devices=4", "--trainer.accelerator=cpu"]
    options = parsed("-o", str(out), "--memory", "1.5", "--steps", "5", str(path), "fit", *trainer)
    assert profile_command.run(options) == 0
    profile = read_profile(out)
    assert isinstance(profile, ModelProfile) and len(profile.layers) == 3
    assert profile.name == "cli.py on cpu, link: loopback" and profile.memory_bytes == 1.5 * (1 << 30)
    assert profile.link_bytes_per_s not in (ModelProfile.link_bytes_per_s, 0)
    text = capsys.readouterr().out
    assert "0 Linear" in text and "1 ReLU" in text and "median of 5" in text
    assert "this says nothing about your network" in text and "an instance has 1.50 GiB" in text
    assert not [found for found in work.rglob("*") if found.is_file() and "lightning_logs" not in found.parts]


# --- the link ---------------------------------------------------------------------------------------------------------


def test_the_slowest_of_several_links_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    links = {"a:1": LinkSpeed(0.1, 5.0), "b:2": LinkSpeed(0.2, 9.0)}
    asked = []

    def measure_link(address: str, secret: bytes) -> LinkSpeed:
        asked.append((address, secret))
        return links[address]

    monkeypatch.setattr(profile_command, "measure_link", measure_link)
    secret = "0123456789abcdef"
    assert profile_command.measure_links(["a:1", "b:2"], {"PARCAE_SECRET": secret}) == (LinkSpeed(0.2, 5.0), "a:1, b:2")
    assert asked == [("a:1", secret.encode()), ("b:2", secret.encode())]


def test_a_served_link_is_measured_with_the_jobs_secret() -> None:
    secret = "0123456789abcdef"
    server = LinkServer("127.0.0.1:0", secret.encode())
    try:
        link, where = profile_command.measure_links([server.address], {"PARCAE_SECRET": secret})
    finally:
        server.close()
    assert where == server.address and link.bytes_per_s > 1e6


def test_the_profile_says_where_its_link_was_measured() -> None:
    profile = profile_command.complete(DONE, LINK, where="10.0.0.2:7000", memory_gib=None)
    assert profile.name == "toy on cpu, link: 10.0.0.2:7000"
    assert (profile.link_latency_s, profile.link_bytes_per_s, profile.memory_bytes) == (1e-4, 1e9, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "what shall be measured"),
        (("--serve-link", "127.0.0.1:0", "train.py"), "leave the script out"),
        (("--serve-link", "0.0.0.0:0"), "without a job secret"),
        (("-o", "/nowhere/there/p.json", "train.py"), "there is no directory /nowhere/there"),
    ],
)
def test_wrong_usage_is_said(arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PARCAE_SECRET", "PARCAE_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=message):
        profile_command.run(parsed(*arguments))
