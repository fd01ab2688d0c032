"""RMSNorm with a float32 scale, over activations of any precision."""

from typing import Self

from qerl_kernels import rms_norm
from torch import Tensor, nn

from qerl_pl.errors import UserError
from qerl_pl.formats.architecture import noisy_norm_names

NORM_CLASSES = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""Norms that compute scale * x / sqrt(mean(x^2) + eps). Others, such as Gemma's (1 + scale), are not these."""


class Float32RMSNorm(nn.Module):
    """scale * x / sqrt(mean(x^2) + eps), computed in float32 and rounded once to x's data type.

    The engines compute their norms in this way too (their scales carry noise below 16-bit resolution), so trainer and
    sampler round alike; and a trained scale moves by steps that 16 bits would swallow.

    Args:
        scale: [hidden].
        eps: Added to the mean square.
    """

    def __init__(self, scale: Tensor, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(scale.detach().float(), requires_grad=False)
        self.noise: Tensor | None = None
        """Added to the scale in the forward pass, float32 [hidden]."""

    @classmethod
    def of(cls, name: str, norm: nn.Module) -> Self:
        """Replacement of a transformers RMSNorm.

        Raises:
            UserError: The module is no RMSNorm that this class computes.
        """
        if type(norm).__name__ not in NORM_CLASSES:
            raise UserError(
                f"noise and trained norms need an RMSNorm of {', '.join(NORM_CLASSES)}; {name} is a "
                f"{type(norm).__name__}; use a Llama, Mistral, Qwen2 or Qwen3 model"
            )
        assert isinstance(norm.variance_epsilon, float)
        return cls(norm.get_parameter("weight"), norm.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> the same shape and data type."""
        return rms_norm(x, self.weight if self.noise is None else self.weight + self.noise, self.eps)


def use_float32_norms(model: nn.Module) -> None:
    """Replace the norms that AQN perturbs (those before q, k, v and before gate, up) by `Float32RMSNorm`.

    Raises:
        UserError: The model has none, or they are no RMSNorm of a known class.
    """
    modules = dict(model.named_modules())
    names = noisy_norm_names(modules)
    if not names:
        raise UserError(
            "the base model must have input_layernorm and post_attention_layernorm in its layers; "
            f"{type(model).__name__} has none; use a Llama, Mistral, Qwen2 or Qwen3 model"
        )
    for name in names:
        model.set_submodule(name, Float32RMSNorm.of(name, modules[name]))
