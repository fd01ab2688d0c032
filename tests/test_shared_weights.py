"""What an engine shares is compared with the checkpoint: other scales, layouts and places are refused."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from model_copies import copy_of
from plain_ops import to_marlin
from qerl_kernels import DenseWeight, FrozenWeight, MarlinRows, MarlinStack, MarlinTensor, StackedWeight
from qerl_kernels.reference import MXFP4Tensor, NVFP4Tensor
from safetensors.torch import load_file
from tiny_families import write_checkpoint
from torch import Tensor

from qerl_pl.engines.base import SharedWeights
from qerl_pl.errors import UserError
from qerl_pl.formats.base import format_of
from qerl_pl.formats.base_format import DENSE
from qerl_pl.formats.nf4 import NF4Weight
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.models.families import family_of
from qerl_pl.models.folder import TensorFiles, load_config
from qerl_pl.policy import loading
from qerl_pl.policy.loading import check_shared_weights, load_base
from qerl_pl.policy.packing import Packing

QKV = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
EMBEDDINGS, EXPERTS = "model.embed_tokens.weight", "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def bases(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base in each format that engines share, and a mixture of experts."""
    root = tmp_path_factory.mktemp("shared")
    sources = {name: tiny_policy_dir for name in ("nvfp4", "mxfp4", "nf4")}
    sources["experts"] = write_checkpoint("qwen3-moe", root / "source")
    for name, source in sources.items():
        quantize_checkpoint(source, root / name, "nvfp4" if name == "experts" else name)  # type: ignore[arg-type]
    return {name: root / name for name in sources} | {"none": tiny_policy_dir}


def packed(tensors: dict[str, Tensor], names: list[str]) -> MarlinTensor:
    """Linears of one matrix in Marlin's layout."""
    codes, scale = (torch.cat([tensors[f"{name}.weight_{kind}"] for name in names]) for kind in ("packed", "scale"))
    scales = tensors.get(f"{names[0]}.weight_global_scale")
    return to_marlin(MXFP4Tensor(codes, scale) if scales is None else NVFP4Tensor(codes, scale, scales))


def shared_of(base: Path) -> SharedWeights:
    """What vLLM shares of the first layer's q, k and v, or of the second's experts, and the embeddings."""
    tensors = load_file(base / "model.safetensors")
    linears: dict[str, FrozenWeight] = {}
    experts: dict[str, StackedWeight] = {}
    if format_of(base) is DENSE:
        rows = [len(tensors[f"{name}.weight"]) for name in QKV]
        fused = torch.cat([tensors[f"{name}.weight"] for name in QKV]).split(rows)
        linears = {name: DenseWeight(weight) for name, weight in zip(QKV, fused, strict=True)}
    elif base.name == "nf4":  # vLLM holds the magnitudes without double quantization
        for name in QKV:
            parts = {key: tensor for key, tensor in tensors.items() if key.startswith(f"{name}.weight.")}
            state = functional.QuantState.from_dict(
                {key.removeprefix(f"{name}.weight."): tensor for key, tensor in parts.items()}, torch.device("cpu")
            )
            magnitudes = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
            plain = functional.QuantState(magnitudes, state.shape, state.code, 64, "nf4", torch.bfloat16)
            linears[name] = NF4Weight(tensors[f"{name}.weight"], plain)
    elif base.name == "experts":
        count = load_config(base).num_experts
        for matrix, members in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            held = [packed(tensors, [f"{EXPERTS}.{expert}.{name}" for name in members]) for expert in range(count)]
            fields = [torch.stack([getattr(one, field) for one in held]) for field in MarlinTensor._fields]
            experts[f"{EXPERTS}.{matrix}"] = MarlinStack(MarlinTensor(*fields))
    else:
        fused, start = packed(tensors, QKV), 0
        for name in QKV:
            stop = start + len(tensors[f"{name}.weight_packed"])
            linears[name] = MarlinRows(fused, start, stop)
            start = stop
    return SharedWeights(linears, {EMBEDDINGS: tensors[EMBEDDINGS]}, experts)


