"""MXFP4, the format `mxfp4-pack-quantized` of compressed-tensors: blocks of 32 weights with a power of two each.

A linear X is stored as `X.weight_packed` uint8 [N, K/2] and `X.weight_scale` uint8 [N, K/32]. Embeddings, norms, biases
and lm_head keep their 16 bits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from qerl_kernels import BlockScales, MXFP4Tensor, MXFP4Weight, quantize_mxfp4
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.formats.compressed_tensors import quantization_config
from qerl_pl.formats.model_files import TensorFiles, in_dtype

FILE_FORMAT = "mxfp4-pack-quantized"
CONFIG = quantization_config(FILE_FORMAT, "group", 32, "torch.uint8")
"""What an MXFP4 checkpoint's config.json says of its weights."""
_PARTS = tuple(f"weight_{part}" for part in MXFP4Tensor._fields)


class MXFP4Format:
    """The base in four bits with a power of two for every 32 weights."""

    name = "mxfp4"
    vllm_devices = ("cuda",)
    vllm_options: Mapping[str, str] = {}

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        return quantization is not None and quantization.get("format") == FILE_FORMAT

    def tensor_names(self, linear: str) -> tuple[str, ...]:
        return tuple(f"{linear}.{part}" for part in _PARTS)

    def check(self, tensors: TensorFiles) -> None:
        """Nothing to check: no scale is shared."""

    def frozen_weight(self, linear: str, tensors: TensorFiles, place: Callable[[Tensor], Tensor]) -> MXFP4Weight | None:
        names = self.tensor_names(linear)
        if names[0] not in tensors:
            return None
        return MXFP4Weight(MXFP4Tensor(*(place(tensors.read(name)) for name in names)))

    def iterate_dense(self, tensors: TensorFiles, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name in tensors:
            linear, _, part = name.rpartition(".")
            if part == "weight_packed":
                held = MXFP4Tensor(*(tensors.read(one) for one in self.tensor_names(linear)))
                yield f"{linear}.weight", MXFP4Weight(held).dense(dtype)
            elif part not in _PARTS:
                yield name, in_dtype(tensors.read(name), dtype)

    def vllm_linear_backend(self, asked: str) -> str | None:
        return asked


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
    remedy = "use nvfp4, or none"

    def __post_init__(self) -> None:
        if self.scales != "minmax" or self.power_of_two:
            raise UserError(
                "MXFP4 has one rounding rule and no global scale; found "
                f"scales={self.scales}, power_of_two={str(self.power_of_two).lower()}; "
                "leave them out or use --format nvfp4"
            )

    def global_scale(self, weights: Iterable[Tensor]) -> Tensor | None:
        return None

    def encode(self, rows: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        held = quantize_mxfp4(rows)
        return held.packed, held.scale

    def store(
        self, codes: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], Tensor]:
        return {"_packed": codes, "_scale": scales}, scales

    def decode(self, codes: Tensor, scales: Tensor, global_scale: Tensor | None) -> Tensor:
        return MXFP4Weight(MXFP4Tensor(codes, scales)).dense(torch.float32)
