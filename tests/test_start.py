"""Training that goes on from a saved adapter: PEFT's policy, its own KL reference, the same bits when resumed."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from fit_helpers import configuration, fit_here, fit_on_ranks
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from transformers import AutoModelForCausalLM

from qerl_pl.cli.main import main
from qerl_pl.errors import UserError
from qerl_pl.formats.dense_checkpoint import write_dense_checkpoint
from qerl_pl.modules import LoraConfig, Policy, PolicyConfig
from qerl_pl.policy.adapter import read_adapter, rename_to_multimodal

CPU = torch.device("cpu")
NORMS = ["input_layernorm", "post_attention_layernorm"]


def peft_adapter(base: Path, folder: Path, **settings: Any) -> Path:
    """An adapter that PEFT has made and saved, every number of it random."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**given | settings))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def taught(tiny_policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with trained norms of all linears, as the tests below go on from."""
    folder = tmp_path_factory.mktemp("taught") / "adapter"
    return peft_adapter(tiny_policy_dir, folder, target_modules="all-linear", modules_to_save=NORMS)


def config_of(base: Path, adapter: Path, **settings: Any) -> PolicyConfig:
    return PolicyConfig(path=str(base), dtype="float32", adapter=str(adapter), **settings)


def policy_of(config: PolicyConfig) -> Policy:
    return Policy(config.base_folder(), config, CPU, seed=1).eval()


def logprobs(policy: Policy, tokens: Tensor, reference: bool = False) -> Tensor:
    mask = torch.ones(tokens.shape, dtype=torch.bool)
    mask[:, 0] = False
    lengths = torch.full((len(tokens),), tokens.shape[1])
    with torch.no_grad():
        return policy.token_values(tokens, lengths, mask, 1.0, reference=reference)[0][:, 1:]


TOKENS = torch.randint(5, 300, (2, 12), generator=torch.Generator().manual_seed(3))
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank-stabilized": {"use_rslora": True, "init_lora_weights": "gaussian"},
    "layers": {"layers_to_transform": [1]},
    "qualified names": {"target_modules": ["self_attn.q_proj", "layers.0.mlp.down_proj"]},
    "a pattern, and norms": {"target_modules": r".*\.(up|gate)_proj", "modules_to_save": NORMS},
    "a pattern over layers": {"target_modules": r".*layers\.1\..*(q|down)_proj"},
    "a pattern of the first layer": {"target_modules": r".*layers\.0\..*\.(k|o)_proj"},
    "a pattern of different layers": {"target_modules": r".*(layers\.0\..*q_proj|layers\.1\.mlp\.\w+_proj)"},
    "a pattern of every layer": {"target_modules": r".*layers\.[01]\.self_attn\.v_proj"},
    "names of the first layer": {"target_modules": [f"model.layers.0.self_attn.{name}_proj" for name in "qv"]},
    "all layers by number": {"layers_to_transform": [0, 1]},
    "less one": {"target_modules": r".*\.(q|v)_proj", "exclude_modules": r".*layers\.0\..*v_proj"},
}


