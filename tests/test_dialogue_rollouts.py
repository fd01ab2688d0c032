"""Rollouts and evaluations of dialogues: log-probabilities, limits, seeds, rewards, samples that are kept."""

import itertools
import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dialogue_helpers import LocalPool, Talking, end_of, tokenizer_of
from light_helpers import WordyGame
from lightning.pytorch import Callback, LightningModule, Trainer
from short_run import module_of, trainer_of
from test_environment_runs import PATTERN
from transformers.utils.chat_template_utils import get_json_schema

from qerl_pl.algorithm import DrGRPO
from qerl_pl.callbacks import EnvironmentConfig, RolloutCallback
from qerl_pl.callbacks.completions import _row
from qerl_pl.datamodules import GuessingDataModule
from qerl_pl.engines import RolloutEngine, TransformersEngine, VLLMEngine
from qerl_pl.environments.contract import Opening, ToolAnswer
from qerl_pl.errors import UserError
from qerl_pl.evaluation.evaluator import Evaluator, EvaluatorConfig, SampleCache
from qerl_pl.modules.qerl import QeRLModule
from qerl_pl.rewards import EnvironmentReward, RewardFunction, RewardSample, with_environment_reward
from qerl_pl.rollout.collector import Collector, CollectorConfig, pad_completions, pad_routing
from qerl_pl.rollout.dialogue_sampler import DialogueJob, DialogueSampler, environment_row
from qerl_pl.rollout.metrics import completion_metrics, environment_metrics
from qerl_pl.rollout.scoring import Scorer, last_turn
from qerl_pl.runtime.communicator import SINGLE_PROCESS
from qerl_pl.seeds import stream_seed
from qerl_pl.toy.game import GuessingGame, GuessNumber
from qerl_pl.types import (
    Completion,
    CompletionRecord,
    DialogueFacts,
    PolicyWeights,
    Prompt,
    PromptBatch,
    RolloutRequest,
    SamplingConfig,
)

SAMPLING = SamplingConfig(max_tokens=120)


class Compared(Callback):
    """Compares the trainer's log-probabilities with the sampler's before each update."""

    def __init__(self) -> None:
        self.differences: list[float] = []
        self.turns: list[list[int]] = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, QeRLModule) and batch.experience is not None
        found = batch.experience
        pl_module.policy.eval()
        with torch.no_grad():
            own, *_ = pl_module.policy.token_values(found.tokens, found.lengths, found.mask, found.temperature)
        self.differences.append((own - found.sampler_logprobs)[found.mask].abs().max().item())
        assert torch.equal(found.sampler_logprobs[~found.mask], torch.zeros(int((~found.mask).sum())))
        self.turns += [[sum(turn) for on, turn in itertools.groupby(row) if on] for row in found.mask.tolist()]


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_the_trainers_logprobs_are_the_samplers_on_every_sampled_token(
    game_policy_dir: Path, tmp_path: Path, kind: str
) -> None:
    compared = Compared()
    engine: RolloutEngine = TransformersEngine()
    if kind == "vllm":
        engine = VLLMEngine(kv_cache_gib=0.25, max_num_seqs=16, prefix_caching=True)
    rollout = RolloutCallback(
        {},
        engine,
        group_size=4,
        sampling=SAMPLING,
        environment=EnvironmentConfig(factory=GuessNumber, tool_format=PATTERN, max_turns=3, max_turn_tokens=12),
    )
    trainer = trainer_of(tmp_path, compared, rollout=rollout, noise=False, max_steps=6)
    module = module_of(game_policy_dir)
    data = GuessingDataModule(GuessingGame(highest=7, turns=3), train_size=12, batch_size=4, val_size=3)
    trainer.fit(module, datamodule=data)
    assert len(compared.differences) == 3 and max(compared.differences) < 2e-5
    assert max(map(len, compared.turns)) == 3 and sum(len(turns) - 1 for turns in compared.turns) > 24


class Playing(Talking):
    """An engine that plays the guessing game, well at an even seed and by counting at an odd one.

    Args:
        highest: Of the numbers.
    """

    def __init__(self, highest: int) -> None:
        self.tokenizer = tokenizer_of("toy")
        self.end = self.tokenizer.convert_tokens_to_ids(end_of("toy"))
        self.highest = highest
        self.weights: list[int] = []
        super().__init__(self._plays)

    def _plays(self, request: RolloutRequest) -> tuple[list[int], bool]:
        text = self.tokenizer.decode(request.prompt_ids)
        low, high = 1, self.highest
        for part in text.split("guess ")[1:]:
            guess = int(part.split("<|eos|>")[0])
            low, high = (guess + 1, high) if "higher" in part else (low, guess - 1)
        guess = (low + high) // 2 if self.good(request) else low
        return [*self.tokenizer(f"guess {guess}")["input_ids"], self.end], True

    def good(self, request: RolloutRequest) -> bool:
        return self.tokenizer.decode(request.prompt_ids).count("even") > 0

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def sync(self, weights: PolicyWeights) -> float:
        self.weights.append(weights.version)
        return 0.0


