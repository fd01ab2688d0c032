"""Rewards against values worked by hand, and what happens when one misbehaves."""

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest

from qerl_pl.errors import UserError
from qerl_pl.rewards import (
    Format,
    GSM8KAnswer,
    MathAnswer,
    OverlongPenalty,
    RewardSample,
    check_references,
    extract_answers,
    normalize_answers,
    score,
)
from qerl_pl.rewards.answers import last_tagged, parse_number


def sample(completion: str, reference: str = "18", num_tokens: int = 5) -> RewardSample:
    return RewardSample("How many?", completion, reference, truncated=False, num_tokens=num_tokens)


def answered(answer: str, reference: str = "18") -> RewardSample:
    return sample(f"<think>so</think><answer>{answer}</answer>", reference)


# Form ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("\n<think>\n1 < 2\n</think>\n\n<answer>b</answer>\n", 1.0),
        ("<think>a</think><answer>b</answer> done", 0.0),
        ("so <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<think></think><answer>b</answer>", 0.0),
        ("<think>a<think>b</think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b<answer>c</answer>", 0.0),
    ],
)
def test_format(completion: str, value: float) -> None:
    assert Format()([sample(completion)]) == [value]


def test_format_with_other_tags() -> None:
    reward = Format(tags=["plan", "code", "result"])
    texts = ["<plan>a</plan><code>b</code> <result>c</result>", "<think>a</think><answer>b</answer>"]
    assert reward(list(map(sample, texts))) == [1.0, 0.0]


def test_overlong_penalty() -> None:
    """DAPO, equation 13, at max_length 100 and buffer 20: 0 to 80 tokens, -1/4 at 85, -1/2 at 90, -1 from 100."""
    reward = OverlongPenalty(max_length=100, buffer=20)
    values = reward([sample("", num_tokens=tokens) for tokens in (0, 79, 80, 85, 90, 100, 101, 5000)])
    assert values == [0, 0, 0, -0.25, -0.5, -1, -1, -1]


def test_overlong_penalty_takes_the_sampling_limit_and_a_quarter_of_it() -> None:
    reward = OverlongPenalty()
    reward.set_limit(400)
    assert reward([sample("", num_tokens=tokens) for tokens in (300, 350, 400)]) == [0, -0.5, -1]
    reward.set_limit(800)  # in another run
    assert reward([sample("", num_tokens=tokens) for tokens in (600, 700, 800)]) == [0, -0.5, -1]


@pytest.mark.parametrize("buffer", [0, 101])
def test_overlong_penalty_refuses_its_buffer(buffer: int) -> None:
    with pytest.raises(UserError, match=f"buffer={buffer}"):
        OverlongPenalty(max_length=100, buffer=buffer)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer> 1 </answer>", "1"),
        ("<answer>1</answer> or <answer>2</answer> <answer>3", "2"),
        ("<answer>1<answer>2</answer>", "2"),
        ("<answer>1</answer></answer>", "1</answer>"),
        ("1</answer>", None),
        ("<answer>1", None),
    ],
)
def test_last_tagged(text: str, content: str | None) -> None:
    assert last_tagged(text, "answer") == content


# GSM8K ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[(text, "18") for text in (" 18 ", "18.00", "$ 18", "18%", "018", "18$", "+18")],
        *[(text, "18") for text in ("**18**", "**18**.", "**18.**", "`18`", "**$18**")],
        *[(text, "1234.5") for text in ("$1,234.50.", "\\$1234.5", "1234.5\\%")],
        *[(text, "-5") for text in ("-$5", "$-5", "−5", "**−5**")],
        ("−.5", "-0.5"),
        (".5", "0.5"),
        ("9" * 400, "9" * 400),
    ],
)
def test_numbers(text: str, value: str) -> None:
    assert parse_number(text) == Decimal(value)


@pytest.mark.parametrize(
    "text", ["", "18 apples", "17 or 18", "1,8", "12,34", "1e3", "1/2", "--5", "+−5", "2**4", "**", "x", "١٨", "nan"]
)
def test_not_numbers(text: str) -> None:
    assert parse_number(text) is None


def test_gsm8k_answer() -> None:
    completions = ["<answer>18</answer>", "<answer>3</answer><answer>$18.00</answer>", "<answer>18</answer><answer>3"]
    assert GSM8KAnswer()(list(map(sample, completions))) == [1.0, 1.0, 1.0]
    completions = ["18", "<answer>18</answer><answer>3</answer>", "<answer>about 18</answer>", "<answer>118</answer>"]
    assert GSM8KAnswer()(list(map(sample, completions))) == [0.0, 0.0, 0.0, 0.0]
    boxes = [r"so \boxed{18}", r"\(\boxed{\$18.00}\)", r"\boxed{3} or \boxed{18\text{ apples}}", r"\boxed{18\,\%}"]
    assert GSM8KAnswer()(list(map(sample, [*boxes, r"<answer>\boxed{18}</answer>"]))) == [1.0] * 5
    wrong = [r"\boxed{18} or \boxed{3}", r"\boxed{about 18}", r"\boxed{}", r"\boxed{1{8"]
    assert GSM8KAnswer()(list(map(sample, [*wrong, r"\boxed{18}<answer>3</answer>"]))) == [0.0] * 5


