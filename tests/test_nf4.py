"""NF4: numbers worked out by hand, and checkpoints that bitsandbytes and transformers read."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from model_copies import copy_of
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from qerl_pl.engines.base import EngineSpec
from qerl_pl.engines.vllm.linear_methods import shared_rows, why_not_shared
from qerl_pl.errors import UserError
from qerl_pl.formats.base import format_of
from qerl_pl.formats.dense_checkpoint import iterate_dense
from qerl_pl.formats.nf4 import NF4Format, NF4Weight
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.models.folder import TensorFiles

CPU = torch.device("cpu")
UP = "model.layers.0.mlp.up_proj"
QUANTIZER = NF4Format()


def test_a_block_worked_out() -> None:
    """2 is the largest; 0.5 / 2 is nearest to 0.2461 (code 10), -0.9 / 2 to -0.3949 (3), 0.08 / 2 to 0.0796 (8)."""
    weight = torch.zeros(1, 64)
    weight[0, :6] = torch.tensor([2.0, 0.5, -0.9, 0.08, -2.0, 0.07])
    packed, absmax = QUANTIZER.encode(weight, None)
    assert absmax.tolist() == [[2.0]]
    assert packed[0, :4].tolist() == [0xFA, 0x38, 0x07, 0x77]  # 0.07 / 2 is below the middle, 0.0398: zero
    dense = QUANTIZER.decode(packed, absmax, None)
    assert dense[0, :6].tolist() == pytest.approx([2.0, 0.49222, -0.78983, 0.15916, -2.0, 0.0], abs=1e-5)


def test_double_quantization_worked_out() -> None:
    """1, 2 and 6 less their mean are -2, -1 and 3; over 3, -0.6667 is nearest to -0.6695, -0.3333 to -0.3320."""
    codes = torch.zeros(1, 96, dtype=torch.uint8)
    stored, magnitudes = QUANTIZER.store(codes, torch.tensor([[1.0, 2.0, 6.0]]), None, torch.bfloat16)
    assert stored[".nested_absmax"].tolist() == [3.0]
    result = stored[".nested_quant_map"][stored[".absmax"].int()]
    assert result.tolist() == pytest.approx([-0.6695, -0.3320, 1.0], abs=1e-4)
    assert magnitudes[0].tolist() == pytest.approx([0.9914, 2.0039, 6.0], abs=1e-4)
    stored, magnitudes = QUANTIZER.store(codes, torch.full((1, 3), 0.5), None, torch.bfloat16)
    assert stored[".absmax"].tolist() == [0] * 3 and magnitudes.tolist() == [[0.5] * 3]  # nothing left to round


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(37, 192), (64, 1920), (1, 64)])
def test_what_is_stored_is_what_bitsandbytes_makes_of_a_full_matrix(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])) * 0.02).to(dtype)
    if shape[0] == 37:
        weight[3], weight[4, :70] = 0, weight[4, 0]
    packed, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    codes, scales = zip(*[QUANTIZER.encode(rows, None) for rows in weight.split(16)], strict=True)
    stored, magnitudes = QUANTIZER.store(torch.cat(codes), torch.cat(scales), None, dtype)
    expected = {"": packed} | {f".{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in stored)
    dense = NF4Weight(packed, state).dense(torch.float32)
    assert torch.equal(QUANTIZER.decode(torch.cat(codes), magnitudes, None), dense)
    assert state.dtype == dtype
    for wanted in (torch.bfloat16, torch.float16):
        assert torch.equal(NF4Weight(packed, state).dense(wanted), dense.to(wanted))


def test_without_bitsandbytes_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, nf4: Path, tiny_policy_dir: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as where it is not installed
    with pytest.raises(UserError, match=r"needs bitsandbytes, .* pip install 'qerl-pl\[baselines\]'"):
        format_of(nf4).check(TensorFiles(nf4))
    with pytest.raises(UserError, match="needs bitsandbytes"):
        quantize_checkpoint(tiny_policy_dir, tmp_path / "out", "nf4")
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def nf4(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "nf4"
    quantize_checkpoint(tiny_policy_dir, folder, "nf4")
    return folder


def test_bitsandbytes_and_transformers_read_a_checkpoint(nf4: Path) -> None:
    stored, dense = load_file(nf4 / "model.safetensors"), dict(iterate_dense(nf4, torch.float32))
    parts = {name.removeprefix(f"{UP}."): tensor for name, tensor in stored.items() if name.startswith(f"{UP}.weight.")}
    state = functional.QuantState.from_dict(parts, CPU)
    assert torch.equal(functional.dequantize_4bit(stored[f"{UP}.weight"], state), dense[f"{UP}.weight"])
    model = AutoModelForCausalLM.from_pretrained(nf4, dtype=torch.float32, device_map="cpu")
    plain = AutoModelForCausalLM.from_config(model.config)
    plain.load_state_dict(dense, strict=False)  # its head is its embeddings
    tokens = torch.arange(10, 22)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=0.05, atol=0.05)  # computes in bf16


def test_a_checkpoint_is_checked_whatever_the_default_device(nf4: Path) -> None:
    with torch.device("meta"):  # as Lightning makes the GPU the default device in configure_model
        format_of(nf4).check(TensorFiles(nf4))


def test_a_code_book_that_another_processor_rounded_is_the_same(nf4: Path, tmp_path: Path) -> None:
    """bitsandbytes makes the map of the magnitudes by `torch.linspace`, whose last bits depend on the CPU."""
    tensors = load_file(nf4 / "model.safetensors")
    book = tensors[f"{UP}.weight.nested_quant_map"]
    book.copy_(torch.nextafter(book, torch.ones(())))
    format_of(nf4).check(TensorFiles(copy_of(nf4, tmp_path / "moved", tensors)))
    book *= 1.001
    with pytest.raises(UserError, match="or other maps"):
        format_of(nf4).check(TensorFiles(copy_of(nf4, tmp_path / "moved", tensors)))


def test_other_blocks_are_refused(nf4: Path, tmp_path: Path) -> None:
    tensors = load_file(nf4 / "model.safetensors")
    name = f"{UP}.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist())) | {"blocksize": 128}
    tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(UserError, match=rf"blocks of 64, .*; {UP}.weight has blocks of \[128, 256\]"):
        format_of(nf4).check(TensorFiles(copy_of(nf4, tmp_path, tensors)))


def fused(rows: tuple[int, ...], columns: int, blocksize: int = 64) -> Any:
    """Projections of random weights in one linear, as vLLM holds them once it has read an NF4 checkpoint."""
    layer: Any = nn.Module()
    weights = [random_weight(count, columns) for count in rows]
    packed = [functional.quantize_4bit(weight, blocksize=blocksize, quant_type="nf4") for weight in weights]
    layer.weight = nn.Parameter(torch.cat([codes for codes, _ in packed]), requires_grad=False)
    layer.weight.bnb_quant_state = dict(enumerate(state for _, state in packed))
    layer.weight.bnb_shard_offsets = torch.tensor([0, *rows]).cumsum(0) * columns // 2
    layer.input_size_per_partition = columns
    return layer


def random_weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def test_vllms_weights_are_lent_as_it_holds_them() -> None:
    layer, parts = fused((64, 8), 128), [("a.q_proj", 0, 64), ("a.k_proj", 64, 72)]
    shared = shared_rows(layer, parts)
    assert shared is not None and list(shared) == ["a.q_proj", "a.k_proj"]
    for count, weight in zip((64, 8), shared.values(), strict=True):
        expected = QUANTIZER.decode(*QUANTIZER.encode(random_weight(count, 128), None), None)
        assert torch.equal(weight.dense(torch.bfloat16), expected.bfloat16())
    packed = next(iter(shared.values())).tensors()["weight"]
    assert packed.data_ptr() == layer.weight.data_ptr()
    assert shared_rows(layer, [("a.qk_proj", 0, 72)]) is None
    assert shared_rows(fused((64, 8), 128, blocksize=128), parts) is None
    spec = EngineSpec(Path(), torch.bfloat16, torch.device("cuda"), 1, ("q_proj",), 8)
    assert why_not_shared(["BitsAndBytesLinearMethod", "UnquantizedLinearMethod"], spec) is None
