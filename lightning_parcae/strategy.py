"""The Lightning strategy: an adapter between ``Trainer`` and the elastic pipeline.

It holds no algorithm. A batch is one operation of the members (:class:`~lightning_parcae.engine.session.Session`):
forward, backward, reduction and vote all happen inside :meth:`ParcaeStrategy.training_step`, so that a batch broken by
a death is done again as a whole; the gradients are attached in :meth:`ParcaeStrategy.backward`, after Lightning has
zeroed the old ones.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parcae import lightning_internals
from lightning_parcae.batch_operation import BatchOperation, BatchResult
from lightning_parcae.batch_supply import BatchSupply
from lightning_parcae.callback import ParcaeCallback
from lightning_parcae.control.messages import CheckpointRef, Event, JobSpec
from lightning_parcae.data import AbsentBatch, ElasticLoader
from lightning_parcae.data_order import isolated_rng
from lightning_parcae.engine.groups import Groups
from lightning_parcae.engine.partition import PipelinedSequential, layer_costs
from lightning_parcae.engine.session import JobOver, LeaveJob, RollbackRequired, Session, SoloSession
from lightning_parcae.environment import ParcaeEnvironment
from lightning_parcae.fallback import Fallback
from lightning_parcae.job_description import describe_job
from lightning_parcae.launcher import InstanceLauncher, SupervisorLauncher
from lightning_parcae.logged_values import to_tensor
from lightning_parcae.membership import Membership, connect_membership
from lightning_parcae.planner import Planner
from lightning_parcae.planning.job_planner import PlannerSettings
from lightning_parcae.planning.job_profile import Limits
from lightning_parcae.planning.layout import Layout
from lightning_parcae.planning.profile import ModelProfile, ThroughputProfile
from lightning_parcae.profiling import (
    ScriptMeasurement,
    SilentLogger,
    build_planner,
    measure_profile,
    memory_of,
    read_given_profile,
    within_memory,
)
from lightning_parcae.refusals import one_optimizer, refuse_loaders, refuse_model, refuse_optimizers, refuse_settings
from lightning_parcae.run_logs import RunLogs
from lightning_parcae.sharding.ledger import CommitRecord
from lightning_parcae.testing import reach, reached_step
from lightning_parcae.whole_state import WholeState

log = logging.getLogger(__name__)

DEFAULT_FAILURE_TIMEOUT_S = 20.0
"""Long enough for a busy host, short enough for a person who waits."""


class ParcaeStrategy(ParallelStrategy):
    """Trains on instances that come and go.

    The DataLoader's ``batch_size`` is the global batch, whatever the number of instances.

    Args:
        pipeline_module: Path of the ``nn.Sequential`` to pipeline, such as ``"net"``. Found by itself if the module
            has exactly one.
        micro_batch_size: Samples in each micro-batch. By default an eighth of the batch, rounded up.
        num_stages: Fix the number of stages of each pipeline.
        num_pipelines: Fix the number of data-parallel pipelines.
        min_stages: Fewest stages; raise it if the model does not fit on one instance.
        max_stages: Most stages; by default one for each layer.
        devices_per_instance: Local devices of each instance; its stage is spread over them.
        recompute: Drop activations and compute them again in backward: ``"never"``, ``"except_last"`` (all but the
            last micro-batch) or ``"always"``.
        batch_norm: What BatchNorm's running statistics are taken over: ``"deferred"`` (the whole batch) or
            ``"micro_batch"``. Must be chosen if the pipeline holds BatchNorm.
        balance: What stages are balanced by: ``"size"`` of the layers or measured ``"time"``.
        loss_weight: Weight of a pipeline's loss, given its batch; by default its number of samples. Use the number of
            tokens if the loss is a mean over tokens.
        fallback_dir: Where checkpoints go that are used when state is lost: any fsspec URL. None: no fallback.
        fallback_every_n_steps: Optimizer steps between them; one is also written at each epoch's end.
        policy: What decides the layout: ``"liveput"`` (most expected throughput under the preemptions to come,
            migrations included), ``"reactive"`` (the fastest layout for the instances there are) or ``"fixed"`` (the
            one that uses the most instances).
        interval: Seconds between two plans, and length of an interval of the forecast.
        horizon: Intervals that a plan looks ahead. None: a value over many intervals, which needs no tuning.
        forecaster: ``"auto"`` (whoever has shown skill on this job, else learned event rates), ``"events"`` (learned
            event rates), ``"arima"`` (as ``"auto"``, with ARIMA models among the candidates) or ``"last_value"`` (no
            events expected).
        profile: Path of a JSON profile to plan with, instead of measuring the layers in the job.
        device_memory: GiB that an instance has on its devices together; layouts that need more are never run. None:
            nine tenths of what its CUDA devices have, and no limit on CPU.
        failure_timeout: Seconds without a sign of life after which an instance counts as gone; by default what
            ``parcae run --failure-timeout`` was told, else 20. Give the coordinator the same. All other timeouts
            derive from it.
        min_instances_timeout: Seconds to wait with too few instances before the job ends; None: wait for ever.
        max_step_failures: End the job when instances die in the same step this many times.
        seed: Seed of data order and dropout; by default ``seed_everything``'s, else one drawn by the first instance.
        coordinator: ``host:port`` of the coordinator; by default ``PARCAE_COORDINATOR``.
        job_id: Name of the job; by default ``PARCAE_JOB_ID``.
        run_dir: Where logs, timeline and records of the run go; by default ``PARCAE_RUN_DIR``.
        bind_host: Address this instance serves state on. By default the loopback address, or the one that leads to
            the coordinator.
        commit_records: Write which samples each step has committed to ``<run_dir>/commits``.
        accelerator: See Lightning.
        checkpoint_io: See Lightning.
        precision_plugin: See Lightning.

    Raises:
        ValueError: If an argument is out of range; the message names the range.
    """

    strategy_name = "parcae"
    # no DistributedSampler and no collectives in self.log: the batch is cut and the logs are combined here
    is_distributed = False

    def __init__(
        self,
        pipeline_module: str | None = None,
        micro_batch_size: int | None = None,
        num_stages: int | None = None,
        num_pipelines: int | None = None,
        min_stages: int = 1,
        max_stages: int | None = None,
        devices_per_instance: int = 1,
        recompute: Literal["never", "except_last", "always"] = "never",
        batch_norm: Literal["deferred", "micro_batch"] | None = None,
        balance: Literal["size", "time"] = "size",
        loss_weight: Callable[[Any], float] | None = None,
        fallback_dir: str | None = None,
        fallback_every_n_steps: int = 100,
        policy: Literal["liveput", "reactive", "fixed"] = "liveput",
        interval: float = 60.0,
        horizon: int | None = None,
        forecaster: Literal["auto", "events", "arima", "last_value"] = "auto",
        profile: str | None = None,
        device_memory: float | None = None,
        failure_timeout: float | None = None,
        min_instances_timeout: float | None = None,
        max_step_failures: int = 3,
        seed: int | None = None,
        coordinator: str | None = None,
        job_id: str | None = None,
        run_dir: str | None = None,
        bind_host: str | None = None,
        commit_records: bool = False,
        accelerator: pl.accelerators.Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            cluster_environment=ParcaeEnvironment(),
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        _check_range("micro_batch_size", micro_batch_size, 1)
        _check_range("num_stages", num_stages, 1)
        _check_range("num_pipelines", num_pipelines, 1)
        _check_range("min_stages", min_stages, 1)
        _check_range("max_stages", max_stages, min_stages)
        _check_range("devices_per_instance", devices_per_instance, 1)
        _check_range("fallback_every_n_steps", fallback_every_n_steps, 1)
        _check_range("max_step_failures", max_step_failures, 1)
        _check_choice("recompute", recompute, ("never", "except_last", "always"))
        _check_choice("batch_norm", batch_norm, (None, "deferred", "micro_batch"))
        _check_choice("balance", balance, ("size", "time"))
        _check_choice("policy", policy, ("liveput", "reactive", "fixed"))
        _check_choice("forecaster", forecaster, ("auto", "events", "arima", "last_value"))
        _check_range("horizon", horizon, 1)
        if not interval > 0:
            raise ValueError(f"interval must be above 0 seconds, got {interval}")
        if device_memory is not None and not device_memory > 0:
            raise ValueError(f"device_memory must be above 0 GiB, got {device_memory}")
        if failure_timeout is None:
            failure_timeout = float(os.environ.get("PARCAE_FAILURE_TIMEOUT", DEFAULT_FAILURE_TIMEOUT_S))
        if failure_timeout < 1:
            raise ValueError(f"failure_timeout must be at least 1 second, got {failure_timeout}")
        if min_instances_timeout is not None and min_instances_timeout < failure_timeout:
            raise ValueError(
                f"min_instances_timeout ({min_instances_timeout} s) must not be below failure_timeout "
                f"({failure_timeout} s): a death takes that long to be noticed"
            )
        if num_stages is not None and not min_stages <= num_stages <= (max_stages or num_stages):
            raise ValueError(f"num_stages={num_stages} lies outside min_stages={min_stages} .. max_stages={max_stages}")
        self.num_nodes = 1
        self._pipeline_module = pipeline_module
        self._micro_batch_size = micro_batch_size
        self._num_stages = num_stages
        self._num_pipelines = num_pipelines
        self._min_stages = min_stages
        self._max_stages = max_stages
        self._devices_per_instance = devices_per_instance
        self._recompute = recompute
        self._batch_norm = batch_norm
        self._balance = balance
        self._loss_weight = loss_weight
        self._fallback_dir = fallback_dir
        self._fallback_every_n_steps = fallback_every_n_steps
        self._planner_settings = PlannerSettings(
            policy=policy, interval_s=float(interval), horizon=horizon, forecaster=forecaster
        )
        self._profile = profile
        self._device_memory = device_memory
        self._failure_timeout_s = float(failure_timeout)
        self._min_instances_timeout_s = min_instances_timeout
        self._max_step_failures = max_step_failures
        self._seed = seed
        self._coordinator = coordinator or os.environ.get("PARCAE_COORDINATOR")
        self._job_id = job_id or os.environ.get("PARCAE_JOB_ID") or "parcae"
        self._run_dir = run_dir or os.environ.get("PARCAE_RUN_DIR")
        self._bind_host = bind_host
        self._commit_records = commit_records or os.environ.get("PARCAE_COMMIT_RECORDS") == "1"
        # built in setup_environment and setup
        self._membership: Membership | None = None
        self._session: Session | SoloSession | None = None
        self._pipeline_path = ""
        self._operation: BatchOperation | None = None
        self._fallback: Fallback | None = None
        self._planner: Planner | None = None
        self._base_profile: ModelProfile | ThroughputProfile | None = None
        self._supply = BatchSupply(micro_batch_size=micro_batch_size, boundary=self._boundary)
        self._whole_state = WholeState(self)
        self._run_logs = RunLogs()
        self._in_fit = False
        self._light_states = False
        self._new_gradients: dict[nn.Parameter, Tensor] = {}
        self._num_broadcasts = 0
        self._has_resumed = False
        self._last_result: BatchResult | None = None
        self._own_state = False
        self._results_settings: list[str] | None = None
        self._gradients_seen: list[tuple[Tensor, int]] = []
        self._has_left = False
        self._measurement = ScriptMeasurement.requested()
        if self._measurement is not None:  # by itself, and it keeps nothing
            self._measurement.reach(reached="strategy")
            self._coordinator = self._run_dir = self._fallback_dir = None
            self._commit_records = False

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=cls.__name__)

    # ------------------------------------------------------------------ devices and processes

    @property
    @override
    def root_device(self) -> torch.device:
        return self.local_devices[0]

    @property
    def local_devices(self) -> list[torch.device]:
        """Devices of this instance."""
        devices = list(self.parallel_devices or [torch.device("cpu")])
        if devices[0].type == "cpu":
            return [torch.device("cpu")] * self._devices_per_instance
        if len(devices) <= self._devices_per_instance:
            return devices
        first = int(os.environ.get("PARCAE_LOCAL_INDEX", "0")) * self._devices_per_instance
        mine = devices[first : first + self._devices_per_instance]
        return mine or devices[: self._devices_per_instance]

    @property
    def num_local_instances(self) -> int:
        """Instances to start on this machine when no coordinator is given."""
        return max(1, len(self.parallel_devices or [0]) // self._devices_per_instance)

    @override
    def _configure_launcher(self) -> None:
        if self._coordinator is None and self.num_local_instances > 1 and self._measurement is None:
            self._launcher = SupervisorLauncher(self)
        else:
            self._launcher = InstanceLauncher(self)

    @property
    def environment(self) -> ParcaeEnvironment:
        """The cluster environment, which knows the ranks."""
        assert isinstance(self.cluster_environment, ParcaeEnvironment)
        return self.cluster_environment

    @property
    def trainer(self) -> pl.Trainer:
        """The trainer of the connected module."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def session(self) -> Session | SoloSession:
        """This instance's part in the job."""
        assert self._session is not None
        return self._session

    @property
    def job_id(self) -> str:
        """Name of the job; two jobs never mix."""
        return self._job_id

    @property
    def run_dir(self) -> str | None:
        """Directory for the records of the run."""
        return self._run_dir

    @property
    def failure_timeout_s(self) -> float:
        """Seconds without a sign of life after which an instance counts as gone."""
        return self._failure_timeout_s

    # ------------------------------------------------------------------ start-up

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        trainer = self.trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self._coordinator is None or self._has_left:
            if self._coordinator is None:
                self.environment.assign(0, 1)
            if fitting:
                self._run_logs.open(trainer, lambda key, value: value)
            return
        if self._membership is None:
            self._membership = connect_membership(
                coordinator=self._coordinator,
                job_id=self._job_id,
                failure_timeout_s=self._failure_timeout_s,
                bind_host=self._bind_host,
            )
            self._run_dir = self._run_dir or self._membership.welcome.run_dir
            self.environment.assign_host_rank(self._membership.welcome.host_rank)
            is_first = self._membership.welcome.leader
            if not fitting:  # the one that shows the results; it may have ended before the others begin
                is_first = (
                    self._membership.agree("evaluator", self._membership.endpoint.name)
                    == self._membership.endpoint.name
                )
            self.environment.assign(0 if is_first else ParcaeEnvironment.NO_RANK, 1)
            atexit.register(self._say_goodbye)  # a script that only evaluates leaves no other way
            reach("set_up")
        if fitting:
            self._membership.watch_signals()
            self._run_logs.open(trainer, self._membership.agree)
            if not self._membership.welcome.leader:
                trainer.num_sanity_val_steps = 0  # a joiner must not hold up the others with what they have checked

    def _say_goodbye(self) -> None:
        if self._membership is not None:
            self._membership.close(goodbye=True)

    def _agree_on_seed(self) -> int:
        given = self._seed if self._seed is not None else os.environ.get("PL_GLOBAL_SEED")
        if given is None:
            given = int.from_bytes(os.urandom(4), "little")
        return int(given if self._membership is None else self._membership.agree("seed", int(given)))

    def check_module(self, module: pl.LightningModule) -> None:
        """Refuse what cannot be trained exactly, before anything is started.

        Raises:
            MisconfigurationException: With the reason and the change to make.
        """
        refuse_settings(module, self.precision_plugin, syncs_batch_norm=self._layer_sync is not None)
        self._pipeline_path = refuse_model(
            module,
            self._pipeline_module,
            batch_norm=self._batch_norm,
            fewest_stages=self._num_stages or self._min_stages,
        )

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            if self._measurement is not None:
                self._measurement.reach(reached="fit")
                trainer.num_sanity_val_steps = 0
            self.check_module(module)
            self._install_pipeline(module)
        with one_optimizer():
            super().setup(trainer)
        if fitting:
            refuse_optimizers(self.optimizers)
            self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
            self.precision_plugin.clip_gradients = self._clip_gradients  # type: ignore[method-assign]
            self.precision_plugin._clip_gradients = self._watch_clipping  # type: ignore[method-assign]
            if self._results_settings is None:  # a rollback enters fit again, with what training has changed since
                self._results_settings = lightning_internals.describe_settings(trainer)
            self._seed = self._agree_on_seed()
            self._begin_session()

    def _install_pipeline(self, module: pl.LightningModule) -> None:
        current = module.get_submodule(self._pipeline_path)
        if not isinstance(current, PipelinedSequential):
            assert isinstance(current, nn.Sequential)
            parent, _, name = self._pipeline_path.rpartition(".")
            setattr(module.get_submodule(parent), name, PipelinedSequential(current))

    @property
    def pipeline_path(self) -> str:
        """Where the pipelined part lies in the user's module."""
        return self._pipeline_path

    @property
    def pipelined(self) -> PipelinedSequential:
        """The pipelined part of the user's module."""
        assert self.lightning_module is not None
        found = self.lightning_module.get_submodule(self._pipeline_path)
        assert isinstance(found, PipelinedSequential)
        return found

    @property
    def layers(self) -> list[nn.Module]:
        """Every layer, resident or not; see Host."""
        return list(self.pipelined.children())

    def _begin_session(self) -> None:
        module = self.lightning_module
        assert module is not None and self._seed is not None
        self._in_fit = True
        if self._fallback is None and self._fallback_dir is not None:
            started = int(time.time() * 1000)
            run = started if self._membership is None else self._membership.agree("fallback/run", started)
            self._fallback = Fallback(self._fallback_dir, every_n_steps=self._fallback_every_n_steps, run=int(run))
            self._fallback.check_writable()
        self._operation = BatchOperation(
            module,
            self.pipelined,
            seed=self._seed,
            devices=self.local_devices,
            recompute=self._recompute,
            batch_norm=self._batch_norm,
            loss_weight=self._loss_weight,
        )
        if self._membership is None:
            solo = SoloSession(len(self.layers))
            self._session = solo
            self._operation.enter(solo.layout, None, "solo")
        elif self._session is None:
            self._session = Session(self._membership.endpoint, self._membership.agent, self)
            self._membership.agent.on_urgent = self._session.on_urgent
            self._session.hold_all()
        self._supply.open(module, self.session)
        self.pipelined.set_guard(self._refuse_partial_state)

    @property
    def _may_cut(self) -> bool:
        """Whether there may be several stages."""
        return len(self.layers) > 1 and 1 not in (self._num_stages, self._max_stages)

    def _refuse_partial_state(self) -> None:
        """Refuse ``state_dict()`` of anybody but ourselves while some layers lie on other instances.

        Raises:
            MisconfigurationException: With the change to make.
        """
        if self._own_state or not self._in_fit or not isinstance(self._session, Session):
            return
        missing = [
            name for i, (name, _) in enumerate(self.pipelined.named_children()) if i not in self._session.resident
        ]
        if missing:
            raise MisconfigurationException(
                f"state_dict() was called during fit, but {len(missing)} of {len(self.layers)} layers of "
                f"{self._pipeline_path} lie on other instances ({', '.join(missing[:5])}"
                f"{', ...' if len(missing) > 5 else ''}). Call it after fit, use trainer.save_checkpoint() or "
                "ModelCheckpoint, or keep the whole model on each instance with ParcaeStrategy(max_stages=1)"
            )

    # ------------------------------------------------------------------ what Lightning asks of all ranks

    @property
    def _is_member(self) -> bool:
        """Whether this instance works with others right now."""
        return isinstance(self._session, Session) and self._session.joined and self._in_fit

    @override
    def barrier(self, name: str | None = None) -> None:
        # nobody waits for an instance: the only meeting point is the vote. Data is prepared once on each host.
        if name == "pre_setup" and self._membership is not None:
            must_prepare = self._membership.wait_for_prepared_data(self.environment.local_rank())
            if must_prepare:  # the one that had begun to is gone
                self.environment.assign_host_rank(0)
                lightning_internals.prepare_data(self.trainer)
                self._membership.wait_for_prepared_data(0)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._membership is None:
            return obj
        if self._is_member:
            assert isinstance(self._session, Session)
            payloads = self._session.run("broadcast", lambda: {"broadcast": obj}, lambda: None)
            return payloads[src]["broadcast"]
        if not self._in_fit and self.trainer.state.fn != TrainerFn.FITTING:
            return obj
        self._num_broadcasts += 1
        return self._membership.agree(f"broadcast/{self._num_broadcasts}", obj)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor  # whatever Lightning reduces is the same on every member

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return tensor.unsqueeze(0)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision  # taken from values that every member has

    # ------------------------------------------------------------------ data

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self._seed is None:
            self._seed = self._agree_on_seed()
        return self._supply.wrap(dataloader, self.trainer, self._seed)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, AbsentBatch):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    # ------------------------------------------------------------------ the step boundary

    def _boundary(self, loader: ElasticLoader) -> None:
        """Between two steps: meet changes of the membership, write the fallback checkpoint."""
        session = self._session
        if isinstance(session, SoloSession):
            if self._measurement is not None:
                self._measure(self._measurement, loader)
            self._resume_alone(session)
            self._write_fallback(loader)
            return
        assert isinstance(session, Session)
        reached_step(self.trainer.global_step)
        reach("boundary")
        try:
            session.boundary(self._describe_job)
            if self._planner is not None:
                self._planner.raise_if_failed()
            if session.stop_requested:
                self._write_fallback(loader, reason="stopped")
                raise LeaveJob("the job was asked to stop", session.stop_code)
            self._write_fallback(loader)
        except JobOver:
            self._leave_fit()
            raise lightning_internals.ExitFitQuietly from None

    def _resume_alone(self, session: SoloSession) -> None:
        """Go on from the newest fallback checkpoint, as the first generation of a job with a coordinator does."""
        if session.clock > 0 or self._fallback is None or self._has_resumed:
            return
        self._has_resumed = True
        newest = self._fallback.newest()
        if newest is not None and newest.step > self.trainer.global_step:
            log.warning("going on from the checkpoint %s of an earlier run", newest.identifier)
            self._fallback.restore(self, newest, range(len(self.layers)))

    def _measure(self, measurement: ScriptMeasurement, loader: ElasticLoader) -> None:
        """Measure layers, then steps, then end the script; see `parcae profile`."""
        trainer = self.trainer
        if measurement.is_complete:
            self._end_measurement()
        if not measurement.has_layers:
            sample = self._warm_up(loader)
            trainer.loggers = [SilentLogger(logger) for logger in trainer.loggers]
            device = self.local_devices[0]
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            measurement.take_layers(self._measure_profile(loader, sample, Path(sys.argv[0]).name), self.layers, name)

    def _end_measurement(self) -> None:
        assert self._measurement is not None
        if self._measurement.has_layers:
            self._measurement.finish(self.layers, self.optimizers)
        raise LeaveJob("the script has been measured")

    def _measure_profile(self, loader: ElasticLoader, sample: Tensor | None, name: str) -> ModelProfile:
        with isolated_rng():  # measuring runs dropout layers
            return measure_profile(
                self._limits(loader),
                layers=self.layers,
                sample=sample,
                context=self.precision_plugin.train_step_context,
                num_samples=loader.max_samples,
                recompute=self._recompute != "never",
                memory_bytes=memory_of(self.local_devices, self._device_memory),
                name=name,
            )

    def _warm_up(self, loader: ElasticLoader) -> Tensor | None:
        """Do a throw-away step that makes the first real one fast; return the input of the pipelined module."""
        assert self._operation is not None
        rank = self.environment.global_rank()
        self.environment.assign(ParcaeEnvironment.NO_RANK, 1)  # the throw-away step must not log anything
        try:
            return self._operation.warm_up(self._supply.prepare(loader.sample(), self.trainer), may_cut=self._may_cut)
        finally:
            self.environment.assign(rank, 1)

    def _limits(self, loader: ElasticLoader) -> Limits:
        return Limits(
            num_layers=len(self.layers),
            max_pipelines=loader.max_pipelines,
            num_stages=self._num_stages,
            num_pipelines=self._num_pipelines,
            min_stages=self._min_stages,
            max_stages=self._max_stages,
        )

    def _describe_job(self) -> tuple[JobSpec, CheckpointRef | None]:
        """Describe the job to the coordinator."""
        loader = self._train_loader
        assert self.lightning_module is not None
        sample = self._warm_up(loader)
        limits = self._limits(loader)
        with isolated_rng():  # measuring runs dropout layers
            costs = layer_costs(self.pipelined, sample if self._balance == "time" else None)
        spec = describe_job(
            self.lightning_module,
            self._pipeline_path,
            self.layers,
            limits=limits,
            costs=costs,
            settings=[
                len(loader),
                self._micro_batch_size,
                self._seed,
                self._batch_norm,
                *(self._results_settings or []),
            ],
            max_step_failures=self._max_step_failures,
            min_instances_timeout_s=self._min_instances_timeout_s,
            has_fallback=self._fallback is not None,
        )
        memory_bytes = memory_of(self.local_devices, self._device_memory)
        if self._planner_settings.policy != "fixed" or memory_bytes is not None:
            base = self._base_profile
            if base is None and self._profile is not None:
                base = read_given_profile(self._profile, limits, memory_bytes=memory_bytes)
            elif base is None:
                base = self._measure_profile(loader, sample, "measured in the job")
            self._base_profile = base
            spec = within_memory(spec, base, limits)
            if self._planner is None and self._planner_settings.policy != "fixed":
                self._planner = self._build_planner(spec, limits, base, loader)
        return spec, None if self._fallback is None else self._fallback.newest()

    def _build_planner(
        self, spec: JobSpec, limits: Limits, base: ModelProfile | ThroughputProfile, loader: ElasticLoader
    ) -> Planner:
        assert self._membership is not None
        planner = build_planner(
            self._membership.agent,
            self._planner_settings,
            spec,
            limits,
            base,
            num_samples=loader.max_samples,
            fallback_every_n_steps=None if self._fallback is None else self._fallback_every_n_steps,
            run_dir=self._run_dir,
        )
        self._callback.watch_planner(lambda: planner.metrics)
        return planner

    def _write_fallback(self, loader: ElasticLoader, reason: str = "interval") -> None:
        if self._fallback is None or not self._fallback.is_due(self.trainer.global_step, loader.epoch, reason):
            return
        self._fallback.write(self, loader.epoch, reason)

    # ------------------------------------------------------------------ Host: what a session needs of the trainer

    def pack_trainer(self) -> Any:
        """Return the trainer's state without the layers; see Host."""
        self._light_states = True
        try:
            tree = lightning_internals.pack(self.trainer)
        finally:
            self._light_states = False
        tree["loader"] = self._train_loader.state_dict()
        assert self.lightning_module is not None and self._operation is not None
        tree["modes"] = [module.training for module in self.lightning_module.modules()]
        tree["metrics"] = self._operation.metrics.state()
        tree["loggers"] = self._run_logs.versions()
        tree["fallback"] = None if self._fallback is None else self._fallback.position()
        tree["counts"] = self._callback.counts()
        return tree

    def inject_trainer(self, tree: Any) -> None:
        """Take over another instance's trainer state; see Host."""
        self._run_logs.use_versions(tree["loggers"])
        self._light_states = True
        try:
            lightning_internals.inject(self.trainer, tree)
        finally:
            self._light_states = False
        self._train_loader.jump(tree["loader"])
        assert self.lightning_module is not None and self._operation is not None
        for module, training in zip(self.lightning_module.modules(), tree["modes"], strict=True):
            module.training = training
        self._operation.metrics.load(tree["metrics"])
        if self._fallback is not None and tree["fallback"] is not None:
            self._fallback.go_to(tree["fallback"])
        self._callback.take_over(tree["counts"])

    def restore(self, checkpoint: CheckpointRef, layers: Sequence[int]) -> None:
        """Take over the state of a checkpoint; see Host."""
        assert self._fallback is not None
        self._fallback.restore(self, checkpoint, layers)
        self._run_logs.rewind(self.trainer.global_step)

    def step_aside(self) -> None:
        """Give up the rank; see Host."""
        self.environment.assign(ParcaeEnvironment.NO_RANK, 1)
        lightning_internals.take_over_progress_bar(self.trainer, is_rank_zero=False)
        if self._planner is not None:
            self._planner.stop()

    def enter(self, layout: Layout, groups: Groups | None, reason: str, pause_s: float) -> None:
        """Begin to work in a new generation; see Host."""
        assert self._operation is not None and self._membership is not None
        self._operation.enter(layout, groups, self._membership.endpoint.name)
        was_zero = self.environment.global_rank() == 0
        rank = layout.rank_of(self._membership.endpoint.name)
        self.environment.assign(rank, len(layout.order))
        if rank == 0 and not was_zero:
            self._run_logs.take_over()
        lightning_internals.take_over_progress_bar(self.trainer, is_rank_zero=rank == 0)
        self._callback.on_generation(self.trainer, layout, reason, pause_s)
        if self._planner is not None:
            assert isinstance(self._session, Session)
            self._planner.link = self._session.link
            self._planner.enter(layout.config, is_zero=rank == 0)

    @property
    def _callback(self) -> ParcaeCallback:
        """The callback that counts; the launcher has added it."""
        return next(c for c in self.trainer.callbacks if isinstance(c, ParcaeCallback))  # type: ignore[attr-defined]

    @property
    def _train_loader(self) -> ElasticLoader:
        assert self._supply.train_loader is not None
        return self._supply.train_loader

    def use_global_batch_size(self, validation_loader: int | None = None) -> None:
        """Weigh what hooks log in the present batch by the global batch; called by the callback before any hook.

        Args:
            validation_loader: Index of the loader the batch comes from; None in training.
        """
        trainer = self.trainer
        if not self._in_fit or trainer.sanity_checking:
            return
        loader = self._train_loader
        if validation_loader is not None:
            loader = self._supply.validation_loader(trainer, validation_loader)
        lightning_internals.use_batch_size(trainer, loader.current.num_samples)

    # ------------------------------------------------------------------ steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, batch_idx = args[0], args[1]
        operation, loader = self._operation, self._train_loader
        assert operation is not None
        trainer = self.trainer
        started = time.perf_counter()
        result = operation.train(
            self.session,
            batch,
            loader,
            reread=lambda: self._supply.reread(loader, trainer),
            step_args=(batch_idx, *args[2:]),
            step_index=trainer.fit_loop.epoch_loop.total_batch_idx,
            keep_gradients=batch_idx % trainer.accumulate_grad_batches != 0,
            want_norms=uses_clipping(trainer) and not trainer.fit_loop._should_accumulate(),
        )
        reach("voted")
        if self._planner is not None:
            self._planner.steps.note(started, is_whole=result.num_broken == 0)
        if self._measurement is not None:
            self._measurement.note(started)
        self._last_result = result
        self._new_gradients = result.gradients
        self._conclude(result, loader)
        self._after_commit(loader)
        if result.extras:
            return {"loss": result.loss, **result.extras}
        return result.loss

    def _conclude(self, result: BatchResult, loader: ElasticLoader) -> None:
        """Log what the last stages have logged, and count what was done again."""
        if result.num_broken:
            self._callback.on_replay(result.num_broken * loader.current.num_samples)
        self._replay_logs(result)

    def _replay_logs(self, result: BatchResult) -> None:
        module = self.lightning_module
        assert module is not None
        for record in result.logs:
            value: Any
            if "metric" in record:
                value = module.get_submodule(record["metric"])
            else:
                value = to_tensor(record, self.root_device)
            module.log(record["name"], value, **record["options"])

    def _after_commit(self, loader: ElasticLoader) -> None:
        """Tell the coordinator how far the job is, and record what was used."""
        plan = loader.current
        # the vote has completed, the optimizer steps next (unless gradients are accumulated further)
        step = self.trainer.global_step + int(not self.trainer.fit_loop._should_accumulate())
        if self._membership is not None:
            agent = self._membership.agent
            agent.step = step
            if self.environment.global_rank() == 0:
                self._membership.report_progress(step, plan.epoch, plan.batch, self.session.clock)
        if self._commit_records and self._run_dir is not None:
            name = "solo" if self._membership is None else self._membership.endpoint.name
            path = Path(self._run_dir) / "commits" / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            record = CommitRecord(
                step=self.trainer.fit_loop.epoch_loop.total_batch_idx,
                epoch=plan.epoch,
                batch=plan.batch,
                indices=tuple(plan.indices),
            )
            with path.open("a") as file:
                file.write(record.to_json() + "\n")

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        if self._membership is not None:
            self._membership.agent.step = self.trainer.global_step + 1  # Lightning counts it when this returns
        reach("stepped")
        return result

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        assert module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        for parameter, gradient in self._new_gradients.items():
            parameter.grad = gradient
        self._new_gradients = {}
        return self.precision_plugin.post_backward(closure_loss, module)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the norm over all stages; see :meth:`BatchOperation.clip`."""
        assert self._operation is not None and self._last_result is not None
        self._operation.clip(self._last_result, float(clip_val))

    def _watch_clipping(self, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Let ``configure_gradient_clipping`` clip, but not by the norm of one stage.

        Raises:
            MisconfigurationException: If the hook changes gradients without ``self.clip_gradients``.
        """
        plugin = self.precision_plugin
        self._note_gradients()
        type(plugin)._clip_gradients(plugin, model, optimizer, *args, **kwargs)
        self._refuse_own_clipping()
        self._gradients_seen = []

    def _clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        plugin = self.precision_plugin
        self._refuse_own_clipping()
        type(plugin).clip_gradients(plugin, optimizer, *args, **kwargs)
        self._note_gradients()

    def _note_gradients(self) -> None:
        found = [parameter.grad for parameter in self.pipelined.parameters() if parameter.grad is not None]
        self._gradients_seen = [(gradient, gradient._version) for gradient in found]

    def _refuse_own_clipping(self) -> None:
        if not self._may_cut or not self._gradients_seen:
            return
        now = [parameter.grad for parameter in self.pipelined.parameters() if parameter.grad is not None]
        seen = self._gradients_seen
        if len(now) == len(seen) and all(
            gradient is before and gradient._version == version
            for gradient, (before, version) in zip(now, seen, strict=True)
        ):
            return
        raise MisconfigurationException(
            "configure_gradient_clipping changes gradients by itself. Each instance has the gradients of its own stage "
            "only, so a norm taken over them depends on the layout. Call self.clip_gradients(optimizer, "
            "gradient_clip_val=..., gradient_clip_algorithm='norm') there, which takes the norm over all stages, or "
            "keep the whole model on each instance with ParcaeStrategy(max_stages=1)"
        )

    def _evaluate(self, hook: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        module, operation, trainer = self.lightning_module, self._operation, self.trainer
        assert module is not None
        if not self._in_fit or trainer.sanity_checking or operation is None:
            return getattr(module, hook)(*args, **kwargs)
        index = int(args[2]) if len(args) > 2 else 0
        loader = self._supply.validation_loader(trainer, index)
        result = operation.evaluate(
            self.session,
            hook,
            args[0],
            loader,
            reread=lambda: self._supply.reread(loader, trainer, index),
            step_args=args[1:],
            step_kwargs=kwargs,
        )
        self._conclude(result, loader)
        return result.extras.get("output")

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate("validation_step", args, kwargs)

    # ------------------------------------------------------------------ checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        self._own_state = True
        try:
            state = module.state_dict()
        finally:
            self._own_state = False
        if self._light_states:
            prefix = f"{self._pipeline_path}."
            return {name: value for name, value in state.items() if not name.startswith(prefix)}
        if not self._is_member:
            return state
        assert isinstance(self._session, Session)
        return self._whole_state.complete_module(state, self._session)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        inner = getattr(optimizer, "_optimizer", optimizer)
        state: dict[str, Any] = inner.state_dict()
        if self._light_states:
            return {"state": {}, "param_groups": state["param_groups"]}
        return self._whole_state.complete_optimizer(state, inner) if self._is_member else state

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if self._measurement is not None:
            return
        if self._is_member:
            assert isinstance(self._session, Session)
            self._whole_state.save(checkpoint, filepath, storage_options, self._session)
        elif self.is_global_zero:
            self._whole_state.write(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self._measurement is None:
            super().remove_checkpoint(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        return lightning_internals.find_loader_position(super().load_checkpoint(checkpoint_path, weights_only))

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self._light_states:
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=False)
            return
        super().load_model_state_dict(checkpoint, strict=strict)

    # ------------------------------------------------------------------ the end

    @override
    def on_train_start(self) -> None:
        refuse_loaders(self.trainer)
        if self._membership is not None:
            self._membership.watch_signals()  # Lightning has installed its own handler since

    @override
    def on_train_end(self) -> None:
        if self._measurement is not None:
            self._end_measurement()
        if isinstance(self._session, Session) and self._session.joined:
            self._session.finish()
        self._leave_fit()

    def _leave_fit(self) -> None:
        """Work alone from here on: every instance holds the whole model."""
        self._in_fit = False
        if self._planner is not None:
            self._planner.stop(wait_s=1.0)
        if self._operation is not None:
            self._operation.leave()
            self.pipelined.set_guard(None)
        self._supply.close()

    def begin_again(self, reason: str) -> None:
        """Prepare to enter ``fit`` again in this process after a rollback."""
        log.warning("state was lost (%s): going back to the newest checkpoint", reason)
        if self._planner is not None:
            self._planner.stop()
        if self._operation is not None:
            self._operation.leave()
        self._supply.close()
        assert isinstance(self._session, Session)
        self._session.begin_again()
        self._num_broadcasts = 0

    def refuse_second_fit(self) -> None:
        """Refuse to enter ``fit`` after this instance has left its job.

        Raises:
            MisconfigurationException: With the change to make.
        """
        if self._has_left:
            raise MisconfigurationException(
                "this job has ended with its first fit; a second one needs a job of its own. Use one script for each "
                "fit, each with its own coordinator or `parcae run`"
            )

    def leave_job(self) -> None:
        """Leave the membership after ``fit``; this process goes on by itself with the whole model."""
        if self._membership is None:
            return
        assert isinstance(self._session, Session)
        self._session.wait_for_spares()
        self._session.close()
        self._membership.close(goodbye=True)
        self._membership = None
        self._session = None
        self._has_left = True

    def record_event(self, name: str, fields: dict[str, Any]) -> None:
        """Put an event into the job's timeline; rank 0's word counts."""
        if self._membership is not None and self.is_global_zero:
            self._membership.agent.send(Event(name=name, fields=fields))

    def fail(self, error: BaseException) -> None:
        """Tell the others why this instance ends."""
        # Ctrl-C on one instance takes this instance away, not the job
        if self._membership is not None and not isinstance(error, (LeaveJob, RollbackRequired, KeyboardInterrupt)):
            self._membership.report_failure(error, self.trainer.global_step)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._measurement is not None:
            self._measurement.refuse(exception)
        self.fail(exception)
        self._leave_fit()
        if isinstance(self._session, Session):
            self._session.close()
        if self._membership is not None:
            self._membership.close(goodbye=isinstance(exception, LeaveJob))

    @override
    def teardown(self) -> None:
        if self._membership is not None:
            self._membership.restore_signals()
        self._run_logs.close()
        super().teardown()


def _check_range(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def uses_clipping(trainer: pl.Trainer) -> bool:
    """Whether gradients may be clipped, so that their norms must travel in the vote."""
    module = trainer.lightning_module
    return bool(trainer.gradient_clip_val) or is_overridden("configure_gradient_clipping", module)
