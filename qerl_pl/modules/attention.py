"""A decoder layer's attention on packed sequences, from the projections to the result token by token."""

from collections.abc import Callable, Mapping
from typing import Any

from qerl_kernels import rotary
from torch import Tensor, nn

from qerl_pl.modules.lora import on_one_input
from qerl_pl.modules.packing import Packing, attention_of_rows

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
NORMS = {"q_norm", "k_norm"}
WINDOWS: Mapping[str, Callable[[Any], int | None]] = {
    "LlamaAttention": lambda attention: None,
    "MistralAttention": lambda attention: attention.config.sliding_window,
    "Qwen2Attention": lambda attention: attention.sliding_window,
    "Qwen3Attention": lambda attention: attention.sliding_window,
}
"""Attentions that compute o(attend(rotate(norm(q(x))), rotate(norm(k(x))), v(x))), or without norms, with their sliding
window. Others stay as they are."""


class PackedAttention(nn.Module):
    """Attention as transformers calls it; what is packed goes through no transposed views.

    Without a packing it is what it takes the place of.

    Args:
        attention: What it takes the place of. Both hold the same layers under the same names: what is put in place of
            one, such as an adapter on it, is in place in both.
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self._modules = attention._modules
        self._plain = (attention,)  # a tuple, lest its layers are found twice
        self._normed = "q_norm" in self._modules
        self._size, self._scaling = attention.head_dim, attention.scaling
        self._dropout, self._window = attention.attention_dropout, WINDOWS[type(attention).__name__](attention)

    @property
    def on_input(self) -> tuple[nn.Module, ...]:
        """The linears that its input goes to."""
        return self.q_proj, self.k_proj, self.v_proj

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        packing: Packing | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [1, S, hidden] of packed sequences -> the same shape; the rest is as transformers has it.

        Args:
            hidden_states: The tokens.
            position_embeddings: Cosines and sines [1, S, head size].
            attention_mask: Not used where there is a packing.
            packing: The sequences.
            **others: What transformers passes besides: a cache of keys and values, say, where there is no packing.
        """
        if packing is None:
            plain = self._plain[0]
            plain.training = self.training
            return plain(
                hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, **others
            )
        assert len(hidden_states) == 1 and not (self.training and self._dropout)
        tokens, (cos, sin) = hidden_states.view(hidden_states.shape[1:]), position_embeddings
        query, key, value = (
            projected.view(len(tokens), -1, self._size) for projected in on_one_input(self.on_input, tokens)
        )
        if self._normed:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotary(query, key, cos.view(cos.shape[1:]), sin.view(sin.shape[1:]))
        attended = attention_of_rows(query, key, value, packing, self._scaling, self._window)
        return self.o_proj(attended.flatten(1)).view(hidden_states.shape), None


def use_packed_attention(model: nn.Module) -> None:
    """Replace the attentions that `PackedAttention` computes."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ in WINDOWS and module._modules.keys() in (PROJECTIONS, PROJECTIONS | NORMS):
            model.set_submodule(name, PackedAttention(module))
