"""A decoder layer's MLP with its activation in one operation."""

from qerl_kernels import silu_product
from torch import Tensor, nn

from qerl_pl.modules.lora import on_one_input

MLP_CLASSES = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
"""MLPs that compute down(act(gate(x)) * up(x)). Others stay as they are."""


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)).

    Args:
        mlp: What it takes the place of, with its linears under their names.
    """

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj = mlp.get_submodule("gate_proj")
        self.up_proj = mlp.get_submodule("up_proj")
        self.down_proj = mlp.get_submodule("down_proj")

    @property
    def on_input(self) -> tuple[nn.Module, ...]:
        """The linears that its input goes to."""
        return self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> the same shape."""
        return self.down_proj(silu_product(*on_one_input(self.on_input, x)))


def use_gated_mlps(model: nn.Module) -> None:
    """Replace the MLPs that `GatedMLP` computes."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ in MLP_CLASSES and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation"):
            model.set_submodule(name, GatedMLP(module))
