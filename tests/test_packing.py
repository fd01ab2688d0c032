"""Packed attention by itself, against loops over every pair of tokens."""

import inspect
import math
import sys
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from qerl_kernels import attention, flash_attention_4, varlen_attention
from qerl_kernels.attention import head_groups
from qerl_kernels.selective_checkpointing import selective_checkpoint_contexts
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qerl_pl.policy.packed_layers import attention_of_rows, packed_attention
from qerl_pl.policy.packing import Packing
from qerl_pl.runtime.random_state import deterministic, strictly_deterministic_gradient

LENGTHS = torch.tensor([3, 1, 5])
SINKS = torch.tensor([0.7, -1.5, 3.0, 0.0], dtype=torch.float64)


def test_a_packing_knows_where_its_tokens_stand() -> None:
    packing = Packing.of(LENGTHS, 6)
    assert packing.mask.int().tolist() == [[1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert packing.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]
    assert packing.cu_seqlens.tolist() == [0, 3, 4, 9] and packing.cu_seqlens.dtype == torch.int32
    assert packing.max_seqlen == 5


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int | None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[1, heads, S, size] to [1, S, heads, size]: every token looks back in its own sequence, so far as the window."""
    heads, tokens, repeats = query.shape[1], query.shape[2], query.shape[1] // key.shape[1]
    starts = [0] * 3 + [3] + [4] * 5
    rows = []
    for now in range(tokens):
        first = starts[now] if window is None else max(starts[now], now - window + 1)
        for head in range(heads):
            keys, values = key[0, head // repeats, first : now + 1], value[0, head // repeats, first : now + 1]
            scores = torch.stack([(query[0, head, now] * one).sum() * scaling for one in keys])
            weights = (scores if cap is None else cap * torch.tanh(scores / cap)).exp()
            weights = weights / (weights.sum() + (0 if sinks is None else sinks[head].exp()))
            rows.append(sum(weight * one for weight, one in zip(weights, values, strict=True)))
    return torch.stack(rows).view(1, tokens, heads, -1)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 1, 2, 4, 5, 9])
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize(("cap", "sinks"), [(None, None), (0.5, None), (None, SINKS), (0.5, SINKS)])
def test_attention_and_its_gradient_are_those_of_loops(
    window: int | None, scaling: float | None, cap: float | None, sinks: Tensor | None
) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, 9, 2, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    packing, direction = Packing.of(LENGTHS, 6), torch.randn(1, 9, 4, 2, dtype=torch.float64)
    expected = plain_attention(*tensors, scaling or 1 / math.sqrt(2), window, cap, sinks)
    options: dict[str, Any] = {"scaling": scaling, "sliding_window": window, "softcap": cap, "s_aux": sinks}
    result, weights = packed_attention(nn.Module(), *tensors, None, **options, packing=packing)
    assert weights is None
    torch.testing.assert_close(result, expected)
    gradients = [torch.autograd.grad((out * direction).sum(), tensors) for out in (result, expected)]
    torch.testing.assert_close(gradients[0], gradients[1])


class OnGPU(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
    """What PyTorch's operation computes, [S, heads, size] and [heads, S], in float64, with any sight."""
    assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
    assert max_q == cum_seq_q.diff().max() and max_k == cum_seq_k.diff().max()
    assert not (dropout_p or return_debug_mask) and window_size_left is not None
    rows, repeats = (
        [tensor.as_subclass(Tensor).double() for tensor in (query, key, value)],
        query.shape[1] // key.shape[1],
    )
    scale, sight = scale or query.shape[2] ** -0.5, (is_causal, window_size_left, window_size_right)
    scores = scores_of(rows[0], rows[1], cum_seq_q, cum_seq_k, scale, *sight)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), rows[2].repeat_interleave(repeats, dim=1))
    return out.to(query.dtype), scores.logsumexp(-1).float(), torch.tensor([7]), torch.tensor([8]), None


