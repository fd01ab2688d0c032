"""The parts of `step_against.py` that others make: TRL's GRPOTrainer, by itself or patched by Unsloth."""

import sys

if sys.argv[-1] == "unsloth":
    import unsloth  # it patches what is imported after it

import argparse
import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from step_timer import StepTimer, parsed, size_of
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Steps(TrainerCallback):
    """Measures the steps.

    Args:
        timer: Keeps the figures.
    """

    def __init__(self, timer: StepTimer) -> None:
        self.timer = timer
        self.phases: dict[str, float] = {}

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, whose seconds count as a phase of the step; after the rollout comes the update."""

        def run(*args: Any, **kwargs: Any) -> Any:
            start = self.timer.now()
            result = work(*args, **kwargs)
            self.phases[name] = self.phases.get(name, 0.0) + self.timer.now() - start
            self.timer.phase = "update" if name == "rollout" else self.timer.phase
            return result

        return run

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.timer.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.phases["update"] = self.timer.now() - self.timer.last - self.phases["rollout"]
        self.timer.step(dict(self.phases))
        self.phases.clear()


def spread(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs between the completions of a group."""
    return [sum(tokens) % 97 / 97 for tokens in completion_ids]


def utilization(args: argparse.Namespace, base: Path) -> float:
    """Share of the GPU for vLLM: the weights, the cache of a step, and 5 GiB for its activations and graphs."""
    if args.device == "cpu":
        return 0.5
    weights = sum(file.stat().st_size for file in base.glob("*.safetensors")) / 2**30
    return (weights + args.kv_gib + 5) / (torch.cuda.mem_get_info()[1] / 2**30)


def sampling(args: argparse.Namespace, part: str, base: Path) -> dict[str, Any]:
    """Settings of GRPOConfig for completions of equal length."""
    _, _, tokens = size_of(args.sizes[0])
    if args.device == "cpu":
        return {"use_vllm": False, "use_cpu": True, "generation_kwargs": {"min_new_tokens": tokens}}
    if part == "unsloth":
        from vllm import SamplingParams

        length = {"ignore_eos": True, "min_tokens": tokens, "max_tokens": tokens}
        return {"vllm_sampling_params": SamplingParams(**length, temperature=1.0, seed=3407)}
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": utilization(args, base),
        "vllm_enable_sleep_mode": part == "trl-sleep",
        "vllm_max_model_length": args.prompt_tokens + tokens + 32,
        "generation_kwargs": {"ignore_eos": True, "min_tokens": tokens, "detokenize": False},
    }


def config(args: argparse.Namespace, part: str, base: Path) -> GRPOConfig:
    prompts, group, tokens = size_of(args.sizes[0])
    trl = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "bfloat16"},
    }
    return GRPOConfig(
        output_dir=str(args.out / "peer"),
        seed=0,
        max_steps=args.steps + args.warmup,
        learning_rate=1e-5,
        per_device_train_batch_size=min(args.sequences, prompts * group),
        gradient_accumulation_steps=max(prompts * group // args.sequences, 1),
        num_generations=group,
        max_completion_length=tokens,
        beta=0.0,
        loss_type="dapo",
        epsilon_high=0.28,
        max_grad_norm=0.2,
        bf16=True,
        shuffle_dataset=False,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        temperature=1.0,
        **({} if part == "unsloth" else trl),
        **sampling(args, part, base),
    )


def unsloth_model(args: argparse.Namespace, base: Path) -> tuple[Any, Any]:
    """Unsloth's model with an adapter, its own checkpointing and its vLLM, and the tokenizer."""
    prompts, group, tokens = size_of(args.sizes[0])
    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
        model_name=str(base),
        max_seq_length=args.prompt_tokens + tokens + 32,
        load_in_4bit=False,
        fast_inference=True,
        max_lora_rank=args.rank,
        gpu_memory_utilization=utilization(args, base),
        dtype=torch.bfloat16,
        max_num_seqs=prompts * group,
    )
    lora = {"r": args.rank, "lora_alpha": args.rank, "target_modules": LINEARS, "random_state": 0}
    return unsloth.FastLanguageModel.get_peft_model(model, **lora, use_gradient_checkpointing="unsloth"), tokenizer


def main() -> None:
    args = parsed()
    part, base = args.parts[-1], args.folder / f"{args.shape}-bf16"
    texts = json.loads((args.out / "questions.json").read_text())
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
    timer = StepTimer(args.warmup, Path(os.environ["STEP_OUT"]))
    timer.found["version"] = version("unsloth" if part == "unsloth" else "trl")
    steps = Steps(timer)
    if part == "unsloth":
        model, tokenizer = unsloth_model(args, base)
        peft: dict[str, Any] = {}
    else:
        model, tokenizer = str(base), AutoTokenizer.from_pretrained(base)
        lora = LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=LINEARS, task_type="CAUSAL_LM")
        peft = {"peft_config": lora}
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[spread],
        args=config(args, part, base),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[steps],
        **peft,
    )
    # Rollout: sync, generation and what else precedes the loss, the sampler's correction included.
    trainer._generate_and_score_completions = steps.timed("rollout", trainer._generate_and_score_completions)
    if args.device == "cuda" and part != "unsloth":
        for name in ("sync_weights", "generate"):
            setattr(trainer.vllm_generation, name, steps.timed(name, getattr(trainer.vllm_generation, name)))
    trainer.train()
    timer.end()


if __name__ == "__main__":
    main()
