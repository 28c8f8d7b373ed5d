"""One batch as one operation: forward, backward, reduction and vote, done again as a whole if it breaks.

Where the user's code runs: the last stage of a pipeline runs the user's step on the pipeline's part of the batch; the
first stage runs it up to the call of the pipelined module; middle stages run none of it. The batch is read by the
first stage and travels to the last.

Numbers that do not depend on the layout: micro-batch borders, dropout (keyed by seed, step, micro-batch and layer),
the weights of the pipelines' losses, and the order in which gradient norms are summed.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import random
import time
from collections import deque
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
from torchmetrics import Metric

from lightning_parcae.data import ElasticLoader
from lightning_parcae.engine.batch_norms import Share, before_step, running_norms
from lightning_parcae.engine.batch_norms import combine as combine_statistics
from lightning_parcae.engine.channel import GroupChannel, recv_tree, send_tree
from lightning_parcae.engine.groups import Groups
from lightning_parcae.engine.partition import PipelinedSequential
from lightning_parcae.engine.pipeline import Recompute, StagePipeline
from lightning_parcae.engine.session import Payload, Session, SoloSession
from lightning_parcae.engine.state import restore_buffers, snapshot_buffers
from lightning_parcae.errors import GenerationBrokenError
from lightning_parcae.logged_values import HookValues, LogRecorder, combine
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


@dataclass(slots=True)
class BatchResult:
    """What a batch has produced, equal on every member but for the gradients.

    Attributes:
        loss: The loss over the global batch (training only).
        logs: Combined records of ``self.log``.
        extras: What the user's step returned beside the loss; on last stages only.
        num_broken: Attempts of this member that broke before the one that counts.
        gradients: Gradient to attach to each parameter held here, earlier batches of an accumulation included.
        norms: For each layer, the gradient norm of each parameter (None without gradient); None if not asked for.
    """

    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    logs: list[dict[str, Any]] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)
    gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    norms: dict[int, list[float | None]] | None = None
    num_broken: int = 0


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
        recompute: Recompute,
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
        self._users_norms: list[tuple[nn.Module, str, _BatchNorm]] = []
        self._hook_values = HookValues()
        self.metrics = MetricStates(module)

    # ------------------------------------------------------------------ generations

    def enter(self, layout: Layout, groups: Groups | None, name: str) -> None:
        """Build this instance's stage of a new generation."""
        self._layout, self._groups = layout, groups
        self._place = layout.place_of(name)
        self._pipeline = None
        self._put_norms_back()
        if self._place is None:
            return
        _, stage = self._place
        held = layout.layers_of_stage(stage)
        layers = list(self._pipelined.children())
        last = layout.config.num_stages - 1
        group = None if groups is None else groups.pipeline
        self._users_norms = [
            (parent, name, child)
            for index in held
            for parent in layers[index].modules()
            for name, child in parent.named_children()
            if isinstance(child, _BatchNorm)
        ]
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
        self._put_norms_back()

    def _put_norms_back(self) -> None:
        """Undo what torchgpipe does to BatchNorm inside of a layer; parameters and buffers are shared anyway."""
        for parent, name, norm in self._users_norms:
            norm.train(getattr(parent, name).training)
            setattr(parent, name, norm)
        self._users_norms = []

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

        def attempt(batch: Any, done: _Attempt) -> Payload:
            return self._train_once(batch, loader, done, step_args, step_index, keep_gradients, want_norms)

        payloads, done, num_broken = self._run(session, "training_step", batch, loader, reread, attempt)
        result = self._conclude_training(payloads, loader, done, want_norms=want_norms)
        result.num_broken = num_broken
        return result

    def _run(
        self,
        session: Session | SoloSession,
        hook: str,
        batch: Any,
        loader: ElasticLoader,
        reread: Callable[[], Any],
        work: Callable[[Any, _Attempt], Payload],
    ) -> tuple[list[Payload], _Attempt, int]:
        """Do a batch until its vote has completed.

        Returns:
            The payloads of all members, what this member has done for them, and how often it broke before.
        """
        done = _Attempt()
        fetched_in = session.generation
        num_broken = 0
        saved = self._save()
        plan = loader.current
        trainer = self._module.trainer
        was_stopping = trainer.should_stop
        logged = trainer._logger_connector._callback_metrics
        hooked = self._hook_values.changes(logged)

        def attempt() -> Payload:
            nonlocal batch, done, fetched_in
            if fetched_in != session.generation:
                batch, fetched_in = reread(), session.generation
            done = _Attempt()
            with _quiet_rng():
                payload = work(batch, done)
            if trainer.should_stop and not was_stopping:
                payload["should_stop"] = True
            if hooked:
                payload["hooked"] = hooked
            return payload

        def restore() -> None:
            nonlocal num_broken
            num_broken += 1
            trainer.should_stop = was_stopping
            self._restore(saved)

        point = f"{hook} of batch {plan.batch} in epoch {plan.epoch}"
        payloads = session.run(point, attempt, restore)
        if any("should_stop" in payload for payload in payloads):
            trainer.should_stop = True  # the step runs on first and last stages only, but all must stop
        self._hook_values.voted(logged)
        if trainer.is_global_zero:
            for name in self._hook_values.differing(logged, [payload.get("hooked", {}) for payload in payloads]):
                log.warning(
                    "%r was logged by a hook outside of a step, with different values on the instances: each sees only "
                    "its part of the batches, so callbacks that monitor it may decide differently. Log it in the step "
                    "with self.log, or use a torchmetrics metric",
                    name,
                )
        return payloads, done, num_broken

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
            sizes = [len(plan.microbatches[index]) for index in share]
            if share:
                seed_everything_local(self._seed, step_index, share[0])
                reach("batch")
                batch = self._pass_batch(batch)
            weight, scale = self._weigh(batch, sizes, plan.num_samples)
            if share:
                payload["weight"] = weight
                self._forward_backward(batch, sizes, share, (self._seed, step_index), scale, step_args, payload, done)
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
        scale: float,
        step_args: Sequence[Any],
        payload: Payload,
        done: _Attempt,
    ) -> None:
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
        scaled = loss if scale == 1.0 else loss * scale
        accumulate = self._module.trainer.accumulate_grad_batches
        if accumulate > 1:
            scaled = scaled / accumulate
        self._module.trainer.precision_plugin.backward(scaled, self._module, None)
        payload.update(loss=float(loss.detach()), dtype=str(loss.dtype), logs=records)
        payload["metrics"] = self.metrics.take_changes()

    def _weigh(self, batch: Any, sizes: Sequence[int], num_samples: int) -> tuple[float, float]:
        """Return the weight of this pipeline's loss, and its part of all weights, which the loss is scaled by.

        Only the last stages need them. With weights of the user's own, they meet to sum them up.
        """
        if not self._is_last:
            return 0.0, 1.0
        if self._loss_weight is None:
            return float(sum(sizes)), sum(sizes) / num_samples
        weight = float(self._loss_weight(batch)) if sizes else 0.0
        if weight < 0 or not math.isfinite(weight):
            raise ValueError(f"loss_weight must return a number of at least 0, got {weight}")
        group = None if self._groups is None else self._groups.replicas
        if group is None:
            return weight, 1.0
        total = torch.tensor([weight], dtype=torch.float64)
        group.all_reduce_sum([total])
        return weight, weight / float(total) if float(total) > 0 else 0.0

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
        except (_StageDone, _StageBroken):
            output = None
        finally:
            self._pipelined.set_route(None)
            self._module.__dict__.pop("log", None)
        if forward.broken is not None:
            raise forward.broken  # even if the user's step has caught everything
        if forward.num_calls != 1:
            raise _not_one_call(hook, forward.num_calls)
        return (output, recorder.records, None) if self._is_last else (None, [], forward.output)

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
        return [(p, g) for p, g, is_used in zip(parameters, gradients, used.tolist(), strict=False) if is_used]

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

    def _conclude_training(
        self, payloads: Sequence[Payload], loader: ElasticLoader, done: _Attempt, *, want_norms: bool
    ) -> BatchResult:
        parts = _last_stages(payloads)
        if not parts:
            raise RuntimeError("no pipeline has computed a loss")
        result = BatchResult(extras=done.extras)
        total = sum(part["weight"] for part in parts)
        value = parts[0]["loss"] if len(parts) == 1 else sum(p["weight"] * p["loss"] for p in parts) / (total or 1.0)
        dtype = getattr(torch, parts[0]["dtype"].removeprefix("torch."))
        result.loss = torch.tensor(value, dtype=dtype, device=self._devices[0])
        result.loss.requires_grad_()  # Lightning expects a loss that backward could be called on
        result.logs = combine([(p["weight"], p["logs"]) for p in parts], loader.current.num_samples)
        self._hook_values.logged_by_steps(result.logs)
        if want_norms:
            found = [item for payload in payloads for item in payload.get("norms", {}).items()]
            result.norms = {int(index): norms for index, norms in found}
        result.gradients = dict(done.gradients)
        self.metrics.merge([part["metrics"] for part in parts])
        return result

    def clip(self, result: BatchResult, clip_val: float) -> None:
        """Clip the gradients held here by the norm over all stages, as ``clip_grad_norm_`` does on one process.

        Raises:
            MisconfigurationException: If nothing has said before the step that its gradients would be clipped.
        """
        if result.norms is None:
            raise MisconfigurationException(
                "gradients can be clipped by norm only where Lightning does it, because the norms of all stages travel "
                "in the step's vote: set Trainer(gradient_clip_val=...), or override configure_gradient_clipping and "
                "call self.clip_gradients(optimizer, gradient_clip_val=..., gradient_clip_algorithm='norm') there"
            )
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

        def attempt(batch: Any, done: _Attempt) -> Payload:
            return self._evaluate_once(hook, batch, loader, done, step_args, step_kwargs)

        payloads, done, num_broken = self._run(session, hook, batch, loader, reread, attempt)
        parts = _last_stages(payloads)
        result = BatchResult(extras=done.extras, num_broken=num_broken)
        result.logs = combine([(part["weight"], part["logs"]) for part in parts], loader.current.num_samples)
        self._hook_values.logged_by_steps(result.logs)
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

    def warm_up(self, batch: Any, *, may_cut: bool = True) -> Tensor | None:
        """Run the user's step once, forward and backward, and forget everything it did.

        The first of everything costs seconds; and a step that cannot be pipelined is refused here, before the job
        begins.

        Args:
            batch: A small batch, ready for the step.
            may_cut: Whether there may be several stages.

        Returns:
            The input of the pipelined module, if it is one tensor.

        Raises:
            MisconfigurationException: If the step does not call the pipelined module exactly once, returns no loss,
                changes buffers outside of the pipelined module, or uses its parameters beside the call; or if a layer
                returns what cannot travel to the next stage.
        """
        reach("warm_up")
        started = time.monotonic()
        module = self._module
        calls: list[Any] = []
        ends: list[tuple[Tensor, Tensor]] = []

        def route(inputs: Any) -> Any:
            calls.append(inputs)
            return _cut_off(self._run_checked(inputs, may_cut), ends)

        was_stopping = module.trainer.should_stop
        module.zero_grad(set_to_none=True)
        saved, buffers = self._save(), snapshot_buffers(list(self._pipelined.children()))
        trace = _ModuleTrace(module, self._pipelined)
        object.__setattr__(module, "log", LogRecorder(self.metrics.names))
        self.metrics.start()
        self._pipelined.set_route(route)
        try:
            with _quiet_rng(), torch.enable_grad():
                with module.trainer.precision_plugin.train_step_context():
                    output = module.training_step(*_step_arguments(module, batch))
                loss, _ = _split_output(output)
                if len(calls) != 1:
                    raise _not_one_call("training_step", len(calls))
                torch.autograd.backward(loss)
                beside = [name for name, p in self._pipelined.named_parameters() if p.grad is not None]
                driven = [(output, leaf.grad) for output, leaf in ends if leaf.grad is not None]
                if driven:
                    torch.autograd.backward([output for output, _ in driven], [gradient for _, gradient in driven])
        finally:
            self._pipelined.set_route(None)
            module.trainer.should_stop = was_stopping
            self.metrics.cancel()
            module.__dict__.pop("log", None)
            changed = trace.undo()
            module.zero_grad(set_to_none=True)
            restore_buffers(list(self._pipelined.children()), buffers)
            self._restore(saved)
        if changed:
            raise MisconfigurationException(
                f"training_step changes buffers outside of the pipelined module: {', '.join(changed)}. It runs on the "
                "last stages only, so other instances would not see the change. Move what holds them into the "
                "pipelined module, put it into eval mode, or use a torchmetrics metric"
            )
        if beside and may_cut:
            raise MisconfigurationException(
                f"training_step uses parameters of the pipelined module beside its call: {', '.join(beside[:5])}"
                f"{f' and {len(beside) - 5} more' if len(beside) > 5 else ''}. Each instance holds the parameters of "
                "its own stage only, so neither the value nor the gradients would be right. For an L2 penalty use the "
                "optimizer's weight_decay; or keep the whole model on each instance with ParcaeStrategy(max_stages=1)"
            )
        log.debug("warm-up took %.2f s", time.monotonic() - started)
        return calls[0].detach() if isinstance(calls[0], Tensor) else None

    def _run_checked(self, value: Any, may_cut: bool) -> Any:
        """Run the layers here, and refuse a layer whose output could not leave its stage."""
        layers = list(self._pipelined.named_children())
        for index, (name, layer) in enumerate(layers):
            value = layer(value)
            if not may_cut and index < len(layers) - 1:
                continue
            parts = value if isinstance(value, tuple) else (value,)
            other = next((type(part).__name__ for part in parts if not isinstance(part, Tensor)), None)
            if other is not None:
                raise MisconfigurationException(
                    f"layer {name} of the pipelined module ({type(layer).__name__}) must return a Tensor or a tuple of "
                    "Tensors, because a stage may end with it, but it returned "
                    f"{'a tuple with ' if isinstance(value, tuple) else ''}{other}. Change what it returns, or join it "
                    "with the layer after it into one"
                )
        return value

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


