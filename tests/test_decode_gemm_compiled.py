"""What Triton and its ptxas make of the decode GEMM, for Hopper and other GPUs; no GPU is needed to compile."""

import functools
import os
import re
import subprocess
import sys

import pytest
from qerl_kernels import triton_decode_gemm

COMPILE = """
import subprocess, sys, tempfile
from pathlib import Path
import triton
from qerl_kernels.decode_gemm_schedule import BLOCK, best_tile, schedule, tile_without_measurement
from qerl_kernels.triton_decode_gemm import decode_gemm_reduce_kernel, decode_gemm_stream_k_kernel
from qerl_kernels.triton_decode_gemm import reduce_registers, stream_k_registers
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def compiled(kernel, constants, arch, described=None, **options):
    types = dict.fromkeys(["x", "a", "b", "bias", "y"], "*bf16") | dict.fromkeys(["words", "scales"], "*i32")
    types |= dict.fromkeys(["partial", "hidden", "global_scale"], "*fp32") | dict.fromkeys(constants, "constexpr")
    types |= {name: f"tensordesc<bf16{shape}>" for name, shape in (described or {}).items()}
    names = kernel.arg_names
    even = {name for name, type in types.items() if "*" in type} | {"columns", "rows", "word_stride", "scale_stride"}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in even}
    source = ASTSource(kernel, {name: types.get(name, "i32") for name in names}, constants, attributes)
    options["launch_pdl"] = arch >= 90
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)

def stream_k(tokens, rows, arch, shared):
    tile = best_tile(tokens, rows, 3584) if arch == 90 else tile_without_measurement(tokens)
    constants = {"TOKENS": tile.tokens, "EXTRA": max(1, tile.extra_tokens), "CHUNK": tile.shrink_tokens}
    constants |= {"N_TILES": tile.n_tiles, "K_TILES": tile.k_tiles, "SPLIT": tile.warps // tile.n_tiles}
    constants |= {"STAGES": tile.stages, "EVEN": True, "ARCH": arch, "BIAS": False, "USE_TMA": tile.use_tma}
    constants["DATA_PARALLEL"] = tile.data_parallel and not shared
    widths = {"x_tma": tile.tokens, "x_tma2": tile.extra_tokens}
    described = {name: [width, tile.columns] for name, width in widths.items() if tile.use_tma and width}
    constants |= {name: None for name in widths if name not in described}
    options = {"num_warps": tile.warps, "maxnreg": stream_k_registers(tile)}
    return compiled(decode_gemm_stream_k_kernel, constants, arch, described, **options)

def reduce(tokens, rows, arch, rank):
    plan = schedule(tokens, rows, 3584, 2 * rank, 132, None if arch == 90 else tile_without_measurement(tokens))
    width, chunk = plan.tile.width, plan.reduce_tokens
    constants = {"RANK": rank, "STARTS": (0, rows // 2), "PADDED": rank, "WIDTH": width, "CHUNK": chunk}
    constants |= {"BLOCK": BLOCK, "SPLITS": plan.splits, "SHRINK_SPLITS": plan.shrink_splits, "ROWS": plan.tile.rows}
    constants |= {"COLUMNS": plan.tile.columns, "DATA_PARALLEL": plan.waves > 0, "BIAS": False, "ARCH": arch}
    ctas = rows // BLOCK * plan.token_blocks * width // chunk
    options = {"num_warps": 8, "maxnreg": reduce_registers(ctas, 132, width, rank)}
    return compiled(decode_gemm_reduce_kernel, constants, arch, **options)

for case in sys.argv[1:]:
    shape, *kinds = case.split()
    tokens, rows = map(int, shape.split("x"))
    (arch,) = [int(kind[3:]) for kind in kinds if kind.startswith("sm_")] or [90]
    (rank,) = [int(kind[5:]) for kind in kinds if kind.startswith("rank_")] or [32]
    one = reduce(tokens, rows, arch, rank) if "reduced" in kinds else stream_k(tokens, rows, arch, "shared" in kinds)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(one.asm["cubin"])
        file.flush()
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        run = [tools / "cuobjdump", "-sass", file.name]
        print(f"case {case}:", subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True).stdout)
"""
CASES = [
    *(f"{tokens}x4608" for tokens in (8, 16, 32, 64)),
    *(f"{tokens}x37888" for tokens in (64, 128, 192, 384)),
    "192x37888 shared",
]
REDUCED = [f"{tokens}x37888" for tokens in (8, 16, 32, 64, 128, 192, 384)]
HIGH_RANKS = [f"{tokens}x37888 rank_{rank}" for tokens in (8, 64) for rank in (128, 256)]
OTHERS = [f"{case} sm_{arch}" for arch in (80, 86, 89, 100, 120) for case in ("8x4608", "8x4608 reduced")]
OTHERS += [f"32x4608 sm_{arch}" for arch in (80, 100)]
WIDTHS = {".128": 4, ".64": 2, ".WIDE": 2, "CS2R": 2, "LDSM.16.M88.4": 4, "LDSM.16.M88.2": 2}