@pytest.mark.parametrize(
    ("box", "number"),
    [
        (r"10{,}000", "10000"),
        (r"10{,}000\text{ dollars}", "10000"),
        (r"\text{18}", "18"),
        (r"\text{18 apples}", "18"),
        (r"\text{\$18.00 per day}", "18"),
        (r"18\text{ miles}\text{ west}", "18"),
        (r"18\text{ percent}", "18"),
        (r"18\text{ more apples}", "18"),
        (r"18\text{}", "18"),
        (r"\text{\$}18", "18"),
        (r"10{,}00", None),
        (r"18\text{ million}", None),
        (r"\text{18 million}", None),
        (r"1\text{ hour }30\text{ minutes}", None),
        (r"\text{1 hour 30 minutes}", None),
        (r"18\text{ or more}", None),
        (r"\text{about }18", None),
        (r"1\text{8}", None),
        (r"\text{18" + " " * 190 + "x}", None),  # in no time, as the next
        (r"\text{18" + " " * 30_000 + "x}", None),
    ],
    ids=lambda given: str(given)[:30],
)
def test_words_of_a_box(box: str, number: str | None) -> None:
    assert GSM8KAnswer().extract_answer(rf"so \boxed{{{box}}}") == number


@pytest.mark.parametrize(
    ("answer", "extracted"),
    [
        ("$1,234.50.", "1234.5"),
        ("1234.5", "1234.5"),
        ("0100", "100"),
        ("20.00", "20"),
        ("-.5", "-0.5"),
        ("-0.0", "0"),
        ("123456789012345678901234567890.10", "123456789012345678901234567890.1"),  # longer than decimal's context
        ("18 apples", None),
        ("", None),
    ],
)
def test_equal_numbers_are_extracted_as_equal_text(answer: str, extracted: str | None) -> None:
    assert GSM8KAnswer().extract_answer(answered(answer).completion) == extracted


def test_what_no_tag_encloses_is_no_answer() -> None:
    assert GSM8KAnswer().extract_answer("18") is None
    assert extract_answers(GSM8KAnswer(), ["<answer>1</answer><answer>2.0</answer>", "2"]) == ["2", None]
    assert MathAnswer().extract_answer("so <answer> \\frac{1}{2} </answer>") == "\\frac{1}{2}"
    assert MathAnswer(tag="result").extract_answer("<answer>1</answer>") is None
    assert MathAnswer(tag=None).extract_answer("<answer>1</answer>") == "1"
    assert extract_answers(Format(), ["<answer>1</answer>"]) == [None]  # it tells no answers


class Upper(GSM8KAnswer):
    """Normalizes to upper case."""

    def normalize_answers(self, answers: Sequence[str]) -> Sequence[str]:
        return [answer.upper() for answer in answers]


def test_wrong_answers_are_normalized_by_rewards_that_do_so() -> None:
    answers, wrong = ["a", "b", None, "a", "a"], [True, True, True, False, True]
    assert normalize_answers(Upper(), answers, wrong) == ["A", "B", None, "a", "A"]
    assert normalize_answers(GSM8KAnswer(), answers, wrong) == answers


def test_gsm8k_answer_refuses_other_references() -> None:
    with pytest.raises(UserError, match=r"got '\\\\pi'; use MathAnswer"):
        GSM8KAnswer()([answered("1", reference="\\pi")])
    with pytest.raises(UserError, match="needs numbers as references; 2 of 3 are none, that of row b the first: '1/2'"):
        check_references([GSM8KAnswer()], {"a": "1,000.5", "b": "1/2", "c": "5 apples"})
    check_references([GSM8KAnswer()], {"a": "1,000.5", "b": "-3", "c": "$5"})


# The weighted sum ----------------------------------------------------------------------------------------------------


class Fixed:
    """Returns what it is given, whatever the samples."""

    def __init__(self, values: object, weight: float = 1.0, name: str = "fixed") -> None:
        self.values, self.weight, self.name = values, weight, name

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float]:
        return self.values  # type: ignore[return-value]


class NoBatches(Fixed):
    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float]:
        if len(samples) > 1:
            raise RuntimeError
        return [0.0]


def test_a_reward_that_raises_on_no_sample_alone() -> None:
    with pytest.raises(UserError, match="a batch of 2 samples, though on none of them alone"):
        score([NoBatches(None)], [sample("a"), sample("b")])


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "at least one"),
        ([Format(), Format(0.5)], r"\['format', 'format'\]"),
        ([Format(math.nan)], "Format has name='format' and weight=nan"),
        ([Fixed([], name=None)], "Fixed has name=None"),
        ([Fixed([], name="total")], "got a reward named total"),
        ([Fixed([3e38]), Fixed([3e38], name="other")], "the sum of all rewards must be a float32 number"),
        ([Fixed([], weight="1")], "weight='1'"),
        ("qerl_pl.rewards.Format", "rewards must be a list of them; got 'qerl_pl.rewards.Format'; put"),
    ],
)
def test_bad_lists_of_rewards(rewards: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        score(rewards, [sample("")])