def check(base: Path, shared: SharedWeights) -> None:
    check_shared_weights(shared, format_of(base), TensorFiles(base), family_of(load_config(base).model_type).experts)


@pytest.mark.parametrize("name", ["none", "nvfp4", "mxfp4", "nf4", "experts"])
def test_the_checkpoints_weights_pass(bases: dict[str, Path], name: str) -> None:
    shared = shared_of(bases[name])
    assert shared.linears or shared.experts
    check(bases[name], shared)
    if name != "nf4":  # bitsandbytes makes a number on the default device, and moves it
        with torch.device("meta"):  # as Lightning makes the GPU the default device in configure_model
            check(bases[name], shared)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "nf4"])
def test_first_rows_are_those_of_the_matrix_and_all_that_is_read(bases: dict[str, Path], name: str) -> None:
    base_format, tensors = format_of(bases[name]), TensorFiles(bases[name])
    placed: list[Tensor] = []

    def place(tensor: Tensor) -> Tensor:
        placed.append(tensor)
        return tensor

    whole = base_format.frozen_weight(QKV[0], tensors, lambda tensor: tensor)
    first = base_format.first_rows(QKV[0], tensors, 64, place)
    assert whole is not None and first is not None and first.shape == (64, whole.shape[1]) != whole.shape
    assert torch.equal(first.dense(torch.float32), whole.dense(torch.float32)[:64])
    assert placed[0].numel() == 64 * whole.shape[1] // 2
    assert base_format.first_rows("lm_head", tensors, 64, place) is None


class Changed:
    """A shared weight that the engine has read otherwise."""

    def __init__(self, weight: Any, change: Callable[[Tensor], Tensor], alpha: float = 1.0) -> None:
        self._weight, self._change, self.shape = weight, change, weight.shape
        self.alpha = alpha * weight.alpha if isinstance(weight.alpha, float) else 1.0

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self._change(self._weight.dense(dtype))

    def tensors(self) -> Any:
        return self._weight.tensors()


def exchanged(tensor: Tensor) -> Tensor:
    """Pairs of columns in the other order, as nibbles read from the other end."""
    return tensor.unflatten(1, (-1, 2)).flip(2).flatten(1)


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "a global scale three times off": (lambda tensor: tensor, 3.0),
    "a global scale a fiftieth off": (lambda tensor: tensor, 1.02),
    "a global scale that is no number": (lambda tensor: tensor, math.nan),
    "negated": (torch.neg, 1.0),
    "zeros": (torch.zeros_like, 1.0),
    "nibbles exchanged": (exchanged, 1.0),
    "rows in another order": (lambda tensor: tensor.roll(1, 0), 1.0),
    "blocks in another order": (lambda tensor: tensor.unflatten(1, (-1, 16)).flip(1).flatten(1), 1.0),
    "a power of two in a row of blocks": (lambda tensor: torch.cat([tensor[:, :16] * 2, tensor[:, 16:]], 1), 1.0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["none", "nvfp4", "mxfp4", "nf4"])
def test_a_linear_that_is_read_otherwise_is_refused(bases: dict[str, Path], name: str, change: str) -> None:
    shared = shared_of(bases[name])
    wrong = Changed(shared.linears[QKV[1]], *CHANGES[change])
    with pytest.raises(UserError, match=f"must have the checkpoint's weights .* {QKV[1]} differ by .* of their size"):
        check(bases[name], replace(shared, linears={**shared.linears, QKV[1]: wrong}))


def test_a_shared_16_bit_base_is_the_checkpoints_and_no_parameter_of_the_trainer(bases: dict[str, Path]) -> None:
    own, shared = (
        load_base(bases["none"], torch.float32, torch.device("cpu"), weights)
        for weights in (None, shared_of(bases["none"]))
    )
    ids = torch.arange(2, 10)[None]
    packing = Packing.of(torch.tensor([8]), 8)
    one, other = (model(ids, position_ids=packing.positions[None], packing=packing).logits for model in (own, shared))
    assert torch.equal(one, other)
    names = {name for name, _ in own.named_parameters()} - {name for name, _ in shared.named_parameters()}
    assert names == {f"{name}.weight" for name in QKV}


