"""Loading of the frozen base model from its folder and from an engine's weights, compared with the checkpoint."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from qerl_kernels import DenseWeight, FrozenWeight, StackedWeight, check_flash_linear_attention
from qerl_kernels.marlin import TILE
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from qerl_pl.engines.base import SharedWeights
from qerl_pl.errors import UserError
from qerl_pl.formats.base import format_of
from qerl_pl.formats.base_format import BaseFormat, Place, StoredExperts
from qerl_pl.formats.norm import use_float32_norms
from qerl_pl.models.families import GATE_UP, Experts, Family, check_family
from qerl_pl.models.folder import TensorFiles, load_config
from qerl_pl.policy.delta_net import use_packed_delta_nets
from qerl_pl.policy.experts import attach_routing_replay, use_packed_experts
from qerl_pl.policy.lora import FrozenLinear, parameter_name
from qerl_pl.policy.packed_layers import ATTENTION, use_gated_mlps, use_packed_attention

log = logging.getLogger(__name__)


def check_trainable(config: Mapping[str, Any], source: object, full: bool, replays: bool) -> Family:
    """The family of a base model, by its config.json; every start and dry run comes here first.

    Raises:
        UserError: As `check_family`, its experts or delta nets cannot train (`full`), or it has none to replay.
    """
    family = check_family(config, source)
    if family.experts is None and replays:
        raise UserError(
            f"replay_routing needs a mixture of experts; {source} is a {family.model_type}: set "
            "model.policy.replay_routing to false"
        )
    if family.experts is not None and full:
        raise UserError(
            f"a mixture of experts trains an adapter, its experts are frozen; got model.policy.finetune full for "
            f"{source}: set it to lora"
        )
    if family.delta_net is not None and full:
        raise UserError(
            f"gated delta nets train an adapter; got model.policy.finetune full for {source}, a "
            f"{family.model_type}: set it to lora"
        )
    return family


def load_base(
    folder: Path, dtype: torch.dtype, device: torch.device, shared: SharedWeights | None = None
) -> PreTrainedModel:
    """Load a frozen causal LM from a local folder; quantized and shared linears are `FrozenLinear`.

    Quantized weights are never dequantized, shared weights, of an engine with the same folder, never copied; all
    other tensors are in `dtype`.

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
    base_format.report_unused(tensors)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)

    def frozen_parameter(tensor: Tensor) -> Tensor:
        return nn.Parameter(tensor.to(device), requires_grad=False)

    shared = SharedWeights({}, {}) if shared is None else shared
    check_shared_weights(shared, base_format, tensors, family.experts)
    experts, loaded_experts = use_packed_experts(
        model, family, base_format, tensors, dtype, frozen_parameter, shared.experts
    )
    linears = _use_frozen_linears(model, base_format, tensors, frozen_parameter, shared.linears)
    state = {**_dense_output_layer(base_format, tensors, dtype, device), **shared.tensors, **experts, **linears}
    frozen = [name for name, module in model.named_modules() if isinstance(module, FrozenLinear)]
    stored = {linear: base_format.tensor_names(linear) for linear in frozen}
    loaded = {name for names in stored.values() for name in names} | state.keys() | loaded_experts
    loaded |= {f"{linear}.weight" for linear in shared.linears if not any(name in tensors for name in stored[linear])}
    loaded |= {*base_format.tensor_names(OUTPUT_LAYER)} if base_format.reads_mixed else set()
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
    if family.delta_net is not None:
        check_flash_linear_attention(device)
    attach_routing_replay(model)
    model.to(device)  # type: ignore[arg-type]
    return model.requires_grad_(False)


OUTPUT_LAYER = "lm_head"


