"""The collector on an engine that says what the test makes it say: no model, no trainer."""

import math
import random
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from scripted import PROMPTS, SAMPLING, Even, Long, Scripted, Watched, Words, config_of, evaluator_of, nobody, own, said

from qerl_pl.algorithm import GRPO, DrGRPO
from qerl_pl.errors import UserError
from qerl_pl.rewards import OverlongPenalty
from qerl_pl.rollout.collector import Collector, pad_completions, require_finite_logprobs
from qerl_pl.rollout.scoring import Scorer
from qerl_pl.seeds import stream_seed
from qerl_pl.types import Completion, Prompt, SamplingConfig


def collector_of(engine: Any, tokenizer: Any = None, **changes: Any) -> Collector:
    return Collector(config_of(**changes), engine, tokenizer or Words(), DrGRPO(), seed=7)


def tokens_of(prompt: Prompt, version: int = 4) -> list[list[int]]:
    """What the four completions of a prompt say in a rollout."""
    return [said(prompt.token_ids, stream_seed(7, "rollout", version, prompt.id, sample)) for sample in range(4)]


def rewards_of(tokens: Sequence[int]) -> tuple[float, float]:
    return float(sum(tokens) % 2 == 0), len(tokens) + 0.25 * (len(tokens) == 3)


def informative(prompt: Prompt) -> bool:
    return 0 < sum(rewards_of(tokens)[0] for tokens in tokens_of(prompt)) < 4


