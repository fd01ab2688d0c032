"""Supervised fine-tuning: steps and losses of plain PEFT and transformers, ranks, resuming, the command line."""

import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from cli_helpers import OWN, built
from fit_helpers import adapter, command, configuration, fit, fit_here, fit_on_ranks
from huggingface_hub import ModelCard
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from safetensors.torch import load_file
from short_run import rollout_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import quiet_trainer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_pl.callbacks import AdaptiveQuantizationNoise, CompletionLog, Monitor, RunSummary
from qerl_pl.cli.main import main
from qerl_pl.datamodules import ArithmeticDataModule, ConversationDataModule
from qerl_pl.datamodules.conversations import ConversationBatch
from qerl_pl.errors import UserError
from qerl_pl.modules import LoraConfig, PolicyConfig, SFTModule
from qerl_pl.runtime.communicator import Communicator

ROOT = Path(__file__).parents[1]
ROWS = [
    {"prompt": "1 and 1 is", "completion": " 2"},
    {"prompt": "She has", "completion": " 12 pens and 3 books, more than before."},
    {"prompt": "How many days", "completion": " make a week? Seven."},
    {"prompt": "ones:", "completion": " 7+8=15."},
]


def module_of(base: Path, **settings: Any) -> SFTModule:
    policy = PolicyConfig(path=str(base), quantization="none", dtype="float32", lora=LoraConfig(rank=4, alpha=8.0))
    given: dict[str, Any] = {"policy": policy, "lr_scheduler": "constant", "warmup_ratio": 0.0, "max_grad_norm": 0.5}
    return SFTModule(**given | {"optimizer": lambda params: torch.optim.SGD(params, lr=0.5)} | settings)


