"""Attention on packed sequences without transposed views, against transformers' own layers."""

import copy
from typing import Any

import pytest
import torch
from qerl_kernels import rms_norm, select_backend
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from qerl_pl.policy.packed_layers import ATTENTION, PackedAttention, use_packed_attention
from qerl_pl.policy.packing import Packing
from qerl_pl.runtime.random_state import deterministic

LENGTHS = torch.tensor([7, 1, 12, 5])
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
LOCAL: dict[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0}
PHI: dict[str, Any] = SIZES | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HALF_TURNED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16},
    **{"beta_fast": 4.0, "beta_slow": 0.2, "truncate": False},
}
MODELS = {
    "gemma3, window in one layer": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **LOCAL)),
    "gpt_oss, window in one layer, sinks, yarn": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2, sliding_window=4, rope_parameters=YARN)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "mistral, window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**PHI)),
    "phi3, window, a part of each head turned": lambda: Phi3ForCausalLM(
        Phi3Config(**PHI, sliding_window=5, rope_parameters=HALF_TURNED)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2, window in one layer": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, **WINDOW)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "qwen3, window in one layer": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **WINDOW)),
}


def make(name: str, attention: str = ATTENTION) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model, biases and norms drawn too, and its copy with packed attention."""
    torch.manual_seed(0)
    plain: Any = MODELS[name]().eval()
    plain.set_attn_implementation(attention)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    packed = copy.deepcopy(plain)
    use_packed_attention(packed)
    assert sum(isinstance(module, PackedAttention) for module in packed.modules()) == 2
    return plain, packed


def run(model: PreTrainedModel, ids: Tensor, packing: Packing | None) -> Tensor:
    """Hidden states [S, hidden] of packed tokens [S], or of one sequence."""
    options = {} if packing is None else {"packing": packing, "position_ids": packing.positions[None]}
    return model.get_decoder()(input_ids=ids[None], use_cache=False, **options).last_hidden_state[0]


@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_have_the_bits_of_the_layer_that_was_there(name: str) -> None:
    ids, packing = torch.randint(50, (25,)), Packing.of(LENGTHS, 12)
    models, gradients, outputs = make(name), [], []
    direction = torch.randn(25, 32)
    for model in models:
        outputs.append(run(model, ids, packing))
        (outputs[-1] * direction).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.get_decoder().named_parameters()})
    assert torch.equal(*outputs) and gradients[0].keys() == gradients[1].keys()
    for parameter, expected in gradients[0].items():
        result = gradients[1][parameter]
        if parameter.endswith(("q_norm.weight", "k_norm.weight")):  # a sum over tokens and heads in another order
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(result, expected), parameter


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_packed_sequences_are_those_of_a_plain_model_one_at_a_time(name: str, backend: Any) -> None:
    ids = torch.randint(50, (25,), generator=torch.Generator().manual_seed(1))
    plain, _ = make(name, "eager")
    expected = torch.cat([run(plain, one, None) for one in ids.split(LENGTHS.tolist())])
    select_backend(backend)
    try:
        result = run(make(name)[1], ids, Packing.of(LENGTHS, 12))
    finally:
        select_backend("torch")
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_a_packing_takes_no_dropout_of_weights() -> None:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, attention_dropout=0.1, attn_implementation=ATTENTION))
    use_packed_attention(model)
    ids, packing = torch.randint(50, (25,)), Packing.of(LENGTHS, 12)
    run(model.eval(), ids, packing)
    with pytest.raises(AssertionError):
        run(model.train(), ids, packing)


@pytest.mark.parametrize("name", MODELS)
def test_names_are_as_they_were_and_each_parameter_is_there_once(name: str) -> None:
    plain, packed = make(name)
    for named in ("named_parameters", "named_buffers", "named_modules"):
        names = [[name for name, _ in getattr(model, named)(remove_duplicate=False)] for model in (plain, packed)]
        assert names[0] == names[1]
    assert plain.state_dict().keys() == packed.state_dict().keys()


def test_a_projection_can_be_replaced_and_a_copy_has_its_own() -> None:
    _, packed = make("qwen2")
    ids, packing = torch.randint(50, (25,)), Packing.of(LENGTHS, 12)
    copied: Any = copy.deepcopy(packed)
    before = run(packed, ids, packing)
    for layer in packed.get_decoder().layers:
        layer.set_submodule("self_attn.v_proj", nn.Linear(32, 16))
    assert not torch.equal(run(packed, ids, packing), before) and torch.equal(run(copied, ids, packing), before)


def test_the_replaced_attention_shares_no_state_with_the_new_one() -> None:
    model = MODELS["qwen3"]()
    attention = model.model.layers[0].self_attn
    use_packed_attention(model)
    packed = model.model.layers[0].self_attn
    packed.v_proj = nn.Linear(32, 16)
    assert attention.v_proj is not packed.v_proj and "v_proj" in dict(packed.named_children())
    with pytest.raises(TypeError, match="packing"):
        model(torch.randint(50, (1, 5)))


def test_layers_that_are_not_known_stay() -> None:
    config = OlmoConfig(vocab_size=50, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4)
    unknown = OlmoForCausalLM(config)  # clips queries, keys and values
    use_packed_attention(unknown)
    grown = MODELS["llama"]()
    grown.model.layers[0].self_attn.extra = nn.Linear(2, 2)
    use_packed_attention(grown)
    assert [isinstance(layer.self_attn, PackedAttention) for layer in grown.model.layers] == [False, True]
    assert not any(isinstance(module, PackedAttention) for module in unknown.modules())


class FusedNorm(nn.Module):
    """A norm of heads by the fused kernel, which on a GPU sums a row's squares in another order than PyTorch."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.variance_epsilon)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_real_layer_on_a_gpu_has_the_bits_of_the_one_that_was_there(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128}
    settings: Any = SIZES | heads | {"num_hidden_layers": 1, "attn_implementation": ATTENTION}
    kind, of_kind = {"qwen2": (Qwen2ForCausalLM, Qwen2Config), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}[name]
    model: Any = kind(of_kind(**settings)).to("cuda", dtype).requires_grad_(False)  # type: ignore[arg-type]
    if name == "qwen3":
        layer = model.model.layers[0].self_attn
        layer.q_norm, layer.k_norm = FusedNorm(layer.q_norm), FusedNorm(layer.k_norm)
    packing = Packing.of(torch.tensor([1500, 700, 1848], device="cuda"), 1848)
    hidden, direction = torch.randn(2, 1, 4048, 3584, device="cuda").to(dtype)
    angles = model.model.rotary_emb(hidden, packing.positions[None])
    hidden.requires_grad_()
    result = []
    select_backend("triton")
    try:
        with deterministic():
            for _ in range(2):
                out, _ = model.model.layers[0].self_attn(
                    hidden, position_embeddings=angles, attention_mask=None, packing=packing
                )
                result.append((out, *torch.autograd.grad(out, hidden, direction)))
                use_packed_attention(model)
    finally:
        select_backend("torch")
    assert isinstance(model.model.layers[0].self_attn, PackedAttention)
    assert all(map(torch.equal, *result))
