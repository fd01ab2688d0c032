"""Whether a model's folder agrees with itself: config.json, weights and tokenizer, in seconds and without a weight."""

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from qerl_pl.errors import UserError
from qerl_pl.formats.model_files import TensorFiles, end_token_ids, load_config, load_tokenizer, read_config

_HEAD = "lm_head.weight"
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def described_model(folder: Path) -> PreTrainedModel:
    """The causal language model that a folder's config.json describes, without weights (on the meta device).

    Raises:
        UserError: The config describes none, the weights are not the ones it describes, there is no tokenizer of its
            vocabulary, or what ends a completion is no token.
    """
    quantized = read_config(folder).get("quantization_config") is not None
    with _in_transformers_words(folder, "config.json"):
        config = load_config(folder)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"the base must be a causal language model of transformers; {folder} is {config.model_type}")
    with _in_transformers_words(folder, "config.json"), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    _check_weights(folder, model, quantized)
    _check_tokenizer(folder, config.get_text_config().vocab_size)
    end_token_ids(folder)
    return model


@contextmanager
def _in_transformers_words(folder: Path, part: str) -> Iterator[None]:
    """Say what transformers says of a file: what a wrong one makes it raise is of every kind."""
    try:
        yield
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"transformers must be able to use a model's files; {part} of {folder} fails with {said:.90}; "
            "get it again from where the model is from"
        ) from error


def _check_weights(folder: Path, model: PreTrainedModel, quantized: bool) -> None:
    rule, remedy = "config.json must describe the weights beside it", "get both from one model"
    found = TensorFiles(folder).shapes()
    for name, shape in [(name, shape) for name, shape in found.items() if name.endswith(".weight_packed")]:
        found[name.removesuffix("_packed")] = (shape[0], 2 * shape[-1])  # two 4-bit weights a byte
    described = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    scaled = any("_scale" in name or name.endswith(".absmax") for name in found)
    for name in [name for name in found if f"{name}.absmax" in found]:  # flat, two 4-bit weights a byte
        if 2 * math.prod(found[name]) == math.prod(described.get(name, ())):
            found[name] = described[name]
    found = {name: shape for name, shape in found.items() if ".weight." not in name}
    wrong = [name for name, shape in described.items() if found.get(name, shape) != shape]
    if wrong:
        raise UserError(
            f"{rule}; {wrong[0]} is {found[wrong[0]]} in {folder} and {described[wrong[0]]} by config.json, one of "
            f"{len(wrong)} such; {remedy}"
        )
    has, should = _layers(found), _layers(described)
    if has != should:
        raise UserError(f"{rule}; {folder} has weights of {len(has)} layers, its config.json {len(should)}; {remedy}")
    missing = [name for name in described.keys() - found if not (name == _HEAD and model.config.tie_word_embeddings)]
    modules = {name for name, _ in model.named_modules()}
    # Where there are unknown names, too, the checkpoint's are others than the model's: loading tells whether it can.
    if missing and all(name.rpartition(".")[0] in modules for name in found):
        raise UserError(f"{rule}; {folder} lacks {min(missing)}, one of {len(missing)} such; {remedy}")
    if quantized and not scaled:
        raise UserError(
            f"quantized weights need scales; config.json of {folder} has a quantization_config and no weight has one; "
            "take it out of a 16-bit model's config.json"
        )


def _layers(names: Iterable[str]) -> set[str]:
    return {match[1] for name in names if (match := _LAYER.search(name))}


def _check_tokenizer(folder: Path, vocabulary: int) -> None:
    with _in_transformers_words(folder, "the tokenizer"):
        tokenizer = load_tokenizer(folder)
        wordless = tokenizer is None or not tokenizer("1 + 1", add_special_tokens=False)["input_ids"]
        known = 0 if tokenizer is None or wordless else tokenizer.vocab_size
    if known == 0:
        raise UserError(
            f"a model needs its tokenizer; {folder} has none, or one without words; copy tokenizer.json and "
            "tokenizer_config.json from where the model is from"
        )
    if known > vocabulary:
        raise UserError(
            f"a tokenizer must not know more tokens than the model; that of {folder} knows {known} and config.json "
            f"names {vocabulary}; get both from one model"
        )
