"""`qerl quantize --format none`: the text model of a published model of text and images, for training in 16 bits."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_families import write_checkpoint, write_wrapped, write_wrapped_gemma4, write_wrapped_qwen
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.random_model import move_trained
from qerl_pl.cli.dry_run import shape_of
from qerl_pl.cli.export import _check_multimodal
from qerl_pl.cli.main import main
from qerl_pl.errors import UserError
from qerl_pl.formats.quantize import quantize_checkpoint
from qerl_pl.models.folder import TensorFiles, read_config
from qerl_pl.policy.adapter import rename_to_multimodal
from qerl_pl.policy.lora import LoraConfig
from qerl_pl.policy.policy import Policy, PolicyConfig

Writer = Callable[[Path, Path], Path]
ROWS = [[(7 * i + 3 * i * i + seed) % 500 + 5 for i in range(size)] for seed, size in ((1, 40), (2, 5), (3, 24))]
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
CASES = [
    ("qwen3.5", write_wrapped_qwen, UNTIED, False),
    ("qwen3.5", write_wrapped_qwen, TIED, True),
    ("qwen3.5-moe", write_wrapped_qwen, UNTIED, True),
    ("gemma-3", write_wrapped, TIED, False),
    ("gemma-3", write_wrapped, UNTIED, True),
    ("gemma-4", write_wrapped_gemma4, TIED, True),
]
SKIPPED = {
    "qwen3": "model.visual, mtp",
    "gemma-3": "multi_modal_projector, vision_tower",
    "gemma-4": ".*model.vision_tower",
}


def wrapped_config(kind: str, **inner: object) -> dict[str, object]:
    """config.json of a model of text and images, as far as a family is told by it."""
    return {"model_type": kind, "text_config": {"model_type": f"{kind}_text", **inner}, "vision_config": {}}


def in_shards(folder: Path) -> Path:
    """The folder, with its weights in three files."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors, key=lambda name: name[::-1])
    index = {name: f"model-{place % 3}.safetensors" for place, name in enumerate(names)}
    for file in set(index.values()):
        part = {name: tensors[name] for name in names if index[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def config_of(folder: Path) -> PolicyConfig:
    return PolicyConfig(path=str(folder), dtype="float32", quantization="none", lora=LoraConfig(rank=4))


def logprobs_of(policy: Policy) -> list[torch.Tensor]:
    """Of the tokens of packed sequences, but of the first."""
    lengths = torch.tensor([len(row) for row in ROWS])
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in ROWS], batch_first=True)
    mask = (torch.arange(ids.shape[1]) > 0) & (torch.arange(ids.shape[1]) < lengths[:, None])
    values = policy.token_values(ids, lengths, mask, 1.0)[0].detach()
    return [value[keep] for value, keep in zip(values, mask, strict=True)]


def assert_refused_alike(config: PolicyConfig, message: str) -> None:
    """By a start and by a dry run, in one line."""
    found = set()
    for start in (config.base_folder, lambda: shape_of(config)):
        with pytest.raises(UserError, match=message) as error:
            start()
        found.add(str(error.value))
    assert len(found) == 1 and "\n" not in found.pop()


@torch.no_grad()
def assert_same(policy: Policy, model: nn.Module) -> None:
    """Of a model of transformers each sequence is computed by itself."""
    for row, found in zip(ROWS, logprobs_of(policy), strict=True):
        ids = torch.tensor([row])
        logits = model.eval()(input_ids=ids).logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(found, logits.gather(1, ids[0, 1:, None])[:, 0], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("name", "write", "tied", "shards"), CASES)
