"""The evaluator: batches of completions, sampling parameters, and its cache."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import Even, Scripted, Watched, evaluator_of

from qerl_pl.callbacks import EvaluationConfig
from qerl_pl.errors import UserError
from qerl_pl.evaluation.evaluator import SampleCache
from qerl_pl.rollout.scoring import Scorer
from qerl_pl.types import EvalSampling, Evaluation, Prompt, RolloutRequest, SamplingConfig

PROMPTS = [Prompt(f"p{index}", (1,) * (index + 1), f"question {index}", str(index)) for index in range(5)]


class Counting(Scripted):
    """Also writes down how many completions each call asks for.

    Args:
        dies_at: Number of the call that fails; 0 is never.
    """

    def __init__(self, dies_at: int = 0) -> None:
        super().__init__()
        self.asked: list[tuple[float, list[int]]] = []
        self.dies_at = dies_at

    def generate(self, requests: Sequence[RolloutRequest], sampling: SamplingConfig) -> Any:
        self.asked.append((sampling.temperature, [len(request.seeds) for request in requests]))
        if len(self.asked) == self.dies_at:
            raise KeyboardInterrupt
        return super().generate(requests, sampling)


def evaluate(
    engine: Counting, cache: SampleCache | None = None, prompts: Sequence[Prompt] = PROMPTS, **settings: Any
) -> Evaluation:
    evaluator = evaluator_of(engine, **{"rewards": [Even()], "sampling": SamplingConfig(max_tokens=8)} | settings)
    evaluator.use_cache(cache)
    return evaluator.evaluate(prompts, Watched().weights(0), "hard")


def test_the_engine_is_asked_for_so_many_completions_whosever_they_are() -> None:
    at_once, batches = Counting(), Counting()
    assert evaluate(at_once) == evaluate(batches, batch=4)
    assert at_once.asked == [(0.0, [1] * 5), (1.0, [3] * 5)]
    assert batches.asked == [(0.0, [1] * 4), (0.0, [1]), *((1.0, counts) for counts in ([3, 1], [2, 2], [1, 3], [3]))]


def test_held_out_prompts_have_their_own_sampling() -> None:
    engine = Counting()
    evaluate(engine, sampling=SamplingConfig(max_tokens=2, temperature=0.6, top_p=0.9, stop=("x",)))
    greedy, sampled = (call[2] for call in engine.calls if call[0] == "generate")
    assert sampled == SamplingConfig(max_tokens=2, temperature=0.6, top_p=0.9, stop=("x",))
    assert greedy == SamplingConfig(max_tokens=2, temperature=0.0, stop=("x",))


def test_what_the_sampling_of_held_out_prompts_leaves_out_is_as_in_training() -> None:
    training = SamplingConfig(max_tokens=700, temperature=0.9, top_p=0.8, top_k=5, min_p=0.1, stop=("END",))

    def resolved(given: EvalSampling | None) -> SamplingConfig:
        return EvaluationConfig(sampling=given).evaluator(Scorer([Even()]), training).sampling

    assert resolved(EvalSampling()) == training
    assert resolved(EvalSampling(temperature=0.6, top_p=0.95)) == replace(training, temperature=0.6, top_p=0.95)
    explicit = EvalSampling(max_tokens=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, stop=())
    assert resolved(explicit) == SamplingConfig(max_tokens=1, temperature=0.0)  # 0 and no strings are no gaps
    assert resolved(None) == SamplingConfig(max_tokens=700, stop=("END",))


def test_samples_cached_before_a_kill_are_not_sampled_again(tmp_path: Path) -> None:
    expected, file = evaluate(Counting()), tmp_path / "samples.jsonl"
    with pytest.raises(KeyboardInterrupt):
        evaluate(Counting(dies_at=4), SampleCache(file), batch=4)
    text = file.read_text()
    assert text.count("\n") == 9  # five greedy ones, and the first four samples
    file.write_text(text[:-5])  # in the middle of the last line
    engine = Counting()
    assert evaluate(engine, SampleCache(file), batch=100) == expected
    assert engine.asked == [(1.0, [3, 3, 3, 3])]
    again = Counting()
    assert evaluate(again, SampleCache(file)) == expected and again.asked == []
    assert len({line for line in file.read_text().splitlines()}) == 20 == len(SampleCache(file))


def test_more_samples_add_to_those_that_are_there(tmp_path: Path) -> None:
    cache = SampleCache(tmp_path / "samples.jsonl")
    evaluate(Counting(), cache, samples=2)
    engine = Counting()
    assert evaluate(engine, cache, samples=3) == evaluate(Counting())
    assert engine.asked == [(1.0, [1] * 5)]


def test_a_question_that_has_changed_is_asked_again(tmp_path: Path) -> None:
    cache = SampleCache(tmp_path / "samples.jsonl")
    evaluate(Counting(), cache)
    assert cache.get("hard", PROMPTS[0], None) is not None and cache.get("easy", PROMPTS[0], None) is None
    changes: list[dict[str, Any]] = [{"text": "another"}, {"reference": "another"}, {"token_ids": (2,)}]
    # What a row's own system message renders to is not in its text, nor are the columns that rewards read.
    changes += [{"messages": ({"role": "system", "content": "Be brief."},)}, {"columns": {"tests": "assert True"}}]
    for change in changes:
        assert cache.get("hard", replace(PROMPTS[0], **change), None) is None, change


def test_samples_of_other_processes_count_and_stay_theirs(tmp_path: Path) -> None:
    first, second = tmp_path / "0.jsonl", tmp_path / "1.jsonl"
    evaluate(Counting(), SampleCache(first))
    unfinished = first.read_text() + "{"
    first.write_text(unfinished)
    engine = Counting()
    evaluate(engine, SampleCache(second, [first, tmp_path / "none.jsonl"]))
    assert engine.asked == [] and not second.exists() and first.read_text() == unfinished


def test_an_incomplete_first_line_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text('{"set": "x"')
    assert len(SampleCache(file)) == 0 and file.read_text() == ""


@pytest.mark.parametrize("damage", [b"\0\0\0\n", b'{"set": "x"}\n'])
def test_what_a_power_cut_leaves_is_sampled_again(tmp_path: Path, damage: bytes) -> None:
    file = tmp_path / "samples.jsonl"
    expected = evaluate(Counting(), SampleCache(file))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:-2], damage, lines[-1]]))
    engine = Counting()
    assert evaluate(engine, SampleCache(file)) == expected and engine.asked == [(1.0, [2])]
    assert file.read_bytes().splitlines()[-2:] == [line.rstrip() for line in lines[-2:]]


def test_samples_of_a_row_that_is_again_as_it_was_are_used_again(tmp_path: Path) -> None:
    file, edited = tmp_path / "samples.jsonl", [replace(PROMPTS[0], text="another"), *PROMPTS[1:]]
    expected = evaluate(Counting(), SampleCache(file))
    evaluate(Counting(), SampleCache(file), prompts=edited)
    engine = Counting()
    assert evaluate(engine, SampleCache(file)) == expected and engine.asked == []


@pytest.mark.parametrize("error", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("settings", [{}, {"batch": 2}])
def test_held_out_prompts_are_not_graded_where_the_policy_diverged(error: float, settings: dict[str, Any]) -> None:
    engine = Counting()
    engine.error = error
    with pytest.raises(UserError, match=r"must be finite; at policy version 0 Counting gave -?(nan|inf) at token 1 of"):
        evaluate(engine, **settings)


def test_the_sample_whose_log_probability_is_not_finite_is_named() -> None:
    class Diverges(Counting):
        def generate(self, requests: Sequence[RolloutRequest], sampling: SamplingConfig) -> Any:
            groups = super().generate(requests, sampling)
            if sampling.temperature:
                groups[1][2] = replace(groups[1][2], logprobs=(math.nan, *groups[1][2].logprobs[1:]))
            return groups

    with pytest.raises(UserError, match=f"at token 1 of . of completion 3 of prompt {PROMPTS[1].id};"):
        evaluate(Diverges())
