"""What a user configures: shipped YAML files, --help and --print_config."""

import importlib
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_helpers import OWN, built, saved_config
from jsonargparse import ArgumentParser

import qerl_pl.algorithm.objectives
import qerl_pl.callbacks
import qerl_pl.datamodules
import qerl_pl.engines
import qerl_pl.modules
import qerl_pl.rewards
from qerl_pl.algorithm.noise import NoiseSchedule
from qerl_pl.algorithm.objectives import DAPO, GRPO, Objective, OnPolicyDistillation
from qerl_pl.callbacks import AdaptiveQuantizationNoise
from qerl_pl.cli.main import COMMANDS, QeRLCLI, main
from qerl_pl.datamodules import PromptDataModule
from qerl_pl.errors import UserError
from qerl_pl.modules import QeRLModule
from qerl_pl.types import SamplingConfig

ROOT = Path(__file__).parents[1]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
SIZES = {"3b": "3B", "7b": "7B", "14b": "14B", "32b": "32B"}

pytestmark = pytest.mark.usefixtures("process_state")


@pytest.mark.parametrize("objective", [DAPO, OnPolicyDistillation])
def test_an_objective_that_is_named_has_its_own_numbers(tmp_path: Path, objective: type[Objective]) -> None:
    settings = yaml.safe_load(QUICKSTART.read_text())
    settings["model"]["objective"] = {"class_path": f"qerl_pl.algorithm.objectives.{objective.__name__}"}
    path = tmp_path / "named.yaml"
    path.write_text(yaml.safe_dump(settings))
    assert built("fit", "-c", str(path)).model.objective == objective()


def config(*names: str) -> list[str]:
    """Options that name shipped files."""
    return [word for name in names for word in ("-c", str(ROOT / "configs" / f"{name}.yaml"))]


def parsed(*args: str) -> dict[str, Any]:
    """What `qerl fit ARGS` resolves every key to."""
    return Parser(["fit", *args]).config["fit"].as_dict()


