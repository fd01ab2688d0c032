"""Dequantization and quantization on the selected backend; dequantization is an operator, opaque to torch.compile.

Eager calls bypass PyTorch's dispatcher, which takes longer than the kernel's launch.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor

from qerl_kernels import marlin, reference
from qerl_kernels.backend import runs_triton

_library = torch.library.Library("qerl", "DEF")
_library.define("dequantize_nvfp4(Tensor packed, Tensor scale, ScalarType dtype) -> Tensor")
_library.define("dequantize_mxfp4(Tensor packed, Tensor scale, ScalarType dtype) -> Tensor")
_library.define(
    "dequantize_marlin(Tensor weight, Tensor scale, int start, int stop, bool mx, ScalarType dtype) -> Tensor"
)


def dequantize_nvfp4_unscaled(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference.dequantize_nvfp4_unscaled` on the selected backend."""
    if torch.compiler.is_compiling():
        return torch.ops.qerl.dequantize_nvfp4(packed, scale, dtype)
    return _dequantize_nvfp4(packed, scale, dtype)


def dequantize_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference.dequantize_mxfp4` on the selected backend."""
    if torch.compiler.is_compiling():
        return torch.ops.qerl.dequantize_mxfp4(packed, scale, dtype)
    return _dequantize_mxfp4(packed, scale, dtype)


def dequantize_marlin(
    weight: Tensor, scale: Tensor, dtype: torch.dtype, start: int = 0, stop: int | None = None, *, mx: bool = False
) -> Tensor:
    """`marlin.dequantize_marlin` on the selected backend."""
    start, stop = marlin.check_rows(weight, start, stop)
    if torch.compiler.is_compiling():
        return torch.ops.qerl.dequantize_marlin(weight, scale, start, stop, mx, dtype)
    return _dequantize_marlin(weight, scale, start, stop, mx, dtype)


@functools.cache
def _triton() -> ModuleType:
    """Imported at the first use: without Triton the rest of the package works."""
    from qerl_kernels import triton_dequantize

    return triton_dequantize


def _dequantize_nvfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if runs_triton(packed):
        return _triton().from_rows(packed, scale, dtype, mx=False)
    return reference.dequantize_nvfp4_unscaled(packed, scale, dtype)


def _dequantize_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if runs_triton(packed):
        return _triton().from_rows(packed, scale, dtype, mx=True)
    return reference.dequantize_mxfp4(packed, scale, dtype)


def _dequantize_marlin(weight: Tensor, scale: Tensor, start: int, stop: int, mx: bool, dtype: torch.dtype) -> Tensor:
    if not runs_triton(weight):
        return marlin.dequantize_marlin(weight, scale, dtype, start, stop, mx=mx)
    return _triton().from_marlin(weight, scale, start, stop, dtype, mx=mx)


def _fake_rows(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((packed.shape[0], 2 * packed.shape[1]), dtype=dtype)


def _fake_marlin(weight: Tensor, scale: Tensor, start: int, stop: int, mx: bool, dtype: torch.dtype) -> Tensor:
    return weight.new_empty((stop - start, 16 * weight.shape[0]), dtype=dtype)


for _name, _op, _fake in (
    ("dequantize_nvfp4", _dequantize_nvfp4, _fake_rows),
    ("dequantize_mxfp4", _dequantize_mxfp4, _fake_rows),
    ("dequantize_marlin", _dequantize_marlin, _fake_marlin),
):
    _library.impl(_name, _op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qerl::{_name}", _fake, lib=_library)
