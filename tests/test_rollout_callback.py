"""RolloutCallback and AdaptiveQuantizationNoise: the engine they launch, the batch they fill in, their warnings."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fit_helpers import Vowels
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from rank_helpers import on_ranks
from scripted import PROMPTS, SAMPLING, Even, Scripted, Watched, Words, config_of, evaluator_of
from short_run import data, module_of, rollout_of, trainer_of

from qerl_pl.algorithm import DrGRPO, NoiseSchedule, NormNoise, OnPolicyDistillation
from qerl_pl.callbacks import AdaptiveQuantizationNoise, EvaluationConfig, ResumeCheckpoint, RolloutCallback
from qerl_pl.callbacks.rollout import PROMPTS_KEY
from qerl_pl.datamodules import ArithmeticDataModule, PromptDataModule
from qerl_pl.engines import EngineSpec, TransformersEngine
from qerl_pl.engines.base import SharedWeights
from qerl_pl.errors import UserError
from qerl_pl.evaluation.evaluator import EvaluatorConfig
from qerl_pl.modules import QeRLModule
from qerl_pl.policy.lora import PROJECTIONS
from qerl_pl.rewards import GSM8KAnswer, MathAnswer
from qerl_pl.rollout.collector import Collector, CollectorConfig
from qerl_pl.runtime.communicator import Communicator
from qerl_pl.seeds import stream_seed
from qerl_pl.toy.task import ArithmeticTask
from qerl_pl.types import EvalSampling, Prompt, PromptBatch, SamplingConfig


class Recording(TransformersEngine):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: list[EngineSpec] = []
        self.noise: list[tuple[int, float | None]] = []
        self.closed = 0

    def launch(self, spec: EngineSpec) -> None:
        self.specs.append(spec)
        super().launch(spec)

    def shared_weights(self) -> SharedWeights | None:
        return SharedWeights({}, {})

    def sync(self, weights: Any) -> Any:
        self.noise.append((weights.version, None if weights.noise is None else weights.noise.sigma))
        return super().sync(weights)

    def close(self) -> None:
        self.closed += 1
        super().close()


def test_the_engine_lives_for_a_stage_and_is_closed_once(tiny_policy_dir: Path, tmp_path: Path) -> None:
    engine, module = Recording(), module_of(tiny_policy_dir)
    rollout = rollout_of(engine)
    seen: list[tuple[int, SharedWeights | None, int, Any]] = []

    def note(*_: Any) -> None:  # while the stage goes on
        seen.append((engine.closed, module.shared_weights, rollout.collector.seed, rollout.collector.objective))

    watch = LambdaCallback(on_fit_start=note, on_fit_end=note, on_validation_start=note, on_validation_end=note)
    trainer = trainer_of(tmp_path, watch, rollout=rollout, limit_val_batches=0)
    rollout.close()
    assert engine.closed == 0
    for known in ({"p1": 5.0}, {"p2": 6.0}):  # of a checkpoint
        rollout.load_state_dict({"expected_lengths": known})
        assert rollout.state_dict() == {"expected_lengths": known}
    trainer.fit(module, datamodule=data())
    lora, shared = module.policy_config.lora_spec, SharedWeights({}, {})
    assert lora is not None
    spec = EngineSpec(module.base_folder, torch.float32, torch.device("cpu"), 4, lora.targets, max_tokens=256 + 4)
    assert engine.specs == [spec] and seen == [(0, shared, 5, module.objective)] * 2
    for _ in range(2):
        rollout.close()
        assert engine.closed == 1
    seen.clear()
    trainer.limit_val_batches = 1.0
    trainer.validate(module, datamodule=data(), verbose=False)
    assert engine.specs == [spec] * 2 and engine.closed == 2
    assert seen == [(1, None, 5, module.objective)] * 2  # the policy is loaded already
    assert rollout.state_dict()["expected_lengths"] == {}  # of another run than this one


def test_a_reward_sees_the_references_of_the_data_before_the_engine_starts(
    tiny_policy_dir: Path, tmp_path: Path
) -> None:
    asked: list[Mapping[str, str]] = []

    class Refusing(Vowels):
        def check_references(self, references: Mapping[str, str]) -> None:
            asked.append(references)
            raise UserError("rewrite them")

    for stage in ("fit", "test"):
        engine, task = Recording(), data()
        rollout = RolloutCallback([Refusing()], engine, group_size=2, sampling=SamplingConfig(max_tokens=4))
        with pytest.raises(UserError, match="rewrite them"):
            getattr(trainer_of(tmp_path, rollout=rollout), stage)(module_of(tiny_policy_dir), datamodule=task)
        assert engine.specs == []
    assert [len(references) for references in asked] == [10, 12]  # 8 to train on, 2 to validate, 2 to test
    assert all(references[row.id] == row.reference for references in asked for row in task.train_rows())


class Renamed(ArithmeticDataModule):
    """Lightning keeps a data module's state by the name of its class, and hands it to no other."""


