"""Stream-K schedule of the decode GEMM: fixed by the shapes and the number of SMs, so that results repeat bit for bit.

After Osama et al., "Stream-K: work-centric parallel decomposition for dense matrix-matrix multiplication on the GPU"
(arXiv 2301.03598): data-parallel waves, then the remaining output tiles with their K iterations split evenly over CTAs.
"""

import functools
import json
from importlib.resources import files
from math import ceil, log
from typing import NamedTuple

RANKS, SHRINK_COLUMNS = 32, 128
"""Rows of A in a LoRA-shrink CTA, and columns in one of its K iterations."""
BLOCK = 64
"""Output features in a CTA of the reduce kernel."""

MAX_UNEVEN = 2
"""Most K iterations of a CTA, over those that it has without an adapter, for LoRA-shrink CTAs to take others' place."""


class Tile(NamedTuple):
    """Output tile of a CTA of the Stream-K kernel."""

    tokens: int
    extra_tokens: int = 0
    """Tokens of a second accumulator: widths that are no power of two need two."""
    n_tiles: int = 4
    """Marlin tiles of 64 output features."""
    k_tiles: int = 4
    """Marlin tiles of 16 columns in a K iteration."""
    warps: int = 4
    """One, two or four times `n_tiles`."""
    stages: int = 4
    """Of the software pipeline along K."""
    ctas_per_sm: int = 2
    data_parallel: bool = False
    """Whether data-parallel waves come first, which need no reduction."""
    use_tma: bool = False
    """Whether x is loaded by TMA instead of by each thread."""

    @property
    def rows(self) -> int:
        """Output features."""
        return 64 * self.n_tiles

    @property
    def columns(self) -> int:
        """Columns in a K iteration."""
        return 16 * self.k_tiles

    @property
    def width(self) -> int:
        """Tokens in all."""
        return self.tokens + self.extra_tokens

    @property
    def shrink_tokens(self) -> int:
        """Tokens of a LoRA-shrink CTA."""
        return min(64, self.tokens, self.extra_tokens or 64)


class Schedule(NamedTuple):
    """Work of the two kernels."""

    tile: Tile
    token_blocks: int
    waves: int
    """Data-parallel waves: output tiles that each CTA computes alone, the first ones of the matrix."""
    shrink_ctas: int
    """LoRA-shrink CTAs of each token block: the first ones, which take no Stream-K iterations."""
    big_ctas: int
    """CTAs after those that take one iteration more than `iterations`."""
    iterations: int
    """K iterations of each other CTA."""
    ctas: int
    """CTAs of the Stream-K kernel for each token block."""
    splits: int
    """CTAs that share an output tile, at most: at least 1."""
    shrink_splits: int
    """Split-K of the product with A."""
    reduce_tokens: int
    """Tokens of a CTA of the reduce kernel: few where there are few rows, so that every SM has a CTA or two."""

    @property
    def data_parallel_rows(self) -> int:
        """Output features of the data-parallel waves."""
        return self.waves * self.ctas * self.tile.rows

    def cta_of(self, iteration: int) -> int:
        """The CTA, counted after the LoRA-shrink CTAs, of an iteration, counted after the data-parallel waves."""
        rest = iteration - self.big_ctas * (self.iterations + 1)
        return iteration // (self.iterations + 1) if rest < 0 else self.big_ctas + rest // self.iterations


class _Measured(NamedTuple):
    """What `benchmarks/kernels/bench_tiles.py` chose for a weight."""

    rows: int
    columns: int
    tiles: tuple[tuple[int, Tile], ...]
    """The largest number of tokens of each, in rising order."""

    def apart(self, rows: int, columns: int) -> float:
        """How unlike a weight's shape is: the sum of the two ratios' logarithms."""
        return abs(log(self.rows / rows)) + abs(log(self.columns / columns))


@functools.cache
def _measured() -> tuple[_Measured, ...]:
    held = json.loads(files(__package__).joinpath("decode_gemm_tiles.json").read_text())
    tiles = {name: Tile(**tile) for name, tile in held["tiles"].items()}
    return tuple(
        _Measured(rows, columns, tuple((tokens, tiles[name]) for tokens, name in fastest))
        for rows, columns, fastest in held["weights"]
    )