@pytest.mark.parametrize(("dtype", "cap"), [(torch.float32, None), (torch.bfloat16, 0.5)])
def test_what_flash_attention_does_not_take_goes_without_its_operation(
    dtype: torch.dtype, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.ops.aten, "_flash_attention_forward", raising=False)
    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, 9, 8).to(dtype) for heads in (4, 2, 2)]
    given = [tensor.as_subclass(OnGPU) for tensor in tensors]
    result, _ = packed_attention(nn.Module(), *given, None, softcap=cap, packing=Packing.of(LENGTHS, 6))
    expected = plain_attention(*(tensor.float() for tensor in tensors), 1 / math.sqrt(8), None, cap)
    torch.testing.assert_close(result.as_subclass(Tensor).float(), expected, rtol=1e-2, atol=1e-2)


def scores_of(
    query: Tensor, key: Tensor, cum_q: Tensor, cum_k: Tensor, scale: float, causal: bool, left: int, right: int | None
) -> Tensor:
    """[heads, Q, K] of sequences with these cumulative lengths, -inf where a token does not see another."""
    ends = cum_q.as_subclass(Tensor).long(), cum_k.as_subclass(Tensor).long()
    of_query, of_key = (torch.arange(len(one) - 1).repeat_interleave(one.diff()) for one in ends)
    seen = of_query[:, None] == of_key
    if causal or left >= 0:
        behind = torch.arange(len(of_query))[:, None] - torch.arange(len(of_key))
        assert right == 0 and causal == (left == -1)
        seen &= (behind >= 0) & (behind < (len(of_key) if causal else left + 1))
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return (torch.einsum("qhd,khd->hqk", query, keys) * scale).masked_fill(~seen, -torch.inf)


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients as flash attention's paper (arXiv 2205.14135, algorithm 4) has them, in float64."""
    assert rng_state.tolist() == [7] and unused.tolist() == [8] and window_size_left is not None and dropout_p == 0
    dtype, repeats, factor = query.dtype, query.shape[1] // key.shape[1], scale or query.shape[2] ** -0.5
    grad_out, query, key, value, out = (t.as_subclass(Tensor).double() for t in (grad_out, query, key, value, out))
    sight = (is_causal, window_size_left, window_size_right)
    scores = scores_of(query, key, cum_seq_q, cum_seq_k, factor, *sight)
    weights = (scores - logsumexp.double()[:, :, None]).exp()
    of_weights = torch.einsum("qhd,khd->hqk", grad_out, value.repeat_interleave(repeats, dim=1))
    of_scores = weights * (of_weights - (grad_out * out).sum(-1).t()[:, :, None])
    of_query = factor * torch.einsum("hqk,khd->qhd", of_scores, key.repeat_interleave(repeats, dim=1))
    of_key = factor * torch.einsum("hqk,qhd->khd", of_scores, query)
    of_value = torch.einsum("hqk,qhd->khd", weights, grad_out)
    of_key, of_value = (t.unflatten(1, (-1, repeats)).sum(2) for t in (of_key, of_value))
    return of_query.to(dtype), of_key.to(dtype), of_value.to(dtype)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("sinks", [None, SINKS.half()])
