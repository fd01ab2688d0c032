"""The collector by itself: a policy, an engine, rewards, and no trainer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qerl_pl.algorithm import DrGRPO, NormNoise
from qerl_pl.chat.template import render_prompts
from qerl_pl.engines import EngineSpec, TransformersEngine
from qerl_pl.evaluation.evaluator import Evaluator, EvaluatorConfig
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.rollout.collector import Collector, CollectorConfig
from qerl_pl.rollout.scoring import Scorer
from qerl_pl.seeds import stream_seed
from qerl_pl.toy.task import ArithmeticTask
from qerl_pl.toy.tokenizer import EOS, PAD
from qerl_pl.types import Completion, Prompt, RolloutRequest, SamplingConfig

SAMPLING = SamplingConfig(max_tokens=5)


class Letters:
    """A reward by what a completion says, above 0.5 where its letters' sum is odd."""

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight

    def __call__(self, samples: Any) -> list[float]:
        return [sum(map(ord, sample.completion)) % 2 + len(self.name) / 100 for sample in samples]


def text_of(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> str:
    """The text that rewards see: all but end and padding."""
    return str(tokenizer.decode(completion.token_ids)).replace(EOS, "").replace(PAD, "")


class Sized:
    """A reward by a completion's length."""

    name = "size"
    weight = 0.5

    def __call__(self, samples: Any) -> list[float]:
        return [float(len(sample.completion)) for sample in samples]


@pytest.fixture(scope="module")
def policy(tiny_policy_dir: Path) -> Policy:
    config = PolicyConfig(path=str(tiny_policy_dir), quantization="none", dtype="float32", lora=LoraConfig(rank=4))
    return Policy(tiny_policy_dir, config, torch.device("cpu"), seed=1)


@pytest.fixture(scope="module")
def engine(tiny_policy_dir: Path, policy: Policy) -> Iterator[TransformersEngine]:
    engine = TransformersEngine()
    lora = policy.config.lora_spec
    assert lora is not None
    engine.launch(EngineSpec(tiny_policy_dir, torch.float32, torch.device("cpu"), lora.rank, lora.targets, 128))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompts(tiny_policy_dir: Path) -> list[Prompt]:
    problems = [ArithmeticTask().problem(index, "train") for index in range(6)]
    ids = render_prompts(AutoTokenizer.from_pretrained(tiny_policy_dir), [problem.question for problem in problems])
    return [
        Prompt(f"train-{index}", tuple(tokens), problem.question, str(problem.answer))
        for index, (tokens, problem) in enumerate(zip(ids, problems, strict=True))
    ]


def test_prompts_and_weights_in_an_experience_out(
    tiny_policy_dir: Path, policy: Policy, engine: TransformersEngine, prompts: list[Prompt]
) -> None:
    config = CollectorConfig(Scorer([Letters("letters", 1.0), Sized()]), 3, SAMPLING)
    collector = Collector(config, engine, AutoTokenizer.from_pretrained(tiny_policy_dir), DrGRPO(), seed=7)
    engine.sync(policy.weights(4, NormNoise(0.01, seed=7, version=4)))
    found = collector.collect(prompts[:2], 4)
    requests = [
        RolloutRequest(prompt.token_ids, tuple(stream_seed(7, "rollout", 4, prompt.id, sample) for sample in range(3)))
        for prompt in prompts[:2]
    ]
    expected = [
        (prompt, one)
        for prompt, group in zip(prompts, engine.generate(requests, SAMPLING), strict=False)
        for one in group
    ]
    tokenizer, said = AutoTokenizer.from_pretrained(tiny_policy_dir), []
    for row, (prompt, one) in enumerate(expected):
        start, end = len(prompt.token_ids), len(prompt.token_ids) + len(one.token_ids)
        assert found.tokens[row, :end].tolist() == [*prompt.token_ids, *one.token_ids]
        assert found.mask[row].nonzero().flatten().tolist() == list(range(start, end))
        assert found.sampler_logprobs[row, start:end].tolist() == pytest.approx(one.logprobs)
        assert found.lengths[row] == end and found.truncated[row] == (one.finish_reason == "length")
        said.append(text_of(tokenizer, one))
    assert [record.completion for record in found.records] == said
    rewards = [sum(map(ord, text)) % 2 + 0.07 + 0.5 * len(text) for text in said]
    means = [sum(rewards[:3]) / 3] * 3 + [sum(rewards[3:]) / 3] * 3
    advantages = [reward - mean for reward, mean in zip(rewards, means, strict=True)]
    assert found.advantages.tolist() == pytest.approx(advantages, abs=1e-5)
    assert found.metrics["reward/mean"] == pytest.approx(sum(rewards) / 6, abs=1e-5)
    assert (found.version, found.max_tokens, found.temperature) == (4, 5, 1.0)
    assert found.sampled_tokens == sum(len(one.token_ids) for _, one in expected)
    assert found.seconds == pytest.approx(sum(v for name, v in found.metrics.items() if name.startswith("time/")))


class Marked(Letters):
    """Takes a completion's first character for its answer."""

    def extract_answer(self, completion: str) -> str | None:
        return completion[:1] or None


@pytest.mark.parametrize(("accuracy_reward", "name"), [(None, ""), ("marked", "hard")])
def test_an_evaluation_keeps_every_answer(
    tiny_policy_dir: Path,
    policy: Policy,
    engine: TransformersEngine,
    prompts: list[Prompt],
    accuracy_reward: str | None,
    name: str,
) -> None:
    rewards = [Letters("letters", 1.0), Marked("marked", 0.0)]
    tokenizer, shares = AutoTokenizer.from_pretrained(tiny_policy_dir), []
    config = EvaluatorConfig(Scorer(rewards, accuracy_reward), SAMPLING, 4)
    found = Evaluator(config, engine, tokenizer, 7).evaluate(prompts, policy.weights(9), name)
    engine.sync(policy.weights(9))
    assert found.name == name and [one.prompt_id for one in found.prompts] == [prompt.id for prompt in prompts]
    for prompt, graded in zip(prompts, found.prompts, strict=True):
        stream = ("evaluation", name) if name else ("evaluation",)  # of several sets with the same ids
        seeds = [stream_seed(7, *stream, prompt.id, sample) for sample in range(4)]
        greedy = RolloutRequest(prompt.token_ids, (seeds[0],))
        sampled = RolloutRequest(prompt.token_ids, tuple(seeds))
        completions = [
            *engine.generate([greedy], SamplingConfig(max_tokens=5, temperature=0.0))[0],
            *engine.generate([sampled], SAMPLING)[0],
        ]
        texts = [text_of(tokenizer, one) for one in completions]
        right = [sum(map(ord, text)) % 2 == 1 for text in texts]
        answers = [(text[:1] or None) if accuracy_reward else None for text in texts]
        assert [(one.correct, one.answer) for one in (graded.greedy, *graded.samples)] == list(
            zip(right, answers, strict=True)
        )
        shares.append((float(right[0]), sum(right[1:]) / 4))
    graded = [(one.greedy.correct, sum(sample.correct for sample in one.samples) / 4) for one in found.prompts]
    assert graded == shares
    assert len({share for _, share in shares}) > 1  # prompts are told apart
