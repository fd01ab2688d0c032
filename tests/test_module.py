"""The module by itself and in short runs by Python: its settings, schedules, checkpoints and what it logs."""

import itertools
import random
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from short_run import data, module_of, trainer_of
from torch import nn

from qerl_pl.algorithm import GRPO, DrGRPO
from qerl_pl.callbacks import ResumeCheckpoint
from qerl_pl.engines.base import SharedWeights
from qerl_pl.errors import UserError
from qerl_pl.modules import Policy, PolicyConfig, QeRLModule, SFTModule
from qerl_pl.modules.policy_module import PolicyModule
from qerl_pl.modules.qerl import BEFORE_TRAINING
from qerl_pl.policy.lora import PROJECTIONS
from qerl_pl.runtime.checkpoint_io import CHECKPOINT_KEY
from qerl_pl.runtime.checks import require_planned_end
from qerl_pl.runtime.random_state import random_state
from qerl_pl.seeds import stream_seed
from qerl_pl.types import EvaluatedPrompt, Evaluation, GradedAnswer, PromptBatch


@pytest.fixture(scope="module")
def uninterrupted(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[QeRLModule, Path]:
    """Four rollouts with a checkpoint at each."""
    run, module = tmp_path_factory.mktemp("module") / "run", module_of(tiny_policy_dir)
    trainer_of(run, ResumeCheckpoint(1, keep=9)).fit(module, datamodule=data())
    return module, run


def test_a_validation_before_changes_nothing(tiny_policy_dir: Path, tmp_path: Path) -> None:
    """Lightning validates in inference mode, whose tensors training cannot update."""
    states = []
    for validated in (False, True):
        module, trainer = module_of(tiny_policy_dir), trainer_of(tmp_path / str(validated))
        if validated:
            trainer.validate(module, datamodule=data(), verbose=False)
        random.seed(0)  # of the reward
        trainer.fit(module, datamodule=data())
        states.append(module.policy.trained_state())
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def resumed(base: Path, uninterrupted: tuple[QeRLModule, Path], run: Path, **settings: Any) -> QeRLModule:
    module, path = module_of(base, **settings), str(uninterrupted[1] / "checkpoints" / "step=2.ckpt")
    trainer_of(run).fit(module, datamodule=data(), ckpt_path=path, weights_only=True)
    return module


def test_settings_by_default() -> None:
    module = QeRLModule()
    update = module.update
    assert isinstance(module.objective, GRPO) and update.objective is module.objective
    assert (module.lr_scheduler, module.warmup_ratio, module.seed, update.seed) == ("cosine", 0.1, 0, 0)
    assert (update.epochs, update.minibatches, update.micro_batch_tokens) == (1, 1, None)
    assert (update.max_grad_norm, update.reference_share, module.policy_version) == (0.2, 0.125, 0)
    (group,) = module.make_optimizer([nn.Parameter(torch.ones(1))]).param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-5, (0.9, 0.99), 0.1)
    assert not module.automatic_optimization and not module.strict_loading