@pytest.mark.parametrize("groups", [(4,), (3, 1), (1, 2, 1)])
def test_flash_attention_and_its_gradients_are_those_of_loops(
    window: int | None,
    scaling: float | None,
    sinks: Tensor | None,
    groups: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By stand-ins for PyTorch's two operations, which know no sinks and run on a GPU alone."""
    called = []

    def backward(grad_out: Tensor, query: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        called.append(query.shape[1])
        return flash_attention_backward(grad_out, query, *others, **options)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_attention_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    monkeypatch.setattr(attention, "_sms", lambda device: 132)
    monkeypatch.setattr(attention, "head_groups", lambda heads, sequences, max_seqlen, sms: groups)
    torch.manual_seed(0)
    tensors = [torch.randn(9, heads, 8).half() for heads in (4, 2, 2)]
    given = [tensor.as_subclass(OnGPU).requires_grad_() for tensor in tensors]
    packing, direction = Packing.of(LENGTHS, 6), torch.randn(9, 4, 8).half()
    inputs = [tensor.double().requires_grad_() for tensor in tensors]
    rows = [tensor.transpose(0, 1)[None] for tensor in inputs]
    of_loops = plain_attention(
        *rows, scaling or 1 / math.sqrt(8), window, sinks=None if sinks is None else sinks.double()
    )
    with deterministic():
        result = attention_of_rows(*given, packing, scaling, window, sinks=sinks)
        ours = torch.autograd.grad(result, given, direction.as_subclass(OnGPU))
    assert tuple(called) == groups
    assert result.dtype == torch.float16 and all(one.dtype == torch.float16 for one in ours)
    torch.testing.assert_close(result.as_subclass(Tensor).double(), of_loops[0], rtol=2e-3, atol=2e-3)
    for one, other in zip(ours, torch.autograd.grad(of_loops[0], inputs, direction.double()), strict=True):
        torch.testing.assert_close(one.as_subclass(Tensor).double(), other, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("sinks", [None, SINKS.bfloat16()])
@pytest.mark.parametrize("repeatable", [True, False])
def test_flash_attention_4_takes_what_pytorchs_operations_take(
    window: int | None, scaling: float | None, sinks: Tensor | None, repeatable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for the package that calls those for PyTorch's operations."""
    called = []

    def arguments(options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        left = -1 if options["window_size_left"] is None else options["window_size_left"]
        assert options["causal"] == (left == -1)
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        others = {"window_size_left": left, "window_size_right": options["window_size_right"]}
        return tuple(options[name] for name in names), {"scale": options["softmax_scale"], **others}

    def forward(*rows: Tensor, return_lse: bool, **options: Any) -> tuple[Tensor, Tensor, None]:
        bounds, others = arguments(options)
        out, log_sum, *_ = flash_attention_forward(*rows, *bounds, 0.0, options["causal"], False, **others)
        return out, log_sum, None

    def backward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        grad: Tensor,
        log_sum: Tensor,
        deterministic: bool,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        called.append(deterministic)
        bounds, others = arguments(options)
        random = (torch.tensor([7]), torch.tensor([8]))
        tensors = (grad, query, key, value, out, log_sum)
        return flash_attention_backward(*tensors, *bounds, 0.0, options["causal"], *random, **others)

    interface = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    monkeypatch.setattr(attention, "_sms", lambda device: 132)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_attention_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_attention_backward)
    torch.manual_seed(0)
    given = [torch.randn(9, heads, 8).bfloat16().as_subclass(OnGPU).requires_grad_() for heads in (4, 2, 2)]
    packing, direction, found = Packing.of(LENGTHS, 6), torch.randn(9, 4, 8).bfloat16().as_subclass(OnGPU), []
    for version_4 in (False, True):
        monkeypatch.setattr(flash_attention_4, "available", lambda *_, is_there=version_4: is_there)
        with deterministic() if repeatable else nullcontext():
            result = attention_of_rows(*given, packing, scaling, window, sinks=sinks)
            found.append([result, *torch.autograd.grad(result, given, direction)])
    assert called == [repeatable]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("head_size", [64, 80])
def test_flash_attention_4_needs_its_package_a_hopper_gpu_and_a_tested_head_size(
    head_size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def available(device: str, module: Any, installed: bool = True) -> bool:
        packages = {"flash-attn-4": "4.0"} if installed else {}

        def version(name: str) -> str:
            if name not in packages:
                raise PackageNotFoundError(name)
            return packages[name]

        monkeypatch.setattr(flash_attention_4, "version", version)
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
        answer = flash_attention_4.available.__wrapped__(torch.device(device), head_size)
        assert isinstance(answer, bool)
        return answer

    module = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(interface=module))
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=sys.modules["flash_attn.cute"]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 if device.index == 0 else 10, 0))
    assert not available("cuda:0", module)  # there is no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert available("cuda:0", module) == (head_size == 64)
    assert not available("cuda:1", module) and not available("cpu", module)
    assert not available("cuda:0", module, installed=False) and not caplog.messages
    assert not available("cuda:0", None)
    assert len(caplog.messages) == (head_size == 64)
    assert all("flash-attn-4 cannot be imported" in message for message in caplog.messages)


def test_sinks_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [torch.randn(9, heads, 8).half().as_subclass(OnGPU) for heads in (4, 2, 2)]
    with pytest.raises(AssertionError, match="sinks are frozen"):
        attention_of_rows(*given, Packing.of(LENGTHS, 6), sinks=nn.Parameter(SINKS.half()))


@pytest.mark.parametrize(
    ("heads", "sequences", "max_seqlen", "expected"),
    [
        (28, 1, 20480, (4, 12, 12)),  # 12 * 11 = 4 * 33 = 132 CTAs of each call, where one for all has 140
        (32, 1, 20480, (4, 4, 12, 12)),
        (33, 1, 20480, (33,)),  # 4 * 33 = 132
        (28, 33, 1024, (28,)),  # 924 = 7 * 132
        (28, 1, 512, (28,)),  # short: another call would cost more than it saves
    ],
)
def test_groups_of_heads_fill_the_gpu(heads: int, sequences: int, max_seqlen: int, expected: tuple[int, ...]) -> None:
    assert head_groups(heads, sequences, max_seqlen, 132) == expected


@pytest.mark.parametrize("sms", [108, 128, 132])
def test_groups_of_heads_cost_no_more_than_one_call_or_any_three(sms: int) -> None:
    """Of at most half of the heads each; from blocks of keys that each CTA computes, one by one."""

    def cost(heads: int) -> int:
        ctas = -(-sms // heads)
        works = [sum(40 - block for block in range(first, 40, ctas)) for first in range(ctas)]
        return 16 + -(-heads * ctas // sms) * max(works)

    chosen = head_groups(28, 1, 40 * 128, sms)
    three = [
        cost(a) + cost(b) + cost(28 - a - b) for a in range(1, 15) for b in range(max(1, 14 - a), 15) if a + b < 28
    ]
    assert sum(chosen) == 28 and max(chosen) <= 14
    assert sum(map(cost, chosen)) <= min(cost(28), 2 * cost(14), *three)


def test_selective_checkpointing_saves_the_result_of_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def forward(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        called.append(args[1].shape[1])
        return flash_attention_forward(*args, **options)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_attention_backward)
    torch.manual_seed(0)
    packing = Packing.of(LENGTHS, 6)
    inputs = [torch.randn(9, heads, 8).half().requires_grad_() for heads in (4, 2, 2)]

    def attend(*rows: Tensor) -> Tensor:
        return varlen_attention(*rows, packing.cu_seqlens, packing.max_seqlen).sin()  # type: ignore[call-arg]

    expected = torch.autograd.grad(attend(*inputs).sum(), inputs)
    out = checkpoint(attend, *inputs, use_reentrant=False, context_fn=lambda: selective_checkpoint_contexts(False))
    ours = torch.autograd.grad(out.sum(), inputs)
    assert len(called) == 2  # without and with checkpointing, and not in its recomputation
    assert all(map(torch.equal, ours, expected))


def test_pytorchs_operations_take_what_they_are_given() -> None:
    """Names of the stand-ins' arguments, and the tensors that have a gradient."""
    operations = (torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward)
    stand_ins = (flash_attention_forward, flash_attention_backward)
    for operation, stand_in in zip(operations, stand_ins, strict=True):
        names = [argument.name for argument in operation.default._schema.arguments]
        expected = list(inspect.signature(stand_in).parameters)
        assert names[: len(expected)] == expected
    names = [returned.name for returned in operations[0].default._schema.returns]
    assert names[:4] == ["output", "softmax_logsumexp", "rng_state", "unused"]


def test_its_result_gradients_and_log_sum_have_the_shapes_of_pytorchs() -> None:
    """The log sum has a row for each head: sinks change it, and the backward pass takes some of its rows."""
    inputs = [torch.randn(9, heads, 64, device="meta", requires_grad=True) for heads in (4, 2, 2)]
    packing = Packing.of(LENGTHS, 6)
    for window in (None, 3):
        out = varlen_attention(*inputs, packing.cu_seqlens.to("meta"), packing.max_seqlen, None, window)
        log_sum = out.grad_fn.saved_tensors[4]  # type: ignore[union-attr]
        assert log_sum.shape == (4, 9) and log_sum.dtype == torch.float32
        gradients = torch.autograd.grad(out, inputs, torch.empty_like(out))
        assert out.shape == inputs[0].shape and [one.shape for one in gradients] == [one.shape for one in inputs]


def drawn_on_a_gpu(lengths: list[int], heads: int, keys: int, size: int) -> tuple[Packing, list[Tensor], Tensor]:
    """A packing of sequences, queries, keys and values in float32, and a gradient."""
    torch.manual_seed(0)
    packing = Packing.of(torch.tensor(lengths, device="cuda"), max(lengths))
    inputs = [torch.randn(sum(lengths), count, size, device="cuda") for count in (heads, keys, keys)]
    return packing, inputs, torch.randn(sum(lengths), heads, size, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("heads", "keys", "size"), [(28, 4, 128), (16, 8, 128), (64, 8, 64), (8, 4, 256)])
@pytest.mark.parametrize("lengths", [[6000], [4096, 5000, 1]])
def test_a_gpus_gradient_by_groups_of_heads_errs_no_more_than_in_one_call(
    heads: int, keys: int, size: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 against float32 in plain PyTorch, and the same bits twice."""
    packing, inputs, direction = drawn_on_a_gpu(lengths, heads, keys, size)

    def gradients(dtype: torch.dtype, groups: int = 1) -> tuple[Tensor, ...]:
        """By groups of keys, of which each is computed by itself: in float32 all scores would take 100 GB."""
        found = []
        for part in zip(*(tensor.chunk(groups, dim=1) for tensor in (*inputs, direction)), strict=True):
            *given, grad = (tensor.bfloat16().to(dtype).requires_grad_() for tensor in part)
            with deterministic():
                out = attention_of_rows(*given, packing, None, None)
                found.append(torch.autograd.grad(out, given, grad.detach()))
        return tuple(torch.cat(tensors, dim=1) for tensors in zip(*found, strict=True))

    monkeypatch.setattr(flash_attention_4, "available", lambda *_: False)
    precise = gradients(torch.float32, groups=keys)
    assert len(head_groups(heads, len(lengths), max(lengths), 132)) > 1
    grouped = gradients(torch.bfloat16)
    assert all(map(torch.equal, grouped, gradients(torch.bfloat16)))
    monkeypatch.setattr(attention, "head_groups", lambda heads, *_: (heads,))
    whole = gradients(torch.bfloat16)
    for one, other, right in zip(grouped, whole, precise, strict=True):
        assert (one - right).norm() <= 1.01 * (other - right).norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("heads", "keys", "size"), [(28, 4, 128), (14, 2, 64), (32, 32, 96)])
@pytest.mark.parametrize(("window", "scaling"), [(None, None), (None, 0.05), (256, None)])
@pytest.mark.parametrize("lengths", [[6000], [2048, 3000, 1, 700]])
@pytest.mark.parametrize("sunk", [False, True])
def test_a_gpus_flash_attention_4_errs_no_more_than_version_2(
    heads: int,
    keys: int,
    size: int,
    window: int | None,
    scaling: float | None,
    lengths: list[int],
    sunk: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """bfloat16 against float32 in plain PyTorch, and the same bits twice."""
    pytest.importorskip("flash_attn.cute", reason="needs an NVIDIA GPU and flash-attn-4")
    packing, inputs, direction = drawn_on_a_gpu(lengths, heads, keys, size)
    sinks = torch.randn(heads, device="cuda") if sunk else None

    def results(dtype: torch.dtype) -> tuple[Tensor, ...]:
        given = [tensor.bfloat16().to(dtype).requires_grad_() for tensor in inputs]
        with deterministic():
            out = attention_of_rows(*given, packing, scaling, window, sinks=sinks)
            return out, *torch.autograd.grad(out, given, direction.bfloat16().to(dtype))

    assert flash_attention_4.available(inputs[0].device, size)
    version_4 = results(torch.bfloat16)
    assert all(map(torch.equal, version_4, results(torch.bfloat16)))
    monkeypatch.setattr(flash_attention_4, "available", lambda *_: False)
    version_2, precise = results(torch.bfloat16), results(torch.float32)
    assert not all(map(torch.equal, version_4, version_2))
    for one, other, right in zip(version_4, version_2, precise, strict=True):
        assert (one - right).norm() <= 1.02 * (other - right).norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("window", [None, 128])
def test_a_gpus_flash_attention_with_sinks_errs_little_more_than_that_without(window: int | None) -> None:
    """gpt-oss-20b's heads, bfloat16 against float32 in plain PyTorch."""
    (packing, inputs, direction), errors = drawn_on_a_gpu([300, 1, 700], 64, 8, 64), []
    for sinks in (None, torch.randn(64, device="cuda")):
        values = []
        for dtype in (torch.bfloat16, torch.float32):
            given = [tensor.bfloat16().to(dtype).requires_grad_() for tensor in inputs]
            with deterministic():
                out = attention_of_rows(*given, packing, None, window, sinks=sinks)
                values.append([out, *torch.autograd.grad(out, given, direction.bfloat16().to(dtype))])
        errors.append([((one - other).norm() / other.norm()).item() for one, other in zip(*values, strict=True)])
    assert all(sunk <= 2 * plain for plain, sunk in zip(*errors, strict=True)), errors


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("heads", "keys", "size"), [(28, 4, 128), (40, 8, 128), (32, 32, 96), (14, 2, 64), (8, 2, 80), (8, 4, 256)]
)
@pytest.mark.parametrize("window", [None, 256])
@pytest.mark.parametrize("scaling", [None, 0.05])
def test_a_gpus_operation_gives_what_pytorchs_function_gives_for_repeated_keys(
    heads: int, keys: int, size: int, window: int | None, scaling: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention.varlen import varlen_attn

    monkeypatch.setattr(flash_attention_4, "available", lambda *_: False)
    packing, drawn, direction = drawn_on_a_gpu([1500, 700, 1, 1848], heads, keys, size)
    inputs, direction = [tensor.bfloat16().requires_grad_() for tensor in drawn], direction.bfloat16()
    bounds = (packing.cu_seqlens, packing.cu_seqlens, packing.max_seqlen, packing.max_seqlen)
    with deterministic():
        result = attention_of_rows(*inputs, packing, scaling, window)
        repeated = [tensor.repeat_interleave(heads // keys, dim=1) for tensor in inputs[1:]]
        sight = (-1 if window is None else window - 1, 0)
        expected: Any = varlen_attn(inputs[0], *repeated, *bounds, scale=scaling, window_size=sight)
        ours = torch.autograd.grad(result, inputs, direction)
        theirs = torch.autograd.grad(strictly_deterministic_gradient(expected), inputs, direction)
    assert torch.equal(result, expected) and torch.equal(ours[0], theirs[0])
    for one, other in zip(ours[1:], theirs[1:], strict=True):  # sums over the heads of a group
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)


def test_what_it_cannot_do_is_refused() -> None:
    tensors = [torch.randn(1, heads, 9, 6) for heads in (4, 2, 2)]
    packed_attention(nn.Module(), *tensors, None, packing=Packing.of(LENGTHS, 5))
    with pytest.raises(AssertionError):
        packed_attention(nn.Module(), *tensors, None)
    with pytest.raises(AssertionError):
        packed_attention(nn.Module(), *tensors, None, dropout=0.1, packing=Packing.of(LENGTHS, 5))
