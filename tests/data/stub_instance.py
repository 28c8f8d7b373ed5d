"""An instance without torch: it speaks the coordinator's protocol and counts steps instead of training.

stub_instance.py train STEPS     count 20 ms steps from the first generation on, then end
stub_instance.py fail STEPS      rank 0 raises half-way
stub_instance.py crash           exit before connecting
stub_instance.py crash-i1 STEPS  as train, but i1 exits before connecting
stub_instance.py checkpoint STEPS  as train, and say that a checkpoint of step 7 was written
stub_instance.py nofit           end without connecting
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path

from lightning_parcae.control.agent import Agent
from lightning_parcae.control.messages import (
    Ack,
    Commit,
    Event,
    Failed,
    Finished,
    Formed,
    JobSpec,
    Notice,
    Progress,
    Ready,
)
from lightning_parcae.control.transport import load_secret
from lightning_parcae.errors import FencedError, JobFailedError

STEP_S = 0.02
NAME = os.environ.get("PARCAE_INSTANCE", "?")
SPEC = JobSpec(
    num_layers=4,
    layer_bytes=[1000] * 4,
    table=[None, (1, 1), (1, 2), (1, 2), (2, 2)],
    boundaries={1: [0, 4], 2: [0, 2, 4]},
    fingerprint="stub",
    max_step_failures=100,
    has_fallback=True,
)


class Stub:
    """Forms generations with the others; its clock counts them."""

    def __init__(self, mode: str, steps: int) -> None:
        self.mode, self.steps = mode, steps
        self.agent = Agent(
            os.environ["PARCAE_COORDINATOR"],
            load_secret(os.environ),
            os.environ["PARCAE_JOB_ID"],
            NAME,
            float(os.environ.get("STUB_FAILURE_TIMEOUT", "20")),
            versions={"stub": "1"},
        )
        self.clock = 0
        self.generation = 0
        self.layers: list[int] = list(range(4))
        self.is_rank0 = False
        self.started_path = Path(os.environ["PARCAE_RUN_DIR"]) / "started"

    @property
    def step(self) -> int:
        """Steps since the first generation, the same on every instance."""
        if not self.started_path.exists() or not self.started_path.read_text():
            return 0
        return int((time.time() - float(self.started_path.read_text())) / STEP_S)

    def run(self) -> None:
        """Take part until the end."""
        self.agent.connect(10.0)
        signal.signal(signal.SIGTERM, lambda number, frame: self.agent.send(Notice(None)))
        self.agent.send(Ready(SPEC, "127.0.0.1:1", "127.0.0.1:1"))
        while True:
            self.agent.raise_if_over()
            if self.agent.released is not None:
                break
            if self.agent.job_finished is not None:
                break
            prepare = self.agent.newest_prepare
            if prepare is not None and prepare.generation > self.generation:
                self.change(prepare.generation)
            elif self.layers_in_use and self.is_over():
                self.agent.send(Finished())
                self.agent.wait(lambda agent: agent.job_finished or agent.released, 5.0)
                break
            elif self.is_rank0:
                self.progress()
            time.sleep(STEP_S / 2)
        self.agent.close(goodbye=True)
        print(f"{NAME} after fit")

    layers_in_use = False

    def is_over(self) -> bool:
        """Whether fit is over."""
        stop = self.agent.stop_request
        stops = stop is not None and stop.graceful and self.mode != "stubborn"
        return self.step >= self.steps or stops

    def change(self, generation: int) -> None:
        """Stop, and form a generation."""
        self.agent.send(Ack(generation, self.clock, f"vote {self.clock}", self.layers, True))

        def news(agent: Agent) -> Commit | int | None:
            if agent.prepare_seen > generation:
                return agent.prepare_seen
            return agent.commit_of(generation) or (-1 if agent.released or agent.job_finished else None)

        commit = self.agent.wait(news, 60.0)
        self.generation = generation
        if not isinstance(commit, Commit) or commit.layout is None or NAME not in commit.layout.order:
            self.layers_in_use = self.is_rank0 = False
            return
        self.clock = commit.clock + 1
        self.layers = list(commit.layout.layers_of(NAME))
        self.layers_in_use = True
        self.is_rank0 = commit.layout.order[0] == NAME
        if self.is_rank0 and not self.started_path.exists():
            self.started_path.write_text(repr(time.time()))
        self.agent.clock = self.clock
        self.agent.send(Formed(generation, 0.01, 0))
        if self.mode == "checkpoint":
            self.agent.send(Event("checkpoint", {"identifier": "c", "step": 7, "reason": "interval"}))
        print(f"{NAME} in generation {generation}")

    def progress(self) -> None:
        """Report a step, and draw a bar."""
        step = self.step
        self.agent.send(Progress(step, 0, step, self.clock))
        sys.stdout.write(f"\r{NAME} step {step} ")
        if self.mode == "fail" and step >= self.steps // 2:
            raise ValueError(f"the stub fails at step {step}")


def main() -> None:
    """Run in the mode that the command line names."""
    mode, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    print(f"{NAME} starts with {len(sys.argv)} words")
    if mode == "crash" or mode == f"crash-{NAME}":
        raise RuntimeError("the stub crashes")
    if mode == "nofit":
        return
    stub = Stub(mode, steps)
    try:
        stub.run()
    except FencedError:
        sys.exit(5)
    except JobFailedError:
        sys.exit(1)
    except ValueError as error:
        stub.agent.send(Failed(stub.step, repr(error), traceback.format_exc()))
        stub.agent.close(goodbye=False)
        raise


if __name__ == "__main__":
    main()
