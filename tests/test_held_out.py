"""Held-out prompts: how many completions are asked for at once, and that what is kept is not sampled again."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import Even, Scripted, Watched, Words, config_of

from qerl_pl.algorithm import GRPO
from qerl_pl.evaluation.evaluator import SampleCache
from qerl_pl.rollout.collector import Collector
from qerl_pl.rollout.config import CollectorConfig
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


def evaluate(engine: Counting, kept: SampleCache | None = None, samples: int = 3, **settings: Any) -> Evaluation:
    sampling = SamplingConfig(max_tokens=8)
    config = CollectorConfig([Even()], 2, sampling, 0, samples, 0.25, 50, **settings)
    collector = Collector(config, engine, Words(), GRPO(), seed=7)  # type: ignore[arg-type]
    return collector.evaluate(PROMPTS, Watched().weights(0), "hard", kept)


def test_the_engine_is_asked_for_so_many_completions_whosever_they_are() -> None:
    full_finetuning, parts = Counting(), Counting()
    assert evaluate(full_finetuning) == evaluate(parts, eval_batch=4)
    assert full_finetuning.asked == [(0.0, [1] * 5), (1.0, [3] * 5)]
    assert parts.asked == [(0.0, [1] * 4), (0.0, [1]), *((1.0, part) for part in ([3, 1], [2, 2], [1, 3], [3]))]


def test_held_out_prompts_have_their_own_sampling() -> None:
    engine = Counting()
    evaluate(engine, eval_sampling=EvalSampling(max_tokens=2, temperature=0.6, top_p=0.9, stop=("x",)))
    greedy, sampled = (call[2] for call in engine.calls if call[0] == "generate")
    assert sampled == SamplingConfig(max_tokens=2, temperature=0.6, top_p=0.9, stop=("x",))
    assert greedy == SamplingConfig(max_tokens=2, temperature=0.0, stop=("x",))


def test_what_the_sampling_of_held_out_prompts_leaves_out_is_as_in_training() -> None:
    training = SamplingConfig(max_tokens=700, temperature=0.9, top_p=0.8, top_k=5, min_p=0.1, stop=("END",))

    def resolved(given: EvalSampling | None) -> SamplingConfig:
        return config_of(sampling=training, eval_sampling=given).evaluation_sampling()

    assert resolved(EvalSampling()) == training
    assert resolved(EvalSampling(temperature=0.6, top_p=0.95)) == replace(training, temperature=0.6, top_p=0.95)
    explicit = EvalSampling(max_tokens=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, stop=())
    assert resolved(explicit) == SamplingConfig(max_tokens=1, temperature=0.0)  # 0 and no strings are no gaps
    assert resolved(None) == SamplingConfig(max_tokens=700, stop=("END",))


def test_what_was_kept_before_a_kill_is_not_sampled_again(tmp_path: Path) -> None:
    expected, file = evaluate(Counting()), tmp_path / "samples.jsonl"
    with pytest.raises(KeyboardInterrupt):
        evaluate(Counting(dies_at=4), SampleCache(file), eval_batch=4)
    text = file.read_text()
    assert text.count("\n") == 9  # five greedy ones, and the first four samples
    file.write_text(text[:-5])  # in the middle of the last line
    engine = Counting()
    assert evaluate(engine, SampleCache(file), eval_batch=100) == expected
    assert engine.asked == [(1.0, [3, 3, 3, 3])]
    again = Counting()
    assert evaluate(again, SampleCache(file)) == expected and again.asked == []
    assert len({line for line in file.read_text().splitlines()}) == 20 == len(SampleCache(file))


def test_more_samples_add_to_those_that_are_there(tmp_path: Path) -> None:
    kept = SampleCache(tmp_path / "samples.jsonl")
    evaluate(Counting(), kept, samples=2)
    engine = Counting()
    assert evaluate(engine, kept, samples=3) == evaluate(Counting())
    assert engine.asked == [(1.0, [1] * 5)]


def test_a_question_that_has_changed_is_asked_again(tmp_path: Path) -> None:
    kept = SampleCache(tmp_path / "samples.jsonl")
    evaluate(Counting(), kept)
    assert kept.find("hard", PROMPTS[0], None) is not None and kept.find("easy", PROMPTS[0], None) is None
    for other in (replace(PROMPTS[0], text="another"), replace(PROMPTS[0], reference="another")):
        assert kept.find("hard", other, None) is None


def test_samples_of_other_processes_count_and_stay_theirs(tmp_path: Path) -> None:
    first, second = tmp_path / "0.jsonl", tmp_path / "1.jsonl"
    evaluate(Counting(), SampleCache(first))
    unfinished = first.read_text() + "{"
    first.write_text(unfinished)
    engine = Counting()
    evaluate(engine, SampleCache(second, [first, tmp_path / "none.jsonl"]))
    assert engine.asked == [] and not second.exists() and first.read_text() == unfinished


def test_a_first_line_that_is_not_whole_is_taken_out(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text('{"set": "x"')
    assert len(SampleCache(file)) == 0 and file.read_text() == ""
