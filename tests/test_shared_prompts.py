"""Prompts that are computed once for their completions, against each sequence by itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from qerl_kernels import attention, flash_attention_4, shared_prompt_attention
from qerl_kernels.selective_checkpointing import selective_checkpoint_contexts
from test_packing import OnGPU, flash_attention_backward, flash_attention_forward
from test_update_steps import experience_of
from tiny_families import write_checkpoint
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qerl_pl.algorithm import GRPO
from qerl_pl.modules import Policy, PolicyConfig
from qerl_pl.modules.update import PolicyUpdate
from qerl_pl.policy.packed_layers import attention_of_rows
from qerl_pl.policy.packing import Packing, Prompts, partition_groups
from qerl_pl.runtime.random_state import deterministic
from qerl_pl.types import Experience

LENGTHS, PROMPTS, GROUPS = torch.tensor([5, 7, 4, 6]), torch.tensor([2, 3, 2, 3]), torch.tensor([8, 4, 8, 4])
"""Four sequences: the first and third begin with two tokens, the others with three others."""
WIDTH = 8


def shared() -> Packing:
    return Packing.with_shared_prompts(LENGTHS, WIDTH, PROMPTS, GROUPS)


def test_a_packing_has_each_prompt_once() -> None:
    packing = shared()
    assert packing.index.tolist() == [0, 1, 8, 9, 10, *range(2, 5), 18, 19, *range(11, 15), *range(27, 30)]
    assert packing.positions.tolist() == [0, 1, 0, 1, 2, 2, 3, 4, 2, 3, 3, 4, 5, 6, 3, 4, 5]
    assert packing.cu_seqlens.tolist() == [0, 2, 5, 8, 10, 14, 17] and packing.max_seqlen == 4
    rows = [[0, 1, 5, 6, 7], [2, 3, 4, 10, 11, 12, 13], [0, 1, 8, 9], [2, 3, 4, 14, 15, 16]]
    assert packing.packed_index is not None and packing.packed_index.tolist() == sum(rows, [])
    found = packing.shared
    assert found is not None and (found.tokens, found.max_prompt, found.max_completions) == (5, 3, 7)
    assert found.cu_prompts.tolist() == [0, 2, 5] and found.cu_completions.tolist() == [0, 5, 12]
    assert all(bounds.dtype == torch.int32 for bounds in (packing.cu_seqlens, found.cu_completions, found.cu_prompts))


def test_a_completion_of_one_token_has_a_place() -> None:
    packing = Packing.with_shared_prompts(torch.tensor([3, 6]), 6, torch.tensor([2, 3]), torch.tensor([0, 1]))
    assert packing.cu_seqlens.tolist() == [0, 2, 5, 6, 9] and packing.shared is not None
    assert packing.shared.cu_completions.tolist() == [0, 1, 4]


def test_what_is_packed_and_padded_again_is_there_in_every_row() -> None:
    packing, values = shared(), torch.arange(4 * WIDTH).view(4, WIDTH) + 1
    values[2, :2], values[3, :3] = values[0, :2], values[1, :3]
    assert torch.equal(packing.pad(packing.pack(values)), values * packing.mask)


def test_the_tokens_before_the_first_of_two_completions_are_one() -> None:
    chosen = torch.zeros(4, WIDTH, dtype=torch.bool)
    chosen[0, 2:5], chosen[2, 2], chosen[3, 5] = True, True, True
    assert shared().before(chosen).tolist() == [1, 5, 6, 1, 15]


def test_prompts_are_what_precedes_the_first_masked_token() -> None:
    tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 9, 4], [1, 3, 3, 4], [1, 2, 3, 4]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 1, 0]], dtype=torch.bool)
    found = Prompts.of(tokens, mask)
    assert found.lengths.tolist() == [2, 3, 2, 2] and found.groups.tolist() == [0, 1, 2, 0]
    assert [numbers.tolist() for numbers in Prompts.of(tokens[:0, :0], mask[:0, :0])] == [[], []]


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [
        (None, [[0, 1, 2, 3]]),
        (17, [[0, 1, 2, 3]]),  # 2 + 3 + 2 and 3 + 4 + 3
        (10, [[1, 3], [0, 2]]),
        (9, [[0, 2], [1], [3]]),  # the second group in two parts, with its prompt in both
        (1, [[1], [3], [0], [2]]),
    ],
)
def test_micro_batches_count_a_prompt_once(max_tokens: int | None, expected: list[list[int]]) -> None:
    numbers = (LENGTHS.tolist(), PROMPTS.tolist(), GROUPS.tolist())
    assert partition_groups(*numbers, max_tokens) == expected


def drawn(heads: int, keys: int, dtype: torch.dtype, size: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(17, count, size, dtype=torch.float64).to(dtype) for count in (heads, keys, keys)]


def of_sequences(tensors: list[Tensor], scale: float | None) -> Tensor:
    """Attention of each sequence by itself, its own prompt included, packed with each prompt once."""
    packing, alone = shared(), Packing.of(LENGTHS, WIDTH)
    rows = [alone.pack(packing.pad(tensor)) for tensor in tensors]
    return packing.pack(alone.pad(attention_of_rows(*rows, alone, scale)))


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_is_that_of_sequences_by_themselves(scale: float | None) -> None:
    tensors = [tensor.requires_grad_() for tensor in drawn(4, 2, torch.float64)]
    direction = torch.randn(17, 4, 8, dtype=torch.float64)
    result, expected = attention_of_rows(*tensors, shared(), scale), of_sequences(tensors, scale)
    torch.testing.assert_close(result, expected)
    found = [torch.autograd.grad(out, tensors, direction) for out in (result, expected)]
    torch.testing.assert_close(*found)


@pytest.fixture
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_attention_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_attention_backward)
    monkeypatch.setattr(attention, "_sms", lambda device: 132)


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("groups", [(4,), (1, 2, 1)])
def test_flash_attention_is_that_of_sequences_by_themselves(
    scale: float | None, groups: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "head_groups", lambda heads, sequences, max_seqlen, sms: groups)
    tensors, direction = drawn(4, 2, torch.float16), torch.randn(17, 4, 8, dtype=torch.float16)
    given = [tensor.as_subclass(OnGPU).requires_grad_() for tensor in tensors]
    precise = [tensor.double().requires_grad_() for tensor in tensors]
    with deterministic():
        result = attention_of_rows(*given, shared(), scale)
        ours = torch.autograd.grad(result, given, direction.as_subclass(OnGPU))
    expected = of_sequences(precise, scale)
    torch.testing.assert_close(result.as_subclass(Tensor).double(), expected, rtol=2e-3, atol=2e-3)
    theirs = torch.autograd.grad(expected, precise, direction.double())
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == torch.float16
        torch.testing.assert_close(one.as_subclass(Tensor).double(), other, rtol=5e-3, atol=5e-3)


@pytest.mark.usefixtures("_stand_ins")
def test_selective_checkpointing_saves_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def forward(*args: Any, **options: Any) -> tuple[Any, ...]:
        calls.append(args)
        return flash_attention_forward(*args, **options)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    packing, inputs = shared(), [tensor.requires_grad_() for tensor in drawn(4, 2, torch.float16)]
    assert packing.shared is not None
    bounds = (packing.cu_seqlens, packing.max_seqlen, packing.shared)

    def attend(*rows: Tensor) -> Tensor:
        return shared_prompt_attention(*rows, *bounds).sin()  # type: ignore[call-arg, arg-type]

    expected = torch.autograd.grad(attend(*inputs).sum(), inputs)
    out = checkpoint(attend, *inputs, use_reentrant=False, context_fn=lambda: selective_checkpoint_contexts(False))
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), inputs), expected))
    assert len(calls) == 4  # two parts each, without and with checkpointing, and not in its recomputation


def make(name: str, tmp_path: Path, sizes: dict[str, Any] | None = None, **settings: Any) -> Policy:
    folder = write_checkpoint(name, tmp_path / name, sizes)
    config = PolicyConfig(path=str(folder), quantization="none", dtype="float32", **settings)
    policy = Policy(folder, config, torch.device("cpu"), seed=1)
    state = policy.trained_state()
    torch.manual_seed(2)
    policy.load_trained_state({key: 0.1 * torch.randn_like(tensor) for key, tensor in state.items()})
    return policy.eval()


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Six rows: one has no mask, two a prompt, two another, and one a prompt of its own that is as long."""
    torch.manual_seed(0)
    tokens, mask = torch.randint(5, 300, (6, WIDTH)), torch.zeros(6, WIDTH, dtype=torch.bool)
    tokens[3, :2], tokens[4, :3] = tokens[0, :2], tokens[2, :3]
    lengths = torch.tensor([5, 4, 7, 4, 6, 4])
    for row, (first, end) in enumerate(zip((2, 4, 3, 2, 3, 2), lengths.tolist(), strict=True)):
        mask[row, first:end] = True
    mask[2, 5] = False
    return tokens, lengths, mask, torch.tensor([8, 0, 4, 8, 4, 5])


