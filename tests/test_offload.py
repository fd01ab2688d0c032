"""Activation offload: the bits of checkpointing, layer inputs on the CPU, blocks used again, fetched ahead."""

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_recompute import make
from torch import Tensor

from qerl_pl.policy import activation_offload
from qerl_pl.policy.activation_offload import ActivationOffload, OffloadedTensor, PinnedBlocks

LENGTHS = torch.tensor([40, 23, 57])


def gradients(folder: Path, mode: Any, steps: int = 1, dropout: float = 0.0) -> tuple[list[Tensor], Any]:
    """Gradients of all steps' losses, and the policy."""
    policy = make(folder, mode, dropout).train()
    tokens = torch.randint(5, 300, (3, 57), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(57) >= 9) & (torch.arange(57) < LENGTHS[:, None])
    with policy.perturbed(3):
        torch.manual_seed(5)
        for _ in range(steps):
            policy.token_values(tokens, LENGTHS, mask, 1.0)[0].sum().backward()
    return [p.grad for p in policy.parameters() if p.requires_grad and p.grad is not None], policy


def test_each_layers_input_is_saved_on_the_cpu_once_and_blocks_are_used_again(
    tiny_policy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = make(tiny_policy_dir, True).base.config.hidden_size
    monkeypatch.setattr(activation_offload, "BLOCK_BYTES", 50 * 4 * hidden)  # 120 packed tokens: three blocks, one cut
    packed: list[OffloadedTensor | Tensor | None] = []
    pack = ActivationOffload.pack

    def watched(self: ActivationOffload, tensor: Tensor) -> Any:
        packed.append(pack(self, tensor))
        return packed[-1]

    monkeypatch.setattr(ActivationOffload, "pack", watched)
    _, policy = gradients(tiny_policy_dir, "offload", steps=3)
    offloaded = {id(one): one for one in packed if isinstance(one, OffloadedTensor)}.values()
    inputs = policy.base.config.num_hidden_layers + 1  # of the layers, and of the last norm, which is float32 here
    assert len(offloaded) == 3 * inputs and all(one._shape == (1, 120, hidden) for one in offloaded)
    assert all(block.device.type == "cpu" for one in offloaded for block in one._blocks)
    blocks = policy.checkpointing._offload.blocks
    assert blocks.count == 3 * 3 * inputs and not blocks._free  # all are held here
    del offloaded
    packed.clear()
    assert len(blocks._free) == blocks.count
    tokens = torch.full((1, 120), 7)
    for _ in range(4):
        policy.token_values(tokens, torch.tensor([120]), torch.arange(120)[None] > 0, 1.0)[0].sum().backward()
        packed.clear()
    assert blocks.count == 3 * 3 * inputs == len(blocks._free)


def test_a_copy_is_not_its_source_and_the_one_before_it_is_fetched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "BLOCK_BYTES", 64)
    blocks = PinnedBlocks(torch.device("cpu"))
    first, second = torch.randn(1, 5, 4), torch.randn(1, 5, 4)
    values = first.clone(), second.clone()
    one = OffloadedTensor(first, blocks, None)
    two = OffloadedTensor(second, blocks, one)
    first.zero_()
    second.zero_()
    assert one._fetched is None
    assert torch.equal(two.restore(), values[1]) and one._fetched is not None and two._fetched is None
    assert torch.equal(one.restore(), values[0]) and torch.equal(one.restore(), values[0])  # a retained graph's
    assert blocks.count == 4 and not blocks._free
    del one, two
    assert len(blocks._free) == 4


def test_a_copy_that_finds_no_memory_says_so_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(count: int) -> list[Tensor]:
        raise RuntimeError("CUDA error: out of memory")

    blocks, unraisable = PinnedBlocks(torch.device("cpu")), list[Any]()
    monkeypatch.setattr(blocks, "allocate", fails)
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with pytest.raises(RuntimeError, match="out of memory"):
        OffloadedTensor(torch.zeros(1, 3, 8), blocks, None)
    gc.collect()
    assert unraisable == []


def test_what_is_no_layer_input_stays_where_it_is() -> None:
    offload = ActivationOffload(8, torch.bfloat16)
    for tensor in (torch.zeros(1, 3, 8), torch.zeros(3, 8).bfloat16(), torch.zeros(1, 3, 9).bfloat16()):
        assert offload.pack(tensor) is tensor and offload.unpack(tensor) is tensor
    assert isinstance(offload.pack(torch.zeros(1, 3, 8).bfloat16()), OffloadedTensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_copies_of_a_gpu_are_right_while_it_computes() -> None:
    blocks = PinnedBlocks(torch.device("cuda"))
    offload = ActivationOffload(1024, torch.float32)
    values = [torch.full((1, 30_000, 1024), float(index), device="cuda") for index in range(6)]
    with offload:
        saved = []
        for index in range(6):
            saved.append(offload.pack(values[index] * 2))  # freed at once
            torch.randn(1, 30_000, 1024, device="cuda").sin_()  # may take its memory
    assert isinstance(saved[0], OffloadedTensor) and saved[0]._blocks[0].is_pinned() and blocks.on_gpu
    for index in reversed(range(6)):
        restored = offload.unpack(saved[index])
        torch.randn(1, 30_000, 1024, device="cuda").sin_()
        assert bool((restored == 2 * index).all())
