"""What a user names and does not fit: models, adapters, optimizers, schedules, rows, runs and checkpoints."""

import importlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from test_mistakes import complaint, users_module

from qerl_pl.cli.export import take_adapter
from qerl_pl.datamodules import PromptDataModule, Row
from qerl_pl.errors import UserError
from qerl_pl.modules.optimizer import build_optimizer, build_schedule
from qerl_pl.policy.adapter import read_adapter

ROOT = Path(__file__).parents[1]


pytestmark = pytest.mark.usefixtures("process_state")


OTHER_ADAPTERS = {
    "use_dora": True,
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 2},
    "fan_in_fan_out": True,
    "lora_bias": True,
    "layer_replication": [[1, 2], [0, 1]],
    "use_bdlora": {"target_modules_bd_a": ["q_proj"]},
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
    policy = SimpleNamespace(path=str(tmp_path), quantization="nvfp4", lora=SimpleNamespace())
    if key is None:
        take_adapter(policy, "test", None)
        assert (policy.path, policy.adapter) == ("base", str(tmp_path))
        shape = policy.lora  # is the adapter's to say
        assert shape.rank is shape.alpha is shape.targets is shape.use_rslora is None and policy.train_norms is False
        return
    with pytest.raises(UserError, match=f"sets {key}; merge it"):
        take_adapter(policy, "test", None)


def test_an_adapter_names_the_toy_policy_that_it_was_trained_on(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "toy", "r": 4, "lora_alpha": 8})
    )
    save_file({"base_model.model.q_proj.lora_A.weight": torch.ones(4, 2)}, tmp_path / "adapter_model.safetensors")
    base = {"path": None, "toy": {"layers": 3}, "quantization": "nf4"}
    (tmp_path / "qerl_base.json").write_text(json.dumps(base))
    policy = SimpleNamespace(path=str(tmp_path), toy=None, quantization="nvfp4", lora=SimpleNamespace())
    take_adapter(policy, "test", None)
    assert (policy.path, policy.toy.layers, policy.quantization) == (None, 3, "nf4")


@pytest.mark.parametrize("other", ["lm_head.weight", "model.embed_tokens.lora_embedding_A", "model.norm.weight"])
def test_an_adapter_with_other_tensors_is_told_which(tmp_path: Path, other: str) -> None:
    """As PEFT saves `modules_to_save` with the output layer or last norm, and an adapter of embeddings."""
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


GSM8K = [f'{{"question": "What is {n} plus 1?", "answer": "#### {n + 1}"}}' for n in range(8)]
FOUND_LATER: dict[str, tuple[list[str] | None, list[str], str]] = {
    "malformed line": ([*GSM8K, "{question"], [], "rows.jsonl, line 9"),
    "adapter on the vocabulary": (GSM8K, ["--model.policy.lora.targets", "[lm_head]"], "'lm_head' matches none"),
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
def test_a_model_folder_that_disagrees_with_itself_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_policy_dir: Path, case: str
) -> None:
    change, message = NO_MODEL[case]
    model = shutil.copytree(tiny_policy_dir, tmp_path / "model")
    change(model)
    assert re.search(message, complaint(capsys, "quantize", str(model), str(tmp_path / "quantized")))
    assert not (tmp_path / "quantized").exists()


def test_an_optimizer_is_refused_with_the_parameters_that_it_gets() -> None:
    with pytest.raises(UserError, match="model.optimizer must take .* Muon only supports 2D"):
        build_optimizer(torch.optim.Muon, [torch.nn.Parameter(torch.zeros(3))])


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_policy_dir: Path, case: str
) -> None:
    body, message = DATA[case]
    monkeypatch.syspath_prepend(str(tmp_path))
    code = f"class Mine(PromptDataModule):\n    def train_rows(self):\n        {body}\n"
    module = importlib.import_module(users_module(tmp_path, monkeypatch, code))
    settings = {} if case == "no base" else {"batch_size": 2, "val_size": 2, "tokenizer": str(tiny_policy_dir)}
    with pytest.raises(UserError, match=message):
        module.Mine(**settings).setup("fit")


def test_rows_may_come_one_by_one(tiny_policy_dir: Path) -> None:
    class OneByOne(PromptDataModule):
        def train_rows(self) -> Any:
            yield from (Row(f"r-{n}", f"What is {n} plus 1?", str(n + 1)) for n in range(6))

        def test_rows(self) -> Any:
            return iter([Row("t-0", "What is 7 plus 1?", "8")])

    data = OneByOne(batch_size=2, val_size=2, tokenizer=str(tiny_policy_dir))
    data.setup("test")
    assert data.batches_per_epoch == 2 and [len(batch.prompts) for batch in data.test_dataloader()] == [1]


@pytest.mark.parametrize("content", [[1, 2], {"state_dict": {}}, {"qerl": 1}])
def test_another_programs_checkpoint_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: Any) -> None:
    path = tmp_path / "other.ckpt"
    torch.save(content, path)
    line = complaint(capsys, "export", str(tmp_path), str(tmp_path / "out"), "--checkpoint", str(path))
    assert re.search(r"by this trainer; .*other.ckpt was written by another program", line)


def test_one_callback_or_plugin_needs_no_list(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_policy_dir: Path
) -> None:
    """As Lightning has it: the check of the rewards, which comes after, is reached."""
    settings = yaml.safe_load((ROOT / "configs" / "gsm8k_cpu.yaml").read_text())
    settings["trainer"]["callbacks"] = {"class_path": "qerl_pl.callbacks.EvaluationReport"}
    settings["trainer"]["plugins"] = {"class_path": "lightning.pytorch.plugins.environments.LightningEnvironment"}
    settings["rollout"]["rewards"] = {}
    path = tmp_path / "one.yaml"
    path.write_text(yaml.safe_dump(settings))
    _, _, _, *rest = starting(tmp_path, tiny_policy_dir, GSM8K)
    assert "rollout.rewards names none" in complaint(capsys, "validate", "-c", str(path), *rest)
