"""A policy in plain PyTorch, for tests: a Qwen2 with adapter in float64, one sequence at a time, nothing cached.

It shares no code with `qerl_pl`: it is what the trainer and the engine must agree with. A weight is the dequantized
base's plus scaling * B A, so there is one way through the model for trainer, reference and sampler; only the adapter
and the noise differ.
"""

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lower three bits of a code stand for; the fourth is the sign."""
BLOCK = 16
NOISY = ("input_layernorm", "post_attention_layernorm")


def stream_seed(*parts: int | str) -> int:
    """Seed of a random stream: 63 bits of the SHA-256 of what it is for, each part with its type."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") // 2


def shuffled(count: int, seed: int) -> list[int]:
    """0 to count - 1 in a random order."""
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def drawn(population: Sequence[str], count: int, seed: int) -> list[str]:
    """At most `count` of a population, without replacement."""
    return random.Random(seed).sample(list(population), min(count, len(population)))


def dequantized(packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """W[n, k] = e2m1(code[n, k]) * scale[n, k // 16] / global_scale; of two codes in a byte the even k is the low one.

    Returns:
        float64 [N, K].
    """
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)
    magnitude = torch.tensor(E2M1, dtype=torch.float64)[(codes & 7).int()]
    sign = 1.0 - 2.0 * (codes >> 3).double()
    return sign * magnitude * scale.double().repeat_interleave(BLOCK, dim=1) / global_scale.double()


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled."""

    max_tokens: int
    temperature: float
    """0 is greedy."""
    stop: Sequence[str]


@dataclass(frozen=True)
class Sample:
    """One completion."""

    tokens: list[int]
    logprobs: list[float]
    """Of the policy that sampled."""
    text: str
    truncated: bool


class PlainPolicy:
    """The base model of a folder in NVFP4, with adapter matrices and norm scales that are trained.

    Args:
        folder: Hugging Face format.
        trained: Adapter matrices and trained norm scales by name, such as "model.layers.0.self_attn.q_proj.lora_A" and
            "model.layers.0.input_layernorm".
        scaling: Factor of B A.
    """

    def __init__(self, folder: Path, trained: Mapping[str, Tensor], scaling: float) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        self.ends = {*ends, self.tokenizer.eos_token_id}
        special = {*self.tokenizer.all_special_ids}
        self.unwritten = special & {*self.ends, self.tokenizer.pad_token_id}
        self.base: dict[str, Tensor] = {}
        files = load_file(folder / "model.safetensors")
        for name, tensor in files.items():
            stem, _, kind = name.rpartition(".")
            if kind == "weight_packed":
                parts = (files[f"{stem}.{part}"] for part in ("weight_packed", "weight_scale", "weight_global_scale"))
                self.base[f"{stem}.weight"] = dequantized(*parts)
            elif kind in ("weight", "bias"):
                self.base[name] = tensor.double()
        self.trained = {name: tensor.double().requires_grad_() for name, tensor in trained.items()}
        self.scaling = scaling

    def logits(self, tokens: Sequence[int], adapter: bool = True, noise: Mapping[str, Tensor] | None = None) -> Tensor:
        """Logits [T, V] of the token after each of T tokens.

        Args:
            tokens: One sequence.
            adapter: False is the reference policy: no adapter, norm scales as in the base.
            noise: What is added to norm scales, by norm.
        """

        def scale(name: str) -> Tensor:
            trained = self.trained.get(name) if adapter else None
            clean = self.base[f"{name}.weight"] if trained is None else trained
            return clean if noise is None else clean + noise[name]

        def weight(name: str) -> Tensor:
            a, b = self.trained[f"{name}.lora_A"], self.trained[f"{name}.lora_B"]
            return self.base[f"{name}.weight"] + (self.scaling * b @ a if adapter else 0.0)

        x = self.base["model.embed_tokens.weight"][torch.tensor(tokens)]
        for number in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{number}"
            h = self._norm(x, scale(f"{layer}.input_layernorm"))
            q, k, v = (
                h @ weight(f"{layer}.self_attn.{part}_proj").T + self.base[f"{layer}.self_attn.{part}_proj.bias"]
                for part in "qkv"
            )
            x = x + self._attention(q, k, v) @ weight(f"{layer}.self_attn.o_proj").T
            h = self._norm(x, scale(f"{layer}.post_attention_layernorm"))
            gate, up = h @ weight(f"{layer}.mlp.gate_proj").T, h @ weight(f"{layer}.mlp.up_proj").T
            x = x + (gate * torch.sigmoid(gate) * up) @ weight(f"{layer}.mlp.down_proj").T
        return self._norm(x, self.base["model.norm.weight"]) @ self.base["lm_head.weight"].T

    def _norm(self, x: Tensor, scale: Tensor) -> Tensor:
        mean_square = (x * x).mean(dim=1, keepdim=True)
        return scale * x / torch.sqrt(mean_square + self.config["rms_norm_eps"])

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention, head by head; q [T, heads * size], k and v [T, key-value heads * size]."""
        heads, shared = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        size, count = q.shape[1] // heads, len(q)
        future = torch.ones(count, count).triu(1).bool()
        out = []
        for head in range(heads):
            other = head * shared // heads
            own, theirs = slice(head * size, (head + 1) * size), slice(other * size, (other + 1) * size)
            scores = self._rotated(q[:, own]) @ self._rotated(k[:, theirs]).T / math.sqrt(size)
            out.append(torch.softmax(scores.masked_fill(future, -math.inf), dim=1) @ v[:, theirs])
        return torch.cat(out, dim=1)

    def _rotated(self, x: Tensor) -> Tensor:
        """Rotary positions 0 to T - 1: channels i and i + size / 2 turn by position * theta^(-2 i / size)."""
        count, size = x.shape
        theta = self.config["rope_parameters"]["rope_theta"]
        speed = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.arange(count, dtype=torch.float64)[:, None] * speed
        first, second = x[:, : size // 2], x[:, size // 2 :]
        turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
        return torch.cat(turned, dim=1)

    def token_logprobs(
        self, prompt: Sequence[int], completion: Sequence[int], temperature: float, adapter: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each token of a completion, and entropy of what it was drawn from, in nats: [T] each."""
        logits = self.logits([*prompt, *completion], adapter)[len(prompt) - 1 : -1] / temperature
        logprobs = torch.log_softmax(logits, dim=1)
        entropy = -(logprobs.exp() * logprobs).sum(dim=1)
        return logprobs[torch.arange(len(completion)), torch.tensor(completion)], entropy

    def noise(self, sigma: float, seed: int, version: int) -> dict[str, Tensor]:
        """Noise of every norm before q, k, v and before gate, up: Gaussian, its root mean square exactly sigma."""
        result = {}
        for number in range(self.config["num_hidden_layers"]):
            for norm in NOISY:
                name = f"model.layers.{number}.{norm}"
                generator = torch.Generator().manual_seed(stream_seed(seed, "aqn", version, name))
                draw = torch.randn(self.config["hidden_size"], generator=generator).double()
                result[name] = sigma * draw / torch.sqrt((draw * draw).mean())
        return result

    @torch.no_grad()
    def sample(
        self, prompt: Sequence[int], seed: int, sampling: Sampling, noise: Mapping[str, Tensor] | None = None
    ) -> Sample:
        """One completion: its token number t inverts the cumulative distribution at the t-th number of its stream.

        It ends with a token that ends completions, with one that makes a stop string appear, or at the limit.
        """
        stream = torch.Generator().manual_seed(seed)
        uniforms = torch.rand(sampling.max_tokens, generator=stream, dtype=torch.float64).tolist()
        tokens: list[int] = []
        logprobs: list[float] = []
        text = ""
        for uniform in uniforms:
            logits = self.logits([*prompt, *tokens], noise=noise)[-1]
            scores = torch.log_softmax(logits / (sampling.temperature or 1.0), dim=0)
            token = int(scores.argmax()) if sampling.temperature == 0 else _inverted(scores.exp().tolist(), uniform)
            tokens.append(token)
            logprobs.append(scores[token].item())
            text = str(self.tokenizer.decode([one for one in tokens if one not in self.unwritten]))
            if token in self.ends or any(string in self.tokenizer.decode(tokens) for string in sampling.stop):
                return Sample(tokens, logprobs, text, truncated=False)
        return Sample(tokens, logprobs, text, truncated=True)


def _inverted(probabilities: Sequence[float], uniform: float) -> int:
    """The first token up to which the probabilities sum to more than a number in [0, 1)."""
    total = 0.0
    for token, probability in enumerate(probabilities):
        total += probability
        if total > uniform:
            return token
    return len(probabilities) - 1
