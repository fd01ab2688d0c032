"""LoftQ's adapter: what it takes up, who loads it, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny_families import write_checkpoint
from transformers import AutoModelForCausalLM

from qerl_pl.cli.main import main
from qerl_pl.errors import UserError
from qerl_pl.formats.dense_checkpoint import iterate_dense
from qerl_pl.formats.loftq import low_rank
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig

RANK = 16
CPU = torch.device("cpu")


def quantized(source: Path, folder: Path, kind: str) -> Path:
    options = ["--format", kind, "--loftq_rank", str(RANK), "--device", "cpu"]
    assert main(["quantize", str(source), str(folder), *options]) == 0
    return folder


def test_the_largest_singular_values_are_shared_by_both_factors() -> None:
    residual = torch.diag(torch.tensor([1.0, 9.0, 0.0, 4.0]))[:3]
    state = torch.get_rng_state()
    a, b = low_rank(residual, 2)
    assert torch.equal(state, torch.get_rng_state())
    assert a.shape == (2, 4) and b.shape == (3, 2) and a.is_contiguous() and b.is_contiguous()
    torch.testing.assert_close(b @ a, torch.diag(torch.tensor([1.0, 9.0, 0.0, 0.0]))[:3], rtol=1e-5, atol=1e-5)
    for factor in (a, b.T):
        torch.testing.assert_close(factor.norm(dim=1), torch.tensor([3.0, 1.0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "nf4"])
def test_the_adapter_is_the_best_of_its_rank_and_the_base_is_the_same(
    tiny_policy_dir: Path, tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = quantized(tiny_policy_dir, Path(kind), kind)
    saved = json.loads((folder / "loftq" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(tmp_path / kind)  # found from any folder
    quantize_checkpoint(tiny_policy_dir, tmp_path / "plain", kind, device="cpu")
    plain, base = (load_file(path / "model.safetensors") for path in (tmp_path / "plain", folder))
    assert plain.keys() == base.keys() and all(map(torch.equal, plain.values(), base.values()))
    source, stored = dict(iterate_dense(tiny_policy_dir, torch.float32)), dict(iterate_dense(folder, torch.float32))
    adapter = load_file(folder / "loftq" / "adapter_model.safetensors")
    assert len(adapter) == 2 * 2 * 7  # A and B of seven linears in two layers
    for name in (name for name in source if name.endswith("_proj.weight")):
        residual = source[name] - stored[name]
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        left = residual - adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"]
        values = torch.linalg.svdvals(residual)
        best = values[RANK:].square().sum().sqrt()
        assert best * 0.999 < left.norm() < best * 1.02 and best < 0.93 * residual.norm()


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_a_policy_that_starts_from_it_is_nearer_to_16_bits(tiny_policy_dir: Path, tmp_path: Path, kind: Any) -> None:
    """So is PEFT's, which loads the adapter over transformers' model of the dequantized weights."""
    folder = quantized(tiny_policy_dir, tmp_path / kind, kind)
    tokens = torch.randint(5, 300, (4, 24), generator=torch.Generator().manual_seed(0))
    lengths, mask = torch.full((4,), 24), torch.ones(4, 24, dtype=torch.bool)
    mask[:, 0] = False

    def logprobs(path: Path, quantization: Any, adapter: Path | None) -> torch.Tensor:
        lora = LoraConfig() if adapter else LoraConfig(rank=1, alpha=1.0)
        start = str(adapter) if adapter else None
        config = PolicyConfig(path=str(path), quantization=quantization, lora=lora, adapter=start, dtype="float32")
        return Policy(path, config, CPU, seed=0).eval().token_values(tokens, lengths, mask, 1.0)[0].detach()

    exact, rounded = logprobs(tiny_policy_dir, "none", None), logprobs(folder, kind, None)
    started = logprobs(folder, kind, folder / "loftq")
    assert (started - exact).norm() < 0.9 * (rounded - exact).norm()
    model = AutoModelForCausalLM.from_pretrained(tiny_policy_dir, dtype=torch.float32)
    model.load_state_dict(dict(iterate_dense(folder, torch.float32)), strict=False)
    peft = PeftModel.from_pretrained(model, str(folder / "loftq"))
    theirs = peft(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(started[:, 1:], theirs.detach(), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused_and_leaves_no_folder(tiny_policy_dir: Path, tmp_path: Path) -> None:
    for rank, message in ((0, "--loftq_rank must be at least 1; got 0"), (129, "got --loftq_rank 129 for .* with 128")):
        with pytest.raises(UserError, match=message):
            quantize_checkpoint(tiny_policy_dir, tmp_path / "out", device="cpu", loftq_rank=rank)
    experts = write_checkpoint("gpt-oss", tmp_path / "experts")
    with pytest.raises(UserError, match="needs quantized linears beside experts"):
        quantize_checkpoint(experts, tmp_path / "out", "mxfp4", device="cpu", loftq_rank=4)
    assert [path.name for path in tmp_path.iterdir()] == ["experts"]


def test_llm_compressor_takes_no_adapter(
    tiny_policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "quantize",
        str(tiny_policy_dir),
        str(tmp_path / "out"),
        "--loftq_rank",
        "4",
        "--calibration",
        "rows.jsonl",
    ]
    assert main(words) == 2
    assert "leave out --loftq_rank, or --calibration" in capsys.readouterr().err
