"""Full fine-tuning: every weight trains as in a plain model, reaches every engine, and comes out as a plain model."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from fit_helpers import train
from model_copies import copy_of
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.random_model import move_trained
from qerl_pl.callbacks import RunSummary
from qerl_pl.engines import EngineSpec, RolloutEngine, TransformersEngine, VLLMEngine
from qerl_pl.errors import UserError
from qerl_pl.formats.norm import Float32RMSNorm
from qerl_pl.models.memory import optimizer_bytes
from qerl_pl.modules import Policy, PolicyConfig
from qerl_pl.policy.full_finetuning import MasterLinear, MasterRMSNorm, use_master_weights
from qerl_pl.rollout import parity_check
from qerl_pl.types import PolicyWeights, Prompt, RolloutRequest, SamplingConfig

CPU = torch.device("cpu")
TOKENS = torch.randint(5, 300, (1, 12), generator=torch.Generator().manual_seed(3))
MASK = (torch.arange(12) >= 6)[None]


def make(base: Path, dtype: str = "float32", with_reference: bool = False, **settings: object) -> Policy:
    config = PolicyConfig(path=str(base), quantization="none", finetune="full", dtype=dtype, **settings)  # type: ignore[arg-type]
    return Policy(base, config, CPU, seed=1, with_reference=with_reference)


def logprobs(policy: Policy, reference: bool = False) -> Tensor:
    return policy.token_values(TOKENS, torch.tensor([12]), MASK, 1.0, reference=reference)[0][MASK]


def plain_logprobs(model: torch.nn.Module) -> Tensor:
    result = model(TOKENS).logits[0, :-1].float().log_softmax(-1)
    return result.gather(1, TOKENS[0, 1:, None])[:, 0][MASK[0, 1:]]


@pytest.fixture(scope="module")
def untied(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same policy with a layer to the vocabulary of its own."""
    assert json.loads((tiny_policy_dir / "config.json").read_text())["tie_word_embeddings"]
    tensors = load_file(tiny_policy_dir / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    return copy_of(tiny_policy_dir, tmp_path_factory.mktemp("untied"), tensors, tie_word_embeddings=False)


@pytest.mark.parametrize(("tied", "checkpointing"), [(True, False), (False, True), (False, "selective")])
def test_gradients_are_those_of_a_plain_model_for_every_weight(
    tiny_policy_dir: Path, untied: Path, tied: bool, checkpointing: bool | str
) -> None:
    base = tiny_policy_dir if tied else untied
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    policy = make(base, gradient_checkpointing=checkpointing).train()
    assert (policy.base.lm_head.weight is policy.base.model.embed_tokens.weight) == tied
    for result in (plain_logprobs(plain), logprobs(policy)):
        result.sum().backward()
    expected = dict(plain.named_parameters())
    trained = dict(policy.base.named_parameters())
    assert trained.keys() == expected.keys() == policy.trained_state().keys()
    for name, parameter in trained.items():
        assert parameter.dtype == torch.float32 and parameter.requires_grad
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_16_bit_policy_computes_with_rounded_weights_and_keeps_steps_that_16_bits_would_swallow(
    tiny_policy_dir: Path,
) -> None:
    policy = make(tiny_policy_dir, "bfloat16")
    plain = AutoModelForCausalLM.from_pretrained(tiny_policy_dir, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(logprobs(policy), plain_logprobs(plain), rtol=0, atol=0.05)
    hidden: list[torch.dtype] = []
    policy.base.model.norm.register_forward_hook(lambda *args: hidden.append(args[2].dtype))
    logprobs(policy).sum().backward()
    assert hidden == [torch.bfloat16]
    weight = policy.base.get_parameter("model.layers.0.mlp.up_proj.weight")
    assert weight.grad is not None and weight.grad.dtype == torch.float32 and weight.grad.any()
    before = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(1 + 1e-5)
    assert (weight != before).any() and torch.equal(weight.bfloat16(), before.bfloat16())


def test_the_reference_is_a_frozen_copy_that_is_loaded_where_it_is_asked_for(tiny_policy_dir: Path) -> None:
    policy = make(tiny_policy_dir, with_reference=True)
    expected = plain_logprobs(AutoModelForCausalLM.from_pretrained(tiny_policy_dir, dtype=torch.float32))
    trainable = sum(p.numel() for p in policy.parameters())
    move_trained(policy, 0.02)
    with torch.no_grad():
        torch.testing.assert_close(logprobs(policy, reference=True), expected, rtol=1e-4, atol=1e-5)
        assert (logprobs(policy) - expected).abs().max() > 0.01
    assert sum(p.numel() for p in policy.parameters() if p.requires_grad) == trainable  # the copy is no part of it
    with pytest.raises(UserError, match="reference policy only where the loss needs it"):
        logprobs(make(tiny_policy_dir), reference=True)


def test_what_old_llama_files_hold_besides_weights_is_saved_as_it_was(tiny_policy_dir: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = load_file(tiny_policy_dir / "model.safetensors") | {name: torch.tensor([1.0, 0.5])}
    policy = make(copy_of(tiny_policy_dir, tmp_path / "base", tensors))
    move_trained(policy, 0.02)
    (tmp_path / "saved").mkdir()
    policy.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    expected = policy.trained_state() | {name: torch.tensor([1.0, 0.5])}
    assert saved.keys() == expected.keys() and all(torch.equal(saved[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_every_weight_reaches_the_engine_in_place(untied: Path, kind: str) -> None:
    engine: RolloutEngine = TransformersEngine() if kind == "transformers" else VLLMEngine(kv_cache_gib=0.1)
    engine.launch(EngineSpec(untied, torch.float32, CPU, 0, (), 64, full_finetuning=True))
    policy = make(untied)
    prompts = [Prompt("p", tuple(TOKENS[0, :6].tolist()), "", "")]
    try:
        before = parity_check.measure_full_finetuning_parity(engine, policy, prompts, 0, 5, 16)
        move_trained(policy, 0.02)
        after = parity_check.measure_full_finetuning_parity(engine, policy, prompts, 1, 6, 16)
        for result in (before, after):  # seeds 5 and 6 perturb a layer each
            assert result.adapter_on < 1e-4 and result.adapter_off < 1e-4 < 0.01 < result.adapter_effect
        own = policy.trained_state()
        for name in own:  # each alone: a weight that never arrives shows
            changed = own | {name: own[name] + 0.1 * torch.randn_like(own[name])}
            samples = []
            for tensors in (changed, own):
                engine.sync(PolicyWeights(1, {}, 1.0, tensors))
                sampling = SamplingConfig(max_tokens=4, temperature=0.0)
                samples.append(engine.generate([RolloutRequest(prompts[0].token_ids, (0,))], sampling)[0][0].logprobs)
            assert samples[0] != samples[1], name
        with pytest.raises(UserError, match=r"model.nothing.weight \(2,\) is none there; train an adapter"):
            engine.sync(PolicyWeights(1, {}, 1.0, {"model.nothing.weight": torch.zeros(2)}))
    finally:
        engine.close()


def test_a_run_says_where_its_model_is(
    tiny_policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = {"path": str(tiny_policy_dir), "dtype": "float32", "quantization": "none", "finetune": "full"}
    train(tiny_policy_dir, tmp_path, TransformersEngine(), watch=RunSummary(), beta=0.0, policy=policy)
    assert f"model {tmp_path / 'model'}" in capsys.readouterr().out and (tmp_path / "model" / "config.json").is_file()
    assert (tmp_path / "model" / "qerl_model.json").is_file()


def test_a_probe_changes_one_layer_and_leaves_no_trace(tiny_policy_dir: Path) -> None:
    policy = make(tiny_policy_dir)
    before = {name: tensor.clone() for name, tensor in policy.trained_state().items()}
    for seed in (0, 1):
        with pytest.raises(InterruptedError), policy.perturbed(seed):
            inside = policy.trained_state()
            changed = {name for name, tensor in inside.items() if not torch.equal(tensor, before[name])}
            assert changed == {name for name in before if f".layers.{seed}." in name}
            raise InterruptedError
        assert all(torch.equal(tensor, before[name]) for name, tensor in policy.trained_state().items())


def test_refuses_the_state_of_another_policy(tiny_policy_dir: Path, untied: Path) -> None:
    with pytest.raises(UserError, match="this policy's weights; .* set model.policy as in the run that wrote it"):
        make(tiny_policy_dir).load_trained_state(make(untied).trained_state())


def test_full_fine_tuning_of_four_bits_is_refused() -> None:
    for quantization in ("nvfp4", "mxfp4"):
        with pytest.raises(UserError, match=f"not quantized; got quantization {quantization}; set .* to none"):
            PolicyConfig(quantization=quantization, finetune="full")  # type: ignore[arg-type]


def test_what_optimizers_hold() -> None:
    """AdamW has two float32 a weight, SGD nothing."""
    assert optimizer_bytes(torch.optim.AdamW, CPU) == 8
    assert optimizer_bytes(lambda p: torch.optim.SGD(p, 0.1), CPU) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_what_optimizers_hold_on_a_gpu() -> None:
    """Paged states are not the GPU's."""
    gpu, fused = torch.device("cuda"), partial(torch.optim.AdamW, fused=True)
    assert optimizer_bytes(torch.optim.AdamW, gpu) == optimizer_bytes(fused, gpu) == 8
    optim = pytest.importorskip("bitsandbytes.optim")
    assert optimizer_bytes(optim.AdamW8bit, gpu) == 2 + 2 * 4 / 256
    assert optimizer_bytes(optim.PagedAdamW8bit, gpu) == 2 * 4 / 256


def test_a_norm_with_masters_computes_with_the_rounded_scale() -> None:
    weight, x = 1 + 0.1 * torch.rand(64), torch.randn(5, 64).bfloat16()
    found, expected = (MasterRMSNorm(nn.Parameter(w), 1e-6)(x) for w in (weight, weight.bfloat16().float()))
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


def test_the_gradient_of_a_bias_has_more_than_16_bits() -> None:
    linear = MasterLinear(nn.Linear(2, 3).bfloat16())
    linear(torch.ones(4097, 2, dtype=torch.bfloat16)).sum().backward()
    assert linear.bias is not None and torch.equal(linear.bias.grad, torch.full((3,), 4097.0))


def test_a_norm_that_had_noise_to_take_keeps_epsilon_and_offset_with_masters() -> None:
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=8, hidden_size=32, intermediate_size=8, num_hidden_layers=1))
    model.model.norm = Float32RMSNorm(torch.ones(32), 0.1, 1.0)
    use_master_weights(model)
    norm = model.model.norm
    assert type(norm) is MasterRMSNorm and (norm.eps, norm.offset) == (0.1, 1.0)
