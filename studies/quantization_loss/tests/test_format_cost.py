"""What a base format costs, by its benchmark."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from studies.quantization_loss import format_cost
from studies.quantization_loss.reordered import Channels, reorder_checkpoint


def test_the_cost_of_a_format_is_what_transformers_says(tiny_policy_dir: Path, tmp_path: Path) -> None:
    rows = [{"question": f"{n} and 1?", "answer": f"{n} + 1.\n#### {n + 1}"} for n in (10, 20, 35)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [str(tiny_policy_dir), "--data", str(tmp_path), "--rows", "3", "--out", str(tmp_path / "out")]
    format_cost.main([*words, "--ways", "none", "nvfp4", "nf4"])
    told = json.loads((tmp_path / "out" / "format_cost.json").read_text())["results"]["nats"]
    model = AutoModelForCausalLM.from_pretrained(tiny_policy_dir, dtype=torch.float32).eval()
    for value, (ids, start) in zip(told["none"], format_cost.solutions(tiny_policy_dir, tmp_path, 3), strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        taken = logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[start - 1 :]
        assert value == pytest.approx(-taken.mean().item(), abs=1e-4)
    assert told["nvfp4"] != told["none"] != told["nf4"] and len(told["nvfp4"]) == 3
    table = format_cost.tables({"none": [1.0, 2.0], "nvfp4": [1.5, 2.7]})
    assert "| 16-bit | 1.500 | – |" in table
    assert "| NVFP4 | 2.100 | 0.600 ± 0.196 |" in table  # 1.96 * 0.1414 / sqrt(2)
    assert "| NVFP4 | 1.500 | 0.500 |" in format_cost.tables({"none": [1.0], "nvfp4": [1.5]})  # of one row no interval


def test_channels_worked_out() -> None:
    channels = Channels(torch.tensor([2, 0, 1]), torch.tensor([1, -1, 1]))
    assert channels.rows(torch.tensor([5.0, 6.0, 7.0])).tolist() == [7, -5, 6]
    assert channels.columns(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [[3, -1, 2]]


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config])  # Qwen2 has biases
def test_a_reordered_model_is_the_same_function_of_other_blocks(kind: type, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 50}
    config = kind(**sizes, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1) * 0.5)
    model.save_pretrained(tmp_path / "one")
    (tmp_path / "two").mkdir()
    reorder_checkpoint(tmp_path / "one", tmp_path / "two", seed=3)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "two", dtype=torch.float32).eval()
    tokens = torch.arange(3, 23)[None]
    with torch.no_grad():
        torch.testing.assert_close(other(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name in before:
        if "_proj.weight" in name or "embed" in name:
            assert not torch.equal(before[name], after[name]), name
        assert torch.equal(before[name].abs().flatten().sort().values, after[name].abs().flatten().sort().values)


def test_orders_are_measured_each_on_its_own(tiny_policy_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "1 and 1?", "answer": "1 + 1.\n#### 2"}) + "\n")
    words = [str(tiny_policy_dir), "--data", str(tmp_path), "--rows", "1", "--out", str(tmp_path / "out")]
    format_cost.main([*words, "--ways", "none", "nf4", "--orders", "3"])
    told = json.loads((tmp_path / "out" / "format_cost_orders.json").read_text())["results"]
    assert len({told["nats"]["nf4"][0], *(one["nf4"][0] for one in told["reordered"])}) == 3
    table = format_cost.order_tables([{"none": [1.0, 2.0], "nf4": [1.5, 2.7]}, {"nf4": [1.5, 2.5]}])
    assert "| NF4 | 0.600 | 0.500 | 0.550 ± 0.071 |" in table
