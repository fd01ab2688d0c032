"""One linear with its adapter against plain products in float64, forward and backward, at scalings other than 1."""

import json
from pathlib import Path

import peft
import pytest
import torch
from qerl_kernels import NVFP4Weight, dequantize_nvfp4, quantize_nvfp4
from safetensors.torch import save_file
from tiny_families import CONFIGS, OPTIONS, SIZES
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from qerl_pl.errors import UserError
from qerl_pl.models.shape import Shape
from qerl_pl.modules import PolicyConfig
from qerl_pl.policy.lora import ADAPTER, FrozenLinear, LoraConfig, LoraSpec
from qerl_pl.policy.lora_adapter import PeftLoraLinear

RANK, ROWS, COLUMNS, DROPPED = 4, 32, 48, 0.25


def base_of(kind: str, random: torch.Generator) -> tuple[nn.Module, Tensor, Tensor]:
    """A frozen linear, and the weight and bias that it multiplies by."""
    weight, bias = torch.randn(ROWS, COLUMNS, generator=random), torch.randn(ROWS, generator=random)
    if kind == "nvfp4":
        tensor = quantize_nvfp4(weight)
        linear = FrozenLinear(NVFP4Weight(tensor), nn.Parameter(bias, requires_grad=False), own=False)
        return linear, dequantize_nvfp4(*tensor, torch.float32), bias
    dense = nn.Linear(COLUMNS, ROWS).requires_grad_(False)
    dense.load_state_dict({"weight": weight, "bias": bias})
    return dense, weight, bias


def adapted(kind: str, alpha: float, dropout: float) -> tuple[PeftLoraLinear, list[Tensor]]:
    """A linear with an adapter that does something, and its weight, bias, A and B in float64."""
    random = torch.Generator().manual_seed(11)
    base, weight, bias = base_of(kind, random)
    config = peft.LoraConfig(r=RANK, lora_alpha=alpha, lora_dropout=dropout)  # type: ignore[arg-type]
    linear = PeftLoraLinear(base, ADAPTER, config, r=RANK, lora_alpha=alpha)  # type: ignore[arg-type]
    with torch.no_grad():
        for factor in linear.factors():
            factor.copy_(torch.randn(factor.shape, generator=random))
    return linear, [one.detach().double() for one in (weight, bias, *linear.factors())]


@pytest.mark.parametrize(("alpha", "scaling"), [(8.0, 2.0), (2.0, 0.5)])
@pytest.mark.parametrize("mode", ["train", "train with dropout", "eval with dropout"])
@pytest.mark.parametrize("kind", ["nvfp4", "dense"])
def test_an_adapter_is_scaled_forward_and_backward(kind: str, mode: str, alpha: float, scaling: float) -> None:
    dropout = DROPPED if "dropout" in mode else 0.0
    linear, (weight, bias, a, b) = adapted(kind, alpha, dropout)
    linear.train(mode.startswith("train"))
    random = torch.Generator().manual_seed(12)
    x, upstream = (torch.randn(3, 5, size, generator=random) for size in (COLUMNS, ROWS))

    torch.manual_seed(13)
    leaf = x.clone().requires_grad_()
    result = linear(leaf)
    result.backward(upstream)

    mask = torch.ones(15, COLUMNS, dtype=torch.float64)
    if mode == "train with dropout":  # the inputs that the same seed keeps, scaled up for those it drops
        torch.manual_seed(13)
        kept = nn.functional.dropout(torch.ones_like(x), dropout).reshape(-1, COLUMNS) > 0
        assert 0 < kept.double().mean() < 1
        mask = kept.double() / (1 - dropout)
    # y = W x + b + s B A (m x), and its gradients by hand.
    ins, outs = x.double().reshape(-1, COLUMNS), upstream.double().reshape(-1, ROWS)
    seen = ins * mask
    expected = ins @ weight.T + bias + scaling * (seen @ a.T) @ b.T
    gradients = (
        outs @ weight + scaling * (outs @ b @ a) * mask,
        scaling * (outs @ b).T @ seen,
        scaling * outs.T @ (seen @ a.T),
    )
    measured = (leaf.grad, *(factor.grad for factor in linear.factors()))
    for one, truth in zip((result.detach(), *measured), (expected, *gradients), strict=True):
        assert one is not None
        torch.testing.assert_close(one.double(), truth.view(one.shape), rtol=1e-5, atol=1e-5 * float(truth.abs().max()))


@pytest.mark.parametrize("kind", ["nvfp4", "dense"])
def test_an_adapter_that_is_off_adds_nothing(kind: str) -> None:
    linear, (weight, bias, *_) = adapted(kind, 8.0, DROPPED)
    linear.enable_adapters(False)
    x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(12))
    torch.testing.assert_close(linear(x).double(), x.double() @ weight.T + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_all_linear_adapts_what_it_does_in_peft(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name](**SIZES | {"pad_token_id": 0} | OPTIONS[name])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"), low_cpu_mem_usage=True)
    spec = PolicyConfig(path=str(tmp_path), lora=LoraConfig(targets="all-linear")).lora_spec
    assert spec == PolicyConfig(path=str(tmp_path)).lora_spec and spec is not None
    adaptable = {target.rpartition(".")[2] for target in adapted.targeted_module_names}
    assert adaptable - {"shared_expert_gate"} == set(spec.targets)  # whose weight has a single row
    factors = {name.partition(".lora_"): p.numel() for name, p in adapted.named_parameters()}
    own = [size for (name, factor, _), size in factors.items() if factor and name.rpartition(".")[2] in spec.targets]
    assert Shape.of(config).adapter_weights(8, spec.targets) == sum(own)  # of PEFT's rank


def test_all_linear_is_compared_with_the_adapter_that_training_starts_from(tmp_path: Path) -> None:
    factors = {f"base_model.model.model.layers.0.self_attn.{name}.lora_A.weight": torch.ones(4, 2) for name in "qv"}
    saved = {"base_model_name_or_path": "base", "r": 4, "lora_alpha": 8, "target_modules": ["q", "v"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    save_file(factors, tmp_path / "adapter_model.safetensors")
    null = PolicyConfig(adapter=str(tmp_path)).lora_spec
    assert null is not None and null.targets == ("q", "v")
    with pytest.raises(UserError, match=r"has targets q, v and model.policy.lora.targets is q_proj, k_proj, .*; leave"):
        _ = PolicyConfig(adapter=str(tmp_path), lora=LoraConfig(targets="all-linear")).lora_spec
    assert LoraConfig(targets="q_proj").spec(LoraSpec()).targets == ("q_proj",)  # type: ignore[arg-type]
    toy = PolicyConfig(lora=LoraConfig(rank=2, targets="all-linear")).lora_spec
    assert toy is not None and (toy.rank, toy.targets) == (2, LoraSpec().targets)
