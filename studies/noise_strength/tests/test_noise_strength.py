"""What a sigma does to a policy, by its benchmark: by hand, and against plain forward passes."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_pl.algorithm.noise import NormNoise
from studies.noise_strength import __main__ as noise_strength
from studies.noise_strength.__main__ import Sampled, distributions, effect, noisy, sample, scales


@pytest.fixture
def model(tiny_policy_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_policy_dir, dtype=torch.float32).eval()


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    rows = [{"question": f"{'1' * (n + 1)} and {n}?", "answer": "#### 1"} for n in range(10)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_an_effect_worked_out() -> None:
    clean, perturbed = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    measured = effect(clean, perturbed, torch.tensor([0, 1]))
    assert measured.mismatch == pytest.approx(math.log(2) / 2)
    assert measured.kl == pytest.approx((0.25 * math.log(0.5) + 0.75 * math.log(1.5)) / 2)
    assert measured.entropy == pytest.approx((-0.25 * math.log(0.25) - 0.75 * math.log(0.75) - math.log(2)) / 2)


def test_noise_is_within_the_block_alone(model: Any) -> None:
    before = {name: scale.clone() for name, scale in scales(model).items()}
    noise = NormNoise(0.1, seed=0, version=0, relative=True)
    with noisy(model, noise):
        for name, scale in scales(model).items():
            added = scale - before[name]
            clean = before[name].square().mean().sqrt().item()
            assert added.square().mean().sqrt().item() == pytest.approx(0.1 * clean, rel=1e-4)
    assert before and all(torch.equal(scale, before[name]) for name, scale in scales(model).items())


def test_the_distributions_are_those_of_each_row_alone(
    model: Any, questions: Path, tiny_policy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise_strength, "AT_ONCE", 4)  # several batches, the last not full
    sampled = sample(model, AutoTokenizer.from_pretrained(tiny_policy_dir), questions, 10, 12)
    logprobs = distributions(model, sampled)
    assert len(logprobs) == sampled.mask.sum() and len(set(sampled.attended.sum(1).tolist())) > 1
    width, first = sampled.ids.shape[1] - sampled.mask.shape[1], 0
    for ids, attended, mask in zip(*sampled, strict=True):
        count, kept = int(mask.sum()), ids[attended.bool()]
        start = int(attended[:width].sum())
        with torch.no_grad():
            alone = model(kept[None]).logits[0, start - 1 : start - 1 + count].log_softmax(-1)
        torch.testing.assert_close(logprobs[first : first + count], alone, rtol=1e-4, atol=1e-4)
        first += count


def test_a_completion_ends_with_its_first_end(questions: Path, tiny_policy_dir: Path) -> None:
    completions = torch.tensor([[5, 6, 7, 8], [5, 2, 6, 2], [3, 2, 2, 9]])
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_policy_dir)

    def generate(ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.cat([ids, completions], 1)

    stub: Any = SimpleNamespace(generate=generate, generation_config=SimpleNamespace(eos_token_id=[2, 3]))
    sampled: Sampled = sample(stub, tokenizer, questions, 3, 4)
    assert sampled.mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]


def test_more_noise_has_more_effect_in_the_table(
    questions: Path, tiny_policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise_strength, "ABSOLUTE", (0.01, 0.1))
    monkeypatch.setattr(noise_strength, "RELATIVE", (0.1,))
    words = [str(tiny_policy_dir), "--data", str(questions), "--rows", "3", "--max-tokens", "6", "--draws", "2"]
    noise_strength.main([*words, "--out", str(tmp_path / "out")])
    (policy,) = json.loads((tmp_path / "out" / "noise_strength.json").read_text())["results"]["policies"]
    small, large = ([draw["mismatch"] for draw in row["draws"]] for row in policy["absolute"])
    assert len(small) == 2 and small[0] != small[1] and 0 < max(small) < min(large)
    lines = (tmp_path / "out" / "noise_strength.md").read_text().splitlines()
    mean = sum(small) / 2
    assert f"{mean:.4f} ± {abs(small[0] - small[1]) / math.sqrt(2):.4f}" in lines[2] and "| 10 % |" in lines[4]
