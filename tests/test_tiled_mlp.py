"""MLPs in tiles of tokens: the numbers of plain ones, the same bits in every mode, memory of a tile."""

from pathlib import Path
from typing import Any

import pytest
import torch
from live_bytes import live_bytes_of_update, untrained_policy
from qerl_kernels import NVFP4Weight, addend_checkpoint_contexts, without_last_addend
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen2Config

from qerl_pl.errors import UserError
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.policy import activation_checkpointing
from qerl_pl.policy.packed_layers import GatedMLP, tile_mlps, tiled

LENGTHS = torch.tensor([40, 23, 57])
MODES: tuple[Any, ...] = (True, False, "selective", "offload")


@pytest.mark.parametrize("tokens", [1, 3, 5, 7, 100])
def test_values_and_gradients_are_those_of_all_rows_at_once(tokens: int) -> None:
    torch.manual_seed(0)
    x, a, b, frozen = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 7, 4), (4, 6), (6, 4), (4, 4)))
    for tensor in (x, a, b):
        tensor.requires_grad_()

    def run(piece: Tensor) -> Tensor:
        assert piece.shape[-2] <= tokens
        return functional.silu(piece @ a) @ b + piece @ frozen

    direction = torch.randn(2, 7, 4, dtype=torch.float64)
    expected = functional.silu(x @ a) @ b + x @ frozen
    found = tiled(run, x, tokens, [a, b])
    torch.testing.assert_close(found, expected)
    of_x, of_a, of_b = torch.autograd.grad(expected, (x, a, b), direction)
    for one, other in zip(torch.autograd.grad(found, (x, a, b), direction), (of_x, of_a, of_b), strict=True):
        torch.testing.assert_close(one, other)
    (only,) = torch.autograd.grad(tiled(run, x.detach(), tokens, [a, b.detach()]), (a,), direction)
    torch.testing.assert_close(only, of_a)


def test_a_recomputation_leaves_it_out_and_nothing_else() -> None:
    calls = []

    def run(piece: Tensor) -> Tensor:
        calls.append(len(piece))
        return 2 * piece

    x = torch.ones(4, 3)
    forward, recomputation = addend_checkpoint_contexts()
    with forward:
        assert tiled(run, x, 2, []).eq(2).all() and calls == [2, 2]
    with recomputation:
        assert tiled(run, x, 2, []).isnan().all() and calls == [2, 2]
    assert tiled(run, x, 3, []).eq(2).all() and calls == [2, 2, 2, 2]
    with torch.no_grad(), pytest.raises(AssertionError, match="only a graph is needed"), without_last_addend():
        tiled(run, x, 2, [])


@pytest.mark.parametrize("norm", ["post_feedforward_layernorm", "mlp_norm", "norm"])
def test_an_mlp_is_left_out_only_where_no_norm_follows_it(norm: str, tiny_policy_dir: Path) -> None:
    """The family says so; a layer that has another norm contradicts it."""
    policy = Policy(
        tiny_policy_dir, PolicyConfig(path=str(tiny_policy_dir), quantization="none"), torch.device("cpu"), 0
    )
    layers = policy.base.get_decoder().layers
    layers[1].add_module(norm, nn.Identity())
    with pytest.raises(AssertionError, match="a norm after the MLP needs its result"):
        activation_checkpointing.ActivationCheckpointing(policy.base, True, False, torch.float32)


