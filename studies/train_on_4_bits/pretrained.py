"""What a pretrained policy can do in a number format, with or without adapters: accuracy on GSM8K, and nats per token.

    python -m studies.train_on_4_bits.pretrained measure MODEL --format nvfp4 --data FOLDER --out nvfp4.json
    python -m studies.train_on_4_bits.pretrained table 16-bit=bf16.json NVFP4=nvfp4.json    # compared with the first

FOLDER has GSM8K's test.jsonl. Completions are sampled by this package's vLLM engine, greedily and at temperature 1.
Nats are the trainer's, of the reference solutions, and with --teacher FILE of another policy's samples, which
--write-samples wrote, one a question. --style says how solutions are written: `boxed` asks an instruct model for a
\\boxed{} answer, `tags` for the tags that supervised fine-tuning here teaches. Intervals are 95 %: of greedy accuracy
Wilson's, of the others, and of differences paired by question, bootstrapped over questions.
"""

import argparse
import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from qerl_kernels import select_backend
from transformers import AutoTokenizer

from benchmarks import report
from qerl_pl.chat.template import SYSTEM_PROMPT
from qerl_pl.datamodules import ConversationDataModule, GSM8KDataModule
from qerl_pl.datamodules.conversations import padded
from qerl_pl.engines import EngineSpec, RolloutEngine, TransformersEngine, VLLMEngine
from qerl_pl.engines.vllm.linear_methods import check_marlin_shapes
from qerl_pl.errors import UserError
from qerl_pl.evaluation.evaluator import Evaluator, EvaluatorConfig, SampleCache
from qerl_pl.evaluation.metrics import bootstrap_interval
from qerl_pl.formats.base import QUANTIZATIONS
from qerl_pl.models.families import linear_shapes
from qerl_pl.models.folder import load_config
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.policy.adapter import read_adapter
from qerl_pl.policy.packing import partition_micro_batches
from qerl_pl.rewards import GSM8KAnswer, MathAnswer, Reward
from qerl_pl.rollout import Scorer
from qerl_pl.types import Prompt, SamplingConfig

MAX_PROMPT_TOKENS = 384
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
SYSTEM_PROMPTS = {"boxed": INSTRUCTION, "tags": SYSTEM_PROMPT}
NATS = {"nats": "nats per token", "teacher_nats": "nats per token of the teacher's samples"}
ENGINES = ("vllm", "transformers")
REWARDS: dict[str, Reward] = {"boxed": MathAnswer(tag=None), "tags": GSM8KAnswer()}


