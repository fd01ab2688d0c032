"""A user's mistakes: one line that says what is wrong, exit status 2, no traceback."""

import errno
import hashlib
import json
import operator
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from qerl_pl.cli.error_messages import explain
from qerl_pl.cli.export import take_adapter
from qerl_pl.cli.main import main
from qerl_pl.datamodules import PromptDataModule, Row
from qerl_pl.errors import UserError
from qerl_pl.modules.optimizer import build_optimizer, build_schedule
from qerl_pl.policy.saved_adapter import read_adapter
from qerl_pl.runtime.checkpoint_io import AtomicCheckpointIO, digest_path

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


@pytest.fixture(autouse=True)
def process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` sets these; give them back."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))


def complaint(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line that a mistake prints, after whatever was logged before it was found."""
    assert main(list(args)) == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("qerl: ")]
    assert len(lines) == 1 and error.endswith(lines[0] + "\n") and "Traceback" not in error
    assert len(lines[0]) < 300
    return lines[0]


PARSED = {
    "unknown key": (["--model.policy.lora.rnk", "4"], r"lora.rnk 4; did you mean model.policy.lora.rank\?; see"),
    "unknown group": (["--model.polcy.path", "x"], r"did you mean model.policy.path\?"),
    "unknown key of the trainer": (["--trainer.max_epoch", "3"], r"did you mean trainer.max_epochs\?"),
    "unknown key of the data": (
        ["--data.batchsize", "4"],
        r"^qerl: data.batchsize is no .* ArithmeticDataModule; did you mean batch_size or val_",
    ),
    "nothing like it": (["--model.zzz", "4"], "arguments: --model.zzz 4; see qerl"),
    "correction of no cap": (
        ["--model.objective.correction.cap", "-1"],
        "correction.cap must be a number above 0; got -1.0; use null for no limit",
    ),
    "no correction": (
        ["--model.objective.correction", "tis"],
        "correction must be one of off, token_tis, .*icepop; got 'tis'; choose",
    ),
    "no objective": (
        ["--model.objective", "PPO"],
        "objectives are BNPO, CISPO, DAPO, DPPO, .*OnPolicyDistillation, SAPO; see",
    ),
    "no optimizer": (
        ["--model.optimizer", "Adamw"],
        "string: Adamw; name it by its import path, as in torch.optim.AdamW",
    ),
    "no engine": (["--rollout.engine", "SGLangEngine"], "engines are TransformersEngine, VLLMEngine; see"),
    "no logger": (["--trainer.logger", "WandB"], "import path string: WandB; loggers are CSVLogger, CometLogger, "),
    "no data module": (["--data", "TabelDataModule"], "data modules are Arith.*, TableDataModule; see"),
    "abbreviated key": (["--model.lr", "1"], "unrecognized arguments: --model.lr 1"),
    "unknown class": (["--model.objective", "qerl_pl.algorithm.objectives.PPO"], "no attribute 'PPO'"),
    "unknown module": (["--data", "nowhere.Data"], "No module named 'nowhere'"),
    "wrong type": (["--model.warmup_ratio", "much"], "^qerl: model.warmup_ratio takes a number; got much; correct"),
    "words for a number": (
        ["--trainer.max_steps", "many"],
        "^qerl: trainer.max_steps takes a whole number; got many; correct it; see qerl fit --help$",
    ),
    "null for a seed": (["--seed_everything", "null"], "takes true or false or a whole number; got null"),
    "weight of a function": (
        ["--rollout.rewards.short", "my.py:short", "--rollout.rewards.short.weight", "0.5"],
        "^qerl: only a reward that is a class has arguments; got --rollout.rewards.short.weight 0.5; put the "
        "class before it, for a function --rollout.rewards.short RewardFunction --rollout.rewards.short.function file",
    ),
    "null for rewards": (["--rollout.rewards", "null"], "rollout.rewards has null; leave it out, or write {}"),
    "a logger that is none": (["--trainer.logger", "Wandb"], "trainer.logger.*import path string: Wandb"),
    "wrong choice": (["--model.policy.quantization", "int8"], "takes one of nvfp4, .*, none; got int8; correct it"),
    "unknown key of the rollout": (["--rollout.grup_size", "4"], r"rollout.grup_size.*mean rollout.group_size\?"),
    "unknown key of a callback": (["--checkpoint.keeps", "4"], "checkpoint.*keeps"),
    "no YAML": (["--rollout.group_size", "[4"], r"rollout.group_size.*\[4"),
    "small group": (["--rollout.group_size", "1"], "^qerl: a group needs .*; got group_size=1; set it to 2"),
    "rising noise": (["--noise.sigma_end", "1"], "Noise must not grow"),
    "no clipping": (["--model.max_grad_norm", "0"], "max_grad_norm must be above 0"),
    "long warm-up": (["--model.warmup_ratio", "2"], r"warmup_ratio must be in \[0, 1\]"),
    "no check": (["--rollout.check_every", "0"], "check_every must be at least 1"),
    "no evaluation": (["--rollout.eval_samples", "0"], "eval_samples must be at least 1"),
    "greedy": (["--rollout.sampling.temperature", "0"], "temperature must be above 0"),
    "cold": (
        ["--rollout.sampling.temperature", "-1"],
        "temperature must be 0 or a number of at",
    ),
    "no tokens": (["--rollout.sampling.max_tokens", "0"], "max_tokens must be at least 1"),
    "empty stop": (
        ["--rollout.sampling.stop", "['']"],
        "none of them empty; got .*; correct the list",
    ),
    "nothing likely of a held-out prompt": (
        ["--rollout.eval_sampling", "{top_p: 0}"],
        "eval_sampling.top_p must be above 0",
    ),
    "nothing likely": (["--rollout.sampling.top_p", "0"], "top_p must be above 0"),
    "nearly greedy": (
        ["--rollout.sampling.temperature", "0.005"],
        "0 or a number of at least 0",
    ),
    "small batch": (["--data.batch_size", "0"], "batch_size must be at least 1"),
    "negative rate": (["--model.optimizer.init_args.lr", "-1"], "model.optimizer .* says: Invalid learning rate: -1"),
    "rate that is none": (["--model.optimizer.init_args.lr", ".nan"], "model.optimizer .* Invalid learning rate: nan"),
    "endless rate": (["--model.optimizer.init_args.lr", ".inf"], "model.optimizer needs a learning rate .* got inf"),
    "rate beyond numbers": (["--model.optimizer.init_args.lr", "1e300"], "from 0 to 1e\\+30; got 1e\\+300; set its"),
    "another optimizer's": (["--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "-1"], "rate: -1"),
    "beta": (["--model.optimizer.init_args.betas", "[0.9, 2.0]"], "model.optimizer .* beta parameter at index 1"),
    "rate in words": (
        ["--model.optimizer.init_args.lr=fast"],
        "^qerl: model.optimizer.init_args.lr takes a number; got fast; correct it; see qerl fit --help$",
    ),
    "short key": (["--model.optimizer.lr", "fast"], "^qerl: model.optimizer.lr takes a number; got fast; correct it;"),
    "number or null": (
        ["--model.objective.correction.cap=x"],
        "^qerl: model.objective.correction.cap takes a number or null; got x",
    ),
    "misspelt argument": (
        ["--model.optimizer.wieght_decay", "1"],
        r"^qerl: model.optimizer.wieght_decay is no argument of AdamW; did you mean weight_decay\?; see qerl fit",
    ),
    "argument like no other": (
        ["--rollout.engine.zzz=1"],
        "^qerl: rollout.engine.zzz is no argument of TransformersEngine; its arguments are max_batch; see",
    ),
    "several losses a step": (["--model.optimizer", "torch.optim.LBFGS"], "once a minibatch; LBFGS asks"),
    "schedule": (["--model.lr_scheduler", "down"], "lr_scheduler must be a schedule .* 'down'"),
    "full of four bits": (["--model.policy.finetune", "full"], "not quantized; got quantization nvfp4; set .* none"),
    "no such format": (["--model.policy.quantization", "int4"], "model.policy.quantization"),
    "adapter of nothing": (["--model.policy.lora.alpha", "0"], "finite alpha > 0; got 0.0; set model.policy.lora"),
    "negative adapter": (["--model.policy.lora.alpha", "-1"], "finite alpha > 0; got -1"),
    "adapter that is none": (["--model.policy.lora.alpha", ".nan"], "finite alpha > 0; got nan"),
    "adapter on nothing": (["--model.policy.lora.targets", "[]"], "linears to adapt; got no targets; set model"),
    "negative seed": (["--seed_everything", "-1"], "a seed from 0 to 4294967295; got -1; set seed_everything"),
    "large seed": (["--seed_everything", "4294967296"], "a seed from 0 to 4294967295; got 4294967296"),
    "no seed": (["--seed_everything", "true"], "a seed from 0 to 4294967295; got True"),
    "negative order": (["--data.seed", "-1"], "data.seed must be at least 0; got -1"),
    "toy rate": (["--model.policy.toy.learning_rate", "-1"], "learning_rate must be a number of at least 0, got -1"),
    "null in an item": (
        ["--checkpoint.keep", "null"],
        "^qerl: checkpoint.keep takes a whole number; got null; correct it",
    ),
    "list for a group": (
        ["--rollout.sampling", "[]"],
        r"rollout.sampling.*\[\]",
    ),
    "another's class": (
        ["--trainer.callbacks+", '{"class_path": "lightning.pytorch.callbacks.Timer", "init_args": {"interval": "x"}}'],
        "interval.*x",
    ),
}


@pytest.mark.parametrize("case", PARSED)
def test_a_mistake_on_the_command_line_is_one_line(capsys: pytest.CaptureFixture[str], case: str) -> None:
    args, message = PARSED[case]
    assert re.search(message, complaint(capsys, "fit", "-c", str(QUICKSTART), *args))


def test_arguments_of_an_optimizer_without_its_class_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "rate.yaml").write_text("model: {optimizer: {lr: 0.001}}\n")
    plain = ["fit", "--data", "ArithmeticDataModule", "--rollout.rewards", "{accuracy: GSM8KAnswer}"]
    rule, remedy = "model.optimizer is a class and its arguments", "put --model.optimizer torch.optim.AdamW before it"
    for args, given in (
        (["--model.optimizer.lr", "1e-4"], "lr='1e-4'"),
        (["-c", str(tmp_path / "rate.yaml")], "{'lr': 0.001}"),
    ):
        assert f"{rule}; got {given} without a class; {remedy}" in complaint(capsys, *plain, *args)


def test_a_mistake_in_a_file_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    settings = yaml.safe_load(QUICKSTART.read_text())
    settings["rollout"]["rewards"]["accuracy"] = {"class_path": "qerl_pl.rewards.Nothing"}
    path = tmp_path / "mistaken.yaml"
    path.write_text(yaml.safe_dump(settings))
    line = complaint(capsys, "fit", "-c", str(path))
    assert "rollout.rewards" in line and "no attribute 'Nothing'" in line and "see qerl fit --help" in line
    for name, nearest in {"gsm8": "gsm8k", "config/sft.yaml": "sft", f"{tmp_path}/dapo.yaml": "dapo"}.items():
        line = complaint(capsys, "fit", "-c", name)
        assert f"got {name}, which is neither; did you mean {nearest}? `qerl configs` lists" in line
    path.write_bytes("# für später".encode("latin-1"))
    assert "text in UTF-8" in complaint(capsys, "fit", "-c", str(path))
    for text, found in {"": "empty", "- sft\n": "none"}.items():
        path.write_text(text)
        line = complaint(capsys, "fit", "-c", str(path))
        assert f"a configuration is a mapping of keys to values; {path} is {found}; write some" in line


NOT_YAML = {
    "model:\n\tpolicy: {}": r", line 2, column 1: found character '\t' that cannot start any token; indent with spaces",
    "model: {policy: {path: x}\ntrainer: {}": ", line 2, column 1: expected ',' or '}', but got '<scalar>'; correct",
    'model: "x': ", line 1, column 10: found unexpected end of stream; correct the line, or the one before",
    "model: \x07": " has U+0007 at character 8; remove it",
}


@pytest.mark.parametrize("text", NOT_YAML)
def test_a_file_that_is_no_yaml_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    line = complaint(capsys, "fit", "-c", str(path))
    assert line.startswith("qerl: a configuration is YAML") and f"{path}{NOT_YAML[text]}" in line


REPEATED = {
    "group": ("rollout: {group_size: 4}\nrollout: {sampling: {max_tokens: 8}}", "line 2 has rollout"),
    "key in a list": ("trainer:\n  callbacks:\n  - class_path: A\n    class_path: B", "line 4 has class_path"),
}


@pytest.mark.parametrize("case", REPEATED)
def test_a_key_that_stands_twice_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, case: str) -> None:
    text, found = REPEATED[case]
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    line = complaint(capsys, "fit", "-c", str(QUICKSTART), "-c", str(path))
    assert f"a key stands once in a mapping; {path}, {found} again; put the values of both under one" in line


def of(name: str, **arguments: object) -> dict[str, Any]:
    return {"class_path": name, "init_args": arguments}


IN_A_FILE: dict[str, tuple[dict[str, Any], str]] = {
    "reward": (
        {"rollout": {"rewards": {"accuracy": of("GSM8KAnswer"), "format": of("Format", wieght=0.1)}}},
        r"rollout.rewards.format.init_args.wieght is no argument of Format; did you mean weight\?; see qerl fit",
    ),
    "list of rewards": (
        {"rollout": {"rewards": [of("GSM8KAnswer"), of("Format", zzz=0.1)]}},
        "rollout.rewards.init_args.zzz is no argument of Format; its arguments are weight, tags; see",
    ),
    "weight": (
        {"rollout": {"rewards": {"accuracy": of("GSM8KAnswer", weight=1.0), "format": of("Format", weight="much")}}},
        "rollout.rewards.format.init_args.weight takes a number; got much; correct it; see qerl fit --help$",
    ),
    "null for a reward": (
        {"rollout": {"rewards": {"accuracy": None}}},
        "a reward is a class or a function, never null; rollout.rewards has null; leave it out",
    ),
    "rate": (
        {"model": {"optimizer": of("torch.optim.AdamW", lr="fast")}},
        "model.optimizer.init_args.lr takes a number; got fast; correct it; see qerl fit --help$",
    ),
    "table": (
        {"data": of("TableDataModule", path="x", sets={"easy": {"path": "y", "limit": "many"}})},
        "data.sets: limit takes a whole number or null; got many; correct it; see",
    ),
}


@pytest.mark.parametrize("case", IN_A_FILE)
def test_a_wrong_argument_of_a_class_is_told_by_its_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, case: str
) -> None:
    settings, message = IN_A_FILE[case]
    path = tmp_path / "mistaken.yaml"
    path.write_text(yaml.safe_dump(settings))
    assert re.search(f"^qerl: {message}", complaint(capsys, "fit", "-c", str(QUICKSTART), "-c", str(path)))


EMPTY = {
    "number": ({"warmup_ratio": None}, "model.warmup_ratio takes a number; got null; correct it"),
    "flag": ({"policy": {"train_norms": None}}, "model.policy.train_norms takes true or false; got null"),
    "group": ({"policy": {"lora": None}}, "model.policy.lora is a mapping of keys; got None"),
}


@pytest.mark.parametrize("case", EMPTY)
def test_a_key_without_a_value_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, case: str) -> None:
    model, message = EMPTY[case]
    path = tmp_path / "empty.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(QUICKSTART.read_text()) | {"model": model}))
    assert re.search(message, complaint(capsys, "fit", "-c", str(path)))


# A constructor, which the parser calls, and a function of the command line.
@pytest.mark.parametrize("broken", ["qerl_pl.rollout.collector.check_rewards", "qerl_pl.cli.main.check_strategy"])
def test_what_is_no_mistake_of_the_user_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str
) -> None:
    monkeypatch.setattr(broken, operator.methodcaller("a_bug"))  # a bug's frame is ours; that of a lambda were a user's
    with pytest.raises((AttributeError, ValueError), match="has no attribute 'a_bug'"):
        main(["fit", "-c", str(QUICKSTART), "--trainer.default_root_dir", str(tmp_path)])


def test_only_what_a_file_system_refuses_is_a_users_file() -> None:
    line = explain(PermissionError(13, "Permission denied", "model/config.json"), ["fit"], ["fit"])
    assert line is not None and "model/config.json: Permission denied" in line
    assert explain(FileNotFoundError(2, "No such file or directory", "model/config.json"), ["fit"], ["fit"]) is None
    assert explain(OSError(5, "Input/output error"), ["fit"], ["fit"]) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_whoever_writes(number: int) -> None:
    """A file that is open fails without its name, as the events of TensorBoard and the lines of a log do."""
    full = OSError(number, os.strerror(number))
    wrapped = RuntimeError("cannot write")
    wrapped.__cause__ = full
    by_safetensors = SafetensorError(f"Error while serializing: I/O error: {full.strerror} (os error {number})")
    for error in (full, wrapped, by_safetensors):
        line = explain(error, ["fit"], ["fit"])
        assert line is not None and line.startswith("saving needs free disk space; ") and "--resume auto" in line


OTHER_ADAPTERS = {
    "use_dora": True,
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 2},
    "fan_in_fan_out": True,
    "lora_bias": True,
    "alora_invocation_tokens": [5, 7],  # before which the adapter is off
    "bias": "all",
    "peft_type": "LOHA",
    "init_lora_weights": "pissa",  # which takes from the base what it puts into the adapter
}


@pytest.mark.parametrize("key", [*OTHER_ADAPTERS, None])
def test_an_adapter_that_adds_something_else_is_not_taken_for_a_plain_one(tmp_path: Path, key: str | None) -> None:
    plain = {"base_model_name_or_path": "base", "r": 4, "lora_alpha": 8, "use_rslora": True}
    off = {"use_dora": False, "rank_pattern": {}, "bias": "none", "peft_type": "LORA", "init_lora_weights": True}
    on = {} if key is None else {key: OTHER_ADAPTERS[key]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(plain | off | on))
    save_file({"base_model.model.q_proj.lora_A.weight": torch.ones(4, 2)}, tmp_path / "adapter_model.safetensors")
    policy = SimpleNamespace(path=str(tmp_path), lora=SimpleNamespace())
    if key is None:
        take_adapter(policy, "test", None)
        assert (policy.path, policy.adapter) == ("base", str(tmp_path))
        return
    with pytest.raises(UserError, match=f"sets {key}; merge it"):
        take_adapter(policy, "test", None)


@pytest.mark.parametrize("other", ["lm_head.weight", "model.embed_tokens.lora_embedding_A"])
def test_an_adapter_with_other_tensors_is_told_which(tmp_path: Path, other: str) -> None:
    """As PEFT saves `modules_to_save` with the output layer, and an adapter of embeddings; norms can go on."""
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "base", "r": 4, "lora_alpha": 8})
    )
    q_proj, norm = (f"base_model.model.model.layers.0.{name}" for name in ("self_attn.q_proj", "input_layernorm"))
    tensors = {f"{q_proj}.lora_A.weight": torch.ones(4, 2), f"{norm}.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert read_adapter(str(tmp_path)).train_norms
    save_file(tensors | {f"base_model.model.{other}": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=f"{tmp_path} has base_model.model.{other}; merge it"):
        read_adapter(str(tmp_path))


FROM_LIGHTNING = {
    "no GPU": (
        ["--trainer.accelerator", "gpu"],
        "accelerator gpu needs a GPU that PyTorch sees; got none; set trainer.accelerator to cpu",
    ),
    "accumulation": (["--trainer.accumulate_grad_batches", "2"], "accumulate_grad_batches 2; .* model.micro_batch_tok"),
    "clipping": (["--trainer.gradient_clip_val", "0.5"], "gradient_clip_val 0.5; leave it out and set model.max_grad"),
    "uneven": (["--trainer.devices", "3"], "multiple of the number of devices; got 16 for 3; change one"),
    "shards": (["--trainer.devices", "2", "--trainer.strategy", "deepspeed"], "trainer.strategy|DeepSpeed"),
    "no accelerator": (["--trainer.accelerator", "quantum"], "Trainer refuses .* accelerator name: .*quantum"),
    "no strategy": (["--trainer.strategy", "quantum"], "Trainer refuses .* strategy name: .*quantum"),
    "processes": (["--trainer.strategy", "ddp"], "got the strategy DDPStrategy for 1 devices; leave .* at auto"),
    "two of a kind": (["--trainer.callbacks", "[RunSummary, RunSummary]"], "Trainer refuses .* `RunSummary`"),
    "no place": (["--trainer.default_root_dir", "/proc/nowhere"], "default_root_dir /proc/nowhere cannot be made"),
}


@pytest.mark.parametrize("case", FROM_LIGHTNING)
def test_what_lightning_refuses_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, case: str) -> None:
    args, message = FROM_LIGHTNING[case]
    where = ("--trainer.default_root_dir", str(tmp_path / "run"), "--trainer.accelerator", "cpu")
    assert re.search(message, complaint(capsys, "fit", "-c", str(QUICKSTART), *where, *args))


GSM8K = [f'{{"question": "What is {n} plus 1?", "answer": "#### {n + 1}"}}' for n in range(8)]
FOUND_LATER: dict[str, tuple[list[str] | None, list[str], str]] = {
    "no data": (None, [], "no such file: .*rows.jsonl"),
    "malformed line": ([*GSM8K, "{question"], [], "rows.jsonl, line 9"),
    "missing column": (['{"problem": "1 + 1", "answer": "#### 2"}'], [], "has no question; got problem, answer"),
    "nothing short enough": (GSM8K, ["--data.max_prompt_tokens", "5"], "none of 8 is"),
    "batch above the set": (GSM8K, ["--data.batch_size", "9"], "batch_size must not exceed"),
    "batch above what is left": (
        GSM8K,
        ["--data.batch_size", "4", "--data.val_size", "6"],
        r"batch_size=4 for 2 prompts \(6 of 8 are held out for validation by val_size\); lower one of them",
    ),
    "odd minibatches": (GSM8K, ["--model.minibatches", "3"], "minibatches must divide .* got 3 and"),
    "rare validation": (
        GSM8K,
        ["--trainer.val_check_interval", "4", "--trainer.check_val_every_n_epoch", "1"],
        "an epoch's 3 batches; got 4",
    ),
    "adapter on the vocabulary": (GSM8K, ["--model.policy.lora.targets", "[lm_head]"], "'lm_head' matches none"),
    "adapter on experts": (
        *(GSM8K, ["--model.policy.lora.target_parameters", "[experts.down_proj]"]),
        "experts are frozen; leave it out: the adapter of a mixture is on attention, by lora.targets",
    ),
    "a folder to resume from": (GSM8K, ["--resume", "."], "is not a file; name another with --resume"),
    "no such LoRA target": (GSM8K, ["--model.policy.lora.targets", "[nothing]"], "LoRA targets? must name"),
    "full rank": (
        GSM8K,
        ["--model.policy.lora.rank", "129"],
        r"not be above the smaller side .* rank 129 for model.layers.0.self_attn.q_proj with 128; lower",
    ),
    "no network": (
        GSM8K,
        ["--model.policy.path", "no/such-model"],
        "'no/such-model' is no folder here, .* HF_HUB_OFFLINE is set; connect",
    ),
    "endless completions": (
        GSM8K,
        ["--rollout.sampling.max_tokens", "1000000000"],
        r"prompt and completion .* the model's 4096 positions; got 1000000\d+ \(data.max_prompt_tokens and .*max_tok",
    ),
    "endless evaluations": (
        GSM8K,
        ["--rollout.eval_sampling", '{"max_tokens": 5000}'],
        r"the model's 4096 positions; got \d+ ",
    ),
    "validation after nothing": (GSM8K, ["--trainer.val_check_interval", "0"], "got val_check_interval=0 "),
    "no validation's share": (
        GSM8K,
        ["--trainer.val_check_interval", "0.0", "--trainer.check_val_every_n_epoch", "1"],
        "got val_check_interval=0.0 ",
    ),
    "validation by the clock": (GSM8K, ["--trainer.val_check_interval", "00:01:00:00"], "not in time; got "),
    "validation after no epoch": (GSM8K, ["--trainer.check_val_every_n_epoch", "0"], "check_val_every_n_epoch=0;"),
    "no step": (GSM8K, ["--trainer.max_steps", "0"], "trainer.max_steps=0 allows none; raise it, or set it to -1"),
    "no epoch": (GSM8K, ["--trainer.max_epochs", "0"], "trainer.max_epochs=0 allows none; raise it"),
    "no batch": (GSM8K, ["--trainer.limit_train_batches", "0"], "limit_train_batches=0 allows none; raise it"),
}


def starting(folder: Path, model: Path, rows: list[str] | None) -> list[str]:
    """Arguments of a small run below `folder`."""
    path = folder / "rows.jsonl"
    if rows is not None:
        path.write_text("\n".join(rows))
    return [
        *("fit", "-c", str(ROOT / "configs" / "gsm8k_cpu.yaml"), "--trainer.default_root_dir", str(folder / "run")),
        *("--model.policy.path", str(model), "--model.policy.quantization", "none"),
        *("--data.path", str(path), "--data.batch_size", "2", "--data.val_size", "2"),
        *("--trainer.val_check_interval", "3", "--trainer.accelerator", "cpu"),
    ]


@pytest.mark.parametrize("case", FOUND_LATER)
def test_a_mistake_found_while_starting_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_policy_dir: Path, case: str
) -> None:
    rows, extra, message = FOUND_LATER[case]
    assert re.search(message, complaint(capsys, *starting(tmp_path, tiny_policy_dir, rows), *extra))


FOUND_FIRST = {
    "rare validation": (
        ["--trainer.val_check_interval", "999", "--trainer.check_val_every_n_epoch", "1"],
        "an epoch's 40 batches; got 999",
    ),
    "odd minibatches": (["--model.minibatches", "3"], "minibatches must divide .* got 3 and 128"),
    "endless completions": (["--rollout.sampling.max_tokens", "1000000000"], "4096 positions; got 1000000096 "),
    "no end": (["--trainer.max_epochs", "-1"], "need a planned end; the run has none; set trainer.max_epochs"),
    "precision": (["--trainer.precision", "bf16-true"], "sets its own precision; trainer.precision is bf16-true"),
    "nothing scores": (["--rollout.rewards", "{}"], "rollout.rewards names none"),
}


@pytest.mark.parametrize("case", FOUND_FIRST)
def test_settings_are_checked_before_anything_is_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """No toy policy is taught for a run that is refused, and its folder stays as it was."""
    cache, run = tmp_path / "cache", tmp_path / "run"
    monkeypatch.setenv("QERL_CACHE", str(cache))
    args, message = FOUND_FIRST[case]
    small = ("--model.policy.toy.steps", "1", "--model.policy.toy.layers", "1", "--trainer.accelerator", "cpu")
    given = ("fit", "-c", str(QUICKSTART), "--trainer.default_root_dir", str(run), *small, *args)
    assert re.search(message, complaint(capsys, *given))
    assert not cache.exists() and not run.exists()


def test_commands_of_our_own_report_alike(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "config.json" in complaint(capsys, "quantize", str(tmp_path / "a"), str(tmp_path / "b"))
    assert "see qerl export --help" in complaint(capsys, "export", str(tmp_path))
    rule = "qerl takes a command first, one of configs, export, fit, quantize, test, validate; got "
    for words, found in {
        ("exprt", "a"): "exprt; did you mean export? see",
        ("-c", "sft"): "none; see",
        (): "none; ",
    }.items():
        assert f"{rule}{found}" in complaint(capsys, *words)


def test_a_run_folder_that_takes_no_files_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_policy_dir: Path
) -> None:
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    line = complaint(capsys, *starting(tmp_path, tiny_policy_dir, GSM8K))
    assert re.search(r"a run must read and write its files; .*run/\.lock: Is a directory", line)


def test_a_run_folder_may_be_below_the_home_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_policy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    arguments = [*starting(tmp_path, tiny_policy_dir, GSM8K), "--trainer.default_root_dir", "~/runs/mine"]
    (tmp_path / "runs" / "mine" / ".lock").mkdir(parents=True)
    line = complaint(capsys, *arguments)
    assert f"{tmp_path}/runs/mine/.lock: Is a directory" in line and not (tmp_path / "~").exists()


def config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        known = json.loads((folder / "config.json").read_text())
        known.pop("layer_types", None)
        (folder / "config.json").write_text(json.dumps(known | values))

    return change


def text(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content)  # type: ignore[return-value]


def without(*patterns: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for pattern in patterns:
            for path in folder.glob(pattern):
                path.unlink()

    return change


def without_weight(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        del weights[name]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def smaller_vocabulary(folder: Path) -> None:
    config(vocab_size=256)(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:256].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


QUANTIZED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
NO_MODEL: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tokenizer": (without("tok*", "chat*"), "a model needs its tokenizer; .*model has none"),
    "tokenizer without words": (without("tokenizer.json"), "a model needs its tokenizer; .* one without words"),
    "damaged tokenizer": (text("tokenizer.json", "{"), "the tokenizer of .*model fails with JSONDecodeError"),
    "another's tokenizer": (smaller_vocabulary, "not know more tokens than the model; .* knows 508 and .* names 256"),
    "vocabulary": (config(vocab_size=16), "embed_tokens.weight is .512, 128. in .* and .16, 128. by config"),
    "heads": (config(num_attention_heads=3), r"q_proj.weight is \(128, 128\) in .* and \(126, 128\) by config.json"),
    "no heads": (config(num_attention_heads=0), "config.json of .* fails with ZeroDivisionError"),
    "fewer layers": (config(num_hidden_layers=1), "has weights of 2 layers, its config.json 1; get both from one"),
    "more layers": (config(num_hidden_layers=3), "has weights of 2 layers, its config.json 3; get both from one"),
    "another architecture": (config(model_type="t5"), "known family; model_type in config.json of .* is 't5', none of"),
    "unknown architecture": (
        config(model_type="quux"),
        "known family; model_type in config.json of .* is 'quux', none",
    ),
    "no object": (config(quantization_config="nvfp4"), "quantization_config must be an object"),
    "no text": (lambda folder: (folder / "config.json").write_bytes(b"\xff"), "config.json must be JSON"),
    "a weight less": (without_weight("model.layers.1.mlp.up_proj.weight"), "lacks model.layers.1.mlp.up_proj.weight"),
    "no end": (text("generation_config.json", '{"eos_token_id": "end"}'), "eos_token_id is a number or a list of them"),
    "no generation": (text("generation_config.json", "["), "generation_config.json must be JSON"),
    "no index": (text("model.safetensors.index.json", "{}"), "index.json has no weight_map"),
}


@pytest.mark.parametrize("case", NO_MODEL)
@pytest.mark.parametrize("command", ["fit", "quantize"])
def test_a_model_folder_that_disagrees_with_itself_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_policy_dir: Path, command: str, case: str
) -> None:
    change, message = NO_MODEL[case]
    model = shutil.copytree(tiny_policy_dir, tmp_path / "model")
    change(model)
    fit = starting(tmp_path, model, GSM8K)
    quantize = ["quantize", str(model), str(tmp_path / "quantized")]
    assert re.search(message, complaint(capsys, *(fit if command == "fit" else quantize)))
    assert not (tmp_path / "quantized").exists()


def test_weights_that_are_said_to_be_quantized_must_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_policy_dir: Path
) -> None:
    model = shutil.copytree(tiny_policy_dir, tmp_path / "model")
    config(quantization_config=QUANTIZED)(model)
    arguments = [*starting(tmp_path, model, GSM8K), "--model.policy.quantization", "nvfp4"]
    assert "quantized weights need scales" in complaint(capsys, *arguments)


def test_an_optimizer_is_refused_with_the_parameters_that_it_gets() -> None:
    with pytest.raises(UserError, match="model.optimizer must take .* Muon only supports 2D"):
        build_optimizer(torch.optim.Muon, [torch.nn.Parameter(torch.zeros(3))])


class Plain(torch.optim.SGD):
    """Steps without being asked for a loss."""

    def step(self) -> None:  # type: ignore[override]
        """Do nothing."""


def test_an_optimizer_is_refused_that_lightning_cannot_step() -> None:
    with pytest.raises(UserError, match=r"model.optimizer must have step\(closure=None\).*; Plain has another"):
        build_optimizer(lambda params: Plain(params, lr=0.1), [torch.nn.Parameter(torch.zeros(1, 1))])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("warmup_stable_decay", "missing 1 required positional argument: 'num_decay_steps'"),
        ("cosine_with_min_lr", "min_lr"),
        ("reduce_lr_on_plateau", "needs a metric"),
        ("polynomial", "must be smaller than initial lr"),
    ],
)
def test_a_schedule_is_refused_in_its_own_words(name: str, said: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-8)
    with pytest.raises(UserError, match=f"lr_scheduler must be a schedule .* got '{name}', which says: .*{said}"):
        build_schedule(name, optimizer, 0, 1)


ROWS = "[Row(f'r-{n}', f'What is {n} plus 1?', str(n + 1)) for n in range(6)]"
DATA = {
    "nothing": ("return None", "Mine.train_rows must return rows .* are text; got None"),
    "dictionaries": ("return [{'question': 'a'}]", r"Mine.train_rows must .*; row 1 is \{'question': 'a'\}"),
    "numbered": (
        "return [Row(n, 'a', 'b') for n in range(6)]",
        r"Mine.train_rows must .*; row 1 is Row\(id=0, question",
    ),
    "text": ("return 'rows'", "Mine.train_rows must return rows .*; got 'rows'"),
    "another method": (
        "return []\n    train_rows = PromptDataModule.train_rows",
        "in train_rows; Mine has no such method",
    ),
    "held out": (f"return {ROWS}\n    def val_rows(self):\n        return [1]", "Mine.val_rows must .*; row 1 is 1"),
    "sets": (f"return {ROWS}\n    def val_sets(self):\n        return [1]", r"Mine must give its sets .* got \[1\]"),
    "no base": (
        "pass\n    def __init__(self) -> None:\n        self.rows = []",
        "__init__ calls .*; Mine's does not",
    ),
}


@pytest.mark.parametrize("case", DATA)
def test_a_users_data_module_is_named_with_what_it_gave(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    body, message = DATA[case]
    code = f"class Mine(PromptDataModule):\n    def train_rows(self):\n        {body}\n"
    module = users_module(tmp_path, monkeypatch, code)
    settings = yaml.safe_load(QUICKSTART.read_text()) | {"data": {"class_path": f"{module}.Mine"}}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(settings))
    line = complaint(capsys, "fit", "-c", str(path), "--trainer.default_root_dir", str(tmp_path / "run"))
    assert re.search(message, line)


def test_rows_may_come_one_by_one(tiny_policy_dir: Path) -> None:
    class OneByOne(PromptDataModule):
        def train_rows(self) -> Any:
            yield from (Row(f"r-{n}", f"What is {n} plus 1?", str(n + 1)) for n in range(6))

        def test_rows(self) -> Any:
            return iter([Row("t-0", "What is 7 plus 1?", "8")])

    data = OneByOne(batch_size=2, val_size=2, tokenizer=str(tiny_policy_dir))
    data.setup("test")
    assert data.batches_per_epoch == 2 and [len(batch.prompts) for batch in data.test_dataloader()] == [1]


def users_module(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> str:
    """Name of a module of a user's, where the command is run."""
    name = f"users_{hashlib.sha256(code.encode()).hexdigest()[:8]}"
    (folder / f"{name}.py").write_text(f"from qerl_pl.datamodules import PromptDataModule, Row\n{code}")
    monkeypatch.chdir(folder)
    return name


REWARD = "class Mine:\n    name = 'mine'\n    weight = 1.0\n    def __call__(self, samples):\n        return samples\n"
RAISES = "def words():\n    return open('words.txt')\n"
USERS: dict[str, tuple[str, str, type[Exception]]] = {
    "reward": (REWARD + "    def __init__(self):\n        {}['x']\n", "rewards", KeyError),
    "deep": (RAISES + REWARD + "    def __init__(self):\n        words()\n", "rewards", FileNotFoundError),
    "value": (REWARD + "    def __init__(self):\n        int('x')\n", "rewards", ValueError),
    "module": ("1 / 0\n" + REWARD, "rewards", ZeroDivisionError),
    "data": (
        "class Mine(PromptDataModule):\n    def __init__(self):\n        raise RuntimeError('no words')\n",
        "data",
        RuntimeError,
    ),
    "rows": (
        "class Mine(PromptDataModule):\n    def train_rows(self):\n        yield 1\n        assert False\n",
        "data",
        AssertionError,
    ),
}


@pytest.mark.parametrize("case", USERS)
def test_an_error_in_a_users_class_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    code, where, kind = USERS[case]
    module = users_module(tmp_path, monkeypatch, code)
    settings = yaml.safe_load(QUICKSTART.read_text())
    if where == "data":
        settings["data"] = {"class_path": f"{module}.Mine"}
    else:
        settings["rollout"]["rewards"] = {"mine": f"{module}.Mine"}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(settings))
    with pytest.raises(Exception) as raised:  # jsonargparse wraps what its parsing meets
        main(["fit", "-c", str(path), "--trainer.default_root_dir", str(tmp_path / "run")])
    cause: BaseException | None = raised.value
    while cause is not None and type(cause) is not kind or cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    assert type(cause) is kind
    assert f"{module}.py" in "".join(traceback.format_exception(raised.value))


POLICY = {"path": None, "lora": {"rank": 4}}
RUNS: dict[str, tuple[str, str]] = {
    "malformed": ("{a: [", "config.yaml must be YAML; .*config.yaml is not"),
    "another's": ("name: tests\non: [push]\n", "has no model.policy with path and lora"),
    "a list": ("[1, 2]", "has no model.policy with path and lora"),
    "empty": ("", "has no model.policy with path and lora"),
    "no policy": ("model: {lr_scheduler: cosine}", "has no model.policy with path and lora"),
    "policy without a path": ("model: {policy: {lora: {rank: 4}}}", "has no model.policy with path and lora"),
    "another version's": (yaml.safe_dump({"model": {"policy": POLICY | {"shape": 1}}}), "not accept option 'shape'"),
    "a rank that is none": (
        yaml.safe_dump({"model": {"policy": POLICY | {"lora": {"rank": "x"}}}}),
        "rank takes a whole.*got x;",
    ),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_run_whose_configuration_is_none_is_not_exported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, case: str
) -> None:
    written, message = RUNS[case]
    AtomicCheckpointIO().save_checkpoint({"qerl": {}}, tmp_path / "checkpoints" / "step=1.ckpt")
    (tmp_path / "config.yaml").write_text(written)
    assert re.search(message, complaint(capsys, "export", str(tmp_path), str(tmp_path / "out")))


@pytest.mark.parametrize("content", [[1, 2], {"state_dict": {}}, {"qerl": 1}])
def test_another_programs_checkpoint_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: Any) -> None:
    path = tmp_path / "other.ckpt"
    torch.save(content, path)
    digest_path(path).write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    line = complaint(capsys, "export", str(tmp_path), str(tmp_path / "out"), "--checkpoint", str(path))
    assert re.search(r"by this trainer; .*other.ckpt was written by another program", line)


@pytest.mark.parametrize("command", ["validate", "test"])
def test_one_callback_or_plugin_needs_no_list(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_policy_dir: Path, command: str
) -> None:
    """As Lightning has it: the check of the rewards, which comes after, is reached."""
    settings = yaml.safe_load((ROOT / "configs" / "gsm8k_cpu.yaml").read_text())
    settings["trainer"]["callbacks"] = {"class_path": "qerl_pl.callbacks.EvaluationReport"}
    settings["trainer"]["plugins"] = {"class_path": "lightning.pytorch.plugins.environments.LightningEnvironment"}
    settings["rollout"]["rewards"] = {}
    path = tmp_path / "one.yaml"
    path.write_text(yaml.safe_dump(settings))
    _, _, _, *rest = starting(tmp_path, tiny_policy_dir, GSM8K)
    assert "rollout.rewards names none" in complaint(capsys, command, "-c", str(path), *rest)


def test_a_state_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"plain values only; .*step=1.ckpt would hold other types .*lambda"):
        AtomicCheckpointIO().save_checkpoint({"qerl": {}, "state": lambda: 1}, tmp_path / "step=1.ckpt")
