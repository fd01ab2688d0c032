"""What linears share: an adapter's products on one input, and 16-bit copies of it, made once a forward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.random_model import move_trained
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.policy import packed_layers
from qerl_pl.policy.lora import PROJECTIONS, FrozenLinear, LoraLinear, can_fuse_lora, shared_input_linears
from qerl_pl.policy.lora_adapter import cast_master_weights
from qerl_pl.policy.packed_layers import GatedMLP
from qerl_pl.policy.packing import Packing

MODES: tuple[Any, ...] = (False, "selective", True)
LAYERS = 2
RANK = 5
"""Where conversions of tensors that have it are counted."""


@pytest.fixture(scope="module")
def quantized(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one_input") / "nvfp4"
    quantize_checkpoint(tiny_policy_dir, folder)
    return folder


@pytest.fixture(params=["nvfp4", "none"])
def frozen(request: pytest.FixtureRequest, quantized: Path, tiny_policy_dir: Path) -> tuple[Path, Any]:
    """Folder and format of a policy."""
    return {"nvfp4": quantized, "none": tiny_policy_dir}[request.param], request.param


def make(folder: Path, quantization: Any = "nvfp4", lora: LoraConfig | None = None, **settings: Any) -> Policy:
    config = PolicyConfig(str(folder), quantization=quantization, lora=lora or LoraConfig(rank=4), **settings)
    return move_trained(Policy(folder, config, torch.device("cpu"), seed=1).train(), 0.1)


def batch() -> tuple[Tensor, Tensor, Tensor, float]:
    tokens = torch.randint(5, 300, (2, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[:, 3:7] = True
    return tokens, torch.tensor([9, 7]), mask, 1.0


def learn(policy: Policy, passes: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of some forward passes, and gradients of all by the parameter's name."""
    torch.manual_seed(5)
    results = [policy.token_values(*batch())[0] for _ in range(passes)]
    for result in results:
        result.sum().backward()
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return torch.stack(results).detach(), gradients