def _dense_output_layer(
    base_format: BaseFormat, tensors: TensorFiles, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The output layer's weight by name if the checkpoint has it in 4 bits and the format allows it."""
    names = base_format.tensor_names(OUTPUT_LAYER)
    if not base_format.reads_mixed or names[0] not in tensors:
        return {}
    held = tensors.read_all(names)
    return {f"{OUTPUT_LAYER}.weight": base_format.dense([held[name] for name in names], dtype).to(device)}


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


def _use_frozen_linears(
    model: nn.Module,
    base_format: BaseFormat,
    tensors: TensorFiles,
    place: Place,
    shared: Mapping[str, FrozenWeight],
) -> dict[str, Tensor]:
    """Replace shared and quantized linears by `FrozenLinear`; returns the loaded tensors by parameter name."""
    state: dict[str, Tensor] = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or (name == OUTPUT_LAYER and base_format.reads_mixed):
            continue
        weight = shared.get(name)
        if weight is None:
            weight = base_format.frozen_weight(name, tensors, place)
            if weight is None:
                continue
            state |= {f"{name}.{parameter_name(key)}": tensor for key, tensor in weight.tensors().items()}
        model.set_submodule(name, FrozenLinear(weight, module.bias, own=name not in shared))
    return state


TOLERANCE = 0.01
"""Largest relative difference of two tiles: rounding to bfloat16 makes 2e-3, another scale or another layout 1."""
EXPERTS_AT_ONCE = 8
"""Experts that are compared at once: a mixture has thousands, and one of them that differs shows among so many."""
NEGLIGIBLE = 1e-4
"""Difference, over a matrix's largest weight, that does not count: Marlin reads the smallest blocks as zeros."""


@torch.no_grad()
def check_shared_weights(
    shared: SharedWeights, base_format: BaseFormat, tensors: TensorFiles, experts: Experts | None
) -> None:
    """Raise UserError if the first rows of a shared matrix are not the checkpoint's.

    An engine that reads a scale or a layout otherwise would sample, and train, another base.
    """
    for name, expected, actual, largest in _tiles(shared, base_format, tensors, experts):
        actual, expected = actual.float(), expected.to(actual.device, torch.float32)
        difference, size = actual - expected, expected.norm()
        if not (difference.norm() <= TOLERANCE * size or difference.abs().max() <= NEGLIGIBLE * largest):
            raise UserError(
                "an engine must have the checkpoint's weights for the trainer to share them; its first rows of "
                f"{name} differ by {(difference.norm() / size).item():.2g} of their size: install the vLLM that the "
                "documentation names, or use TransformersEngine"
            )


def _tiles(
    shared: SharedWeights, base_format: BaseFormat, tensors: TensorFiles, experts: Experts | None
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(name, first rows in the checkpoint, first rows of the shared matrix, its largest weight)."""
    first_rows = tensors.first_rows(TILE)
    for name, tensor in shared.tensors.items():
        if name in tensors:
            yield name, first_rows.read(name).to(tensor.dtype), tensor[:TILE], tensor[:TILE].abs().max()
    for name, weight in shared.linears.items():
        stored = base_format.first_rows(name, tensors, TILE, _place_beside(weight))
        if stored is None and f"{name}.weight" in tensors:
            stored = DenseWeight(_place_beside(weight)(first_rows.read(f"{name}.weight")))
        if stored is not None:
            dense = weight.dense(torch.bfloat16)  # in 16 bits: a matrix may have GiBs, and a tile is compared
            expected, tile = stored.dense(torch.bfloat16).float() * stored.alpha, dense[:TILE].float() * weight.alpha
            yield name, expected, tile, (dense.abs().max().float() * weight.alpha).abs()
    if experts is None:
        return
    for name, stack in shared.experts.items():
        module, _, matrix = name.rpartition(".")
        count, rows, _ = stack.shape
        all_stored = StoredExperts(experts, base_format, first_rows, module, count)
        tiles = all_stored.weight(matrix, torch.bfloat16, _place_beside(stack))
        # Experts that are stored one by one have gates and ups apart: the first rows of each.
        starts = (0, rows // 2) if matrix == GATE_UP and not experts.stored_in_stacks else (0,)
        for first in range(0, count, EXPERTS_AT_ONCE):
            last = min(first + EXPERTS_AT_ONCE, count)
            expected, dense = (_experts(one, first, last) for one in (tiles, stack))
            size = expected.shape[1] // len(starts)
            tile = torch.cat([dense[:, start : start + size] for start in starts], dim=1)
            yield f"{name}, experts {first} to {last - 1}", expected, tile, dense.abs().max()


def _place_beside(weight: FrozenWeight | StackedWeight) -> Place:
    """Moves a tensor to a weight's device."""
    device = next(iter(weight.tensors().values())).device
    return lambda tensor: tensor.to(device)


def _experts(stack: StackedWeight, first: int, last: int) -> Tensor:
    """The matrices of some experts, float32 [last - first, N, K]."""
    alphas, dense = stack.alphas, stack.dense(first, last, torch.bfloat16).float()
    return dense if alphas is None else dense * alphas[first:last, None, None]
