"""What an import loads, seen from fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ["torch", "lightning", "pytorch_lightning", "pmdarima", "sklearn", "pandas", "matplotlib"]


def start(code: str) -> subprocess.Popen[str]:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def outcome(process: subprocess.Popen[str]) -> str:
    """Return what the process printed; it must have ended well."""
    try:
        output, _ = process.communicate(timeout=110)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    return output.strip()


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, lightning_parcae; print([name for name in {HEAVY} if name in sys.modules])"
    assert outcome(start(code)) == "[]"


def test_pure_packages_and_the_control_plane_load_without_torch() -> None:
    code = f"""
import importlib, pkgutil, sys
packages = ["planning", "availability", "sharding", "control", "notices"]
count = 0
for package in packages:
    found = importlib.import_module(f"lightning_parcae.{{package}}")
    for module in pkgutil.walk_packages(found.__path__, found.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            count += 1
assert count >= 8, f"only {{count}} modules found"
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert outcome(start(code)) == "[]"


@pytest.mark.timeout(120)
def test_both_import_orders_make_the_strategy_known() -> None:
    check = """
from lightning.pytorch.strategies import StrategyRegistry
print("parcae" in StrategyRegistry)
"""
    # both at once: each loads torch and Lightning, which takes seconds
    ours_first = start("import lightning_parcae\nimport lightning.pytorch" + check)
    lightning_first = start("import lightning.pytorch\nimport lightning_parcae" + check)
    try:
        assert outcome(ours_first) == "True"
    finally:
        assert outcome(lightning_first) == "True"


def test_public_names_are_listed_before_they_are_loaded() -> None:
    code = """
import sys, lightning_parcae
assert {"ParcaeStrategy", "ParcaeCallback"} <= set(dir(lightning_parcae)), dir(lightning_parcae)
try:
    lightning_parcae.no_such_name
except AttributeError as error:
    print(error, "torch" in sys.modules)
"""
    assert outcome(start(code)) == "module 'lightning_parcae' has no attribute 'no_such_name' False"
