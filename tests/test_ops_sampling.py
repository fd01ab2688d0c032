"""Drawing a token a row: the random numbers, the reference worked by hand, the kernels against it."""

import math
import struct

import pytest
import torch
from poisoned import triton_on_poisoned_memory
from qerl_kernels import backend_for, sample_tokens
from qerl_kernels.sampling import gumbel_noise, murmur3, philox, uniform

pytestmark = pytest.mark.usefixtures(triton_on_poisoned_memory.__name__)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEMPERATURES = [0.0, 1.0, 0.7, 2.5]
VOCABULARIES = [1, 7, 2047, 2048, 2049, 5000] + [151936, 152064] * (DEVICE == "cuda")
# Salmon et al. 2011, the known answers of Philox 4x32-10: counter, key, first word.
ANSWERS = [
    ((0, 0, 0, 0), (0, 0), 0x6627E8D5),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 0x408F276D),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 0xD16CFE09),
]
GENERATORS = ["philox", "murmur3"]


def drawn(rows, vocabulary, dtype=torch.bfloat16, scale=3.0):
    """Logits, and what `sample_tokens` takes beside them: requests in another order, greedy ones among them."""
    generator = torch.Generator().manual_seed(rows + vocabulary)
    logits = (scale * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
    temperatures = torch.tensor(TEMPERATURES).repeat(-(-rows // 4))
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(temperatures),), generator=generator)
    positions = torch.randint(0, 2**40, (3 * rows,), generator=generator)
    requests = torch.randperm(len(temperatures), generator=generator)[:rows].int()
    last = torch.arange(2, 3 * rows, 3)
    given = [tensor.to(DEVICE) for tensor in (temperatures, seeds, positions, requests, last)]
    return logits.to(DEVICE), given


def sample(logits, given, generator="philox"):
    temperatures, seeds, positions, requests, last = given
    return sample_tokens(logits, temperatures, seeds, positions, requests=requests, last=last, generator=generator)


def loops(counter, key):
    """Philox in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second % 2**32, first >> 32 ^ c[3] ^ k[1], first % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[0]


@pytest.mark.parametrize(("counter", "key", "word"), ANSWERS)
def test_random_words_are_those_of_the_paper(counter, key, word):
    assert loops(counter, key) == word
    words = [tuple(torch.tensor([value]) for value in values) for values in (counter, key)]
    assert philox(*words).item() == word


def test_noise_worked_by_hand():
    words = torch.tensor([0, 1, 2**30, 2**31 - 1, 2**31, 2**32 - 1])
    tiny = 4.6566127342e-10
    assert uniform(words).tolist() == pytest.approx([0.0, tiny, 0.5, 1.0, 1.0, 0.0], rel=1e-6)
    assert (uniform(words) < 1).all()
    seed, position = -5, 3 * 2**32 + 17
    key = loops((17, 3, 0, 0), (2**32 - 5, 2**32 - 1))
    folded = [min(word, 2**32 - 1 - word) for word in (loops((token, 0, 0, 0), (key, 0)) for token in range(9))]
    expected = [-math.log(-math.log1p(-max(word * tiny, tiny))) for word in folded]
    result = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), 9)
    assert result[0].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("data", "word"),
    [  # of the algorithm's public test vectors with seed 0
        (b"\0\0\0\0", 0x2362F9DE),
        (b"\xff\xff\xff\xff", 0x76293B50),
        (b"!Ce\x87", 0xF55B516B),
        (b"test", 0xBA6BD213),
        (b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 0xEE925B90),
    ],
)
def test_hashes_are_those_of_the_algorithms_test_vectors(data, word):
    words = [torch.tensor([value]) for value in struct.unpack(f"<{len(data) // 4}I", data)]
    assert murmur3(words).item() == word


def test_noise_of_hashes_worked_by_hand():
    """Of the two halves of the seed, of the position's lower half and of the token."""
    seed, position = -5, 3 * 2**32 + 17
    words = [torch.tensor([value]) for value in (2**32 - 5, 2**32 - 1, 17)]
    hashes = [murmur3([*words, torch.tensor([token])]).item() for token in range(9)]
    expected = [-math.log(-math.log1p(-(value + 0.5) / 2**32)) for value in hashes]
    result = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), 9, "murmur3")
    assert result[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_tokens_worked_by_hand():
    # Seed 0 at position 0: the key is the first known answer, and the noise follows from it as above.
    noise = gumbel_noise(torch.tensor([0]), torch.tensor([0]), 3)[0].tolist()
    logits = [1.0, 0.0, 0.5]
    given = [torch.tensor(one, device=DEVICE) for one in ([2.0, 0.0, 1.0], [0, 0, 0], [0], [0, 1, 2], [0, 0, 0])]
    tokens, logprobs = sample(torch.tensor([logits] * 3, device=DEVICE), given)
    for row, (divisor, weight) in enumerate([(2.0, 1.0), (1.0, 0.0), (1.0, 1.0)]):  # the second is greedy
        sums = [logit / divisor + weight * one for logit, one in zip(logits, noise, strict=True)]
        token = sums.index(max(sums))
        total = sum(math.exp(logit / divisor) for logit in logits)
        assert tokens[row].item() == token
        assert logprobs[row].item() == pytest.approx(logits[token] / divisor - math.log(total), abs=1e-6)
    assert tokens[1].item() == 0
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_kernels_take_the_references_tokens(vocabulary, dtype, generator):
    logits, given = drawn(9, vocabulary, dtype)
    tokens, logprobs = sample(logits, given, generator)
    with backend_for(torch.device("cpu")):
        expected, expected_logprobs = sample(logits, given, generator)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=0, atol=1e-5)
    temperature = given[0][given[3].long()][:, None]
    scaled = logits.float() / torch.where(temperature == 0, 1.0, temperature)
    of_tokens = scaled.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), of_tokens, rtol=0, atol=1e-5)
    if vocabulary > 2000:
        assert len(set(tokens.tolist())) > 5