@pytest.mark.parametrize(("mode", "tile"), [(True, None), ("offload", None), (True, 50)])
def test_a_recomputation_makes_no_product_that_is_only_added(
    mode: Any, tile: int | None, tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's seven weights in the forward pass, six when it is recomputed, seven in the backward pass but for those
    of the first layer's input. In three tiles, the recomputation has q, k, v and o alone, and each tile 3, 2 and 3."""
    quantize_checkpoint(tiny_policy_dir, tmp_path / "nvfp4")
    calls: list[int] = []
    dense = NVFP4Weight.dense

    def counted(self: NVFP4Weight, dtype: torch.dtype) -> Tensor:
        calls.append(1)
        return dense(self, dtype)

    monkeypatch.setattr(NVFP4Weight, "dense", counted)
    _, found, _ = gradients(tmp_path / "nvfp4", "nvfp4", mode, tile)
    assert all(one.isfinite().all() for one in found)
    per_layer = 7 + 6 + 7 if tile is None else (4 + 3 * 3) + 4 + (4 + 3 * (2 + 3))
    assert len(calls) == 2 * per_layer - 3  # nothing needs the gradient of the embedding


def folder_of(kind: str, tiny: Path, tmp_path: Path) -> Path:
    if kind != "nvfp4":
        return tiny
    quantize_checkpoint(tiny, tmp_path / "nvfp4")
    return tmp_path / "nvfp4"


def gradients(
    folder: Path, kind: str, mode: Any, tile: Any, chosen: str | None = None
) -> tuple[Tensor, list[Tensor], Policy]:
    """Log-probabilities and gradients of a ragged batch of 120 tokens; by what "auto" has chosen, if that is given."""
    config = PolicyConfig(
        path=str(folder),
        quantization="nvfp4" if kind == "nvfp4" else "none",
        dtype="float32",
        finetune="full" if kind == "full" else "lora",
        lora=LoraConfig(rank=4),
        gradient_checkpointing=mode,
        mlp_tile_tokens=tile,
    )
    policy = Policy(folder, config, torch.device("cpu"), seed=1, with_reference=kind == "full").train()
    policy.checkpointing.load(chosen)
    tokens = torch.randint(5, 300, (3, 57), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(57) >= 9) & (torch.arange(57) < LENGTHS[:, None])
    with policy.perturbed(3):
        logprobs, *_ = policy.token_values(tokens, LENGTHS, mask, 1.0)
        logprobs.sum().backward()
    return logprobs.detach(), [p.grad for p in policy.parameters() if p.grad is not None], policy


@pytest.mark.parametrize("kind", ["nvfp4", "none", "full"])
def test_a_policy_in_tiles_has_the_gradients_of_a_plain_one_and_the_same_bits_in_every_mode(
    kind: str, tiny_policy_dir: Path, tmp_path: Path
) -> None:
    folder = folder_of(kind, tiny_policy_dir, tmp_path)
    expected, plain, _ = gradients(folder, kind, True, None)
    reference, first, policy = gradients(folder, kind, True, 50)
    assert all(module.tile_tokens == 50 for module in policy.modules() if isinstance(module, GatedMLP))
    torch.testing.assert_close(reference, expected, rtol=1e-5, atol=1e-5)
    assert len(first) == len(plain) > 0
    for one, other in zip(first, plain, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm()
    for mode in MODES[1:]:
        logprobs, found, _ = gradients(folder, kind, mode, 50)
        assert torch.equal(logprobs, reference)
        assert all(torch.equal(one, other) for one, other in zip(found, first, strict=True)), mode
    _, shorter, _ = gradients(folder, kind, True, 120)  # one tile: nothing is tiled
    assert all(torch.equal(one, other) for one, other in zip(shorter, plain, strict=True))


@pytest.mark.parametrize("kind", ["nvfp4", "full"])
def test_tiles_that_auto_chose_are_those_that_are_set_by_hand(
    kind: str, tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_checkpointing, "TILE_TOKENS", 50)
    folder = folder_of(kind, tiny_policy_dir, tmp_path)
    expected, by_hand, _ = gradients(folder, kind, "offload", 50)
    found, chosen, policy = gradients(folder, kind, "auto", "auto", "offload, mlp_tile_tokens 50")
    assert torch.equal(found, expected) and policy.checkpointing.state() == "offload, mlp_tile_tokens 50"
    assert all(torch.equal(one, other) for one, other in zip(chosen, by_hand, strict=True))
    if kind == "full":  # the reference policy's MLPs too: at the start the divergence from it is 0
        with policy.trained.reference() as reference:
            mlps = [module for module in reference.modules() if isinstance(module, GatedMLP)]
        assert mlps and all(module.tile_tokens == 50 for module in mlps)


@pytest.mark.parametrize("mode", [True, "selective"])
def test_no_tensor_of_all_tokens_is_as_wide_as_the_mlp(tmp_path: Path, mode: Any) -> None:
    config = Qwen2Config(  # the MLP is ten times as wide as its layers
        vocab_size=64, hidden_size=32, intermediate_size=320, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    row, peaks = 4 * 320 * 1024, []
    for tile in (None, 64):
        policy = untrained_policy(config, tmp_path, gradient_checkpointing=mode, mlp_tile_tokens=tile)
        live = live_bytes_of_update(policy, 1, 1024)
        assert any(size >= row for size in live.at_peak) is (tile is None)
        peaks.append(live.peak)
    assert peaks[0] - peaks[1] > 4 * row  # gate, up, the gradients of both and of their product


def test_dropout_and_tiles_exclude_each_other() -> None:
    with pytest.raises(UserError, match=r"dropout 0\.1 and mlp_tile_tokens 4096"):
        PolicyConfig(lora=LoraConfig(dropout=0.1), mlp_tile_tokens=4096)
    with pytest.raises(UserError, match="mlp_tile_tokens must be at least 1; got 0"):
        PolicyConfig(mlp_tile_tokens=0)


def test_a_model_without_such_mlps_refuses_tiles() -> None:
    tile_mlps(nn.Linear(2, 2), None)
    with pytest.raises(UserError, match="mlp_tile_tokens is 64; set it to null"):
        tile_mlps(nn.Linear(2, 2), 64)


def test_a_gated_mlp_tiles_only_what_is_longer() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)

    mlp = GatedMLP(Plain(), lambda gate, up: functional.silu(gate) * up)
    mlp.tile_tokens = 8
    kinds = [type(mlp(torch.randn(1, tokens, 4)).grad_fn).__name__ for tokens in (8, 9)]
    assert "_Tiled" not in kinds[0] and "_Tiled" in kinds[1]
