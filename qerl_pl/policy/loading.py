"""Loading of the frozen base model from its folder and from weights shared with an engine."""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from accelerate import init_empty_weights
from qerl_kernels import FrozenWeight
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from qerl_pl.engines.base import SharedWeights
from qerl_pl.errors import UserError
from qerl_pl.formats.base import BaseFormat, format_of
from qerl_pl.formats.norm import use_float32_norms
from qerl_pl.models.families import check_family
from qerl_pl.models.folder import TensorFiles, load_config
from qerl_pl.policy.delta_net import use_packed_delta_nets
from qerl_pl.policy.experts import attach_routing_replay, use_packed_experts
from qerl_pl.policy.lora import FrozenLinear, parameter_name
from qerl_pl.policy.packed_layers import ATTENTION, use_gated_mlps, use_packed_attention
from qerl_pl.policy.shared_weights import check_shared_weights

log = logging.getLogger(__name__)


def load_base(
    folder: Path, dtype: torch.dtype, device: torch.device, shared: SharedWeights | None = None
) -> PreTrainedModel:
    """Load a frozen causal LM from a local folder; quantized and shared linears are `FrozenLinear`.

    Quantized weights are never dequantized, shared weights never copied.

    Args:
        folder: Hugging Face format.
        dtype: Data type of all tensors that are not quantized.
        device: Where the tensors go, one by one.
        shared: Weights of an engine that has loaded the same folder.

    Raises:
        UserError: The folder holds no model of a known family, tensors are missing or unexpected, fused
            projections have different global scales, layers would mix packed sequences, or shared weights are not the
            folder's.
    """
    log.info("loading the trainer's base on %s: %s", device, folder)
    base_format, tensors = format_of(folder), TensorFiles(folder)
    config = load_config(folder)
    family = check_family(config.to_dict(), folder)
    for name in family.dropouts:  # neither engines nor packed attention have it
        setattr(config, name, 0.0)
    base_format.check(tensors)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    shared = SharedWeights({}, {}) if shared is None else shared
    check_shared_weights(shared, base_format, tensors, family.experts)
    experts, loaded_experts = use_packed_experts(
        model, family, base_format, tensors, dtype, partial(_frozen_parameter, device=device), shared.experts
    )
    linears = _use_frozen_linears(model, base_format, tensors, device, shared.linears)
    state = {**shared.tensors, **experts, **linears}
    frozen = [name for name, module in model.named_modules() if isinstance(module, FrozenLinear)]
    loaded = {name for linear in frozen for name in base_format.tensor_names(linear)} | state.keys() | loaded_experts
    # Old Llama files store inv_freq, which the model computes from its config.
    skipped = (".inv_freq", *(f".{suffix}" for suffix in base_format.dropped))
    others = [name for name in tensors if name not in loaded and not name.endswith(skipped)]
    for name, (tensor,) in zip(others, tensors.read_groups([(name,) for name in others]), strict=True):
        state[name] = tensor.to(device, torch.float32 if family.keeps_precision(name) else dtype)
    _check_output_layer(model, state, base_format, folder)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name in missing if name != "lm_head.weight" or not config.tie_word_embeddings]
    if missing or unexpected:
        raise UserError(
            f"the weight files must fit config.json; {folder} lacks {missing[:3]} and has {unexpected[:3]} besides; "
            "check that both come from the same model"
        )
    use_float32_norms(model)
    use_gated_mlps(model)
    use_packed_attention(model)
    use_packed_delta_nets(model, config, family)
    attach_routing_replay(model)
    model.to(device)  # type: ignore[arg-type]
    return model.requires_grad_(False)


def _check_output_layer(
    model: PreTrainedModel, state: Mapping[str, Tensor], base_format: BaseFormat, folder: Path
) -> None:
    """Raise UserError if the output layer is quantized, or tied to embeddings that it differs from."""
    if isinstance(model.get_output_embeddings(), FrozenLinear):
        raise UserError(
            f"lm_head must be in 16 bits; {folder} has it in {base_format.name.upper()}: quantize the 16-bit model "
            "with lm_head among the modules to ignore, as `qerl quantize` does"
        )
    head, embeddings = "lm_head.weight", "model.embed_tokens.weight"
    stored = head in state and embeddings in state
    if model.config.tie_word_embeddings and stored and not torch.equal(state[head], state[embeddings]):
        raise UserError(
            f"with tie_word_embeddings true lm_head must be the embeddings; {folder} stores two different ones: set it "
            "to false, or delete lm_head.weight, in whichever way the model was trained"
        )


def _frozen_parameter(tensor: Tensor, device: torch.device) -> Tensor:
    return nn.Parameter(tensor.to(device), requires_grad=False)


def _use_frozen_linears(
    model: nn.Module,
    base_format: BaseFormat,
    tensors: TensorFiles,
    device: torch.device,
    shared: Mapping[str, FrozenWeight],
) -> dict[str, Tensor]:
    """Replace shared and quantized linears by `FrozenLinear`; returns the loaded tensors by parameter name."""
    state: dict[str, Tensor] = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        weight = shared.get(name)
        if weight is None:
            weight = base_format.frozen_weight(name, tensors, partial(_frozen_parameter, device=device))
            if weight is None:
                continue
            state |= {f"{name}.{parameter_name(key)}": tensor for key, tensor in weight.tensors().items()}
        model.set_submodule(name, FrozenLinear(weight, module.bias, own=name not in shared))
    return state
