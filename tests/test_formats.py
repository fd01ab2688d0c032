"""Base formats: which one a folder is in, and that every way to read it gives the same weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pages
import pytest
import torch
from model_copies import copy_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from qerl_pl.cli.dry_run import shape_of
from qerl_pl.cli.export import base_of, take_adapter
from qerl_pl.cli.main import main
from qerl_pl.engines.vllm.startup import runs
from qerl_pl.errors import UserError
from qerl_pl.formats.base import FORMATS, QUANTIZATIONS, QUANTIZED, format_of, format_of_config, named_format
from qerl_pl.formats.dense_checkpoint import iterate_dense
from qerl_pl.formats.fp4 import MXFP4StacksFormat
from qerl_pl.formats.quantize import in_format, quantize_checkpoint
from qerl_pl.models.folder import TensorFiles, other_files, read_config
from qerl_pl.modules import PolicyConfig
from qerl_pl.policy.policy import Policy

UP, HEAD = "model.layers.0.mlp.up_proj", "lm_head"
OF_LINEARS = [base_format for base_format in FORMATS if not isinstance(base_format, MXFP4StacksFormat)]
"""The other one is of gpt-oss's experts alone: test_gpt_oss.py."""


@pytest.fixture(scope="module")
def folders(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder in each format, by the format's name."""
    root = tmp_path_factory.mktemp("formats")
    for name in QUANTIZED:
        quantize_checkpoint(tiny_policy_dir, root / name, name)
    return {"none": tiny_policy_dir} | {name: root / name for name in QUANTIZED}


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

    dense = dict(iterate_dense(folders[base_format.name], torch.float32))
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
    dense = dict(iterate_dense(folders[base_format.name], torch.float32))
    shapes = base_format.dense_shapes(TensorFiles(folders[base_format.name]))
    assert shapes == {name: tuple(tensor.shape) for name, tensor in dense.items()}


@pytest.mark.parametrize(
    ("name", "least", "most"), [("nvfp4", 0.0025, 0.0144), ("mxfp4", 0.0025, 0.02), ("nf4", 0.007, 0.011)]
)
def test_the_report_holds_every_matrix_error(folders: dict[str, Path], name: str, least: float, most: float) -> None:
    """Four bits lose about 0.009 of Gaussian weights' squares."""
    report = json.loads((folders[name] / "quantization_report.json").read_text())
    source, dense = load_file(folders["none"] / "model.safetensors"), dict(iterate_dense(folders[name], torch.float32))
    errors = report["relative_squared_error"]
    assert errors.keys() == {name for name in source if "_proj.weight" in name} and len(errors) == 14
    for matrix, error in errors.items():
        exact = source[matrix].double()
        expected = (dense[matrix].double() - exact).square().sum() / exact.square().sum()
        assert error == pytest.approx(expected.item(), rel=1e-4)
    assert report["mean_relative_squared_error"] == pytest.approx(sum(errors.values()) / 14)
    assert report["format"] == name and least < errors[f"{UP}.weight"] < most


def test_a_user_can_ask_for_every_format_that_there_is() -> None:
    assert {base_format.name for base_format in FORMATS} == {*QUANTIZED, "none"} == set(QUANTIZATIONS)
    for name in QUANTIZATIONS:
        assert PolicyConfig(quantization=name).quantization == named_format(name).name == name


def test_sixteen_bit_training_refuses_a_quantized_folder(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="none needs 16-bit weights; .* is NVFP4; .*quantization to nvfp4"):
        PolicyConfig(path=str(folders["nvfp4"]), quantization="none").base_folder()
    assert PolicyConfig(path=str(folders["nvfp4"])).base_folder() == folders["nvfp4"]
    for name, folder in folders.items():
        assert PolicyConfig(path=str(folder), quantization=name).base_folder() == folder


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_16_bit_folder_is_quantized_once_and_a_quantized_one_is_not_again(
    folders: dict[str, Path], name: str, tmp_path: Path
) -> None:
    made = PolicyConfig(path=str(folders["none"]), quantization=name).base_folder()
    tensors, expected = load_file(made / "model.safetensors"), load_file(folders[name] / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for key, tensor in tensors.items():
        assert torch.equal(tensor.view(torch.uint8), expected[key].view(torch.uint8))
    other = next(base_format for base_format in QUANTIZED if base_format != name)
    with pytest.raises(UserError, match=f"{name} needs 16-bit weights; .* is {other.upper()}; .*ization to {other}"):
        PolicyConfig(path=str(folders[other]), quantization=name).base_folder()
    with pytest.raises(UserError, match=f"only 16-bit weights can be quantized; .* is {other.upper()} already"):
        quantize_checkpoint(folders[other], tmp_path / "again", name)


def test_every_tensor_that_is_no_linears_reads_alike(folders: dict[str, Path]) -> None:
    stored = load_file(folders["none"] / "model.safetensors")
    for folder in folders.values():
        dense = dict(iterate_dense(folder, torch.float32))
        assert dense.keys() == stored.keys()
        assert all(torch.equal(dense[name], stored[name]) for name in stored if "_proj" not in name)


def test_a_format_that_nobody_knows_is_named(tiny_policy_dir: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_policy_dir, tmp_path / "awq", quantization_config={"quant_method": "awq"})
    for start in (lambda: format_of(folder), lambda: quantize_checkpoint(folder, tmp_path / "out")):
        with pytest.raises(UserError, match=r"nvfp4, .*, and 16-bit activations; .* has awq: quantize the 16-bit"):
            start()


def test_a_copy_of_a_model_has_no_weights_of_other_libraries(tiny_policy_dir: Path, tmp_path: Path) -> None:
    """Nor what says where they are; and a digest of what is copied reads none of them."""
    source = shutil.copytree(tiny_policy_dir, tmp_path / "source")
    copied = [path.name for path in other_files(source)]
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(copied)
    weights = ("model.gguf", "tf_model.h5", "flax_model.msgpack", "pytorch_model-00001-of-00002.bin", "model.onnx")
    for name in (*weights, "pytorch_model.bin.index.json", "last.ckpt", "config.json", "quantization_report.json"):
        (source / name).touch()
    assert [path.name for path in other_files(source)] == copied


def test_a_quantized_copy_renders_tools_as_its_source(tiny_policy_dir: Path, tmp_path: Path) -> None:
    source = shutil.copytree(tiny_policy_dir, tmp_path / "source")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ tools | length }} tools"}
    tokenizer.save_pretrained(source)
    quantized = in_format(source, "mxfp4")
    assert AutoTokenizer.from_pretrained(quantized).chat_template == tokenizer.chat_template
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("another")
    assert in_format(source, "mxfp4") != quantized


