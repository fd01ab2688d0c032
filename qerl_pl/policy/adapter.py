"""The trained LoRA adapter (factors, low-precision copies, checkpoints), and a saved one that a policy starts from.

Helpers beside it are shared with full fine-tuning.
"""

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from peft import get_peft_model_state_dict
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, ModulesToSaveWrapper
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from qerl_pl.errors import UserError
from qerl_pl.formats.norm import Float32RMSNorm
from qerl_pl.formats.quantize import local_folder
from qerl_pl.models.families import family_of, names_match, noisy_norm_names
from qerl_pl.models.folder import read_config
from qerl_pl.policy.delta_net import PackedDeltaNet
from qerl_pl.policy.lora import ADAPTER, FrozenLinear, LoraConfig, LoraLinear, LoraSpec, can_fuse_lora, check_targets
from qerl_pl.policy.packed_layers import GatedMLP, PackedAttention
from qerl_pl.seeds import stream_seed


def load_in_place(own: Mapping[str, Tensor], state: Mapping[str, Tensor], content: str, keys: str) -> None:
    """Copy a checkpoint's tensors into a policy's detached ones, in place; all or none.

    Args:
        own: Tensors of the policy by checkpoint name.
        state: Tensors of the checkpoint.
        content: Of the state, for the error message.
        keys: Configuration keys that determine it.

    Raises:
        UserError: Names or shapes differ.
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


def cast_master_weights(groups: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Low-precision copies, bit-equal to `to(dtype)`, in a few kernels forward and backward.

    The gradients of all master weights are computed once the backward pass has reached every copy.

    Args:
        groups: Master weights of one device and one data type; the members of a group differ in their rows only.
        dtype: Another data type.

    Returns:
        The copies of each group, concatenated by rows.
    """
    return _CastMasterWeights.apply(dtype, groups, *(master for group in groups for master in group))


