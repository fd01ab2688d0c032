"""A base model's folder: its config, tensors and tokenizer, and a writer of such folders."""

import copy
import itertools
import json
import math
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from qerl_pl.errors import UserError
from qerl_pl.models.families import DOWN, GATE_UP, find_family

QUANTIZATION_REPORT = "quantization_report.json"
"""File of a quantized checkpoint with the error of each matrix."""
SHARD_BYTES = 4 * 2**30
BATCH_ELEMENTS = 2**26
"""Elements that are read at once: opening a file of all experts takes 0.1 s, for its header has 50 000 entries."""
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MODELOPT = "hf_quant_config.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
"""Suffixes of weight files of any library, and of their indices."""


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder; UserError if there is none, or it is no JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"a base model is a folder with a config.json; {folder} has none: check the path")
    config = _json_object(path)
    if not isinstance(config.get("quantization_config", {}), dict | NoneType):
        raise UserError(f"a model's quantization_config must be an object; {path} has another: get the model again")
    inner = config.get("text_config")
    nested = inner.pop("quantization_config", None) if isinstance(inner, dict) else None
    if not config.get("quantization_config"):  # vLLM looks in these places, too
        if isinstance(nested, dict) and nested:
            config["quantization_config"] = nested
        elif config.get("compression_config"):
            config["quantization_config"] = {"quant_method": "its settings in compression_config"}
        elif (folder / _MODELOPT).is_file():
            settings = _json_object(folder / _MODELOPT).get("quantization")
            config["quantization_config"] = {
                "quant_method": "modelopt",
                **(settings if isinstance(settings, dict) else {}),
            }
    return config


def _json_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON, or of UTF-8
        raise UserError(f"{path.name} must be JSON; {path} fails with '{error}': download the model again") from None
    if not isinstance(document, dict):
        raise UserError(f"{path.name} must be a JSON object; {path} is a {type(document).__name__}: check the file")
    return document


def longest_sequence(config: Mapping[str, Any]) -> int | None:
    """Longest sequence, in tokens, that a model of this config.json knows; None where it does not say."""
    known, rope = config.get("max_position_embeddings"), config.get("rope_parameters") or config.get("rope_scaling")
    if known is None or rope is None:
        return known
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor") or 1.0
    original = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    # Dynamic scaling is not counted: beyond the known positions it changes all frequencies of a batch. So does
    # longrope beyond the original ones, and in vLLM, which then takes the long factors, even of shorter sequences.
    if kind == "longrope":
        return int(original or known)
    if kind == "yarn" and original is not None:  # max_position_embeddings may count the factor, or not yet
        return max(known, int(original * factor))
    family = find_family(config.get("model_type"))
    counted = family is not None and family.positions_count_scaling
    return int(known * factor) if kind in ("linear", "yarn") and not counted else known


def load_config(folder: Path) -> PretrainedConfig:
    """`config.json` as a transformers config, without `quantization_config`: base formats load the linears."""
    config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    vars(config).pop("quantization_config", None)
    return config


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> name of its safetensors file; UserError if the folder has none."""
    index = folder / _INDEX
    if index.is_file():
        files = _json_object(index).get("weight_map")
        if not isinstance(files, dict):
            raise UserError(f"{_INDEX} must say which file holds which tensor; {index} has no weight_map: get it again")
        return files
    single = folder / _SINGLE
    if not single.is_file():
        raise UserError(
            f"weights must be in safetensors files; {folder} has neither {_SINGLE} nor {_INDEX}: convert them"
        )
    with _open(single) as file:
        return {name: _SINGLE for name in file.keys()}


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (FileNotFoundError, SafetensorError) as error:
        raise UserError(
            f"weights must be intact safetensors files; {path} cannot be read ({error}): download the model again"
        ) from error


_TEXT_MODELS = {"model.language_model.": "model.", "language_model.": ""}
"""Prefixes of the text model's tensors in a model of text and images, with those of a text model."""
_MTP = "mtp."
"""Prefix of the layers that Qwen's models have for speculative decoding; layers of no text model here."""