class Starter(QeRLCLI):
    """Stops before it trains."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


class Parser(Starter):
    """Stops after parsing."""

    def instantiate_classes(self) -> None:
        self.trainer = self.model = self.datamodule = None


# Shipped files --------------------------------------------------------------------------------------------------------

COMBINATIONS = [
    *("quickstart", "quickstart_tools", "gsm8k_cpu", "evaluate", "distill"),
    *("gsm8k gsm8k_calculator qwen2.5_7b", "search qwen2.5_7b", "gsm8k think_tags qwen2.5_3b"),
    *("gsm8k qwen2.5_7b small_card", "gsm8k qwen2.5_7b full_finetuning", "gsm8k qwen2.5_3b"),
    *("gsm8k dapo qwen2.5_14b", "bigmath qwen2.5_32b", "bigmath dapo qwen2.5_7b"),
]
SIZED = {f"{data} qwen2.5_{size}" for data in ("gsm8k", "gsm8k dapo", "bigmath", "bigmath dapo") for size in SIZES}
MORE = [pytest.param(names, marks=pytest.mark.nightly) for names in sorted(SIZED.difference(COMBINATIONS))]


def test_every_shipped_file_is_among_the_combinations() -> None:
    assert {path.stem for path in SHIPPED} - {"sft"} == {name for names in COMBINATIONS for name in names.split()}


@pytest.mark.parametrize("combination", [*COMBINATIONS, *MORE])
def test_shipped_files_build_what_they_name(combination: str) -> None:
    names, folder = combination.split(), combination.replace(" ", "_")
    if "full_finetuning" in names:
        pytest.importorskip("bitsandbytes")  # its optimizer's
    settings = built("fit", *config(*names))
    rollout = settings.rollout.config
    assert isinstance(settings.data, PromptDataModule)
    objective = {"dapo": DAPO, "distill": OnPolicyDistillation}.get(names[min(1, len(names) - 1)], GRPO)
    assert isinstance(settings.model.objective, objective)
    assert settings.trainer.default_root_dir == f"runs/{folder}"
    completions = settings.data.batch_size * rollout.group_size
    assert completions % settings.model.update.minibatches == 0
    longest = settings.data.max_prompt_tokens + rollout.sampling.max_tokens
    assert settings.model.update.micro_batch_tokens is None or settings.model.update.micro_batch_tokens >= longest
    for reward in rollout.scorer.rewards:
        if reward.name == "overlong":
            assert (reward.max_length, reward.buffer, reward.weight) == (
                rollout.sampling.max_tokens,
                rollout.sampling.max_tokens // 4,
                0.5,
            )
    if names == ["quickstart_tools"]:
        assert [reward.name for reward in rollout.scorer.rewards] == ["environment"]
        return
    has_environment = settings.rollout.environment.factory is not None
    tags = "think_tags" in names or names[0] in ("quickstart", "gsm8k_cpu", "bigmath", "search")
    assert (settings.data.system_prompt is None) == (names[0] == "gsm8k" and not tags)
    optional = {"format": tags, "overlong": "dapo" in names, "environment": has_environment}
    expected = ["accuracy", *(name for name, has in optional.items() if has)]
    assert [reward.name for reward in rollout.scorer.rewards] == expected
    if (size := re.search(r"qwen2.5_(\d+b)", folder)) is not None:
        assert isinstance(settings.rollout.engine, qerl_pl.engines.VLLMEngine)
        assert settings.model.policy_config.path == f"Qwen/Qwen2.5-{SIZES[size[1]]}-Instruct"


def test_a_shipped_file_is_found_by_its_name_unless_a_file_here_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()  # a folder, such as that of the data, is no configuration
    settings = built("fit", "-c", "gsm8k", "-c", "qwen2.5_7b")
    assert settings.trainer.default_root_dir == "runs/gsm8k_qwen2.5_7b"
    assert settings.data.batch_size == 16 and settings.model.policy_config.path == "Qwen/Qwen2.5-7B-Instruct"
    (tmp_path / "qwen2.5_7b").write_text("model: {policy: {path: my_model}}")
    assert built("fit", "-c", "gsm8k", "-c", "qwen2.5_7b").model.policy_config.path == "my_model"


def test_a_shipped_file_is_copied_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for args, written in {(): "dapo.yaml", ("mine.yaml",): "mine.yaml", ("runs",): "runs/dapo.yaml"}.items():
        (tmp_path / "runs").mkdir(exist_ok=True)
        assert main(["configs", "dapo", *args]) == 0
        assert (tmp_path / written).read_bytes() == (ROOT / "configs" / "dapo.yaml").read_bytes()
        assert capsys.readouterr().out == f"wrote {written}\n"
        assert main(["configs", "dapo", *args]) == 2
        assert f"{written} does; choose another name" in capsys.readouterr().err


SETTINGS_OF_7B = """
seed_everything: 0
model:
  policy: {quantization: nvfp4, dtype: bfloat16, finetune: lora, gradient_checkpointing: auto, train_norms: false,
           path: Qwen/Qwen2.5-7B-Instruct, lora: {rank: 32, alpha: 32.0, dropout: 0.0}}
  objective: {class_path: qerl_pl.algorithm.GRPO, init_args: {beta: 0.0, epsilon_low: 0.2, epsilon_high: 0.28}}
  optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 3.0e-5, betas: [0.9, 0.99], weight_decay: 0.1}}
  lr_scheduler: cosine
  warmup_ratio: 0.1
  max_grad_norm: 0.2
  update_epochs: 1
  minibatches: 4
  micro_batch_tokens: 16384
  monitor_kl: 0.125
data:
  class_path: qerl_pl.datamodules.GSM8KDataModule
  init_args: {path: openai/gsm8k, batch_size: 16, val_size: 256, val_batch_size: 256, max_prompt_tokens: 256, seed: 0}
trainer:
  {default_root_dir: runs/gsm8k_qwen2.5_7b, accelerator: gpu, devices: 1, max_epochs: 1, max_steps: -1,
   val_check_interval: 50, num_sanity_val_steps: -1, log_every_n_steps: 1, enable_model_summary: false}
rollout:
  group_size: 8
  sampling: {max_tokens: 640, temperature: 1.0}
  resample_rounds: 0
  rewards:
    accuracy: {class_path: qerl_pl.rewards.GSM8KAnswer, init_args: {weight: 1.0}}
  engine: {class_path: qerl_pl.engines.VLLMEngine, init_args: {kv_cache_gib: 16.0, max_num_seqs: 128,
           linear_backend: marlin, enforce_eager: false, sleep_mode: true}}
noise: {class_path: qerl_pl.callbacks.AdaptiveQuantizationNoise,
        init_args: {sigma_start: 0.01, sigma_end: 0.0005, stages: 10, decay: exponential}}
best: {class_path: lightning.pytorch.callbacks.ModelCheckpoint,
       init_args: {monitor: val/accuracy, mode: max, filename: "best-{rollouts:.0f}"}}
