"""The strategy in one process without a coordinator: the same as plain Lightning, and clear refusals."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_parcae import ParcaeCallback, ParcaeStrategy
from lightning_parcae.batch_operation import BatchOperation
from lightning_parcae.engine.partition import PipelinedSequential
from lightning_parcae.engine.session import Session, SoloSession
from lightning_parcae.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings(
    "ignore:The `srun` command",
    "ignore:You are running on single node",
    "ignore:`training_step` returned `None`",
    "ignore:Starting from v1.9.0:UserWarning",
)


def samples(count: int = 53) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 8, generator=generator)
    return x, x.sum(-1)


class Regressor(L.LightningModule):
    """A small model without dropout."""

    def __init__(self, schedule: str | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 1)
        )
        self.schedule = schedule
        self.steps: list[tuple[Any, ...]] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return (self.net(x).squeeze(-1) - y).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        self.steps.append((self.current_epoch, batch_idx, self.global_step, outputs["loss"].item(), rate))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedulers = torch.optim.lr_scheduler
        if self.schedule is None:
            return optimizer
        if self.schedule == "plateau":
            scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}
        steps = int(self.trainer.estimated_stepping_batches)
        cosine = schedulers.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": self.schedule}}


def loader(batch_size: int = 8, count: int = 53) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples(count)), batch_size=batch_size)


def trainer_of(strategy: Any, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "max_epochs": 3,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }
    return L.Trainer(strategy=strategy, accelerator="cpu", devices=1, **settings)


def built(kind: type[Regressor]) -> Regressor:
    L.seed_everything(1, verbose=False)
    return kind()


def fit(strategy: Any, schedule: str | None = None, module: Any = None, **options: Any) -> tuple[Any, L.Trainer]:
    L.seed_everything(1, verbose=False)
    module = Regressor(schedule) if module is None else module
    trainer = trainer_of(strategy, **options)
    trainer.fit(module, loader(), [loader(5, 13), loader(4, 9)])
    return module, trainer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.5},
        {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2, "schedule": "step"},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3, "schedule": "epoch"},
        {"precision": "64-true"},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"val_check_interval": 2},
        {"val_check_interval": 0.5},
        {"val_check_interval": 4, "check_val_every_n_epoch": None},
        {"check_val_every_n_epoch": 2, "limit_train_batches": 4},
        {"max_steps": 10},
        {"reload_dataloaders_every_n_epochs": 1},
        {"overfit_batches": 2},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()) or "plain",
)
@pytest.mark.filterwarnings("ignore")
def test_one_instance_with_one_micro_batch_gives_the_bits_of_plain_lightning(options: dict[str, Any]) -> None:
    plain, plain_trainer = fit("auto", **options)
    ours, trainer = fit(ParcaeStrategy(micro_batch_size=8), **options)
    assert ours.steps == plain.steps
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
    assert trainer.callback_metrics == plain_trainer.callback_metrics
    assert (trainer.global_step, trainer.current_epoch) == (plain_trainer.global_step, plain_trainer.current_epoch)


def test_plateau_checkpoints_and_early_stopping_decide_as_in_plain_lightning(tmp_path: Path) -> None:
    kept = []
    for name, strategy in (("plain", "auto"), ("ours", ParcaeStrategy(micro_batch_size=8))):
        checkpoint = ModelCheckpoint(tmp_path / name, monitor="loss_epoch", save_top_k=2, save_last=True)
        stopping = EarlyStopping("loss_epoch", patience=0, min_delta=0.5)
        module, _trainer = fit(strategy, callbacks=[checkpoint, stopping], max_epochs=12, enable_checkpointing=True)
        paths = sorted(path.name for path in (tmp_path / name).iterdir())
        kept.append((paths, Path(checkpoint.best_model_path).name, stopping.stopped_epoch, module.steps))
    assert kept[0] == kept[1]
    assert kept[0][2] > 0
    checkpoints = [torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in ("plain", "ours")]
    assert checkpoints[0]["callbacks"].keys() == checkpoints[1]["callbacks"].keys()
    assert checkpoints[0]["state_dict"].keys() == checkpoints[1]["state_dict"].keys()


def test_a_run_goes_on_in_the_other_strategy(tmp_path: Path) -> None:
    whole, _ = fit("auto", max_epochs=4)
    for name, first, second in (("a", "auto", "parcae"), ("b", "parcae", "auto")):
        _, trainer = fit(first, max_epochs=2)
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        module = Regressor()
        other = trainer_of(second, max_epochs=4)
        other.fit(module, loader(), loader(5, 13), ckpt_path=tmp_path / f"{name}.ckpt")
        rest = [step for step in whole.steps if step[0] >= 2]
        assert [step[:3] for step in module.steps] == [step[:3] for step in rest]


def test_two_fits_and_evaluation_in_one_process(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    module = Regressor()
    trainer = trainer_of(ParcaeStrategy(micro_batch_size=4), max_epochs=1, logger=logger, log_every_n_steps=1)
    validated_before = trainer.validate(module, loader(5, 13), verbose=False)
    trainer.fit(module, loader(), loader(5, 13))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(), loader(5, 13))
    assert trainer.global_step == 14
    validated = trainer.validate(module, loader(5, 13), verbose=False)
    assert validated[0]["val"] < validated_before[0]["val"]
    assert "log_metrics" not in vars(logger)
    assert "_on_before_batch_transfer" not in vars(module)


def test_a_module_can_be_copied_and_used_after_fit() -> None:
    module, _ = fit(ParcaeStrategy(), max_epochs=1)
    assert isinstance(module.net, PipelinedSequential)
    twin = copy.deepcopy(module)
    x, _ = samples(3)
    assert torch.equal(twin.net(x), module.net(x))
    plain = Regressor()
    plain.load_state_dict(module.state_dict())
    assert torch.equal(plain.net(x), module.net(x))
    assert module.net[0] is next(iter(module.net))


def test_the_callback_is_added_once() -> None:
    _, trainer = fit(ParcaeStrategy(), max_epochs=1)
    assert sum(isinstance(callback, ParcaeCallback) for callback in trainer.callbacks) == 1
    _, trainer = fit(ParcaeStrategy(), max_epochs=1, callbacks=[ParcaeCallback()])
    assert sum(isinstance(callback, ParcaeCallback) for callback in trainer.callbacks) == 1


def test_a_token_mean_does_not_change_one_pipeline() -> None:
    ours, _ = fit(ParcaeStrategy(micro_batch_size=8, loss_weight=lambda batch: 3.0 * len(batch[0])))
    plain, _ = fit("auto")
    assert ours.steps == plain.steps


# ---------------------------------------------------------------------- the throw-away step


class LeavesTraces(Regressor):
    """Changes whatever a step can change."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))
        self.losses: list[Tensor] = []
        self.counts = {"calls": 0}
        self.total = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counts["calls"] += 1
        self.total += float(torch.rand(()))
        self.newcomer = 1
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.log("loss", loss)
        return loss


