"""This package's part of `step_against.py`, and what other runs of random weights take from it."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from step_timer import PARTS, StepTimer, parsed, size_of

from qerl_pl.cli.main import QeRLCLI
from qerl_pl.rewards import RewardSample
from qerl_pl.runtime.random_state import set_cublas_config

LOGGED = ("time/", "memory/", "mismatch/", "completions/length_mean")


class Spread:
    """A reward that differs between the completions of a group, so that the update is a real one."""

    name = "spread"
    weight = 1.0

    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[float]:
        return [sum(sample.token_ids) % 97 / 97 for sample in samples]


class Steps(Callback):
    """Measures the steps.

    Args:
        warmup: Steps that do not count, before the others.
        out: File for what was found.
    """

    def __init__(self, warmup: int, out: str) -> None:
        self.timer = StepTimer(warmup, Path(out))

    def on_train_start(self, *_: Any) -> None:
        self.timer.begin()

    def on_train_batch_start(self, *_: Any) -> None:
        self.timer.phase = "update"  # rollouts come from the callback before this one

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith(LOGGED)}
        rollout = logged["time/sync_s"] + logged["time/rollout_s"]
        self.timer.step({"rollout": rollout, "update": logged["time/update_s"]} | logged)

    def teardown(self, *_: Any, **__: Any) -> None:
        self.timer.end()


def settings(args: argparse.Namespace, part: str, adapter: str) -> dict[str, Any]:
    """Of a run of random weights."""
    prompts, group, tokens = size_of(args.sizes[0])
    on_gpu, full, kind = args.device == "cuda", part == "ours-full", PARTS[part][2]
    engine = {"kv_cache_gib": args.kv_gib, "max_num_seqs": prompts * group}
    engine |= {"adapter": adapter} if adapter else {}
    engine |= {"share_weights": False} if args.copies == 2 else {}
    engine |= {"sleep_mode": False} if args.awake else {}
    rollout = {
        "engine": {"class_path": args.engine, "init_args": engine if args.engine == "VLLMEngine" else {}},
        "group_size": group,
        "sampling": {"max_tokens": tokens},
        "rewards": [{"class_path": "step_ours.Spread"}],
        "mismatch_bound": 10.0,  # random weights: nothing to compare with
    }
    optimizer = {"class_path": "bitsandbytes.optim.AdamW8bit" if on_gpu else "torch.optim.AdamW"}
    warmup = args.warmup + 1  # the second step, too, has a parity check, after the first sleep
    questions = json.loads((args.out / "questions.json").read_text())[: prompts * (args.steps + warmup)]
    return {
        "seed_everything": 0,
        "model": {
            "policy": {
                "path": str(args.folder / f"{args.shape}-{kind}"),
                "quantization": "none" if kind == "bf16" else kind,
                "lora": {"rank": args.rank, "alpha": float(args.rank), "targets": args.targets},
                "replay_routing": args.replay_routing,
                "finetune": "full" if full else "lora",
                "gradient_checkpointing": args.checkpointing,
            },
            "objective": {"class_path": "qerl_pl.algorithm.DAPO", "init_args": {"mask_truncated": False}},
            "micro_batch_tokens": (args.own_sequences or args.sequences) * (args.prompt_tokens + tokens),
            "monitor_kl": False,
            "share_prompts": args.share_prompts,
            **({"optimizer": optimizer | {"init_args": {"lr": 1e-6}}} if full else {}),
        },
        "data": {
            "class_path": "qerl_pl.datamodules.TableDataModule",
            "init_args": {
                **{"path": [{"question": text, "answer": "0"} for text in questions], "batch_size": prompts},
                **{"max_prompt_tokens": args.prompt_tokens, "system_prompt": None, "val_size": 0},
            },
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
                {"class_path": "step_ours.Steps", "init_args": {"warmup": warmup, "out": os.environ["STEP_OUT"]}},
            ],
        },
    }


def main() -> None:
    args = parsed()
    sys.argv = sys.argv[:1]
    set_cublas_config()
    QeRLCLI({"subcommand": "fit", "fit": settings(args, args.parts[-1], args.adapter[-1])})


if __name__ == "__main__":
    main()
