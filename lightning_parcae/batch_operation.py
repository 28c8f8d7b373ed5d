"""One batch as one operation: forward, backward, reduction and vote, done again as a whole if it breaks.

Where the user's code runs: the last stage of a pipeline runs the user's step on the pipeline's part of the batch; the
first stage runs it up to the call of the pipelined module; middle stages run none of it. The batch is read by the
first stage and travels to the last.

Numbers that do not depend on the layout: micro-batch borders, dropout (keyed by seed, step, micro-batch and layer),
the weights of the pipelines' losses, and the order in which gradient norms are summed.
"""

from __future__ import annotations

import inspect
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_parcae.data import ElasticLoader
from lightning_parcae.engine.batch_norms import Share, before_step, running_norms
from lightning_parcae.engine.batch_norms import combine as combine_statistics
from lightning_parcae.engine.channel import GroupChannel, recv_tree, send_tree
from lightning_parcae.engine.groups import Groups
from lightning_parcae.engine.partition import PipelinedSequential
from lightning_parcae.engine.pipeline import StagePipeline
from lightning_parcae.engine.session import Payload, Session, SoloSession
from lightning_parcae.engine.state import restore_buffers, snapshot_buffers
from lightning_parcae.errors import GenerationBrokenError
from lightning_parcae.logged_values import LogRecorder, combine
from lightning_parcae.metric_states import MetricStates
from lightning_parcae.planning.layout import Layout
from lightning_parcae.sharding.order import derive_seed
from lightning_parcae.testing import reach

log = logging.getLogger(__name__)

_BATCH_TAG = 1_000_003
"""Tag of the messages that carry a batch from the first stage to the last."""


class _StageDone(BaseException):
    """The user's step has reached the pipelined module on a stage that is not the last one."""


class _StageBroken(BaseException):
    """The pipeline broke below the user's step, whose ``except Exception`` must not take it for its own error."""

    def __init__(self, error: GenerationBrokenError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class BatchResult:
    """What a batch has produced, equal on every member but for the gradients.

    Attributes:
        loss: The loss over the global batch (training only).
        logs: Combined records of ``self.log``.
        extras: What the user's step returned beside the loss; on last stages only.
        gradients: Gradient to attach to each parameter held here, earlier batches of an accumulation included.
        norms: For each layer, the gradient norm of each parameter (None without gradient); if clipping was asked for.
    """

    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    logs: list[dict[str, Any]] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)
    gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    norms: dict[int, list[float | None]] = field(default_factory=dict)


@dataclass(slots=True)
class _Attempt:
    """What one attempt of this member has produced, to be kept if its vote completes."""

    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)


