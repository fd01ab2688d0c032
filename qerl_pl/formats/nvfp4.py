"""NVFP4, the format `nvfp4-pack-quantized` of compressed-tensors: blocks of 16 weights with a scale each.

A linear X is stored as `X.weight_packed` uint8 [N, K/2], `X.weight_scale` float8_e4m3fn [N, K/16] and
`X.weight_global_scale` float32 [1], the divisor of the block scales. Embeddings, norms, biases and lm_head keep their
16 bits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from qerl_kernels import (
    BlockScales,
    NVFP4Tensor,
    NVFP4Weight,
    dequantize_nvfp4,
    nvfp4_global_scale,
    quantize_nvfp4,
)
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.formats.architecture import fused_group
from qerl_pl.formats.compressed_tensors import quantization_config
from qerl_pl.formats.model_files import TensorFiles, in_dtype

FILE_FORMAT = "nvfp4-pack-quantized"
CONFIG = quantization_config(FILE_FORMAT, "tensor_group", 16, "torch.float8_e4m3fn")
"""What an NVFP4 checkpoint's config.json says of its weights."""
_PARTS = tuple(f"weight_{part}" for part in NVFP4Tensor._fields)


class NVFP4Format:
    """The base in four bits, as `qerl quantize` writes it."""

    name = "nvfp4"
    vllm_devices = ("cuda",)
    vllm_options: Mapping[str, str] = {}

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        return quantization is not None and quantization.get("format") == FILE_FORMAT

    def tensor_names(self, linear: str) -> tuple[str, ...]:
        return tuple(f"{linear}.{part}" for part in _PARTS)

    def check(self, tensors: TensorFiles) -> None:
        """Refuse global scales that differ within a fused group: vLLM would take one of them for all."""
        for name in tensors:
            if not name.endswith(".weight_global_scale"):
                continue
            group = fused_group(name.removesuffix("_global_scale"))
            scales = {member: tensors.read(f"{member}_global_scale").item() for member in group}
            if len(set(scales.values())) > 1:
                raise UserError(
                    "projections that run fused must share one global scale; found "
                    + ", ".join(f"{key}={value:g}" for key, value in scales.items())
                    + "; quantize the 16-bit weights with `qerl quantize`"
                )

    def frozen_weight(self, linear: str, tensors: TensorFiles, place: Callable[[Tensor], Tensor]) -> NVFP4Weight | None:
        names = self.tensor_names(linear)
        if names[0] not in tensors:
            return None
        return NVFP4Weight(NVFP4Tensor(*(place(tensors.read(name)) for name in names)))

    def iterate_dense(self, tensors: TensorFiles, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name in tensors:
            linear, _, part = name.rpartition(".")
            if part == "weight_packed":
                held = NVFP4Tensor(*(tensors.read(one) for one in self.tensor_names(linear)))
                yield f"{linear}.weight", dequantize_nvfp4(*held, dtype)
            elif part not in _PARTS:
                yield name, in_dtype(tensors.read(name), dtype)

    def vllm_linear_backend(self, asked: str) -> str | None:
        return asked


@dataclass(frozen=True)
class NVFP4Quantizer:
    """Rounds matrices to NVFP4; `scales` and `power_of_two` are those of `qerl quantize`."""

    scales: BlockScales
    power_of_two: bool
    label = "NVFP4"
    block = 16
    config = CONFIG
    remedy = "set model.policy.quantization to none"

    def global_scale(self, weights: Iterable[Tensor]) -> Tensor | None:
        return nvfp4_global_scale(*weights, block_scales=self.scales, power_of_two=self.power_of_two)

    def encode(self, rows: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        held = quantize_nvfp4(rows, global_scale, block_scales=self.scales)
        return held.packed, held.scale

    def store(
        self, codes: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], Tensor]:
        assert global_scale is not None
        return {"_packed": codes, "_scale": scales, "_global_scale": global_scale.clone()}, scales

    def decode(self, codes: Tensor, scales: Tensor, global_scale: Tensor | None) -> Tensor:
        assert global_scale is not None
        return dequantize_nvfp4(codes, scales, global_scale, torch.float32)
