"""The Triton kernel of NF4 against its reference: on a GPU, or on a CPU in Triton's interpreter."""

import pytest
import torch
from poisoned import triton_on_poisoned_memory
from qerl_kernels import dequantize_nf4, nf4

pytestmark = pytest.mark.usefixtures(triton_on_poisoned_memory.__name__)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 64), (3, 192), (64, 3584), *([(18944, 3584)] if DEVICE == "cuda" else [])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_expands_bit_for_bit_as_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.05
    packed, magnitudes = nf4.quantize_nf4(weight.to(DEVICE))
    expected = nf4.dequantize_nf4(packed.cpu(), magnitudes.cpu(), dtype)
    for _ in range(2):  # a GPU's first call of a size tries every choice on its output
        assert torch.equal(dequantize_nf4(packed, magnitudes, dtype).cpu(), expected)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_weight_rounds_alike_on_a_gpu() -> None:
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)) * 0.02
    (packed, magnitudes), (here, there) = nf4.quantize_nf4(weight), nf4.quantize_nf4(weight.to(DEVICE))
    assert torch.equal(packed, here.cpu()) and torch.equal(magnitudes, there.cpu())
