"""The stage engine: one result for every number of stages, split over devices and recompute mode."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchgpipe.checkpoint
import torchgpipe.phony
import torchgpipe.pipeline
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_parcae.engine.channel import InProcessChannel
from lightning_parcae.engine.pipeline import StagePipeline

MODES = ("never", "except_last", "always")
SIZES = (4, 4, 4, 3)


@pytest.fixture(autouse=True)
def _stages_in_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Stages are threads here and share the generator of the process. torchgpipe sets it on recomputation, in the middle
    # of what another "instance" draws; our own seeding makes that unnecessary.
    def drop(device: object, states: Any) -> contextlib.AbstractContextManager[None]:
        states.pop()
        return contextlib.nullcontext()

    monkeypatch.setattr(torchgpipe.checkpoint, "restore_rng_states", drop)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Stages:
    """A model cut into stages that run as threads, ``boundaries`` as evenly as possible."""

    def __init__(
        self,
        model: nn.Sequential,
        num_stages: int,
        recompute: Any = "never",
        devices: Sequence[str] = ("cpu",),
        deferred_batch_norm: bool = False,
    ) -> None:
        count = len(model)
        self.model = model
        self.channels = InProcessChannel.connect(num_stages)
        self.stages = []
        for stage in range(num_stages):
            held = range(count * stage // num_stages, count * (stage + 1) // num_stages)
            self.stages.append(
                StagePipeline(
                    [model[i] for i in held],
                    held,
                    devices=devices,
                    is_first=stage == 0,
                    is_last=stage == num_stages - 1,
                    channel=None if num_stages == 1 else self.channels[stage],
                    recompute=recompute,
                    deferred_batch_norm=deferred_batch_norm,
                )
            )

    def step(
        self,
        inputs: Any,
        loss: Callable[[Any], Tensor] | None,
        sizes: Sequence[int] = SIZES,
        key: tuple[int, ...] = (7, 0),
        context: Callable[[], Any] = contextlib.nullcontext,
        indices: Sequence[int] | None = None,
        **options: Any,
    ) -> Any:
        """Run forward and, with a loss, backward; return the output of the last stage."""
        errors: list[BaseException] = []
        result: list[Any] = []
        last = len(self.stages) - 1

        def work(stage: int) -> None:
            try:
                with context():
                    output = self.stages[stage].forward(
                        inputs if stage == 0 else None, sizes, indices or range(len(sizes)), key, **options
                    )
                if stage == last:
                    result.append(output)
                if loss is not None:
                    (loss(output) if stage == last else output.sum()).backward()
            except BaseException as error:
                errors.append(error)
                for channel in self.channels:
                    channel.abort()

        threads = [threading.Thread(target=work, args=(stage,)) for stage in range(last + 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        if errors:
            raise errors[0]
        return result[0]

    def gradients(self) -> list[Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]


def assert_same(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(a, b)


def convolutional(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.Dropout(0.3),
        nn.ReLU(inplace=True),  # starts a stage of 4
        nn.Linear(16, 16),
        nn.ReLU(inplace=True),  # starts a stage of 2 and of 4
        nn.BatchNorm1d(16),
        parametrizations.spectral_norm(nn.Linear(16, 16)),
        nn.Dropout(0.5),
        nn.Linear(16, 4),
    ).to(dtype)


def two_steps(
    num_stages: int, mode: str, dtype: torch.dtype, devices: Sequence[str], sizes: Sequence[int]
) -> list[Any]:
    stages = Stages(convolutional(dtype), num_stages, mode, devices)
    torch.manual_seed(1)
    inputs, targets = torch.randn(sum(sizes), 8, dtype=dtype), torch.randn(sum(sizes), 4, dtype=dtype)
    seen: list[Any] = []
    for step in range(2):
        stages.model.zero_grad()
        output = stages.step(inputs, lambda out: ((out - targets) ** 2).mean(), sizes, key=(7, step))
        seen += [output.detach(), *stages.gradients()]
    return seen + [buffer.clone() for buffer in stages.model.buffers()]


@pytest.fixture(scope="module")
def references() -> dict[tuple[torch.dtype, tuple[int, ...]], list[Any]]:
    return {}


@pytest.mark.parametrize("sizes", [SIZES, (2, 2, 2, 2, 2, 2), (2,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_outputs_gradients_and_buffers_are_bit_equal(
    num_stages: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    references: dict[tuple[torch.dtype, tuple[int, ...]], list[Any]],
) -> None:
    reference = references.setdefault((dtype, sizes), two_steps(1, "never", dtype, ["cpu"], sizes))
    for mode in MODES:
        for devices in (["cpu"], ["cpu", "cpu"]):
            assert_same(two_steps(num_stages, mode, dtype, devices, sizes), reference)


def test_one_stage_without_random_layers_equals_plain_torch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    inputs = torch.randn(15, 8, dtype=torch.float64)
    model(inputs).pow(2).mean().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    Stages(model, 1, "always").step(inputs, lambda out: out.pow(2).mean())
    for a, b in zip(plain, [p.grad for p in model.parameters()], strict=True):
        assert b is not None and torch.allclose(a, b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_of_one_sample(mode: str) -> None:
    def run(num_stages: int, recompute: str) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(4, 2))
        stages = Stages(model, num_stages, recompute)
        out = stages.step(torch.arange(20.0).view(5, 4), lambda o: o.pow(2).sum(), [1] * 5)
        return [out.detach(), *stages.gradients()]

    for num_stages in (1, 2, 4):
        assert_same(run(num_stages, mode), run(1, "never"))


class Tokens(nn.Module):
    """Token ids in; a tuple of hidden states, a padding mask, float weights without gradient and the ids out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        return ids, self.embed(ids), ids != 0, (ids != 0).float()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids, hidden, mask, weights = value
        hidden = F.dropout(torch.tanh(self.linear(hidden)), 0.2, self.training) * mask.unsqueeze(-1)
        if random.random() < 0.5:  # layer drop by Python's generator
            hidden = hidden * 2
        return ids, hidden + value[1], mask, weights


