"""NF4: numbers worked out, bitsandbytes' own on the same weights, and checkpoints that it and transformers read."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from qerl_kernels import NF4Tensor, NF4Weight, dequantize_nf4, quantize_absmax, quantize_nf4
from qerl_kernels.nf4 import dynamic_map, nf4_magnitudes, nf4_values
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from qerl_pl.engines.vllm.linear_methods import shared_rows, why_not_shared
from qerl_pl.errors import UserError
from qerl_pl.formats.base import format_of
from qerl_pl.formats.dense_checkpoint import load_dense_state
from qerl_pl.formats.model_folder import TensorFiles
from qerl_pl.formats.quantize import quantize_checkpoint

CPU = torch.device("cpu")
UP = "model.layers.0.mlp.up_proj"


def test_a_block_worked_out() -> None:
    """2 is the largest; 0.5 / 2 is nearest to 0.2461 (code 10), -0.9 / 2 to -0.3949 (3), 0.08 / 2 to 0.0796 (8)."""
    weight = torch.zeros(1, 64)
    weight[0, :6] = torch.tensor([2.0, 0.5, -0.9, 0.08, -2.0, 0.07])
    packed, absmax = quantize_nf4(weight)
    assert absmax.tolist() == [[2.0]]
    assert packed[0, :4].tolist() == [0xFA, 0x38, 0x07, 0x77]  # 0.07 / 2 is below the middle, 0.0398: zero
    dense = dequantize_nf4(packed, absmax, torch.float32)
    assert dense[0, :6].tolist() == pytest.approx([2.0, 0.49222, -0.78983, 0.15916, -2.0, 0.0], abs=1e-5)


def test_double_quantization_worked_out() -> None:
    """1, 2 and 6 less their mean are -2, -1 and 3; over 3, -0.6667 is nearest to -0.6695, -0.3333 to -0.3320."""
    absmax, nested, offset = quantize_absmax(torch.tensor([1.0, 2.0, 6.0]))
    assert (nested.tolist(), offset) == ([3.0], 3.0)
    found = dynamic_map(CPU)[absmax.int()]
    assert found.tolist() == pytest.approx([-0.6695, -0.3320, 1.0], abs=1e-4)
    held = nf4_magnitudes(NF4Tensor(torch.empty(0), absmax, nested, offset))
    assert held.tolist() == pytest.approx([0.9914, 2.0039, 6.0], abs=1e-4)
    assert quantize_absmax(torch.full((5,), 0.5))[0].tolist() == [0] * 5  # nothing left to round


def test_the_codes_are_those_of_float32_whatever_the_default_type_was_when_they_were_first_asked_for() -> None:
    weight = torch.linspace(-1, 1, 64 * 64).view(64, 64)
    packed, absmax = quantize_nf4(weight)
    nf4_values.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        nf4_values(CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    assert nf4_values(CPU)[1].item() == -0.6961928009986877
    assert torch.equal(quantize_nf4(weight)[0], packed)


def test_the_dynamic_map_has_seven_decades_and_as_many_parts_as_they_have_bits() -> None:
    values = dynamic_map(CPU)
    assert len(values) == 256 and values.tolist() == sorted(values.tolist())
    positive = values[values > 0]
    counts = [int(((positive > 10.0 ** (i - 7)) & (positive < 10.0 ** (i - 6))).sum()) for i in range(7)]
    assert counts == [1, 2, 4, 8, 16, 32, 64] and values[-1] == 1.0 and values[127] == 0.0
    assert positive[0].item() == pytest.approx(0.55e-6) and values[0].item() == pytest.approx(-1 + 0.9 / 128, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(37, 192), (64, 19200), (1, 64)])
def test_bits_are_those_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])) * 0.02).to(dtype)
    if shape[0] == 37:
        weight[3], weight[4, :70] = 0, weight[4, 0]
    theirs, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    packed, magnitudes = quantize_nf4(weight)
    absmax, nested, offset = quantize_absmax(magnitudes.flatten())
    assert torch.equal(dynamic_map(CPU), state.state2.code) and torch.equal(nf4_values(CPU), state.code)
    assert torch.equal(packed.view(-1, 1), theirs)
    assert torch.equal(absmax, state.absmax) and torch.equal(nested, state.state2.absmax)
    assert offset == state.offset.item()
    for wanted in (torch.float32, torch.bfloat16, torch.float16):
        state.dtype = wanted
        held = NF4Weight(NF4Tensor(packed, absmax, nested, offset), shape)
        assert torch.equal(held.dense(wanted), functional.dequantize_4bit(theirs, state))


@pytest.fixture(scope="module")
def nf4(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "nf4"
    quantize_checkpoint(tiny_policy_dir, folder, "nf4")
    return folder


def test_bitsandbytes_and_transformers_read_a_checkpoint(nf4: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    stored, dense = load_file(nf4 / "model.safetensors"), load_dense_state(nf4, torch.float32)
    parts = {name.removeprefix(f"{UP}."): tensor for name, tensor in stored.items() if name.startswith(f"{UP}.weight.")}
    state = functional.QuantState.from_dict(parts, CPU)
    assert torch.equal(functional.dequantize_4bit(stored[f"{UP}.weight"], state), dense[f"{UP}.weight"])
    model = AutoModelForCausalLM.from_pretrained(nf4, dtype=torch.float32, device_map="cpu")
    plain = AutoModelForCausalLM.from_config(model.config)
    plain.load_state_dict(dense, strict=False)  # its head is its embeddings
    tokens = torch.arange(10, 22)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=0.05, atol=0.05)  # computes in bf16


def test_the_error_is_that_of_what_is_stored(tiny_policy_dir: Path, nf4: Path) -> None:
    source = load_file(tiny_policy_dir / "model.safetensors")[f"{UP}.weight"]
    dense = load_dense_state(nf4, torch.float32)[f"{UP}.weight"]
    report = json.loads((nf4 / "quantization_report.json").read_text())["relative_squared_error"]
    expected = (dense - source).square().sum() / source.square().sum()
    assert report[f"{UP}.weight"] == pytest.approx(expected.item(), rel=1e-4)
    assert 0.007 < expected < 0.011  # normal weights


def test_other_blocks_and_options_are_refused(tiny_policy_dir: Path, nf4: Path, tmp_path: Path) -> None:
    tensors = load_file(nf4 / "model.safetensors")
    name = f"{UP}.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist())) | {"blocksize": 128}
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    (tmp_path / "config.json").write_bytes((nf4 / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"blocks of 64, .*; {UP}.weight has blocks of \[128, 256\]"):
        format_of(tmp_path).check(TensorFiles(tmp_path))
    with pytest.raises(UserError, match="NF4 has one rounding rule; found scales=search"):
        quantize_checkpoint(tiny_policy_dir, tmp_path / "out", "nf4", scales="search")


def fused(rows: tuple[int, ...], columns: int, **state: Any) -> Any:
    """Projections of random weights in one linear, as vLLM holds them once it has read an NF4 checkpoint."""
    layer: Any = nn.Module()
    weights = [torch.randn(count, columns, generator=torch.Generator().manual_seed(count)) for count in rows]
    held = [quantize_nf4(weight) for weight in weights]
    layer.weight = nn.Parameter(torch.cat([packed.view(-1, 1) for packed, _ in held]), requires_grad=False)
    common = {"quant_type": "nf4", "blocksize": 64, "nested": False} | state
    layer.weight.bnb_quant_state = {
        index: SimpleNamespace(absmax=absmax.flatten(), shape=weight.shape, **common)
        for index, (weight, (_, absmax)) in enumerate(zip(weights, held, strict=True))
    }
    layer.weight.bnb_shard_offsets = torch.tensor([0, *rows]).cumsum(0) * columns // 2
    layer.input_size_per_partition = columns
    return layer


def test_vllms_weights_are_lent_as_it_holds_them() -> None:
    layer, parts = fused((64, 8), 128), [("a.q_proj", 0, 64), ("a.k_proj", 64, 72)]
    shared = shared_rows(layer, parts)
    assert shared is not None and list(shared) == ["a.q_proj", "a.k_proj"]
    for count, weight in zip((64, 8), shared.values(), strict=True):
        source = torch.randn(count, 128, generator=torch.Generator().manual_seed(count))
        assert torch.equal(weight.dense(torch.bfloat16), dequantize_nf4(*quantize_nf4(source), torch.bfloat16))
    packed = next(iter(shared.values())).tensors()["weight"]
    assert packed.data_ptr() == layer.weight.data_ptr()
    assert shared_rows(layer, [("a.qk_proj", 0, 72)]) is None
    assert shared_rows(fused((64, 8), 128, blocksize=128), parts) is None
    assert why_not_shared(["BitsAndBytesLinearMethod", "UnquantizedLinearMethod"], torch.bfloat16) is None
