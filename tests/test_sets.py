"""Several held-out sets: each is measured by itself."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fit_helpers import Vowels, train
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from short_run import module_of, trainer_of
from torch.utils.data import DataLoader

from qerl_pl.callbacks import RunSummary
from qerl_pl.datamodules import ArithmeticDataModule, PromptDataModule, Row, TableConfig
from qerl_pl.engines import TransformersEngine
from qerl_pl.errors import UserError
from qerl_pl.modules import QeRLModule
from qerl_pl.types import Evaluation


def rows(count: int, reference: str) -> list[Row]:
    """Rows whose ids are those of every other set."""
    return [Row(f"row-{index}", f"{index} + {index} =", reference) for index in range(count)]


class Sets(ArithmeticDataModule):
    """Held-out sets with names.

    Args:
        sets: Sizes by name; what is held out has its set's name for its reference.
    """

    def __init__(self, sets: Mapping[str, int], **settings: Any) -> None:
        super().__init__(train_size=8, batch_size=2, val_batch_size=2, **{"val_size": 3, **settings})
        self.sets = sets

    def val_sets(self) -> Mapping[str, Sequence[Row]]:
        return {name: rows(size, name) for name, size in self.sets.items()}

    def test_sets(self) -> Mapping[str, Sequence[Row]]:
        return self.val_sets()


class RightReferences:
    """Finds every answer right whose reference is among some."""

    name = "accuracy"
    weight = 1.0

    def __init__(self, *references: str) -> None:
        self.references = references

    def __call__(self, samples: Any) -> list[float]:
        return [float(sample.reference in self.references) for sample in samples]


class Seen(RunSummary):
    """Also keeps the evaluations that steps return."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Evaluation] = []

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.found.append(batch.evaluation)


