"""This package's part of `step_against_trl.py`: the same steps in each way of gradient checkpointing, one engine."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import step_against_trl
from lightning.pytorch import Callback

from qerl_pl.cli.main import QeRLCLI
from qerl_pl.datamodules import PromptDataModule
from qerl_pl.datamodules.tables import Row

PHASES = ("sync", "rollout", "reward", "update", "sleep")


class Questions(PromptDataModule):
    """The questions that the parent wrote.

    Args:
        path: JSON file.
        batch_size: Prompts a step.
        max_prompt_tokens: Of each.
    """

    def __init__(self, path: str, batch_size: int, max_prompt_tokens: int) -> None:
        super().__init__(batch_size, 0, None, max_prompt_tokens, None)
        self.path = path

    def train_rows(self) -> Sequence[Row]:
        return [Row(f"train-{index}", text, "") for index, text in enumerate(json.loads(Path(self.path).read_text()))]


class Steps(Callback):
    """Measures the steps; after as many as count it goes on with the next way of checkpointing.

    Args:
        modes: The ways, from what needs least memory on.
        steps: That count, of each.
        warmup: That do not, before them.
        out: File for what was found, written anew after each way.
    """

    def __init__(self, modes: list[str], steps: int, warmup: int, out: str) -> None:
        self.modes, self.count, self.out = modes, steps, Path(out)
        self.watch = step_against_trl.StepTimer(warmup)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin(pl_module)

    def _begin(self, module: Any) -> None:
        mode = self.modes.pop(0)
        module.policy.checkpointing.load(mode)
        self.watch.begin(f"qerl_pl, NVFP4, gradient_checkpointing {mode}")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        metrics = trainer.callback_metrics
        phases = {name: float(metrics[f"time/{name}_s"]) for name in PHASES if f"time/{name}_s" in metrics}
        phases["tokens"] = float(metrics["completions/length_mean"])
        self.watch.step(phases)
        if self.watch.steps() == self.count:
            self.out.write_text(json.dumps(self.watch.found, indent=1))
            if self.modes:
                self._begin(pl_module)

    def teardown(self, *_: Any, **__: Any) -> None:
        self.watch.end()


def settings(args: argparse.Namespace) -> dict[str, Any]:
    on_gpu = args.device == "cuda"
    engine: dict[str, Any] = {"class_path": "qerl_pl.engines.TransformersEngine"}
    if on_gpu:
        inits = {"kv_cache_gib": args.kv_gib, "max_num_seqs": args.prompts * args.group}
        engine = {"class_path": "qerl_pl.engines.VLLMEngine", "init_args": inits}
    rollout = {
        "engine": engine,
        "group_size": args.group,
        "sampling": {"max_tokens": args.tokens},
        "rewards": [{"class_path": "rl_step.Spread"}],
        "mismatch_bound": 10.0,  # random weights: nothing to compare with
    }
    steps = {"modes": args.modes, "steps": args.steps, "warmup": args.warmup, "out": str(args.out / "step_ours.json")}
    questions = {"path": str(args.out / "questions.json"), "batch_size": args.prompts}
    return {
        "seed_everything": 0,
        "model": {
            "policy": {
                "path": str(args.folder / f"{args.shape}-nvfp4"),
                "lora": {"rank": args.rank, "alpha": float(args.rank)},
                "gradient_checkpointing": "auto",  # so that the callback may say which
            },
            "objective": {"class_path": "qerl_pl.algorithm.DAPO", "init_args": {"mask_truncated": False}},
            "micro_batch_tokens": args.sequences * (args.prompt_tokens + args.tokens),
            "monitor_kl": False,
        },
        "data": {
            "class_path": "step_ours.Questions",
            "init_args": {**questions, "max_prompt_tokens": args.prompt_tokens},
        },
        "trainer": {
            "default_root_dir": str(args.out / "run"),
            "accelerator": "gpu" if on_gpu else "cpu",
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "callbacks": [
                {"class_path": "qerl_pl.callbacks.RolloutCallback", "init_args": rollout},
                {"class_path": "qerl_pl.callbacks.AdaptiveQuantizationNoise", "init_args": {"stages": 2}},
                {"class_path": "qerl_pl.callbacks.Monitor"},
                {"class_path": "step_ours.Steps", "init_args": steps},
            ],
        },
    }


def main() -> None:
    args = step_against_trl.arguments(__doc__).parse_args()
    sys.argv = sys.argv[:1]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as the command line does
    QeRLCLI({"subcommand": "fit", "fit": settings(args)})


if __name__ == "__main__":
    main()
