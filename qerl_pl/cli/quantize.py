"""`qerl quantize`: a 4-bit checkpoint by rounding to nearest, or by GPTQ of llm-compressor, calibrated on data."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from qerl_pl.chat.template import template_texts
from qerl_pl.datamodules.tables import TableConfig, read_table
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.formats.base import format_of
from qerl_pl.formats.base_format import DENSE
from qerl_pl.formats.dense_checkpoint import validate_checkpoint
from qerl_pl.formats.quantize import Device, quantize_checkpoint
from qerl_pl.models.families import check_family, find_family
from qerl_pl.models.folder import TensorFiles, copy_other_files, read_config
from qerl_pl.runtime.files import atomic_directory, require_absent

log = logging.getLogger(__name__)

SCHEMES = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}
"""llm-compressor's names of the weights-only schemes."""


def quantize(
    src: Path,
    dst: Path,
    format: str = "nvfp4",
    device: Device = "auto",
    loftq_rank: int | None = None,
    calibration: str | None = None,
    samples: int = 256,
    max_length: int = 1024,
) -> None:
    """Quantize a 16-bit checkpoint to 4 bits.

    Without --calibration, every `*_proj.weight` of the decoder layers is rounded to nearest, and a gated delta net's
    `in_proj_qkv` and `in_proj_z`; `quantization_report.json` in DST holds their relative squared errors: the sum of
    (quantized - weight)**2 over the sum of weight**2. With it, every linear but lm_head is quantized by
    llm-compressor's GPTQ.

    Args:
        src: Folder of a causal LM in Hugging Face format, 16 or 32 bits.
        dst: Folder to write; must not exist, and appears only when it is complete.
        format: `nvfp4` (blocks of 16 with an E4M3 scale) and `mxfp4` (blocks of 32 with a power of two), in the layout
            of compressed-tensors; `nf4` (blocks of 64, double quantization), in that of bitsandbytes; `none`, the
            text model of a model of text and images as it is; or the import path of a `BaseFormat`.
        device: Device of the arithmetic. `auto` is the GPU where there is one. llm-compressor chooses its own.
        loftq_rank: Rank of an adapter in DST/loftq, in PEFT's format, that takes up a part of each linear's error
            (LoftQ); training starts from it by model.policy.adapter. null writes none.
        calibration: Table of texts (a column text) or of conversations (prompt, messages or question, and answer): a
            JSONL, CSV or parquet file, or a hub name; null rounds to nearest.
        samples: Rows of the table that are used, from the first.
        max_length: Tokens of each; the rest is cut off.

    Raises:
        UserError: `dst` exists, `src` is no model folder, is inconsistent or already quantized, has no matrix to
            quantize or one that the format cannot store, there is no GPU for `device`,
            `loftq_rank` does not fit, or llm-compressor is not installed.
    """
    if calibration is None:
        quantize_checkpoint(src, dst, format, device, loftq_rank)
        return
    if loftq_rank is not None:
        raise UserError(
            "LoftQ's adapter takes up what rounding to nearest leaves; llm-compressor rounds otherwise; leave out "
            "--loftq_rank, or --calibration"
        )
    require_at_least(1, {"--samples": samples, "--max_length": max_length})
    check_family(read_config(src), src)
    if (stored := format_of(src)) is not DENSE:
        raise UserError(
            f"only 16-bit weights can be quantized; {src} is {stored.name.upper()} already; use it as it is"
        )
    validate_checkpoint(src)
    tokenizer = AutoTokenizer.from_pretrained(src)
    calibrate_checkpoint(src, dst, calibration_texts(calibration, tokenizer, samples), tokenizer, format, max_length)


def calibration_texts(path: str, tokenizer: PreTrainedTokenizerBase, samples: int) -> list[str]:
    """Texts of a table's first rows: the column `text`, or the rendered conversation with its answer.

    Raises:
        UserError: The table cannot be read, or has neither.
    """
    table = read_table(path, "train", key="--calibration")[:samples]
    if "text" in table[0]:
        if lacking := [number for number, row in enumerate(table, start=1) if row.get("text") is None]:
            raise UserError(f"each row of --calibration has a text; row {lacking[0]} of {path} has none; leave it out")
        return [str(row["text"]) for row in table]
    chats = []
    for row in TableConfig(cast(Any, table)).rows("calibration"):
        chat = [dict(turn) for turn in row.messages or [{"role": "user", "content": row.question}]]
        answer = str(row.columns.get("answer") or row.reference)
        chat += [{"role": "assistant", "content": answer}] if answer else []
        chats.append(chat)
    return template_texts(tokenizer, chats, None, generation_prompt=False)


def calibrate_checkpoint(
    src: Path,
    dst: Path,
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    format: str = "nvfp4",
    max_length: int = 1024,
) -> None:
    """Quantize a 16-bit checkpoint by GPTQ (arXiv 2210.17323), so that its outputs on texts change least.

    Args:
        src: Folder of a causal LM in Hugging Face format.
        dst: Folder to write; must not exist.
        texts: Calibration texts, chat template included.
        tokenizer: The model's.
        format: nvfp4 or mxfp4.
        max_length: Tokens of a text; the rest is cut off.

    Raises:
        UserError: llm-compressor is not installed or cannot read the model, the format has no such scheme, the
            model is a mixture of experts, or `dst` exists.
    """
    if format not in SCHEMES:
        raise UserError(f"calibration is for {' and '.join(SCHEMES)}; got {format}; leave out --calibration")
    config = read_config(src)
    family = find_family(config.get("model_type"))
    if family is not None and family.delta_net is not None:
        raise UserError(
            f"in_proj_qkv and in_proj_z must share one global scale, which llm-compressor gives each its own; {src} is "
            f"a {family.model_type}; leave out --calibration"
        )
    if family is not None and family.experts is not None:
        raise UserError(
            f"calibration quantizes linears, and transformers has a mixture's experts in none; {src} is a mixture of "
            "experts; leave out --calibration"
        )
    require_absent(dst)
    model = _calibrated(src, texts, tokenizer, format, max_length)
    with atomic_directory(dst) as folder:
        model.save_pretrained(folder, save_compressed=True)
        config = read_config(folder)
        copy_other_files(src, folder, config)
        format_of(folder).check(TensorFiles(folder))
    log.info("wrote %s checkpoint %s, calibrated on %d texts", format.upper(), dst, len(texts))


def _calibrated(
    src: Path, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, format: str, max_length: int
) -> PreTrainedModel:
    """The model that llm-compressor's `oneshot` has quantized in place; arguments as for `calibrate_checkpoint`."""
    try:
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import GPTQModifier
    except ImportError as error:
        raise UserError(
            f"--calibration uses llm-compressor, which cannot be imported ({error}); `pip install llmcompressor`, "
            "in an environment of its own where its pins differ"
        ) from error
    from datasets import Dataset

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(src, dtype="auto")
    # Without padding tokens, or their outputs would be calibrated on, too.
    tokens = [tokenizer(text, add_special_tokens=False, truncation=True, max_length=max_length) for text in texts]
    oneshot(
        model=model,
        processor=tokenizer,
        recipe=[GPTQModifier(targets="Linear", scheme=SCHEMES[format], ignore=["lm_head"])],
        dataset=Dataset.from_list([dict(text) for text in tokens]),
        max_seq_length=max_length,
        num_calibration_samples=len(texts),
        shuffle_calibration_samples=False,
        batch_size=1,
    )
    return model
