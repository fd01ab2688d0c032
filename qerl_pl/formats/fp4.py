"""NVFP4 and MXFP4, the formats of compressed-tensors with 4-bit floats, and MXFP4 of experts in stacks.

A linear X is stored as `X.weight_packed` uint8 [N, K/2] and `X.weight_scale`: in `nvfp4-pack-quantized` float8_e4m3fn
[N, K/16], with `X.weight_global_scale` float32 [1], the divisor of the block scales; in `mxfp4-pack-quantized` uint8
[N, K/32], powers of two. Embeddings, norms, biases and lm_head stay in 16 bits. transformers and vLLM load both.

gpt-oss is published with the matrix X of all experts, `….experts.gate_up_proj` or `….experts.down_proj`, as `X_blocks`
uint8 [E, N, K/32, 16] and `X_scales` uint8 [E, N, K/32], the same codes and scales. All else stays in 16 bits; without
quantization such a matrix is X [E, K, N].
"""

import logging
import math
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from qerl_kernels import (
    MXFP4Stack,
    MXFP4Tensor,
    MXFP4Weight,
    NVFP4Stack,
    NVFP4Tensor,
    NVFP4Weight,
    StackedWeight,
    dequantize_nvfp4,
    nvfp4_global_scale,
    quantize_mxfp4,
    quantize_nvfp4,
)
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.formats.base_format import BaseFormat, DenseFormat, Place, extra_setting
from qerl_pl.models.families import fused_group
from qerl_pl.models.folder import TensorFiles

log = logging.getLogger(__name__)

_FREE = ("config_groups", "ignore", "quantization_status", "global_compression_ratio", "version")
"""Settings that say which weights are quantized, which the files show, and who wrote them."""
_NEEDED = ("num_bits", "type", "strategy", "group_size")
"""Settings of a group's weights whose defaults are other formats'."""
_FREE_OF_WEIGHTS = ("observer", "observer_kwargs", "zp_dtype")
_CALIBRATION = (("actorder", "static"), ("actorder", "weight"))
"""An order in which GPTQ rounds; the weights lie in their own."""


_WIDE = ("BF16", "F16", "F32")
"""Data types, as safetensors names them, of what is not quantized."""
_FP8 = "F8_E4M3"


