"""Base formats: which one a folder is in, and that every way to read it gives the same weights."""

import json
import shutil
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qerl_pl.errors import UserError
from qerl_pl.formats.base import FORMATS, QUANTIZERS, format_of
from qerl_pl.formats.dense_checkpoint import load_dense_state
from qerl_pl.formats.model_folder import TensorFiles, other_files, read_config
from qerl_pl.formats.mxfp4 import MXFP4StacksFormat
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.modules import PolicyConfig

UP, HEAD = "model.layers.0.mlp.up_proj", "lm_head"
OF_LINEARS = [base_format for base_format in FORMATS if not isinstance(base_format, MXFP4StacksFormat)]
"""The other one is of gpt-oss's experts alone: test_gpt_oss.py."""


@pytest.fixture(scope="module")
def folders(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder in each format, by the format's name."""
    root = tmp_path_factory.mktemp("formats")
    for name in QUANTIZERS:
        quantize_checkpoint(tiny_policy_dir, root / name, name)
    return {"none": tiny_policy_dir} | {name: root / name for name in QUANTIZERS}


@pytest.mark.parametrize("base_format", OF_LINEARS, ids=lambda base_format: base_format.name)
def test_a_folder_is_in_one_format_and_holds_the_tensors_that_it_names(base_format, folders: dict[str, Path]) -> None:
    folder = folders[base_format.name]
    assert format_of(folder) is base_format
    assert [other for other in FORMATS if other.recognises(read_config(folder).get("quantization_config"))] == [
        base_format
    ]
    stored = {name for name in TensorFiles(folder) if name.startswith(f"{UP}.weight")}
    assert set(base_format.tensor_names(UP)) == stored


@pytest.mark.parametrize("base_format", OF_LINEARS, ids=lambda base_format: base_format.name)
def test_a_frozen_weight_is_the_dense_one(base_format, folders: dict[str, Path]) -> None:
    tensors, placed = TensorFiles(folders[base_format.name]), []

    def place(tensor: Tensor) -> Tensor:
        placed.append(tensor.clone())
        return placed[-1]

    dense = load_dense_state(folders[base_format.name], torch.float32)
    assert base_format.frozen_weight(HEAD, tensors, place) is None and not placed
    weight = base_format.frozen_weight(UP, tensors, place)
    if base_format.name == "none":  # its linears stay PyTorch's
        assert weight is None
        return
    torch.testing.assert_close(weight.alpha * weight.dense(torch.float32), dense[f"{UP}.weight"], rtol=3e-7, atol=0)
    names = base_format.tensor_names(UP)[: len(weight.tensors())]  # NF4's files hold its tables besides
    assert tuple(f"{UP}.{part}" for part in weight.tensors()) == names
    assert [tensor.data_ptr() for tensor in weight.tensors().values()] == [tensor.data_ptr() for tensor in placed]


@pytest.mark.parametrize("base_format", OF_LINEARS, ids=lambda base_format: base_format.name)
def test_shapes_are_those_of_the_dense_checkpoint(base_format, folders: dict[str, Path]) -> None:
    dense = load_dense_state(folders[base_format.name], torch.float32)
    shapes = base_format.dense_shapes(TensorFiles(folders[base_format.name]))
    assert shapes == {name: tuple(tensor.shape) for name, tensor in dense.items()}


def test_a_user_can_ask_for_every_format_that_there_is() -> None:
    assert set(get_args(get_type_hints(PolicyConfig)["quantization"])) == {base_format.name for base_format in FORMATS}
    assert set(get_args(get_type_hints(quantize_checkpoint)["format"])) == set(QUANTIZERS)
    assert {base_format.name for base_format in FORMATS} == {*QUANTIZERS, "none"}


def test_sixteen_bit_training_refuses_a_quantized_folder(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="none needs 16-bit weights; .* is NVFP4; .*quantization to nvfp4"):
        PolicyConfig(path=str(folders["nvfp4"]), quantization="none").base_folder()
    assert PolicyConfig(path=str(folders["nvfp4"])).base_folder() == folders["nvfp4"]
    for name, folder in folders.items():
        assert PolicyConfig(path=str(folder), quantization=name).base_folder() == folder


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_16_bit_folder_is_quantized_once_and_a_quantized_one_is_not_again(
    folders: dict[str, Path], name: str, tmp_path: Path
) -> None:
    made = PolicyConfig(path=str(folders["none"]), quantization=name).base_folder()
    tensors, expected = load_file(made / "model.safetensors"), load_file(folders[name] / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for key, tensor in tensors.items():
        assert torch.equal(tensor.view(torch.uint8), expected[key].view(torch.uint8))
    other = next(base_format for base_format in QUANTIZERS if base_format != name)
    with pytest.raises(UserError, match=f"{name} needs 16-bit weights; .* is {other.upper()}; .*ization to {other}"):
        PolicyConfig(path=str(folders[other]), quantization=name).base_folder()
    with pytest.raises(UserError, match=f"only 16-bit weights can be quantized; .* is {other.upper()} already"):
        quantize_checkpoint(folders[other], tmp_path / "again", name)


def test_every_tensor_that_is_no_linears_reads_alike(folders: dict[str, Path]) -> None:
    stored = load_file(folders["none"] / "model.safetensors")
    for folder in folders.values():
        dense = load_dense_state(folder, torch.float32)
        assert dense.keys() == stored.keys()
        assert all(torch.equal(dense[name], stored[name]) for name in stored if "_proj" not in name)


def test_a_format_that_nobody_knows_is_named(tiny_policy_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_policy_dir, tmp_path / "awq")
    config = read_config(folder) | {"quantization_config": {"quant_method": "awq"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"nvfp4, .*, and 16-bit activations; .* has awq: quantize the 16-bit"):
        format_of(folder)


def test_a_copy_of_a_model_has_no_weights_of_other_libraries(tiny_policy_dir: Path, tmp_path: Path) -> None:
    """Nor what says where they are; and a digest of what is copied reads none of them."""
    source = shutil.copytree(tiny_policy_dir, tmp_path / "source")
    copied = [path.name for path in other_files(source)]
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(copied)
    weights = ("model.gguf", "tf_model.h5", "flax_model.msgpack", "pytorch_model-00001-of-00002.bin", "model.onnx")
    for name in (*weights, "pytorch_model.bin.index.json", "last.ckpt", "config.json", "quantization_report.json"):
        (source / name).touch()
    assert [path.name for path in other_files(source)] == copied