def test_a_weight_in_16_bits_beside_the_same_in_4_bits_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(bases["nvfp4"] / "model.safetensors")
    folder = copy_of(bases["nvfp4"], tmp_path, tensors | {f"{QKV[0]}.weight": torch.zeros(4, 4)})
    for shared in (None, shared_of(bases["nvfp4"])):
        with pytest.raises(UserError, match=f"in one format, each stored once; .*: {QKV[0]}.weight; quantize"):
            load_base(folder, torch.float32, torch.device("cpu"), shared)


def test_slices_in_each_others_place_are_refused_at_the_start(bases: dict[str, Path]) -> None:
    shared = shared_of(bases["nvfp4"])
    for one, other in itertools.combinations(QKV, 2):
        linears = {**shared.linears, one: shared.linears[other], other: shared.linears[one]}
        with pytest.raises(UserError, match=f"first rows of {one} differ"):
            load_base(bases["nvfp4"], torch.float32, torch.device("cpu"), replace(shared, linears=linears))
    table = shared.tensors[EMBEDDINGS]
    for wrong in (table * 1.5, table.roll(1, 0), table.flip(1)):
        with pytest.raises(UserError, match=f"first rows of {EMBEDDINGS} differ"):
            check(bases["nvfp4"], replace(shared, tensors={EMBEDDINGS: wrong}))
    check(bases["nvfp4"], replace(shared, tensors={EMBEDDINGS: table.bfloat16(), "lm_head.weight": table}))


def test_blocks_that_marlin_reads_as_zeros_are_no_difference(bases: dict[str, Path]) -> None:
    shared = shared_of(bases["nvfp4"])

    def without_small(tensor: Tensor) -> Tensor:
        return torch.where(tensor.abs() <= 4e-5 * tensor.abs().max(), 0.0, tensor)

    check(
        bases["nvfp4"],
        replace(shared, linears={name: Changed(weight, without_small) for name, weight in shared.linears.items()}),
    )


def exchange_experts(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.cat([tensor[1:2], tensor[:1], tensor[2:]]) for tensor in tensors]


def last_scale(tensors: list[Tensor]) -> list[Tensor]:
    scales = tensors[2].clone()
    scales[-1] *= 3
    return [*tensors[:2], scales]


def ups_before_gates(tensors: list[Tensor]) -> list[Tensor]:
    turned = [torch.cat(tensor.view(torch.uint8).chunk(2, 2)[::-1], 2).view(tensor.dtype) for tensor in tensors[:2]]
    return [*turned, tensors[2]]


@pytest.mark.parametrize(
    ("matrix", "change", "where"),
    [
        ("gate_up_proj", last_scale, "experts 4 to 5"),
        ("down_proj", last_scale, "experts 4 to 5"),
        ("gate_up_proj", exchange_experts, "experts 0 to 3"),
        ("down_proj", exchange_experts, "experts 0 to 3"),
        ("gate_up_proj", ups_before_gates, "experts 0 to 3"),
    ],
)
def test_experts_that_are_read_otherwise_are_refused(
    bases: dict[str, Path],
    matrix: str,
    change: Callable[[list[Tensor]], list[Tensor]],
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "EXPERTS_AT_ONCE", 4)  # of six
    shared, name = shared_of(bases["experts"]), f"{EXPERTS}.{matrix}"
    held = shared.experts[name].tensors()
    changed = change([held["weight"], held["weight_scale"], held["weight_scale_2"]])
    wrong = {**shared.experts, name: MarlinStack(MarlinTensor(*changed))}
    with pytest.raises(UserError, match=f"first rows of {name}, {where} differ by"):
        check(bases["experts"], replace(shared, experts=wrong))
