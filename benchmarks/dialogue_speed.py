"""Sampled tokens per second of dialogues of several turns, beside one turn of the same total, as a table and JSON.

    python benchmarks/dialogue_speed.py --out benchmarks/results            # 7B; --shape 3b, 14b, 32b

Random weights of the model's shape in NVFP4 with an adapter, vLLM with prefix caching. Each dialogue samples the same
number of tokens in equal turns; a tool answers each turn but the last with `--answer` tokens after `--tool-s` seconds.
The key/value cache has room for all dialogues: with less, dialogues of more turns, which are longer, would be computed
again more often. The contract of `generate_from` is tested first. `--shape tiny --device cpu --no-tests` tries the
script on the CPU build.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report
import torch
from engine_speed import RANK, TARGETS, random_policy, timed
from random_model import SHAPES, cache_gib, config_of, write_model

from qerl_pl.engines import EngineSpec, VLLMEngine
from qerl_pl.engines.base import RequestSource
from qerl_pl.types import Completion, RolloutRequest, SamplingConfig

GATE = ("tests/test_continued.py",)


class Dialogues(RequestSource):
    """Dialogues of turns of equal length, whose tool answers after a fixed time.

    Args:
        prompts: Token ids, [dialogues, prompt].
        answers: Token ids, [dialogues, turns, answer].
        length: Tokens of a turn.
        tool_s: Seconds of a tool.
    """

    def __init__(self, prompts: torch.Tensor, answers: torch.Tensor, length: int, tool_s: float) -> None:
        self.ids: list[list[int]] = prompts.tolist()
        self.answers: list[list[list[int]]] = answers.tolist()
        self.length = length
        self.tool_s = tool_s
        self.done = [0] * len(self.ids)
        self.ready = dict.fromkeys(range(len(self.ids)), 0.0)
        self.sampled = 0

    def take(self, wait: bool, gather: bool = False) -> Sequence[tuple[int, RolloutRequest]]:
        """The turns whose tool has answered."""
        if wait and self.ready:
            time.sleep(max(0.0, min(self.ready.values()) - time.perf_counter()))
        now = time.perf_counter()
        ready = [key for key, since in self.ready.items() if since <= now]
        for key in ready:
            del self.ready[key]
        return [
            (key, RolloutRequest(tuple(self.ids[key]), (1000 * key + self.done[key],), self.length)) for key in ready
        ]

    def put(self, key: int, completion: Completion) -> None:
        """Add a turn, and have the tool answer."""
        self.sampled += len(completion.token_ids)
        self.ids[key] += [*completion.token_ids, *self.answers[key][self.done[key]]]
        self.done[key] += 1
        if self.done[key] < len(self.answers[key]):
            self.ready[key] = time.perf_counter() + self.tool_s


def measure(engine: VLLMEngine, turns: int, weights: Any, args: argparse.Namespace) -> dict[str, float]:
    """Median tokens per second of several runs; each begins with an empty prefix cache."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = SHAPES[args.shape][-1]
    prompts = torch.randint(10, vocabulary, (args.dialogues, args.prompt), generator=generator)
    answers = torch.randint(10, vocabulary, (args.dialogues, turns, args.answer), generator=generator)
    rates = []
    for _ in range(args.repeats + 1):
        engine.sync(weights)
        source = Dialogues(prompts, answers, args.tokens // turns, args.tool_s)
        sampling = SamplingConfig(max_tokens=args.tokens)
        seconds = timed(torch.device(args.device), lambda: engine.generate_from(source, sampling))  # noqa: B023
        rates.append(source.sampled / seconds)
    del rates[0]  # warm-up
    return {"turns": turns, "tokens_per_s": statistics.median(rates), "slowest": min(rates), "fastest": max(rates)}


def main() -> int:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dialogues", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=1024, help="sampled tokens of a dialogue")
    parser.add_argument("--answer", type=int, default=64, help="tokens of a tool's answer")
    parser.add_argument("--tool-s", type=float, default=0.05, help="seconds of a tool")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-gib", type=float, help="key/value cache; by default room for all dialogues")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--no-tests", action="store_true")
    args = parser.parse_args()
    if not args.no_tests and not report.correct(GATE):
        return 1
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        write_model(base, args.shape, device)
        longest = args.prompt + args.tokens + args.answer * max(args.turns)
        spec = EngineSpec(base, torch.bfloat16, device, RANK, TARGETS, longest)
        room = cache_gib(config_of(args.shape), longest, args.dialogues)
        engine = VLLMEngine(kv_cache_gib=args.kv_gib or room, max_num_seqs=args.dialogues)
        engine.launch(spec)
        weights = random_policy(base, spec, None)
        rows = [measure(engine, turns, weights, args) for turns in (1, *args.turns)]
        engine.close()
    one = rows[0]["tokens_per_s"]
    cells = [
        [row["turns"], *(f"{row[name]:.0f}" for name in ("tokens_per_s", "slowest", "fastest"))]
        + [f"{row['tokens_per_s'] / one:.3f}"]
        for row in rows
    ]
    title = (
        f"{args.shape}, {args.dialogues} dialogues, {args.tokens} sampled tokens each, answers of {args.answer} tokens "
        f"after {args.tool_s:g} s\n\n"
    )
    table = report.markdown(["turns", "sampled tok/s", "slowest", "fastest", "of one turn"], cells)
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "no_tests")}
    report.write(args.out, f"dialogue_speed_{args.shape}", title + table, {"settings": settings, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
