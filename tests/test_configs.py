"""What a user configures: shipped YAML files, --help, --print_config, and a bare installation."""

import importlib
import re
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_helpers import built
from jsonargparse import ArgumentParser, Namespace

import qerl_pl.algorithm.objectives
import qerl_pl.callbacks
import qerl_pl.datamodules
import qerl_pl.engines
import qerl_pl.rewards
from qerl_pl.algorithm.objectives import Objective
from qerl_pl.callbacks import AdaptiveQuantizationNoise, RolloutCallback
from qerl_pl.cli.main import COMMANDS, main
from qerl_pl.datamodules import PromptDataModule
from qerl_pl.types import SamplingConfig

ROOT = Path(__file__).parents[1]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
SIZES = ("3b", "7b", "14b", "32b")
BASELINES = {
    "bf16": {".model.policy.quantization": "none"},
    "mxfp4": {".model.policy.quantization": "mxfp4"},
    "nf4": {".model.policy.quantization": "nf4"},
    "full": {
        ".model.policy.quantization": "none",
        ".model.policy.finetune": "full",
        ".model.optimizer.class_path": "bitsandbytes.optim.AdamW8bit",
        ".model.optimizer.init_args.lr": 1e-6,
    },
}
"""What each changes of gsm8k_grpo_7b.yaml, besides its folder and the noise that it leaves out."""
FAMILIES = ("gsm8k_grpo", "gsm8k_dapo", "bigmath_grpo", "bigmath_dapo")


@pytest.mark.parametrize("objective", [one for one in Objective.__subclasses__() if one.__module__ != __name__])
def test_an_objective_that_is_named_has_its_own_numbers(tmp_path: Path, objective: type[Objective]) -> None:
    settings = yaml.safe_load(QUICKSTART.read_text())
    settings["model"]["objective"] = {"class_path": f"qerl_pl.algorithm.objectives.{objective.__name__}"}
    path = tmp_path / "named.yaml"
    path.write_text(yaml.safe_dump(settings))
    assert built("fit", "-c", str(path)).model.objective == objective()


def callback(settings: Namespace, kind: type) -> Any:
    return next((found for found in settings.trainer.callbacks if isinstance(found, kind)), None)


def flat(node: Any, path: str = "") -> dict[str, Any]:
    """Leaves of a YAML document by path; items of a list under their class."""
    if isinstance(node, dict):
        return {p: v for key, value in node.items() for p, v in flat(value, f"{path}.{key}").items()}
    if isinstance(node, list) and node and isinstance(node[0], dict):
        return {p: v for item in node for p, v in flat(item, f"{path}.{item['class_path'].rpartition('.')[2]}").items()}
    return {path: node}


def document(name: str) -> dict[str, Any]:
    return flat(yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text()))


def different(one: str, other: str) -> set[str]:
    a, b = document(one), document(other)
    return {key.rpartition(".")[2] for key in a.keys() | b.keys() if a.get(key) != b.get(key)}


# Shipped files --------------------------------------------------------------------------------------------------------


def test_every_family_and_size_is_shipped() -> None:
    expected = {"quickstart", "gsm8k_cpu", "evaluate"} | {f"{f}_{size}" for f in FAMILIES for size in SIZES}
    expected |= {f"gsm8k_grpo_{baseline}_7b" for baseline in BASELINES}
    assert {path.stem for path in SHIPPED} == expected


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_builds_what_it_names(path: Path) -> None:
    if path.stem == "gsm8k_grpo_full_7b":
        pytest.importorskip("bitsandbytes")  # its optimizer's
    settings = built("fit", "-c", str(path))
    sampler = callback(settings, RolloutCallback)
    rollout = sampler.config
    assert isinstance(settings.data, PromptDataModule) and isinstance(settings.model.objective, Objective)
    assert settings.trainer.default_root_dir == f"runs/{path.stem}"
    completions = settings.data.batch_size * rollout.group_size
    assert completions % settings.model.update.minibatches == 0
    longest = settings.data.max_prompt_tokens + rollout.sampling.max_tokens
    assert settings.model.update.micro_batch_tokens is None or settings.model.update.micro_batch_tokens >= longest
    for reward in rollout.rewards:
        if reward.name == "overlong":
            assert reward.max_length == rollout.sampling.max_tokens
    if path.stem not in ("quickstart", "gsm8k_cpu", "evaluate"):
        assert isinstance(sampler.engine, qerl_pl.engines.VLLMEngine)
        assert settings.model.policy_config.path.lower() == f"qwen/qwen2.5-{path.stem.rpartition('_')[2]}-instruct"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_key_of_a_shipped_file_has_a_comment(path: Path) -> None:
    keys = re.compile(r"\s+(- )?[a-z_]+: \S")  # of a value; a key that only opens a block has none
    bare = [line for line in path.read_text().splitlines() if keys.match(line) and "#" not in line]
    assert [line for line in bare if "class_path:" not in line] == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [size for size in SIZES if size != "7b"])
