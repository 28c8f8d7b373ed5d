"""The one model that all benchmarks train, and the contestants that train it.

Each contestant runs in processes of its own. A :class:`Gate` lets it work for a few steps and then wait for its next
turn, so that contestants take turns on the same machine within seconds: what else runs there hits all of them.
"""

from __future__ import annotations

import json
import os
import resource
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.benchmarks.stamps import stamp


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Random sequences of vectors; a sample depends on its index only."""

    def __init__(self, length: int, tokens: int, width: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self._length = length
        self._inputs = torch.randn(64, tokens, width, generator=generator)
        self._targets = torch.randn(64, tokens, width, generator=generator)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index % 64], self._targets[index % 64]


def make_layers(num_layers: int, width: int) -> list[nn.Module]:
    """Equal transformer layers without dropout: stages are balanced, and every contestant computes the same numbers."""
    torch.manual_seed(11)
    return [
        nn.TransformerEncoderLayer(width, 8, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(num_layers)
    ]


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


class Encoder(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return squared_error(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters())


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    # Adam would blow up the last bits of tiny gradients: parameters could not be compared
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Gate:
    """Lets a process work for ``steps`` steps at a time; keeps when each began."""

    def __init__(self, go: Any, done: Any, steps: int) -> None:
        self._go, self._done, self._steps = go, done, steps
        self._count = 0
        self.turns: list[list[float]] = []
        self.usage: list[list[float]] = []  # of each turn: user and system seconds, page faults

    def step_begins(self) -> None:
        if self._count % self._steps == 0:
            if self._count:
                self.turns[-1].append(time.perf_counter())
                self.usage[-1] = [after - before for before, after in zip(self.usage[-1], _usage(), strict=True)]
                self._done.release()
            self._go.acquire()
            self.turns.append([])
            self.usage.append(_usage())
        self.turns[-1].append(time.perf_counter())
        self._count += 1

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"turns": self.turns[:-1], "usage": self.usage[:-1]}))


def _usage() -> list[float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return [usage.ru_utime, usage.ru_stime, float(usage.ru_minflt)]


class GateCallback(Callback):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def on_train_batch_start(self, *_: Any) -> None:
        self._gate.step_begins()


def _begin() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def _trainer(shape: dict[str, int], gate: Gate, out: str, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        max_steps=shape["steps"],
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
        callbacks=[GateCallback(gate), *options.pop("callbacks", [])],
        **options,
    )


def _loader(shape: dict[str, int], rank: int = 0, world: int = 1) -> DataLoader[Any]:
    dataset = Sequences(shape["batch"] * (shape["steps"] + 1), shape["tokens"], shape["width"])
    sampler = DistributedSampler(dataset, world, rank, shuffle=False) if world > 1 else None
    return DataLoader(dataset, batch_size=shape["batch"] // world, sampler=sampler)


def _finish(out: str, name: str, rank: int, gate: Gate, state: dict[str, Tensor] | None) -> None:
    gate.write(Path(out) / f"steps-{name}-{rank}.json")
    if state is not None:
        torch.save(state, Path(out) / f"state-{name}-{rank}.pt")


def run_parcae(
    name: str, out: str, gate: tuple[Any, Any, int], shape: dict[str, int], strategy: dict[str, Any]
) -> None:
    """One instance of ours."""
    from lightning_parcae import ParcaeStrategy

    _begin()
    turn = Gate(*gate)
    module = Encoder(nn.Sequential(*make_layers(shape["layers"], shape["width"])))
    trainer = _trainer(shape, turn, out, strategy=ParcaeStrategy(**strategy), devices=1)
    trainer.fit(module, _loader(shape))
    _finish(out, "parcae", int(name[1:]), turn, module.net.state_dict())


def run_ddp(rank: int, world: int, port: int, out: str, gate: tuple[Any, Any, int], shape: dict[str, int]) -> None:
    """One rank of Lightning's ``strategy="ddp"``, which runs one forward pass for each rank's part of the batch."""
    _begin()
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    turn = Gate(*gate)
    module = Encoder(nn.Sequential(*make_layers(shape["layers"], shape["width"])))
    # Lightning's own sampler would shuffle: with this one both contestants see the same global batches
    trainer = _trainer(shape, turn, out, strategy="ddp", devices=world, use_distributed_sampler=False)
    trainer.fit(module, _loader(shape, rank, world))
    _finish(out, "ddp", rank, turn, module.net.state_dict())


def run_gpipe(out: str, gate: tuple[Any, Any, int], shape: dict[str, int]) -> None:
    """The one process of plain torchgpipe: two partitions on the CPU, in plain Lightning."""
    from torchgpipe import GPipe

    _begin()
    turn = Gate(*gate)
    layers = make_layers(shape["layers"], shape["width"])
    half = len(layers) // 2
    net = GPipe(
        nn.Sequential(*layers),
        balance=[half, len(layers) - half],
        devices=["cpu", "cpu"],
        chunks=shape["micro_batches"],
        checkpoint="never",
    )
    module = Encoder(net)
    _trainer(shape, turn, out, devices=1).fit(module, _loader(shape))
    _finish(out, "gpipe", 0, turn, {str(i): v for i, v in enumerate(net.state_dict().values())})


def run_pipelining(rank: int, port: int, out: str, gate: tuple[Any, Any, int], shape: dict[str, int]) -> None:
    """One of two stages of torch.distributed.pipelining's GPipe schedule, in a bare loop without Lightning."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    _begin()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    turn = Gate(*gate)
    layers = make_layers(shape["layers"], shape["width"])
    half = len(layers) // 2
    stage_module = nn.Sequential(*(layers[half:] if rank else layers[:half]))
    stage = PipelineStage(stage_module, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=shape["micro_batches"], loss_fn=squared_error)
    optimizer = make_optimizer(stage_module.parameters())
    loader = _loader(shape)
    for step, (inputs, targets) in enumerate(loader):
        if step == shape["steps"]:
            break
        turn.step_begins()
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        optimizer.step()
    first = sum(len(layer.state_dict()) for layer in layers[:half]) if rank else 0
    _finish(
        out, "pipelining", rank, turn, {str(first + i): v for i, v in enumerate(stage_module.state_dict().values())}
    )
    dist.destroy_process_group()


