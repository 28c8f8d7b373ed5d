"""Outputs are checked before the work: what cannot be written is said with its option, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_parcae.simulation.outputs import check_outputs


def test_what_can_be_written_passes_and_is_not_touched(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("kept")
    check_outputs([("--json", old), ("--plot", tmp_path / "new.png")], inputs=["aws-p3", tmp_path / "in.csv"])
    assert old.read_text() == "kept" and [path.name for path in tmp_path.iterdir()] == ["old.json"]


def test_an_input_is_found_under_another_name(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("4\n")
    (tmp_path / "link.csv").symlink_to(trace)
    with pytest.raises(ValueError, match=r"--json .*link.csv would be written over an input"):
        check_outputs([("--json", tmp_path / "link.csv")], inputs=[trace])
    with pytest.raises(ValueError, match=r"--json and --plot would both be written"):
        check_outputs([("--json", tmp_path / "a"), ("--plot", tmp_path / "x" / ".." / "a")])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "it is a directory"),
        ("nowhere/a.json", "there is no directory .*nowhere"),
        ("file/a.json", "there is no directory .*file"),
        ("x" * 300, "File name too long"),
    ],
)
def test_what_cannot_be_written_is_said(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=f"^--json .* cannot be written: {message}"):
        check_outputs([("--json", tmp_path / name)])
