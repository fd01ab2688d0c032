"""The runs that `test_reference_trajectory` compares: a tiny base, questions, rewards, and a recorder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from plain_objective import Recipe
from torch import Tensor
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from qerl_pl.datamodules import PromptDataModule
from qerl_pl.datamodules.tables import Row
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.toy.tokenizer import VOCABULARY, build_tokenizer

LONGEST_PROMPT, LONGEST_COMPLETION = 16, 8
SCALING = 2.0
ENDS = tuple(range(260, 300))
"""Tokens that end a completion, besides the tokenizer's own."""
STOP = ("y", "ll")
BUFFER = 4
"""Tokens below the longest completion at which the penalty for length begins."""
QUESTIONS = [f"{'one more ' * (index % 4)}{chr(66 + index)}{index + 7}" for index in range(12)]


def build_base(folder: Path) -> Path:
    """A two-layer Qwen2 in NVFP4 whose completions end at different lengths.

    Its weights are whole numbers over powers of two from a seeded generator, so that no machine's rounding moves a
    four-bit code. Frequencies of its rotary positions change beyond the longest sequence: positions that do not start
    at 0 in each sequence would not show otherwise, for attention sees their differences alone.
    """
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST_PROMPT + LONGEST_COMPLETION,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        tie_word_embeddings=False,
        dtype=torch.float32,
    )
    model = Qwen2ForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            grid = torch.randint(-7, 8, parameter.shape, generator=generator).float()
            unit = 16 if "norm" in name or "lm_head" in name else 32
            parameter.copy_(grid / unit + ("norm" in name))
    tokenizer = build_tokenizer()
    model.generation_config = GenerationConfig(eos_token_id=[tokenizer.eos_token_id, *ENDS])
    model.save_pretrained(folder / "dense")
    tokenizer.save_pretrained(folder / "dense")
    quantize_checkpoint(folder / "dense", folder / "nvfp4")
    return folder / "nvfp4"


class Questions(PromptDataModule):
    """Questions of different lengths, the last two held out."""

    def train_rows(self) -> Sequence[Row]:
        return [Row(f"train-{index}", text, "") for index, text in enumerate(QUESTIONS[:-2])]

    def val_rows(self) -> Sequence[Row]:
        return [Row(f"validation-{index}", text, "") for index, text in enumerate(QUESTIONS[-2:])]


def is_right(text: str) -> float:
    """Whether the number of letters is odd: what half of the completions are."""
    return float(sum(letter.isalpha() for letter in text) % 2)


def vowels(text: str) -> float:
    """Vowels, by tens."""
    return sum(letter in "aeiou" for letter in text) / 10


class Right:
    """`is_right`; writes every completion that it is asked about to a file.

    Args:
        journal: The file, a line of JSON a completion.
        weight: Its weight.
    """

    name = "right"

    def __init__(self, journal: str, weight: float = 1.0) -> None:
        self.weight = weight
        self.journal = Path(journal)

    def __call__(self, samples: Any) -> list[float]:
        with self.journal.open("a") as file:
            for one in samples:
                file.write(json.dumps([one.prompt, one.completion, one.num_tokens, one.truncated]) + "\n")
        return [is_right(one.completion) for one in samples]


class Vowels:
    """`vowels`.

    Args:
        weight: Its weight.
    """

    name = "vowels"

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, samples: Any) -> list[float]:
        return [vowels(one.completion) for one in samples]


class Snapshots(Callback):
    """Keeps what was trained, before the first rollout and after each, and what was logged."""

    def __init__(self) -> None:
        self.trained: list[dict[str, Tensor]] = []
        self.metrics: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before the first rollout."""
        self._keep(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a rollout and its update."""
        self._keep(pl_module)
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After an evaluation."""
        self.evaluations.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def _keep(self, module: LightningModule) -> None:
        named = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
        self.trained.append({plain_name(name): tensor for name, tensor in named.items()})


def plain_name(name: str) -> str:
    """Of a parameter, such as model.layers.0.self_attn.q_proj.lora_A, without what PEFT puts around it."""
    for part in ("default.", "modules_to_save.", ".weight"):
        name = name.replace(part, "")
    return name[name.index("model.layers.") :]


def settings(recipe: Recipe, base: Path, run: Path, policy: dict[str, Any]) -> dict[str, Any]:
    """The configuration of `qerl fit` that follows a recipe; a micro-batch has two or three completions.

    Args:
        recipe: Of the training.
        base: Folder of the base model.
        run: Folder of the run; the journal is beside it.
        policy: More of `model.policy`.
    """

    def named(*names: str) -> dict[str, Any]:
        return {name: getattr(recipe, name) for name in names}

    cap = recipe.importance_cap
    objective = named("beta", "epsilon_low", "epsilon_high", "mask_truncated")
    objective |= {"correction": "off" if cap is None else {"cap": cap}} | dict(recipe.more)
    noise = named("sigma_start", "sigma_end", "stages", "noiseless_first_stage")
    data = {"batch_size": recipe.batch_size, "val_size": 2, "max_prompt_tokens": LONGEST_PROMPT, "system_prompt": None}
    return {
        "seed_everything": recipe.seed,
        "model": {
            "policy": {"path": str(base), "dtype": "float32", "lora": {"rank": 4, "alpha": 4 * SCALING}, **policy},
            "objective": {"class_path": f"qerl_pl.algorithm.{recipe.algorithm}", "init_args": objective},
            "optimizer": {
                "class_path": "torch.optim.AdamW",
                "init_args": named("lr", "betas", "eps", "weight_decay"),
            },
            "micro_batch_tokens": 45,
            "monitor_kl": True,
            **named("warmup_ratio", "update_epochs", "minibatches", "max_grad_norm"),
        },
        "data": {"class_path": "reference_run.Questions", "init_args": {**data, "seed": recipe.data_seed}},
        "trainer": {
            "default_root_dir": str(run),
            "accelerator": "cpu",
            "max_epochs": recipe.max_epochs,
            "logger": False,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "num_sanity_val_steps": -1,
            "callbacks": [
                {"class_path": "qerl_pl.callbacks.RolloutCallback", "init_args": _rollout(recipe, run)},
                {"class_path": "qerl_pl.callbacks.AdaptiveQuantizationNoise", "init_args": noise},
                {"class_path": "reference_run.Snapshots"},
            ],
        },
    }


def _rollout(recipe: Recipe, run: Path) -> dict[str, Any]:
    sampling = recipe.sampling
    own = {
        "right": ("reference_run.Right", {"journal": f"{run}.jsonl"}),
        "vowels": ("reference_run.Vowels", {}),
        "overlong": ("qerl_pl.rewards.OverlongPenalty", {"max_length": sampling.max_tokens, "buffer": BUFFER}),
    }
    return {
        "group_size": recipe.group_size,
        "resample_rounds": recipe.resample_rounds,
        "evaluation": {"samples": recipe.eval_samples},
        "accuracy_reward": "right",
        "sampling": {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "stop": list(sampling.stop),
        },
        "rewards": [
            {"class_path": own[name][0], "init_args": {**own[name][1], "weight": weight}}
            for name, (weight, _) in reversed(recipe.rewards.items())
        ],
        "engine": {"class_path": "qerl_pl.engines.TransformersEngine", "init_args": {"max_batch": 5}},
    }