class Game:
    """The guessing game in this process."""

    tools = (get_json_schema(GuessNumber().guess),)

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.game = GuessNumber()

    def reset(self, **row: Any) -> None:
        self.game.reset(**row)

    def called(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        return ToolAnswer(self.game.guess(**arguments), False, 0.5, self.game.dialogue_done)

    def get_reward(self) -> float:
        return self.game.get_reward()


PROMPTS = [Prompt(f"p{n}", (1, 2), f"{'even' if n % 2 == 0 else 'odd'} {n}", str(n)) for n in range(1, 8)]


def sampler_of(pool: Any, **settings: Any) -> DialogueSampler:
    tokenizer = tokenizer_of("toy")
    end = tokenizer.convert_tokens_to_ids(end_of("toy"))
    config = EnvironmentConfig(**{"tool_format": PATTERN, "max_turns": 3} | settings)
    return DialogueSampler(config, pool, tokenizer, [end], 200)


def evaluator_of(engine: Playing, pool: LocalPool) -> Evaluator:
    config = EvaluatorConfig(Scorer([EnvironmentReward()]), SAMPLING, samples=2)
    return Evaluator(config, engine, engine.tokenizer, 7, dialogues=sampler_of(pool))  # type: ignore[arg-type]


def test_an_evaluation_plays_every_prompt_and_keeps_its_dialogues(tmp_path: Path) -> None:
    pool, engine = LocalPool(Game), Playing(7)
    evaluator = evaluator_of(engine, pool)
    evaluator.use_cache(SampleCache(tmp_path / "samples.jsonl"))
    weights = PolicyWeights(0, None, 1.0)
    found = evaluator.evaluate(PROMPTS, weights).prompts
    # Halving finds 2, 4 and 6 in up to three guesses; counting from 1 finds 1 and 3, and neither 5 nor 7.
    right = {"p2", "p4", "p6", "p1", "p3"}
    assert {prompt.prompt_id for prompt in found if prompt.greedy.correct} == right
    assert all([sample.correct for sample in prompt.samples] == [prompt.greedy.correct] * 2 for prompt in found)
    turns, rounds = {"p4": 1, "p1": 1, "p2": 2, "p6": 2}, len(engine.log)
    for prompt in found:
        question = next(one.text for one in PROMPTS if one.id == prompt.prompt_id)
        said = [turn for request, turn in engine.log if question in engine.tokenizer.decode(request.prompt_ids)]
        assert prompt.greedy.tokens * 3 == sum(len(turn.token_ids) for turn in said)
        assert len(said) == 3 * turns.get(prompt.prompt_id, 3) and not prompt.greedy.truncated
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert len(lines) == 21 and '"role": "tool", "name": "guess", "content": "higher"' in "".join(lines)
    again = evaluator_of(engine, pool)
    again.use_cache(SampleCache(tmp_path / "samples.jsonl"))
    assert again.evaluate(PROMPTS, weights).prompts == found and len(engine.log) == rounds


def test_turns_and_environments_have_seeds_by_row_completion_and_turn() -> None:
    pool, engine = LocalPool(Game), Playing(7)
    jobs = [DialogueJob(prompt, sample) for prompt in PROMPTS for sample in (0, 3)]
    completions = sampler_of(pool).sample(engine, jobs, SAMPLING, 7, "rollout", 5)  # type: ignore[arg-type]
    dialogues = [completion.dialogue for completion in completions if completion.dialogue is not None]
    assert [one.tool_seconds for one in dialogues] == [0.5 * one.calls for one in dialogues]
    assert len(dialogues) == len(jobs)
    seeds = {request.seeds[0] for request, _ in engine.log}
    assert len(seeds) == len(engine.log)
    turns = {stream_seed(7, "rollout", 5, prompt.id, s, t) for prompt in PROMPTS for s in (0, 3) for t in range(3)}
    assert seeds <= turns and all(stream_seed(7, "rollout", 5, p.id, 3, 0) in seeds for p in PROMPTS)
    assert pool.seeds == [stream_seed(7, "rollout", 5, job.prompt.id, "environment") for job in jobs]


@pytest.mark.parametrize("workers", [1, 3, 256])
def test_no_more_environments_are_open_than_allowed(workers: int) -> None:
    class Counting(LocalPool):
        most = 0

        def open(self, row: Mapping[str, Any], seed: int | None = None) -> Any:
            session = super().open(row, seed)
            self.most = max(self.most, sum(not session.closed for session in self.sessions))
            return session

    pool, engine = Counting(Game), Playing(7)
    jobs = [DialogueJob(prompt, 0) for prompt in PROMPTS]
    found = sampler_of(pool, workers=workers).sample(engine, jobs, SAMPLING, 7)  # type: ignore[arg-type]
    expected = sampler_of(LocalPool(Game)).sample(Playing(7), jobs, SAMPLING, 7)  # type: ignore[arg-type]
    assert pool.most == min(workers, 7) and [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert engine.rounds == ([1] * len(engine.log) if workers == 1 else engine.rounds)


def test_dialogues_whose_tools_have_answered_go_on_while_others_wait() -> None:
    release = threading.Event()

    class Slow(Game):
        def called(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
            if self.game._number == 3:
                release.wait(timeout=20)
            return super().called(name, arguments)

    class Last(Playing):
        """Lets the slow tool answer when all other dialogues are over."""

        def _completion(self, request: RolloutRequest) -> Completion:
            completion = super()._completion(request)
            if sum("odd 3" in self.tokenizer.decode(asked.prompt_ids) for asked, _ in self.log) == 1:
                others = len(self.log) - 1
                if others == 1 + 2 + 1 + 3 + 2 + 3:
                    release.set()
            return completion

    engine = Last(7)
    jobs = [DialogueJob(prompt, 0) for prompt in PROMPTS]
    waits = sampler_of(LocalPool(Slow, threads=8), tool_wait=0.0)
    found = waits.sample(engine, jobs, SAMPLING, 7)  # type: ignore[arg-type]
    assert release.is_set()  # or the slow one had been waited for
    expected = sampler_of(LocalPool(Game)).sample(Playing(7), jobs, SAMPLING, 7)  # type: ignore[arg-type]
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


class NoReward(LocalPool):
    """Environments without a reward, but for the first `rewarded` ones."""

    rewarded = 0

    def open(self, row: Mapping[str, Any], seed: int | None = None) -> Any:
        session = super().open(row, seed)
        if len(self.sessions) > self.rewarded:
            session.reward = lambda messages=(): self.thread.submit(lambda: None)
        return session


def collector_of(pool: LocalPool, **settings: Any) -> Collector:
    engine = Playing(7)
    config = CollectorConfig(Scorer([EnvironmentReward()]), group_size=2, sampling=SAMPLING, **settings)
    return Collector(config, engine, engine.tokenizer, DrGRPO(), 7, dialogues=sampler_of(pool))  # type: ignore[arg-type]


def test_a_rollout_without_any_reward_is_refused() -> None:
    collector = collector_of(NoReward(Game))
    with pytest.raises(UserError, match="none of its completions has one; define get_reward in the environment"):
        collector._sample_informative(PROMPTS[:2], 0, lambda *_: [], {})


def test_a_round_of_dynamic_sampling_without_any_reward_is_not_a_rollout_without_any() -> None:
    pool = NoReward(Game)
    pool.rewarded = 4  # the tools of the replacement's dialogues were ended by their time limit
    collector = collector_of(pool, resample_rounds=1)
    groups = collector._sample_informative(PROMPTS[:2], 0, lambda *_: PROMPTS[2:3], {})
    assert [group.total.isnan().all().item() for group in groups] == [False, False, True]


def completion_by_hand() -> Completion:
    """Two turns of two tokens with three of an environment between them."""
    facts = DialogueFacts(2, 1, 0, 0.5, ({"role": "assistant", "content": "a"},), 0.75)
    sampled = (True, True, False, False, False, True, True)
    return Completion((5, 6, 90, 91, 92, 7, 8), (-1.0, -2.0, 0, 0, 0, -3.0, -4.0), "stop", sampled, (40, 41, 42), facts)


def test_tensors_and_rewards_of_a_dialogue_by_hand() -> None:
    completion, prompt = completion_by_hand(), Prompt("p", (1, 2), "question", "answer")
    assert completion.sampled_ids == (5, 6, 7, 8) and last_turn(completion) == [7, 8]
    plain = Completion((3, 4), (-0.5, -0.25), "length")
    tokens, lengths, mask, logprobs = pad_completions([prompt], [[completion, plain]], 0)
    assert tokens.tolist() == [[40, 41, 42, 5, 6, 90, 91, 92, 7, 8], [1, 2, 3, 4, 0, 0, 0, 0, 0, 0]]
    assert lengths.tolist() == [10, 4]
    assert mask.nonzero().tolist() == [[0, 3], [0, 4], [0, 8], [0, 9], [1, 2], [1, 3]]
    assert logprobs[0].tolist() == [0, 0, 0, -1, -2, 0, 0, 0, -3, -4] and logprobs[1, 2:4].tolist() == [-0.5, -0.25]
    seen: list[RewardSample] = []

    class Seeing(EnvironmentReward):
        def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float | None]:
            seen.extend(samples)
            return super().__call__(samples)

    tokenizer = tokenizer_of("toy")
    (group,) = Scorer([Seeing(2.0)]).score(tokenizer, [prompt], [[completion, plain]])
    assert group.rewards["environment"][0] == 0.75 and group.total[0] == 1.5 and group.total[1].isnan()
    entropy = completion_metrics([group], SINGLE_PROCESS)["completions/sampler_entropy"]
    assert entropy == pytest.approx((1 + 2 + 3 + 4 + 0.5 + 0.25) / 6)
    assert group.lengths == [4, 2] and seen[0].num_tokens == 4 and seen[0].token_ids == (5, 6, 7, 8)
    assert seen[0].completion == tokenizer.decode([7, 8]) and seen[0].dialogue == completion.dialogue.messages  # type: ignore[union-attr]
    function = RewardFunction(lambda completions: [len(messages) for messages in completions], name="messages")
    assert function(seen[:1]) == [1]


def test_failed_calls_are_a_share_of_all_calls_and_the_time_of_tools_is_a_dialogues() -> None:
    dialogues = [DialogueFacts(1, 3, 1, 2.0, (), None), DialogueFacts(1, 1, 0, 4.0, (), None)]
    metrics = environment_metrics([SimpleNamespace(dialogues=[one]) for one in dialogues])  # type: ignore[misc]
    assert (metrics["environment/failed_calls_frac"], metrics["environment/tool_s"]) == (0.25, 3.0)


def test_the_environments_reward_comes_behind_others_and_only_with_an_environment() -> None:
    (own,) = with_environment_reward([], True, 0.5)
    assert (own.name, own.weight) == ("environment", 0.5)
    listed = EnvironmentReward(3.0)
    assert with_environment_reward([listed], True, 0.5) == [listed] and with_environment_reward([], False, 1.0) == []
    with pytest.raises(UserError, match="rollout.environment.factory is null; set it"):
        with_environment_reward([listed], False, 1.0)


def test_a_row_as_reset_takes_it() -> None:
    prompt = Prompt("p", (1,), "question", "7", columns={"level": 3, "answer": "own"})
    row = {"prompt": [{"role": "user", "content": "question"}], "id": "p", "answer": "own", "solution": "7", "level": 3}
    assert environment_row(prompt) == row
    chat = replace(prompt, messages=({"role": "user", "content": "hi"},), columns={})
    assert (
        environment_row(chat)["prompt"] == [{"role": "user", "content": "hi"}]
        and environment_row(chat)["answer"] == "7"
    )


EACH, ASKS = "{% for m in messages %}<|user|>{{ m.content }}", "{% if add_generation_prompt %}<|assistant|>{% endif %}"
REFUSES = EACH + "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}" + ASKS
LEAVES_OUT = "{% for m in messages if m.role == 'user' %}<|user|>{{ m.content }}{% endfor %}" + ASKS
LAST_ALONE = EACH.replace("messages", "messages[:2] + messages[2:][-1:]") + "{% endfor %}" + ASKS
ASKS_ONCE = EACH + "{% endfor %}{% if add_generation_prompt and messages|length < 2 %}<|assistant|>{% endif %}"


@pytest.mark.parametrize(
    ("template", "role"), [(REFUSES, "tool"), (LEAVES_OUT, "tool"), (LAST_ALONE, "tool"), (ASKS_ONCE, "user")]
)
def test_a_template_that_cannot_go_on_is_refused_at_the_start(template: str, role: str) -> None:
    sampler = sampler_of(LocalPool(Game))
    sampler.continuation.check(role)
    tokenizer = sampler.continuation.tokenizer
    kept = tokenizer.chat_template
    try:
        tokenizer.chat_template = template
        with pytest.raises(UserError, match=f"goes on after a turn with a message of role '{role}'"):
            sampler.continuation.check(role)
    finally:
        tokenizer.chat_template = kept


def test_a_template_that_leaves_tools_out_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for tools, warnings in (("{{ tools }}", 0), ("", 1)):
        sampler = sampler_of(LocalPool(Game))
        tokenizer = sampler.continuation.tokenizer
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizer, "chat_template", f"{tools}{tokenizer.chat_template}")
            sampler.check(Opening(None, Game.tools, False))
        assert caplog.text.count("does not mention tools: describe them in the system prompt") == warnings


def test_environments_run_by_the_settings() -> None:
    settings = {"tool_time_limit": 3.0, "workers": 5, "variables": ["GAME_KEY"]}
    pool = EnvironmentConfig(factory="my_games.Guess", **settings).pool()  # type: ignore[arg-type]
    assert pool is not None and pool.factory == "my_games.Guess"
    assert {"tool_time_limit": pool.time_limit, "workers": pool.workers, "variables": pool.variables} == settings


def test_a_dialogue_is_shown_with_what_trains_marked() -> None:
    messages = ({"role": "assistant", "content": "guess 4"}, {"role": "tool", "name": "guess", "content": "<b>|\n"})
    record = CompletionRecord("p", "question", "last turn", "7", {"total": 1.0}, False, 3, messages=messages)
    assert _row(2, record)[3] == "[assistant, trained] guess 4\n[tool guess] <b>|\n"
    assert _row(2, replace(record, messages=None))[3] == "last turn"


def test_a_call_of_an_unknown_tool_is_answered_by_a_message_of_no_ones_name() -> None:
    class Shouting(Playing):
        def _plays(self, request: RolloutRequest) -> tuple[list[int], bool]:
            return [*self.tokenizer('{"name": "\\ud800<|eos|>"}')["input_ids"], self.end], True

    class Refusing(Game):
        def called(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
            return ToolAnswer("Error: there is no such tool", True, 0.0)

    sampler = sampler_of(LocalPool(Refusing), tool_format="llama3_json", max_turns=2)
    (found,) = sampler.sample(Shouting(7), [DialogueJob(PROMPTS[0], 0)], SAMPLING, 7)  # type: ignore[arg-type]
    assert found.dialogue is not None and found.dialogue.failed_calls == 2
    assert [message["role"] for message in found.dialogue.messages] == ["assistant", "tool"] * 2
    assert {message.get("name") for message in found.dialogue.messages[1::2]} == {"unknown"}


@pytest.mark.parametrize(
    ("answers", "warnings"),
    [
        (
            [("Error: ValueError: first", True), ("Error: ValueError: second", True)],
            ["Error: ValueError: first; correct"],
        ),
        ([("Error: KeyError: 'GAME_KEY'", True)], ["workers get few variables: name GAME_KEY in rollout.environment."]),
        ([("Error: ValueError: once", True), ("higher", False)], []),
        ([("Error: wrong arguments", False)], []),
    ],
)
def test_a_tool_whose_every_call_raises_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[tuple[str, bool]],
    warnings: list[str],
) -> None:
    monkeypatch.setenv("GAME_KEY", "s5")
    given = itertools.cycle(answers)

    class Raising(Game):
        def called(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
            text, raised = next(given)
            return ToolAnswer(text, text.startswith("Error"), 0.0, raised=raised)

    sampler = sampler_of(LocalPool(Raising, threads=1))
    with caplog.at_level(logging.WARNING, logger="qerl_pl"):
        for prompt in PROMPTS[:3]:
            sampler.sample(Playing(7), [DialogueJob(prompt, 0)], SAMPLING, 7)  # type: ignore[arg-type]
    found = [record.getMessage() for record in caplog.records if "every call of guess failed" in record.getMessage()]
    assert len(found) == len(warnings) and all(text in found[0] for text in warnings)


def test_an_engine_that_takes_turns_as_they_are_ready_waits_for_no_tool() -> None:
    release = threading.Event()

    class Opening(Game):
        def reset(self, **row: Any) -> None:
            if row["id"] == "p3":
                release.wait(timeout=20)
            super().reset(**row)

    class AtOnce(Playing):
        def generate_from(self, source: Any, sampling: SamplingConfig) -> None:
            first = source.take(wait=True)
            assert first and not release.is_set()  # though one environment has not opened
            release.set()
            self.taken = len(first)
            ready = list(first)
            while ready or (ready := list(source.take(wait=True))):
                key, request = ready.pop(0)
                source.put(key, self._completion(request))

    engine, jobs = AtOnce(7), [DialogueJob(prompt, 0) for prompt in PROMPTS]
    found = sampler_of(LocalPool(Opening, threads=8)).sample(engine, jobs, SAMPLING, 7)  # type: ignore[arg-type]
    expected = sampler_of(LocalPool(Game)).sample(Playing(7), jobs, SAMPLING, 7)  # type: ignore[arg-type]
    assert [one.token_ids for one in found] == [one.token_ids for one in expected] and engine.taken < 7


# Long observations ----------------------------------------------------------------------------------------------------


def test_a_long_observation_ends_its_dialogue_before_the_first_turn(caplog: pytest.LogCaptureFixture) -> None:
    class Wordy(Game):
        def __init__(self, row: Mapping[str, Any]) -> None:
            self.game = WordyGame()

        def reset(self, **row: Any) -> str | None:  # type: ignore[override]
            return self.game.reset(**row)

    engine, pool = Playing(7), LocalPool(Wordy)
    jobs = [DialogueJob(prompt, 0) for prompt in PROMPTS]
    sampler = sampler_of(pool, workers=2)
    found = sampler.sample(engine, jobs, SAMPLING, 7)  # type: ignore[arg-type]
    sampler.sample(engine, jobs[:1], SAMPLING, 7)  # type: ignore[arg-type]
    said = ({"role": "assistant", "content": ""},)
    assert caplog.text.count("3 of 7 dialogues ended before their first turn") == 1
    (longest,) = re.findall(r"have up to (\d+) tokens, more than data.max_prompt_tokens, 200", caplog.text)
    assert int(longest) > 300  # an observation of 300 words
    ended = Completion((), (), "length", (), (1, 2), DialogueFacts(0, 0, 0, 0.0, said, 0.0))
    assert found[1::2] == [ended] * 3 and not any(
        "even" in engine.tokenizer.decode(r.prompt_ids) for r, _ in engine.log
    )
    assert [one.token_ids for one in found[::2]] == [
        one.token_ids
        for one in sampler_of(LocalPool(Game)).sample(Playing(7), jobs[::2], SAMPLING, 7)  # type: ignore[arg-type]
    ]
    assert all(session.closed for session in pool.sessions)


def test_a_dialogue_without_a_turn_has_no_routing() -> None:
    """The rows beside it keep theirs."""
    routing = torch.arange(6, dtype=torch.int16).view(3, 2, 1)
    empty, whole = Completion((), (), "length", ()), Completion((3, 4), (-0.5, -0.25), "stop", routing=routing)
    padded = pad_routing([[empty, whole]], (2, 4))
    assert padded is not None and (padded[0] == -1).all()
    assert padded[1, :, :, 0].tolist() == [[0, 1], [2, 3], [4, 5], [-1, -1]]
    assert pad_routing([[empty]], (1, 2)) is None


def test_turns_are_asked_for_in_the_order_of_the_jobs_whichever_environment_answers_first() -> None:
    class LastFirst(Game):
        def reset(self, **row: Any) -> None:
            time.sleep(0.05 * (len(PROMPTS) - int(row["id"][1:])))
            super().reset(**row)

    engine, jobs = Playing(7), [DialogueJob(prompt, 0) for prompt in PROMPTS]
    sampler_of(LocalPool(LastFirst, threads=len(jobs))).sample(engine, jobs, SAMPLING, 7)  # type: ignore[arg-type]
    first = [engine.tokenizer.decode(request.prompt_ids) for request, _ in engine.log[: len(jobs)]]
    assert engine.rounds[0] == len(jobs)
    assert all(prompt.text in asked for prompt, asked in zip(PROMPTS, first, strict=True))


def test_a_prompt_of_just_the_limit_is_sampled() -> None:
    jobs = [DialogueJob(PROMPTS[0], 0)]
    size = len(sampler_of(LocalPool(Game)).sample(Playing(7), jobs, SAMPLING, 7)[0].prompt_ids or ())  # type: ignore[arg-type]
    for limit, turns in ((size, 1), (size - 1, 0)):
        sampler = sampler_of(LocalPool(Game))
        sampler.max_prompt_tokens = limit
        (completion,) = sampler.sample(Playing(7), jobs, SAMPLING, 7)  # type: ignore[arg-type]
        assert completion.dialogue is not None and min(completion.dialogue.turns, 1) == turns
