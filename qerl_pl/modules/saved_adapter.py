"""A saved adapter in PEFT's format, as `qerl export`, PEFT and TRL write it: what a policy starts from."""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.formats.architecture import names_match
from qerl_pl.formats.quantize import local_folder
from qerl_pl.modules.lora import LoraConfig, LoraSpec

_FACTOR = re.compile(r"^(?:base_model\.model\.)?(.+)\.lora_[AB]\.weight$")
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the base, too
}
"""Values that an adapter of the form scaling * B A has under PEFT's keys."""
_OFF = (
    *("use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias", "alora_invocation_tokens"),
    "target_parameters",  # of experts, which are frozen here
)
"""Keys of PEFT for other adapters."""


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter's folder and what its files say."""

    folder: Path
    base: str
    """Folder or hub name of its base model, as PEFT records it."""
    lora: LoraSpec
    train_norms: bool
    """Whether it has trained norm scales."""
    digest: str
    """SHA-256 of the file of its weights."""

    def tensors(self) -> dict[str, Tensor]:
        """The weights by PEFT's names, on the CPU."""
        return load_file(self.folder / SAFETENSORS_WEIGHTS_NAME)

    def spec(self, config: LoraConfig) -> LoraSpec:
        """The adapter's settings, with the dropout of `config`.

        Raises:
            UserError: `config` sets another rank, alpha, targets or use_rslora.
        """
        for name in ("rank", "alpha", "targets", "use_rslora"):
            given, saved = vars(config)[name], vars(self.lora)[name]
            same = set(given) == set(saved) if isinstance(given, tuple | list) else given == saved
            if given is not None and not same:
                raise UserError(
                    f"training goes on with the shape that the adapter has; {self.folder} has {name} {_text(saved)} "
                    f"and model.policy.lora.{name} is {_text(given)}; leave it out or set it to null"
                )
        return LoraConfig(dropout=config.dropout).spec(self.lora)


def _text(value: object) -> str:
    return (", ".join(value) or "none") if isinstance(value, tuple | list) else str(value)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter in PEFT's format."""
    return (folder / CONFIG_NAME).is_file()


def read_adapter(path: str, key: str = "model.policy.adapter") -> SavedAdapter:
    """Read an adapter's settings; its targets are those that its weights have.

    Args:
        path: Folder, or name on the hub, from where it is downloaded once.
        key: Configuration key of the path, for error messages.

    Raises:
        UserError: There is no such adapter, a file is missing or damaged, or it is no plain LoRA.
    """
    folder = local_folder(path, key)
    for name in (CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME):
        if not (folder / name).is_file():
            raise UserError(f"an adapter in PEFT's format has {name}; {folder} has none; export or save it again")
    try:
        saved = json.loads((folder / CONFIG_NAME).read_bytes())
        base, rank, alpha = str(saved["base_model_name_or_path"]), int(saved["r"]), float(saved["lora_alpha"])
        others = [name for name, plain in _PLAIN.items() if saved.get(name, plain[0]) not in plain]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{CONFIG_NAME} must be PEFT's of a LoRA; {folder} has another ({error!r}); export or save it again"
        ) from error
    if others := [*others, *(name for name in _OFF if saved.get(name))]:
        raise UserError(
            f"an adapter adds a multiple of B A, of one rank and alpha; {folder / CONFIG_NAME} sets {others[0]}; "
            "merge it into its base with PEFT, and name that model as model.policy.path"
        )
    names = _names(folder / SAFETENSORS_WEIGHTS_NAME)
    if others := [name for name in names if not (_FACTOR.search(name) or name.endswith("norm.weight"))]:
        raise UserError(
            f"a saved adapter may hold factors of linears and norm scales; {folder} has {others[0]}; "
            "merge it into its base with PEFT, and name that model as model.policy.path"
        )
    factors = {name: match[1] for name in names if (match := _FACTOR.search(name))}
    spec = LoraSpec(rank, alpha, _targets(saved, set(factors.values())), bool(saved.get("use_rslora")))
    with (folder / SAFETENSORS_WEIGHTS_NAME).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return SavedAdapter(folder, base, spec, len(names) > len(factors), digest)


def _targets(saved: Mapping[str, Any], linears: Collection[str]) -> tuple[str, ...]:
    """Name suffixes of an adapter's linears: those of its configuration, or the last components of the names if it has
    a pattern or names every layer's linears one by one."""
    if saved.get("layers_to_transform") is not None or saved.get("exclude_modules"):
        return tuple(sorted(linears))
    last = tuple(sorted({linear.rpartition(".")[2] for linear in linears}))
    own = saved.get("target_modules")
    if not isinstance(own, list) or not all(names_match(linear, own) for linear in linears):
        return last  # of a pattern, say
    layers = {int(match[1]) for linear in linears if (match := _LAYER.search(linear))}
    uniform = layers == {*range(len(layers))} and len(linears) == len(layers) * len(last)
    if uniform and any(_LAYER.search(target) for target in own):
        return last
    return tuple(sorted(target for target in own if any(names_match(linear, [target]) for linear in linears)))


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, "pt") as tensors:
            names: list[Any] = list(tensors.keys())
    except SafetensorError as error:
        raise UserError(
            f"an adapter's weights must be an intact safetensors file; {file} is not ({error}); copy or export it again"
        ) from error
    return names