class Head(nn.Module):
    def forward(self, value: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        ids, hidden, mask, weights = value
        return (hidden * weights.unsqueeze(-1)).sum(1), ids, mask


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]], ids=len)
def test_tuples_integers_and_masks_between_stages(mode: str, devices: list[str]) -> None:
    ids = torch.randint(0, 11, (15, 5), generator=torch.Generator().manual_seed(3))

    def run(num_stages: int, recompute: str, places: list[str]) -> list[Any]:
        torch.manual_seed(0)
        stages = Stages(nn.Sequential(Tokens(), Block(), Block(), Block(), Head()), num_stages, recompute, places)
        hidden, back, mask = stages.step(ids, lambda out: out[0].pow(2).mean())
        assert torch.equal(back, ids) and torch.equal(mask, ids != 0)
        return [hidden.detach(), *stages.gradients()]

    for num_stages in (1, 2, 3, 5):
        assert_same(run(num_stages, mode, devices), run(1, "never", ["cpu"]))


def test_ints_that_end_a_stage_alone() -> None:
    class Best(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(-1)

    model = nn.Sequential(nn.Linear(4, 4), Best())
    inputs = torch.randn(15, 4)
    with torch.no_grad():
        expected = model(inputs)
    for num_stages in (1, 2):
        with_grad = Stages(model, num_stages).step(inputs, None)
        without = Stages(model, num_stages).step(inputs, None, context=torch.no_grad)
        assert torch.equal(with_grad, expected) and torch.equal(without, expected)


def test_the_input_may_be_a_tuple() -> None:
    class Add(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0] + pair[1]

    torch.manual_seed(0)
    model = nn.Sequential(Add(), nn.Linear(4, 4))
    a, b = torch.randn(15, 4), torch.randn(15, 4)
    for num_stages in (1, 2):
        out = Stages(model, num_stages, "always").step((a, b), lambda out: out.sum())
        assert torch.allclose(out, model((a, b)))


def test_input_that_requires_grad_gets_its_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 1))
    for mode in MODES:
        inputs = torch.randn(15, 4, requires_grad=True)
        Stages(model, 1, mode).step(inputs, lambda out: out.sum())
        weight = model[1].weight.detach()
        assert inputs.grad is not None and torch.allclose(inputs.grad, (inputs > 0).float() * weight)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]], ids=len)