@pytest.mark.parametrize("name", ["step=2", pytest.param("step=4", marks=pytest.mark.nightly)])
def test_other_prompts_are_refused_from_whatever_class_they_come(
    tiny_policy_dir: Path, tmp_path: Path, name: str
) -> None:
    trainer_of(tmp_path, ResumeCheckpoint(2, keep=9)).fit(module_of(tiny_policy_dir), datamodule=data())
    path = tmp_path / "checkpoints" / f"{name}.ckpt"

    def go_on(of: ArithmeticDataModule, path: Path = path) -> int:
        module = module_of(tiny_policy_dir)
        trainer_of(tmp_path / "on", max_epochs=2).fit(module, datamodule=of, ckpt_path=str(path), weights_only=True)
        return module.policy_version

    sizes = {"train_size": 8, "batch_size": 2, "val_size": 2, "test_size": 2}
    other = Renamed(ArithmeticTask(seed=1), **sizes)
    with pytest.raises(UserError, match="the training prompts differ; restore the data and their options"):
        go_on(other)
    assert go_on(Renamed(**sizes)) == 8
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint[PROMPTS_KEY] == checkpoint["ArithmeticDataModule"]


def test_noise_is_that_of_the_version_in_training_and_none_in_evaluation(tiny_policy_dir: Path, tmp_path: Path) -> None:
    engine, noise = Recording(), AdaptiveQuantizationNoise(0.02, 0.005, 3, "linear", False)
    trainer = trainer_of(tmp_path, noise, rollout=rollout_of(engine), noise=False)
    trainer.fit(module_of(tiny_policy_dir), datamodule=data())
    schedule = NoiseSchedule(0.02, 0.005, 3, "linear", False)
    expected = [(version, schedule.sigma(version, 4)) for version in range(4)]
    assert [(version, sigma) for version, sigma in engine.noise if sigma is not None] == expected
    assert engine.noise[-1] == (4, None)  # the validation at the end
    assert noise.state_dict() == {"planned_rollouts": 4}
    resumed = AdaptiveQuantizationNoise()
    resumed.load_state_dict({"planned_rollouts": 9})
    assert resumed.state_dict() == {"planned_rollouts": 9} and resumed.schedule == NoiseSchedule()
    module = module_of(tiny_policy_dir)
    assert noise_of(resumed, trainer, module, 9) == NormNoise(pytest.approx(1e-4), 5, 9)
    resumed.setup(trainer, module, "fit")  # of another run, which plans anew
    assert resumed.planned_rollouts is None


def noise_of(callback: AdaptiveQuantizationNoise, trainer: Any, module: QeRLModule, version: int) -> NormNoise:
    """The noise that the callback sets in a batch at a policy version."""
    module.policy_version, batch = version, PromptBatch([])
    callback.on_train_batch_start(trainer, module, batch, 0)
    assert batch.noise is not None
    return batch.noise


