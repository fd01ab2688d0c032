"""Models of random weights in the shapes of real ones, to measure speed and memory."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from qerl_kernels import NVFP4Tensor, nvfp4_global_scale, quantize_nvfp4
from qerl_kernels.reference import BLOCK
from transformers import AutoConfig, AutoModelForCausalLM

from qerl_pl.algorithm import NormNoise
from qerl_pl.formats.fp4 import NVFP4_CONFIG, STACKS_CONFIG, MXFP4StacksFormat
from qerl_pl.models.families import DOWN, GATE_UP, family_of, find_family, fused_group
from qerl_pl.models.folder import ShardWriter
from qerl_pl.models.shape import Shape
from qerl_pl.policy.policy import Policy
from qerl_pl.toy.tokenizer import build_tokenizer

SHAPES = {  # hidden, intermediate, layers, heads, key/value heads, vocabulary
    "tiny": (256, 512, 2, 4, 2, 512),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
    "3b": (2048, 11008, 36, 16, 2, 151936),
    "7b": (3584, 18944, 28, 28, 4, 152064),
    "8b": (4096, 12288, 36, 32, 8, 151936),
    "14b": (5120, 13824, 48, 40, 8, 152064),
    "32b": (5120, 27648, 64, 40, 8, 152064),
    "72b": (8192, 29568, 80, 64, 8, 152064),
    "qwen3.5-tiny": (256, 512, 4, 4, 2, 512),
    "qwen3.5-9b": (4096, 12288, 32, 16, 4, 248320),
    "qwen3.5-27b": (5120, 17408, 64, 24, 4, 248320),
}
QWEN3 = ("8b",)
"""Shapes of Qwen3, which has norms of queries and keys; the others are Qwen2's."""