def learn_one_by_one(policy: Policy) -> tuple[Tensor, dict[str, Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_layers, "shared_input_linears", lambda linears, x: tuple(linear(x) for linear in linears))
        return learn(policy)


@pytest.mark.parametrize("checkpointing", MODES)
@pytest.mark.parametrize(
    ("lora", "targets"), [(LoraConfig(rank=4, alpha=8.0), 7), (LoraConfig(rank=3, targets=PROJECTIONS[:6]), 6)]
)
def test_a_policy_learns_what_it_learns_one_by_one(
    frozen: tuple[Path, Any], checkpointing: Any, lora: LoraConfig, targets: int
) -> None:
    """In float32: no more than the order of the sums differs. o's adapter, and down's or its base, are alone."""
    policy = make(*frozen, dtype="float32", lora=lora, gradient_checkpointing=checkpointing)
    (expected, before), (result, after) = learn_one_by_one(policy), learn(policy)
    torch.testing.assert_close(result, expected)
    assert before.keys() == after.keys() and len(after) == LAYERS * 2 * targets
    for name, gradient in before.items():
        assert gradient.any()
        torch.testing.assert_close(after[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_that_can_be_recomputed_gives_the_same_bits(frozen: tuple[Path, Any], dtype: Any) -> None:
    result, gradients = learn(make(*frozen, dtype=dtype))
    for mode in MODES[1:]:
        again, others = learn(make(*frozen, dtype=dtype, gradient_checkpointing=mode))
        assert torch.equal(again, result) and others.keys() == gradients.keys()
        assert all(torch.equal(others[name], gradient) for name, gradient in gradients.items())


class Products(TorchDispatchMode):
    """Counts what a library of matrix products is called for."""

    KINDS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)

    def __init__(self) -> None:
        super().__init__()
        self.count = self.joins = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket in self.KINDS
        self.joins += function is torch.ops.aten.cat.default and any(4 in part.shape for part in args[0])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("checkpointing", "backward", "joins"), [(False, 29, 2), ("selective", 29, 2), (True, 29 + 16, 4)]
)
def test_a_layer_needs_eighteen_products_and_twenty_nine_for_its_gradients(
    frozen: tuple[Path, Any], checkpointing: Any, backward: int, joins: int
) -> None:
    """Forward 7 for q, k and v, 5 for gate and up, 3 each for o and down; in backward 11, 8 and 5 each. A recomputation
    leaves out down's two products, of the weight and of B, that are only added.

    What is joined is the gradients on their way to A, and A only where each layer is recomputed.
    """
    policy = make(*frozen, gradient_checkpointing=checkpointing)
    packing = Packing.of(torch.tensor([9, 7]), 9)
    embedded = torch.randn(1, 16, 128, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    with Products() as first, policy.trained.low_precision_copies(torch.bfloat16):
        hidden = policy.base.get_decoder()(  # type: ignore[operator]
            inputs_embeds=embedded, position_ids=packing.positions[None], use_cache=False, packing=packing
        ).last_hidden_state
    with Products() as second:
        hidden.sum().backward()
    assert (first.count, second.count) == (LAYERS * 18, LAYERS * backward)
    assert (first.joins, second.joins) == (0, LAYERS * joins)


class Other(FrozenLinear):
    """Whatever it computes, it does so by itself."""

    def forward(self, x: Tensor, lora: Any = None) -> Tensor:
        return 2 * super().forward(x, lora)


def other_base(mlp: GatedMLP) -> None:
    mlp.up_proj.get_submodule("base_layer").__class__ = Other


def no_adapter(mlp: GatedMLP) -> None:
    mlp.up_proj = mlp.up_proj.get_submodule("base_layer")


def one_off(mlp: GatedMLP) -> None:
    mlp.up_proj.enable_adapters(False)  # type: ignore[operator]


@pytest.mark.parametrize("change", [other_base, no_adapter, one_off])
def test_one_that_is_not_as_the_others_has_them_computed_one_by_one(
    quantized: Path, change: Callable[[GatedMLP], None]
) -> None:
    policy = make(quantized)
    mlp = next(module for module in policy.modules() if isinstance(module, GatedMLP))
    assert can_fuse_lora(mlp.shared_input)
    change(mlp)
    assert not can_fuse_lora(mlp.shared_input)
    x = torch.randn(3, 128).bfloat16()
    for block in (nullcontext(), policy.trained.low_precision_copies(torch.bfloat16)):
        with block:
            expected: list[Tensor] = [linear(x) for linear in mlp.shared_input]
            assert all(map(torch.equal, shared_input_linears(mlp.shared_input, x), expected))
    (_, after), (_, before) = learn(policy), learn_one_by_one(policy)
    assert after.keys() == before.keys() and all(gradient.any() for gradient in after.values())


def test_dropout_full_fine_tuning_and_an_adapter_that_is_off_are_computed_one_by_one(
    quantized: Path, tiny_policy_dir: Path
) -> None:
    dropping = make(quantized, lora=LoraConfig(rank=4, dropout=0.5))
    for policy in (dropping, make(tiny_policy_dir, "none", finetune="full")):
        (result, after), (expected, before) = learn(policy), learn_one_by_one(policy)
        assert torch.equal(result, expected) and after.keys() == before.keys()
        assert all(torch.equal(after[name], gradient) for name, gradient in before.items())
    mlps = [module for module in dropping.eval().modules() if isinstance(module, GatedMLP)]
    assert all(can_fuse_lora(mlp.shared_input) for mlp in mlps)
    with dropping.trained.reference():
        assert not any(can_fuse_lora(mlp.shared_input) for mlp in mlps)


def test_a_linear_that_is_called_alone_computes_with_its_own_a(quantized: Path) -> None:
    policy = make(quantized)
    mlp = next(module for module in policy.modules() if isinstance(module, GatedMLP))
    x = torch.randn(3, 128).bfloat16()
    expected: list[Tensor] = [linear(x) for linear in mlp.shared_input]
    with policy.trained.low_precision_copies(torch.bfloat16):
        first, second = (linear.get_parameter("lora_A.default.weight") for linear in mlp.shared_input)
        copies: Any = [linear.low_precision_factors for linear in mlp.shared_input]
        assert copies[0][0] is copies[1][0] and torch.equal(copies[0][0], torch.cat([first, second]).bfloat16())
        assert all(torch.equal(linear(x), alone) for linear, alone in zip(mlp.shared_input, expected, strict=True))
        within = mlp(x.float())
    assert torch.equal(mlp(x.float()), within)  # copies of another type are not for it


# Copies in 16 bits, made once a forward pass --------------------------------------------------------------------------


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


@pytest.mark.parametrize("checkpointing", MODES)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_log_probabilities_and_gradients_are_those_of_linears_that_round_alone(
    frozen: tuple[Path, Any], dropout: float, checkpointing: Any
) -> None:
    policy = make(*frozen, lora=LoraConfig(rank=4, dropout=dropout), gradient_checkpointing=checkpointing)
    with rounding_alone(policy):
        expected, gradients = learn(policy, 2)
    result, ours = learn(policy, 2)
    assert torch.equal(result, expected) and len(ours) == len(gradients) == LAYERS * 7 * 2
    for name, one in ours.items():
        assert one.dtype == torch.float32 and one.any() and torch.equal(one, gradients[name])


@pytest.mark.parametrize(("checkpointing", "in_backward"), [(False, 0), ("selective", 0), (True, 2 * (7 + 4))])
def test_no_linear_rounds_alone_but_those_that_are_recomputed_whole(
    quantized: Path, checkpointing: Any, in_backward: int
) -> None:
    """Of a layer's recomputation: seven B, o's and down's A, the others' one above the other."""
    policy = make(quantized, lora=LoraConfig(rank=RANK), gradient_checkpointing=checkpointing)
    with AdapterCasts() as forward:
        loss = policy.token_values(*batch())[0].sum()
    with AdapterCasts() as backward:
        loss.backward()
    assert (forward.count, backward.count) == (0, in_backward)


@torch.no_grad()
def test_nothing_computes_with_copies_of_before(quantized: Path) -> None:
    policy = make(quantized)
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


def test_no_copies_where_the_adapter_is_off_or_of_the_same_type(quantized: Path) -> None:
    policy = make(quantized)
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