@functools.cache
def machine_code():
    """By case, (address, instruction without its predicate) of all that the kernel has."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    cases = [*CASES, *[f"{case} reduced" for case in (*REDUCED, *HIGH_RANKS)], *OTHERS]
    run = [sys.executable, "-c", COMPILE, *cases]
    text = subprocess.run(run, check=True, capture_output=True, text=True, env=environment).stdout
    result = [part.partition(":") for part in text.split("case ")[1:]]
    return {case: parsed(sass) for case, _, sass in result}


def parsed(sass):
    lines = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)
    return [(int(address, 16), re.sub(r"^@!?U?P\w+ ", "", text.strip())) for address, text in lines]


def written(text):
    """Registers that an instruction writes, other than a product's sums."""
    name, _, rest = text.partition(" ")
    operands = [operand.strip() for operand in rest.split(",")]
    if re.fullmatch(r"P(T|\d)", operands[0]) and "SETP" not in name:
        operands = operands[1:]
    register = re.match(r"R(\d+)", operands[0]) if operands and not name.startswith("HGMMA") else None
    width = max([count for mark, count in WIDTHS.items() if mark in name], default=1)
    return set(range(int(register[1]), int(register[1]) + width)) if register else set()


def overwritten(body):
    """Instructions on the path that write what a product which may be running reads."""
    groups, group, result = [], {}, []
    for address, text in body:
        for where, registers in [item for one in [*groups, group] for item in one.items()]:
            if registers & written(text):
                result.append(f"{address:#x} {text}, read at {where:#x}")
        product = re.match(r"HGMMA\S+ R\d+, R(\d+),", text)
        if product:
            group[address] = set(range(int(product[1]), int(product[1]) + 4))
        if product and "gsb0" in text:
            groups, group = [*groups, group], {}
        wait = re.match(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)", text)
        if wait:
            groups = groups[len(groups) - min(int(wait[1]), len(groups)) :]
    return result


def target(text):
    """Address that an instruction jumps to."""
    jump = re.match(r"BRA.* 0x(\w+)", text)
    return int(jump[1], 16) if jump else None


def loops(code):
    """First and last index of the loops without a loop inside that have products."""
    index = {address: i for i, (address, _) in enumerate(code)}
    for last, (address, text) in enumerate(code):
        if (begin := target(text)) is not None and begin < address:
            inside = [text for _, text in code[index[begin] : last]]
            within = any(begin <= jump <= address for jump in map(target, inside) if jump is not None)
            if any(text.startswith("HGMMA") for text in inside) and not within:
                yield index[begin], last + 1


def turn(code, first, last):
    """A loop's instructions, and behind a jump out of it, to wait for a copy, those until the jump back."""
    index = {address: i for i, (address, _) in enumerate(code)}
    for i in range(first, last):
        yield code[i]
        away = index.get(target(code[i][1]), 0)
        if away >= last:
            back = next(j for j in range(away, len(code)) if target(code[j][1]) == code[i + 1][0])
            yield from code[away : back + 1]


def test_what_overwrites_a_running_product_is_found():
    lines = ["HGMMA.64x64x16.F32.BF16 R56, R88, gdesc[UR16], R56, gsb0", "LDS.64 R90, [R2]", "MOV R92, R1"]
    body = list(enumerate(lines))
    assert overwritten(body) == ["0x1 LDS.64 R90, [R2], read at 0x0"]
    assert not overwritten([body[0], (9, "WARPGROUP.DEPBAR.LE gsb0, 0x0"), *body[1:]])
    assert overwritten([body[0], (9, "WARPGROUP.DEPBAR.LE gsb0, 0x1"), *body[1:]])