class HasBuffer(Regressor):
    """Keeps a running mean outside of the pipelined module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean.mul_(0.9).add_(batch[0].mean(0), alpha=0.1)
        return self.loss(batch)


def operation_of(module: L.LightningModule) -> BatchOperation:
    trainer_of("auto").strategy.connect(module)
    module.trainer = trainer_of("auto")
    module.net = PipelinedSequential(module.net)
    return BatchOperation(
        module,
        module.net,
        seed=1,
        devices=[torch.device("cpu")],
        recompute="never",
        batch_norm="micro_batch",
        loss_weight=None,
    )


def test_the_throw_away_step_leaves_no_trace() -> None:
    module = LeavesTraces()
    operation = operation_of(module)
    lists = (module.losses, module.counts)
    state, rng = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    shape = operation.warm_up(samples(4))
    assert shape is not None and shape.shape == (4, 8)
    assert (module.losses, module.counts, module.total) == ([], {"calls": 0}, 0.0)
    assert (module.losses, module.counts) == lists and module.losses is lists[0] and module.counts is lists[1]
    assert not hasattr(module, "newcomer")
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert "log" not in vars(module)


def test_a_buffer_that_a_step_changes_outside_of_the_pipeline_is_refused() -> None:
    module = HasBuffer()
    with pytest.raises(MisconfigurationException, match=r"changes buffers outside .*: mean"):
        operation_of(module).warm_up(samples(4))
    assert not module.mean.any()


# ---------------------------------------------------------------------- what the throw-away step refuses


class Penalised(Regressor):
    """Adds a penalty on its parameters to the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + 0.1 * sum(p.pow(2).sum() for p in self.net[2].parameters())


