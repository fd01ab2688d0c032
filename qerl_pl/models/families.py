"""Families of decoders: names of norms and projections, and what differs between their layers.

To add a family, append a `Family` to `FAMILIES`; docs/adding-a-family.md adds one as the example. All other code asks a
family by its fields and names none.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from qerl_pl.errors import UserError

GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""Stacks of a mixture's experts, in transformers' names and order."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
"""Linears of a gated delta net: of queries, keys and values, of the gate, of beta, of the decay, and of the result."""
FUSED = (PROJECTIONS[:3], PROJECTIONS[4:6], DELTA_NET[:2], DELTA_NET[2:4])
"""Projections that engines run as one matrix; in NVFP4 they share one global scale."""


@dataclass(frozen=True)
class Experts:
    """The mixture of experts in place of a layer's MLP: y = sum over the top-k experts e of p_e(x) expert_e(x).

    Its submodule `experts` has the stacks `gate_up_proj` [experts, 2 I, hidden] and `down_proj` of all experts. The
    defaults are Qwen3's, whose checkpoints store every expert as an MLP of its own, `experts.E.gate_proj.weight` and so
    on; transformers stacks them on loading.
    """

    block: str = "SparseMoeBlock"
    """Name of its class in transformers, after the prefix in the family's `classes`."""
    stored_in_stacks: bool = False
    """Whether checkpoints store the stacks, transposed, with interleaved rows of gates and ups, and biases
    `gate_up_proj_bias` [experts, 2 I] and `down_proj_bias`."""
    published_in_stacks: bool = False
    """Whether published checkpoints have the stacks as transformers has them: `TensorFiles` reads each expert by
    itself, and 4-bit checkpoints store it so."""
    clamped: bool = False
    """Whether act(gate) * up is `qerl_kernels.clamped_swiglu`, with the submodule's `alpha` and `limit`."""
    router: str = "gate"
    """Submodule with `weight` [experts, hidden] and `top_k`. It stays in 16 bits."""
    softmax_after_topk: bool = False
    """Whether p is the softmax over the top-k experts' logits, with the router's `bias` if it has one. Otherwise it is
    the softmax over all, divided by the top-k sum if the router's `norm_topk_prob` is true."""
    returns_topk_weights: bool = False
    """Whether the mixture also returns p."""
    shared: str | None = None
    """Submodule with the shared expert, if any: an MLP for all tokens, which LoRA adapts. The sigmoid of a linear with
    one row, named "…_gate", multiplies its result; the key for its width is "…_intermediate_size"."""
    count: str = "num_experts"
    """Key of config.json for the number of experts."""
    intermediate_size: str = "moe_intermediate_size"
    """Key for the width of an expert."""


