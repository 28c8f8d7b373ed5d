"""`Trainer(strategy="parcae", devices=n)` in a user's script: the user's process supervises and returns the results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import sys, time, warnings
warnings.filterwarnings("ignore")
import lightning as L, lightning_parcae, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    def training_step(self, batch, batch_idx):
        time.sleep(0.05)
        if self.global_step == FAIL_AT:
            raise ZeroDivisionError("the user's own mistake")
        loss = ((self.net(batch[0]) - batch[1]) ** 2).mean()
        self.log("loss", loss)
        return loss
    def test_step(self, batch, batch_idx):
        self.log("test_loss", ((self.net(batch[0]) - batch[1]) ** 2).mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)

if __name__ == "__main__":
    x = torch.randn(320, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    trainer = L.Trainer(strategy="parcae", accelerator="cpu", devices=2, max_epochs=4, enable_progress_bar=False,
                        enable_model_summary=False, log_every_n_steps=5)
    net = Net()
    trainer.fit(net, DataLoader(data, batch_size=16, shuffle=True))
    result = trainer.test(net, DataLoader(data, batch_size=64), verbose=False)
    print("AFTER FIT", trainer.global_step, trainer.current_epoch, float(trainer.callback_metrics["test_loss"]))
"""


def _start(folder: Path, fail_at: int = -1) -> subprocess.Popen[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("FAIL_AT", str(fail_at)))
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(script)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _timeline(folder: Path, event: str) -> list[dict[str, object]]:
    paths = list(folder.glob("parcae_runs/*/timeline.jsonl"))
    lines = paths[0].read_text().splitlines() if paths else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [record for record in records if record["event"] == event]


@pytest.mark.timeout(180)
def test_a_killed_instance_does_not_end_the_users_script(tmp_path: Path) -> None:
    process = _start(tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not any(int(str(r["step"])) >= 10 for r in _timeline(tmp_path, "progress")):
            assert process.poll() is None, process.stdout and process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        victim = _timeline(tmp_path, "connected")[1]
        os.kill(int(str(victim["pid"])), signal.SIGKILL)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    after = [line for line in output.splitlines() if line.startswith("AFTER FIT")]
    assert len(after) == 1, output  # what follows fit runs in the user's process only
    _, _, steps, epochs, loss = after[0].split()
    assert (steps, epochs) == ("80", "4")
    assert float(loss) < 1.0
    assert [record["instance"] for record in _timeline(tmp_path, "died")] == [victim["instance"]]
    assert len(_timeline(tmp_path, "formed")) == 2


@pytest.mark.timeout(180)
def test_a_users_mistake_ends_the_job_with_its_traceback_once(tmp_path: Path) -> None:
    process = _start(tmp_path, fail_at=7)
    try:
        output, _ = process.communicate(timeout=150)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    assert output.count('raise ZeroDivisionError("the user') == 1, output  # the traceback's line
    assert "AFTER FIT" not in output


@pytest.mark.timeout(60)
def test_without_a_script_it_says_what_to_do(tmp_path: Path) -> None:
    code = SCRIPT.replace("FAIL_AT", "-1")
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert process.returncode != 0
    assert "Put the code into a file, or use devices=1" in process.stderr
