"""The ways out of `qerl export`: what rounding leaves of an adapter, and what vLLM and llama.cpp's converter read."""

import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fit_helpers import configuration
from peft import PeftModel
from safetensors.torch import load_file
from short_run import data, trainer_of
from tiny_families import write_checkpoint, write_wrapped
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from qerl_pl.algorithm import GRPO
from qerl_pl.cli.export import _check_multimodal, _Merged
from qerl_pl.cli.main import main
from qerl_pl.cli.model_card import gguf_line
from qerl_pl.errors import UserError
from qerl_pl.formats.dense_checkpoint import iterate_dense, write_dense_checkpoint
from qerl_pl.formats.quantize import in_format
from qerl_pl.modules import PolicyConfig, QeRLModule
from qerl_pl.policy.adapter import read_adapter
from qerl_pl.toy.tokenizer import CHAT_TEMPLATE, EOS
from qerl_pl.types import PolicyWeights

pytestmark = pytest.mark.usefixtures("process_state")


# Rounding -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantization", "size", "low", "high"),
    [
        ("nvfp4", 0.005, -0.02, 0.02),
        ("nvfp4", 0.01, -0.02, 0.02),
        ("nvfp4", 0.03, 0.05, 0.2),
        ("nvfp4", 0.1, 0.7, 0.9),
        ("nvfp4", 0.2, 0.9, 1.1),
        ("mxfp4", 0.01, -0.02, 0.02),
        ("nf4", 0.01, -0.02, 0.1),
        ("nf4", 0.2, 0.8, 1.1),
    ],
)
def test_rounding_takes_small_changes_and_leaves_large_ones(
    tiny_policy_dir: Path, quantization: str, size: float, low: float, high: float
) -> None:
    """Changes of random factors, of so much of the weights' norm."""
    base = in_format(tiny_policy_dir, quantization)
    dense, generator, adapter = dict(iterate_dense(base, torch.float32)), torch.Generator().manual_seed(0), {}
    for name in (name for name in dense if "_proj.weight" in name):
        (rows, columns), linear = dense[name].shape, name.removesuffix(".weight")
        a, b = torch.randn(4, columns, generator=generator), torch.randn(rows, 4, generator=generator)
        adapter[linear] = (a, b * (size * dense[name].norm() / (b @ a).norm() / 2.0))
    merged = _Merged(PolicyWeights(0, adapter, scaling=2.0), base)
    for name, tensor in dense.items():
        found = merged(name, tensor)
        assert adapter.keys() >= {name.removesuffix(".weight")} or found is tensor
    kept = merged.kept_by_rounding()
    assert kept is not None and low <= kept <= high


def test_a_base_in_16_bits_and_an_adapter_of_zeros_have_no_such_share(tiny_policy_dir: Path) -> None:
    q_proj = "model.layers.0.self_attn.q_proj"
    for quantization, factor, name in (("none", 1.0, q_proj), ("nvfp4", 0.0, q_proj), ("nvfp4", 1.0, "lm_head")):
        merged = _Merged(
            PolicyWeights(0, {name: (torch.ones(1, 128), torch.full((128, 1), factor))}, scaling=1.0),
            in_format(tiny_policy_dir, quantization),
        )
        merged(f"{name}.weight", torch.zeros(128, 128))
        assert merged.kept_by_rounding() is None


def test_the_model_of_full_fine_tuning_is_written_as_it_trained_merged_or_not(
    tiny_policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = PolicyConfig(path=str(tiny_policy_dir), quantization="none", dtype="float32", finetune="full")
    module = QeRLModule(policy, GRPO(beta=0.0))
    trainer_of(tmp_path / "run", limit_train_batches=1, limit_val_batches=0).fit(module, datamodule=data())
    words = ["export", str(tmp_path / "run")]
    for name, merge in (("plain", []), ("merged", ["--merge"])):
        assert main([*words, str(tmp_path / name), *merge]) == 0
        saved = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(saved[key], tensor) for key, tensor in module.policy.trained_state().items())
        said = capsys.readouterr().out
        assert "wrote the complete model to " in said and "as GGUF: " in said and "rounded to" not in said
    assert main([*words, str(tmp_path / "two"), "--multimodal", str(tiny_policy_dir)]) == 2
    assert "renames an adapter's weights; got " in capsys.readouterr().err


# A text model of a multimodal one -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "is_model", "message"),
    [
        ("qwen2", True, r"renames an adapter's weights; got \S+ and a complete model to write; leave one out"),
        (
            "gemma3_text",
            False,
            r"text model is the run's base, qwen2; \S+ has gemma3_text; name the model that `qerl q",
        ),
        (None, False, r"text model is the run's base, qwen2; \S+ has none, or cannot be reached; name the model that"),
        ("qwen2", False, None),
    ],
)
def test_an_adapter_is_renamed_for_a_model_that_has_its_base(
    tiny_policy_dir: Path, tmp_path: Path, inner: str | None, is_model: bool, message: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"model_type": inner}} if inner else {}))
    with pytest.raises(UserError, match=message) if message else nullcontext():
        _check_multimodal(str(tmp_path), tiny_policy_dir, is_model)