@dataclass(frozen=True)
class Family:
    """Decoders of one `model_type` of transformers; the defaults are Llama's."""

    model_type: str
    """In config.json."""
    classes: str
    """Prefix of transformers' classes: "Qwen3" for Qwen3Attention, Qwen3MLP and Qwen3RMSNorm; "Text" may follow it."""
    projections: tuple[str, ...] = PROJECTIONS
    """Linears of a layer in the order of its forward pass: q, k, v (or all in one), o, gate, up (or both in one), down;
    then those of a gated delta net. LoRA adapts them by default."""
    noisy_norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    """Norms of a layer before q, k, v and before gate, up: AQN perturbs them, and `train_norms` trains them. The final
    norm and norms of queries, keys and outputs feed no quantized linear."""
    norm_offset: float = 0.0
    """What the norm adds to its weight: 1 if it multiplies by 1 + weight. Noise is added to the weight."""
    float32_norms: bool = False
    """Whether norms multiply in float32, as `Float32RMSNorm` does, which then replaces all of them."""
    norm_eps: str = "variance_epsilon"
    """The norm's attribute that is added to the mean square."""
    normed_outputs: bool = False
    """Whether a norm follows the layer's last linear, so that selective activation checkpointing must save its product.
    """
    head_norms: bool = False
    """Whether queries and keys have norms."""
    value_norm: bool = False
    """Whether values have a norm, which has no weight."""
    positions_count_scaling: bool = False
    """Whether `max_position_embeddings` in config.json counts the factor of linear rotary scaling."""
    embedding_scale: str | None = None
    """The embedding's attribute that multiplies its rows, if any."""
    window: Callable[[Any], int | None] = lambda attention: None
    """Sliding window of an attention layer of transformers, in tokens; None for full attention."""
    score_cap: str | None = None
    """The attention's attribute with the soft cap of its scores, if any; such layers attend in plain PyTorch."""
    sinks: str | None = None
    """The attention's parameter with its sinks, if any: a score of each head that takes part in the softmax and has no
    value. Frozen."""
    half_angles: bool = False
    """Whether transformers' rotary embedding has an angle for each pair of channels, not one for each channel."""
    gated_attention: bool = False
    """Whether q has for each head its query, then a gate, whose sigmoid multiplies what the head has attended to."""
    keys_as_values: str | None = None
    """Key of config.json with which layers of full attention have no v: their values are the keys before norm and
    rotary embedding. In such a family the size and number of heads differ between kinds of layers, too."""
    delta_net: str | None = None
    """Name of a layer's gated delta net, if any, which some layers have in place of attention: a class of transformers
    that ends in GatedDeltaNet, with the linears `DELTA_NET`."""
    logit_cap: str | None = None
    """Key of config.json with the soft cap of the logits, if any."""
    dropouts: tuple[str, ...] = ("attention_dropout",)
    """Keys of config.json for pretraining's dropout, which is off in the policy."""
    unsupported: tuple[str, ...] = ()
    """Keys of config.json that must be null or false: the policy does not compute what they turn on."""
    assumed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Keys of config.json with the values that the policy computes, where they are given."""
    experts: Experts | None = None
    """Mixture of experts; None for a dense MLP. Its linears are not among `projections`: they are frozen."""
    attention_in_vllm: str = "self_attn"
    """Name of a layer's attention in vLLM's model; here it is self_attn."""
    embedding_in_vllm: str = "embed_tokens"
    """Name of the embedding in vLLM's model; here it is embed_tokens."""
    fixed_in_vllm: Callable[[Any], Mapping[str, object]] = lambda config: {}
    """Keys of a transformers config that vLLM's model does not read, with the values that it assumes."""

    @property
    def dense_linears(self) -> tuple[str, ...]:
        """Linears of few rows, which a 4-bit checkpoint has in 16 bits: a delta net's, and a shared expert's gate."""
        net = () if self.delta_net is None else DELTA_NET[2:4]
        return net if self.experts is None or self.experts.shared is None else (*net, f"{self.experts.shared}_gate")

    @property
    def unquantized(self) -> tuple[str, ...]:
        """Linears of a layer that a 4-bit checkpoint stores in 16 bits, as entries of compressed-tensors' `ignore`."""
        router = () if self.experts is None else (rf"mlp\.{self.experts.router}",)
        parent = {name: self.delta_net if name in DELTA_NET else "mlp" for name in self.dense_linears}
        return tuple(f"re:.*{name}$" for name in (*router, *(rf"{parent[name]}\.{name}" for name in parent)))

    def is_four_bits(self, weight: str) -> bool:
        """Whether a 4-bit checkpoint stores a weight of this name in 4 bits, if it has no stacks of experts."""
        names = rf"\w+_proj|{self.delta_net}\.in_proj_(qkv|z)"
        return re.search(rf"\.layers\.\d+\.(.+\.)?({names})\.weight$", weight) is not None

    def keeps_precision(self, tensor: str) -> bool:
        """Whether a tensor of this name is computed with as it is stored, in float32: all of a gated delta net but its
        linears. A rounded A_log would be another decay."""
        _, found, name = tensor.partition(f".{self.delta_net}.")
        return bool(found) and name.partition(".")[0] not in DELTA_NET

    def name_in_base(self, name: str) -> str:
        """The base model's name of a module of vLLM's model."""
        if name == f"model.{self.embedding_in_vllm}":
            return "model.embed_tokens"
        return name.replace(f".{self.attention_in_vllm}.", ".self_attn.")

    def layers_without_values(self, config: Any) -> frozenset[int]:
        """Layers of a transformers config whose attention has no v, as its values are its keys."""
        if self.keys_as_values is None or not getattr(config, self.keys_as_values):
            return frozenset()
        return frozenset(index for index, kind in enumerate(config.layer_types) if kind == "full_attention")

    def mlp_widths(self, config: Any) -> tuple[int, int]:
        """Elements of a token's gates (or ups) in one layer, without a shared expert's, and its experts, 0 for none."""
        if self.experts is None:
            return int(config.intermediate_size), 0
        top_k = int(config.num_experts_per_tok)
        return top_k * int(getattr(config, self.experts.intermediate_size)), top_k


