"""gpt-oss as it is published: 4-bit experts in stacks, sinks, YaRN, against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from model_copies import copy_of
from qerl_kernels import select_backend
from safetensors.torch import load_file
from test_experts import said_by, said_by_transformers
from tiny_families import PUBLISHED, write_checkpoint, write_published
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from qerl_pl.cli.dry_run import _with_engine
from qerl_pl.cli.main import main
from qerl_pl.cli.quantize import calibrate_checkpoint
from qerl_pl.engines import EngineSpec, VLLMEngine
from qerl_pl.engines.vllm import worker
from qerl_pl.errors import UserError
from qerl_pl.formats import quantize
from qerl_pl.formats.base import FORMATS, format_of
from qerl_pl.formats.dense_checkpoint import iterate_dense, validate_checkpoint, write_dense_checkpoint
from qerl_pl.formats.fp4 import MXFP4StacksFormat
from qerl_pl.formats.quantize import local_folder, quantize_checkpoint
from qerl_pl.models.families import family_of
from qerl_pl.models.folder import TensorFiles, read_config
from qerl_pl.models.memory_plan import MicroBatch, RunPlan, run_memory
from qerl_pl.models.shape import Shape
from qerl_pl.modules import PolicyConfig
from qerl_pl.toy.tokenizer import build_tokenizer

STACK = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 16-bit checkpoint, as transformers saves it."""
    return write_checkpoint("gpt-oss", tmp_path_factory.mktemp("gpt") / "source")


@pytest.fixture(scope="module")
def published(source: Path) -> Path:
    """The same as published ones are."""
    return write_published(source, source.with_name("published"))


def bits(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: tensor.contiguous().view(torch.uint8).flatten().tolist() for name, tensor in tensors.items()}


def test_a_published_checkpoint_is_read_as_transformers_reads_it(published: Path, tmp_path: Path) -> None:
    base = PolicyConfig(path=str(published), quantization="mxfp4").base_folder()
    assert base == published  # taken as it is
    assert [other for other in FORMATS if other.recognises(read_config(base)["quantization_config"])] == [
        format_of(base)
    ]
    dequantized = Mxfp4Config(dequantize=True)  # type: ignore[no-untyped-call]
    theirs = AutoModelForCausalLM.from_pretrained(
        published, dtype=torch.float32, quantization_config=dequantized, attn_implementation="eager"
    )
    ours = dict(iterate_dense(published, torch.float32))
    assert bits(ours) == bits(theirs.state_dict())
    shapes = format_of(base).dense_shapes(TensorFiles(base))
    assert shapes == {name: tuple(tensor.shape) for name, tensor in ours.items()}
    write_dense_checkpoint(published, tmp_path / "dense", torch.float32)
    torch.testing.assert_close(said_by(published, "mxfp4"), said_by_transformers(tmp_path / "dense"), rtol=0, atol=2e-5)


