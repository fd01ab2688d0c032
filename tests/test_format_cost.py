"""What a base format costs, by its benchmark."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.study import format_cost


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
    assert "| 16 bits | 1.500 | – |" in table
    assert "| NVFP4 | 2.100 | 0.600 ± 0.196 |" in table  # 1.96 * 0.1414 / sqrt(2)