COMMON = {
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Of every config.json here; no token ends a completion, so that every one has its full length."""


def config_of(shape: str, layers: int | None = None) -> dict[str, Any]:
    """config.json of a dense model of this shape.

    Args:
        shape: Of `SHAPES`.
        layers: Fewer or more than it has.
    """
    hidden, intermediate, own_layers, heads, kv_heads, vocabulary = SHAPES[shape]
    layers = layers or own_layers
    if shape.startswith("qwen3.5"):
        return delta_net_config("", hidden, layers, heads, kv_heads, vocabulary) | {"intermediate_size": intermediate}
    kind = "Qwen3" if shape in QWEN3 else "Qwen2"
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        **COMMON,
        **({"head_dim": hidden // heads} if kind == "Qwen3" else {}),
    }


def delta_net_config(kind: str, hidden: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    """What config.json of a Qwen3.5 has without its MLPs: three gated delta nets, then an attention.

    Args:
        kind: "Moe" of a mixture of experts.
        hidden: And the others, as in `SHAPES`.
    """
    size, attention, key_heads = (64, 64, 2) if vocabulary == 512 else (128, 256, 16)
    own = ("rope_theta", "dtype")
    return {
        "architectures": [f"Qwen3_5{kind}ForCausalLM"],
        "model_type": "qwen3_5_moe_text" if kind else "qwen3_5_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "layer_types": [("linear_attention", "full_attention")[index % 4 == 3] for index in range(layers)],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": attention,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": {4096: 32, 5120: 48}.get(hidden, 2 * key_heads),
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": 4,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "dtype": "bfloat16",
        **{key: value for key, value in COMMON.items() if key not in own},
    }


MIXTURES = {  # hidden, inner of an expert, layers, heads, key/value heads, head size, experts, chosen, vocabulary
    "tiny": (128, 64, 2, 4, 2, 32, 6, 2, 512),
    "30b-a3b": (2048, 768, 48, 32, 4, 128, 128, 8, 151936),
    "gpt-oss-tiny": (128, 64, 2, 4, 2, 32, 6, 2, 512),
    "gpt-oss-20b": (2880, 2880, 24, 64, 8, 64, 32, 4, 201088),
    "qwen3.5-moe-tiny": (256, 128, 4, 4, 2, 64, 6, 2, 512),
    "qwen3.5-35b-a3b": (2048, 512, 40, 16, 2, 256, 256, 8, 248320),
}
GPT_OSS = ("gpt-oss-tiny", "gpt-oss-20b")
"""Mixtures of gpt-oss, with 4-bit experts alone; the others are Qwen3's and Qwen3.5's, which has a shared expert."""
STACKS = (f".experts.{GATE_UP}", f".experts.{DOWN}")


def mixture_config(shape: str, layers: int | None = None) -> dict[str, Any]:
    """config.json of a mixture of experts of this shape, with so many layers, in 16 bits."""
    hidden, inner, own_layers, heads, kv_heads, head_size, experts, chosen, vocabulary = MIXTURES[shape]
    if shape in GPT_OSS:
        return {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers or own_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_size,
            "num_local_experts": experts,
            "num_experts_per_tok": chosen,
            "vocab_size": vocabulary,
            "max_position_embeddings": 131072,
            **COMMON,
            "attention_bias": True,
            "swiglu_limit": 7.0,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "rope_theta": 150000,
            "rope_scaling": {
                **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
                "original_max_position_embeddings": 4096,
            },
        }
    if shape.startswith("qwen3.5"):
        return {
            **delta_net_config("Moe", hidden, layers or own_layers, heads, kv_heads, vocabulary),
            "moe_intermediate_size": inner,
            "shared_expert_intermediate_size": inner,
            "num_experts": experts,
            "num_experts_per_tok": chosen,
        }
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "intermediate_size": 8 * inner,
        "moe_intermediate_size": inner,
        "num_hidden_layers": layers or own_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": vocabulary,
        "max_position_embeddings": 40960,
        **COMMON,
    }


def any_config(shape: str, layers: int | None = None) -> dict[str, Any]:
    """config.json of a dense model or a mixture, by its name in `SHAPES` or `MIXTURES`."""
    if shape not in SHAPES:
        return mixture_config(shape, layers)
    return config_of(shape, layers)


def cache_gib(config: dict[str, Any], tokens: float, sequences: int) -> float:
    """GiB of a key/value cache with room for so many sequences of so many tokens."""
    each = Shape.of(AutoConfig.for_model(**config)).sequence_kv_bytes(int(tokens) + 16, torch.bfloat16)
    return 1.05 * each * sequences / 2**30


def _stores_stacks(config: dict[str, Any]) -> bool:
    experts = family_of(config["model_type"]).experts
    return experts is not None and experts.stored_in_stacks


def published_sizes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's tensors by their names in a checkpoint in 16 bits, which has experts by themselves or, of
    gpt-oss, in stacks."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    sizes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        stem, _, matrix = name.rpartition(".")
        if not stem.endswith(".experts") or _stores_stacks(config):
            sizes[name] = tuple(parameter.shape)
            continue
        experts, rows, columns = parameter.shape
        members, rows = (("gate_proj", "up_proj"), rows // 2) if matrix == "gate_up_proj" else ((matrix,), rows)
        names = (f"{stem}.{expert}.{member}.weight" for expert in range(experts) for member in members)
        sizes |= dict.fromkeys(names, (rows, columns))
    return sizes


def write_model(
    folder: Path,
    shape: str,
    device: torch.device,
    nvfp4: bool = True,
    codes: bool = False,
    layers: int | None = None,
) -> None:
    """A checkpoint of random weights, quantized group by group on `device`, or in bfloat16; with the toy tokenizer.

    With `codes` the 4-bit codes themselves are drawn.
    """
    write_random(folder, any_config(shape, layers), device, nvfp4, codes)


def write_random(
    folder: Path, config: dict[str, Any], device: torch.device, nvfp4: bool = True, codes: bool = False
) -> None:
    """`write_model` for any config.json; experts in stacks are in MXFP4. The folder appears when it is complete."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a run that was cut off
    part.mkdir(parents=True)
    _write(part, config, device, nvfp4, codes)
    part.rename(folder)


def _write(folder: Path, config: dict[str, Any], device: torch.device, nvfp4: bool, codes: bool) -> None:
    unquantized = family_of(config["model_type"]).unquantized
    ignored, stacks = {"ignore": [*NVFP4_CONFIG["ignore"], *unquantized]}, _stores_stacks(config)
    quantization = {"quantization_config": STACKS_CONFIG if stacks else NVFP4_CONFIG | ignored} if nvfp4 else {}
    (folder / "config.json").write_text(json.dumps(config | quantization))
    build_tokenizer().save_pretrained(folder)
    sizes = published_sizes(config)
    writer = ShardWriter(folder)
    generator = torch.Generator(device).manual_seed(0)
    family = find_family(config["model_type"])

    def random(name: str) -> torch.Tensor:
        values = torch.empty(sizes[name], dtype=torch.bfloat16, device=device)
        if name.endswith("dt_bias"):  # states that forget within a token to a thousand
            return values.uniform_(-7, -1, generator=generator)
        if name.endswith("conv1d.weight"):
            return values.normal_(std=0.5, generator=generator)
        if family is not None and family.norm_offset and "norm" in name and "linear_attn" not in name:
            return values.fill_(0.0)
        # Of a size that shows in the result: biases beside products of a normed input, sinks beside scores.
        large = stacks and name.endswith(("bias", "sinks"))
        return values.fill_(1.0) if "norm" in name else values.normal_(std=0.2 if large else 0.02, generator=generator)

    done: set[str] = set()
    for name in sizes:
        if nvfp4 and stacks and name.endswith(STACKS):
            for suffix, tensor in in_mxfp4(random(name)).items():
                writer.add(f"{name}{suffix}", tensor)
            continue
        if not nvfp4 or stacks or family is None or not family.is_four_bits(name):
            writer.add(name, random(name))
            continue
        group = fused_group(name)
        if name in done:
            continue
        done.update(group)
        held = drawn(sizes, group, generator) if codes else quantized({member: random(member) for member in group})
        for member, packed in held.items():
            stem = member.removesuffix(".weight")
            writer.add(f"{stem}.weight_packed", packed.packed)
            writer.add(f"{stem}.weight_scale", packed.scale)
            writer.add(f"{stem}.weight_global_scale", packed.global_scale.clone())
    writer.finish()


def quantized(weights: Mapping[str, torch.Tensor]) -> dict[str, NVFP4Tensor]:
    """Weights that are fused, with one global scale."""
    scale = nvfp4_global_scale(*weights.values())
    return {name: quantize_nvfp4(weight, scale) for name, weight in weights.items()}


def drawn(
    sizes: Mapping[str, tuple[int, ...]], names: Iterable[str], generator: torch.Generator
) -> dict[str, NVFP4Tensor]:
    """Random codes and block scales, of weights with a root mean square of 0.02, which are not quantized first."""
    found, device = {}, generator.device
    for name in names:
        rows, columns = sizes[name]
        codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8, device=device, generator=generator)
        scales = torch.empty(rows, columns // BLOCK, device=device).uniform_(0.75, 1.25, generator=generator)
        found[name] = NVFP4Tensor(codes, scales.to(torch.float8_e4m3fn), torch.full((1,), 2.93 / 0.02, device=device))
    return found


def in_mxfp4(stack: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """What stores a stack of experts [E, K, N] as gpt-oss is published, by the suffix of its name."""
    quantizer = MXFP4StacksFormat()
    codes, scales = zip(*(quantizer.encode(matrix.t().contiguous(), None) for matrix in stack), strict=True)
    return quantizer.store(torch.stack(codes), torch.stack(scales), None, stack.dtype)[0]


def move_trained(policy: Policy, size: float) -> Policy:
    """The policy, with noise added to all that is trained: an adapter that is lost shows."""
    generator = torch.Generator().manual_seed(7)
    state = policy.trained_state()
    policy.load_trained_state(
        {name: t + size * torch.randn(t.shape, generator=generator).to(t.device) for name, t in state.items()}
    )
    return policy


@contextmanager
def noisy_norms(policy: Policy, noise: NormNoise | None) -> Iterator[None]:
    """Inside the block the policy's norms have the noise that an engine is synced with; None for none."""
    norms = {} if noise is None else policy.trained.norms()
    clean = {name: norm.weight.detach().clone() for name, norm in norms.items()}
    with torch.no_grad():
        for name, norm in norms.items():
            norm.weight += noise.of_norm(name, norm.multiplier(norm.weight)).to(norm.weight.device)
        yield
        for name, norm in norms.items():
            norm.weight.copy_(clean[name])
