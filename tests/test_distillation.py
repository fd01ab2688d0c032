"""On-policy distillation: values by hand, exact gradients, log-probabilities and updates of plain loops, whole runs."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import pytest
import torch
from model_copies import copy_of
from plain_policy import PlainPolicy
from rank_helpers import on_ranks
from reference_run import SCALING, build_base, plain_name
from safetensors.torch import load_file
from short_run import data, module_of, rollout_of, trainer_of
from test_update_ranks import ragged, share
from tiny_families import write_checkpoint
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_pl.algorithm import GRPO, Objective, OnPolicyDistillation
from qerl_pl.algorithm.losses import distillation_advantages
from qerl_pl.algorithm.objectives import Divergence, LossInputs
from qerl_pl.callbacks import ResumeCheckpoint
from qerl_pl.errors import UserError
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig, TeacherConfig
from qerl_pl.modules.update import PolicyUpdate
from qerl_pl.policy.teacher import Teacher, check_same_tokens
from qerl_pl.runtime.checkpoint_io import CHECKPOINT_KEY
from qerl_pl.runtime.communicator import SINGLE_PROCESS, Communicator
from qerl_pl.toy.policy import ToyConfig, build_toy_policy
from qerl_pl.types import Experience, SamplingConfig

CPU = torch.device("cpu")


# The loss -------------------------------------------------------------------------------------------------------------


def inputs(objective: Objective, **settings: Any) -> LossInputs:
    """Two completions of two tokens and of one, before the first step: old and current policy are equal."""
    old = torch.tensor([[-1.0, -2.0], [-0.5, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    given: dict[str, Any] = {
        "logprobs": old.clone().requires_grad_(),
        "old_logprobs": old,
        "sampler_logprobs": old,
        "advantages": torch.tensor([1.0, -1.0], dtype=torch.float64),
        "mask": mask,
        "weights": objective.weights(mask, max_tokens=2, completions=2, tokens=3).double(),
        "teacher_logprobs": torch.tensor([[-0.25, -3.0], [-0.5, math.nan]], dtype=torch.float64),
    }
    return LossInputs(**given | settings)


def test_the_teacher_alone_by_hand() -> None:
    """Advantages log teacher - log old are 0.75, -1 and 0; on policy the gradient is -1/3 of each."""
    objective = OnPolicyDistillation()
    batch = inputs(objective)
    outputs = objective.loss(batch)
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(-(0.75 - 1.0) / 3, rel=1e-6)
    expected = torch.tensor([[-0.25, 1 / 3], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(batch.logprobs.grad, expected, rtol=1e-6, atol=1e-9)
    k3 = [math.exp(difference) - 1 - difference for difference in (0.75, -1.0, 0.0)]
    assert outputs.metrics["teacher_kl"].item() == pytest.approx(sum(k3))


def test_added_to_rewards_by_hand() -> None:
    """Advantages 1 + 0.5 * 0.75, 1 - 0.5 and -1; GRPO's weights are 1/4, 1/4 and 1/2."""
    objective = GRPO(beta=0.0, distillation_coefficient=0.5)
    batch = inputs(objective)
    objective.loss(batch).loss.backward()
    expected = torch.tensor([[-1.375 / 4, -0.5 / 4], [0.5, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(batch.logprobs.grad, expected, rtol=1e-6, atol=1e-9)


def test_the_sign_of_each_tokens_advantage_decides_its_clip() -> None:
    """Ratios 1.5 with advantages 0.75 and -1: the first is clipped, the second is not, in one completion."""
    objective = OnPolicyDistillation()
    batch = inputs(objective)
    moved = (batch.old_logprobs + math.log(1.5)).detach().requires_grad_()
    outputs = objective.loss(replace(batch, logprobs=moved))
    outputs.loss.backward()
    expected = torch.tensor([[0.0, 1.5 / 3], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(moved.grad, expected, rtol=1e-6, atol=1e-9)
    assert outputs.metrics["clip_high"] == 1


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Summed over every token of a small vocabulary, each as often as it is sampled."""
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(7, generator=draw, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(7, generator=draw, dtype=torch.float64).log_softmax(0)
    student = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)
    advantages = distillation_advantages(student, teacher)
    assert not advantages.requires_grad
    surrogate = (student.exp().detach() * advantages * student).sum()
    (expected,) = torch.autograd.grad(-surrogate, logits)
    torch.testing.assert_close(expected, exact)
    assert exact.norm() > 0.1


def test_the_full_vocabulary_adds_the_divergence_to_the_loss_by_hand() -> None:
    """Advantages are 0 without rewards; three tokens of 0.3, 0.6 and 0.9 nats, token mean, twice."""
    objective = OnPolicyDistillation(distillation_coefficient=2.0, distillation_divergence="full_vocabulary")
    kl = torch.tensor([[0.3, 0.6], [0.9, math.nan]], dtype=torch.float64).requires_grad_()
    batch = inputs(objective, teacher_logprobs=None, teacher_kl=kl)
    outputs = objective.loss(batch)
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(2 * 0.6, rel=1e-6)
    third = torch.tensor([[2 / 3, 2 / 3], [2 / 3, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(kl.grad, third, rtol=1e-6, atol=1e-9)
    assert not batch.logprobs.grad.any() and outputs.metrics["teacher_kl"].item() == pytest.approx(1.8)
    added = replace(GRPO(beta=0.0, distillation_coefficient=2.0), distillation_divergence="full_vocabulary")
    weights = torch.tensor([[0.25, 0.25], [0.5, 0.0]], dtype=torch.float64)  # GRPO's; advantages are 1 and -1
    expected = -(0.5 * 1 - 0.5 * 1) + 2 * (weights * kl.detach().nan_to_num()).sum().item()
    assert added.loss(replace(batch, weights=weights)).loss.item() == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="full_vocabulary needs teacher_kl"):
        objective.loss(replace(batch, teacher_kl=None))
    with pytest.raises(UserError, match="distillation_divergence"):
        OnPolicyDistillation(distillation_divergence="forward")  # type: ignore[arg-type]


def test_missing_log_probabilities_and_a_coefficient_of_zero_are_refused() -> None:
    objective = OnPolicyDistillation()
    with pytest.raises(ValueError, match="needs teacher_logprobs"):
        objective.loss(inputs(objective, teacher_logprobs=None))
    with pytest.raises(UserError, match="got 0; leave it at 1"):
        OnPolicyDistillation(distillation_coefficient=0.0)
    with pytest.raises(UserError, match="distillation_coefficient must be a number of at least 0"):
        GRPO(distillation_coefficient=-1.0)


# The teacher and the update, against plain loops ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model as `dense` and as `nvfp4`."""
    return build_base(tmp_path_factory.mktemp("base")).parent


def plain_logprobs(folder: Path, experience: Experience) -> Tensor:
    """By transformers in float64, a sequence at a time; 0 outside the mask."""
    # Experts one after another: a grouped product knows no float64.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    result = torch.zeros(experience.mask.shape, dtype=torch.float64)
    for row, length in enumerate(experience.lengths.tolist()):
        tokens = experience.tokens[row, :length]
        with torch.no_grad():
            logits = model(tokens[None]).logits[0] / experience.temperature
        for t in range(5, length):
            result[row, t] = logits[t - 1].log_softmax(0)[tokens[t]]
    return result


@pytest.mark.parametrize(
    ("name", "micro_batch_tokens", "offload"),
    [
        ("dense", None, True),
        ("dense", 20, False),
        ("dense", 1, True),
        ("gemma-2", None, True),  # with soft caps
        ("gpt-oss", None, True),  # with sinks
    ],
)
def test_log_probabilities_are_those_of_transformers(
    base: Path, tmp_path: Path, name: str, micro_batch_tokens: int | None, offload: bool
) -> None:
    experience, folder = ragged(9), base / name if name == "dense" else write_checkpoint(name, tmp_path / name)
    teacher = Teacher(TeacherConfig(offload=offload), folder, torch.float32, CPU)
    found = teacher.logprobs(experience, experience.mask, micro_batch_tokens)
    atol = 1e-5 if name == "dense" else 2e-5
    torch.testing.assert_close(found.double(), plain_logprobs(folder, experience), rtol=1e-5, atol=atol)
    assert found.dtype == torch.float32 and not found.requires_grad


def test_weights_go_back_where_the_device_has_no_memory_for_all(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = Teacher(TeacherConfig(), base / "dense", torch.float32, CPU)
    held, to = [parameter.data_ptr() for parameter in teacher._model.parameters()], Tensor.to
    moved: list[int] = []

    def short_of_memory(tensor: Tensor, *args: Any) -> Tensor:
        moved.append(tensor.data_ptr())
        if len(moved) == 3:
            raise torch.OutOfMemoryError
        return to(tensor, *args).clone()

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(Tensor, "to", short_of_memory)
        with teacher._on_device():
            raise AssertionError("two of the weights are on the device")
    assert moved == held[:3] and [parameter.data_ptr() for parameter in teacher._model.parameters()] == held


def test_settings_from_python_are_checked_too() -> None:
    with pytest.raises(UserError, match="model.teacher.dtype must be one of float32, bfloat16; got 'float16'"):
        TeacherConfig(dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="gradient_checkpointing must be one of .*; got 'selectiv'"):
        PolicyConfig(gradient_checkpointing="selectiv")  # type: ignore[arg-type]


def test_a_teacher_of_an_unknown_family_is_refused(base: Path, tmp_path: Path) -> None:
    config = {"model_type": "qwen3_next", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="is 'qwen3_next', which has gated delta nets"):
        TeacherConfig(path=str(tmp_path)).check(PolicyConfig(path=str(base / "dense"), quantization="none"))


def test_completions_that_do_not_train_cost_nothing(base: Path) -> None:
    experience = ragged(9)
    teacher = Teacher(TeacherConfig(dtype="bfloat16"), base / "dense", torch.float32, CPU)
    assert {parameter.dtype for parameter in teacher._model.parameters()} >= {torch.bfloat16}
    mask = experience.mask & ~experience.truncated[:, None]
    found = teacher.logprobs(experience, mask, 20)
    assert torch.equal(found != 0, mask)
    assert not teacher.logprobs(experience, torch.zeros_like(mask), 20).any()


@pytest.mark.parametrize(("micro_batch_tokens", "offload"), [(None, True), (20, False)])
def test_distributions_are_those_of_transformers(base: Path, micro_batch_tokens: int | None, offload: bool) -> None:
    experience = ragged(9)
    mask = experience.mask & ~experience.truncated[:, None]
    teacher = Teacher(TeacherConfig(offload=offload), base / "dense", torch.float32, CPU)
    states = teacher.states(experience, mask, micro_batch_tokens)
    assert torch.equal(states.index >= 0, mask) and len(states.hidden) == mask.sum() and not states.head.requires_grad
    logits = states.hidden[states.index[mask]] @ states.head.t() / experience.temperature
    found = logits.log_softmax(-1).gather(-1, experience.tokens[mask][:, None]).squeeze(-1)
    expected = plain_logprobs(base / "dense", experience)[mask]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert not len(teacher.states(experience, torch.zeros_like(mask), None).hidden)


def learn(
    start: Policy, update: PolicyUpdate, experience: Experience, ranks: Communicator = SINGLE_PROCESS
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Trained matrices after an update by plain gradient descent, and metrics."""
    policy = copy.deepcopy(start)
    optimizer = torch.optim.SGD([parameter for parameter in policy.parameters() if parameter.requires_grad], lr=1.0)
    schedule = LambdaLR(optimizer, lambda _: 1.0)
    metrics = update.run(policy, experience, optimizer, schedule, lambda loss: loss.backward(), ranks)  # type: ignore[arg-type]
    return {name: tensor.clone() for name, tensor in policy.trained_state().items()}, metrics


@pytest.fixture(scope="module")
def start(base: Path) -> Policy:
    """A policy in NVFP4 with an adapter of random matrices."""
    config = PolicyConfig(path=str(base / "nvfp4"), dtype="float32", lora=LoraConfig(rank=4, alpha=4 * SCALING))
    policy, draw = Policy(base / "nvfp4", config, CPU, seed=1), torch.Generator().manual_seed(4)
    for tensor in policy.trained_state().values():
        tensor.copy_(0.05 * torch.randn(tensor.shape, generator=draw))
    return policy


def with_teacher(base: Path, experience: Experience) -> Experience:
    teacher = Teacher(TeacherConfig(), base / "dense", torch.float32, CPU)
    return replace(experience, teacher_logprobs=teacher.logprobs(experience, experience.mask, None))


def policy_in_loops(start: dict[str, Tensor], base: Path) -> PlainPolicy:
    return PlainPolicy(base / "nvfp4", {plain_name(name): tensor for name, tensor in start.items()}, SCALING)


def descend(policy: PlainPolicy, loss: Tensor) -> None:
    """One step of gradient descent."""
    gradients = torch.autograd.grad(loss, list(policy.trained.values()))
    pairs = zip(policy.trained.items(), gradients, strict=True)
    policy.trained = {name: (value - gradient).detach().requires_grad_() for (name, value), gradient in pairs}


def assert_learned(real: dict[str, Tensor], plain: dict[str, Tensor], before: dict[str, Tensor], least: float) -> None:
    """Both have moved, by at least so much and alike."""
    for name, tensor in real.items():
        moved = (plain[plain_name(name)] - before[name]).abs().max().item()
        assert moved > least
        torch.testing.assert_close(tensor.double(), plain[plain_name(name)].detach(), rtol=0, atol=1e-3 * moved)


def plain_update(
    base: Path, start: dict[str, Tensor], experience: Experience, rewards: float, coefficient: float, steps: int
) -> tuple[dict[str, Tensor], float]:
    """The same by loops over tokens: two steps of gradient descent on all completions, token mean; and the first KL."""
    policy = policy_in_loops(start, base)
    teacher, old = plain_logprobs(base / "dense", experience), []
    kl, tokens = 0.0, int(experience.mask.sum())
    for step in range(steps):
        loss = torch.zeros((), dtype=torch.float64)
        for row, length in enumerate(experience.lengths.tolist()):
            ids = experience.tokens[row, :length].tolist()
            logprobs, _ = policy.token_logprobs(ids[:5], ids[5:], experience.temperature)
            if step == 0:
                old.append(logprobs.tolist())
            for t, logprob in enumerate(logprobs):
                before, target = old[row][t], teacher[row, 5 + t].item()
                advantage = rewards * experience.advantages[row].item() + coefficient * (target - before)
                ratio = torch.exp(logprob - before)
                value = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                importance = min(math.exp(before - experience.sampler_logprobs[row, 5 + t].item()), 2.0)
                loss = loss - importance * value / tokens
                kl += (math.exp(target - before) - 1 - (target - before)) / tokens if step == 0 else 0.0
        descend(policy, loss)
    return policy.trained, kl


@pytest.mark.parametrize("objective", [OnPolicyDistillation(), GRPO(beta=0.0, distillation_coefficient=0.3)])
def test_the_update_is_that_of_plain_loops(base: Path, start: Policy, objective: Objective) -> None:
    experience = ragged(6)
    alone = isinstance(objective, OnPolicyDistillation)
    if not alone:  # of the plain loop's aggregation
        object.__setattr__(objective, "aggregation", "token_mean")
    update = PolicyUpdate(objective, 2, 1, 25, math.inf, reference_share=0.0, seed=0)
    real, metrics = learn(start, update, with_teacher(base, experience))
    before = start.trained_state()
    plain, kl = plain_update(base, before, experience, 0.0 if alone else 1.0, objective.distillation_coefficient, 2)
    assert metrics["distill/kl"] == pytest.approx(kl, rel=1e-4)  # of the old policy, in both steps
    assert_learned(real, plain, before, 1e-3)


def test_the_update_over_the_full_vocabulary_is_that_of_plain_loops(base: Path, start: Policy) -> None:
    """Two steps of gradient descent on the mean divergence of all tokens, without rewards and importance weights."""
    experience, tokens = ragged(6), 0
    objective = OnPolicyDistillation(distillation_coefficient=0.5, distillation_divergence="full_vocabulary")
    teacher = Teacher(TeacherConfig(), base / "dense", torch.float32, CPU)
    given = replace(experience, teacher_states=teacher.states(experience, experience.mask, None))
    real, metrics = learn(start, PolicyUpdate(objective, 2, 1, 25, math.inf, reference_share=0.0, seed=0), given)
    before = start.trained_state()
    policy = policy_in_loops(before, base)
    model = AutoModelForCausalLM.from_pretrained(base / "dense", dtype=torch.float64).eval()
    tokens, mean = int(experience.mask.sum()), 0.0
    for _ in range(2):
        loss = torch.zeros((), dtype=torch.float64)
        for row, length in enumerate(experience.lengths.tolist()):
            ids = experience.tokens[row, :length].tolist()
            own = (policy.logits(ids, True)[4:-1] / experience.temperature).log_softmax(-1)
            with torch.no_grad():
                theirs = (model(torch.tensor([ids])).logits[0, 4:-1] / experience.temperature).log_softmax(-1)
            loss = loss + (own.exp() * (own - theirs)).sum() / tokens
        mean += loss.item() / 2
        descend(policy, 0.5 * loss)
    assert metrics["distill/kl"] == pytest.approx(mean, rel=1e-4)
    assert_learned(real, policy.trained, before, 1e-4)


@pytest.mark.parametrize("divergence", get_args(Divergence))
def test_ranks_take_the_steps_of_one_process(base: Path, start: Policy, divergence: Divergence) -> None:
    experience = with_teacher(base, ragged(8))
    teacher = Teacher(TeacherConfig(), base / "dense", torch.float32, CPU)
    states = teacher.states(experience, experience.mask, None)
    if divergence == "full_vocabulary":
        experience = replace(experience, teacher_states=states)
    objective = OnPolicyDistillation(distillation_divergence=divergence)
    update = PolicyUpdate(objective, 1, 2, 25, 0.5, reference_share=0.0, seed=0)
    alone, expected = learn(start, update, experience)

    def work(ranks: Communicator) -> tuple[dict[str, Tensor], dict[str, float]]:
        rows = [[0, 3, 4], [1, 2, 5, 6, 7]][ranks.rank]
        own = replace(share(experience, rows), teacher_logprobs=experience.teacher_logprobs[rows])
        if own.teacher_states is not None:
            own = replace(own, teacher_states=teacher.states(own, own.mask, 25))
        return learn(start, update, own, ranks)

    for trained, metrics in on_ranks(2, work):
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
        for name, tensor in alone.items():
            torch.testing.assert_close(trained[name], tensor, rtol=1e-4, atol=1e-6)


# What is refused ------------------------------------------------------------------------------------------------------


def test_a_teacher_of_another_kind_is_refused(base: Path, tmp_path: Path) -> None:
    policy = PolicyConfig(path=str(base / "dense"), quantization="nvfp4")
    TeacherConfig().check(policy)
    TeacherConfig(path=str(base / "nvfp4")).check(policy)
    with pytest.raises(UserError, match="NVFP4 weights alone; name the 16-bit model as model.teacher.path"):
        TeacherConfig().check(PolicyConfig(path=str(base / "nvfp4")))
    with pytest.raises(UserError, match="model.teacher.path must be a folder or a model of the hub"):
        TeacherConfig(path=str(tmp_path / "none")).check(policy)
    other = copy_of(base / "dense", tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(other)
    smaller = json.loads((other / "config.json").read_text())["vocab_size"]
    assert len(tokenizer) == smaller + 1  # validation of the folder refuses a tokenizer beyond the vocabulary
    with pytest.raises(UserError, match="teacher needs the policy's tokenizer; 1 tokens have other ids.*'<extra>'"):
        check_same_tokens(other, base / "dense")


def test_a_teacher_with_a_smaller_output_layer_is_refused(base: Path, tmp_path: Path) -> None:
    check_same_tokens(copy_of(base / "dense", tmp_path / "larger", vocab_size=600), base / "dense")
    with pytest.raises(UserError, match="output layer needs the policy's 600 tokens; .* has 512"):
        check_same_tokens(base / "dense", tmp_path / "larger")
    (tmp_path / "larger" / "tokenizer.json").unlink()
    (tmp_path / "larger" / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="larger has none; copy it there"):
        check_same_tokens(tmp_path / "larger", base / "dense")


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def student_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy of 16 bits, barely trained; not the fixture of all tests, which a benchmark runs these without."""
    config = ToyConfig(layers=2, intermediate=128, steps=2, batch_size=2)
    return build_toy_policy(config, tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, trained for longer."""
    config = ToyConfig(layers=2, intermediate=128, steps=12, batch_size=2)
    return build_toy_policy(config, tmp_path_factory.mktemp("teacher"))


def distilling(base: Path, teacher: Path, **settings: Any) -> Any:
    given = {"objective": OnPolicyDistillation(), "teacher": TeacherConfig(path=str(teacher)), "warmup_ratio": 0.0}
    return module_of(base, **given | settings)


@pytest.mark.parametrize("divergence", get_args(Divergence))
def test_a_run_comes_closer_to_its_teacher_without_a_reward(
    student_dir: Path, teacher_dir: Path, tmp_path: Path, divergence: Divergence
) -> None:
    objective = OnPolicyDistillation(distillation_divergence=divergence)
    module = distilling(student_dir, teacher_dir, objective=objective, max_grad_norm=1.0)
    rollout = rollout_of(group_size=16, sampling=SamplingConfig(max_tokens=8))
    trainer = trainer_of(tmp_path / "run", rollout=rollout, noise=False, max_epochs=4)
    found = []
    trainer.callbacks[0].on_train_batch_end = lambda *_: found.append(  # type: ignore[attr-defined]
        {name: float(value) for name, value in trainer.callback_metrics.items()}
    )
    trainer.fit(module, datamodule=data())
    kl = [metrics["distill/kl"] for metrics in found]
    assert len(kl) == 16 and fmean(kl[:4]) > 0.1
    assert fmean(kl[-4:]) < 0.6 * fmean(kl[:4])
    assert all(metrics["time/teacher_s"] > 0 for metrics in found)
    # No part of the module: neither its checkpoint nor its optimizer has the teacher.
    assert not any("teacher" in name for name, _ in module.named_parameters())


def test_a_resumed_run_has_the_bits_of_one_that_went_through(
    student_dir: Path, teacher_dir: Path, tmp_path: Path
) -> None:
    def run(name: str, **settings: Any) -> Any:
        module = distilling(student_dir, teacher_dir)
        trainer = trainer_of(tmp_path / name, ResumeCheckpoint(1, keep=9))
        trainer.fit(module, datamodule=data(), **settings)
        return load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")

    whole = run("whole")
    path = tmp_path / "whole" / "checkpoints" / "step=2.ckpt"
    resumed = run("resumed", ckpt_path=str(path), weights_only=True)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    assert "teacher" in torch.load(path, weights_only=True)[CHECKPOINT_KEY]
    other = distilling(student_dir, student_dir)
    with pytest.raises(UserError, match="a run keeps its teacher"):
        trainer_of(tmp_path / "other").fit(other, datamodule=data(), ckpt_path=str(path), weights_only=True)