class StampCallback(Callback):
    """Notes when each step was completed."""

    def __init__(self, out: str) -> None:
        self._out = out

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        stamp(self._out, "step", step=trainer.global_step, rank=trainer.global_rank)


def _stamping_trainer(shape: dict[str, int], out: str, callbacks: list[Callback], **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        max_steps=shape["steps"],
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
        callbacks=[*callbacks, StampCallback(out)],
        **options,
    )


def run_elastic_parcae(name: str, out: str, shape: dict[str, int], strategy: dict[str, Any]) -> None:
    """One instance of ours in a job that loses some."""
    from lightning_parcae import ParcaeStrategy

    _begin()
    module = Encoder(nn.Sequential(*make_layers(shape["layers"], shape["width"])))
    trainer = _stamping_trainer(
        shape, out, [], strategy=ParcaeStrategy(**strategy), devices=1, enable_checkpointing=False
    )
    trainer.fit(module, _loader(shape))


def run_elastic_ddp(out: str, shape_text: str, checkpoint_every: str) -> None:
    """One worker of torchrun: DDP over all that are there, from the last checkpoint if there is one."""
    _begin()
    shape = json.loads(shape_text)
    world = int(os.environ["WORLD_SIZE"])
    module = Encoder(nn.Sequential(*make_layers(shape["layers"], shape["width"])))
    checkpoints = ModelCheckpoint(f"{out}/checkpoints", every_n_train_steps=int(checkpoint_every), save_last=True)
    trainer = _stamping_trainer(
        shape, out, [checkpoints], strategy="ddp", devices=1, num_nodes=world, use_distributed_sampler=False
    )
    trainer.fit(module, _loader(shape, int(os.environ["RANK"]), world), ckpt_path="last")