@pytest.mark.parametrize("quantization", ["nvfp4", "none"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_policy_starts_as_peft_loads_the_adapter(
    tiny_policy_dir: Path, tmp_path: Path, shape: str, quantization: Any
) -> None:
    folder = peft_adapter(tiny_policy_dir, tmp_path / "adapter", **SHAPES[shape])
    config = config_of(tiny_policy_dir, folder, quantization=quantization)
    policy = policy_of(config)
    dense = write_dense_checkpoint(config.base_folder(), tmp_path / "dense", torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    found, plain = logprobs(policy, TOKENS), expected(theirs)
    with torch.no_grad():
        torch.testing.assert_close(found, expected(peft.PeftModel.from_pretrained(theirs, folder)), atol=1e-4, rtol=0)
    assert (found - plain).abs().mean() > 0.01  # the adapter does something
    policy.save(tmp_path / "again")
    assert read_adapter(str(tmp_path / "again")).lora == read_adapter(str(folder)).lora == config.lora_spec
    again, start = (load_file(at / "adapter_model.safetensors") for at in (tmp_path / "again", folder))
    assert again.keys() == start.keys() and all(torch.equal(again[name], start[name]) for name in start)


OF_WEIGHTS: dict[str, tuple[Any, str, dict[int, str], tuple[str, ...]]] = {
    "every layer": (r".*\.(q|v)_proj", "", {0: "qv", 1: "qv", 2: "qv"}, ("q_proj", "v_proj")),
    "one": (r".*layers\.1\..*(q|v)_proj", "", {1: "q"}, ("layers.1.q_proj",)),
    "the first": (r".*layers\.0\..*(q|v)_proj", "", {0: "q"}, ("layers.0.q_proj",)),
    "the first two": (r".*layers\.[01]\.q_proj", "", {0: "q", 1: "q"}, ("layers.0.q_proj", "layers.1.q_proj")),
    "all but one": (r".*layers\.(?!1\.)\d\.q_proj", "", {0: "q", 2: "q"}, ("layers.0.q_proj", "layers.2.q_proj")),
    "all, by number": (r".*layers\.[0-2]\.q_proj", "base", {0: "q", 1: "q", 2: "q"}, ("q_proj",)),
    "one by one": ([f"layers.{i}.q_proj" for i in range(3)], "base", {0: "q", 1: "q", 2: "q"}, ("q_proj",)),
    "some by name": (["layers.0.q_proj"], "base", {0: "q"}, ("layers.0.q_proj",)),
    "suffixes": (["q_proj", "o_proj"], "base", {0: "q", 1: "q", 2: "q"}, ("q_proj",)),
}


@pytest.mark.parametrize("case", OF_WEIGHTS)
def test_targets_are_those_of_the_weights(tmp_path: Path, case: str) -> None:
    """Of a base of three layers, which is in a folder or out of reach."""
    own, base, held, targets = OF_WEIGHTS[case]
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"num_hidden_layers": 3}')
    config = {"base_model_name_or_path": str(tmp_path / base) if base else "a/base", "r": 4, "lora_alpha": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"target_modules": own}))
    names = [f"base_model.model.layers.{layer}.{name}_proj" for layer, some in held.items() for name in some]
    tensors = {f"{name}.lora_{factor}.weight": torch.ones(4, 4) for name in names for factor in "AB"}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert read_adapter(str(tmp_path)).lora.targets == targets
    if case != "one by one":  # which only the base tells from an adapter of its first layers
        assert read_adapter(str(tmp_path), layers=3).lora.targets == targets


