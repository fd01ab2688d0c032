"""What reward functions are told of the run and log, by the arguments that TRL gives them."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_helpers import on_ranks
from scripted import PROMPTS, Scripted, Words, config_of
from short_run import data, module_of, trainer_of

from qerl_pl.algorithm import DrGRPO
from qerl_pl.callbacks import CompletionLog, RolloutCallback
from qerl_pl.errors import UserError
from qerl_pl.rewards import RewardFunction, RewardSample, TrainerState, score
from qerl_pl.rollout.collector import Collector
from qerl_pl.runtime.communicator import SINGLE_PROCESS, Communicator
from qerl_pl.types import SamplingConfig

SAMPLES = [RewardSample("2 + 2?", text, "4", False, 2) for text in ("four", "4", "five")]


def logged_by(function: Any, samples: Sequence[RewardSample] = SAMPLES) -> RewardFunction:
    reward = RewardFunction(function, name="mine")
    score([reward], samples)
    return reward


def takes_all(completions: list[str], trainer_state: Any, log_extra: Any, log_metric: Any) -> list[float]:
    log_extra("parsed", [text.upper() for text in completions])
    log_metric("share", trainer_state.global_step / 10)
    log_metric("share", 0.5)
    return [1.0] * len(completions)


def takes_the_rest(completions: list[str], **others: Any) -> list[float]:
    return takes_all(completions, others["trainer_state"], others["log_extra"], others["log_metric"])


async def takes_all_async(completions: list[str], trainer_state: Any, log_extra: Any, log_metric: Any) -> list[float]:
    return takes_all(completions, trainer_state, log_extra, log_metric)


@pytest.mark.parametrize("function", [takes_all, takes_the_rest, takes_all_async, functools.partial(takes_all)])
def test_a_function_is_told_the_trainers_state_and_logs_columns_and_metrics(function: Any) -> None:
    reward = RewardFunction(function, name="mine")
    for step in (4, 0):
        reward.trainer_state = TrainerState(global_step=step, max_steps=8, epoch=0.5)
        scored = score([reward], SAMPLES)
        assert scored.rewards["mine"].tolist() == [1.0] * len(SAMPLES)
        assert reward.logged_columns == {"parsed": [one.completion.upper() for one in SAMPLES]}  # of the last call
        assert reward.logged_metrics == {"share": [step / 10, 0.5]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda log_extra, log_metric: log_extra("a", [1]), "log_extra takes .* 'mine' gave 1 values of 'a' for 3;"),
        (lambda log_extra, log_metric: log_metric("a", "much"), "log_metric takes a number; .* gave 'much' for 'a'"),
        (lambda log_extra, log_metric: log_metric("step", 1), "the run logs itself; .* 'mine' has 'step'; choose"),
        (lambda log_extra, log_metric: log_metric("reward/mean", 1), "has 'reward/mean'; choose another, mine_mean,"),
    ],
)
def test_what_cannot_be_logged_is_one_line(call: Any, message: str) -> None:
    def logs(completions: list[str], log_extra: Any, log_metric: Any) -> list[float]:
        call(log_extra, log_metric)
        return [0.0] * len(completions)

    with pytest.raises(UserError, match=message):
        logged_by(logs)


def test_values_of_any_type_are_logged_as_json_has_them() -> None:
    def logs(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("any", [torch.tensor(3), None, ["a"]])
        log_extra("number", (1, 2.5, True))
        return [0.0] * len(completions)

    assert logged_by(logs).logged_columns == {"any": ["tensor(3)", None, "['a']"], "number": [1, 2.5, True]}


def test_what_is_logged_now_and_then_is_not_logged_again() -> None:
    def logs(completions: list[str], log_extra: Any) -> list[float]:
        if len(completions) > 1:
            log_extra("text", completions)
        return [0.0] * len(completions)

    reward = RewardFunction(logs)
    for samples, columns in ((SAMPLES, ["text"]), (SAMPLES[:1], [])):
        score([reward], samples)
        assert [*reward.logged_columns] == columns


@pytest.mark.parametrize("size", [1, 3])
def test_a_metric_is_the_mean_over_a_rollout_on_however_many_ranks(size: int) -> None:
    def lengths(completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
        log_extra("words", [text.split() for text in completions])
        for text in completions:
            log_metric("words/mean", len(text.split()))
        return [float(len(text)) for text in completions]

    def work(ranks: Communicator) -> Any:
        config = config_of(rewards=[RewardFunction(lengths)])
        collector = Collector(config, Scripted(), Words(), DrGRPO(), seed=7, ranks=ranks)
        return [collector.collect(batch, turn, lambda *_: []) for turn, batch in enumerate((PROMPTS, PROMPTS[:1]))]

    for found in [work(SINGLE_PROCESS)] if size == 1 else on_ranks(size, work):
        for experience in found:  # in the second, all but one rank have no prompts
            counts = [len(record.completion.split()) for record in experience.records]
            assert experience.metrics["words/mean"] == pytest.approx(sum(counts) / len(counts))
            assert all(one.extra == {"words": str(one.completion.split())} for one in experience.records)


def test_a_run_logs_them_and_tells_how_far_it_is(tiny_policy_dir: Path, tmp_path: Path) -> None:
    states: list[TrainerState] = []

    def vowels(completions: list[str], trainer_state: TrainerState, log_extra: Any, log_metric: Any) -> list[float]:
        states.append(trainer_state)
        log_extra("initial", [text[:1] for text in completions])
        log_metric("step_seen", trainer_state.global_step)
        return [sum(map("aeiou".count, text)) / 10 for text in completions]

    rollout = RolloutCallback([vowels], group_size=2, sampling=SamplingConfig(max_tokens=4))
    trainer = trainer_of(tmp_path, CompletionLog(jsonl=True), rollout=rollout, max_steps=6)
    trainer.fit(module_of(tiny_policy_dir), datamodule=data())
    seen = [(one.global_step, one.max_steps, one.epoch, one.num_train_epochs) for one in states]
    assert [*dict.fromkeys(seen)] == [(0, 6, 0.0, 1), (2, 6, 0.25, 1), (4, 6, 0.5, 1)]
    assert float(trainer.callback_metrics["step_seen"]) == 4
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert len(lines) == 12 and all(line["extra"] == {"initial": line["completion"][:1]} for line in lines)
