"""MXFP4, the format `mxfp4-pack-quantized` of compressed-tensors: blocks of 32 weights with a power of two each.

A linear X is stored as `X.weight_packed` uint8 [N, K/2] and `X.weight_scale` uint8 [N, K/32]. It is written for other
programs; what trains and samples refuses it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from qerl_kernels import BlockScales, MXFP4Weight, quantize_mxfp4
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.formats.compressed_tensors import quantization_config

CONFIG = quantization_config("mxfp4-pack-quantized", "group", 32, "torch.uint8")


@dataclass(frozen=True)
class MXFP4Quantizer:
    """Rounds matrices to MXFP4, which leaves nothing to choose.

    Raises:
        UserError: `scales` or `power_of_two` of `qerl quantize` is set.
    """

    scales: BlockScales
    power_of_two: bool
    label = "MXFP4"
    block = 32
    config = CONFIG
    remedy = "use --format nvfp4"

    def __post_init__(self) -> None:
        if self.scales != "minmax" or self.power_of_two:
            raise UserError(
                "MXFP4 has one rounding rule and no global scale; found "
                f"scales={self.scales}, power_of_two={str(self.power_of_two).lower()}; "
                "leave them out or use --format nvfp4"
            )

    def global_scale(self, weights: Iterable[Tensor]) -> Tensor | None:
        return None

    def encode(self, rows: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        held = quantize_mxfp4(rows)
        return held.packed, held.scale, MXFP4Weight(held).dense(torch.float32)