@pytest.mark.parametrize("pad", [9, None])
def test_an_experience_worked_out(pad: int | None) -> None:
    words = Words()
    words.pad_token_id = pad
    found = collector_of(Scripted(), words).collect(PROMPTS[:3], 4, nobody)
    rows = [(prompt, tokens) for prompt in PROMPTS[:3] for tokens in tokens_of(prompt)]
    width = max(len(prompt.token_ids) + len(tokens) for prompt, tokens in rows)
    for row, (prompt, tokens) in enumerate(rows):
        rest = width - len(prompt.token_ids) - len(tokens)
        before = len(prompt.token_ids)
        assert found.tokens[row].tolist() == [*prompt.token_ids, *tokens, *[pad or 0] * rest]
        assert found.mask[row].tolist() == [False] * before + [True] * len(tokens) + [False] * rest
        logprobs = [0.0] * before + [own(True, token) for token in tokens] + [0.0] * rest
        assert found.sampler_logprobs[row].tolist() == pytest.approx(logprobs)
        assert (found.lengths[row], found.truncated[row]) == (before + len(tokens), len(tokens) == 3)
    scores = [rewards_of(tokens) for _, tokens in rows]
    total = [even + 0.5 * long for even, long in scores]
    means = [sum(total[index : index + 4]) / 4 for index in (0, 4, 8)]
    assert found.advantages.tolist() == pytest.approx([total[row] - means[row // 4] for row in range(12)], abs=1e-6)
    for row, (record, (prompt, tokens)) in enumerate(zip(found.records, rows, strict=True)):
        assert record.rewards == pytest.approx({"even": scores[row][0], "long": scores[row][1], "total": total[row]})
        said_it = (record.prompt_id, record.prompt, record.reference, record.completion)
        assert said_it == (prompt.id, prompt.text, prompt.reference, " ".join(map(str, tokens)))
        assert (record.tokens, record.truncated, record.trained) == (len(tokens), len(tokens) == 3, True)
    counts = [len(tokens) for _, tokens in rows]
    mean = sum(total) / 12
    expected = {
        "reward/mean": mean,
        "reward/std": math.sqrt(sum((one - mean) ** 2 for one in total) / 11),
        "reward/even": sum(even for even, _ in scores) / 12,
        "reward/long": sum(long for _, long in scores) / 12,
        "completions/length_mean": sum(counts) / 12,
        "completions/length_max": max(counts),
        "completions/truncated_frac": counts.count(3) / 12,
        "completions/groups_dropped_frac": 0.0,
        "completions/groups_without_signal_frac": sum(len(set(total[i : i + 4])) == 1 for i in (0, 4, 8)) / 3,
        "completions/sampler_entropy": -sum(own(True, token) for _, tokens in rows for token in tokens) / sum(counts),
        "completions/sampled_tokens": sum(counts),
    }
    times = {name: value for name, value in found.metrics.items() if name.startswith("time/")}
    assert found.metrics == pytest.approx(expected | times, abs=1e-6)
    assert times.keys() == {f"time/{name}_s" for name in ("wait", "rollout", "reward")}
    assert found.seconds == pytest.approx(sum(times.values())) and found.sampled_tokens == sum(counts)
    assert (found.version, found.temperature, found.max_tokens, len(found)) == (4, 0.9, 3, 12)
    assert found.indices is not None and found.indices.tolist() == list(range(12))


def test_an_experience_goes_to_a_device_with_all_that_trains() -> None:
    found = collector_of(Scripted()).collect(PROMPTS[:1], 4, nobody)
    assert set(found.metrics) >= {"reward/even", "reward/long"}  # of a batch of one prompt
    there = found.to(torch.device("meta"))
    for name in ("tokens", "lengths", "mask", "sampler_logprobs", "advantages", "truncated"):
        before, after = getattr(found, name), getattr(there, name)
        assert (after.device.type, after.shape, after.dtype) == ("meta", before.shape, before.dtype)
    assert (there.indices, there.records, there.metrics) == (found.indices, found.records, found.metrics)


def test_a_reward_sees_question_reference_and_answer() -> None:
    shown: list[Any] = []

    class Echo(Even):
        def __call__(self, samples: Any) -> list[float]:
            shown.extend((sample.prompt, sample.reference, sample.completion) for sample in samples)
            return super().__call__(samples)

    collector_of(Scripted(), rewards=[Echo()]).collect(PROMPTS[:2], 4, nobody)
    said = [(prompt, " ".join(map(str, tokens))) for prompt in PROMPTS[:2] for tokens in tokens_of(prompt)]
    assert shown == [(prompt.text, prompt.reference, text) for prompt, text in said]


def test_a_token_that_ends_a_completion_is_no_part_of_its_text() -> None:
    heard: list[str] = []

    class Hearing(Even):
        def __call__(self, samples: Any) -> list[float]:
            heard.extend(sample.completion for sample in samples)
            return super().__call__(samples)

    class Special(Words):
        """Has 4 as a special token."""

        def batch_decode(self, rows: Any, skip_special_tokens: bool, **settings: Any) -> list[str]:
            shown = [[token for token in row if token != 4 or not skip_special_tokens] for row in rows]
            return super().batch_decode(shown, skip_special_tokens, **settings)

    for ends in ((), (4,)):
        words = Special()
        collector = collector_of(Scripted(), words, rewards=[Hearing()])
        collector.ends = ends
        collector.collect(PROMPTS, 4, nobody)
        trained = [*heard]
        evaluator = evaluator_of(Scripted(), rewards=[Hearing()])
        evaluator.tokenizer, evaluator.ends = words, ends  # type: ignore[assignment]
        evaluator.evaluate(PROMPTS, Watched().weights(5))
        for texts in (trained, heard[len(trained) :]):
            assert any("4" in text for text in texts) == (ends == ())
        heard.clear()


def test_each_prompt_has_its_completions() -> None:
    one = Completion((1,), (-1.0,), "stop")
    with pytest.raises(ValueError, match="argument"):
        pad_completions(PROMPTS[:2], [[one]], 0)
    with pytest.raises(ValueError, match="argument"):
        require_finite_logprobs(PROMPTS[:2], [[one]], "Engine", 6)
    for completions in ([[one]], [[one], [one, one]]):
        with pytest.raises(ValueError, match="argument"):
            Scorer([Even()]).score(Words(), PROMPTS[:2], completions)  # type: ignore[arg-type]


def test_nothing_is_replaced_where_every_group_teaches() -> None:
    good = [prompt for prompt in PROMPTS if informative(prompt)][:2]
    found = collector_of(Scripted(), resample_rounds=2).collect(good, 4, nobody)
    assert len(found) == 8


@pytest.mark.parametrize("spare", [3, 1, 0])
def test_dynamic_sampling_replaces_what_teaches_nothing(spare: int, caplog: pytest.LogCaptureFixture) -> None:
    prompts = [Prompt(f"q{index}", (index % 7,) * (1 + index % 3), f"{index}", "") for index in range(60)]
    good = [prompt for prompt in prompts if informative(prompt)]
    bad = [prompt for prompt in prompts if not informative(prompt)]
    asked: list[Any] = []
    rounds = [[bad[3], good[1]], good[2 : 2 + spare]]

    def others(key: Sequence[int | str], count: int, exclude: Collection[str]) -> list[Prompt]:
        asked.append((key, count, set(exclude)))
        return rounds[len(asked) - 1][:count]

    batch = [bad[0], good[0], bad[1]]
    collector = collector_of(Scripted(), resample_rounds=2, accuracy_reward="even")
    found = collector.collect(batch, 4, others)
    first = {prompt.id for prompt in batch}
    assert asked == [(("resample", 4, 0), 2, first), (("resample", 4, 1), 1, first | {bad[3].id, good[1].id})]
    sampled = [*batch, bad[3], good[1], *good[2 : 2 + min(spare, 1)]]
    assert [record.prompt_id for record in found.records[::4]] == [prompt.id for prompt in sampled]
    assert [record.trained for record in found.records[::4]] == [informative(prompt) for prompt in sampled]
    trained = [prompt for prompt in sampled if informative(prompt)]
    assert len(found) == 4 * len(trained) == (12 if spare else 8)
    assert found.metrics["completions/groups_dropped_frac"] == pytest.approx(3 / len(sampled))
    assert found.sampled_tokens == sum(len(tokens) for prompt in sampled for tokens in tokens_of(prompt))
    assert "trains nothing" not in caplog.text


def test_an_answer_without_a_grade_is_not_a_wrong_one() -> None:
    class Graded(Even):
        """1, or no grade."""

        def __call__(self, samples: Any) -> list[float | None]:  # type: ignore[override]
            return [value or None for value in super().__call__(samples)]

    collector = collector_of(Scripted(), resample_rounds=1, rewards=[Graded(), Long()])
    found = collector.collect(PROMPTS[:3], 4, lambda *_: [])
    assert any(informative(prompt) for prompt in PROMPTS[:3])  # by wrong answers, where there were such
    assert not any(record.trained for record in found.records)


def test_a_rollout_that_teaches_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    prompts = [Prompt(f"q{index}", (index % 7,) * (1 + index % 3), f"{index}", "") for index in range(60)]
    bad = [prompt for prompt in prompts if not informative(prompt)][:2]
    found = collector_of(Scripted(), resample_rounds=1).collect(bad, 4, lambda *_: [])
    assert len(found) == 0 and len(found.records) == 8 and found.tokens.shape == (0, 0)
    assert found.truncated.dtype == torch.bool
    assert "rollout 4 trains nothing: none of 2 groups has both right and wrong answers" in caplog.text
    assert math.isnan(found.metrics["completions/length_max"]) and math.isnan(found.metrics["completions/length_mean"])
    assert found.metrics["completions/groups_dropped_frac"] == 1 and not math.isnan(found.metrics["reward/mean"])


@pytest.mark.parametrize("value", [0.5, None])
def test_rewards_that_are_equal_or_missing_everywhere_are_told_of(
    value: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    class Same(Even):
        def __call__(self, samples: Any) -> list[float | None]:  # type: ignore[override]
            return [value] * len(samples)

    collector_of(Scripted(), rewards=[Same()]).collect(PROMPTS[:2], 4, nobody)
    told = "rollout 4 has no advantages: each group's rewards are equal or missing; the first completion, of row "
    assert f"{told}{PROMPTS[0].id}, ends with " in caplog.text
    assert f"and its reference is {PROMPTS[0].reference!r}" in caplog.text
    caplog.clear()
    taught = collector_of(Scripted(), rewards=[Same()])
    taught.objective = DrGRPO(distillation_coefficient=0.1)
    taught.collect(PROMPTS[:2], 4, nobody)
    assert "has no advantages" not in caplog.text
    caplog.clear()
    collector_of(Scripted()).collect(PROMPTS[:2], 4, nobody)
    assert not caplog.text


@pytest.mark.parametrize(
    ("given", "missing", "std"),
    [
        ({"first": [None]}, ["first"], math.nan),
        ({"first": [None], "second": [0.0, 1.0]}, ["first"], math.sqrt(2 / 7)),
        ({"first": [None], "second": [None]}, ["first", "second"], math.nan),
        ({"first": [None] * 7 + [1.0]}, [], math.nan),
        ({"first": [1.0], "second": [None, 1.0]}, [], math.sqrt(2 / 7)),
        ({"environment": [None], "second": [0.0, 1.0]}, [], math.sqrt(2 / 7)),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_reward_that_is_none_everywhere_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, given: dict[str, list[float | None]], missing: list[str], std: float
) -> None:
    class Given(Even):
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, samples: Any) -> list[float | None]:  # type: ignore[override]
            values = given[self.name]
            return (values * len(samples))[: len(samples)]

    collector = collector_of(Scripted(), rewards=[Given(name) for name in given])
    for version in (4, 5):
        found = collector.collect(PROMPTS[:2], version, nobody)
    warned = [record.getMessage() for record in caplog.records if " is None for all 8 " in record.getMessage()]
    assert sorted(text.split()[1] for text in warned) == missing
    assert all(f"completions of rollout 4, the first of them of row {PROMPTS[0].id}: " in text for text in warned)
    logged = {name for name in given if f"reward/{name}" in found.metrics}
    assert logged == {name for name, values in given.items() if {*values} != {None}}
    assert found.metrics["reward/std"] == pytest.approx(std, nan_ok=True)


@pytest.mark.parametrize("name", ["", "hard"])
def test_an_evaluation_worked_out(name: str) -> None:
    engine, policy = Scripted(), Watched()
    found = evaluator_of(engine).evaluate(PROMPTS[:3], policy.weights(5), name)
    ids = [prompt.token_ids for prompt in PROMPTS[:3]]
    greedy, sampled = (SamplingConfig(3, temperature, stop=("!",)) for temperature in (0.0, 1.0))
    asked = [("generate", ids, greedy), ("generate", ids, sampled)]
    assert engine.calls == ["wake", ("sync", 5, True), *asked, "sleep"] and found.name == name
    assert engine.samples == [[1] * 3, [3] * 3]
    for prompt, graded in zip(PROMPTS, found.prompts, strict=False):
        seeds = [stream_seed(7, "evaluation", *[name] * bool(name), prompt.id, sample) for sample in range(3)]
        right = [rewards_of(said(prompt.token_ids, seed))[0] > 0.5 for seed in seeds]
        assert (graded.prompt_id, graded.greedy.correct) == (prompt.id, right[0])
        assert [one.correct for one in graded.samples] == right
    assert evaluator_of(Scripted()).evaluate(PROMPTS[:3], policy.weights(5)).name == ""


def test_wrong_answers_vote_by_their_normal_form() -> None:
    class Telling(Even):
        def extract_answer(self, completion: str) -> str | None:
            return completion

        def normalize_answers(self, answers: Sequence[str]) -> Sequence[str]:
            return ["the same"] * len(answers)

    (found,) = (
        evaluator_of(Scripted(), rewards=[Telling()], samples=8).evaluate(PROMPTS[:1], Watched().weights(5)).prompts
    )
    wrong = [one.answer for one in found.samples if not one.correct]
    right = {one.answer for one in found.samples if one.correct}
    assert len(wrong) > 1 and set(wrong) == {"the same"} and right and "the same" not in right


def test_settings_that_cannot_be_are_refused() -> None:
    for name, value, message in (
        ("group_size", 1, "at least 2 completions; got group_size=1"),
        ("resample_rounds", -1, "resample_rounds .*got -1"),
        ("sampling", SamplingConfig(temperature=0.0), "temperature must be above 0; got 0"),
        ("rewards", [], "reward"),
        ("accuracy_reward", "odd", r"got 'odd'; choose among \['even', 'long'\]"),
    ):
        with pytest.raises(UserError, match=message):
            config_of(**{name: value})
    for name, field in (("evaluation.samples", "samples"), ("evaluation.batch", "batch")):
        with pytest.raises(UserError, match=f"{name} .*got 0"):
            evaluator_of(Scripted(), **{field: 0})
    config_of(group_size=2, accuracy_reward="long")
    for given, name in ((None, "even"), ("long", "long")):
        assert evaluator_of(Scripted(), samples=1, accuracy_reward=given).config.scorer.accuracy.name == name


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_log_probability_that_is_not_finite_is_named(value: float) -> None:
    good, bad = Completion((1, 2), (-1.0, -2.0), "stop"), Completion((1, 2, 3), (-1.0, value, value), "length")
    require_finite_logprobs(PROMPTS[:2], [[good, good], [good, good]], "Engine", 6)
    message = f"at policy version 6 Engine gave {value} at token 2 of 3 of completion 2 of prompt p1;"
    with pytest.raises(UserError, match=message):
        require_finite_logprobs(PROMPTS[:2], [[good, good], [good, bad]], "Engine", 6)


def test_a_log_probability_that_is_not_finite_stops_a_rollout() -> None:
    engine = Scripted()
    collector = collector_of(engine)
    for version in (3, 4):
        collector.collect(PROMPTS[:1], version, nobody)
    engine.error = math.nan  # where no self-check is due
    with pytest.raises(UserError, match="at policy version 5 Scripted gave nan at token 1 of . of completion 1 of "):
        collector.collect(PROMPTS[:1], 5, nobody)


def test_nothing_pads_to_nothing() -> None:
    shapes = [tuple(tensor.shape) for tensor in pad_completions([], [], 0)]
    assert shapes == [(0, 0), (0,), (0, 0), (0, 0)]
    assert [tensor.dtype for tensor in pad_completions([], [], 0)] == [
        torch.int64,
        torch.int64,
        torch.bool,
        torch.float32,
    ]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_a_group_with_equal_totals_has_a_signal_where_each_reward_is_normalized_by_itself(aggregation: str) -> None:
    class Odd(Even):
        """So much where `Even` is 0 that the weighted sum is 1 everywhere."""

        name, weight = "odd", 0.5

        def __call__(self, samples: Any) -> list[float]:
            return [2 - 2 * value for value in super().__call__(samples)]

    prompts = [Prompt(f"q{i}", (i,) * (1 + i % 3), f"{i}", "") for i in range(30)]
    mixed = [len({sum(tokens) % 2 for tokens in tokens_of(prompt)}) == 2 for prompt in prompts]
    config, objective = (
        config_of(rewards=[Even(), Odd()], resample_rounds=1),
        GRPO(multi_objective_aggregation=aggregation),
    )
    collector = Collector(config, Scripted(), Words(), objective, seed=7)  # type: ignore[arg-type]
    found = collector.collect(prompts, 4, lambda *_: [])
    signal = mixed if aggregation == "normalize_then_sum" else [False] * 30
    assert 0 < sum(mixed) < 30 and [record.trained for record in found.records[::4]] == signal
    assert found.metrics["completions/groups_without_signal_frac"] == signal.count(False) / 30
    assert len(found) == 4 * sum(signal) and found.advantages.ne(0).all()


@pytest.mark.parametrize("reward", [0.5, None])
def test_half_a_reward_or_none_is_not_right(reward: float | None) -> None:
    class Fixed(Even):
        def __call__(self, samples: Any) -> list[float | None]:  # type: ignore[override]
            return [reward] * len(samples)

    rewards = [Fixed(), Long()]
    (found,) = evaluator_of(Scripted(), rewards=rewards).evaluate(PROMPTS[:1], Watched().weights(5)).prompts
    assert [one.correct for one in (found.greedy, *found.samples)] == [False] * 4


def test_the_mean_of_a_reward_is_over_the_completions_that_it_applies_to() -> None:
    class Some(Even):
        """None for all but the first completion."""

        def __call__(self, samples: Any) -> list[float | None]:  # type: ignore[override]
            return [1.0, *[None] * (len(samples) - 1)]

    collected = collector_of(Scripted(), rewards=[Some()]).collect(PROMPTS[:2], 4, nobody)
    assert collected.metrics["reward/even"] == collected.metrics["reward/mean"] == 1
    assert [record.rewards for record in collected.records] == [
        {"even": 1.0, "total": 1.0},
        *[{"even": None, "total": None}] * 7,
    ]


def test_the_overlong_penalty_takes_the_limit_of_sampling() -> None:
    penalty = OverlongPenalty()
    config_of(rewards=[Even(), penalty])
    assert penalty.max_length == SAMPLING.max_tokens


def test_rewards_that_draw_in_an_evaluation_leave_the_draws_of_training() -> None:
    class Drawing(Even):
        def __call__(self, samples: Any) -> list[float]:
            random.random()
            torch.rand(1)
            return super().__call__(samples)

    before = random.getstate(), torch.get_rng_state()
    evaluator_of(Scripted(), rewards=[Drawing()]).evaluate(PROMPTS[:1], Watched().weights(5))
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
