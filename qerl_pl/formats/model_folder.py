"""A base model's folder: its config, its tensors one at a time, its tokenizer, and how such a folder is written."""

import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qerl_pl.errors import UserError

QUANTIZATION_REPORT = "quantization_report.json"

"""File of a quantized checkpoint that holds the error of each matrix."""

_INDEX = "model.safetensors.index.json"

_SINGLE = "model.safetensors"

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")

"""How the names of files end that hold weights, in any library's form, or say which file holds which."""

SHARD_BYTES = 4 * 2**30


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder.

    Raises:
        UserError: The folder or its config is missing or is no JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"a base model is a folder with a config.json; found none in {folder}: check the path")
    config = _json_object(path)
    if not isinstance(config.get("quantization_config", {}), dict | NoneType):
        raise UserError(f"a model's quantization_config must be an object; {path} has another: get the model again")
    return config


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON, or of UTF-8
        raise UserError(f"{path.name} must be JSON; {path} fails with '{error}': download the model again") from None
    if not isinstance(found, dict):
        raise UserError(f"{path.name} must be a JSON object; {path} is a {type(found).__name__}: check the file")
    return found


def load_config(folder: Path) -> PretrainedConfig:
    """The same as transformers has it, without what it says of quantization: how linears are held is decided here."""
    config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    vars(config).pop("quantization_config", None)
    return config


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> name of the safetensors file that holds it.

    Raises:
        UserError: The folder has no safetensors weights.
    """
    index = folder / _INDEX
    if index.is_file():
        places = _json_object(index).get("weight_map")
        if not isinstance(places, dict):
            raise UserError(f"{_INDEX} must say which file holds which tensor; {index} has no weight_map: get it again")
        return places
    single = folder / _SINGLE
    if not single.is_file():
        raise UserError(
            f"weights must be in safetensors files; found neither {_SINGLE} nor {_INDEX} in {folder}: convert them"
        )
    with _opened(single) as file:
        return {name: _SINGLE for name in file.keys()}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (FileNotFoundError, SafetensorError) as error:
        raise UserError(
            f"weights must be whole safetensors files; {path} cannot be read ({error}): download the model again"
        ) from error


class TensorFiles:
    """Tensors of a model folder by name, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place = weight_map(folder)

    def __iter__(self) -> Iterator[str]:
        """Names file by file, so that a reader goes through each file once."""
        return iter(sorted(self._place, key=lambda name: (self._place[name], name)))

    def __contains__(self, name: str) -> bool:
        return name in self._place

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor as it is stored, read without its content.

        Raises:
            UserError: A file is missing or damaged, or lacks what the index says it holds.
        """
        found: dict[str, tuple[int, ...]] = {}
        for file_name in sorted(set(self._place.values())):
            with _opened(self._folder / file_name) as file:
                held = file.keys()
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in held}
        if missing := sorted(self._place.keys() - found):
            raise UserError(
                f"weight files must hold what their index says; {self._folder} lacks {missing[0]}: download it again"
            )
        return {name: found[name] for name in self._place}

    def read(self, name: str) -> Tensor:
        """Tensor `name`, on the CPU, in the data type it was saved in.

        Raises:
            UserError: There is no such tensor, or its file is missing or damaged.
        """
        if name not in self._place:
            raise UserError(f"every quantized weight needs its scales; {self._folder} lacks {name}; quantize it again")
        # A file kept open would keep every page that was ever read in this process's memory.
        with _opened(self._folder / self._place[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating-point tensor as `dtype`, any other as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def other_files(folder: Path) -> list[Path]:
    """What a model folder holds besides weights and config.json: tokenizer, templates, generation config."""
    found = (path for path in folder.iterdir() if path.is_file() and not path.name.endswith(_WEIGHTS))
    return sorted(path for path in found if path.name not in ("config.json", QUANTIZATION_REPORT))


def copy_other_files(src: Path, dst: Path, config: dict[str, Any]) -> None:
    """Copy what a model folder holds besides weights, and write `config` as its config.json."""
    for path in other_files(src):
        shutil.copy2(path, dst / path.name)
    (dst / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class ShardWriter:
    """Collects tensors and writes them as numbered safetensors shards with an index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = 0
        self.shards: list[list[str]] = []
        self.total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; a shard is written whenever 4 GiB have come together."""
        self.pending[name] = tensor.cpu().contiguous()
        self.pending_bytes += tensor.nbytes
        if self.pending_bytes >= SHARD_BYTES:
            self._flush()

    def _flush(self) -> None:
        save_file(self.pending, self.folder / f"shard-{len(self.shards)}.safetensors", metadata={"format": "pt"})
        self.shards.append(list(self.pending))
        self.total_bytes += self.pending_bytes
        self.pending, self.pending_bytes = {}, 0

    def finish(self) -> None:
        """Write what is left and give the shards the names that transformers looks for."""
        if self.pending or not self.shards:
            self._flush()
        count = len(self.shards)
        if count == 1:
            (self.folder / "shard-0.safetensors").rename(self.folder / _SINGLE)
            return
        index: dict[str, str] = {}
        for number, names in enumerate(self.shards):
            final = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self.folder / f"shard-{number}.safetensors").rename(self.folder / final)
            index.update(dict.fromkeys(names, final))
        document = {"metadata": {"total_size": self.total_bytes}, "weight_map": index}
        (self.folder / _INDEX).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model folder; None when the folder has none."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """Every token id that ends a completion, by config, generation config and tokenizer, in ascending order."""
    found: list[Any] = [read_config(folder).get("eos_token_id")]
    generation = folder / "generation_config.json"
    if generation.is_file():
        found.append(_json_object(generation).get("eos_token_id"))
    tokenizer = load_tokenizer(folder)
    if tokenizer is not None:
        found.append(tokenizer.eos_token_id)
    ids = [one for value in found for one in (value if isinstance(value, list) else [value]) if one is not None]
    if not all(isinstance(one, int) for one in ids):
        raise UserError(f"eos_token_id is a number or a list of them; {folder} has {ids}: get the model again")
    return tuple(sorted(set(ids)))


_HEAD = "lm_head.weight"

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def validate_checkpoint(folder: Path) -> PreTrainedModel:
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