def test_settings_are_taken_and_bad_ones_refused() -> None:
    given: dict[str, Any] = {"update_epochs": 3, "minibatches": 4, "micro_batch_tokens": 5, "max_grad_norm": 6.0}
    module = QeRLModule(objective=DrGRPO(), monitor_kl=False, seed=7, **given)
    update = module.update
    assert (update.epochs, update.minibatches, update.micro_batch_tokens, update.max_grad_norm) == (3, 4, 5, 6.0)
    assert (update.objective, update.reference_share, update.seed, module.seed) == (DrGRPO(), 0.0, 7, 7)
    for name, value in (("update_epochs", 0), ("minibatches", 0), ("micro_batch_tokens", 0)):
        with pytest.raises(UserError, match=f"model.{name} .*got 0"):
            QeRLModule(**{name: value})
    with pytest.raises(UserError, match="^model.seed .*got -1"):
        QeRLModule(seed=-1)
    tried: list[Any] = []

    def optimizer(params: Any) -> torch.optim.Optimizer:
        tried.extend(params)
        return torch.optim.SGD(tried, lr=0.1)

    QeRLModule(optimizer=optimizer)
    assert [tuple(one.shape) for one in tried] == [(1, 1)]  # some optimizers take matrices alone
    for norm in (0.0, -1.0, float("nan")):
        with pytest.raises(UserError, match="max_grad_norm must be above 0"):
            QeRLModule(max_grad_norm=norm)
    assert QeRLModule(monitor_kl=True).update.reference_share == 1.0
    full = PolicyConfig(finetune="full", quantization="none")  # its reference is loaded for a loss alone
    assert QeRLModule(policy=full, monitor_kl=True).update.reference_share == 0.0
    for share in (-0.1, 1.5, float("nan")):
        with pytest.raises(UserError, match=f"monitor_kl must be true, false or .*got {share}"):
            QeRLModule(monitor_kl=share)
    for ratio in (-0.1, 1.1):
        with pytest.raises(UserError, match=r"warmup_ratio must be in \[0, 1\]"):
            QeRLModule(warmup_ratio=ratio)
    assert [QeRLModule(warmup_ratio=ratio, max_grad_norm=1.0).warmup_ratio for ratio in (0.0, 1.0)] == [0.0, 1.0]


def planned(max_steps: int | None, max_epochs: int | None, **settings: Any) -> QeRLModule:
    """A module in a trainer whose epochs have three rollouts."""
    module = QeRLModule(**{"update_epochs": 2, "minibatches": 2} | settings)
    loader = SimpleNamespace(batches_per_epoch=3)
    module._trainer = SimpleNamespace(max_steps=max_steps, max_epochs=max_epochs, datamodule=loader)  # type: ignore
    return module


@pytest.mark.parametrize(
    ("max_steps", "max_epochs", "rollouts"),
    [
        (-1, 2, 6),
        (8, -1, 2),
        (9, None, 3),
        (1, 1, 1),
        (8, 2, 2),
        (80, 2, 6),
        (None, 1, 3),
        (0, 1, 3),
        (8, 1000, 2),
        (-1, 999, 2997),
    ],
)
def test_a_run_is_planned_by_the_nearest_of_its_limits(max_steps: int, max_epochs: int, rollouts: int) -> None:
    assert planned(max_steps, max_epochs).planned_batches() == rollouts


@pytest.mark.parametrize(("max_steps", "max_epochs"), [(-1, -1), (-1, None), (0, 0)])
def test_a_run_without_an_end_is_refused(max_steps: int, max_epochs: int | None) -> None:
    with pytest.raises(UserError, match="need a planned end"):
        require_planned_end(planned(max_steps, max_epochs).trainer)


@pytest.mark.parametrize(
    ("given", "epochs"),
    [
        ({}, 1),
        ({"max_steps": -1}, 1),
        ({"min_epochs": 2}, 2),
        ({"min_steps": 5}, 1),
        ({"max_epochs": 1000}, 1000),
        ({"max_epochs": -1}, -1),
        ({"max_steps": 3}, None),
        ({"max_time": {"hours": 1}}, None),
        ({"fast_dev_run": True}, 1),
    ],
)
@pytest.mark.parametrize("module", [QeRLModule(), SFTModule()])
def test_a_run_without_a_limit_has_one_epoch(given: dict[str, Any], epochs: int | None, module: PolicyModule) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **given)
    assert trainer.max_epochs == (epochs if {"max_epochs", "fast_dev_run"} & given.keys() else None)
    for stage in (TrainerFn.VALIDATING, TrainerFn.FITTING):
        module.trainer = None
        trainer.state.fn = stage
        module.trainer = trainer
        assert stage == TrainerFn.FITTING or trainer.max_epochs in (None, epochs)
    assert module.trainer is trainer and trainer.max_epochs == epochs
    module.trainer = None