def expected(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        logits = model(TOKENS).logits[:, :-1].log_softmax(-1)
    return logits.gather(-1, TOKENS[:, 1:, None]).squeeze(-1)


def test_the_reference_stays_the_start_whatever_is_trained(tiny_policy_dir: Path, taught: Path) -> None:
    policy = policy_of(config_of(tiny_policy_dir, taught))
    before, start = logprobs(policy, TOKENS), policy.weights(0, reference=True)
    assert torch.equal(logprobs(policy, TOKENS, reference=True), before)
    state = {name: tensor + 0.1 for name, tensor in policy.trained_state().items()}
    policy.load_trained_state(state)
    assert torch.equal(logprobs(policy, TOKENS, reference=True), before)
    assert (logprobs(policy, TOKENS) - before).abs().mean() > 0.01
    assert all(torch.equal(tensor, state[name]) for name, tensor in policy.trained_state().items())
    trained, reference = policy.weights(3), policy.weights(3, reference=True)
    assert trained.adapter is not None and reference.adapter is not None and start.adapter is not None
    for name, (a, b) in reference.adapter.items():
        assert torch.equal(a, start.adapter[name][0]) and torch.equal(a + 0.1, trained.adapter[name][0])
        assert torch.equal(b, start.adapter[name][1]) and torch.equal(b + 0.1, trained.adapter[name][1])
    assert len(reference.tensors) == 2 * 2
    assert all(torch.equal(t + 0.1, trained.tensors[name]) for name, t in reference.tensors.items())


def test_norms_may_train_from_an_adapter_that_has_none(tiny_policy_dir: Path, tmp_path: Path) -> None:
    folder = peft_adapter(tiny_policy_dir, tmp_path / "adapter")
    policy = policy_of(config_of(tiny_policy_dir, folder, train_norms=True))
    plain = policy_of(config_of(tiny_policy_dir, folder))
    assert len(policy.trained_state()) == len(plain.trained_state()) + 4
    torch.testing.assert_close(logprobs(policy, TOKENS), logprobs(plain, TOKENS), atol=1e-5, rtol=0)


CONTRADICTIONS: dict[str, tuple[Any, str]] = {
    "rank": (8, "has rank 4 and model.policy.lora.rank is 8; leave it out or set it to null"),
    "alpha": (16.0, "has alpha 8.0 and model.policy.lora.alpha is 16.0"),
    "targets": (("q_proj",), "has targets down_proj, .* and model.policy.lora.targets is q_proj"),
    "use_rslora": (True, "has use_rslora False and model.policy.lora.use_rslora is True"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_shape_that_contradicts_the_adapter_is_refused(tiny_policy_dir: Path, taught: Path, name: str) -> None:
    value, message = CONTRADICTIONS[name]
    with pytest.raises(UserError, match=message):
        config_of(tiny_policy_dir, taught, lora=LoraConfig(**{name: value})).base_folder()
    saved = read_adapter(str(taught)).lora
    same: Any = vars(saved)[name]
    same = same[::-1] if name == "targets" else same  # in any order
    assert config_of(tiny_policy_dir, taught, lora=LoraConfig(**{name: same}, dropout=0.5)).lora_spec.dropout == 0.5  # type: ignore[union-attr]


def test_qualified_targets_do_not_contradict_the_adapter_that_they_made(tiny_policy_dir: Path, tmp_path: Path) -> None:
    lora = LoraConfig(rank=4, targets=("self_attn.q_proj", "layers.0.mlp.down_proj"))
    made = Policy(tiny_policy_dir, PolicyConfig(str(tiny_policy_dir), quantization="none", lora=lora), CPU, seed=1)
    made.save(tmp_path / "adapter")
    again = policy_of(config_of(tiny_policy_dir, tmp_path / "adapter", quantization="none", lora=lora))
    assert again.trained_state().keys() == made.trained_state().keys()


def test_what_is_no_adapter_to_start_from_is_refused(tiny_policy_dir: Path, taught: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no adapter to go on from; got model.policy.adapter .* or merge the adapter"):
        config_of(tiny_policy_dir, taught, finetune="full", quantization="none")
    with pytest.raises(UserError, match="model.policy.adapter must be a folder or a model of the hub; 'no/adapter' is"):
        config_of(tiny_policy_dir, Path("no/adapter")).base_folder()
    with pytest.raises(UserError, match="has adapter_config.json; .* has none"):
        config_of(tiny_policy_dir, tiny_policy_dir).base_folder()
    broken = shutil.copytree(taught, tmp_path / "broken")
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])
    with pytest.raises(UserError, match="weights must be an intact safetensors file; .*broken"):
        config_of(tiny_policy_dir, broken).base_folder()
    some = {name: tensor for name, tensor in load_file(taught / "adapter_model.safetensors").items() if ".0." in name}
    save_file(some, weights)
    with pytest.raises(UserError, match="must hold this policy's adapter; .* set model.policy.adapter and model.poli"):
        policy_of(config_of(tiny_policy_dir, broken))
    saved = json.loads((broken / "adapter_config.json").read_text())
    others = {"target_parameters": ["experts.down_proj"], "alpha_pattern": {"q_proj": 3}, "rank_pattern": {"q_proj": 3}}
    for name, value in (others | {"use_dora": True, "init_lora_weights": "pissa", "bias": "all"}).items():
        (broken / "adapter_config.json").write_text(json.dumps(saved | {name: value}))
        with pytest.raises(UserError, match=f"adapter_config.json sets {name}; merge it into its base with PEFT"):
            config_of(tiny_policy_dir, broken).base_folder()


# Resuming -------------------------------------------------------------------------------------------------------------


def from_adapter(base: Path, adapter: Path, run: Path) -> dict[str, Any]:
    """A run of four rollouts from an adapter, with a KL term."""
    settings = configuration(base, run, summary=False)
    policy = {"path": str(base), "dtype": "float32", "adapter": str(adapter), "lora": {"dropout": 0.1}}
    settings["model"] |= {"policy": policy}
    settings["model"]["objective"]["init_args"] = {"beta": 0.1}
    settings["trainer"] |= {"max_epochs": 1}
    return settings


@pytest.mark.usefixtures("process_state")
def test_a_run_resumes_refuses_another_start_and_is_exported_without_its_own(
    tiny_policy_dir: Path, taught: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, other = (shutil.copytree(taught, tmp_path / name) for name in ("own", "other"))
    settings = from_adapter(tiny_policy_dir, own, tmp_path / "run")
    assert fit_here(settings) == 0
    weights = other / "adapter_model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights)
    for start in (str(other), "null"):
        shape = [] if start != "null" else ["--model.policy.lora.rank=4", "--model.policy.lora.alpha=8"]
        assert fit_here(settings, "--resume", "auto", "--model.policy.adapter", start, *shape) == 2
        assert "a run keeps its starting adapter" in capsys.readouterr().err
    adapter = tmp_path / "run" / "adapter" / "adapter_model.safetensors"
    expected = load_file(adapter)
    adapter.unlink()
    assert fit_here(settings, "--resume", str(tmp_path / "run" / "checkpoints" / "step=3.ckpt")) == 0
    shutil.rmtree(own)  # an export needs the checkpoint alone
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    assert json.loads((tmp_path / "exported" / "adapter_config.json").read_text())["r"] == 4
    for found in (load_file(adapter), load_file(tmp_path / "exported" / "adapter_model.safetensors")):
        assert found.keys() == expected.keys() and all(torch.equal(expected[name], found[name]) for name in expected)


def test_two_ranks_start_from_the_same_adapter(tiny_policy_dir: Path, taught: Path, tmp_path: Path) -> None:
    settings = from_adapter(tiny_policy_dir, taught, tmp_path / "run")
    settings["trainer"] |= {"devices": 2}
    settings["trainer"]["callbacks"].append({"class_path": "fit_helpers.KeepsEachRank"})
    settings["model"]["policy"]["lora"] = {"dropout": 0.0}
    settings["model"] |= {"update_epochs": 1, "minibatches": 1}
    statuses, output = fit_on_ranks(settings)
    assert statuses == [0, 0], output
    ranks = [load_file(tmp_path / "run" / f"rank{rank}.safetensors") for rank in (0, 1)]
    assert all(torch.equal(tensor, ranks[1][name]) for name, tensor in ranks[0].items())
    kl = [event.value for event in EventAccumulator(str(tmp_path / "run")).Reload().Scalars("policy/kl")]
    assert abs(kl[0]) < 1e-6 and len(kl) == 4 and min(kl[1:]) > 1e-4


def test_a_fraction_of_alpha_is_kept(tiny_policy_dir: Path, tmp_path: Path) -> None:
    folder = peft_adapter(tiny_policy_dir, tmp_path / "adapter", lora_alpha=2.5)
    assert read_adapter(str(folder)).lora.alpha == 2.5


def test_a_renamed_adapter_is_read_as_it_was(tiny_policy_dir: Path, tmp_path: Path) -> None:
    folder = peft_adapter(tiny_policy_dir, tmp_path / "adapter")
    before, tensors = read_adapter(str(folder)).lora, read_adapter(str(folder)).tensors()
    rename_to_multimodal(folder, str(tiny_policy_dir))
    after = read_adapter(str(folder))
    assert after.lora == before and after.tensors().keys() == tensors.keys()
    targets = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    linears = ("language_model.layers.0.self_attn.q_proj", "visual.blocks.0.attn.q_proj")
    assert [re.fullmatch(targets, f"model.{linear}") is not None for linear in linears] == [True, False]
