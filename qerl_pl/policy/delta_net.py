"""Gated delta nets over packed sequences, which never mix."""

from typing import Any

from qerl_kernels import gated_delta_rule, rms_norm
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig

from qerl_pl.errors import UserError
from qerl_pl.models.families import DELTA_NET, Family, family_of_class
from qerl_pl.policy.lora import shared_input_linears
from qerl_pl.policy.packing import Packing

_ATTENTION = {"full_attention", "sliding_attention"}
"""Kinds of layers that mix tokens by attention alone."""


class PackedDeltaNet(nn.Module):
    """A gated delta net over packed sequences, with fused LoRA products.

    out(norm(gated_delta_rule(qkv(x), decay(a(x)), sigmoid(b(x)))) * silu(z(x))) with the norm of each head, in float32.
    The layers and parameters of the replaced transformers module become this module's, under the same names.
    """

    A_log: Tensor
    dt_bias: Tensor
    conv1d: nn.Module
    norm: nn.Module
    out_proj: nn.Module

    def __init__(self, net: Any) -> None:
        super().__init__()
        for name, child in net.named_children():
            self.add_module(name, child)
        self.A_log, self.dt_bias = net.A_log, net.dt_bias
        self._key_heads, self._key_size = net.num_k_heads, net.head_k_dim
        self._eps = float(net.layer_norm_epsilon)

    @property
    def shared_input(self) -> tuple[nn.Module, ...]:
        """The linears on the block's input."""
        return tuple(self.get_submodule(name) for name in DELTA_NET[:4])

    def forward(self, hidden_states: Tensor, packing: Packing, **_: Any) -> Tensor:
        """hidden_states [1, S, hidden] -> the same shape."""
        assert len(hidden_states) == 1
        x = hidden_states.view(hidden_states.shape[1:])
        qkv, z, b, a = shared_input_linears(self.shared_input, x)
        log_decay = -self.A_log.exp() * functional.softplus(a.float() + self.dt_bias)
        out = gated_delta_rule(
            qkv,
            self.conv1d.get_parameter("weight").squeeze(1),
            log_decay,
            b.sigmoid(),
            self._key_heads,
            self._key_size,
            packing.cu_seqlens,
            packing.max_seqlen,
        )
        normed = rms_norm(out.float(), self.norm.get_parameter("weight"), self._eps)
        gated = normed * functional.silu(z.float()).view(normed.shape)
        return self.out_proj(gated.to(x.dtype).flatten(1)).view(hidden_states.shape)


def use_packed_delta_nets(model: nn.Module, config: PretrainedConfig, family: Family) -> None:
    """Replace the gated delta nets of a family by `PackedDeltaNet`, in place.

    Raises:
        UserError: Layers that are neither these nor attention remain: they would mix the packed sequences.
    """
    nets = []
    if family.delta_net is not None:
        nets = [name for name, net in model.named_modules() if family_of_class(type(net).__name__, "GatedDeltaNet")]
    for name in nets:
        model.set_submodule(name, PackedDeltaNet(model.get_submodule(name)))
    others = [kind for kind in getattr(config, "layer_types", None) or () if kind not in _ATTENTION]
    if len(others) > len(nets):
        raise UserError(
            f"layers must keep packed sequences apart; {len(others) - len(nets)} layers of the {family.model_type} are "
            f"{others[0]}, which transformers computes across them: describe them as docs/adding-a-family.md shows"
        )