def _text_names(stored: Iterable[str]) -> dict[str, str]:
    """The text model's names of a folder's tensors, by the stored names; of others there is none."""
    names = [name for name in stored if not name.startswith(_MTP)]
    prefix = next((prefix for prefix in _TEXT_MODELS if any(name.startswith(prefix) for name in names)), None)
    if prefix is None:
        return {name: name for name in names}
    renamed = {name: _TEXT_MODELS[prefix] + name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    return renamed | {name: name for name in names if name.startswith("lm_head.")}


_DIVISOR = ".weight_scale_2"
"""End of the name of ModelOpt's global scale, a factor, where compressed-tensors has a divisor."""
_MODELOPT_ENDS = {".weight": ".weight_packed", _DIVISOR: ".weight_global_scale", ".input_scale": ".input_global_scale"}
"""Ends of the names of an NVFP4 linear's tensors in ModelOpt's checkpoints, with those of compressed-tensors."""


def _packed_names(names: Mapping[str, str]) -> dict[str, str]:
    """Names as `_text_names` has them, those of ModelOpt's NVFP4 linears as compressed-tensors has them."""
    linears = {name.removesuffix(_DIVISOR) for name in names.values() if name.endswith(_DIVISOR)}
    renamed = {f"{linear}{old}": f"{linear}{new}" for linear in linears for old, new in _MODELOPT_ENDS.items()}
    return {stored: renamed.get(name, name) for stored, name in names.items()}


_FP8_METHODS = ("compressed-tensors", "modelopt")
"""`quant_method` of checkpoints in which `X.weight_scale` beside `X.weight` is a factor of 8-bit codes."""
_FP8_BLOCK = 128
"""Rows, and columns, of a weight in FP8 that share a scale, where blocks have one."""


def _dequantize_fp8(name: str, weight: Tensor, scale: Tensor, rows: int) -> Tensor:
    """A weight in float32, of E4M3 codes [n, K], the first of so many rows, and a scale of matrix, rows or blocks."""
    blocks, factors = (-(-rows // _FP8_BLOCK), -(-weight.shape[1] // _FP8_BLOCK)), None
    if scale.numel() == 1:
        factors = scale.reshape(1, 1)
    elif tuple(scale.shape) in ((rows,), (rows, 1)):
        factors = scale.reshape(rows, 1)[: len(weight)]
    elif scale.numel() == math.prod(blocks):
        by_row = scale.reshape(blocks).repeat_interleave(_FP8_BLOCK, 0)[: len(weight)]
        factors = by_row.repeat_interleave(_FP8_BLOCK, 1)[:, : weight.shape[1]]
    scales = scale.is_floating_point() and bool((scale.float() >= 0).all() and scale.float().isfinite().all())
    if factors is None or weight.dtype != torch.float8_e4m3fn or not scales:
        raise UserError(
            f"8-bit weights must be E4M3 floats with a scale for a matrix, a row or a block of {_FP8_BLOCK} x "
            f"{_FP8_BLOCK}, a number from 0; {name} is {weight.dtype} with {scale.dtype} {tuple(scale.shape)} from "
            f"{scale.float().min():g}: quantize the 16-bit model"
        )
    return weight.float() * factors.float()


class TensorFiles:
    """Tensors of a model folder by name, read one at a time; of a model of text and images those of the text model.

    NVFP4 linears of ModelOpt have the names and the global scale that compressed-tensors gives them; experts that a
    family publishes in stacks have the names of experts that are stored one by one. Weights in FP8, of both, are read
    in float32, and their scales are no tensors. Reading raises UserError where there is no such tensor, or its file is
    missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: int | None = None
        files, config = weight_map(folder), read_config(folder)
        self._stored = {name: stored for stored, name in _packed_names(_text_names(files)).items()}
        may_have_fp8 = (config.get("quantization_config") or {}).get("quant_method") in _FP8_METHODS
        names = list(self._stored) if may_have_fp8 else []
        fp8 = [name for name in names if f"{name}_scale" in self._stored and f"{name}_packed" not in self._stored]
        self._scales = {name: self._stored.pop(f"{name}_scale") for name in fp8}
        self._scale_files = {name: files[scale] for name, scale in self._scales.items()}
        self._files = {name: files[stored] for name, stored in self._stored.items()}
        self.skipped = sorted(files.keys() - {*self._stored.values(), *self._scales.values()})
        """Stored names of tensors that are no part of the text model."""
        self._parts: dict[str, tuple[int, int, int]] = {}
        """Slices of a stack that are tensors of their own: expert, first row, and the row after the last."""
        family = find_family((config.get("text_config") or config).get("model_type"))
        if family is not None and family.experts is not None and family.experts.published_in_stacks:
            self._unstack()

    def _unstack(self) -> None:
        """Give each expert of a stack names of its own: gates are above ups."""
        for stack in [name for name in self._stored if name.endswith((f".experts.{GATE_UP}", f".experts.{DOWN}"))]:
            stored, file_name = self._stored[stack], self._files[stack]
            with _open(self._folder / file_name) as file:
                shape = file.get_slice(stored).get_shape()
            if len(shape) != 3:
                continue
            del self._stored[stack], self._files[stack]
            stem, _, matrix = stack.rpartition(".")
            members = (DOWN,) if matrix == DOWN else ("gate_proj", "up_proj")
            size = shape[1] // len(members)
            for expert, (index, member) in itertools.product(range(shape[0]), enumerate(members)):
                name = f"{stem}.{expert}.{member}.weight"
                self._stored[name], self._files[name] = stored, file_name
                self._parts[name] = expert, index * size, (index + 1) * size

    @property
    def fp8(self) -> Collection[str]:
        """Names of the weights that are stored in FP8."""
        return self._scales.keys()

    def __iter__(self) -> Iterator[str]:
        """Names in the order of the files, so that a reader goes through each file once."""
        return iter(sorted(self._files, key=lambda name: (self._files[name], name)))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def headers(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Stored shape and data type (as safetensors names it) of every tensor, from the headers of the files."""
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        for file_name in sorted(set(self._files.values())):
            with _open(self._folder / file_name) as file:
                parts = {name: file.get_slice(name) for name in file.keys()}
                found |= {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
        if missing := sorted(name for name, stored in self._stored.items() if stored not in found):
            raise UserError(
                f"weight files must hold what their index says; {self._folder} lacks {missing[0]}: download it again"
            )
        return {name: found[stored] for name, stored in self._stored.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, of an expert's in a stack that of its part."""
        shapes = {name: shape for name, (shape, _) in self.headers().items()}
        for name, (_, start, stop) in self._parts.items():
            shapes[name] = (stop - start, *shapes[name][2:])
        return shapes

    def require(self, names: Iterable[str]) -> None:
        """Raise UserError if there is no tensor of one of these names."""
        if missing := [name for name in names if name not in self._files]:
            raise UserError(
                f"every quantized weight needs its scales; {self._folder} lacks {missing[0]}; quantize it again"
            )

    def read(self, name: str) -> Tensor:
        """Tensor `name`, on the CPU, in its stored data type."""
        self.require((name,))
        # An open file would keep every page that was read in the process's memory.
        with _open(self._folder / self._files[name]) as file:
            return self._read(file, name)

    def read_all(self, names: Collection[str]) -> dict[str, Tensor]:
        """Several tensors, as by `read`; each file is opened once."""
        self.require(names)
        found: dict[str, Tensor] = {}
        for file_name in sorted({self._files[name] for name in names}):
            with _open(self._folder / file_name) as file:
                here = (name for name in names if self._files[name] == file_name)
                found |= {name: self._read(file, name) for name in here}
        return found

    def _read(self, file: Any, name: str) -> Tensor:
        stored = self._stored[name]
        tensor = self._read_stored(file, name, stored)
        if name not in self._scales:
            return tensor
        with _open(self._folder / self._scale_files[name]) as other:
            scale = other.get_tensor(self._scales[name])
        return _dequantize_fp8(name, tensor, scale, file.get_slice(stored).get_shape()[0])

    def _read_stored(self, file: Any, name: str, stored: str) -> Tensor:
        if name in self._parts:
            expert, start, stop = self._parts[name]
            stop = stop if self._rows is None else min(stop, start + self._rows)
            with torch.device("cpu"):  # slices are made on the default device
                return file.get_slice(stored)[expert : expert + 1, start:stop][0]
        dims = 0 if self._rows is None else len(file.get_slice(stored).get_shape())
        if dims < 2:
            tensor: Tensor = file.get_tensor(stored)
            return tensor.float().reciprocal().reshape(1) if stored.endswith(_DIVISOR) else tensor
        part = file.get_slice(stored)
        with torch.device("cpu"):  # slices are made on the default device
            return part[: self._rows] if dims == 2 else part[:, : self._rows]

    def first_rows(self, rows: int) -> "TensorFiles":
        """A view of these files that reads only the first rows of matrices [N, ...] and stacks [E, N, ...]."""
        some = copy.copy(self)
        some._rows = rows
        return some

    def read_groups(self, groups: Iterable[Sequence[str]]) -> Iterator[list[Tensor]]:
        """The tensors of each group of names, in order; many small groups are read at once, large ones one by one."""
        shapes, batch, size = self.shapes(), list[Sequence[str]](), 0
        for group in groups:
            batch.append(group)
            size += sum(math.prod(shapes.get(name, ())) for name in group)
            if size >= BATCH_ELEMENTS:
                yield from self._read_batch(batch)
                batch, size = [], 0
        yield from self._read_batch(batch)

    def _read_batch(self, groups: Sequence[Sequence[str]]) -> Iterator[list[Tensor]]:
        held = self.read_all([name for group in groups for name in group])
        for group in groups:
            yield [held.pop(name) for name in group]


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating-point tensor as `dtype`, any other as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def other_files(folder: Path) -> list[Path]:
    """Files of a model folder besides weights and config.json: tokenizer, templates, generation config."""
    files = [*folder.iterdir(), *folder.glob("additional_chat_templates/*.jinja")]  # with tools, say
    files = [path for path in files if path.is_file() and not path.name.endswith(_WEIGHTS)]
    return sorted(path for path in files if path.name not in ("config.json", _MODELOPT, QUANTIZATION_REPORT))


def copy_other_files(src: Path, dst: Path, config: dict[str, Any]) -> None:
    """Copy `other_files` of a model folder, and write `config` as config.json."""
    for path in other_files(src):
        (dst / path.relative_to(src)).parent.mkdir(exist_ok=True)
        shutil.copy2(path, dst / path.relative_to(src))
    (dst / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class ShardWriter:
    """Writes tensors as numbered safetensors shards with an index, at most one shard in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = 0
        self.shards: list[list[str]] = []
        self.total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; a shard is written whenever `SHARD_BYTES` are pending."""
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
        """Write the last shard and give the shards the names that transformers loads."""
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
    values: list[Any] = [read_config(folder).get("eos_token_id")]
    if (generation := folder / "generation_config.json").is_file():
        values.append(_json_object(generation).get("eos_token_id"))
    if (tokenizer := load_tokenizer(folder)) is not None:
        values.append(tokenizer.eos_token_id)
    ids = [item for value in values for item in (value if isinstance(value, list) else [value]) if item is not None]
    if not all(isinstance(item, int) for item in ids):
        raise UserError(f"eos_token_id is a number or a list of them; {folder} has {ids}: get the model again")
    return tuple(sorted(set(ids)))
