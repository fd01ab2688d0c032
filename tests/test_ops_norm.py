"""RMSNorm with a frozen scale against plain PyTorch: on a GPU, or on a CPU in Triton's interpreter."""

import pytest
import torch
from poisoned import triton_on_poisoned_memory
from qerl_kernels import rms_norm
from qerl_kernels.norm import plain_rms_norm

pytestmark = pytest.mark.usefixtures(triton_on_poisoned_memory.__name__)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1, 32), (2, 3, 96), (1, 7, 3584)]
if DEVICE == "cuda":
    SHAPES += [(1, 6144, 3584), (1, 2048, 2048), (1, 1000, 5120), (1, 300, 8192)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_have_the_bits_of_plain_pytorch(shape, dtype):
    torch.manual_seed(0)
    x = (3 * torch.randn(shape)).to(dtype).to(DEVICE).requires_grad_()
    weight = (1 + 0.1 * torch.randn(shape[-1])).to(DEVICE)
    direction = torch.randn(shape).to(dtype).to(DEVICE)
    found, expected = (norm(x, weight, 1e-6) for norm in (rms_norm, plain_rms_norm))
    assert type(found.grad_fn).__name__ == "_FrozenRMSNormBackward"
    ours, theirs = (torch.autograd.grad(y, x, direction)[0] for y in (found, expected))
    for one, plain in ((found, expected), (ours, theirs)):
        assert one.dtype == dtype
        if DEVICE == "cpu" and dtype == torch.bfloat16:  # which Triton's interpreter cuts off instead of rounding
            torch.testing.assert_close(one, plain, rtol=2**-7, atol=1e-6)
        else:
            assert torch.equal(one, plain)


def test_a_scale_that_trains_gets_its_gradient():
    x, weight = torch.randn(4, 32, device=DEVICE), torch.ones(32, device=DEVICE, requires_grad=True)
    rms_norm(x, weight, 1e-6).sum().backward()
    assert weight.grad is not None