_gemma = partial(
    Family,
    noisy_norms=("input_layernorm", "pre_feedforward_layernorm"),
    norm_offset=1.0,
    float32_norms=True,
    norm_eps="eps",
    normed_outputs=True,
    embedding_scale="embed_scale",
    window=lambda attention: attention.sliding_window,
)
_qwen3_5 = partial(  # the text models of Qwen3.5, 3.6 and 3.8
    Family,
    projections=(*PROJECTIONS, *DELTA_NET),
    norm_offset=1.0,
    float32_norms=True,
    norm_eps="eps",
    gated_attention=True,
    delta_net="linear_attn",
    assumed={
        "attn_output_gate": (True,),
        "output_gate_type": ("silu", "swish"),
        "mamba_ssm_dtype": ("float32",),
        "hidden_act": ("silu",),
        "norm_topk_prob": (True,),
    },
)

FAMILIES = (
    Family("llama", "Llama"),
    Family("mistral", "Mistral", window=lambda attention: attention.config.sliding_window),
    Family("qwen2", "Qwen2", window=lambda attention: attention.sliding_window),
    Family("qwen3", "Qwen3", head_norms=True, window=lambda attention: attention.sliding_window),
    Family(  # Phi-3, Phi-3.5 mini, Phi-4, Phi-4 mini
        "phi3",
        "Phi3",
        projections=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
        window=lambda attention: attention.config.sliding_window,
        dropouts=("attention_dropout", "resid_pdrop", "embd_pdrop"),
    ),
    _gemma(
        "gemma2",
        "Gemma2",
        score_cap="attn_logit_softcapping",
        logit_cap="final_logit_softcapping",
        unsupported=("use_bidirectional_attention",),
    ),
    _gemma(  # the text models of Gemma 3
        "gemma3_text",
        "Gemma3",
        head_norms=True,
        positions_count_scaling=True,
        unsupported=("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    ),
    _gemma(  # the dense text models of Gemma 4 without embeddings by layer, such as 31B
        "gemma4_text",
        "Gemma4",
        norm_offset=0.0,
        head_norms=True,
        value_norm=True,
        keys_as_values="attention_k_eq_v",
        logit_cap="final_logit_softcapping",
        unsupported=(  # E2B and E4B have the first three, the mixture of experts the last
            "hidden_size_per_layer_input",
            "num_kv_shared_layers",
            "use_double_wide_mlp",
            "enable_moe_block",
        ),
        assumed={"use_bidirectional_attention": (None, "vision")},
    ),
    Family(
        "gpt_oss",
        "GptOss",
        projections=("q_proj", "k_proj", "v_proj", "o_proj"),
        window=lambda attention: attention.sliding_window,
        sinks="sinks",
        half_angles=True,
        experts=Experts(
            block="MLP",
            stored_in_stacks=True,
            clamped=True,
            router="router",
            softmax_after_topk=True,
            returns_topk_weights=True,
            count="num_local_experts",
            intermediate_size="intermediate_size",
        ),
        attention_in_vllm="attn",
        embedding_in_vllm="embedding",
        fixed_in_vllm=lambda config: {
            **{"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "attention_bias": True},
            "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(config.num_hidden_layers)],
        },
    ),
    _qwen3_5("qwen3_5_text", "Qwen3_5"),
    _qwen3_5(  # Qwen3.5-35B-A3B and its like
        "qwen3_5_moe_text",
        "Qwen3_5Moe",
        experts=Experts(published_in_stacks=True, softmax_after_topk=True, shared="shared_expert"),
    ),
    Family(  # Qwen3-30B-A3B and its like
        "qwen3_moe",
        "Qwen3Moe",
        head_norms=True,
        projections=("q_proj", "k_proj", "v_proj", "o_proj"),
        window=lambda attention: attention.sliding_window,
        experts=Experts(),
    ),
)

NOT_COMPUTED: Mapping[str, str] = {"qwen3_next": "gated delta nets whose linears are fused otherwise than Qwen3.5's"}
"""What is not computed for a family, so that an entry in `FAMILIES` is not enough, by `model_type`."""


def find_family(model_type: str | None) -> Family | None:
    """The family of a `model_type`; None for an unknown one."""
    return next((family for family in FAMILIES if family.model_type == model_type), None)


def family_of(model_type: str, source: object = "the model") -> Family:
    """The family of the `model_type` in a config of `source`; UserError if it is none of `FAMILIES`."""
    if (family := find_family(model_type)) is not None:
        return family
    if model_type in NOT_COMPUTED:
        raise UserError(
            f"a base model must be of a family that trains; model_type in config.json of {source} is {model_type!r}, "
            f"which has {NOT_COMPUTED[model_type]}; take one of docs/your-own-model.md"
        )
    known = ", ".join(family.model_type for family in FAMILIES)
    raise UserError(
        f"a base model must be of a known family; model_type in config.json of {source} is {model_type!r}, none of "
        f"{known}: add it as docs/adding-a-family.md shows"
    )


def logit_cap(config: PretrainedConfig) -> float | None:
    """Soft cap of the logits of a model of a known family; None where they have none."""
    key = family_of(config.model_type).logit_cap
    return None if key is None else getattr(config, key)


def family_of_class(name: str, kind: str) -> Family | None:
    """The family that has a class of transformers, such as "Qwen3RMSNorm", of a kind, such as "RMSNorm"."""
    return next((one for one in FAMILIES if name in (f"{one.classes}{kind}", f"{one.classes}Text{kind}")), None)


def check_family(config: Mapping[str, Any], source: object) -> Family:
    """The family of a model's config.json.

    Raises:
        UserError: As `family_of`, or the model is multimodal, or uses a feature that the policy does not compute.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and find_family(inner.get("model_type")) is not None:
        raise UserError(
            f"a base model must be of text alone; {source} has a {inner['model_type']} in a "
            f"{config.get('model_type')}: take the text model out by `qerl quantize`, in 16 bits by --format none"
        )
    family = family_of(config.get("model_type", ""), source)
    for key in family.unsupported:
        if config.get(key):
            raise UserError(
                f"a {family.model_type} model must have {key} null or false; config.json of {source} has "
                f"{config[key]}: take a model without it"
            )
    for key, values in family.assumed.items():
        if key in config and config[key] not in values:
            raise UserError(
                f"a {family.model_type} model must have {key} {' or '.join(map(str, values))}; config.json of {source} "
                f"has {config[key]}: take a model that has it so"
            )
    return family


def check_expert_names(config: Mapping[str, Any], names: Iterable[str], source: object) -> None:
    """Raise UserError if a tensor of `names` is a stack of experts although the family stores them one by one."""
    family = find_family(config.get("model_type"))
    experts = None if family is None else family.experts
    if experts is None or experts.stored_in_stacks or experts.published_in_stacks:
        return
    stack = next((name for name in names if re.search(r"\.experts\.\D", name)), None)
    if stack is not None:
        raise UserError(
            f"experts must be stored one by one, as published models have them; {source} has them stacked in {stack}: "
            "take the published files, or save a model that AutoModelForCausalLM.from_config has made and that has "
            "loaded its state dict"
        )


def text_config(config: Mapping[str, Any], source: object) -> dict[str, Any] | None:
    """config.json of the text model in a multimodal model; None for a text model. UserError as `check_family`."""
    if not isinstance(inner := config.get("text_config"), Mapping):
        return None
    family = check_family(inner, source)
    inherited = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
    own = {key: config[key] for key in inherited if key in config}
    return {**inner, **own, "architectures": [f"{family.classes}ForCausalLM"]}


def noisy_norm_names(names: Iterable[str], family: Family) -> list[str]:
    """The module names that AQN perturbs, in the order of `names`."""
    noisy = re.compile(rf"(^|\.)layers\.\d+\.({'|'.join(family.noisy_norms)})$")
    return [name for name in names if noisy.search(name)]


def fused_group(name: str) -> tuple[str, ...]:
    """The weights that run fused with weight `name` ("….q_proj.weight" -> q, k and v), itself included."""
    module, _, projection = name.removesuffix(".weight").rpartition(".")
    for group in FUSED:
        if projection in group:
            return tuple(f"{module}.{member}.weight" for member in group)
    return (name,)


def linear_shapes(config: PretrainedConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of every linear of a causal language model by name, from its config alone."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: (m.out_features, m.in_features) for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def expert_blocks(model: nn.Module, family: Family) -> dict[str, nn.Module]:
    """The mixtures of experts of a transformers model by name."""
    if family.experts is None:
        return {}
    block = f"{family.classes}{family.experts.block}"
    return {name: module for name, module in model.named_modules() if type(module).__name__ == block}


def names_match(name: str, targets: Iterable[str]) -> bool:
    """Whether one of `targets` is the end of a name, as PEFT's `target_modules` are."""
    return any(name == target or name.endswith(f".{target}") for target in targets)