@pytest.mark.parametrize("first", [True, False])
def test_noise_is_set_before_sampling_in_any_order_of_the_callbacks(
    first: bool, tiny_policy_dir: Path, tmp_path: Path
) -> None:
    engine, noise = Recording(), AdaptiveQuantizationNoise(0.02, 0.005, 3, "linear", False)
    callbacks = [noise, rollout_of(engine)] if first else [rollout_of(engine), noise]
    trainer = trainer_of(tmp_path, *callbacks[1:], rollout=callbacks[0], noise=False, max_steps=1)
    trainer.fit(module_of(tiny_policy_dir), datamodule=data())
    assert trainer.callbacks.count(noise) == 1 and (0, 0.02) in engine.noise


@pytest.mark.parametrize(
    ("batches", "stages", "noiseless", "said"),
    [
        (2, 4, True, "2 planned rollouts are fewer than 4 stages of noise: sigma is at most 0.0001 (sigma_start=0.01)"),
        (3, 4, True, "3 planned rollouts are fewer than 4 stages of noise: sigma is at most 0.01 (sigma_start=0.01)"),
        (1, 2, True, "1 planned rollouts are fewer than 2 stages of noise: sigma is at most 0 (sigma_start=0.01)"),
        (4, 4, True, None),
        (1, 1, False, None),
    ],
)
def test_a_run_too_short_for_its_stages_of_noise_is_told(
    batches: int, stages: int, noiseless: bool, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    module, trainer = module_of(Path("nowhere")), SimpleNamespace(max_steps=-1, max_epochs=1, global_rank=0)
    trainer.datamodule = SimpleNamespace(batches_per_epoch=batches)
    module._trainer = trainer  # type: ignore[assignment]
    for sigma in (0.01, 0.0):  # without noise there is nothing to tell
        noise = AdaptiveQuantizationNoise(sigma, sigma / 100, stages, noiseless_first_stage=noiseless)
        assert max(noise_of(noise, trainer, module, version).sigma for version in range(batches)) <= sigma
    warned = [record.getMessage() for record in caplog.records]
    assert warned == ([] if said is None else [f"{said}; lower stages, or plan more rollouts"])


def test_a_run_tells_sigma_beside_the_scales_of_the_norms(
    tiny_policy_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, noise = module_of(tiny_policy_dir), AdaptiveQuantizationNoise()
    trainer = trainer_of(tmp_path, noise, noise=False, max_steps=2, limit_val_batches=0)
    caplog.set_level("INFO")
    trainer.fit(module, datamodule=data())
    assert "noise.sigma_start 0.01 is 1 % of a norm's scale: 1 (root mean square, median of 4 norms)" in caplog.messages
    norms = module.policy.trained.norms().values()
    for norm, value in zip(norms, (1.0, 2.0, 2.0, 6.0), strict=True):
        norm.weight.data.fill_(value)
    for settings, said in (
        ({}, ["noise.sigma_start 0.01 is 0.5 % of a norm's scale: 2 (root mean square, median of 4 norms)"]),
        ({"relative": True}, []),
        ({"sigma_start": 0.0, "sigma_end": 0.0}, []),
    ):
        caplog.clear()
        again = AdaptiveQuantizationNoise(**settings)
        again.setup(trainer, module, "fit")
        again.on_train_start(trainer, module)
        assert caplog.messages == said


@pytest.mark.parametrize("reward", [MathAnswer(), GSM8KAnswer()])
def test_an_empty_reference_is_refused_where_a_reward_compares_with_it(
    tiny_policy_dir: Path, tmp_path: Path, reward: Any
) -> None:
    class Empty(ArithmeticDataModule):
        def train_rows(self) -> Any:
            return [
                replace(row, reference=" ") if row.id in ("train-3", "train-5") else row for row in super().train_rows()
            ]

    def fit(*rewards: Any) -> None:
        rollout, given = (
            RolloutCallback([*rewards], Recording(), 2, SamplingConfig(max_tokens=4)),
            Empty(train_size=8, batch_size=2, val_size=2, test_size=2),
        )
        trainer_of(tmp_path, rollout=rollout, max_steps=1).fit(module_of(tiny_policy_dir), datamodule=given)

    said = "compares with references, which must not be empty; 2 of 10 are, the first that of train-3;"
    with pytest.raises(UserError, match=said):
        fit(reward)
    fit(Vowels())  # which reads none


@pytest.mark.parametrize("rounds", [0, 2])
def test_dynamic_sampling_needs_an_objective_that_learns_from_rewards(rounds: int, tiny_policy_dir: Path) -> None:
    module = module_of(tiny_policy_dir, objective=OnPolicyDistillation())
    rollout = RolloutCallback([Vowels()], Recording(), 2, SamplingConfig(max_tokens=4), resample_rounds=rounds)
    trainer: Any = SimpleNamespace(lightning_module=module, datamodule=data())
    if not rounds:
        return rollout.check_first(trainer, "fit")
    with pytest.raises(UserError, match="of which OnPolicyDistillation learns nothing; got .*rounds=2; set it to 0"):
        rollout.check_first(trainer, "fit")


def test_noise_goes_by_the_plan_that_a_run_began_with() -> None:
    module, trainer = module_of(Path("nowhere")), SimpleNamespace(max_steps=-1, max_epochs=2, global_rank=3)
    trainer.datamodule = SimpleNamespace(batches_per_epoch=3)
    module._trainer = trainer  # type: ignore[assignment]
    noise = AdaptiveQuantizationNoise(0.4, 0.1, 3, "linear", False)
    assert noise.state_dict() == {"planned_rollouts": None}
    expected = [NormNoise(sigma, 5, version) for version, sigma in enumerate([0.4, 0.4, 0.25, 0.25, 0.1, 0.1])]
    assert [noise_of(noise, trainer, module, version) for version in range(6)] == expected
    trainer.max_epochs = 9
    assert noise.state_dict() == {"planned_rollouts": 6} and noise_of(noise, trainer, module, 5) == expected[5]


def test_noise_of_a_run_is_relative(tiny_policy_dir: Path, tmp_path: Path) -> None:
    seen, module = [], module_of(tiny_policy_dir)
    noise = AdaptiveQuantizationNoise(0.02, 0.02, 1, noiseless_first_stage=False, relative=True)
    watch = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, batch, index: seen.append(batch.noise))
    trainer_of(tmp_path, noise, watch, noise=False, max_steps=2, limit_val_batches=0).fit(module, datamodule=data())
    assert seen == [NormNoise(0.02, 5, 0, relative=True)]


class TwoSets(PromptDataModule):
    """Held-out sets by name, and nothing read from anywhere."""

    val_names, test_names = ("easy", "hard"), ("sums", "products")

    def replacement_prompts(self, key: Sequence[int | str], count: int, exclude: Collection[str]) -> list[Prompt]:
        self.asked = (key, count, set(exclude))
        return []


def trainer_with(strategy: Any) -> Any:
    """What the callback's set-up reads of a trainer."""
    return SimpleNamespace(
        callbacks=[], datamodule=TwoSets(), lightning_module=None, sanity_checking=False, strategy=strategy
    )


@pytest.fixture
def scripted() -> tuple[RolloutCallback, QeRLModule, Any]:
    """The callback on an engine that says what a test makes it say, with a module and a trainer to call it with."""
    callback, module, trainer = (
        rollout_of(),
        module_of(Path("nowhere")),
        SimpleNamespace(callbacks=[], datamodule=TwoSets(), lightning_module=None, sanity_checking=False),
    )
    engine: Any = Scripted()
    callback.engine, callback.check_every = engine, 3
    callback.collector = Collector(config_of(resample_rounds=1), engine, Words(), DrGRPO(), seed=7)  # type: ignore
    callback.evaluator = evaluator_of(Scripted())
    callback._launch = lambda *_: None  # type: ignore[method-assign]
    callback.setup(trainer, module, "fit")  # type: ignore[arg-type]
    module.policy, module.policy_version = Watched(), 4  # type: ignore[assignment]
    return callback, module, trainer


def test_engine_and_collector_know_how_many_ranks_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[EngineSpec] = []
    engine: Any = SimpleNamespace(launch=specs.append, shared_weights=lambda: None, memory_gib=dict)
    (tmp_path / "config.json").write_text("{}")
    callback, module, ranks = rollout_of(engine), module_of(Path("nowhere")), Communicator(1, 3)
    module.base_folder, module.tokenizer = tmp_path, Words()  # type: ignore[misc, assignment]
    monkeypatch.setattr("qerl_pl.callbacks.rollout.communicator_of", lambda trainer: ranks)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    callback.setup(trainer_with(strategy), module, "fit")
    assert module.shared_weights is None
    assert [spec.ranks for spec in specs] == [3] and callback.collector.ranks is callback.evaluator.ranks is ranks


def test_an_engine_makes_room_for_an_adapter_or_takes_every_weight(tmp_path: Path) -> None:
    specs: list[EngineSpec] = []
    (tmp_path / "config.json").write_text("{}")
    for finetune in ("lora", "full"):
        engine: Any = SimpleNamespace(launch=specs.append, shared_weights=lambda: None, memory_gib=dict)
        callback = rollout_of(engine)
        module = module_of(Path("nowhere"))
        module.policy_config = replace(module.policy_config, finetune=finetune, quantization="none")
        module.base_folder, module.tokenizer = tmp_path, Words()  # type: ignore[misc, assignment]
        strategy = SimpleNamespace(root_device=torch.device("cpu"))
        callback.setup(trainer_with(strategy), module, "fit")
    assert [(spec.full_finetuning, spec.lora_rank, spec.lora_targets) for spec in specs] == [
        (False, 4, PROJECTIONS),
        (True, 0, ()),
    ]


def test_a_held_out_batch_is_sampled_for_its_own_set(scripted: tuple[RolloutCallback, QeRLModule, Any]) -> None:
    callback, module, trainer = scripted
    for hook, names in (
        (callback.on_validation_batch_start, TwoSets.val_names),
        (callback.on_test_batch_start, TwoSets.test_names),
    ):
        for loader, name in enumerate(names):
            batch = PromptBatch(PROMPTS[:2])
            hook(trainer, module, batch, 0, loader)
            assert batch.evaluation == callback.evaluator.evaluate(PROMPTS[:2], module.policy.weights(4), name)
            assert [prompt.prompt_id for prompt in batch.evaluation.prompts] == ["p0", "p1"]
            assert batch.evaluation.name == name
        hook(trainer, module, batch, 0)
        assert batch.evaluation.name == names[0]


def test_a_batch_is_sampled_by_the_policy_as_it_is(scripted: tuple[RolloutCallback, QeRLModule, Any]) -> None:
    callback, module, trainer = scripted
    module.register_parameter("trained", torch.nn.Parameter(torch.ones(1)))
    for hook in (callback.on_train_batch_start, callback.on_validation_batch_start, callback.on_train_batch_start):
        module.trained.grad = torch.ones(1)
        batch = PromptBatch(PROMPTS)
        hook(trainer, module, batch, 0)
        assert module.trained.grad is None  # the engine has its room
    found, ids = batch.experience, [prompt.id for prompt in PROMPTS]
    assert found is not None and found.version == 4 and [record.prompt_id for record in found.records[::4]] == ids
    dropped = [record.trained for record in found.records[::4]].count(False)
    assert dropped > 0 and trainer.datamodule.asked == (("resample", 4, 0), dropped, set(ids))


def test_the_engine_is_woken_checked_synced_asked_and_put_to_sleep(
    scripted: tuple[RolloutCallback, QeRLModule, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    callback, module, trainer = scripted
    engine, policy, checked, clock = callback.engine, module.policy, [], SimpleNamespace(now=0.0)

    def takes(seconds: int, method: Any) -> Any:
        def slow(*given: Any) -> Any:
            clock.now += seconds
            return method(*given)

        return slow

    callback.config = callback.collector.config = config_of()
    for name, seconds in (("wake", 1), ("sync", 2), ("generate", 4), ("sleep", 8)):
        monkeypatch.setattr(engine, name, takes(seconds, getattr(engine, name)))
    monkeypatch.setattr("qerl_pl.rollout.metrics.time", SimpleNamespace(perf_counter=lambda: clock.now))
    for version in range(8):
        module.policy_version, batch = version, PromptBatch(PROMPTS[:3], noise=NormNoise(0.01, 7, version))
        engine.calls.clear()
        policy.probes.clear()
        callback.on_train_batch_start(trainer, module, batch, 0)
        checked.append(bool(policy.probes))
        ids = [prompt.token_ids for prompt in PROMPTS[:3]]
        rollout = [("sync", version, True), ("generate", ids, SAMPLING), "sleep"]
        greedy = ("generate", ids[:2], SamplingConfig(max_tokens=3, temperature=0.0))
        check = [("sync", version, True), greedy, ("sync", version, False), greedy] * 2
        assert engine.calls == ["wake", *(check if checked[-1] else []), *rollout]
        assert policy.probes == [stream_seed(module.seed, "probe", version)] * checked[-1]
        found = batch.experience
        assert found is not None and (found.metrics["aqn/sigma"], found.metrics["aqn/measured_std"]) == (0.01, 0.125)
        times = {name[5:-2]: value for name, value in found.metrics.items() if name.startswith("time/")}
        spent = 24 * checked[-1]  # two checks of two syncs and two generations
        assert times == {"check": spent, "wait": 0, "sync": 2, "rollout": 4, "reward": 0, "sleep": 9}
        assert found.seconds == 15 + spent
    assert checked == [True, True, False, True, False, False, True, False]
    callback.on_train_batch_start(trainer, module, plain := PromptBatch(PROMPTS[:3]), 0)
    assert plain.experience is not None
    assert found.metrics.keys() - plain.experience.metrics.keys() == {"aqn/sigma", "aqn/measured_std"}


@pytest.mark.parametrize("engine", [Scripted(error=0.3), Scripted(lost=True)])
def test_a_rollout_stops_where_engine_and_policy_disagree(
    engine: Any, scripted: tuple[RolloutCallback, QeRLModule, Any]
) -> None:
    callback, module, trainer = scripted
    callback.engine = engine
    with pytest.raises(UserError, match="engine and trainer must agree within 0.25 nats"):
        callback.on_train_batch_start(trainer, module, PromptBatch(PROMPTS[:3]), 0)


def test_ranks_that_read_other_files_are_refused(
    scripted: tuple[RolloutCallback, QeRLModule, Any], tmp_path: Path
) -> None:
    callback, module, trainer = scripted
    (tmp_path / "config.json").write_text("{}")
    module.base_folder = tmp_path  # type: ignore[misc]

    def work(ranks: Communicator) -> None:
        own = SimpleNamespace(callbacks=[], datamodule=TwoSets(), strategy=SimpleNamespace(ranks=ranks))
        own.datamodule.seed += ranks.rank * other
        callback.on_train_start(own, module)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qerl_pl.callbacks.rollout.communicator_of", lambda trainer: trainer.strategy.ranks)
        other = 0
        on_ranks(2, work)
        other = 1
        with pytest.raises(UserError, match="every rank must have the same seed; got 1 on rank 1 and 0 on rank 0"):
            on_ranks(2, work)
        facts: dict[str, object] = {}
        alone = SimpleNamespace(require_same=facts.update)
        callback.on_train_start(
            SimpleNamespace(callbacks=[], datamodule=TwoSets(), strategy=SimpleNamespace(ranks=alone)), module
        )  # type: ignore[arg-type]
    own = {"base model": module.base_identity, "adapter to start from": None, "teacher": None}
    own["number of finished rollouts"] = 4
    assert facts == own | {"seed": 0, "batch_size": 8, "training prompts": ""}


def test_settings_by_default() -> None:
    callback = RolloutCallback([Vowels()])
    config = callback.config
    assert isinstance(callback.engine, TransformersEngine) and config.sampling == SamplingConfig()
    found = (config.group_size, config.resample_rounds, callback.check_every, callback.scorer.accuracy.name)
    assert found == (8, 0, 50, "vowels") and callback.mismatch_bound == 0.25
    assert config.scorer is callback.scorer and callback.eval_config == EvaluatorConfig(config.scorer, SamplingConfig())
    rewards, sampling = [Vowels()], SamplingConfig(max_tokens=3)
    held_out = EvalSampling(max_tokens=2, temperature=0.5)
    evaluation = EvaluationConfig(5, held_out, 9)
    given = RolloutCallback(rewards, None, 3, sampling, 4, 0.5, 6, Vowels.name, evaluation=evaluation)
    assert given.scorer.rewards == rewards and given.config == CollectorConfig(given.scorer, 3, sampling, 4)
    assert (given.mismatch_bound, given.check_every) == (0.5, 6)
    assert given.eval_config == EvaluatorConfig(given.scorer, SamplingConfig(2, 0.5), 5, 9)
    with pytest.raises(UserError, match="check_every .*got 0"):
        rollout_of(check_every=0)


@pytest.mark.parametrize(("bound", "warned"), [(0.25, False), (0.2, True)])
def test_a_mismatch_above_its_bound_is_warned_of(bound: float, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    trainer: Any = SimpleNamespace(callback_metrics={"mismatch/logprob_abs_mean": torch.tensor(0.25)})
    rollout_of(mismatch_bound=bound).on_train_batch_end(trainer, module_of(Path("nowhere")), None, None, 0)
    assert ("differ by 0.250 nats a token, more than mismatch_bound=0.2:" in caplog.text) == warned
    assert bool(caplog.records) == warned


def test_sizes_that_do_not_divide_are_refused_in_training_alone(tiny_policy_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="got 3 and 4"):
        trainer_of(tmp_path).fit(module_of(tiny_policy_dir, minibatches=3), datamodule=data())
    trainer_of(tmp_path).validate(module_of(tiny_policy_dir, minibatches=3), datamodule=data(), verbose=False)


@pytest.mark.parametrize("callback", [rollout_of(), AdaptiveQuantizationNoise()])
def test_other_modules_and_data_are_refused(callback: Callback, tmp_path: Path) -> None:
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(UserError, match="QeRLModule; got a LightningModule; train that, or leave it out"):
        callback.setup(trainer, LightningModule(), "fit")
    if isinstance(callback, RolloutCallback):
        for without in (trainer, SimpleNamespace()):
            with pytest.raises(UserError, match="need a PromptDataModule; got NoneType;"):
                callback.setup(without, module_of(Path("nowhere")), "fit")  # type: ignore[arg-type]


def test_a_new_engine_is_checked_from_its_first_rollout_on(tmp_path: Path) -> None:
    engine: Any = SimpleNamespace(launch=lambda spec: None, shared_weights=lambda: None)
    (tmp_path / "config.json").write_text("{}")
    callback, module = rollout_of(engine), module_of(Path("nowhere"))
    module.base_folder, module.tokenizer = tmp_path, Words()  # type: ignore[misc, assignment]
    callback._rollouts = 7  # of an earlier engine
    callback.setup(trainer_with(SimpleNamespace(root_device=torch.device("cpu"))), module, "fit")
    assert callback._rollouts == 0
    callback.load_state_dict({"expected_lengths": {"p0": 12.0}})
    assert callback.collector.expected_lengths == {"p0": 12.0} == callback.state_dict()["expected_lengths"]


@pytest.mark.parametrize(("training", "held_out"), [(8, 32), (32, 8)])
def test_the_engine_has_room_for_the_longer_completions(training: int, held_out: int) -> None:
    evaluation = EvaluationConfig(sampling=EvalSampling(max_tokens=held_out))
    callback = RolloutCallback([Even()], sampling=SamplingConfig(max_tokens=training), evaluation=evaluation)
    assert callback.longest(SimpleNamespace(max_prompt_tokens=100)) == 132  # type: ignore[arg-type]


def test_a_second_fit_plans_anew_and_a_validation_does_not(tiny_policy_dir: Path) -> None:
    noise, module = AdaptiveQuantizationNoise(), module_of(tiny_policy_dir)
    trainer: Any = SimpleNamespace(callbacks=[noise])
    noise.load_state_dict({"planned_rollouts": 9})
    noise.setup(trainer, module, "validate")
    assert noise.state_dict() == {"planned_rollouts": 9}
    noise.setup(trainer, module, "fit")
    assert noise.state_dict() == {"planned_rollouts": None}