def test_sizes_of_a_family_differ_only_where_size_matters(family: str, size: str) -> None:
    allowed = {"path", "default_root_dir", "micro_batch_tokens", "kv_cache_gib", "max_num_seqs"}
    if family.startswith("bigmath") and size == "32b":
        allowed |= {"levels"}  # the paper's 32B learns from harder problems
    assert {"path", "default_root_dir"} <= different(f"{family}_7b", f"{family}_{size}") <= allowed


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_differs_only_in_what_it_is_named_for_and_noise(name: str) -> None:
    a, b = document("gsm8k_grpo_7b"), document(f"gsm8k_grpo_{name}_7b")
    changed = {key: b.get(key) for key in a.keys() | b.keys() if a.get(key) != b.get(key)}
    noise = {key for key in a if ".AdaptiveQuantizationNoise." in key}
    assert noise and not noise & b.keys()
    assert changed == BASELINES[name] | {".trainer.default_root_dir": f"runs/gsm8k_grpo_{name}_7b"} | dict.fromkeys(
        noise
    )


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "nf4", "none"])
def test_one_line_changes_the_format(name: str) -> None:
    settings = built("fit", "-c", str(ROOT / "configs" / "gsm8k_grpo_7b.yaml"), "--model.policy.quantization", name)
    assert settings.model.policy_config.quantization == name
    assert callback(settings, AdaptiveQuantizationNoise) is not None  # with noise, whatever the format


# The command line -----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` sets these; give them back."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_printed_configuration_parses_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = printed(capsys, "fit", "-c", str(QUICKSTART), "--print_config")
    path = tmp_path / "printed.yaml"
    path.write_text(first)
    assert printed(capsys, "fit", "-c", str(path), "--print_config") == first
    assert yaml.safe_load(first)["model"]["optimizer"]["init_args"]["lr"] == 0.002


def test_the_sampling_of_held_out_prompts_may_be_given_in_part(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As model cards advise it; read again from what is printed, which a run's folder keeps, it is the same."""
    rollout, path = "--trainer.callbacks.RolloutCallback", tmp_path / "printed.yaml"
    given = [f"{rollout}.sampling", "{max_tokens: 900, stop: [END]}"]
    given += [f"{rollout}.eval_sampling", "{temperature: 0.6, top_p: 0.95}"]
    path.write_text(printed(capsys, "test", "-c", str(QUICKSTART), *given, "--print_config"))
    expected = SamplingConfig(max_tokens=900, temperature=0.6, top_p=0.95, stop=["END"])
    for settings in (built("test", "-c", str(QUICKSTART), *given), built("validate", "-c", str(path))):
        assert callback(settings, RolloutCallback).eval_config.sampling == expected
    one = built("test", "-c", str(ROOT / "configs" / "evaluate.yaml"), f"{rollout}.eval_sampling.temperature", "0.6")
    assert callback(one, RolloutCallback).eval_config.sampling == SamplingConfig(4096, 0.6, stop=[])


def unexplained(text: str) -> list[str]:
    """Options of a --help text, printed wide, that have no words of help."""
    found = []
    for block in re.split(r"\n  (?=--)", text)[1:]:
        header = re.match(r"(--\S+)(?: [^\n]*?)?(?:\s{2,}|\n\s+)", block)
        rest = block[header.end() :] if header else ""
        if len(re.findall(r"[A-Za-z]{2,}", rest.partition("(type:")[0].partition("(required")[0])) < 2:
            found.append(block.split()[0])
    return found


def test_help_explains_every_key_of_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    text = printed(capsys, "fit", "--help")
    assert text.count("\n  --model.") > 30
    assert unexplained(text) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_a_command_as_it_is_typed(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert printed(capsys, command, "--help").startswith(f"usage: qerl {command} ")


CONFIGURABLE = [
    getattr(module, name)
    for module in (qerl_pl.callbacks, qerl_pl.datamodules, qerl_pl.engines, qerl_pl.rewards)
    for name in module.__all__
    if name[0].isupper() and name not in ("EngineSpec", "RolloutEngine", "Preempted")
    and name not in ("Reward", "RewardSample", "Row", "ScoredBatch")
] + Objective.__subclasses__()  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGURABLE, ids=lambda kind: kind.__name__)
def test_help_explains_every_key_of_a_class(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    parser = ArgumentParser()
    parser.add_class_arguments(kind, "x")
    assert unexplained(parser.format_help()) == []


# A bare installation --------------------------------------------------------------------------------------------------

BARE = """
import importlib, pkgutil, sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from packaging.requirements import Requirement

def needed(name, extras=frozenset(), seen=None):
    seen = set() if seen is None else seen
    try:
        lines = requires(name) or []
    except PackageNotFoundError:
        return seen
    seen.add((name, extras))
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or ("",)):
            key = (requirement.name.lower().replace("_", "-"), frozenset(requirement.extras))
            if key not in seen:
                needed(*key, seen)
    return seen

core = {name for name, _ in needed("qerl-pl")}
hidden = {
    module for module, owners in packages_distributions().items()
    if not any(owner.lower().replace("_", "-") in core for owner in owners)
} | {"vllm", "triton"}

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
assert "pytest" in hidden and "torch" not in hidden
import qerl_kernels, qerl_pl
count = 0
for package in (qerl_pl, qerl_kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        short = module.name.rpartition(".")[2]
        if short == "__main__" or short.startswith("triton_"):
            continue  # a program; kernels, imported where a GPU asks for them
        importlib.import_module(module.name)
        count += 1
print(count)
"""


def test_every_module_imports_with_the_core_dependencies_alone() -> None:
    done = subprocess.run([sys.executable, "-c", BARE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 50


def test_the_kernels_folder_shadows_no_package(tmp_path: Path) -> None:
    """Hugging Face has a package called kernels, which transformers imports; ours is qerl_kernels, in that folder."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    found = PathFinder.find_spec("kernels", [str(ROOT), str(tmp_path)])
    assert found is not None and found.origin == str(tmp_path / "kernels" / "__init__.py")
    assert importlib.util.find_spec("qerl_kernels") is not None
