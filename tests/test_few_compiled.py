"""What Triton makes of the product of few tokens for a Hopper GPU; no GPU is needed to compile."""

import os
import re
import subprocess
import sys

import pytest

COMPILE = """
import sys
from qerl_kernels.few_plan import best_tile
from qerl_kernels.triton_few import _partial_kernel
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

tile = best_tile(int(sys.argv[1]), int(sys.argv[2]))
constants = {"TP": tile.tokens, "TP2": max(1, tile.more), "TC": tile.chunk, "NT": tile.tiles, "KT": tile.steps}
constants |= {"SPLIT": tile.warps // tile.tiles, "STAGES": tile.stages, "EVEN": True, "REAL": True}
types = dict.fromkeys(["x", "a"], "*bf16") | dict.fromkeys(["words", "scales"], "*i32")
types |= dict.fromkeys(["partial", "hidden"], "*fp32") | dict.fromkeys(constants, "constexpr")
names = _partial_kernel.arg_names
even = {"x", "a", "words", "scales", "partial", "hidden", "columns", "rows", "word_stride", "scale_stride"}
attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in even}
source = ASTSource(_partial_kernel, {name: types.get(name, "i32") for name in names}, constants, attributes)
options = {"num_warps": tile.warps, "launch_pdl": True, "maxnreg": tile.registers}
print(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


def loops(ptx):
    """The bodies of the loops that hold no other."""
    bodies = []
    for label in re.findall(r"^(\$L__BB\w+):", ptx, re.MULTILINE):
        body = ptx[ptx.index(f"{label}:") :]
        back = re.search(rf"bra(\.uni)?\s+{re.escape(label)};", body)
        if back and not re.search(r"^\$L__BB\w+:", body[: back.start()].partition("\n")[2], re.MULTILINE):
            bodies.append(body[: back.start()])
    return bodies


@pytest.mark.parametrize(("tokens", "rows"), [(16, 4608), (64, 4608), (192, 37888)])
def test_no_product_runs_on_into_the_next_turn_of_a_loop(tokens, rows):
    # Before CUDA 13.3 ptxas would let that turn write into the registers that it still reads (`finish_products`).
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = [sys.executable, "-c", COMPILE, str(tokens), str(rows)]
    ptx = subprocess.run(run, check=True, capture_output=True, text=True, env=environment).stdout
    products = [body for body in loops(ptx) if "wgmma.mma_async" in body]
    assert len(products) == 1
    last = products[0].rpartition("wgmma.mma_async")[2]
    assert re.search(r"wgmma\.wait_group\.sync\.aligned 0;", last)
