"""The sampler's noise in the trainer: log-probabilities of the engine, gradients of a plain model with noisy scales."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from short_run import data, module_of, rollout_of, trainer_of
from torch import Tensor

from qerl_pl.algorithm import GRPO, NormNoise
from qerl_pl.callbacks import AdaptiveQuantizationNoise, ResumeCheckpoint
from qerl_pl.engines import EngineSpec, TransformersEngine
from qerl_pl.formats.base import QUANTIZERS
from qerl_pl.formats.quantize import in_format
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.modules.policy import TokenValues
from qerl_pl.modules.trainer_noise import TrainerNoise
from qerl_pl.modules.update import PolicyUpdate
from qerl_pl.rollout.experience import pad_completions
from qerl_pl.types import Experience, Prompt, RolloutRequest, SamplingConfig

CPU = torch.device("cpu")
NOISE = NormNoise(0.2, seed=7, version=0, draw_number=4, relative=True, draws=2, in_trainer=True)
PROMPTS = [Prompt("a", (5, 6, 7), "", ""), Prompt("b", (8, 9), "", ""), Prompt("c", (10, 11, 12, 13), "", "")]
DRAWS = torch.tensor([0, 0, 1, 1, 0, 0])
"""Of two completions of each prompt."""


def make(base: Path, quantization: str = "none", **settings: Any) -> Policy:
    """A policy whose trained weights, norms included, are no longer those of the base."""
    if quantization == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("needs bitsandbytes")
    given: dict[str, Any] = {"lora": LoraConfig(rank=4), "train_norms": True} | settings
    config = PolicyConfig(path=str(base), quantization=quantization, dtype="float32", **given)  # type: ignore[arg-type]
    policy = Policy(in_format(base, config.quantization), config, CPU, seed=1)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    return policy


def sampled(policy: Policy, noise: NormNoise | None = NOISE) -> Experience:
    """Completions of the engine, each prompt under its draw of the noise."""
    engine = TransformersEngine()
    lora = policy.config.lora_spec
    rank, targets = (0, ()) if lora is None else (lora.rank, lora.targets)
    spec = EngineSpec(policy.folder, torch.float32, CPU, rank, targets, 32, full_finetuning=lora is None)
    engine.launch(spec)
    completions = []
    for index, prompt in enumerate(PROMPTS):
        draw = None if noise is None else replace(noise, draw_number=4 + index % 2, draws=1)
        engine.sync(policy.weights(0, draw))
        sampling = SamplingConfig(max_tokens=6)
        completions += engine.generate([RolloutRequest(prompt.token_ids, (index, index + 9))], sampling)
    engine.close()
    tokens, lengths, mask, logprobs = pad_completions(PROMPTS, completions, 0)
    return Experience(
        version=0,
        tokens=tokens,
        lengths=lengths,
        mask=mask,
        sampler_logprobs=logprobs,
        advantages=torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0]),
        truncated=torch.zeros(6, dtype=torch.bool),
        sampled_tokens=int(mask.sum()),
        seconds=0.0,
        temperature=1.0,
        max_tokens=6,
        draws=None if noise is None else DRAWS,
        noise=noise,
    )


def logprobs(policy: Policy, experience: Experience, rows: Tensor, reference: bool = False) -> Tensor:
    one = experience
    return policy.token_logprobs(one.tokens[rows], one.lengths[rows], one.mask[rows], 1.0, reference=reference)[0]


WAYS = {name: {"quantization": name} for name in [*QUANTIZERS, "none"]} | {
    "full": {"finetune": "full"},
    "frozen norms": {"train_norms": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_trainer_computes_the_log_probabilities_of_the_noisy_sampler(tiny_policy_dir: Path, way: str) -> None:
    policy = make(tiny_policy_dir, **WAYS[way]).eval()
    experience = sampled(policy)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    noise = TrainerNoise(policy.trained.norms(), experience.noise, experience.draws)
    every = torch.arange(6)
    with torch.no_grad():
        clean = logprobs(policy, experience, every)
        for draw in (0, 1):
            rows = (DRAWS == draw).nonzero().squeeze(1)
            with noise.added(rows):
                noisy = logprobs(policy, experience, rows)
            torch.testing.assert_close(noisy, experience.sampler_logprobs[rows], rtol=1e-4, atol=1e-4)
            assert (clean[rows] - noisy).abs().max() > 0.01
        assert torch.equal(logprobs(policy, experience, every), clean)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
@pytest.mark.parametrize("way", ["nvfp4", "none", "full", "frozen norms"])
def test_gradients_are_those_of_a_policy_whose_scales_are_noisy(
    tiny_policy_dir: Path, way: str, checkpointing: Any
) -> None:
    settings = WAYS[way] | {"gradient_checkpointing": checkpointing}
    policy, plain = make(tiny_policy_dir, **settings).train(), make(tiny_policy_dir, **settings).train()
    experience, rows = sampled(policy), torch.tensor([2, 3])
    with TrainerNoise(policy.trained.norms(), experience.noise, experience.draws).added(rows):
        logprobs(policy, experience, rows).sum().backward()
    with torch.no_grad():
        for name, norm in plain.trained.norms().items():
            drawn = replace(NOISE, draw_number=5).of_norm(name, norm.weight)
            assert drawn is not None
            norm.weight += drawn
    logprobs(plain, experience, rows).sum().backward()
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    ours, theirs = dict(policy.named_parameters()), dict(plain.named_parameters())
    assert trained and all(torch.equal(ours[name].grad, theirs[name].grad) for name in trained)  # type: ignore[arg-type]
    assert any("layernorm" in name for name in trained) == (way != "frozen norms")


def updated(policy: Policy, experience: Experience, micro_batch_tokens: int | None) -> tuple[dict[str, float], Tensor]:
    """Metrics of two optimizer steps, and all trained weights after them."""
    update = PolicyUpdate(GRPO(beta=0.1), 2, 1, micro_batch_tokens, 0.5, 0.0, seed=0)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    metrics = update.run(policy, experience, optimizer, schedule, lambda loss: loss.backward())  # type: ignore[arg-type]
    return metrics, torch.cat([parameter.detach().flatten() for parameter in trained])


@pytest.mark.parametrize("micro_batch_tokens", [None, 16])
def test_an_update_under_noise_has_ratios_of_the_noisy_policy_and_a_clean_reference(
    tiny_policy_dir: Path, micro_batch_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    references, passes = [0.0], []
    experience = sampled(make(tiny_policy_dir))
    plain = Policy.token_values

    def note(self: Policy, tokens: Tensor, lengths: Tensor, mask: Tensor, *rest: Any) -> TokenValues:
        found = plain(self, tokens, lengths, mask, *rest)
        passes.append(len(lengths))
        _, _, reference, *_ = rest
        if reference:
            references[-1] += found.logprobs.sum().item()
        return found

    monkeypatch.setattr(Policy, "token_values", note)
    noisy, after = updated(make(tiny_policy_dir), experience, micro_batch_tokens)
    assert sorted(set(passes)) == ([2, 4, 6] if micro_batch_tokens is None else [1, 2])  # six of the reference
    references.append(0.0)
    clean, _ = updated(make(tiny_policy_dir), replace(experience, noise=None), micro_batch_tokens)
    references.append(0.0)
    again, after_again = updated(make(tiny_policy_dir), experience, 4)
    assert references[1] == pytest.approx(references[0], rel=1e-6) and references[0] < -10
    assert noisy["mismatch/is_weight_mean"] == pytest.approx(1.0, abs=1e-4)
    assert noisy["mismatch/logprob_abs_mean"] < 1e-4 < 0.01 < clean["mismatch/logprob_abs_mean"]
    assert noisy == pytest.approx(again, rel=1e-4, abs=1e-6)  # whatever the micro-batches
    torch.testing.assert_close(after, after_again, rtol=1e-4, atol=1e-6)


def run(base: Path, folder: Path, *callbacks: Any, **options: Any) -> tuple[dict[str, Tensor], list[float], list[Any]]:
    """What a run of four rollouts has learned, its mismatch, and the draws of its rows."""
    mismatch: list[float] = []
    draws: list[Any] = []

    def note(trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        mismatch.append(float(trainer.callback_metrics["mismatch/logprob_abs_mean"]))
        draws.append(None if batch.experience.draws is None else batch.experience.draws.tolist())

    noise = AdaptiveQuantizationNoise(0.2, 0.1, 2, "linear", trainer="in trainer" in folder.name, draws=2)
    module = module_of(base)
    watch = LambdaCallback(on_train_batch_end=note)
    trainer = trainer_of(folder, noise, watch, *callbacks, rollout=rollout_of(), noise=False, limit_val_batches=0)
    trainer.fit(module, datamodule=data(), weights_only=True, **options)
    return {name: tensor.clone() for name, tensor in module.policy.trained_state().items()}, mismatch, draws


def test_a_run_with_draws_and_noise_in_the_trainer_goes_on_bit_for_bit(tiny_policy_dir: Path, tmp_path: Path) -> None:
    learned, mismatch, draws = run(tiny_policy_dir, tmp_path / "in trainer", ResumeCheckpoint(3, keep=9))
    assert draws == [None, None, [0, 0, 1, 1], [0, 0, 1, 1]]  # the first stage has no noise
    assert mismatch[2] < 1e-4
    _, clean, _ = run(tiny_policy_dir, tmp_path / "clean")
    assert clean[2] > 0.005
    checkpoint = tmp_path / "in trainer" / "checkpoints" / "step=3.ckpt"
    resumed, rest, _ = run(tiny_policy_dir, tmp_path / "on, in trainer", ckpt_path=checkpoint)
    assert rest == mismatch[3:]
    assert all(torch.equal(resumed[name], tensor) for name, tensor in learned.items())
