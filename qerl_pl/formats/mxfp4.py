"""MXFP4: blocks of 32 weights with a power of two each, of all linears or of experts in stacks alone.

In the format `mxfp4-pack-quantized` of compressed-tensors a linear X is stored as `X.weight_packed` uint8 [N, K/2] and
`X.weight_scale` uint8 [N, K/32]. Embeddings, norms, biases and lm_head stay in 16 bits.

gpt-oss is published with the matrix X of all experts, `….experts.gate_up_proj` or `….experts.down_proj`, as `X_blocks`
uint8 [E, N, K/32, 16] and `X_scales` uint8 [E, N, K/32], the same codes and scales. All else stays in 16 bits; without
quantization such a matrix is X [E, K, N].
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationStrategy
from qerl_kernels import MXFP4Stack, MXFP4Tensor, MXFP4Weight, StackedWeight, quantize_mxfp4
from torch import Tensor

from qerl_pl.formats.base_format import BaseFormat, DenseFormat, Place, extra_setting
from qerl_pl.formats.compressed_tensors import PackedFormat, quantization_config
from qerl_pl.models.folder import TensorFiles, in_dtype

CONFIG = quantization_config(CompressionFormat.mxfp4_pack_quantized, QuantizationStrategy.GROUP, 32, torch.uint8)
"""`quantization_config` of an MXFP4 checkpoint."""


class _Rounding(BaseFormat):
    """Of matrices to MXFP4."""

    name = "mxfp4"
    block = 32

    def encode(self, rows: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        packed, scale = quantize_mxfp4(rows)
        return packed, scale

    def decode(self, codes: Tensor, scales: Tensor, global_scale: Tensor | None) -> Tensor:
        return MXFP4Weight(MXFP4Tensor(codes, scales)).dense(torch.float32)


class MXFP4Format(_Rounding, PackedFormat):
    """4-bit weights with a power of two for every 32 weights."""

    compression = CompressionFormat.mxfp4_pack_quantized
    config = CONFIG
    suffixes = tuple(f"weight_{field}" for field in MXFP4Tensor._fields)
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


class MXFP4StacksFormat(_Rounding, DenseFormat):
    """4-bit experts in stacks, as gpt-oss is published; everything else in 16 bits."""

    config = STACKS_CONFIG
    remedy = "use none"
    stores_experts = True

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        return quantization is not None and quantization.get("quant_method") == self.config["quant_method"]

    def excess(self, quantization: Mapping[str, Any] | None) -> str | None:
        return extra_setting(quantization or {}, STACKS_CONFIG, ("modules_to_not_convert",))

    def dense_shapes(self, tensors: TensorFiles) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in tensors.shapes().items():
            if name.endswith(_STORED[0]):
                experts, rows, blocks, size = shape
                shapes[name.removesuffix(_STORED[0])] = (experts, 2 * blocks * size, rows)
            elif not name.endswith(_STORED[1]):
                shapes[name] = shape
        return shapes

    def stack_names(self, stack: str) -> tuple[str, ...]:
        return tuple(f"{stack}{suffix}" for suffix in _STORED)

    def expert_stack(self, stack: str, tensors: TensorFiles, dtype: torch.dtype, place: Place) -> StackedWeight:
        blocks, scales = (tensors.read(name) for name in self.stack_names(stack))
        return MXFP4Stack(MXFP4Tensor(place(blocks.flatten(-2)), place(scales)))

    def iterate_dense(self, tensors: TensorFiles, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name in tensors:
            if name.endswith(_STORED[0]):
                stack = name.removesuffix(_STORED[0])
                weight = self.expert_stack(stack, tensors, dtype, lambda tensor: tensor)
                yield stack, weight.dense(0, weight.shape[0], dtype).transpose(1, 2).contiguous()
            elif not name.endswith(_STORED[1]):
                yield name, in_dtype(tensors.read(name), dtype)

    def store(
        self, codes: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], Tensor]:
        return dict(zip(_STORED, (codes.unflatten(-1, (-1, 16)), scales), strict=True)), scales
