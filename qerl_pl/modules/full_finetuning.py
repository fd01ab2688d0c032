"""Layers whose weights train: kept in float32, rounded to the activations' data type where they are used.

An optimizer's steps are below the resolution of 16 bits; and what an engine holds is the rounded weight, so trainer and
sampler compute with the same numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from qerl_kernels.selective_checkpointing import save_products
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from qerl_pl.errors import UserError
from qerl_pl.formats.dense_checkpoint import fill_dense_folder
from qerl_pl.formats.norm import Float32RMSNorm
from qerl_pl.modules.adapter import load_in_place, restored_parameters
from qerl_pl.persistence.random_state import stream_seed


class MasterLinear(nn.Module):
    """y = x W^T + b, both trained.

    Args:
        linear: What it replaces.
        weight: W [N, K], where it is another layer's too; by default a copy of the linear's.
    """

    def __init__(self, linear: nn.Linear, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = _master(linear.weight) if weight is None else weight
        self.bias = None if linear.bias is None else _master(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in x's data type."""
        flat = x.reshape(-1, x.shape[-1])
        y: Tensor = _RoundedLinear.apply(flat, self.weight, self.bias)
        return y.view(*x.shape[:-1], y.shape[-1])


class _RoundedLinear(torch.autograd.Function):
    """The rounded weight lives as long as one product and is made again in backward: 2 bytes a weight less."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        low = None if bias is None else bias.to(x.dtype)
        return save_products(lambda: (F.linear(x, weight.to(x.dtype), low),))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad
        dx = torch.mm(grad, weight.to(grad.dtype)) if needed[0] else None
        dw = torch.mm(grad.t(), x).to(weight.dtype) if needed[1] else None
        db = grad.sum(0, dtype=weight.dtype) if needed[2] else None
        return dx, dw, db


class MasterEmbedding(nn.Module):
    """Rows of a trained table.

    Args:
        embedding: What it replaces; its data type is the result's.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.dtype, self.padding_idx = embedding.weight.dtype, embedding.padding_idx
        self.weight = _master(embedding.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., D]."""
        return F.embedding(ids, self.weight, self.padding_idx).to(self.dtype)


class MasterRMSNorm(Float32RMSNorm):
    """A norm that takes no noise: an engine holds its scale in 16 bits and rounds before it multiplies, so this does.

    Its scale trains.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> the same shape and data type."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


def _master(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().float(), requires_grad=True)


def use_master_weights(model: nn.Module) -> None:
    """Replace every layer of a causal language model that has weights, one by one, and let them train.

    Args:
        model: Its layers' norms are `Float32RMSNorm` already.

    Raises:
        UserError: It has weights in a layer of another kind.
    """
    tables: dict[int, nn.Parameter] = {}  # that the linear to the vocabulary may share
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Embedding):
            made = MasterEmbedding(module)
            tables[id(module.weight)] = made.weight
            model.set_submodule(name, made)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, MasterLinear(module, tables.get(id(module.weight))))
        elif isinstance(module, Float32RMSNorm):
            module.requires_grad_(True)
        elif "weight" in module._parameters and not isinstance(module, MasterEmbedding):
            norm = MasterRMSNorm.of(name, module)
            model.set_submodule(name, norm.requires_grad_(True))
    if left := [name for name, parameter in model.named_parameters() if not parameter.requires_grad]:
        raise UserError(
            f"full fine-tuning trains linears, embeddings and RMSNorms; {left[0]} is none of them; "
            "set model.policy.finetune to lora"
        )


class FullWeights:
    """Trains every weight of a 16-bit base.

    Args:
        base: The causal LM; its layers are replaced by ones that train.
        folder: Where it is from.
        dtype: In which engines and saved models hold the weights.
        reference: A frozen copy; None where nothing asks for the reference policy.
    """

    result = "model"
    """Folder of a run that holds what was learned."""
    random = False
    """Whether two forward passes in training differ."""
    full_finetuning = True
    """Whether all of the model trains: then nothing is left to switch off."""

    def __init__(
        self, base: PreTrainedModel, folder: Path, dtype: torch.dtype, reference: PreTrainedModel | None
    ) -> None:
        self.base, self.folder, self.dtype, self.reference = base, folder, dtype, reference
        self.layers = base.config.num_hidden_layers
        use_master_weights(base)

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """No adapter."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Every weight by its checkpoint name, the trained parameters themselves."""
        return dict(self.base.named_parameters())

    @contextmanager
    def off(self) -> Iterator[PreTrainedModel]:
        """The frozen copy.

        Raises:
            UserError: None was loaded.
        """
        if self.reference is None:
            raise UserError(
                "full fine-tuning has its reference policy only where the loss needs it; found none; set the "
                "objective's beta above 0"
            )
        yield self.reference

    @contextmanager
    def rounded(self, dtype: torch.dtype) -> Iterator[None]:
        """Each layer rounds its own weight, which is too large to be kept beside the master."""
        yield

    @contextmanager
    def perturbed(self, seed: int) -> Iterator[None]:
        """Inside the block the weights of one decoder layer, another by each seed, are changed by half of themselves.

        Args:
            seed: Of the choice and of the random numbers.
        """
        place = f".layers.{seed % self.layers}."
        changed = {name: parameter for name, parameter in self.tensors().items() if place in name}
        with restored_parameters(changed.values()):
            with torch.no_grad():
                for name, parameter in changed.items():
                    generator = torch.Generator(parameter.device).manual_seed(stream_seed(seed, name))
                    drawn = torch.randn(parameter.shape, generator=generator, device=parameter.device)
                    parameter.add_(drawn, alpha=0.5 * parameter.square().mean().sqrt().item())
            yield

    def state(self) -> dict[str, Tensor]:
        """Everything that training changes, by checkpoint name, detached."""
        return {name: parameter.detach() for name, parameter in self.tensors().items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave.

        Raises:
            UserError: Names or shapes are another model's.
        """
        load_in_place(self.state(), state, "weights", "model.policy")

    def save(self, folder: Path) -> None:
        """Write the whole model as plain transformers loads it, a few GiB in memory at a time."""
        trained = {name: p.detach() for name, p in self.base.named_parameters(remove_duplicate=False)}
        # All but what `load_base` leaves out of a checkpoint: that stays as it is.
        fill_dense_folder(self.folder, folder, self.dtype, lambda name, tensor: tensor.copy_(trained.get(name, tensor)))