def test_a_turn_includes_what_waits_for_a_copy_behind_the_loop():
    code = list(enumerate(["NOP", "BRA 0x5", "HGMMA x", "BRA 0x0", "NOP", "MOV R1, R2", "BRA 0x5", "BRA 0x2"]))
    assert list(loops(code)) == [(0, 4)]
    assert [address for address, _ in turn(code, 0, 4)] == [0, 1, 5, 6, 7, 2, 3]


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_written_to_registers_that_a_product_may_still_read(case):
    # Before CUDA 13.3 ptxas would do so in a loop's next turn (`finish_products`).
    code = machine_code()[case]
    result = list(loops(code))
    asynchronous = int(case.split("x")[0]) >= triton_decode_gemm._WGMMA_TOKENS.value
    assert len(result) == asynchronous
    for first, last in result:
        assert not overwritten(list(turn(code, first, last)) * 3)
        assert not overwritten(code[first : last + 100])


@pytest.mark.parametrize("case", CASES)
def test_products_of_a_turn_run_at_once(case):
    waits = [text for _, text in machine_code()[case] if text.startswith("WARPGROUP.DEPBAR.LE gsb0, 0x0")]
    assert len(waits) <= 2  # before the first turn's copies and after the last one


def test_the_tile_of_few_tokens_spills_nothing():
    code = [text for _, text in machine_code()["8x4608"]]
    assert not [text for text in code if text.startswith(("STL", "LDL"))]


@pytest.mark.parametrize("case", REDUCED)
def test_the_reduce_kernel_multiplies_on_tensor_cores_and_spills_two_registers_at_most(case):
    code = [text for _, text in machine_code()[f"{case} reduced"]]
    assert any("MMA" in text for text in code)
    spills = [text for text in code if text.startswith(("STL", "LDL"))]
    assert len(spills) <= 2 * {"192x37888": 1, "384x37888": 2}.get(case, 0)  # a store and a load each


@pytest.mark.parametrize("case", HIGH_RANKS)
def test_a_high_rank_is_kept_in_registers(case):
    code = [text for _, text in machine_code()[f"{case} reduced"]]
    assert len([text for text in code if text.startswith(("STL", "LDL"))]) <= 32  # 116 and 470 with 32 registers


@pytest.mark.parametrize("case", OTHERS)
def test_other_gpus_multiply_on_tensor_cores_and_spill_nothing(case):
    code = [text for _, text in machine_code()[case]]
    assert any("MMA" in text for text in code)
    assert not [text for text in code if text.startswith(("STL", "LDL"))]


AT_ONCE = """
import threading
import torch, triton
from qerl_kernels import MarlinTensor, triton_decode_gemm as kernels
from triton.backends.compiler import GPUTarget

class Hopper:
    get_current_device, get_current_target = (lambda self: 0), (lambda self: GPUTarget("cuda", 90, 32))
    get_current_stream = lambda self, device: 0

triton.runtime.driver._active = Hopper()
kernels._sms, kernels._arch = (lambda device: 132), (lambda device: 90)
compiled, plain = [], triton.compiler.compile
def compile(source, *args, **kwargs):
    compiled.append((source.fn.fn.__name__, threading.current_thread() is threading.main_thread()))
    return plain(source, *args, **kwargs)
for kernel in (kernels.decode_gemm_stream_k_kernel, kernels.decode_gemm_reduce_kernel):
    kernel.device_caches[0]  # sets its function that compiles
    kernel.compile = compile
weight = MarlinTensor(torch.zeros(8, 512, dtype=torch.int32), torch.zeros(8, 256, dtype=torch.int8), torch.ones(1))
a, b = torch.zeros(8, 128, dtype=torch.bfloat16), torch.zeros(256, 8, dtype=torch.bfloat16)
kernels.compile_at_once((n, weight, None, a, b, (0,)) for n in (1, 9))
first = list(compiled)
for n in (1, 9):
    x = torch.zeros(n, 128, dtype=torch.bfloat16)
    kernels.decode_gemm_linear(x, weight, None, a, b, (0,), compile_only=True)  # looks it up as a launch does
print(sorted(first), len(compiled) - len(first))
"""


def test_kernels_are_compiled_in_threads_and_found_when_they_are_launched(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    run = subprocess.run([sys.executable, "-c", AT_ONCE], check=True, capture_output=True, text=True, env=environment)
    kinds = ("reduce", "stream_k")
    expected = ([(f"decode_gemm_{kind}_kernel", False) for kind in kinds for _ in range(2)], 0)
    assert run.stdout.strip() == f"{expected[0]} {expected[1]}"