checkpoint: {class_path: qerl_pl.callbacks.ResumeCheckpoint, init_args: {every_n_rollouts: 10}}
monitor: {class_path: qerl_pl.callbacks.Monitor}
completions: {class_path: qerl_pl.callbacks.CompletionLog}
summary: {class_path: qerl_pl.callbacks.RunSummary}
"""
"""The paper's section 4.1 and table 4, and the project's own choices where it has none."""


def leaves(node: Any, path: str = "") -> dict[str, Any]:
    """Values of nested dictionaries by path."""
    if isinstance(node, dict):
        return {p: value for key, item in node.items() for p, value in leaves(item, f"{path}.{key}").items()}
    return {path: list(node) if isinstance(node, tuple) else node}


def changes(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What of `one` has another value in `other`."""
    values = leaves(other)
    return {key: values.get(key) for key, value in leaves(one).items() if values.get(key) != value}


def test_data_and_size_combine_to_the_papers_7b_on_gsm8k() -> None:
    assert changes(yaml.safe_load(SETTINGS_OF_7B), parsed(*config("gsm8k", "qwen2.5_7b"))) == {}


@pytest.mark.parametrize(("name", "noise"), [("mxfp4", []), ("nf4", []), ("none", ["--noise", "null"])])
def test_one_option_changes_the_format_and_one_the_noise(name: str, noise: list[str]) -> None:
    settings = built("fit", *config("gsm8k", "qwen2.5_7b"), "--model.policy.quantization", name, *noise)
    assert settings.model.policy_config.quantization == name
    assert type(settings.noise) is (type(None) if noise else AdaptiveQuantizationNoise)  # whatever the format


def test_the_noise_has_its_options_on_the_command_line() -> None:
    noise = built("fit", "-c", str(QUICKSTART), "--noise.relative", "true", "--noise.decay", "cosine").noise
    assert noise.relative and noise.schedule == NoiseSchedule(1e-2, 1e-4, 10, "cosine")


def test_the_runs_seed_orders_the_data_unless_another_is_set() -> None:
    for more, seed in ((["--seed_everything", "5"], 5), (["--seed_everything", "5", "--data.seed", "0"], 0)):
        assert built("fit", "-c", str(QUICKSTART), *more).data.seed == seed


NOISE, ROLLOUT = "AdaptiveQuantizationNoise", "RolloutCallback"
EVERY_RUN = ["ModelCheckpoint", "ResumeCheckpoint", "Monitor", "CompletionLog", "RunSummary"]
LISTED = f"--trainer.callbacks=[{{class_path: RolloutCallback, init_args: {{rewards: [Format]}}}}, {NOISE}, Monitor]"


def callbacks(*args: str) -> list[str]:
    """Names of a trainer's callbacks, without those of the command line and Lightning."""
    ours = {NOISE, ROLLOUT, "EvaluationReport", *EVERY_RUN}
    names = [type(callback).__name__ for callback in Starter(["fit", "-c", str(QUICKSTART), *args]).trainer.callbacks]
    return [name for name in names if name in ours]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--noise=null", "--report={}", "--best=null"], [ROLLOUT, *EVERY_RUN[1:], "EvaluationReport"]),
        (["--checkpoint=null", "--monitor=null"], [NOISE, ROLLOUT, "ModelCheckpoint", *EVERY_RUN[3:]]),
        (["--trainer.enable_checkpointing=false"], [NOISE, ROLLOUT, *EVERY_RUN[2:]]),
        (["--trainer.callbacks=[{class_path: CompletionLog, init_args: {jsonl: true}}]"], [NOISE, ROLLOUT, *EVERY_RUN]),
        (["--trainer.callbacks=[ModelCheckpoint, RunSummary]", "--best.save_top_k=3"], [NOISE, ROLLOUT, *EVERY_RUN]),
        ([LISTED], [NOISE, ROLLOUT, "Monitor", "ModelCheckpoint"]),  # the last is Lightning's own default
    ],
)
def test_the_callbacks_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], expected: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sorted(callbacks(*given)) == sorted(expected)


def test_a_reward_is_changed_and_added_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "more.yaml"
    path.write_text("rollout: {rewards: {mine: {class_path: fit_helpers.Vowels, init_args: {weight: 0.5}}}}")
    settings = built("fit", "-c", str(QUICKSTART), "-c", str(path), "--rollout.rewards.format.weight", "0.2")
    assert [(reward.name, reward.weight) for reward in settings.rollout.scorer.rewards] == [
        ("accuracy", 1.0),
        ("format", 0.2),
        ("mine", 0.5),
    ]


