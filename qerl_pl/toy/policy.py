"""The toy policy: a small Qwen2, fine-tuned on demonstrations of mixed quality, and cached."""

import hashlib
import json
import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils.chat_template_utils import get_json_schema

from qerl_pl.chat.continuation import ChatContinuation
from qerl_pl.chat.template import render_prompt
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.runtime.files import atomic_directory, build_once, cache_root
from qerl_pl.seeds import stream_seed
from qerl_pl.toy.game import GuessingGame, GuessNumber
from qerl_pl.toy.task import ArithmeticTask, careful_demonstration, careless_demonstration
from qerl_pl.toy.tokenizer import TOOLS_TEMPLATE, VOCABULARY, build_tokenizer

log = logging.getLogger(__name__)

FORMAT = 1
"""Version of what this code builds from a `ToyConfig`; raise it with every change that alters the weights."""
POSITIONS = 4096
"""Longest sequence, in tokens."""
_MULTIPLE = 128
_HEAD_SIZES = (32, 64, 128)
_IGNORED = -100


@dataclass(frozen=True)
class ToyConfig:
    """The toy policy: its task, its size and its supervised warm-up.

    Args:
        task: The problems it is taught.
        layers: Transformer layers.
        width: Hidden size, a multiple of 128.
        intermediate: Width of the MLP, a multiple of 128.
        heads: Attention heads, also of keys and values; width / heads is 32, 64 or 128.
        careless_fraction: Fraction of the demonstrations that guess instead of adding column by column.
        steps: Optimizer steps of the warm-up; a task with more digits or operands needs more.
        batch_size: Demonstrations per step.
        learning_rate: Peak rate of AdamW, after a linear warm-up and before a cosine decay to zero.
        seed: Seed of initial weights and demonstrations.
        game: A game that it is taught in place of the problems; null teaches the problems.
    """

    task: ArithmeticTask = field(default_factory=ArithmeticTask)
    layers: int = 3
    width: int = 128
    intermediate: int = 256
    heads: int = 2
    careless_fraction: float = 0.55
    steps: int = 1000
    batch_size: int = 16
    learning_rate: float = 1.5e-3
    seed: int = 0
    game: GuessingGame | None = None

    def __post_init__(self) -> None:
        for name in ("width", "intermediate"):
            if (size := getattr(self, name)) < 1 or size % _MULTIPLE:
                raise UserError(f"{name} must be a multiple of {_MULTIPLE}, got {size}: the 4-bit kernels need it.")
        if self.width not in [self.heads * size for size in _HEAD_SIZES]:
            raise UserError(f"width / heads must be one of {_HEAD_SIZES}, got {self.width} / {self.heads}: set heads.")
        require_at_least(1, {"layers": self.layers, "batch_size": self.batch_size})
        require_at_least(0, {"steps": self.steps})
        if not 0 <= self.learning_rate < math.inf:
            raise UserError(f"learning_rate must be a number of at least 0, got {self.learning_rate}: set 1.5e-3, say.")
        if not 0 <= self.careless_fraction <= 1:
            raise UserError(f"careless_fraction must be in [0, 1], got {self.careless_fraction}: set it in that range.")

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration by name, without a game if there is none."""
        return {name: value for name, value in asdict(self).items() if name != "game" or value is not None}

    @property
    def digest(self) -> str:
        """Digest of this configuration and `FORMAT`."""
        text = json.dumps({"format": FORMAT, **self.settings}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def build_toy_policy(config: ToyConfig | None = None, cache_dir: str | Path | None = None) -> Path:
    """Folder of the toy policy in Hugging Face format, trained on the first call and cached.

    The weights are the same, bit for bit, with the same library versions and kind of processor. The global random state
    does not change. The default takes about 80 seconds of one core.

    Args:
        config: Configuration; the default policy if None.
        cache_dir: Folder of cached policies; $QERL_CACHE, or else ~/.cache/qerl_pl, if None.

    Raises:
        UserError: The cache folder cannot be written.
    """
    config = ToyConfig() if config is None else config
    cache = cache_root() if cache_dir is None else Path(cache_dir).expanduser()
    folder = cache / f"toy-{config.digest}"
    with build_once(folder) as missing:
        if missing:
            _teach(config, folder)
    return folder


def _teach(config: ToyConfig, folder: Path) -> None:
    log.info("teaching the toy policy (once): %s", folder)
    with atomic_directory(folder) as unfinished:
        tokenizer = build_tokenizer() if config.game is None else build_tokenizer(TOOLS_TEMPLATE)
        with one_thread():
            model = _new_model(config, tokenizer)
            teach(model, config, tokenizer)
        _save(model, unfinished)
        tokenizer.save_pretrained(unfinished)


def _save(model: Qwen2ForCausalLM, folder: Path) -> None:
    """Write what `save_pretrained` does, which writes on rank 0 only; any rank may be the first to build the policy."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    assert model.generation_config is not None
    model.generation_config.save_pretrained(folder)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: the last bits depend on the number of threads, and more gain little."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def teach(model: Any, config: ToyConfig, tokenizer: Qwen2Tokenizer) -> None:
    """Train a causal LM of transformers on demonstrations, in place, and set it to evaluation.

    Args:
        model: Of any size: those of the configuration mean nothing here.
        config: Task, demonstrations, steps and learning rate.
        tokenizer: The toy tokenizer.
    """
    rng = random.Random(stream_seed(config.seed, "toy demonstrations"))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, config.steps))
    # disable=None: no bar where standard error is no terminal
    progress = tqdm(range(config.steps), desc="Teaching the toy policy", unit="step", leave=False, disable=None)
    for step in progress:
        loss = demonstration_loss(model, *demonstration_batch(config, tokenizer, rng, step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
    model.eval()


def demonstration_loss(model: Any, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the completions' tokens, in nats, of a `demonstration_batch`."""
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
    taught = labels != _IGNORED
    return functional.cross_entropy(model.lm_head(hidden[:, :-1][taught[:, 1:]]), labels[:, 1:][taught[:, 1:]])


def _new_model(config: ToyConfig, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(config.seed, "toy weights"))
        model: Qwen2ForCausalLM = AutoModelForCausalLM.from_config(  # whatever the default dtype
            Qwen2Config(
                vocab_size=VOCABULARY,
                hidden_size=config.width,
                intermediate_size=config.intermediate,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.heads,
                max_position_embeddings=POSITIONS,
                tie_word_embeddings=True,
                initializer_range=0.06,  # learns in half the steps that the default of 0.02 takes at this width
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
            ),
            dtype=torch.float32,
        )
    model.generation_config = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model


def demonstration_batch(
    config: ToyConfig, tokenizer: Qwen2Tokenizer, rng: random.Random, step: int
) -> tuple[Tensor, Tensor]:
    """The demonstrations of one step of the warm-up.

    Args:
        config: Task, batch size and fraction of careless demonstrations.
        tokenizer: The toy tokenizer.
        rng: Draws which demonstrations are careless, and their guesses.
        step: Selects the problems of the training split.

    Returns:
        Token ids and labels, both [batch_size, T], right-padded; labels of prompts and padding are -100.
    """
    rows, labels = [], []
    game = None if config.game is None else game_demonstrator(config.game, tokenizer)
    for index in range(step * config.batch_size, (step + 1) * config.batch_size):
        careless = rng.random() < config.careless_fraction
        if game is not None:
            ids, taught = game(index, careless)
            rows.append(torch.tensor(ids))
            labels.append(torch.tensor(taught))
            continue
        problem = config.task.problem(index, "train")
        text = careless_demonstration(problem, rng) if careless else careful_demonstration(problem)
        prompt = render_prompt(tokenizer, problem.question)
        completion = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
        rows.append(torch.tensor(prompt + completion))
        labels.append(torch.tensor([_IGNORED] * len(prompt) + completion))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, True, float(tokenizer.pad_token_id)), pad(labels, True, float(_IGNORED))


def game_demonstrator(
    game: GuessingGame, tokenizer: Qwen2Tokenizer
) -> Callable[[int, bool], tuple[list[int], list[int]]]:
    """Token ids and labels of a game's demonstrations, by index and whether they are careless.

    They are those of a dialogue with the environment; labels of what is not the policy's are -100.
    """
    ends = [int(tokenizer.eos_token_id)]
    continuation = ChatContinuation(tokenizer, ends)
    tools = [get_json_schema(GuessNumber().guess)]

    def demonstrate(index: int, careless: bool) -> tuple[list[int], list[int]]:
        problem = game.problem(index, "train")
        ids = list(continuation.prompt(problem.question, tools))
        labels = [_IGNORED] * len(ids)
        for turn, (text, answer) in enumerate(turns := game.play(problem.answer, careless)):
            said = [*tokenizer(text)["input_ids"], *ends]
            ids, labels = ids + said, labels + said
            if turn + 1 < len(turns):
                suffix = continuation.suffix(said, [{"role": "tool", "name": "guess", "content": answer}], tools)
                ids, labels = ids + [*suffix], labels + [_IGNORED] * len(suffix)
        return ids, labels

    return demonstrate


def _rate(step: int, steps: int) -> float:
    """Factor of the peak learning rate: linear over the first tenth, then half a cosine down to zero."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
