"""The order of the prompts: shuffled by seed and epoch, and the same after a resume."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoTokenizer

from qerl_pl.datamodules import ArithmeticDataModule, PromptDataModule, Row
from qerl_pl.datamodules.base import PromptSampler
from qerl_pl.errors import UserError
from qerl_pl.runtime.checks import SamplingCallback
from qerl_pl.toy.task import ArithmeticTask
from qerl_pl.toy.tokenizer import build_tokenizer
from qerl_pl.types import Prompt, PromptBatch


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(folder)
    return str(folder)


def make_data(tokenizer: str | None, seed: int = 0, task_seed: int = 0) -> ArithmeticDataModule:
    """Nine training prompts, one for validation."""
    return ArithmeticDataModule(
        ArithmeticTask(seed=task_seed),
        train_size=9,
        test_size=1,
        batch_size=2,
        val_size=1,
        seed=seed,
        tokenizer=tokenizer,
    )


def ids_of(loader: object) -> list[str]:
    return [prompt.id for batch in loader for prompt in batch.prompts]


class Recorder(LightningModule):
    """Writes down the prompts of every training batch."""

    def __init__(self, tokenizer: str) -> None:
        super().__init__()
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[str]] = []

    def training_step(self, batch: PromptBatch, batch_idx: int) -> torch.Tensor:
        self.seen.append([prompt.id for prompt in batch.prompts])
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        assert isinstance(batch.prompts[0], Prompt)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, data: PromptDataModule, module: Recorder, ckpt_path: Path | None = None) -> list[list[str]]:
    """Three epochs of four batches, with a checkpoint after every batch and at the end of every epoch."""
    checkpoints = [
        ModelCheckpoint(folder, filename="batch-{step}", every_n_train_steps=1, save_top_k=-1),
        ModelCheckpoint(folder, filename="epoch-{step}", every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1),
    ]
    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        callbacks=checkpoints,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module.seen


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:The dirpath has changed")
def test_a_resumed_run_sees_the_same_batches(tokenizer: str, tmp_path: Path) -> None:
    full_finetuning = fit(tmp_path / "whole", make_data(None), Recorder(tokenizer))
    epochs = [full_finetuning[start : start + 4] for start in (0, 4, 8)]
    assert all(len({name for batch in epoch for name in batch}) == 8 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    for step in range(1, 12):
        for kind in ("batch", "epoch") if step % 4 == 0 else ("batch",):
            saved = tmp_path / "whole" / f"{kind}-step={step}.ckpt"
            rest = fit(tmp_path / f"{kind}-{step}", make_data(None), Recorder(tokenizer), saved)
            assert rest == full_finetuning[step:], f"resumed from {saved.name}"
    saved = tmp_path / "whole" / "batch-step=3.ckpt"
    with pytest.raises(UserError, match="the seed is 1, 0 in the checkpoint"):
        fit(tmp_path / "seed", make_data(None, seed=1), Recorder(tokenizer), saved)
    with pytest.raises(UserError, match="the training prompts"):
        fit(tmp_path / "data", make_data(None, task_seed=1), Recorder(tokenizer), saved)


def test_loaders_leave_the_global_random_state_alone(tokenizer: str) -> None:
    data = make_data(tokenizer)
    before = torch.get_rng_state()
    data.setup("test")
    orders = [ids_of(data.train_dataloader()) for _ in range(2)]
    ids_of(data.val_dataloader()), ids_of(data.test_dataloader())
    assert torch.equal(torch.get_rng_state(), before)
    assert orders[0] == orders[1]


def test_batches_are_whole_and_in_the_order_of_seed_and_epoch() -> None:
    sampler = PromptSampler(11, batch_size=4, seed=5)
    first = list(sampler)
    assert len(sampler) == 8 == len(set(first)) and set(first) < set(range(11))
    assert list(PromptSampler(11, batch_size=4, seed=5)) == first != list(PromptSampler(11, batch_size=4, seed=6))
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_a_restored_sampler_knows_its_position_before_it_goes_on() -> None:
    sampler = PromptSampler(8, batch_size=2, seed=0)
    sampler.set_epoch(3)
    order = list(sampler)
    sampler.load_state_dict({"epoch": 3, "yielded": 4})
    assert sampler.state_dict() == {"epoch": 3, "yielded": 4}
    assert list(sampler) == order[4:]


def test_replacement_prompts(tokenizer: str) -> None:
    def draw(data: ArithmeticDataModule, key: int, count: int = 4, exclude: tuple[str, ...] = ()) -> list[str]:
        return [prompt.id for prompt in data.replacement_prompts(("resample", key), count, exclude)]

    one, other = make_data(tokenizer), make_data(tokenizer)
    for data in (one, other):
        data.setup("fit")
    drawn = draw(one, 3, exclude=("train-0", "train-5"))
    assert len(set(drawn)) == 4 and set(drawn) < {f"train-{n}" for n in (1, 2, 3, 4, 6, 7, 8)}
    draw(other, 2)  # an earlier draw changes nothing
    assert draw(other, 3, exclude=("train-0", "train-5")) == drawn
    assert len({tuple(draw(one, key)) for key in range(3)}) > 1
    of_seeds = [make_data(tokenizer, seed) for seed in range(3)]
    for data in of_seeds:
        data.setup("fit")
    assert len({tuple(draw(data, 3)) for data in of_seeds}) > 1
    assert sorted(draw(one, 3, count=99, exclude=("train-0",))) == [f"train-{n}" for n in range(1, 9)]


class Counted(ArithmeticDataModule):
    """A user's, which counts its calls."""

    def __init__(self, calls: list[str], **settings: Any) -> None:
        super().__init__(batch_size=2, val_size=2, train_size=8, **settings)
        self.calls = calls

    def setup(self, stage: str) -> None:
        self.calls.append("setup")
        super().setup(stage)

    def train_rows(self) -> Sequence[Row]:
        self.calls.append("read")
        return super().train_rows()