def without_annotations(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Rows of GSM8K without the annotations <<1+2=3>> of a calculator, which no model should learn to write."""
    return [row | {"answer": re.sub(r"<<.*?>>", "", row["answer"])} for row in rows]


def read_rows(file: Path) -> list[dict[str, str]]:
    return without_annotations([json.loads(line) for line in file.read_text().splitlines()])


def prompts_of(rows: list[dict[str, str]], style: str, tokenizer: str) -> list[Prompt]:
    """The rows' questions under the style's system prompt."""
    data = GSM8KDataModule(
        rows,  # type: ignore[arg-type]  # a table may be a list of rows
        batch_size=len(rows),
        val_size=0,
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        system_prompt=SYSTEM_PROMPTS[style],
        tokenizer=tokenizer,
    )
    data.setup("fit")
    prompts = sorted(next(iter(data.train_dataloader())).prompts, key=lambda prompt: int(prompt.id.rpartition("-")[2]))
    assert len(prompts) == len(rows), (len(prompts), len(rows))
    return prompts


def conversation(question: str, style: str, completion: str) -> dict[str, Any]:
    """A question and its completion in TRL's format."""
    prompt = [{"role": "system", "content": SYSTEM_PROMPTS[style]}, {"role": "user", "content": question}]
    return {"prompt": prompt, "completion": [{"role": "assistant", "content": completion}]}


def sampled_completions(file: Path, style: str) -> list[dict[str, Any]]:
    """The first sample of each question in a file that `SampleCache` wrote, without truncated ones."""
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    chosen = [sample for sample in samples if sample["sample"] == 0 and not sample["truncated"]]
    return [conversation(sample["prompt"], style, sample["completion"]) for sample in chosen]


def solutions(rows: list[dict[str, str]], style: str) -> list[dict[str, Any]]:
    """The rows' reference solutions as conversations of TRL's format, or for the tags as questions and answers."""
    if style == "tags":
        return list(rows)
    written = []
    for row in rows:
        thought, _, number = row["answer"].rpartition("####")
        answer = f"{thought.strip()}\nThe answer is \\boxed{{{number.strip()}}}."
        written.append(conversation(row["question"], style, answer))
    return written


def engine_of(name: str, base: Path) -> RolloutEngine:
    """The engine of this name; for a base that Marlin's tiles do not cover, vLLM with a copy of its own, padded."""
    if name == "transformers":
        return TransformersEngine()
    try:
        check_marlin_shapes(linear_shapes(load_config(base)))
    except UserError:
        return VLLMEngine(sleep_mode=False, linear_backend="auto", share_weights=False)
    return VLLMEngine(sleep_mode=False)


class Measurement:
    """A policy in a format, loaded by the engine and by the trainer.

    Args:
        model: Folder of a 16-bit model.
        quantization: Format of the base.
        lora: Shape of the adapters that are measured.
        max_tokens: Token limit of a completion.
        engine: One of `ENGINES`.
        dtype: Data type of the trainer.
    """

    def __init__(
        self,
        model: Path,
        quantization: Any,
        lora: LoraConfig,
        max_tokens: int,
        engine: str = "vllm",
        dtype: Any = "bfloat16",
    ) -> None:
        config = PolicyConfig(path=str(model), quantization=quantization, dtype=dtype, lora=lora)
        base, spec = config.base_folder(), config.lora_spec
        assert spec is not None
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cuda":
            select_backend("triton")
        self.engine = engine_of(engine, base)
        longest = MAX_PROMPT_TOKENS + max_tokens
        self.engine.launch(EngineSpec(base, config.torch_dtype, self.device, spec.rank, spec.targets, longest))
        self.policy = Policy(base, config, self.device, 0, self.engine.shared_weights())
        self.max_tokens, self.tokenizer_folder = max_tokens, str(base)
        self._initial = {name: tensor.clone() for name, tensor in self.policy.trained_state().items()}

    def use(self, adapter: Path | None) -> None:
        """Load an adapter; None has no effect on the base, as a new one."""
        self.policy.load_trained_state(self._initial if adapter is None else read_adapter(str(adapter)).tensors())

    def accuracy(
        self,
        rows: list[dict[str, str]],
        style: str,
        samples: int,
        file: Path | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> dict[str, Any]:
        """Whether each greedy answer is right, and how many of each question's samples; lengths and truncations.

        All completions, of up to `max_tokens` tokens (the measurement's by default), go to `file`, if there is one.
        """
        sampling = SamplingConfig(max_tokens=max_tokens or self.max_tokens)
        config = EvaluatorConfig(Scorer([REWARDS[style]]), sampling, samples)
        evaluator = Evaluator(config, self.engine, AutoTokenizer.from_pretrained(self.tokenizer_folder), seed=seed)
        if file is not None:
            evaluator.use_cache(SampleCache(file))
        prompts = prompts_of(rows, style, self.tokenizer_folder)
        evaluated = evaluator.evaluate(prompts, self.policy.weights(0)).prompts
        greedy = [prompt.greedy for prompt in evaluated]
        return {
            "greedy": [answer.correct for answer in greedy],
            "sampled": [sum(answer.correct for answer in prompt.samples) / samples for prompt in evaluated],
            "samples": samples,
            "tokens": statistics.fmean(answer.tokens for answer in greedy),
            "truncated": statistics.fmean(answer.truncated for answer in greedy),
        }

    @torch.no_grad()
    def nats(self, conversations: list[dict[str, Any]]) -> list[float]:
        """Negative log-likelihood of each conversation's completion, mean over its tokens."""
        count = len(conversations)
        data = ConversationDataModule(conversations, batch_size=count, val_size=0, tokenizer=self.tokenizer_folder)
        data.setup("fit")
        batch = next(iter(data.train_dataloader()))
        rendered = sorted(batch.conversations, key=lambda row: int(row.id.rpartition("-")[2]))
        losses = [0.0] * len(rendered)
        self.policy.eval()
        for indices in partition_micro_batches([len(row.token_ids) for row in rendered], 16384):
            tokens, lengths, mask = padded([rendered[index] for index in indices], self.device)
            logprobs = self.policy.token_values(tokens, lengths, mask, temperature=1.0)[0]
            for index, total, count in zip(indices, logprobs.sum(1).tolist(), mask.sum(1).tolist(), strict=True):
                losses[index] = -total / count
        return losses


def interval(values: Sequence[float]) -> tuple[float, float]:
    return bootstrap_interval(torch.tensor(values, dtype=torch.float64), seed=0)


def with_interval(values: Sequence[float], digits: int, bounds: tuple[float, float] | None = None) -> str:
    low, high = interval(values) if bounds is None else bounds
    return f"{statistics.fmean(values):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def table(measured: dict[str, dict[str, Any]]) -> str:
    """A row for each policy; differences are from the first, paired by question."""
    (name, first), rows = next(iter(measured.items())), list[list[str]]()
    for label, result in measured.items():
        cells = [label]
        for kind in ("greedy", "sampled"):
            share = statistics.fmean(result[kind])
            bounds = report.wilson(sum(result[kind]), len(result[kind])) if kind == "greedy" else None
            cells.append(with_interval([float(value) for value in result[kind]], 3, bounds))
            less = [float(own) - float(other) for own, other in zip(result[kind], first[kind], strict=True)]
            recovery = share / (statistics.fmean(first[kind]) or math.nan)
            cells.append("" if label == name else f"{with_interval(less, 3)}, {recovery:.0%}")
        for kind in (kind for kind in NATS if kind in first):
            more = [own - other for own, other in zip(result[kind], first[kind], strict=True)]
            cells += [f"{statistics.fmean(result[kind]):.4f}", "" if label == name else with_interval(more, 4)]
        rows.append([*cells, f"{result['tokens']:.0f}", f"{result['truncated']:.1%}"])
    difference = f"less {name}, recovery"
    headers = ["policy", "greedy accuracy", difference, "sampled accuracy", difference]
    for kind in (kind for kind in NATS if kind in first):
        headers += [NATS[kind], f"above {name}"]
    return report.markdown([*headers, "tokens", "truncated"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("measure")
    measure.add_argument("model", type=Path, help="folder of a 16-bit model with a chat template")
    measure.add_argument("--data", type=Path, required=True, help="folder with test.jsonl of GSM8K")
    measure.add_argument("--format", choices=QUANTIZATIONS, default="none")
    measure.add_argument("--adapter", type=Path)
    measure.add_argument("--style", choices=SYSTEM_PROMPTS, default="boxed")
    measure.add_argument("--questions", type=int, default=1319)
    measure.add_argument("--samples", type=int, default=4, help="samples a question")
    measure.add_argument("--write-samples", type=Path, help="file of all completions")
    measure.add_argument("--teacher", type=Path, help="such a file of another policy: nats of its samples, too")
    measure.add_argument("--max-tokens", type=int, default=512)
    measure.add_argument("--engine", choices=ENGINES, default="vllm")
    measure.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    measure.add_argument("--out", type=Path, required=True)
    tables = commands.add_parser("table")
    tables.add_argument("files", nargs="+", metavar="LABEL=FILE")
    tables.add_argument("--name", help="write results NAME.md and NAME.json to --out")
    tables.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.command == "table":
        files = [file.partition("=") for file in args.files]
        measured = {label: json.loads(Path(file).read_text()) for label, _, file in files}
        if args.name:
            report.write(args.out, args.name, table(measured), measured)
        else:
            print(table(measured))
        return
    rows = read_rows(args.data / "test.jsonl")[: args.questions]
    lora = LoraConfig()
    if args.adapter:
        saved = read_adapter(str(args.adapter)).lora
        lora = LoraConfig(saved.rank, saved.alpha, targets=saved.targets)
    policy = Measurement(args.model, args.format, lora, args.max_tokens, args.engine, args.dtype)
    policy.use(args.adapter)
    result = policy.accuracy(rows, args.style, args.samples, args.write_samples)
    result["nats"] = policy.nats(solutions(rows, args.style))
    if args.teacher:
        result["teacher_nats"] = policy.nats(sampled_completions(args.teacher, args.style))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result | {"environment": report.environment()}))
    policy.engine.close()


if __name__ == "__main__":
    main()
