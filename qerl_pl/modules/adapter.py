"""What every way to train does with its parameters: takes over a checkpoint's, and gives back changed ones."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import ModulesToSaveWrapper
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from qerl_pl.errors import UserError
from qerl_pl.formats.norm import Float32RMSNorm
from qerl_pl.modules.lora import ADAPTER, LoraConfig, LoraLinear, attach_lora, can_fuse_lora
from qerl_pl.modules.packed_layers import GatedMLP, PackedAttention
from qerl_pl.persistence.random_state import stream_seed


def load_in_place(own: Mapping[str, Tensor], state: Mapping[str, Tensor], what: str, keys: str) -> None:
    """Copy a checkpoint's tensors into a policy's own, all of them or, where one does not fit, none.

    Args:
        own: Detached, by checkpoint name; written in place.
        state: The checkpoint's.
        what: Trains, for the message.
        keys: Of the configuration that say which names and shapes there are, for the message.

    Raises:
        UserError: Names or shapes differ.
    """
    shapes, found = ({name: tuple(tensor.shape) for name, tensor in one.items()} for one in (own, state))
    if wrong := sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name)):
        has, should = (one.get(wrong[0], "nothing") for one in (found, shapes))
        raise UserError(
            f"a checkpoint must hold this policy's {what}; found other names or shapes, {len(wrong)} in all: "
            f"{wrong[0]} is {has} there and {should} here; set {keys} as in the run that wrote it"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])


@contextmanager
def restored_parameters(parameters: Collection[Tensor]) -> Iterator[None]:
    """Inside the block the parameters may be changed in place; after it they are what they were, bit for bit."""
    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in zip(parameters, kept, strict=True):
                parameter.copy_(before)


def cast_together(groups: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What `to(dtype)` gives for each, bit for bit, in a few launches for all of them, forward and backward.

    The masters get their gradients together, when the backward pass has come to the last of them.

    Args:
        groups: The masters, on one device and of one data type, another than the copies'. Those of a group are equal
            but for their rows.
        dtype: Of the copies.

    Returns:
        The copies of each group, one above the other in one tensor.
    """
    return _Rounded.apply(dtype, groups, *(master for group in groups for master in group))


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, groups: Sequence[Sequence[Tensor]], *masters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.dtype, ctx.rows = masters[0].dtype, [[len(master) for master in group] for group in groups]
        ctx.set_materialize_grads(False)
        made = [
            group[0].new_empty((sum(rows), *group[0].shape[1:]), dtype=dtype)
            for group, rows in zip(groups, ctx.rows, strict=True)
        ]
        parts = [
            part for full_finetuning, rows in zip(made, ctx.rows, strict=True) for part in _parts(full_finetuning, rows)
        ]
        torch._foreach_copy_(parts, masters)
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        parts = [part for grad, rows in zip(grads, ctx.rows, strict=True) for part in _parts(grad, rows)]
        low = [part for part in parts if part is not None]
        made = [torch.empty_like(part, dtype=ctx.dtype) for part in low]
        if made:
            torch._foreach_copy_(made, low)
        wide = iter(made)
        return None, None, *(None if part is None else next(wide) for part in parts)


def _parts(full_finetuning: Tensor | None, rows: list[int]) -> Sequence[Any]:
    """A group's members, or their gradients, out of what is one above the other."""
    if full_finetuning is None:
        return [None] * len(rows)
    return [full_finetuning] if len(rows) == 1 else full_finetuning.split(rows)