class Offers(Callback, SamplingCallback):
    """Has a tool, and counts its calls."""

    tool: ClassVar[dict[str, Any]] = {"type": "function", "function": {"name": "add"}}

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def check_first(self, trainer: Trainer, stage: str) -> None:
        self.calls.append(f"check {stage}")

    def open_environments(self, trainer: Trainer) -> Sequence[Mapping[str, Any]]:
        self.calls.append("open")
        return [self.tool]


FIT = ["read", "check fit", "open", "setup"]


@pytest.mark.parametrize(
    ("stages", "calls"),
    [
        (["fit"], FIT),
        (["validate"], ["read", "check validate", "open", "setup"]),
        (["test"], ["read", "check test", "open", "setup"]),
        (["fit", "validate"], [*FIT, "check validate", "open", "setup"]),
        (["fit", "test"], [*FIT, "check test", "open", "setup"]),
        (["another rank's fit"], ["setup", "read", "check fit", "open"]),
    ],
)
def test_a_run_is_checked_and_set_up_once_and_offers_the_tools_of_its_environments(
    stages: list[str], calls: list[str], tokenizer: str, tmp_path: Path
) -> None:
    found: list[str] = []
    data, module, callback = Counted(found, tokenizer=tokenizer), Recorder(tokenizer), Offers(found)
    options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(accelerator="cpu", max_epochs=1, num_sanity_val_steps=0, callbacks=[callback], **options)
    for stage in stages:
        if stage.startswith("another"):
            data.trainer = trainer
            data.setup("fit")
        else:
            getattr(trainer, stage)(module, data)
    assert found == calls and data.tools == [Offers.tool]


def test_a_restored_sampler_goes_on_once() -> None:
    sampler = PromptSampler(10, 2, seed=0)
    sampler.load_state_dict({"epoch": 0, "yielded": 4})
    assert [len([*sampler]) for _ in range(2)] == [6, 10]