def test_the_rate_rises_over_its_share_of_the_steps_and_falls_to_the_end() -> None:
    module = planned(8, -1, lr_scheduler="linear", warmup_ratio=0.25)
    module.policy = nn.Linear(2, 2)  # type: ignore[assignment]
    module.policy.bias.requires_grad_(False)
    configured: Any = module.configure_optimizers()
    scheduled = configured["lr_scheduler"]
    rate = scheduled["scheduler"].lr_lambdas[0]
    assert [rate(step) for step in range(9)] == pytest.approx([0, 1 / 2, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])
    assert scheduled["scheduler"].optimizer is configured["optimizer"]
    assert scheduled["interval"] == "step"  # of which LearningRateMonitor logs each
    assert [group["params"] for group in configured["optimizer"].param_groups] == [[module.policy.weight]]
    for name in ("reduce_lr_on_plateau", "nonesuch"):
        module.lr_scheduler = name
        with pytest.raises(UserError, match=f"that steps are enough for; got '{name}', which says:"):
            module.configure_optimizers()


def test_other_optimizers_of_a_subclass_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = planned(8, -1)
    monkeypatch.setattr(module, "optimizers", lambda: [])
    monkeypatch.setattr(module, "lr_schedulers", lambda: None)
    with pytest.raises(UserError, match="configure_optimizers of QeRLModule returns others; remove it, and set"):
        module.optimizer_and_schedule()


def test_a_policy_is_loaded_once_by_the_seed_of_its_adapter(tiny_policy_dir: Path) -> None:
    module, device = module_of(tiny_policy_dir), torch.device("cpu")
    place, state = SimpleNamespace(root_device=device), SimpleNamespace(fn=TrainerFn.FITTING)
    module._trainer = SimpleNamespace(strategy=place, state=state, precision="32-true")  # type: ignore[assignment]
    module.configure_model()
    policy = module.policy
    expected = Policy(tiny_policy_dir, module.policy_config, device, stream_seed(5, "adapter")).trained_state()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in policy.trained_state().items())
    module.configure_model()
    assert module.policy is policy