class PackedFormat(BaseFormat):
    """Base class of NVFP4 and MXFP4: a linear X is stored as `X.weight_packed` and its scales."""

    compression: ClassVar[str]
    """Name of the format in compressed-tensors."""
    dtypes: ClassVar[tuple[tuple[str, ...], ...]]
    """Data types of a linear's tensors, in the order of `suffixes`."""
    stores_experts = True

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        return quantization is not None and quantization.get("format") == self.compression

    def excess(self, quantization: Mapping[str, Any] | None) -> str | None:
        quantization = quantization or {}
        groups = quantization.get("config_groups") or {}
        if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
            return f"config_groups {groups!s:.80}"  # a name of several schemes, say
        if any(self._quantizes_activations(group) for group in groups.values()):
            return "quantized activations"
        sparsity, (exact,) = quantization.get("sparsity_config"), self.config["config_groups"].values()
        dense = isinstance(sparsity, Mapping) and sparsity.get("format") == "dense" and not sparsity.get("targets")
        found = [extra_setting(quantization, self.config, (*_FREE, "sparsity_config") if dense else _FREE)]
        for group in groups.values():
            weights = group.get("weights") if isinstance(group.get("weights"), Mapping) else {}
            needed = {key: weights.get(key) or "absent" for key in _NEEDED}
            asked = {key: value for key, value in weights.items() if (key, value) not in _CALIBRATION}
            free = ("targets", "weights", "input_activations")
            found.append(extra_setting(group, {"format": self.compression}, free))
            found.append(extra_setting(asked | needed, exact["weights"], _FREE_OF_WEIGHTS))
        return next(filter(None, found), None)

    def _quantizes_activations(self, group: Mapping[str, Any]) -> bool:
        """Whether a group asks for activations that are not computed in 16 bits, unless their scales are dropped."""
        inputs = group.get("input_activations")
        rounded = isinstance(inputs, Mapping) and inputs.get("num_bits") == 4 and bool(self.dropped)
        return bool(group.get("output_activations") or (inputs and not rounded))

    def check(self, tensors: TensorFiles) -> None:
        dtypes, packed = dict(zip(self.suffixes, self.dtypes, strict=True)), self.suffixes[0]
        for name, (shape, dtype) in tensors.headers().items():
            linear, _, suffix = name.rpartition(".")
            allowed = (_FP8,) if name in tensors.fp8 else dtypes.get(suffix, _WIDE)
            if dtype not in allowed and suffix not in self.dropped:
                raise UserError(
                    f"{name} of a base in {self.name.upper()} must be in {' or '.join(allowed)}; it is in {dtype}, or "
                    "lacks its scales: quantize the 16-bit model"
                )
            if suffix in self.suffixes:
                tensors.require(self.tensor_names(linear))
            if suffix in self.suffixes[2:] and math.prod(shape) != 1:
                raise UserError(f"a matrix has one global scale; {name} has {shape}: quantize the 16-bit model")
            if suffix == packed and (linear.endswith("embed_tokens") or (linear == "lm_head" and not self.reads_mixed)):
                raise UserError(
                    f"{linear} must be in 16 bits; it is in {self.name.upper()}: quantize the 16-bit model with it "
                    "among the modules to ignore, as `qerl quantize` does"
                )
            if suffix == "weight" and re.search(r"\.experts\.\d+\.\w+$", linear):
                raise UserError(
                    f"experts of a base in {self.name.upper()} must be in it; {name} is in {dtype}: quantize the "
                    "16-bit model"
                )

    def dense_shape(self, linear: str, stored: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        *rows, half = stored[f"{linear}.{self.suffixes[0]}"]
        scales, shape = stored.get(f"{linear}.{self.suffixes[1]}"), (*rows, 2 * half)  # two codes a byte
        if scales not in (None, (*rows, 2 * half // self.block)):
            raise UserError(
                f"{self.compression} has a scale for every {self.block} weights of a row; {linear} has {shape} "
                f"weights and {scales} scales: quantize the 16-bit model"
            )
        return shape

    @abstractmethod
    def stack(self, stored: Sequence[Tensor]) -> StackedWeight:
        """The frozen weights of a layer's experts, from their tensors [E, ...] in the order of `suffixes`."""

    def stacked_weight(
        self, experts: Sequence[Sequence[str]], tensors: TensorFiles, dtype: torch.dtype, place: Place
    ) -> StackedWeight:
        stored = []
        held = tensors.read_all([stored for names in experts for name in names for stored in self.tensor_names(name)])
        for suffix in self.suffixes:
            parts = [[held.pop(f"{name}.{suffix}") for name in names] for names in experts]
            # `check` has seen that the linears of an expert share their global scale.
            matrices = [part[0].reshape(()) if part[0].numel() == 1 else _by_rows(part) for part in parts]
            stored.append(place(_stacked(matrices)))
        return self.stack(stored)


def _by_rows(parts: Sequence[Tensor]) -> Tensor:
    """`torch.cat` of bytes in any data type: 8-bit floats cannot be concatenated everywhere."""
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    if matrices[0].dim() == 0:
        return torch.stack(list(matrices))
    return torch.stack([matrix.view(torch.uint8) for matrix in matrices]).view(matrices[0].dtype)


def quantization_config(compression: str, group_size: int, strategy: str, scale_dtype: str) -> dict[str, Any]:
    """`quantization_config` of a checkpoint whose linears, except lm_head, have 4-bit float weights."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "group_size": group_size,
        "strategy": strategy,
        "dynamic": False,
        "scale_dtype": scale_dtype,
        "observer": "memoryless_minmax",
    }
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "config_groups": {"group_0": scheme},
        "quant_method": "compressed-tensors",
        "format": compression,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
    }


NVFP4_CONFIG = quantization_config("nvfp4-pack-quantized", 16, "tensor_group", "torch.float8_e4m3fn")
"""`quantization_config` of an NVFP4 checkpoint."""
MODELOPT = {"quant_method": "modelopt", "group_size": 16}
"""What a `quantization_config` of ModelOpt must say; `TensorFiles` reads the names of its tensors as the others'."""
_MIXED_OF_MODELOPT = "MIXED_PRECISION"
_NVFP4_OF_MODELOPT = ("NVFP4", "W4A16_NVFP4")
_FP8_OF_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
"""ModelOpt's algorithms for a checkpoint, a layer or a group of layers; the last is lower-case in its files."""
_CACHE = ("kv_cache_scheme", "kv_cache_quant_algo")
"""Settings of keys and values, which the policy and `VLLMEngine.kv_cache_dtype` choose."""
_CACHE_SCALES = tuple(f"{one}_{kind}" for one in "qkv" for kind in ("scale", "zero_point", "bias"))
_LAYERS_OF_MODELOPT = ("quantized_layers", "config_groups", "ignore", "exclude_modules")
_FREE_OF_MODELOPT = ("quant_algo", "producer", *_LAYERS_OF_MODELOPT, *_CACHE)


def _is_modelopt(quantization: Mapping[str, Any]) -> bool:
    known = (*_NVFP4_OF_MODELOPT, _MIXED_OF_MODELOPT)
    return quantization.get("quant_method") == MODELOPT["quant_method"] and _algorithm(quantization) in known


def _algorithm(settings: Any) -> str:
    return str(settings.get("quant_algo")).upper() if isinstance(settings, Mapping) else ""


def _groups(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = quantization.get("config_groups") or {}
    return groups if isinstance(groups, Mapping) else {"all": groups}


def _is_fp8(group: Any) -> bool:
    """Whether a group's weights are E4M3 floats as `TensorFiles` reads them; its activations are not looked at."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or group.get("output_activations"):
        return False
    float8 = (weights.get("num_bits"), weights.get("type")) == (8, "float")
    blocks = weights.get("strategy") != "block" or weights.get("block_structure") in ([128, 128], "128x128")
    symmetric = weights.get("symmetric") is not False and not weights.get("dynamic")
    known = weights.get("strategy") in (None, "tensor", "channel", "block") and weights.get("group_size") in (None, 128)
    return float8 and blocks and symmetric and known


class NVFP4Format(PackedFormat):
    """4-bit weights with an E4M3 scale for every 16 weights and a global scale, of compressed-tensors or ModelOpt."""

    name = "nvfp4"
    config = NVFP4_CONFIG
    compression = "nvfp4-pack-quantized"
    suffixes = tuple(f"weight_{field}" for field in NVFP4Tensor._fields)
    dtypes = (("U8",), (_FP8,), _WIDE)
    dropped = ("input_global_scale", "input_scale", *_CACHE_SCALES)
    block = 16
    reads_mixed = True

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        others = _is_modelopt(quantization or {}) or self._has_several(quantization)
        return others or super().recognises(quantization)

    def _has_several(self, quantization: Mapping[str, Any] | None) -> bool:
        """Whether compressed-tensors has several formats, NVFP4 among them."""
        if quantization is None or quantization.get("format") != "mixed-precision":
            return False
        groups = _groups(quantization).values()
        mappings = all(isinstance(group, Mapping) for group in groups)
        return mappings and any(group.get("format") == self.compression for group in groups)

    def is_mixed(self, quantization: Mapping[str, Any] | None, tensors: TensorFiles) -> bool:
        cache = any((quantization or {}).get(key) for key in _CACHE) or _any_ends(tensors, _CACHE_SCALES)
        return bool(tensors.fp8) or cache or f"lm_head.{self.suffixes[0]}" in tensors

    def excess(self, quantization: Mapping[str, Any] | None) -> str | None:
        if quantization is not None and _is_modelopt(quantization):
            return self._excess_of_modelopt(quantization)
        rest = {key: value for key, value in (quantization or {}).items() if key not in _CACHE}
        if not self._has_several(quantization):
            return super().excess(rest)
        own = {}
        for name, group in _groups(rest).items():
            if group.get("format") == self.compression:
                own[name] = group
            elif group.get("format") != "float-quantized" or not _is_fp8(group):
                return f"{group.get('format')} weights {group.get('weights')!s:.80}"
        return super().excess({**rest, "format": self.compression, "config_groups": own})

    def _excess_of_modelopt(self, quantization: Mapping[str, Any]) -> str | None:
        mixed = _algorithm(quantization) == _MIXED_OF_MODELOPT
        layers = quantization.get("quantized_layers") or {}
        for layer in layers.values() if isinstance(layers, Mapping) else [layers]:
            known = _algorithm(layer) in _NVFP4_OF_MODELOPT + _FP8_OF_MODELOPT
            if not known or extra_setting(layer, MODELOPT, ("quant_algo",)):
                return f"quantized_layers {layer!s:.80}"
        for group in _groups(quantization).values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if mixed and (_is_fp8(group) or _algorithm(group) in _FP8_OF_MODELOPT):
                continue
            if not isinstance(weights, Mapping) or (weights.get("num_bits"), weights.get("group_size")) != (4, 16):
                return f"weights {weights!s:.80}"
            if more := extra_setting(group, {}, ("targets", "weights", "input_activations", "output_activations")):
                return more
            if self._quantizes_activations(group):
                return "quantized activations"
        return extra_setting(quantization, MODELOPT, _FREE_OF_MODELOPT)

    def weight(self, stored: Sequence[Tensor]) -> NVFP4Weight:
        return NVFP4Weight(NVFP4Tensor(*stored))

    def dense(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return dequantize_nvfp4(*NVFP4Tensor(*stored), dtype)

    def stack(self, stored: Sequence[Tensor]) -> NVFP4Stack:
        return NVFP4Stack(NVFP4Tensor(*stored))

    def check(self, tensors: TensorFiles) -> None:
        """Refuse formats or global scales that differ within a fused group: vLLM would use one of them for all."""
        super().check(tensors)
        names = [name for name in tensors if name.endswith(".weight_global_scale")]
        groups = dict.fromkeys(fused_group(name.removesuffix("_global_scale")) for name in names)
        held = tensors.read_all(names)
        for group in groups:
            if wide := [member for member in group if member in tensors]:
                raise UserError(
                    f"projections that run fused must be in one format, each stored once; of {', '.join(group)} not "
                    f"all are in NVFP4 alone: {wide[0]}; quantize the 16-bit weights with `qerl quantize`"
                )
            of_group = {member: held.get(f"{member}_global_scale") for member in group}
            scales = {member: scale.item() for member, scale in of_group.items() if scale is not None}
            if not all(0 < scale < math.inf for scale in scales.values()):
                raise UserError(f"global scales must be positive numbers; got {scales}: get the model again")
            if len(set(scales.values())) > 1:
                values = ", ".join(f"{key}={value:g}" for key, value in scales.items())
                raise UserError(
                    f"projections that run fused must share one global scale; got {values}; "
                    "quantize the 16-bit weights with `qerl quantize`"
                )

    def report_unused(self, tensors: TensorFiles) -> None:
        if _any_ends(tensors, ("input_global_scale",)):
            log.info("activations stay in 16 bits: the scales that the base has for 4-bit ones are not used")
        if tensors.fp8:
            log.info("%d linears in FP8 are read in 16 bits, as their activations are", len(tensors.fp8))
        if _any_ends(tensors, _CACHE_SCALES):
            log.info("the scales that the base has for keys and values in 8 bits are not used")

    def global_scale(self, weights: Iterable[Tensor]) -> Tensor | None:
        return nvfp4_global_scale(*weights)

    def encode(self, rows: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        packed, scale, _ = quantize_nvfp4(rows, global_scale)
        return packed, scale

    def decode(self, codes: Tensor, scales: Tensor, global_scale: Tensor | None) -> Tensor:
        assert global_scale is not None
        return dequantize_nvfp4(codes, scales, global_scale, torch.float32)


def _any_ends(tensors: TensorFiles, suffixes: tuple[str, ...]) -> bool:
    return any(name.rpartition(".")[2] in suffixes for name in tensors)


MXFP4_CONFIG = quantization_config("mxfp4-pack-quantized", 32, "group", "torch.uint8")
"""`quantization_config` of an MXFP4 checkpoint."""


class _MXFP4Rounding(BaseFormat):
    """Rounds matrices to MXFP4."""

    name = "mxfp4"
    block = 32

    def encode(self, rows: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        packed, scale = quantize_mxfp4(rows)
        return packed, scale

    def decode(self, codes: Tensor, scales: Tensor, global_scale: Tensor | None) -> Tensor:
        return MXFP4Weight(MXFP4Tensor(codes, scales)).dense(torch.float32)


class MXFP4Format(_MXFP4Rounding, PackedFormat):
    """4-bit weights with a power of two for every 32 weights."""

    config = MXFP4_CONFIG
    compression = "mxfp4-pack-quantized"
    suffixes = tuple(f"weight_{field}" for field in MXFP4Tensor._fields)
    dtypes = (("U8",), ("U8",))
    remedy = "use nvfp4, or none"

    @property
    def of_stacks(self) -> BaseFormat:
        return MXFP4StacksFormat()

    def weight(self, stored: Sequence[Tensor]) -> MXFP4Weight:
        return MXFP4Weight(MXFP4Tensor(*stored))

    def stack(self, stored: Sequence[Tensor]) -> MXFP4Stack:
        return MXFP4Stack(MXFP4Tensor(*stored))


STACKS_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
        *("model.embed_tokens", "lm_head"),
    ],
}
"""`quantization_config` of a checkpoint with experts in stacks, as gpt-oss is published."""
_STORED = ("_blocks", "_scales")


class MXFP4StacksFormat(_MXFP4Rounding, DenseFormat):
    """4-bit experts in stacks, as gpt-oss is published; everything else in 16 bits."""

    config = STACKS_CONFIG
    remedy = "use none"
    stores_experts = True

    recognises = BaseFormat.recognises

    def excess(self, quantization: Mapping[str, Any] | None) -> str | None:
        return extra_setting(quantization or {}, STACKS_CONFIG, ("modules_to_not_convert",))

    def stored_names(self, tensors: TensorFiles) -> dict[str, tuple[str, ...]]:
        names = {}
        for name in tensors:
            if name.endswith(_STORED[0]):
                stack = name.removesuffix(_STORED[0])
                names[stack] = self.stack_names(stack)
            elif not name.endswith(_STORED[1]):
                names[name] = (name,)
        return names

    def dense_shape(self, linear: str, stored: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        experts, rows, blocks, size = stored[f"{linear}{_STORED[0]}"]
        return experts, 2 * blocks * size, rows

    def dense(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        weight = MXFP4Stack(MXFP4Tensor(stored[0].flatten(-2), stored[1]))
        return weight.dense(0, weight.shape[0], dtype).transpose(1, 2).contiguous()

    def stack_names(self, stack: str) -> tuple[str, ...]:
        return tuple(f"{stack}{suffix}" for suffix in _STORED)

    def expert_stack(self, stack: str, tensors: TensorFiles, dtype: torch.dtype, place: Place) -> StackedWeight:
        blocks, scales = (tensors.read(name) for name in self.stack_names(stack))
        return MXFP4Stack(MXFP4Tensor(place(blocks.flatten(-2)), place(scales)))

    def store(
        self, codes: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], Tensor]:
        return dict(zip(_STORED, (codes.unflatten(-1, (-1, 16)), scales), strict=True)), scales
