"""Lines with the time, from every process of a benchmark; imports nothing that takes long."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def stamp(out: str, event: str, **fields: Any) -> None:
    line = json.dumps({"time": time.time(), "event": event, "pid": os.getpid(), **fields})
    with open(f"{out}/stamps-{os.getpid()}.jsonl", "a") as file:
        file.write(line + "\n")


def read_stamps(out: Path) -> list[dict[str, Any]]:
    """Return every stamp, by time; a line that is half written is left out."""
    found = []
    for path in out.glob("stamps-*.jsonl"):
        found += [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return sorted(found, key=lambda item: item["time"])
