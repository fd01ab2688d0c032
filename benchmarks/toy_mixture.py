"""A small Qwen3 mixture of experts, taught on the CPU like the toy policy, in a shape that Marlin's experts take."""

import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path

import random_model
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qerl_pl.persistence.atomic_files import atomic_directory, build_once, cache_root
from qerl_pl.seeds import stream_seed
from qerl_pl.toy.policy import ToyConfig, demonstration_batch, demonstration_loss, one_thread, teach
from qerl_pl.toy.tokenizer import build_tokenizer

HELD_OUT = 128
"""Demonstrations that the loss is measured on."""


def toy_mixture(config: ToyConfig) -> Path:
    """Folder of the mixture in float32, taught on the first call and cached.

    Its `teaching.json` has the steps and the loss on demonstrations that it was not taught, nats a token.

    Args:
        config: Task, layers and teaching; the other sizes are those of `random_model.MIXTURES["toy"]`.
    """
    tokenizer = build_tokenizer()
    model_config = random_model.mixture_config("toy", config.layers) | {
        "tie_word_embeddings": True,
        "initializer_range": 0.06,  # as the toy policy's
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    digest = hashlib.sha256(json.dumps([config.digest, model_config]).encode()).hexdigest()[:16]
    folder = cache_root() / f"toy-mixture-{digest}"
    with build_once(folder) as missing:
        if not missing:
            return folder
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(config.seed, "toy weights"))
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model_config), dtype=torch.float32)
        batch = demonstration_batch(replace(config, batch_size=HELD_OUT), tokenizer, random.Random(0), config.steps)
        with one_thread():
            teach(model, config, tokenizer)
            with torch.no_grad():
                loss = demonstration_loss(model, *batch).item()
        with atomic_directory(folder) as unfinished:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            (unfinished / "teaching.json").write_text(json.dumps({"steps": config.steps, "loss": loss}))
    return folder
