"""What a rollout hands over, and when it stops the run: by runs on a tiny policy."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_helpers import Vowels, train
from lightning.pytorch import Callback

from qerl_pl.callbacks import CompletionLog
from qerl_pl.engines import TransformersEngine


class Keeping(TransformersEngine):
    """Keeps what training sampled, by prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.sampled: list[tuple[tuple[int, ...], int]] = []

    def generate(self, requests: Any, sampling: Any) -> Any:
        groups = super().generate(requests, sampling)
        for request, group in zip(requests, groups, strict=True):
            if len(request.seeds) == 2:
                self.sampled += [(request.prompt_ids, len(one.token_ids)) for one in group]
        return groups


class Odd:
    """Finds the completions of half of the prompts all right, of the others those with an odd sum of letters."""

    name = "odd"
    weight = 1.0

    def __call__(self, samples: Any) -> list[float]:
        return [float(len(s.prompt) % 2 or sum(map(ord, s.completion)) % 2) for s in samples]


class Same:
    """Finds everything equally good."""

    name = "same"
    weight = 1.0

    def __call__(self, samples: Any) -> list[float]:
        return [1.0] * len(samples)


class Start(Callback):
    """Keeps what was there before the first step, and how many completions each experience has."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch.experience))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.trained = {name: tensor.clone() for name, tensor in pl_module.policy.trained_state().items()}


def test_rollouts_without_any_informative_group_change_nothing_but_the_version(
    tiny_policy_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = Start()
    module = train(
        tiny_policy_dir,
        tmp_path,
        TransformersEngine(),
        rewards=[Same(), Vowels(weight=0.0)],
        resample_rounds=1,
        lr=0.05,
        watch=watch,
        minibatches=2,
        policy={"path": str(tiny_policy_dir), "dtype": "float32", "lora": {"rank": 4, "dropout": 0.5}},
    )
    assert module.policy_version == 4 and module.trainer.global_step == 4 * 2
    now = module.policy.trained_state()
    assert all(torch.equal(now[name], before) for name, before in watch.trained.items())  # no KL, no weight decay
    assert not module.trainer.optimizers[0].state
    assert module.lr_schedulers().last_epoch == 4 * 2
    metrics = {name: value.item() for name, value in module.trainer.callback_metrics.items()}
    over_nothing = ("policy/", "mismatch/", "completions/length", "completions/truncated")
    for name, value in metrics.items():
        assert math.isnan(value) == name.startswith(over_nothing), name
    assert metrics["completions/groups_dropped_frac"] == 1 and metrics["reward/same"] == 1
    assert metrics["completions/groups_without_signal_frac"] == 1 and metrics["completions/sampler_entropy"] > 0
    assert metrics["completions/sampled_tokens"] > 0 and metrics["optim/grad_norm"] == 0
    assert watch.sizes == [0] * 4
    assert caplog.text.count("trains nothing: none of 4 groups has both right and wrong answers") == 4


def test_the_file_of_completions_has_those_that_dynamic_sampling_dropped(tiny_policy_dir: Path, tmp_path: Path) -> None:
    engine, watch = Keeping(), CompletionLog(jsonl=True)
    rewards = [Odd(), Vowels()]
    module = train(tiny_policy_dir, tmp_path, engine, rewards=rewards, resample_rounds=1, watch=watch)
    records = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    prompts = {prompt.id: prompt for prompt in module.trainer.datamodule.replacement_prompts(("all",), 40, ())}
    written = [(prompts[record["prompt_id"]].token_ids, record["tokens"]) for record in records]
    assert written == engine.sampled and len(written) > 4 * 2 * 2
    assert [record["version"] for record in records] == sorted(record["version"] for record in records)
    groups = [records[index : index + 2] for index in range(0, len(records), 2)]
    for one, other in groups:
        assert one["trained"] == other["trained"] == (one["rewards"]["odd"] != other["rewards"]["odd"])
    assert {one["trained"] for one, _ in groups} == {True, False}