@pytest.mark.parametrize("stage", [TrainerFn.FITTING, TrainerFn.TESTING])
@pytest.mark.parametrize(("device", "backends"), [("cpu", []), ("cuda", ["triton"])])
def test_a_policy_is_on_the_trainers_device_with_the_weights_that_are_lent(
    device: str, backends: list[str], stage: TrainerFn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    forgotten: list[torch.device] = []
    monkeypatch.setattr("qerl_kernels.backend.select_backend", asked.append)
    monkeypatch.setattr("qerl_pl.modules.policy_module.forget_cublas_config", forgotten.append)
    monkeypatch.setattr("qerl_pl.modules.policy_module.Policy", lambda *given: given)
    for shared in (None, SharedWeights({}, {})):
        module, asked[:] = module_of(tmp_path), []
        module.base_folder = tmp_path  # type: ignore[misc]
        module.shared_weights = shared
        place, state = SimpleNamespace(root_device=torch.device(device)), SimpleNamespace(fn=stage)
        module._trainer = SimpleNamespace(strategy=place, state=state, precision="32-true")  # type: ignore[assignment]
        module.configure_model()
        expected = (tmp_path, module.policy_config, place.root_device, stream_seed(5, "adapter"))
        reference = module.objective.needs_reference
        assert module.policy == (*expected, shared, reference) and asked == backends
        assert forgotten.pop() == place.root_device


@pytest.mark.parametrize(("stage", "fitting"), [("val", True), ("val", False), ("test", False)])
@pytest.mark.parametrize(("name", "loader"), [("", 0), ("hard", 0), ("hard", 1)])
def test_an_evaluation_is_logged_under_the_name_of_its_set(stage: str, fitting: bool, name: str, loader: int) -> None:
    right, wrong = GradedAnswer(True, None), GradedAnswer(False, None)
    prompts = [EvaluatedPrompt("p0", right, [right, wrong]), EvaluatedPrompt("p1", wrong, [wrong, wrong])]
    module, logged, options = module_of(Path("nowhere")), {}, {}

    def log(tag: str, value: Any, **given: Any) -> None:
        logged[tag], options[tag] = value, given

    module.log = log  # type: ignore[method-assign, assignment]
    module.policy_version = 7
    state = SimpleNamespace(fn=TrainerFn.FITTING if fitting else TrainerFn.VALIDATING)
    module._trainer = SimpleNamespace(state=state)  # type: ignore[assignment]
    step, place = getattr(module, {"val": "validation_step"}.get(stage, "test_step")), f"{stage}/{name}".rstrip("/")
    for batch in (prompts, prompts[:1]):
        step(PromptBatch([], evaluation=Evaluation(batch, name)), 0, loader)
    means = {tag: logged.pop(tag).compute().item() for tag in (f"{place}/accuracy", f"{place}/pass@1")}
    # Over all prompts, not over batches: two right ones of three; half of the samples of two of three.
    assert list(means.values()) == pytest.approx([2 / 3, 1 / 3])
    others = (
        "pass@2",
        "maj@2",
        "length_mean",
        "truncated_frac",
        "unanswered_frac",
    )
    assert [logged.pop(f"{place}/{metric}").compute().item() for metric in others][0] == pytest.approx(2 / 3)
    assert logged == ({"rollouts": 7.0} | ({} if fitting else {"step": 6.0}) if loader == 0 else {})
    assert [options[tag]["prog_bar"] for tag in means] == [True, False]
    assert all(options[tag]["metric_attribute"] == tag and options[tag]["on_epoch"] is True for tag in means)
    shared = {"batch_size": 1, "add_dataloader_idx": False}
    assert all(given.items() >= shared.items() for given in options.values())
    assert loader or options["rollouts"] == shared | {"logger": False}


def test_a_checkpoint_holds_what_training_changes_and_what_it_fits(uninterrupted: tuple[QeRLModule, Path]) -> None:
    module, run = uninterrupted
    checkpoint = torch.load(run / "checkpoints" / "step=4.ckpt", weights_only=True)
    state = checkpoint["qerl"]
    trained = module.policy.trained_state()
    assert checkpoint["state_dict"] == {} and state["trained"].keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in state["trained"].items())
    found = {name: value for name, value in state.items() if name not in ("trained", "random_states")}
    expected = {"policy_version": 4, "base": module.base_identity, "scaling": 2.0, "steps_per_batch": 2}
    expected["built"] = {"optimizer": "AdamW", "lr_scheduler": "LambdaLR()"}
    policy = asdict(module.policy_config)  # so that a run by Python can be exported
    lora = {"rank": 4, "alpha": 8.0, "targets": PROJECTIONS, "use_rslora": False, "dropout": 0.0}
    started = {"kind": "reinforcement learning", "lora": lora, "start": None}
    assert found == expected | started | {"finetune": "lora", "policy": policy, "recomputation": None}
    assert (run / "adapter" / "adapter_model.safetensors").is_file()


def test_a_resumed_run_ends_with_the_same_bits(
    uninterrupted: tuple[QeRLModule, Path], tiny_policy_dir: Path, tmp_path: Path
) -> None:
    random.seed(99)
    torch.manual_seed(99)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "of an earlier run").touch()
    module = resumed(tiny_policy_dir, uninterrupted, tmp_path)
    expected = uninterrupted[0].policy.trained_state()
    assert module.policy_version == 4
    assert all(torch.equal(tensor, expected[name]) for name, tensor in module.policy.trained_state().items())
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert "adapter_model.safetensors" in names and "of an earlier run" not in names


def test_random_states_that_wait_for_a_rollout_are_kept_by_a_checkpoint_before_it(
    uninterrupted: tuple[QeRLModule, Path], tiny_policy_dir: Path, tmp_path: Path
) -> None:
    """As of a run that is killed between its last step and its end, and resumed to end."""
    path = uninterrupted[1] / "checkpoints" / "step=4.ckpt"
    random.seed(99)
    torch.manual_seed(99)
    end, module = tmp_path / "end.ckpt", module_of(tiny_policy_dir)
    callback = LambdaCallback(on_fit_end=lambda trainer, _: trainer.save_checkpoint(end))
    trainer_of(tmp_path, callback).fit(module, datamodule=data(), ckpt_path=str(path), weights_only=True)
    ends = [path, end]
    states = [torch.load(one, weights_only=True)["qerl"]["random_states"][0] for one in ends]
    assert torch.equal(states[0]["torch"], states[1]["torch"]) and states[0]["python"] == states[1]["python"]


