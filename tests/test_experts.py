"""Mixtures of experts: how checkpoints store them, which layers have them, and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import write_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from qerl_pl.cli.main import main
from qerl_pl.cli.quantize import calibrate_checkpoint
from qerl_pl.errors import UserError
from qerl_pl.formats.dense_checkpoint import write_dense_checkpoint
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.models import folder as model_folder
from qerl_pl.models.families import family_of
from qerl_pl.models.folder import TensorFiles, read_config
from qerl_pl.models.memory_plan import MicroBatch, working_bytes
from qerl_pl.models.shape import Shape
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.policy.activation_checkpointing import ActivationCheckpointing, MemorySettings
from qerl_pl.policy.experts import PackedExperts
from qerl_pl.policy.packed_layers import GatedMLP
from qerl_pl.toy.tokenizer import build_tokenizer

CPU = torch.device("cpu")
own = model_folder._open
IDS = torch.arange(40, 90)[None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 16-bit checkpoint."""
    return write_checkpoint("qwen3-moe", tmp_path_factory.mktemp("experts") / "moe")


def said_by(folder: Path, quantization: str) -> Tensor:
    """Log-probabilities of IDS by the policy's base, float32 [49]."""
    config = PolicyConfig(path=str(folder), dtype="float32", quantization=quantization)  # type: ignore[arg-type]
    mask = torch.ones_like(IDS, dtype=torch.bool)
    mask[:, 0] = False
    with torch.no_grad():
        policy = Policy(config.base_folder(), config, CPU, seed=1).eval()
        return policy.token_values(IDS, torch.tensor([IDS.shape[1]]), mask, 1.0)[0][0, 1:]


