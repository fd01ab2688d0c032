"""The two modules through which `TransformersEngine` changes a base model: LoRA on a linear, and an RMSNorm whose
scale is float32."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qerl_pl.errors import UserError

NORM_CLASSES = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""Norms that compute scale * x / sqrt(mean(x^2) + eps). Others, such as Gemma's (1 + scale), are not these."""


class LoRALinear(nn.Module):
    """base(x) + B A x, with the adapter's scaling folded into B; A [r, in], B [out, r] in the base's data type."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.enabled = False
        self.register_buffer("a", base.weight.new_zeros(rank, base.in_features))
        self.register_buffer("b", base.weight.new_zeros(base.out_features, rank))
        self.a: Tensor
        self.b: Tensor

    @torch.no_grad()
    def write(self, a: Tensor, b: Tensor, scaling: float) -> None:
        """Take over an adapter's A [r, in] and B [out, r] as copies."""
        self.a.copy_(a)
        self.b.copy_(b * scaling)
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        out: Tensor = self.base(x)
        return out + F.linear(F.linear(x, self.a), self.b) if self.enabled else out


class Float32Norm(nn.Module):
    """RMSNorm that normalises and scales in float32 and casts the result back.

    A bfloat16 scale near 1 moves in steps of 2^-7, which swallows the noise of most of the schedule.
    """

    def __init__(self, scale: Tensor, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("base", scale.detach().float().clone())
        self.register_buffer("clean", self.base.clone())
        self.register_buffer("scale", self.base.clone())
        self.base: Tensor
        self.clean: Tensor
        self.scale: Tensor

    @classmethod
    def of(cls, name: str, norm: nn.Module) -> "Float32Norm":
        """Replacement of a transformers RMSNorm.

        Raises:
            UserError: The module is no RMSNorm that this class computes.
        """
        if type(norm).__name__ not in NORM_CLASSES:
            raise UserError(
                f"noise and trained norms need an RMSNorm of {', '.join(NORM_CLASSES)}; {name} is a "
                f"{type(norm).__name__}: use a Llama, Mistral, Qwen2 or Qwen3 model"
            )
        scale, eps = norm.get_parameter("weight"), norm.variance_epsilon
        assert isinstance(eps, float)
        return cls(scale, eps)

    @torch.no_grad()
    def write(self, trained: Tensor | None, noise: Tensor | None) -> None:
        """Set the scale [hidden] to (the trained scale, or the base's) + noise."""
        self.clean.copy_(self.base if trained is None else trained)
        self.scale.copy_(self.clean if noise is None else self.clean + noise.to(self.clean.device))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> the same shape and data type."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.scale * wide).to(x.dtype)
