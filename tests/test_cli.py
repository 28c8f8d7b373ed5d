"""The command line: what it accepts, what it refuses in one line, and that it finds a running job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_parcae.cli import main
from lightning_parcae.job_files import run_dir_lock

_STUB = str(Path(__file__).parent / "data" / "stub_instance.py")
_SCRIPT = """\
import sys
from pathlib import Path
import lightning_parcae, neighbour
assert "torch" not in sys.modules
print(__name__, sys.argv, Path(sys.path[0]).name, neighbour.WORD)
"""


def _parcae(*words: str, timeout_s: float = 30.0, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_parcae", *words]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PARCAE_")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env={**plain, **environ}, check=False
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "what shall run? Give a script"),
        (["run", "missing.py"], "there is no script missing.py"),
        (["run", "-n", "0", "x.py"], "wanted a whole number of at least 1, got '0'"),
        (["run", "--faults", "missing.yaml", __file__], "No such file"),
        (["run", "--trace", __file__, __file__], "is no time"),
        (["report", "."], "holds no timeline.jsonl"),
        (["status", "--run-dir", "."], "no job runs in ."),
        (["status"], "which job?"),
        (["preempt", "--coordinator", "127.0.0.1:1", "--instance", "i1"], "onnection refused"),
        (["stop", "--coordinator", "nowhere"], "an address must look like host:port"),
        (["coordinator", "--bind", "0.0.0.0:0", "--job-id", "j"], "refusing to listen on 0.0.0.0 without a job secret"),
        (["train"], "invalid choice: 'train'"),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PARCAE_COORDINATOR", "PARCAE_SECRET_FILE", "PARCAE_SECRET"):
        monkeypatch.delenv(name, raising=False)
    try:
        code: object = main(words)
    except SystemExit as ended:  # argparse
        code = ended.code
    error = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert message in error[-1]
    assert len([line for line in error if not line.startswith(("usage", " "))]) == 1


def test_help_and_version() -> None:
    done = _parcae("--help")
    assert done.returncode == 0
    for command in ("run", "coordinator", "status", "preempt", "stop", "report", "demo", "doctor"):
        assert f"\n    {command}" in done.stdout
    assert "exit codes: 0 finished" in done.stdout
    assert _parcae("--version").stdout.startswith("lightning-parcae ")


@pytest.mark.parametrize("as_module", [False, True])
def test_scripts_run_as_they_would_without_us(tmp_path: Path, as_module: bool) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    (tmp_path / "neighbour.py").write_text("WORD = 'found'\n")
    what = ["-m", "train"] if as_module else ["train.py"]
    command = [
        sys.executable,
        "-m",
        "lightning_parcae",
        "run",
        "-n",
        "1",
        "--run-dir",
        "r",
        *what,
        "--lr",
        "1",
        "-n",
        "2",
    ]
    here = Path(__file__).parent.parent
    environ = {**os.environ, "PYTHONPATH": str(here)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=tmp_path, env=environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    name = str(tmp_path / "train.py") if as_module else "train.py"
    assert f"__main__ {[name, '--lr', '1', '-n', '2']} {tmp_path.name} found" in done.stdout


def test_commands_reach_a_running_job(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    faults = tmp_path / "faults.yaml"
    faults.write_text("[{add: 1, at_s: 0.1}]")
    words = [
        "run",
        "-n",
        "2",
        "--run-dir",
        str(run_dir),
        "--job-id",
        "j",
        "--faults",
        str(faults),
        _STUB,
        "train",
        "3000",
    ]
    with subprocess.Popen([sys.executable, "-m", "lightning_parcae", *words], stdout=subprocess.PIPE, text=True) as job:
        try:
            deadline = time.monotonic() + 20.0
            while True:
                status = _parcae("status", "--run-dir", str(run_dir), "--json")
                known = json.loads(status.stdout) if status.returncode == 0 else {"instances": {}, "phase": ""}
                if len(known["instances"]) == 3 and known["phase"] == "running" and known["config"] == [1, 2]:
                    break
                assert time.monotonic() < deadline, status
            assert "rank 0" in _parcae("status", "--run-dir", str(run_dir)).stdout
            refused = _parcae("preempt", "--run-dir", str(run_dir), "--instance", "i9")
            assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
            assert "no instance is named 'i9'" in refused.stderr
            assert _parcae("preempt", "--run-dir", str(run_dir), "--instance", "i0").returncode == 0
            assert _parcae("stop", "--run-dir", str(run_dir)).returncode == 0
            shown, _ = job.communicate(timeout=20)
        finally:
            job.kill()
    assert job.returncode == 0
    assert "i0 has notice: 30 s" in shown
    report = _parcae("report", str(run_dir), "--json")
    assert {"start", "notice"} <= {item["cause"] for item in json.loads(report.stdout)["generations"]}
    assert "layouts over time" in _parcae("report", str(run_dir)).stdout


def test_a_coordinator_in_the_foreground(tmp_path: Path) -> None:
    words = ["coordinator", "--job-id", "j", "--run-dir", str(tmp_path), "--expected", "1"]
    command = [sys.executable, "-m", "lightning_parcae", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as service:
        try:
            assert service.stdout is not None
            lines = [service.stdout.readline() for _ in range(3)]
            variables = dict(word.split("=") for line in lines[1:] for word in line.removeprefix("export ").split())
            assert variables["PARCAE_JOB_ID"] == "j"
            assert os.stat(variables["PARCAE_SECRET_FILE"]).st_mode & 0o777 == 0o600
            environ = {**os.environ, **variables, "PARCAE_INSTANCE": "i0", "PARCAE_RUN_DIR": str(tmp_path)}
            subprocess.run([sys.executable, _STUB, "train", "5"], env=environ, timeout=20, check=True)
            assert service.wait(10) == 0
        finally:
            service.kill()
    assert not (tmp_path / "secret").exists()
    assert not (tmp_path / "job.json").exists()


def test_a_coordinator_keeps_out_of_a_run_directory_in_use(tmp_path: Path) -> None:
    with run_dir_lock(tmp_path):
        done = _parcae("coordinator", "--job-id", "j", "--run-dir", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "is used by another job" in done.stderr


def test_an_interrupted_coordinator_cleans_up(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_parcae", "coordinator", "--job-id", "j", "--run-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        service.stdout.readline()
        service.send_signal(signal.SIGINT)
        _, errors = service.communicate(timeout=10)
    assert "Traceback" not in errors
    assert not (tmp_path / "secret").exists()


def test_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_parcae import doctor

    monkeypatch.setattr(doctor, "_run", lambda code: "ImportError: no" if "torchgpipe" in code else None)
    assert doctor.check_torchgpipe().fix == "pip install 'torchgpipe>=0.0.7'"
    assert doctor.check_gloo().fix is None
    assert doctor.check_loopback().fix is None
    monkeypatch.setattr(doctor, "_version", lambda package: "2.6.3")
    assert "malicious" in doctor.check_lightning().found
    secret = tmp_path / "secret"
    secret.write_text("x" * 32)
    secret.chmod(0o644)
    monkeypatch.setenv("PARCAE_SECRET_FILE", str(secret))
    assert doctor.check_secret().fix == f"chmod 600 {secret}"
    assert doctor.check_machine(tmp_path / "new") == 1