class InPlace(Regressor):
    """Changes the pipeline's output in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).mul_(2.0).mean()


class MakesDict(nn.Module):
    def forward(self, value: Any) -> Any:
        return value["x"] if isinstance(value, dict) else {"x": value}


class PassesDict(Regressor):
    """Hands a dict from one layer to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, MakesDict())
        self.net.insert(2, MakesDict())


def test_parameters_used_beside_the_call_are_refused_where_there_may_be_stages() -> None:
    module = Penalised()
    with pytest.raises(MisconfigurationException, match=r"beside its call: 2.weight, 2.bias\. .*weight_decay"):
        operation_of(module).warm_up(samples(4))
    assert all(parameter.grad is None for parameter in module.parameters())
    module.net = nn.Sequential(*module.net)
    operation_of(module).warm_up(samples(4), may_cut=False)


def test_a_step_may_change_the_output_in_place() -> None:
    operation_of(InPlace()).warm_up(samples(4))


def test_a_layer_whose_output_cannot_leave_its_stage_is_named() -> None:
    module = PassesDict()
    with pytest.raises(
        MisconfigurationException, match=r"layer 1 of the pipelined module \(MakesDict\) .*returned dict"
    ):
        operation_of(module).warm_up(samples(4))
    module.net = nn.Sequential(*module.net)
    operation_of(module).warm_up(samples(4), may_cut=False)


# ---------------------------------------------------------------------- gradients clipped by the user's hook


class ClipsByHand(Regressor):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class ClipsTwice(Regressor):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")


@pytest.mark.filterwarnings("ignore")
def test_clipping_by_hand_is_refused_where_there_may_be_stages() -> None:
    with pytest.raises(MisconfigurationException, match=r"changes gradients by itself.*self\.clip_gradients"):
        fit(ParcaeStrategy(micro_batch_size=8), module=built(ClipsByHand))
    plain, _ = fit("auto", module=built(ClipsByHand))
    ours, _ = fit(ParcaeStrategy(micro_batch_size=8, max_stages=1), module=built(ClipsByHand))
    assert ours.steps == plain.steps


@pytest.mark.filterwarnings("ignore")
def test_a_hook_may_clip_with_lightnings_own_means() -> None:
    plain, _ = fit("auto", module=built(ClipsTwice))
    ours, _ = fit(ParcaeStrategy(micro_batch_size=8), module=built(ClipsTwice))
    assert ours.steps == plain.steps


# ---------------------------------------------------------------------- state


class SlicesLayers(Regressor):
    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net[:2].parameters(), "lr": 0.1}, {"params": self.net[2:].parameters()}]
        return torch.optim.SGD(groups, lr=0.01)


@pytest.mark.filterwarnings("ignore")
def test_layers_can_be_sliced_into_parameter_groups() -> None:
    plain, _ = fit("auto", module=built(SlicesLayers), max_epochs=1)
    ours, _ = fit(ParcaeStrategy(micro_batch_size=8), module=built(SlicesLayers), max_epochs=1)
    assert ours.steps == plain.steps


class SavesMidEpoch(Regressor):
    path = ""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.path and self.global_step == 3:
            self.trainer.save_checkpoint(self.path)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_from_within_an_epoch_loads_in_both_strategies(tmp_path: Path) -> None:
    module = SavesMidEpoch()
    module.path = str(tmp_path / "a.ckpt")
    whole, _ = fit(ParcaeStrategy(micro_batch_size=8), module=module, max_epochs=1)
    stored = torch.load(module.path, weights_only=True)
    assert "combined_loader" not in stored["loops"]["fit_loop"]["state_dict"]
    rest = {}
    for name, strategy in (("auto", "auto"), ("parcae", ParcaeStrategy(micro_batch_size=8))):
        again = Regressor()
        trainer_of(strategy, max_epochs=1).fit(again, loader(), ckpt_path=module.path)
        rest[name] = again.steps
    assert rest["parcae"] == whole.steps[3:]
    assert [step[:3] for step in rest["auto"]] == [step[:3] for step in whole.steps[3:]]


def test_a_state_with_holes_is_refused_in_fit() -> None:
    module = Regressor()
    strategy = ParcaeStrategy()
    strategy._pipeline_path = "net"
    module.net = PipelinedSequential(module.net)
    strategy._lightning_module = module
    module.net.set_guard(strategy._refuse_partial_state)
    strategy._session = Session.__new__(Session)
    strategy._session._resident, strategy._session.joined = {0, 1, 2}, False
    module.state_dict()
    strategy._in_fit = True
    with pytest.raises(MisconfigurationException, match=r"state_dict\(\) was called during fit, but 2 of 5 .*\(3, 4\)"):
        module.state_dict()
    assert strategy.lightning_module_state_dict().keys() == Regressor().state_dict().keys()
    copy.deepcopy(module).state_dict()
    pickle.loads(pickle.dumps(module)).state_dict()
    strategy._session._resident = set(range(5))
    module.state_dict()