def _cut_off(value: Any, ends: list[tuple[Tensor, Tensor]]) -> Any:
    """Return a copy of the layers' output that backward ends at; note the output and where its gradient gathers."""
    if isinstance(value, tuple):
        return tuple([_cut_off(part, ends) for part in value])
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    leaf = value.detach().requires_grad_()
    ends.append((value, leaf))
    return leaf.clone()  # the user's step may change it in place


class _ModuleTrace:
    """What a step of the user's may leave in a module beside the pipelined layers: attributes and buffers."""

    def __init__(self, module: pl.LightningModule, pipelined: nn.Module) -> None:
        self._owners = [child for child in module.modules() if not isinstance(child, Metric)]
        inside = {id(child) for child in pipelined.modules()}
        self._owners = [child for child in self._owners if id(child) not in inside]
        names = {id(child): name for name, child in module.named_modules()}
        self._attributes = [
            {name: (value, copy.copy(value)) for name, value in vars(owner).items() if name not in _TORCH_ATTRIBUTES}
            for owner in self._owners
        ]
        self._buffers = [
            (owner, name, f"{names[id(owner)]}.{name}".lstrip("."), buffer, buffer.clone())
            for owner in self._owners
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    def undo(self) -> list[str]:
        """Put everything back; return the names of the buffers that had changed."""
        for owner, attributes in zip(self._owners, self._attributes, strict=True):
            for name in [name for name in vars(owner) if name not in _TORCH_ATTRIBUTES and name not in attributes]:
                del vars(owner)[name]
            for name, (value, content) in attributes.items():
                vars(owner)[name] = value
                _refill(value, content)
        changed = []
        for owner, name, path, buffer, content in self._buffers:
            now = owner._buffers.get(name)
            # the version counter would not tell: normalisation kernels update their statistics without a trace in it
            if now is not buffer or not torch.allclose(buffer, content, rtol=0, atol=0, equal_nan=True):
                changed.append(path)
                owner._buffers[name] = buffer
                buffer.copy_(content)
        return changed


_TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) | frozenset(vars(pl.LightningModule()))


def _refill(value: Any, content: Any) -> None:
    """Give a container back what it held."""
    if isinstance(value, (list, deque)):
        value.clear()
        value.extend(content)
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(content)


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
        self.broken: GenerationBrokenError | None = None

    def run(self, inputs: Any) -> Any:
        """Run this stage's forward pass."""
        self.num_calls += 1
        if self.num_calls > 1:
            raise _not_one_call("the step", self.num_calls)
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
            self.broken = error
            raise _StageBroken from error

    def route_first(self, inputs: Any) -> Any:
        """Take the user's input on the first stage and end the user's step."""
        self.route_last(inputs)
        raise _StageDone


def _not_one_call(hook: str, num_calls: int) -> MisconfigurationException:
    return MisconfigurationException(
        f"{hook} called the pipelined module {num_calls} times; it must be called exactly once, with the whole batch. "
        "Join the inputs into one batch, or put the other calls into layers"
    )


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
    torch.default_generator.manual_seed(derived)  # torch.manual_seed formats the stack for CUDA first: 0.9 ms
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(derived)
    random.seed(derived)
    np.random.seed(derived)


@contextmanager
def _quiet_rng() -> Iterator[None]:
    """Leave the process's random number generators as they were."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