def in_group(group: dict[str, Any] | None = None, **weights: Any) -> Callable[[dict[str, Any]], None]:
    """Change the scheme of a quantization_config of compressed-tensors, and the settings of its weights."""

    def change(config: dict[str, Any]) -> None:
        config["config_groups"]["group_0"] |= group or {}
        config["config_groups"]["group_0"]["weights"] |= weights

    return change


def at_top(**settings: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(settings)


ROTATIONS = {"config_groups": {"R1": {"type": "hadamard", "apply": [{"location": "weight_output"}]}}}
MORE: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "rotations": ("nvfp4", at_top(transform_config=ROTATIONS), "nvfp4-pack-quantized with transform_config"),
    "sparse": ("nvfp4", at_top(sparsity_config={"format": "sparse-24-bitmask"}), "with sparsity_config"),
    "sparse linears": ("nvfp4", at_top(sparsity_config={"format": "dense", "targets": ["Linear"]}), "sparsity_config"),
    "sparse experts": ("nvfp4", at_top(moe_sparsity_config={"top_k": 2}), "with moe_sparsity_config"),
    "8-bit cache": ("mxfp4", at_top(kv_cache_scheme={"num_bits": 8, "type": "float"}), "with kv_cache_scheme"),
    "unheard of": ("mxfp4", at_top(smoothing={"alpha": 0.5}), "with smoothing"),
    "another method": ("nvfp4", at_top(quant_method="modelopt"), "with quant_method modelopt"),
    "groups of 32": ("nvfp4", in_group(group_size=32), "with group_size 32"),
    "asymmetric": ("nvfp4", in_group(symmetric=False), "with symmetric False"),
    "integers": ("mxfp4", in_group(type="int"), "with type int"),
    "8 bits": ("nvfp4", in_group(num_bits=8), "with num_bits 8"),
    "default bits": ("nvfp4", lambda config: config["config_groups"]["group_0"]["weights"].pop("num_bits"), "absent"),
    "no global scale": ("nvfp4", in_group(strategy="group"), "with strategy group"),
    "other scales": ("nvfp4", in_group(scale_dtype="torch.bfloat16"), "with scale_dtype torch.bfloat16"),
    "dynamic": ("nvfp4", in_group(dynamic="local"), "with dynamic local"),
    "in another order": ("nvfp4", in_group(actorder="group"), "with actorder group"),
    "W4A4": ("mxfp4", in_group({"input_activations": {"num_bits": 4}}), "with quantized activations"),
    "mixed": ("nvfp4", in_group({"format": "float-quantized"}), "with format float-quantized"),
    "a second scheme": ("nvfp4", lambda config: config["config_groups"].update(group_1={"targets": ["a"]}), "absent"),
    "a named scheme": ("nvfp4", at_top(config_groups={"NVFP4A16": ["Linear"]}), "with config_groups"),
    "16-bit storage": ("nf4", at_top(bnb_4bit_quant_storage="bfloat16"), "with bnb_4bit_quant_storage bfloat16"),
    "int8 beside": ("nf4", at_top(load_in_8bit=True), "with load_in_8bit True"),
}