def test_a_row_is_by_itself_and_the_same_again():
    logits, given = drawn(8, 3000)
    tokens, logprobs = sample(logits, given)
    wide = torch.full((8, 3100), torch.inf, dtype=logits.dtype, device=DEVICE)
    wide[:, :3000] = logits
    for one, other in zip(sample(wide[:, :3000], given), (tokens, logprobs), strict=True):
        assert torch.equal(one, other)
    for row in (0, 5):
        requests, last = given[3][row : row + 1], given[4][row : row + 1]
        token, logprob = sample(logits[row : row + 1], [*given[:3], requests, last])
        assert torch.equal(token[0], tokens[row]) and torch.equal(logprob[0], logprobs[row])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_of_equal_logits_the_first_is_taken_and_forbidden_ones_never(temperature):
    logits = torch.full((2, 5000), -torch.inf, device=DEVICE)
    logits[0, 4990], logits[0, 2500], logits[0, 2050] = 3.0, 3.0, 3.0
    logits[1, 4999] = -7.0
    given = [torch.tensor(one, device=DEVICE) for one in ([temperature], [11], [5], [0, 0], [0, 0])]
    tokens, logprobs = sample(logits, given)
    assert tokens[0].item() == 2050 if temperature == 0 else tokens[0].item() in (2050, 2500, 4990)
    assert tokens[1].item() == 4999
    assert logprobs.tolist() == pytest.approx([-math.log(3), 0.0], abs=1e-6)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_what_is_no_distribution_still_gives_a_token_of_the_vocabulary(value):
    logits = torch.full((4, 2100), value, device=DEVICE)
    given = [torch.tensor(one, device=DEVICE) for one in ([0.0, 1.0], [1, 2], [5], [0, 1, 0, 1], [0] * 4)]
    tokens, logprobs = sample(logits, given)
    assert ((tokens >= 0) & (tokens < 2100)).all() and logprobs.isnan().all()


@pytest.mark.parametrize("generator", GENERATORS)
def test_tokens_come_as_often_as_their_probability_says(generator):
    count, temperature = 20000, 1.5
    logits = torch.tensor([2.0, -1.0, 0.3, 0.0, 3.1, -4.0, 1.2])
    rows = torch.arange(count)
    given = [torch.full((count,), temperature), rows // 500 - 20, rows % 500, rows, rows]
    with backend_for(torch.device("cpu")):
        tokens, _ = sample(logits.expand(count, -1), given, generator)
    expected = count * (logits / temperature).softmax(-1)
    distance = ((tokens.bincount(minlength=7) - expected).square() / expected).sum().item()
    assert distance < 22.46  # chi-square of 6 degrees of freedom: above in one of a thousand
