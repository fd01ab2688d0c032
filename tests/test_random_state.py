"""Algorithms that repeat: inside the block only, and a user's stricter setting stays."""

import hashlib
import io
import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qerl_pl.policy.packed_layers import packed_attention
from qerl_pl.policy.packing import Packing
from qerl_pl.runtime.random_state import (
    CUBLAS_CONFIG,
    deterministic,
    forget_cublas_config,
    random_state,
    set_cublas_config,
    set_random_state,
    strictly_deterministic_gradient,
)
from qerl_pl.seeds import stream_seed


def settings() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def test_the_block_asks_for_repeatable_algorithms_and_leaves_nothing_behind() -> None:
    before = settings()
    with pytest.raises(KeyError), deterministic():
        assert settings() == (True, True, False)
        raise KeyError
    assert settings() == before and not before[0]


def test_a_users_own_strict_setting_stays_strict() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with deterministic():
            assert settings() == (True, False, True)
        assert settings() == (True, False, True)
    finally:
        torch.use_deterministic_algorithms(False)


class Product:
    """In place of a tensor on a GPU: its product notes the settings, and the variable."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, str | None]] = []

    def __matmul__(self, other: "Product") -> None:
        self.seen.append((settings()[0], os.environ.get(CUBLAS_CONFIG[0])))


@pytest.mark.parametrize(
    ("device", "major", "own", "left"),
    [
        ("cuda", 9, None, None),
        ("cuda", 8, None, ":4096:8"),  # its workspace would be another
        ("cuda", 9, ":16:8", ":16:8"),  # the user's own
        ("cpu", 9, None, ":4096:8"),
    ],
)
def test_cublas_variable_is_checked_once_and_deleted(
    device: str, major: int, own: str | None, left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, product = CUBLAS_CONFIG[0], Product()
    monkeypatch.delenv(name, raising=False)
    if own:
        monkeypatch.setenv(name, own)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    monkeypatch.setattr(torch, "ones", lambda *_, **__: product)
    set_cublas_config()
    forget_cublas_config(torch.device(device))
    assert os.environ.get(name) == left
    assert product.seen == ([(True, ":4096:8")] if left is None else [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_products_have_the_same_bits_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*CUBLAS_CONFIG)
    torch.manual_seed(0)
    shapes = ((6144, 1536), (1536, 8960), (6144, 8960))
    a, b, c = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)

    def products() -> list[Tensor]:
        with deterministic():
            return [a @ b, c @ b.t(), a.t() @ c]

    before = products()
    forget_cublas_config(a.device)
    assert all(map(torch.equal, products(), before))


class Double(torch.autograd.Function):
    """2 x, whose gradient notes the settings it is computed under."""

    seen: list[tuple[bool, bool, bool]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Double.seen.append(settings())
        return 2 * grad


@pytest.mark.parametrize("checkpointed", [False, True])
def test_one_operations_gradient_is_strict_and_its_neighbours_are_not(checkpointed: bool) -> None:
    def three(x: Tensor) -> Tensor:
        return Double.apply(strictly_deterministic_gradient(Double.apply(Double.apply(x))))

    Double.seen.clear()
    x = torch.ones(1, requires_grad=True)
    with deterministic():
        (checkpoint(three, x, use_reentrant=False) if checkpointed else three(x)).backward()
    assert x.grad is not None and x.grad.item() == 8
    assert Double.seen == [(True, True, False), (True, False, False), (True, True, False)]


def test_outside_of_the_block_gradients_are_left_alone() -> None:
    Double.seen.clear()
    before = settings()
    strictly_deterministic_gradient(Double.apply(torch.ones(1, requires_grad=True))).backward()
    assert Double.seen == [before] and settings() == before


def test_attentions_gradient_is_strict_inside_the_block() -> None:
    lengths = torch.tensor([3, 5])
    packing = Packing.of(lengths, 5)
    q, k, v = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    seen = []
    with deterministic():
        out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, packing=packing)
        node = out.grad_fn
        while "ScaledDotProduct" not in type(node).__name__:
            node = node.next_functions[0][0]
        node.register_prehook(lambda _: seen.append(settings()))
        out.sum().backward()
    assert seen == [(True, False, False)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_long_sequences_repeat_on_a_gpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    packing = Packing.of(torch.tensor([1500, 700, 1848], device="cuda"), 1848)
    shapes = ((1, 28, 4048, 128), (1, 4, 4048, 128), (1, 4, 4048, 128))
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes)
    grad = torch.randn(1, 4048, 28, 128, device="cuda", dtype=dtype)

    def gradients() -> tuple[Tensor, ...]:
        out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, packing=packing)
        return torch.autograd.grad(out, (q, k, v), grad)

    with deterministic():
        first = gradients()
        for _ in range(4):
            assert all(map(torch.equal, gradients(), first))


@pytest.mark.parametrize("own", [(True, False), (False, True), (False, False)])
def test_a_users_own_setting_outlasts_a_strict_gradient(own: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(own[0], warn_only=own[1])
    try:
        strictly_deterministic_gradient(torch.ones(2, requires_grad=True) * 2).sum().backward()
        found = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == own


def drawn() -> list[float]:
    """Three numbers of each global generator; Python's and NumPy's keep every second normal one for the next call."""
    python, numpy = [random.gauss(0, 1) for _ in range(3)], np.random.standard_normal(3).tolist()
    return [*python, *numpy, random.random(), np.random.random(), *torch.rand(3).tolist()]


@pytest.mark.parametrize("odd", [False, True])
def test_from_a_restored_state_the_same_is_drawn_again(odd: bool) -> None:
    if odd:
        random.gauss(0, 1), np.random.standard_normal()
    file = io.BytesIO()
    torch.save(random_state(), file)  # as a checkpoint holds it
    first = drawn()
    assert drawn() != first
    set_random_state(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert drawn() == first


@pytest.mark.parametrize(("there", "taken"), [(2, True), (1, False), (0, False)])
def test_states_of_gpus_are_set_where_as_many_are_there(
    there: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, found = [torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([3, 4], dtype=torch.uint8)], []
    with monkeypatch.context() as machine:
        machine.setattr(torch.cuda, "is_available", lambda: True)
        machine.setattr(torch.cuda, "get_rng_state_all", lambda: states)
        state = random_state()
    assert random_state()["cuda"] == [] or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", found.append)
    set_random_state(state)
    assert found == [states] * taken


def test_streams_go_by_their_names_types_and_order() -> None:
    digest = hashlib.sha256(b"int:3\x1fstr:rollout\x1fint:0").digest()
    assert stream_seed(3, "rollout", 0) == int.from_bytes(digest[:8], "little") // 2
    others = {stream_seed(3, "rollout", "0"), stream_seed("rollout", 3, 0), stream_seed(3, "rollout0"), stream_seed(3)}
    assert len(others | {stream_seed(3, "rollout", 0)}) == 5
    assert all(0 <= stream_seed(index) < 2**63 for index in range(100))
    assert max(stream_seed(index) for index in range(100)) > 2**62


def test_the_second_of_two_gaussians_is_restored_too() -> None:
    _ = random.gauss(), np.random.randn()  # both generators keep a second number
    state = random_state()
    expected = random.gauss(), np.random.randn()
    _ = random.gauss(), np.random.randn()
    set_random_state(state)
    assert (random.gauss(), np.random.randn()) == expected


def test_a_users_warnings_are_warnings_again_behind_the_block() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic():
            pass
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