@pytest.mark.parametrize("case", MORE)
def test_a_config_that_asks_for_more_than_the_format_is_refused_at_dry_run_and_start(
    folders: dict[str, Path], tmp_path: Path, case: str
) -> None:
    name, change, message = MORE[case]
    config = read_config(folders[name])
    change(config["quantization_config"])
    policy = PolicyConfig(path=str(copy_of(folders[name], tmp_path / "model", **config)), quantization=name)
    for start in (policy.base_folder, lambda: shape_of(policy)):
        with pytest.raises(UserError, match=rf"16-bit activations; .*model has .*{message}.*: quantize the 16-bit"):
            start()


SAME: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "empty": ("nvfp4", at_top(transform_config={"config_groups": {}}, sparsity_config={}, kv_cache_scheme=None)),
    "zeros that rounding made": ("nvfp4", at_top(sparsity_config={"format": "dense", "global_sparsity": 0.14})),
    "GPTQ": ("mxfp4", in_group(actorder="static", observer="mse", block_structure=None, zp_dtype="torch.int8")),
    "an older release": ("nvfp4", in_group(scale_dtype=None)),
    "some linears": ("nvfp4", in_group({"targets": ["re:.*proj$"], "format": "nvfp4-pack-quantized"})),
    "no groups": ("nvfp4", lambda config: config.pop("config_groups")),
    "of transformers": ("nf4", at_top(_load_in_4bit=True, llm_int8_threshold=6.0, bnb_4bit_compute_dtype="float32")),
}


@pytest.mark.parametrize("case", SAME)
def test_settings_that_change_nothing_are_the_format(folders: dict[str, Path], case: str) -> None:
    name, change = SAME[case]
    config = read_config(folders[name])
    change(config["quantization_config"])
    assert format_of_config(config, "model").name == name


def test_modelopts_config_beside_weights_in_16_bits_is_refused(tiny_policy_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_policy_dir, tmp_path / "model")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(UserError, match="quantized weights need scales"):
        PolicyConfig(path=str(folder)).base_folder()


def test_a_config_of_quantization_elsewhere_is_refused(tiny_policy_dir: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_policy_dir, tmp_path / "model", compression_config={"format": "pack-quantized"})
    policy = PolicyConfig(path=str(folder))
    for start in (policy.base_folder, lambda: shape_of(policy)):
        with pytest.raises(UserError, match="model has its settings in compression_config: quantize the 16-bit model"):
            start()


@pytest.mark.parametrize("blocks", [2, 0.5])
def test_scales_of_other_groups_are_refused(folders: dict[str, Path], tmp_path: Path, blocks: float) -> None:
    tensors = load_file(folders["mxfp4"] / "model.safetensors")
    rows, groups = tensors[f"{UP}.weight_scale"].shape
    scales = torch.zeros(rows, int(groups / blocks), dtype=torch.uint8).view(tensors[f"{UP}.weight_scale"].dtype)
    folder = copy_of(folders["mxfp4"], tmp_path / "model", tensors | {f"{UP}.weight_scale": scales})
    with pytest.raises(UserError, match=f"has a scale for every .* weights of a row; {UP} has"):
        PolicyConfig(path=str(folder), quantization="mxfp4").base_folder()


# A user's own ---------------------------------------------------------------------------------------------------------

OTHERS = """
from qerl_pl.formats.base_format import BaseFormat

class Half(BaseFormat):
    def encode(self, rows, global_scale):
        return rows, rows

def function(rows): ...
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of the format of the page, in a file of the working directory."""
    (block,) = pages.fences(pages.ROOT / "docs" / "your-own-model.md", "python")
    (tmp_path / "my_formats.py").write_text(block + OTHERS)
    monkeypatch.chdir(tmp_path)
    return f"{tmp_path}/my_formats.py:Float8"


