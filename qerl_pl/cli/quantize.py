"""`qerl quantize`: a 4-bit checkpoint by rounding to nearest, or calibrated on data."""

from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qerl_pl.datamodules.tables import TableConfig, read_table
from qerl_pl.errors import UserError, require_at_least
from qerl_pl.formats.calibration import Method, calibrate_checkpoint
from qerl_pl.formats.quantize import Device, quantize_checkpoint


def quantize(
    src: Path,
    dst: Path,
    format: str = "nvfp4",
    device: Device = "auto",
    loftq_rank: int | None = None,
    calibration: str | None = None,
    method: Method = "gptq",
    samples: int = 256,
    max_length: int = 1024,
) -> None:
    """Quantize a 16-bit checkpoint to 4 bits.

    Without --calibration, every `*_proj.weight` of the decoder layers is rounded to nearest, and a gated delta net's
    `in_proj_qkv` and `in_proj_z`; `quantization_report.json` in DST holds their relative squared errors: the sum of
    (quantized - weight)**2 over the sum of weight**2. With it, llm-compressor quantizes every linear but lm_head.

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
        method: How llm-compressor quantizes: GPTQ or AWQ.
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
    tokenizer = AutoTokenizer.from_pretrained(src)
    calibrate_checkpoint(
        src, dst, calibration_texts(calibration, tokenizer, samples), tokenizer, format, method, max_length
    )


def calibration_texts(path: str, tokenizer: PreTrainedTokenizerBase, samples: int) -> list[str]:
    """Texts of a table's first rows: the column `text`, or the rendered conversation with its answer.

    Raises:
        UserError: The table cannot be read, or has neither.
    """
    table = read_table(path, "train", key="--calibration")[:samples]
    if "text" in table[0]:
        return [str(row["text"]) for row in table]
    texts = []
    for row in TableConfig(cast(Any, table)).rows("calibration"):
        chat = [dict(turn) for turn in row.messages or [{"role": "user", "content": row.question}]]
        answer = str(row.columns.get("answer") or row.reference)
        chat += [{"role": "assistant", "content": answer}] if answer else []
        texts.append(cast(str, tokenizer.apply_chat_template(chat, tokenize=False)))
    return texts
