"""vLLM's arguments and kernels for each base format; formats themselves know nothing of vLLM."""

import importlib.util
from collections.abc import Mapping

import torch

from qerl_pl.engines.vllm import compat
from qerl_pl.errors import UserError
from qerl_pl.formats.base import FORMATS
from qerl_pl.formats.base_format import DENSE, BaseFormat
from qerl_pl.formats.compressed_tensors import PackedFormat
from qerl_pl.formats.mxfp4 import MXFP4StacksFormat
from qerl_pl.formats.nf4 import NF4Format


def runs(base_format: BaseFormat, device: torch.device) -> bool:
    """Whether vLLM runs a format on a device; otherwise it gets dense weights."""
    if isinstance(base_format, NF4Format) and importlib.util.find_spec("bitsandbytes") is None:
        return False
    return base_format is DENSE or (device.type == "cuda" and base_format in FORMATS)


def load_options(base_format: BaseFormat) -> dict[str, str]:
    """Arguments of `vllm.LLM` that a format needs besides the folder."""
    if not isinstance(base_format, NF4Format):
        return {}
    return {"quantization": compat.BITSANDBYTES, "load_format": compat.BITSANDBYTES}


def check_reads(base_format: BaseFormat, missing: Mapping[str, str]) -> None:
    """Refuse a base whose format this vLLM does not read, by `compat.check_names`."""
    method = load_options(base_format).get("quantization")
    if method is not None and method in missing:
        raise UserError(
            f"vLLM reads {base_format.name.upper()} by {method}; {missing[method]}: install vllm 0.25.1, quantize to "
            "nvfp4, or use TransformersEngine"
        )


def linear_backend(base_format: BaseFormat, asked: str) -> str | None:
    """vLLM's `linear_backend` where a user requested `asked`; None where vLLM has no choice for the format."""
    return asked if isinstance(base_format, PackedFormat) else None


def moe_backend(base_format: BaseFormat, asked: str, share: bool) -> str | None:
    """vLLM's `moe_backend`, for experts in a format; None leaves the choice to vLLM.

    Marlin for stacks that the trainer is to share: vLLM would choose a layout that it cannot read.

    Args:
        base_format: Of the base.
        asked: The `linear_backend` that a user requested.
        share: Whether the trainer is to use the engine's experts.
    """
    if isinstance(base_format, MXFP4StacksFormat):
        return asked if share and asked == "marlin" else None
    return linear_backend(base_format, asked)