def test_the_format_of_the_page_holds_a_policy(own: str, tiny_policy_dir: Path) -> None:
    config = PolicyConfig(path=str(tiny_policy_dir), quantization=own, dtype="float32")
    folder = config.base_folder()
    assert folder == config.base_folder() and "Float8" in folder.name
    stored, dense, exact = TensorFiles(folder), dict(iterate_dense(folder, torch.float32)), tiny_policy_dir
    assert {name for name in stored if name.startswith(UP)} == {f"{UP}.weight_codes", f"{UP}.weight_scale"}
    assert stored.read(f"{UP}.weight_codes").dtype == torch.float8_e4m3fn
    weight, error = load_file(exact / "model.safetensors")[f"{UP}.weight"], dense[f"{UP}.weight"]
    assert 0 < (error - weight).norm() < 0.04 * weight.norm()  # E4M3 has steps of up to 1/8
    policy = Policy(folder, config, torch.device("cpu"), seed=0)
    up = dict(policy.base.named_modules())[f"{UP}.base_layer"]
    assert torch.equal(up(torch.eye(up.in_features)).T, dense[f"{UP}.weight"])
    tokens = torch.arange(12).view(2, 6)
    mask = torch.ones_like(tokens).bool().index_fill(1, torch.tensor([0]), False)
    logprobs, *_ = policy.token_values(tokens, torch.tensor([6, 6]), mask, 1.0)
    logprobs.sum().backward()
    assert any(factor.grad is not None and factor.grad.norm() > 0 for _, factor in policy.trained.factors().values())
    assert not runs(format_of(folder), torch.device("cuda"))  # vLLM gets dense weights


def test_qerl_quantize_writes_a_format_of_ones_own(own: str, tiny_policy_dir: Path, tmp_path: Path) -> None:
    assert main(["quantize", str(tiny_policy_dir), str(tmp_path / "own"), "--format", own, "--device", "cpu"]) == 0
    assert read_config(tmp_path / "own")["quantization_config"] == {"quant_method": "Float8"}
    report = json.loads((tmp_path / "own" / "quantization_report.json").read_text())
    assert 0 < report["mean_relative_squared_error"] < 0.04**2
    again = PolicyConfig(path=str(tmp_path / "own"), quantization=own)
    assert again.base_folder() == tmp_path / "own"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("float8", "got 'float8'; choose one of them, or write"),
        ("my_formats.py:Float4", "'my_formats.py:Float4' cannot be imported"),
        ("no_file.py:Float8", "'no_file.py:Float8' cannot be imported"),
        ("my_formats.py:function", "is <function function.*; derive a class from"),
        ("my_formats.py:Half", "is <class .*; derive a class from .*BaseFormat, with encode and decode"),
        ("qerl_pl.formats.base_format.BaseFormat", "is <class .*; derive"),
        ("pathlib.Path", "is <class .*; derive"),
    ],
)
def test_what_is_no_format_is_told_in_one_line(own: str, name: str, message: str, tiny_policy_dir: Path) -> None:
    for key, start in (
        ("model.policy.quantization", lambda: PolicyConfig(quantization=name)),
        ("--format", lambda: quantize_checkpoint(tiny_policy_dir, Path("out"), name)),
    ):
        with pytest.raises(UserError, match=f"^{key} must be one of nvfp4, .*, or the import path of .*; .*{message}"):
            start()
    with pytest.raises(UserError, match="rounds nothing; .* is a text model: use it as it is"):
        quantize_checkpoint(tiny_policy_dir, Path("out"), "none")


def test_an_adapter_chooses_no_code(own: str, tmp_path: Path) -> None:
    (tmp_path / "qerl_base.json").write_text(json.dumps({"path": "model", "toy": None, "quantization": own}))
    plain = {"base_model_name_or_path": "base", "r": 4, "lora_alpha": 8, "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(plain))
    save_file({"base_model.model.q_proj.lora_A.weight": torch.ones(4, 2)}, tmp_path / "adapter_model.safetensors")
    policies = [SimpleNamespace(path=str(tmp_path), quantization=q, lora=SimpleNamespace()) for q in ("nvfp4", own)]
    for start in (lambda: base_of(tmp_path), lambda: take_adapter(policies[0], "test", None)):
        with pytest.raises(UserError, match="or in the format that you name; .*if you trust its code, set"):
            start()
    take_adapter(policies[1], "test", None)  # the user names it
    assert policies[1].quantization == own
