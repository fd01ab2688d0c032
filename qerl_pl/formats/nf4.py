"""NF4 with double quantization, as QLoRA and bitsandbytes have it: blocks of 64 weights.

A linear X is stored as `X.weight` uint8 [N K/2, 1], `X.weight.absmax` uint8 [N K/64], `X.weight.nested_absmax` float32
[N K/64/256], the two maps of codes to numbers, and `X.weight.quant_state.bitsandbytes__nf4`, JSON as bytes. That is
what transformers and vLLM read. Embeddings, norms, biases and lm_head keep their 16 bits.
"""

import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from qerl_kernels import BlockScales, NF4Tensor, NF4Weight, dequantize_nf4, quantize_absmax, quantize_nf4
from qerl_kernels.nf4 import NESTED_BLOCK, NF4_BLOCK, dynamic_map, nf4_magnitudes, nf4_values
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.formats.model_folder import TensorFiles, in_dtype

CONFIG = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "llm_int8_skip_modules": ["lm_head"],
}
"""What an NF4 checkpoint's config.json says of its weights."""
_STATE = "quant_state.bitsandbytes__nf4"
_PARTS = ("absmax", "nested_absmax", "quant_map", "nested_quant_map", _STATE)
_CPU = torch.device("cpu")


class NF4Format:
    """The base in NF4."""

    name = "nf4"
    vllm_options: Mapping[str, str] = {"quantization": "bitsandbytes", "load_format": "bitsandbytes"}

    @property
    def vllm_devices(self) -> tuple[str, ...]:
        """vLLM multiplies by bitsandbytes."""
        return ("cuda",) if importlib.util.find_spec("bitsandbytes") else ()

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        known = ("quant_method", "load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
        return quantization is not None and all(quantization.get(key) == CONFIG[key] for key in known)

    def tensor_names(self, linear: str) -> tuple[str, ...]:
        return (f"{linear}.weight", *(f"{linear}.weight.{part}" for part in _PARTS))

    def dense_shapes(self, tensors: TensorFiles) -> dict[str, tuple[int, ...]]:
        shapes = {}
        for name, shape in tensors.shapes().items():
            if f"{name}.{_STATE}" in tensors:  # stored flat, two codes a byte
                shapes[name] = tuple(_unpacked(tensors.read(f"{name}.{_STATE}"))["shape"])
            elif name.rpartition(".weight.")[2] not in _PARTS:
                shapes[name] = shape
        return shapes

    def check(self, tensors: TensorFiles) -> None:
        """Refuse other blocks and other numbers than these codes stand for."""
        for name in tensors:
            if not name.endswith(_STATE):
                continue
            weight, state = name.removesuffix(f".{_STATE}"), _unpacked(tensors.read(name))
            found = [state.get("blocksize"), state.get("nested_blocksize")]
            maps = [tensors.read(f"{weight}.{part}") for part in ("quant_map", "nested_quant_map")]
            known = nf4_values(_CPU), dynamic_map(_CPU)
            if found != [NF4_BLOCK, NESTED_BLOCK] or not all(map(torch.equal, maps, known)):
                raise UserError(
                    f"NF4 has blocks of {NF4_BLOCK}, double quantization in blocks of {NESTED_BLOCK} and bitsandbytes' "
                    f"maps; {weight} has blocks of {found} or other maps; use `qerl quantize` on the 16-bit model"
                )

    def frozen_weight(self, linear: str, tensors: TensorFiles, place: Callable[[Tensor], Tensor]) -> NF4Weight | None:
        weight = f"{linear}.weight"
        if f"{weight}.absmax" not in tensors:
            return None
        state = _unpacked(tensors.read(f"{weight}.{_STATE}"))
        packed, absmax, nested = (
            place(tensors.read(name)) for name in (weight, f"{weight}.absmax", f"{weight}.nested_absmax")
        )
        rows, columns = state["shape"]
        return NF4Weight(NF4Tensor(packed, absmax, nested, state["nested_offset"]), (rows, columns))

    def iterate_dense(self, tensors: TensorFiles, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name in tensors:
            linear, _, last = name.rpartition(".weight")
            held = self.frozen_weight(linear, tensors, lambda tensor: tensor) if not last else None
            if held is not None:
                yield name, held.dense(dtype)
            elif last.removeprefix(".") not in _PARTS:
                yield name, in_dtype(tensors.read(name), dtype)

    def vllm_linear_backend(self, asked: str) -> str | None:
        return None


def _unpacked(tensor: Tensor) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(bytes(tensor.tolist()))
    return state


@dataclass(frozen=True)
class NF4Quantizer:
    """Rounds matrices to NF4, which leaves nothing to choose.

    Raises:
        UserError: `scales` or `power_of_two` of `qerl quantize` is set.
    """

    scales: BlockScales
    power_of_two: bool
    label = "NF4"
    block = NF4_BLOCK
    config = CONFIG
    remedy = "use nvfp4, or none"

    def __post_init__(self) -> None:
        if self.scales != "minmax" or self.power_of_two:
            raise UserError(
                "NF4 has one rounding rule; found "
                f"scales={self.scales}, power_of_two={str(self.power_of_two).lower()}; "
                "leave them out or use --format nvfp4"
            )

    def global_scale(self, weights: Iterable[Tensor]) -> Tensor | None:
        return None

    def encode(self, rows: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        return quantize_nf4(rows)

    def store(
        self, codes: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], Tensor]:
        absmax, nested, offset = quantize_absmax(scales.flatten())
        rows, columns = len(codes), 2 * codes.shape[1]
        state = {
            "quant_type": "nf4",
            "blocksize": NF4_BLOCK,
            "dtype": str(dtype).removeprefix("torch."),
            "shape": (rows, columns),
            "nested_blocksize": NESTED_BLOCK,
            "nested_dtype": "float32",
            "nested_offset": offset,
        }
        stored = {
            "": codes.reshape(-1, 1),
            ".absmax": absmax,
            ".nested_absmax": nested,
            ".quant_map": nf4_values(_CPU).clone(),
            ".nested_quant_map": dynamic_map(_CPU).clone(),
            f".{_STATE}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }
        held = nf4_magnitudes(NF4Tensor(codes, absmax, nested, offset))
        return stored, held.view(rows, columns // NF4_BLOCK)

    def decode(self, codes: Tensor, scales: Tensor, global_scale: Tensor | None) -> Tensor:
        return dequantize_nf4(codes, scales, torch.float32)
