"""NVFP4, the format `nvfp4-pack-quantized` of compressed-tensors: blocks of 16 weights with a scale each.

A linear X is stored as `X.weight_packed` uint8 [N, K/2], `X.weight_scale` float8_e4m3fn [N, K/16] and
`X.weight_global_scale` float32 [1], the divisor of the block scales. Embeddings, norms, biases and lm_head stay in 16
bits.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationStrategy
from qerl_kernels import (
    NVFP4Stack,
    NVFP4Tensor,
    NVFP4Weight,
    dequantize_nvfp4,
    nvfp4_global_scale,
    quantize_nvfp4,
)
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.formats.compressed_tensors import PackedFormat, quantization_config
from qerl_pl.formats.dense import extra_setting
from qerl_pl.models.families import fused_group
from qerl_pl.models.folder import TensorFiles

log = logging.getLogger(__name__)

CONFIG = quantization_config(
    CompressionFormat.nvfp4_pack_quantized, QuantizationStrategy.TENSOR_GROUP, 16, torch.float8_e4m3fn
)
"""`quantization_config` of an NVFP4 checkpoint."""


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
"""What a `quantization_config` of ModelOpt must say; `TensorFiles` reads the names of its tensors as the others'."""
_FREE = ("config_groups", "ignore", "exclude_modules", "producer")


class NVFP4Format(PackedFormat):
    """4-bit weights with an E4M3 scale for every 16 weights and a global scale, of compressed-tensors or ModelOpt."""

    name = "nvfp4"
    compression = CompressionFormat.nvfp4_pack_quantized
    config = CONFIG
    suffixes = tuple(f"weight_{field}" for field in NVFP4Tensor._fields)
    dropped: tuple[str, ...] = ("input_global_scale",)

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        return super().recognises(quantization) or _is_modelopt(quantization or {})

    def excess(self, quantization: Mapping[str, Any] | None) -> str | None:
        if not _is_modelopt(quantization or {}):
            return super().excess(quantization)
        assert quantization is not None
        groups = quantization.get("config_groups") or {}
        for group in groups.values() if isinstance(groups, Mapping) else [groups]:
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if not isinstance(weights, Mapping) or (weights.get("num_bits"), weights.get("group_size")) != (4, 16):
                return f"weights {weights!s:.80}"
            if self._quantizes_activations(group):
                return "quantized activations"
        return extra_setting(quantization, MODELOPT, _FREE)

    def weight(self, stored: Sequence[Tensor]) -> NVFP4Weight:
        return NVFP4Weight(NVFP4Tensor(*stored))

    def dense(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return dequantize_nvfp4(*NVFP4Tensor(*stored), dtype)

    def stack(self, stored: Sequence[Tensor]) -> NVFP4Stack:
        return NVFP4Stack(NVFP4Tensor(*stored))

    def check(self, tensors: TensorFiles) -> None:
        """Refuse global scales that differ within a fused group: vLLM would use one of them for all."""
        if any(name.endswith(self.dropped) for name in tensors):
            log.info("activations stay in 16 bits: the scales that the base has for 4-bit ones are not used")
        names = [name for name in tensors if name.endswith(".weight_global_scale")]
        groups = dict.fromkeys(fused_group(name.removesuffix("_global_scale")) for name in names)
        held = tensors.read_all([f"{member}_global_scale" for group in groups for member in group])
        for group in groups:
            scales = {member: held[f"{member}_global_scale"].item() for member in group}
            if len(set(scales.values())) > 1:
                values = ", ".join(f"{key}={value:g}" for key, value in scales.items())
                raise UserError(
                    f"projections that run fused must share one global scale; got {values}; "
                    "quantize the 16-bit weights with `qerl quantize`"
                )


def _is_modelopt(quantization: Mapping[str, Any]) -> bool:
    return all(quantization.get(key) == MODELOPT[key] for key in ("quant_method", "quant_algo"))


class NVFP4Quantizer:
    """Rounds matrices to NVFP4."""

    label = "NVFP4"
    block = 16
    config = CONFIG
    remedy = "set model.policy.quantization to none"
    stores_experts = True
    of_stacks = None

    def global_scale(self, weights: Iterable[Tensor]) -> Tensor | None:
        return nvfp4_global_scale(*weights)

    def encode(self, rows: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        packed, scale, _ = quantize_nvfp4(rows, global_scale)
        return packed, scale

    def store(
        self, codes: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], Tensor]:
        assert global_scale is not None
        return {"_packed": codes, "_scale": scales, "_global_scale": global_scale.clone()}, scales

    def decode(self, codes: Tensor, scales: Tensor, global_scale: Tensor | None) -> Tensor:
        assert global_scale is not None
        return dequantize_nvfp4(codes, scales, global_scale, torch.float32)
