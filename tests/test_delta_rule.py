"""Gated delta nets by Triton: the convolution in its interpreter, too; the recurrence of fla-core on a GPU."""

import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

import pytest
import torch
import triton
from qerl_kernels import flash_linear_attention, gated_delta_rule, select_backend
from qerl_kernels.delta_rule import causal_convolution, check_flash_linear_attention
from qerl_kernels.triton_launch import pin_tiles
from torch import Tensor

from qerl_pl.policy.packing import Packing
from qerl_pl.runtime.random_state import deterministic

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def triton_backend() -> Iterator[None]:
    select_backend("triton")
    yield
    select_backend("torch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "channels", "width"), [([1], 3, 4), ([5, 1, 2, 18], 130, 4), ([17], 128, 2), ([3, 3], 64, 5)]
)
def test_a_convolution_and_its_gradient_are_pytorchs_in_each_sequence(
    lengths: Sequence[int], channels: int, width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(channels)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(DEVICE)
    sizes = ((len(positions), channels), (channels, width), (len(positions), channels))
    x, weight, grad = (torch.randn(size, generator=generator).to(DEVICE, dtype) for size in sizes)
    found = []
    for backend in ("torch", "triton"):
        select_backend(backend)  # type: ignore[arg-type]
        given = x.clone().requires_grad_()
        out = causal_convolution(given, weight, positions)
        out.backward(grad)
        assert given.grad is not None and out.dtype == dtype
        found.append((out.detach(), given.grad))
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, **tolerance)


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_a_pinned_kernel_has_the_middle_one_of_its_configurations(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    @triton.heuristics({"FLAG": lambda args: True})
    @triton.autotune([triton.Config({}, num_warps=1, num_stages=n) for n in range(count)], key=[])
    @triton.jit
    def kernel(out, FLAG: triton.language.constexpr):  # type: ignore[no-untyped-def]
        pass

    module = ModuleType("some_kernels")
    vars(module).update(kernel=kernel, other=triton, number=3)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    pin_tiles([module.__name__])
    assert [config.num_stages for config in kernel.fn.configs] == [count // 2]


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "no number",
        "another gradient",
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("zeros", "another scale")),
    ],
)
def test_a_kernel_that_computes_otherwise_is_refused_before_the_first_pass(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_steps(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, _: Tensor) -> Tensor:
        """The recurrence by tokens, of a sequence of 70 and one of 5."""
        rows, (heads, size) = [], v.shape[1:]
        state = torch.zeros(heads, size, size, device=v.device)
        for t in range(len(q)):
            state = state * (0.0 if t == 70 else log_decay[t].exp()[:, None, None])
            key = k[t].float().expand(heads, size)
            error = v[t].float() - torch.einsum("hkv,hk->hv", state, key)
            state = state + torch.einsum("hk,hv->hkv", key, beta[t].float()[:, None] * error)
            rows.append(torch.einsum("hkv,hk->hv", state, q[t].float().expand(heads, size)) * size**-0.5)
        out = torch.stack(rows)
        if wrong == "another gradient":
            out = 2 * out - out.detach()
        return (out * {"zeros": 0.0, "no number": torch.nan, "another scale": 1.2}.get(wrong, 1.0)).to(v.dtype)

    monkeypatch.setattr(flash_linear_attention, "_refused", refused := [])
    monkeypatch.setattr(flash_linear_attention, "available", lambda _: not refused)
    monkeypatch.setattr(flash_linear_attention, "delta_rule", by_steps)
    with torch.device("cuda" if DEVICE == "cuda" else "meta"):  # as Lightning's default while a model is built
        check_flash_linear_attention(torch.device(DEVICE))
    assert len(refused) == bool(wrong) and all("results differ by" in reason for reason in refused)


def results(inputs: Sequence[Tensor], dtype: torch.dtype, key_heads: int, packing: Packing) -> list[Tensor]:
    """Result and gradients to queries, keys and values, decays and betas."""
    mixed, weight, decay, beta, grad = (x.clone() for x in inputs)
    given = [mixed.to(dtype), decay, beta.to(dtype)]
    for x in given:
        x.requires_grad_()
    bounds = (packing.cu_seqlens, packing.max_seqlen)
    out = gated_delta_rule(given[0], weight.to(dtype), given[1], given[2], key_heads, 128, *bounds)
    out.backward(grad.to(dtype))
    return [out.detach().float(), *(x.grad.float() for x in given if x.grad is not None)]


def packed(lengths: Sequence[int], key_heads: int, heads: int) -> tuple[list[Tensor], Packing]:
    """Float32 arguments with decays from 0.5 to 0.999, and a gradient."""
    generator, tokens, channels = torch.Generator().manual_seed(1), sum(lengths), 128 * (2 * key_heads + heads)
    mixed, weight, beta, grad, decay = (
        torch.randn(size, generator=generator)
        for size in ((tokens, channels), (channels, 4), (tokens, heads), (tokens, heads, 128), (tokens, heads))
    )
    inputs = [mixed, weight, -(2 * decay - 3).exp(), beta.sigmoid(), grad]
    return [x.to(DEVICE) for x in inputs], Packing.of(torch.tensor(lengths, device=DEVICE), max(lengths))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("lengths", "key_heads", "heads"),
    [([2048, 1, 777, 64], 16, 32), ([65, 130], 16, 48), ([63], 16, 32), ([8192], 16, 32), ([5, 128, 200, 3], 16, 32)],
)
def test_fla_computes_packed_sequences_apart_and_repeats_its_bits(
    lengths: Sequence[int], key_heads: int, heads: int
) -> None:
    inputs, packing = packed(lengths, key_heads, heads)
    exact = results(inputs, torch.float32, key_heads, packing)
    assert flash_linear_attention.available("cuda"), "pip install fla-core"
    found = results(inputs, torch.bfloat16, key_heads, packing)
    select_backend("torch")
    plain = results(inputs, torch.bfloat16, key_heads, packing)
    select_backend("triton")
    for ours, theirs, reference in zip(found, plain, exact, strict=True):
        errors = [((x - reference).norm() / reference.norm()).item() for x in (ours, theirs)]
        assert errors[0] < 3 * errors[1], errors
    with deterministic():
        again = results(inputs, torch.bfloat16, key_heads, packing)
    assert all(torch.equal(first, second) for first, second in zip(found, again, strict=True))
    first, rest = lengths[0], sum(lengths[1:])
    inputs[0][first:], inputs[-1][first:] = torch.nan, torch.nan
    changed = results(inputs, torch.bfloat16, key_heads, packing)
    assert all(torch.equal(ours[:first], before[:first]) for ours, before in zip(changed, found, strict=True))
    assert not rest or changed[0][first:].isnan().any()