def test_evaluation_sends_no_gradients(context: Any, devices: list[str]) -> None:
    model = convolutional(torch.float32).eval()
    inputs = torch.randn(15, 8)
    with torch.no_grad():
        expected = model(inputs)
    for num_stages in (1, 2, 4):
        stages = Stages(model, num_stages, "always", devices)
        with context():
            output = stages.step(inputs.clone(), None, context=context, training=False)
        assert not output.requires_grad
        assert torch.allclose(output, expected, atol=1e-6)
        assert [c.gradients_sent for c in stages.channels] == [0] * num_stages


def test_validation_in_inference_mode_before_training_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchgpipe.phony, "_phonies", {})
    with torch.inference_mode():  # made by a first user in inference mode
        torchgpipe.phony.get_phony(torch.device("cpu"), requires_grad=False)
    stages = Stages(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), 2, "always")
    stages.step(torch.randn(15, 4), None, context=torch.inference_mode, training=False)
    stages.step(torch.randn(15, 4), lambda out: out.sum())
    assert all(gradient is not None for gradient in stages.gradients())


def test_autocast_reaches_the_workers() -> None:
    def bf16() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    seen: list[torch.dtype] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return x

    def run(num_stages: int, mode: str) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), Spy(), nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 2))
        stages = Stages(model, num_stages, mode)
        output = stages.step(torch.linspace(0, 1, 120).view(15, 8), lambda o: o.float().sum(), autocast=bf16)
        assert output.dtype == torch.bfloat16
        return [output.detach(), *stages.gradients()]

    reference = run(1, "never")
    for mode in MODES:
        for num_stages in (1, 2, 3):
            assert_same(run(num_stages, mode), reference)
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("mode", MODES)
def test_recomputation_adds_no_messages(mode: str) -> None:
    stages = Stages(convolutional(torch.float32), 3, mode)
    stages.step(torch.randn(15, 8), lambda out: out.sum())
    counts = [
        (c.activations_sent, c.activations_received, c.gradients_sent, c.gradients_received) for c in stages.channels
    ]
    assert counts == [(4, 0, 0, 4), (4, 4, 4, 4), (0, 4, 4, 0)]


class Counted(nn.Module):
    """A layer whose saved activations are counted while they are alive."""

    def __init__(self, live: weakref.WeakSet[Any], peaks: list[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._live = live
        self._peaks = peaks

    def forward(self, x: Tensor) -> Tensor:
        class Saved:
            def __init__(self, tensor: Tensor) -> None:
                self.tensor = tensor

        def pack(tensor: Tensor) -> Saved:
            saved = Saved(tensor)
            self._live.add(saved)
            self._peaks.append(len(self._live))
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            return torch.tanh(self.linear(x))


@pytest.mark.parametrize("first", ["floats", "token ids"])
def test_recomputation_keeps_the_activations_of_one_micro_batch(first: str) -> None:
    # With token ids torchgpipe alone loses its order: every micro-batch is recomputed before the first is used.
    peaks: dict[str, int] = {}
    for mode in MODES:
        live: weakref.WeakSet[Any] = weakref.WeakSet()
        seen: list[int] = []
        layers = [Counted(live, seen) for _ in range(4)]
        model = nn.Sequential(nn.Embedding(5, 4) if first == "token ids" else nn.Identity(), *layers)
        inputs = torch.ones(16, dtype=torch.long) if first == "token ids" else torch.randn(16, 4)
        Stages(model, 1, mode).step(inputs, lambda out: out.sum(), [2] * 8)
        peaks[mode] = max(seen)
        assert not live
    assert peaks["always"] * 8 == peaks["never"]
    assert peaks["except_last"] <= 2 * peaks["always"]


def test_torchgpipe_runs_the_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int]] = []
    run = torchgpipe.pipeline.Pipeline.run

    def spy(self: Any) -> None:
        calls.append((len(self.batches), len(self.partitions), self.checkpoint_stop))
        run(self)

    monkeypatch.setattr(torchgpipe.pipeline.Pipeline, "run", spy)
    Stages(convolutional(torch.float32), 1, "except_last", ["cpu", "cpu"]).step(torch.randn(15, 8), lambda o: o.sum())
    assert calls == [(4, 2, 3)]


def test_there_is_no_engine_without_torchgpipe() -> None:
    code = "import sys; sys.modules['torchgpipe'] = None\nimport lightning_parcae.engine.pipeline"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert result.returncode == 1
    assert "torchgpipe" in result.stderr


