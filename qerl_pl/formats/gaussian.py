"""A placebo of NVFP4: 16-bit weights with a frozen Gaussian error as large as NVFP4's rounding error.

It separates the effect of quantization's error from that of its size: same squared error in each matrix, without 4-bit
codes. A linear X is stored as `X.weight` in 16 bits and `X.weight_error` float32 [1], the relative squared error that
was added. Embeddings, norms, biases and lm_head are those of the base.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from qerl_kernels import BlockScales, DenseWeight, FrozenWeight
from torch import Tensor

from qerl_pl.formats.dense import DenseFormat, extra_setting
from qerl_pl.formats.model_folder import TensorFiles, in_dtype
from qerl_pl.formats.nvfp4 import NVFP4Quantizer
from qerl_pl.seeds import stream_seed

CONFIG = {"quant_method": "gaussian"}
"""`quantization_config` of a placebo, which only this package reads."""
_ERROR = ".weight_error"


class GaussianFormat(DenseFormat):
    """The base in 16 bits with a Gaussian error; vLLM gets a dense copy."""

    name = "gaussian"
    vllm_devices = ()

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        return quantization is not None and quantization.get("quant_method") == CONFIG["quant_method"]

    def excess(self, quantization: Mapping[str, Any] | None) -> str | None:
        return extra_setting(quantization or {}, CONFIG)

    def tensor_names(self, linear: str) -> tuple[str, ...]:
        return f"{linear}.weight", f"{linear}{_ERROR}"

    def dense_shapes(self, tensors: TensorFiles) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in tensors.shapes().items() if not name.endswith(_ERROR)}

    def frozen_weight(
        self, linear: str, tensors: TensorFiles, place: Callable[[Tensor], Tensor]
    ) -> FrozenWeight | None:
        return DenseWeight(place(tensors.read(f"{linear}.weight"))) if f"{linear}{_ERROR}" in tensors else None

    def iterate_dense(self, tensors: TensorFiles, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        return ((name, in_dtype(tensors.read(name), dtype)) for name in tensors if not name.endswith(_ERROR))


@dataclass(frozen=True)
class GaussianQuantizer:
    """Adds Gaussian errors E to matrices, scaled to the Frobenius norm of NVFP4's error with the same options.

    The direction of E is a function of the matrix alone: the same in every run and on every device.
    """

    scales: BlockScales
    power_of_two: bool
    label = "The placebo of NVFP4"
    config = CONFIG
    stores_experts = True
    of_stacks = None

    @cached_property
    def nvfp4(self) -> NVFP4Quantizer:
        """The quantizer whose error is matched."""
        return NVFP4Quantizer(self.scales, self.power_of_two)

    @property
    def block(self) -> int:
        return self.nvfp4.block

    @property
    def remedy(self) -> str:
        return self.nvfp4.remedy

    def global_scale(self, weights: Iterable[Tensor]) -> Tensor | None:
        return self.nvfp4.global_scale(weights)

    def encode(self, rows: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """The rows themselves [n, K], and NVFP4's squared error of each, float64 [n, 1]."""
        rounded = self.nvfp4.decode(*self.nvfp4.encode(rows, global_scale), global_scale)
        return rows, rounded.double().sub_(rows).square_().sum(dim=1, keepdim=True)

    def store(
        self, codes: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The matrix with its error, and the error's relative square; the "block scales" are the matrix as stored."""
        digest = hashlib.blake2b(codes.cpu().contiguous().view(torch.uint8).numpy().data, digest_size=16)
        generator = torch.Generator().manual_seed(stream_seed("gaussian placebo", digest.hexdigest()))
        noise = torch.randn(codes.shape, generator=generator, dtype=torch.float32)
        error = scales.double().sum().cpu()
        size = (error / noise.double().square().sum()).sqrt().item()
        perturbed = codes.float().add(noise.to(codes.device), alpha=size).to(dtype)
        relative = (error / codes.double().square().sum().cpu()).nan_to_num(0.0).float()
        return {"": perturbed, "_error": relative.reshape(1)}, perturbed

    def decode(self, codes: Tensor, scales: Tensor, global_scale: Tensor | None) -> Tensor:
        """The stored rows, which `store` returned as scales."""
        return scales.to(torch.float32, copy=True)  # the caller computes in place