class _CastMasterWeights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, groups: Sequence[Sequence[Tensor]], *masters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.dtype, ctx.rows = masters[0].dtype, [[len(master) for master in group] for group in groups]
        ctx.set_materialize_grads(False)
        shapes = [(sum(map(len, group)), *group[0].shape[1:]) for group in groups]
        copies = [masters[0].new_empty(shape, dtype=dtype) for shape in shapes]
        slices = [part for copy, rows in zip(copies, ctx.rows, strict=True) for part in copy.split(rows)]
        torch._foreach_copy_(slices, masters)
        return tuple(copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        slices: list[Tensor | None] = []
        for grad, rows in zip(grads, ctx.rows, strict=True):
            slices += [None] * len(rows) if grad is None else grad.split(rows)
        low = [grad for grad in slices if grad is not None]
        wide = [torch.empty_like(grad, dtype=ctx.dtype) for grad in low]
        if wide:
            torch._foreach_copy_(wide, low)
        remaining = iter(wide)
        return None, None, *(None if grad is None else next(remaining) for grad in slices)


class LoraAdapter:
    """Trains low-rank factors over a frozen base, and copies of its norms. `FullWeights` has the same methods.

    PEFT's wrapping is private to this class.

    Args:
        base: The frozen causal LM; the adapter is attached to it in place.
        config: Of the factors; A is drawn from PyTorch's generator, B is zero: the policy starts as its base.
        train_norms: Train copies of the layers' norms too; PEFT saves them with the adapter.
        base_name: Folder or hub name of the base, as the user gave it.

    Raises:
        UserError: As `check_targets`.
    """

    result = "adapter"
    """Folder of a run's result."""
    state_description = ("adapter", "model.policy.lora and train_norms")
    """Content of the state, and the configuration keys that determine it, for error messages."""
    full_finetuning = False

    def __init__(self, base: PreTrainedModel, config: LoraSpec, train_norms: bool, base_name: str) -> None:
        check_targets(base, config)
        self.config, self.base, self._family = config, base, family_of(base.config.model_type)
        peft_config = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]
            lora_dropout=config.dropout,
            target_modules=list(config.targets),
            use_rslora=config.use_rslora,
            modules_to_save=list(self._family.noisy_norms) if train_norms else None,
            bias="none",
            task_type="CAUSAL_LM",
        )
        peft_config._register_custom_module(dict.fromkeys((FrozenLinear, nn.Linear), LoraLinear))
        # Float32 factors over a 16-bit base: AdamW steps are below the resolution of bfloat16.
        self.model = peft.PeftModelForCausalLM(base, peft_config, adapter_name=ADAPTER, autocast_adapter_dtype=True)
        self.model.peft_config[ADAPTER].base_model_name_or_path = base_name
        self._linears = {name: module for name, module in base.named_modules() if isinstance(module, LoraLinear)}
        blocks = PackedAttention | PackedDeltaNet | GatedMLP
        self._blocks = [module for module in base.modules() if isinstance(module, blocks)]
        self._start: list[Tensor] = []

    @property
    def has_dropout(self) -> bool:
        """Whether forward passes in training are random."""
        return self.config.dropout > 0.0

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The trained A [r, in] and B [out, r] by the linear's name in the base."""
        return {name: linear.factors() for name, linear in self._linears.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Trained norm scales [hidden] by checkpoint name."""
        norms = {name: m for name, m in self.base.named_modules() if isinstance(m, ModulesToSaveWrapper)}
        return {f"{name}.weight": norm.modules_to_save[ADAPTER].get_parameter("weight") for name, norm in norms.items()}

    def norms(self) -> dict[str, Float32RMSNorm]:
        """The layers' norms that a forward pass uses, by module name in the base."""
        modules = dict(self.base.named_modules())
        found = {}
        for name in noisy_norm_names(modules, self._family):
            norm = modules[name]
            norm = norm.modules_to_save[ADAPTER] if isinstance(norm, ModulesToSaveWrapper) else norm
            assert isinstance(norm, Float32RMSNorm)
            found[name] = norm
        return found

    def start_from(self, start: Mapping[str, Tensor]) -> None:
        """Load a saved adapter, and keep a copy as the reference policy. Norms that it lacks start as the base's.

        Args:
            start: Its tensors by PEFT's names.

        Raises:
            UserError: Names or shapes differ.
        """
        own = self.state()
        norms = {name: tensor for name, tensor in own.items() if ".lora_" not in name}
        load_in_place(own, norms | dict(start), self.state_description[0], "model.policy.adapter and model.policy.path")
        self._start = [parameter.detach().clone() for parameter in self._parameters()]

    @property
    def has_start(self) -> bool:
        """Whether the reference policy is a saved adapter, which training started from; or else the base."""
        return bool(self._start)

    @contextmanager
    def reference(self) -> Iterator[PreTrainedModel]:
        """Inside the block the model it returns is the reference policy, without gradients if that has an adapter."""
        if not self._start:
            with self.model.disable_adapter():
                yield self.base
            return
        self._exchange_with_start()
        try:
            with torch.no_grad():
                yield self.base
        finally:
            self._exchange_with_start()

    def _exchange_with_start(self) -> None:
        """Exchange the memory of the trained parameters and of their start; nothing is copied."""
        for index, parameter in enumerate(self._parameters()):
            parameter.data, self._start[index] = self._start[index], parameter.data

    def _parameters(self) -> list[Tensor]:
        linears = (factor for linear in self._linears.values() for factor in linear.factors())
        return [*linears, *self.tensors().values()]

    @contextmanager
    def low_precision_copies(self, dtype: torch.dtype) -> Iterator[None]:
        """Inside the block, a single forward pass, the linears use copies of their factors in `dtype`.

        All copies, and the gradients of all master weights, are made together: the same numbers as if each linear cast
        its own, in a few kernels. Linears that `can_fuse_lora` get one concatenated A. Recomputation in the backward
        pass happens outside the block and casts the master weights again, unless the copies were saved.
        """
        groups = [block.shared_input for block in self._blocks if can_fuse_lora(block.shared_input)]
        fused = {linear for group in groups for linear in group}
        groups += [(linear,) for linear in self._linears.values() if not (linear.disable_adapters or linear in fused)]
        linears = [linear for group in groups for linear in group]
        a = [[linear.factors()[0] for linear in group] for group in groups]
        b = [[linear.factors()[1]] for linear in linears]
        if all(master.dtype == dtype for masters in (*a, *b) for master in masters):
            yield
            return
        copies = cast_master_weights(a + b, dtype)
        a_copies = [copy for copy, group in zip(copies, groups, strict=False) for _ in group]
        b_copies = copies[len(groups) :]
        try:
            for linear, a_copy, b_copy in zip(linears, a_copies, b_copies, strict=True):
                linear.low_precision_factors = a_copy, b_copy
            yield
        finally:
            for linear in linears:
                linear.low_precision_factors = None

    @contextmanager
    def perturbed(self, seed: int, strength: float = 1.0) -> Iterator[None]:
        """Inside the block every B is random by `seed`.

        At strength 1 it changes the output of a linear with random weights by about half of it, and with pretrained
        ones, where some activations are very large, by more.
        """
        matrices = {name: b for name, (_, b) in self.factors().items()}
        std = strength / (self.config.scaling * math.sqrt(self.config.rank))
        with restored_parameters(matrices.values()):
            with torch.no_grad():
                for name, b in matrices.items():
                    b.normal_(std=std, generator=torch.Generator(b.device).manual_seed(stream_seed(seed, name)))
            yield

    def state(self) -> dict[str, Tensor]:
        """Trained tensors by PEFT's names, detached."""
        # Not "auto", which asks the hub whether the embeddings are the base's own.
        state = get_peft_model_state_dict(self.model, adapter_name=ADAPTER, save_embedding_layers=False)
        return {name: tensor.detach() for name, tensor in state.items()}

    def save(self, folder: Path) -> None:
        """Write the adapter in PEFT's format."""
        self.model.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # an empty model card


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


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter in PEFT's format."""
    return (folder / CONFIG_NAME).is_file()


def read_adapter(path: str, key: str = "model.policy.adapter", layers: int | None = None) -> SavedAdapter:
    """Read an adapter's settings; its targets are those that its weights have.

    Args:
        path: Folder, or name on the hub, from where it is downloaded once.
        key: Configuration key of the path, for error messages.
        layers: Of the base; by default those of the base that it was trained on, if that is a folder here.

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
    use_rslora = bool(saved.get("use_rslora"))
    if layers is None and (Path(base) / "config.json").is_file():
        layers = read_config(Path(base)).get("num_hidden_layers")
    spec = LoraSpec(rank, alpha, _targets(saved, set(factors.values()), layers), use_rslora)
    with (folder / SAFETENSORS_WEIGHTS_NAME).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return SavedAdapter(folder, base, spec, len(names) > len(factors), digest)


def _targets(saved: Mapping[str, Any], linears: Collection[str], layers: int | None) -> tuple[str, ...]:
    """Name suffixes of an adapter's linears, as its weights have them.

    The last components of the names where every layer has the same; the configuration's own where it lists suffixes;
    else every linear's full name. `layers` are the base's; None where it is not known.
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


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, "pt") as tensors:
            names: list[Any] = list(tensors.keys())
    except SafetensorError as error:
        raise UserError(
            f"an adapter's weights must be an intact safetensors file; {file} is not ({error}); copy or export it again"
        ) from error
    return names