@pytest.mark.parametrize("name", ["llama-3", "qwen3", "phi-4", "qwen3-moe"])
@pytest.mark.parametrize("mode", [False, True, "selective"])
def test_a_policys_values_and_gradients_are_those_without_sharing(
    name: str, mode: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make(name, tmp_path, gradient_checkpointing=mode)
    tokens, lengths, mask, groups = batch()
    seen: list[int] = []
    policy.base.get_decoder().register_forward_pre_hook(
        lambda module, args, given: seen.append(given["input_ids"].numel()), with_kwargs=True
    )

    def found(groups: Tensor | None) -> list[Tensor]:
        policy.zero_grad()
        values = policy.token_values(tokens, lengths, mask, 0.7, entropy_gradient=True, groups=groups)
        (values.logprobs.square().sum() + values.entropies.sum()).backward()
        return [*values[:2], *(p.grad for p in policy.parameters() if p.grad is not None)]

    alone, together = found(None), found(groups)
    assert seen[:2] == [26, 21] and policy.shares_prompts and len(alone) == len(together) > 10
    for one, other in zip(alone, together, strict=True):
        assert (other - one).norm() <= 1e-5 * one.norm()


def test_a_prompts_experts_are_those_of_its_first_row(tmp_path: Path) -> None:
    policy = make("qwen3-moe", tmp_path, replay_routing=True)
    tokens, lengths, mask, groups = batch()
    routing = torch.rand(6, WIDTH, 2, 6).argsort(-1)[..., :2].short()  # two of six experts in each of two layers
    routing[3, :2], routing[4, :3] = routing[0, :2], routing[2, :3]
    with torch.no_grad():
        alone, together = (
            policy.token_values(tokens, lengths, mask, 1.0, routing=routing, groups=one)[0] for one in (None, groups)
        )
        routed = policy.token_values(tokens, lengths, mask, 1.0)[0]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert (routed - alone).abs().max() > 1e-3


NO_WINDOWS = {"layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("gemma-2", {}), ("gemma-2", NO_WINDOWS), ("gpt-oss", NO_WINDOWS), ("mistral", {}), ("qwen3.5", {})],
)
def test_models_with_more_than_full_attention_do_not_share(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    assert not make(name, tmp_path, sizes).shares_prompts


def updated(policy: Policy, experience: Experience, share: bool, tokens: int | None) -> tuple[dict[str, float], Tensor]:
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    update = PolicyUpdate(GRPO(beta=0.1), minibatches=2, micro_batch_tokens=tokens, share_prompts=share)
    metrics = update.run(policy, experience, optimizer, schedule)
    return metrics, torch.cat([tensor.flatten() for tensor in policy.trained_state().values()])


@pytest.mark.parametrize("tokens", [None, 9])
def test_an_update_that_shares_prompts_is_the_one_that_does_not(tokens: int | None, tmp_path: Path) -> None:
    ids, lengths, mask, _ = batch()
    logprobs = torch.where(mask, -1.0, 0.0)
    changes = {"tokens": ids, "lengths": lengths, "mask": mask, "sampler_logprobs": logprobs}
    experience = experience_of(**changes, advantages=torch.tensor([1.0, 0.0, -1.0, 0.5, -0.5, 2.0]))
    sizes: dict[bool, list[int]] = {False: [], True: []}
    results = []
    for share in (False, True):
        policy = make("llama-3", tmp_path / str(share))
        policy.base.get_decoder().register_forward_pre_hook(
            lambda module, args, given, share=share: sizes[share].append(given["input_ids"].numel()), with_kwargs=True
        )
        results.append(updated(policy, experience, share, tokens))
    (plain, weights), (metrics, shared_weights) = results
    assert metrics.keys() == plain.keys() and metrics == pytest.approx(plain, rel=1e-3, abs=1e-5, nan_ok=True)
    torch.testing.assert_close(shared_weights, weights, rtol=1e-4, atol=1e-6)
    assert sum(sizes[True]) < sum(sizes[False]) and max(sizes[True]) <= (tokens or 26)


def gpu_layout() -> tuple[Packing, Packing]:
    """Two prompts of 300 and 130 tokens with five completions and three, shared and not."""
    prompts = torch.tensor([300] * 5 + [130] * 3, device="cuda")
    lengths = prompts + torch.tensor([1, 500, 77, 128, 900, 2, 640, 129], device="cuda")
    groups = torch.tensor([0] * 5 + [1] * 3, device="cuda")
    width = int(lengths.max())
    return Packing.with_shared_prompts(lengths, width, prompts, groups), Packing.of(lengths, width)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("heads", "keys", "size"), [(28, 4, 128), (12, 2, 128), (14, 2, 64), (8, 8, 96)])
def test_a_gpus_attention_with_shared_prompts_errs_little_more_than_without(
    heads: int, keys: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 against float32 in plain PyTorch, and the same bits twice."""
    monkeypatch.setattr(flash_attention_4, "available", lambda *_: False)
    torch.manual_seed(0)
    packing, alone = gpu_layout()
    drawn = [torch.randn(len(packing.index), count, size, device="cuda").bfloat16() for count in (heads, keys, keys)]
    direction = torch.randn(len(packing.index), heads, size, device="cuda").bfloat16()

    def results(attend: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        given = [tensor.to(dtype).requires_grad_() for tensor in drawn]
        with deterministic():
            out = attend(*given)
            return out, *torch.autograd.grad(out, given, direction.to(dtype))

    def together(*rows: Tensor) -> Tensor:
        return attention_of_rows(*rows, packing)  # type: ignore[call-arg, arg-type]

    def each(*rows: Tensor) -> Tensor:
        repeated = [alone.pack(packing.pad(tensor)) for tensor in rows]
        return packing.pack(alone.pad(attention_of_rows(*repeated, alone)))

    found = results(together, torch.bfloat16)
    assert all(map(torch.equal, found, results(together, torch.bfloat16)))
    for one, other, right in zip(found, results(each, torch.bfloat16), results(each, torch.float32), strict=True):
        assert (one - right).norm() <= 1.5 * (other - right).norm()