# ---------------------------------------------------------------------- stopping


class Stops(Regressor):
    """Ends the training from within a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 4:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class OneOf(SoloSession):
    """Runs a batch as the member ``rank`` of two would, or one that has broken before."""

    def __init__(self, other: dict[str, Any], *, breaks: bool = False) -> None:
        super().__init__(5)
        self.other, self.breaks = other, breaks

    def run(self, point: str, attempt: Any, undo: Any) -> Any:
        if self.breaks:
            attempt()
            undo()
        return [attempt(), self.other]


@pytest.mark.filterwarnings("ignore")
def test_a_step_can_end_the_training() -> None:
    plain, _ = fit("auto", module=built(Stops))
    ours, trainer = fit(ParcaeStrategy(micro_batch_size=8), module=built(Stops))
    assert ours.steps == plain.steps
    assert len(ours.steps) == 5 and trainer.should_stop


def test_all_members_stop_where_one_step_says_so_and_a_broken_attempt_says_nothing() -> None:
    module = Regressor()
    operation = operation_of(module)

    class Loader:
        current = type("Plan", (), {"batch": 0, "epoch": 0})

    def run(session: Any, work: Any) -> list[Any]:
        return operation._run(session, "training_step", None, Loader(), lambda: None, work)[0]  # type: ignore[arg-type]

    def says(*answers: bool) -> Any:
        left = list(answers)

        def work(batch: Any, done: Any) -> dict[str, Any]:
            if left.pop(0):
                module.trainer.should_stop = True
            return {}

        return work

    assert run(OneOf({}), says(False)) == [{}, {}] and not module.trainer.should_stop
    run(OneOf({}, breaks=True), says(True, False))
    assert not module.trainer.should_stop
    assert run(OneOf({}), says(True))[0] == {"should_stop": True}
    module.trainer.should_stop = False
    run(OneOf({"should_stop": True}), says(False))
    assert module.trainer.should_stop


def test_a_value_that_a_hook_has_logged_otherwise_elsewhere_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    module = Regressor()
    operation = operation_of(module)

    class Loader:
        current = type("Plan", (), {"batch": 0, "epoch": 0})

    for value in (1.0, 2.0, 3.0):
        module.trainer._logger_connector._callback_metrics = {"kept": torch.tensor(1.0)}
        session = OneOf({"hooked": {"kept": value}})
        operation._run(session, "training_step", None, Loader(), lambda: None, lambda *args: {})  # type: ignore[arg-type]
    assert caplog.text.count("'kept' was logged by a hook outside of a step") == 1


# ---------------------------------------------------------------------- refusals


class NoSequential(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(8, 1)])  # type: ignore[assignment]


class TwoSequentials(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(nn.Linear(2, 2))


class Outside(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1)


class Manual(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Tied(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.net[2].weight = nn.Parameter(torch.zeros(16, 16))
        self.net.append(nn.Linear(16, 16))
        self.net[5].weight = self.net[2].weight


class Normed(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))


class Cumulative(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16, momentum=None))


class CallsTwice(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + self.loss(batch)


class CallsTwiceAndCatches(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        try:
            self.loss(batch)
        except Exception:
            pass
        return loss


class NeverCalls(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.Sequential.forward(self.net, batch[0]).mean()


class ReturnsNone(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss(batch)


class ReturnsVector(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).squeeze(-1)


class TwoOptimizers(Regressor):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[0].parameters(), 0.1), torch.optim.SGD(self.net[2].parameters(), 0.1)]


class SecondOrder(Regressor):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class ClipsByItself(Regressor):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class Hooked(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.net.register_forward_hook(lambda module, inputs, output: output * 2)


class Lazy(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(1))


class SubclassedAveraging(StochasticWeightAveraging):
    """A user's own variant."""