def test_each_set_has_its_own_metrics(
    tiny_policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, data = Seen(), Sets({"easy": 2, "MATH-500": 5})
    rewards = [RightReferences("easy"), Vowels()]
    module = train(tiny_policy_dir, tmp_path, TransformersEngine(), rewards=rewards, watch=seen, data=data)
    metrics = {name: value.item() for name, value in module.trainer.callback_metrics.items()}
    lengths = ("length_mean", "truncated_frac")
    held_out = {name: value for name, value in metrics.items() if name.startswith("val/")}
    of_length = {name: held_out.pop(name) for name in list(held_out) if name.endswith(lengths)}
    assert sorted(of_length.values()) == [1.0, 1.0, 4.0, 4.0]  # all are cut off after four tokens
    vowels = {name: held_out.pop(f"val/{name}/reward_vowels") for name in ("easy", "MATH-500")}
    assert all(0 < share < 1 for share in vowels.values())
    assert held_out == {
        "val/easy/reward_mean": pytest.approx(1 + vowels["easy"]),
        "val/easy/reward_accuracy": 1.0,
        "val/MATH-500/reward_mean": pytest.approx(vowels["MATH-500"]),
        "val/MATH-500/reward_accuracy": 0.0,
        "val/easy/accuracy": 1.0,
        "val/easy/pass@1": 1.0,
        "val/MATH-500/accuracy": 0.0,
        "val/MATH-500/pass@1": 0.0,
    }
    assert metrics["rollouts"] == 4
    ids = [(evaluation.name, [one.prompt_id for one in evaluation.prompts]) for evaluation in seen.found]
    assert [name for name, _ in ids] == ["easy", "MATH-500", "MATH-500"]
    assert [len(names) for _, names in ids] == [2, 2, 1]  # val_size 3 of each, in batches of 2
    summary = json.loads((tmp_path / "summary.json").read_text())
    right = {"easy": 1.0, "MATH-500": 0.0}
    assert summary["accuracy_after"] == right
    assert summary["accuracy_before"] == {"easy": None, "MATH-500": None}  # the run began without a validation
    assert "accuracy on MATH-500" in capsys.readouterr().out
    again: Any = RunSummary()
    again.setup(None, None, "fit")
    again.load_state_dict(seen.state_dict())
    totals = {name: held_out[f"val/{name}/reward_mean"] for name in vowels}
    for metric, values in {"pass@1": right, "accuracy": right, "reward_mean": totals}.items():
        assert again.curves[metric] == {name: [(4, value)] for name, value in values.items()}
    assert summary["held_out_reward_after"] == totals and not any(summary["held_out_reward_before"].values())
    tested = module.trainer.test(module, datamodule=data, verbose=False)
    others = (*lengths, "reward_mean", "reward_vowels")
    found = {name: value for loader in tested for name, value in loader.items() if not name.endswith(others)}
    assert found | {"step": None} == {
        "step": None,
        "test/easy/accuracy": 1.0,
        "test/easy/pass@1": 1.0,
        "test/easy/reward_accuracy": 1.0,
        "test/MATH-500/accuracy": 0.0,
        "test/MATH-500/pass@1": 0.0,
        "test/MATH-500/reward_accuracy": 0.0,
    }


def test_a_single_set_needs_no_name(tiny_policy_dir: Path) -> None:
    for sets, reference in (({"only": 5}, {"only"}), ({}, None)):
        data = Sets(sets, tokenizer=str(tiny_policy_dir))
        for stage in ("fit", "test"):
            data.setup(stage)
        assert data.val_names == data.test_names == ("",)
        loaders = data.val_dataloader(), data.test_dataloader()
        assert all(isinstance(loader, DataLoader) for loader in loaders)
        found = [[prompt.reference for batch in loader for prompt in batch.prompts] for loader in loaders]
        if reference:
            assert [len(references) for references in found] == [3, 5]  # val_size of those to validate on
            assert {one for references in found for one in references} == reference
        else:  # the set of val_rows and test_rows, as ever
            assert [len(references) for references in found] == [3, 512]


def test_without_validation_no_set_is_drawn(tiny_policy_dir: Path) -> None:
    data = Sets({"a": 2, "b": 2}, val_size=0, tokenizer=str(tiny_policy_dir))
    data.setup("fit")
    assert data.val_names == ("",) and list(data.val_dataloader()) == []


@pytest.mark.parametrize("name", ["", "a/b", "a b"])
def test_a_name_that_no_metric_can_have_is_refused(tiny_policy_dir: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"sets are named by letters, .*; got '{name}'"):
        Sets({"fine": 1, name: 1}, tokenizer=str(tiny_policy_dir)).setup("fit")


# Sets of a configuration ---------------------------------------------------------------------------------------------


def tables(folder: Path) -> dict[str, TableConfig]:
    (folder / "sums.jsonl").write_text('{"q": "1 + 1", "a": "so\\n#### 1,002"}\n{"q": "1 + 2", "a": "3"}\n')
    (folder / "words").mkdir()
    (folder / "words" / "test.jsonl").write_text('{"question": "Who?", "answer": "\\\\text{I}"}\n')
    return {
        "Sums-1": TableConfig(str(folder / "sums.jsonl"), question="q", answer="a"),
        "words": TableConfig(str(folder / "words")),
    }


def test_named_tables_are_tested_on_without_a_training_set(tiny_policy_dir: Path, tmp_path: Path) -> None:
    found = tables(tmp_path)
    data = PromptDataModule(tokenizer=str(tiny_policy_dir), sets=found, val_size=1)
    for stage in ("test", "validate"):
        data.setup(stage)
        assert data.test_names == ("Sums-1", "words")
    rows = [
        (one.id, one.text, one.reference)
        for loader in data.test_dataloader()
        for batch in loader
        for one in batch.prompts
    ]
    assert rows == [("Sums-1-0", "1 + 1", "1002"), ("Sums-1-1", "1 + 2", "3"), ("words-0", "Who?", "\\text{I}")]
    assert [len(list(loader)) for loader in data.val_dataloader()] == [1, 1]
    with pytest.raises(UserError, match="PromptDataModule has no such method; define it, .* or evaluate on data.sets"):
        PromptDataModule(tokenizer=str(tiny_policy_dir), sets=found).setup("fit")


def test_a_table_alone_keeps_its_name_and_replaces_the_module_s_own(tiny_policy_dir: Path, tmp_path: Path) -> None:
    one = {"Sums-1": tables(tmp_path)["Sums-1"]}
    data = ArithmeticDataModule(train_size=8, batch_size=2, sets=one, tokenizer=str(tiny_policy_dir))
    for stage in ("fit", "test"):
        data.setup(stage)
    assert data.val_names == data.test_names == ("Sums-1",)
    assert len(data.state_dict()["training prompts"]) == 64  # it trains on its own


@pytest.mark.parametrize(
    ("written", "reference"),
    [
        ("so #### -1,234,567.5", "-1234567.5"),
        ("#### $1,000", "$1000"),
        ("#### 1,00,000", "100000"),
        ("#### 1,000%", "1000%"),
        ("#### (1, 2)", "(1, 2)"),
        ("#### (100,200)", "(100,200)"),
        ("#### 1,2,3", "1,2,3"),
        ("1,000", "1,000"),
    ],
)
def test_commas_leave_a_number_and_stay_between_numbers(tmp_path: Path, written: str, reference: str) -> None:
    (tmp_path / "table.jsonl").write_text(json.dumps({"question": "?", "answer": written}))
    assert [row.reference for row in TableConfig(str(tmp_path / "table.jsonl")).rows("set")] == [reference]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"question": "problem"}, "needs the columns problem, a; row 1 of .* has no problem"),
        ({"limit": 0}, "a set's limit must be at least 1; got 0"),
        ({"path": "nowhere.jsonl"}, "no such file: nowhere.jsonl"),
        ({"answer": "e"}, "an answer must not be empty; row 1 of"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path, table: dict[str, Any], message: str) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_text('{"q": "1 + 1", "a": "2", "e": " "}\n')
    with pytest.raises(UserError, match=message):
        TableConfig(**{"path": str(file), "question": "q", "answer": "a"} | table).rows("sums")


