"""Writes the tiny checkpoints beside this file with llm-compressor, which the tests themselves do not need.

    python tests/llm_compressor/make.py

A folder has random weights of one layer, rounded to nearest, by GPTQ or by AWQ. Those here are of llm-compressor
0.14.0.1 with compressed-tensors 0.20.0.
"""

import shutil
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

HERE = Path(__file__).parent
MODEL = Qwen2Config(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    initializer_range=0.3,
)


def write(name: str, recipe: list, calibrated: bool) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:  # it looks files of the model up where that was loaded
        Qwen2ForCausalLM(MODEL).to(torch.bfloat16).save_pretrained(folder)
        _write(Qwen2ForCausalLM.from_pretrained(folder), HERE / name, recipe, calibrated)


def _write(model: Qwen2ForCausalLM, folder: Path, recipe: list, calibrated: bool) -> None:
    rows = [{"input_ids": torch.randint(64, (12,)).tolist(), "attention_mask": [1] * 12} for _ in range(8)]
    unused = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    data = {"processor": unused, "dataset": Dataset.from_list(rows), "num_calibration_samples": 8, "max_seq_length": 12}
    oneshot(model=model, recipe=recipe, **(data if calibrated else {}))
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, save_compressed=True)
    for path in folder.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()


def main() -> None:
    torch.Tensor.pin_memory = lambda self: self  # AWQ pins, also on a machine without an accelerator
    for name, scheme in (("nvfp4", "NVFP4A16"), ("mxfp4", "MXFP4A16")):
        rounding = {"targets": "Linear", "scheme": scheme, "ignore": ["lm_head"]}
        write(f"{name}-rtn", [QuantizationModifier(**rounding)], name == "nvfp4")
        write(f"{name}-gptq", [GPTQModifier(**rounding)], True)
        write(f"{name}-awq", [AWQModifier(), QuantizationModifier(**rounding)], True)
    write("nvfp4-activations", [QuantizationModifier(targets="Linear", scheme="NVFP4", ignore=["lm_head"])], True)


if __name__ == "__main__":
    main()
