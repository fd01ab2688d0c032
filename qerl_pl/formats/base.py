"""Which format a base model is in: one of the package's, or one that a user has named by import path.

A further format of the package is a file with a subclass of `BaseFormat`, listed in `FORMATS`.
"""

from collections.abc import Mapping
from inspect import isabstract
from pathlib import Path
from typing import Any

from qerl_pl.errors import UserError
from qerl_pl.formats.base_format import DENSE, BaseFormat
from qerl_pl.formats.fp4 import MXFP4Format, MXFP4StacksFormat, NVFP4Format
from qerl_pl.formats.nf4 import NF4Format
from qerl_pl.models.folder import read_config
from qerl_pl.runtime.import_path import load_named

FORMATS: tuple[BaseFormat, ...] = (NVFP4Format(), MXFP4Format(), MXFP4StacksFormat(), NF4Format(), DENSE)
"""Formats of a policy's base. Two may share a name: the first stores linears, the second stacked experts."""
QUANTIZED = tuple(dict.fromkeys(one.name for one in FORMATS if one is not DENSE))
"""Names of the 4-bit formats."""
QUANTIZATIONS = (*QUANTIZED, DENSE.name)
"""Values of `model.policy.quantization` besides import paths."""
_named: dict[str, BaseFormat] = {}
"""A user's formats by import path, the one named last at the end: `format_of` finds what settings have named."""


def named_format(name: str, key: str = "model.policy.quantization") -> BaseFormat:
    """The format of a name of `QUANTIZATIONS`, or of the import path of a user's class.

    Raises:
        UserError: There is none, or it is no `BaseFormat` that is complete; it names the setting's `key`.
    """
    if (known := next((one for one in FORMATS if one.name == name), None)) is not None:
        return known
    if name in _named:
        _named[name] = made = _named.pop(name)
        return made
    rule = f"{key} must be one of {', '.join(QUANTIZATIONS)}, or the import path of a BaseFormat"
    kind = load_named(name, rule, "choose one of them, or write my_formats.Float8", "format")
    if not (isinstance(kind, type) and issubclass(kind, BaseFormat)) or isabstract(kind):
        raise UserError(
            f"{rule}; {name} is {kind!r:.60}; derive a class from qerl_pl.formats.base_format.BaseFormat, with encode "
            "and decode"
        )
    _named[name] = made = kind()
    made.name, made.config = name, made.config or {"quant_method": kind.__name__}
    return made


def format_of(folder: Path) -> BaseFormat:
    """The format of a base model's folder; UserError if it has no config.json, or another format."""
    return format_of_config(read_config(folder), folder)


def format_of_config(config: Mapping[str, Any], source: object) -> BaseFormat:
    """The format of a base model by its config.json, as `read_config` returns it, of `source`.

    Raises:
        UserError: It has another format, or asks for more than the format does.
    """
    quantization: Any = config.get("quantization_config") or None
    found = next((one for one in (*FORMATS, *reversed(_named.values())) if one.recognises(quantization)), None)
    excess = None if found is None else found.excess(quantization)
    if found is not None and excess is None:
        return found
    name = quantization.get("format") or quantization.get("quant_method")
    if found is None and quantization.get("quant_algo"):
        name = f"{name} {quantization['quant_algo']!s:.40}"
    raise UserError(
        f"a quantized base has weights in {', '.join(QUANTIZED)}, and 16-bit activations; {source} has {name}"
        f"{f' with {excess}' if excess else ''}: quantize the 16-bit model"
    )
