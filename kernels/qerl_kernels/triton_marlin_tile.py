"""A tile of a weight in vLLM's Marlin layout as the left operand of the decode GEMM, in registers.

Marlin's words lie as the tensor cores read them, so expanding takes bit operations alone and no thread needs another's.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from qerl_kernels.triton_dequantize import _halves, _unpack


def _expansion(product: str, before: str = "") -> str:
    """PTX: two words $8, $9 and their four scale bytes $10 to eight pairs of bfloat16 numbers, weight * 2**-7.

    A code's bits in those of a bfloat16 number are e2m1 * 2**-126. One product puts two copies of the code, one where
    its sign belongs and one where the rest does. A scale's byte starts with a one unless it is zero: spread over the
    upper bits of the exponent it gives scale * 2**119.

    Args:
        product: Instruction of d = t s, with places for d and s.
        before: Instructions before all others.
    """
    lines = ["{", ".reg .b32 s, t, s0, s1, s2, s3;", ".reg .b16 l, h;"]
    lines += [before] * bool(before)
    for pick, first, second in (("0xA280", "s0", "s1"), ("0xB391", "s2", "s3")):
        lines += [f"prmt.b32 s, $10, $10, {pick};", "shl.b32 s, s, 4;", "and.b32 s, s, 0x7FF07FF0;"]
        lines += ["mov.b32 {l, h}, s;", f"mov.b32 {first}, {{l, l}};", f"mov.b32 {second}, {{h, h}};"]
    for word in range(2):
        source = f"${8 + word}"
        for pair in range(4):
            if pair == 2:
                lines += [f"shr.u32 s, {source}, 8;"]
                source = "s"
            code, copies = ("0x00F000F0", "0x104") if pair % 2 else ("0x000F000F", "0x1040")
            lines += [f"and.b32 t, {source}, {code};", f"mul.lo.u32 t, t, {copies};", "and.b32 t, t, 0x81C081C0;"]
            lines += [product.format(f"${4 * word + pair}", f"s{2 * word + pair // 2}")]
    return "\n".join([*lines, "}"])


_EXPANSION = tl.constexpr(_expansion("mul.bf16x2 {}, t, {};"))
_EXPANSION_BEFORE_90 = tl.constexpr(_expansion("fma.rn.bf16x2 {}, t, {}, z;", ".reg .b32 z; mov.b32 z, 0x80008000;"))
"""Of older GPUs, which have no such product: a sum with -0."""


@triton.jit
def rows_as_expanded(NT: tl.constexpr, SPLIT: tl.constexpr):
    """Which of the 64 NT rows of `expand`'s tiles stands where."""
    m = tl.arange(0, 64 * NT)
    sixteen = m // 16
    own = sixteen % SPLIT + sixteen // (SPLIT * NT) * SPLIT  # of the four in a tile
    if SPLIT == 2:  # bit 5 of n counts among the warps, bit 4 does not
        own = sixteen % 2 * 2 + sixteen // (2 * NT)
    return sixteen // SPLIT % NT * 64 + own * 16 + m % 16


@triton.jit
def expand(word, scale, SPLIT: tl.constexpr, WIDE: tl.constexpr, ARCH: tl.constexpr):
    """Words [KT, 128 NT] and scales, four bytes a number, [KT, 16 NT] to bfloat16 [64 NT, 16 KT], weight * 2**-7.

    Rows are in the order of `rows_as_expanded`, which gives every warp those of its own words: SPLIT warps, 1, 2 or 4,
    share a tile of 64. Columns are in the weight's order if WIDE, in that of `columns_as_expanded` if not.
    """
    KT: tl.constexpr = word.shape[0]
    NT: tl.constexpr = word.shape[1] // 128
    if ARCH > 0:
        asm: tl.constexpr = _EXPANSION if ARCH >= 90 else _EXPANSION_BEFORE_90
        first, second = tl.split(word.reshape(KT, NT, 8, 4, 2, 2))  # by bit 4 of n
        scale = tl.broadcast_to(scale.reshape(KT, NT, 8, 1, 2), (KT, NT, 8, 4, 2))
        p0, p1, p2, p3, q0, q1, q2, q3 = tl.inline_asm_elementwise(
            asm, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [first, second, scale], (tl.int32,) * 8, True, 1
        )
        p, q = tl.join(tl.join(p0, p1), tl.join(p2, p3)), tl.join(tl.join(q0, q1), tl.join(q2, q3))
        pairs = tl.join(p, q)
        low = pairs.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = (pairs >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        # (k tile, n tile, n%8, (k%8)//2, bit 5 of n, 3 of k, 3 and 4 of n, 0 of k)
        values = tl.permute(tl.join(low, high), (0, 1, 2, 3, 4, 7, 6, 5, 8))
    else:
        values = _unpack(_halves(word)).reshape(KT, NT, 8, 4, 2, 2, 2, 2, 2)
        byte = (tl.expand_dims(scale, -1) >> (8 * tl.arange(0, 4))) & 0xFF
        unit = (byte << 7).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        unit = tl.permute(unit.reshape(KT, NT, 8, 2, 2, 2), (0, 1, 2, 3, 5, 4)).reshape(KT, NT, 8, 1, 2, 2, 2, 1, 1)
        values = (values * unit).to(tl.bfloat16)
    # (k tile, n tile, n%8, (k%8)//2, bits 5, 4 and 3 of n, 3 and 0 of k)
    if not WIDE:
        values = tl.permute(values, (4, 5, 1, 6, 2, 0, 3, 7, 8))
    elif SPLIT == 1:
        values = tl.permute(values, (4, 5, 1, 6, 2, 0, 7, 3, 8))
    elif SPLIT == 2:
        values = tl.permute(values, (5, 1, 4, 6, 2, 0, 7, 3, 8))
    else:
        values = tl.permute(values, (1, 4, 5, 6, 2, 0, 7, 3, 8))
    return values.reshape(64 * NT, 16 * KT)


@triton.jit
def columns_as_expanded(x):
    """[tokens, columns] with each 16 columns in the order (bits 2, 1, 3 and 0).

    In mma instructions a thread holds four neighbouring columns; Marlin's word holds two and two, eight apart.
    """
    return tl.permute(x.reshape(x.shape[0], x.shape[1] // 16, 2, 4, 2), (0, 1, 3, 2, 4)).reshape(x.shape)


@triton.jit
def dot(left, right, acc, ON_GPU: tl.constexpr):
    if not ON_GPU:  # the interpreter multiplies the bits of bfloat16 numbers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc)


@triton.jit
def finish_products():
    """Wait for the last iteration's asynchronous products (wgmma), whose left operands are registers.

    Before CUDA 13.3 ptxas reuses these registers in the next iteration while products still read them:
    https://github.com/triton-lang/triton/issues/9433. Waiting at its beginning lets the next loads start before.
    """
    tl.inline_asm_elementwise("wgmma.wait_group.sync.aligned 0; // $0", "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def to_bfloat16(x, ON_GPU: tl.constexpr):
    if not ON_GPU:  # the interpreter truncates: to the nearest, ties to even
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def rounded(x, KIND: tl.constexpr, ON_GPU: tl.constexpr):
    """float32 to any floating-point KIND, to the nearest also in the interpreter."""
    if KIND == tl.bfloat16:
        x = to_bfloat16(x, ON_GPU)
    return x.to(KIND)