LEAST = "{data: GSM8KDataModule, rollout: {rewards: {accuracy: GSM8KAnswer}}}"


@pytest.mark.parametrize(
    ("objective", "words", "beta"),
    [
        (None, ["--model.objective", "qerl_pl.algorithm.GRPO", "--model.objective.epsilon_high", "0.28"], 0.0),
        ({"class_path": "GRPO", "init_args": {"beta": 0.04}}, [], 0.04),
        ({"class_path": "GRPO", "init_args": {"beta": 0.04}}, ["--model.objective", "BNPO"], 0.04),
    ],
)
def test_grpo_has_no_kl_penalty_unless_one_is_set(
    objective: object, words: list[str], beta: float, tmp_path: Path
) -> None:
    path = tmp_path / "least.yaml"
    model = {} if objective is None else {"model": {"objective": objective}}
    path.write_text(yaml.safe_dump(yaml.safe_load(LEAST) | model))
    settings = built("fit", "-c", str(path), *words)
    assert settings.model.objective.beta == beta
    assert isinstance(settings.rollout.engine, qerl_pl.engines.VLLMEngine)
    assert QeRLModule().objective == GRPO() == GRPO(beta=0.0)


@pytest.mark.parametrize(
    "words",
    [
        ["-c", "least.yaml"],
        [
            *("-c", "quickstart", "--model.max_grad_norm", ".inf", "--trainer.max_time", "00:01:00:00"),
            *("--data.system_prompt", "yes", "--rollout.rewards.mine", "more.py:exact"),
            *("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/accuracy"),
        ],
        pytest.param(
            ["-c", "quickstart", "--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.1"],
            marks=pytest.mark.nightly,
        ),
        [
            "-c",
            "quickstart_tools",
            "--rollout.evaluation.sampling",
            "{temperature: 0.6}",
            "--noise",
            "null",
        ],
        pytest.param(
            ["-c", "gsm8k", "-c", "dapo", "--model.objective.correction", "{rejection: token, low: 0.5}"],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ["-c", "quickstart", "--trainer.callbacks+=ModelCheckpoint", "--data.sets", "{one: {path: rows.jsonl}}"],
            marks=pytest.mark.nightly,
        ),
        ["-c", "sft"],
        ["-c", "sft_least.yaml"],
    ],
)
def test_the_saved_configuration_is_read_back_as_it_was(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("least.yaml").write_text(LEAST)
    Path("sft_least.yaml").write_text("{model: {class_path: SFTModule}, data: ArithmeticConversations}")
    Path("more.py").write_text("def exact(completions, **columns):\n    return [0.0 for _ in completions]\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = saved_config("fit", *words)
    Path("config.yaml").write_text(text)
    assert saved_config("fit", "-c", "config.yaml") == text
    assert yaml.safe_load(text)["model"]["optimizer"]["init_args"]["lr"] > 0
    built("fit", "-c", "config.yaml")


SFT_DATA = ["--data", "ArithmeticConversations"]


@pytest.mark.parametrize(
    ("base", "named", "words"),
    [
        ("QeRLModule", "users_modules.py:Mine", ["-c", "quickstart", "-c", "mine.yaml", "-c", "dapo"]),
        ("SFTModule", "users_modules:Mine", ["-c", "mine.yaml", *SFT_DATA]),
        ("SFTModule", "users_modules.Mine", [f"--config={ROOT}/configs/sft.yaml"]),
    ],
)
def test_a_users_own_module_is_named_by_its_import_path(
    base: str, named: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_modules", raising=False)
    monkeypatch.delitem(sys.modules, "qerl_module_users_modules", raising=False)
    Path("users_modules.py").write_text(OWN.format(base=base))
    Path("mine.yaml").write_text(yaml.safe_dump({"model": {"class_path": named, "shown": 0.25}}))
    if "mine.yaml" not in words:
        words = [*words, "--model.class_path", named, "--model.shown", "0.25"]
    settings = built("fit", *words, "--model.max_grad_norm", "0.7")
    assert (type(settings.model).__name__, settings.model.shown) == ("Mine", 0.25)
    assert isinstance(settings.model, getattr(qerl_pl.modules, base)) and 0.7 in (
        settings.model.update.max_grad_norm if base == "QeRLModule" else settings.model.max_grad_norm,
    )
    text = saved_config("fit", *words)
    Path("config.yaml").write_text(text)
    assert saved_config("fit", "-c", "config.yaml") == text and yaml.safe_load(text)["model"]["class_path"] == named


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--model.class_path", "SFTModul"],
            "model.class_path is QeRLModule or .*; got 'SFTModul'; did you mean SFTMod",
        ),
        (["--model.class_path=nowhere.Mine"], "model.class_path is .*'nowhere.Mine' cannot be imported"),
        (["--model.class_path", "torch.nn.Linear"], "got torch.nn.Linear, which is none; derive it from one"),
        (
            ["--model.class_path", "few.py:Few"],
            r"few.py:Few does not take seed; add \*\*settings to its __init__, and g",
        ),
        (
            ["-c", '{"model": {"class_path": "SFTModule"}}'],
            "read before other keys; it stands in a pipe, .*; add --model",
        ),
    ],
)
def test_a_module_that_does_not_go_with_the_run_is_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("few.py").write_text(
        "from qerl_pl.modules import QeRLModule\n"
        "class Few(QeRLModule):\n"
        "    def __init__(self, policy):\n"
        "        super().__init__(policy)\n"
    )
    with pytest.raises(UserError, match=message) as refused:
        built("fit", "-c", str(QUICKSTART), *words)
    assert "\n" not in str(refused.value)