class BatchOperation:
    """Runs batches through the pipeline of the present generation.

    Args:
        module: The user's module.
        pipelined: Its pipelined part.
        seed: Seed of the job.
        devices: Local devices of this instance.
        recompute: See ``ParcaeStrategy``.
        batch_norm: See ``ParcaeStrategy``.
        loss_weight: See ``ParcaeStrategy``.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        pipelined: PipelinedSequential,
        *,
        seed: int,
        devices: Sequence[torch.device],
        recompute: str,
        batch_norm: str | None,
        loss_weight: Callable[[Any], float] | None,
    ) -> None:
        self._module = module
        self._pipelined = pipelined
        self._seed = seed
        self._devices = list(devices)
        self._recompute = recompute
        self._batch_norm = batch_norm
        self._loss_weight = loss_weight
        self._layout: Layout | None = None
        self._groups: Groups | None = None
        self._place: tuple[int, int] | None = None
        self._pipeline: StagePipeline | None = None
        self.metrics = MetricStates(module)

    # ------------------------------------------------------------------ generations

    def enter(self, layout: Layout, groups: Groups | None, name: str) -> None:
        """Build this instance's stage of a new generation."""
        self._layout, self._groups = layout, groups
        self._place = layout.place_of(name)
        self._pipeline = None
        if self._place is None:
            return
        _, stage = self._place
        held = layout.layers_of_stage(stage)
        layers = list(self._pipelined.children())
        last = layout.config.num_stages - 1
        group = None if groups is None else groups.pipeline
        self._pipeline = StagePipeline(
            [layers[index] for index in held],
            held,
            devices=self._devices,
            is_first=stage == 0,
            is_last=stage == last,
            channel=None if group is None else GroupChannel(group),
            recompute=self._recompute,
            deferred_batch_norm=self._batch_norm == "deferred",
        )

    def leave(self) -> None:
        """Let the module run by itself again."""
        self._pipelined.set_route(None)
        self._pipeline = None
        self._groups = None

    @property
    def _is_first(self) -> bool:
        return self._place is not None and self._place[1] == 0

    @property
    def _is_last(self) -> bool:
        return (
            self._place is not None
            and self._layout is not None
            and self._place[1] == self._layout.config.num_stages - 1
        )

    # ------------------------------------------------------------------ training

    def train(
        self,
        session: Session | SoloSession,
        batch: Any,
        loader: ElasticLoader,
        *,
        reread: Callable[[], Any],
        step_args: Sequence[Any],
        step_index: int,
        keep_gradients: bool,
        want_norms: bool,
    ) -> BatchResult:
        """Train on a global batch.

        Args:
            session: This instance's part in the job.
            batch: The part that was read here for the generation the batch was fetched in.
            loader: The loader it came from.
            reread: Reads the batch again, cut for the present generation.
            step_args: Further arguments of ``training_step``.
            step_index: Number of the batch since the start of the job; keys dropout.
            keep_gradients: Whether earlier gradients of an accumulation are added to.
            want_norms: Whether the gradients' norms are needed, for clipping.

        Returns:
            The result, equal on every member.
        """
        box = [batch]
        fetched_in = [session.generation]
        done = _Attempt()
        saved = self._save()

        def attempt() -> Payload:
            nonlocal done
            if fetched_in[0] != session.generation:
                box[0], fetched_in[0] = reread(), session.generation
            done = _Attempt()
            with _quiet_rng():
                return self._train_once(box[0], loader, done, step_args, step_index, keep_gradients, want_norms)

        payloads = session.run(attempt, lambda: self._restore(saved))
        return self._conclude_training(payloads, loader, done)

    def _train_once(
        self,
        batch: Any,
        loader: ElasticLoader,
        done: _Attempt,
        step_args: Sequence[Any],
        step_index: int,
        keep_gradients: bool,
        want_norms: bool,
    ) -> Payload:
        assert self._layout is not None
        payload: Payload = {"weight": 0.0}
        if self._place is None:
            return payload
        pipeline_index, _ = self._place
        num_pipelines = self._layout.config.num_pipelines
        plan = loader.current
        share = plan.share(num_pipelines, pipeline_index)
        parameters = self._trainable()
        norms = self._shared_norms()
        statistics = before_step(norms)
        earlier = {parameter: parameter.grad for parameter in parameters}
        for parameter in parameters:
            parameter.grad = None
        try:
            if share:
                sizes = [len(plan.microbatches[index]) for index in share]
                seed_everything_local(self._seed, step_index, share[0])
                self._forward_backward(
                    batch, sizes, share, (self._seed, step_index), plan.num_samples, step_args, payload, done
                )
            reach("reduction")
            fresh = self._reduce(parameters)
            if norms:
                assert self._groups is not None and self._groups.replicas is not None
                weight = sum(len(plan.microbatches[index]) for index in share) / plan.num_samples
                part = Share(share, len(plan.microbatches), weight)
                deferred = self._batch_norm == "deferred"
                combine_statistics(norms, statistics, part, self._groups.replicas, deferred=deferred)
        finally:
            for parameter in parameters:
                parameter.grad = earlier[parameter]
        for parameter, gradient in fresh:
            before = earlier[parameter] if keep_gradients else None
            done.gradients.append((parameter, gradient if before is None else before + gradient))
        if want_norms and pipeline_index == 0:
            payload["norms"] = self._norms(done)
        payload["pipeline"] = pipeline_index
        return payload

    def _forward_backward(
        self,
        batch: Any,
        sizes: list[int],
        share: range,
        key: tuple[int, int],
        num_samples: int,
        step_args: Sequence[Any],
        payload: Payload,
        done: _Attempt,
    ) -> None:
        pipeline = self._pipeline
        assert pipeline is not None
        reach("batch")
        batch = self._pass_batch(batch)
        reach("forward")
        with self._module.trainer.precision_plugin.train_step_context():
            output, records, driver = self._run_user_step(
                "training_step", batch, sizes, list(share), key, step_args, {}, training=True
            )
        reach("backward")
        if not self._is_last:
            assert driver is not None
            torch.autograd.backward(driver)
            return
        loss, done.extras = _split_output(output)
        weight = float(sum(sizes)) if self._loss_weight is None else float(self._loss_weight(batch))
        scaled = loss
        if self._loss_weight is not None:
            scaled = scaled * weight  # divided by the sum of all weights after the vote
        elif weight != num_samples:
            scaled = scaled * (weight / num_samples)
        accumulate = self._module.trainer.accumulate_grad_batches
        if accumulate > 1:
            scaled = scaled / accumulate
        self._module.trainer.precision_plugin.backward(scaled, self._module, None)
        payload.update(weight=weight, loss=float(loss.detach()), dtype=str(loss.dtype), logs=records)
        payload["metrics"] = self.metrics.take_changes()

    def _pass_batch(self, batch: Any) -> Any:
        """Bring the batch from the first stage to the last."""
        assert self._layout is not None
        if self._layout.config.num_stages == 1 or not (self._is_first or self._is_last):
            return batch
        assert self._groups is not None and self._groups.pipeline is not None
        group = self._groups.pipeline
        if self._is_first:
            send_tree(group, batch, group.size - 1, _BATCH_TAG)
            return batch
        received = recv_tree(group, 0, _BATCH_TAG)
        return _to_device(received, self._devices[-1])

    def _run_user_step(
        self,
        hook: str,
        batch: Any,
        sizes: list[int],
        indices: list[int],
        key: tuple[int, int],
        step_args: Sequence[Any],
        step_kwargs: Mapping[str, Any],
        *,
        training: bool,
    ) -> tuple[Any, list[dict[str, Any]], Tensor | None]:
        """Run the user's step, or the stage alone where the step does not run.

        Returns:
            What the step returned, its log records, and what drives backward where there is no loss.
        """
        pipeline = self._pipeline
        assert pipeline is not None
        forward = _PipelineCall(pipeline, sizes, indices, key, training)
        if not (self._is_first or self._is_last):
            return None, [], forward.run(None)
        recorder = LogRecorder(self.metrics.names)
        self.metrics.start()
        object.__setattr__(self._module, "log", recorder)
        self._pipelined.set_route(forward.route_last if self._is_last else forward.route_first)
        try:
            output = getattr(self._module, hook)(batch, *step_args, **step_kwargs)
        except _StageDone:
            return None, [], forward.output
        except _StageBroken as broken:
            raise broken.error from broken
        finally:
            self._pipelined.set_route(None)
            self._module.__dict__.pop("log", None)
        if forward.num_calls == 0:
            raise MisconfigurationException(
                f"{hook} did not call the pipelined module; call it once, with the whole batch"
            )
        return output, recorder.records, None

    def _trainable(self) -> list[nn.Parameter]:
        assert self._layout is not None and self._place is not None
        layers = list(self._pipelined.children())
        held = self._layout.layers_of_stage(self._place[1])
        return [p for index in held for p in layers[index].parameters() if p.requires_grad]

    def _shared_norms(self) -> list[_BatchNorm]:
        """Return this stage's BatchNorm modules if several pipelines follow the same statistics."""
        if self._groups is None or self._groups.replicas is None or self._layout is None or self._place is None:
            return []
        layers = list(self._pipelined.children())
        return running_norms([layers[index] for index in self._layout.layers_of_stage(self._place[1])])

    def _reduce(self, parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
        """Sum the gradients of this stage over the pipelines, in the order of the layers."""
        group = None if self._groups is None else self._groups.replicas
        if group is None:
            return [(p, p.grad) for p in parameters if p.grad is not None]
        used = torch.tensor([float(p.grad is not None) for p in parameters])
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        group.all_reduce_sum([*gradients, used])
        return [(p, g) for p, g, is_used in zip(parameters, gradients, used.tolist()) if is_used]

    def _norms(self, done: _Attempt) -> dict[str, list[float | None]]:
        assert self._layout is not None and self._place is not None
        found = {id(parameter): gradient for parameter, gradient in done.gradients}
        layers = list(self._pipelined.children())
        return {
            str(index): [
                float(torch.linalg.vector_norm(found[id(p)])) if id(p) in found else None
                for p in layers[index].parameters()
            ]
            for index in self._layout.layers_of_stage(self._place[1])
        }

    def _conclude_training(self, payloads: Sequence[Payload], loader: ElasticLoader, done: _Attempt) -> BatchResult:
        parts = _last_stages(payloads)
        if not parts:
            raise RuntimeError("no pipeline has computed a loss")
        result = BatchResult(extras=done.extras)
        total = sum(part["weight"] for part in parts)
        value = parts[0]["loss"] if len(parts) == 1 else sum(p["weight"] * p["loss"] for p in parts) / total
        dtype = getattr(torch, parts[0]["dtype"].removeprefix("torch."))
        result.loss = torch.tensor(value, dtype=dtype, device=self._devices[0])
        result.loss.requires_grad_()  # Lightning expects a loss that backward could be called on
        result.logs = combine([(p["weight"], p["logs"]) for p in parts], loader.current.num_samples)
        scale = 1.0 if self._loss_weight is None else 1.0 / total
        for payload in payloads:
            for index, norms in payload.get("norms", {}).items():
                result.norms[int(index)] = [None if norm is None else norm * scale for norm in norms]
        for parameter, gradient in done.gradients:
            result.gradients[parameter] = gradient if scale == 1.0 else gradient * scale
        self.metrics.merge([part["metrics"] for part in parts])
        return result

    def clip(self, result: BatchResult, clip_val: float) -> None:
        """Clip the gradients held here by the norm over all stages, as ``clip_grad_norm_`` does on one process."""
        norms = [norm for index in sorted(result.norms) for norm in result.norms[index] if norm is not None]
        gradients = [p.grad for p in self._pipelined.parameters() if p.grad is not None]
        if not norms or not gradients:
            return
        total = torch.linalg.vector_norm(torch.tensor(norms, dtype=gradients[0].dtype, device=gradients[0].device))
        factor = torch.clamp(clip_val / (total + 1e-6), max=1.0)
        torch._foreach_mul_(gradients, factor)

    # ------------------------------------------------------------------ evaluation

    def evaluate(
        self,
        session: Session | SoloSession,
        hook: str,
        batch: Any,
        loader: ElasticLoader,
        *,
        reread: Callable[[], Any],
        step_args: Sequence[Any],
        step_kwargs: Mapping[str, Any],
    ) -> BatchResult:
        """Run ``validation_step`` on a global batch; see :meth:`train`."""
        box = [batch]
        fetched_in = [session.generation]
        done = _Attempt()
        saved = self._save()

        def attempt() -> Payload:
            nonlocal done
            if fetched_in[0] != session.generation:
                box[0], fetched_in[0] = reread(), session.generation
            done = _Attempt()
            with _quiet_rng():
                return self._evaluate_once(hook, box[0], loader, done, step_args, step_kwargs)

        payloads = session.run(attempt, lambda: self._restore(saved))
        parts = _last_stages(payloads)
        result = BatchResult(extras=done.extras)
        result.logs = combine([(part["weight"], part["logs"]) for part in parts], loader.current.num_samples)
        self.metrics.merge([part["metrics"] for part in parts])
        return result

    def _evaluate_once(
        self,
        hook: str,
        batch: Any,
        loader: ElasticLoader,
        done: _Attempt,
        step_args: Sequence[Any],
        step_kwargs: Mapping[str, Any],
    ) -> Payload:
        assert self._layout is not None
        payload: Payload = {"weight": 0.0}
        if self._place is None:
            return payload
        plan = loader.current
        share = plan.share(self._layout.config.num_pipelines, self._place[0])
        payload["pipeline"] = self._place[0]
        if not share:
            return payload
        sizes = [len(plan.microbatches[index]) for index in share]
        seed_everything_local(self._seed, plan.batch, share[0])
        batch = self._pass_batch(batch)
        reach("validation")
        output, records, _ = self._run_user_step(
            hook, batch, sizes, list(share), (self._seed, plan.batch), step_args, step_kwargs, training=False
        )
        if self._is_last:
            done.extras["output"] = output
            payload.update(weight=float(sum(sizes)), logs=records, metrics=self.metrics.take_changes())
        return payload

    # ------------------------------------------------------------------ warm-up

    def warm_up(self, loader: ElasticLoader, prepare: Callable[[Any], Any]) -> Tensor | None:
        """Run the user's step once, forward and backward, and forget everything it did.

        The first of everything costs seconds; and a step that cannot be pipelined is refused here, before the job
        begins.

        Returns:
            The input of the pipelined module, if it is one tensor.

        Raises:
            MisconfigurationException: If the step does not call the pipelined module exactly once or returns no loss.
        """
        reach("warm_up")
        started = time.monotonic()
        module = self._module
        batch = prepare(loader.sample())
        calls: list[Any] = []

        def route(inputs: Any) -> Any:
            calls.append(inputs)
            return nn.Sequential.forward(self._pipelined, inputs)

        saved, buffers = self._save(), snapshot_buffers(list(self._pipelined.children()))
        attributes = {
            name: value.copy() if isinstance(value, (list, dict, set)) else value
            for name, value in module.__dict__.items()
            if not name.startswith("_")
        }
        object.__setattr__(module, "log", LogRecorder(self.metrics.names))
        self.metrics.start()
        self._pipelined.set_route(route)
        try:
            with _quiet_rng(), torch.enable_grad():
                with module.trainer.precision_plugin.train_step_context():
                    output = module.training_step(*_step_arguments(module, batch))
                loss, _ = _split_output(output)
                if len(calls) != 1:
                    raise MisconfigurationException(
                        f"training_step called the pipelined module {len(calls)} times; it must be called exactly "
                        "once, with the whole batch. Join the inputs into one batch, or put the other calls into "
                        "layers"
                    )
                loss.backward()
        finally:
            self._pipelined.set_route(None)
            self.metrics.cancel()
            for name in set(module.__dict__) - set(attributes):
                if not name.startswith("_"):
                    del module.__dict__[name]
            module.__dict__.update(attributes)
            module.zero_grad(set_to_none=True)
            restore_buffers(list(self._pipelined.children()), buffers)
            self._restore(saved)
        log.debug("warm-up took %.2f s", time.monotonic() - started)
        return calls[0].detach() if isinstance(calls[0], Tensor) else None

    # ------------------------------------------------------------------ undoing

    def _save(self) -> Any:
        """Remember what a broken attempt could change: buffers and metrics."""
        layers = list(self._pipelined.children())
        held: Sequence[int] = range(0)
        if self._layout is not None and self._place is not None:
            held = self._layout.layers_of_stage(self._place[1])
        return held, snapshot_buffers([layers[index] for index in held])

    def _restore(self, saved: Any) -> None:
        held, buffers = saved
        layers = list(self._pipelined.children())
        restore_buffers([layers[index] for index in held], buffers)
        self.metrics.cancel()


class _PipelineCall:
    """The one call of the pipelined module in a step."""

    def __init__(
        self, pipeline: StagePipeline, sizes: list[int], indices: list[int], key: tuple[int, int], training: bool
    ) -> None:
        self._pipeline = pipeline
        self._sizes = sizes
        self._indices = indices
        self._key = key
        self._training = training
        self.num_calls = 0
        self.output: Any = None

    def run(self, inputs: Any) -> Any:
        """Run this stage's forward pass."""
        self.num_calls += 1
        if self.num_calls > 1:
            raise MisconfigurationException(
                "the pipelined module was called twice in one step; it must be called exactly once, with the whole "
                "batch. Join the inputs into one batch, or put the other calls into layers"
            )
        self.output = self._pipeline.forward(
            inputs,
            sizes=self._sizes,
            indices=self._indices,
            key=self._key,
            training=self._training,
            autocast=_current_autocast(),
        )
        return self.output

    def route_last(self, inputs: Any) -> Any:
        """Answer the user's call on the last stage."""
        try:
            return self.run(inputs)
        except GenerationBrokenError as error:
            raise _StageBroken(error) from error

    def route_first(self, inputs: Any) -> Any:
        """Take the user's input on the first stage and end the user's step."""
        try:
            self.run(inputs)
        except GenerationBrokenError as error:
            raise _StageBroken(error) from error
        raise _StageDone


def _current_autocast() -> Callable[[], Any] | None:
    for device_type in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            return lambda: torch.autocast(device_type, dtype=dtype)
    return None


def _last_stages(payloads: Sequence[Payload]) -> list[Payload]:
    parts = [payload for payload in payloads if "logs" in payload]
    return sorted(parts, key=lambda payload: int(payload["pipeline"]))


def _split_output(output: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss and what else the user's training_step returned."""
    loss, extras = output, {}
    if isinstance(output, Mapping):
        loss = output.get("loss")
        extras = {key: value for key, value in output.items() if key != "loss"}
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise MisconfigurationException(
            f"training_step must return the loss, a tensor with one value, or a dict with 'loss'; it returned {found}. "
            "Skipping a step by returning None is not possible: all stages take part in it"
        )
    return loss, extras


def _step_arguments(module: pl.LightningModule, batch: Any) -> tuple[Any, ...]:
    takes = inspect.signature(module.training_step).parameters
    return (batch,) if len(takes) == 1 else (batch, 0)


def _to_device(tree: Any, device: torch.device) -> Any:
    return tree if device.type == "cpu" else move_data_to_device(tree, device)


def seed_everything_local(seed: int, step: int, first_microbatch: int) -> None:
    """Seed the process's generators for the part of a step that runs here."""
    derived = derive_seed(seed, step, first_microbatch) & 0xFFFFFFFF
    torch.manual_seed(derived)
    random.seed(derived)
    np.random.seed(derived)


@contextmanager
def _quiet_rng() -> Iterator[None]:
    """Leave the process's random number generators as they were."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

