"""Weights that a trainer takes from an engine, compared with the checkpoint that both have read."""

from collections.abc import Callable, Iterator

import torch
from qerl_kernels import FrozenWeight, StackedWeight
from qerl_kernels.marlin import TILE
from torch import Tensor

from qerl_pl.engines.base import SharedWeights
from qerl_pl.errors import UserError
from qerl_pl.formats.base_format import BaseFormat
from qerl_pl.formats.stored_experts import StoredExperts
from qerl_pl.models.families import GATE_UP, Experts
from qerl_pl.models.folder import TensorFiles

TOLERANCE = 0.01
"""Largest relative difference of two tiles: rounding to bfloat16 makes 2e-3, another scale or another layout 1."""
NEGLIGIBLE = 1e-4
"""Difference, over a matrix's largest weight, that does not count: Marlin reads the smallest blocks as zeros."""


@torch.no_grad()
def check_shared_weights(
    shared: SharedWeights, base_format: BaseFormat, tensors: TensorFiles, experts: Experts | None
) -> None:
    """Compare the first rows of each shared matrix with the checkpoint's.

    An engine that reads a scale or a layout otherwise would sample, and train, another base.

    Args:
        shared: Of an engine.
        base_format: Of the checkpoint.
        tensors: The checkpoint.
        experts: Of the model's family.

    Raises:
        UserError: They differ.
    """
    for name, expected, actual, largest in _tiles(shared, base_format, tensors, experts):
        actual, expected = actual.float(), expected.to(actual.device, torch.float32)
        difference, size = actual - expected, expected.norm()
        if not (difference.norm() <= TOLERANCE * size or difference.abs().max() <= NEGLIGIBLE * largest):
            raise UserError(
                "an engine must have the checkpoint's weights for the trainer to share them; its first rows of "
                f"{name} differ by {(difference.norm() / size).item():.2g} of their size: install the vLLM that the "
                "documentation names, or use TransformersEngine"
            )


def _tiles(
    shared: SharedWeights, base_format: BaseFormat, tensors: TensorFiles, experts: Experts | None
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(name, first rows in the checkpoint, first rows of the shared matrix, its largest weight)."""
    first_rows = tensors.first_rows(TILE)
    for name, tensor in shared.tensors.items():
        if name in tensors:
            yield name, first_rows.read(name).to(tensor.dtype), tensor[:TILE], tensor[:TILE].abs().max()
    for name, weight in shared.linears.items():
        stored = base_format.first_rows(name, tensors, TILE, _place_beside(weight))
        if stored is not None:
            dense = weight.dense(torch.bfloat16)  # in 16 bits: a matrix may have GiBs, and a tile is compared
            expected, tile = stored.dense(torch.bfloat16).float() * stored.alpha, dense[:TILE].float() * weight.alpha
            yield name, expected, tile, (dense.abs().max().float() * weight.alpha).abs()
    if experts is None:
        return
    for name, stack in shared.experts.items():
        module, _, matrix = name.rpartition(".")
        count, rows, _ = stack.shape
        all_stored = StoredExperts(experts, base_format, first_rows, module, count)
        tiles = all_stored.weight(matrix, torch.bfloat16, _place_beside(stack))
        # Experts that are stored one by one have gates and ups apart: the first rows of each.
        starts = (0, rows // 2) if matrix == GATE_UP and not experts.stored_in_stacks else (0,)
        for expert in range(count):
            expected, dense = (_expert(one, expert) for one in (tiles, stack))
            size = len(expected) // len(starts)
            tile = torch.cat([dense[start : start + size] for start in starts])
            yield f"{name}, expert {expert}", expected, tile, dense.abs().max()


def _place_beside(weight: FrozenWeight | StackedWeight) -> Callable[[Tensor], Tensor]:
    """Moves a tensor to a weight's device."""
    device = next(iter(weight.tensors().values())).device
    return lambda tensor: tensor.to(device)


def _expert(stack: StackedWeight, index: int) -> Tensor:
    """The matrix of one expert, float32 [N, K]."""
    alphas, dense = stack.alphas, stack.dense(index, index + 1, torch.bfloat16)[0].float()
    return dense if alphas is None else dense * alphas[index]