def said_by_transformers(folder: Path) -> Tensor:
    """The same by a plain model."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, IDS[0, 1:, None])[:, 0]


@pytest.mark.parametrize("quantization", ["nvfp4", "mxfp4", "none"])
def test_every_format_holds_experts_as_transformers_computes_them(
    source: Path, tmp_path: Path, quantization: str
) -> None:
    base = PolicyConfig(path=str(source), quantization=quantization).base_folder()  # type: ignore[arg-type]
    dense = write_dense_checkpoint(base, tmp_path / "dense", torch.float32)
    torch.testing.assert_close(said_by(base, quantization), said_by_transformers(dense), rtol=0, atol=2e-5)
    if quantization != "none":
        assert (said_by_transformers(dense) - said_by_transformers(source)).abs().max() > 1e-3


def test_four_bit_experts_are_stored_one_by_one_as_published_recipes_have_them(source: Path, tmp_path: Path) -> None:
    for format in ("nvfp4", "mxfp4"):
        folder = tmp_path / format
        assert main(["quantize", str(source), str(folder), "--format", format]) == 0
        assert read_config(folder)["quantization_config"]["ignore"] == ["lm_head", r"re:.*mlp\.gate$"]
        tensors = load_file(folder / "model.safetensors")
        experts = "model.layers.1.mlp.experts"
        assert tensors[f"{experts}.5.gate_proj.weight_packed"].shape == (64, 64)
        assert tensors[f"{experts}.5.down_proj.weight_packed"].shape == (128, 32)
        assert tensors["model.layers.1.mlp.gate.weight"].dtype == torch.float32
        if format == "mxfp4":
            continue
        scales = {
            (expert, matrix): tensors[f"{experts}.{expert}.{matrix}_proj.weight_global_scale"].item()
            for expert in range(6)
            for matrix in ("gate", "up", "down")
        }
        assert all(scales[expert, "gate"] == scales[expert, "up"] for expert in range(6))
        assert len(set(scales.values())) > 6


def test_a_model_with_dense_layers_in_between_is_computed_by_both_kinds(source: Path, tmp_path: Path) -> None:
    config = read_config(source) | {"mlp_only_layers": [0]}
    mixed = AutoModelForCausalLM.from_config(type(AutoModelForCausalLM.from_pretrained(source).config)(**config))
    mixed.save_pretrained(tmp_path / "mixed")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "mixed" / name).write_bytes((source / name).read_bytes())
    quantize_checkpoint(tmp_path / "mixed", tmp_path / "nvfp4")
    dense = write_dense_checkpoint(tmp_path / "nvfp4", tmp_path / "dense", torch.float32)
    torch.testing.assert_close(said_by(tmp_path / "nvfp4", "nvfp4"), said_by_transformers(dense), rtol=0, atol=2e-5)
    settings = PolicyConfig(path=str(tmp_path / "nvfp4"), dtype="float32")
    modules = list(Policy(tmp_path / "nvfp4", settings, CPU, seed=1).modules())
    assert [sum(isinstance(module, kind) for module in modules) for kind in (GatedMLP, PackedExperts)] == [1, 1]


def test_many_small_tensors_are_read_at_once_and_large_ones_one_by_one(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_checkpoint(source, tmp_path / "base")
    expected = load_file(tmp_path / "base" / "model.safetensors")
    groups = [tuple(name for name in expected if f"experts.{expert}." in name) for expert in range(6)]
    opened: list[Path] = []
    monkeypatch.setattr(model_folder, "_open", lambda path: (opened.append(path), own(path))[1])
    for elements, files in ((2**26, 1), (1, len(groups))):
        monkeypatch.setattr(model_folder, "BATCH_ELEMENTS", elements)
        tensors = TensorFiles(tmp_path / "base")
        tensors.shapes()
        shapes = len(opened)
        found = list(tensors.read_groups(groups))
        assert len(opened) - shapes == 1 + files  # the first is for the shapes
        assert all(
            torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8))
            for group, read in zip(groups, found, strict=True)
            for name, tensor in zip(group, read, strict=True)
        )
    with pytest.raises(UserError, match="every quantized weight needs its scales; .* lacks model.nothing"):
        list(tensors.read_groups([("model.nothing",)]))


def test_stacked_experts_are_refused_with_the_way_to_store_them(source: Path, tmp_path: Path) -> None:
    stacked = tmp_path / "stacked"
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(stacked, save_original_format=False)
    with pytest.raises(UserError, match=r"stored one by one.*stacked in model.layers.0.mlp.experts.down_proj"):
        quantize_checkpoint(stacked, tmp_path / "quantized")
    loaded = AutoModelForCausalLM.from_pretrained(stacked)
    again = AutoModelForCausalLM.from_config(loaded.config)
    again.load_state_dict(loaded.state_dict())
    again.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()


def test_different_global_scales_within_an_expert_are_refused(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.experts.3.up_proj.weight_global_scale"] *= 2
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"share one global scale; got model.layers.0.mlp.experts.3.gate_proj"):
        said_by(tmp_path / "base", "nvfp4")


def test_what_experts_cannot_do_is_refused(source: Path, tmp_path: Path) -> None:
    full = PolicyConfig(path=str(source), quantization="none", finetune="full")
    with pytest.raises(UserError, match="trains an adapter, its experts are frozen; got model.policy.finetune full"):
        full.base_folder()
    for target in ("gate_proj", "down_proj", "experts.gate_up_proj", "mlp.experts", "experts.0.down_proj"):
        expected = rf"'{target}' matches none; choose .* among k_proj, .*v_proj; experts and router are frozen"
        with pytest.raises(UserError, match=expected):
            PolicyConfig(path=str(source), lora=LoraConfig(targets=("q_proj", target))).base_folder()
    with pytest.raises(UserError, match=r"calibration quantizes linears.*leave out --calibration"):
        calibrate_checkpoint(source, tmp_path / "gptq", ["1 + 1"], build_tokenizer())


def test_memory_of_experts_is_that_of_the_chosen_ones(source: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(source)
    config = base.config
    assert family_of(config.model_type).mlp_widths(config) == (2 * 64, 2)
    needs, mlp = {}, {}
    for chosen in (2, 4):
        config.num_experts_per_tok = chosen
        checkpointing = ActivationCheckpointing(base, False, False, torch.bfloat16)
        needs[chosen] = checkpointing.needed_bytes(MemorySettings(False), 4096) - checkpointing.needed_bytes(
            MemorySettings(False), 0
        )
        mlp[chosen] = working_bytes(Shape.of(config), MicroBatch(4096, checkpointing=False))["MLP"]
    # Gates, ups and products of two layers; in one, gradients of gates or ups beside a group's dense weights, and
    # copies of the input and results.
    assert needs[4] - needs[2] == pytest.approx(1.1 * 4096 * 2 * 3 * 2 * (2 * 64), rel=1e-6)
    assert mlp[4] - mlp[2] == 4096 * 2 * (2 * 64 + 2 * 2 * 128)
    shape = Shape.of(config)
    assert shape.linear_weights == sum(weight.numel() for name, weight in base.named_parameters() if "_proj" in name)
