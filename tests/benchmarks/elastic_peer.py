"""What torchrun runs in pause_vs_torchrun.py: Lightning DDP that resumes from the last checkpoint.

torchrun ... tests/benchmarks/elastic_peer.py OUT SHAPE CHECKPOINT_EVERY
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.stamps import stamp

if __name__ == "__main__":
    stamp(sys.argv[1], "process", rank=int(os.environ["RANK"]))
    from tests.benchmarks import workloads

    stamp(sys.argv[1], "imported", rank=int(os.environ["RANK"]))
    workloads.run_elastic_ddp(*sys.argv[1:])
