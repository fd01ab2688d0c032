"""How a product of few tokens is cut among a GPU's processors: fixed by the shapes, so that its bits repeat."""

import functools
from typing import NamedTuple

RANKS, SHRINK_COLUMNS = 32, 128
"""Rows of A in a program for the adapter, columns in one of its steps."""
BLOCK = 64
"""Output features of a program of the second launch."""


class Tile(NamedTuple):
    """What a program of the first launch holds at a time."""

    tokens: int
    more: int = 0
    """Tokens beside those, for both are powers of two."""
    tiles: int = 4
    """Marlin's, of 64 output features."""
    steps: int = 4
    """Marlin's, of 16 columns."""
    warps: int = 4
    """One, two or four times `tiles`."""
    stages: int = 4
    """Of the loop along k that are being loaded."""
    programs: int = 2
    """For each processor."""

    @property
    def rows(self) -> int:
        """Output features."""
        return 64 * self.tiles

    @property
    def columns(self) -> int:
        """Columns in a step."""
        return 16 * self.steps

    @property
    def width(self) -> int:
        """Tokens in all."""
        return self.tokens + self.more

    @property
    def chunk(self) -> int:
        """Tokens of a program for the adapter."""
        return min(64, self.tokens, self.more or 64)

    @property
    def registers(self) -> int:
        """Of a thread, so that a processor holds `programs`."""
        return min(255, 2**16 // (32 * self.warps * self.programs))


class Plan(NamedTuple):
    """How the work is cut: fixed by the shapes and the device's number of processors, so that bits repeat."""

    tile: Tile
    token_blocks: int
    run: int
    """Steps of a program."""
    workers: int
    """Programs that multiply by the weight, for each block of tokens."""
    parts: int
    """Programs that share a block of rows, at most."""
    hidden_parts: int
    """Runs that A's columns are cut into."""
    chunk: int
    """Tokens of a program of the second launch: few where rows are, so that every processor has a program or two."""


def best_tile(tokens: int, rows: int) -> Tile:
    """Measured on an H200 with 7B's shapes at up to 256 tokens: wide tiles pay where rows are many.

    Args:
        tokens: Of the product.
        rows: Output features.
    """
    if tokens > 32 and rows <= 8192:
        return Tile(64, tiles=2, programs=3)
    if tokens > 64:
        return Tile(128, 64, steps=2, warps=8, programs=1) if 128 < tokens <= 192 else Tile(128, warps=8, programs=1)
    return Tile(max(8, 2 ** (tokens - 1).bit_length() if tokens else 8))


@functools.cache
def plan(tokens: int, rows: int, columns: int, rank: int, processors: int, tile: Tile | None = None) -> Plan:
    """The cut for a number of tokens, with a tile of one's own or the best known."""
    tile = tile or best_tile(tokens, rows)
    token_blocks = max(1, _ceil(tokens, tile.width))
    programs = processors * tile.programs // token_blocks
    hidden_parts = _hidden_parts(tile, rows, columns, max(programs, 1)) if rank else 0
    chunk = tile.chunk
    while chunk > 16 and rows // BLOCK * token_blocks * (tile.width // chunk) < 3 * processors // 2:
        chunk //= 2
    if tile.tokens > 16:  # as many as fill the processors
        programs -= _ceil(rank, RANKS) * hidden_parts * (tile.width // tile.chunk)
    steps = columns // tile.columns
    total = _ceil(rows, tile.rows) * steps
    run = max(min(4, steps), _ceil(total, max(programs, 1)))
    return Plan(tile, token_blocks, run, _ceil(total, run), (steps + run - 2) // run + 1, hidden_parts, chunk)


def _hidden_parts(tile: Tile, rows: int, columns: int, programs: int) -> int:
    """Runs of A's columns: the fewer, the less the second launch reads, but none should outlast a program."""
    steps = _ceil(columns, SHRINK_COLUMNS)
    if tile.tokens <= 16:
        parts = min(_ceil(columns, 1024), 8)
    else:
        run = _ceil(_ceil(rows, tile.rows) * columns // SHRINK_COLUMNS, programs)
        parts = min(_ceil(steps, max(8, 2 * run)), 16)
    return _ceil(steps, _ceil(steps, parts))


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
