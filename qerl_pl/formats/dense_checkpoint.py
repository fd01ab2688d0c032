"""A checkpoint in any base format as a dense one: validated against its config, loaded, and written."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

from qerl_pl.errors import UserError
from qerl_pl.formats.base import format_of
from qerl_pl.formats.base_format import DENSE
from qerl_pl.models.families import check_expert_names, find_family, text_config
from qerl_pl.models.folder import (
    ShardWriter,
    TensorFiles,
    copy_other_files,
    end_token_ids,
    load_config,
    load_tokenizer,
    read_config,
)
from qerl_pl.runtime.files import atomic_directory

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def validate_checkpoint(folder: Path) -> PreTrainedModel:
    """Load a checkpoint's shapes into its text model, of a known family, on the meta device; no weight is read.

    Raises:
        UserError: config.json is damaged, the weights do not fit it, quantized ones lack scales or differ in format
            where they run fused, experts are stored in stacks, the tokenizer is missing or larger than the vocabulary,
            or an end token is no token id.
    """
    base_format, tensors = format_of(folder), TensorFiles(folder)
    base_format.check(tensors)
    inner = text_config(read_config(folder), folder)
    with _transformers_errors(folder, "config.json"):
        config = load_config(folder) if inner is None else AutoConfig.for_model(**inner)
    shapes = base_format.dense_shapes(tensors)
    check_expert_names(config.to_dict(), shapes, folder)
    with _transformers_errors(folder, "config.json"):
        state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]).from_pretrained(
            None, config=config, state_dict=state, device_map={"": "meta"}, **options
        )
    _check_weights(folder, shapes, model, info)
    if base_format is not DENSE and shapes.keys() == set(tensors):
        raise UserError(
            f"quantized weights need scales; config.json of {folder} has a quantization_config and no weight has one; "
            "take it out of a 16-bit model's config.json"
        )
    _check_tokenizer(folder, config.get_text_config().vocab_size)
    end_token_ids(folder)
    return cast(PreTrainedModel, model)


@contextmanager
def _transformers_errors(folder: Path, source: str) -> Iterator[None]:
    """Turn an error of transformers about a file, which may be of any class, into a UserError."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"transformers must be able to use a model's files; {source} of {folder} fails with {reason:.90}; "
            "get it again from where the model is from"
        ) from error


def _check_weights(folder: Path, shapes: Iterable[str], model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    rule, remedy = "config.json must describe the weights beside it", "get both from one model"
    mismatched = {name: (tuple(stored), tuple(described)) for name, stored, described in info["mismatched_keys"]}
    for name in model.state_dict():
        if name in mismatched:
            stored, described = mismatched[name]
            raise UserError(
                f"{rule}; {name} is {stored} in {folder} and {described} by config.json, one of {len(mismatched)} "
                f"such; {remedy}"
            )
    stored_layers, layers = _layers(shapes), _layers(model.state_dict())
    if stored_layers != layers:
        raise UserError(
            f"{rule}; {folder} has weights of {len(stored_layers)} layers, its config.json {len(layers)}; {remedy}"
        )
    if missing := info["missing_keys"]:
        raise UserError(f"{rule}; {folder} lacks {min(missing)}, one of {len(missing)} such; {remedy}")
    if more := [name for name in info["unexpected_keys"] if not name.endswith(".inv_freq")]:
        raise UserError(f"{rule}; {folder} has {min(more)} besides, one of {len(more)} such; {remedy}")


def _layers(names: Iterable[str]) -> set[str]:
    return {match[1] for name in names if (match := _LAYER.search(name))}


def _check_tokenizer(folder: Path, vocabulary: int) -> None:
    with _transformers_errors(folder, "the tokenizer"):
        tokenizer = load_tokenizer(folder)
        usable = tokenizer is not None and tokenizer("1 + 1", add_special_tokens=False)["input_ids"]
        size = tokenizer.vocab_size if tokenizer is not None and usable else 0
    if size == 0:
        raise UserError(
            f"a model needs its tokenizer; {folder} has none, or one without words; copy tokenizer.json and "
            "tokenizer_config.json from where the model is from"
        )
    if size > vocabulary:
        raise UserError(
            f"a tokenizer must not know more tokens than the model; that of {folder} knows {size} and config.json "
            f"names {vocabulary}; get both from one model"
        )


def iterate_dense(folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a base model in any base format, dequantized, floating-point tensors as `dtype`.

    What its family keeps the precision of (`Family.keeps_precision`) is as stored.

    Raises:
        UserError: There is no such folder, it has no weights, or another quantized format.
    """
    tensors, family = TensorFiles(folder), find_family(read_config(folder).get("model_type"))
    for name, tensor in format_of(folder).iterate_dense(tensors, dtype):
        yield name, tensors.read(name) if family is not None and family.keeps_precision(name) else tensor


def load_dense_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a folder with dense weights, in evaluation mode, on the CPU, without gradients."""
    format_of(folder)  # first: it names what is wrong with a folder of no model
    config, state = load_config(folder), dict(iterate_dense(folder, dtype))
    family = find_family(config.model_type)
    # SDPA has neither soft caps nor sinks.
    eager = family is not None and (family.score_cap is not None or family.sinks is not None)
    attention = "eager" if eager else "sdpa"
    model: PreTrainedModel = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]).from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, attn_implementation=attention
    )
    for name, parameter in model.named_parameters():  # transformers has cast all
        if family is not None and family.keeps_precision(name):
            parameter.data = state[name].float()
    return model.eval().requires_grad_(False)


def write_dense_checkpoint(src: Path, dst: Path, dtype: torch.dtype) -> Path:
    """Write a dense copy of a checkpoint to a folder that is created atomically, and left as it is if it exists."""
    if not dst.is_dir():
        with atomic_directory(dst) as folder:
            fill_dense_folder(src, folder, dtype)
    return dst


def fill_dense_folder(
    src: Path, folder: Path, dtype: torch.dtype, change: Callable[[str, Tensor], Tensor] | None = None
) -> None:
    """Write a dense copy of a checkpoint in any base format into an existing folder, a few GiB in memory at a time.

    `change` maps (name, float32 tensor) to the tensor that is saved, such as a weight with its adapter merged.
    """
    config = read_config(src)
    family = find_family(config.get("model_type"))
    writer = ShardWriter(folder)
    for name, tensor in iterate_dense(src, torch.float32 if change else dtype):
        keeps = family is not None and family.keeps_precision(name)
        writer.add(name, change(name, tensor).to(dtype) if change and not keeps else tensor)
    writer.finish()
    config.pop("quantization_config", None)
    config.pop("torch_dtype", None)
    copy_other_files(src, folder, config | {"dtype": str(dtype).removeprefix("torch.")})
