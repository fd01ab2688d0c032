"""How far bfloat16 alone moves log-probabilities of deep models of random weights: the floor of a mismatch there.

    python benchmarks/rounding.py --out results        # a CPU, half a minute

Narrow Qwen2 models with the depths of 7B, 32B and 72B, their random weights scaled so that logits spread as in the wide
ones, in plain transformers: sampled tokens' log-probabilities in bfloat16 against float32, the weights being the same.
Trainer and engine both compute in bfloat16, in different orders, so they cannot agree better on such weights.
"""

import argparse
from pathlib import Path

import report
import torch
from random_model import SHAPES
from transformers import Qwen2Config, Qwen2ForCausalLM

WIDTH, VOCABULARY = 512, 8192


@torch.no_grad()
def difference(hidden: int, layers: int) -> tuple[float, float]:
    """Mean absolute difference in nats a token, and the standard deviation of the logits."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=0.02 if "embed" in name else 0.02 * (hidden / WIDTH) ** 0.5)
    model = model.bfloat16().float()
    ids = torch.randint(VOCABULARY, (2, 192))
    exact = model(input_ids=ids).logits
    tokens = torch.distributions.Categorical(logits=exact).sample().unsqueeze(-1)
    rounded = model.bfloat16()(input_ids=ids).logits.float()
    first, second = (logits.log_softmax(-1).gather(-1, tokens) for logits in (exact, rounded))
    return (first - second).abs().mean().item(), exact.std().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["7b", "32b", "72b"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for shape in args.shapes:
        hidden, _, layers, *_ = SHAPES[shape]
        gap, spread = difference(hidden, layers)
        rows.append([shape, layers, f"{spread:.2f}", f"{gap:.3f}"])
    headers = ["depth of", "layers", "standard deviation of logits", "bfloat16 against float32, nats a token"]
    report.write(args.out, "rounding", report.markdown(headers, rows), {"rows": rows})


if __name__ == "__main__":
    main()
