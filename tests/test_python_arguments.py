"""Arguments of constructors as a script may give them: they work, or end in one line before anything is loaded."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from qerl_pl.algorithm import GRPO
from qerl_pl.callbacks import AdaptiveQuantizationNoise, EvaluationConfig, RolloutCallback
from qerl_pl.datamodules import BigMathDataModule, ConversationDataModule, GSM8KDataModule, TableDataModule
from qerl_pl.datamodules.tables import TableConfig
from qerl_pl.errors import UserError
from qerl_pl.modules import LoraConfig, PolicyConfig, QeRLModule, TeacherConfig
from qerl_pl.rewards import GSM8KAnswer
from qerl_pl.types import EvalSampling, SamplingConfig


class Named:
    """A user's reward whose members are its class's."""

    name, weight = "named", 1.0

    def __call__(self, samples: Any) -> list[float]:
        return [0.0] * len(samples)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: QeRLModule(optimizer="adamw"), "model.optimizer must take .* it says: 'str' object is not callable"),
    (lambda: PolicyConfig(quantization="int4"), "model.policy.quantization must be one of nvfp4, .*; got 'int4'"),
    (lambda: PolicyConfig(dtype=torch.bfloat16), "model.policy.dtype must be one of float32, bfloat16; got torch.bf"),
    (lambda: PolicyConfig(finetune="qlora"), "model.policy.finetune must be one of lora, full; got 'qlora'"),
    (
        lambda: PolicyConfig(lora={"rank": 8}),
        "lora must be of the class LoraConfig; got {'rank': 8}; make it by .*lora.LoraConfig",
    ),
    (
        lambda: QeRLModule("Qwen/Qwen2.5-1.5B"),
        "policy must be of the class PolicyConfig; got 'Qwen/Qwen2.5-1.5B'; make it by",
    ),
    (lambda: QeRLModule(objective="grpo"), "objective must be of the class Objective; got 'grpo'; make it by"),
    (lambda: QeRLModule(teacher={"path": "x"}), "teacher must be of the class TeacherConfig; got {"),
    (
        lambda: RolloutCallback([], sampling={"max_tokens": 8}),
        "sampling must be of the class SamplingConfig; got {'max_tok",
    ),
    (
        lambda: RolloutCallback([], environment={"factory": Named}),
        "environment must be of the class EnvironmentConfig; got {",
    ),
    (lambda: RolloutCallback([], evaluation={"samples": 4}), "evaluation must be of the class EvaluationConfig; got {"),
    (lambda: RolloutCallback("GSM8KAnswer"), "rewards must be a list of them; got 'GSM8KAnswer'"),
    (lambda: RolloutCallback(["GSM8KAnswer"]), "a reward is a class of rewards, or a function named .*'GSM8KAnswer'"),
    (
        lambda: RolloutCallback([GSM8KAnswer]),
        "a reward is an object .*; got <class .*GSM8KAnswer'>; GSM8KAnswer.. make",
    ),
    (lambda: RolloutCallback({"mine": Named}), "a reward is an object that scores samples, .*; Named.. makes one"),
    (lambda: RolloutCallback([GSM8KAnswer(), 3]), "a reward is an object that scores samples, or a function; got 3;"),
    (lambda: GRPO(multi_objective_aggregation="sum"), "aggregation must be one of sum_then_n"),
    (lambda: SamplingConfig(max_tokens="8"), "sampling.max_tokens must be at least 1; got 8"),
    (lambda: SamplingConfig(temperature=None), "sampling.temperature must be 0 or a number .*; got None"),
    (lambda: TableDataModule(None), "data.path must be a file, a folder, a hub name or rows; got a NoneType;"),
    (lambda: TableDataModule({"train": [{"question": "?"}]}), "got a dict of train; give one split, data..train..,"),
    (
        lambda: TableDataModule(datasets.DatasetDict(train=datasets.Dataset.from_list([{"q": 1}]))),
        "a DatasetDict of tr",
    ),
    (lambda: TableConfig(3), "data.path must be a file, a folder, a hub name or rows; got a int;"),
    # Values that no type excludes.
    (lambda: AdaptiveQuantizationNoise(sigma_end=1.0), "Noise must not grow"),
    (lambda: AdaptiveQuantizationNoise(decay="math.exp"), "progress in .0, 1. to .0, 1.; with math.exp, sigma is -0.0"),
    (lambda: AdaptiveQuantizationNoise(decay="builtins.print"), "print must map progress to a number; it says: unsup"),
    (lambda: SamplingConfig(temperature=-1.0), "temperature must be 0 or a number from 0.01 to 2; got -1.0"),
    (lambda: SamplingConfig(temperature=2.5), "temperature must be 0 or a number from 0.01 to 2; got 2.5"),
    (lambda: SamplingConfig(stop=[""]), "none of them empty; got .*; correct the list"),
    (
        lambda: RolloutCallback([Named()], evaluation=EvaluationConfig(sampling=EvalSampling(top_p=0.0))),
        "evaluation.sampling.top_p must be above 0",
    ),
    (lambda: LoraConfig(alpha=math.nan), "finite alpha > 0; got nan; set model.policy.lora"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=range(len(REFUSED)))
def test_an_argument_of_another_type_is_one_line(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_paths_are_their_text_which_checkpoints_hold() -> None:
    config = PolicyConfig(path=Path("a/b"), adapter=Path("c"))  # type: ignore[arg-type]
    assert TeacherConfig(path=Path("a/b")).path == "a/b"  # type: ignore[arg-type]
    assert (config.path, config.adapter) == ("a/b", "c")


ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(12)]


@pytest.mark.parametrize(
    "given",
    [
        lambda path: path,
        lambda path: str(path),
        lambda path: ROWS,
        lambda path: tuple(ROWS),
        lambda path: iter(ROWS),
        lambda path: datasets.Dataset.from_list(ROWS),
        lambda path: datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    ],
)
def test_a_table_is_whatever_yields_rows(given: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    datasets.Dataset.from_list(ROWS).to_json(path)
    rows = TableDataModule(given(path)).train_rows()
    assert [(row.question, row.reference) for row in rows] == [(row["question"], row["answer"]) for row in ROWS]
    assert len(TableConfig(given(path)).rows("set")) == len(ROWS)
    assert TableDataModule(given(path))._has_one_split and len(ConversationDataModule(given(path)).train_rows()) == 12


def test_files_of_the_named_data_sets_are_paths_too() -> None:
    assert (GSM8KDataModule(Path("g.jsonl")).path, BigMathDataModule(Path("b")).path) == ("g.jsonl", "b")  # type: ignore