def test_the_best_checkpoint_of_a_module_with_sets_of_its_own(tiny_policy_dir: Path, tmp_path: Path) -> None:
    class Logs(Callback):
        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("val/mine", 0.5)

    class Mine(QeRLModule):
        def on_validation_epoch_end(self) -> None:
            super().on_validation_epoch_end()
            self.log("val/also_mine", 0.5)

    def fit(monitor: str, *others: Callback, **settings: Any) -> ModelCheckpoint:
        best = ModelCheckpoint(tmp_path, "best", monitor=monitor, mode="max")
        module = module_of(tiny_policy_dir)
        module.__class__ = Mine
        trainer = trainer_of(tmp_path / "run", Logs(), best, *others, **settings)
        trainer.fit(module, datamodule=Sets({"easy": 2, "MATH-500": 2}))
        return best

    best = fit("val/accuracy")  # which sets with names do not log
    assert best.monitor == "val/easy/accuracy" and Path(best.best_model_path).is_file()
    for mine in ("val/mine", "val/also_mine"):
        assert Path(fit(mine, num_sanity_val_steps=-1).best_model_path).is_file()
    said = "ModelCheckpoint.monitor must be one of val/MATH-500/accuracy, .*; got val/easy/acuracy; correct it"
    for settings in ({}, {"num_sanity_val_steps": -1}):
        with pytest.raises(UserError, match=said):
            fit("val/easy/acuracy", **settings)
        with pytest.raises(UserError, match=said.replace("ModelCheckpoint", "EarlyStopping")):
            fit("val/mine", EarlyStopping("val/easy/acuracy"), **settings)


def test_of_a_larger_set_rows_are_drawn_by_the_seed(tiny_policy_dir: Path) -> None:
    def drawn(seed: int) -> list[str]:
        data = Sets({"easy": 30, "hard": 30}, seed=seed, tokenizer=str(tiny_policy_dir))
        data.setup("fit")
        assert [len(prompts) for prompts in data._val.values()] == [3, 3]
        return [prompt.id for prompt in data._val["easy"]]

    assert len({tuple(drawn(seed)) for seed in range(3)}) == 3  # tables are often sorted by difficulty