@pytest.mark.parametrize(("rank", "size", "taken"), [(0, 2, 0), (1, 2, 1), (0, 1, 0), (2, 3, 0)])
def test_each_rank_takes_its_own_random_state_where_as_many_are_there(
    rank: int, size: int, taken: int, uninterrupted: tuple[QeRLModule, Path]
) -> None:
    module, saved, states = (
        uninterrupted[0],
        torch.load(uninterrupted[1] / "checkpoints" / "step=4.ckpt", weights_only=True),
        [],
    )
    with isolate_rng():
        for seed in (1, 2):
            random.seed(seed)
            states.append(random_state())
        trainer, state = module._trainer, SimpleNamespace(fn=TrainerFn.FITTING)
        module._trainer = SimpleNamespace(global_rank=rank, world_size=size, state=state)  # type: ignore[assignment]
        module.on_load_checkpoint(saved | {"qerl": saved["qerl"] | {"random_states": states}})
        module._trainer = trainer
        module.sampling_weights()
        found = random.random()
        random.seed(taken + 1)
        assert found == random.random()


def test_what_a_run_chose_to_recompute_goes_with_its_checkpoints(
    uninterrupted: tuple[QeRLModule, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, saved = (
        uninterrupted[0],
        torch.load(uninterrupted[1] / "checkpoints" / "step=4.ckpt", weights_only=True)["qerl"],
    )
    chosen: list[Any] = []
    checkpoint: dict[str, Any] = {}
    choice = SimpleNamespace(state=lambda: "selective", load=chosen.append)
    monkeypatch.setattr(module.policy, "checkpointing", choice)
    module.on_save_checkpoint(checkpoint)
    assert checkpoint["qerl"]["recomputation"] == "selective"
    module.on_load_checkpoint({"optimizer_states": [], "qerl": saved | {"recomputation": "true"}})
    monkeypatch.setattr(module, "_random_state", None)
    assert chosen == ["true"]


def test_what_the_optimizer_will_hold_is_counted_on_where_no_checkpoint_brings_it(
    uninterrupted: tuple[QeRLModule, Path], tiny_policy_dir: Path, tmp_path: Path
) -> None:
    """Momentum is a float32 a weight; the choice of the first run is not that of the second, which goes on from a run
    that made none."""
    for path, to_come in ((None, 4.0), (str(uninterrupted[1] / "checkpoints" / "step=2.ckpt"), 0.0)):
        module = module_of(tiny_policy_dir)
        module.policy_config = replace(module.policy_config, gradient_checkpointing="auto")
        if path is None:
            module.make_optimizer = lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.5)
        trainer_of(tmp_path).fit(module, datamodule=data(), ckpt_path=path, weights_only=path and True)
        assert module.policy.checkpointing.state() == "false"
        assert module.policy.checkpointing._pending_state_bytes == to_come


def test_a_resumed_run_takes_the_rates_it_is_given(
    uninterrupted: tuple[QeRLModule, Path], tiny_policy_dir: Path, tmp_path: Path
) -> None:
    class Rates(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            (group,) = trainer.optimizers[0].param_groups
            found.append({name: group[name] for name in ("lr", "weight_decay", "betas")})
            found.append({"base": list(trainer.lr_scheduler_configs[0].scheduler.base_lrs)})

    found: list[dict[str, Any]] = []
    module = module_of(tiny_policy_dir, lr_scheduler="linear", warmup_ratio=0.0)
    module.make_optimizer = lambda params: torch.optim.AdamW(params, lr=0.5, weight_decay=0.25, betas=(0.5, 0.5))
    path = str(uninterrupted[1] / "checkpoints" / "step=2.ckpt")
    trainer_of(tmp_path, Rates()).fit(module, datamodule=data(), ckpt_path=path, weights_only=True)
    # Four of eight steps are done.
    assert found[:2] == [{"lr": 0.25, "weight_decay": 0.25, "betas": (0.5, 0.5)}, {"base": [0.5]}]


@pytest.mark.parametrize(("limit", "warns"), [(2, False), (3, True)])
def test_a_limit_that_does_not_extend_a_finished_epoch_is_said(
    limit: int, warns: bool, tiny_policy_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fit(batches: int, path: str | None) -> int:
        module, given = module_of(tiny_policy_dir), {"max_steps": -1, "max_epochs": 1, "limit_train_batches": batches}
        trainer = trainer_of(tmp_path, ResumeCheckpoint(9), **given)
        trainer.fit(module, datamodule=data(), ckpt_path=path, weights_only=path and True)
        return module.policy_version

    assert fit(2, None) == fit(limit, str(tmp_path / "checkpoints" / "step=2.ckpt")) == 2
    said = "its epoch after 2 batches, which a higher trainer.limit_train_batches does not extend" in caplog.text
    assert said == warns


@pytest.mark.parametrize(
    ("callbacks", "settings", "message"),
    [
        ([EMAWeightAveraging()], {}, "the policy's own weights, .* got EMAWeightAveraging; leave it out"),
        ([StochasticWeightAveraging(swa_lrs=0.1)], {}, "got StochasticWeightAveraging; leave it out"),
        ([GradientAccumulationScheduler({0: 2})], {}, "got GradientAccumulationScheduler; leave it out"),
        ([LearningRateFinder()], {}, "got LearningRateFinder; leave it out"),
        ([BatchSizeFinder()], {}, "got BatchSizeFinder; leave it out"),
        ([], {"limit_train_batches": 0}, "trains on batches; got trainer.limit_train_batches=0; raise it"),
        ([], {"barebones": True}, "training logs its metrics; got a Trainer with barebones=True; leave it out"),
    ],
)
def test_what_training_has_no_use_for_is_refused(
    callbacks: list[Callback], settings: dict[str, Any], message: str, tiny_policy_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        trainer_of(tmp_path, *callbacks, **settings).fit(module_of(tiny_policy_dir), datamodule=data())


def test_a_checkpoint_of_each_rollout_has_its_number(tiny_policy_dir: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"monitor": "reward/mean", "every_n_train_steps": 1, "save_top_k": -1}
    saves = ModelCheckpoint(tmp_path, "best-{rollouts:.0f}", **given)
    trainer_of(tmp_path / "run", saves, max_epochs=1).fit(module_of(tiny_policy_dir), datamodule=data())
    found = {path.name: torch.load(path, weights_only=True)[CHECKPOINT_KEY] for path in tmp_path.glob("*.ckpt")}
    assert {name: state["policy_version"] for name, state in found.items()} == {
        f"best-rollouts={number}.ckpt": number for number in (1, 2, 3, 4)
    }


def test_weights_alone_are_no_state_to_go_on_from(
    uninterrupted: tuple[QeRLModule, Path], tiny_policy_dir: Path, tmp_path: Path
) -> None:
    whole = torch.load(uninterrupted[1] / "checkpoints" / "step=2.ckpt", weights_only=True)
    torch.save({key: value for key, value in whole.items() if key != "optimizer_states"}, tmp_path / "best.ckpt")
    with pytest.raises(UserError, match="its optimizer's state; this one has weights alone, by save_weights_only"):
        trainer_of(tmp_path).fit(
            module_of(tiny_policy_dir), datamodule=data(), ckpt_path=str(tmp_path / "best.ckpt"), weights_only=True
        )


@pytest.mark.parametrize(("epochs", "warns"), [(2, False), (1, True)])
def test_other_steps_a_rollout_shift_the_schedule_and_are_said(
    epochs: int,
    warns: bool,
    uninterrupted: tuple[QeRLModule, Path],
    tiny_policy_dir: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = str(uninterrupted[1] / "checkpoints" / "step=2.ckpt")
    module = module_of(tiny_policy_dir, update_epochs=epochs)
    trainer_of(tmp_path).fit(module, datamodule=data(), ckpt_path=path, weights_only=True)
    said = "a batch had 2 of them and has 1 now" in caplog.text
    assert said == warns


def test_what_does_not_fit_a_checkpoint_is_refused(
    uninterrupted: tuple[QeRLModule, Path], tiny_policy_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="keeps its optimizer; got SGD for AdamW"):
        resumed(tiny_policy_dir, uninterrupted, tmp_path, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    momentum = lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.5)  # noqa: E731
    writes = trainer_of(tmp_path, ResumeCheckpoint(1, keep=9))
    writes.fit(module_of(tiny_policy_dir, optimizer=momentum), datamodule=data())
    with pytest.raises(UserError, match="keeps its optimizer; got AdamW for SGD"):  # which cannot read its state
        resumed(tiny_policy_dir, (uninterrupted[0], tmp_path), tmp_path)
    with pytest.raises(UserError, match="alpha / rank; the checkpoint's is 2.0 and this run's 1.0;"):
        resumed(tiny_policy_dir, uninterrupted, tmp_path, alpha=4.0)
    with pytest.raises(UserError, match="must be one of this trainer's"):
        uninterrupted[0].on_load_checkpoint({"state_dict": {}})


def test_what_is_logged_shown_and_tested(
    uninterrupted: tuple[QeRLModule, Path], tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, module = trainer_of(tmp_path), module_of(tiny_policy_dir)
    monkeypatch.setattr("qerl_pl.modules.qerl.time", SimpleNamespace(perf_counter=itertools.count(50.0).__next__))
    trainer.fit(module, datamodule=data())
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    seconds = sum(value for name, value in metrics.items() if name.startswith("time/"))
    assert metrics["perf/tokens_per_s"] == pytest.approx(metrics["completions/sampled_tokens"] / seconds, rel=1e-4)
    assert metrics["time/update_s"] == 1 and metrics["rollouts"] == 4  # a clock that ticks when it is looked at
    shown = {"reward/mean", "policy/entropy", "completions/length_mean", "val/accuracy"}
    assert set(trainer.progress_bar_metrics) == shown
    assert "step" not in metrics
    for stage, run in (("val", trainer.validate), ("test", trainer.test)):
        (found,) = run(module, datamodule=data(), verbose=False)
        names = {"accuracy", "pass@1", "reward_mean", "length_mean", "truncated_frac"}  # the reward tells no answers
        assert found.keys() == {"step", *(f"{stage}/{name}" for name in names)} and found["step"] == 3
    fresh = module_of(tiny_policy_dir)
    (found,) = trainer_of(tmp_path).validate(fresh, datamodule=data(), verbose=False)
    assert found["step"] == BEFORE_TRAINING


def test_what_a_run_cannot_do_is_said_at_its_start(tiny_policy_dir: Path, tmp_path: Path) -> None:
    alone = QeRLModule()
    for what, step in (("training", alone.training_step), ("validation", alone.validation_step)):
        with pytest.raises(UserError, match=f"^{what} needs a callback that samples"):
            step(PromptBatch([]), 0)
    plain = Trainer(accelerator="cpu", max_epochs=1, logger=False)
    with pytest.raises(UserError, match="^fit needs a callback that samples"):
        alone.check_first(plain, "fit")
    alone.check_first(trainer_of(tmp_path), "fit")
    for run in ("fit", "validate", "test"):
        with pytest.raises(UserError, match="the policy sets its own precision; trainer.precision is bf16-true"):
            getattr(trainer_of(tmp_path, precision="bf16-true"), run)(module_of(tiny_policy_dir), datamodule=data())
    trainer = trainer_of(tmp_path, fast_dev_run=True)
    trainer.fit(module_of(tiny_policy_dir), datamodule=data())
    assert not (tmp_path / "adapter").exists()


def test_a_loss_that_is_not_finite_ends_the_run_in_one_line(tiny_policy_dir: Path, tmp_path: Path) -> None:
    module = module_of(tiny_policy_dir, lr=1e30, warmup_ratio=0.0)
    with pytest.raises(UserError, match="^loss and gradient must be finite; got .* go on with --resume auto$"):
        trainer_of(tmp_path).fit(module, datamodule=data())
