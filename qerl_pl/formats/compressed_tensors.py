"""Formats of compressed-tensors with 4-bit weights; transformers and vLLM load their checkpoints."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    DEFAULT_QUANTIZATION_METHOD,
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    QuantizationStrategy,
    QuantizationType,
)
from qerl_kernels import StackedWeight
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.formats.base_format import BaseFormat, Place, extra_setting
from qerl_pl.models.folder import TensorFiles

_FREE = ("config_groups", "ignore", "quantization_status", "global_compression_ratio", "version")
"""Settings that say which weights are quantized, which the files show, and who wrote them."""
_NEEDED = ("num_bits", "type", "strategy", "group_size")
"""Settings of a group's weights whose defaults are other formats'."""
_FREE_OF_WEIGHTS = ("observer", "observer_kwargs", "zp_dtype")
_CALIBRATION = (("actorder", "static"), ("actorder", "weight"))
"""An order in which GPTQ rounds; the weights lie in their own."""


class PackedFormat(BaseFormat):
    """Base class of NVFP4 and MXFP4: a linear X is stored as `X.weight_packed` and its scales."""

    compression: ClassVar[CompressionFormat]
    stores_experts = True

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        return quantization is not None and quantization.get("format") == self.compression.value

    def excess(self, quantization: Mapping[str, Any] | None) -> str | None:
        quantization = quantization or {}
        groups = quantization.get("config_groups") or {}
        if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
            return f"config_groups {groups!s:.80}"  # a name of several schemes, say
        if any(group.get("input_activations") or group.get("output_activations") for group in groups.values()):
            return "quantized activations"
        sparsity, (exact,) = quantization.get("sparsity_config"), self.config["config_groups"].values()
        dense = isinstance(sparsity, Mapping) and sparsity.get("format") == "dense" and not sparsity.get("targets")
        found = [extra_setting(quantization, self.config, (*_FREE, "sparsity_config") if dense else _FREE)]
        for group in groups.values():
            weights = group.get("weights") if isinstance(group.get("weights"), Mapping) else {}
            needed = {key: weights.get(key) or "absent" for key in _NEEDED}
            asked = {key: value for key, value in weights.items() if (key, value) not in _CALIBRATION}
            found.append(extra_setting(group, {"format": self.compression.value}, ("targets", "weights")))
            found.append(extra_setting(asked | needed, exact["weights"], _FREE_OF_WEIGHTS))
        return next(filter(None, found), None)

    def dense_shape(self, linear: str, stored: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        *rows, half = stored[f"{linear}.{self.suffixes[0]}"]
        scales, shape = stored.get(f"{linear}.{self.suffixes[1]}"), (*rows, 2 * half)  # two codes a byte
        if scales not in (None, (*rows, 2 * half // self.block)):
            raise UserError(
                f"{self.compression.value} has a scale for every {self.block} weights of a row; {linear} has {shape} "
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


def quantization_config(
    compression: CompressionFormat, strategy: QuantizationStrategy, group_size: int, scale_dtype: torch.dtype
) -> dict[str, Any]:
    """`quantization_config` of a checkpoint whose linears, except lm_head, have 4-bit float weights.

    Every field is set and no default is written, so that config.json, which a base model's identity covers, is the
    same with each release of compressed-tensors.
    """
    weights = QuantizationArgs(
        num_bits=4,
        type=QuantizationType.FLOAT,
        symmetric=True,
        strategy=strategy,
        group_size=group_size,
        dynamic=False,
        scale_dtype=scale_dtype,
        observer="memoryless_minmax",
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=None, output_activations=None)
    config = QuantizationConfig(
        quant_method=DEFAULT_QUANTIZATION_METHOD,
        format=compression.value,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=["lm_head"],
        config_groups={"group_0": scheme},
    )
    document = config.model_dump(mode="json", exclude_unset=True)
    document["config_groups"]["group_0"]["weights"].pop("zp_dtype", None)  # null, which 0.17 adds
    return document
