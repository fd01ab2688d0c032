"""RMSNorm with a float32 scale, over activations of any precision."""

from typing import Self

from qerl_kernels import rms_norm
from torch import Tensor, nn
from transformers import PreTrainedModel

from qerl_pl.errors import UserError
from qerl_pl.models.families import family_of, family_of_class, noisy_norm_names


class Float32RMSNorm(nn.Module):
    """(weight + offset) * x / sqrt(mean(x^2) + eps), computed in float32 and rounded once to x's data type.

    The engines compute their norms in this way too (their scales carry noise below 16-bit resolution), so trainer and
    sampler round alike; and a trained scale moves by steps that 16 bits would swallow.

    Args:
        weight: [hidden].
        eps: Added to the mean square.
        offset: Offset of the family's norms: 0, or 1 where the norm multiplies by 1 + weight.
    """

    def __init__(self, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(weight.detach().float(), requires_grad=False)

    @classmethod
    def of(cls, name: str, norm: nn.Module) -> Self:
        """Replacement of a transformers RMSNorm; UserError if the module is none that this class computes."""
        family = family_of_class(type(norm).__name__, "RMSNorm")
        if family is None:
            raise UserError(
                f"noise and trained norms need an RMSNorm of a known family; {name} is a {type(norm).__name__}: "
                "describe its family as docs/adding-a-family.md shows, or use another model"
            )
        return cls(norm.get_parameter("weight"), float(getattr(norm, family.norm_eps)), family.norm_offset)

    def multiplier(self, weight: Tensor) -> Tensor:
        """The scale of a weight [hidden], which noise can be relative to."""
        return weight.float() + self.offset if self.offset else weight

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> the same shape and data type."""
        return rms_norm(x, self.multiplier(self.weight), self.eps)


def use_float32_norms(model: PreTrainedModel) -> None:
    """Replace the norms that AQN perturbs (those before q, k, v and before gate, up) by `Float32RMSNorm`.

    Of a family whose norms compute in float32 as it does, all are replaced: the same numbers by a fused kernel.

    Raises:
        UserError: The model is of no known family, has none, or they are no RMSNorm of its family.
    """
    modules = dict(model.named_modules())
    family = family_of(model.config.model_type)
    names = noisy_norm_names(modules, family)
    assert names, f"{type(model).__name__} has no layers"
    if family.float32_norms:
        norms = {name: one for name, one in modules.items() if type(one).__name__ == f"{family.classes}RMSNorm"}
        names = [name for name, norm in norms.items() if "weight" in norm._parameters]
    for name in names:
        model.set_submodule(name, Float32RMSNorm.of(name, modules[name]))