@pytest.mark.vllm
@pytest.mark.parametrize("module", ["gemma3_mm", "gemma4_mm", "qwen3_vl"])  # Qwen3.5's takes its names from the last
def test_vllm_has_the_names_of_multimodal_models_that_an_adapter_gets(module: str) -> None:
    """By its source: the modules import torchvision."""
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None and vllm.origin is not None
    source = Path(vllm.origin).with_name("model_executor") / "models" / f"{module}.py"
    assert '"model.language_model.": "language_model.model."' in source.read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("format", ["nvfp4", "none"])
def test_an_export_for_a_multimodal_model_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    wrapped = write_wrapped(write_checkpoint("gemma-3", tmp_path / "text"), tmp_path / "wrapped")
    base = tmp_path / "base"
    assert main(["quantize", str(wrapped), str(base), "--format", format]) == 0
    *_, printed = exported(base, tmp_path, capsys, format)
    assert f"serve it: vllm serve {base} --enable-lora --lora-modules mine={tmp_path / 'mine'} " in printed
    mine = tmp_path / "multimodal"
    assert main(["export", str(tmp_path / "run"), str(mine), "--multimodal", str(wrapped)]) == 0
    line = f"vllm serve {wrapped} --enable-lora --lora-modules multimodal={mine} --max-lora-rank 8"
    assert f"serve it: {line}\n" in capsys.readouterr().out
    assert "vllm serve BASE --enable-lora --lora-modules multimodal=multimodal" in (mine / "README.md").read_text()
    prefix = "base_model.model.model.language_model.layers."
    assert all(name.startswith(prefix) for name in load_file(mine / "adapter_model.safetensors"))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "plain")]) == 0
    read = [read_adapter(str(folder)) for folder in (mine, tmp_path / "plain")]
    plain = read[1].tensors()
    assert read[0].lora == read[1].lora and read[0].tensors().keys() == plain.keys()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in read[0].tensors().items())
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "two"), "--merge", "--multimodal", str(wrapped)]) == 2
    assert not (tmp_path / "two").exists()


# Other programs -------------------------------------------------------------------------------------------------------


def exported(
    base: Path, folder: Path, capsys: pytest.CaptureFixture[str], quantization: str = "nvfp4"
) -> tuple[Path, Path, str]:
    """Adapter and merged weights of a run of two rollouts, moved away from it, and what was printed."""
    settings: dict[str, Any] = configuration(base, folder / "run")
    settings["model"]["policy"]["quantization"] = quantization
    settings["model"]["policy"]["train_norms"] = False
    settings["data"]["init_args"]["max_prompt_tokens"] = 240
    settings["trainer"] |= {
        "max_epochs": 1,
        "limit_train_batches": 2,
        "callbacks": settings["trainer"]["callbacks"][:3],
    }
    (folder / "fit.yaml").write_text(yaml.safe_dump(settings))
    assert main(["fit", "-c", str(folder / "fit.yaml")]) == 0
    capsys.readouterr()
    assert main(["export", str(folder / "run"), str(folder / "mine")]) == 0
    assert main(["export", str(folder / "run"), str(folder / "merged"), "--merge"]) == 0
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    moved = [(folder / name).rename(elsewhere / name) for name in ("mine", "merged")]
    return moved[0], moved[1], capsys.readouterr().out


def test_a_run_is_exported_from_anywhere_and_after_its_base_has_moved(
    tmp_path: Path, tiny_policy_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_policy_dir, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    mine, *_ = exported(Path("base"), tmp_path, capsys, "none")
    monkeypatch.chdir("/")
    words = ["export", str(tmp_path / "run")]
    assert main([*words, str(tmp_path / "here")]) == 0
    (tmp_path / "base").rename(tmp_path / "moved")
    assert main([*words, str(tmp_path / "there")]) == 2
    assert "a base that has been moved is named by --base" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "there"), "--base", str(tmp_path / "moved")]) == 0
    weights = [
        load_file(folder / "adapter_model.safetensors") for folder in (mine, tmp_path / "here", tmp_path / "there")
    ]
    assert all(torch.equal(tensor, one[name]) for one in weights[1:] for name, tensor in weights[0].items())
    assert f"vllm serve {tmp_path / 'moved'} " in capsys.readouterr().out