def test_what_a_layer_draws_depends_on_the_micro_batch_not_on_the_pipeline() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    ones = torch.ones(16, 32)
    whole = Stages(model, 1).step(ones, None, [4] * 4)
    second = Stages(model, 2).step(ones[8:], None, [4] * 2, indices=(2, 3))
    assert torch.equal(whole[8:], second)
    assert not torch.equal(whole[:4], whole[4:8])
    assert not torch.equal(whole, Stages(model, 1).step(ones, None, [4] * 4, key=(7, 1)))


def test_the_process_keeps_its_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # torchgpipe's own guard is part of this
    model = nn.Sequential(Block(), Block(), Head())
    inputs = (torch.ones(15, 2, dtype=torch.long), torch.ones(15, 2, 6), torch.ones(15, 2), torch.ones(15, 2))
    torch.manual_seed(5)
    random.seed(5)
    before, python_before = torch.get_rng_state(), random.getstate()
    Stages(model, 1, "always").step(inputs, lambda out: out[0].sum())
    assert torch.equal(before, torch.get_rng_state())
    assert python_before == random.getstate()


def test_layers_keep_their_parameters_and_gradients_of_frozen_layers_stay_none() -> None:
    model = convolutional(torch.float32)
    ids = [id(p) for p in model.parameters()]
    model[0].requires_grad_(False)
    for num_stages in (1, 4):
        stages = Stages(model, num_stages, "except_last")
        stages.step(torch.randn(15, 8), lambda out: out.sum())
        assert [id(p) for p in model.parameters()] == ids
        assert model[0].weight.grad is None and model[3].weight.grad is not None


def test_a_users_exception_arrives_with_its_type_and_the_stage_works_again() -> None:
    class Fails(nn.Module):
        broken = True

        def forward(self, x: Tensor) -> Tensor:
            if self.broken:
                raise ZeroDivisionError("mine")
            return x

    layer = Fails()
    stages = Stages(nn.Sequential(nn.Linear(4, 4), layer), 1, "always")
    with pytest.raises(ZeroDivisionError, match="mine"):
        stages.step(torch.randn(15, 4), None)
    layer.broken = False
    stages.step(torch.randn(15, 4), lambda out: out.sum())


def test_deferred_batch_norm_counts_each_batch_once() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(15, 3, 6)
    running = []
    for mode in MODES:
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(18, 1))
        keys = set(model.state_dict())
        stages = Stages(model, 1, mode, deferred_batch_norm=True)
        stages.step(inputs, lambda out: out.sum())
        assert set(model.state_dict()) == keys
        assert int(model[0].num_batches_tracked) == 1
        running.append(model[0].running_mean.clone())
        model.eval()
        mean = model[0].running_mean.clone()
        again = Stages(model, 1, mode, deferred_batch_norm=True)  # as after a reconfiguration
        for some in (stages, again):
            with torch.no_grad():
                output = some.step(inputs, None)
                assert torch.equal(mean, model[0].running_mean) and torch.allclose(output, model(inputs), atol=1e-6)
    expected = 0.1 * inputs.mean((0, 2))
    assert all(torch.allclose(mean, expected, atol=1e-6) for mean in running)


def test_refusals_say_what_is_wanted() -> None:
    with pytest.raises(ValueError, match="recompute must be"):
        StagePipeline([nn.ReLU()], range(1), recompute="sometimes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a channel"):
        StagePipeline([nn.ReLU()], range(1), is_last=False)
    with pytest.raises(ValueError, match="an index for each"):
        StagePipeline([nn.ReLU()], range(2))
    stage = StagePipeline([nn.Flatten(0)], range(1))
    with pytest.raises(ValueError, match="15 samples"):
        stage.forward(torch.zeros(14, 2), SIZES, range(4), (0,))
    with pytest.raises(ValueError, match="micro-batches"):
        stage.forward(torch.zeros(0, 2), [], [], (0,))
    with pytest.raises(TypeError, match="input must be"):
        stage.forward(("text",), [1], [0], (0,))  # type: ignore[arg-type]

    class Words(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": x}

    with pytest.raises(TypeError, match=r"layer 3 .* returned dict"):
        StagePipeline([Words()], range(3, 4)).forward(torch.zeros(1), [1], [0], (0,))

    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum()

    stage = StagePipeline([Loss()], range(1))
    with pytest.raises(TypeError, match="samples in front"):
        stage.forward(torch.zeros(1), [1], [0], (0,))