def test_any_codes_and_scales_are_transformers_weights_in_the_packed_stack(published: Path, tmp_path: Path) -> None:
    """Every byte there is, and scales so small and large that bfloat16 still holds all values."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 10, 4, 16), generator=generator, dtype=torch.uint8)
    blocks.view(-1)[:256] = torch.arange(256)
    scales = torch.randint(3, 250, (3, 10, 4), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)

    class Stored(TensorFiles):
        def __init__(self) -> None:
            pass

        def read(self, name: str) -> Tensor:
            return {f"{STACK}_blocks": blocks, f"{STACK}_scales": scales}[name]

    stack = MXFP4StacksFormat().expert_stack(STACK, Stored(), torch.bfloat16, lambda tensor: tensor)
    assert stack.shape == (3, 10, 128) and stack.tensors()["weight_packed"].data_ptr() == blocks.data_ptr()
    dense = stack.dense(0, 3, torch.bfloat16)
    assert torch.equal(dense.transpose(1, 2), expected) and torch.equal(stack.dense(1, 2, torch.bfloat16), dense[1:2])


def test_sixteen_bits_are_quantized_to_what_is_published(source: Path, published: Path, tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    assert main(["quantize", str(source), str(folder), "--format", "mxfp4"]) == 0
    assert read_config(folder)["quantization_config"] == PUBLISHED["quantization_config"]
    found, expected = (load_file(path / "model.safetensors") for path in (folder, published))
    assert {name: tensor.shape for name, tensor in found.items()} == {name: t.shape for name, t in expected.items()}
    assert {name for name in found if found[name].dtype == torch.uint8} == {
        name for name in expected if expected[name].dtype == torch.uint8
    }
    report = json.loads((folder / "quantization_report.json").read_text())["relative_squared_error"]
    dense, exact = dict(iterate_dense(folder, torch.float32)), dict(iterate_dense(source, torch.float32))
    assert set(report) == {name for name in dense if not torch.equal(dense[name], exact[name])}
    by_lookup = dict(iterate_dense(published, torch.float32))
    for name, error in report.items():
        squares = exact[name].square().sum()
        assert error == pytest.approx(((dense[name] - exact[name]).square().sum() / squares).item(), rel=1e-4)
        # Largest values are not cut off at 6, as the table's are: a little less error.
        assert 0.8 < error / ((by_lookup[name] - exact[name]).square().sum() / squares).item() < 1
    # The cached copy is the same, and sixteen bits train, too.
    cached = PolicyConfig(path=str(source), quantization="mxfp4").base_folder()
    assert bits(load_file(cached / "model.safetensors")) == bits(found)
    torch.testing.assert_close(said_by(source, "none"), said_by_transformers(source), rtol=0, atol=2e-5)


def test_what_gpt_oss_cannot_do_is_refused(source: Path, published: Path, tmp_path: Path) -> None:
    for name, label in (("nvfp4", "NVFP4"), ("nf4", "NF4")):
        with pytest.raises(UserError, match=rf"{label} holds no experts in stacks.*; {source} has such; use mxfp4"):
            quantize_checkpoint(source, tmp_path / name, name)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"nvfp4 needs 16-bit weights; {published} is MXFP4; set .* to mxfp4"):
        PolicyConfig(path=str(published)).base_folder()
    with pytest.raises(UserError, match=f"only 16-bit weights can be quantized; {published} is MXFP4 already"):
        quantize_checkpoint(published, tmp_path / "again", "mxfp4")
    with pytest.raises(UserError, match="trains an adapter, its experts are frozen; got model.policy.finetune full"):
        PolicyConfig(path=str(source), quantization="none", finetune="full").base_folder()
    with pytest.raises(UserError, match=r"calibration quantizes linears.*leave out --calibration"):
        calibrate_checkpoint(source, tmp_path / "gptq", ["1 + 1"], build_tokenizer(), "mxfp4")


@pytest.mark.parametrize(
    ("key", "value", "assumed"),
    [
        ("swiglu_limit", 5.0, "7.0"),
        ("rms_norm_eps", 1e-6, "1e-05"),
        ("layer_types", ["full_attention"] * 2, r"\['sliding_attention', 'full_attention'\]"),
    ],
)
def test_vllm_is_not_given_what_it_would_compute_otherwise(
    published: Path, tmp_path: Path, key: str, value: object, assumed: str
) -> None:
    folder = copy_of(published, tmp_path / "other", **{key: value})
    spec = EngineSpec(folder, torch.float32, torch.device("cpu"), 4, ("q_proj",), 96)
    with pytest.raises(UserError, match=f"every gpt_oss with {key} {assumed}; config.json has .*TransformersEngine"):
        VLLMEngine().launch(spec)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, "marlin"), ({"share_weights": False}, "auto"), ({"linear_backend": "auto"}, "auto")],
)
def test_vllm_is_asked_for_marlins_experts_where_the_trainer_shares_them(
    published: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], expected: str
) -> None:
    import vllm

    asked: list[tuple[str, str]] = []

    def start(**settings: Any) -> None:
        asked.append((settings["moe_backend"], settings["linear_backend"]))
        raise ValueError("no GPU")

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(vllm, "LLM", start)
    monkeypatch.setattr(worker, "worker_class", lambda *_: "worker")  # as in a build for GPUs
    spec = EngineSpec(published, torch.bfloat16, torch.device("cuda"), 4, ("q_proj",), 96)
    try:
        with pytest.raises(UserError, match="no GPU"):
            VLLMEngine(**settings).launch(spec)
    finally:
        select_backend("torch")
    assert asked == [(expected, "auto")]


def test_a_download_leaves_out_the_weights_in_another_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["config.json", "model-00000-of-00002.safetensors", "chat_template.jinja", "tokenizer.json"]
    others = ["original/model.safetensors", "metal/model.bin", "README.md", "consolidated.safetensors"]

    def download(name: str, **patterns: list[str]) -> str:
        assert name == "openai/gpt-oss-20b"
        for file in filter_repo_objects(files + others, **patterns):
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(quantize, "snapshot_download", download)
    assert local_folder("openai/gpt-oss-20b") == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


@pytest.mark.parametrize("gone", ["model.layers.1.mlp.experts.gate_up_proj_blocks", "model.layers.0.self_attn.sinks"])
def test_a_published_checkpoint_that_lacks_a_tensor_is_refused_by_its_name(
    published: Path, tmp_path: Path, gone: str
) -> None:
    tensors = load_file(published / "model.safetensors")
    del tensors[gone]
    with pytest.raises(UserError, match=f"lacks {gone.removesuffix('_blocks')}"):
        validate_checkpoint(copy_of(published, tmp_path / "broken", tensors))


def test_the_published_config_says_positions_and_memory(published: Path, tmp_path: Path) -> None:
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED))
    assert PolicyConfig(path=str(folder)).positions() == 131072  # not YaRN's 32 times as many
    assert PolicyConfig(path=str(published)).positions() == 256
    shape = Shape.of(AutoConfig.from_pretrained(folder))
    experts, attention, embeddings = 24 * 32 * 3 * 2880**2, 24 * 2880 * (2 * 4096 + 2 * 512), 2 * 201088 * 2880
    assert shape.linear_weights == experts + attention and shape.embedding_weights == embeddings
    assert family_of("gpt_oss").mlp_widths(AutoConfig.from_pretrained(folder)) == (4 * 2880, 4)
    plan = RunPlan(shape, MicroBatch(4096, rank=32), quantization="mxfp4", targets=("q_proj", "o_proj"))
    expected = 4.25 / 8 * experts + 2 * (attention + embeddings)
    assert run_memory(plan).update["base model"] == pytest.approx(expected)
    shared = run_memory(_with_engine(plan, VLLMEngine(), 4096, 4096)).update
    unshared = 4.25 / 8 * 24 * 32 * 3 * (3072 * 2944 - 2880**2)
    assert shared["base model"] == pytest.approx(expected)
    assert shared["base model, what the engine does not share"] == pytest.approx(unshared)
    for engine in (VLLMEngine(share_weights=False), VLLMEngine(linear_backend="auto")):
        found = run_memory(_with_engine(plan, engine, 4096, 4096)).update
        assert found["base model, the engine's copy"] == pytest.approx(expected)
        assert "base model, what the engine does not share" not in found
