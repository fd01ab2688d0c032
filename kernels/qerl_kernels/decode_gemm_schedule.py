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
    full_finetuning: bool = False
    """Whether every program first takes row blocks alone, as many as there are for each, which leave no sums to add."""
    copied: bool = False
    """Whether x's tiles come by TMA, the GPU's unit that copies; else every thread asks for some of their bytes."""

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
        """Of a thread, so that a processor holds `programs`, and beside narrow ones the second launch's.

        It gives them out by eights.
        """
        room = 2**16 // 8 * (8 if self.tokens > 8 else 3)
        return min(255, room // (32 * self.warps * self.programs) // 8 * 8)


class Plan(NamedTuple):
    """How the work is cut: fixed by the shapes and the device's number of processors, so that bits repeat."""

    tile: Tile
    token_blocks: int
    rounds: int
    """Row blocks that every program takes alone: the first ones of all. Steps are counted through the others."""
    shrinks: int
    """Programs that multiply by the adapter's A, for each block of tokens: the first, which share no row blocks."""
    longer: int
    """Programs after those that take a step more than `run`."""
    run: int
    """Steps of those that are left."""
    workers: int
    """Programs, for each block of tokens."""
    parts: int
    """Programs that share a block of rows, at most: at least 1."""
    hidden_parts: int
    """Runs that A's columns are cut into."""
    chunk: int
    """Tokens of a program of the second launch: few where rows are, so that every processor has a program or two."""

    @property
    def alone(self) -> int:
        """Rows of the blocks that one program takes."""
        return self.rounds * self.workers * self.tile.rows

    def program(self, step: int) -> int:
        """Which program after those for the adapter takes a step of the row blocks that programs share."""
        last = step - self.longer * (self.run + 1)
        return step // (self.run + 1) if last < 0 else self.longer + last // self.run

    def sharing(self, first: int, steps: int) -> int:
        """Programs that share steps."""
        return self.program(first + steps - 1) - self.program(first) + 1


def best_tile(tokens: int, rows: int, columns: int) -> Tile:
    """Measured on an H200 with 7B's shapes at up to 256 tokens: wide tiles pay where the weight is large.

    Args:
        tokens: Of the product.
        rows: Output features.
        columns: Input features.
    """
    if tokens <= 32:
        return Tile(max(8, 2 ** (tokens - 1).bit_length() if tokens else 8))
    if tokens <= 64 or (tokens <= 192 and max(rows, columns) <= 8192):
        steps, stages = (8, 3) if columns % 128 == 0 else (4, 4)
        return Tile(64, tiles=2, steps=steps, stages=stages, programs=3, copied=True)
    if 128 < tokens <= 192:
        return Tile(128, 64, tiles=2, steps=2, full_finetuning=True, copied=True)
    return Tile(128, tiles=2, copied=True)


@functools.cache
def plan(
    tokens: int, rows: int, columns: int, rank: int, processors: int, tile: Tile | None = None, gated: bool = False
) -> Plan:
    """The cut for a number of tokens, with a tile of one's own or the best known.

    Args:
        tokens: Of the product.
        rows: Output features.
        columns: Input features.
        rank: Of the adapters together; 0 without.
        processors: Of the GPU.
        tile: One's own.
        gated: Whether a program of the second launch takes the same rows of both halves, and activates them.
    """
    tile = tile or best_tile(tokens, rows, columns)
    assert columns % tile.columns == 0, "a tile's steps divide the columns"
    token_blocks = max(1, _ceil(tokens, tile.width))
    programs = max(1, processors * tile.programs // token_blocks)
    steps, blocks = columns // tile.columns, _ceil(rows, tile.rows)
    rounds = blocks // programs if tile.full_finetuning else 0
    if 0 < (blocks - rounds * programs) * steps < 4 * programs:  # too little to share
        rounds = max(0, rounds - 1)
    total = (blocks - rounds * programs) * steps
    hidden_parts = _hidden_parts(tile, columns, total // programs, rounds) if rank else 0
    shrinks = _ceil(rank, RANKS) * hidden_parts * (tile.width // tile.chunk)
    if rounds and shrinks >= programs:
        return plan(tokens, rows, columns, rank, processors, tile._replace(full_finetuning=False), gated)
    if tile.tokens > 16:  # no more programs than fill the processors
        programs = max(1, programs - shrinks)
    if not rounds:
        programs = max(1, min(programs, total // 4))
    run, longer = divmod(total, programs)
    chunk = _chunk(tile, rows, token_blocks, processors, gated)
    cut = Plan(tile, token_blocks, rounds, shrinks, longer, run, shrinks + programs, 0, hidden_parts, chunk)
    return cut._replace(parts=max((cut.sharing(first, steps) for first in range(0, total, steps)), default=1))


def _chunk(tile: Tile, rows: int, token_blocks: int, processors: int, gated: bool) -> int:
    """Tokens of a program of the second launch: half as many where it has two blocks of rows, but for one width."""
    blocks = rows // BLOCK // (1 + gated)
    chunk = tile.chunk
    if gated and (tile.width, token_blocks) != (128, 1):  # there, on an H200, all of them are faster
        chunk = max(chunk // 2, min(16, chunk))
    while chunk > 16 and blocks * token_blocks * (tile.width // chunk) < 3 * processors // 2:
        chunk //= 2
    return chunk


def _hidden_parts(tile: Tile, columns: int, run: int, rounds: int) -> int:
    """Runs of A's columns: the fewer, the less the second launch reads, but none should outlast a program's `run`."""
    steps = _ceil(columns, SHRINK_COLUMNS)
    if rounds:  # who multiplies by A takes its row blocks too, and may have nothing to share
        parts = next((parts for parts in range(1, 8) if _shrink_cost(_ceil(steps, parts)) <= run), 8)
    elif tile.tokens <= 16:
        parts = min(_ceil(columns, 1024), 8)
    else:
        parts = min(_ceil(steps, max(8, run)), 16)
    return _ceil(steps, _ceil(steps, parts))


def _shrink_cost(steps: int) -> int:
    """How many of a program's steps along the weight take as long as so many along A, and beginning with them.

    On an H200 half of `steps` to a good two thirds, by how many programs share a processor.
    """
    return 3 * steps // 4 + 2


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
