"""The frozen base model, made from its folder and from what an engine lends."""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import init_empty_weights
from qerl_kernels import FrozenWeight
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from qerl_pl.engines.base import SharedWeights
from qerl_pl.errors import UserError
from qerl_pl.formats.base import BaseFormat, format_of
from qerl_pl.formats.model_folder import TensorFiles, load_config
from qerl_pl.modules.lora import FrozenLinear, parameter_name
from qerl_pl.modules.packed_layers import ATTENTION

log = logging.getLogger(__name__)


def load_base(
    folder: Path, dtype: torch.dtype, device: torch.device, shared: SharedWeights | None = None
) -> PreTrainedModel:
    """A frozen causal LM from a local folder; linears that its format quantizes, or that are lent, are `FrozenLinear`.

    No dense copy of a quantized weight is made, and none at all of what is lent.

    Args:
        folder: Hugging Face format.
        dtype: Data type of everything that is not packed.
        device: Where the tensors go, one by one.
        lent: Weights of an engine that has loaded the same folder.

    Raises:
        UserError: The folder is no such model, tensors are missing or left over, or projections that run fused have
            unequal global scales.
    """
    log.info("loading the trainer's base on %s: %s", device, folder)
    base_format, tensors = format_of(folder), TensorFiles(folder)
    config = load_config(folder)
    config.attention_dropout = 0.0  # of pretraining: what samples has none, and packed attention neither
    base_format.check(tensors)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    shared = SharedWeights({}, {}) if shared is None else shared
    state = {**shared.tensors, **_use_frozen_linears(model, base_format, tensors, device, shared.linears)}
    frozen = [name for name, module in model.named_modules() if isinstance(module, FrozenLinear)]
    held = {name for linear in frozen for name in base_format.tensor_names(linear)} | state.keys()
    for name in tensors:
        # Old Llama files store inv_freq, which their configuration says.
        if name not in held and not name.endswith(".inv_freq"):
            state[name] = tensors.read(name).to(device, dtype)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name in missing if name != "lm_head.weight" or not config.tie_word_embeddings]
    if missing or unexpected:
        raise UserError(
            f"the weight files must fit config.json; {folder} lacks {missing[:3]} and has {unexpected[:3]} besides; "
            "check that both come from the same model"
        )
    model.to(device)  # type: ignore[arg-type]
    return model.requires_grad_(False)


def _use_frozen_linears(
    model: nn.Module,
    base_format: BaseFormat,
    tensors: TensorFiles,
    device: torch.device,
    shared: Mapping[str, FrozenWeight],
) -> dict[str, Tensor]:
    """Put `FrozenLinear` in place of what is lent or quantized; the tensors of own copies by the layers' names."""

    def place(tensor: Tensor) -> Tensor:
        return nn.Parameter(tensor.to(device), requires_grad=False)

    own: dict[str, Tensor] = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        weight = shared.get(name)
        if weight is None:
            weight = base_format.frozen_weight(name, tensors, place)
            if weight is None:
                continue
            own |= {f"{name}.{parameter_name(part)}": tensor for part, tensor in weight.tensors().items()}
        model.set_submodule(name, FrozenLinear(weight, module.bias, own=name not in shared))
    return own
