"""A simulation, not a measurement: how a run would scale to numbers of GPUs that were not there.

    python benchmarks/ranks_simulation.py --out results        # any machine, seconds

From the measured phases of one GPU (results/ranks_vllm_gpu.json: 7B, 32 completions of 512 tokens a GPU) and an assumed
spread of lengths: a rank decodes until its longest completion ends, a step of the decoder taking what it took there;
the update takes its tokens' share; ranks wait for the slowest twice, before the update and in its all-reduce. Lengths
are log-normal around a mean of each prompt's own, cut at the limit. Prompts are dealt as the trainer does, by the
lengths that they had before.
"""

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

import report

from qerl_pl.rollout.collector import partition_prompts

RESULTS = Path(__file__).parent / "results" / "ranks_vllm_gpu.json"
PROMPTS, GROUP, TOKENS, PROMPT_TOKENS = 4, 8, 512, 256
ALL_REDUCE_S = 0.0011  # 320 MB over NVLink between two H200s; between machines more, and once a step
SPREADS = {"equal": (0.0, 0.0), "usual": (0.5, 0.3), "wide": (0.8, 0.5)}  # of log lengths: between prompts, within one


def seconds(
    mean_of: dict[str, float], within: float, hands: list[list[str]], unit: dict[str, float], draw: random.Random
) -> tuple[float, float]:
    """(seconds of a rollout and its update, mean seconds that a rank waited) for prompts dealt so."""
    sampled, learned = [], []
    for hand in hands:
        lengths = [
            min(mean_of[prompt] * draw.lognormvariate(0.0, within), 4.0 * TOKENS)
            for prompt in hand
            for _ in range(GROUP)
        ]
        sampled.append(unit["token"] * max(lengths))
        learned.append(unit["learned"] * sum(length + PROMPT_TOKENS for length in lengths))
    waited = statistics.mean(max(part) - one for part in (sampled, learned) for one in part) * 2
    return max(sampled) + max(learned) + unit["rest"] + ALL_REDUCE_S * (len(hands) > 1), waited


def simulate(ranks: int, spread: str, unit: dict[str, float], rollouts: int = 200) -> dict[str, float]:
    """Completions a second and share of waiting, over rollouts of prompts that were sampled once before."""
    between, within = SPREADS[spread]
    draw, times, waits = random.Random(0), [], []
    for _ in range(rollouts):
        mean_of = {str(n): TOKENS * draw.lognormvariate(-(between**2) / 2, between) for n in range(PROMPTS * ranks)}
        names = list(mean_of)
        hands = [[names[place] for place in hand] for hand in partition_prompts(names, mean_of, ranks)]
        time, wait = seconds(mean_of, within, hands, unit, draw)
        times.append(time)
        waits.append(wait / time)
    return {
        "completions_per_s": PROMPTS * GROUP * ranks / statistics.mean(times),
        "waiting": statistics.mean(waits),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    measured: dict[str, Any] = json.loads(RESULTS.read_text())["results"]["7b"]["steps"]["1"]
    median = {tag: statistics.median(values) for tag, values in measured.items()}
    whole = PROMPTS * GROUP / median["completions_per_s"]
    unit = {
        "token": median["time/rollout_s"] / TOKENS,
        "learned": median["time/update_s"] / (PROMPTS * GROUP * (TOKENS + PROMPT_TOKENS)),
        "rest": whole - median["time/rollout_s"] - median["time/update_s"],
    }
    rows, found = [], {}
    for spread in SPREADS:
        for ranks in (1, 2, 4, 8, 32):
            one = found[f"{spread} {ranks}"] = simulate(ranks, spread, unit)
            alone = found[f"{spread} 1"]["completions_per_s"]
            over = one["completions_per_s"] / alone
            rows.append([spread, ranks, f"{one['completions_per_s']:.1f}", f"{over:.2f}", f"{one['waiting']:.0%}"])
    headers = ["lengths", "GPUs", "completions/s, simulated", "over one", "waiting, mean share of a step"]
    report.write(args.out, "ranks_simulation", report.markdown(headers, rows), found)


if __name__ == "__main__":
    main()