REFUSED: dict[str, tuple[type[Regressor], dict[str, Any], dict[str, Any], str]] = {
    "no sequential": (NoSequential, {}, {}, "has no nn.Sequential"),
    "two sequentials": (TwoSequentials, {}, {}, r"has 2 nn.Sequential: net, other.*pipeline_module='net'"),
    "unknown name": (Regressor, {"pipeline_module": "model"}, {}, "names nothing in Regressor"),
    "not a sequential": (Outside, {"pipeline_module": "head"}, {}, "must be an nn.Sequential"),
    "outside": (Outside, {}, {}, r"trainable parameters outside of net: head.weight, head.bias"),
    "manual": (Manual, {}, {}, "manual optimization"),
    "tied": (Tied, {}, {}, "Tied weights"),
    "batch norm": (Normed, {}, {}, r"holds BatchNorm \(1\).*batch_norm='deferred'"),
    "cumulative": (Cumulative, {"batch_norm": "deferred"}, {}, "momentum=None"),
    "hooks": (Hooked, {}, {}, "net itself has forward hooks"),
    "too many stages": (Regressor, {"num_stages": 6}, {}, "6 stages need at least 6 layers, but net has 5"),
    "called twice": (CallsTwice, {}, {}, "called the pipelined module 2 times"),
    "called twice, caught": (CallsTwiceAndCatches, {}, {}, "called the pipelined module 2 times"),
    "never called": (NeverCalls, {}, {}, "called the pipelined module 0 times"),
    "none": (ReturnsNone, {}, {}, "must return the loss.*NoneType"),
    "vector": (ReturnsVector, {}, {}, r"must return the loss.*shape \(8,\)"),
    "two optimizers": (TwoOptimizers, {}, {}, "trains with one optimizer, .*parameter groups"),
    "lbfgs": (SecondOrder, {}, {}, "LBFGS cannot be used"),
    "clipping unseen": (ClipsByItself, {}, {}, "gradient_clip_val"),
    "synchronised": (Regressor, {}, {"sync_batchnorm": True}, "sync_batchnorm=True"),
    "averaging": (Regressor, {}, {"callbacks": [SubclassedAveraging(0.1)]}, "SubclassedAveraging cannot be used"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_trained_exactly_is_refused_before_the_first_step(case: str) -> None:
    kind, arguments, options, message = REFUSED[case]
    module = kind()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(MisconfigurationException, match=message):
        fit(ParcaeStrategy(micro_batch_size=8, **arguments), module=module, num_sanity_val_steps=0, **options)
    assert module.steps == []
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_parameters_without_a_shape_are_refused_with_the_fix() -> None:
    with pytest.raises(MisconfigurationException, match=r"net.0.weight, net.0.bias, net.2.weight, ... have no shape"):
        fit(ParcaeStrategy(), module=Lazy())


def test_loss_scaling_is_refused() -> None:
    strategy = ParcaeStrategy()
    plugin = MixedPrecision("bf16-mixed", "cpu")
    plugin.scaler = torch.amp.GradScaler("cpu")
    strategy.precision_plugin = plugin
    with pytest.raises(MisconfigurationException, match="bf16-mixed"):
        strategy.check_module(Regressor())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from zip(*samples(20), strict=True)


@pytest.mark.parametrize(
    ("loaders", "message"),
    [
        (lambda: DataLoader(Stream(), batch_size=4), "without a length.*none"),
        (lambda: [loader(), loader()], "there are 2"),
        (lambda: [[torch.zeros(1)]], "needs a torch DataLoader, got Tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_loaders_that_cannot_be_read_exactly_once_are_refused(loaders: Any, message: str) -> None:
    module = Regressor()
    with pytest.raises(MisconfigurationException, match=message):
        trainer_of(ParcaeStrategy()).fit(module, loaders())
    assert module.steps == []


def test_a_fallback_directory_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(CheckpointError, match="/proc/nowhere"):
        fit(ParcaeStrategy(fallback_dir="/proc/nowhere/x"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1, got 0"),
        ({"num_stages": 0}, "num_stages must be at least 1"),
        ({"min_stages": 3, "max_stages": 2}, "max_stages must be at least 3"),
        ({"num_stages": 4, "max_stages": 2}, "num_stages=4 lies outside"),
        ({"failure_timeout": 0.5}, "failure_timeout must be at least 1"),
        ({"failure_timeout": 20, "min_instances_timeout": 5}, "must not be below failure_timeout"),
        ({"recompute": "sometimes"}, "recompute must be one of 'never', 'except_last', 'always'"),
        ({"batch_norm": "sync"}, "batch_norm must be one of None, 'deferred', 'micro_batch'"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParcaeStrategy(**arguments)
