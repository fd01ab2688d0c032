"""`qerl quantize SRC DST`: a 16-bit checkpoint in, an NVFP4 checkpoint out, one tensor in memory at a time.

The output is the format `nvfp4-pack-quantized` of compressed-tensors, which transformers and vLLM load. Embeddings,
norms, biases and lm_head keep their 16 bits.
"""

import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from qerl_kernels import nvfp4_global_scale, quantize_nvfp4
from tqdm import tqdm

from qerl_pl.checkpoints import NVFP4_FORMAT, ShardWriter, TensorFiles, copy_other_files, is_nvfp4, read_config
from qerl_pl.errors import UserError
from qerl_pl.files import building

log = logging.getLogger(__name__)

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that engines run as one matrix; they share one global scale."""
Scales = Literal["minmax", "search"]

QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": NVFP4_FORMAT,
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "symmetric": True,
                "strategy": "tensor_group",
                "group_size": 16,
                "dynamic": False,
                "scale_dtype": "torch.float8_e4m3fn",
                "observer": "memoryless_minmax",
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
}


def quantize_checkpoint(src: Path, dst: Path, scales: Scales = "minmax", device: str = "cpu") -> None:
    """Write the NVFP4 form of a 16-bit checkpoint.

    Every two-dimensional `*_proj.weight` of the decoder layers is quantized without data, bit for bit as
    llm-compressor's NVFP4A16 scheme does with `scales="minmax"`.

    Args:
        src: Folder of a causal LM in Hugging Face format, 16 or 32 bits.
        dst: Folder to write; must not exist. It appears under this name only when it is whole.
        scales: How block scales are chosen: `minmax` from each block's largest weight, `search` by the least squared
            error among the neighbouring E4M3 values (same format, lower error).
        device: Where the arithmetic runs, "cpu" or "cuda".

    Raises:
        UserError: `dst` exists, `src` is no model folder or already quantized, or a weight's input dimension is no
            multiple of 16.
    """
    config = read_config(src)
    if is_nvfp4(src):
        raise UserError(f"only 16-bit weights can be quantized; {src} is NVFP4 already; use it as it is")
    if dst.exists():
        raise UserError(f"the destination must not exist; {dst} does; choose another name or remove it")
    with TensorFiles(src) as tensors, building(dst) as folder:
        writer = ShardWriter(folder)
        quantized = {name for name in tensors if re.search(r"\.layers\.\d+\..*_proj\.weight$", name)}
        for group in tqdm(list(_groups(tensors, quantized)), desc="quantizing", unit="matrix", mininterval=1.0):
            _quantize_group(tensors, group, scales, torch.device(device), writer)
        for name in tensors:
            if name not in quantized:
                writer.add(name, tensors.read(name))
        writer.finish()
        copy_other_files(src, folder, config | {"quantization_config": QUANTIZATION_CONFIG})
    log.info("wrote NVFP4 checkpoint %s", dst)


def fused_group(name: str) -> tuple[str, ...]:
    """The weights that share one global scale with weight `name` ("….q_proj.weight" -> q, k and v), itself included."""
    module, _, projection = name.removesuffix(".weight").rpartition(".")
    for group in FUSED:
        if projection in group:
            return tuple(f"{module}.{member}.weight" for member in group)
    return (name,)


def _groups(tensors: Iterable[str], quantized: set[str]) -> Iterator[tuple[str, ...]]:
    seen: set[str] = set()
    for name in tensors:
        if name in quantized and name not in seen:
            group = tuple(member for member in fused_group(name) if member in quantized)
            seen.update(group)
            yield group


def _quantize_group(
    tensors: TensorFiles, group: tuple[str, ...], scales: Scales, device: torch.device, writer: ShardWriter
) -> None:
    weights = {name: tensors.read(name).to(device) for name in group}
    for name, weight in weights.items():
        if weight.shape[1] % 16:
            raise UserError(
                f"NVFP4 needs an input dimension divisible by 16; found {name} with {weight.shape[1]}; "
                "set model.policy.quantization to none"
            )
    global_scale = nvfp4_global_scale(*weights.values())
    for name, weight in weights.items():
        packed = quantize_nvfp4(weight, global_scale, block_scales=scales)
        writer.add(f"{name}_packed", packed.packed)
        writer.add(f"{name}_scale", packed.scale)
        writer.add(f"{name}_global_scale", packed.global_scale.clone())
