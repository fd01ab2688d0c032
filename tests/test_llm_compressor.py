"""Checkpoints that llm-compressor wrote load as they are; `qerl quantize --calibration` has it write them."""

import importlib.util
import json
import logging
import re
import sys
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from model_copies import copy_of
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

from qerl_pl.cli.main import main
from qerl_pl.cli.quantize import calibration_texts
from qerl_pl.errors import UserError
from qerl_pl.formats.base import format_of
from qerl_pl.models.folder import TensorFiles
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.policy.loading import load_base

WRITTEN = Path(__file__).parent / "llm_compressor"
FOLDERS = [f"{name}-{method}" for name in ("nvfp4", "mxfp4") for method in ("rtn", "gptq", "awq")]


def reference(folder: Path) -> torch.nn.Module:
    """The model as transformers and compressed-tensors read it."""
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=CompressedTensorsConfig(dequantize=True), dtype=torch.float32
    ).eval()


@pytest.mark.parametrize("name", FOLDERS)
def test_logprobs_are_those_of_compressed_tensors(name: str) -> None:
    folder = WRITTEN / name
    quantization, _, method = name.partition("-")
    assert format_of(folder).name == quantization
    config = PolicyConfig(str(folder), quantization=quantization, lora=LoraConfig(rank=1, alpha=1.0), dtype="float32")
    policy = Policy(folder, config, torch.device("cpu"), seed=0).eval()
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    with torch.no_grad():
        found = policy.token_values(tokens, torch.tensor([8, 8]), mask, 1.0)[0]
        logprobs = reference(folder)(tokens).logits[:, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
    tolerance = 1e-5 if quantization == "mxfp4" else 0.05  # NVFP4's scales are rounded to bfloat16 there
    torch.testing.assert_close(found[:, 1:], expected, rtol=tolerance, atol=tolerance)
    assert expected.std() > 0.5  # logits that tell weights apart


@pytest.mark.parametrize("name", FOLDERS)
def test_dense_weights_are_those_of_compressed_tensors(name: str) -> None:
    """What an engine without the format, and a merged export, get."""
    tensors = TensorFiles(WRITTEN / name)
    base_format = format_of(WRITTEN / name)
    base_format.check(tensors)
    state = reference(WRITTEN / name).state_dict()
    dense = dict(base_format.iterate_dense(tensors, torch.float32))
    assert {*state} - {"lm_head.weight"} == {*dense}
    rounding = 2**-7 if name.startswith("nvfp4") else 0.0  # see above
    assert all(torch.allclose(tensor, state[key], rtol=rounding, atol=0) for key, tensor in dense.items())
    if name.startswith("nvfp4"):
        linear = "model.layers.0.mlp.down_proj.weight"
        scales = tensors.read(f"{linear}_scale").double() / tensors.read(f"{linear}_global_scale").double()
        codes = unpack_fp4_from_uint8(tensors.read(f"{linear}_packed"), 64, 128, torch.float64)
        exact = codes * scales.repeat_interleave(16, 1)
        torch.testing.assert_close(dense[linear].double(), exact, rtol=1e-6, atol=0)


def test_four_bits_of_activations_stay_16_and_their_scales_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """The weights are what counts: those of compressed-tensors, in trainer and dense copy."""
    folder = WRITTEN / "nvfp4-activations"
    tensors, base_format = TensorFiles(folder), format_of(folder)
    assert any(name.endswith("input_global_scale") for name in tensors)
    with caplog.at_level(logging.INFO, "qerl_pl.formats.fp4"):
        base = load_base(folder, torch.float32, torch.device("cpu"))
    assert [record.getMessage() for record in caplog.records if "16 bits" in record.getMessage()] == [
        "activations stay in 16 bits: the scales that the base has for 4-bit ones are not used"
    ]
    dense = dict(base_format.iterate_dense(tensors, torch.float32))
    assert dense.keys() == set(base_format.dense_shapes(tensors)) and not any(name.endswith("scale") for name in dense)
    for linear in ("model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj"):
        scales = (
            tensors.read(f"{linear}.weight_scale").double() / tensors.read(f"{linear}.weight_global_scale").double()
        )
        packed = tensors.read(f"{linear}.weight_packed")
        exact = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1], torch.float64)
        exact = exact * scales.repeat_interleave(16, 1)
        torch.testing.assert_close(dense[f"{linear}.weight"].double(), exact, rtol=1e-6, atol=0)
        x = torch.eye(2 * packed.shape[1])
        torch.testing.assert_close(base.get_submodule(linear)(x).T, dense[f"{linear}.weight"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("inputs", [{"num_bits": 8}, {"num_bits": "4"}, "all", [4], {"type": "float"}])
def test_other_quantized_activations_are_refused(tmp_path: Path, inputs: object) -> None:
    config = json.loads((WRITTEN / "nvfp4-activations" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="16-bit activations; .* nvfp4-pack-quantized with quantized activations: quan"):
        format_of(tmp_path)


# qerl quantize --calibration ------------------------------------------------------------------------------------------


def test_calibration_texts(tmp_path: Path, tiny_policy_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy_dir)
    tables = {
        "text": [{"text": "One."}, {"text": "Two."}, {"text": "Three."}],
        "answers": [{"question": "What is 1 plus 2?", "answer": "1 + 2 = 3 #### 3"}],
        "messages": [{"messages": [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "a."}]}],
    }
    for name, rows in tables.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = {name: calibration_texts(str(tmp_path / f"{name}.jsonl"), tokenizer, 2) for name in tables}
    assert texts["text"] == ["One.", "Two."]
    for name, question, answer in (("answers", "What is 1 plus 2?", "1 + 2 = 3 #### 3"), ("messages", "A?", "a.")):
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        assert texts[name] == [tokenizer.apply_chat_template(chat, tokenize=False)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "nf4"], "calibration is for nvfp4 and mxfp4; got nf4"),
        (["--samples", "0"], "--samples must be at least 1; got 0"),
        (["--calibration", "nothing.jsonl"], "no such file: nothing.jsonl"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(
    tmp_path: Path,
    tiny_policy_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["qerl"])
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "One."}\n')
    assert main(["quantize", str(tiny_policy_dir), str(tmp_path / "out"), "--calibration", str(data), *words]) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nowhere", "a folder with a config.json"),
        ("another family", "must be of a known family"),
        ("four bits", "only 16-bit weights can be quantized; .* is NVFP4 already; use it as it is"),
        ("no template", "prompts need a chat template; the tokenizer of .* has none"),
        ("a row without a text", "each row of --calibration has a text; row 2 of .* has none; leave it out"),
    ],
)
def test_a_model_or_table_that_ends_in_nothing_is_refused_before_it_is_calibrated(
    tmp_path: Path,
    tiny_policy_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["qerl"])
    source, data = WRITTEN / FOLDERS[0] if kind == "four bits" else tmp_path / "model", tmp_path / "texts.jsonl"
    if kind not in ("nowhere", "four bits"):
        copy_of(tiny_policy_dir, source, **({"model_type": "gpt2"} if kind == "another family" else {}))
    if kind == "no template":
        (source / "chat_template.jinja").unlink()
    rows = [{"question": "1 + 2?", "answer": "3"}] if kind == "no template" else [{"text": "One."}, {"text": None}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["quantize", str(source), str(tmp_path / "out"), "--calibration", str(data)]) == 2
    assert re.search(message, capsys.readouterr().err) and not (tmp_path / "out").exists()


def test_calibration_by_llm_compressor(
    tmp_path: Path, tiny_policy_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["qerl"])
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": f"What is {n} plus {n}?"}) + "\n" for n in range(4)))
    words = ["quantize", str(tiny_policy_dir), str(tmp_path / "out"), "--calibration", str(data)]
    if importlib.util.find_spec("llmcompressor") is None:
        assert main(words) != 0
        assert "--calibration uses llm-compressor, which cannot be imported" in capsys.readouterr().err
        return
    assert main(words) == 0
    folder = tmp_path / "out"
    assert format_of(folder).name == "nvfp4"
    names = {path.name for path in tiny_policy_dir.iterdir()}
    assert names <= {path.name for path in folder.iterdir()}
    dense = dict(format_of(folder).iterate_dense(TensorFiles(folder), torch.float32))
    before = TensorFiles(tiny_policy_dir)
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = before.read(name).float()
    assert 0 < (dense[name] - weight).norm() / weight.norm() < 0.2
