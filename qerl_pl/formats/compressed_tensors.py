"""Formats of compressed-tensors with 4-bit weights; transformers and vLLM load their checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from qerl_kernels import FrozenWeight, StackedWeight
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.formats.dense import UnpackedStacks, extra_setting
from qerl_pl.models.folder import TensorFiles, in_dtype

_FREE = ("config_groups", "ignore", "quantization_status", "global_compression_ratio", "version")
"""Settings that say which weights are quantized, which the files show, and who wrote them."""
_NEEDED = ("num_bits", "type", "strategy", "group_size")
"""Settings of a group's weights whose defaults are other formats'."""
_FREE_OF_WEIGHTS = ("observer", "observer_kwargs", "zp_dtype")
_CALIBRATION = (("actorder", "static"), ("actorder", "weight"))
"""An order in which GPTQ rounds; the weights lie in their own."""


class PackedFormat(UnpackedStacks, ABC):
    """Base class of NVFP4 and MXFP4: a linear X is stored as `X.weight_packed` and its scales."""

    name: ClassVar[str]
    compression: ClassVar[CompressionFormat]
    config: ClassVar[dict[str, Any]]
    """Its `quantization_config`."""
    suffixes: ClassVar[tuple[str, ...]]
    """What follows a linear's name in the names of its tensors, the packed codes first."""
    vllm_devices = ("cuda",)
    vllm_options: Mapping[str, str] = {}

    @abstractmethod
    def weight(self, stored: Sequence[Tensor]) -> FrozenWeight:
        """The frozen weight of a linear, from its tensors in the order of `suffixes`."""

    def dense(self, stored: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The dequantized matrix [N, K] of a linear."""
        return self.weight(stored).dense(dtype)

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        return quantization is not None and quantization.get("format") == self.compression.value

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
            found.append(extra_setting(group, {"format": self.compression.value}, free))
            found.append(extra_setting(asked | needed, exact["weights"], _FREE_OF_WEIGHTS))
        return next(filter(None, found), None)

    def _quantizes_activations(self, group: Mapping[str, Any]) -> bool:
        """Whether a group asks for activations that are not computed in 16 bits, unless their scales are dropped."""
        inputs = group.get("input_activations")
        rounded = isinstance(inputs, Mapping) and inputs.get("num_bits") == 4 and bool(self.dropped)
        return bool(group.get("output_activations") or (inputs and not rounded))

    def tensor_names(self, linear: str) -> tuple[str, ...]:
        return tuple(f"{linear}.{suffix}" for suffix in self.suffixes)

    def dense_shapes(self, tensors: TensorFiles) -> dict[str, tuple[int, ...]]:
        shapes, stored = {}, tensors.shapes()
        (group,) = self.config["config_groups"].values()
        block = group["weights"]["group_size"]
        for name, shape in stored.items():
            linear, _, suffix = name.rpartition(".")
            if suffix == self.suffixes[0]:
                shapes[f"{linear}.weight"] = dense = (*shape[:-1], 2 * shape[-1])  # two codes a byte
                scales = stored.get(f"{linear}.{self.suffixes[1]}")
                if scales not in (None, (*dense[:-1], dense[-1] // block)):
                    raise UserError(
                        f"{self.compression.value} has a scale for every {block} weights of a row; {linear} has "
                        f"{dense} weights and {scales} scales: quantize the 16-bit model"
                    )
            elif suffix not in (*self.suffixes, *self.dropped):
                shapes[name] = shape
        return shapes

    def frozen_weight(
        self, linear: str, tensors: TensorFiles, place: Callable[[Tensor], Tensor]
    ) -> FrozenWeight | None:
        names = self.tensor_names(linear)
        if names[0] not in tensors:
            return None
        held = tensors.read_all(names)
        return self.weight([place(held[name]) for name in names])

    def first_rows(
        self, linear: str, tensors: TensorFiles, rows: int, place: Callable[[Tensor], Tensor]
    ) -> FrozenWeight | None:
        return self.frozen_weight(linear, tensors.first_rows(rows), place)

    @abstractmethod
    def stack(self, stored: Sequence[Tensor]) -> StackedWeight:
        """The frozen weights of a layer's experts, from their tensors [E, ...] in the order of `suffixes`."""

    def stacked_weight(
        self,
        experts: Sequence[Sequence[str]],
        tensors: TensorFiles,
        dtype: torch.dtype,
        place: Callable[[Tensor], Tensor],
    ) -> StackedWeight:
        stored = []
        held = tensors.read_all([stored for names in experts for name in names for stored in self.tensor_names(name)])
        for suffix in self.suffixes:
            parts = [[held.pop(f"{name}.{suffix}") for name in names] for names in experts]
            # `check` has seen that the linears of an expert share their global scale.
            matrices = [part[0].reshape(()) if part[0].numel() == 1 else _by_rows(part) for part in parts]
            stored.append(place(_stacked(matrices)))
        return self.stack(stored)

    def expert_stack(
        self, stack: str, tensors: TensorFiles, dtype: torch.dtype, place: Callable[[Tensor], Tensor]
    ) -> StackedWeight:
        raise UserError(
            f"{self.compression.value} holds no experts in stacks; the base has {stack}: take the published weights, "
            "or quantize those in 16 bits to mxfp4"
        )

    def iterate_dense(self, tensors: TensorFiles, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        names, groups = list[str](), list[tuple[str, ...]]()
        for name in tensors:
            linear, _, suffix = name.rpartition(".")
            if suffix == self.suffixes[0]:
                names.append(f"{linear}.weight")
                groups.append(self.tensor_names(linear))
            elif suffix not in (*self.suffixes, *self.dropped):
                names.append(name)
                groups.append((name,))
        for name, group, stored in zip(names, groups, tensors.read_groups(groups), strict=True):
            yield name, in_dtype(stored[0], dtype) if group == (name,) else self.dense(stored, dtype)

    def vllm_linear_backend(self, asked: str) -> str | None:
        return asked

    def vllm_moe_backend(self, asked: str, share: bool) -> str | None:
        return asked


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
