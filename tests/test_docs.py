"""The documents agree with the repository: links, commands, code, module list."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
CODE_BLOCK = re.compile(r"^```(\w+)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MODULES = sorted(path for path in (ROOT / "lightning_parcae").rglob("*.py") if path.name != "__init__.py")


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a document."""
    text = CODE_BLOCK.sub("", document.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_relative_links_resolve(document: Path) -> None:
    broken = []
    for link in LINK.findall(CODE_BLOCK.sub("", document.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_python_blocks_compile(document: Path) -> None:
    for number, (language, code) in enumerate(CODE_BLOCK.findall(document.read_text())):
        if language == "python":
            compile(code, f"{name_of(document)}, block {number}", "exec")


def test_readme_and_ci_hold_the_same_test_command() -> None:
    (command,) = re.findall(r"^tests='(.*)'$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    # a quote inside a quoted word of the shell
    command = command.replace("'\\''", "'")
    assert command in (ROOT / "README.md").read_text().splitlines()


def test_readme_commands_make_their_own_environment_from_the_pinned_set() -> None:
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("python3 -m venv")]
    assert len(lines) == 2
    for line, last in zip(lines, ["parcae demo", "pytest"], strict=True):
        environment = line.split()[3]
        assert f"{environment}/bin/pip install -q -c constraints.txt -e" in line
        assert line.endswith(f"{environment}/bin/{last}")


def test_every_module_has_its_line_in_the_architecture_page() -> None:
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    found = {str(path.relative_to(ROOT / "lightning_parcae")) for path in MODULES}
    assert len(listed) == len(set(listed))
    assert found - set(listed) == set(), "modules without a line"
    assert set(listed) - found == set(), "lines without a module"


@pytest.mark.parametrize("module", [path for path in MODULES if ">>> " in path.read_text()], ids=name_of)
def test_examples_in_docstrings_run(module: Path) -> None:
    name = ".".join(module.relative_to(ROOT).with_suffix("").parts)
    assert doctest.testmod(importlib.import_module(name)).failed == 0