# The command line -----------------------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_the_sampling_of_held_out_prompts_may_be_given_in_part(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As model cards advise it; read again from what is printed, which a run's folder keeps, it is the same."""
    path = tmp_path / "printed.yaml"
    given = ["--rollout.sampling", "{max_tokens: 900, stop: [END]}"]
    given += ["--rollout.evaluation.sampling", "{temperature: 0.6, top_p: 0.95}"]
    path.write_text(printed(capsys, "test", "-c", str(QUICKSTART), *given, "--print_config"))
    expected = SamplingConfig(max_tokens=900, temperature=0.6, top_p=0.95, stop=["END"])
    for settings in (built("test", "-c", str(QUICKSTART), *given), built("validate", "-c", str(path))):
        assert settings.rollout.eval_config.sampling == expected
    one = built("test", *config("evaluate"), "--rollout.evaluation.sampling.temperature", "0.6")
    assert one.rollout.eval_config.sampling == SamplingConfig(4096, 0.6, stop=[])


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


def test_only_the_subcommand_that_is_called_gets_its_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump({"fit": yaml.safe_load(QUICKSTART.read_text())}))
    found = Parser(["-c", str(path), "fit"]).config["fit"].as_dict()  # options may come before it
    assert changes(parsed("-c", str(QUICKSTART)), found).keys() <= {".config", ".trainer.default_root_dir"}
    parsers = Parser(["fit", "-c", str(QUICKSTART)])._subcommand_parsers
    keys = {name: set(one.get_defaults().as_dict()) for name, one in parsers.items()}
    assert {"model", "data"} < keys["fit"] and keys["validate"] == keys["test"] == {"config"}
    listed = printed(capsys, "--help")
    assert all(f"\n    {name} " in listed for name in keys)


@pytest.mark.parametrize("command", [*COMMANDS, "compare", "completions", "configs"])
def test_help_shows_a_command_as_it_is_typed(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert printed(capsys, command, "--help").startswith(f"usage: qerl {command} ")


CONFIGURABLE = [
    getattr(module, name)
    for module in (qerl_pl.callbacks, qerl_pl.datamodules, qerl_pl.engines, qerl_pl.rewards)
    for name in module.__all__
    if name[0].isupper() and name not in ("EngineSpec", "RolloutEngine", "Preempted")
    and name not in ("Reward", "RewardSample", "Row", "ScoredBatch", "TrainerState")
] + Objective.__subclasses__()  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGURABLE, ids=lambda kind: kind.__name__)
def test_help_explains_every_key_of_a_class(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    parser = ArgumentParser()
    parser.add_class_arguments(kind, "x")
    assert unexplained(parser.format_help()) == []


def test_the_kernels_folder_shadows_no_package(tmp_path: Path) -> None:
    """Hugging Face has a package called kernels, which transformers imports; ours is qerl_kernels, in that folder."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    found = PathFinder.find_spec("kernels", [str(ROOT), str(tmp_path)])
    assert found is not None and found.origin == str(tmp_path / "kernels" / "__init__.py")
    assert importlib.util.find_spec("qerl_kernels") is not None