def trainer_of(run: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    return quiet_trainer(run, *callbacks, **{"enable_checkpointing": False} | settings)


def data_of(rows: list[dict[str, Any]] = ROWS, **settings: Any) -> ConversationDataModule:
    return ConversationDataModule(rows, **{"batch_size": 4, "val_size": 0} | settings)


# One step -------------------------------------------------------------------------------------------------------------


def labelled(base: Path, row: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Token ids [1, T] of a row and its labels, -100 in the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompt, completion = (
        tokenizer(row[name], add_special_tokens=False)["input_ids"] for name in ("prompt", "completion")
    )
    completion = [*completion, tokenizer.eos_token_id]
    return torch.tensor([prompt + completion]), torch.tensor([[-100] * len(prompt) + completion])


def plain_step(model: nn.Module, base: Path) -> float:
    """One step on all rows, by transformers' own loss; returns the mean over their tokens."""
    batch = [labelled(base, row) for row in ROWS]
    total = sum(int((labels != -100).sum()) for _, labels in batch)
    nll = sum(model(input_ids=ids, labels=labels).loss * (labels != -100).sum() for ids, labels in batch)
    (nll / total).backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.nn.utils.clip_grad_norm_(trained, 0.5)
    torch.optim.SGD(trained, lr=0.5).step()
    return float(nll) / total


@pytest.mark.parametrize("micro_batch_tokens", [None, 12])
def test_a_step_on_an_adapter_is_that_of_peft(
    tiny_policy_dir: Path, tmp_path: Path, micro_batch_tokens: int | None
) -> None:
    module = module_of(tiny_policy_dir, micro_batch_tokens=micro_batch_tokens)
    trainer = trainer_of(tmp_path)
    start: dict[str, Tensor] = {}
    module.on_train_batch_start = lambda *_: start.update(
        {n: t.clone() for n, t in module.policy.trained_state().items()}
    )  # type: ignore[method-assign]
    trainer.fit(module, datamodule=data_of())
    model = AutoModelForCausalLM.from_pretrained(tiny_policy_dir, dtype=torch.float32)
    theirs = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    peft.set_peft_model_state_dict(theirs, start)
    loss = plain_step(theirs, tiny_policy_dir)
    assert float(trainer.callback_metrics["optim/loss"]) == pytest.approx(loss, rel=1e-5)
    expected = peft.get_peft_model_state_dict(theirs, save_embedding_layers=False)
    found = module.policy.trained_state()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
    assert any((found[name] - start[name]).abs().max() > 1e-3 for name in found)


def test_a_step_on_all_weights_is_that_of_transformers(tiny_policy_dir: Path, tmp_path: Path) -> None:
    policy = PolicyConfig(path=str(tiny_policy_dir), quantization="none", dtype="float32", finetune="full")
    trainer = trainer_of(tmp_path)
    trainer.fit(module_of(tiny_policy_dir, policy=policy), datamodule=data_of())
    model = AutoModelForCausalLM.from_pretrained(tiny_policy_dir, dtype=torch.float32)
    loss = plain_step(model, tiny_policy_dir)
    assert float(trainer.callback_metrics["optim/loss"]) == pytest.approx(loss, rel=1e-5)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for (name, found), (_, expected) in zip(saved.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=name)


def test_validation_measures_every_held_out_token(tiny_policy_dir: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_policy_dir, dtype=torch.float32).eval()
    nll, right, tokens = 0.0, 0, 0
    for row in ROWS:
        ids, labels = labelled(tiny_policy_dir, row)
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].log_softmax(-1)
        taught = labels[0, 1:] != -100
        nll -= logits[taught].gather(1, ids[0, 1:][taught, None]).sum().item()
        right += int((logits.argmax(-1) == ids[0, 1:])[taught].sum())
        tokens += int(taught.sum())

    class HeldOut(ConversationDataModule):
        def val_rows(self) -> list[dict[str, Any]]:
            return ROWS

    trainer = trainer_of(tmp_path)
    data = HeldOut(ROWS, batch_size=1, val_size=4, val_batch_size=3)
    (found,) = trainer.validate(module_of(tiny_policy_dir, micro_batch_tokens=20), datamodule=data, verbose=False)
    assert found["val/loss"] == pytest.approx(nll / tokens, rel=1e-5)
    assert found["val/perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    assert found["val/mean_token_accuracy"] == pytest.approx(right / tokens) and 0 < right < tokens


# Settings that are refused --------------------------------------------------------------------------------------------


def test_what_does_not_fit_sft_is_refused(tiny_policy_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a ConversationDataModule; got ArithmeticDataModule"):
        trainer_of(tmp_path).fit(module_of(tiny_policy_dir), datamodule=ArithmeticDataModule(train_size=8, val_size=2))
    with pytest.raises(UserError, match="RolloutCallback needs a QeRLModule; got a SFTModule"):
        trainer_of(tmp_path, rollout_of()).fit(module_of(tiny_policy_dir), datamodule=data_of())
    for callback in (AdaptiveQuantizationNoise(), CompletionLog(), Monitor(), RunSummary()):
        message = f"^{type(callback).__name__} needs a QeRLModule; got a SFTModule; train that, or leave it out$"
        with pytest.raises(UserError, match=message):
            trainer_of(tmp_path, callback).fit(module_of(tiny_policy_dir), datamodule=data_of())
    with pytest.raises(UserError, match="must fit the model's 4096 positions; got data.max_length 5000; lower it"):
        trainer_of(tmp_path).fit(module_of(tiny_policy_dir), datamodule=data_of(max_length=5000))
    with pytest.raises(UserError, match="the policy sets its own precision; trainer.precision is bf16-true"):
        trainer_of(tmp_path, precision="bf16-true").fit(module_of(tiny_policy_dir), datamodule=data_of())
    assert [*tmp_path.iterdir()] == []
    trainer = trainer_of(tmp_path, EarlyStopping("val/los"), num_sanity_val_steps=1)
    message = "EarlyStopping.monitor must be one of val/loss, val/mean_token_accuracy, val/perplexity; got val/los; "
    with pytest.raises(UserError, match=message):
        trainer.fit(module_of(tiny_policy_dir), datamodule=data_of(ROWS * 2, val_size=1))
    assert trainer.global_step == 0


SFT = ROOT / "configs" / "sft.yaml"
MISTAKES = {
    "objective": (["--model.objective", "DAPO"], "there is no key model.objective; see qerl fit --help"),
    "noise": (["--noise.sigma_start", "0.02"], "there is no key noise.sigma_start; see"),
    "rollout": (["-c", "small_card"], "there is no key rollout.engine"),
    "no path": (["--data", "ConversationDataModule"], "data.path needs a value; got none"),
    "a test": (["test"], "samples answers, which SFTModule does not; evaluate its loss by qerl val"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_keys_of_reinforcement_learning_are_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["qerl"])
    words, message = MISTAKES[name]
    command, words = ("test", []) if words == ["test"] else ("fit", words)
    assert main([command, "-c", str(SFT), "--trainer.default_root_dir", str(tmp_path / "run"), *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qerl: ")]
    assert len(lines) == 1 and re.search(message, lines[0]), lines


def test_the_configuration_builds_an_sft_run() -> None:
    settings = built("fit", "-c", str(SFT), "--model.max_grad_norm", "0.7", "--seed_everything", "4")
    assert isinstance(settings.model, SFTModule) and isinstance(settings.data, ConversationDataModule)
    assert (settings.model.max_grad_norm, settings.model.seed, settings.data.seed) == (0.7, 4, 4)
    assert (settings.best.monitor, settings.best.mode) == ("val/loss", "min")
    other = built("fit", "-c", str(SFT), "--best.monitor", "val/perplexity")
    assert (other.best.monitor, other.best.mode) == ("val/perplexity", "min")


# Runs of the command line ---------------------------------------------------------------------------------------------


def sft_settings(base: Path, run: Path, dropout: float = 0.1) -> dict[str, Any]:
    """Eight steps over two epochs, with a validation at each end and a checkpoint every third step."""
    settings = configuration(base, run)
    settings["model"] = {name: settings["model"][name] for name in ("policy", "optimizer")} | {
        "micro_batch_tokens": 150
    }
    settings["model"]["policy"]["lora"]["dropout"] = dropout
    settings["model"]["class_path"] = "SFTModule"
    settings["data"] = {
        "class_path": "qerl_pl.datamodules.ArithmeticConversations",
        "init_args": {"train_size": 16, "batch_size": 4, "val_size": 5, "val_batch_size": 2},
    }
    settings["trainer"] = {name: value for name, value in settings["trainer"].items() if name != "callbacks"}
    settings["trainer"]["num_sanity_val_steps"] = -1
    return settings | {"checkpoint": {"class_path": "ResumeCheckpoint", "init_args": {"every_n_rollouts": 3}}}


@pytest.fixture(scope="module")
def uninterrupted(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("sft") / "uninterrupted"
    status, output = fit(sft_settings(tiny_policy_dir, run))
    assert status == 0, output
    return run


def curve(run: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in EventAccumulator(str(run)).Reload().Scalars(tag)]


class DieIn:
    """SIGKILL at one call of a method: an update, or a validation's batch."""

    def __init__(self, method: str, number: int) -> None:
        self.method, self.number = method, number

    def __call__(self) -> None:
        plain, calls = getattr(SFTModule, self.method), iter(range(100))

        def dying(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == self.number:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **kwargs)

        setattr(SFTModule, self.method, dying)


def test_a_run_learns_and_writes_what_reinforcement_learning_starts_from(uninterrupted: Path) -> None:
    loss, validated = curve(uninterrupted, "optim/loss"), curve(uninterrupted, "val/loss")
    assert [step for step, _ in loss] == [*range(8)] and [step for step, _ in validated] == [-1, 3, 7]
    assert validated[-1][1] < loss[0][1] - 0.5
    assert curve(uninterrupted, "val/perplexity")[-1][1] == pytest.approx(math.exp(validated[-1][1]), rel=1e-5)
    names = {path.name for path in (uninterrupted / "checkpoints").glob("*.ckpt")}
    assert names == {"best-step=8.ckpt", "step=6.ckpt", "step=8.ckpt"}
    assert not (uninterrupted / "completions.jsonl").exists() and (uninterrupted / "config.yaml").is_file()
    assert any("layernorm" in name for name in adapter(uninterrupted))


def test_the_configuration_trains_on_data_of_few_batches(tiny_policy_dir: Path, tmp_path: Path) -> None:
    """Two steps of a user's own module, with a validation at their end."""
    (tmp_path / "mine.py").write_text(OWN.format(base="SFTModule"))
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS * 2))
    run = tmp_path / "run"
    data = ["--data", "ConversationDataModule", "--data.path", str(tmp_path / "few.jsonl"), "--data.val_size", "2"]
    policy = ["--model.policy.path", str(tiny_policy_dir), "--model.policy.quantization", "none"]
    policy += ["--model.class_path", f"{tmp_path}/mine.py:Mine", "--model.shown", "0.25"]
    words = ["fit", "-c", str(SFT), *data, "--data.batch_size", "3", *policy, "--trainer.default_root_dir", str(run)]
    status, output = command(words, tmp_path / "log")
    assert status == 0, output
    assert [step for step, _ in curve(run, "optim/loss")] == [0, 1]
    assert [step for step, _ in curve(run, "val/loss")] == [-1, 1]
    assert [value for _, value in curve(run, "mine/shown")] == [0.25, 0.25]
    assert (run / "checkpoints" / "best-step=2.ckpt").is_file()
    hyperparameters = (run / "hparams.yaml").read_text()
    assert re.search(r"^model: .*mine.py:Mine$", hyperparameters, re.M) and "model.shown: 0.25" in hyperparameters


def test_an_export_is_the_runs_adapter(uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(uninterrupted), str(tmp_path / "exported")]) == 0
    assert "the adapter of " in (said := capsys.readouterr().out) and "after 8 steps, from " in said
    tags = ModelCard.load(tmp_path / "exported" / "README.md").data.tags
    assert "sft" in tags and "reinforcement-learning" not in tags
    exported = load_file(tmp_path / "exported" / "adapter_model.safetensors")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in adapter(uninterrupted).items())


@pytest.mark.parametrize(
    "die", [DieIn("_accumulate", 4), DieIn("validation_step", 4)], ids=["in a step", "in a validation"]
)
def test_a_killed_run_resumes_bit_for_bit(
    tiny_policy_dir: Path, uninterrupted: Path, tmp_path: Path, die: Callable[[], None]
) -> None:
    settings = sft_settings(tiny_policy_dir, tmp_path / "run")
    found, output = fit(settings, "--resume", "auto", prepare=die)
    assert found == -signal.SIGKILL, output
    found, output = fit(settings, "--resume", "auto")
    assert found == 0 and "resuming from" in output, output
    expected, resumed = adapter(uninterrupted), adapter(tmp_path / "run")
    assert expected.keys() == resumed.keys() and all(torch.equal(expected[name], resumed[name]) for name in expected)
    for tag in ("optim/loss", "optim/lr", "val/loss", "val/mean_token_accuracy"):
        assert curve(tmp_path / "run", tag) == curve(uninterrupted, tag)


@pytest.mark.usefixtures("process_state")
def test_a_run_refuses_other_data_and_another_kind_of_training(
    tiny_policy_dir: Path, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    assert fit_here(sft_settings(tiny_policy_dir, run), "--resume", "auto", "--data.train_size", "12") == 2
    assert "in the same order; the training conversations differ; restore" in capsys.readouterr().err
    assert fit_here(configuration(tiny_policy_dir, run, summary=False), "--resume", "auto") == 2
    assert "the checkpoint is of supervised fine-tuning and this is reinforcement" in capsys.readouterr().err


def test_ranks_take_the_steps_of_one_process(tiny_policy_dir: Path, tmp_path: Path) -> None:
    single = sft_settings(tiny_policy_dir, tmp_path / "one", dropout=0.0)
    status, output = fit(single)
    assert status == 0, output
    several = sft_settings(tiny_policy_dir, tmp_path / "two", dropout=0.0)
    several["trainer"]["devices"] = 2
    several["data"]["init_args"]["val_batch_size"] = 1  # of which one rank has nothing
    several["trainer"]["callbacks"] = [{"class_path": "fit_helpers.KeepsEachRank"}]
    statuses, output = fit_on_ranks(several)
    assert statuses == [0, 0], output
    for tag in ("optim/loss", "optim/grad_norm", "policy/entropy", "val/loss", "val/mean_token_accuracy"):
        one, two = (curve(tmp_path / run, tag) for run in ("one", "two"))
        assert [step for step, _ in one] == [step for step, _ in two]
        assert [value for _, value in two] == pytest.approx([value for _, value in one], rel=1e-3)
    ranks = [load_file(tmp_path / "two" / f"rank{rank}.safetensors") for rank in (0, 1)]
    expected = adapter(tmp_path / "one")
    for name, tensor in ranks[0].items():
        assert torch.equal(tensor, ranks[1][name])
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-3)


def test_an_update_is_deterministic(tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU two runs would differ otherwise."""
    found, plain = [], SFTModule._accumulate

    def watched(*given: Any) -> Any:
        found.append(torch.are_deterministic_algorithms_enabled())
        return plain(*given)

    monkeypatch.setattr(SFTModule, "_accumulate", watched)
    trainer_of(tmp_path).fit(module_of(tiny_policy_dir), datamodule=data_of())
    assert found == [True] and not torch.are_deterministic_algorithms_enabled()


def test_ranks_that_have_read_other_conversations_are_told_apart(
    tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recording(Communicator):
        def require_same(self, facts: Any) -> None:
            compared.append(dict(facts))

    compared: list[dict[str, object]] = []
    monkeypatch.setattr("qerl_pl.modules.sft.communicator_of", lambda _: Recording())
    for name, rows in (("one", ROWS), ("other", [*ROWS[:3], {"prompt": "ones:", "completion": " 7+8=16."}])):
        trainer_of(tmp_path / name).fit(module_of(tiny_policy_dir), datamodule=data_of(rows))
    one, other = compared
    assert one.keys() == other.keys() and one["base model"] == other["base model"] and one != other


def test_each_step_and_each_rank_drops_other_activations(
    tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With equal rows and a rate of zero, only dropout makes the gradients of two steps differ."""

    class Norms(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            norms.append(round(float(trainer.callback_metrics["optim/grad_norm"]), 6))

    policy = PolicyConfig(
        path=str(tiny_policy_dir), quantization="none", dtype="float32", lora=LoraConfig(rank=4, alpha=8.0, dropout=0.5)
    )
    norms: list[float] = []
    for rank in (0, 1):
        monkeypatch.setattr("qerl_pl.modules.sft.communicator_of", lambda _, rank=rank: Communicator(rank))
        monkeypatch.setattr(ConversationBatch, "share", lambda batch, *_: [*batch.conversations])
        module = module_of(tiny_policy_dir, policy=policy, optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
        trainer_of(tmp_path / str(rank), Norms(), max_epochs=2).fit(module, datamodule=data_of([ROWS[1]] * 4))
    assert len(norms) == len(set(norms)) == 4
