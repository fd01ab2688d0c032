"""Reading a base model's folder: 16/32-bit weights as they are, NVFP4 weights dequantized.

The NVFP4 format is `nvfp4-pack-quantized` of compressed-tensors: for a linear X, `X.weight_packed` uint8 [N, K/2],
`X.weight_scale` float8_e4m3fn [N, K/16] and `X.weight_global_scale` float32 [1], the divisor of the block scales.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from qerl_kernels.reference import dequantize_nvfp4
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qerl_pl.errors import UserError

NVFP4_FORMAT = "nvfp4-pack-quantized"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder.

    Raises:
        UserError: The folder or its config is missing or is no JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"a base model is a folder with a config.json; found none in {folder}: check the path")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"config.json must be JSON; {path} fails with '{error}': download the model again") from None
    if not isinstance(config, dict):
        raise UserError(f"config.json must be a JSON object; {path} is a {type(config).__name__}: check the file")
    return config


def is_nvfp4(folder: Path) -> bool:
    """Whether the folder holds an NVFP4 checkpoint.

    Raises:
        UserError: The checkpoint is quantized in another format.
    """
    quantization = read_config(folder).get("quantization_config")
    if quantization is None:
        return False
    if quantization.get("format") != NVFP4_FORMAT:
        found = quantization.get("format") or quantization.get("quant_method")
        raise UserError(
            f"a quantized base must have the format {NVFP4_FORMAT}; {folder} has {found}: "
            "quantize the 16-bit model with `qerl quantize`"
        )
    return True


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> name of the safetensors file that holds it.

    Raises:
        UserError: The folder has no safetensors weights.
    """
    index = folder / _INDEX
    if index.is_file():
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    single = folder / _SINGLE
    if not single.is_file():
        raise UserError(f"weights must be in safetensors files; found neither {_SINGLE} nor {_INDEX} in {folder}")
    with safe_open(single, framework="pt") as file:
        return {name: _SINGLE for name in file.keys()}


def iterate_dense(folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, str, Tensor]]:
    """Every tensor of a checkpoint, one at a time and file by file, in 16 or 32 bits.

    Args:
        folder: A model folder, NVFP4 or not.
        dtype: What floating-point tensors are converted to.

    Yields:
        (name in the dense checkpoint, file that held it, tensor on the CPU).
    """
    nvfp4 = is_nvfp4(folder)
    files = weight_map(folder)
    handles = {file: safe_open(folder / file, framework="pt") for file in sorted(set(files.values()))}

    def read(name: str) -> Tensor:
        if name not in files:
            raise UserError(f"an NVFP4 weight needs its scales; {folder} lacks {name}: quantize the model again")
        tensor: Tensor = handles[files[name]].get_tensor(name)
        return tensor

    for name, file in sorted(files.items(), key=lambda item: item[1]):
        stem, _, kind = name.rpartition(".")
        if nvfp4 and kind == "weight_packed":
            yield f"{stem}.weight", file, _dequantize(read, stem, dtype)
        elif not (nvfp4 and kind in ("weight_scale", "weight_global_scale")):
            tensor = read(name)
            yield name, file, tensor.to(dtype) if tensor.is_floating_point() else tensor


def _dequantize(read: Callable[[str], Tensor], stem: str, dtype: torch.dtype) -> Tensor:
    packed, scale = read(f"{stem}.weight_packed"), read(f"{stem}.weight_scale")
    return dequantize_nvfp4(packed, scale, read(f"{stem}.weight_global_scale"), dtype)


def load_dense_state(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """State dict of the base model with NVFP4 weights dequantized.

    Args:
        folder: A model folder, NVFP4 or not.
        dtype: What floating-point tensors are converted to.

    Raises:
        UserError: No such folder, no weights, or another quantized format.
    """
    return {name: tensor for name, _, tensor in iterate_dense(folder, dtype)}


def load_dense_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a folder with dense weights, in evaluation mode, on the CPU, without gradients.

    Raises:
        UserError: As `load_dense_state`, or the architecture is no causal language model of transformers.
    """
    quantized = is_nvfp4(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"the base must be a causal language model of transformers; {folder} is {config.model_type}")
    if quantized:
        del config.quantization_config
    model_class = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    model: PreTrainedModel = model_class.from_pretrained(
        None, config=config, state_dict=load_dense_state(folder, dtype), dtype=dtype, attn_implementation="sdpa"
    )
    return model.eval().requires_grad_(False)


def write_dense_checkpoint(src: Path, dst: Path, dtype: torch.dtype) -> Path:
    """Write a copy of a checkpoint with dense weights, for engines that cannot run NVFP4.

    One file of weights is in memory at a time. The folder appears under its name only when it is whole.

    Args:
        src: A model folder, NVFP4 or not.
        dst: Where the copy goes. A folder that is already there is taken as finished.
        dtype: Data type of the copy.

    Returns:
        `dst`.
    """
    if dst.is_dir():
        return dst
    dst.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{dst.name}-", dir=dst.parent))
    try:
        _write_dense(src, temporary, dtype)
        os.replace(temporary, dst)
    except OSError:
        if not dst.is_dir():  # else another process has finished the same copy first
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return dst


def _write_dense(src: Path, dst: Path, dtype: torch.dtype) -> None:
    names: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    size, current = 0, ""
    for name, file, tensor in iterate_dense(src, dtype):
        if file != current and shard:
            save_file(shard, dst / current, metadata={"format": "pt"})
            shard = {}
        current = file
        shard[name] = tensor.contiguous()
        names[name] = file
        size += tensor.numel() * tensor.element_size()
    save_file(shard, dst / current, metadata={"format": "pt"})
    if set(names.values()) != {_SINGLE}:
        index = {"metadata": {"total_size": size}, "weight_map": names}
        (dst / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    config = read_config(src)
    config.pop("quantization_config", None)
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    for path in src.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name not in ("config.json", _INDEX):
            shutil.copy2(path, dst / path.name)
    (dst / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


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
        found.append(json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id"))
    tokenizer = load_tokenizer(folder)
    if tokenizer is not None:
        found.append(tokenizer.eos_token_id)
    ids: set[int] = set()
    for value in found:
        ids.update([value] if isinstance(value, int) else value or [])
    return tuple(sorted(ids))
