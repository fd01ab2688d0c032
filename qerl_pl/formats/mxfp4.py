"""MXFP4, the format `mxfp4-pack-quantized` of compressed-tensors: blocks of 32 weights with a power of two each.

A linear X is stored as `X.weight_packed` uint8 [N, K/2] and `X.weight_scale` uint8 [N, K/32]. Embeddings, norms, biases
and lm_head stay in 16 bits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationStrategy
from qerl_kernels import BlockScales, MXFP4Stack, MXFP4Tensor, MXFP4Weight, quantize_mxfp4
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.formats.compressed_tensors import PackedFormat, quantization_config
from qerl_pl.formats.model_folder import TensorFiles

CONFIG = quantization_config(CompressionFormat.mxfp4_pack_quantized, QuantizationStrategy.GROUP, 32, torch.uint8)
"""`quantization_config` of an MXFP4 checkpoint."""


class MXFP4Format(PackedFormat):
    """4-bit weights with a power of two for every 32 weights."""

    name = "mxfp4"
    compression = CompressionFormat.mxfp4_pack_quantized
    suffixes = tuple(f"weight_{field}" for field in MXFP4Tensor._fields)

    def weight(self, stored: Sequence[Tensor]) -> MXFP4Weight:
        return MXFP4Weight(MXFP4Tensor(*stored))

    def stack(self, stored: Sequence[Tensor]) -> MXFP4Stack:
        return MXFP4Stack(MXFP4Tensor(*stored))

    def check(self, tensors: TensorFiles) -> None:
        """Nothing to check: no scale is shared."""


@dataclass(frozen=True)
class MXFP4Quantizer:
    """Rounds matrices to MXFP4, which has no options.

    Raises:
        UserError: `scales` or `power_of_two` of `qerl quantize` is set.
    """

    scales: BlockScales
    power_of_two: bool
    label = "MXFP4"
    block = 32
    config = CONFIG
    remedy = "use nvfp4, or none"
    stores_experts = True

    def __post_init__(self) -> None:
        if self.scales != "minmax" or self.power_of_two:
            raise UserError(
                f"MXFP4 has one rounding rule and no global scale; got scales={self.scales}, "
                f"power_of_two={str(self.power_of_two).lower()}; leave them out or use --format nvfp4"
            )

    def global_scale(self, weights: Iterable[Tensor]) -> Tensor | None:
        return None

    def encode(self, rows: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        packed, scale = quantize_mxfp4(rows)
        return packed, scale

    def store(
        self, codes: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], Tensor]:
        return {"_packed": codes, "_scale": scales}, scales

    def decode(self, codes: Tensor, scales: Tensor, global_scale: Tensor | None) -> Tensor:
        return MXFP4Weight(MXFP4Tensor(codes, scales)).dense(torch.float32)
