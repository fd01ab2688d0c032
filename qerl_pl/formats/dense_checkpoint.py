"""A base model of any format with dense weights: what runs without 4-bit kernels, and what is exported."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from qerl_pl.errors import UserError
from qerl_pl.formats.base import format_of
from qerl_pl.formats.model_folder import ShardWriter, TensorFiles, copy_other_files, load_config, read_config
from qerl_pl.persistence.atomic_files import atomic_directory


def load_dense_state(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """State dict of the base model, all of its weights dense.

    Args:
        folder: A model folder, in any base format.
        dtype: What floating-point tensors are converted to.

    Raises:
        UserError: No such folder, no weights, or another quantized format.
    """
    return dict(format_of(folder).iterate_dense(TensorFiles(folder), dtype))


def load_dense_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a folder with dense weights, in evaluation mode, on the CPU, without gradients.

    Raises:
        UserError: As `load_dense_state`, or the architecture is no causal language model of transformers.
    """
    base_format = format_of(folder)  # first: it says what is wrong with a folder that is no model's
    config = load_config(folder)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"the base must be a causal language model of transformers; {folder} is {config.model_type}")
    model_class = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    state = dict(base_format.iterate_dense(TensorFiles(folder), dtype))
    model: PreTrainedModel = model_class.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, attn_implementation="sdpa"
    )
    return model.eval().requires_grad_(False)


def write_dense_checkpoint(
    src: Path, dst: Path, dtype: torch.dtype, change: Callable[[str, Tensor], Tensor] | None = None
) -> Path:
    """Write a copy of a checkpoint with dense weights, a few GiB in memory at a time.

    Args:
        src: A model folder, in any base format.
        dst: Where the copy goes; appears only when it is whole. A folder that is already there is taken as finished.
        dtype: Data type of the copy.
        change: Maps (name, float32 tensor) to what is saved under that name, such as a weight with its adapter merged.

    Returns:
        `dst`.
    """
    if dst.is_dir():
        return dst
    with atomic_directory(dst) as folder:
        fill_dense_folder(src, folder, dtype, change)
    return dst


def fill_dense_folder(
    src: Path, folder: Path, dtype: torch.dtype, change: Callable[[str, Tensor], Tensor] | None = None
) -> None:
    """Write the same into a folder that is there."""
    tensors = format_of(src).iterate_dense(TensorFiles(src), torch.float32 if change else dtype)
    writer = ShardWriter(folder)
    for name, tensor in tensors:
        writer.add(name, change(name, tensor).to(dtype) if change else tensor)
    writer.finish()
    config = read_config(src)
    config.pop("quantization_config", None)
    config.pop("torch_dtype", None)
    copy_other_files(src, folder, config | {"dtype": str(dtype).removeprefix("torch.")})