class LoraAdapter:
    """Trains low-rank factors over a frozen base, and copies of its norms.

    All that is known of PEFT's wrapping is known here. Another way to train has the same methods.

    Args:
        base: The frozen causal LM; what is trained is put into it.
        config: Of the factors; their A is drawn from PyTorch's generator.
        train_norms: Train the layers' norms too.
        base_name: Folder or hub name of the base, as the user gave it.
    """

    result = "adapter"
    """Folder of a run that holds what was learned."""
    full_finetuning = False
    """Whether all of the model trains: then nothing is left to switch off."""

    def __init__(self, base: PreTrainedModel, config: LoraConfig, train_norms: bool, base_name: str) -> None:
        self.config = config
        self.base = base
        self.model: PeftModel = attach_lora(base, config, train_norms)
        self.model.peft_config[ADAPTER].base_model_name_or_path = base_name
        self._linears = [module for module in base.modules() if isinstance(module, LoraLinear)]
        self._sharing = [module for module in base.modules() if isinstance(module, PackedAttention | GatedMLP)]

    @property
    def random(self) -> bool:
        """Whether two forward passes in training differ."""
        return self.config.dropout > 0.0

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A [r, in] and B [out, r] by the linear's name in the base, the trained parameters themselves."""
        modules = self.base.named_modules()
        return {name: module.factors() for name, module in modules if isinstance(module, LoraLinear)}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are trained whole, by their checkpoint name: norm scales [hidden]."""
        found: dict[str, Tensor] = {}
        for name, module in self.base.named_modules():
            if isinstance(module, ModulesToSaveWrapper):
                norm = module.modules_to_save[ADAPTER]
                assert isinstance(norm, Float32RMSNorm)
                found[f"{name}.weight"] = norm.weight
        return found

    @contextmanager
    def off(self) -> Iterator[PreTrainedModel]:
        """The model, which is its base inside the block."""
        with self.model.disable_adapter():
            yield self.base

    @contextmanager
    def rounded(self, dtype: torch.dtype) -> Iterator[None]:
        """Inside the block, which is to be a single forward pass, all linears have copies of their factors in `dtype`.

        They are made together, and so are the masters' gradients of theirs: the same numbers as where each linear
        rounds its own, in few launches. The A of those that `can_fuse_lora` are made one above the other. What a backward
        pass recomputes is outside of the block and rounds the masters, unless the rounded ones were kept.
        """
        groups = [linears for linears in (module.on_input for module in self._sharing) if can_fuse_lora(linears)]
        grouped = {linear for group in groups for linear in group}
        groups += [(one,) for one in self._linears if not (one.disable_adapters or one in grouped)]
        linears = [linear for group in groups for linear in group]
        first = [[linear.factors()[0] for linear in group] for group in groups]
        second = [[linear.factors()[1]] for linear in linears]
        if all(master.dtype == dtype for masters in (*first, *second) for master in masters):
            yield
            return
        copies = cast_together(first + second, dtype)
        try:
            of_group = [a for a, group in zip(copies, groups, strict=False) for _ in group]
            for linear, a, b in zip(linears, of_group, copies[len(groups) :], strict=True):
                linear.rounded = a, b
            yield
        finally:
            for linear in linears:
                linear.rounded = None

    @contextmanager
    def perturbed(self, seed: int) -> Iterator[None]:
        """Inside the block B of every adapter is random, and changes each product by some half of itself.

        Args:
            seed: Of the random numbers.
        """
        matrices = {name: b for name, (_, b) in self.factors().items()}
        std = 1 / (self.config.scaling * math.sqrt(self.config.rank))
        with restored_parameters(matrices.values()):
            with torch.no_grad():
                for name, b in matrices.items():
                    b.normal_(std=std, generator=torch.Generator(b.device).manual_seed(stream_seed(seed, name)))
            yield

    def state(self) -> dict[str, Tensor]:
        """Everything that training changes, by PEFT's names, detached."""
        # Not "auto", which asks the hub whether the base's embeddings are the model's own.
        state = get_peft_model_state_dict(self.model, adapter_name=ADAPTER, save_embedding_layers=False)
        return {name: tensor.detach() for name, tensor in state.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave.

        Raises:
            UserError: Names or shapes are another adapter's.
        """
        load_in_place(self.state(), state, "adapter", "model.policy.lora and train_norms")

    def save(self, folder: Path) -> None:
        """Write it in PEFT's format."""
        self.model.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # an empty model card
