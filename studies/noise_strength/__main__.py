"""How far the noise of AQN moves a pretrained policy: on its norms' scales, log-probabilities and entropy.

    python -m studies.noise_strength MODEL [MODEL ...] --data FOLDER

FOLDER has test.jsonl as GSM8K's. A policy without noise samples completions, in float32; each sigma is measured on
their tokens, in independent draws. `noise.relative` makes sigma a fraction of the root mean square (RMS) of a norm's
own scale. The mismatch is the mean absolute difference of the sampled tokens' log-probabilities, as in the metric
`mismatch/logprob_abs_mean`; the KL divergence is that of the noisy policy from the clean one, over the vocabulary.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import report
from qerl_pl.algorithm.noise import NormNoise, rms
from qerl_pl.chat.template import render_prompts
from qerl_pl.datamodules.tables import read_table
from qerl_pl.models.families import family_of, noisy_norm_names

ABSOLUTE = (0.0005, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
RELATIVE = (0.005, 0.02, 0.05, 0.1, 0.2)
AT_ONCE = 8


class Sampled(NamedTuple):
    """Prompts, padded on the left, and completions."""

    ids: Tensor
    """[rows, prompt + completion]."""
    attended: Tensor
    """1 where `ids` is no padding."""
    mask: Tensor
    """[rows, completion]: 1 for sampled tokens, the end included."""


class Effect(NamedTuple):
    """What a draw of noise changes, in nats per sampled token."""

    mismatch: float
    kl: float
    entropy: float
    """Noisy less clean."""


@torch.no_grad()
def sample(model: Any, tokenizer: Any, data: Path, rows: int, max_tokens: int) -> Sampled:
    """A completion for each of the first test questions, at temperature 1."""
    questions = [str(row["question"]) for row in read_table(str(data), "test")[:rows]]
    prompts = render_prompts(tokenizer, questions)
    width, padding = max(map(len, prompts)), tokenizer.pad_token_id
    ids = torch.tensor([[padding] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    attended = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    torch.manual_seed(0)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    out = model.generate(ids, attention_mask=attended, max_new_tokens=max_tokens, pad_token_id=padding, **sampling)
    completions = out[:, width:]
    ends = torch.isin(completions, torch.tensor(model.generation_config.eos_token_id))
    mask = (ends.cumsum(1) - ends.int() == 0).int()  # up to the first end
    return Sampled(out, torch.cat([attended, mask], 1), mask)


@torch.no_grad()
def distributions(model: Any, sampled: Sampled) -> Tensor:
    """Log-probabilities of the vocabulary at each sampled token [tokens, vocabulary]."""
    logprobs, length = [], sampled.mask.shape[1]
    for rows in torch.arange(len(sampled.ids)).split(AT_ONCE):
        attended = sampled.attended[rows]
        positions = (attended.cumsum(1) - 1).clamp(min=0)
        out = model(sampled.ids[rows], attention_mask=attended, position_ids=positions, logits_to_keep=length + 1)
        logprobs.append(out.logits[:, :-1][sampled.mask[rows].bool()].log_softmax(-1))
    return torch.cat(logprobs)


@contextmanager
def noisy(model: Any, noise: NormNoise) -> Iterator[None]:
    """Within it the model's noisy norms have scale + noise."""
    clean = scales(model)
    for name, scale in clean.items():
        added = noise.of_norm(name, scale)
        assert added is not None  # no layers are chosen
        model.get_submodule(name).weight.data = scale + added
    yield
    for name, scale in clean.items():
        model.get_submodule(name).weight.data = scale


def scales(model: Any) -> dict[str, Tensor]:
    """The scales that AQN perturbs, by module name."""
    names = noisy_norm_names([name for name, _ in model.named_modules()], family_of(model.config.model_type))
    return {name: model.get_submodule(name).weight.data for name in names}


def effect(clean: Tensor, perturbed: Tensor, tokens: Tensor) -> Effect:
    """Compare two policies' log-probabilities [tokens, vocabulary] at the same tokens."""
    chosen = tokens[:, None]
    return Effect(
        (clean.gather(1, chosen) - perturbed.gather(1, chosen)).abs().mean().item(),
        (perturbed.exp() * (perturbed - clean)).sum(1).mean().item(),
        (entropy(perturbed) - entropy(clean)).item(),
    )


def entropy(logprobs: Tensor) -> Tensor:
    """Mean entropy of distributions [tokens, vocabulary], in nats."""
    return -(logprobs.exp() * logprobs).sum(1).mean()


def measure(path: Path, data: Path, rows: int, max_tokens: int, draws: int) -> dict[str, Any]:
    """The effects of every sigma on a policy, and its scales."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    sampled = sample(model, tokenizer, data, rows, max_tokens)
    clean = distributions(model, sampled)
    tokens = sampled.ids[:, -sampled.mask.shape[1] :][sampled.mask.bool()]
    effects: dict[str, list[dict[str, Any]]] = {"absolute": [], "relative": []}
    for kind, sigmas in (("absolute", ABSOLUTE), ("relative", RELATIVE)):
        for sigma in sigmas:
            measured = []
            for draw in range(draws):
                with noisy(model, NormNoise(sigma, seed=0, version=draw, relative=kind == "relative")):
                    measured.append(effect(clean, distributions(model, sampled), tokens)._asdict())
            effects[kind].append({"sigma": sigma, "draws": measured})
    return {
        "model": path.name,
        "rms": sorted(map(rms, scales(model).values())),
        "tokens": len(tokens),
        "entropy": entropy(clean).item(),
        **effects,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Means over draws, and the standard deviation of the mismatch, as Markdown."""
    lines = []
    for result in results:
        scale = statistics.median(result["rms"])
        for kind in ("absolute", "relative"):
            for row in result[kind]:
                mean = {name: statistics.fmean(draw[name] for draw in row["draws"]) for name in Effect._fields}
                spread = statistics.stdev(draw["mismatch"] for draw in row["draws"])
                share = row["sigma"] if kind == "relative" else row["sigma"] / scale
                cells = [result["model"], f"{scale:.2f}", f"{row['sigma']:g}", f"{100 * share:.2g} %"]
                cells += [f"{mean['mismatch']:.4f} ± {spread:.4f}", f"{mean['kl']:.5f}", f"{mean['entropy']:+.4f}"]
                lines.append([*cells[:2], kind, *cells[2:]])
    headers = ["policy", "RMS of a scale, median", "noise", "sigma", "of that RMS", "mismatch", "KL", "entropy"]
    return report.markdown(headers, lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="folders of 16-bit models with chat templates")
    parser.add_argument("--data", type=Path, required=True, help="folder with test.jsonl")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--name", default="noise_strength", help="of the table")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args(words)
    results = [measure(model, args.data, args.rows, args.max_tokens, args.draws) for model in args.models]
    report.write(args.out, args.name, table(results), {"policies": results})


if __name__ == "__main__":
    main()
