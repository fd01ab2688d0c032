"""TRL's part of `step_against_trl.py`: GRPOTrainer with LoRA on the 16-bit base and colocated vLLM."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import step_against_trl
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Steps(TrainerCallback):
    """Measures the steps.

    Args:
        watch: Keeps the figures.
        label: Of these steps.
        out: File for what was found.
    """

    def __init__(self, watch: step_against_trl.StepTimer, label: str, out: Path) -> None:
        self.watch, self.label, self.out = watch, label, out
        self.phases: dict[str, float] = {}

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, whose seconds count as a phase of the step."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = self.watch._now()
            result = work(*args, **kwargs)
            self.phases[name] = self.phases.get(name, 0.0) + self.watch._now() - start
            return result

        return run

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.watch.begin(self.label)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.watch.step(dict(self.phases))
        self.phases.clear()
        self.out.write_text(json.dumps(self.watch.found, indent=1))


def spread(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs between the completions of a group."""
    return [sum(tokens) % 97 / 97 for tokens in completion_ids]


def config(args: argparse.Namespace, part: str) -> GRPOConfig:
    on_gpu = args.device == "cuda"
    completions = args.prompts * args.group
    vllm: dict[str, Any] = {"use_vllm": False}
    generation: dict[str, Any] = {"min_new_tokens": args.tokens}
    if on_gpu:
        vllm = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": args.utilization,
            "vllm_enable_sleep_mode": part == "trl_sleep",
            "vllm_max_model_length": args.prompt_tokens + args.tokens + 32,
        }
        generation = {"ignore_eos": True, "min_tokens": args.tokens, "detokenize": False}
    return GRPOConfig(
        output_dir=str(args.out / "trl"),
        seed=0,
        max_steps=args.steps + args.warmup,
        learning_rate=1e-5,
        per_device_train_batch_size=min(args.sequences, completions),
        gradient_accumulation_steps=max(completions // args.sequences, 1),
        num_generations=args.group,
        max_completion_length=args.tokens,
        generation_kwargs=generation,
        beta=0.0,
        loss_type="dapo",
        epsilon_high=0.28,
        max_grad_norm=0.2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=True,
        use_cpu=not on_gpu,
        shuffle_dataset=False,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": "bfloat16"},
        **vllm,
    )


def main() -> None:
    args = step_against_trl.arguments(__doc__).parse_args()
    part = args.parts[-1]
    folder = args.folder / f"{args.shape}-bf16"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = json.loads((args.out / "questions.json").read_text())
    rows = [{"prompt": step_against_trl.rendered(tokenizer, text)} for text in texts]
    watch = step_against_trl.StepTimer(args.warmup)
    label = "TRL, BF16, vLLM asleep in the update" if part == "trl_sleep" else "TRL, BF16"
    steps = Steps(watch, label, args.out / f"step_{part}.json")
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=spread,
        args=config(args, part),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=LINEARS, task_type="CAUSAL_LM"),
        callbacks=[steps],
    )
    # Rollout: sync, generation and what else precedes the loss, the sampler's correction included.
    trainer._generate_and_score_completions = steps.timed("rollout", trainer._generate_and_score_completions)
    if args.device == "cuda":
        for name in ("sync_weights", "generate"):
            setattr(trainer.vllm_generation, name, steps.timed(name, getattr(trainer.vllm_generation, name)))
    began = time.perf_counter()
    trainer.train()
    lengths = trainer.state.log_history
    print(
        f"trained in {time.perf_counter() - began:.0f} s; {lengths[-1] if lengths else ''}; torch {torch.__version__}"
    )
    watch.end()


if __name__ == "__main__":
    main()