def test_the_16_bit_text_model_trains_as_the_published_one_computes(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    write: Writer,
    tied: dict[str, bool],
    shards: bool,
) -> None:
    text = write_checkpoint(name, tmp_path / "text", tied)
    wrapped, base = write(text, tmp_path / "wrapped"), tmp_path / "base"
    document = read_config(wrapped)
    del document["text_config"]["tie_word_embeddings"]  # what the whole model has counts
    (wrapped / "config.json").write_text(json.dumps(document))
    (wrapped / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "temperature": 0.7}))
    if shards:
        in_shards(wrapped)
        monkeypatch.setattr("qerl_pl.models.folder.SHARD_BYTES", 2**19)
    refused = rf"of text alone; {wrapped} has a \w+_text in a \w+: .* by `qerl quantize`, in 16 bits by --format none"
    for quantization in ("none", "nvfp4"):
        assert_refused_alike(replace(config_of(wrapped), quantization=quantization), refused)
    with caplog.at_level(logging.INFO, "qerl_pl.formats.quantize"):
        assert main(["quantize", str(wrapped), str(base), "--format", "none"]) == 0
    skipped = next(value for key, value in SKIPPED.items() if name.startswith(key))
    assert re.search(rf"left out \d+ tensors that are no part of the text model: {skipped}\n", caplog.text)

    expected, stored = TensorFiles(text), TensorFiles(base)
    assert len(list(base.glob("*.safetensors"))) > 1 if shards else (base / "model.safetensors").is_file()
    assert stored.shapes() == expected.shapes() and not stored.skipped
    assert all(torch.equal(stored.read(one), expected.read(one)) for one in expected)
    assert ("lm_head.weight" in stored) != tied["tie_word_embeddings"]
    config, inner = read_config(base), read_config(wrapped)["text_config"]
    assert not any(
        re.search("vision|image|audio|text_config|quantization", key) for key in config.keys() - inner.keys()
    )
    assert config["model_type"] == inner["model_type"] and config["tie_word_embeddings"] == tied["tie_word_embeddings"]
    assert config["architectures"] == read_config(text)["architectures"]
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (base / file).read_bytes() == (wrapped / file).read_bytes()

    assert config_of(base).base_folder() == base and shape_of(config_of(base)) == shape_of(config_of(text))
    policy = Policy(base, config_of(base), torch.device("cpu"), seed=1).eval()
    model = AutoModelForImageTextToText.from_pretrained(wrapped, dtype=torch.float32)
    plain, ids = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), torch.tensor(ROWS[:1])
    with torch.no_grad():
        assert torch.equal(plain.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    assert_same(policy, model)
    before = logprobs_of(policy)
    move_trained(policy, 0.05)
    assert (torch.cat(before) - torch.cat(logprobs_of(policy))).abs().mean() > 0.01
    policy.save(tmp_path / "mine")
    _check_multimodal(str(wrapped), base, False)
    rename_to_multimodal(tmp_path / "mine", str(wrapped))
    assert_same(policy, PeftModel.from_pretrained(model, tmp_path / "mine"))


def test_the_command_refuses_a_published_folder_alike_with_and_without_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = write_wrapped_qwen(write_checkpoint("qwen3.5", tmp_path / "text"), tmp_path / "wrapped")
    monkeypatch.chdir(tmp_path)
    words, printed = ["-c", "quickstart", "--model.policy.path", str(wrapped)], []
    capsys.readouterr()  # of what has written the folder
    for option in (["--dry-run"], []):
        assert main(["fit", *option, *words]) == 2
        printed.append(capsys.readouterr())
    assert printed[0].err.splitlines() == printed[1].err.splitlines()[-1:] and not printed[0].out
    assert "take the text model out by `qerl quantize`, in 16 bits by --format none" in printed[0].err


FULL: dict[str, object] = {"finetune": "full", "quantization": "none"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
ALIKE: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "Qwen3.5": (wrapped_config("qwen3_5"), {}, "of text alone"),
    "Qwen3.5, ModelOpt": (wrapped_config("qwen3_5") | {"quantization_config": MODELOPT}, {}, "of text alone"),
    "Qwen3.5, in another format": (
        wrapped_config("qwen3_5") | {"quantization_config": {"quant_method": "awq"}},
        {"quantization": "none"},
        "of text alone",
    ),
    "Qwen3.5 mixture, replayed": (wrapped_config("qwen3_5_moe"), {"replay_routing": True}, "of text alone"),
    "Gemma 3, full": (wrapped_config("gemma3"), FULL, "has a gemma3_text in a gemma3: take the text model out"),
    "Gemma 4": (wrapped_config("gemma4"), {"quantization": "mxfp4"}, "has a gemma4_text in a gemma4: take"),
    "Gemma 4 E2B": (
        wrapped_config("gemma4", hidden_size_per_layer_input=256),
        {},
        "has a gemma4_text in a gemma4: take",
    ),
    "unknown": (
        {"model_type": "llava", "text_config": {"model_type": "olmo"}},
        {},
        "known family; .* is 'llava', none of llama",
    ),
    "dense, replayed": ({"model_type": "qwen3"}, {"replay_routing": True}, "needs a mixture of experts"),
    "delta nets, full": ({"model_type": "qwen3_5_text"}, FULL, "gated delta nets train an adapter"),
    "experts, full": ({"model_type": "qwen3_moe"}, FULL, "its experts are frozen"),
}


@pytest.mark.parametrize("case", ALIKE)
def test_a_dry_run_by_config_json_refuses_what_a_start_refuses(tmp_path: Path, case: str) -> None:
    document, settings, message = ALIKE[case]
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert_refused_alike(PolicyConfig(path=str(tmp_path), **settings), message)  # type: ignore[arg-type]


def test_what_has_no_16_bit_text_model_to_take_out_is_refused(tmp_path: Path) -> None:
    text = write_checkpoint("gemma-3", tmp_path / "text")
    wrapped = write_wrapped(text, tmp_path / "wrapped")
    quantize_checkpoint(text, tmp_path / "packed")
    (tmp_path / "unknown").mkdir()
    unknown = {"model_type": "llava", "text_config": {"model_type": "olmo"}}
    (tmp_path / "unknown" / "config.json").write_text(json.dumps(unknown))
    (tmp_path / "both").mkdir()
    config = read_config(wrapped) | {"quantization_config": read_config(tmp_path / "packed")["quantization_config"]}
    (tmp_path / "both" / "config.json").write_text(json.dumps(config))
    for file in (tmp_path / "packed").iterdir():
        if file.name != "config.json":
            (tmp_path / "both" / file.name).write_bytes(file.read_bytes())
    rounds_nothing = "--format none takes a text model out of one of text and images and rounds nothing"
    refused = {
        "text": (None, f"^{rounds_nothing}; {text} is a text model: use it as it is"),
        "wrapped": (8, f"^{rounds_nothing}; leave out --loftq_rank"),
        "packed": (None, "only 16-bit weights can be quantized; .*packed is NVFP4 already; use it as it is"),
        "both": (None, "only 16-bit weights .*both is NVFP4 already; take its text model out by --format nvfp4"),
        "unknown": (None, "a base model must be of a known family; model_type in .*unknown is 'olmo', none of llama"),
    }
    for name, (rank, message) in refused.items():
        with pytest.raises(UserError, match=message):
            quantize_checkpoint(tmp_path / name, tmp_path / "out", "none", loftq_rank=rank)
        assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="the destination must not exist"):
        quantize_checkpoint(wrapped, text, "none")