@functools.cache
def best_tile(tokens: int, rows: int, columns: int) -> Tile:
    """The tile for M tokens, N rows and K columns: that of the most similar weight in decode_gemm_tiles.json.

    The file has the tiles that are fastest on an H200 for the layers of 3B, 7B, 14B and 32B models.
    """
    if tokens <= 32:
        return Tile(max(8, 2 ** (tokens - 1).bit_length() if tokens else 8))
    measured = min(_measured(), key=lambda one: one.apart(rows, columns)).tiles
    tile = next((tile for most, tile in measured if tokens <= most), measured[-1][1])
    return tile if columns % tile.columns == 0 else tile._replace(k_tiles=4)


def tile_without_measurement(tokens: int) -> Tile:
    """The tile for M tokens on a GPU on which nobody has measured tiles."""
    return Tile(max(8, min(32, 2 ** max(tokens - 1, 0).bit_length())))


@functools.cache
def schedule(tokens: int, rows: int, columns: int, rank: int, sms: int, tile: Tile | None = None) -> Schedule:
    """The schedule of a product: M tokens, N rows, K columns, rank of all adapters together, SMs of the GPU."""
    tile = tile or best_tile(tokens, rows, columns)
    assert columns % tile.columns == 0, "a tile's K iterations divide the columns"
    token_blocks = max(1, ceil(tokens / tile.width))
    ctas = max(1, sms * tile.ctas_per_sm // token_blocks)
    per_tile, tiles = columns // tile.columns, ceil(rows / tile.rows)
    waves = tiles // ctas if tile.data_parallel else 0
    if 0 < (tiles - waves * ctas) * per_tile < 4 * ctas:  # too little to split
        waves = max(0, waves - 1)
    total = (tiles - waves * ctas) * per_tile
    shrink_splits = _shrink_splits(tile, rows, columns, rank, total // ctas, waves) if rank else 0
    shrink_ctas = ceil(rank / RANKS) * shrink_splits * (tile.width // tile.shrink_tokens)
    remaining, alone = ctas - shrink_ctas, waves * per_tile
    too_few = remaining < 1 or alone + ceil(total / remaining) > MAX_UNEVEN * (alone + total / ctas)
    if waves and too_few:
        return schedule(tokens, rows, columns, rank, sms, tile._replace(data_parallel=False))
    # No more CTAs than fill the SMs, unless a high rank's LoRA-shrink CTAs leave too few: then all others follow them.
    if tile.tokens > 16 and not too_few:
        ctas = remaining
    if not waves:
        ctas = max(1, min(ctas, total // 4))
    iterations, big_ctas = divmod(total, ctas)
    reduce_tokens = tile.shrink_tokens
    while reduce_tokens > 16 and rows // BLOCK * token_blocks * (tile.width // reduce_tokens) < 3 * sms // 2:
        reduce_tokens //= 2
    result = Schedule(
        tile, token_blocks, waves, shrink_ctas, big_ctas, iterations, shrink_ctas + ctas, 0, shrink_splits,
        reduce_tokens,
    )  # fmt: skip
    splits = [result.cta_of(i + per_tile - 1) - result.cta_of(i) + 1 for i in range(0, total, per_tile)]
    return result._replace(splits=max(splits, default=1))


def _shrink_splits(tile: Tile, rows: int, columns: int, rank: int, iterations: int, waves: int) -> int:
    """Split-K of the product with A: few, for the reduce kernel reads them all, but none outlasts `iterations`."""
    steps = ceil(columns / SHRINK_COLUMNS)
    if waves:  # a LoRA-shrink CTA takes part in the data-parallel waves
        # Measured on an H200, an iteration along A takes half to about two thirds of the time of one along the weight.
        splits = next((n for n in range(1, 8) if 3 * ceil(steps / n) // 4 + 2 <= iterations), 8)
    elif tile.tokens <= 16 and rank >= 256:
        # The reduce kernel reads the splits of all ranks for each of its blocks. Measured: rollout_7b_ranks.md.
        splits = max(ceil(columns / 4096), 1 if rows > 4 * columns else 2)
    elif tile.tokens <= 16:
        splits = min(ceil(columns / 1024), 8)
    else:
        splits = min(ceil(steps / max(8, iterations)), 16)
    return ceil(steps / ceil(steps / splits))
