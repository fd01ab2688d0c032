"""A saved LoRA adapter that a policy starts from; how trained parameters, of an adapter or of a model, are loaded."""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.formats.quantize import local_folder
from qerl_pl.models.families import names_match
from qerl_pl.models.folder import read_config
from qerl_pl.policy.lora import LoraConfig, LoraSpec

CONFIG_NAME = "adapter_config.json"
SAFETENSORS_WEIGHTS_NAME = "adapter_model.safetensors"
"""PEFT's files, named here as its import takes long."""


def load_in_place(own: Mapping[str, Tensor], state: Mapping[str, Tensor], content: str, keys: str) -> None:
    """Copy a checkpoint's tensors into a policy's detached ones by name, in place; all or none.

    Raises:
        UserError: Names or shapes differ; it says what the `content` is, and which configuration `keys` determine it.
    """
    here, there = ({name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (own, state))
    if wrong := sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name)):
        first, got, needed = wrong[0], there.get(wrong[0], "nothing"), here.get(wrong[0], "nothing")
        raise UserError(
            f"a checkpoint must hold this policy's {content}; got other names or shapes, {len(wrong)} in all: {first} "
            f"is {got} there and {needed} here; set {keys} as in the run that wrote it"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])


@contextmanager
def restored_parameters(parameters: Collection[Tensor]) -> Iterator[None]:
    """Inside the block the parameters may change in place; afterwards they are restored, bit for bit."""
    saved = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in zip(parameters, saved, strict=True):
                parameter.copy_(before)


_FACTOR = re.compile(r"^(?:base_model\.model\.)?(.+)\.lora_[AB]\.weight$")
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_NORM = re.compile(r"\blayers\.\d+\..*norm\.weight$")
_PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the base, too
}
"""Values that an adapter of the form scaling * B A has under PEFT's keys."""
_OFF = (
    *("use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias", "alora_invocation_tokens"),
    *("layer_replication", "use_bdlora"),
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
        """The weights by PEFT's names for a model of text, on the CPU."""
        stored = load_file(self.folder / SAFETENSORS_WEIGHTS_NAME)
        return {_name_of_text(name): tensor for name, tensor in stored.items()}

    def spec(self, config: LoraConfig) -> LoraSpec:
        """The adapter's settings, with the dropout of `config`; UserError if that has another rank or alpha, say."""
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


def rename_to_multimodal(folder: Path, base: str) -> None:
    """Give a saved adapter of a text model the names that a model of text and images has for it, in place."""
    weights, settings = folder / SAFETENSORS_WEIGHTS_NAME, folder / CONFIG_NAME
    renamed = {
        name.replace(".model.model.", ".model.model.language_model.", 1): t for name, t in load_file(weights).items()
    }
    save_file(renamed, weights, metadata={"format": "pt"})
    saved = json.loads(settings.read_bytes())
    targets = "|".join(re.escape(target.removeprefix("model.")) for target in saved["target_modules"])
    # A regular expression: suffixes are names of an image encoder's linears, too.
    saved |= {"base_model_name_or_path": base, "target_modules": rf".*\blanguage_model\.(.+\.)?({targets})"}
    settings.write_text(json.dumps(saved, indent=2) + "\n")


def _name_of_text(name: str) -> str:
    """What `rename_to_multimodal` has renamed, by its own name."""
    return name.replace(".model.language_model.", ".model.", 1)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter in PEFT's format."""
    return (folder / CONFIG_NAME).is_file()


def read_adapter(path: str, key: str = "model.policy.adapter", layers: int | None = None) -> SavedAdapter:
    """Read an adapter's settings; its targets are those that its weights have.

    Args:
        path: Folder, or name on the hub, from where it is downloaded once.
        key: Configuration key of the path, for error messages.
        layers: Number of the base's layers; by default of the base that it was trained on, if that is a folder here.

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
    weights = folder / SAFETENSORS_WEIGHTS_NAME
    try:
        with safe_open(weights, "pt") as tensors:
            stored: list[str] = list(tensors.keys())
    except SafetensorError as error:
        raise UserError(
            f"an adapter's weights must be an intact safetensors file; {weights} is not ({error}); copy or export it "
            "again"
        ) from error
    names = [*map(_name_of_text, stored)]
    if names != stored:  # its targets are an expression for the stored names
        saved["target_modules"] = None
    if others := [name for name in names if not (_FACTOR.search(name) or _NORM.search(name))]:
        raise UserError(
            f"a saved adapter may hold factors of linears and scales of the layers' norms; {folder} has {others[0]}; "
            "merge it into its base with PEFT, and name that model as model.policy.path"
        )
    factors = {name: match[1] for name in names if (match := _FACTOR.search(name))}
    if layers is None and (Path(base) / "config.json").is_file():
        layers = read_config(Path(base)).get("num_hidden_layers")
    spec = LoraSpec(rank, alpha, _targets(saved, set(factors.values()), layers), bool(saved.get("use_rslora")))
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return SavedAdapter(folder, base, spec, len(names) > len(factors), digest)


def _targets(saved: Mapping[str, Any], linears: Collection[str], layers: int | None) -> tuple[str, ...]:
    """Targets that name an adapter's `linears` in a base of so many layers, None for an unknown number.

    The last components of the names where every layer has the same; the configuration's own where it lists suffixes;
    else every linear's full name.
    """
    last = tuple(sorted({linear.rpartition(".")[2] for linear in linears}))
    found = {int(match[1]) for linear in linears if (match := _LAYER.search(linear))}
    own = saved.get("target_modules")
    some = saved.get("layers_to_transform") is not None or saved.get("exclude_modules")
    if layers is None and isinstance(own, str):  # of all layers, if it would match those of one more
        following = (_LAYER.sub(f"layers.{len(found)}.", linear) for linear in linears)
        some = some or not all(re.fullmatch(own, linear) for linear in following)
    every = found == {*range(layers or len(found))} and len(linears) == len(found) * len(last)
    if not some and isinstance(own, list) and all(names_match(linear, own) for linear in linears):
        if not (every and any(_LAYER.search(target) for target in own)):
            # A linear that is named with its layer, and has no weights, stays: they are not complete.
            used = [t for t in own if _LAYER.search(t) or any(names_match(linear, [t]) for linear in linears)]
            return tuple(sorted(used))
    return last if every and (layers is not None or not some) else tuple(sorted(linears))
