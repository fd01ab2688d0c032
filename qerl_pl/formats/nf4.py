"""NF4 with double quantization (QLoRA, arXiv 2305.14314, section 3), by bitsandbytes.

A linear X is stored as `X.weight` uint8 [N K/2, 1] and the tensors of bitsandbytes' `QuantState`: `X.weight.absmax`
uint8 [N K/64], `X.weight.nested_absmax` float32 [N K/64/256], the two code books, and the rest as JSON bytes. This is
the layout that transformers and vLLM read. Embeddings, norms, biases and lm_head keep their 16 bits.
"""

import copy
import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.formats.base_format import BaseFormat, Place, extra_setting
from qerl_pl.models.folder import TensorFiles

NF4_BLOCK, NESTED_BLOCK = 64, 256
"""Weights that share a magnitude, and magnitudes that share one in turn."""
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
"""The `quantization_config` of an NF4 checkpoint."""
_FREE = (
    *("_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "llm_int8_skip_modules", "llm_int8_threshold"),
    *("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"),
)
"""Settings that transformers writes besides, and that do not change how the weights are read."""
_STATE = "quant_state.bitsandbytes__nf4"
_SUFFIXES = ("absmax", "nested_absmax", "quant_map", "nested_quant_map", _STATE)


def _functional() -> Any:
    """The module `bitsandbytes.functional`, an optional dependency."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("an NF4 base needs bitsandbytes, which is not installed: pip install 'qerl-pl[baselines]'")
    return importlib.import_module("bitsandbytes.functional")


def _stored_state(tensor: Tensor) -> dict[str, Any]:
    """The JSON of a `QuantState`, stored as bytes."""
    state: dict[str, Any] = json.loads(bytes(tensor.tolist()))
    return state


class NF4Weight:
    """A frozen NF4 weight of N K/2 bytes, dequantized by bitsandbytes; `state` is its `QuantState`, nested or not."""

    alpha = 1.0

    def __init__(self, packed: Tensor, state: Any) -> None:
        self._packed, self._state = packed, state
        rows, columns = state.shape
        self.shape: tuple[int, int] = (rows, columns)

    def dense(self, dtype: torch.dtype) -> Tensor:
        state = copy.copy(self._state)  # an engine's state keeps its own dtype
        state.dtype = dtype
        weight: Tensor = _functional().dequantize_4bit(self._packed.view(-1, 1), state)
        return weight

    def tensors(self) -> dict[str, Tensor]:
        held = {"weight": self._packed, "weight.absmax": self._state.absmax}
        return held | {"weight.nested_absmax": self._state.state2.absmax} if self._state.nested else held


class NF4Format(BaseFormat):
    """The base in NF4."""

    name = "nf4"
    config = CONFIG
    block = NF4_BLOCK
    remedy = "use nvfp4, or none"

    def recognises(self, quantization: Mapping[str, Any] | None) -> bool:
        known = ("quant_method", "load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
        return quantization is not None and all(quantization.get(key) == CONFIG[key] for key in known)

    def excess(self, quantization: Mapping[str, Any] | None) -> str | None:
        return extra_setting(quantization or {}, CONFIG, _FREE)

    def tensor_names(self, linear: str) -> tuple[str, ...]:
        return (f"{linear}.weight", *(f"{linear}.weight.{suffix}" for suffix in _SUFFIXES))

    def stored_names(self, tensors: TensorFiles) -> dict[str, tuple[str, ...]]:
        return {
            name: self.tensor_names(name.removesuffix(".weight")) if f"{name}.{_STATE}" in tensors else (name,)
            for name in tensors
            if name.rpartition(".weight.")[2] not in _SUFFIXES
        }

    def dense_shapes(self, tensors: TensorFiles) -> dict[str, tuple[int, ...]]:
        shapes = tensors.shapes()
        return {
            name: shapes[name] if group == (name,) else tuple(_stored_state(tensors.read(group[-1]))["shape"])
            for name, group in self.stored_names(tensors).items()
        }

    def check(self, tensors: TensorFiles) -> None:
        """Reject other block sizes and other code books."""
        code_books = _code_books()
        for name in tensors:
            if not name.endswith(_STATE):
                continue
            weight, state = name.removesuffix(f".{_STATE}"), _stored_state(tensors.read(name))
            blocks = [state.get("blocksize"), state.get("nested_blocksize")]
            stored = [tensors.read(f"{weight}.{suffix}") for suffix in ("quant_map", "nested_quant_map")]
            # Close, not equal: the last bits of bitsandbytes' maps depend on the CPU that made them.
            if blocks != [NF4_BLOCK, NESTED_BLOCK] or not all(map(torch.allclose, stored, code_books)):
                raise UserError(
                    f"NF4 has blocks of {NF4_BLOCK}, double quantization in blocks of {NESTED_BLOCK} and bitsandbytes' "
                    f"maps; {weight} has blocks of {blocks} or other maps; use `qerl quantize` on the 16-bit model"
                )

    def frozen_weight(self, linear: str, tensors: TensorFiles, place: Place) -> NF4Weight | None:
        names = self.tensor_names(linear)
        if names[-1] not in tensors:
            return None
        held = tensors.read_all(names)
        stored = [held[name] for name in names]
        return self.weight([*map(place, stored[:3]), *stored[3:]])  # the rest is small, and no parameter

    def first_rows(self, linear: str, tensors: TensorFiles, rows: int, place: Place) -> NF4Weight | None:
        weight = f"{linear}.weight"
        if f"{weight}.absmax" not in tensors:
            return None
        held = {suffix: tensors.read(f"{weight}.{suffix}") for suffix in _SUFFIXES}
        state = _stored_state(held[_STATE])
        shape = (min(rows, state["shape"][0]), state["shape"][1])
        blocks = -(-shape[0] * shape[1] // NF4_BLOCK)
        for suffix, count in (("absmax", blocks), ("nested_absmax", -(-blocks // NESTED_BLOCK))):
            held[suffix] = held[suffix][:count]
        text = json.dumps(state | {"shape": shape})
        held[_STATE] = torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")
        codes = place(tensors.first_rows(shape[0] * shape[1] // 2).read(weight))
        return NF4Weight(codes, _functional().QuantState.from_dict(held, codes.device))

    def weight(self, stored: Sequence[Tensor]) -> NF4Weight:
        packed, *state = stored
        of_suffix = dict(zip(_SUFFIXES, state, strict=True))
        return NF4Weight(packed, _functional().QuantState.from_dict(of_suffix, packed.device))

    def encode(self, rows: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        packed, state = _functional().quantize_4bit(rows, blocksize=NF4_BLOCK, quant_type="nf4")
        return packed.view(len(rows), -1), state.absmax.view(len(rows), -1)

    def store(
        self, codes: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], Tensor]:
        functional, absmax = _functional(), scales.flatten()
        offset = absmax.mean()
        rounded, nested = functional.quantize_blockwise(absmax - offset, blocksize=NESTED_BLOCK)
        shape, code = (len(codes), 2 * codes.shape[1]), _code_books()[0]
        state = functional.QuantState(rounded, shape, code, NF4_BLOCK, "nf4", dtype, offset, nested)
        stored = {f".{suffix}": tensor for suffix, tensor in state.as_dict(packed=True).items()}
        magnitudes = functional.dequantize_blockwise(rounded, nested) + offset
        return {"": codes.reshape(-1, 1), **stored}, magnitudes.view(scales.shape)

    def decode(self, codes: Tensor, scales: Tensor, global_scale: Tensor | None) -> Tensor:
        shape = (len(codes), 2 * codes.shape[1])
        state = _functional().QuantState(scales.flatten(), shape, None, NF4_BLOCK, "nf4", torch.float32)
        return NF4Weight(codes, state).dense(torch.float32)


def _code_books() -> tuple[Tensor, Tensor]:
    """The 16 values of NF4 and the 256 of the magnitudes' codes, on the CPU, as files are read.

    Lightning makes the GPU the default device while a module is configured, which bitsandbytes' map would follow.
    """
    functional = _functional()
    with torch.device("cpu"):
        return functional.get_4bit_type("nf4", "cpu"), functional.create_dynamic_map()
