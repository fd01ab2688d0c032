"""Copies of the adapter in 16 bits, made once a forward pass: never other numbers than without them."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.policy.adapter import cast_master_weights
from qerl_pl.policy.lora import LoraLinear

RANK = 5


@pytest.fixture(scope="module")
def folders(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    quantized = tmp_path_factory.mktemp("rounded") / "nvfp4"
    quantize_checkpoint(tiny_policy_dir, quantized)
    return {"nvfp4": quantized, "none": tiny_policy_dir}


def make(folders: dict[str, Path], quantization: Any = "nvfp4", dropout: float = 0.0, **settings: Any) -> Policy:
    lora = LoraConfig(rank=RANK, dropout=dropout)
    config = PolicyConfig(path=str(folders[quantization]), quantization=quantization, lora=lora, **settings)
    policy = Policy(folders[quantization], config, torch.device("cpu"), seed=1).train()
    draw = torch.Generator().manual_seed(7)
    state = policy.trained_state()
    policy.load_trained_state({name: t + 0.1 * torch.randn(t.shape, generator=draw) for name, t in state.items()})
    return policy


def batch() -> tuple[Tensor, Tensor, Tensor, float]:
    tokens = torch.randint(5, 300, (2, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[:, 3:7] = True
    return tokens, torch.tensor([9, 7]), mask, 1.0


def learn(policy: Policy) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities of two forward passes, and the gradients of both."""
    torch.manual_seed(5)
    both = [policy.token_values(*batch())[0] for _ in range(2)]
    for result in both:
        result.sum().backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    for parameter in policy.parameters():
        parameter.grad = None
    return torch.stack(both).detach(), gradients


@contextmanager
def rounding_alone(policy: Policy) -> Iterator[None]:
    """Inside the block each linear rounds its own factors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy.trained, "low_precision_copies", nullcontext)
        yield


class AdapterCasts(TorchDispatchMode):
    """Counts conversions, one by one, of tensors that have the shape of a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ranks = {RANK, 2 * RANK, 3 * RANK}  # also one above the other
        self.count += function is torch.ops.aten._to_copy.default and not ranks.isdisjoint(args[0].shape)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("checkpointing", [False, "selective", True])
@pytest.mark.parametrize(("quantization", "dropout"), [("nvfp4", 0.0), ("none", 0.0), ("nvfp4", 0.5)])
def test_log_probabilities_and_gradients_are_those_of_linears_that_round_alone(
    folders: dict[str, Path], quantization: str, dropout: float, checkpointing: Any
) -> None:
    policy = make(folders, quantization, dropout, gradient_checkpointing=checkpointing)
    with rounding_alone(policy):
        expected, gradients = learn(policy)
    result, ours = learn(policy)
    assert torch.equal(result, expected) and len(ours) == len(gradients) == 2 * 7 * 2
    for one, other in zip(ours, gradients, strict=True):
        assert one.dtype == torch.float32 and one.any() and torch.equal(one, other)


@pytest.mark.parametrize(("checkpointing", "in_backward"), [(False, 0), ("selective", 0), (True, 2 * (7 + 4))])
def test_no_linear_rounds_alone_but_those_that_are_recomputed_whole(
    folders: dict[str, Path], checkpointing: Any, in_backward: int
) -> None:
    """Of a layer's recomputation: seven B, o's and down's A, the others' one above the other."""
    policy = make(folders, gradient_checkpointing=checkpointing)
    with AdapterCasts() as forward:
        loss = policy.token_values(*batch())[0].sum()
    with AdapterCasts() as backward:
        loss.backward()
    assert (forward.count, backward.count) == (0, in_backward)


@torch.no_grad()
def test_nothing_computes_with_copies_of_before(folders: dict[str, Path]) -> None:
    policy = make(folders)
    linears = [module for module in policy.modules() if isinstance(module, LoraLinear)]
    x = torch.randn(3, linears[0].in_features).bfloat16()
    before, plainly = policy.token_values(*batch())[0], linears[0](x)
    with policy.perturbed(3):  # other weights
        with rounding_alone(policy):
            expected = policy.token_values(*batch())[0]
        assert torch.equal(policy.token_values(*batch())[0], expected) and not torch.equal(before, expected)
        assert not torch.equal(linears[0](x), plainly)
    assert torch.equal(policy.token_values(*batch())[0], before) and torch.equal(linears[0](x), plainly)
    with pytest.raises(ZeroDivisionError), policy.trained.low_precision_copies(torch.bfloat16):
        assert all(linear.low_precision_factors is not None for linear in linears)
        raise ZeroDivisionError
    assert all(linear.low_precision_factors is None for linear in linears)


def test_no_copies_where_the_adapter_is_off_or_of_the_same_type(folders: dict[str, Path]) -> None:
    policy = make(folders)
    linears = [module for module in policy.modules() if isinstance(module, LoraLinear)]
    for off, dtype, copied in ((True, torch.bfloat16, False), (False, torch.float32, False), (False, torch.half, True)):
        with policy.trained.reference() if off else nullcontext(), policy.trained.low_precision_copies(dtype):
            assert all((linear.low_precision_factors is not None) == copied for linear in linears)
    # Copies of another type than the input's are not for it.
    x = torch.randn(3, linears[0].in_features).bfloat16()
    expected = linears[0](x)
    with policy.trained.low_precision_copies(torch.half):
        assert torch.equal(linears[0](x), expected)


def test_gradients_of_copies_by_hand() -> None:
    masters = [torch.tensor([1.0 + 2**-9, 3.0], requires_grad=True) for _ in range(3)]
    copies = cast_master_weights([[master] for master in masters], torch.bfloat16)
    assert all(copy.dtype == torch.bfloat16 and copy.tolist() == [1.0, 3.0] for copy in copies)
    (2 * copies[0] + 5 * copies[2]).sum().backward()  # the second is not used
    result = [None if m.grad is None else (m.grad.dtype, m.grad.tolist()) for m in masters]
    assert result == [(torch.float32, [2.0, 2.0]), None, (torch.float32, [5.0, 5.0])]


def test_copies_have_the_bits_of_one_at_a_time_on_a_gpu_too() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator().manual_seed(0)
    bits = [torch.randint(-(2**31), 2**31, shape, generator=draw) for shape in ((32, 3584), (4099, 7), (1, 1))]
    masters = [b.int().view(torch.float32).nan_to_num(3.0).to(device).requires_grad_() for b in bits]
    copies = cast_master_weights([[master] for master in masters], torch.bfloat16)
    grads = [torch.randn(copy.shape, generator=draw).bfloat16().to(device) for copy in copies]
    result = torch.autograd.grad(copies, masters, grads)
    for master, copy, grad, ours in zip(masters, copies, grads, result, strict=True):
        assert torch.equal(copy, master.bfloat16()) and torch.equal(ours, grad.float())
