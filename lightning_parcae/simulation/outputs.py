"""What commands that write files check before they work.

What could not be written after minutes of work is refused with a ``ValueError`` of one line that names option and path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


def check_outputs(outputs: Sequence[tuple[str, Path]], inputs: Iterable[str | Path] = ()) -> None:
    """Check that files can be written, and that none is written over what is read or written besides.

    Nothing is left behind by it.

    Args:
        outputs: Option and path of each file.
        inputs: What is read; names that are no files do not count.

    Raises:
        ValueError: If one cannot be written, is an input, or is named twice.
    """
    read = {Path(one).resolve() for one in inputs if Path(one).is_file()}
    seen: dict[Path, str] = {}
    for option, path in outputs:
        what = path.resolve()
        if what in read:
            raise ValueError(f"{option} {path} would be written over an input; give another name")
        if what in seen:
            raise ValueError(f"{seen[what]} and {option} would both be written to {path}; give two names")
        seen[what] = option
        _check_writable(option, path)


def _check_writable(option: str, path: Path) -> None:
    parent = path.absolute().parent
    try:
        if path.is_dir():
            raise ValueError(f"{option} {path} cannot be written: it is a directory; name a file in it")
        if not parent.is_dir():
            raise ValueError(f"{option} {path} cannot be written: there is no directory {path.parent}")
        if not path.exists():
            with path.open("xb"):
                pass
            path.unlink()
        elif path.is_file():
            with path.open("ab"):
                pass
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}") from error