SERVED = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
model, adapter, rank, ids = json.loads(sys.argv[1])
lora = {"enable_lora": True, "max_lora_rank": rank} if adapter else {}
llm = LLM(model, dtype="float32", max_model_len=64, enforce_eager=True, kv_cache_memory_bytes=1 << 26, **lora)
(found,) = llm.generate(
    {"prompt_token_ids": ids},
    SamplingParams(max_tokens=1, prompt_logprobs=0),
    use_tqdm=False,
    lora_request=LoRARequest("mine", 1, adapter) if adapter else None,
)
print(json.dumps([each[token].logprob for token, each in zip(ids[1:], found.prompt_logprobs[1:])]))
"""
"""Log-probabilities of a prompt by vLLM as it is installed, without this package."""


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["qwen2", "gemma-3"])
def test_vllm_reads_adapter_and_merged_weights_from_another_folder(
    tiny_policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The adapter stands on a dense copy of its base: no CPU multiplies NVFP4 in vLLM."""
    source = tiny_policy_dir if name == "qwen2" else write_checkpoint(name, tmp_path / "text")
    adapter, merged, printed = exported(source, tmp_path, capsys)
    serving, rank = re.findall(r"serve it: vllm serve (\S+) --enable-lora .*--max-lora-rank (\d+)", printed)[0]
    assert f"serve it: vllm serve {tmp_path / 'merged'}\n" in printed
    dense = write_dense_checkpoint(Path(serving), tmp_path / "dense", torch.float32)
    ids = list(range(40, 80))

    def by_vllm(model: Path, *lora: object) -> torch.Tensor:
        given = json.dumps([str(model), *map(str, lora[:1]), *lora[1:], ids] if lora else [str(model), None, 0, ids])
        # After its result vLLM's process may abort in its own threads.
        run = subprocess.run([sys.executable, "-c", SERVED, given], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        (line,) = (line for line in run.stdout.splitlines() if line.startswith("[-"))
        return torch.tensor(json.loads(line))

    def by_transformers(model: Any) -> torch.Tensor:
        with torch.no_grad():
            logprobs = model.eval()(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]

    plain = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    before = by_transformers(plain)
    adapted = by_transformers(PeftModel.from_pretrained(plain, adapter))
    assert (adapted - before).abs().max() > 0.05
    torch.testing.assert_close(by_vllm(dense, adapter, int(rank)), adapted, rtol=0, atol=1e-3)
    expected = by_transformers(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32))
    torch.testing.assert_close(by_vllm(merged), expected, rtol=0, atol=1e-3)
    assert (expected - adapted).abs().max() < 0.2 * (adapted - before).abs().max()  # weights in bfloat16


def write_llama(folder: Path) -> Path:
    """A tiny Llama with a tokenizer of characters and bytes: the converter knows others by their hash alone."""
    write_checkpoint("llama-3", folder)
    special = ["<unk>", "<|pad|>", "<|bos|>", EOS, "<|system|>", "<|user|>", "<|assistant|>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(32, 127)), "\u2581"]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    names = dict(zip(("unk_token", "pad_token", "bos_token"), special, strict=False), eos_token=EOS)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **names)
    fast.add_special_tokens({"additional_special_tokens": special[4:]})
    fast.save_pretrained(folder)
    return folder


@pytest.mark.nightly
def test_the_printed_line_converts_merged_weights_to_gguf_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, merged, printed = exported(write_llama(tmp_path / "llama"), tmp_path, capsys)
    assert f"as GGUF: {gguf_line(str(tmp_path / 'merged'))}\n" in printed
    _, _, command = gguf_line(str(merged)).partition(" && ")
    packages = Path(sys.prefix) / "gguf"  # a folder of its own: its packages have names that others use
    program, *args = shlex.split(command)
    environment = {**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, packages / "bin" / program, *args], env=environment, cwd=tmp_path, check=True)
    monkeypatch.syspath_prepend(packages)
    reader = importlib.import_module("gguf").GGUFReader(merged.with_suffix(".gguf"))
    found = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    stored, heads = load_file(merged / "model.safetensors"), {"attn_q": 4, "attn_k": 2}
    compared = 0
    for name, held in found.items():
        if (source := NAMES.get(re.sub(r"blk\.\d+\.", "", name).removesuffix(".weight"))) is None:
            continue
        layer = re.match(r"blk\.(\d+)\.", name)
        expected = stored[(f"model.layers.{layer[1]}.{source}" if layer else source) + ".weight"]
        if kind := heads.get(name.split(".")[-2]):  # llama.cpp rotates neighbours, transformers halves
            expected = expected.unflatten(0, (kind, 2, -1)).transpose(1, 2).flatten(0, 2)
        held = held.view(torch.bfloat16) if held.dtype == torch.uint8 else held
        assert torch.equal(held.float().flatten(), expected.float().flatten()), name
        compared += 1
    assert compared == len(stored)


NAMES = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{
        f"attn_{short}": f"self_attn.{long}_proj" for short, long in zip(("q", "k", "v", "output"), "qkvo", strict=True)
    },
    **{f"ffn_{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")},
}
"""Names of llama.cpp's tensors, and transformers'."""


def test_a_merge_takes_trained_norms(tiny_policy_dir: Path) -> None:
    name, trained = "model.layers.0.input_layernorm.weight", torch.full((128,), 3.0)
    merged = _Merged(PolicyWeights(0, {}, 1.0, {name: trained}), tiny_policy_dir)
    assert merged(name, torch.ones(128)) is trained
