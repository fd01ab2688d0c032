"""The reverse KL divergence against plain PyTorch: on a GPU, or on a CPU in Triton's interpreter and in PyTorch."""

import math
from contextlib import nullcontext

import pytest
import torch
from plain_ops import reverse_kl
from poisoned import in_pytorch, triton_on_poisoned_memory
from qerl_kernels import chunked_reverse_kl
from qerl_kernels.logprob import _default_chunk

pytestmark = pytest.mark.usefixtures(triton_on_poisoned_memory.__name__)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAPS = {"without caps": (None, None), "capped": (5.0, 4.0), "policy capped": (5.0, None)}


def states(dtype, tokens, vocabulary, distance=1.0, width=32, scale=1.0):
    """Hidden states and output layers of a policy and of a teacher at this distance, whose vocabulary is larger."""
    torch.manual_seed(1)
    hidden, head = torch.randn(tokens, width) * scale, torch.randn(vocabulary, width)
    theirs, their_head = torch.randn(tokens, width) * scale, torch.randn(vocabulary, width)
    theirs, their_head = hidden + distance * theirs, head + distance * their_head
    their_head = torch.cat([their_head, torch.full((3, width), 9.0)])  # rows that are no tokens of the policy
    return [tensor.to(dtype).to(DEVICE) for tensor in (hidden, head, theirs, their_head)]


def plain(hidden, head, theirs, their_head, *rest):
    return reverse_kl(hidden, head, theirs, their_head[: len(head)], *rest)


@pytest.mark.parametrize(("temperature", "caps"), list(zip((0.6, 1.0, 0.6), CAPS.values(), strict=True)), ids=CAPS)
@pytest.mark.parametrize(("tokens", "vocabulary", "chunk"), [(1, 17, 8), (9, 5000, 4), (7, 4096, 7)])
@pytest.mark.parametrize("trained", [("hidden",), ("hidden", "head"), ("head",)], ids="+".join)
def test_divergence_and_gradients_equal_the_plain_ones(tokens, vocabulary, chunk, temperature, caps, trained):
    given = states(torch.float32, tokens, vocabulary)
    leaves = [given[("hidden", "head").index(name)].requires_grad_() for name in trained]
    expected = plain(*given, temperature, *caps)
    torch.manual_seed(2)
    factor = torch.randn(tokens, device=DEVICE)
    gradients = torch.autograd.grad((expected * factor).sum(), leaves)
    for backend in (nullcontext, in_pytorch):
        with backend():
            actual = chunked_reverse_kl(*given, temperature, *caps, chunk=chunk)
            found = torch.autograd.grad((actual * factor).sum(), leaves)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found, gradients, rtol=1e-3, atol=1e-3)


def test_without_gradients_it_is_the_same():
    given = states(torch.float32, 5, 300)
    before = [tensor.clone() for tensor in given]
    given[0].requires_grad_()
    with torch.no_grad():
        alone = chunked_reverse_kl(*given)
    assert torch.equal(alone, chunked_reverse_kl(*given).detach())
    assert all(map(torch.equal, before, given))


def test_a_small_divergence_keeps_its_digits():
    """1e-5 nats beside logits of 30, whose float32 steps are 2e-6: a difference of cross entropies errs by them."""
    given = states(torch.float32, 4, 5000, distance=1e-4, scale=5.0)
    exact = plain(*(tensor.double() for tensor in given))
    assert 5e-6 < exact.max().item() < 5e-5
    torch.testing.assert_close(chunked_reverse_kl(*given).double(), exact, rtol=0, atol=2e-7)


def test_a_token_that_the_policy_rules_out_adds_nothing():
    """Of three tokens one has a logit of minus infinity: probabilities 3/4 and 1/4 against thirds."""
    hidden = torch.ones(1, 1, device=DEVICE).requires_grad_()
    head = torch.tensor([[3.0], [1.0], [0.0]], device=DEVICE).log()
    teacher = torch.zeros(1, 1, device=DEVICE), torch.ones(3, 1, device=DEVICE)
    for backend in (nullcontext, in_pytorch):
        with backend():
            kl = chunked_reverse_kl(hidden, head, *teacher)
        assert kl.item() == pytest.approx(0.75 * math.log(2.25) + 0.25 * math.log(0.75), rel=1e-5)


@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_half_precision_errs_at_most_twice_as_much_as_the_plain_way(soft_cap):
    given = states(torch.bfloat16, 16, 700)
    results = []
    for op, cast, options in (
        (plain, torch.float64, ()),
        (plain, torch.bfloat16, ()),
        (chunked_reverse_kl, torch.bfloat16, (5,)),
    ):
        own, *rest = (tensor.to(cast) for tensor in given)
        own.requires_grad_()
        kl = op(own, *rest, 0.9, soft_cap, soft_cap, *options)
        results.append([tensor.double() for tensor in (kl.detach(), *torch.autograd.grad(kl.sum(), own))])
    truth, low, ours = results
    for actual, plain_low, exact in zip(ours, low, truth, strict=True):
        assert (actual - exact).norm() <= 2 * (plain_low - exact).norm()


def test_a_chunk_holds_nothing_beside_both_logits():
    hidden, head = (torch.empty(rows, 8, dtype=torch.bfloat16, device=DEVICE) for rows in (1, 40960))
    assert _default_chunk(hidden, head, hidden, (None, None)) == 2048  # 320 MiB / (4 * 40960)
    assert _default_chunk(hidden, head, hidden, (5.0, None)) == 1280  # 6 bytes, in steps of 128


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
def test_a_real_vocabulary_takes_bounded_memory():
    given = states(torch.bfloat16, 4096, 152064, distance=0.1, width=896)
    given[1], given[3] = given[1] * 0.05, given[3] * 0.05
    given[0].requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kl = chunked_reverse_kl(*given)
    kl.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**29
    exact = plain(given[0][:64].float(), given[1].float(), given[2][:64].float(), given[3].float())
    torch.testing.assert_close(kl[:64], exact, rtol=2e-2, atol=2e-3)
