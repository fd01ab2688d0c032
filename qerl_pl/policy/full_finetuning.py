"""Full fine-tuning: layers with float32 master weights, which each product casts to the activations' data type.

Optimizer steps are below the resolution of 16 bits. An engine holds the cast weights, so that trainer and sampler
compute with the same numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from qerl_kernels.pointwise import plain_rms_norm
from qerl_kernels.selective_checkpointing import save_products
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from qerl_pl.errors import UserError
from qerl_pl.formats.dense_checkpoint import fill_dense_folder
from qerl_pl.formats.norm import Float32RMSNorm
from qerl_pl.models.families import family_of, noisy_norm_names
from qerl_pl.policy.adapter import restored_parameters
from qerl_pl.seeds import stream_seed


class MasterLinear(nn.Module):
    """y = x W^T + b with trained master weights; `weight` [N, K] is given where another layer shares it."""

    def __init__(self, linear: nn.Linear, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = _master(linear.weight) if weight is None else weight
        self.bias = None if linear.bias is None else _master(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in x's data type."""
        flat = x.reshape(-1, x.shape[-1])
        y: Tensor = _LowPrecisionLinear.apply(flat, self.weight, self.bias)
        return y.view(*x.shape[:-1], y.shape[-1])


class _LowPrecisionLinear(torch.autograd.Function):
    """Casts the weight again in backward instead of saving the copy: 2 bytes a weight less."""

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
    """Embedding with a trained master weight, in the replaced embedding's data type; a `scale` multiplies the rows."""

    def __init__(self, embedding: nn.Embedding, scale: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("scale", None if scale is None else scale.to(embedding.weight.dtype), persistent=False)
        self.scale: Tensor | None
        self.dtype, self.padding_idx = embedding.weight.dtype, embedding.padding_idx
        self.weight = _master(embedding.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., D]."""
        rows = F.embedding(ids, self.weight, self.padding_idx).to(self.dtype)
        return rows if self.scale is None else rows * self.scale


class MasterRMSNorm(Float32RMSNorm):
    """A trained norm without noise: casts before it multiplies, as an engine with a 16-bit scale does.

    With an offset it casts the weight alone, as transformers' and vLLM's norms do.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> the same shape and data type."""
        return plain_rms_norm(x, self.multiplier(self.weight.to(x.dtype)), self.eps)


def _master(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().float(), requires_grad=True)


def use_master_weights(model: PreTrainedModel) -> None:
    """Replace every layer of a causal LM that has weights by one with trained master weights, in place.

    Norms of its layers are `Float32RMSNorm` already. UserError if a layer of another kind has weights.
    """
    family = family_of(model.config.model_type)
    scale, noisy = family.embedding_scale, noisy_norm_names([name for name, _ in model.named_modules()], family)
    tied: dict[int, nn.Parameter] = {}  # embeddings that the output layer may share
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Embedding):
            embedding = MasterEmbedding(module, None if scale is None else getattr(module, scale))
            tied[id(module.weight)] = embedding.weight
            model.set_submodule(name, embedding)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, MasterLinear(module, tied.get(id(module.weight))))
        elif isinstance(module, Float32RMSNorm) and name in noisy:
            module.requires_grad_(True)
        elif isinstance(module, Float32RMSNorm):
            norm = MasterRMSNorm(module.weight, module.eps, module.offset)
            model.set_submodule(name, norm.requires_grad_(True))
        elif "weight" in module._parameters and not isinstance(module, MasterEmbedding):
            model.set_submodule(name, MasterRMSNorm.of(name, module).requires_grad_(True))
    if frozen := [name for name, parameter in model.named_parameters() if not parameter.requires_grad]:
        raise UserError(
            f"full fine-tuning trains linears, embeddings and RMSNorms; {frozen[0]} is none of them; "
            "set model.policy.finetune to lora"
        )


class FullWeights:
    """Trains every weight of a 16-bit base. `LoraAdapter` has the same methods.

    Args:
        base: The causal LM; its layers are replaced by ones with master weights.
        folder: It was loaded from.
        dtype: Data type of the weights in engines and saved models.
        reference_model: A frozen copy; None where no reference policy is needed.
    """

    result = "model"
    """Folder of a run's result."""
    state_description = ("weights", "model.policy")
    full_finetuning = True
    has_start = False
    has_dropout = False

    def __init__(
        self, base: PreTrainedModel, folder: Path, dtype: torch.dtype, reference_model: PreTrainedModel | None
    ) -> None:
        self.base, self.folder, self.dtype, self.reference_model = base, folder, dtype, reference_model
        use_master_weights(base)

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """No adapter."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """The master weights by checkpoint name."""
        return dict(self.base.named_parameters())

    def norms(self) -> dict[str, Float32RMSNorm]:
        """The layers' norms by module name."""
        norms = {name: module for name, module in self.base.named_modules() if isinstance(module, Float32RMSNorm)}
        return {name: norms[name] for name in noisy_norm_names(norms, family_of(self.base.config.model_type))}

    @contextmanager
    def reference(self) -> Iterator[PreTrainedModel]:
        """The frozen copy; UserError if none was loaded."""
        if self.reference_model is None:
            raise UserError(
                "full fine-tuning has its reference policy only where the loss needs it; got none; set the "
                "objective's beta above 0"
            )
        yield self.reference_model

    @contextmanager
    def low_precision_copies(self, dtype: torch.dtype) -> Iterator[None]:
        """Nothing: each layer casts its weight for one product, as copies of all weights would take too much memory."""
        yield

    @contextmanager
    def perturbed(self, seed: int, strength: float = 1.0) -> Iterator[None]:
        """Inside the block the weights of one decoder layer, chosen by `seed`, change at random by half of them times
        the strength."""
        layer = f".layers.{seed % self.base.config.num_hidden_layers}."
        weights = {name: weight for name, weight in self.tensors().items() if layer in name}
        with restored_parameters(weights.values()):
            with torch.no_grad():
                for name, weight in weights.items():
                    generator = torch.Generator(weight.device).manual_seed(stream_seed(seed, name))
                    noise = torch.randn(weight.shape, generator=generator, device=weight.device)
                    weight.add_(noise, alpha=0.5 * strength * weight.square().mean().sqrt().item())
            yield

    def state(self) -> dict[str, Tensor]:
        """Trained tensors by checkpoint name, detached."""
        return {name: parameter.detach() for name, parameter in self.tensors().items()}

    def save(self, folder: Path) -> None:
        """Write the full model for plain transformers, a few GiB in memory at a time."""
        trained = {name: p.detach() for name, p in self.base.named_parameters(remove_duplicate=False)}
        # Tensors that `load_base` skips are copied from the base's files.
        fill_dense_folder(self.folder, folder, self.dtype, lambda name, tensor: tensor.copy_(trained.get(name, tensor)))
