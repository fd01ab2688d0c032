"""The sampler's noise in the trainer's norms (ALP, arXiv 2603.19470), added in the forward pass."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from qerl_pl.algorithm.noise import NormNoise
from qerl_pl.formats.norm import Float32RMSNorm


class TrainerNoise:
    """The noise of a rollout on a policy's norms; drawn once, before the first optimizer step.

    The scales are not changed: nothing has to be restored, and trained scales may be updated in between.

    Args:
        norms: The policy's layer norms by module name in the base model.
        noise: Noise of the sampler; None for a trainer without noise.
        draws: Index of the draw that sampled each row, int64 [B], on the CPU; None with a single draw.
    """

    def __init__(self, norms: Mapping[str, Float32RMSNorm], noise: NormNoise | None, draws: Tensor | None) -> None:
        self._draws = None if noise is None else draws
        self._added: list[list[tuple[Float32RMSNorm, Tensor]]] = []
        for draw in () if noise is None else noise.each_draw():
            drawn = ((norm, draw.of_norm(name, norm.multiplier(norm.weight.detach()))) for name, norm in norms.items())
            self._added.append([(norm, added.to(norm.weight.device)) for norm, added in drawn if added is not None])

    def draws_of(self, rows: Tensor) -> Tensor | None:
        """Draw of each row [len(rows)], on the CPU; None where all rows have the same."""
        return None if self._draws is None else self._draws[rows.cpu()]

    @contextmanager
    def added(self, rows: Tensor) -> Iterator[None]:
        """Inside the block, a forward pass and its backward pass, the norms have the noise that sampled `rows`.

        Args:
            rows: Rows of the experience that have the same draw.
        """
        draws = self.draws_of(rows)
        assert draws is None or len(draws.unique()) <= 1
        index = 0 if draws is None or not len(draws) else int(draws[0])
        norms = self._added[index] if self._added else []
        try:
            for norm, noise in norms:
                norm.noise = noise
            yield
        finally:
            for norm, _ in norms:
                norm.noise = None
