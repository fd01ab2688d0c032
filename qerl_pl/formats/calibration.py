"""4-bit checkpoints by GPTQ (arXiv 2210.17323) or AWQ (arXiv 2306.00978), which llm-compressor implements."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from qerl_pl.errors import UserError
from qerl_pl.formats.base import format_of
from qerl_pl.models.families import find_family, has_experts
from qerl_pl.models.folder import TensorFiles, copy_other_files, read_config
from qerl_pl.runtime.files import atomic_directory, require_absent

log = logging.getLogger(__name__)

Method = Literal["gptq", "awq"]
SCHEMES = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}
"""llm-compressor's names of the weights-only schemes."""


def calibrate_checkpoint(
    src: Path,
    dst: Path,
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    format: str = "nvfp4",
    method: Method = "gptq",
    max_length: int = 1024,
) -> None:
    """Quantize a 16-bit checkpoint so that its outputs on calibration texts change least.

    Args:
        src: Folder of a causal LM in Hugging Face format.
        dst: Folder to write; must not exist.
        texts: Calibration texts, chat template included.
        tokenizer: The model's.
        format: nvfp4 or mxfp4.
        method: GPTQ or AWQ.
        max_length: Tokens of a text; the rest is cut off.

    Raises:
        UserError: llm-compressor is not installed or cannot read the model, the format has no such scheme, the
            model is a mixture of experts, or `dst` exists.
    """
    if format not in SCHEMES:
        raise UserError(f"calibration is for {' and '.join(SCHEMES)}; got {format}; leave out --calibration")
    config = read_config(src)
    if (family := find_family(config.get("model_type"))) is not None and family.delta_net is not None:
        raise UserError(
            f"in_proj_qkv and in_proj_z must share one global scale, which llm-compressor gives each its own; {src} is "
            f"a {family.model_type}; leave out --calibration"
        )
    if has_experts(config):
        raise UserError(
            f"calibration quantizes linears, and transformers has a mixture's experts in none; {src} is a mixture of "
            "experts; leave out --calibration"
        )
    require_absent(dst)
    model = _calibrated(src, texts, tokenizer, format, method, max_length)
    with atomic_directory(dst) as folder:
        model.save_pretrained(folder, save_compressed=True)
        config = read_config(folder)
        copy_other_files(src, folder, config)
        format_of(folder).check(TensorFiles(folder))
    log.info("wrote %s checkpoint %s, calibrated by %s on %d texts", format.upper(), dst, method.upper(), len(texts))


def _calibrated(
    src: Path, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, format: str, method: Method, max_length: int
) -> PreTrainedModel:
    """The model that llm-compressor's `oneshot` has quantized in place; arguments as for `calibrate_checkpoint`."""
    try:
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
        from llmcompressor.modifiers.transform.awq import AWQModifier
    except ImportError as error:
        raise UserError(
            f"--calibration uses llm-compressor, which cannot be imported ({error}); `pip install llmcompressor`, "
            "in an environment of its own where its pins differ"
        ) from error
    from datasets import Dataset

    rounding = {"targets": "Linear", "scheme": SCHEMES[format], "ignore": ["lm_head"]}
    recipe = [GPTQModifier(**rounding)] if method == "gptq" else [AWQModifier(), QuantizationModifier(**rounding)]
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(src, dtype="auto")
    # Without padding tokens, or their outputs would be calibrated on, too.
    tokens = [tokenizer(text, add_special_tokens=False, truncation=True, max_length=max_length) for text in texts]
    oneshot(
        model=model,
        processor=tokenizer,
        recipe=recipe,
        dataset=Dataset.from_list([dict(text) for text in tokens]),
        max_seq_length=max_length,
        num_calibration_samples=len(texts),
        shuffle_calibration_samples=False,
        batch_size=1,
    )
    return model
